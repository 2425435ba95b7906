"""Speed and memory of named recipes, on whatever device is there: training, prediction, growth with points and horizon.

    python benchmarks/run.py                                       # training and inference: a few minutes on a GPU
    python benchmarks/run.py --what all --out mine.csv             # everything, kept
    python benchmarks/run.py --names burgers-2048 --modes eager    # one recipe, quickly
    python benchmarks/run.py --what growth --sizes 1000 10000      # points of growth, or steps of horizon
    python benchmarks/run.py --what train --profile profiles       # also what the time of each step goes into
    python benchmarks/run.py --what ledger --out ledger.csv        # what each fused row gains; see ledger.py
    python benchmarks/run.py --against ../before --modes recipe    # this code beside other code, case by case

README.md says what is measured and what each column means. Every case runs in a fresh process (`measure.py`), so that
no case inherits another's memory or compiled code. What is slower or larger than in reference.csv is flagged.
"""

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ledger
import torch
from measure import SECTIONS, Case

from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.files import write_text
from oformer.training.step import used_precision

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "reference.csv"
NAMES = ("ns2-full", "darcy-141", "burgers-2048", "electro@16")
SEQUENCES = "ns2-full"  # the recipe of inference, growth and horizon
MODES = ("plain", "eager", "compiled", "recipe", "sparing")
PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
DEFAULT = ("train", "infer")
SLOWER, LARGER = 0.95, 1.05  # parts of the reference's speed and memory beyond which a row is flagged
# On a CPU the recipes' own sizes would take an hour: so many samples, and about so many points in all.
CPU_BATCH, CPU_POINTS, CPU_STEPS = 2, 1024, 5
GPU_STEPS = 20
REPEATS = 3
PLAIN_CODE = {"OFORMER_FUSED": "0"}  # the environment of a process without fused code
INFERENCE_BATCH = 200  # sequences, as in the paper
GROWTH = (1_000, 10_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
CPU_GROWTH = (1_000, 3_000, 10_000)
FITTED = (1e5, 1e7)  # points between which exponents are fitted
HORIZON = (1, 5, 10, 20, 40)
CPU_HORIZON = (1, 4)

Kind = TypeVar("Kind")  # of the rows of a CSV file, a dataclass of numbers and words


@dataclass(frozen=True)
class Work:
    """The work that a row is of; the first columns of the CSV files."""

    machine: str
    torch: str
    what: str
    recipe: str
    precision: str
    mode: str
    batch: int
    points: str
    times: int
    steps: int


@dataclass(frozen=True)
class Row(Work):
    """What came out; the columns of the CSV file. NaN: not measured here."""

    per_second: float = math.nan  # steps, or calls
    milliseconds: float = math.nan
    allocated_mib: float = math.nan
    reserved_mib: float = math.nan
    tflops: float = math.nan
    of_peak: float = math.nan  # of a large product of matrices in the same process and precision
    startup_seconds: float = math.nan  # from the start of the process to the end of the first step
    ratio: float = math.nan  # of the speed of the first row of the same work
    failure: str = ""

    @property
    def work(self) -> tuple[str, ...]:
        """What two rows must share for their speeds to have a ratio."""
        return (self.what, self.recipe, str(self.batch), self.points, str(self.times))

    @property
    def key(self) -> tuple[str, ...]:
        """What two rows must share to be compared."""
        return (self.machine, *self.work, self.precision, self.mode)

    @property
    def expected_end(self) -> bool:
        """Whether it only says how far growth went."""
        return self.what.startswith("growth") and self.failure == "out of memory"


@dataclass(frozen=True)
class Kernel:
    """What one kind of kernel takes of a step; the columns of a file of `--profile`."""

    machine: str
    torch: str
    recipe: str
    precision: str
    mode: str
    batch: int
    points: str
    kernel: str
    calls: float  # in a step
    microseconds: float  # likewise, all of them together


@dataclass(frozen=True)
class Comparison(Work):
    """One row of work as the code of two folders does it: medians of repeated processes; the columns of `--against`."""

    old_milliseconds: float
    new_milliseconds: float
    time_ratio: float  # new over old
    time_spread: float  # largest minus smallest of the repeats over their median, the larger of old and new
    old_mib: float  # reserved
    new_mib: float
    memory_ratio: float
    old_startup: float
    new_startup: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write, compare; the exit status is 1 where a case failed or is worse than the reference."""
    options = _parser().parse_args(arguments)
    try:
        if options.what == ["ledger"]:
            return _ledger(options)
        cases = planned(options)
        if options.against:
            return _against(cases, options)
        reference = read_rows(options.reference) if options.reference else []
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    rows = with_ratios(list(_measured(cases, options.profile)))
    print(table(rows))
    for line in exponents(rows):
        print(line)
    if options.out:
        write_text(options.out, to_csv(rows))
    verdict, worse = compare(rows, reference)
    if options.reference:
        print(verdict)
    return int(worse or any(row.failure and not row.expected_end for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Speed and memory of named recipes.")
    what = f"sections (default: {' '.join(DEFAULT)})"
    names = f"recipes to train, NAME or NAME@BATCH (default: {' '.join(NAMES)}); of the other sections the first"
    batch = f"samples per step (default: the recipe's; on a CPU {CPU_BATCH})"
    points = f"points along each axis (default: the recipe's; on a CPU about {CPU_POINTS} in all)"
    modes = "plain: eager, no fused kernels; recipe: as it trains; sparing: with recomputation (default: plain, recipe)"
    precision = "one or more (default: float32 of plain, the recipe's own of recipe)"
    sizes = "points of growth, steps in time of horizon"
    parser.add_argument("--what", nargs="+", choices=(*SECTIONS, "all", "ledger"), default=list(DEFAULT), help=what)
    parser.add_argument("--names", nargs="+", help=names)
    parser.add_argument("--device", help="cpu, cuda, cuda:1... (default: a GPU if there is one)")
    parser.add_argument("--batch", type=int, help=batch)
    parser.add_argument("--points", type=int, help=points)
    parser.add_argument("--steps", type=int, help=f"timed steps (default: {GPU_STEPS}; on a CPU {CPU_STEPS})")
    parser.add_argument("--modes", nargs="+", choices=MODES, help=modes)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help=precision)
    parser.add_argument("--sizes", nargs="+", type=int, help=sizes)
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    profile = "write the kernels of a training step, by their time, to a CSV file for each case in this folder"
    parser.add_argument("--profile", type=Path, help=profile)
    known = REFERENCE if REFERENCE.exists() else None
    parser.add_argument("--reference", type=Path, default=known, help="compare with this CSV file of --out")
    against = "measure also the code of this folder, another checkout of the repository, and print both side by side"
    parser.add_argument("--against", type=Path, metavar="FOLDER", help=against)
    repeats = f"processes for each case of --against, and for all rows on in the ledger (default: {REPEATS})"
    parser.add_argument("--repeats", type=int, default=REPEATS, help=repeats)
    group = parser.add_argument_group("only with --what ledger")
    columns = f"what to switch off, each in processes of its own (default: {' '.join(ledger.COLUMNS)})"
    group.add_argument("--rows", nargs="+", metavar="ROW", help=columns)
    group.add_argument("--works", nargs="+", choices=ledger.WORKS, default=list(ledger.WORKS), help="what to measure")
    warm = "keep what compilers cached: quicker, but start-ups cannot be compared then and are left out"
    group.add_argument("--warm", action="store_true", help=warm)
    read = "print the table of CSV files that --out wrote, and measure nothing"
    group.add_argument("--read", nargs="+", type=Path, metavar="FILE", help=read)
    return parser


def planned(options: argparse.Namespace) -> list[Case]:
    """Every case that was asked for, with what was chosen instead of the recipe's own said out loud."""
    if "ledger" in options.what:
        raise InputError(
            "--what ledger alone", f"--what {' '.join(options.what)}", "Run the other sections on their own"
        )
    if options.rows or options.read:
        raise InputError("--what ledger with --rows or --read", f"--what {' '.join(options.what)}")
    check_counts(options, ("batch", "points", "steps", "sizes", "repeats"))
    device = chosen_device(options)
    sections = list(SECTIONS) if "all" in options.what else options.what
    cases = []
    for what in sections:
        names = options.names or (NAMES if what == "train" else (SEQUENCES,))
        for name in names if what == "train" else names[:1]:
            cases += _cases(what, name, device, options)
    return cases


def check_counts(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse less than one of anything."""
    for name in names:
        given = getattr(options, name)
        if given is not None and min(given if isinstance(given, list) else [given]) < 1:
            raise InputError(f"at least 1 in --{name}", str(given))


def chosen_device(options: argparse.Namespace) -> str:
    """What `--device` says, or a GPU if there is one."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not device.startswith("cuda"):  # another kind of device needs its own clock
        raise InputError("cpu or cuda as --device", f"`{device}`")
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError(f"a GPU that torch sees for --device {device}", "none", "Use --device cpu")
    return device


def _cases(what: str, name: str, device: str, options: argparse.Namespace) -> Iterator[Case]:
    """The cases of one section and recipe."""
    gpu = device != "cpu"
    name, _, size = name.partition("@")
    recipe = recipe_named(name)
    if size and not (size.isdigit() and int(size)):
        raise InputError("a whole number of samples after @", f"`{size}`")
    whole = recipe.data_spec().grid
    if whole is None:
        if recipe.problem is None:
            raise InputError("a recipe with a problem", f"`{name}`, which has none", "Choose another")
        whole = (recipe.problem.typical().input.points,)
    own = {"infer": INFERENCE_BATCH, "growth": 1}.get(what, int(size or recipe.training.batch))
    batch = 1 if what == "growth" else options.batch or (own if gpu else min(own, CPU_BATCH))
    each = options.points or (None if gpu else min(*whole, math.ceil(CPU_POINTS ** (1 / len(whole)))))
    grid = whole if each is None else (each,) * len(whole)
    if what != "growth" and (batch, grid) != (own, whole):
        print(f"{name}: batch {batch} of {_by(grid)} points instead of {own} of {_by(whole)}", flush=True)
    sizes: tuple[int, ...] = ()
    if what in ("growth", "horizon"):
        usual = {"growth": (CPU_GROWTH, GROWTH), "horizon": (CPU_HORIZON, HORIZON)}[what][gpu]
        sizes = tuple(sorted(options.sizes or usual))
    # Many shapes would be compiled one after the other: growth is measured without.
    usual_modes = ("plain", "recipe") if not sizes else ("eager",)
    if what == "train" and recipe.data_spec().out_times > 1:  # where there is much to recompute
        usual_modes += ("sparing",)
    steps = options.steps or (GPU_STEPS if gpu else CPU_STEPS)
    for mode in options.modes or usual_modes:
        usual_precision = "float32" if mode == "plain" else used_precision(recipe.training, torch.device(device))
        for precision in options.precision or (usual_precision,):
            yield Case(what, name, device, precision, mode, batch, grid, steps, sizes, options.profile is not None)


def _measured(cases: Sequence[Case], profiles: Path | None = None) -> Iterator[Row]:
    """The rows of each case, from a process of its own; one that fails says why and the others go on."""
    for i, case in enumerate(cases, 1):
        title = f"{case.what} {case.recipe}, {case.precision}, {case.mode}"
        for numbers in _numbers(case, f"[{i}/{len(cases)}] {title}"):
            if profiles is not None and "kernels" in numbers:
                write_profile(profiles, case, numbers["kernels"])
            else:
                yield _row(case, numbers)


def _numbers(
    case: Case, title: str, folder: Path = HERE, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What the `measure.py` of a folder prints about a case in a process of its own; the last is a failure, if any."""
    print(f"{title} ...", end=" ", file=sys.stderr, flush=True)
    started = time.time()
    asked = json.dumps(dataclasses.asdict(case)), repr(started)
    changed = {**(PLAIN_CODE if case.mode == "plain" else {}), **(environment or {})}
    done = in_process(folder / "measure.py", *asked, environment=changed)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        print(f"failed\n{done.stderr}", end="", file=sys.stderr, flush=True)
        found.append({"what": case.what, "failure": lines[-1]})
    print(f"{time.time() - started:.0f} s", file=sys.stderr, flush=True)
    return found


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of a process whose compilers find nothing from earlier ones: start-ups can then be compared."""
    with tempfile.TemporaryDirectory(prefix="oformer-caches-", ignore_cleanup_errors=True) as folder:
        yield {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


def _ledger(options: argparse.Namespace) -> int:
    """Measure what each row gains, or read it; print the table; the exit status is 1 where a case failed."""
    if options.read:
        runs = [read_rows(path, ledger.Entry) for path in options.read]
    else:
        runs = [_measured_ledger(_ledger_cases(options), options)]
    lines = [line for run in runs for line in ledger.table_lines(run)]
    entries = [entry for run in runs for entry in run]
    header, *cells = ledger.table(lines)
    places = dict.fromkeys(f"{e.machine}; torch {e.torch}; medians of up to {e.steps} steps" for e in entries)
    said = [*ledger.notes(lines, entries)]
    print("\n".join(["", *places, "", *aligned([header, *cells], 3), "", *ledger.reasons(lines), "", *said]))
    if options.out and options.read:
        write_text(options.out, to_csv(entries, ledger.Entry))
    if options.out:
        sentences = [*places, "", ledger.markdown([header, *cells]), "", *(f"- {note}" for note in said), ""]
        write_text(options.out.with_suffix(".md"), "\n".join(sentences))
    return int(any(entry.failure for entry in entries))


def _ledger_cases(options: argparse.Namespace) -> list[tuple[Case, str, str]]:
    """The processes of the ledger in their order: a case, its work, and what is off in it."""
    check_counts(options, ("batch", "points", "steps"))
    columns, device = ledger.chosen_columns(options.rows), chosen_device(options)
    if options.repeats < 2:
        raise InputError("at least 2 in --repeats, from which the noise is known", str(options.repeats))
    for given, name in ((options.against, "--against"), (options.profile, "--profile"), (options.modes, "--modes")):
        if given:
            raise InputError(f"no {name} with --what ledger, which measures mode recipe", str(given))
    planned = []
    for name in options.names or ledger.NAMES:
        for work in options.works:
            for case in _cases(work, name, device, argparse.Namespace(**{**vars(options), "modes": ["recipe"]})):
                case = dataclasses.replace(case, what=f"ledger-{work}")
                planned += [(case, work, off) for off in ledger.order(columns, work, options.repeats)]
    return planned


def _measured_ledger(planned: Sequence[tuple[Case, str, str]], options: argparse.Namespace) -> list[ledger.Entry]:
    """The entries of the ledger, each from a process of its own, written after each of them."""
    entries: list[ledger.Entry] = []
    columns = {field.name for field in dataclasses.fields(ledger.Entry)}
    for i, (case, work, off) in enumerate(planned, 1):
        title = f"[{i}/{len(planned)}] {work} {case.recipe}, {case.precision}, off: {off or 'nothing'}"
        with empty_caches() if work == "train" and not options.warm else contextlib.nullcontext({}) as caches:
            found = _numbers(case, title, environment={**caches, "OFORMER_FUSED": ledger.fused(off)})
        times = recipe_named(case.recipe).data_spec().out_times
        shared = {**_shared(case), "times": times, "steps": case.steps, "work": work, "off": off}
        # A process that failed has one line more, which says why.
        numbers = {**shared, **(found[-1] if found else {"failure": "it printed no numbers"})}
        if options.warm:
            numbers.pop("startup_seconds", None)
        numbers = {name: value for name, value in numbers.items() if name in columns}
        entries = ledger.with_ratios([*entries, ledger.Entry(**numbers)])
        if options.out:
            write_text(options.out, to_csv(entries, ledger.Entry))
    return entries


def _against(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Measure the code of another folder and this one in turns; the exit status is 1 where this one is worse."""
    other = options.against.resolve()
    if not all((other / part).is_file() for part in ("oformer/__init__.py", "benchmarks/measure.py")):
        raise InputError(
            "a checkout with oformer and benchmarks/measure.py as --against", f"`{options.against}`",
            "Make one: git worktree add FOLDER COMMIT",
        )  # fmt: skip
    if options.profile:
        raise InputError("no --profile with --against", str(options.profile), "Profile each checkout on its own")
    folders, total = {"old": other, "new": HERE.parent}, 2 * len(cases) * options.repeats
    found: dict[str, list[Row]] = {name: [] for name in folders}
    done = 0
    for case in cases:
        for name, folder in list(folders.items()) * options.repeats:
            done += 1
            title = f"[{done}/{total}] {name}: {case.what} {case.recipe}, {case.precision}, {case.mode}"
            path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
            with empty_caches() as caches:
                numbers = _numbers(case, title, folder / "benchmarks", {**caches, "PYTHONPATH": path})
            found[name] += [_row(case, n) for n in numbers]
    compared = comparisons(found["old"], found["new"])
    print("\n".join(["", f"old: {other}", f"new: {HERE.parent}", *comparison_table(compared)]))
    failed = [f"{name}: {_name(r)}: {r.failure}" for name, rows in found.items() for r in rows if r.failure]
    print("\n".join(["", *dict.fromkeys(failed)]))
    if options.out:
        write_text(options.out, to_csv(compared, Comparison))
    unexpected = any(r.failure and not r.expected_end for rows in found.values() for r in rows)
    return int(unexpected or any(flags(c) for c in compared))


def comparisons(old: Sequence[Row], new: Sequence[Row]) -> list[Comparison]:
    """What both measured, row by row."""

    def repeats(rows: Sequence[Row], like: Row) -> list[Row]:
        return [r for r in rows if r.key == like.key and not r.failure]

    def spread(rows: Sequence[Row]) -> float:
        times = [r.milliseconds for r in rows]
        return (max(times) - min(times)) / statistics.median(times) if len(times) > 1 else math.nan

    found = []
    for row in {r.key: r for r in new if not r.failure}.values():
        before, now = repeats(old, row), repeats(new, row)
        if not before:
            continue
        numbers = {}
        for name, rows in (("old", before), ("new", now)):
            numbers[f"{name}_milliseconds"] = statistics.median(r.milliseconds for r in rows)
            numbers[f"{name}_mib"] = statistics.median(r.reserved_mib for r in rows)
            numbers[f"{name}_startup"] = statistics.median(r.startup_seconds for r in rows)
        shared = [f.name for f in dataclasses.fields(Work)]
        found.append(
            Comparison(
                **{name: getattr(row, name) for name in shared},
                **numbers,
                time_ratio=numbers["new_milliseconds"] / numbers["old_milliseconds"],
                time_spread=max(spread(before), spread(now)),
                memory_ratio=numbers["new_mib"] / (numbers["old_mib"] or math.nan),
            )
        )
    return found


def flags(c: Comparison) -> list[str]:
    """Whether the new code is slower beyond the noise, or on a GPU larger."""
    noise = 0.0 if math.isnan(c.time_spread) else c.time_spread
    counted = "thread(s)" not in c.machine
    slower = c.time_ratio > max(1 / SLOWER, 1 + noise)
    return ["SLOWER"] * slower + ["LARGER"] * (counted and c.memory_ratio > LARGER)


def comparison_table(compared: Sequence[Comparison]) -> list[str]:
    """The comparisons for people."""
    lines: list[tuple[str, ...]] = [
        ("what", "recipe", "precision", "mode", "batch", "points", "times", "old ms", "new ms", "new/old", "spread",
         "old MiB", "new MiB", "new/old", "old start s", "new start s", ""),
    ]  # fmt: skip
    for c in compared:
        numbers = (
            f"{c.old_milliseconds:.4g}", f"{c.new_milliseconds:.4g}", f"{c.time_ratio:.3f}", f"{c.time_spread:.1%}",
            f"{c.old_mib:,.0f}", f"{c.new_mib:,.0f}", f"{c.memory_ratio:.3f}",
            f"{c.old_startup:.1f}", f"{c.new_startup:.1f}",
        )  # fmt: skip
        shown = tuple("-" if "nan" in n else n for n in numbers)
        words = (c.what, c.recipe, c.precision, c.mode, str(c.batch), c.points, str(c.times))
        lines.append((*words, *shown, " ".join(flags(c))))
    places = dict.fromkeys(f"{c.machine}; torch {c.torch}; medians of up to {c.steps} steps" for c in compared)
    return [*places, "", *aligned(lines, 4)]


def write_profile(folder: Path, case: Case, kernels: Sequence[tuple[str, float, float]]) -> None:
    """Write the kernels of a step to a file of the case."""
    shared = _shared(case)
    found = [Kernel(**shared, kernel=name, calls=calls, microseconds=taken) for name, calls, taken in kernels]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{case.recipe}-{case.precision}-{case.mode}.csv", to_csv(found, Kernel))


def in_process(script: Path, *arguments: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """A script in a fresh process, in this environment but for what is given; with what it said."""
    changed = {**os.environ, **environment}
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=changed)


def _row(case: Case, numbers: dict[str, Any]) -> Row:
    times = recipe_named(case.recipe).data_spec().out_times
    return Row(**{**_shared(case), "times": times, "steps": case.steps, **numbers})


def _shared(case: Case) -> dict[str, Any]:
    """What all that is found of a case has in common."""
    return {
        "machine": machine(case.device),
        "torch": torch.__version__,
        "recipe": case.recipe,
        "precision": case.precision,
        "mode": case.mode,
        "batch": case.batch,
        "points": _by(case.grid),
    }


def machine(device: str) -> str:
    """The name under which rows of this machine are compared: the processor, and on a CPU the threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    return f"{name}, {torch.get_num_threads()} thread(s)"


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their speeds relative to the first one of the same work that ran: plain, unless excluded."""
    first: dict[tuple[str, ...], float] = {}
    for row in rows:
        if not row.failure:
            first.setdefault(row.work, row.per_second)
    return [dataclasses.replace(r, ratio=r.per_second / first.get(r.work, math.nan)) for r in rows]


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    header = (
        "what", "recipe", "precision", "mode", "batch", "points", "times", "per s", "ms", "MiB", "MiB reserved",
        "TFLOP/s", "of peak", "start s", "ratio",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [header]
    for r in rows:
        numbers = (
            f"{r.per_second:.4g}", f"{r.milliseconds:.4g}", f"{r.allocated_mib:,.0f}", f"{r.reserved_mib:,.0f}",
            f"{r.tflops:.3g}", f"{r.of_peak:.1%}", f"{r.startup_seconds:.1f}", f"{r.ratio:.2f}",
        )  # fmt: skip
        shown = ("failed", *"-" * 7) if r.failure else tuple("-" if "nan" in n else n for n in numbers)
        lines.append((r.what, r.recipe, r.precision, r.mode, str(r.batch), r.points, str(r.times), *shown))
    text = aligned(lines, 4)
    places = dict.fromkeys(f"{r.machine}; torch {r.torch}; medians of up to {r.steps} steps" for r in rows)
    failures = [f"{_name(r)}: {r.failure}" for r in rows if r.failure]
    return "\n".join(["", *places, "", *text, *failures, ""])


def aligned(lines: Sequence[Sequence[str]], words: int) -> list[str]:
    """A table as text: the first columns hold words, the others numbers; under the header stands a rule."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = zip(line, widths, strict=True)
        text.append("  ".join(c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip())
    text.insert(1, "  ".join("-" * w for w in widths).rstrip())
    return text


def exponents(rows: Sequence[Row]) -> list[str]:
    """How time and memory grow with the points, as powers fitted where points are many."""
    lines = []
    for what in dict.fromkeys(r.what for r in rows if r.what.startswith("growth")):
        fitted = exponent(rows, what)
        if fitted is not None:
            low, high, time_power, memory_power = fitted
            lines.append(
                f"{what}: from {low:,} to {high:,} points time grows as their power {time_power:.3f}, "
                f"memory as {memory_power:.3f}"
            )
    return lines


def exponent(rows: Sequence[Row], what: str) -> tuple[int, int, float, float] | None:
    """The fewest and most points of a series within the fitted range, and the powers of time and memory."""
    chosen = [r for r in rows if r.what == what and not r.failure and FITTED[0] <= int(r.points) <= FITTED[1]]
    points = [int(r.points) for r in chosen]
    if len(set(points)) < 2:
        return None
    powers = (_slope(points, [r.milliseconds for r in chosen]), _slope(points, [r.allocated_mib for r in chosen]))
    return min(points), max(points), *powers


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line that fits best on logarithmic axes."""
    if min(y) <= 0:
        return math.nan
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    middle, height = sum(a) / len(a), sum(b) / len(b)
    return sum((u - middle) * (v - height) for u, v in zip(a, b, strict=True)) / sum((u - middle) ** 2 for u in a)


def to_csv(rows: Sequence[Any], kind: type = Row) -> str:
    """Rows of a kind for programs."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [f.name for f in dataclasses.fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return buffer.getvalue()


def read_rows(path: Path, kind: type[Kind] = Row) -> list[Kind]:
    """The rows of a CSV file that `--out` wrote."""
    columns: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    try:
        found = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
        return [kind(**{name: made(raw[name]) for name, made in columns.items()}) for raw in found]
    except OSError as error:
        raise InputError(f"a readable file at {path}", str(error.strerror), "Check the path") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"a CSV file that --out wrote at {path}", f"another one ({error})", "Name another, or write it anew"
        ) from error


def compare(rows: Sequence[Row], reference: Sequence[Row]) -> tuple[str, bool]:
    """Speed and memory against those of a file, where machine and case are the same; whether any is worse."""
    before = {row.key: row for row in reference if not row.failure}
    known = [row for row in rows if row.key in before and not row.failure]
    if not known:
        return "The reference has no row of these cases on this machine; nothing was compared.", False
    lines, worse = ["Speed and memory relative to the reference, on the same machine:"], False
    for row in known:
        speed = row.per_second / before[row.key].per_second
        memory = row.reserved_mib / max(before[row.key].reserved_mib, 1e-9)
        # What a process on a CPU takes from the system differs from run to run; what torch takes of a card does not.
        counted = "thread(s)" not in row.machine
        flags = ["SLOWER"] * (speed < SLOWER) + ["LARGER"] * (counted and memory > LARGER)
        worse = worse or bool(flags)
        lines.append(f"  {speed:.2f}x  {memory:.2f}x  {_name(row)}" + "   ".join(["", *flags]))
    if missing := len(rows) - len(known):
        lines.append(f"  {missing} row(s) without a counterpart were not compared.")
    return "\n".join(lines), worse


def _name(r: Row) -> str:
    return f"{r.what} {r.recipe}, {r.batch} of {r.points} points, {r.times} step(s), {r.precision}, {r.mode}"


def _by(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


if __name__ == "__main__":
    sys.exit(main())
