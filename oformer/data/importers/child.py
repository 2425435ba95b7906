"""Reads foreign files in a process of its own, where a crash, a loop or a bomb in a library ends that process alone.

`apart.py` starts this file as a script, so that torch is imported only for files of torch. A request is a pickled
(operation, arguments, bytes of memory, current folder) on the standard input; the answer is a pickled (True, result) or
(False, (kind of error, its arguments)) on the standard output. Results are plain: numbers, text and arrays of numbers.
"""

import contextlib
import csv
import importlib
import io
import itertools
import math
import os
import pickle
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oformer.errors import InputError
from oformer.vtk.mesh import Block, Mesh

IDLE = 60.0  # seconds without a request and without an open file, after which the process ends
NUMBERS = "fiub"  # numpy's kinds of real numbers
# Bytes of a number by MATLAB's class.
MATLAB_SIZES = {
    "double": 8, "single": 4, "logical": 1,
    **{f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)},
}  # fmt: skip
_DAMAGED_OR_MORE = "one that is damaged or holds something else"

_open: dict[int, Any] = {}  # HDF5 files and dictionaries of tensors, by handle
_handles = itertools.count(os.getpid() << 32)  # another child has other handles
_budget = math.inf  # bytes that the request may take


def numbers(path: str, name: str, values: Any) -> np.ndarray:
    """An array of real numbers, or an error."""
    array = np.asarray(values)
    if array.dtype.kind not in NUMBERS:
        raise InputError(f"real numbers in `{name}` of {path}", f"an array of {array.dtype}")
    return array


def _check_size(path: str, name: str, shape: tuple[int, ...], itemsize: int) -> None:
    """Refuse an array whose declared size is above the budget, before any of it is read: it is here and there."""
    if 2 * math.prod(shape) * itemsize > _budget:
        raise MemoryError(f"`{name}` of {path} has shape {shape}")


