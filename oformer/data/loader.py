"""Batches as a function of the step: resuming a run needs no state, and ranks agree without talking.

The samples come as an endless stream of epochs, each a permutation drawn from (seed, epoch), cut into
batches of constant size. Where an epoch does not end with a batch, that batch takes its first samples from
one epoch and the others from the next.

Where samples differ in size, a batch holds samples of like size, since it is padded to its largest: in an
epoch, windows of fifty batches are sorted by size, cut into batches, and the batches shuffled. The batch that
straddles two epochs is left out of that: its samples are the last and the first of two permutations, whatever
their size. Sizes may be rounded up, so that few shapes of batch occur and each may be compiled.
"""

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Batch, Sample, collate
from oformer.nn.shared_grids import once_per_grid
from oformer.seeds import numpy_generator

WINDOW = 50  # batches sorted by size together: enough to find like ones, few enough to stay random
CPU_BUDGET = 2 * 2**30
GPU_SHARE = 0.4  # of the free memory
SIZES = 4  # so many sizes of batch at most where `few_sizes` says what to round to
UNIT = 32  # points that a GPU computes together
Points = tuple[int, int]  # of the input and of the queries
# Of the first tensors of `Sample.tensors`: whose points they have, the input's (0) or the queries' (1), and the axis.
_POINTS = ((0, -2), (0, -2), (0, -1), (1, -2), (1, -2), (1, -1), (1, -2))
_DRAWS = 0x10AD  # keeps these draws apart from those of problems, which are seeded by (seed, index)


