"""The shapes: where their points are, how many, and what is held."""

import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from tests.flow_meshes import quality

HALF = torch.tensor([0.5, 0.5], dtype=torch.float64)


def grid(n: int = 401) -> torch.Tensor:
    axis = torch.linspace(0, 1, n, dtype=torch.float64)
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)


@pytest.mark.parametrize(
    ("shape", "published", "area"),
    [
        (Square(), 256, 1.0),
        (Disc(), 252, math.pi / 4),
        (Annulus(), 82, math.pi * (0.25 - 0.12**2)),
        (LShape(), 80, 0.75),
        (UShape(), 68, 0.625),
    ],
)
def test_default_meshes_have_about_as_many_points_as_the_published(shape, published, area):
    mesh = shape.build()
    assert len(mesh.points) == pytest.approx(published, rel=0.07)
    assert float(mesh.areas.sum()) == pytest.approx(area, rel=0.02)
    assert quality(mesh).min() > 0.6
    assert torch.equal(mesh.marks != 0, torch.isin(torch.arange(len(mesh.points)), mesh.border.unique()))


def test_the_square_is_structured():
    mesh = Square(3).build()
    assert len(mesh.points) == 16
    assert len(mesh.triangles) == 18
    assert mesh.areas.allclose(torch.full((18,), 1 / 18, dtype=torch.float64))
    diagonals = mesh.edges[~mesh.outer]
    steps = (mesh.points[diagonals[:, 1]] - mesh.points[diagonals[:, 0]]) * 3
    slanted = steps[(steps.abs() > 0.5).all(1)]
    assert len(slanted) == 9
    assert torch.allclose(slanted, torch.ones_like(slanted))  # all the same way


@pytest.mark.parametrize("resolution", [8, 15, 19])
def test_points_of_the_disc_lie_on_its_rim(resolution):
    mesh = Disc(resolution).build()
    radii = (mesh.points - HALF).norm(dim=1)
    assert ((radii - 0.5).abs() < 1e-15)[mesh.marks == 1].all()
    assert radii[mesh.marks == 0].max() < 0.5 - 0.4 / resolution
    assert int((mesh.marks == 1).sum()) == round(math.pi * resolution)


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_are_meshed_well(seed):
    """Also where hole and rim nearly touch."""
    r = np.random.default_rng(seed)
    near = Annulus(0.25, (0.5 + 0.212 * math.cos(seed), 0.5 + 0.212 * math.sin(seed)))
    for shape in (
        Annulus(r.uniform(0.05, 0.25), tuple(r.uniform(0.35, 0.65, 2).tolist())),
        near,
        LShape(r.uniform(0.2, 0.8), r.uniform(0.2, 0.8), int(r.integers(4))),
        UShape(r.uniform(0.2, 0.6), r.uniform(0.2, 0.8)),
    ):
        mesh = shape.build()
        assert quality(mesh).min() > 0.4
        assert 40 < len(mesh.points) < 200
        held = shape.held(mesh.points)
        assert held[mesh.marks != 0].all()  # the border is held
        assert not held.all()


def test_corners_of_the_l():
    """Cutting another corner mirrors the area that is left."""
    for corner, (x, y) in enumerate([(0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9)]):
        shape = LShape(0.3, 0.6, corner)
        mesh = shape.build()
        assert float(mesh.areas.sum()) == pytest.approx(1 - 0.18, rel=1e-12)
        inside = (mesh.points - torch.tensor([x, y], dtype=torch.float64)).abs() < 0.19
        assert not inside.all(1).any()  # no point within the cut
        centers = mesh.points[mesh.triangles].mean(1)
        assert not ((centers[:, 0] - x).abs() < 0.19).logical_and((centers[:, 1] - y).abs() < 0.45).any()


def test_what_the_published_data_hold():
    points = grid()
    x, y = points.unbind(1)
    r2 = (points - HALF).square().sum(1)
    assert torch.equal(Square().held(points), ((points == 0) | (points == 1)).any(1))
    assert torch.equal(Disc().held(points), r2 > 0.25 - (2 / 15) ** 2)
    hole = (points - torch.tensor([0.4, 0.55], dtype=torch.float64)).square().sum(1)
    expected = (r2 > 0.25 - 1 / 64) | (hole < 0.01 + 1 / 128)
    assert torch.equal(Annulus(0.1, (0.4, 0.55)).held(points), expected)
    border = ((points == 0) | (points == 1)).any(1)
    assert torch.equal(LShape().held(points), border | ((x < 0.501) & (y < 0.501)))
    assert torch.equal(LShape(0.3, 0.4, 2).held(points), border | ((x > 0.699) & (y > 0.599)))
    assert torch.equal(UShape().held(points), border | (((x - 0.5).abs() < 0.251) & (y > 0.249)))


def test_impossible_shapes_are_refused():
    for make, sentence in (
        (lambda: Square(1), "cells"),
        (lambda: Disc(2), "resolution"),
        (lambda: Annulus(0.25, (0.9, 0.5)), "hole"),
        (lambda: Annulus(0.6), "hole"),
        (lambda: Annulus(math.nan), "hole"),
        (lambda: LShape(0.95), "width"),
        (lambda: LShape(corner=4), "corner"),
        (lambda: UShape(depth=1.0), "depth"),
        (lambda: UShape(size=1.0), "size"),
    ):
        with pytest.raises(InputError, match=sentence):
            make()
