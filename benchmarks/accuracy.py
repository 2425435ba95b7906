"""Whether the fast ways of training learn as well as plain float32: short runs of recipes, each with several seeds.

    python benchmarks/accuracy.py                                 # ns2-part and burgers-2048, plain and as recipes say
    python benchmarks/accuracy.py --ways plain recipe tf32        # in another precision too
    python benchmarks/accuracy.py --names burgers-2048 --jobs 3   # three runs at once on one card
    python benchmarks/accuracy.py --datasets elsewhere --out mine.csv

Each run trains as `oformer train` does, in a process of its own: the recipe's schedule shrunk to fewer steps, and one
evaluation at the end. A run whose result is in the file is not repeated, so that the same command goes on after an
interruption. Ways are compared by Welch's t, the difference of the means m over the seeds relative to its deviation,

    t = (m - m') / sqrt(s^2 / n + s'^2 / n'),

with s the standard deviation over n seeds; p is the probability that seeds alone make so large a difference.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from run import (
    HERE,
    PLAIN_CODE,
    PRECISIONS,
    check_counts,
    chosen_device,
    in_process,
    machine,
    read_rows,
    to_csv,
)

from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.files import write_text
from oformer.terminal import say, table
from oformer.training.find_data import open_data, train_and_test
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.recipe import Recipe
from oformer.training.step import used_precision

RESULTS = HERE / "accuracy.csv"
NAMES = ("ns2-part", "burgers-2048")
PLAIN, AS_IT_IS = "plain", "recipe"
WAYS = (PLAIN, AS_IT_IS, *PRECISIONS)
SEEDS = (1, 2, 3)
STEPS, BATCH = 600, 8
MARKS = 20  # times that a run is timed; the first half compiles, records and grows the horizon, and does not count
HEADS = ("recipe", "steps", "way", "precision", "seeds", "test error", "deviation", "difference", "t", "p", "ms/step")
WORDS = 4  # of the heads are words, the others numbers


@dataclass(frozen=True)
class Run:
    """What is trained, in one process."""

    name: str  # of the recipe, or its file
    way: str  # plain: float32, nothing compiled, recorded or fused; recipe: as it says; or that in another precision
    seed: int
    steps: int
    batch: int
    device: str
    datasets: str

    def recipe(self) -> Recipe:
        """The recipe, shortened and changed."""
        recipe = recipe_named(self.name)
        rarely = {"evaluate_every": self.steps, "checkpoint_every": self.steps, "patience": None}
        often = max(1, self.steps // MARKS)
        settings = dataclasses.replace(
            recipe.training, steps=self.steps, batch=self.batch, seed=self.seed, log_every=often, **rarely
        )
        if self.way == PLAIN:
            settings = dataclasses.replace(settings, precision="float32", compile=False, capture=False, recompute=False)
        elif self.way != AS_IT_IS:
            settings = dataclasses.replace(settings, precision=self.way)
        return dataclasses.replace(recipe, training=settings)


@dataclass(frozen=True)
class Result:
    """What came out; the columns of the CSV file."""

    machine: str
    torch: str
    recipe: str
    way: str
    precision: str  # that was computed in: float32 on a CPU
    seed: int
    steps: int
    batch: int
    jobs: int  # runs that shared the device, at most
    error: float  # the mean over the test samples of the relative L2 error
    milliseconds: float  # a step, the median of the second half
    seconds: float  # of the process, from its start to its end

    @property
    def comparable(self) -> tuple[str | int, ...]:
        """What two results must share to be compared."""
        return (self.machine, self.torch, self.recipe, self.steps, self.batch)

    @property
    def key(self) -> tuple[str | int, ...]:
        """What is not repeated."""
        return (*self.comparable, self.way, self.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, then print the table; the exit status is 1 where a run failed."""
    options = _parser().parse_args(arguments)
    if options.alone:
        print(json.dumps(trained(Run(**json.loads(options.alone)))), flush=True)
        return 0
    try:
        results = read_rows(options.out, Result) if options.out.exists() else []
        runs = planned(options)
        known = {result.key for result in results}
        missing = [run for run in runs if _result(run, options.jobs).key not in known]
        for run in {run.name: run for run in missing}.values():  # before several processes would make it
            open_data(run.recipe(), options.datasets, device=run.device, say=say)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if len(missing) < len(runs):
        say(f"{len(runs) - len(missing)} of {len(runs)} runs are in {options.out} and are not repeated.")
    failed = 0
    with contextlib.closing(_in_processes(missing, options.jobs)) as ended:
        for i, (run, numbers) in enumerate(ended, 1):
            title = f"[{i}/{len(missing)}] {run.name}, {run.way}, seed {run.seed}:"
            if isinstance(numbers, str):
                failed += 1
                print(f"{title} failed\n{numbers}", flush=True)
                continue
            result = dataclasses.replace(_result(run, options.jobs), **numbers)
            results.append(result)
            write_text(options.out, to_csv(results, Result))  # at once: whoever stops us loses only what is under way
            print(f"{title} test error {result.error:.4g}, {result.milliseconds:.3g} ms/step, {result.seconds:.0f} s",
                  flush=True)  # fmt: skip
    if results:
        print("\n".join(["", *places(results)]))
        table(HEADS, lines(results))
    return int(failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Test errors of short runs, in the fast ways and in plain float32.")
    ways = (
        f"{PLAIN}: float32, nothing compiled, recorded or fused; {AS_IT_IS}: as it says; or that in another precision"
    )
    parser.add_argument("--names", nargs="+", default=NAMES, help=f"recipes (default: {' '.join(NAMES)})")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=(PLAIN, AS_IT_IS), help=ways)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of training (default: 1 2 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default: {STEPS})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"samples per step (default: {BATCH})")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on the device (default: 1)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1... (default: a GPU if there is one)")
    parser.add_argument("--datasets", type=Path, default=Path("datasets"), help="folder of generated datasets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file of results, which grows")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # one run, for a process of its own
    return parser


