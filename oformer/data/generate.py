"""Problem, count and seed to a dataset on disk: parallel, and resumable at any moment.

On a CPU several processes make a part each; on a GPU one batch is solved while the next ones are drawn and the part
before is written.

All randomness comes from (seed, index), a batch never crosses the border of a part, and parts are written
whole. So a run may be killed and repeated, and several processes may each make a share of the parts: the
bytes are the same. They are the same for another `batch` too, as far as the solver gives the same numbers in
another batch.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oformer import config, files
from oformer.data.manifest import Splits, part_path
from oformer.data.part_file import Storage
from oformer.data.store import ABANDONED, Store, Writer
from oformer.errors import InputError, SolverDiverged
from oformer.fields import Sample
from oformer.problems.base import Problem
from oformer.processes import stop_with_parent
from oformer.terminal import ProgressBar, say

ATTEMPTS = 5  # redraws of a sample whose solver diverged
AHEAD = 4  # batches that are drawn at once, each in a thread, while a GPU solves
LINE_SECONDS = 10.0  # between lines about the progress, where there is no terminal for a bar
STRIDE = 2**32  # attempt k of sample i is drawn as sample i + k * STRIDE, which no dataset reaches

Progress = Callable[[int, int], None]  # called with (done, total) samples
Solved = tuple[list[Sample], list[tuple[int, int]]]  # and (index, attempt) of those that were redrawn


def generate(
    problem: Problem,
    count: int,
    *,
    seed: int,
    folder: Path | str,
    n_train: int | None = None,
    n_test: int | None = None,
    splits: Splits | None = None,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    part_size: int = 64,
    shard: tuple[int, int] = (0, 1),
    storage: Storage = "float32",
    workers: int | None = 1,
    progress: Progress | None = None,
) -> Store | None:
    """Make a dataset, or the rest of it.

    Args:
        problem: what to draw and solve.
        count: samples in all.
        seed: of the dataset.
        folder: new, empty, or begun before with the same settings.
        n_train: the first so many samples are the training split.
        n_test: the last so many are the test split; by default what is left, and a tenth if neither is given.
        splits: instead of both, [first, end) by name.
        device: where to solve.
        batch: samples solved at once; by default a whole part, on a CPU at most the problem's `cpu_batch`.
        part_size: samples per file, and the most that an interruption costs.
        shard: (i, n) makes the parts i, i + n, i + 2n...; whoever makes the last one completes the dataset.
        storage: how values are kept.
        workers: processes that share the work of this shard on a CPU; None: one per core, where there are parts
            enough for them to be worth starting.
        progress: called with the samples done and wanted of this shard; by default a bar, or lines in a log.

    Returns:
        The dataset, or None while other shards are still at work.
    """
    _check_request(count, seed, batch, shard, workers)
    on_cpu = torch.device(device).type == "cpu"
    folder = Path(folder)
    if splits is None:
        splits = first_and_last(count, n_train, n_test)
    if "train" in splits:
        problem = problem.split_after(splits["train"][1])
    writer = Store.create(
        folder,
        spec=problem.spec,
        card=problem.card,
        count=count,
        splits=splits,
        part_size=part_size,
        storage=storage,
        problem=config.to_json(problem),
        seed=seed,
    )
    # What is missing of it, and which part of that is ours.
    for place in (folder, folder / "parts"):
        files.remove_leftovers(place, older_than=ABANDONED)
    missing = writer.missing()
    if not missing and writer.ready and writer.manifest.complete:
        return Store.open(folder)
    mine = range(shard[0], writer.parts, shard[1])
    todo = sorted(set(missing).intersection(mine))
    total = sum(len(writer.indices(part)) for part in mine)
    left = sum(len(writer.indices(part)) for part in todo)
    if problem.spec.grid is not None:
        check_space(folder, estimate(problem, left, storage) if left else 0)
    with torch.no_grad(), _reported(progress, total - left, total) as report:
        if batch is None:
            batch = min(part_size, problem.cpu_batch) if on_cpu else part_size
        work = _Work(problem, seed, device, batch)
        # What samples share, and how large a part is on scattered points, is seen in the first one.
        if todo[:1] != [0] and not writer.ready:
            writer.share(work.solve([0])[0][0])
        first, others = todo[:1], todo[1:]
        _make(writer, first, work, report)
        if others and problem.spec.grid is None:
            check_space(folder, part_path(folder, first[0]).stat().st_size * len(others))
        if not on_cpu:
            _ahead(writer, others, work, report)
        elif (processes := _processes(workers, len(others))) > 1:
            _in_processes(processes, writer, others, work, report)
        else:
            _make(writer, others, work, report)
    return writer.finalize() if not writer.missing() else None


def estimate(problem: Problem, count: int, storage: Storage = "float32") -> int:
    """Bytes that a dataset will take on disk.

    On a grid the spec says it all; on scattered points a typical sample shows how many there are.
    """
    spec = problem.spec
    values = spec.in_times * spec.in_channels, spec.out_times * spec.out_channels
    width = 4 if storage == "float32" else 2
    overhead = 8192 + 30 * count  # JSON, offsets, and a header for each part of 64
    if spec.grid is not None:
        points = math.prod(spec.grid)
        once = points * (4 * (spec.dim + 1) + width * spec.query_channels)
        return once + count * points * sum(values) * width + overhead
    with torch.no_grad():
        sample = problem.typical()
    points, queries = sample.input.points, sample.query.points
    one = (points * values[0] + queries * (values[1] + spec.query_channels)) * width
    one += points * 4 * (spec.dim + 1)
    if not torch.equal(sample.input.coords, sample.query.coords):
        one += queries * 4 * (spec.dim + 1)
    one += sum(4 * block.numel() for block in sample.cells or ())
    return count * one + overhead


def _check_request(count: int, seed: int, batch: int | None, shard: tuple[int, int], workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise InputError("at least one of `workers`", str(workers))
    if not 0 < count < STRIDE:
        raise InputError(f"a `count` of samples between 1 and {STRIDE - 1}", str(count))
    if seed < 0:
        raise InputError("a `seed` of zero or more", str(seed))
    if batch is not None and batch < 1:
        raise InputError("a `batch` of at least one sample", str(batch))
    if not 0 <= shard[0] < shard[1]:
        raise InputError("a `shard` (i, n) with 0 <= i < n", str(shard))


def first_and_last(count: int, n_train: int | None, n_test: int | None) -> Splits:
    """The first samples for training and the last for testing; a tenth of all for testing where nothing is said."""
    if n_test is None:
        n_test = count - n_train if n_train is not None else min(max(count // 10, 1), count - 1)
    if n_train is None:
        n_train = count - n_test
    if min(n_train, n_test) < 0 or n_train + n_test > count:
        raise InputError(f"training and test samples within the {count}", f"{n_train} and {n_test}")
    splits = {"train": (0, n_train), "test": (count - n_test, count)}
    return {name: (first, end) for name, (first, end) in splits.items() if end > first}


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{needed / 1e9:.2f} GB of disk space for {folder}",
            f"{free / 1e9:.2f} GB free",
            "Free some, choose another folder, fewer samples or `storage=float16`",
        )


@dataclass(frozen=True)
class _Work:
    """A problem, the seed of the dataset, the device that solves, and the number of samples that are solved at once."""

    problem: Problem
    seed: int
    device: torch.device | str
    batch: int

    def batches(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """The samples of a part, as they are solved together."""
        return [indices[first : first + self.batch] for first in range(0, len(indices), self.batch)]

    def draw(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The first draws of some samples."""
        return self.problem.draw(indices, self.seed)

    def solve(self, indices: Sequence[int], drawn: dict[str, Tensor] | None = None) -> Solved:
        """Samples, and (index, attempt) of those whose first draws diverged.

        A batch with a bad sample is solved again one by one: which of them are redrawn, and as what, must not
        depend on who was in the batch.

        Args:
            indices: the samples.
            drawn: what `draw` gave for them, if it was called.
        """
        problem, seed, device = self.problem, self.seed, self.device
        try:
            return problem.samples(indices, seed, device) if drawn is None else problem.solved(drawn, device), []
        except SolverDiverged:
            solved = [self._solve_one(index) for index in indices]
        redrawn = [(i, attempt) for i, (_, attempt) in zip(indices, solved, strict=True) if attempt]
        return [sample for sample, _ in solved], redrawn

    def _solve_one(self, index: int) -> tuple[Sample, int]:
        last: SolverDiverged | None = None
        for attempt in range(ATTEMPTS + 1):
            try:
                return self.problem.samples([index + attempt * STRIDE], self.seed, self.device)[0], attempt
            except SolverDiverged as error:
                last = error
        raise InputError(
            "settings of the problem that its solver can solve",
            f"{ATTEMPTS + 1} draws of sample {index} that diverged ({last})",
            "More time steps or a coarser grid may help",
        ) from last


