"""What a run did, as pictures and as one self-contained page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from oformer.analysis import resolution_sweep
from oformer.checkpoint import Checkpoint, arrays_of_a_call, in_python, parameter_count
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Field
from oformer.plots import lines, maps, page, style
from oformer.plots.lines import Panel, Resolution
from oformer.predict import Predictor
from oformer.training.evaluate import Errors, errors, summarize
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
    """Write RUN/report.html: settings, scores, curves, predictions, and what to do next; see `measure`."""
    seen = measure(run, test, sweep, device)
    checkpoint = seen.predictor.checkpoint
    sections: list[page.Block] = [_summary(checkpoint)]
    if seen.sweep:
        table = [(r.label, r.points, f"{r.error:.3%}") for r in seen.sweep]
        sections.append(
            page.Table(
                "Test error (mean relative L2) by resolution",
                ("looked at with", "input points", "error"),
                table,
            )
        )
    sections += [page.Picture(page.CAPTIONS[name], figure) for name, figure in pictures(seen).items()]
    sections += [
        page.Text([f"{test.card.title}. {test.card.text}"]),
        page.Code("Use it from Python:", in_python(checkpoint, str(run))),
        page.Table("Its arrays", ("array", "shape", "holds"), arrays_of_a_call(checkpoint)),
        page.Code("The recipe, complete:", json.dumps(checkpoint.recipe, indent=2)),
    ]
    path = run / "report.html"
    subtitle = f"{parameter_count(checkpoint.operator):,} parameters, step {checkpoint.step:,}"
    page.write_page(path, page.Page(checkpoint.name, subtitle, sections))
    return path


def _summary(checkpoint: Checkpoint) -> page.Table:
    scores = checkpoint.scores
    rows: list[tuple[str, str]] = []
    if "error" in scores:
        rows += [
            (f"mean error over {scores['count']} test samples", f"{scores['error']:.3%}"),
            ("median error", f"{scores['median']:.3%}"),
            ("worst error", f"{scores['worst']:.3%}"),
        ]
    if checkpoint.recipe and checkpoint.recipe["paper"]:
        rows.append(("in the paper", checkpoint.recipe["paper"]))
    rows += [(name, str(value)) for name, value in checkpoint.provenance.items() if value is not None]
    return page.Table("The run (errors are relative L2, in physical units)", ("", "value"), rows)
