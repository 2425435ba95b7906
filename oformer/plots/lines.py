"""Figures of curves: solutions in one dimension, losses, and how errors change with resolution and with time.

Functions take fields and arrays and return figures; they know nothing of models.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Sample
from oformer.metrics import Resolution, relative_l2
from oformer.plots import style

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

FEW = 100  # up to so many input points are drawn one by one: the reader sees what the model saw
COLUMNS = 3  # panels side by side
ERROR = "relative L2 error"


@dataclass(frozen=True)
class Panel:
    """One sample and what was predicted for it, in physical units."""

    title: str  # "best", "median", "worst", or what makes this sample worth a look
    sample: Sample  # without a batch axis
    prediction: Float[Tensor, "times queries channels"]

    def __post_init__(self) -> None:
        shape = tuple(self.sample.target.shape)
        if len(shape) != 3 or self.prediction.shape != shape:
            raise InputError(
                f"one sample and a prediction of the target's shape {shape}",
                str(tuple(self.prediction.shape)),
                "Predict one sample of a batch, at its own query points",
            )

    def error(self, time: int, channel: int) -> float:
        """The relative L2 error of one frame and channel alone."""
        answer, truth = (v[None, time, None, :, channel, None].double() for v in (self.prediction, self.sample.target))
        return relative_l2(answer, truth, self.sample.query.weights[None].double()).item()


def check_dimension(panels: Sequence[Panel], dim: int, advice: str) -> None:
    """Refuse an empty figure, and panels of a dimension that it cannot draw."""
    if not panels:
        raise InputError("at least one sample to draw", "none")
    for panel in panels:
        found = panel.sample.query.coords.shape[-1]
        if found == 3:
            advice = "Write it for ParaView: answer.to_vtu('answer.vtu', cells)"
        if found != dim:
            raise InputError(f"samples of a {dim}-D problem to draw", f"{found} dimension(s)", advice)


def solutions(
    panels: Sequence[Panel],
    *,
    input: str = "input",
    target: str = "truth",
    time: int = -1,
    channel: int = 0,
) -> "matplotlib.figure.Figure":
    """Input, truth and prediction of several samples side by side, with the error beneath each.

    All panels share their scales, so that a large error looks large. Points may come in any order; padding is
    left out.

    Args:
        panels: what to draw, in reading order.
        input: the name of the input.
        target: the name of what is predicted.
        time: which frame of target and prediction; the printed error is that of this frame and channel alone.
        channel: which channel.
    """
    check_dimension(panels, 1, "Fields in two dimensions are drawn by plots.maps")
    counts = sorted(n for panel in panels if (n := int((panel.sample.input.weights > 0).sum())) <= FEW)
    few = "" if not counts else f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    input, target = style.plain(input), style.plain(target)
    names = (f"{input} (input)", f"{input} ({few} input points)", f"{target} (truth)")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    with style.styled():
        # A lone panel would be a letterbox at full width.
        figure = style.new_figure(0.6 + 2.9 * rows, style.WIDTH if columns > 1 else 4.8)
        axes: list[tuple[matplotlib.axes.Axes, matplotlib.axes.Axes]] = []
        grid = figure.add_gridspec(2 * rows, columns, height_ratios=[2.4, 1] * rows)
        for i, panel in enumerate(panels):
            row, column = divmod(i, columns)
            first = axes[0] if axes else (None, None)
            upper = figure.add_subplot(grid[2 * row, column], sharey=first[0])
            lower = figure.add_subplot(grid[2 * row + 1, column], sharex=upper, sharey=first[1])
            axes.append((upper, lower))
            _draw_solution(upper, lower, panel, names, time, channel)
            # More numbers would touch the next panel's, and so would a longer title.
            style.round_ticks(upper, 3 if columns > 1 else 6)
            upper.set_title(style.plain(panel.title), size=min(10.5, 205 * 3 / columns / max(len(panel.title), 1)))
            upper.tick_params(labelbottom=False, labelleft=column == 0)
            lower.tick_params(labelleft=column == 0)
            if column == 0:
                upper.set_ylabel(target)
                lower.set_ylabel("error")
            if i + columns >= len(panels):
                lower.set_xlabel("x")
        largest = max(abs(limit) for _, lower in axes for limit in lower.dataLim.intervaly)
        # Room above for the printed number; a perfect prediction has a scale too.
        axes[0][1].set_ylim(-1.15 * (largest or 1.0), 1.6 * (largest or 1.0))
        # Every kind of line once, whichever panel has it.
        lines = {str(line.get_label()): line for upper, _ in axes for line in upper.get_lines()}
        order = [name for name in (*names, "prediction") if name in lines]
        style.legend_above(figure, {name: lines[name] for name in order})
        figure.align_ylabels()
    return figure


def _draw_solution(
    upper: "matplotlib.axes.Axes",
    lower: "matplotlib.axes.Axes",
    panel: Panel,
    names: tuple[str, str, str],
    time: int,
    channel: int,
) -> None:
    sample = panel.sample
    known, exists = sample.input, sample.query.weights > 0
    truth, prediction = sample.target[time, :, channel], panel.prediction[time, :, channel]
    # The answer follows the last known frame.
    given = _sorted(known.coords[known.weights > 0, 0], known.values[-1, known.weights > 0, 0])
    x, expected = _sorted(sample.query.coords[exists, 0], truth[exists])
    _, answered = _sorted(sample.query.coords[exists, 0], prediction[exists])

    if len(given[0]) <= FEW:
        dots = {"linestyle": "none", "marker": "o", "markersize": 3.2, "markeredgewidth": 0}
        upper.plot(*given, color=style.INPUT, label=names[1], **dots)
    else:
        upper.plot(*given, color=style.INPUT, linewidth=1.1, label=names[0])
    # The truth is a wide pale band on which a good prediction lies as a thin dark line.
    upper.plot(x, expected, color=style.TRUTH, linewidth=4.2, alpha=0.75, label=names[2])
    upper.plot(x, answered, color=style.PREDICTION, linewidth=1.3, label="prediction")

    lower.axhline(0, color="#B6BCC3", linewidth=0.8)
    lower.fill_between(x, answered - expected, color=style.PREDICTION, alpha=0.18, linewidth=0)
    lower.plot(x, answered - expected, color=style.PREDICTION, linewidth=1.1)
    text = f"relative L2  {style.percent(panel.error(time, channel))}"
    lower.text(0.02, 0.97, text, transform=lower.transAxes, va="top", size=8.5, color=style.INK)


def prediction(
    known: Field, answer: Field, *, input: str = "input", target: str = "prediction", channel: int = 0
) -> "matplotlib.figure.Figure":
    """The input and what was predicted from it, on a line; several frames go from pale to dark.

    Args:
        known: the input, without a batch axis.
        answer: the prediction, without a batch axis.
        input: the name of the input.
        target: the name of what is predicted.
        channel: which channel of the prediction.
    """
    if answer.coords.ndim != 2 or answer.coords.shape[-1] != 1:
        raise InputError(
            "one prediction on a line to draw",
            f"coordinates of shape {tuple(answer.coords.shape)}",
            "Fields in more dimensions need maps",
        )
    with style.styled():
        figure = style.new_figure(3.4, 4.8)
        axes = figure.add_subplot()
        given = _sorted(known.coords[:, 0], known.values[-1, :, 0])
        axes.plot(*given, color=style.INPUT, linewidth=1.1, label=style.plain(input))
        frames = answer.values[..., channel]
        for i, frame in enumerate(frames, 1):
            last = i == len(frames)
            line = _sorted(answer.coords[:, 0], frame)
            label = style.plain(target) if last else None
            axes.plot(*line, color=style.PREDICTION, alpha=0.25 + 0.75 * i / len(frames), label=label)
        axes.set_xlabel("x")
        axes.legend(frameon=False)
    return figure


def _sorted(coords: Float[Tensor, " points"], values: Float[Tensor, " points"]) -> tuple[np.ndarray, np.ndarray]:
    """Values along the line, as arrays."""
    order = coords.argsort(stable=True)
    return coords[order].detach().cpu().double().numpy(), values[order].detach().cpu().double().numpy()


def loss_curves(records: Sequence[Mapping[str, Any]]) -> "matplotlib.figure.Figure":
    """Training loss, test or validation error, and learning rate of a run, from the records of its journal.

    Args:
        records: of every kind; those of other kinds than `train` and `evaluate` are passed over.
    """
    train = [r for r in records if r.get("kind") == "train" and r.get("loss") is not None]
    tests = [r for r in records if r.get("kind") == "evaluate" and r.get("error") is not None]
    with style.styled():
        figure = style.new_figure(4.0)
        if not train and not tests:
            figure.text(0.5, 0.5, "nothing recorded yet", ha="center", va="center", color=style.MUTED, size=11)
            return figure
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
        if train:
            steps, losses = _columns(train, "loss")
            upper.plot(steps, losses, color=style.PREDICTION, alpha=0.3, linewidth=0.9)
            upper.plot(steps, smoothed(losses), color=style.PREDICTION, linewidth=2, label="training loss")
            lower.plot(*_columns(train, "rate"), color=style.MUTED, linewidth=1.4)
            lower.set_ylim(bottom=0)
        if tests:
            steps, errors = _columns(tests, "error")
            label = f"{tests[-1].get('split', 'test')} error"
            upper.plot(steps, errors, color=style.TEST, marker="o", markersize=5, label=label)
            # The last error stands at its point: it is the number that people look for.
            look: dict[str, Any] = {"color": style.TEST, "weight": "bold", "path_effects": style.halo()}
            last = style.percent(errors[-1])
            upper.annotate(last, (steps[-1], errors[-1]), (0, -16), textcoords="offset points", ha="right", **look)
        upper.set_ylabel("loss, relative error")
        style.log_scale(upper, "y")
        upper.legend(loc="upper right", ncols=2)
        upper.margins(y=0.12)
        upper.tick_params(labelbottom=False)
        lower.set_ylabel("rate")
        lower.set_xlabel("training step")
        style.round_ticks(lower, whole=True)
        lower.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        figure.align_ylabels()
    return figure


def _columns(records: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and numbers; what is missing is a gap in the line."""
    numbers = [math.nan if r.get(name) is None else float(r[name]) for r in records]
    return np.array([r["step"] for r in records], dtype=float), np.array(numbers)


