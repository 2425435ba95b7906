"""Flow around an airfoil on a mesh that does not move: what MeshGraphNets' records and OFormer's .npz folders hold.

The released field named "velocity" (`vel`) is the momentum density, density times velocity: it is free of divergence in
the steady frames of a published trajectory, and the velocity is not. By default it is divided by the density.

Differs: the released loader takes the files in the order of the disk and scales positions by the box of all
trajectories; here files are sorted, and each position is scaled by the box of its own mesh (the published mesh is one).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oformer.data.importers.common import (
    Choices,
    Layout,
    Opened,
    check_numbers,
    cut,
    files_in,
    reading,
    single_floats,
    strided,
)
from oformer.data.importers.named_arrays import are_meant
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec
from oformer.files import load_npz
from oformer.problems.airfoil import Airfoil

IN_TIMES = 4
NODE_TYPES = {0: 0, 2: 1, 4: 2}  # theirs and ours: interior, airfoil, far field
# By MeshGraphNets' name of an array: the type and the number of its components.
ARRAYS = {
    "cells": ("<i4", 3), "mesh_pos": ("<f4", 2), "node_type": ("<i4", 1),
    "velocity": ("<f4", 2), "density": ("<f4", 1), "pressure": ("<f4", 1),
}  # fmt: skip
_SHORT = {"mesh_pos": "pos", "velocity": "vel", "density": "dns", "pressure": "prs"}  # the names in OFormer's folders
STRIDE = 4  # of every 6th frame ("dt6"): 101 frames become the paper's 26


@dataclass(frozen=True)
class Trajectory:
    """The arrays of one trajectory, as a file has them."""

    points: np.ndarray  # (points, 2)
    cells: np.ndarray  # (triangles, 3)
    types: np.ndarray  # (points,)
    momentum: np.ndarray  # (times, points, 2)
    density: np.ndarray  # (times, points, 1)
    pressure: np.ndarray  # (times, points, 1)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Trajectory":
        """The trajectory of arrays (times, rows, components), by the names of `ARRAYS`."""
        cells, points, types, *flow = (arrays[name] for name in ARRAYS)
        return cls(points[0], cells[0], types[0, :, 0], *flow)

    def check(self, where: str) -> None:
        """Refuse arrays that contradict each other."""
        times, points = len(self.density), len(self.points)
        shapes = {
            "positions": (self.points, (points, 2)), "node types": (self.types, (points,)),
            "cells": (self.cells, (len(self.cells), 3)), "velocity": (self.momentum, (times, points, 2)),
            "density": (self.density, (times, points, 1)), "pressure": (self.pressure, (times, points, 1)),
        }  # fmt: skip
        for name, (array, shape) in shapes.items():
            if array.shape != shape or 0 in shape:
                raise InputError(f"{name} of shape {shape}, none of them 0, in {where}", str(array.shape))
        if self.cells.min() < 0 or self.cells.max() >= points:
            found = f"{self.cells.min()} to {self.cells.max()}"
            raise InputError(f"corners of cells among the {points} points of {where}, from 0", found)
        foreign = sorted(set(np.unique(self.types).tolist()) - set(NODE_TYPES))
        if foreign:
            raise InputError(
                f"node types 0 (interior), 2 (airfoil) and 4 (far field) in {where}", f"{foreign[0]:g} among them"
            )


@dataclass(frozen=True)
class AirfoilFile:
    """A file or folder of trajectories, whose frames are cut into input and target."""

    path: Path
    format: str  # how it is written
    words: Mapping[str, str]  # by array, the axes in words
    samples: int
    read: Callable[[int], Trajectory]
    stride: int  # keep one frame in this many, where the caller does not say
    momentum: str  # the file's name for it
    sources: tuple[Path, ...]
    said: tuple[str, ...] = ()  # sentences about what is assumed

    def opened(self, choices: Choices) -> Opened:
        """The file, understood by its first trajectory."""
        stored = choices.stored or "velocity"
        first = self.read(0)
        first.check(f"trajectory 0 of {self.path}")
        times = len(first.density)
        kept, about_stride = strided(times, choices.stride, self.stride, self.path)
        count, about_cut = cut(len(kept), choices.in_times, self.path, IN_TIMES)
        own = Airfoil(stored=stored).card  # has the same channels, whose names are one

        def sample(index: int) -> Sample:
            found = self.read(index)
            where = f"trajectory {index} of {self.path}"
            found.check(where)
            if len(found.density) != times:
                raise InputError(f"{times} frames in {where}, as in the first", str(len(found.density)))
            return _sample(found, kept, count, stored == "velocity", where)

        meaning = f"`{self.momentum}` is density times velocity in the published files, whatever its name: it is " + (
            "divided by the density; --stored momentum keeps it." if stored == "velocity" else "kept as it is."
        )
        layout = Layout(
            kind="airfoil",
            format=self.format,
            arrays=dict(self.words),
            samples=self.samples,
            times=times,
            card=Card(f"Airfoil, from {self.path.name}", inputs=own.inputs, queries=own.queries, targets=own.targets),
            spec=Spec(
                dim=2, in_times=count, in_channels=7, out_times=len(kept) - count, out_channels=4, query_channels=1,
                in_categories=len(NODE_TYPES), query_categories=len(NODE_TYPES),
            ),
            assumptions=(
                meaning, *about_stride, *about_cut, "Node types 0, 2 and 4 become 0 interior, 1 airfoil, 2 far field.",
                "Scaled positions go from 0 to 1 over the box of a mesh.", *self.said,
            ),
            sizes=(len(first.points),),
        )  # fmt: skip
        return Opened(self.path, layout, lambda a, b: [sample(i) for i in range(a, b)], sources=self.sources)


def _sample(found: Trajectory, kept: range, count: int, divide: bool, where: str) -> Sample:
    frames = slice(kept.start, kept.stop, kept.step)
    density = found.density[frames].astype(np.float64)
    flow = found.momentum[frames].astype(np.float64)
    if divide:
        if not (density > 0).all():
            raise InputError(
                f"positive densities in {where}", f"{density.min():.4g}", "Keep the momentum: `stored` momentum"
            )
        flow = flow / density
    values = np.concatenate([flow, density, found.pressure[frames]], -1)
    low, high = found.points.min(0), found.points.max(0)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (high > low).all()):
        raise InputError(f"points that span a plane in {where}", f"a box from {low} to {high}")
    codes = np.zeros(len(found.types))
    for theirs, ours in NODE_TYPES.items():
        codes[found.types == theirs] = ours
    still = np.concatenate([(found.points - low) / (high - low), codes[:, None]], -1)
    inputs = np.concatenate([values[:count], np.broadcast_to(still, (count, *still.shape))], -1)
    coords = torch.from_numpy(found.points.astype(np.float32))
    return Sample(
        Field.of(coords, single_floats(inputs)),
        Field.of(coords, single_floats(codes[None, :, None])),
        single_floats(values[count:]),
        cells=(torch.from_numpy(found.cells.astype(np.int64)),),
    )


def are_trajectories(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a folder holds .npz files with the names of trajectories, or with none that named arrays have."""
    sources = files_in(path, (".npz",)) if path.is_dir() else ()
    if not sources:
        return False
    with contextlib.suppress(InputError):  # said better by whoever reads it
        if {"pos", "vel"} <= load_npz(sources[0]).keys():
            return True
    return not are_meant(path, choices)


