"""Maps on triangles show the values at the points, on scales that can be compared; arrows point along the vectors."""

import dataclasses

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection, TriMesh
from matplotlib.quiver import Quiver

from oformer.errors import InputError
from oformer.fields import Field, Picture, Sample, collate
from oformer.plots import maps, style
from oformer.plots.lines import Panel
from oformer.plots.triangles import surface

PRESSURE = Picture(target=2)
FLOW = Picture(target=2, vector=(0, 1))


def lattice(n):
    """Points of an n by n grid on the unit square, and its triangles."""
    axis = torch.linspace(0, 1, n)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    i, j = (k.reshape(-1) for k in torch.meshgrid(torch.arange(n - 1), torch.arange(n - 1), indexing="ij"))
    a = i * n + j
    return points, torch.cat([torch.stack([a, a + n, a + 1], -1), torch.stack([a + n, a + n + 1, a + 1], -1)])


def panel(times=3, n=7, cells=True, scale=(1.0, 2.0)):
    """A rotation about the middle, and a ramp; in x twice as wide as in y, so that bent arrows would be seen."""
    points, triangles = lattice(n)
    points = points * torch.tensor(scale)
    x, y = points.unbind(-1)
    still = torch.stack([1 - 2 * y, x + 3, 5 + x + 10 * y], -1)
    target = still * torch.arange(1, times + 1)[:, None, None]
    sample = Sample(Field.of(points, target[:1]), Field.of(points), target, cells=(triangles,) if cells else None)
    return Panel("a title", sample, target * 1.1)


def artists(figure, kind):
    return [c for axis in figure.axes for c in axis.collections if isinstance(c, kind)]


def test_a_row_holds_the_values_at_the_corners():
    one = panel()
    given, truth, answer, error = artists(maps.solutions([one], picture=PRESSURE), TriMesh)
    frame = one.sample.target[-1, :, 2].numpy()
    np.testing.assert_allclose(truth.get_array(), frame)
    np.testing.assert_allclose(answer.get_array(), 1.1 * frame, rtol=1e-6)
    np.testing.assert_allclose(error.get_array(), 0.1 * frame, rtol=1e-4)
    np.testing.assert_allclose(given.get_array(), one.sample.input.values[0, :, 0])
    mesh = truth._triangulation
    np.testing.assert_allclose(np.stack([mesh.x, mesh.y], -1), one.sample.query.coords, rtol=1e-6)
    np.testing.assert_array_equal(mesh.triangles, one.sample.cells[0])
    assert truth.get_clim() == answer.get_clim() == (frame.min(), frame.max())
    assert error.get_clim()[0] == -error.get_clim()[1]
    assert error.get_cmap().name == maps.DIVERGING


def test_the_labels_name_the_channel_and_its_error():
    one = panel()
    figure = maps.solutions([one], picture=PRESSURE, input="inflow", target="pressure")
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == ["inflow", "pressure (truth)", "prediction", "error"]
    assert "10%" in figure.axes[3].get_xlabel()
    assert all(axis.get_aspect() == 1 for axis in figure.axes)
    assert maps.frames(one, target="velocity y").get_suptitle() == "velocity y"


def test_the_border_of_the_mesh_is_drawn_and_nothing_inside():
    one = panel(n=4)
    _, border, *_ = artists(maps.solutions([one]), LineCollection)
    segments = np.array(border.get_segments())
    assert len(segments) == 4 * 3
    middle = segments.mean(1) / [1, 2]
    assert (np.isclose(middle, 0) | np.isclose(middle, 1)).any(1).all()


def test_arrows_point_along_the_vectors_and_share_a_scale():
    one = panel(n=40)
    figure = maps.solutions([one], picture=FLOW)
    truth, answer = artists(figure, Quiver)
    coords, vectors = one.sample.query.coords.numpy(), one.sample.target[-1, :, :2].numpy()
    at = truth.get_offsets()
    nearest = np.array([np.argmin(np.hypot(*(coords - place).T)) for place in at])
    np.testing.assert_allclose(coords[nearest], at, atol=1e-6)
    np.testing.assert_allclose(np.stack([truth.U, truth.V], -1), vectors[nearest], rtol=1e-6)
    np.testing.assert_allclose(np.stack([answer.U, answer.V], -1), 1.1 * vectors[nearest], rtol=1e-5)
    # Turned with the axes, not with the screen; and equally long for equal vectors.
    assert (truth.angles, truth.scale_units) == ("xy", "xy")
    assert truth.scale == answer.scale
    # Spread over the whole map: some in each ninth, none on top of another.
    parts = np.floor(np.clip(at / [1, 2], 0, 0.999) * 3).astype(int)
    assert len({tuple(part) for part in parts}) == 9
    apart = np.hypot(*(at[:, None] - at[None]).transpose(2, 0, 1)) + np.eye(len(at))
    assert apart.min() > 0.5 * 2 / 12
    assert 40 < len(at) < 200


