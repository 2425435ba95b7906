"""What a problem is: what to draw, how to solve, what to learn.

A problem is a frozen dataclass of its physical settings; it is its own configuration. All randomness comes from
(seed, index): sample i is the same whatever the batch, the shard or the number of devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch, Card, Sample, Spec

Undo = Callable[[Tensor], Tensor]  # values predicted for a changed batch, as the unchanged one would have them


@dataclass(frozen=True)
class Problem:
    """The base of all problems: subclasses give `spec`, `card`, `draw` and `solve`."""

    name: ClassVar[str]
    cpu_batch: ClassVar[int] = 64  # samples to solve at once on a CPU, where many large ones only delay the first
    # Whether any run of frames is a solution, whenever it begins: the law does not change with time, and input and
    # target are the same quantities at the same points.
    autonomous: ClassVar[bool] = False

    @property
    def spec(self) -> Spec:
        """Shapes of the samples as they are stored, before any view thins them."""
        raise NotImplementedError

    @property
    def card(self) -> Card:
        """The story of the dataset for people, and the names of its channels."""
        raise NotImplementedError

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """What varies from sample to sample (initial state, source), one row per index, on the CPU in float64.

        Several threads may ask at once: while a GPU solves, what comes next is drawn.
        """
        raise NotImplementedError

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """Solve the drawn states on the device they lie on, in float64."""
        raise NotImplementedError

    def samples(self, indices: Sequence[int], seed: int, device: torch.device | str = "cpu") -> list[Sample]:
        """Draw, solve, and bring the samples back to the CPU."""
        return self.solved(self.draw(indices, seed), device)

    def solved(self, state: dict[str, Tensor], device: torch.device | str = "cpu") -> list[Sample]:
        """Solve drawn states on a device, and bring the samples back to the CPU."""
        solved = self.solve({name: tensor.to(device) for name, tensor in state.items()})
        if torch.device(device).type == "cpu":
            return solved
        # A tensor that samples share is copied once and stays shared.
        here: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in here:
                here[id(tensor)] = tensor.cpu()
            return here[id(tensor)]

        return [sample.map(copied) for sample in solved]

    def finer(self) -> "Problem | None":
        """The problem whose samples are the same functions at twice the resolution; None where there is none."""
        return None

    def typical(self) -> Sample:
        """A sample of the usual size, from which a dataset's is estimated; its values do not matter."""
        return self.samples([0], 0)[0]

    def split_after(self, train: int) -> "Problem":
        """The same problem where so many leading samples are for training; a few draw the others from another law."""
        return self

    def symmetries(self, batch: Batch) -> int:
        """How many exact symmetries `transformed` knows for the points of this batch, the first of which is none."""
        return 1

    def transformed(self, batch: Batch, which: Int[Tensor, "batch"]) -> tuple[Batch, Undo]:
        """Each sample under one of the symmetries, and what turns predictions for it back.

        Args:
            batch: on any device.
            which: for each sample, from 0 to one less than `symmetries`; on the device of the batch.
        """
        return batch, lambda values: values

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A random exact symmetry of the problem for each sample; without any, the batch as it is.

        Args:
            batch: on any device.
            generator: on the CPU; the only source of randomness.
        """
        which = torch.randint(self.symmetries(batch), (batch.size,), generator=generator)
        return self.transformed(batch, which.to(batch.target.device))[0]

    def averaged(
        self, predict: Callable[[Batch], Tensor], batch: Batch, count: int
    ) -> Float[Tensor, "batch times queries channels"]:
        """The mean of predictions under so many symmetries, evenly chosen from all: exact, and costs no training.

        Args:
            predict: values at the queries of a batch.
            batch: on any device.
            count: 1 is the plain prediction.
        """
        known = self.symmetries(batch)
        if not 1 <= count <= known:
            raise InputError(
                f"an average over 1 to {known} symmetries, which {self.name} has on these points", str(count)
            )
        total = torch.zeros_like(batch.target)
        for index in range(count):
            which = torch.full((batch.size,), index * known // count, device=batch.target.device)
            changed, undo = self.transformed(batch, which)
            total += undo(predict(changed))
        return total / count


def permuted(
    batch: Batch, source: Int[Tensor, "batch points"], sign: Int[Tensor, "batch"] | None = None
) -> tuple[Batch, Undo]:
    """A symmetry of a grid, other for each sample: values of input and target change places, and sign; points stay.

    Args:
        batch: whose input and queries are the same grid.
        source: where each value comes from.
        sign: 1 or -1 for each sample; all 1 if left out.

    Returns:
        The changed batch, and what turns predictions for it back.
    """

    def signed(values: Tensor) -> Tensor:
        return values if sign is None else values * sign[:, None, None, None].to(values.dtype)

    def move(values: Tensor) -> Tensor:
        return signed(values.take_along_dim(source[:, None, :, None], dim=2))

    def undo(values: Tensor) -> Tensor:
        return torch.empty_like(values).scatter_(2, source[:, None, :, None].expand_as(values), signed(values))

    known = batch.input.with_values(move(batch.input.values))
    return dataclasses.replace(batch, input=known, target=move(batch.target)), undo
