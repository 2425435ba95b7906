"""The Well: scalars in `t0_fields`, vectors in `t1_fields`, tensors in `t2_fields`, and what varies with what."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oformer.data.importers.common import Choices, GridFile, Opened, checked_axis, even
from oformer.data.importers.hdf5 import Array, Group, is_hdf5, open_hdf5, words
from oformer.errors import InputError

ORDERS = {"t0_fields": 0, "t1_fields": 1, "t2_fields": 2}


def is_well(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a file is HDF5 with the names of The Well."""
    if not is_hdf5(path, head, choices):
        return False
    with open_hdf5(path) as file:
        return "dimensions" in file and any(name in file for name in ORDERS)


@dataclass(frozen=True)
class _Quantity:
    """A field of the file: its channels, and whether it varies."""

    name: str
    data: Array
    by_sample: bool
    by_time: bool
    by_axis: tuple[bool, ...]
    components: int


@contextmanager
def open_well(path: Path, choices: Choices) -> Iterator[Opened]:
    """A file of The Well."""
    with open_hdf5(path) as file:
        yield _understood(path, file, choices.in_times)


def _understood(path: Path, file: Group, in_times: int | None) -> Opened:
    dimensions = file.group("dimensions")
    letters = words(dimensions.attribute("spatial_dims", ()))
    if not 1 <= len(letters) <= 3:
        raise InputError(f"one to three `spatial_dims` in {path}", ", ".join(letters) or "none")
    # Only the lengths: the coordinates are read when the fields agree with them.
    points = [math.prod(dimensions.numbers(letter).shape) for letter in letters]
    times = dimensions.numbers("time").shape[-1:]
    if not times:
        raise InputError(f"the times of the frames in `dimensions/time` of {path}", "one number")
    samples = _samples(path, file)
    shape = (samples, times[0], *points)
    found = [
        _quantity(path, file.group(group), name, order, shape)
        for group, order in ORDERS.items()
        if group in file
        for name in _fields(file.group(group))
    ]
    axes = tuple(_axis(path, dimensions, letter) for letter in letters)
    moving, still = [q for q in found if q.by_time], [q for q in found if not q.by_time]
    if not moving:
        raise InputError(f"fields that vary in time in {path}", "none", "There is nothing to predict")
    periods, said, warnings = _periods(path, file, letters, axes)
    numbers, more = _scalars(path, file, samples)
    if still:
        said.append(f"{', '.join(q.name for q in still)}: constant in time, input channels of every frame.")
    grid_type = words(file.attribute("grid_type", "cartesian"))
    if grid_type != ["cartesian"]:
        warnings.append(f"The grid is {', '.join(grid_type)}: its {', '.join(letters)} are used as plain coordinates.")
    title = words(file.attribute("dataset_name", path.stem))[0]
    return GridFile(
        path, "the-well", "The Well (HDF5)", f"The Well: {title}, from {path.name}", axes,
        {q.name: _described(q, letters) for q in found}, periods, numbers, said, (*warnings, *more),
    ).march(
        in_times, (samples, times[0]), _names(moving, letters), _reader(moving, shape),
        _names(still, letters), _reader(still, shape) if still else None,
    )  # fmt: skip


def _fields(group: Group) -> list[str]:
    """In the file's own order where it says one."""
    return words(group.attribute("field_names")) if "field_names" in group.attributes else sorted(group)


def _samples(path: Path, file: Group) -> int:
    count = file.attribute("n_trajectories")
    if not isinstance(count, (int, np.integer)) or count < 1:
        raise InputError(f"`n_trajectories`, at least one, in the attributes of {path}", str(count))
    return int(count)


def _axis(path: Path, dimensions: Group, letter: str) -> np.ndarray:
    data = dimensions.numbers(letter)
    if bool(data.attribute("sample_varying", False)) or bool(data.attribute("time_varying", False)):
        raise InputError(f"coordinates `{letter}` that all samples and frames of {path} share", "varying ones")
    return checked_axis(path, f"dimensions/{letter}", data)


