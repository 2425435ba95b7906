"""What a problem is: what to draw, how to solve, what to learn.

A problem is a frozen dataclass of its physical settings; it is its own configuration. All randomness comes from
(seed, index): sample i is the same whatever the batch, the shard or the number of devices.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
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


def permuted(batch: Batch, source: Int[Tensor, "batch points"], sign: Int[Tensor, "batch"] | None = None) -> Batch:
    """A symmetry of a grid, other for each sample: values of input and target change places, and sign; points stay.

    Args:
        batch: whose input and queries are the same grid.
        source: where each value comes from.
        sign: 1 or -1 for each sample; all 1 if left out.
    """

    def move(values: Tensor) -> Tensor:
        moved = values.take_along_dim(source[:, None, :, None], dim=2)
        return moved if sign is None else moved * sign[:, None, None, None].to(values.dtype)

    known = dataclasses.replace(batch.input, values=move(batch.input.values))
    return dataclasses.replace(batch, input=known, target=move(batch.target))
