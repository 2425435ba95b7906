"""What `run.py` runs in a process of its own: one case, whose numbers it prints as lines of JSON.

Sections: a training step; predictions of a batch of sequences; growth of both with the points; growth with the horizon.
The ledger measures a training step or a prediction with less beside it.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from oformer.checkpoint import Checkpoint
from oformer.experiments.recipes import recipe_named
from oformer.fields import Batch, Field, Sample, Spec, collate
from oformer.meshes.grids import periodic_grid
from oformer.models import Operator
from oformer.models.base import autocast_of
from oformer.predict import Predictor
from oformer.training.optimizers import Descent
from oformer.training.recipe import Recipe, Training
from oformer.training.step import Stepper

WARM_UP = 3  # after a first step, which compiles: then steps are recorded, and settle
BOUNDED_GB = 2.0  # of the predictions whose memory must not grow with the points
CHUNK = 2**17  # points of a training step in chunks that are in the model at once
PATIENCE = 2.0  # seconds after which a call is not repeated
FEW = 4  # points along each axis on which products are counted
PROFILED = 3  # steps of a profile
LONGEST = 160  # characters of a kernel's name: those of templates go on for pages
PRODUCT = {"cuda": 8192, "cpu": 1024}  # rows and columns of the product whose speed is the card's peak


@dataclass(frozen=True)
class Case:
    """What is measured, in one process."""

    what: str  # train, infer, growth, horizon; ledger-train, ledger-infer
    recipe: str
    device: str
    precision: str
    mode: str  # plain: eager, without fused kernels; eager; compiled; recipe: as it trains; sparing: and recomputes
    batch: int
    grid: tuple[int, ...]
    steps: int
    sizes: tuple[int, ...] = ()  # points of growth, steps in time of horizon
    profile: bool = False  # whether training also says what its time goes into


def measure(case: Case, started: float) -> Iterator[dict[str, Any]]:
    """The numbers of each row, as soon as they are known.

    Args:
        case: what to measure.
        started: when the process was asked for, in seconds of `time.time()`.
    """
    device = torch.device(case.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # the marks below go into the stream of the current device
    torch.manual_seed(0)
    yield from {**SECTIONS, **LEDGER}[case.what](case, recipe_named(case.recipe), device, started)


def _train(case: Case, recipe: Recipe, device: torch.device, started: float) -> Iterator[dict[str, Any]]:
    spec, points = _spec(case, recipe), math.prod(case.grid)
    trainer = Trainer(case, recipe, spec, device)
    batch = random_batch(spec, case.batch, device, points)
    trainer.step(batch)
    _wait(device)
    startup = time.time() - started
    numbers = {"what": case.what, **trainer.timed(batch, case.steps), "startup_seconds": startup}
    if case.what in LEDGER:
        yield numbers
        return
    work = training_flops(recipe, spec, case.batch, points)
    yield {**numbers, **_rate(work, numbers["milliseconds"], device, case.precision)}
    if case.profile:
        yield {"what": "profile", "kernels": profiled(lambda: trainer.step(batch), device)}


def _infer(case: Case, recipe: Recipe, device: torch.device, started: float) -> Iterator[dict[str, Any]]:
    before = resident_mib()
    spec, points = _spec(case, recipe), math.prod(case.grid)
    predict = _predictor(case, recipe, spec, device)
    on_device = random_batch(spec, case.batch, device, points)
    work = prediction_flops(recipe, spec, case.batch, points)
    startup = math.nan
    for what, place in (("infer", device), ("infer-host", torch.device("cpu"))):
        batch = on_device if place == device else random_batch(spec, case.batch, place, points)

        def answer(batch: Batch = batch, place: torch.device = place) -> None:
            predict(batch.input, batch.query, answer_on=place)

        if what == "infer":
            answer()
            _wait(device)
            startup = time.time() - started
        numbers = _timed_calls(answer, device, case.steps, before)
        rate = _rate(work, numbers["milliseconds"], device, case.precision)
        yield {"what": what, **numbers, "startup_seconds": startup, **rate}


def _answer(case: Case, recipe: Recipe, device: torch.device, started: float) -> Iterator[dict[str, Any]]:
    """A prediction whose answer stays on the device."""
    before = resident_mib()
    spec = _spec(case, recipe)
    predict = _predictor(case, recipe, spec, device)
    batch = random_batch(spec, case.batch, device, math.prod(case.grid))
    predict(batch.input, batch.query, answer_on=device)  # compiles
    numbers = _timed_calls(lambda: predict(batch.input, batch.query, answer_on=device), device, case.steps, before)
    yield {"what": case.what, **numbers}


def _growth(case: Case, recipe: Recipe, device: torch.device, started: float) -> Iterator[dict[str, Any]]:
    """One sample of more and more points, as many queries as input points; from host memory and back."""
    spec = dataclasses.replace(recipe.data_spec(), grid=None)
    host = torch.device("cpu")

    def predicted(memory_gb: float | None) -> Callable[[int], dict[str, float]]:
        predict = _predictor(case, recipe, spec, device, memory_gb)

        def numbers(points: int) -> dict[str, float]:
            before = resident_mib()
            sample = random_batch(spec, 1, host, points)
            return _timed_calls(lambda: predict(sample.input, sample.query), device, case.steps, before)

        return numbers

    def trained(chunk: int | None) -> Callable[[int], dict[str, float]]:
        loss = dataclasses.replace(recipe.training.loss, derivative=0.0)  # scattered points have no neighbors
        settings = dataclasses.replace(recipe.training, loss=loss, chunk=chunk)

        def numbers(points: int) -> dict[str, float]:
            trainer = Trainer(case, dataclasses.replace(recipe, training=settings), spec, device)
            batch = random_batch(spec, 1, device, points)
            if chunk is None:
                return trainer.timed(batch, case.steps)
            return _timed_calls(lambda: trainer.step(batch), device, case.steps, trainer.before)

        return numbers

    series = {
        "growth-bounded": predicted(BOUNDED_GB), "growth-predict": predicted(None),
        "growth-train": trained(None), "growth-train-chunks": trained(CHUNK),
    }  # fmt: skip
    for what, numbers in series.items():
        for points in case.sizes:
            try:
                found = numbers(points)
            except torch.OutOfMemoryError:
                yield {"what": what, "points": str(points), "failure": "out of memory"}
                break
            yield {"what": what, "points": str(points), **found}
            _forget(device)


def _horizon(case: Case, recipe: Recipe, device: torch.device, started: float) -> Iterator[dict[str, Any]]:
    """The recipe's batch for more and more steps in time."""
    spec, points = _spec(case, recipe), math.prod(case.grid)
    for what in ("horizon-predict", "horizon-train"):
        for times in case.sizes:
            before = resident_mib()
            longer = dataclasses.replace(spec, out_times=times)
            batch = random_batch(longer, case.batch, device, points)
            if what == "horizon-train":
                numbers = Trainer(case, recipe, longer, device).timed(batch, case.steps)
            else:
                predict = _predictor(case, recipe, longer, device)

                def answer(batch: Batch = batch, predict: Predictor = predict) -> None:
                    predict(batch.input, batch.query, answer_on=device)

                numbers = _timed_calls(answer, device, case.steps, before)
            yield {"what": what, "times": times, **numbers}
            _forget(device)