class Loader:
    """Batches of a dataset on a device."""

    def __init__(
        self,
        dataset: PointDataset,
        batch: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        resident: Literal["auto"] | bool = "auto",
        budget: int | None = None,
        prefetch: int = 2,
        round_to: int = 1,
    ):
        """Prepare the batches; a dataset that fits is stacked on the device at once.

        Args:
            dataset: where the samples come from.
            batch: samples per batch, over all ranks together.
            seed: of the order.
            device: where batches are wanted.
            rank: which slice of each batch is ours.
            world: how many slices there are; it must divide the batch.
            shuffle: a new order in each epoch; otherwise that of the dataset.
            resident: whether to keep all samples on the device, padded to the largest; `auto`: if they fit.
            budget: bytes that resident samples may take: by default 2 GiB, on a GPU 40 % of what is free.
            prefetch: batches that a thread prepares ahead when samples are not resident.
            round_to: where samples differ in size, pad batches to a multiple of so many points and queries.
        """
        if batch < 1 or world < 1 or batch % world:
            raise InputError(
                "a batch that the number of ranks divides",
                f"{batch} over {world}",
                f"Take a multiple of {max(world, 1)}",
            )
        if not 0 <= rank < world:
            raise InputError(f"a rank from 0 to {world - 1}", str(rank))
        if seed < 0:
            raise InputError("a `seed` of zero or more", str(seed))
        if round_to < 1:
            raise InputError("a `round_to` of at least 1", str(round_to))
        self.dataset, self.batch, self.device = dataset, batch, torch.device(device)
        self._seed, self._rank, self._world, self._shuffle = seed, rank, world, shuffle
        self._prefetch = max(1, prefetch)
        self._orders: dict[int, np.ndarray] = {}
        self._threads: set[ThreadPoolExecutor] = set()  # one for each open stream
        sizes = dataset.sizes()
        even = (sizes == sizes[0]).all(0)
        self._sizes = None if even.all() else sizes.sum(1)
        # Of each sample alone; a batch has the largest of its own. Queries on a whole grid stay a whole grid.
        self._points = np.where(even, sizes, _rounded_up(sizes, round_to))
        self._resident: _Resident | None = None
        if resident is not False:
            limit = math.inf if resident is True else _budget(self.device) if budget is None else budget
            self._resident = _Resident.of(dataset, self.device, limit, _largest(self._points))

    @property
    def resident(self) -> bool:
        """Whether all samples are kept on the device."""
        return self._resident is not None

    def __len__(self) -> int:
        """Batches in a pass over the dataset, the last one maybe short."""
        return -(-len(self.dataset) // self.batch)

    def indices_at(self, step: int) -> Int[np.ndarray, "batch"]:
        """The samples of a step, over all ranks."""
        if step < 0:
            raise InputError("a step of zero or more", str(step))
        count = len(self.dataset)
        place = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, place = np.divmod(place, count)
        return np.concatenate([self._order(int(e))[place[epochs == e]] for e in np.unique(epochs)])

    def batch_at(self, step: int) -> Batch:
        """This rank's slice of the batch of a step: the same whenever and however often it is asked for."""
        return self._make(self._slice(self.indices_at(step)))

    def stream(self, first_step: int = 0) -> Iterator[Batch]:
        """The batches of `first_step` and all steps after it, without end."""

        def pieces() -> Iterator[np.ndarray]:
            step = first_step
            while True:
                yield self._slice(self.indices_at(step))
                step += 1

        return self._batches(pieces())

    def epoch(self, filled: bool = False) -> Iterator[Batch]:
        """One pass in the order of the dataset, for evaluation: each sample once, the last batch maybe short.

        Of several ranks each takes its slice of each batch, and of a short last one perhaps nothing.

        Args:
            filled: repeat samples at the end of a short batch, so that all are of one size.
        """
        size = self.batch // self._world if filled else 0
        return self._batches(np.resize(piece, max(size, len(piece))) for piece in self._epoch_slices() if len(piece))

    def epoch_indices(self) -> Int[np.ndarray, "samples"]:
        """Which samples `epoch` gives this rank, in its order and without the repeated ones."""
        return np.concatenate(list(self._epoch_slices()))

    def close(self) -> None:
        """Stop the threads; streams that are still open give the batches that are ready, and end."""
        while self._threads:
            self._threads.pop().shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epoch_slices(self) -> Iterator[np.ndarray]:
        order = np.arange(len(self.dataset))
        return (self._slice(order[i : i + self.batch]) for i in range(0, len(order), self.batch))

    def _slice(self, indices: np.ndarray) -> np.ndarray:
        share = self.batch // self._world
        return indices[self._rank * share : (self._rank + 1) * share]

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            if len(self._orders) > 3:  # the present epoch and the next
                self._orders = {}
            order = self._orders[epoch] = self._drawn_order(epoch)
        return order

    def _drawn_order(self, epoch: int) -> np.ndarray:
        count, batch = len(self.dataset), self.batch
        if not self._shuffle:
            return np.arange(count)
        random = numpy_generator(self._seed, epoch, _DRAWS)
        order = random.permutation(count)
        if self._sizes is None:
            return order
        head = min(-(epoch * count) % batch, count)  # completes the batch that the epoch before began
        whole = (count - head) // batch * batch
        middle = order[head : head + whole]
        windows = [middle[i : i + WINDOW * batch] for i in range(0, whole, WINDOW * batch)]
        by_size = [w[np.argsort(self._sizes[w], kind="stable")].reshape(-1, batch) for w in windows]
        batches = random.permutation(np.concatenate(by_size)).reshape(-1) if by_size else middle
        return np.concatenate([order[:head], batches, order[head + whole :]])

    def _make(self, indices: np.ndarray) -> Batch:
        points = _largest(self._points[indices])
        if self._resident is not None:
            return self._resident.gather(indices, points)
        batch = padded(collate([self.dataset[int(i)] for i in indices]), points)
        return _moved(dataclasses.replace(batch, query=batch.query.sharing(batch.input)), self.device)

    def _batches(self, pieces: Iterator[np.ndarray]) -> Iterator[Batch]:
        if self._resident is not None:
            yield from map(self._make, pieces)
            return
        thread = ThreadPoolExecutor(1, "oformer-loader")
        self._threads.add(thread)
        try:
            ahead = deque(thread.submit(self._make, piece) for piece in itertools.islice(pieces, self._prefetch))
            while ahead and not (first := ahead.popleft()).cancelled():
                batch = first.result()
                if thread in self._threads:
                    ahead.extend(thread.submit(self._make, piece) for piece in itertools.islice(pieces, 1))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)
            self._threads.discard(thread)


