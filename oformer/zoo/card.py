"""What is said of trained weights: a card, as numbers (card.json) and as a page (README.md).

Errors are those of the weights as they are shipped, on the test split, in physical units, computed in float32.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oformer.checkpoint import WEIGHTS, Checkpoint, how_to_use
from oformer.config import differences, from_json, to_json
from oformer.errors import InputError
from oformer.experiments.published import rows_of_their_own
from oformer.experiments.recipes import RECIPES, recipe_named
from oformer.fields import Card
from oformer.files import MODEL_CARD as CARD
from oformer.files import read_json
from oformer.metrics import Resolution
from oformer.terminal import markdown_table
from oformer.training.evaluate import Scores
from oformer.training.recipe import Recipe
from oformer.training.refusals import WITHOUT_EFFECT
from oformer.zoo.traits import Trait, worst_count

SHARES = (0.95, 0.75, 0.5, 0.25)  # of the input points: those of the paper's appendix C


@dataclass(frozen=True)
class DataRecord:
    """Which samples the weights were trained and measured on."""

    title: str
    seed: int
    train: int  # those that training saw
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
    def error(self) -> float:
        """The mean error."""
        return statistics.fmean(self.by_sample)

    @property
    def median(self) -> float:
        """The median error."""
        return percentile(self.by_sample, 50)

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.by_sample)

    @property
    def worst_sample(self) -> int:
        """The number of the sample with the largest error."""
        return self.first + self.by_sample.index(self.worst)


def percentile(errors: Sequence[float], share: int) -> float:
    """The smallest of the errors that at least so many percent of them do not exceed."""
    return sorted(errors)[-(-len(errors) * share // 100) - 1]


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The content of card.json."""

    name: str
    command: str  # that trains it
    paper: str = ""  # the row of the paper that it repeats
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
    fresh: Fresh | None = None  # None where only the test split was measured
    seeds: tuple[SeedRun, ...]  # the first is the one that is shipped
    files: dict[str, str]  # SHA-256 of what lies beside the card
    licence: str = "MIT"

    @property
    def with_weights(self) -> bool:
        """Whether the weights lie beside the card."""
        return WEIGHTS in self.files

    def expected(self, samples: int | None = None, *, fresh: bool = False) -> float:
        """The mean error of the first test samples; by default of all of them.

        Args:
            samples: their number.
            fresh: take the fresh samples instead of the test samples.
        """
        kind, errors, mean = "test", self.by_sample, self.scores.error
        if fresh:
            if self.fresh is None:
                raise InputError(
                    f"a card with errors on fresh samples for {self.name}",
                    "one with the test split alone",
                    f"Measure them: oformer zoo measure {self.name}",
                )
            kind, errors, mean = "fresh", self.fresh.by_sample, self.fresh.error
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


def read_card(folder: Path) -> ModelCard:
    """The card of a folder."""
    return from_json(ModelCard, read_json(folder / CARD), str(folder / CARD))


def training_command(recipe: Recipe) -> str:
    """The command that trains a recipe, with the settings in which it differs from the named one."""
    name = recipe.name
    if name.partition("+")[0] not in RECIPES:
        return f"oformer train RECIPE.py, of your own `{name}`"
    words = ["oformer train", name]
    for where, before, after in differences(to_json(recipe_named(name)), to_json(recipe)):
        group, _, setting = where.rpartition(".")
        if where in ("name", "paper") or (group == "training" and setting in WITHOUT_EFFECT):
            continue
        if isinstance(before, dict) or isinstance(after, dict):
            words.append(f"(and another {where})")  # a whole group of settings, which no option names
            continue
        option = where.replace("_", "-")
        if isinstance(after, bool):
            words.append(f"--{option}" if after else f"--{group.replace('_', '-')}.no-{setting.replace('_', '-')}")
        else:
            words += [f"--{option}", *map(str, _flat(after))]
    return " ".join(words)


def _flat(value: Any) -> list[Any]:
    """The numbers and words of lists in lists, as options spell them."""
    return [part for item in value for part in _flat(item)] if isinstance(value, list | tuple) else [value]


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
            f"over {len(fresh.by_sample):,} fresh samples {_percent(fresh.error)}, at worst {_percent(fresh.worst)}"
        )
    if rows := rows_of_their_own(card.name):
        numbers = (f"{row.quantity} {row.number(row.measured(card.scores))}{row.multiple}" for row in rows)
        parts.append(f"as the paper measures it, {' and '.join(numbers)}")
    return "; ".join(parts)


def _percent(error: float) -> str:
    return f"{100 * error:.3g}%"


