"""Several processes that train one operator: what they tell each other, and nothing else (docs/scaling.md).

Of a batch each rank takes some samples, or of every sample some points. The state is the same on all ranks, so that a
run may go on with another number of them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch
from oformer.nn.sums import points_split
from oformer.processes import stop_with_parent

Split = Literal["samples", "points"]
Result = TypeVar("Result")
# The others wait while the first rank makes a dataset. That a rank died is for torchrun to notice, not for a clock.
PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, as one of them sees them; by default it is alone.

    All methods but the properties must be called on all ranks, in the same order.
    """

    rank: int = 0
    world: int = 1
    split: Split = "samples"  # what of a batch is shared out

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise InputError(f"a rank from 0 to {self.world - 1}", str(self.rank))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which share of the samples is ours, and of how many: all of them where points are split."""
        return (self.rank, self.world) if self.split == "samples" else (0, 1)

    @property
    def splits_points(self) -> bool:
        """Whether this rank holds only some points of each sample."""
        return self.split == "points" and self.world > 1

    def points_together(self) -> contextlib.AbstractContextManager[None]:
        """Within it, layers and losses add up over the points of all ranks."""
        return points_split() if self.splits_points else contextlib.nullcontext()

    def our_points(self, batch: Batch) -> Batch:
        """Our points of a batch, as many on each rank: what is missing is padded. Weights keep the sample's sum."""
        if not self.splits_points:
            return batch

        return dataclasses.replace(
            batch,
            input=batch.input.map_points(self._our_part),
            query=batch.query.map_points(self._our_part),
            target=self._our_part(batch.target, -2),
            cells=None,
        )

    def _our_part(self, tensor: Tensor, axis: int) -> Tensor:
        points = tensor.shape[axis]
        size = -(-points // self.world)
        start = min(self.rank * size, points)
        part = tensor.narrow(axis, start, min(size, points - start))
        missing = size - part.shape[axis]
        if not missing:
            return part
        shape = list(part.shape)
        shape[axis] = missing
        return torch.cat([part, part.new_zeros(shape)], axis)

    def all_points(
        self, part: Float[Tensor, "batch times part channels"], points: int
    ) -> Float[Tensor, "batch times points channels"]:
        """Values at all query points of a sample, from those at our own."""
        if not self.splits_points:
            return part
        size = part.shape[2]
        whole = part.new_zeros((*part.shape[:2], size * self.world, part.shape[3]))
        whole[:, :, self.rank * size : (self.rank + 1) * size] = part
        return self.sum(whole)[:, :, :points]

    def sum(self, tensor: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The sum over the ranks."""
        if self.world == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def average(self, tensors: list[Tensor]) -> None:
        """Put the means over the ranks in place of the tensors, in one message."""
        if self.world == 1 or not tensors:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Put what the first rank has in place of the tensors."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def highest(self, number: int) -> int:
        """The largest of the numbers of all ranks. They meet on the CPU: a GPU goes on with what it has to do."""
        if self.world == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def wait(self) -> None:
        """Go on when all ranks are here."""
        self.highest(0)

    def first_then_others(self, work: Callable[[], Result]) -> Result:
        """Work on the first rank, then on the others, which find what it left on the disk.

        What goes wrong on the first rank goes wrong on all of them: none is left waiting.
        """
        if self.world == 1:
            return work()
        failure: list[Exception | None] = [None]
        result: list[Result] = []
        if self.first:
            try:
                result.append(work())
            except Exception as error:
                failure = [error]
        dist.broadcast_object_list(failure, 0)
        if failure[0] is not None:
            raise failure[0]
        return result[0] if self.first else work()


ALONE = Ranks()


@contextlib.contextmanager
def started_by_torchrun(device: torch.device | str, split: Split = "samples") -> Iterator[Ranks]:
    """The ranks that torchrun started, connected for a while; without torchrun, one that is alone.

    Args:
        device: where this rank computes.
        split: what of a batch the ranks share out.
    """
    _refuse_tasks_of_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(split=split)
        return
    stop_with_parent()  # torchrun that is killed, also by a signal that it does not pass on, ends no rank
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Both: gradients travel between GPUs, and wishes to stop between CPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), split)
    finally:
        dist.destroy_process_group()


def _refuse_tasks_of_slurm() -> None:
    """Refuse to be one of several tasks of srun, which would each train the same run: we connect by torchrun alone."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if int(tasks) > 1 and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "processes that torchrun started, or a single one",
            f"SLURM_NTASKS={tasks} and no WORLD_SIZE",
            "Start one task per node that starts torchrun: "
            "srun --ntasks-per-node 1 torchrun --nproc-per-node GPUS -m oformer train. "
            "To train in one process, ask for one task (--ntasks 1)",
        )
