"""Mesh files and tables of points: a file is a sample, and the caller says which fields are what.

VTK's files and tables are read here, XDMF, gmsh and SU2 files through meshio. Fields at points are taken as they are. A
field at cells is brought to the points: each point gets the mean of its cells, weighted by their length, area or
volume: a constant stays itself, and small cells do not outvote large ones.
"""

import contextlib
import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oformer.data.importers.apart import ask
from oformer.data.importers.common import (
    Choices,
    Layout,
    Opened,
    cut,
    files_in,
    reading,
    refuse_in_times,
    single_floats,
    strided,
)
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field, Sample, Spec
from oformer.vtk.mesh import CURVED, SIMPLICES, Block, Mesh

OF_VTK = (".vtu", ".vtk", ".vtp", ".vti", ".vtr", ".vts", ".pvtu", ".pvtp", ".pvti", ".pvtr", ".pvts", ".pvd")
_OF_OTHERS = (".xdmf", ".xmf", ".msh", ".su2")  # which meshio reads
SUFFIXES = (*OF_VTK, *_OF_OTHERS, ".csv")
_LETTERS = ("x", "y", "z")
# Of a table: the columns of coordinates, with a unit or not, as in ParaView or Fluent; the column of times.
_AXIS = re.compile(r"points?:([012])|([xyz])(?:[ _-]?coord\w*)?(?: ?[\[(].*[\])])?", re.I)
_TIME = re.compile(r"t|[Tt]ime(?: ?[\[(].*[\])])?")  # T is a temperature


@dataclass(frozen=True)
class _Content:
    """A file's points, simplices and fields, all at points."""

    points: np.ndarray  # (points, 3)
    blocks: tuple[Block, ...]  # the cells as they are in the file
    cells: np.ndarray | None  # (cells, corners); None for a cloud of points
    fields: dict[str, np.ndarray]  # (times, points, components); also x, y and z, where no field has that name
    named: tuple[str, ...]  # those that are in the file
    at_cells: frozenset[str]  # names of the fields that were at cells
    left_out: int  # points that no cell uses
    notes: tuple[str, ...]  # what was changed in reading
    said: tuple[str, ...]  # by meshio, while reading

    @property
    def times(self) -> int:
        """The number of frames."""
        return max(len(field) for field in self.fields.values())


@contextlib.contextmanager
def open_meshes(path: Path, choices: Choices) -> Iterator[Opened]:
    """A file, or a folder of files in the order of their names: each a sample."""
    sources = files_in(path, SUFFIXES) if path.is_dir() else (path,)
    yield _Chosen.of(path, sources, choices).opened()


def read_channels(
    path: Path, inputs: Sequence[str], queries: Sequence[str], dim: int
) -> tuple[Field, Field, tuple[Block, ...]]:
    """The fields of a mesh file that an operator reads: input, query, and the cells as they are in the file.

    Args:
        path: of the file.
        inputs: names of the input's channels: a field, a component of a vector as in `velocity_x`, or a coordinate.
        queries: names of the query's channels.
        dim: of the space that the operator lives in.
    """
    chosen = _Chosen.of(path, (path,), Choices())
    if len(chosen.axes) != dim:
        along = ", ".join(_LETTERS[k] for k in chosen.axes)
        raise InputError(f"points in {dim} dimension(s) in {path}", f"points that differ along {along}")
    content = chosen.first
    columns: dict[str, np.ndarray] = {}
    for name in chosen._names():
        parts = content.fields[name][..., chosen._components(name)]
        each = dict(zip(chosen._channels([name]), np.split(parts, parts.shape[2], axis=2), strict=True))
        columns |= {channel.replace(" ", "_"): part for channel, part in ({name: parts} | each).items()}

    def taken(names: Sequence[str], advice: str) -> Tensor | None:
        for name in names:
            if name.replace(" ", "_") not in columns:
                wanted = f"fields `{'`, `'.join(names)}` in {path}"
                raise InputError(wanted, f"no `{name}` among `{'`, `'.join(columns)}`", advice)
        parts = [columns[name.replace(" ", "_")] for name in names]
        times = max(map(len, parts), default=1)
        wide = [np.broadcast_to(values, (times, *values.shape[1:])) for values in parts]
        return single_floats(np.concatenate(wide, -1)) if wide else None

    coords = torch.from_numpy(content.points[:, chosen.axes].astype(np.float32))
    known = taken(inputs, "Say which fields of the file these are, in this order: --inputs NAME,NAME...")
    features = taken(queries, "Give the file these fields, under these names")
    return Field.of(coords, known), Field.of(coords, features), content.blocks


