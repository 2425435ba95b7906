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

from oformer.analysis import resolution_sweep
from oformer.checkpoint import MODEL_CARD as CARD
from oformer.checkpoint import WEIGHTS, Checkpoint, how_to_use
from oformer.config import differences, to_json
from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.files import read_json
from oformer.models import Operator
from oformer.plots.lines import Resolution
from oformer.recipes import RECIPES
from oformer.training.evaluate import Scores, evaluate
from oformer.training.loop import WITHOUT_EFFECT
from oformer.training.recipe import Recipe

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
class ModelCard:
    """All that a card says."""

    name: str
    command: str  # that trains it
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
    seeds: tuple[SeedRun, ...]  # the first is the one that is shipped
    files: dict[str, str]  # SHA-256 of what lies beside the card
    licence: str = "MIT"

    @classmethod
    def of(cls, content: dict[str, Any]) -> "ModelCard":
        """From what `dataclasses.asdict` made of it."""
        averaged = content["averaged"]
        seeds = (SeedRun(**{**run, "scores": Scores.of(run["scores"])}) for run in content["seeds"])
        return cls(
            **{
                **content,
                "data": DataRecord(**content["data"]),
                "scores": Scores.of(content["scores"]),
                "by_sample": tuple(content["by_sample"]),
                "views": tuple(Resolution(**row) for row in content["views"]),
                "averaged": Averaged(**averaged) if averaged else None,
                "seeds": tuple(seeds),
            }
        )

    @property
    def with_weights(self) -> bool:
        """Whether the weights lie beside the card."""
        return WEIGHTS in self.files

    def expected(self, samples: int | None = None) -> float:
        """The mean error that the first so many test samples must have; by default that of all."""
        if samples is None or samples == len(self.by_sample):
            return self.scores.error
        if not 1 <= samples <= len(self.by_sample):
            raise InputError(f"1 to {len(self.by_sample)} test samples", str(samples))
        if len(self.scores.mean_squared) > 1:
            raise InputError(
                "all test samples where there are several channels, whose units are measured over the split",
                f"the first {samples}",
                "Leave the number out",
            )
        return statistics.fmean(self.by_sample[:samples])


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


def card_page(card: ModelCard, paper: str = "", checkpoint: Checkpoint | None = None) -> str:
    """The card as a page for people.

    Args:
        card: its numbers.
        paper: the row of the paper that it repeats.
        checkpoint: of the shipped weights, if they are.
    """
    shipped, scores, data = card.seeds[0], card.scores, card.data
    rows = [
        ("trained by", f"`{card.command}`"),
        ("in the paper", paper or "no such row"),
        ("parameters", f"{card.parameters:,}, in {card.storage}" + " (not shipped)" * (not card.with_weights)),
        ("data", f"{data.title}: {data.train:,} + {data.test:,} samples, data seed {data.seed}"),
        ("SHA-256 of the data", f"`{data.checksum or 'not written down'}`"),
        ("SHA-256 of the test values", f"`{data.test_checksum}`"),
        ("training", f"{shipped.steps:,} steps, seed {shipped.seed}, {card.precision}, torch {card.torch}"),
        ("hardware", f"{shipped.hardware}, {shipped.minutes:.1f} minutes"),
    ]
    lines = [f"# {card.name}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    lines += ["", "## Errors", "", "Relative L2 on the test split, in physical units, arithmetic in float32.", ""]
    lines += ["| | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in _error_rows(card))]
    if len(scores.by_step) > 1:
        lines += ["", "By step: " + ", ".join(f"{error:.4g}" for error in scores.by_step) + "."]
    lines += ["", "## Other points", "", "| looked at with | input points | error |", "|---|---:|---:|"]
    lines += [f"| {row.label}{' (trained)' * (row.kind == 'trained')} | {row.points:,} | {row.error:.4e} |"
              for row in card.views]  # fmt: skip
    lines += [f"| {name} | | not measured: {why} |" for name, why in card.not_measured.items()]
    if len(card.seeds) > 1:
        errors = [run.scores.error for run in card.seeds]
        lines += ["", "## Seeds", "", "| training seed | error | minutes | journal |", "|---:|---:|---:|---|"]
        lines += [f"| {run.seed} | {run.scores.error:.4e} | {run.minutes:.1f} | [{run.journal}]({run.journal}) |"
                  for run in card.seeds]  # fmt: skip
        spread = statistics.stdev(errors)
        lines += ["", f"Mean {statistics.fmean(errors):.4e}, standard deviation {spread:.1e}; float32 weights."]
    if checkpoint is None:
        return "\n".join([*lines, "", f"{card.licence} licence."]) + "\n"
    lines += [
        "",
        "## Use",
        "",
        *how_to_use(checkpoint, card.name),
        "",
        f"`oformer evaluate zoo:{card.name}` makes the test samples again and compares. Values are in physical units;",
        f"the normalization is part of the weights. {card.licence} licence.",
    ]
    return "\n".join(lines) + "\n"


def _error_rows(card: ModelCard) -> list[tuple[str, str]]:
    scores = card.scores
    rows = [
        (f"mean over {scores.count} samples", f"{scores.error:.4e}"),
        ("median", f"{scores.median:.4e}"),
        (f"worst (sample {scores.worst_sample})", f"{scores.worst:.4e}"),
        ("mean of batch means, as the released code", f"{scores.batch_mean:.4e}"),
    ]
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
            ("the same times density, mean over batches, as the released code", f"{near.as_released:.4g}"),
        ]
    return rows