def _make(writer: Writer, parts: Sequence[int], work: _Work, report: Callable[[int], None]) -> None:
    """Make parts one by one; the samples of the last batch of a part are reported when it is written."""
    for part in parts:
        samples, redrawn, last = _solved(work.batches(writer.indices(part)), work.solve, report)
        writer.write(part, samples, redrawn)
        report(last)


def _solved(
    batches: Sequence[Sequence[int]], solve: Callable[[Sequence[int]], Solved], report: Callable[[int], None]
) -> tuple[list[Sample], list[tuple[int, int]], int]:
    """The samples of a part, those of them that were redrawn, and how many are in its last batch, not reported yet."""
    samples, redrawn = [], []
    for some in batches:
        solved, again = solve(some)
        samples += solved
        redrawn += again
        if some is not batches[-1]:
            report(len(solved))
    return samples, redrawn, len(batches[-1])


def _ahead(writer: Writer, parts: Sequence[int], work: _Work, report: Callable[[int], None]) -> None:
    """Make parts while threads draw what comes next and write what came before, for which a GPU would wait.

    All of the solving happens in the calling thread. At most one part waits to be written.
    """
    to_draw = (some for part in parts for some in work.batches(writer.indices(part)))
    with _threads(AHEAD) as drawers, _threads(1) as scribe:
        drawn = deque(drawers.submit(work.draw, some) for some in itertools.islice(to_draw, AHEAD))

        def solve(indices: Sequence[int]) -> Solved:
            state = drawn.popleft().result()
            drawn.extend(drawers.submit(work.draw, some) for some in itertools.islice(to_draw, 1))
            return work.solve(indices, state)

        waiting: tuple[Future[None], int] | None = None

        def finish() -> None:
            if waiting is not None:
                waiting[0].result()  # or what went wrong
                report(waiting[1])

        for part in parts:
            samples, redrawn, last = _solved(work.batches(writer.indices(part)), solve, report)
            finish()
            waiting = scribe.submit(writer.write, part, samples, redrawn), last
        finish()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that finish what they are at, and begin nothing more, when the block is left in any way."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _processes(workers: int | None, parts: int) -> int:
    """The number of processes that make `parts` parts; a process takes seconds to start."""
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return workers if parts >= 2 * workers else 1
    return min(workers, parts)


