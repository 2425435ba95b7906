"""Training steps per second and peak memory of named recipes, on whatever device is there.

    python benchmarks/run.py                                    # the three recipes, eager and compiled
    python benchmarks/run.py --names burgers-2048 --no-compile  # one of them, quickly
    python benchmarks/run.py --out mine.csv --reference benchmarks/reference.csv

A step is forward, loss, backward, clipping and the optimizer, on random data of the recipe's shape; README.md says
what each column means. Every case runs in a fresh process, so that no case inherits another's memory or compiler cache.
"""

import argparse
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("burgers-2048", "darcy-141", "ns2-full")
PRECISIONS = ("float32", "tf32", "bfloat16")
SLOWER = 0.95  # below this part of the reference's speed a row is flagged
# On a CPU the recipes' own sizes would take an hour: so many samples, and about so many points in all.
CPU_BATCH, CPU_POINTS, CPU_STEPS = 2, 1024, 5
GPU_STEPS = 20
WARM_UP = 3  # the first step compiles and allocates, the next ones settle


@dataclass(frozen=True)
class Case:
    """What is measured."""

    recipe: str
    device: str
    precision: str
    compiled: bool
    batch: int
    grid: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Row:
    """What came out; the columns of the table and of the CSV file."""

    machine: str
    torch: str
    recipe: str
    precision: str
    compiled: bool
    batch: int
    points: str
    steps: int
    steps_per_second: float = math.nan
    milliseconds: float = math.nan
    peak_mib: float = math.nan
    ratio: float = math.nan  # of the speed of the recipe's first row
    failure: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What two rows must share to be compared."""
        return (self.machine, self.recipe, self.precision, str(self.compiled), str(self.batch), self.points)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write, compare; the exit status is 1 where a case failed or is slower than the reference."""
    options = _parser().parse_args(arguments)
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)))))
        return 0
    from oformer.errors import InputError

    try:
        reference = read_rows(options.reference) if options.reference else []
        cases = _cases(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows = with_ratios(list(_measured(cases)))
    print(table(rows))
    if options.out:
        from oformer.files import write_text

        write_text(options.out, to_csv(rows))
    verdict, slower = compare(rows, reference)
    if options.reference:
        print(verdict)
    return int(slower or any(row.failure for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Training steps per second and peak memory of named recipes.")
    names = f"recipes on regular grids (default: {' '.join(NAMES)})"
    batch = f"samples per step (default: the recipe's; on a CPU {CPU_BATCH})"
    points = f"points along each axis (default: the recipe's; on a CPU about {CPU_POINTS} in all)"
    modes = "only compiled, or only eager (default: both)"
    precision = "one or more (default: all three on a GPU, float32 on a CPU)"
    parser.add_argument("--names", nargs="+", default=list(NAMES), help=names)
    parser.add_argument("--device", help="cpu, cuda, cuda:1... (default: a GPU if there is one)")
    parser.add_argument("--batch", type=int, help=batch)
    parser.add_argument("--points", type=int, help=points)
    parser.add_argument("--steps", type=int, help=f"timed steps (default: {GPU_STEPS}; on a CPU {CPU_STEPS})")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help=modes)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help=precision)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    parser.add_argument("--reference", type=Path, help="flag what is slower than in this CSV file of --out")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case in a process of its own
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    """Every combination that was asked for, with what was chosen said out loud."""
    import torch

    from oformer.errors import InputError
    from oformer.recipes import recipe_named

    for name in ("batch", "points", "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InputError(f"at least 1 in --{name}", str(getattr(options, name)))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    if device != "cpu" and not gpu:  # another kind of device needs its own clock
        raise InputError("cpu or cuda as --device", f"`{device}`")
    if gpu and not torch.cuda.is_available():
        raise InputError("a GPU that torch sees for --device cuda", "none", "Use --device cpu")
    precisions = options.precision or (PRECISIONS if gpu else ("float32",))
    modes = (False, True) if options.compile is None else (options.compile,)
    cases = []
    for name in options.names:
        recipe = recipe_named(name)
        whole = recipe.data_spec().grid
        if whole is None:
            if recipe.problem is None:
                raise InputError("a recipe with a problem", f"`{name}`, which has none", "Choose another")
            whole = (recipe.problem.typical().input.points,)
        batch = options.batch or (recipe.training.batch if gpu else CPU_BATCH)
        each = options.points or (None if gpu else min(*whole, math.ceil(CPU_POINTS ** (1 / len(whole)))))
        grid = whole if each is None else (each,) * len(whole)
        if (batch, grid) != (recipe.training.batch, whole):
            own = f"{recipe.training.batch} of {_by(whole)}"
            print(f"{name}: batch {batch} of {_by(grid)} points instead of the recipe's {own}", flush=True)
        steps = options.steps or (GPU_STEPS if gpu else CPU_STEPS)
        cases += [Case(name, device, p, c, batch, grid, steps) for p in precisions for c in modes]
    return cases


def _measured(cases: Sequence[Case]) -> Iterator[Row]:
    """A row for each case, from a process of its own; one that fails says why and the others go on."""
    for i, case in enumerate(cases, 1):
        print(f"[{i}/{len(cases)}] {_name(case)} ...", end=" ", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            numbers, failure = json.loads(done.stdout.splitlines()[-1]), ""
            print(f"{numbers['steps_per_second']:.4g} steps/s", file=sys.stderr, flush=True)
        else:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            print(f"failed\n{done.stderr}", file=sys.stderr, flush=True)
            numbers, failure = {}, lines[-1]
        yield Row(
            machine=machine(case.device),
            torch=torch_version(),
            recipe=case.recipe,
            precision=case.precision,
            compiled=case.compiled,
            batch=case.batch,
            points=_by(case.grid),
            steps=case.steps,
            failure=failure,
            **numbers,
        )


def measure(case: Case) -> dict[str, float]:
    """Train for some steps on random data, and time them."""
    import torch

    from oformer.models import Operator
    from oformer.recipes import recipe_named
    from oformer.training.optimizers import Descent

    recipe, device = recipe_named(case.recipe), torch.device(case.device)
    gpu = device.type == "cuda"
    if gpu and device.index is not None:
        torch.cuda.set_device(device)  # the marks below go into the stream of the current device
    before = resident_mib()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if case.precision == "float32" else "high")
    spec = recipe.data_spec()
    if spec.grid is not None:
        spec = dataclasses.replace(spec, grid=tuple(case.grid))
    operator = Operator(recipe.model.build(spec), recipe.normalization).to(device).train()
    operator.autocast = torch.bfloat16 if case.precision == "bfloat16" else None
    if case.compiled:
        operator.model.compile()
    descent, settings = Descent(operator, recipe.training.optimizer), recipe.training
    batch = random_batch(spec, case.batch, device, math.prod(case.grid))

    def step(number: int) -> None:
        value, _ = settings.loss(operator, batch, spec.out_times)
        value.backward()
        descent.step(*settings.schedule.at(number, settings.steps))

    for number in range(WARM_UP):
        step(number)
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        # Marks in the stream and one wait at the end: waiting at each step would hide that a launch overlaps work.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(case.steps + 1)]
        marks[0].record()
        for number, mark in enumerate(marks[1:]):
            step(WARM_UP + number)
            mark.record()
        torch.cuda.synchronize(device)
        times = [first.elapsed_time(last) / 1000 for first, last in itertools.pairwise(marks)]
        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        reset_peak()
        times = []
        for number in range(case.steps):
            started = time.perf_counter()
            step(WARM_UP + number)
            times.append(time.perf_counter() - started)
        peak = peak_mib() - before
    median = statistics.median(times)
    return {"steps_per_second": 1 / median, "milliseconds": 1000 * median, "peak_mib": peak}


def random_batch(spec, size: int, device, points: int):
    """Noise of the right shape as the loader hands it out: on a shared grid, or on points of each sample's own."""
    import torch

    from oformer.fields import Field, Sample, collate
    from oformer.meshes.grids import periodic_grid

    def values(times: int, channels: int, categories: int):
        noise = torch.randn(times, points, channels, device=device)
        if categories:
            noise[..., -1] = torch.randint(categories, (points,), device=device).float()
        return noise

    def query():
        # Where the points of a grid lie changes nothing about the cost, so it may be a periodic one.
        if spec.grid is not None:
            coords = periodic_grid(spec.grid, (1.0,) * spec.dim).float().to(device)
        else:
            coords = torch.rand(points, spec.dim, device=device)
        return Field.of(coords, values(1, spec.query_channels, spec.query_categories))

    shared, samples = query(), []
    for _ in range(size):
        where = shared if spec.grid is not None else query()
        known = Field(where.coords, values(spec.in_times, spec.in_channels, spec.in_categories), where.weights)
        samples.append(Sample(known, where, values(spec.out_times, spec.out_channels, 0)))
    return collate(samples)


def reset_peak() -> None:
    """Forget the largest memory so far, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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


def machine(device: str) -> str:
    """The name under which rows of this machine are compared: the processor, and on a CPU the threads."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {torch.get_num_threads()} thread(s)"


def torch_version() -> str:
    """As installed."""
    import torch

    return torch.__version__


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their speeds relative to their recipe's first one that ran: eager float32, unless excluded."""
    first: dict[str, float] = {}
    for row in rows:
        if not row.failure:
            first.setdefault(row.recipe, row.steps_per_second)
    return [dataclasses.replace(r, ratio=r.steps_per_second / first.get(r.recipe, math.nan)) for r in rows]


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    header = ("recipe", "precision", "mode", "batch", "points", "steps/s", "ms/step", "peak MiB", "ratio")
    lines: list[tuple[str, ...]] = [header]
    for r in rows:
        mode = "compiled" if r.compiled else "eager"
        numbers = (f"{r.steps_per_second:.4g}", f"{r.milliseconds:.4g}", f"{r.peak_mib:,.0f}", f"{r.ratio:.2f}")
        shown = ("failed", "-", "-", "-") if r.failure else numbers
        lines.append((r.recipe, r.precision, mode, str(r.batch), r.points, *shown))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        text.append("  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(cells)))
    text.insert(1, "  ".join("-" * w for w in widths))
    places = dict.fromkeys(f"{r.machine}; torch {r.torch}; medians of {r.steps} steps" for r in rows)
    failures = [f"failed: {_name(r)}: {r.failure}" for r in rows if r.failure]
    return "\n".join(["", *places, "", *text, *failures, ""])


def to_csv(rows: Sequence[Row]) -> str:
    """The rows for programs."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [f.name for f in dataclasses.fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return buffer.getvalue()


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file that `--out` wrote."""
    from oformer.errors import InputError

    try:
        found = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        return [Row(**{f.name: _parsed(raw[f.name], f.type) for f in dataclasses.fields(Row)}) for raw in found]
    except OSError as error:
        raise InputError(f"a readable file at {path}", str(error.strerror), "Check the path") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a CSV file that --out wrote at {path}", f"another one ({error})", "Write it anew") from error


def _parsed(text: str, kind: Any) -> Any:
    return text == "True" if kind is bool else kind(text)


def compare(rows: Sequence[Row], reference: Sequence[Row]) -> tuple[str, bool]:
    """Speeds against those of a file, where machine and case are the same: the words, and whether any is slower."""
    before = {row.key: row for row in reference if math.isfinite(row.steps_per_second)}
    known = [row for row in rows if row.key in before and not row.failure]
    if not known:
        return "The reference has no row of these cases on this machine; nothing was compared.", False
    lines, slower = ["Against the reference, on the same machine:"], False
    for row in known:
        ratio = row.steps_per_second / before[row.key].steps_per_second
        slower = slower or ratio < SLOWER
        flag = "   SLOWER" if ratio < SLOWER else ""
        lines.append(f"  {ratio:.2f}x  {_name(row)}{flag}")
    if missing := len(rows) - len(known):
        lines.append(f"  {missing} row(s) without a counterpart were not compared.")
    return "\n".join(lines), slower


def _name(case: Case | Row) -> str:
    return f"{case.recipe}, {case.precision}, {'compiled' if case.compiled else 'eager'}"


def _by(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


if __name__ == "__main__":
    sys.exit(main())
