"""A table or figure of the paper from nothing: data, training, errors, and a page beside the paper's numbers.

Each recipe is trained in a folder of its own, which other items share. What is there is kept, and goes on.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from oformer.checkpoint import checkpoints, load_checkpoint
from oformer.data.dataset import PointDataset
from oformer.data.generate import estimate
from oformer.errors import TrainingDiverged
from oformer.experiments.items import BASELINE_ROWS, Item
from oformer.experiments.latents import study_latents
from oformer.experiments.published import BY_SHARE, OURS, ROWS, Row
from oformer.experiments.scaled_down import scaled_down
from oformer.fields import Field, Sample, collate
from oformer.files import write_json, write_text
from oformer.meshes.grids import cell_grid
from oformer.models import Operator
from oformer.plots import lines, studies, style
from oformer.report import measure, pictures
from oformer.terminal import markdown_table, say, table
from oformer.training.evaluate import Scores, evaluate
from oformer.training.find_data import open_data, train_and_scored, train_and_test, whole_dataset
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.recipe import Recipe
from oformer.training.run import Splits

LONG = 5.0  # seconds of a step that is not timed with its whole batch on a CPU
# The header and the rows of a table, and the files of its pictures and numbers.
Shown = tuple[tuple[str, ...], list[tuple[str, ...]], list[Path]]


@dataclass(frozen=True)
class Planned:
    """A run of an item."""

    name: str  # of the recipe in the item
    recipe: Recipe  # as it is trained
    folder: Path

    @property
    def parameters(self) -> int:
        """The number of parameters of its model."""
        with torch.device("meta"):  # without memory for the numbers
            return sum(p.numel() for p in self.recipe.model.build(self.recipe.data_spec()).parameters())

    @property
    def speed(self) -> float:
        """Training steps per second, the median of its journal."""
        speeds = [record["steps_per_second"] for record in read_journal(self.folder) if record["kind"] == "train"]
        return statistics.median(speeds) if speeds else 0.0


@dataclass(frozen=True)
class Done(Planned):
    """A run that has ended."""

    scores: Scores | None  # None where training diverged
    splits: Splits  # the samples that it was trained on, and the test samples

    @property
    def error(self) -> float:
        """The mean test error; infinite where training diverged."""
        return float("inf") if self.scores is None else self.scores.error

    def operator(self, device: torch.device | str) -> Operator:
        """The trained operator."""
        return load_checkpoint(checkpoints(self.folder)[-1], device).operator


def plan(
    item: Item, out: Path, *, quick: bool = False, seeds: int = 1, change: Callable[[Recipe], Recipe] = lambda r: r
) -> list[Planned]:
    """The runs of an item.

    Args:
        item: the table or figure.
        out: the folder of all runs.
        quick: scaled down to minutes on a CPU.
        seeds: runs of each recipe, which differ in the seed of training.
        change: of each recipe, after it is scaled down.
    """
    runs = []
    for name in item.recipes:
        recipe = change(scaled_down(item.recipe(name)) if quick else item.recipe(name))
        shorter = f"-{recipe.training.steps}-steps" if name.partition("+")[0] in item.steps and not quick else ""
        for number in range(seeds):
            training = dataclasses.replace(recipe.training, seed=recipe.training.seed + number)
            folder = out / f"{recipe.name}{shorter}{f'-seed{training.seed}' if number else ''}"
            runs.append(Planned(name, dataclasses.replace(recipe, training=training), folder))
    return runs


def announce(runs: Sequence[Planned], datasets: Path, device: torch.device | str) -> None:
    """Print what will be made and trained, and how long training takes at most, by one timed step of each recipe."""
    say(f"Timing one step of each of {len(runs)} runs on {device}.")
    rows, total = [], 0.0
    for run in runs:
        problem, data = run.recipe.problem, run.recipe.data
        assert problem is not None
        megabytes = estimate(problem, data.train + data.test, data.storage) / 1e6
        made = "made" if whole_dataset(run.recipe, datasets) else f"{megabytes:,.0f} MB to make"
        saved = checkpoints(run.folder)
        left = run.recipe.training.steps - (int(saved[-1].name) if saved else 0)
        seconds = left * seconds_per_step(run.recipe, device) if left > 0 else 0.0
        total += seconds
        rows.append((run.recipe.name, run.recipe.describe(), made, _duration(seconds) if left > 0 else "trained"))
    table(("recipe", "training", "data", "time to train"), rows)
    at_most = " at most" * (torch.device(device).type == "cuda")  # compiled and recorded steps are faster
    say(f"About {_duration(total)} of training{at_most}, beside the data.")


def _duration(seconds: float) -> str:
    """A number of minutes, or of hours where they are more than three."""
    return f"{seconds / 3600:,.0f} h" if seconds > 3 * 3600 else f"{seconds / 60:.1f} min"


def seconds_per_step(recipe: Recipe, device: torch.device | str) -> float:
    """The duration of a training step by plain code; on a CPU, where it is long, that of one sample times the batch."""
    spec, device, count = recipe.data_spec(), torch.device(device), recipe.training.batch
    if spec.grid is None:
        assert recipe.problem is not None
        sample = PointDataset([recipe.problem.typical()], spec=recipe.problem.spec)[0]
    else:
        points = Field.of(cell_grid(spec.grid, (1.0,) * spec.dim).float())
        known = torch.randn(spec.in_times, points.points, spec.in_channels)
        target = torch.randn(spec.out_times, points.points, spec.out_channels)
        sample = Sample(points.with_values(known), points, target)
    operator = Operator(recipe.model.build(spec), recipe.normalization).to(device)

    def timed(samples: int) -> float:
        batch, begun = collate([sample] * samples).to(device), time.monotonic()
        recipe.training.loss(operator, batch, spec.out_times)[0].backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.monotonic() - begun

    timed(1)  # the first is slower
    one = timed(1)
    return one * count if device.type == "cpu" and one * count > LONG else timed(count)


def reproduce(
    item: Item, runs: Sequence[Planned], folder: Path, datasets: Path, device: torch.device | str, quiet: bool = False
) -> Path | None:
    """Make the data, train all runs, and write a table, pictures and numbers.

    Args:
        item: the table or figure.
        runs: of it.
        folder: for the page of the item.
        datasets: where generated data are kept.
        device: where to compute.
        quiet: show no progress of training.

    Returns:
        The page; None where training was interrupted, and goes on when it is called again.
    """
    done: dict[str, list[Done]] = {name: [] for name in item.recipes}
    for number, run in enumerate(runs, 1):
        say(f"{number} of {len(runs)}: {run.recipe.name} in {run.folder}")
        data = open_data(run.recipe, datasets, device=device, say=say)
        seen, test = train_and_scored(data, run.recipe), train_and_test(data, run.recipe)[1]
        settings, scores = run.recipe.training, None
        try:
            outcome = train(run.recipe, run.folder, seen, device=device, quiet=quiet)
            if not outcome.finished:
                return None
            scores = outcome.scores
            if run.recipe.data.validation:  # which training has scored
                scores = evaluate(outcome.operator, test, settings.batch, region=settings.loss.region)
        except TrainingDiverged as diverged:
            say(f"{run.recipe.name}: {diverged}")
        done[run.name].append(Done(run.name, run.recipe, run.folder, scores, (seen[0], test)))
    header, rows, files = SHOWN[item.kind](item, done, folder, device)
    table(header, rows)
    images = [f"![{path.stem}]({path.relative_to(folder).as_posix()})" for path in files if path.suffix == ".png"]
    about = ["Scaled down: these numbers show that each step works, and nothing about the models."]
    about *= runs[0].recipe.name.endswith("-quick")
    page = folder / "README.md"
    write_text(page, "\n\n".join([f"# {item.title}", *about, markdown_table(header, rows), *images]) + "\n")
    write_json(folder / "runs.json", [
        {"recipe": run.recipe.name, "run": run.folder.name, "seed": run.recipe.training.seed,
         "parameters": run.parameters, "steps_per_second": run.speed, "scores": run.scores and run.scores.to_json()}
        for group in done.values() for run in group
    ])  # fmt: skip
    return page


def _spread(numbers: Sequence[float], digits: int) -> str:
    """The mean, and the standard deviation where there are several."""
    several = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{several}"


def _cost(runs: Sequence[Done]) -> tuple[str, str]:
    return f"{runs[0].parameters:,}", f"{statistics.fmean(run.speed for run in runs):.3g}"


def _errors(item: Item, done: Mapping[str, list[Done]], *_) -> Shown:
    """Each model in each row of the paper's table, with the paper's error and ours."""
    models, rows = {BASELINE_ROWS.get(name, (name, OURS)): runs for name, runs in done.items()}, []
    for row in (row for row in ROWS if row.recipe in done):
        unprinted = [model for recipe, model in models if recipe == row.recipe and model not in row.errors]
        for model in (*row.errors, *unprinted):
            runs = models.get((row.recipe, model))
            printed = row.number(row.errors[model]) if model in row.errors else "not printed"
            here = (_measured(row, runs), *_cost(runs)) if runs else ("no recipe", "", "")
            rows.append((row.recipe, row.quantity + row.multiple, model, printed, *here))
    return ("row", "quantity", "model", "paper", "here", "parameters", "steps per second"), rows, []


def _measured(row: Row, runs: Sequence[Done]) -> str:
    found = [row.measured(run.scores) for run in runs if run.scores is not None]
    return _spread(found, row.digits) if len(found) == len(runs) else "diverged"


def _variants(item: Item, done: Mapping[str, list[Done]], folder: Path, *_) -> Shown:
    """Errors of a recipe and of its variants, and bars of them."""
    rows, groups, picture = [], {}, folder / "errors.png"
    for name, runs in done.items():
        base, _, change = name.partition("+")
        errors, unchanged = [run.error for run in runs], statistics.fmean(run.error for run in done[base])
        printed, change = f"{item.printed[name]:.4g}" if name in item.printed else "drawn only", change or "unchanged"
        here = ("diverged", "")
        if all(map(math.isfinite, errors)):
            here = _spread(errors, 5), f"{statistics.fmean(errors) / unchanged:.2f}"
            groups.setdefault(base, {})[change] = statistics.fmean(errors)
        rows.append((base, change, printed, *here, *_cost(runs)))
    style.save_figure(picture, studies.error_bars(groups))
    header = ("recipe", "change", "paper", "relative L2 error", "to unchanged", "parameters", "steps per second")
    return header, rows, [picture]


def _shares(item: Item, done: Mapping[str, list[Done]], folder: Path, device: torch.device | str) -> Shown:
    """Errors from random shares of the input points, with the paper's equal weights and with those of a quadrature."""
    rows, curves, picture = [], {}, folder / "by-share.png"
    for name, (run, *_) in done.items():
        printed = BY_SHARE["dropped points" if name.endswith("drop=on") else "all points"]
        rows.append((name, "equal (paper)", *(f"{printed[share]:.4f}" for share in item.shares)))
        operator, test = run.operator(device), run.splits[1]
        for words, weights in (("equal", "scaled"), ("quadrature", None)):
            views = [dataclasses.replace(test.view, keep=share, keep_weights=weights) for share in item.shares]
            found = [evaluate(operator, test.with_view(view), run.recipe.training.batch).error for view in views]
            rows.append((name, f"{words} (here)", *(f"{error:.4f}" for error in found)))
            curves[f"{name}, {words} weights"] = dict(zip(item.shares, found, strict=True))
    style.save_figure(picture, lines.error_by_share(curves, {f"paper, {how}": row for how, row in BY_SHARE.items()}))
    return ("trained with", "weights", *(f"{share:.0%}" for share in item.shares)), rows, [picture]