@dataclass(frozen=True)
class _Chosen:
    """Files, and which of their fields are input and target."""

    path: Path
    sources: tuple[Path, ...]
    first: _Content
    axes: tuple[int, ...]  # along which the points differ
    choices: Choices

    @classmethod
    def of(cls, path: Path, sources: tuple[Path, ...], choices: Choices) -> "_Chosen":
        """The first of the files is read."""
        first = _read(sources[0], choices.coords)
        axes = _axes(first.points)
        if not axes:
            raise InputError(f"points that span a line, a plane or a space in {sources[0]}", "all in one place")
        return cls(path, sources, first, axes, choices)

    def opened(self) -> Opened:
        first, choices, dim = self.first, self.choices, len(self.axes)
        arrays = {name: _described(name, first.fields[name], first) for name in first.named}
        if first.cells is not None:
            simplex = ("lines", "triangles", "tetrahedra")[first.cells.shape[1] - 2]
            arrays["(cells)"] = f"{len(first.cells):,} {simplex}"
        for name in (*choices.inputs, *choices.targets):
            if name not in self._names():
                raise unknown_name("field of the mesh", name, self._names())
        spec, cut_at, kept, said = None, 1, range(first.times), []
        if choices.inputs and choices.targets:
            cut_at, kept, said = self._frames()
            inputs, targets = self._channels(choices.inputs), self._channels(choices.targets)
            spec = Spec(dim, cut_at, len(inputs), max(len(kept) - cut_at, 1), len(targets))
        else:
            inputs = targets = ()
        if first.at_cells:
            names = ", ".join(sorted(first.at_cells))
            said.append(f"{names}: at cells; a point gets the mean of its cells, weighted by their size.")
        said += first.notes
        if first.left_out:
            said.append(f"{first.left_out} points that no cell uses are left out.")
        if dim < 3:
            said.append(f"Coordinates are {', '.join(_LETTERS[k] for k in self.axes)}; the others do not vary.")
        layout = Layout(
            kind="mesh",
            format=self.sources[0].suffix.lstrip(".").upper(),
            arrays=arrays,
            samples=len(self.sources),
            times=first.times,
            card=Card(f"Fields on meshes, from {self.path.name}", inputs=inputs, targets=targets),
            spec=spec,
            assumptions=tuple(said),
            warnings=first.said,
            sizes=(len(first.points),),
        )

        def take(begin: int, end: int) -> list[Sample]:
            return [self._sample(source, cut_at, kept) for source in self.sources[begin:end]]

        return Opened(self.path, layout, take, sources=self.sources)

    def _names(self) -> tuple[str, ...]:
        """Names that may be chosen: fields, and coordinates where no field has that name."""
        return tuple(dict.fromkeys((*self.first.named, *(_LETTERS[k] for k in self.axes))))

    def _frames(self) -> tuple[int, range, list[str]]:
        times = self.first.times
        if times == 1:
            refuse_in_times(self.choices.in_times, "a mesh with one frame")
            self.choices.refuse(self.path, "stride")
            return 1, range(1), []
        kept, about_stride = strided(times, self.choices.stride, 1, self.path)
        count, about_cut = cut(len(kept), self.choices.in_times, self.path)
        return count, kept, [*about_stride, *about_cut]

    def _channels(self, names: Sequence[str]) -> tuple[str, ...]:
        channels = []
        for name in names:
            count = self.first.fields[name].shape[2]
            components = [f"_{_LETTERS[k] if count <= 3 else k}" for k in self._components(name)] if count > 1 else [""]
            channels += [f"{name}{component}" for component in components]
        return tuple(channels)

    def _components(self, name: str) -> list[int]:
        """Those of a field that are kept: files pad vectors of a plane to three components."""
        field = self.first.fields[name]
        if field.shape[2] != 3 or np.delete(field, self.axes, axis=2).any():
            return list(range(field.shape[2]))
        return list(self.axes)

    def _sample(self, source: Path, count: int, kept: range) -> Sample:
        content = self.first if source == self.sources[0] else _read(source, self.choices.coords)
        if content.times != self.first.times or not set(_axes(content.points)) <= set(self.axes):
            raise InputError(
                f"{self.first.times} frame(s) and points that vary along "
                f"{', '.join(_LETTERS[k] for k in self.axes)} alone in {source}, as in {self.sources[0].name}",
                f"{content.times} and {', '.join(_LETTERS[k] for k in _axes(content.points)) or 'none'}",
            )
        known, answer = (self._values(content, names, source) for names in (self.choices.inputs, self.choices.targets))
        if self.first.times > 1:
            known, answer = known[kept][:count], answer[kept][count:]
        coords = torch.from_numpy(content.points[:, self.axes].astype(np.float32))
        cells: tuple[Tensor, ...] | None = None
        if content.cells is not None:
            cells = (torch.from_numpy(content.cells.astype(np.int64)),)
        return Sample(Field.of(coords, single_floats(known)), Field.of(coords), single_floats(answer), cells=cells)

    def _values(self, content: _Content, names: Sequence[str], source: Path) -> np.ndarray:
        """(times, points, channels) of the named fields."""
        parts = []
        for name in names:
            found, wanted = content.fields.get(name), self.first.fields[name]
            if found is None or found.shape[2] != wanted.shape[2]:
                got = "none" if found is None else f"one of {found.shape[2]}"
                raise InputError(f"a field `{name}` of {wanted.shape[2]} component(s) in {source}", got)
            kept = self._components(name)
            if (across := np.delete(found, kept, axis=2)).any():
                wanted = f"nothing across the plane in `{name}` of {source}, as in {self.sources[0].name}"
                raise InputError(wanted, f"values up to {np.abs(across).max():.4g}")
            parts.append(np.broadcast_to(found[:, :, kept], (content.times, len(content.points), len(kept))))
        return np.concatenate(parts, -1)


