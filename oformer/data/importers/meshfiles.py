"""VTK, VTU, XDMF and gmsh files, through meshio: a file is a sample, and the caller says which fields are what.

Fields at points are taken as they are. A field at cells is brought to the points: each point gets the mean of its
cells, weighted by their length, area or volume: a constant stays itself, and small cells do not outvote large ones.
"""

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

SUFFIXES = (".vtu", ".vtk", ".xdmf", ".xmf", ".msh")
_LETTERS = ("x", "y", "z")
# By meshio's name of a cell: its dimension, and its corners as lines, triangles or tetrahedra.
_SIMPLICES = {
    **{name: (1, ((0, 1),)) for name in ("line", "line3")},
    **{name: (2, ((0, 1, 2),)) for name in ("triangle", "triangle6")},
    **{name: (2, ((0, 1, 2), (0, 2, 3))) for name in ("quad", "quad8", "quad9")},
    **{name: (3, ((0, 1, 2, 3),)) for name in ("tetra", "tetra10")},
}


@dataclass(frozen=True)
class _Content:
    """A file's points, simplices and fields, all at points."""

    points: np.ndarray  # (points, 3)
    cells: np.ndarray | None  # (cells, corners); None for a cloud of points
    fields: dict[str, np.ndarray]  # (times, points, components); also x, y and z, where no field has that name
    named: tuple[str, ...]  # those that are in the file
    at_cells: frozenset[str]  # names of the fields that were at cells
    left_out: int  # points that no cell uses
    said: tuple[str, ...]  # by meshio, while reading

    @property
    def times(self) -> int:
        """The number of frames."""
        return max(len(field) for field in self.fields.values())


@contextlib.contextmanager
def open_meshes(path: Path, choices: Choices) -> Iterator[Opened]:
    """A file, or a folder of files in the order of their names: each a sample."""
    sources = files_in(path, SUFFIXES) if path.is_dir() else (path,)
    first = _read(sources[0])
    axes = _axes(first.points)
    if not axes:
        raise InputError(f"points that span a line, a plane or a space in {sources[0]}", "all in one place")
    yield _Chosen(path, sources, first, axes, choices).opened()


