"""The files of the papers, in whatever format: Burgers, Darcy and Navier-Stokes, told apart by their names."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from oformer.data.importers.common import Choices, GridFile, Named, Opened, Rows, check_room, refuse_in_times, unit
from oformer.errors import InputError

_PAIRS = {
    "burgers": (("a", "u"), ("x", "y")),
    "darcy": (("coeff", "sol"), ("a", "u"), ("x", "y")),
    "navier-stokes": (("x", "y"),),
}
_SPACE = {"burgers": 1, "darcy": 2, "navier-stokes": 2}
_PERIODIC = "Periodic with period 1 along each axis; point j of n lies at j/n, the end not repeated."
_STRIDES = (2, 3, 5, 7, 10, 15)  # by which the papers thin the 421 x 421 points of Darcy


def by_names(file: Named, choices: Choices) -> Opened:
    """Understand the named arrays of a file; which equation they belong to is guessed where the caller names none."""
    path, arrays = file.path, file.arrays
    kind = choices.kind or _guess(path, arrays)
    if kind == "navier-stokes" and "u" in arrays:
        return _trajectories(file, choices.in_times)
    names = next((names for names in _PAIRS[kind] if set(names) <= arrays.keys()), None)
    if names is None:
        wanted = " or ".join(f"`{a}` and `{u}`" for a, u in _PAIRS[kind])
        raise InputError(f"{wanted} in {path} for {kind}", _listed(arrays))
    refuse_in_times(choices.in_times, kind)
    a, dim = arrays[names[0]], _SPACE[kind]
    if a.axes != dim + 1:
        axes = "(sample, x)" if dim == 1 else "(sample, x, y)"
        raise InputError(f"`{names[0]}` of {path} with axes {axes} for {kind}", f"shape {a.shape}")
    if dim == 2 and a.shape[1] != a.shape[2]:
        raise InputError(f"a square grid in `{names[0]}` of {path}", f"shape {a.shape}")
    return _darcy(file, names) if kind == "darcy" else _periodic(file, kind, names)


def _guess(path: Path, arrays: Mapping[str, Rows]) -> str:
    if {"coeff", "sol"} <= arrays.keys():
        return "darcy"
    if "u" in arrays and arrays["u"].axes == 4:
        return "navier-stokes"
    shapes = {name: rows.shape for name, rows in arrays.items()}
    if {"a", "u"} <= arrays.keys() and arrays["a"].axes == arrays["u"].axes == 2 and shapes.get("x") != shapes["a"]:
        return "burgers"
    if {"x", "y"} <= arrays.keys() and not _may_be_points(shapes):
        if arrays["x"].axes == 2:
            return "burgers"
        if arrays["x"].axes == 3 and arrays["x"].dtype.kind == "b":
            return "darcy"
    saved, mine = ("", path) if path.suffix == ".mat" else ("save them as .npz and ", path.with_suffix(".npz"))
    points = [name for name in ("x", "y", "z") if name in arrays]
    fields = [name for name in arrays if name not in points] or ["NAME"]
    raise InputError(
        f"`a` and `u` (Burgers), `coeff` and `sol` (Darcy), `u` (Navier-Stokes, four axes), or `x` and `y` of several "
        f"samples and no other arrays of their shape in {path}",
        _listed(arrays),
        f"If you know that it is one of these, say so with --kind, as in --kind burgers; if the arrays are your own, "
        f"{saved}say which are points, input and target: oformer import {mine} --coords {','.join(points) or 'NAME'} "
        f"--inputs {fields[0]} --targets {fields[-1]}",
    )


def _may_be_points(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether `x` and `y` may be the coordinates of points: rows or columns, or beside arrays of as many numbers."""
    place = shapes["x"]
    others = [shape for name, shape in shapes.items() if name not in ("x", "y")]
    return min(place) == 1 or any(shape == place or shape[0] == place[0] for shape in others)


def _listed(arrays: Mapping[str, Rows]) -> str:
    return ", ".join(f"`{name}` {rows.shape}" for name, rows in sorted(arrays.items())[:8]) or "no array of numbers"


def _periodic(file: Named, kind: str, names: tuple[str, str]) -> Opened:
    a, u = (file.arrays[name] for name in names)
    dim = _SPACE[kind]
    assumptions = [_PERIODIC]
    skip = 0
    if u.axes == dim + 2 and u.shape[0] == a.shape[0] and u.shape[1] > 1:
        few = min(8, a.shape[0])
        if np.array_equal(u.take(0, few)[:, 0], a.take(0, few)):
            skip = 1
            assumptions.append(f"The first frame of `{names[1]}` is `{names[0]}` again and is left out of the target.")
    title, letter = {"burgers": ("Burgers", "u"), "navier-stokes": ("Navier-Stokes", "w")}[kind]
    return GridFile(
        file.path, kind, file.format, f"{title}, from {file.path.name}", (unit(a.shape[1]),) * dim,
        periods=(1.0,) * dim, assumptions=assumptions, parameters=file.numbers,
    ).pair(names, file.arrays, (f"{letter} before", f"{letter} after"), skip)  # fmt: skip