def test_a_window_shows_and_scales_to_what_is_in_it():
    one = panel(n=21)
    window = (0.21, 0.58, 0.52, 1.47)
    figure = maps.solutions([one], picture=Picture(target=2, window=window))
    _, truth, *_ = artists(figure, TriMesh)
    axis = figure.axes[1]
    assert (*axis.get_xlim(), *axis.get_ylim()) == window
    x, y = one.sample.query.coords.T.numpy()
    inside = (x >= 0.21) & (x <= 0.58) & (y >= 0.52) & (y <= 1.47)
    values = one.sample.target[-1, :, 2].numpy()[inside]
    assert truth.get_clim() == (values.min(), values.max())
    # A triangle that only reaches into the window is drawn too: there is no gap at the rim.
    corners = one.sample.query.coords.numpy()[truth._triangulation.triangles]
    assert corners[..., 0].min() < 0.21


def test_points_without_cells_are_triangulated_and_it_is_said():
    one = panel(cells=False)
    figure = maps.solutions([one], picture=PRESSURE)
    _, truth, *_ = artists(figure, TriMesh)
    np.testing.assert_allclose(truth.get_array(), one.sample.target[-1, :, 2])
    assert figure.axes[1].get_xlabel() == "triangles by Delaunay"
    assert maps.solutions([panel()]).axes[1].get_xlabel() == ""
    assert artists(figure, LineCollection) == []  # nobody knows where the border is


def test_delaunay_does_not_bridge_a_notch():
    """The letter U: the notch stays open, and nearly all of the letter is covered."""
    points, _ = lattice(21)
    notch = ((points[:, 0] - 0.5).abs() < 0.24) & (points[:, 1] > 0.26)
    letter = Field.of(points[~notch])
    place = surface(letter)
    corners = place.points[place.triangles]
    middle = corners.mean(1)
    assert not ((abs(middle[:, 0] - 0.5) < 0.15) & (middle[:, 1] > 0.4)).any()
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    area = np.abs(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum() / 2
    assert 0.62 < area < 0.68  # 1 - 0.5 * 0.75 = 0.625, and the slopes in the corners


def test_points_on_a_line_are_dots_and_padding_is_left_out():
    line = Field.of(torch.stack([torch.linspace(0, 1, 9), torch.linspace(0, 1, 9)], -1))
    values = torch.arange(9.0)[None, :, None]
    figure = maps.solutions([Panel("line", Sample(dataclasses.replace(line, values=values), line, values), values)])
    drawn = artists(figure, PathCollection)
    np.testing.assert_allclose(drawn[1].get_array(), np.arange(9))
    assert "no triangles" in figure.axes[1].get_xlabel()
    long, short = panel(n=7, cells=False).sample, panel(n=5, cells=False).sample
    batch = collate([long, short])
    place = surface(batch.query.single(1))
    assert len(place.points) == 25
    np.testing.assert_allclose(place.points, short.query.coords, atol=1e-6)


def test_frames_go_from_the_first_to_the_last_step():
    one = panel(times=9)
    figure = maps.frames(one, picture=FLOW)
    assert [axis.get_title(loc="left") for axis in figure.axes[:5]] == [f"step {k}" for k in (1, 3, 5, 7, 9)]
    shown = artists(figure, TriMesh)
    np.testing.assert_allclose(shown[4].get_array(), one.sample.target[8, :, 2])
    np.testing.assert_allclose(shown[14].get_array(), 0.1 * one.sample.target[8, :, 2], rtol=1e-4)
    assert len({mesh.get_clim() for mesh in shown[10:15]}) == 1
    assert len(artists(figure, Quiver)) == 10


@pytest.mark.parametrize("kind", ["gif", "mp4"])
def test_an_animation_has_a_picture_for_each_step(tmp_path, kind):
    path = tmp_path / f"movie.{kind}"
    if kind == "mp4":
        imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    maps.animation(path, panel(times=4), target="pressure", picture=dataclasses.replace(FLOW, window=(0, 1, 0, 1)))
    if kind == "gif":
        from PIL import Image

        with Image.open(path) as movie:
            assert movie.n_frames == 4
    else:
        assert imageio_ffmpeg.count_frames_and_secs(str(path))[0] == 4


def test_a_prediction_of_zeros_and_a_constant_truth_can_be_drawn():
    one = panel()
    flat = dataclasses.replace(one.sample, target=torch.full_like(one.sample.target, 3.0))
    figure = maps.solutions([Panel("flat", flat, torch.zeros_like(flat.target))], picture=FLOW)
    assert style.rendered(figure).startswith(b"\x89PNG")
    assert style.rendered(figure, "svg").count(b"<path") < 5000  # shaded triangles are one picture there


def test_what_cannot_be_drawn_is_refused():
    one = panel()
    for request, words in (
        (({"target": 3}, None), "a channel between 0 and 2"),
        (({"target": -4}, None), "a channel between 0 and 2"),
        (({"input": 5}, None), "a channel between 0 and 2"),
        (({"vector": (0, 3)}, None), "a channel between 0 and 2"),
        (({"window": (0.5, 0.2, 0, 1)}, None), "left, right, bottom, top"),
        (({"window": (7.0, 8.0, 7.0, 8.0)}, None), "points in the window .* got none"),
        (({"window": (0, 1, 0, 1)}, (7, 7)), "a window only for scattered"),
        (({"vector": (0, 1)}, (7, 7)), "arrows only on scattered"),
    ):
        picture, grid = request
        with pytest.raises(InputError, match=words):
            maps.solutions([one], grid, picture=Picture(**picture))
