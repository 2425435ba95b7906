"""PDEBench: one `tensor` for all samples, named fields, or a group for each seed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from oformer.data.importers.common import Choices, GridFile, Opened, Rows, checked_axis, refuse_in_times
from oformer.data.importers.hdf5 import Array, Group, open_hdf5
from oformer.errors import InputError

FIELDS = ("density", "pressure", "Vx", "Vy", "Vz")  # of the compressible flows
_FORMAT = "PDEBench (HDF5)"
_NOT_PERIODIC = "The file names no boundary condition: the domain is taken as not periodic."


@contextmanager
def open_pdebench(path: Path, choices: Choices) -> Iterator[Opened]:
    """A PDEBench file in one of its three forms; other names in an HDF5 file are refused."""
    with open_hdf5(path) as file:
        names = ("tensor",) if "tensor" in file else tuple(name for name in FIELDS if name in file)
        if {"x-coordinate", "tensor", "nu"} <= set(file):
            yield _darcy(file, choices.in_times)
        elif "x-coordinate" in file and names:
            yield _one_tensor(file, names, choices.in_times)
        elif list(file) and all(name.isdigit() for name in file):
            yield _seeds(file, choices.in_times)
        else:
            raise InputError(
                f"the names of PDEBench or The Well in {path}",
                str(file),
                "They are `tensor` and `x-coordinate`, `0000/data` and so on, or `t0_fields` and `dimensions`",
            )


def _rows(data: Array, squeeze: bool = False) -> Rows:
    def take(first: int, end: int) -> np.ndarray:
        values = np.asarray(data[first:end])
        return values[:, 0] if squeeze else values

    shape = (data.shape[0], *data.shape[2:]) if squeeze else data.shape
    return Rows(tuple(shape), take, data.dtype)


def _axes(group: Group, names: list[str], grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    prefix = group.place.lstrip("/").rpartition("/")[2]
    return tuple(
        checked_axis(group.path, f"{prefix}/{name}" if prefix else name, group.numbers(name), n)
        for name, n in zip(names, grid, strict=True)
    )


def _coordinates(file: Group, grid: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    if len(grid) not in (1, 2, 3):
        raise InputError(
            f"`tensor` of {file.path} with axes (sample, time, x), up to three of space", f"{len(grid)} of space"
        )
    return _axes(file, [f"{letter}-coordinate" for letter in "xyz"[: len(grid)]], grid)


def _darcy(file: Group, in_times: int | None) -> Opened:
    refuse_in_times(in_times, "darcy")
    a, u = file.numbers("nu"), file.numbers("tensor")
    if a.ndim != 3 or u.shape != (a.shape[0], 1, *a.shape[1:]):
        raise InputError(
            f"`nu` (sample, x, y) and `tensor` (sample, 1, x, y) in {file.path}", f"shapes {a.shape} and {u.shape}"
        )
    beta = file.attribute("beta")
    return GridFile(
        file.path, "pdebench", _FORMAT, f"PDEBench Darcy, from {file.path.name}", _coordinates(file, a.shape[1:]),
        {"tensor": f"(sample, 1, x, y) = {u.shape}: the target"},
        parameters={"beta": float(beta)} if isinstance(beta, (int, float, np.number)) else {},
    ).pair(("nu", "tensor"), {"nu": _rows(a), "tensor": _rows(u, squeeze=True)}, ("coefficient", "u"))  # fmt: skip


def _one_tensor(file: Group, names: tuple[str, ...], in_times: int | None) -> Opened:
    arrays = [file.numbers(name) for name in names]
    shape = arrays[0].shape
    if len(shape) < 3 or any(array.shape != shape for array in arrays):
        found = ", ".join(f"`{name}` {array.shape}" for name, array in zip(names, arrays, strict=True))
        raise InputError(f"arrays (sample, time, x) with up to three axes of space in {file.path}", found)
    warnings = []
    if "t-coordinate" in file:
        times = file.array("t-coordinate").shape
        # Their one-dimensional files have one time more than frames.
        if times not in ((shape[1],), (shape[1] + 1,)):
            warnings.append(f"`t-coordinate` has shape {times} for {shape[1]} frames.")
    letters = ", ".join("xyz"[: len(shape) - 2])
    return GridFile(
        file.path, "pdebench", _FORMAT, f"PDEBench, from {file.path.name}", _coordinates(file, shape[2:]),
        {name: f"(sample, time, {letters}) = {shape}" for name in names},
        assumptions=(_NOT_PERIODIC,), warnings=warnings,
    ).march(
        in_times, shape[:2], ("u",) if names == ("tensor",) else names,
        lambda first, end: np.stack([array[first:end] for array in arrays], -1),
    )  # fmt: skip


def _seeds(file: Group, in_times: int | None) -> Opened:
    names, path = sorted(file, key=int), file.path
    first = file.group(names[0])
    grid = first.group("grid")
    shape, letters = first.numbers("data").shape, [letter for letter in "xyz" if letter in grid]
    if len(shape) != len(letters) + 2 or not letters:
        raise InputError(
            f"`{names[0]}/data` of {path} with axes (time, {', '.join(letters) or 'x'}, channel)", f"shape {shape}"
        )

    def one(name: str) -> np.ndarray:
        data = file.group(name).numbers("data")
        if data.shape != shape:
            raise InputError(f"`{name}/data` of {path} in the shape {shape} of the first", f"{data.shape}")
        return np.asarray(data[()])

    return GridFile(
        path, "pdebench", _FORMAT, f"PDEBench, from {path.name}", _axes(grid, letters, shape[1:-1]),
        {f"{names[0]}/data": f"(time, {', '.join(letters)}, channel) = {shape}, and so on to {names[-1]}"},
        assumptions=(_NOT_PERIODIC, "All seeds have the points and times of the first."),
    ).march(
        in_times, (len(names), shape[0]), tuple(f"u{k}" for k in range(shape[-1])) if shape[-1] > 1 else ("u",),
        lambda first, end: np.stack([one(name) for name in names[first:end]]),
    )  # fmt: skip
