"""Maps show the numbers they are given, the right way up, on scales that can be compared."""

import dataclasses
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from oformer.errors import InputError
from oformer.fields import Field, Sample
from oformer.meshes.grids import periodic_grid
from oformer.plots import maps, style
from oformer.plots.lines import Panel

GRID = (6, 5)
IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"


def panel(times=4, sign=False):
    coords = periodic_grid(GRID, (1.0, 1.0)).float()
    ramp = coords[:, 0] + 10 * coords[:, 1] - (5.0 if sign else 0.0)
    target = ramp[None, :, None] * torch.arange(1, times + 1)[:, None, None]
    sample = Sample(Field.of(coords, ramp[None, :, None]), Field.of(coords), target)
    return Panel("a title", sample, target * 1.1)


def images(figure):
    return [axis.images[0] for axis in figure.axes if axis.images]


def test_a_row_holds_input_truth_prediction_and_error():
    one = panel()
    given, truth, answer, error = images(maps.solutions([one], GRID))
    frame = one.sample.target[-1, :, 0].reshape(GRID).numpy()
    # Right is the first coordinate, up the second: pixel rows are the second coordinate.
    np.testing.assert_allclose(truth.get_array(), frame.T)
    np.testing.assert_allclose(answer.get_array(), 1.1 * frame.T, rtol=1e-6)
    np.testing.assert_allclose(error.get_array(), 0.1 * frame.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(given.get_array(), one.sample.input.values[0, :, 0].reshape(GRID).T)
    assert truth.get_clim() == answer.get_clim()
    assert error.get_clim()[0] == -error.get_clim()[1]
    assert truth.origin == "lower"


def test_the_printed_error_is_the_relative_error():
    figure = maps.solutions([panel()], GRID)
    assert any("10%" in axis.get_xlabel() for axis in figure.axes)


def test_fields_of_both_signs_get_colors_with_a_neutral_middle():
    _, truth, *_ = images(maps.solutions([panel(sign=True)], GRID))
    assert truth.get_cmap().name == maps.DIVERGING
    assert truth.get_clim()[0] == -truth.get_clim()[1]
    _, truth, *_ = images(maps.solutions([panel()], GRID))
    assert truth.get_cmap().name == maps.SEQUENTIAL


def test_sparse_inputs_are_drawn_as_dots():
    one = panel()
    few = Field.of(one.sample.input.coords[:7], one.sample.input.values[:, :7])
    figure = maps.solutions([dataclasses.replace(one, sample=dataclasses.replace(one.sample, input=few))], GRID)
    (dots,) = [c for axis in figure.axes for c in axis.collections if len(c.get_offsets()) == 7]
    np.testing.assert_allclose(dots.get_offsets(), few.coords)


@pytest.mark.parametrize("move", [lambda coords: coords + 0.05, lambda coords: coords.flip(0)])
def test_as_many_input_points_elsewhere_are_no_map_of_the_queries(move):
    """Points beside those of the queries, or the same in another order."""
    one = panel()
    other = Field.of(move(one.sample.input.coords), one.sample.input.values)
    figure = maps.solutions([dataclasses.replace(one, sample=dataclasses.replace(one.sample, input=other))], GRID)
    assert len(images(figure)) == 3  # truth, prediction and error
    (dots,) = [c for axis in figure.axes for c in axis.collections if len(c.get_offsets()) == other.points]
    np.testing.assert_allclose(dots.get_offsets(), other.coords)
    np.testing.assert_allclose(dots.get_array(), other.values[0, :, 0])


def test_frames_go_from_the_first_to_the_last_step():
    one = panel(times=9)
    figure = maps.frames(one, GRID)
    assert [axis.get_title(loc="left") for axis in figure.axes[:5]] == [f"step {k}" for k in (1, 3, 5, 7, 9)]
    shown = images(figure)
    np.testing.assert_allclose(shown[4].get_array(), one.sample.target[8, :, 0].reshape(GRID).T)
    assert len({image.get_clim() for image in shown[10:15]}) == 1


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_an_animation_has_a_picture_for_each_step(tmp_path, kind):
    path = tmp_path / f"movie.{kind}"
    if kind == "mp4":
        imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    maps.animation(path, panel(times=3), GRID)
    if kind == "gif":
        with Image.open(path) as movie:
            assert movie.n_frames == 3
            assert movie.info["duration"] == 160  # a sixth of a second, in hundredths
    else:
        frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(path))
        assert (frames, seconds) == (3, pytest.approx(0.5, abs=0.1))


