"""What a run did, as pictures and as one self-contained page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oformer.analysis import resolution_sweep
from oformer.checkpoint import Checkpoint, load_checkpoint, parameter_count
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Field
from oformer.plots import lines, maps, page, style
from oformer.plots.lines import Panel, Resolution
from oformer.predict import Predictor, find_checkpoint
from oformer.training.evaluate import Errors, errors
from oformer.training.journal import read_journal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def typical_samples(found: Errors) -> dict[str, int]:
    """The samples worth a look: the best, the median and the worst."""
    order = found.relative.argsort().tolist()
    return {"best": order[0], "median": order[len(order) // 2], "worst": order[-1]}


def _panels(predictor: Predictor, test: PointDataset, found: Errors) -> list[Panel]:
    panels = []
    for label, index in typical_samples(found).items():
        sample = test[index]
        answer = predictor(sample.input, sample.query, sample.target.shape[0])
        panels.append(Panel(f"{label} of {len(found.relative)}", sample, answer.values))
    return panels


def pictures(run: Path, test: PointDataset, sweep: Sequence[Resolution] | None = None) -> dict[str, "Figure"]:
    """The figures of a run by name: its curves, and on a line its predictions and errors by resolution.

    Args:
        run: the run folder.
        test: its test split.
        sweep: errors by resolution, if they are known already.
    """
    figures = {"training": lines.loss_curves(read_journal(run))}
    predictor = Predictor(run)
    found = errors(predictor.operator, test)
    card, panels = test.card, _panels(predictor, test, found)
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
        figures["by-step"] = lines.error_by_step(found.by_step)
    rows = resolution_sweep(predictor.operator, test) if sweep is None else sweep
    if rows:
        figures["by-resolution"] = lines.error_by_resolution(rows)
    return figures


def movie(run: Path, test: PointDataset, path: Path) -> None:
    """Write the median prediction of a problem of the plane in time as a moving picture."""
    predictor = Predictor(run)
    if test.spec.dim != 2 or test.spec.out_times < 2:
        raise InputError("a problem in time and two dimensions for a movie", "another", "Draw its pictures instead")
    panel = _panels(predictor, test, errors(predictor.operator, test))[1]
    maps.animation(path, panel, **_what_to_draw(test))


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
    figure = lines.prediction(
        known, answer, input=names[0][0] if names[0] else "input", target=names[1][0] if names[1] else "prediction"
    )
    style.save_figure(path, figure)


_CAPTIONS = {
    "training": "Training loss and test error.",
    "predictions": "Best, median and worst prediction of the test split; the error beneath each, on one scale for all.",
    "frames": "The median prediction over time.",
    "by-step": "Error over time.",
    "by-resolution": "Test error when the same weights see other numbers of points.",
}


def write_report(run: Path, test: PointDataset, sweep: Sequence[Resolution] | None = None) -> Path:
    """Write RUN/report.html: settings, scores, curves, predictions, and what to do next."""
    checkpoint = load_checkpoint(find_checkpoint(run))
    rows = resolution_sweep(checkpoint.operator, test) if sweep is None else sweep
    figures = pictures(run, test, rows)
    sections: list[page.Block] = [_summary(checkpoint)]
    if rows:
        table = [(r.label, r.points, f"{r.error:.3%}") for r in rows]
        sections.append(
            page.Table(
                "Test error (mean relative L2) by resolution",
                ("looked at with", "input points", "error"),
                table,
            )
        )
    sections += [page.Picture(_CAPTIONS[name], figure) for name, figure in figures.items()]
    sections += [
        page.Text([f"{test.card.title}. {test.card.text}"]),
        page.Code("Use it from Python:", _usage(run)),
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


def _usage(run: Path) -> str:
    return (
        "from oformer import Field, Predictor\n\n"
        f'predict = Predictor("{run}")\n'
        "answer = predict(Field.of(coords, values), query_points)"
    )