@dataclass(frozen=True)
class _Chosen:
    """Files, and which of their fields are input and target."""

    path: Path
    sources: tuple[Path, ...]
    first: _Content
    axes: tuple[int, ...]  # along which the points differ
    choices: Choices

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
        if first.left_out:
            said.append(f"{first.left_out} points that no cell uses are left out.")
        if dim < 3:
            said.append(f"Coordinates are {', '.join(_LETTERS[k] for k in self.axes)}; the others do not vary.")
        layout = Layout(
            kind="mesh",
            format=f"{self.sources[0].suffix.lstrip('.').upper()} through meshio",
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
        content = self.first if source == self.sources[0] else _read(source)
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


def _read(path: Path) -> _Content:
    """A mesh file, however it is written."""
    if importlib.util.find_spec("meshio") is None:
        raise InputError(f"the package meshio to read {path.name}", "none", "Install it: pip install meshio")
    with reading(path, "a mesh with fields"):
        points, blocks, frames, heard = ask(path, "mesh", str(path), what="a mesh with fields")
        said = " ".join(heard.split())
        return _understood(path, points, blocks, frames, (f"meshio says: {said[:200]}",) if said else ())


def _understood(
    path: Path, points: np.ndarray, blocks: Any, frames: list[tuple[Any, Any]], said: tuple[str, ...]
) -> _Content:
    if points.ndim != 2 or len(points) == 0 or points.shape[1] > 3 or not np.isfinite(points).all():
        raise InputError(f"finite points (points, 3) in {path}", f"shape {points.shape}")
    places = np.pad(points.astype(np.float64), ((0, 0), (0, 3 - points.shape[1])))
    top, chosen = _largest(path, [kind for kind, _ in blocks])
    corners = [np.asarray(blocks[i][1]) for i in chosen]
    for nodes in corners:
        if nodes.size == 0 or nodes.min() < 0 or nodes.max() >= len(places):
            found = f"{nodes.min()} to {nodes.max()}" if nodes.size else "cells without corners"
            raise InputError(f"cells with corners among the {len(places)} points of {path}, from 0", found)
    sizes = [_sizes(places, nodes, blocks[i][0]) for nodes, i in zip(corners, chosen, strict=True)]
    used = np.unique(np.concatenate([nodes.ravel() for nodes in corners])) if corners else np.arange(len(places))
    fields: dict[str, list[np.ndarray]] = {}
    at_cells = set()
    for at_points, by_block in frames:
        for name, values in at_points.items():
            fields.setdefault(name, []).append(_rows(path, name, values, len(places)))
        for name, values in by_block.items():
            if name in at_points or not corners:
                continue
            parts = [_rows(path, name, values[i], len(n)) for i, n in zip(chosen, corners, strict=True)]
            fields.setdefault(name, []).append(_to_points(len(places), corners, sizes, parts))
            at_cells.add(name)
    for name, parts in fields.items():
        if len(parts) != len(frames) or len({part.shape for part in parts}) != 1:
            shapes = ", ".join(str(shape) for shape in sorted({part.shape for part in parts}))
            wanted = f"`{name}` in each of the {len(frames)} frames of {path}, in one shape"
            raise InputError(wanted, f"{len(parts)} of shape {shapes}")
    numbers = np.full(len(places), -1)
    numbers[used] = np.arange(len(used))
    simplices = [
        nodes[:, list(simplex)]
        for nodes, i in zip(corners, chosen, strict=True)
        for simplex in _SIMPLICES[blocks[i][0]][1]
    ]
    return _Content(
        points=places[used],
        cells=numbers[np.concatenate(simplices)] if top else None,
        fields={letter: places[used][None, :, [k]] for k, letter in enumerate(_LETTERS)}
        | {name: np.stack(parts)[:, used] for name, parts in fields.items()},
        named=tuple(fields),
        at_cells=frozenset(at_cells),
        left_out=len(places) - len(used),
        said=said,
    )


def _largest(path: Path, types: list[str]) -> tuple[int, list[int]]:
    """The largest dimension of the cells, and which blocks have it."""
    real = [(i, kind) for i, kind in enumerate(types) if kind != "vertex"]
    for _, kind in real:
        if kind not in _SIMPLICES:
            raise InputError(
                f"lines, triangles, quadrilaterals or tetrahedra in {path}", f"cells `{kind}`", "Split them into these"
            )
    top = max((_SIMPLICES[kind][0] for _, kind in real), default=0)
    return top, [i for i, kind in real if _SIMPLICES[kind][0] == top]


def _sizes(points: np.ndarray, nodes: np.ndarray, kind: str) -> np.ndarray:
    """The length, area or volume of each cell."""
    dimension, simplices = _SIMPLICES[kind]
    total = np.zeros(len(nodes))
    for simplex in simplices:
        edges = points[nodes[:, list(simplex[1:])]] - points[nodes[:, simplex[:1]]]
        gram = np.linalg.det(edges @ edges.transpose(0, 2, 1))
        total += np.sqrt(np.maximum(gram, 0)) / math.factorial(dimension)
    return total


def _rows(path: Path, name: str, array: np.ndarray, count: int) -> np.ndarray:
    """A field as (rows, components)."""
    if array.ndim == 0 or len(array) != count or array.size == 0:
        raise InputError(f"{count} values in `{name}` of {path}", f"shape {array.shape}")
    return array.reshape(count, -1).astype(np.float64)


def _to_points(count: int, corners: list[np.ndarray], sizes: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """The mean over the cells of each point, weighted by their sizes; 0 where there is none."""
    total, weight = np.zeros((count, values[0].shape[1])), np.zeros(count)
    for nodes, size, value in zip(corners, sizes, values, strict=True):
        each = nodes.shape[1]
        np.add.at(total, nodes.ravel(), np.repeat(value * size[:, None], each, axis=0))
        np.add.at(weight, nodes.ravel(), np.repeat(size, each))
    return total / np.where(weight > 0, weight, 1)[:, None]
