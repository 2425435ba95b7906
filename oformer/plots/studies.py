"""Figures of studies: bars of a recipe and its variants, and a parameter in the latents of an operator."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from oformer.plots import style
from oformer.plots.lines import ERROR

if TYPE_CHECKING:
    import matplotlib.figure


def error_bars(groups: Mapping[str, Mapping[str, float]]) -> "matplotlib.figure.Figure":
    """Errors by recipe and by variant, a panel for each recipe; the first bar, lighter, is the recipe as it is."""
    with style.styled():
        figure = style.new_figure(0.5 + sum(0.5 + 0.24 * len(group) for group in groups.values()))
        heights = [2 + len(group) for group in groups.values()]
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (name, group) in zip(panels, groups.items(), strict=True):
            colors = [style.TRUTH, *[style.SPARSE] * (len(group) - 1)]
            bars = axis.barh(list(map(style.plain, group)), list(group.values()), color=colors, height=0.7)
            axis.bar_label(bars, labels=[style.number(error) for error in group.values()], padding=3, size=8)
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.grid(False, axis="y")
            axis.set_title(style.plain(name))
        panels[-1].set_xlabel(f"mean {ERROR}")
    return figure


def parameter_in_latents(
    name: str,
    dots: tuple[Sequence[tuple[float, float]], Sequence[float], Sequence[float]],
    regression: tuple[Sequence[float], Sequence[float], float],
) -> "matplotlib.figure.Figure":
    """Training samples on the first two principal components, and predictions of a parameter for test samples.

    Args:
        name: of the parameter.
        dots: components and parameter of each training sample, and the share of the variance of each component.
        regression: true and predicted parameter of each test sample, and R².
    """
    (components, trained, variance), (true, predicted, r2) = dots, regression
    with style.styled():
        figure = style.new_figure(3.2)
        left, right = figure.subplots(1, 2)
        colored = left.scatter(*zip(*components, strict=True), c=trained, cmap="viridis", s=9, linewidths=0)
        figure.colorbar(colored, ax=left, label=style.plain(name))
        left.set_title("latents of training samples")
        left.set_xlabel(f"first component ({variance[0]:.0%})")
        left.set_ylabel(f"second component ({variance[1]:.0%})")
        ends = min(*true, *predicted), max(*true, *predicted)
        right.plot(ends, ends, color=style.MUTED, linewidth=1)
        right.plot(true, predicted, "o", color=style.PREDICTION, markersize=3, markeredgewidth=0)
        right.set_title(f"test samples: R² {r2:.4f}")
        right.set_xlabel(style.plain(name))
        right.set_ylabel("by linear regression")
        style.round_ticks(right, 4)
    return figure