def smoothed(values: Float[np.ndarray, " records"]) -> Float[np.ndarray, " records"]:
    """The noise taken off: a straight line fitted to the logarithms around each record.

    A line instead of a mean, so that the ends of a falling curve are not bent: an exponential stays as it is.

    Args:
        values: positive; others are left out of the fits.
    """
    count = len(values)
    half = max(3, round(0.05 * count))  # the window holds a tenth of all records
    positions = np.arange(count, dtype=float)
    valid = np.isfinite(values) & (values > 0)
    logs = np.log(np.where(valid, values, 1.0))
    result = np.full(count, np.nan)
    for i in np.flatnonzero(valid):
        # At an end the window moves inward and stays as wide.
        start = max(0, min(i - half, count - 2 * half - 1))
        near = slice(start, start + 2 * half + 1)
        x, y = positions[near][valid[near]] - i, logs[near][valid[near]]
        x_mean, y_mean = x.mean(), y.mean()
        spread = np.square(x - x_mean).sum()
        slope = ((x - x_mean) * (y - y_mean)).sum() / spread if spread else 0.0
        result[i] = math.exp(y_mean - slope * x_mean)
    return result


def error_by_resolution(rows: Sequence[Resolution]) -> "matplotlib.figure.Figure":
    """The error against the number of points a model is given, on grids and on sparse random points.

    Args:
        rows: in any order.
    """
    every = sorted(rows, key=lambda row: row.points)
    if not every:
        raise InputError("at least one row to draw", "none")
    grids = [r for r in every if r.kind != "sparse"]
    trained = [r for r in every if r.kind == "trained"]
    sparse = [r for r in every if r.kind == "sparse"]
    with style.styled():
        figure = style.new_figure(3.6)
        ax = figure.subplots()
        for row in trained:
            ax.axvline(row.points, color=style.TEST, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        _mark(ax, grids, "whole grid", color=style.PREDICTION, linestyle="-", marker="o", markersize=5.5)
        _mark(ax, trained, "trained here", color=style.TEST, marker="D", markersize=9)
        hollow = {"marker": "^", "markersize": 8, "markerfacecolor": "white"}
        _mark(ax, sparse, "random points", color=style.SPARSE, **hollow)
        middle = math.sqrt(every[0].points * every[-1].points)
        for row in sparse:
            # Toward the middle, where there is room.
            offset, side = ((8, 3), "left") if row.points <= middle else ((-8, 5), "right")
            look: dict[str, Any] = {"size": 8.5, "color": style.MUTED, "path_effects": style.halo()}
            label, place = textwrap.fill(style.plain(row.label), 16), (row.points, row.error)
            ax.annotate(label, place, offset, textcoords="offset points", ha=side, **look)
        _scale_errors(ax, [r.error for r in every])
        style.log_scale(ax, "x", _ticks([r.points for r in grids], [r.points for r in sparse]))
        ax.margins(x=0.1, y=0.12)
        ax.set_xlabel("input points")
        ax.set_ylabel(ERROR)
        ax.legend(loc="best")
    return figure


def _mark(axis: "matplotlib.axes.Axes", rows: Sequence[Resolution], label: str, **look: Any) -> None:
    if rows:
        look = {"linestyle": "none", "markeredgewidth": 1.6, **look}
        axis.plot([r.points for r in rows], [r.error for r in rows], label=label, **look)


def _ticks(first: Sequence[int], others: Sequence[int]) -> list[float]:
    """The numbers of points themselves; where two would touch on a log scale, the first come."""
    ticks: list[float] = []
    for points in (*first, *others):
        if all(max(points / tick, tick / points) > 1.18 for tick in ticks):
            ticks.append(float(points))
    return sorted(ticks)


def _scale_errors(axis: "matplotlib.axes.Axes", errors: Sequence[float]) -> None:
    """Percentages from zero where the errors are alike, on a log scale where they differ several times."""
    positive = [e for e in errors if math.isfinite(e) and e > 0]
    if positive and max(positive) > 5 * min(positive):
        style.log_scale(axis, "y")
    elif positive:
        axis.set_ylim(0, 1.3 * max(positive))
    axis.yaxis.set_major_formatter(lambda share, _: style.percent(share))


def error_by_step(errors: Float[Tensor, "samples times"]) -> "matplotlib.figure.Figure":
    """How the error grows with time: the median over samples, in a band that holds four of five of them.

    Args:
        errors: one row per sample.
    """
    table = errors.detach().cpu().double().numpy()
    if not table.size:
        raise InputError("the errors of at least one sample and step", f"an array of shape {table.shape}")
    finite, x = np.isfinite(table).all(1), np.arange(1, table.shape[1] + 1)
    with style.styled():
        figure = style.new_figure(3.4)
        ax = figure.subplots()
        if finite.any():
            low, middle, high = np.quantile(table[finite], [0.1, 0.5, 0.9], axis=0)
            if finite.sum() > 1:
                band = f"80% of {finite.sum()} samples"
                ax.fill_between(x, low, high, color=style.PREDICTION, alpha=0.18, linewidth=0, label=band)
            marker = "o" if len(x) <= 40 else None
            name = "median" if finite.sum() > 1 else "one sample"
            ax.plot(x, middle, color=style.PREDICTION, marker=marker, markersize=4, label=name)
            _scale_errors(ax, [low.min(), high.max()])
            ax.legend(loc="upper left")
        if not finite.all():
            # Left out of the quantiles, never out of sight.
            text = f"{(~finite).sum()} of {len(table)} samples are not finite"
            ax.text(0.99, 0.03, text, transform=ax.transAxes, ha="right", color=style.MUTED)
        style.round_ticks(ax, whole=True)
        ax.set_xlabel("step")
        ax.set_ylabel(ERROR)
    return figure


# Of curves in one figure: told apart by color, by marker and by dash, and alike only after forty-two of them.
_COLORS = (style.PREDICTION, style.SPARSE, style.TEST, style.TRUTH, style.INK, style.MUTED)
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def error_over_time(errors: Mapping[str, Sequence[float]]) -> "matplotlib.figure.Figure":
    """How the mean error of each of several operators grows with time (the paper's figure of temporal trends).

    Args:
        errors: of each predicted step, by the name of the operator.
    """
    curves = {name: {float(i): error for i, error in enumerate(steps, 1)} for name, steps in errors.items()}
    figure = _curves(curves, {}, "step")
    style.round_ticks(figure.axes[0], whole=True)
    return figure


def error_by_share(
    errors: Mapping[str, Mapping[float, float]],
    others: Mapping[str, Mapping[float, float]] | None = None,
    *,
    axis: str = "share of the input points that is given",
) -> "matplotlib.figure.Figure":
    """The error of several operators against the share of the input points that they are given.

    Args:
        errors: by share, in (0, 1], and by the name of the operator.
        others: likewise, of published operators to compare with; gray and dotted.
        axis: the name of that axis, in one or several lines.
    """
    own, beside = ({name: dict(sorted(row.items())) for name, row in rows.items()} for rows in (errors, others or {}))
    wrong = [share for row in (*own.values(), *beside.values()) for share in row if not 0 < share <= 1]
    if wrong:
        raise InputError("shares above 0 and at most 1", f"{wrong[0]:g}")
    figure = _curves(own, beside, axis)
    figure.axes[0].set_xticks([0.25, 0.5, 0.75, 1.0])
    figure.axes[0].xaxis.set_major_formatter(lambda share, _: style.percent(share))
    return figure


def _curves(
    curves: Mapping[str, Mapping[float, float]],
    others: Mapping[str, Mapping[float, float]],
    axis: str,
) -> "matplotlib.figure.Figure":
    """One line of errors for each name, with one legend; those of others gray and dotted."""
    if not any(curves.values()):
        raise InputError("at least one curve to draw", "none")
    with style.styled():
        figure = style.new_figure(3.6)
        ax = figure.subplots()
        looks = [(_COLORS[i % 6], _MARKERS[i % 7], "-" if i % 6 < 3 else "--") for i in range(len(curves))]
        looks += [(style.MUTED, _MARKERS[-1 - i % 7], ":") for i in range(len(others))]
        drawn = [*curves.items(), *others.items()]
        for (name, points), (color, marker, dash) in zip(drawn, looks, strict=True):
            ax.plot(
                list(points), list(points.values()), label=style.plain(name), markersize=4,
                color=color, marker=marker, linestyle=dash,
            )  # fmt: skip
        _scale_errors(ax, [error for _, points in drawn for error in points.values()])
        ax.set_xlabel(axis)
        ax.set_ylabel(f"mean {ERROR}")
        style.legend_above(figure, {str(line.get_label()): line for line in ax.get_lines()})
    return figure
