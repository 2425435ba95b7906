"""Meshes by description: kept, and shipped."""

import pytest
import torch

import oformer.meshes.cache as cache
from oformer.meshes.airfoil import Naca
from oformer.meshes.cache import DEFAULTS, DEFAULTS_FILE, mesh_of, save_defaults
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from oformer.meshes.triangles import Mesh
from tests.flow_meshes import quality

RANDOM = Annulus(0.1 + 0.2 / 3, (0.47, 1 / 1.9))


def same(one: Mesh, other: Mesh) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in cache.TYPES)


def test_asking_twice_gives_the_same_object():
    assert mesh_of(RANDOM) is mesh_of(Annulus(0.1 + 0.2 / 3, (0.47, 1 / 1.9)))
    assert mesh_of(Square(5)) is not mesh_of(Square(6))
    assert same(mesh_of(RANDOM), RANDOM.build())


def test_defaults_are_shipped_and_small(monkeypatch):
    assert DEFAULTS_FILE.stat().st_size < 400_000
    assert {type(geometry) for geometry in DEFAULTS} == {Disc, Annulus, LShape, UShape, Naca}
    monkeypatch.setattr(cache, "_made", None)  # to be called by nobody
    for geometry in DEFAULTS:
        mesh_of(geometry).check()


@pytest.mark.slow
def test_shipped_meshes_are_those_of_the_mesher(tmp_path):
    """Bit by bit where they were made; elsewhere Qhull may decide a tie otherwise, and little else changes."""
    save_defaults(tmp_path / "again")
    save_defaults(tmp_path / "once more")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "once more").read_bytes()
    for geometry, fresh in cache._read(tmp_path / "again").items():
        shipped = mesh_of(geometry)
        border = shipped.marks != 0
        assert len(fresh.points) == pytest.approx(len(shipped.points), rel=0.02)
        torch.testing.assert_close(fresh.points[fresh.marks != 0], shipped.points[border], rtol=0, atol=1e-12)
        assert float(quality(fresh).mean()) == pytest.approx(float(quality(shipped).mean()), abs=0.01)
        assert float(fresh.areas.sum()) == pytest.approx(float(shipped.areas.sum()), rel=1e-12)


@pytest.mark.parametrize("geometry", [Disc(), Annulus(), LShape(), UShape()])
def test_shipped_shapes_are_those_of_the_mesher(geometry):
    fresh, shipped = geometry.build(), mesh_of(geometry)
    assert len(fresh.points) == pytest.approx(len(shipped.points), rel=0.02)
    torch.testing.assert_close(fresh.points[fresh.marks != 0], shipped.points[shipped.marks != 0], rtol=0, atol=1e-12)