def _errors(card: ModelCard) -> list[str]:
    """The table of errors, those of each predicted step, and where fresh samples come from."""
    scores, fresh = card.scores, card.fresh
    columns = [_column(scores, card.by_sample)] + ([_column(fresh, fresh.by_sample)] if fresh else [])
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    rows += [(name, value, *[""] * (len(columns) - 1)) for name, value in _further_errors(card)]
    table = markdown_table(
        ("", "test split", "fresh samples")[: len(rows[0])], [row for row in rows if any(row[1:])], right=(1, 2)
    )
    lines = ["## Errors", "", "Relative L2 errors in physical units, computed in float32.", "", table]
    if len(scores.by_step) > 1:
        steps = [(str(step), f"{error:.4g}") for step, error in enumerate(scores.by_step, 1)]
        lines += ["", markdown_table(("predicted step", "mean error"), steps, right=(0, 1))]
    if fresh is not None:
        last = fresh.first + len(fresh.by_sample) - 1
        lines += [
            "",
            f"Fresh samples are the samples {fresh.first:,} to {last:,} of data seed {card.data.seed}: after those of "
            "training and test, and of the same law as the test samples. Errors above the worst of them are rarer, not "
            "impossible.",
        ]
    return lines


def _column(found: Scores | Fresh, errors: Sequence[float]) -> dict[str, str]:
    """Cells of the table of errors, by the name of their row; empty where there are too few samples."""
    return {
        "samples": f"{len(errors):,}",
        "mean": f"{found.error:.4e}",
        "standard error of the mean": _standard_error(errors),
        "median": f"{found.median:.4e}",
        "99th percentile": f"{percentile(errors, 99):.4e}" if len(errors) >= 100 else "",
        "worst": f"{found.worst:.4e} (sample {found.worst_sample})",
    }


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
    ]
    header = ("property", "median of all", f"median of the {count} worst", "rank correlation with the error")
    rows = [(t.name, f"{t.typical:.3g}", f"{t.worst:.3g}", f"{t.correlation:+.2f}") for t in fresh.traits]
    return [*lines, markdown_table(header, rows, right=(1, 2, 3))]


def _points(card: ModelCard) -> list[str]:
    rows = [(row.title, f"{row.points:,}", f"{row.error:.4e}")
            for row in card.views]  # fmt: skip
    rows += [(name, "", f"not measured: {why}") for name, why in card.not_measured.items()]
    return ["## Error at other input points", "", markdown_table(("input", "points", "mean error"), rows, (1, 2))]


def _seeds(card: ModelCard) -> list[str]:
    errors = [run.scores.error for run in card.seeds]
    header = ("training seed", "mean error", "minutes", "journal")
    rows = [(str(run.seed), f"{run.scores.error:.4e}", f"{run.minutes:.1f}", f"[{run.journal}]({run.journal})")
            for run in card.seeds]  # fmt: skip
    return [
        "## Error by training seed",
        "",
        markdown_table(header, rows, right=(0, 1, 2)),
        "",
        f"Mean {statistics.fmean(errors):.4e}, standard deviation {statistics.stdev(errors):.1e}; float32 weights.",
    ]


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
    lines = ["## Training and data", "", markdown_table(("", ""), rows)]
    if card.with_weights:
        check = (
            f"`oformer evaluate zoo:{card.name}` makes the test samples again and compares their error with this card."
        )
        lines += ["", check]
    return lines


def _further_errors(card: ModelCard) -> list[tuple[str, str]]:
    """Rows of the table of errors on the test split alone."""
    scores, rows = card.scores, [("mean of batch means, as the released code", f"{card.scores.batch_mean:.4e}")]
    if card.storage == "float16":
        full = card.seeds[0].scores.error
        rows.append(("mean with the weights in float32", f"{full:.4e} (float16 costs {scores.error / full - 1:+.2%})"))
    if card.averaged is not None:
        rows.append((f"mean, averaged over {card.averaged.symmetries} symmetries", f"{card.averaged.error:.4e}"))
    return rows + errors_on_meshes(scores)


def errors_on_meshes(scores: Scores, channels: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Names and values of the errors that the paper reports for problems on meshes, as far as they were measured."""
    rows, near = [], scores.momentum
    if scores.mean_squared_scaled is not None and len(scores.mean_squared_scaled) > 1:
        squares = ", ".join(f"{error:.4g}" for error in scores.mean_squared_scaled)
        rows.append((f"mean squared error of {', '.join(channels) or 'each channel'}, on unit scale", squares))
    if near is not None:
        rows += [
            ("momentum near the foil, relative", f"{near.relative:.4%}"),
            ("momentum near the foil, root mean square error", f"{near.rmse:.4g} kg/(m2 s)"),
            ("density times momentum, mean over batches, as the released code", f"{near.as_released:.4g}"),
        ]
    return rows
