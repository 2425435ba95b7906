"""What a run did, as pictures and as one self-contained page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oformer.checkpoint import Checkpoint, arrays_of_a_call, in_python, parameter_count
from oformer.data.dataset import PointDataset
from oformer.engine.runners import runner_of
from oformer.errors import InputError
from oformer.fields import Field
from oformer.files import write_text
from oformer.metrics import Resolution
from oformer.plots import lines, maps, page, style
from oformer.predict import Predictor
from oformer.training.evaluate import Errors, errors, resolution_sweep, summarize
from oformer.training.journal import read_journal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Measured:
    """A run and its errors: all that its pictures and its report are made of."""

    run: Path
    test: PointDataset
    predictor: Predictor
    found: Errors
    sweep: Sequence[Resolution]  # errors by resolution


def measure(
    run: Path,
    test: PointDataset,
    sweep: Sequence[Resolution] | None = None,
    device: torch.device | str | None = None,
) -> Measured:
    """Predict the test split of a run, and see it at other resolutions.

    Args:
        run: the run folder.
        test: its test split.
        sweep: errors by resolution, if they are known already.
        device: where to predict; by default a GPU if there is one.
    """
    predictor = Predictor(run, device, warn=False)  # what it does not know is measured here
    found = errors(runner_of(predictor.checkpoint), test)
    if sweep is None:
        sweep = resolution_sweep(runner_of(predictor.checkpoint), test, trained_error=summarize(found).error)
    return Measured(run, test, predictor, found, sweep)


def _panels(seen: Measured) -> list[lines.Panel]:
    """The samples with the smallest, the median and the largest error, and their predictions."""
    panels, order = [], seen.found.relative.argsort().tolist()
    for label, index in (("best", order[0]), ("median", order[len(order) // 2]), ("worst", order[-1])):
        sample = seen.test[index]
        answer = seen.predictor(sample.input, sample.query, times=sample.target.shape[0])
        panels.append(lines.Panel(f"{label} of {len(order)}", sample, answer.values))
    return panels


def pictures(seen: Measured) -> dict[str, "Figure"]:
    """The figures of a run by name: its curves, and on a line its predictions and errors by resolution."""
    figures = {"training": lines.loss_curves(read_journal(seen.run))}
    test = seen.test
    card, panels = test.card, _panels(seen)
    known = card.inputs[card.picture.input] if card.inputs else "input"
    wanted = _target(test) or "target"
    if test.spec.dim == 1:
        figures["predictions"] = lines.solutions(panels, input=known, target=wanted)
    elif test.spec.dim == 2:
        grid = _grid(test)
        figures["predictions"] = maps.solutions(panels, grid, input=known, target=wanted, picture=card.picture)
        if test.spec.out_times > 1:
            figures["frames"] = maps.frames(panels[1], grid, target=_target(test), picture=card.picture)
    if test.spec.out_times > 1:
        figures["by-step"] = lines.error_by_step(seen.found.by_step)
    if seen.sweep:
        figures["by-resolution"] = lines.error_by_resolution(seen.sweep)
    return figures


def movie(seen: Measured, path: Path) -> None:
    """Write the median prediction of a problem of the plane in time as a moving picture."""
    spec = seen.test.spec
    if spec.dim != 2 or spec.out_times < 2:
        raise InputError("a problem in time and two dimensions for a movie", "another", "Draw its pictures instead")
    test = seen.test
    maps.animation(path, _panels(seen)[1], _grid(test), target=_target(test), picture=test.card.picture)


def _grid(test: PointDataset) -> tuple[int, int] | None:
    return None if test.spec.grid is None else (test.spec.grid[0], test.spec.grid[1])


def _target(test: PointDataset) -> str:
    """The name of the target channel that is drawn; empty if channels have none."""
    return test.card.targets[test.card.picture.target] if test.card.targets else ""


def draw_prediction(predictor: Predictor, known: Field, answer: Field, path: Path) -> None:
    """Draw a prediction without a truth to compare it with."""
    card = predictor.checkpoint.data
    names = (card.inputs, card.targets) if card else ((), ())
    draw = lines.prediction if predictor.spec.dim == 1 else maps.prediction
    input, target = names[0][0] if names[0] else "input", names[1][0] if names[1] else "prediction"
    style.save_figure(path, draw(known, answer, input=input, target=target))


def write_report(
    run: Path,
    test: PointDataset,
    sweep: Sequence[Resolution] | None = None,
    device: torch.device | str | None = None,
) -> Path:
    """Write RUN/report.html: result, predictions, other resolutions, curves, how to use it, settings; see `measure`."""
    seen = measure(run, test, sweep, device)
    checkpoint, figures = seen.predictor.checkpoint, pictures(seen)

    def drawn(*names: str) -> list[str]:
        return [page.picture(page.CAPTIONS[name], figures[name]) for name in names if name in figures]

    told, sums = _provenance(checkpoint)
    blocks = [
        *_under("Predictions", drawn("predictions", "frames", "by-step")),
        *_under("Other resolutions", [*_resolutions(seen.sweep), *drawn("by-resolution")]),
        *_under("Training", drawn("training")),
        page.heading("Use"),
        page.code("Load the operator in Python:", in_python(checkpoint, str(run))),
        page.table("Arrays of the call", ("array", "shape", "holds"), arrays_of_a_call(checkpoint)),
        page.heading("Problem"),
        page.paragraph(f"{test.card.title}. {test.card.text}"),
        page.heading("Settings and provenance"),
        page.table("The run", ("", "value"), told),
        page.code("The complete recipe:", json.dumps(checkpoint.recipe, indent=2)),
        *([page.table("Checksums (SHA-256)", ("", "value"), sums)] if sums else []),
    ]
    path = run / "report.html"
    write_text(path, page.page_html(checkpoint.name, _result(seen), blocks))
    return path


def _result(seen: Measured) -> str:
    """The errors of the test split in one line."""
    scores, many = summarize(seen.found), len(seen.found.relative) != 1
    return (
        f"Relative L2 error of {scores.count:,} test sample{'s' * many}, in physical units: mean {scores.error:.3%}, "
        f"median {scores.median:.3%}, worst {scores.worst:.3%}"
    )


def _under(heading: str, blocks: list[str]) -> list[str]:
    """Blocks under a heading, which is left out where there are none."""
    return [page.heading(heading), *blocks] if blocks else []


def _resolutions(sweep: Sequence[Resolution]) -> list[str]:
    rows = [(row.title, f"{row.points:,}", f"{row.error:.3%}") for row in sweep]
    return [page.table("Mean test error (relative L2) by input points", ("input", "points", "error"), rows)] * bool(
        rows
    )


def _provenance(checkpoint: Checkpoint) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Rows about the training (its data, duration, hardware, versions), and rows of checksums."""
    told = [("parameters", f"{parameter_count(checkpoint.operator):,}"), ("steps", f"{checkpoint.step:,}")]
    if paper := (checkpoint.recipe or {}).get("paper"):
        told.append(("in the paper", str(paper)))
    sums: list[tuple[str, str]] = []
    for name, value in checkpoint.provenance.items():
        if name != "parameters":
            (sums if name.endswith("checksum") else told).append((name, str(value)))
    return told, sums
