"""Flow around an airfoil on a mesh that does not move: what MeshGraphNets' records and OFormer's .npz folders hold.

The released field named "velocity" (`vel`) is the momentum density, density times velocity: it is free of divergence in
the steady frames of a published trajectory, and the velocity is not. By default it is divided by the density.

Differs: the released loader takes the files in the order of the disk and scales positions by the box of all
trajectories; here files are sorted, and each position is scaled by the box of its own mesh (the published mesh is one).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oformer.data.importers.common import Choices, Layout, Opened, check_numbers, cut, reading, single_floats, strided
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec
from oformer.files import load_npz
from oformer.problems.airfoil import Airfoil

IN_TIMES = 4
NODE_TYPES = {0: 0, 2: 1, 4: 2}  # theirs and ours: interior, airfoil, far field
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
            raise InputError(f"corners of cells among the {points} points of {where}", "others")
        foreign = sorted(set(np.unique(self.types).tolist()) - set(NODE_TYPES))
        if foreign:
            raise InputError(
                f"node types 0 (interior), 2 (airfoil) and 4 (far field) in {where}", f"{foreign[0]:g} among them"
            )


def airfoil(
    path: Path,
    format: str,
    words: Mapping[str, str],
    samples: int,
    trajectory: Callable[[int], Trajectory],
    choices: Choices,
    *,
    stride: int,
    momentum: str,
    said: tuple[str, ...] = (),
    sources: tuple[Path, ...] = (),
) -> Opened:
    """Trajectories, with their frames cut into input and target.

    Args:
        path: the file or folder.
        format: how it is written.
        words: the arrays.
        samples: how many trajectories.
        trajectory: reads one.
        choices: of the caller.
        stride: keep one in so many frames, if the caller does not say.
        momentum: the file's name for it.
        said: more that was assumed.
        sources: the files.
    """
    if choices.kind not in (None, "airfoil"):
        raise InputError(f"trajectories around an airfoil in {path}", f"`{choices.kind}`", "Leave `kind`")
    choices.refuse(path, "inputs", "targets", "coords")
    stored = choices.stored or "velocity"
    first = trajectory(0)
    first.check(f"trajectory 0 of {path}")
    times = len(first.density)
    kept, about_stride = strided(times, choices.stride, stride, path)
    count, about_cut = cut(len(kept), choices.in_times, path, IN_TIMES)
    own = Airfoil(stored=stored).card  # has the same channels, whose names are one

    def sample(index: int) -> Sample:
        found = trajectory(index)
        where = f"trajectory {index} of {path}"
        found.check(where)
        if len(found.density) != times:
            raise InputError(f"{times} frames in {where}, as in the first", str(len(found.density)))
        return _sample(found, kept, count, stored == "velocity", where)

    meaning = f"`{momentum}` is density times velocity in the published files, whatever its name: it is " + (
        "divided by the density; --stored momentum keeps it." if stored == "velocity" else "kept as it is."
    )
    layout = Layout(
        kind="airfoil",
        format=format,
        arrays=dict(words),
        samples=samples,
        times=times,
        channels=own.targets,
        spec=Spec(
            dim=2, in_times=count, in_channels=7, out_times=len(kept) - count, out_channels=4, query_channels=1,
            in_categories=len(NODE_TYPES), query_categories=len(NODE_TYPES),
        ),
        assumptions=(
            meaning, *about_stride, *about_cut, "Node types 0, 2 and 4 become 0 interior, 1 airfoil, 2 far field.",
            "Scaled positions go from 0 to 1 over the box of a mesh.", *said,
        ),
        sizes=(len(first.points),),
        inputs=own.inputs,
    )  # fmt: skip
    card = Card(f"Airfoil, from {path.name}", inputs=own.inputs, queries=own.queries, targets=own.targets)
    return Opened(path, layout, card, lambda a, b: [sample(i) for i in range(a, b)], sources=sources or (path,))


def _sample(found: Trajectory, kept: range, count: int, divide: bool, where: str) -> Sample:
    frames = slice(kept.start, kept.stop, kept.step)
    density = found.density[frames].astype(np.float64)
    flow = found.momentum[frames].astype(np.float64)
    if divide:
        if not (density > 0).all():
            raise InputError(f"positive densities in {where}", "others", "Keep the momentum: `stored` momentum")
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


_KEYS = {"node_type": 1, "pos": 2, "cells": 3, "dns": 1, "prs": 1, "vel": 2}  # and the size of their last axis


def are_trajectories(folder: Path) -> bool:
    """Whether the first file of a folder has the names that tell these files from others."""
    try:
        return {"pos", "vel"} <= load_npz(min(folder.glob("*.npz"))).keys()
    except InputError:  # said better by whoever reads it
        return False


@contextmanager
def open_trajectories(folder: Path, choices: Choices) -> Iterator[Opened]:
    """A folder of .npz files, one trajectory each, in the order of their names."""
    sources = tuple(sorted(folder.glob("*.npz")))

    def trajectory(index: int) -> Trajectory:
        return _from_npz(sources[index])

    with reading(sources[0], "a trajectory"):
        words = {
            name: f"(time, {'triangle, corner' if name == 'cells' else 'point, component'}) = {array.shape}"
            for name, array in load_npz(sources[0]).items()
        }
        opened = airfoil(
            folder, "a folder of .npz trajectories", words, len(sources), trajectory, choices,
            stride=STRIDE, momentum="vel", sources=sources,
        )  # fmt: skip
    yield opened


def _from_npz(path: Path) -> Trajectory:
    found = load_npz(path)
    arrays = {}
    for name, last in _KEYS.items():
        if name not in found:
            raise InputError(f"`{name}` in {path}", ", ".join(f"`{key}`" for key in found) or "nothing")
        array = arrays[name] = found[name]
        check_numbers(path, name, array.dtype)
        if array.ndim != 3 or array.shape[2] != last or 0 in array.shape:
            raise InputError(f"`{name}` of shape (times, rows, {last}) in {path}", str(array.shape))
    for name in ("node_type", "pos", "cells"):
        array = arrays[name]
        # NaN is not equal to itself, and has a sentence of its own later.
        if not np.array_equal(array, np.broadcast_to(array[:1], array.shape), equal_nan=array.dtype.kind == "f"):
            raise InputError(f"a mesh that does not change in {path}", f"`{name}` that differs between frames")
    cells, types = arrays["cells"][0], arrays["node_type"][0, :, 0]
    for name, whole in (("cells", cells), ("node_type", types)):
        if whole.dtype.kind == "f" and not (whole == np.floor(whole)).all():
            raise InputError(f"whole numbers in `{name}` of {path}", "others")
    return Trajectory(
        points=arrays["pos"][0],
        cells=cells,
        types=types,
        momentum=arrays["vel"],
        density=arrays["dns"],
        pressure=arrays["prs"],
    )