SECTIONS = {"train": _train, "infer": _infer, "growth": _growth, "horizon": _horizon}
LEDGER = {"ledger-train": _train, "ledger-infer": _answer}  # no products are counted: there are many such cases


class Trainer:
    """Training steps as the loop makes them, without its data and its journal."""

    def __init__(self, case: Case, recipe: Recipe, spec: Spec, device: torch.device):
        """Build the operator of the recipe with random weights."""
        self.before = resident_mib()
        self.settings, self.times, self.device = _settings(case, recipe), spec.out_times, device
        self.operator = Operator(recipe.model.build(spec), recipe.normalization).to(device).train()
        torch.set_float32_matmul_precision("highest" if case.precision == "float32" else "high")
        self.stepper = Stepper(self.operator, self.settings, device)
        self.stepper.runner.autocast = autocast_of(case.precision)  # which training leaves out on a CPU
        self.descent = Descent(self.operator, self.settings.optimizer, self.stepper.recorder())
        self.done = 0

    def step(self, batch: Batch) -> None:
        """Forward, loss, backward, clipping and the optimizer."""
        self.stepper(batch, self.times)
        self.descent.step(*self.settings.schedule.at(self.done, self.settings.steps))
        self.done += 1

    def timed(self, batch: Batch, steps: int) -> dict[str, float]:
        """The median time of a step, and the most memory of some."""
        for _ in range(1 + WARM_UP - min(self.done, 1)):
            self.step(batch)
        _wait(self.device)
        reset_peak(self.device)
        if self.device.type == "cuda":
            # Marks in the stream and one wait at the end: waiting at each step would hide that a launch overlaps work.
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            marks[0].record()
            for mark in marks[1:]:
                self.step(batch)
                mark.record()
            _wait(self.device)
            times = [first.elapsed_time(last) / 1000 for first, last in itertools.pairwise(marks)]
        else:
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                self.step(batch)
                times.append(time.perf_counter() - start)
        return {**_speed(times), **peaks(self.device, self.before)}