def how_to_choose(layout: Layout, path: Path) -> InputError:
    """The sentence for a file whose fields the caller has to choose."""
    names = [name for name in layout.arrays if name != "(cells)"]
    listed = ", ".join(f"`{name}`" for name in names) or "none"
    if layout.kind == "arrays":
        return InputError(
            f"which arrays of {path} are points, input and target",
            f"no choice; in it, {layout.format}, are {listed}",
            f"Say so: oformer import {path} --coords x --inputs a --targets u; several with commas",
        )
    if not names:
        return InputError(f"fields at points or cells in {path}", "a mesh alone", "There is nothing to learn")
    return InputError(
        f"which fields of {path} are input and which are target",
        f"no choice; there are {listed}",
        f"Say so: oformer import {path} --inputs {names[0]} --targets {names[-1]}; several with commas, coordinates as "
        "x, y, z",
    )


def _axes(points: np.ndarray) -> tuple[int, ...]:
    spans = np.ptp(points, axis=0)
    return tuple(int(k) for k in np.flatnonzero(spans > 1e-9 * spans.max()))


def _described(name: str, field: np.ndarray, content: _Content) -> str:
    where = "cells" if name in content.at_cells else "points"
    frames = f"{len(field)} frames, " if content.times > 1 else ""
    return f"{frames}{field.shape[2]} component(s) at {where}, from {field.min():.4g} to {field.max():.4g}"


def _read(path: Path, coords: Sequence[str]) -> _Content:
    """A mesh file or a table, however it is written."""
    suffix, heard = path.suffix.lower(), ""
    if coords and suffix != ".csv":
        raise InputError("`coords` only where a file has use for it", f"one for {path}", "A mesh has points: leave it")
    if suffix in _OF_OTHERS and not any(map(importlib.util.find_spec, ("meshlane", "meshio"))):
        raise InputError(f"the package meshio to read {path.name}", "none", "Install it: pip install meshio")
    with reading(path, "a mesh with fields"):
        if suffix == ".csv":
            names, values = ask(path, "table", str(path), what="a table of points")
            meshes = _from_table(path, names, values, coords)
        elif suffix in OF_VTK:
            meshes = ask(path, "vtk_mesh", str(path), what="a mesh with fields")
        else:
            meshes, heard = ask(path, "other_mesh", str(path), what="a mesh with fields")
        said = " ".join(heard.split())
        return _understood(path, meshes, (f"meshio says: {said[:200]}",) if said else ())


def _from_table(path: Path, names: list[str], values: np.ndarray, coords: Sequence[str]) -> list[Mesh]:
    """The points of a table, with the other columns as fields; a frame for each time, if there is such a column."""
    columns = dict(zip(names, values.T, strict=True))
    if coords:
        for name in coords:
            if name not in columns:
                raise unknown_name(f"column of {path.name}", name, columns)
        places = list(coords)
    else:
        axes = {name: found[1] or "xyz".index(found[2].lower()) for name in names if (found := _AXIS.fullmatch(name))}
        places = sorted(axes, key=lambda name: int(axes[name]))
    if not 1 <= len(places) <= 3:
        listed = ", ".join(f"`{name}`" for name in names)
        raise InputError(
            f"columns x, y, z in {path}", listed, "Say which columns are the points: --coords first,second"
        )
    clock = next((name for name in names if _TIME.fullmatch(name) and name not in places), None)
    times = np.zeros(len(values)) if clock is None else columns[clock]
    points = np.stack([columns[name] for name in places], -1)
    fields = {name: column for name, column in columns.items() if name not in (*places, clock)}
    meshes = []
    for time in np.unique(times):
        rows = times == time
        if meshes and not np.array_equal(points[rows], meshes[0].points):
            raise InputError(f"the same points in the same order at all times of {path}", f"others at {clock} {time:g}")
        meshes.append(Mesh(points[rows], [], {name: column[rows] for name, column in fields.items()}, {}))
    return meshes


