"""What a run did, as pictures and as one self-contained page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oformer.checkpoint import Checkpoint, arrays_of_a_call, in_python, parameter_count
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Field
from oformer.metrics import Resolution
from oformer.plots import lines, maps, page, style
from oformer.plots.lines import Panel
from oformer.predict import Predictor
from oformer.training.evaluate import Errors, errors, resolution_sweep, summarize
from oformer.training.journal import read_journal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def typical_samples(found: Errors) -> dict[str, int]:
    """The samples worth a look: the best, the median and the worst."""
    order = found.relative.argsort().tolist()
    return {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}


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
    found = errors(predictor.operator, test)
    if sweep is None:
        sweep = resolution_sweep(predictor.operator, test, trained_error=summarize(found).error)
    return Measured(run, test, predictor, found, sweep)


def _panels(seen: Measured) -> list[Panel]:
    panels = []
    for label, index in typical_samples(seen.found).items():
        sample = seen.test[index]
        answer = seen.predictor(sample.input, sample.query, sample.target.shape[0])
        panels.append(Panel(f"{label} of {len(seen.found.relative)}", sample, answer.values))
    return panels


def pictures(seen: Measured) -> dict[str, "Figure"]:
    """The figures of a run by name: its curves, and on a line its predictions and errors by resolution."""
    figures = {"training": lines.loss_curves(read_journal(seen.run))}
    test = seen.test
    card, panels = test.card, _panels(seen)
    known = card.inputs[card.picture.input] if card.inputs else "input"
    wanted = card.targets[card.picture.target] if card.targets else "target"
    if test.spec.dim == 1:
        figures["predictions"] = lines.solutions(panels, input=known, target=wanted)
    elif test.spec.dim == 2:
        what = _what_to_draw(test)
        figures["predictions"] = maps.solutions(
            panels, input=known, target=wanted, input_channel=card.picture.input, **what
        )
        if test.spec.out_times > 1:
            figures["frames"] = maps.frames(panels[1], **what)
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
    maps.animation(path, _panels(seen)[1], **_what_to_draw(seen.test))


def _what_to_draw(test: PointDataset) -> dict[str, Any]:
    """The arguments that all maps share."""
    grid, picture = test.spec.grid, test.card.picture
    return {
        "grid": None if grid is None else (grid[0], grid[1]),
        "channel": picture.target,
        "names": test.card.targets,
        "arrows": picture.vector,
        "window": picture.window,
    }


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

    def drawn(*names: str) -> list[page.Block]:
        return [page.Picture(page.CAPTIONS[name], figures[name]) for name in names if name in figures]

    sections: list[page.Block] = [
        *_under("Predictions", drawn("predictions", "frames", "by-step")),
        *_under("Other resolutions", [*_resolutions(seen.sweep), *drawn("by-resolution")]),
        *_under("Training", drawn("training")),
        page.Heading("Use"),
        page.Code("Load the operator in Python:", in_python(checkpoint, str(run))),
        page.Table("Arrays of the call", ("array", "shape", "holds"), arrays_of_a_call(checkpoint)),
        page.Heading("Problem"),
        page.Text(f"{test.card.title}. {test.card.text}"),
        page.Heading("Settings and provenance"),
        page.Table("The run", ("", "value"), _provenance(checkpoint)),
        page.Code("The complete recipe:", json.dumps(checkpoint.recipe, indent=2)),
        *_checksums(checkpoint),
    ]
    path = run / "report.html"
    page.write_page(path, page.Page(checkpoint.name, _result(seen), sections))
    return path


def _result(seen: Measured) -> str:
    """The errors of the test split in one line."""
    scores, many = summarize(seen.found), len(seen.found.relative) != 1
    return (
        f"Relative L2 error of {scores.count:,} test sample{'s' * many}, in physical units: mean {scores.error:.3%}, "
        f"median {scores.median:.3%}, worst {scores.worst:.3%}"
    )


def _under(heading: str, blocks: list[page.Block]) -> list[page.Block]:
    """Blocks under a heading, which is left out where there are none."""
    return [page.Heading(heading), *blocks] if blocks else []


def _resolutions(sweep: Sequence[Resolution]) -> list[page.Block]:
    if not sweep:
        return []
    rows = [(row.label + " (trained)" * (row.kind == "trained"), row.points, f"{row.error:.3%}") for row in sweep]
    return [page.Table("Mean test error (relative L2) by input points", ("input", "points", "error"), rows)]


def _provenance(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """What was trained, on what and for how long, without checksums."""
    rows = [("parameters", f"{parameter_count(checkpoint.operator):,}"), ("steps", f"{checkpoint.step:,}")]
    if paper := (checkpoint.recipe or {}).get("paper"):
        rows.append(("in the paper", str(paper)))
    told = checkpoint.provenance.items()
    return rows + [(name, str(value)) for name, value in told if not _is_checksum(name) and name != "parameters"]


def _checksums(checkpoint: Checkpoint) -> list[page.Block]:
    rows = [(name, str(value)) for name, value in checkpoint.provenance.items() if _is_checksum(name)]
    return [page.Table("Checksums (SHA-256)", ("", "value"), rows)] if rows else []


def _is_checksum(name: str) -> bool:
    return name.endswith("checksum")