def _settings(case: Case, recipe: Recipe) -> Training:
    """How the recipe trains, or a plainer way."""
    settings = dataclasses.replace(recipe.training, precision=case.precision, steps=max(recipe.training.steps, 1000))
    if case.mode in ("recipe", "sparing"):
        return dataclasses.replace(settings, recompute=settings.recompute or case.mode == "sparing")
    compiled = case.mode == "compiled" and settings.chunk is None
    return dataclasses.replace(settings, compile=compiled, capture=False, recompute=False)


def _predictor(
    case: Case, recipe: Recipe, spec: Spec, device: torch.device, memory_gb: float | None = None
) -> Predictor:
    operator = Operator(recipe.model.build(spec), recipe.normalization)
    own = device.type == "cuda" if recipe.training.compile is None else recipe.training.compile
    compiled = case.mode == "compiled" or (case.mode == "recipe" and own)
    precision: Any = case.precision
    return Predictor(
        Checkpoint(operator, recipe.name), device, precision=precision, compile=compiled, memory_gb=memory_gb
    )


def _spec(case: Case, recipe: Recipe) -> Spec:
    spec = recipe.data_spec()
    return spec if spec.grid is None else dataclasses.replace(spec, grid=tuple(case.grid))


def _timed_calls(work: Callable[[], object], device: torch.device, repeats: int, before: float) -> dict[str, float]:
    """The median time of a call after one that does not count; slow ones are not repeated."""
    start = time.perf_counter()
    work()
    _wait(device)
    slow = time.perf_counter() - start > PATIENCE
    reset_peak(device)
    times = []
    for _ in range(1 if slow else repeats):
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return {**_speed(times), **peaks(device, before)}


