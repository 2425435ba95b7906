"""MATLAB, numpy and torch files as named arrays; nothing in them is ever run."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from oformer.data.importers.apart import ask, kept_open
from oformer.data.importers.child import MATLAB_SIZES
from oformer.data.importers.common import Opened, Rows, check_numbers
from oformer.data.importers.equations import by_names, navier_stokes
from oformer.data.importers.hdf5 import Group, dataset_in, open_hdf5
from oformer.errors import InputError
from oformer.files import check_regular

Named = tuple[str, dict[str, Rows], dict[str, float]]  # how a file is written, its arrays, its single numbers


def matlab_version(head: bytes) -> int | None:
    """The major version that a MATLAB file says it has: 1 for 5 to 7.2, 2 for 7.3; None if it is none."""
    if len(head) < 128 or head[126:128] not in (b"IM", b"MI"):
        return None
    return head[125] if head[126:128] == b"IM" else head[124]


@contextmanager
def open_matlab(path: Path, kind: str | None, in_times: int | None) -> Iterator[Opened]:
    """A MATLAB file of one of the papers."""
    with matlab_arrays(path) as (format, arrays, numbers):
        yield by_names(path, format, arrays, kind, in_times, numbers)


@contextmanager
def matlab_arrays(path: Path) -> Iterator[Named]:
    """What a MATLAB file holds, of any version."""
    check_regular(path)
    with path.open("rb") as file:
        old = matlab_version(file.read(128)) == 1
    if old:
        yield _matlab_5(path)
        return
    with open_hdf5(path) as content:
        yield _matlab_73(path, content)


def _matlab_5(path: Path) -> Named:
    """MATLAB 5 to 7.2: each variable is read whole when it is first used."""
    loaded: dict[str, np.ndarray] = {}

    def variable(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in loaded:
            size = 8 * math.prod(shape)
            loaded[name] = ask(path, "matlab_arrays", str(path), [name], what=f"`{name}`", expected=size)[name]
        return loaded[name]

    arrays, single = {}, []
    for name, shape, kept in ask(path, "matlab_index", str(path)):
        if kept in MATLAB_SIZES and shape == (1, 1):
            single.append(name)
        elif kept in MATLAB_SIZES:
            dtype = np.dtype(bool) if kept == "logical" else np.dtype(np.float64)
            arrays[name] = Rows(shape, lambda i, j, name=name, shape=shape: variable(name, shape)[i:j], dtype)
    found = ask(path, "matlab_arrays", str(path), single) if single else {}
    return "MATLAB 5 to 7", arrays, {name: float(value.reshape(-1)[0]) for name, value in found.items()}


def _matlab_73(path: Path, file: Group) -> Named:
    """MATLAB 7.3, which is HDF5 with all axes reversed: samples come last."""
    arrays, numbers = {}, {}
    for name in (name for name, kind in file.members.items() if kind == "array"):
        data = dataset_in(path, file, name)
        if data.dtype.kind not in "fiub":
            continue
        if data.size == 1:
            numbers[name] = float(np.asarray(data[()]).reshape(-1)[0])
        elif data.ndim:
            shape = tuple(reversed(data.shape))
            arrays[name] = Rows(shape, lambda i, j, data=data: np.asarray(data[..., i:j]).T, data.dtype)
    return "MATLAB 7.3 (HDF5, axes reversed)", arrays, numbers


@contextmanager
def open_numpy(path: Path, kind: str | None, in_times: int | None) -> Iterator[Opened]:
    """One array (time, x, y, sample), mapped into memory."""
    if kind not in (None, "navier-stokes"):
        raise InputError(f"Navier-Stokes in the one array of {path}", f"`{kind}`", "Use PointDataset.from_arrays")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    check_numbers(path, "the array", array.dtype)
    shape = array.shape
    if len(shape) != 4 or shape[1] != shape[2]:
        raise InputError(f"one array (time, x, y, sample) on a square grid in {path}", f"shape {shape}")
    words = {"(the array)": f"(time, x, y, sample) = {shape}: the vorticity"}

    def take(first: int, end: int) -> np.ndarray:
        return np.moveaxis(array[..., first:end], 3, 0)

    yield navier_stokes(path, "numpy", words, shape[3], shape[0], shape[1], take, in_times, {})


@contextmanager
def open_torch(path: Path, kind: str | None, in_times: int | None) -> Iterator[Opened]:
    """A dictionary of tensors as torch saves it; anything else in it is refused unread."""
    with kept_open(path, "tensors_open", mapped=path.stat().st_size) as (handle, found, numbers):
        arrays = {
            name: Rows(
                shape,
                lambda i, j, name=name: ask(path, "tensors_read", handle, name, i, j, what=f"`{name}`"),
                np.dtype(bool) if logical else np.dtype(np.float32),
            )
            for name, (shape, logical) in found.items()
        }
        yield by_names(path, "torch tensors", arrays, kind, in_times, numbers)
