"""The Poisson solver against exact solutions, orders of convergence, conservation, symmetries and linearity."""

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import skfem
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.meshes.cache import mesh_of
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from oformer.meshes.triangles import Mesh
from oformer.solvers.poisson_fem import Poisson
from tests.flow_meshes import areas_around

SHAPES = [Square(9), Disc(8), Annulus(), LShape(), UShape()]


def ones(mesh: Mesh) -> Tensor:
    return torch.ones(1, len(mesh.points), dtype=torch.float64)


def load_of(solver: Poisson, source: Callable[[Tensor], Tensor]) -> Tensor:
    """The integrals of a source, known everywhere, against the quadratic basis functions."""
    x = np.asarray(solver._basis.global_coordinates())
    values = source(torch.from_numpy(x.reshape(2, -1).T.copy())).numpy().reshape(x.shape[1:])
    return torch.from_numpy(skfem.LinearForm(lambda v, w: values * v).assemble(solver._basis))


def potential(solver: Poisson, load: Tensor, values: Tensor) -> Tensor:
    """u with values at the held nodes that are not zero: they are taken to the right-hand side."""
    given = torch.where(solver.held, values, 0.0)
    return solver.potential(load - torch.from_numpy(solver.stiffness @ given.numpy())) + given


def waves(points: Tensor) -> Tensor:
    x, y = (math.pi * points).unbind(1)
    return torch.sin(x) * torch.sin(y)


def wave_errors(n: int) -> tuple[float, float]:
    """Of potential and projected field at the mesh points, u = sin(pi x) sin(pi y)."""
    mesh = Square(n).build()
    solver = Poisson(mesh, Square(n).held)
    u = solver.potential(load_of(solver, lambda p: 2 * math.pi**2 * waves(p)))
    x, y = (math.pi * mesh.points).unbind(1)
    slopes = math.pi * torch.stack([torch.cos(x) * torch.sin(y), torch.sin(x) * torch.cos(y)])
    error = (u[: len(mesh.points)] - waves(mesh.points)).abs().max()
    return float(error), float((solver.gradient(u) - slopes).abs().max())


def test_orders_on_the_square_and_the_known_errors():
    """Fourth order at the points (superconvergent there), second of the projected field; figures measured by others."""
    sizes = (8, 15, 30)
    errors = np.array([wave_errors(n) for n in sizes])
    np.testing.assert_allclose(errors[:, 0], [2.3e-4, 1.9e-5, 1.2e-6], rtol=0.04)
    np.testing.assert_allclose(errors[:, 1], [8.1e-2, 2.3e-2, 5.7e-3], rtol=0.02)
    rates = -np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert rates[0] == pytest.approx(4, abs=0.05)
    assert rates[1] == pytest.approx(2, abs=0.05)


def test_third_order_in_the_mean_on_an_irregular_mesh():
    """Where no symmetry helps: the theory of quadratic elements."""
    errors = []
    for size in (0.2, 0.1, 0.05):
        mesh = UShape(size=size).build()
        solver = Poisson(mesh)
        load = load_of(solver, lambda p: 2 * math.pi**2 * waves(p))
        u = potential(solver, load, waves(solver.nodes))
        errors.append(float(((u[: len(mesh.points)] - waves(mesh.points)).square() * areas_around(mesh)).sum().sqrt()))
    rate = -np.polyfit(np.log([1, 2, 4]), np.log(errors), 1)[0]
    assert rate > 2.8


def test_a_linear_source_is_what_is_known_at_the_points():
    """Integrated exactly: the load of a linear function equals the load of its values at the points."""
    for shape in SHAPES[:1] + SHAPES[3:]:
        mesh = shape.build()
        solver = Poisson(mesh)
        plane = lambda p: 1 + 2 * p[:, 0] - 3 * p[:, 1]  # noqa: E731
        u = solver.potential(load_of(solver, plane))
        got, slope = solver.solve(plane(mesh.points)[None])
        torch.testing.assert_close(got[0], u[: len(mesh.points)], rtol=0, atol=1e-14)
        torch.testing.assert_close(slope[0].mT, solver.gradient(u), rtol=0, atol=1e-13)


def disc_error(mesh: Mesh) -> tuple[float, float]:
    u, slope = Poisson(mesh).solve(ones(mesh))
    offset = mesh.points - 0.5
    exact = (0.25 - offset.square().sum(1)) / 4
    return float((u[0] - exact).abs().max()), float((slope[0] + offset / 2).abs().max())


