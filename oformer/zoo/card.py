"""What is said of trained weights: a card, as numbers (card.json) and as a page (README.md).

Errors are those of the weights as they are shipped, on the test split, in physical units, computed in float32.
"""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, get_type_hints

from oformer.checkpoint import MODEL_CARD as CARD
from oformer.checkpoint import WEIGHTS, Checkpoint, how_to_use
from oformer.config import differences, to_json
from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.experiments.published import ROWS, Row
from oformer.experiments.recipes import RECIPES
from oformer.fields import Card
from oformer.files import read_json
from oformer.metrics import Resolution
from oformer.models import Operator
from oformer.training.evaluate import Scores, evaluate, resolution_sweep
from oformer.training.loop import WITHOUT_EFFECT
from oformer.training.recipe import Recipe
from oformer.zoo.traits import Trait, worst_count

PLUS = "-plus"  # ends the name of a variant that is better than the faithful recipe at equal size and data
SHARES = (0.95, 0.75, 0.5, 0.25)  # of the input points: those of the paper's appendix C


@dataclass(frozen=True)
class DataRecord:
    """Which samples the weights were trained and measured on."""

    title: str
    seed: int
    train: int
    test: int
    checksum: str | None  # SHA-256 over the files that it was trained on; None where the run did not write it down
    test_checksum: str  # SHA-256 over the values of the test samples; other processors may round otherwise


@dataclass(frozen=True)
class SeedRun:
    """One of the runs behind a card, with its float32 weights."""

    seed: int
    steps: int
    minutes: float
    hardware: str
    journal: str  # its file beside the card
    scores: Scores


@dataclass(frozen=True)
class Averaged:
    """The error of the mean of predictions under exact symmetries."""

    symmetries: int
    error: float


@dataclass(frozen=True)
class Fresh:
    """Errors on fresh samples: those after the test split in number, of the same problem and seed."""

    first: int  # number of the first one
    by_sample: tuple[float, ...]  # relative L2 errors
    traits: tuple[Trait, ...]  # properties of the samples beside their errors; first what sets the worst apart most

    @property
    def mean(self) -> float:
        """The mean error."""
        return statistics.fmean(self.by_sample)

    @property
    def median(self) -> float:
        """The median error."""
        return self.percentile(50)

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.by_sample)

    @property
    def worst_sample(self) -> int:
        """The number of the sample with the largest error."""
        return self.first + self.by_sample.index(self.worst)

    def percentile(self, share: int) -> float:
        """See `percentile`."""
        return percentile(self.by_sample, share)


