"""Meshes by their description: made once, kept, and shipped with the package where they are defaults.

A geometry is a frozen dataclass of numbers; the same one gives the same mesh. Meshing depends on the last bits of the
Delaunay triangulation and hence on the machine; the file of default meshes (`defaults.safetensors`, made by
`save_defaults`) does not.
"""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from oformer.config import from_json, to_json
from oformer.files import map_arrays, save_arrays
from oformer.meshes.airfoil import Naca
from oformer.meshes.shapes import Annulus, Disc, LShape, Square, UShape
from oformer.meshes.triangles import Mesh

Geometry: TypeAlias = Square | Disc | Annulus | LShape | UShape | Naca

DEFAULTS: tuple[Geometry, ...] = (Disc(), Annulus(), LShape(), UShape(), Naca())  # a square is made in no time
DEFAULTS_FILE = Path(__file__).with_name("defaults.safetensors")

KEPT = 256  # meshes of random shapes in memory
TYPES = {"points": np.float64, "triangles": np.int32, "marks": np.int32, "circles": np.float64}


def mesh_of(geometry: Geometry) -> Mesh:
    """The mesh of a geometry: shipped with the package, or made now and kept; the same object again.

    Treat it as read-only: all who ask share it.
    """
    return _read(DEFAULTS_FILE).get(geometry) or _made(geometry)


def save_defaults(path: Path = DEFAULTS_FILE) -> None:
    """Mesh the default geometries afresh and write the file that comes with the package.

    `python -c "from oformer.meshes.cache import save_defaults; save_defaults()"`
    """
    arrays = {}
    for geometry in DEFAULTS:
        key, mesh = json.dumps(to_json(geometry), sort_keys=True, separators=(",", ":")), geometry.build()
        for name, dtype in TYPES.items():
            arrays[f"{key}/{name}"] = getattr(mesh, name).numpy().astype(dtype)
    save_arrays(path, arrays)


@lru_cache(KEPT)
def _made(geometry: Geometry) -> Mesh:
    return geometry.build()


@cache
def _read(path: Path) -> dict[Geometry, Mesh]:
    """The meshes of a file by their geometry; none where it is not there."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, array in (map_arrays(path) if path.is_file() else {}).items():
        key, _, part = name.rpartition("/")
        wide = np.float64 if array.dtype.kind == "f" else np.int64
        parts.setdefault(key, {})[part] = torch.from_numpy(array.astype(wide))
    kinds = {type(geometry).__name__: type(geometry) for geometry in DEFAULTS}
    contents = {key: json.loads(key) for key in parts}
    return {from_json(kinds[contents[key]["type"]], contents[key], str(path)): Mesh(**parts[key]) for key in parts}