def test_the_disc_has_a_closed_form_and_round_edges_meet_it():
    """-Δu = 1: u = (R² - r²)/4. With straight edges the polygon's error remains, a hundred times larger."""
    errors = []
    for resolution in (8, 15, 30):
        mesh = Disc(resolution).build()
        potential, slope = disc_error(mesh)
        errors.append(potential)
        polygon = disc_error(Mesh(mesh.points, mesh.triangles, mesh.marks, torch.zeros(0, 3, dtype=torch.float64)))
        assert polygon[0] > 50 * potential
        assert slope < 0.01 * 0.25
    assert errors[1] < 1.5e-6
    assert -np.polyfit(np.log([8, 15, 30]), np.log(errors), 1)[0] > 2.5


def test_the_annulus_has_a_closed_form():
    """u = (R² - r²)/4 - c log(R/r), zero on both circles."""
    hole, rim = 0.12, 0.5
    c = (rim**2 - hole**2) / 4 / math.log(rim / hole)
    errors = []
    for size in (0.125, 0.0625, 0.03125):
        mesh = Annulus(hole, size=size).build()
        u, slope = Poisson(mesh).solve(ones(mesh))
        offset = mesh.points - 0.5
        r = offset.norm(dim=1)
        exact = (rim**2 - r**2) / 4 - c * torch.log(rim / r)
        errors.append(float((u[0] - exact).abs().max() / exact.abs().max()))
        along = (slope[0] * offset).sum(1) / r
        across = slope[0, :, 0] * offset[:, 1] - slope[0, :, 1] * offset[:, 0]
        worst = (along - (c / r - r / 2)).abs().max()
        assert worst < 3 * size * 0.28  # the field is steep at the hole
        assert across.abs().max() < 0.01
    assert errors[0] < 5e-3
    assert errors[2] < 3e-4


def test_given_values_are_met_and_harmonic_polynomials_are_exact():
    """Quadratic harmonic functions lie in the space where edges are straight: no error at all."""
    mesh = LShape().build()
    solver = Poisson(mesh)
    exact = lambda p: p[:, 0] ** 2 - p[:, 1] ** 2 + 3 * p[:, 0] * p[:, 1] - p[:, 1] + 2  # noqa: E731
    u = potential(solver, torch.zeros(len(solver.nodes), dtype=torch.float64), exact(solver.nodes))
    torch.testing.assert_close(u, exact(solver.nodes), rtol=0, atol=1e-12)
    x, y = mesh.points.unbind(1)
    expected = torch.stack([2 * x + 3 * y, -2 * y + 3 * x - 1])
    torch.testing.assert_close(solver.gradient(u), expected, rtol=0, atol=1e-11)


def test_many_loads_at_once():
    mesh = Square(6).build()
    solver = Poisson(mesh)
    loads = torch.randn(len(solver.nodes), 3, dtype=torch.float64)
    together = solver.potential(loads)
    for k in range(3):
        torch.testing.assert_close(together[:, k], solver.potential(loads[:, k]), rtol=0, atol=1e-13)
        torch.testing.assert_close(solver.gradient(together)[..., k], solver.gradient(together[:, k]))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_flows_out_is_what_the_source_gives(shape):
    """Gauss's law: the reactions of the held nodes, which are fluxes through the border, sum to the source."""
    mesh = shape.build()
    solver = Poisson(mesh)
    load = load_of(solver, lambda p: 1 + torch.sin(5 * p[:, 0]) * p[:, 1])
    u = solver.potential(load)
    reaction = torch.from_numpy(solver.stiffness @ u.numpy()) - load
    assert reaction[~solver.held].abs().max() < 1e-14
    assert float(-reaction[solver.held].sum()) == pytest.approx(float(load.sum()), rel=1e-12)


def test_the_projected_field_obeys_gauss_too():
    """To the order of its projection: through the edges of the rim, from the values at their ends."""
    errors = []
    for resolution in (8, 16, 32):
        mesh = Disc(resolution).build()
        solver = Poisson(mesh)
        slope = solver.gradient(solver.potential(load_of(solver, lambda p: torch.ones_like(p[:, 0])))).mT
        a, b = mesh.border.unbind(1)
        along = mesh.points[b] - mesh.points[a]
        outward = torch.stack([along[:, 1], -along[:, 0]], 1)
        flux = -((slope[a] + slope[b]) / 2 * outward).sum()
        errors.append(abs(float(flux) - math.pi / 4))
    assert errors[2] < errors[1] < errors[0] < 0.03
    assert errors[2] < 3e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_superposition_and_positivity(shape):
    mesh = shape.build()
    solver = Poisson(mesh, shape.held)
    f = torch.rand(2, len(mesh.points), dtype=torch.float64)
    u, slope = solver.solve(torch.cat([f, f.sum(0, keepdim=True) * 2]))
    torch.testing.assert_close(u[2], 2 * (u[0] + u[1]), rtol=0, atol=1e-15)
    torch.testing.assert_close(slope[2], 2 * (slope[0] + slope[1]), rtol=0, atol=1e-14)
    free = ~solver.held[: len(mesh.points)]
    assert (u[:, free] > 0).all()
    assert (u[:, ~free] == 0).all()