def _darcy(file: Named, names: tuple[str, str]) -> Opened:
    a, u = (file.arrays[name] for name in names)
    assumptions = []
    if a.dtype.kind == "b":
        assumptions.append(f"`{names[0]}` says yes or no: kept as 1 and 0, since the file names no two coefficients.")
    axis, where, warnings = _darcy_axis(a.shape[1], u)
    return GridFile(
        file.path, "darcy", file.format, f"Darcy, from {file.path.name}", (axis, axis),
        assumptions=(*assumptions, where), warnings=warnings, parameters=file.numbers,
    ).pair(names, file.arrays, ("coefficient", "u"))  # fmt: skip


def _darcy_axis(n: int, solution: Rows) -> tuple[np.ndarray, str, list[str]]:
    """Coordinates along an axis of the unit square, the sentence about them, and warnings.

    The solution is zero on the boundary, so how it falls off towards the first and the last line tells how far these
    lie from it. That is compared with each grid in use.
    """
    check_room(64 * n)
    i = np.arange(n)
    cells = (i + 0.5) / n, f"The points are the centres of {n} cells per axis of the unit square, (i + 1/2)/{n}"
    if n == 421:
        return cells[0], cells[1] + ", as in the published files.", []
    choices = [cells, (i / max(n - 1, 1), f"The points are nodes i/{n - 1} of the unit square, its boundary included")]
    for fine, strides in ((421, _STRIDES), (512, (2, 4, 8, 16, 32, 64))):
        for r in strides:
            if len(range(0, fine, r)) == n:
                words = f"The points are one in {r} of the centres of {fine} cells per axis, ({r} i + 1/2)/{fine}"
                choices.append(((r * i + 0.5) / fine, words))
    edges = _edges(solution)
    if edges is None:
        return cells[0], cells[1] + ".", ["There is too little in the file to check where its grid begins and ends."]

    def misfit(axis: np.ndarray) -> float:
        step = axis[1] - axis[0]
        return abs(axis[0] / step - edges[0]) + abs((1 - axis[-1]) / step - edges[1])

    axis, words = min(choices, key=lambda choice: misfit(choice[0]))
    if misfit(axis) > 0.3:
        return (
            cells[0],
            cells[1] + ".",
            ["The solution does not fall to zero at the edges as on any grid in use: check the coordinates."],
        )
    return axis, f"{words}: that fits how the solution falls to zero at the edges.", []


def _edges(solution: Rows) -> tuple[float, float] | None:
    """Distances, in steps of the grid, from the first and the last line to the zeros of the solution, by a cubic."""
    n = solution.shape[-1]
    if n < 8 or solution.axes != 3 or solution.shape[0] == 0:
        return None
    values = np.asarray(solution.take(0, min(64, solution.shape[0])), np.float64)
    profile = (values.mean((0, 2)) + values.mean((0, 1))) / 2
    found = []
    for mean in (profile[:4], profile[::-1][:4]):
        if not np.isfinite(mean).all() or not mean.any():
            return None
        roots = np.roots(np.polyfit(np.arange(4), mean, 3))
        real = -roots[np.abs(roots.imag) < 1e-9].real
        found.append(float(real[np.abs(real).argmin()]) if len(real) else np.inf)
    return found[0], found[1]


def _trajectories(file: Named, in_times: int | None) -> Opened:
    u = file.arrays["u"]
    if u.axes != 4 or u.shape[1] != u.shape[2]:
        raise InputError(f"`u` of {file.path} with axes (sample, x, y, time) and a square grid", f"shape {u.shape}")
    words = {"u": f"(sample, x, y, time) = {u.shape}: the vorticity"}
    for name, meaning in (("a", "the vorticity at time 0, left out as in the papers"),
                          ("t", "the times of the frames, not stored")):  # fmt: skip
        if name in file.arrays:
            words[name] = f"{file.arrays[name].shape}: {meaning}"
    frames = Rows((u.shape[0], u.shape[3], *u.shape[1:3]), lambda i, j: np.moveaxis(u.take(i, j), 3, 1), u.dtype)
    return navier_stokes(file.path, file.format, words, frames, in_times, file.numbers)


def navier_stokes(
    path: Path, format: str, words: dict[str, str], frames: Rows, in_times: int | None, numbers: Mapping[str, float]
) -> Opened:
    """A file of the vorticity (sample, time, x, y) on the periodic unit square."""
    samples, times, points, _ = frames.shape
    warning = f"More frames ({times}) than samples ({samples}): check which axis is which."
    return GridFile(
        path, "navier-stokes", format, f"Navier-Stokes, from {path.name}", (unit(points),) * 2, words,
        periods=(1.0, 1.0), parameters=numbers, assumptions=(_PERIODIC,), warnings=(warning,) * (times > samples),
    ).march(in_times, (samples, times), ("vorticity",), lambda i, j: frames.take(i, j)[..., None])  # fmt: skip
