"""How our figures look, in one place: colors, sizes, fonts, and how a figure becomes bytes.

Figures are plain `matplotlib.figure.Figure` objects, made without pyplot, which would remember each of them
and choose a window system. matplotlib is imported when the first figure is made.
"""

import contextlib
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oformer.errors import InputError
from oformer.files import write_bytes
from oformer.terminal import printable

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Okabe and Ito's palette: told apart with every common color blindness, and by lightness in gray print.
TRUTH = "#56B4E9"
PREDICTION = "#C44601"  # their vermilion, darkened until thin lines and text stand out on white
TEST = "#00795A"  # likewise their green
SPARSE = "#0072B2"
INPUT = "#8A8A8A"
INK = "#1F2328"
MUTED = "#5E666E"
GRID = "#E7E9EC"

WIDTH = 6.4  # inches; with this width and these sizes text is still legible on a phone
DPI = 200  # sharp on screens of double density
MOVIE_DPI = 150  # of many pictures in one file

STYLE: dict[str, Any] = {
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#B6BCC3",
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": "#B6BCC3",
    "ytick.color": "#B6BCC3",
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 1.6,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw in our style whatever the reader's matplotlibrc says; it is as before when the block ends."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def new_figure(height: float, width: float = WIDTH) -> "matplotlib.figure.Figure":
    """An empty figure, in inches, whose axes make room for each other's labels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(name: str) -> str:
    """A name from somebody's file as text and nothing else: a `$` is no formula, and a first `_` hides no line."""
    return printable(" " * name.startswith("_") + name, "").replace("$", r"\$")


def legend_above(figure: "matplotlib.figure.Figure", handles: Mapping[str, Any]) -> None:
    """One legend for all axes, above them, in as many columns as fit; its lines add to the height."""
    width, height = figure.get_size_inches()
    # A handle, the gaps, and about five points for each letter.
    widest = max(len(name) for name in handles) * 5 + 45
    columns = max(1, min(len(handles), int(width * 72 / widest)))
    figure.set_size_inches(width, height + 0.2 * (math.ceil(len(handles) / columns) - 1))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)


def log_scale(axis: "matplotlib.axes.Axes", which: str, ticks: list[float] | None = None) -> None:
    """A logarithmic axis that says 300 and 0.02 instead of powers of ten.

    Args:
        axis: of the figure.
        which: `x` or `y`.
        ticks: where to put them; without, at 1, 2 and 5 of each decade.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    (axis.set_xscale if which == "x" else axis.set_yscale)("log")
    target = axis.xaxis if which == "x" else axis.yaxis
    target.set_major_locator(FixedLocator(ticks) if ticks else LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    target.set_minor_formatter(NullFormatter())


def round_ticks(axis: "matplotlib.axes.Axes", count: int | None = None, whole: bool = False) -> None:
    """Round numbers along x: about `count` of them, and no fractions where only whole ones have a meaning."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(count or "auto", steps=[1, 2, 5, 10], integer=whole))


def halo() -> list[Any]:
    """The path effect of a white rim, which keeps text legible where lines cross it."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="white")]


def number(value: float) -> str:
    """A number as people write it: 8,192, 0.05, 2e-05."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def percent(share: float) -> str:
    """A share as a percentage of three digits: 0.0123 is 1.23%."""
    return f"{number(100 * share)}%"


def rendered(figure: "matplotlib.figure.Figure", kind: str = "png") -> bytes:
    """The file of a figure: png, svg or pdf."""
    buffer = io.BytesIO()
    with styled():  # some settings, such as those of savefig, are read only now
        figure.savefig(buffer, format=kind, dpi=DPI)
    return buffer.getvalue()


def picture_format(path: Path) -> str:
    """What the ending of a figure's name chooses: png, svg or pdf."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise InputError("a figure's name that ends in .png, .svg or .pdf", f"`{path.name}`", "Choose one of them")
    return kind


def save_figure(path: Path, figure: "matplotlib.figure.Figure") -> None:
    """Write a figure, whole or not at all; the name's ending chooses the format."""
    write_bytes(path, rendered(figure, picture_format(path)))