@pytest.mark.parametrize("offset", [10.0, 0.0], ids=["of one sign", "of both signs"])
def test_the_error_of_an_animation_has_an_even_scale_that_is_symmetric_around_zero(offset, tmp_path, monkeypatch):
    """Also where small errors are much more frequent than large ones, and whatever colors the truth has."""
    drawn, pixels = [], maps._pixels
    monkeypatch.setattr(maps, "_pixels", lambda figure: drawn.append(pixels(figure)) or drawn[-1])
    coords = periodic_grid((64, 64), (1.0, 1.0)).float()
    truth = torch.sin(6 * coords[:, :1]) + offset
    error = torch.linspace(-1, 1, 4096)[:, None] ** 9
    sample = Sample(Field.of(coords, truth[None]), Field.of(coords), truth[None])
    maps.animation(tmp_path / "movie.gif", Panel("a title", sample, truth[None] + error), (64, 64))
    with Image.open(tmp_path / "movie.gif") as movie:
        shown = np.asarray(movie.convert("RGB"), int)
    scale = matplotlib.colormaps[maps.DIVERGING](np.arange(256), bytes=True)[:, :3].astype(int)
    number = np.array([65536, 256, 1])  # of a color
    on_scale = np.isin(drawn[0].astype(int) @ number, scale @ number)
    assert np.abs(shown - drawn[0])[on_scale].max() <= 4
    found = np.isin(scale @ number, shown @ number)
    assert found.sum() >= 100
    np.testing.assert_array_equal(found, found[::-1])


def test_an_animation_keeps_its_colors_where_they_are_rare(tmp_path, monkeypatch):
    """An error of one point among smooth maps: a palette by how often a color occurs would have none for it."""
    drawn, pixels = [], maps._pixels
    monkeypatch.setattr(maps, "_pixels", lambda figure: drawn.append(pixels(figure)) or drawn[-1])
    one = panel(times=3)
    wrong = one.sample.target.clone()
    wrong[:, 17] += 5.0
    maps.animation(tmp_path / "movie.gif", dataclasses.replace(one, prediction=wrong), GRID)
    with Image.open(tmp_path / "movie.gif") as movie:
        for step, picture in enumerate(drawn):
            movie.seek(step)
            shown = np.asarray(movie.convert("RGB"), float)
            np.testing.assert_allclose(shown, picture, rtol=0, atol=24)
            assert np.all(shown[0, -1] == 255)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    line = Field.of(torch.rand(5, 1), torch.rand(1, 5, 1))
    with pytest.raises(InputError, match="2-D"):
        maps.solutions([Panel("a line", Sample(line, line, line.values), line.values)], GRID)
    with pytest.raises(InputError, match="6 x 6 values"):
        maps.solutions([panel()], (6, 6))
    with pytest.raises(InputError, match=r"\.gif or \.mp4"):
        maps.animation(tmp_path / "movie.avi", panel(), GRID)


def test_a_perfect_prediction_can_be_drawn():
    one = panel()
    perfect = dataclasses.replace(one, prediction=one.sample.target)
    assert style.rendered(maps.solutions([perfect], GRID)).startswith(b"\x89PNG")


def test_a_prediction_alone_is_drawn_beside_its_input():
    """On points of either, each with the colors of its own last frame."""
    known = Field.of(torch.rand(50, 2), torch.stack([torch.zeros(50, 1), torch.linspace(3, 12, 50)[:, None]]))
    answer = Field.of(
        torch.rand(80, 2), torch.stack([torch.full((80, 2), 99.0), torch.linspace(0, 1, 160).view(80, 2)])
    )
    figure = maps.prediction(known, answer, input="a", target="u", channel=1)
    left, right = (axis for axis in figure.axes if axis.get_title("left"))
    assert (left.get_title("left"), right.get_title("left")) == ("a", "u")
    for axis, values in ((left, known.values[-1, :, 0]), (right, answer.values[-1, :, 1])):
        (shown,) = axis.collections
        np.testing.assert_allclose(np.sort(shown.get_array()), np.sort(values.numpy()), rtol=1e-6)
    with pytest.raises(InputError, match=r"in the plane to draw, got coordinates of shape \(4, 1\)"):
        maps.prediction(known, Field.of(torch.rand(4, 1), torch.rand(1, 4, 1)))


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*/predictions.png")), ids=lambda path: path.parent.name)
def test_a_shipped_picture_that_was_reduced_to_a_palette_has_the_colors_of_its_scales(path):
    """A palette for the whole picture can leave so few colors to the errors that their scale has bands of others."""
    with Image.open(path) as picture:
        if picture.mode != "P":
            return
        pixels, colors = picture.width * picture.height, picture.convert("RGB").getcolors() or []
    scales = [
        matplotlib.colormaps[name](np.arange(256), bytes=True)[:, :3] for name in (maps.SEQUENTIAL, maps.DIVERGING)
    ]
    shades = 255 * np.linspace(to_rgb(style.INK), (1.0, 1.0, 1.0), 64)
    known = np.concatenate([*scales, shades])
    foreign = sum(count for count, color in colors if np.abs(known - color).max(1).min() > 20)
    assert foreign < 1e-3 * pixels