def _understood(path: Path, meshes: list[Mesh], said: tuple[str, ...]) -> _Content:
    points, blocks = meshes[0].points, meshes[0].blocks
    if points.ndim != 2 or len(points) == 0 or points.shape[1] > 3 or not np.isfinite(points).all():
        raise InputError(f"finite points (points, 3) in {path}", f"shape {points.shape}")
    places = np.pad(points.astype(np.float64), ((0, 0), (0, 3 - points.shape[1])))
    for mesh in meshes:
        if mesh.points.shape != points.shape or not np.array_equal(mesh.points, points):
            raise InputError(f"the same points in all frames of {path}", "others in some", "Import each frame alone")
    for block in blocks:
        if block.type not in SIMPLICES:
            raise InputError(f"cells that can be split into simplices in {path}", f"cells of VTK's type {block.type}")
        nodes = block.corners
        if nodes.size == 0 or nodes.min() < 0 or nodes.max() >= len(places):
            found = f"{nodes.min()} to {nodes.max()}" if nodes.size else "cells without corners"
            raise InputError(f"cells with corners among the {len(places)} points of {path}, from 0", found)
    top = max((block.dim for block in blocks), default=0)
    blocks = [block for block in blocks if block.dim == top]
    sizes = [_sizes(places, block) for block in blocks]
    used = np.unique(np.concatenate([block.corners.ravel() for block in blocks])) if blocks else np.arange(len(places))
    fields: dict[str, list[np.ndarray]] = {}
    at_cells = set()
    for mesh in meshes:
        for name, values in mesh.at_points.items():
            fields.setdefault(name, []).append(_rows(path, name, values, len(places)))
        for name, values in mesh.at_cells.items():
            if name in mesh.at_points or not blocks:
                continue
            values = _rows(path, name, values, len(values))
            fields.setdefault(name, []).append(_to_points(len(places), blocks, sizes, values))
            at_cells.add(name)
    for name, parts in fields.items():
        if len(parts) != len(meshes) or len({part.shape for part in parts}) != 1:
            shapes = ", ".join(str(shape) for shape in sorted({part.shape for part in parts}))
            wanted = f"`{name}` in each of the {len(meshes)} frames of {path}, in one shape"
            raise InputError(wanted, f"{len(parts)} of shape {shapes}")
    numbers = np.full(len(places), -1)
    numbers[used] = np.arange(len(used))
    kept = tuple(block._replace(corners=numbers[block.corners]) for block in blocks)
    curved = sum(len(block.corners) for block in blocks if block.type in CURVED)
    return _Content(
        points=places[used],
        blocks=kept,
        cells=np.concatenate([b.corners[:, simplex] for b in kept for simplex in SIMPLICES[b.type]]) if kept else None,
        fields={letter: places[used][None, :, [k]] for k, letter in enumerate(_LETTERS)}
        | {name: np.stack(parts)[:, used] for name, parts in fields.items()},
        named=tuple(fields),
        at_cells=frozenset(at_cells),
        left_out=len(places) - len(used),
        notes=(f"{curved:,} curved cells are straight between their corners here; all points stay.",) * bool(curved),
        said=said,
    )


def _sizes(points: np.ndarray, block: Block) -> np.ndarray:
    """The length, area or volume of each cell."""
    total = np.zeros(len(block.corners))
    for simplex in SIMPLICES[block.type]:
        edges = points[block.corners[:, simplex[1:]]] - points[block.corners[:, simplex[:1]]]
        gram = np.linalg.det(edges @ edges.transpose(0, 2, 1))
        total += np.sqrt(np.maximum(gram, 0)) / math.factorial(block.dim)
    return total


def _rows(path: Path, name: str, array: np.ndarray, count: int) -> np.ndarray:
    """A field as (rows, components)."""
    if array.ndim == 0 or len(array) != count or array.size == 0:
        raise InputError(f"{count} values in `{name}` of {path}", f"shape {array.shape}")
    return array.reshape(count, -1).astype(np.float64)


def _to_points(count: int, blocks: list[Block], sizes: list[np.ndarray], values: np.ndarray) -> np.ndarray:
    """The mean over the cells of each point, weighted by their sizes; 0 where there is none."""
    total, weight = np.zeros((count, values.shape[1])), np.zeros(count)
    for block, size in zip(blocks, sizes, strict=True):
        nodes, each = block.corners.ravel(), block.corners.shape[1]
        np.add.at(total, nodes, np.repeat(values[block.rows] * size[:, None], each, axis=0))
        np.add.at(weight, nodes, np.repeat(size, each))
    return total / np.where(weight > 0, weight, 1)[:, None]