@contextlib.contextmanager
def open_trajectories(folder: Path, choices: Choices) -> Iterator[Opened]:
    """A folder of .npz files, one trajectory each, in the order of their names."""
    sources = files_in(folder, (".npz",))
    with reading(sources[0], "a trajectory"):
        words = {
            name: f"(time, {'triangle, corner' if name == 'cells' else 'point, component'}) = {array.shape}"
            for name, array in load_npz(sources[0]).items()
        }
        opened = AirfoilFile(
            folder, "a folder of .npz trajectories", words, len(sources), lambda index: _from_npz(sources[index]),
            STRIDE, "vel", sources,
        ).opened(choices)  # fmt: skip
    yield opened


def _from_npz(path: Path) -> Trajectory:
    found, arrays = load_npz(path), {}
    for name, (_, last) in ARRAYS.items():
        short = _SHORT.get(name, name)
        if short not in found:
            raise InputError(f"`{short}` in {path}", ", ".join(f"`{key}`" for key in found) or "nothing")
        array = arrays[name] = found[short]
        check_numbers(path, short, array.dtype)
        if array.ndim != 3 or array.shape[2] != last or 0 in array.shape:
            raise InputError(f"`{short}` of shape (times, rows, {last}) in {path}", str(array.shape))
        # NaN is not equal to itself, and has a sentence of its own later.
        same = functools.partial(np.array_equal, array, equal_nan=array.dtype.kind == "f")
        if name in ("cells", "mesh_pos", "node_type") and not same(np.broadcast_to(array[:1], array.shape)):
            raise InputError(f"a mesh that does not change in {path}", f"`{short}` that differs between frames")
        if name in ("cells", "node_type") and (array[0] != np.floor(array[0])).any():
            raise InputError(f"whole numbers in `{short}` of {path}", "fractions")
    return Trajectory.of(arrays)
