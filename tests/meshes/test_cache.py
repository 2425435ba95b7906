"""Meshes by description: kept, saved, loaded, and shipped."""

import numpy as np
import pytest
import torch

import oformer.meshes.cache as cache
from oformer.errors import InputError
from oformer.files import save_arrays
from oformer.meshes.airfoil import Naca
from oformer.meshes.cache import DEFAULTS, DEFAULTS_FILE, load_meshes, mesh_of, save_defaults, save_meshes
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from oformer.meshes.triangles import Mesh

RANDOM = Annulus(0.1 + 0.2 / 3, (0.47, 1 / 1.9))


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What one test loads, the next one does not see."""
    monkeypatch.setattr(cache, "_loaded", {})


def same(one: Mesh, other: Mesh) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in cache.TYPES)


def test_asking_twice_gives_the_same_object():
    assert mesh_of(RANDOM) is mesh_of(Annulus(0.1 + 0.2 / 3, (0.47, 1 / 1.9)))
    assert mesh_of(Square(5)) is not mesh_of(Square(6))
    assert same(mesh_of(RANDOM), RANDOM.build())


def test_saved_and_loaded_meshes_need_no_mesher(tmp_path, monkeypatch):
    geometries = (RANDOM, LShape(0.3, 0.7, 2), Square(4), UShape(0.25))
    made = [mesh_of(geometry) for geometry in geometries]
    save_meshes(tmp_path / "meshes.safetensors", geometries)

    def refuse(self) -> Mesh:
        raise AssertionError("meshed again")

    for kind in (Annulus, LShape, Square, UShape):
        monkeypatch.setattr(kind, "build", refuse)
    cache._made.cache_clear()
    assert set(load_meshes(tmp_path / "meshes.safetensors")) == set(geometries)
    for geometry, mesh in zip(geometries, made, strict=True):
        again = mesh_of(geometry)
        assert again is not mesh
        assert same(again, mesh)
        assert again.triangles.dtype == torch.int64
        assert again.points.dtype == torch.float64


def test_the_same_meshes_give_the_same_bytes(tmp_path):
    save_meshes(tmp_path / "one", [RANDOM, Square(4)])
    cache._made.cache_clear()
    save_meshes(tmp_path / "two", [Square(4), RANDOM])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


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
    for geometry, fresh in cache._read(tmp_path / "again").items():
        shipped = mesh_of(geometry)
        border = shipped.marks != 0
        assert len(fresh.points) == pytest.approx(len(shipped.points), rel=0.02)
        torch.testing.assert_close(fresh.points[fresh.marks != 0], shipped.points[border], rtol=0, atol=1e-12)
        assert float(fresh.quality.mean()) == pytest.approx(float(shipped.quality.mean()), abs=0.01)
        assert float(fresh.areas.sum()) == pytest.approx(float(shipped.areas.sum()), rel=1e-12)


@pytest.mark.parametrize("geometry", [Disc(), Annulus(), LShape(), UShape()])
def test_shipped_shapes_are_those_of_the_mesher(geometry):
    fresh, shipped = geometry.build(), mesh_of(geometry)
    assert len(fresh.points) == pytest.approx(len(shipped.points), rel=0.02)
    torch.testing.assert_close(fresh.points[fresh.marks != 0], shipped.points[shipped.marks != 0], rtol=0, atol=1e-12)


def test_foreign_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        load_meshes(tmp_path / "absent")
    (tmp_path / "noise").write_bytes(b"no mesh at all")
    with pytest.raises(InputError, match="safetensors"):
        load_meshes(tmp_path / "noise")
    save_arrays(tmp_path / "other", {"weights": np.zeros(3)})
    with pytest.raises(InputError, match="save_meshes"):
        load_meshes(tmp_path / "other")
    parts = {"points": np.zeros((3, 2)), "triangles": np.zeros((1, 3), np.int32), "marks": np.zeros(3, np.int32)}
    parts["circles"] = np.zeros((0, 3))
    save_arrays(tmp_path / "unnamed", {f"disc/{name}": array for name, array in parts.items()})
    with pytest.raises(InputError, match="JSON"):
        load_meshes(tmp_path / "unnamed")
    key = '{"cells":4,"type":"Square"}'
    save_arrays(tmp_path / "flat", {f"{key}/{name}": array for name, array in parts.items()})
    with pytest.raises(InputError, match="in none"):
        load_meshes(tmp_path / "flat")
    assert len(mesh_of(Square(4)).points) == 25  # nothing of it was kept
    save_arrays(tmp_path / "unknown", {f'{{"cells":4,"type":"Cube"}}/{n}': a for n, a in parts.items()})
    with pytest.raises(InputError, match="Square"):
        load_meshes(tmp_path / "unknown")