def matlab_index(path: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and class of each variable of a MATLAB file of version 5 to 7.2."""
    import scipy.io

    found = scipy.io.whosmat(path)
    for name, shape, kind in found:
        _check_size(path, name, shape, MATLAB_SIZES.get(kind, 1))
    return found


def matlab_arrays(path: str, names: list[str]) -> dict[str, np.ndarray]:
    """Variables of a MATLAB file of version 5 to 7.2, by name."""
    import scipy.io

    found = scipy.io.loadmat(path, variable_names=names)
    return {name: numbers(path, name, found[name]) for name in names}


def _opened(handle: int) -> Any:
    if handle not in _open:
        raise InputError("a file that is still open", "one whose reader was ended by another file", "Run it again")
    return _open[handle]


def hdf5_open(path: str) -> int:
    """A handle for an HDF5 file."""
    import h5py

    handle = next(_handles)
    _open[handle] = h5py.File(path, "r")
    return handle


def close(handle: int) -> None:
    """Close an HDF5 file, or drop tensors."""
    content = _open.pop(handle, None)
    if hasattr(content, "close"):
        content.close()


def hdf5_look(handle: int, place: str) -> tuple[str, Any, Any, list[str]]:
    """A group as its members' kinds, or an array as its shape and type; the names of its attributes.

    Links that lead elsewhere are named as such and not followed.
    """
    import h5py

    item = _opened(handle)[place]
    attributes = list(item.attrs)
    if isinstance(item, h5py.Dataset):
        elsewhere = bool(item.external) or item.is_virtual
        return "elsewhere" if elsewhere else "array", item.shape, item.dtype.str, attributes
    members = {}
    for name in item:
        if not isinstance(item.get(name, getlink=True), h5py.HardLink):
            members[name] = "link"
        else:
            kind = item.get(name, getclass=True)
            members[name] = "array" if kind is h5py.Dataset else "group" if kind is h5py.Group else "type"
    return "group", members, None, attributes


def hdf5_attribute(handle: int, place: str, name: str) -> Any:
    """An attribute of text or numbers; None for another one."""
    value = _opened(handle)[place].attrs[name]
    plain = isinstance(value, (str, bytes)) or np.asarray(value).dtype.kind in NUMBERS + "SU"
    if not plain:
        words = np.atleast_1d(np.asarray(value)).tolist()
        return words if all(isinstance(word, (str, bytes)) for word in words) else None
    return value


def hdf5_read(handle: int, place: str, part: Any) -> np.ndarray:
    """A part of an HDF5 array, chosen by slices."""
    data = _opened(handle)[place]
    shape = np.broadcast_to(False, data.shape)[part].shape  # a view of one element
    _check_size(data.file.filename, place, shape, data.dtype.itemsize)
    return numbers(data.file.filename, place, data[part])


def vtk_mesh(path: str) -> list[Mesh]:
    """The mesh of each frame of one of VTK's files."""
    from oformer.vtk.read_legacy import read_legacy
    from oformer.vtk.read_xml import read_xml

    return [read_legacy(path)] if path.lower().endswith(".vtk") else read_xml(path)


def other_mesh(path: str) -> tuple[list[Mesh], str]:
    """The mesh of each frame of an XDMF, gmsh or SU2 file, and what meshio or its successor meshlane printed."""
    meshio, heard, suffix = _meshio(), io.StringIO(), Path(path).suffix.lower()
    # Its readers are called one by one: meshio's own entrance leaves the program at a file it cannot read.
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        if suffix in (".xdmf", ".xmf"):
            points, cells, frames = _xdmf(path)
        else:
            found = {".msh": meshio.gmsh, ".su2": meshio.su2}[suffix].read(path)
            points, cells, frames = found.points, found.cells, [(found.point_data, found.cell_data)]
    numbered = {name: number for number, name in meshio._vtk_common.vtk_to_meshio_type.items()}
    counts = np.cumsum([0, *(len(block.data) for block in cells)])
    blocks = [
        Block(numbered[block.type], np.asarray(block.data), first + np.arange(len(block.data)))
        for block, first in zip(cells, counts, strict=False)
        if block.type != "vertex"
    ]
    points = numbers(path, "the points", points)
    meshes = [
        Mesh(points, blocks, {name: numbers(path, name, values) for name, values in at_points.items()},
             {name: numbers(path, name, np.concatenate(parts)) for name, parts in at_cells.items()})
        for at_points, at_cells in frames
    ]  # fmt: skip
    return meshes, heard.getvalue()


def _meshio() -> Any:
    """meshlane, the fork that is looked after, or meshio."""
    try:
        return importlib.import_module("meshlane")
    except ImportError:
        return importlib.import_module("meshio")


def table(path: str) -> tuple[list[str], np.ndarray]:
    """The names and the numbers (rows, columns) of a text file with a column for each quantity."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        head = ""
        for skipped, line in enumerate(file):  # noqa: B007 - counts the lines before the numbers
            if re.match(r"\s*[-+.\d]", line):
                break
            head = line.strip() or head
        else:
            raise InputError(f"rows of numbers in {path}", "none")
    split = next((mark for mark in (",", ";", "\t") if mark in line), None)
    values = np.loadtxt(path, delimiter=split, skiprows=skipped, comments="%", ndmin=2, encoding="utf-8-sig")
    names = [name.strip(" \"'") for name in next(csv.reader([head.lstrip("%# ")], delimiter=split or " "), [])]
    names = [name for name in names if name or split]
    if len(names) != values.shape[1] or len(set(names)) != len(names):
        raise InputError(
            f"a line with {values.shape[1]} different names above the numbers of {path}, one for each column",
            ", ".join(f"`{name}`" for name in names) or "none",
        )
    return names, values


def _xdmf(path: str) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """Points, cells and the fields of each frame of an XDMF file."""
    import xml.etree.ElementTree

    meshio = _meshio()
    tree = xml.etree.ElementTree.parse(path)
    # Every element, whatever its tag: meshio reads any child of a geometry, a topology or an attribute.
    for item in tree.iter():
        kind = item.get("Format", "XML")
        if kind == "HDF":
            _check_reference(Path(path), (item.text or "").strip())
        elif kind != "XML":
            raise InputError(f"data in HDF5 or in the file itself in {path}", f"`{kind}`", "Save it anew as HDF5")
    if any(grid.get("CollectionType") == "Temporal" for grid in tree.iter("Grid")):
        with meshio.xdmf.TimeSeriesReader(path) as series:
            points, blocks = series.read_points_cells()
            return points, blocks, [series.read_data(k)[1:] for k in range(series.num_steps)]
    found = meshio.xdmf.read(path)
    return found.points, found.cells, [(found.point_data, found.cell_data)]


def _check_reference(path: Path, reference: str) -> None:
    """Refuse what an XDMF file refers to, unless it is an array in a regular HDF5 file of the same folder."""
    import h5py

    folder, (name, _, inside) = path.resolve().parent, reference.partition(":")
    beside = (folder / name).resolve()  # a link may lead elsewhere
    if Path(name).name != name or beside.parent != folder or not inside.strip("/"):
        raise InputError(f"data of {path} in a file beside it", f"`{reference[:80]}`", "Copy the data there")
    if not beside.is_file():
        raise InputError(f"a file {name} beside {path}", "a device or a pipe" if beside.exists() else "none")
    with h5py.File(beside, "r") as file:
        place: Any = file
        for key in inside.strip("/").split("/"):
            if not isinstance(place, h5py.Group) or not isinstance(place.get(key, getlink=True), h5py.HardLink):
                raise InputError(f"an array `{inside}` in {beside} itself", "none, or a link", "Copy the data there")
            place = place[key]
        if not isinstance(place, h5py.Dataset) or place.external or place.is_virtual:
            raise InputError(f"an array `{inside}` in {beside} itself", "none, or data in other files")
        _check_size(str(beside), inside, place.shape, place.dtype.itemsize)


def netcdf(path: str) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Each array of numbers in a NetCDF file with the names of its axes; packed numbers are unpacked."""
    import xarray

    with xarray.open_dataset(path, decode_times=False) as data:
        found = {str(name): array for name, array in data.variables.items() if array.dtype.kind in NUMBERS}
        _check_size(path, ", ".join(found), (sum(array.size for array in found.values()),), 8)
        return {name: (tuple(map(str, array.dims)), numbers(path, name, array.values)) for name, array in found.items()}


def tensors_open(path: str) -> tuple[int, dict[str, tuple[tuple[int, ...], bool]], dict[str, float], int | None]:
    """A handle for a dictionary of tensors, or for a list of such dictionaries.

    Returns:
        The handle; the shape of each tensor, and whether it is of yes and no; single numbers. Of a list, those of its
        first dictionary, and how many there are; None where there is no list.
    """
    import torch

    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle's version, before refusing it
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError:
        raise
    except Exception as error:
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        got = f"one that would run `{foreign[1]}`" if foreign else _DAMAGED_OR_MORE
        raise InputError(
            f"a .pt file of nothing but tensors at {path}", got, "Save it anew as torch.save({'x': x, 'y': y}, file)"
        ) from error
    samples: list[Any] = content if isinstance(content, list) and content else [content]
    for sample in samples:
        if not isinstance(sample, dict):
            kind = f"a {type(content).__name__}" + f" with a {type(sample).__name__}" * (sample is not content)
            raise InputError(f"a dictionary of tensors, or a list of them, in {path}", kind)
    listed, handle = isinstance(content, list), next(_handles)
    found = [_tensors(path, sample) for sample in samples]
    _open[handle] = found
    single = {} if listed else {name: float(tensor) for name, tensor in found[0].items() if tensor.numel() == 1}
    arrays = {name: tensor for name, tensor in found[0].items() if name not in single and (listed or tensor.ndim)}
    shapes = {name: (tuple(torch.atleast_1d(t).shape), t.dtype == torch.bool) for name, t in arrays.items()}
    return handle, shapes, single, len(samples) if listed else None


def _tensors(path: str, content: dict[Any, Any]) -> dict[str, Any]:
    """The tensors and, as such, the numbers of a dictionary."""
    import torch

    kept = {}
    for key, value in content.items():
        name = str(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            kept[name] = torch.tensor(float(value), dtype=torch.float64)
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout != torch.strided or value.is_quantized or value.is_complex() or value.is_meta:
            raise InputError(f"dense real numbers in `{name}` of {path}", f"{value.dtype}, {value.layout}")
        kept[name] = value.detach()
    return kept


def tensors_read(handle: int, name: str, sample: int, first: int, end: int | None) -> np.ndarray:
    """Rows of a tensor in one of the dictionaries."""
    import torch

    tensors = _opened(handle)[sample]
    if name not in tensors:
        raise InputError(f"a tensor `{name}` in each dictionary of the list", f"none in number {sample}")
    rows = torch.atleast_1d(tensors[name])[first:end]
    _check_size("the file", name, tuple(rows.shape), 8)
    # numpy has no bfloat16, and needs none: values are stored in float32.
    return (rows if rows.dtype in (torch.bool, torch.float64) else rows.float()).contiguous().numpy()


class _Type:
    """Stands for numpy.dtype in a pickle: of numbers only."""

    def __init__(self, code: Any, *_: Any):
        if not isinstance(code, str) or not re.fullmatch(r"[fiu][1248]|b1", code):
            raise pickle.UnpicklingError(f"an array of {code!r}"[:80])
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("a number type in an unknown order of bytes")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands for numpy.ndarray in a pickle: a view of bytes of the file, which must be as many as it claims."""

    def __init__(self, content: Any = b"", kind: Any = None, shape: Any = (0,), order: Any = "C"):
        sides = shape if isinstance(shape, tuple) else ()
        dtype = kind.dtype if isinstance(kind, _Type) else np.dtype(np.float32)
        claimed = all(type(n) is int and n >= 0 for n in sides) and math.prod(sides) * dtype.itemsize
        if not isinstance(content, (bytes, bytearray)) or order not in ("C", "F") or claimed != len(content):
            raise pickle.UnpicklingError("an array whose bytes are not those of its type and shape")
        self.values = np.frombuffer(content, dtype).reshape(sides, order=order)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array of unknown make")
        _, shape, kind, columns_first, content = state
        self.__init__(content, kind, shape, "F" if columns_first else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _scalar(kind: Any, content: Any) -> float | int | bool:
    return _Array(content, kind, ()).values.item()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes for the older protocols."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("text in an unknown encoding")
    return text.encode("latin1")


# The old and the new name of numpy's inner modules: before and after numpy 2.
_STANDINS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Array for core in ("core", "_core")},
}


class _Foreign(Exception):
    """A name that is none of ours; its text is the name."""


class _Unpickler(pickle.Unpickler):
    """Knows our stand-ins, and no other name: a pickle is a program, and this is all that it can call."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _STANDINS:
            raise _Foreign(f"{module_name}.{global_name}")
        return _STANDINS[module_name, global_name]


def pickled_arrays(path: str, names: tuple[str, ...]) -> list[dict[str, np.ndarray | None] | str] | str:
    """The dictionaries in a pickled list, with those arrays that are named; what is of another type is its name."""

    def kind(content: Any) -> str:
        if isinstance(content, list):
            return "a list" if content else "an empty list"
        return "an array" if isinstance(content, _Array) else f"a {type(content).__name__}"

    def entry(content: Any) -> dict[str, np.ndarray | None] | str:
        if not isinstance(content, dict):
            return kind(content)
        arrays = {str(key): value.values for key, value in content.items() if isinstance(value, _Array)}
        return {str(key): arrays.get(str(key)) if key in names else None for key in content}

    got, advice = "", "Nothing in it was run. Save it anew as a list of dictionaries of numpy arrays"
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file).load()
        return [entry(item) for item in content] if isinstance(content, list) and content else kind(content)
    except MemoryError:
        raise
    except _Foreign as error:
        got = f"one that would run `{error}`"
    except Exception as error:
        got = f"one that is damaged, cut short or holds something else ({' '.join(str(error).split())[:120]})"
    raise InputError(f"a pickle of nothing but arrays at {path}", got, advice)


# By name: the operation, and the library that is imported before memory is limited.
OPERATIONS: dict[str, tuple[Callable[..., Any], str]] = {
    operation.__name__: (operation, library)
    for library, operations in {
        "scipy.io": (matlab_index, matlab_arrays),
        "h5py": (hdf5_open, hdf5_look, hdf5_attribute, hdf5_read),
        "torch": (tensors_open, tensors_read),
        "xarray": (netcdf,),
        "numpy": (close, pickled_arrays, vtk_mesh, other_mesh, table),
    }.items()
    for operation in operations
}


def _limit_memory(room: float) -> None:
    """Let the process grow by so many bytes; only Linux and its relatives can be asked for it."""
    global _budget
    _budget = room
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    wanted = resource.RLIM_INFINITY if math.isinf(room) else pages * resource.getpagesize() + int(room)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        wanted = most if wanted == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, most))


def _answer(operation: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        with warnings.catch_warnings(action="ignore"):
            return True, operation(*arguments)
    except InputError as error:
        return False, ("InputError", error.__reduce__()[1])
    except Exception as error:
        return False, (type(error).__name__, (" ".join(str(error).split())[:160],))


def _leave_if_idle() -> None:
    if not _open:
        os._exit(0)


def serve() -> None:
    """Answer requests until there are none."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "wb") as nowhere:  # what libraries print, in C too, is no answer
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    while True:
        clock = threading.Timer(IDLE, _leave_if_idle)
        clock.daemon = True
        clock.start()
        try:
            name, arguments, room, folder = pickle.load(requests)
        except EOFError:
            return
        clock.cancel()
        operation, library = OPERATIONS[name]
        importlib.import_module(library)
        os.chdir(folder)  # paths may be relative, and sentences name them as they were given
        _limit_memory(room)
        answer = _answer(operation, arguments)
        _limit_memory(math.inf)
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


if __name__ == "__main__":
    serve()
