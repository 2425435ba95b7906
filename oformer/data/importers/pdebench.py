"""PDEBench: one `tensor` for all samples, named fields, or a group for each seed."""

from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.common import March, Opened, Rows, checked_axis, pair, refuse_in_times
from oformer.data.importers.hdf5 import dataset_in, group_in, numbers_in
from oformer.errors import InputError
from oformer.fields import Card

FIELDS = ("density", "pressure", "Vx", "Vy", "Vz")  # of the compressible flows
_FORMAT = "PDEBench (HDF5)"
_NOT_PERIODIC = "The file names no boundary condition: the domain is taken as not periodic."


def open_pdebench(path: Path, file: Any, in_times: int | None) -> Opened:
    """Understand an open PDEBench file."""
    if "tensor" in file and "nu" in file:
        return _darcy(path, file, in_times)
    names = ("tensor",) if "tensor" in file else tuple(name for name in FIELDS if name in file)
    return _one_tensor(path, file, names, in_times) if names else _seeds(path, file, in_times)


def is_pdebench(file: Any) -> bool:
    """Whether the names are those of PDEBench."""
    names = list(file)
    seeded = bool(names) and all(name.isdigit() for name in names)
    return seeded or ("x-coordinate" in names and not {"tensor", *FIELDS}.isdisjoint(names))


def _rows(data: Any, squeeze: bool = False) -> Rows:
    def take(first: int, end: int) -> np.ndarray:
        values = np.asarray(data[first:end])
        return values[:, 0] if squeeze else values

    shape = (data.shape[0], *data.shape[2:]) if squeeze else data.shape
    return Rows(tuple(shape), take, data.dtype)


def _axes(path: Path, file: Any, grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    if len(grid) not in (1, 2, 3):
        raise InputError(
            f"`tensor` of {path} with axes (sample, time, x), up to three of space", f"{len(grid)} of space"
        )
    return tuple(
        checked_axis(path, f"{letter}-coordinate", numbers_in(path, file, f"{letter}-coordinate"), n)
        for letter, n in zip("xyz", grid, strict=False)
    )


def _darcy(path: Path, file: Any, in_times: int | None) -> Opened:
    refuse_in_times(in_times, "darcy")
    a, u = numbers_in(path, file, "nu"), numbers_in(path, file, "tensor")
    if a.ndim != 3 or u.shape != (a.shape[0], 1, *a.shape[1:]):
        raise InputError(
            f"`nu` (sample, x, y) and `tensor` (sample, 1, x, y) in {path}", f"shapes {a.shape} and {u.shape}"
        )
    beta = file.attrs.get("beta")
    number = {"beta": float(beta)} if isinstance(beta, (int, float, np.number)) else {}
    return pair(
        path, "pdebench", _FORMAT, ("nu", "tensor"), {"nu": _rows(a), "tensor": _rows(u, squeeze=True)},
        _axes(path, file, a.shape[1:]),
        card=Card(f"PDEBench Darcy, from {path.name}", inputs=("coefficient",), targets=("u",)),
        words={"tensor": f"(sample, 1, x, y) = {u.shape}: the target"}, parameters=number,
    )  # fmt: skip


def _one_tensor(path: Path, file: Any, names: tuple[str, ...], in_times: int | None) -> Opened:
    arrays = [numbers_in(path, file, name) for name in names]
    shape = arrays[0].shape
    if len(shape) < 3 or any(array.shape != shape for array in arrays):
        found = ", ".join(f"`{name}` {array.shape}" for name, array in zip(names, arrays, strict=True))
        raise InputError(f"arrays (sample, time, x) with up to three axes of space in {path}", found)
    warnings = []
    if "t-coordinate" in file:
        times = dataset_in(path, file, "t-coordinate").shape
        # Their one-dimensional files have one time more than frames.
        if times not in ((shape[1],), (shape[1] + 1,)):
            warnings.append(f"`t-coordinate` has shape {times} for {shape[1]} frames.")
    letters = ", ".join("xyz"[: len(shape) - 2])
    return March(
        path=path, kind="pdebench", format=_FORMAT,
        arrays={name: f"(sample, time, {letters}) = {shape}" for name in names},
        title=f"PDEBench, from {path.name}", samples=shape[0], times=shape[1], axes=_axes(path, file, shape[2:]),
        channels=("u",) if names == ("tensor",) else names,
        take=lambda first, end: np.stack([array[first:end] for array in arrays], -1),
        assumptions=(_NOT_PERIODIC,), warnings=tuple(warnings),
    ).opened(in_times)  # fmt: skip


def _seeds(path: Path, file: Any, in_times: int | None) -> Opened:
    names = sorted(file, key=int)
    first = group_in(path, file, names[0])
    grid = group_in(path, first, "grid")
    shape, letters = numbers_in(path, first, "data").shape, [letter for letter in "xyz" if letter in grid]
    if len(shape) != len(letters) + 2 or not letters:
        raise InputError(
            f"`{names[0]}/data` of {path} with axes (time, {', '.join(letters) or 'x'}, channel)", f"shape {shape}"
        )
    places = zip(letters, shape[1:-1], strict=True)
    axes = tuple(checked_axis(path, f"grid/{k}", numbers_in(path, grid, k), n) for k, n in places)

    def one(name: str) -> np.ndarray:
        data = numbers_in(path, group_in(path, file, name), "data")
        if data.shape != shape:
            raise InputError(f"`{name}/data` of {path} in the shape {shape} of the first", f"{data.shape}")
        return np.asarray(data[()])

    return March(
        path=path, kind="pdebench", format=_FORMAT,
        arrays={f"{names[0]}/data": f"(time, {', '.join(letters)}, channel) = {shape}, and so on to {names[-1]}"},
        title=f"PDEBench, from {path.name}", samples=len(names), times=shape[0], axes=axes,
        channels=tuple(f"u{k}" for k in range(shape[-1])) if shape[-1] > 1 else ("u",),
        take=lambda first, end: np.stack([one(name) for name in names[first:end]]),
        assumptions=(_NOT_PERIODIC, "All seeds have the points and times of the first."),
    ).opened(in_times)  # fmt: skip
