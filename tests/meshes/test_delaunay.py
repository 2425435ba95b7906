"""The mesher: borders kept, sizes met, angles wide, the same mesh again."""

import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.meshes.delaunay import fill, graded, spread
from tests.flow_meshes import quality


def ring(radius: float, points: int) -> np.ndarray:
    angle = 2 * math.pi * np.arange(points) / points
    return radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def constant(size: float):
    return lambda points: np.full(len(points), size)


def lengths(mesh) -> torch.Tensor:
    return (mesh.points[mesh.edges[:, 0]] - mesh.points[mesh.edges[:, 1]]).norm(dim=1)


def test_border_points_are_the_given_ones_with_their_marks():
    loops = [ring(1.0, 40), ring(0.3, 20)[::-1]]
    mesh = fill(loops, (5, 7), constant(0.15))
    assert torch.equal(mesh.points[:60], torch.from_numpy(np.concatenate(loops)))
    assert mesh.marks.tolist() == [5] * 40 + [7] * 20 + [0] * (len(mesh.points) - 60)
    assert len(mesh.border) == 60
    polygons = (20 * math.sin(2 * math.pi / 40), 10 * 0.09 * math.sin(2 * math.pi / 20))
    assert float(mesh.areas.sum()) == pytest.approx(polygons[0] - polygons[1], rel=1e-12)


@pytest.mark.parametrize("size", [0.2, 0.1, 0.05])
def test_edges_have_the_wished_length(size):
    mesh = fill([ring(1.0, round(2 * math.pi / size))], (1,), constant(size))
    assert float(lengths(mesh).mean()) == pytest.approx(size, rel=0.1)
    assert lengths(mesh).max() < 1.8 * size
    assert quality(mesh).min() > 0.5
    assert quality(mesh).mean() > 0.9


def test_five_decades_of_size():
    """A hole a hundred-thousandth of the disc: angles stay wide all the way."""
    loops = [ring(1.0, 30), ring(1e-5, 12)[::-1]]
    mesh = fill(loops, (1, 2), graded(loops, 0.25, 0.25))
    assert quality(mesh).min() > 0.5
    assert lengths(mesh).min() < 1e-5
    middles = mesh.points[mesh.edges].mean(1).numpy()
    ratio = lengths(mesh).numpy() / graded(loops, 0.25, 0.25)(middles)
    assert ratio.min() > 0.4
    assert ratio.max() < 2


def test_the_same_again():
    one, two = (fill([ring(1.0, 40)], (1,), constant(0.15)) for _ in range(2))
    assert torch.equal(one.points, two.points)
    assert torch.equal(one.triangles, two.triangles)


def test_an_edge_that_is_lost_is_refused():
    """The long side of a thin slit, with points close behind it and others before it: no empty circle touches it."""
    behind = np.stack([np.linspace(-0.5, 0.5, 21), np.full(21, -0.01)], 1)
    slit = np.concatenate([behind, [[0.5, 0.01], [-0.5, 0.01]]])[::-1]
    with pytest.raises(InputError, match="of 53 that cannot"):
        fill([ring(0.6, 30), slit], (1, 2), constant(0.1))


def test_spread_follows_the_size():
    curve = np.stack([np.linspace(0, 1, 5001), np.zeros(5001)], 1)
    points = spread(curve, lambda x: 0.01 + 0.1 * x[:, 0])
    steps = np.diff(points[:, 0])
    wished = 0.01 + 0.1 * (points[1:, 0] + points[:-1, 0]) / 2
    np.testing.assert_allclose(steps / wished, (steps / wished).mean(), rtol=1e-3)
    assert (steps / wished).mean() == pytest.approx(1, abs=0.05)
    assert points[0].tolist() == [0, 0]
    assert points[-1].tolist() == [1, 0]
    assert len(spread(curve, lambda x: 0.01 + 0.1 * x[:, 0], 7)) == 8