def planned(options: argparse.Namespace) -> list[Run]:
    """Every run that was asked for; all ways of a seed before the next seed, so that what is there can be compared."""
    check_counts(options, ("steps", "batch", "jobs"))
    device = chosen_device(options)
    runs = [
        Run(name, way, seed, options.steps, options.batch, device, str(options.datasets))
        for name in dict.fromkeys(options.names)
        for seed in dict.fromkeys(options.seeds)
        for way in dict.fromkeys(options.ways)
    ]
    for run in runs:
        run.recipe()  # an unknown name is said before anything is trained
    return runs


def _result(run: Run, jobs: int) -> Result:
    """What is known of a result before the run."""
    recipe, unknown = run.recipe(), math.nan
    precision = used_precision(recipe.training, torch.device(run.device))
    return Result(
        machine(run.device), torch.__version__, recipe.name, run.way, precision, run.seed, run.steps, run.batch, jobs,
        unknown, unknown, unknown,
    )  # fmt: skip


def _in_processes(runs: Sequence[Run], jobs: int) -> Generator[tuple[Run, dict[str, float] | str]]:
    """Each run as it ends, with its numbers or with what it said when it failed."""
    pool = ThreadPoolExecutor(jobs)
    try:
        pending = {pool.submit(_in_process, run): run for run in runs}
        for done in as_completed(pending):
            yield pending[done], done.result()
    finally:  # Ctrl-C reaches the processes too; those that have not begun must not
        pool.shutdown(cancel_futures=True)


def _in_process(run: Run) -> dict[str, float] | str:
    started = time.monotonic()
    asked = "--alone", json.dumps(dataclasses.asdict(run))
    done = in_process(HERE / "accuracy.py", *asked, environment=PLAIN_CODE if run.way == PLAIN else {})
    if done.returncode:
        return done.stderr.strip() or f"exit status {done.returncode}"
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": time.monotonic() - started}


def trained(run: Run) -> dict[str, float]:
    """Train, here and now; the numbers of a result but for those of the process."""
    recipe = run.recipe()
    data = train_and_test(open_data(recipe, Path(run.datasets), device=run.device), recipe)
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, folder, data, device=run.device, quiet=True, tensorboard=False)
        if not outcome.finished or outcome.scores is None:
            raise SystemExit(f"stopped at step {outcome.step} by {outcome.reason}")
        speeds = [r["steps_per_second"] for r in read_journal(Path(folder)) if r["kind"] == "train"]
    return {
        "error": outcome.scores.error,
        "milliseconds": 1000 / statistics.median(speeds[len(speeds) // 2 :]),
    }


def lines(results: Sequence[Result]) -> list[list[str]]:
    """A line for each recipe and way: means over seeds, compared with those of plain, or of the first way."""
    groups: dict[tuple[str | int, ...], dict[str, list[Result]]] = {}
    for result in results:
        groups.setdefault(result.comparable, {}).setdefault(result.way, []).append(result)
    found = []
    for ways in groups.values():
        base = PLAIN if PLAIN in ways else next(iter(ways))
        for way in sorted(ways, key=lambda way: way != base):
            found.append(_line(ways[way], None if way == base else ways[base]))
    return found


def _line(chosen: Sequence[Result], base: Sequence[Result] | None) -> list[str]:
    errors = [r.error for r in chosen]
    mean, speed = statistics.fmean(errors), statistics.median(r.milliseconds for r in chosen)
    deviation = f"{statistics.stdev(errors):.2g}" if len(errors) > 1 else "-"
    compared = ["-"] * 3
    if base is not None:
        other = [r.error for r in base]
        t, p = welch(errors, other)
        compared = [f"{mean / statistics.fmean(other) - 1:+.2%}", _number(f"{t:+.2f}"), _number(f"{p:.2f}")]
    r = chosen[0]
    words = [r.recipe, f"{r.steps} of {r.batch}", r.way, r.precision]
    return [*words, str(len(errors)), f"{mean:.4g}", deviation, *compared, f"{speed:.3g}"]


def welch(errors: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Welch's t of two samples, and the probability of one as large by chance; NaN where nothing varies."""
    samples = errors, others
    if min(map(len, samples)) < 2:
        return math.nan, math.nan
    of_mean = [statistics.variance(sample) / len(sample) for sample in samples]  # variances of the two means
    if not sum(of_mean):
        return math.nan, math.nan
    from scipy.special import stdtr

    t = (statistics.fmean(errors) - statistics.fmean(others)) / math.sqrt(sum(of_mean))
    freedom = sum(of_mean) ** 2 / sum(v**2 / (len(s) - 1) for v, s in zip(of_mean, samples, strict=True))
    return t, 2 * float(stdtr(freedom, -abs(t)))


def _number(text: str) -> str:
    return "-" if "nan" in text else text


def places(results: Sequence[Result]) -> list[str]:
    """Where results came about, without repetition."""
    return list(dict.fromkeys(f"{r.machine}, torch {r.torch}, up to {r.jobs} run(s) at once" for r in results))


if __name__ == "__main__":
    sys.exit(main())