def _in_processes(
    processes: int, writer: Writer, todo: Sequence[int], work: _Work, report: Callable[[int], None]
) -> None:
    """Make parts in several processes of one thread each; an error of one ends all, and whole parts stay."""
    context = multiprocessing.get_context("spawn")  # a forked process would share the threads of torch
    failures = context.SimpleQueue()
    team = [
        context.Process(target=_worker, args=(writer, todo[i::processes], work, failures, os.getpid()), daemon=True)
        for i in range(processes)
    ]
    waiting = set(todo)

    def look() -> None:
        made = {part for part in waiting if part_path(writer.folder, part).exists()}
        waiting.difference_update(made)
        if made:
            report(sum(len(writer.indices(part)) for part in made))

    try:
        for process in team:
            process.start()
        while failures.empty() and (left := [p.sentinel for p in team if p.exitcode is None]):
            wait(left, 0.1)
            look()
            if any(process.exitcode for process in team):  # killed: the others need not go on
                break
    finally:
        # All have ended, or what is left of the work is not wanted.
        for process in team:
            process.terminate()
            process.join()
    if not failures.empty():
        raise failures.get()
    look()
    if waiting:
        raise InputError(
            f"{processes} processes that make their share of the dataset",
            "one that was killed",
            "It may have run out of memory: use fewer `workers`; the same command goes on",
        )


def _worker(writer: Writer, parts: Sequence[int], work: _Work, failures: Any, parent: int) -> None:
    """The main function of one process."""
    stop_with_parent(parent)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            _make(writer, parts, work, lambda _: None)
    except KeyboardInterrupt:
        pass  # the parent says it
    except Exception as error:  # any error at all must reach the parent
        failures.put(error)


@contextlib.contextmanager
def _reported(progress: Progress | None, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be told how many more samples are done: it calls `progress`, draws a bar or prints lines."""
    start, begun = time.monotonic(), done
    said = start
    bar = ProgressBar("Generating", total, done) if progress is None and sys.stderr.isatty() else None

    def report(more: int) -> None:
        nonlocal done, said
        done += more
        now = time.monotonic()
        rate = (done - begun) / max(now - start, 1e-9)
        if progress is not None:
            progress(done, total)
        elif bar is not None:
            bar.show(done, f"{rate:.1f} samples/s")
        elif now - said >= LINE_SECONDS or done == total:
            said = now
            left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
            say(f"Generated {done} of {total} samples, {rate:.1f} samples/s{left}")

    try:
        if done < total:
            report(0)
        yield report
    finally:
        if bar is not None:
            bar.close()