def test_the_response_is_symmetric():
    """What a source at one point does at another, seen through its hat function, the other does at the one."""
    solver = Poisson(LShape().build())
    hats = solver._linear_load
    green = torch.from_numpy(hats.T @ solver.potential(torch.from_numpy(hats.toarray())).numpy())
    torch.testing.assert_close(green, green.mT, rtol=0, atol=1e-15)


def test_mirror_symmetry():
    """The mesh is not its own image; the answer on the image of the mesh is the image of the answer."""
    mesh = mesh_of(UShape())
    flip = torch.tensor([[-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    image = mesh.moved(flip, torch.tensor([0.5, 0.5], dtype=torch.float64))
    source = torch.rand(1, len(mesh.points), dtype=torch.float64)
    u, slope = Poisson(mesh).solve(source)
    v, turned = Poisson(image).solve(source)
    torch.testing.assert_close(v, u, rtol=0, atol=1e-15)
    torch.testing.assert_close(turned, slope @ flip, rtol=0, atol=1e-14)


def test_a_symmetric_mesh_and_source_give_a_symmetric_answer():
    """The diagonals of the square map onto themselves under the exchange of x and y."""
    mesh = Square(12).build()
    n = 13
    f = torch.rand(n, n, dtype=torch.float64)
    f = f + f.mT
    u, slope = Poisson(mesh).solve(f.reshape(1, -1))
    u = u.view(n, n)
    torch.testing.assert_close(u, u.mT, rtol=0, atol=1e-15)
    torch.testing.assert_close(slope.view(n, n, 2)[..., 0], slope.view(n, n, 2)[..., 1].mT, rtol=0, atol=1e-14)


def test_held_edges_follow_their_middles():
    """At two corners of the square an inner edge joins border points: its middle is free, as in FEniCS."""
    solver = Poisson(Square(4).build(), Square(4).held)
    middles = solver.nodes[25:][solver.held[25:]]
    assert ((middles == 0) | (middles == 1)).any(1).all()
    assert len(middles) == 16
    assert torch.equal(solver.held, Poisson(Square(4).build()).held)


def test_points_near_the_border_are_held_where_the_predicate_says():
    """A wide predicate holds inner edges too; a point that satisfies it alone stays free."""
    mesh = Square(10).build()
    wide = Poisson(mesh, lambda p: ((p < 0.14) | (p > 0.86)).any(1))
    inner = wide.held[:121].view(11, 11)
    assert inner[1].all()
    assert not inner[2, 2:-2].any()
    u, _ = wide.solve(ones(mesh))
    narrow = Poisson(mesh).solve(ones(mesh))[0]
    assert float(u.max()) == pytest.approx(0.0736713 * 0.64, rel=1e-3)  # the square of side 0.8
    assert (narrow >= u - 1e-15).all()
    spot = torch.tensor([0.5, 0.5], dtype=torch.float64)
    lonely = Poisson(mesh, lambda p: ((p == 0) | (p == 1)).any(1) | ((p - spot).abs() < 1e-9).all(1))
    assert not lonely.held[60]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_source_has_the_same_bits_in_any_batch(shape):
    mesh = shape.build()
    f = torch.rand(9, len(mesh.points), dtype=torch.float64)
    u, slope = Poisson(mesh).solve(f)
    for rows in ([4], [7, 2], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
        again, slope_again = Poisson(mesh).solve(f[rows])
        assert torch.equal(again, u[rows])
        assert torch.equal(slope_again, slope[rows])


def refused(sentence: str, work: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=sentence):
        work()


def test_impossible_requests_are_refused():
    mesh = Square(3).build()
    solver = Poisson(mesh)
    refused("edge on which u is zero", lambda: Poisson(mesh, lambda p: p[:, 0] > 2))
    refused("each of 16 points", lambda: solver.solve(torch.zeros(1, 15, dtype=torch.float64)))
    refused("at least one source", lambda: solver.solve(torch.zeros(0, 16, dtype=torch.float64)))
    refused("finite", lambda: solver.solve(torch.full((1, 16), math.inf, dtype=torch.float64)))
    refused("finite", lambda: solver.potential(torch.full((49,), math.nan, dtype=torch.float64)))


def test_all_nodes_held_leave_nothing_to_solve():
    mesh = Square(3).build()
    u, slope = Poisson(mesh, lambda p: torch.ones(len(p), dtype=torch.bool)).solve(ones(mesh))
    assert (u == 0).all()
    assert (slope == 0).all()


def test_missing_scikit_fem_is_said_plainly(monkeypatch):
    monkeypatch.setitem(sys.modules, "skfem", None)
    refused(r"pip install oformer\[mesh\]", lambda: Poisson(Square(3).build()))
