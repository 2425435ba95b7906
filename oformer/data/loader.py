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
import math
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Batch, Field, Sample, collate
from oformer.nn.rotary import once_per_grid
from oformer.seeds import numpy_generator

WINDOW = 50  # batches sorted by size together: enough to find like ones, few enough to stay random
CPU_BUDGET = 2 * 2**30
GPU_SHARE = 0.4  # of the free memory
SIZES = 4  # so many sizes of batch at most where `few_sizes` says what to round to
UNIT = 32  # points that a GPU computes together
Points = tuple[int, int]  # of the input and of the queries
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
        self._active: set[_Ahead] = set()
        sizes = dataset.sizes()
        even = (sizes == sizes[0]).all(0)
        self._sizes = None if even.all() else sizes.sum(1)
        # Of each sample alone; a batch has the largest of its own. Queries on a whole grid stay a whole grid.
        self._points = np.where(even, sizes, _rounded_up(sizes, round_to))
        self._stack: _Stack | None = None
        if resident is not False:
            limit = math.inf if resident is True else _budget(self.device) if budget is None else budget
            self._stack = _Stack.of(dataset, self.device, limit, _largest(self._points))

    @property
    def resident(self) -> bool:
        """Whether all samples are kept on the device."""
        return self._stack is not None

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
        """Stop the threads; streams that are still open end."""
        for ahead in list(self._active):
            ahead.close()

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
            if len(self._orders) > 3:  # the present epoch and the next, for the caller and for the thread
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
        if self._stack is not None:
            return self._stack.gather(indices, points)
        batch = padded(collate([self.dataset[int(i)] for i in indices]), points)
        return _moved(dataclasses.replace(batch, query=batch.query.sharing(batch.input)), self.device)

    def _batches(self, pieces: Iterator[np.ndarray]) -> Iterator[Batch]:
        if self._stack is not None:
            yield from map(self._make, pieces)
            return
        ahead = _Ahead(self._make, pieces, self._prefetch)
        self._active.add(ahead)
        try:
            yield from ahead
        finally:
            ahead.close()
            self._active.discard(ahead)


class _Ahead:
    """Prepares batches in one thread, a few ahead of who takes them."""

    def __init__(self, make: Callable[[np.ndarray], Batch], pieces: Iterator[np.ndarray], depth: int):
        self._make, self._pieces = make, pieces
        self._ready: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="oformer-loader", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for piece in self._pieces:
                self._room.acquire()
                if self._stopped:
                    break
                self._ready.put(self._make(piece))
        except BaseException as error:  # it belongs to whoever waits for the batch
            self._ready.put(error)
        self._ready.put(None)

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            self._room.release()
            yield item

    def close(self) -> None:
        """Stop the thread and wait for it; safe to repeat."""
        self._stopped = True
        self._room.release()
        self._thread.join()


class _Stack:
    """All samples of a dataset on a device, stacked and padded to one size; what they share is there once."""

    def __init__(self, columns: dict[str, Tensor], shared: dict[str, Tensor], cells: list[Tensor] | None):
        self._columns, self._shared, self._cells = columns, shared, cells
        self._queries_are_inputs = _queries_are_inputs({**columns, **shared})

    @classmethod
    def of(cls, dataset: PointDataset, device: torch.device, limit: float, points: Points) -> "_Stack | None":
        """Stack samples, or None if they take more bytes than the limit."""
        count = len(dataset)
        first = _columns(dataset[0])
        full = {name: _filled(name, tensor, points) for name, tensor in first.items()}
        shared = set(first)
        for probe in {count // 2, count - 1} - {0}:
            shared -= _unequal(first, _columns(dataset[probe]), shared)
        while True:  # once, unless an array that three samples share differs in a fourth
            own = {name: t for name, t in full.items() if name not in shared or count == 1}
            if sum(count * t.nbytes for t in own.values()) > limit:
                return None
            stacks = {name: t.new_zeros((count, *t.shape), device=device) for name, t in own.items()}
            different, cells = cls._fill(dataset, stacks, first, shared - own.keys())
            if not different:
                common = {name: full[name].to(device) for name in shared - own.keys()}
                return cls(stacks, common, cells if len(cells) == count else None)
            shared -= different

    @staticmethod
    def _fill(
        dataset: PointDataset, stacks: dict[str, Tensor], first: dict[str, Tensor], shared: set[str]
    ) -> tuple[set[str], list[Tensor]]:
        """Fill the stacks; returns what turned out not to be shared, and the cells."""
        count, chunk, cells = len(dataset), 64, []
        for start in range(0, count, chunk):
            samples = [dataset[i] for i in range(start, min(start + chunk, count))]
            for sample in samples:
                if different := _unequal(first, _columns(sample), shared):
                    return different, []
            together = _columns(collate(samples))
            for name, stack in stacks.items():
                part = stack[start : start + len(samples)]
                part[tuple(slice(n) for n in together[name].shape)] = together[name].to(stack.device)
            cells += [sample.cells[0] for sample in samples if sample.cells]
        return set(), cells

    def gather(self, indices: np.ndarray, points: Points) -> Batch:
        """The batch of some samples, with so many points."""
        size = len(indices)
        columns = {name: t.expand(size, *t.shape) for name, t in self._shared.items()}
        if self._columns:
            device = next(iter(self._columns.values())).device
            rows = torch.from_numpy(indices)
            rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)
            columns |= {name: _cut(name, t, points).index_select(0, rows) for name, t in self._columns.items()}
        if self._queries_are_inputs and points[0] == points[1]:
            columns["query.coords"] = columns["input.coords"]
        return _batch_of(columns, tuple(self._cells[int(i)] for i in indices) if self._cells else None)


