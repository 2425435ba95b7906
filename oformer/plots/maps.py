"""Fields on two-dimensional regular grids: input, truth, prediction and error as maps; frames over time; animations."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.files import write_bytes
from oformer.plots import style
from oformer.plots.panel import Panel, check_dimension

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

_ADVICE = "Fields on a line are drawn by plots.lines"
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # told apart with common color blindness; the second has a neutral middle


def solutions(
    panels: Sequence[Panel],
    grid: tuple[int, int],
    *,
    input: str = "input",
    target: str = "truth",
    time: int = -1,
    channel: int = 0,
) -> "matplotlib.figure.Figure":
    """A row for each sample: input, truth, prediction, and the error with a scale of its own.

    Args:
        panels: what to draw, from top to bottom.
        grid: points along each axis of the queries, row-major.
        input: the name of the input.
        target: the name of what is predicted.
        time: which frame of target and prediction; the printed error is that of this frame and channel alone.
        channel: which channel.
    """
    check_dimension(list(panels), 2, _ADVICE)
    with style.styled():
        figure = style.new_figure(0.3 + 1.75 * len(panels), 7.6)
        axes = figure.subplots(len(panels), 4, squeeze=False)
        for row, panel in zip(axes, panels, strict=True):
            known = panel.sample.input
            truth, answer = (_image(v[time, :, channel], grid) for v in (panel.sample.target, panel.prediction))
            same_grid = known.points == panel.sample.query.points
            if same_grid:
                _map(figure, row[0], _image(known.values[-1, :, 0], grid))
            else:
                _dots(figure, row[0], known.coords.numpy(), known.values[-1, :, 0].numpy())
            limits = _limits(truth)
            _map(figure, row[1], truth, limits)
            _map(figure, row[2], answer, limits)
            _map(figure, row[3], answer - truth, _symmetric(answer - truth), DIVERGING)
            row[0].set_ylabel(panel.title)
            row[3].set_xlabel(f"relative L2  {style.percent(panel.error(time, channel))}")
        for axis, name in zip(axes[0], (input, f"{target} (truth)", "prediction", "error"), strict=True):
            axis.set_title(name, fontsize=9.5)
    return figure


def frames(
    panel: Panel, grid: tuple[int, int], *, count: int = 5, channel: int = 0, first_step: int = 1
) -> "matplotlib.figure.Figure":
    """Truth, prediction and error of one sample at several steps, from left to right.

    Args:
        panel: what to draw.
        grid: points along each axis of the queries, row-major.
        count: how many steps, spread evenly; the last one is among them.
        channel: which channel.
        first_step: the number of the first predicted frame.
    """
    check_dimension([panel], 2, _ADVICE)
    steps = _spread(panel.sample.target.shape[0], count)
    truth, answer = (_movie(v[..., channel], grid) for v in (panel.sample.target, panel.prediction))
    with style.styled():
        figure = style.new_figure(4.6, 1.1 + 1.35 * len(steps))
        axes = figure.subplots(3, len(steps), squeeze=False)
        error_limits = _symmetric(answer - truth)
        for column, step in enumerate(steps):
            limits = _limits(truth[step])
            last = column == len(steps) - 1
            _map(figure, axes[0, column], truth[step], limits, bar=False)
            _map(figure, axes[1, column], answer[step], limits, bar=False)
            _map(figure, axes[2, column], answer[step] - truth[step], error_limits, DIVERGING, bar=last)
            axes[0, column].set_title(f"step {first_step + step}", fontsize=9.5)
            axes[2, column].set_xlabel(style.percent(panel.error(step, channel)))
        for row, name in zip(axes, ("truth", "prediction", "error"), strict=True):
            row[0].set_ylabel(name)
    return figure


def animation(path: Path, panel: Panel, grid: tuple[int, int], *, channel: int = 0, rate: int = 6) -> None:
    """Truth, prediction and error over time as a moving picture: .gif, or .mp4 where imageio-ffmpeg is installed.

    Args:
        path: the file; its ending chooses the kind.
        panel: what to draw.
        grid: points along each axis of the queries, row-major.
        channel: which channel.
        rate: frames a second.
    """
    check_dimension([panel], 2, _ADVICE)
    kind = path.suffix.lower()
    if kind not in (".gif", ".mp4"):
        raise InputError("an animation's name that ends in .gif or .mp4", f"`{path.name}`", "Choose one of them")
    truth, answer = (_movie(v[..., channel], grid) for v in (panel.sample.target, panel.prediction))
    limits, error_limits = _limits(truth), _symmetric(answer - truth)
    pictures = []
    for step in range(len(truth)):
        with style.styled():
            figure = style.new_figure(2.5, 7.2)
            axes = figure.subplots(1, 3)
            _map(figure, axes[0], truth[step], limits)
            _map(figure, axes[1], answer[step], limits)
            _map(figure, axes[2], answer[step] - truth[step], error_limits, DIVERGING)
            for axis, name in zip(axes, (f"truth, step {step + 1}", "prediction", "error"), strict=True):
                axis.set_title(name, fontsize=9.5)
        pictures.append(_pixels(figure))
    write_bytes(path, _gif(pictures, rate) if kind == ".gif" else _mp4(pictures, rate, path))


def _pixels(figure: "matplotlib.figure.Figure") -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())[..., :3]
    # Video codecs want even sides.
    return np.ascontiguousarray(image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2])


def _gif(pictures: list[np.ndarray], rate: int) -> bytes:
    from PIL import Image

    first, *others = (Image.fromarray(p).quantize(128) for p in pictures)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=1000 / rate, loop=0, disposal=1)
    return buffer.getvalue()


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


def _image(values: Float[Tensor, " points"], grid: tuple[int, int]) -> np.ndarray:
    if values.numel() != grid[0] * grid[1]:
        raise InputError(f"the {grid[0]} x {grid[1]} values of a grid to draw", str(values.numel()))
    return values.reshape(grid).numpy()


def _movie(values: Float[Tensor, "times points"], grid: tuple[int, int]) -> np.ndarray:
    return np.stack([_image(frame, grid) for frame in values])


def _limits(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def _symmetric(values: np.ndarray) -> tuple[float, float]:
    """Limits around zero; a perfect prediction has a scale too."""
    largest = float(np.abs(values).max()) or 1.0
    return -largest, largest


def _map(
    figure: "matplotlib.figure.Figure",
    axis: "matplotlib.axes.Axes",
    image: np.ndarray,
    limits: tuple[float, float] | None = None,
    colors: str | None = None,
    bar: bool = True,
) -> None:
    """One map; fields of both signs get colors with a neutral middle."""
    low, high = limits or _limits(image)
    if colors is None:
        colors = DIVERGING if low < 0 < high else SEQUENTIAL
        if colors == DIVERGING:
            low, high = _symmetric(np.array([low, high]))
    # The first coordinate goes right and the second up, as people draw axes.
    shown = axis.imshow(image.T, origin="lower", cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(visible=False)
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
    bar = figure.colorbar(shown, ax=axis, fraction=0.05, pad=0.03)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    bar.ax.yaxis.get_offset_text().set_fontsize(7)