def profiled(step: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """Kernels of a GPU, or operations of torch on a CPU: name, how many of them in a step, and their microseconds."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if gpu else activity.CPU]) as record:
        for _ in range(PROFILED):
            step()
        _wait(device)
    found: dict[str, list[float]] = {}
    for event in record.events() or ():
        if not gpu or event.device_type == torch.autograd.DeviceType.CUDA:
            took = event.time_range.elapsed_us() if gpu else event.self_cpu_time_total
            found.setdefault(event.name[:LONGEST], []).append(took)
    rows = [(name, len(times) / PROFILED, sum(times) / PROFILED) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def _speed(times: Sequence[float]) -> dict[str, float]:
    median = statistics.median(times)
    return {"per_second": 1 / median, "milliseconds": 1000 * median}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget(device: torch.device) -> None:
    """Give back the memory of what was measured before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def training_flops(recipe: Recipe, spec: Spec, size: int, points: int) -> float:
    """Additions and multiplications in the matrix products of a step: forward and backward, nothing computed twice."""

    def step(operator: Operator, batch: Batch) -> None:
        recipe.training.loss(operator.train(), batch, spec.out_times)[0].backward()

    return _flops(recipe, spec, size, points, step)


def prediction_flops(recipe: Recipe, spec: Spec, size: int, points: int) -> float:
    """Those of a forward pass."""

    def predict(operator: Operator, batch: Batch) -> None:
        with torch.no_grad():
            operator.eval()(batch.input, batch.query)

    return _flops(recipe, spec, size, points, predict)


def _flops(recipe: Recipe, spec: Spec, size: int, points: int, work: Callable[[Operator, Batch], None]) -> float:
    """Counted on a CPU in plain float32 on few points: products grow with the points, or do not depend on them."""

    def count(side: int) -> float:
        small = spec if spec.grid is None else dataclasses.replace(spec, grid=(side,) * spec.dim)
        operator = Operator(recipe.model.build(small), recipe.normalization)
        with FlopCounterMode(display=False) as counter:
            work(operator, random_batch(small, size, torch.device("cpu"), side**spec.dim))
        return counter.get_total_flops()

    few, more = FEW, FEW + 1
    each = (count(more) - count(few)) / (more**spec.dim - few**spec.dim)
    return count(few) + each * (points - few**spec.dim)


def _rate(flops: float, milliseconds: float, device: torch.device, precision: str) -> dict[str, float]:
    """Model FLOP/s, and their share of what one large product reaches here in the same precision."""
    tflops = flops / milliseconds / 1e9
    return {"tflops": tflops, "of_peak": tflops / matmul_tflops(device, precision)}


def matmul_tflops(device: torch.device, precision: str) -> float:
    """TFLOP/s of a large product of matrices, the best of some."""
    n = PRODUCT[device.type]
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    a, b = (torch.randn(n, n, device=device, dtype=_dtype(precision)) for _ in range(2))
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e12


def _dtype(precision: str) -> torch.dtype:
    return autocast_of(precision) or torch.float32


def random_batch(spec: Spec, size: int, device: torch.device, points: int) -> Batch:
    """Noise of the right shape as the loader hands it out: on a shared grid, or on points of each sample's own."""

    def values(times: int, channels: int, categories: int) -> Tensor:
        noise = torch.randn(times, points, channels, device=device)
        if categories:
            noise[..., -1] = torch.randint(categories, (points,), device=device).float()
        return noise

    def query() -> Field:
        # Where the points of a grid lie changes nothing about the cost, so it may be a periodic one.
        if spec.grid is not None:
            coords = periodic_grid(spec.grid, (1.0,) * spec.dim).float().to(device)
        else:
            coords = torch.rand(points, spec.dim, device=device)
        return Field.of(coords, values(1, spec.query_channels, spec.query_categories))

    shared, samples = query(), []
    for _ in range(size):
        where = shared if spec.grid is not None else query()
        known = where.with_values(values(spec.in_times, spec.in_channels, spec.in_categories))
        samples.append(Sample(known, where, values(spec.out_times, spec.out_channels, 0)))
    return collate(samples)


def reset_peak(device: torch.device) -> None:
    """Forget the largest memory so far; on a CPU where the system can (Linux)."""
    _forget(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peaks(device: torch.device, before: float) -> dict[str, float]:
    """The most memory since `reset_peak`, in MiB.

    On a GPU `allocated` is what tensors filled. It does not see what a captured CUDA graph keeps for itself;
    `reserved`, all that torch took from the card, does. On a CPU both are the growth of the process in RAM.

    Args:
        device: that computed.
        before: MiB of the process in RAM, before it began.
    """
    if device.type == "cuda":
        return {
            "allocated_mib": torch.cuda.max_memory_allocated(device) / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved(device) / 2**20,
        }
    grown = max(peak_mib() - before, 0.0)
    return {"allocated_mib": grown, "reserved_mib": grown}


def resident_mib() -> float:
    """Memory of this process that lies in RAM now."""
    return _status("VmRSS") or peak_mib()


def peak_mib() -> float:
    """The most memory of this process that lay in RAM; NaN where the system does not tell."""
    if (known := _status("VmHWM")) is not None:
        return known
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**20 if sys.platform == "darwin" else 2**10)


def _status(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), None)


if __name__ == "__main__":
    for found in measure(Case(**json.loads(sys.argv[1])), float(sys.argv[2])):
        print(json.dumps(found), flush=True)