def _trend(item: Item, done: Mapping[str, list[Done]], folder: Path, *_) -> Shown:
    """The error of each predicted step."""
    steps = {name: runs[0].scores.by_step for name, runs in done.items() if runs[0].scores is not None}
    rows = [(name, f"{len(e)}", f"{e[0]:.4f}", f"{e[len(e) // 2]:.4f}", f"{e[-1]:.4f}") for name, e in steps.items()]
    style.save_figure(folder / "over-time.png", lines.error_over_time(steps))
    return ("recipe", "steps", "error of the first", "of the middle", "of the last"), rows, [folder / "over-time.png"]


def _latents(item: Item, done: Mapping[str, list[Done]], folder: Path, device: torch.device | str) -> Shown:
    """The latent study of each run."""
    rows, files = [], []
    for name, (run, *_) in done.items():
        study = study_latents(run.operator(device), *run.splits)
        rows.append((name, study.name, "drawn only", f"{study.r2:.4f}", f"{run.error:.4f}"))
        files += study.write(folder / name)
    return ("recipe", "parameter", "R² in the paper", "R² here", "relative L2 error"), rows, files


def _pictures(item: Item, done: Mapping[str, list[Done]], folder: Path, device: torch.device | str) -> Shown:
    """Predictions of the best, the median and the worst test sample of each run."""
    rows, files = [], []
    for name, (run, *_) in done.items():
        for share in item.shares:
            test, given = run.splits[1], f"-from-{100 * share:.0f}-percent" * (share < 1)
            view = dataclasses.replace(test.view, keep=share, keep_weights="scaled")
            seen = measure(run.folder, test.with_view(view), [], device)
            files.append(folder / f"{name}{given}.png")
            style.save_figure(files[-1], pictures(seen)["predictions"])
            rows.append((name, f"{share:.0%}", f"{float(seen.found.relative.mean()):.4f}"))
    return ("recipe", "input points", "relative L2 error"), rows, files


SHOWN = {
    "errors": _errors, "variants": _variants, "shares": _shares, "trend": _trend, "latents": _latents,
    "pictures": _pictures,
}  # fmt: skip
