"""Meshes by their description: made once, kept, and carried between machines as small arrays.

A geometry is a frozen dataclass of numbers; the same one gives the same mesh. Meshing depends on the last bits of the
Delaunay triangulation and hence on the machine; a file of meshes does not. The default ones come with the package
(`defaults.safetensors`, made by `save_defaults`), others travel by `save_meshes` and `load_meshes`: what was loaded is
not meshed again.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from oformer.config import from_json, to_json
from oformer.errors import InputError, unknown_name
from oformer.files import map_arrays, save_arrays
from oformer.meshes.airfoil import Naca
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from oformer.meshes.triangles import Mesh

Geometry: TypeAlias = Square | Disc | Annulus | LShape | UShape | Naca
KINDS: dict[str, type[Geometry]] = {kind.__name__: kind for kind in (Square, Disc, Annulus, LShape, UShape, Naca)}

DEFAULTS: tuple[Geometry, ...] = (Disc(), Annulus(), LShape(), UShape(), Naca())  # a square is made in no time
DEFAULTS_FILE = Path(__file__).with_name("defaults.safetensors")

KEPT = 256  # meshes of random shapes in memory
TYPES = {"points": np.float64, "triangles": np.int32, "marks": np.int32, "circles": np.float64}

_loaded: dict[Geometry, Mesh] = {}


def mesh_of(geometry: Geometry) -> Mesh:
    """The mesh of a geometry: loaded, shipped with the package, or made now and kept; the same object again.

    Treat it as read-only: all who ask share it.
    """
    if geometry in _loaded:
        return _loaded[geometry]
    if geometry in _shipped():
        return _shipped()[geometry]
    return _made(geometry)


def save_meshes(path: Path | str, geometries: Iterable[Geometry]) -> None:
    """Write the meshes of these geometries to one safetensors file; the same bytes for the same meshes.

    Args:
        path: of the file.
        geometries: what cannot be had from memory or the package is made.
    """
    _write(Path(path), {geometry: mesh_of(geometry) for geometry in geometries})


def load_meshes(path: Path | str) -> tuple[Geometry, ...]:
    """Read meshes that `save_meshes` wrote: from now on `mesh_of` gives these.

    Returns:
        The geometries that the file holds.
    """
    meshes = _read(Path(path))
    for mesh in meshes.values():
        mesh.check()
    _loaded.update(meshes)
    return tuple(meshes)


def save_defaults(path: Path | str = DEFAULTS_FILE) -> None:
    """Mesh the default geometries afresh and write the file that comes with the package.

    `python -c "from oformer.meshes.cache import save_defaults; save_defaults()"`
    """
    _write(Path(path), {geometry: geometry.build() for geometry in DEFAULTS})


@cache
def _shipped() -> dict[Geometry, Mesh]:
    return _read(DEFAULTS_FILE) if DEFAULTS_FILE.is_file() else {}


@lru_cache(KEPT)
def _made(geometry: Geometry) -> Mesh:
    return geometry.build()


def _write(path: Path, meshes: Mapping[Geometry, Mesh]) -> None:
    arrays = {}
    for geometry, mesh in meshes.items():
        key = json.dumps(to_json(geometry), sort_keys=True, separators=(",", ":"))
        for name, dtype in TYPES.items():
            arrays[f"{key}/{name}"] = getattr(mesh, name).numpy().astype(dtype)
    save_arrays(path, arrays)


def _read(path: Path) -> dict[Geometry, Mesh]:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, array in map_arrays(path).items():
        key, _, part = name.rpartition("/")
        wide = np.float64 if array.dtype.kind == "f" else np.int64
        parts.setdefault(key, {})[part] = torch.from_numpy(array.astype(wide))
    meshes = {}
    for key, tensors in parts.items():
        if tensors.keys() != TYPES.keys():
            raise InputError(
                f"{', '.join(TYPES)} of each mesh in {path}", ", ".join(tensors), "Write the file with `save_meshes`"
            )
        try:
            content = json.loads(key)
        except json.JSONDecodeError as error:
            raise InputError(f"geometries as JSON in {path}", repr(key)[:80], "Write it with `save_meshes`") from error
        name = content.get("type") if isinstance(content, dict) else content
        if name not in KINDS:
            raise unknown_name("geometry", str(name), KINDS)
        meshes[from_json(KINDS[name], content, where=str(path))] = Mesh(**tensors)
    return meshes
