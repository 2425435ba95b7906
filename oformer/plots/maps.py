"""Fields in the plane, on grids and on triangles: input, truth, prediction and error as maps; frames; animations.

Truth and prediction share their colors, and the error has a scale of its own around zero. On scattered points the
colors are chosen by the points in view, so that a close-up is not washed out by what lies far away.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from oformer.errors import InputError, optional_module
from oformer.fields import Field, Picture
from oformer.files import write_bytes
from oformer.plots import style
from oformer.plots.lines import Panel, check_dimension
from oformer.plots.triangles import Scattered, Surface, surface

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_ADVICE = "Fields on a line are drawn by plots.lines"
SHADES = 24  # in the palette of a movie, at least: white paper, and text with smooth edges
FRAMES = 5  # of a sample side by side
RATE = 6  # frames of a movie per second
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # told apart with common color blindness; the second has a neutral middle

FIRST = Picture()  # the first channel of input and target
Grid = tuple[int, int] | None  # points along each axis of the queries, row-major; None on scattered points


def solutions(
    panels: Sequence[Panel],
    grid: Grid = None,
    *,
    input: str = "input",
    target: str = "truth",
    picture: Picture = FIRST,
    time: int = -1,
) -> "matplotlib.figure.Figure":
    """A row for each sample: input, truth, prediction, and the error with a scale of its own.

    Args:
        panels: the samples, from top to bottom.
        grid: points along each axis of the queries, row-major; without it, triangles: the samples' own, or Delaunay's.
        input: the name of the input.
        target: the name of what is predicted.
        picture: the channels of the input's last frame and of the target, the vector whose arrows are drawn over truth
            and prediction, and the part in view; the last two only on scattered points.
        time: which frame of target and prediction; the printed error is that of this frame and channel alone.
    """
    check_dimension(panels, 2, _ADVICE)
    shown = [_Shown(panel, grid, picture) for panel in panels]
    ratios = [0.45 + 1.3 * one.place.ratio for one in shown]
    with style.styled():
        figure = style.new_figure(0.3 + sum(ratios), 7.6)
        axes = figure.subplots(len(panels), 4, squeeze=False, height_ratios=ratios)
        for row, panel, one in zip(axes, panels, shown, strict=True):
            known = panel.sample.input
            first = known.values[-1, :, _checked(picture.input, known.values.shape[-1])].numpy()
            coords = known.coords.numpy()
            here = np.array_equal(coords, panel.sample.query.coords.numpy())
            _map(figure, row[0], one.place if here else Scattered(coords, None, np.arange(len(coords))), first)
            error = one.error[time]
            one.draw(figure, row[1:3], time, _limits(one.truth[time][one.place.shown]), one.longest(time))
            _map(figure, row[3], one.place, error, _symmetric(error[one.place.shown]), DIVERGING)
            _aside(row[1], one.place)
            row[0].set_ylabel(style.plain(panel.title))
            row[3].set_xlabel(f"relative L2  {style.percent(panel.error(time, picture.target))}")
        _title(axes[0], (input, f"{target} (truth)", "prediction", "error"))
    return figure


def prediction(
    known: Field, answer: Field, *, input: str = "input", target: str = "prediction", channel: int = 0, time: int = -1
) -> "matplotlib.figure.Figure":
    """The last frame of the input and what was predicted from it, in the plane.

    Args:
        known: the input, without a batch axis.
        answer: the prediction, without a batch axis.
        input: the name of the input.
        target: the name of what is predicted.
        channel: which channel of the prediction.
        time: which of its frames.
    """
    if answer.coords.ndim != 2 or answer.coords.shape[-1] != 2:
        raise InputError("one prediction in the plane to draw", f"coordinates of shape {tuple(answer.coords.shape)}")
    places = [surface(known), surface(answer)]
    with style.styled():
        figure = style.new_figure(0.5 + 2.6 * max(place.ratio for place in places), 6.4)
        axes = figure.subplots(1, 2)
        for axis, place, values in zip(
            axes, places, (known.values[-1, :, 0], answer.values[time, :, channel]), strict=True
        ):
            _map(figure, axis, place, values.double().numpy())
        _title(axes, (input, target))
    return figure


def frames(
    panel: Panel, grid: Grid = None, *, target: str = "", picture: Picture = FIRST
) -> "matplotlib.figure.Figure":
    """Truth, prediction and error of one sample at five steps or fewer, from the first to the last.

    Args:
        panel: the sample.
        grid: points along each axis of the queries, row-major; without it, triangles: the sample's own, or Delaunay's.
        target: the name of what is predicted.
        picture: as in `solutions`.
    """
    check_dimension([panel], 2, _ADVICE)
    one = _Shown(panel, grid, picture)
    place, error = one.place, one.error
    steps = sorted({int(i) for i in np.linspace(0, len(error) - 1, min(FRAMES, len(error))).round()})
    with style.styled():
        figure = style.new_figure(0.55 + 4.05 * place.ratio, 1.1 + 1.35 * len(steps))
        axes = figure.subplots(3, len(steps), squeeze=False)
        error_limits = _symmetric(error[:, place.shown])
        for column, step in enumerate(steps):
            limits, pair = _limits(one.truth[step][place.shown]), list(axes[:2, column])
            one.draw(figure, pair, step, limits, one.longest(step), bar=False)
            _map(figure, axes[2, column], place, error[step], error_limits, DIVERGING, bar=step == steps[-1])
            axes[2, column].set_xlabel(style.percent(panel.error(step, picture.target)))
        _aside(axes[0, 0], place)
        _title(axes[0], [f"step {step + 1}" for step in steps])
        for row, name in zip(axes, ("truth", "prediction", "error"), strict=True):
            row[0].set_ylabel(name)
        _headline(figure, target)
    return figure


def animation(path: Path, panel: Panel, grid: Grid = None, *, target: str = "", picture: Picture = FIRST) -> None:
    """Truth, prediction and error over time as a moving picture: .gif, or .mp4 where imageio-ffmpeg is installed.

    Args:
        path: the file; its ending chooses the kind.
        panel: the sample.
        grid: points along each axis of the queries, row-major; without it, triangles: the sample's own, or Delaunay's.
        target: the name of what is predicted.
        picture: as in `solutions`.
    """
    check_dimension([panel], 2, _ADVICE)
    kind = path.suffix.lower()
    if kind not in (".gif", ".mp4"):
        raise InputError("an animation's name that ends in .gif or .mp4", f"`{path.name}`", "Choose one of them")
    one = _Shown(panel, grid, picture)
    place, error = one.place, one.error
    limits, error_limits = _limits(one.truth[:, place.shown]), _symmetric(error[:, place.shown])
    longest = max(one.longest(step) for step in range(len(error)))
    pictures = []
    for step in range(len(error)):
        with style.styled():
            figure = style.new_figure(0.5 + 2.0 * place.ratio, 7.2)
            axes = figure.subplots(1, 3)
            one.draw(figure, axes[:2], step, limits, longest)
            _map(figure, axes[2], place, error[step], error_limits, DIVERGING)
            _aside(axes[0], place)
            _title(axes, (f"truth, step {step + 1}", "prediction", "error"))
            _headline(figure, target)
        pictures.append(_pixels(figure))
    used = {_colormap(*limits), DIVERGING}
    write_bytes(path, _gif(pictures, used) if kind == ".gif" else _mp4(pictures))


class _Shown:
    """Truth and prediction of a panel: one channel at all steps, the vectors drawn over them, and where."""

    def __init__(self, panel: Panel, grid: Grid, picture: Picture):
        target, cells = panel.sample.target, panel.sample.cells
        index = _checked(picture.target, target.shape[-1])
        self.place = surface(panel.sample.query, cells[0] if cells else None, grid, picture.window)
        self.truth, answer = (values[..., index].numpy() for values in (target, panel.prediction))
        self.error, self._both = answer - self.truth, (self.truth, answer)
        self._vectors: list[np.ndarray] | None = None  # (times, points, 2) of truth and prediction
        if picture.vector is not None:
            if grid is not None:
                raise InputError("arrows only on scattered points", f"a grid of {grid}", "Leave them out")
            x_y = [_checked(axis, target.shape[-1]) for axis in picture.vector]
            self._vectors = [values[..., x_y].double().numpy() for values in (target, panel.prediction)]

    def longest(self, step: int) -> float:
        """The length of the longest true vector in view: the arrows of truth and prediction have one scale."""
        return 0.0 if self._vectors is None else float(np.hypot(*self._vectors[0][step][self.place.shown].T).max())

    def draw(
        self,
        figure: "matplotlib.figure.Figure",
        axes: Sequence["matplotlib.axes.Axes"],
        step: int,
        limits: tuple[float, float],
        longest: float,
        bar: bool = True,
    ) -> None:
        """Draw the truth and the prediction at a step, with the same colors and the same scale of arrows."""
        for k, axis in enumerate(axes):
            _map(figure, axis, self.place, self._both[k][step], limits, bar=bar)
            if self._vectors is not None and isinstance(self.place, Scattered):
                self.place.arrows(axis, self._vectors[k][step], longest)


def _checked(channel: int, count: int) -> int:
    if not -count <= channel < count:
        raise InputError(f"a channel between 0 and {count - 1}", str(channel), "Count from 0")
    return channel


def _aside(axis: "matplotlib.axes.Axes", place: Surface) -> None:
    """Write beneath the truth what the picture added to the data."""
    if place.note:
        axis.set_xlabel(place.note, fontsize=8, color=style.MUTED)


def _title(axes: Sequence["matplotlib.axes.Axes"], names: Sequence[str]) -> None:
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(style.plain(name), fontsize=9.5, y=1.0)


def _headline(figure: "matplotlib.figure.Figure", name: str) -> None:
    if name:
        figure.suptitle(style.plain(name), x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def _pixels(figure: "matplotlib.figure.Figure") -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(style.MOVIE_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3]
    # Video codecs want even sides.
    return np.ascontiguousarray(image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2])


def _gif(pictures: list[np.ndarray], colormaps: set[str]) -> bytes:
    from PIL import Image

    palette = _palette(colormaps)

    def frame(picture: np.ndarray) -> Image.Image:
        codes = picture.astype(np.int64) @ (65536, 256, 1)
        _, first, index = np.unique(codes, return_index=True, return_inverse=True)
        colors = picture.reshape(-1, 3)[first]
        # Exactly the nearest: PIL's own search rounds to a quarter of the 256 levels first, which makes bands.
        squares = np.square(palette.astype(np.float32)).sum(1) - 2.0 * colors @ palette.T.astype(np.float32)
        coded = Image.fromarray(squares.argmin(1).astype(np.uint8)[index].reshape(picture.shape[:2]))
        coded.putpalette(palette.tobytes())
        return coded

    first, *others = map(frame, pictures)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 / RATE, loop=0, disposal=1)
    return buffer.getvalue()


def _palette(colormaps: set[str]) -> UInt8[np.ndarray, "256 3"]:
    """One palette for all frames: shades from ink to paper, and the colormaps, evenly and alike on both sides of zero.

    A palette chosen from the pixels has many colors where a map is smooth, few where an error is large, and shows a
    scale that is neither even nor symmetric.
    """
    from matplotlib import colormaps as known
    from matplotlib.colors import to_rgb

    share = (256 - SHADES) // len(colormaps) // 2
    half = np.linspace(0, 127, share).round().astype(int)
    parts = [known[name](np.concatenate([half, 255 - half]), bytes=True)[:, :3] for name in sorted(colormaps)]
    shades = np.linspace(to_rgb(style.INK), (1.0, 1.0, 1.0), 256 - 2 * share * len(colormaps))
    return np.concatenate([*parts, (255 * shades).round().astype(np.uint8)])


def _mp4(pictures: list[np.ndarray]) -> bytes:
    import tempfile

    ffmpeg = optional_module("imageio_ffmpeg", "a movie in .mp4", "pip install imageio-ffmpeg; or choose .gif")
    height, width = pictures[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "movie.mp4"
        writer = ffmpeg.write_frames(str(place), (width, height), fps=RATE, macro_block_size=2, quality=8)
        writer.send(None)
        for picture in pictures:
            writer.send(picture.tobytes())
        writer.close()
        return place.read_bytes()


def _limits(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _colormap(low: float, high: float) -> str:
    """The colormap of a field with these limits."""
    return DIVERGING if min(-low, high) > 0.2 * max(-low, high) else SEQUENTIAL


def _symmetric(values: np.ndarray) -> tuple[float, float]:
    """Limits around zero; a perfect prediction has a scale too."""
    largest = float(np.abs(values).max()) or 1.0
    return -largest, largest


def _map(
    figure: "matplotlib.figure.Figure",
    axis: "matplotlib.axes.Axes",
    place: Surface,
    values: np.ndarray,
    limits: tuple[float, float] | None = None,
    colors: str | None = None,
    bar: bool = True,
) -> None:
    """One map; fields of both signs get colors with a neutral middle, unless one of them hardly occurs."""
    low, high = limits or _limits(values[place.shown])
    if colors is None:
        colors = _colormap(low, high)
        if colors == DIVERGING:
            low, high = _symmetric(np.array([low, high]))
    shown = place.draw(axis, values, cmap=colors, vmin=low, vmax=high)
    if isinstance(place, Scattered):
        axis.spines[:].set_visible(False)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    if not bar:
        return
    # Within the map's own frame, so that it is as high as the map whatever shape that has.
    scale = figure.colorbar(shown, cax=axis.inset_axes((1.03, 0.0, 0.05, 1.0)))
    scale.ax.tick_params(labelsize=7)
    scale.outline.set_visible(False)
    scale.ax.yaxis.get_offset_text().set_fontsize(7)
    scale.ax.yaxis.set_offset_position("left")  # from the bar to the right, where no title is