def percentile(errors: Sequence[float], share: int) -> float:
    """The smallest of the errors that at least so many percent of them do not exceed."""
    return sorted(errors)[-(-len(errors) * share // 100) - 1]


@dataclass(frozen=True)
class ModelCard:
    """All that a card says."""

    name: str
    command: str  # that trains it
    paper: str  # the row of the paper that it repeats
    parameters: int
    storage: Literal["float32", "float16"]  # of the weights
    precision: str  # of the arithmetic in training
    torch: str
    data: DataRecord
    scores: Scores  # of the shipped weights
    by_sample: tuple[float, ...]  # relative L2 errors in the order of the test split
    views: tuple[Resolution, ...]  # errors at other resolutions and from sparse input
    not_measured: dict[str, str]  # what is missing there, and why
    averaged: Averaged | None
    fresh: Fresh | None  # None where only the test split was measured
    seeds: tuple[SeedRun, ...]  # the first is the one that is shipped
    files: dict[str, str]  # SHA-256 of what lies beside the card
    licence: str = "MIT"

    @classmethod
    def of(cls, content: dict[str, Any]) -> "ModelCard":
        """From what `dataclasses.asdict` made of it."""
        content = {"paper": "", "fresh": None, **content}  # which older cards do not have
        averaged, fresh = content["averaged"], content["fresh"]
        seeds = (SeedRun(**{**run, "scores": Scores.of(run["scores"])}) for run in content["seeds"])
        return cls(
            **{
                **content,
                "data": DataRecord(**content["data"]),
                "scores": Scores.of(content["scores"]),
                "by_sample": tuple(content["by_sample"]),
                "views": tuple(Resolution(**row) for row in content["views"]),
                "averaged": Averaged(**averaged) if averaged else None,
                "fresh": _fresh_of(fresh) if fresh else None,
                "seeds": tuple(seeds),
            }
        )

    @property
    def with_weights(self) -> bool:
        """Whether the weights lie beside the card."""
        return WEIGHTS in self.files

    def expected(self, samples: int | None = None, *, fresh: bool = False) -> float:
        """The mean error of the first test samples; by default of all of them.

        Args:
            samples: their number.
            fresh: the same of the fresh samples.
        """
        kind, errors, mean = "test", self.by_sample, self.scores.error
        if fresh:
            if self.fresh is None:
                raise InputError(
                    f"a card with errors on fresh samples for {self.name}",
                    "one with the test split alone",
                    f"Measure them: oformer zoo measure {self.name}",
                )
            kind, errors, mean = "fresh", self.fresh.by_sample, self.fresh.mean
        if samples is None or samples == len(errors):
            return mean
        if not 1 <= samples <= len(errors):
            raise InputError(f"1 to {len(errors)} {kind} samples", str(samples))
        if len(self.scores.mean_squared) > 1:
            raise InputError(
                f"all {kind} samples where there are several channels, whose units are measured over all of them",
                f"the first {samples}",
                "Leave the number out",
            )
        return statistics.fmean(errors[:samples])


def _fresh_of(content: dict[str, Any]) -> Fresh:
    traits = tuple(Trait(**trait) for trait in content["traits"])
    return Fresh(content["first"], tuple(content["by_sample"]), traits)


def read_card(folder: Path) -> ModelCard:
    """The card of a folder."""
    content = read_json(folder / CARD)
    try:
        return ModelCard.of(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"a card of this version in {folder / CARD}", f"another ({error})", "Make it again: oformer zoo add RUN"
        ) from error


def other_views(
    operator: Operator,
    test: PointDataset,
    *,
    finer: PointDataset | None = None,
    shares: Sequence[float] = SHARES,
    batch: int = 16,
    trained_error: float | None = None,
) -> tuple[tuple[Resolution, ...], dict[str, str]]:
    """Errors at half and double resolution and from sparse input; and what could not be measured, with the reason.

    Args:
        operator: trained.
        test: the test split, under the view it was trained on.
        finer: the same samples at twice the trained resolution, for data that are not stored so finely.
        shares: of the input points.
        batch: samples at once.
        trained_error: the mean error on the test split as it is, where it was measured already.
    """
    rows = resolution_sweep(operator, test, shares, batch, trained_error)
    trained, full = test.spec.grid, test.source_spec.grid
    if trained is None or full is None:
        return tuple(rows), dict.fromkeys(("half resolution", "double resolution"), "the points are no regular grid")
    missing: dict[str, str] = {}
    measured = {row.points for row in rows if row.kind == "resolution"}
    for name, factor in (("half resolution", 0.5), ("double resolution", 2.0)):
        wanted = tuple(round(n * factor) for n in trained)
        if math.prod(wanted) in measured:
            continue
        grid = _nearest_grid(full, trained, factor, test.spec.periods is not None)
        if factor > 1 and finer is not None:
            source, grid = finer, finer.spec.grid or wanted
        elif grid is None:
            missing[name] = f"the data have {_words(full)} points"
            continue
        else:
            source = test.with_view(dataclasses.replace(test.view, points=grid))
            if max(abs(m / (n * factor) - 1) for m, n in zip(grid, trained, strict=True)) > 0.05:
                missing[name] = f"the nearest grid in the data has {_words(grid)} points"
        error = evaluate(operator, source, batch).error
        rows.append(Resolution(f"{_words(grid)} points", math.prod(grid), error, "resolution"))
    rows.sort(key=lambda row: (row.kind == "sparse", 0 if row.kind == "sparse" else row.points))
    return tuple(rows), missing


def _nearest_grid(
    full: tuple[int, ...], trained: tuple[int, ...], factor: float, periodic: bool
) -> tuple[int, ...] | None:
    """The grid in the data that is next to `factor` times the trained one, on the same side of it; None without any."""
    found = []
    for n, m in zip(full, trained, strict=True):
        possible = {-(-n // stride) for stride in range(1, n + 1) if not periodic or n % stride == 0}
        beyond = [p for p in possible if (p > m) == (factor > 1) and p != m and p > 1]
        if not beyond:
            return None
        found.append(min(beyond, key=lambda p: abs(p - factor * m)))
    return tuple(found)


def _words(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))


def values_checksum(test: PointDataset) -> str:
    """SHA-256 over the values of the samples as they are stored, whatever files they came in."""
    digest = hashlib.sha256()
    for sample in test.with_view(View()):
        for values in (sample.input.values, sample.target):
            digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def training_command(recipe: Recipe) -> str:
    """The command that trains a recipe, with the settings in which it differs from the named one."""
    name = recipe.name
    if name not in RECIPES:
        return f"oformer train RECIPE.py, of your own `{name}`"
    words = ["oformer train", name]
    for where, before, after in differences(to_json(RECIPES[name]), to_json(recipe)):
        group, _, setting = where.rpartition(".")
        if where in ("name", "paper") or (group == "training" and setting in WITHOUT_EFFECT):
            continue
        if isinstance(before, dict) or isinstance(after, dict):
            words.append(f"(and another {where})")  # a whole group of settings, which no option names
            continue
        option = where.replace("_", "-")
        if get_type_hints(type(reduce(getattr, group.split("."), RECIPES[name])))[setting] is bool:
            words.append(f"--{option}" if after else f"--{group.replace('_', '-')}.no-{setting.replace('_', '-')}")
        else:
            words += [f"--{option}", *map(str, _flat(after))]
    return " ".join(words)


def _flat(value: Any) -> list[Any]:
    """The numbers and words of lists in lists, as options spell them."""
    return [part for item in value for part in _flat(item)] if isinstance(value, list | tuple) else [value]


def measured(row: Row, scores: Scores) -> float:
    """What a row of the paper measures, in its unit, from our scores."""
    near, squares = scores.momentum, None
    if row.scale and len(scores.mean_squared) == len(row.scale):
        squares = [error / scale**2 for error, scale in zip(scores.mean_squared, row.scale, strict=True)]
    if row.quantity == "relative L2":
        error = scores.error
    elif row.quantity == "squared error of potential" and squares is not None:
        error = squares[0]
    elif row.quantity == "squared error of field" and squares is not None:
        error = statistics.fmean(squares[1:])
    elif row.quantity == "relative momentum" and near is not None:
        error = near.relative
    elif row.quantity == "density times momentum" and near is not None:
        error = near.as_released
    else:
        raise InputError(f"scores of {row.recipe} with its {row.quantity}", "others", "Add the run to the zoo again")
    return error / row.unit


def _rows_of_their_own(card: ModelCard) -> list[Row]:
    """The rows of the paper that a card repeats, of those that measure something else than relative L2."""
    return [row for row in ROWS if row.recipe == card.name.removesuffix(PLUS) and row.quantity != "relative L2"]


def headline(card: ModelCard) -> str:
    """The test error of a card in a few words: relative L2 in percent, or else what the paper's row measures."""
    rows = _rows_of_their_own(card)
    if not rows:
        return f"{card.scores.error:.4%}"
    power = {1.0: "", 1e-2: "e-2", 1e-3: "e-3"}
    errors = (row.number(measured(row, card.scores)) + power[row.unit] for row in rows)
    return f"{'squared' if 'squared' in rows[0].quantity else 'momentum'} {', '.join(errors)}"


def card_page(card: ModelCard, checkpoint: Checkpoint | None = None) -> str:
    """The card as a page for people: what the operator predicts, how well, how to call it; then how it was made.

    Args:
        card: its numbers.
        checkpoint: of the shipped weights, if they are.
    """
    sections = [_opening(card, checkpoint), _errors(card)]
    if card.fresh is not None and card.fresh.traits:
        sections.append(_worst_samples(card.fresh))
    sections.append(_points(card))
    if len(card.seeds) > 1:
        sections.append(_seeds(card))
    sections.append(_origin(card))
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _opening(card: ModelCard, checkpoint: Checkpoint | None) -> list[str]:
    """What the operator predicts, its error, and how to call it."""
    title, error = card.data.title, f"**Test error:** {_error_in_a_line(card)}."
    if checkpoint is None:
        story = f"Problem: {title}. The weights are not shipped; `{card.command}` trains them again."
        return [f"# {card.name}", "", story, "", error]
    spec, names = checkpoint.operator.spec, checkpoint.data or Card(title)
    known = _channels(names.inputs or ("the input",), spec.in_times)
    wanted = _channels(names.targets or ("the target",), spec.out_times)
    return [
        f"# {card.name}",
        "",
        f"Predicts {wanted} from {known}. Both may lie at any points of the domain; "
        "[the error depends on the input points](#error-at-other-input-points).",
        "",
        error,
        "",
        *how_to_use(checkpoint, card.name),
        "",
        "Values are in physical units; the normalization is part of the weights.",
        "",
        "## Problem",
        "",
        f"{title}. {names.text}".strip(),
    ]


def _channels(names: Sequence[str], frames: int) -> str:
    """The channels of a field in words."""
    words = ", ".join(names) if len(names) <= 4 else f"{len(names)} channels"
    return words if frames == 1 else f"{frames} frames of {words}"


def _error_in_a_line(card: ModelCard) -> str:
    """The mean errors of the test split and of the fresh samples."""
    parts = [f"relative L2 {_percent(card.scores.error)}, mean over {card.scores.count:,} test samples"]
    if card.fresh is not None:
        fresh = card.fresh
        parts.append(
            f"over {len(fresh.by_sample):,} fresh samples {_percent(fresh.mean)}, at worst {_percent(fresh.worst)}"
        )
    if rows := _rows_of_their_own(card):
        numbers = (f"{row.quantity} {row.number(measured(row, card.scores))}{row.multiple}" for row in rows)
        parts.append(f"as the paper measures it, {' and '.join(numbers)}")
    return "; ".join(parts)


def _percent(error: float) -> str:
    return f"{100 * error:.3g}%"


def _errors(card: ModelCard) -> list[str]:
    scores, fresh = card.scores, card.fresh
    rows = [
        ("samples", f"{scores.count:,}", fresh and f"{len(fresh.by_sample):,}"),
        ("mean", f"{scores.error:.4e}", fresh and f"{fresh.mean:.4e}"),
        ("standard error of the mean", _standard_error(card.by_sample), fresh and _standard_error(fresh.by_sample)),
        ("median", f"{scores.median:.4e}", fresh and f"{fresh.median:.4e}"),
        ("99th percentile", f"{percentile(card.by_sample, 99):.4e}" if len(card.by_sample) >= 100 else "",
         fresh and f"{fresh.percentile(99):.4e}"),
        ("worst", f"{scores.worst:.4e} (sample {scores.worst_sample})",
         fresh and f"{fresh.worst:.4e} (sample {fresh.worst_sample})"),
        ("mean of batch means, as the released code", f"{scores.batch_mean:.4e}", ""),
        *((name, value, "") for name, value in _further_errors(card)),
    ]  # fmt: skip
    width = 2 if fresh is None else 3
    head = ("", "test split", "fresh samples")[:width]
    lines = ["## Errors", "", "Relative L2 errors in physical units, computed in float32.", ""]
    lines += ["| " + " | ".join(head) + " |", "|---" + "|---:" * (width - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row[:width])) + " |" for row in rows if any(row[1:width])]
    if len(scores.by_step) > 1:
        steps = range(1, len(scores.by_step) + 1)
        lines += ["", "| predicted step | mean error |", "|---:|---:|"]
        lines += [f"| {step} | {error:.4g} |" for step, error in zip(steps, scores.by_step, strict=True)]
    if fresh is not None:
        last = fresh.first + len(fresh.by_sample) - 1
        lines += [
            "",
            f"Fresh samples are the samples {fresh.first:,} to {last:,} of data seed {card.data.seed}: after those of "
            "training and test, and of the same law as the test samples. Errors above the worst of them are rarer, not "
            "impossible.",
        ]
    return lines


def _standard_error(errors: Sequence[float]) -> str:
    return f"{statistics.stdev(errors) / math.sqrt(len(errors)):.1e}" if len(errors) > 1 else ""


def _worst_samples(fresh: Fresh) -> list[str]:
    """What sets the samples with the largest errors apart."""
    count, first = worst_count(len(fresh.by_sample)), fresh.traits[0]
    lines = [
        "## Which samples have the largest errors",
        "",
        f"The {count} worst of the {len(fresh.by_sample):,} fresh samples differ from the others most in the "
        f"{first.name}: its median is {first.worst:.3g} among them and {first.typical:.3g} among all.",
        "",
        f"| property | median of all | median of the {count} worst | rank correlation with the error |",
        "|---|---:|---:|---:|",
    ]
    return lines + [f"| {trait.name} | {trait.typical:.3g} | {trait.worst:.3g} | {trait.correlation:+.2f} |"
                    for trait in fresh.traits]  # fmt: skip


def _points(card: ModelCard) -> list[str]:
    lines = ["## Error at other input points", "", "| input | points | mean error |", "|---|---:|---:|"]
    lines += [f"| {row.label}{' (trained)' * (row.kind == 'trained')} | {row.points:,} | {row.error:.4e} |"
              for row in card.views]  # fmt: skip
    return lines + [f"| {name} | | not measured: {why} |" for name, why in card.not_measured.items()]


def _seeds(card: ModelCard) -> list[str]:
    errors = [run.scores.error for run in card.seeds]
    lines = [
        "## Error by training seed",
        "",
        "| training seed | mean error | minutes | journal |",
        "|---:|---:|---:|---|",
    ]
    lines += [f"| {run.seed} | {run.scores.error:.4e} | {run.minutes:.1f} | [{run.journal}]({run.journal}) |"
              for run in card.seeds]  # fmt: skip
    spread = statistics.stdev(errors)
    return [*lines, "", f"Mean {statistics.fmean(errors):.4e}, standard deviation {spread:.1e}; float32 weights."]


def _origin(card: ModelCard) -> list[str]:
    """How the weights were made, and checksums."""
    shipped, data = card.seeds[0], card.data
    rows = [
        ("trained by", f"`{card.command}`"),
        ("in the paper", card.paper or "no such row"),
        ("parameters", f"{card.parameters:,}, in {card.storage}" + " (not shipped)" * (not card.with_weights)),
        ("data", f"{data.title}: {data.train:,} training and {data.test:,} test samples, data seed {data.seed}"),
        ("training", f"{shipped.steps:,} steps, seed {shipped.seed}, {card.precision}, torch {card.torch}"),
        ("hardware", f"{shipped.hardware}, {shipped.minutes:.1f} minutes"),
        ("licence", card.licence),
        ("SHA-256 of the data", f"`{data.checksum}`" if data.checksum else "not recorded"),
        ("SHA-256 of the test values", f"`{data.test_checksum}`"),
    ]
    lines = ["## Training and data", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    if card.with_weights:
        check = (
            f"`oformer evaluate zoo:{card.name}` makes the test samples again and compares their error with this card."
        )
        lines += ["", check]
    return lines


def _further_errors(card: ModelCard) -> list[tuple[str, str]]:
    """Rows of the table of errors that only some operators have."""
    scores, rows = card.scores, []
    if card.storage == "float16":
        full = card.seeds[0].scores.error
        rows.append(("mean with the weights in float32", f"{full:.4e} (float16 costs {scores.error / full - 1:+.2%})"))
    if card.averaged is not None:
        rows.append((f"mean, averaged over {card.averaged.symmetries} symmetries", f"{card.averaged.error:.4e}"))
    if scores.mean_squared_scaled is not None and len(scores.mean_squared_scaled) > 1:
        squares = ", ".join(f"{error:.4g}" for error in scores.mean_squared_scaled)
        rows.append(("mean squared error of each channel, on unit scale", squares))
    if scores.momentum is not None:
        near = scores.momentum
        rows += [
            ("momentum near the foil, relative", f"{near.relative:.4e}"),
            ("momentum near the foil, root mean square error", f"{near.rmse:.4g} kg/(m2 s)"),
            (
                "density times momentum near the foil, mean over batches, as the released code",
                f"{near.as_released:.4g}",
            ),
        ]
    return rows