def few_sizes(dataset: PointDataset) -> int:
    """What to round the sizes of samples up to, so that batches come in about `SIZES` of them."""
    sizes = dataset.sizes()
    spread = int((sizes.max(0) - sizes.min(0)).max())
    return max(UNIT, _rounded_up(-(-spread // SIZES), UNIT))


def padded(batch: Batch, points: Points) -> Batch:
    """The batch with so many input points and queries, at least those it has; the new ones weigh nothing."""
    columns = _columns(batch)
    longer = {name: once_per_grid(lambda t, n=name: _filled(n, t, points), t) for name, t in columns.items()}
    return _batch_of(longer, batch.cells)


def _columns(sample: Sample) -> dict[str, Tensor]:
    fields = {"input": sample.input, "query": sample.query}
    parts = {f"{role}.{name}": t for role, field in fields.items() for name, t in vars(field).items()}
    return {**parts, "target": sample.target, **{f"parameters.{n}": t for n, t in sample.parameters.items()}}


def _batch_of(columns: dict[str, Tensor], cells: tuple[Tensor, ...] | None) -> Batch:
    return Batch(
        input=Field(columns["input.coords"], columns["input.values"], columns["input.weights"]),
        query=Field(columns["query.coords"], columns["query.values"], columns["query.weights"]),
        target=columns["target"],
        parameters={n.removeprefix("parameters."): t for n, t in columns.items() if n.startswith("parameters.")},
        cells=cells,
    )


def _queries_are_inputs(columns: dict[str, Tensor]) -> bool:
    """Whether all samples are asked for at their input points, each of which counts as input."""
    i, q = columns["input.coords"], columns["query.coords"]
    known, asked = columns["input.weights"] > 0, columns["query.weights"] > 0
    return i.shape == q.shape and torch.equal(i, q) and known.shape == asked.shape and bool((known | ~asked).all())


def _place(name: str) -> tuple[int, int] | None:
    """Which of the two counts of points a column has, and along which axis; None where it has none."""
    if name.startswith("parameters."):
        return None
    return int(not name.startswith("input.")), -1 if name.endswith(".weights") else -2


def _filled(name: str, tensor: Tensor, points: Points) -> Tensor:
    """A column with zeros after its points, up to so many."""
    if (place := _place(name)) is None or tensor.shape[place[1]] == points[place[0]]:
        return tensor
    missing = list(tensor.shape)
    missing[place[1]] = points[place[0]] - tensor.shape[place[1]]
    return torch.cat([tensor, tensor.new_zeros(missing)], place[1])


def _cut(name: str, tensor: Tensor, points: Points) -> Tensor:
    """A column with so many of its points."""
    return tensor if (place := _place(name)) is None else tensor.narrow(place[1], 0, points[place[0]])


def _largest(sizes: np.ndarray) -> Points:
    points, queries = sizes.max(0).tolist()
    return points, queries


def _rounded_up(number, multiple: int):
    return -(-number // multiple) * multiple


def _unequal(a: dict[str, Tensor], b: dict[str, Tensor], names: set[str]) -> set[str]:
    return {name for name in names if a[name] is not b[name] and not torch.equal(a[name], b[name])}


def _budget(device: torch.device) -> float:
    if device.type == "cuda":
        return GPU_SHARE * torch.cuda.mem_get_info(device)[0]
    return CPU_BUDGET


def _moved(batch: Batch, device: torch.device) -> Batch:
    """A batch from the CPU on the device; what its samples share travels once and stays expanded."""
    if device.type == "cpu":
        return batch

    def move(tensor: Tensor) -> Tensor:
        one = tensor[:1] if tensor.shape[0] > 1 and tensor.stride(0) == 0 else tensor
        if device.type == "cuda":
            one = one.pin_memory()
        return one.to(device, non_blocking=True).expand(tensor.shape)

    return batch.each(move)