def _quantity(path: Path, group: Group, name: str, order: int, shape: tuple[int, ...]) -> _Quantity:
    data = group.numbers(name)
    dim = len(shape) - 2
    by_axis = tuple(bool(v) for v in np.atleast_1d(data.attribute("dim_varying", [True] * dim)))
    by_sample, by_time = (bool(data.attribute(f"{what}_varying", True)) for what in ("sample", "time"))
    varies = (by_sample, by_time, *by_axis)
    expected = (*(n for n, here in zip(shape, varies, strict=False) if here), *(dim,) * order)
    if len(by_axis) != dim or data.shape != expected:
        raise InputError(f"`{name}` of shape {expected} in {path}, as its attributes say", f"{data.shape}")
    return _Quantity(name, data, by_sample, by_time, by_axis, dim**order)


def _reader(quantities: list[_Quantity], shape: tuple[int, ...]) -> Callable[[int, int], np.ndarray]:
    """Reads (samples, times, *grid, channels); what does not vary along an axis is repeated."""

    def one(q: _Quantity, first: int, end: int) -> np.ndarray:
        values = np.asarray(q.data[first:end] if q.by_sample else q.data[()])
        varies = (q.by_sample, q.by_time, *q.by_axis)
        full = (end - first, shape[1] if q.by_time else 1, *shape[2:])
        kept = tuple(n if here else 1 for n, here in zip(full, varies, strict=True))
        return np.broadcast_to(values.reshape(*kept, q.components), (*full, q.components))

    return lambda first, end: np.concatenate([one(q, first, end) for q in quantities], -1)


def _names(quantities: list[_Quantity], letters: list[str]) -> tuple[str, ...]:
    names = []
    for q in quantities:
        if q.components == 1 and not q.data.place.startswith(("/t1_fields", "/t2_fields")):
            names.append(q.name)
        elif q.components == len(letters):
            names += [f"{q.name}_{letter}" for letter in letters]
        else:
            names += [f"{q.name}_{a}{b}" for a in letters for b in letters]
    return tuple(names)


def _described(q: _Quantity, letters: list[str]) -> str:
    varies = zip(("sample", "time", *letters), (q.by_sample, q.by_time, *q.by_axis), strict=True)
    axes = [name for name, here in varies if here]
    parts = ["component"] * (q.data.ndim - len(axes))
    return f"({', '.join([*axes, *parts])}) = {q.data.shape}"


def _periods(
    path: Path, file: Group, letters: list[str], axes: tuple[np.ndarray, ...]
) -> tuple[tuple[float, ...] | None, list[str], list[str]]:
    """The periods if all axes have one, what was assumed, and warnings."""
    periodic: set[str] = set()
    if "boundary_conditions" in file:
        conditions = file.group("boundary_conditions")
        for name in conditions:
            condition = conditions.group(name)
            if words(condition.attribute("bc_type", ""))[0].upper() == "PERIODIC":
                periodic |= set(words(condition.attribute("associated_dims", letters)))
    wrapped = [letter for letter in letters if letter in periodic]
    if not wrapped:
        return None, ["No axis is periodic by the file's boundary conditions."], []
    if len(wrapped) < len(letters):
        some = f"Only {', '.join(wrapped)} of {', '.join(letters)} is periodic: stored as a domain without periods."
        return None, [], [some]
    if not all(even(axis) and len(axis) > 1 for axis in axes):
        return None, [], ["The axes are periodic but not evenly spaced: stored as a domain without periods."]
    periods = tuple(float(len(axis) * (axis[-1] - axis[0]) / (len(axis) - 1)) for axis in axes)
    said = f"Periodic; the period is n steps of each axis: {', '.join(f'{p:g}' for p in periods)}."
    return periods, [said], []


def _scalars(path: Path, file: Group, samples: int) -> tuple[dict[str, np.ndarray], list[str]]:
    """Numbers of each sample as parameters, and warnings about those that vary in time, which are left out."""
    values: dict[str, np.ndarray] = {}
    warnings = []
    for name in file.group("scalars") if "scalars" in file else ():
        data = file.group("scalars").array(name)
        if data.dtype.kind not in "fiub" or data.shape not in ((), (1,), (samples,)):
            warnings.append(f"The scalar `{name}` of shape {data.shape} is left out.")
            continue
        values[name] = np.asarray(data[()]).reshape(-1)
        if not math.isfinite(float(values[name].sum())):
            raise InputError(f"finite numbers in the scalar `{name}` of {path}", "NaN or infinite ones")
    return values, warnings
