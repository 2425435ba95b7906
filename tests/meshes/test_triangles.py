"""Triangle meshes: areas, weights, borders, and what a check refuses."""

import math

import pytest
import torch

from oformer.errors import InputError
from oformer.meshes.shapes import Annulus, Disc, LShape, Square
from oformer.meshes.triangles import Mesh, edge_middles
from tests.flow_meshes import areas_around, quality


def two_triangles() -> Mesh:
    """The unit square, cut once."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    return Mesh(points, torch.tensor([[0, 1, 2], [0, 2, 3]]), torch.ones(4, dtype=torch.int64))


def test_areas_weights_and_edges_by_hand():
    mesh = two_triangles().check()
    assert mesh.areas.tolist() == [0.5, 0.5]
    torch.testing.assert_close(areas_around(mesh), torch.tensor([2, 1, 2, 1], dtype=torch.float64) / 6)
    assert mesh.edges.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [2, 3]]
    assert sorted(mesh.border.tolist()) == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert mesh.outer.tolist() == [True, False, True, True, True]


def test_quality_is_one_for_an_equilateral_triangle_and_falls_to_zero():
    def of_triangle(x: float, y: float) -> float:
        points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [x, y]], dtype=torch.float64)
        mesh = Mesh(points, torch.tensor([[0, 1, 2]]), torch.zeros(3, dtype=torch.int64))
        return float(quality(mesh)[0])

    assert of_triangle(0.5, math.sqrt(3) / 2) == pytest.approx(1, abs=1e-14)
    # A right isosceles triangle: inradius 1 - 1/sqrt(2), circumradius 1/sqrt(2).
    assert of_triangle(0.0, 1.0) == pytest.approx(2 * (1 - math.sqrt(0.5)) / math.sqrt(0.5), abs=1e-14)
    assert of_triangle(0.5, 1e-6) < 1e-10


@pytest.mark.parametrize("shape", [Square(7), Disc(8), Annulus(), LShape()])
def test_weights_integrate_linear_functions_exactly(shape):
    """Over the polygon that the triangles cover, whose moments Green's theorem gives from its border."""
    mesh = shape.build()
    a, b = mesh.points[mesh.border].unbind(1)
    cross = a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]
    area, moments = cross.sum() / 2, ((a + b) * cross[:, None]).sum(0) / 6
    assert float(area) == pytest.approx(float(mesh.areas.sum()), rel=1e-13)
    weights = areas_around(mesh)
    torch.testing.assert_close(weights @ mesh.points, moments, rtol=1e-12, atol=0)
    assert float(weights.sum()) == pytest.approx(float(area), abs=1e-14)


def test_border_runs_around_with_the_domain_on_its_left():
    mesh = Annulus().build()
    a, b = mesh.points[mesh.border].unbind(1)
    around = (a - 0.5)[:, 0] * (b - 0.5)[:, 1] - (a - 0.5)[:, 1] * (b - 0.5)[:, 0]
    outer = mesh.marks[mesh.border[:, 0]] == 1
    assert (around[outer] > 0).all()
    assert (around[~outer] < 0).all()
    assert torch.equal(mesh.border[:, 0].sort().values, mesh.border[:, 1].sort().values)  # closed


def test_middles_lie_on_the_circles_and_only_border_edges_bend():
    mesh = Annulus(0.2, (0.45, 0.55)).build()
    middles = edge_middles(mesh)
    straight = mesh.points[mesh.edges].mean(1)
    assert torch.equal(middles[~mesh.outer], straight[~mesh.outer])
    rim = ((middles[mesh.outer] - 0.5).norm(dim=1) - 0.5).abs()
    hole = ((middles[mesh.outer] - torch.tensor([0.45, 0.55], dtype=torch.float64)).norm(dim=1) - 0.2).abs()
    assert torch.minimum(rim, hole).max() < 1e-12
    assert torch.equal(edge_middles(two_triangles()), two_triangles().points[two_triangles().edges].mean(1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_moving_keeps_areas_circles_and_orientation(sign):
    mesh = Annulus().build()
    c, s = math.cos(0.7), math.sin(0.7)
    matrix = torch.tensor([[c, -s * sign], [s, c * sign]], dtype=torch.float64)
    center = torch.tensor([0.5, -0.25], dtype=torch.float64)
    moved = mesh.moved(matrix, center).check()
    torch.testing.assert_close(moved.areas, mesh.areas, rtol=1e-12, atol=0)
    lengths, before = ((m.points[m.edges[:, 0]] - m.points[m.edges[:, 1]]).norm(dim=1) for m in (moved, mesh))
    torch.testing.assert_close(lengths, before, rtol=1e-12, atol=0)
    bent = (edge_middles(moved) - moved.points[moved.edges].mean(1)).norm(dim=1)
    expected = (edge_middles(mesh) - mesh.points[mesh.edges].mean(1)).norm(dim=1)
    torch.testing.assert_close(bent, expected, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="orthogonal"):
        mesh.moved(2 * matrix, center)


def changed(points=None, triangles=None, marks=None) -> Mesh:
    mesh = two_triangles()
    return Mesh(
        mesh.points if points is None else torch.tensor(points, dtype=torch.float64),
        mesh.triangles if triangles is None else torch.tensor(triangles),
        mesh.marks if marks is None else torch.tensor(marks),
    )


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        (changed(triangles=[[0, 1, 2], [0, 3, 2]]), "counterclockwise"),
        (changed(triangles=[[0, 1, 2], [0, 2, 4]]), "points 0 to 3"),
        (changed(triangles=[[0, 1, 2], [-1, 0, 2]]), "points 0 to 3"),
        (changed(triangles=[[0, 1, 2]]), "1 points in none"),
        (changed(triangles=[[0, 1, 2], [0, 2, 3], [0, 1, 2]]), "overlap"),
        (changed(points=[[0, 0], [1, 0], [1, 1], [0, math.nan]]), "finite"),
        (changed(points=[[0, 0], [1, 0], [1, 1], [0.5, 0.5]]), "positive area"),
    ],
)
def test_what_no_solver_can_use_is_refused(mesh, sentence):
    with pytest.raises(InputError, match=sentence):
        mesh.check()


def test_a_hanging_point_is_refused():
    """Two triangles on one side of a long edge, one on the other: every edge has a partner but for this."""
    points = torch.tensor([[0, 0], [1, 0], [0.5, 1], [0.5, 0], [0.5, -1]], dtype=torch.float64)
    triangles = torch.tensor([[0, 1, 2], [0, 4, 3], [3, 4, 1]])
    with pytest.raises(InputError, match="1 points within a side"):
        Mesh(points, triangles, torch.zeros(5, dtype=torch.int64)).check()


def test_a_point_given_twice_is_refused():
    points = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1], [0, 0], [1, 1]], dtype=torch.float64)
    with pytest.raises(InputError, match="whole sides"):
        Mesh(points, torch.tensor([[0, 1, 2], [4, 5, 3]]), torch.zeros(6, dtype=torch.int64)).check()


def test_an_empty_mesh_is_refused():
    with pytest.raises(InputError, match="at least one triangle"):
        Mesh(torch.zeros(3, 2).double(), torch.zeros(0, 3).long(), torch.zeros(3).long()).check()