class _Resident:
    """All samples of a dataset on a device, padded to one size; a tensor that all of them share is stored once."""

    def __init__(self, like: Batch, tensors: list[Tensor], shared: set[int], cells: list[Tensor]):
        """Use `of`.

        Args:
            like: a batch of the same parameters.
            tensors: those of all samples, in the order of `Batch.tensors`; of one sample where they are shared.
            shared: which are.
            cells: those of each sample, or none.
        """
        self._like, self._tensors, self._shared, self._cells = like, tensors, shared, cells
        (inputs, _, known), (queries, _, asked) = tensors[:3], tensors[3:6]
        same = inputs.shape == queries.shape and torch.equal(inputs, queries)
        # A query is read off the input only where each of its points counts there.
        self._queries_are_inputs = same and not bool(((known <= 0) & (asked > 0)).any())

    @classmethod
    def of(cls, dataset: PointDataset, device: torch.device, limit: float, points: Points) -> "_Resident | None":
        """Stack all samples, or return None if they take more bytes than the limit."""
        count, first = len(dataset), dataset[0]
        one = padded(collate([first]), points)
        shared = set(range(len(one.tensors))) if count > 1 else set()
        for probe in {count // 2, count - 1} - {0}:
            shared -= _unequal(first, dataset[probe], shared)
        while True:  # once, unless a tensor that three samples share differs in a fourth
            own = {i: t[0] for i, t in enumerate(one.tensors) if i not in shared}
            if sum(count * t.nbytes for t in own.values()) > limit:
                return None
            stacks = {i: t.new_zeros((count, *t.shape), device=device) for i, t in own.items()}
            different, cells = cls._fill(dataset, stacks, first, shared)
            if not different:
                tensors = [stacks[i] if i in stacks else t.to(device) for i, t in enumerate(one.tensors)]
                return cls(one, tensors, shared, cells if len(cells) == count else [])
            shared -= different

    @staticmethod
    def _fill(
        dataset: PointDataset, stacks: dict[int, Tensor], first: Sample, shared: set[int]
    ) -> tuple[set[int], list[Tensor]]:
        """Fill the stacks; returns which tensors turned out not to be shared, and the cells."""
        count, chunk, cells = len(dataset), 64, []
        for start in range(0, count, chunk):
            samples = [dataset[i] for i in range(start, min(start + chunk, count))]
            for sample in samples:
                if different := _unequal(first, sample, shared):
                    return different, []
            together = collate([dataclasses.replace(first, cells=None), *samples]).tensors
            for i, stack in stacks.items():
                part, new = stack[start : start + len(samples)], together[i][1:]
                part[tuple(slice(n) for n in new.shape)] = new.to(stack.device)
            cells += [sample.cells[0] for sample in samples if sample.cells]
        return set(), cells

    def gather(self, indices: np.ndarray, points: Points) -> Batch:
        """The batch of some samples, cut to a number of input points and of queries."""
        rows, device = torch.from_numpy(indices), self._tensors[0].device
        rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)

        def gathered(number: int, tensor: Tensor) -> Tensor:
            if number in self._shared:
                return tensor.expand(len(indices), *tensor.shape[1:])
            if number < len(_POINTS):
                which, axis = _POINTS[number]
                tensor = tensor.narrow(axis, 0, points[which])
            return tensor.index_select(0, rows)

        batch = self._like.with_tensors([gathered(i, t) for i, t in enumerate(self._tensors)])
        if self._queries_are_inputs and points[0] == points[1]:
            batch = dataclasses.replace(batch, query=dataclasses.replace(batch.query, coords=batch.input.coords))
        return dataclasses.replace(batch, cells=tuple(self._cells[int(i)] for i in indices) if self._cells else None)


def few_sizes(dataset: PointDataset) -> int:
    """The multiple that sizes of samples are rounded up to, so that batches have about `SIZES` different sizes."""
    sizes = dataset.sizes()
    spread = int((sizes.max(0) - sizes.min(0)).max())
    return max(UNIT, _rounded_up(-(-spread // SIZES), UNIT))


def padded(batch: Batch, points: Points) -> Batch:
    """The batch with the given numbers of input points and queries, at least those it has; the new ones weigh zero."""

    def longer(tensor: Tensor, which: int, axis: int) -> Tensor:
        missing = points[which] - tensor.shape[axis]
        if missing == 0:
            return tensor
        return F.pad(tensor, (0, missing) if axis == -1 else (0, 0, 0, missing))

    tensors = list(batch.tensors)
    for i, place in enumerate(_POINTS):
        tensors[i] = once_per_grid(functools.partial(longer, which=place[0], axis=place[1]), tensors[i])
    return batch.with_tensors(tensors)


def _largest(sizes: np.ndarray) -> Points:
    points, queries = sizes.max(0).tolist()
    return points, queries


def _rounded_up(number, multiple: int):
    return -(-number // multiple) * multiple


def _unequal(a: Sample, b: Sample, numbers: set[int]) -> set[int]:
    """Which of these tensors of two samples differ."""
    ours, theirs = a.tensors, (*b.tensors[: len(_POINTS)], *(b.parameters[name] for name in a.parameters))
    return {i for i in numbers if ours[i] is not theirs[i] and not torch.equal(ours[i], theirs[i])}


def _budget(device: torch.device) -> float:
    if device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return CPU_BUDGET


def _moved(batch: Batch, device: torch.device) -> Batch:
    """A batch copied from the CPU to the device; a grid that its samples share is copied once and stays shared."""
    if device.type == "cpu":
        return batch

    def move(tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    return batch.map(move)
