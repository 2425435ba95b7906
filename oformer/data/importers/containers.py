"""MATLAB, numpy and torch files as named arrays; nothing in them is ever run."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from oformer.data.importers.apart import ask, kept_open
from oformer.data.importers.child import MATLAB_SIZES
from oformer.data.importers.common import Choices, Named, Opened, Rows, check_numbers
from oformer.data.importers.equations import by_names, navier_stokes
from oformer.data.importers.hdf5 import Group, is_hdf5, open_hdf5
from oformer.errors import InputError
from oformer.files import check_regular


def is_matlab(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a file has MATLAB's header of version 5 to 7.3, or ends in .mat and is HDF5."""
    return _version(head) in (1, 2) or (path.suffix == ".mat" and is_hdf5(path, head, choices))


def _version(head: bytes) -> int | None:
    """The major version in the header of a MATLAB file: 1 for 5 to 7.2, 2 for 7.3; None for other files."""
    if len(head) < 128 or head[126:128] not in (b"IM", b"MI"):
        return None
    return head[125] if head[126:128] == b"IM" else head[124]


@contextmanager
def open_matlab(path: Path, choices: Choices) -> Iterator[Opened]:
    """A MATLAB file of one of the papers."""
    with matlab_arrays(path) as file:
        yield by_names(file, choices)


@contextmanager
def matlab_arrays(path: Path) -> Iterator[Named]:
    """The arrays and single numbers of a MATLAB file of any version."""
    check_regular(path)
    with path.open("rb") as file:
        old = _version(file.read(128)) == 1
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
    return Named(path, "MATLAB 5 to 7", arrays, {name: float(value.reshape(-1)[0]) for name, value in found.items()})


def _matlab_73(path: Path, file: Group) -> Named:
    """MATLAB 7.3, which is HDF5 with all axes reversed: samples come last."""
    arrays, numbers = {}, {}
    for name in (name for name, kind in file.members.items() if kind == "array"):
        data = file.array(name)
        if data.dtype.kind not in "fiub":
            continue
        if data.size == 1:
            numbers[name] = float(np.asarray(data[()]).reshape(-1)[0])
        elif data.ndim:
            shape = tuple(reversed(data.shape))
            arrays[name] = Rows(shape, lambda i, j, data=data: np.asarray(data[..., i:j]).T, data.dtype)
    return Named(path, "MATLAB 7.3 (HDF5, axes reversed)", arrays, numbers)


def is_numpy(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a file begins as .npy does."""
    return head.startswith(b"\x93NUMPY")


@contextmanager
def open_numpy(path: Path, choices: Choices) -> Iterator[Opened]:
    """One array (time, x, y, sample), mapped into memory."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    check_numbers(path, "the array", array.dtype)
    shape = array.shape
    if len(shape) != 4 or shape[1] != shape[2]:
        raise InputError(f"one array (time, x, y, sample) on a square grid in {path}", f"shape {shape}")
    words = {"(the array)": f"(time, x, y, sample) = {shape}: the vorticity"}
    frames = Rows((shape[3], *shape[:3]), lambda i, j: np.moveaxis(array[..., i:j], 3, 0), array.dtype)
    yield navier_stokes(path, "numpy", words, frames, choices.in_times, {})


@contextmanager
def open_torch(path: Path, choices: Choices) -> Iterator[Opened]:
    """A dictionary of tensors as torch saves it; anything else in it is refused unread."""
    with torch_arrays(path) as (file, dictionaries, _):
        if dictionaries is not None:
            raise InputError(f"one dictionary of tensors in {path} for `{choices.kind}`", "a list", "Leave `kind`")
        yield by_names(file, choices)


@contextmanager
def torch_arrays(path: Path) -> Iterator[tuple[Named, int | None, Callable[..., np.ndarray]]]:
    """The tensors of a torch file.

    Yields:
        Those of its dictionary, or of the first one in a list; how many are in the list, None where there is none; a
        function that reads rows by name, number of the dictionary, first row and end.
    """
    with kept_open(path, "tensors_open", mapped=path.stat().st_size) as (handle, found, numbers, dictionaries):

        def read(name: str, *place: int | None) -> np.ndarray:
            return ask(path, "tensors_read", handle, name, *place, what=f"`{name}`")

        arrays = {
            name: Rows(shape, functools.partial(read, name, 0), np.dtype(bool if logical else np.float32))
            for name, (shape, logical) in found.items()
        }
        yield Named(path, "torch tensors", arrays, numbers), dictionaries, read
