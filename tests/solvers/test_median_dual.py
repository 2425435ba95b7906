"""Dual volumes: they fill the mesh, they close, and gradients of linear functions are exact on them."""

import pytest
import torch

from oformer.errors import InputError
from oformer.solvers.median_dual import FAR, INTERIOR, WALL, median_dual
from tests.flow_meshes import box, o_mesh

MESHES = {
    "irregular airfoil": lambda: o_mesh(40, 10, shake=0.2),
    "irregular box": lambda: box(9, 7, 2.0, 1.0, WALL, shake=0.3),
}


@pytest.fixture(params=sorted(MESHES))
def mesh(request):
    return MESHES[request.param]()


def mesh_area(points, triangles):
    a, b, c = points[triangles].unbind(1)
    return ((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]).abs().sum() / 2


def test_volumes_fill_the_mesh(mesh):
    dual = median_dual(*mesh)
    assert (dual.volumes > 0).all()
    assert float(dual.volumes.sum()) == pytest.approx(float(mesh_area(*mesh[:2])), rel=1e-13)


def test_volumes_close(mesh):
    dual = median_dual(*mesh)
    left_over = dual.normals.sum(1) + dual.border
    assert float((left_over.norm(dim=0) / dual.normals.norm(dim=0).sum(0)).max()) < 1e-14


def test_what_a_face_gives_its_other_side_takes(mesh):
    dual = median_dual(*mesh)
    n = len(dual.volumes)
    faces = {
        (i, int(dual.neighbors[k, i])): dual.normals[:, k, i]
        for k in range(len(dual.neighbors))
        for i in range(n)
        if dual.real[k, i]
    }
    assert len(faces) == int(dual.real.sum())
    for (i, j), normal in faces.items():
        assert torch.equal(normal, -faces[j, i])


def test_padded_slots_lead_nowhere(mesh):
    dual = median_dual(*mesh)
    empty = dual.real == 0
    assert empty.any()
    assert torch.equal(dual.neighbors[empty], torch.arange(len(dual.volumes)).expand_as(empty)[empty])
    assert not dual.normals[:, empty].any()
    assert not dual.reaches[:, empty].any()


def test_gradients_of_linear_functions_are_exact_inside(mesh):
    """The sum of means times normals is the volume times the gradient."""
    points = mesh[0]
    dual = median_dual(*mesh)
    f = (points @ torch.tensor([1.3, -0.7], dtype=torch.float64) + 0.2)[dual.order]
    gradient = ((f + f[dual.neighbors]) / 2 * dual.normals).sum(1) / dual.volumes
    inside = gradient[:, : dual.far]
    expected = torch.tensor([[1.3], [-0.7]], dtype=torch.float64).expand_as(inside)
    torch.testing.assert_close(inside, expected, rtol=0, atol=1e-10)


def test_nodes_are_renumbered_by_kind():
    points, triangles, marks = o_mesh(40, 10)
    dual = median_dual(points, triangles, marks)
    assert torch.equal(dual.order.sort().values, torch.arange(len(points)))
    for part, kind in (((0, dual.far), INTERIOR), ((dual.far, dual.wall), FAR), ((dual.wall, None), WALL)):
        assert (marks[dual.order[slice(*part)]] == kind).all()
    assert not dual.border[:, : dual.far].any()


def test_neighbors_are_near_in_memory():
    generator = torch.Generator().manual_seed(1)
    points, triangles, marks = box(30, 30, 1.0, 1.0, FAR)
    shuffle = torch.randperm(len(points), generator=generator)
    back = shuffle.argsort()
    dual = median_dual(points[shuffle], back[triangles], marks[shuffle])
    inner = dual.neighbors[:, : dual.far]
    gap = (inner - torch.arange(dual.far)).abs()
    assert float(gap[inner < dual.far].double().mean()) < 60  # of 841; shuffled they would be 280 apart


def test_the_way_around_does_not_matter(mesh):
    points, triangles, marks = mesh
    one, other = median_dual(points, triangles, marks), median_dual(points, triangles.flip(1), marks)
    assert torch.equal(one.neighbors, other.neighbors)
    torch.testing.assert_close(one.normals, other.normals, rtol=1e-13, atol=1e-13)


def test_a_mirrored_mesh_has_a_mirrored_dual(mesh):
    points, triangles, marks = mesh
    flip = torch.tensor([1.0, -1.0], dtype=torch.float64)
    one, other = median_dual(points, triangles, marks), median_dual(points * flip, triangles, marks)
    assert torch.equal(one.order, other.order)
    assert torch.equal(one.neighbors, other.neighbors)
    assert torch.equal(one.normals * flip[:, None, None], other.normals)
    assert torch.equal(one.border * flip[:, None], other.border)
    assert torch.equal(one.volumes, other.volumes)


def test_bad_meshes_are_refused():
    points, triangles, marks = box(4, 4, 1.0, 1.0, WALL)
    turned = triangles.clone()
    turned[3] = turned[3].flip(0)
    with pytest.raises(InputError, match="all one way around, got 1 others"):
        median_dual(points, turned, marks)
    more = torch.cat([points, points[:1] + 9]), triangles, torch.cat([marks, marks[:1]])
    with pytest.raises(InputError, match="all corners of triangles, got 1 that are not"):
        median_dual(*more)
    with pytest.raises(InputError, match="numbers of the 25 points"):
        median_dual(points, triangles + 1, marks)
    with pytest.raises(InputError, match="at most two triangles on an edge"):
        median_dual(points, torch.cat([triangles, triangles[:8], triangles[:8]]), marks)
    broken = points.clone()
    broken[7] = torch.nan
    with pytest.raises(InputError, match="finite numbers in `points`"):
        median_dual(broken, triangles, marks)


def test_bad_marks_are_refused():
    points, triangles, marks = box(4, 4, 1.0, 1.0, WALL)
    inside = marks.clone()
    inside[12] = WALL
    with pytest.raises(InputError, match="0 inside, got 1 nodes marked otherwise"):
        median_dual(points, triangles, inside)
    with pytest.raises(InputError, match="got other numbers"):
        median_dual(points, triangles, marks * 4)
    mixed = marks.clone()
    mixed[0] = FAR
    with pytest.raises(InputError, match="wall or far field all around"):
        median_dual(points, triangles, mixed)
