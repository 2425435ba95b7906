"""MATLAB, numpy and torch files as named arrays; nothing in them is ever run."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.common import Opened, Rows, check_numbers
from oformer.data.importers.equations import by_names, navier_stokes
from oformer.data.importers.hdf5 import dataset_in, open_hdf5
from oformer.errors import InputError

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
    with path.open("rb") as file:
        old = matlab_version(file.read(128)) == 1
    if old:
        yield _matlab_5(path)
        return
    with open_hdf5(path) as content:
        yield _matlab_73(path, content)


def _matlab_5(path: Path) -> Named:
    """MATLAB 5 to 7.2: each variable is read whole when it is first used."""
    import scipy.io

    loaded: dict[str, np.ndarray] = {}

    def variable(name: str) -> np.ndarray:
        if name not in loaded:
            found = scipy.io.loadmat(path, variable_names=[name])[name]
            check_numbers(path, name, found.dtype)
            loaded[name] = found
        return loaded[name]

    numeric = ("double", "single", "logical", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
    arrays, single = {}, []
    for name, shape, kept in scipy.io.whosmat(path):
        if kept in numeric and shape == (1, 1):
            single.append(name)
        elif kept in numeric:
            dtype = np.dtype(bool) if kept == "logical" else np.dtype(np.float64)
            arrays[name] = Rows(tuple(shape), lambda i, j, name=name: variable(name)[i:j], dtype)
    found = scipy.io.loadmat(path, variable_names=single) if single else {}
    numbers = {name: float(found[name][0, 0]) for name in single if found[name].dtype.kind in "fiub"}
    return "MATLAB 5 to 7", arrays, numbers


def _matlab_73(path: Path, file: Any) -> Named:
    """MATLAB 7.3, which is HDF5 with all axes reversed: samples come last."""
    import h5py

    arrays, numbers = {}, {}
    for name in file:
        if not isinstance(file.get(name, getlink=True), h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
            continue
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
    import torch

    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle's version, before refusing it
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        got = f"one that would run `{foreign[1]}`" if foreign else "one that is damaged or holds something else"
        raise InputError(
            f"a .pt file of nothing but tensors at {path}", got, "Save it anew as torch.save({'x': x, 'y': y}, file)"
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"a dictionary of tensors in {path}", f"a {type(content).__name__}")
    arrays, numbers = {}, {}
    for name, value in content.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[str(name)] = float(value)
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
            raise InputError(f"dense real numbers in `{name}` of {path}", f"{value.dtype}, {value.layout}")
        if value.numel() == 1:
            numbers[str(name)] = float(value)
        elif value.ndim:
            arrays[str(name)] = _tensor_rows(value.detach())
    yield by_names(path, "torch tensors", arrays, kind, in_times, numbers)


def _tensor_rows(tensor: Any) -> Rows:
    import torch

    dtype = np.dtype(bool) if tensor.dtype == torch.bool else np.dtype(np.float32)

    def take(first: int, end: int) -> np.ndarray:
        rows = tensor[first:end]
        # numpy has no bfloat16, and needs none: values are stored in float32.
        return (rows if tensor.dtype in (torch.bool, torch.float64) else rows.float()).numpy()

    return Rows(tuple(tensor.shape), take, dtype)
