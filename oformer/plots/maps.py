"""Fields in the plane, on grids and on triangles: input, truth, prediction and error as maps; frames; animations.

Truth and prediction share their colors, and the error has a scale of its own around zero. On scattered points the
colors are chosen by the points in view, so that a close-up is not washed out by what lies far away.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from oformer.errors import InputError
from oformer.fields import Field, Sample
from oformer.files import write_bytes
from oformer.plots import style
from oformer.plots.panel import Panel, check_dimension
from oformer.plots.triangles import Scattered, Surface, Window, channel_index, surface, vectors_of

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_ADVICE = "Fields on a line are drawn by plots.lines"
SHADES = 24  # in the palette of a movie, at least: white paper, and text with smooth edges
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # told apart with common color blindness; the second has a neutral middle

Grid = tuple[int, int] | None  # points along each axis of the queries, row-major; None on scattered points
Channel = int | str


def solutions(
    panels: Sequence[Panel],
    grid: Grid = None,
    *,
    input: str = "input",
    target: str | None = None,
    time: int = -1,
    channel: Channel = 0,
    names: Sequence[str] = (),
    input_channel: int = 0,
    arrows: tuple[Channel, Channel] | None = None,
    window: Window | None = None,
) -> "matplotlib.figure.Figure":
    """A row for each sample: input, truth, prediction, and the error with a scale of its own.

    Args:
        panels: what to draw, from top to bottom.
        grid: points along each axis of the queries, row-major; without it, triangles: the samples' own, or Delaunay's.
        input: the name of the input.
        target: the name of what is predicted; by default the channel's, if it has one.
        time: which frame of target and prediction; the printed error is that of this frame and channel alone.
        channel: which channel, by number or name.
        names: of the target's channels.
        input_channel: which channel of the input's last frame.
        arrows: two channels of the target that are a vector, drawn over truth and prediction.
        window: the part in view (left, right, bottom, top); only on scattered points.
    """
    check_dimension(list(panels), 2, _ADVICE)
    chosen = [_Chosen.of(panel, grid, channel, names, arrows, window) for panel in panels]
    label = target or chosen[0].name or "truth"
    with style.styled():
        figure = style.new_figure(0.3 + sum(0.45 + 1.3 * one.place.ratio for one in chosen), 7.6)
        ratios = [0.45 + 1.3 * one.place.ratio for one in chosen]
        axes = figure.subplots(len(panels), 4, squeeze=False, height_ratios=ratios)
        for row, panel, one in zip(axes, panels, chosen, strict=True):
            known, shown = panel.sample.input, one.place.shown
            first = known.values[-1, :, channel_index(input_channel, (), known.values.shape[-1])].numpy()
            if np.array_equal(known.coords.numpy(), panel.sample.query.coords.numpy()):
                _map(figure, row[0], one.place, first)
            else:
                _dots(figure, row[0], known.coords.numpy(), first)
            truth, answer = one.truth[time], one.answer[time]
            limits = _limits(truth[shown])
            longest = one.longest(time)
            for axis, values, vectors in zip(row[1:3], (truth, answer), one.vectors(time), strict=True):
                _map(figure, axis, one.place, values, limits, vectors=vectors, longest=longest)
            _map(figure, row[3], one.place, answer - truth, _symmetric((answer - truth)[shown]), DIVERGING)
            _aside(row[1], one.place)
            row[0].set_ylabel(style.plain(panel.title))
            row[3].set_xlabel(f"relative L2  {style.percent(panel.error(time, one.index))}")
        titles = (input, f"{label} (truth)", "prediction", "error")
        for axis, name in zip(axes[0], titles, strict=True):
            axis.set_title(style.plain(name), fontsize=9.5, y=1.0)
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
    places = [surface(Sample(field, field, field.values)) for field in (known, answer)]
    with style.styled():
        figure = style.new_figure(0.5 + 2.6 * max(place.ratio for place in places), 6.4)
        shown = (known.values[-1, :, 0], answer.values[time, :, channel])
        for axis, place, values, name in zip(figure.subplots(1, 2), places, shown, (input, target), strict=True):
            _map(figure, axis, place, values.double().numpy())
            axis.set_title(style.plain(name), fontsize=9.5, y=1.0)
    return figure


def frames(
    panel: Panel,
    grid: Grid = None,
    *,
    count: int = 5,
    channel: Channel = 0,
    names: Sequence[str] = (),
    first_step: int = 1,
    arrows: tuple[Channel, Channel] | None = None,
    window: Window | None = None,
) -> "matplotlib.figure.Figure":
    """Truth, prediction and error of one sample at several steps, from left to right.

    Args:
        panel: what to draw.
        grid: points along each axis of the queries, row-major; without it, triangles: the sample's own, or Delaunay's.
        count: how many steps, spread evenly; the last one is among them.
        channel: which channel, by number or name.
        names: of the target's channels.
        first_step: the number of the first predicted frame.
        arrows: two channels of the target that are a vector, drawn over truth and prediction.
        window: the part in view (left, right, bottom, top); only on scattered points.
    """
    check_dimension([panel], 2, _ADVICE)
    steps = _spread(panel.sample.target.shape[0], count)
    one = _Chosen.of(panel, grid, channel, names, arrows, window)
    place, error = one.place, one.answer - one.truth
    with style.styled():
        figure = style.new_figure(0.55 + 4.05 * place.ratio, 1.1 + 1.35 * len(steps))
        axes = figure.subplots(3, len(steps), squeeze=False)
        error_limits = _symmetric(error[:, place.shown])
        for column, step in enumerate(steps):
            limits = _limits(one.truth[step][place.shown])
            last = column == len(steps) - 1
            longest = one.longest(step)
            for axis, values, vectors in zip(axes[:2, column], one.both(step), one.vectors(step), strict=True):
                _map(figure, axis, place, values, limits, bar=False, vectors=vectors, longest=longest)
            _map(figure, axes[2, column], place, error[step], error_limits, DIVERGING, bar=last)
            axes[0, column].set_title(f"step {first_step + step}", fontsize=9.5, y=1.0)
            axes[2, column].set_xlabel(style.percent(panel.error(step, one.index)))
        _aside(axes[0, 0], place)
        for row, name in zip(axes, ("truth", "prediction", "error"), strict=True):
            row[0].set_ylabel(name)
        _headline(figure, one.name)
    return figure


def animation(
    path: Path,
    panel: Panel,
    grid: Grid = None,
    *,
    channel: Channel = 0,
    names: Sequence[str] = (),
    rate: int = 6,
    arrows: tuple[Channel, Channel] | None = None,
    window: Window | None = None,
) -> None:
    """Truth, prediction and error over time as a moving picture: .gif, or .mp4 where imageio-ffmpeg is installed.

    Args:
        path: the file; its ending chooses the kind.
        panel: what to draw.
        grid: points along each axis of the queries, row-major; without it, triangles: the sample's own, or Delaunay's.
        channel: which channel, by number or name.
        names: of the target's channels.
        rate: frames a second.
        arrows: two channels of the target that are a vector, drawn over truth and prediction.
        window: the part in view (left, right, bottom, top); only on scattered points.
    """
    check_dimension([panel], 2, _ADVICE)
    kind = path.suffix.lower()
    if kind not in (".gif", ".mp4"):
        raise InputError("an animation's name that ends in .gif or .mp4", f"`{path.name}`", "Choose one of them")
    one = _Chosen.of(panel, grid, channel, names, arrows, window)
    place, error = one.place, one.answer - one.truth
    limits, error_limits = _limits(one.truth[:, place.shown]), _symmetric(error[:, place.shown])
    longest = max(one.longest(step) for step in range(len(one.truth)))
    pictures = []
    for step in range(len(one.truth)):
        with style.styled():
            figure = style.new_figure(0.5 + 2.0 * place.ratio, 7.2)
            axes = figure.subplots(1, 3)
            for axis, values, vectors in zip(axes[:2], one.both(step), one.vectors(step), strict=True):
                _map(figure, axis, place, values, limits, vectors=vectors, longest=longest)
            _map(figure, axes[2], place, error[step], error_limits, DIVERGING)
            _aside(axes[0], place)
            for axis, name in zip(axes, (f"truth, step {step + 1}", "prediction", "error"), strict=True):
                axis.set_title(name, fontsize=9.5, y=1.0)
            _headline(figure, one.name)
        pictures.append(_pixels(figure))
    used = {_colormap(*limits), DIVERGING}
    write_bytes(path, _gif(pictures, rate, used) if kind == ".gif" else _mp4(pictures, rate, path))


@dataclass(frozen=True)
class _Chosen:
    """What of a panel is drawn, and where."""

    place: Surface
    index: int  # of the channel
    name: str  # of the channel; empty if it has none
    truth: np.ndarray  # (times, points)
    answer: np.ndarray
    flow: tuple[np.ndarray, np.ndarray] | None  # (times, points, 2) of truth and prediction

    @classmethod
    def of(
        cls,
        panel: Panel,
        grid: Grid,
        channel: Channel,
        names: Sequence[str],
        arrows: tuple[Channel, Channel] | None,
        window: Window | None,
    ) -> "_Chosen":
        target = panel.sample.target
        index = channel_index(channel, names, target.shape[-1])
        flow = None
        if arrows is not None:
            if grid is not None:
                raise InputError("arrows only on scattered points", f"a grid of {grid}", "Leave them out")
            x, y = (channel_index(one, names, target.shape[-1]) for one in arrows)
            flow = (vectors_of(target, (x, y)), vectors_of(panel.prediction, (x, y)))
        truth, answer = (v[..., index].numpy() for v in (target, panel.prediction))
        name = names[index] if index < len(names) else ""
        return cls(surface(panel.sample, grid, window), index, name, truth, answer, flow)

    def both(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self.truth[step], self.answer[step]

    def vectors(self, step: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        return (None, None) if self.flow is None else (self.flow[0][step], self.flow[1][step])

    def longest(self, step: int) -> float:
        """The longest true vector in view: the arrows of truth and prediction have one scale."""
        if self.flow is None:
            return 0.0
        return float(np.hypot(*self.flow[0][step][self.place.shown].T).max())


def _headline(figure: "matplotlib.figure.Figure", name: str) -> None:
    if name:
        figure.suptitle(style.plain(name), x=0.01, ha="left", fontsize=10.5, fontweight="bold")


def _aside(axis: "matplotlib.axes.Axes", place: Surface) -> None:
    """Say beneath the truth what the picture added to the data."""
    if place.note:
        axis.set_xlabel(place.note, fontsize=8, color=style.MUTED)


def _pixels(figure: "matplotlib.figure.Figure") -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(style.MOVIE_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3]
    # Video codecs want even sides.
    return np.ascontiguousarray(image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2])


def _gif(pictures: list[np.ndarray], rate: int, colormaps: set[str]) -> bytes:
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
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 / rate, loop=0, disposal=1)
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


def _mp4(pictures: list[np.ndarray], rate: int, path: Path) -> bytes:
    import tempfile

    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise InputError(
            f"the package imageio-ffmpeg to write {path.name}",
            "none",
            "Install it (pip install imageio-ffmpeg), or choose .gif",
        ) from error
    height, width = pictures[0].shape[:2]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "movie.mp4"
        writer = imageio_ffmpeg.write_frames(str(place), (width, height), fps=rate, macro_block_size=2, quality=8)
        writer.send(None)
        for picture in pictures:
            writer.send(picture.tobytes())
        writer.close()
        return place.read_bytes()


def _spread(available: int, count: int) -> list[int]:
    """Up to `count` steps from the first to the last."""
    return sorted({int(i) for i in np.linspace(0, available - 1, min(count, available)).round()})


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
    vectors: np.ndarray | None = None,
    longest: float = 0.0,
) -> None:
    """One map; fields of both signs get colors with a neutral middle, unless one of them hardly occurs."""
    low, high = limits or _limits(values[place.shown])
    if colors is None:
        colors = _colormap(low, high)
        if colors == DIVERGING:
            low, high = _symmetric(np.array([low, high]))
    shown = place.draw(axis, values, cmap=colors, vmin=low, vmax=high)
    if vectors is not None and isinstance(place, Scattered):
        place.arrows(axis, vectors, longest)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    if isinstance(place, Scattered):
        axis.spines[:].set_visible(False)
    if bar:
        _bar(figure, axis, shown)


def _dots(figure: "matplotlib.figure.Figure", axis: "matplotlib.axes.Axes", x: np.ndarray, values: np.ndarray) -> None:
    """Scattered input points, each in the color of its value."""
    shown = axis.scatter(x[:, 0], x[:, 1], c=values, s=3, cmap=SEQUENTIAL, linewidths=0)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
    _bar(figure, axis, shown)


def _bar(figure: "matplotlib.figure.Figure", axis: "matplotlib.axes.Axes", shown) -> None:
    # Within the map's own frame, so that it is as high as the map whatever shape that has.
    bar = figure.colorbar(shown, cax=axis.inset_axes((1.03, 0.0, 0.05, 1.0)))
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    bar.ax.yaxis.get_offset_text().set_fontsize(7)
    bar.ax.yaxis.set_offset_position("left")  # from the bar to the right, where no title is
