"""What a problem is: what to draw, how to solve, what to learn.

A problem is a frozen dataclass of its physical settings; it is its own configuration. All randomness comes from
(seed, index): sample i is the same whatever the batch, the shard or the number of devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oformer.fields import Batch, Card, Sample, Spec


@dataclass(frozen=True)
class Problem:
    """The base of all problems: subclasses give `spec`, `card`, `draw` and `solve`."""

    name: ClassVar[str]

    @property
    def spec(self) -> Spec:
        """Shapes of the samples as they are stored, before any view thins them."""
        raise NotImplementedError

    @property
    def card(self) -> Card:
        """The story of the dataset for people, and the names of its channels."""
        raise NotImplementedError

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """What varies from sample to sample (initial state, source), one row per index, on the CPU in float64."""
        raise NotImplementedError

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """Solve the drawn states on the device they lie on, in float64."""
        raise NotImplementedError

    def samples(self, indices: Sequence[int], seed: int, device: torch.device | str = "cpu") -> list[Sample]:
        """Draw, solve, and bring the samples back to the CPU."""
        state = {name: tensor.to(device) for name, tensor in self.draw(indices, seed).items()}
        return [sample.to("cpu") for sample in self.solve(state)]

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A random exact symmetry of the problem for each sample; without any, the batch as it is."""
        return batch
