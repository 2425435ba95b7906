"""A person's own arrays by name: the caller says which are points, input and target.

They come in .npz, MATLAB, HDF5, NetCDF and torch files, in three forms: a file whose arrays have a first axis of
samples; a folder with a file for each sample; an HDF5 file with a group, or a torch file with a dictionary, for each
sample. In the last two, samples may differ in their points.

The names `coords`, `inputs`, `targets`, and where they exist `query_coords`, `query_features`, `weights` and
`query_weights`, are those of `OperatorRegressor.fit`, and need not be said. Several names are channels side by side,
and a single number of a sample becomes a channel that is constant over its points.

MATLAB, which knows no vectors, keeps them as rows (1 x n) or columns (n x 1): both are understood wherever the counts
of points and samples leave one reading.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.arrays import samples_of
from oformer.data.importers.common import Choices, Layout, Named, Opened, files_in, reading, refuse_in_times
from oformer.data.importers.containers import matlab_arrays, torch_arrays
from oformer.data.importers.hdf5 import Group, open_hdf5
from oformer.data.importers.netcdf import SUFFIXES as NETCDF
from oformer.data.importers.netcdf import netcdf_arrays
from oformer.errors import InputError, unknown_name
from oformer.fields import MOST_AXES, Card, Sample, Spec
from oformer.files import load_npz

SUFFIXES = (".npz", ".mat", ".h5", ".hdf5", *NETCDF)
_TORCH = (".pt", ".pth")
CHOSEN = ("coords", "inputs", "targets")
OPTIONAL = ("query_coords", "query_features", "weights", "query_weights")

Numbers = Mapping[str, Any]  # arrays by name: numpy's, or what reads like one and is read when it is cut


@dataclass(frozen=True)
class _Content:
    """The arrays of a file or folder, before it is known which are points, input and target."""

    format: str
    shapes: dict[str, tuple[int, ...]]  # of the first sample's arrays, or of arrays over all samples
    samples: int | None  # None: arrays have a first axis of samples
    cut: Callable[[str, int, int], Any]  # of a name, arrays of the samples from first to end, or one array of all
    sources: tuple[Path, ...]

    def column(self, name: str, first: int, end: int) -> list[np.ndarray]:
        """An array of each sample from first to end."""
        return [np.asarray(row) for row in self.cut(name, first, end)]

    def whole(self, name: str) -> np.ndarray:
        """An array that has no axis of samples, in a file where others have."""
        return np.asarray(self.cut(name, 0, self.shapes[name][0]))


def are_named(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a folder or file is to be read by the names of its arrays: .npz and NetCDF always are."""
    if path.is_dir():
        return bool(files_in(path, SUFFIXES))
    suffix = path.suffix.lower()
    return suffix in (".npz", *NETCDF) or (suffix in (*SUFFIXES, *_TORCH) and are_meant(path, choices))


def are_meant(path: Path, choices: Choices) -> bool:
    """Whether the caller names the arrays of a file or folder, or these have the names `CHOSEN`."""
    if choices.kind is not None:
        return choices.kind == "arrays"
    if any(getattr(choices, role) for role in CHOSEN):
        return True
    try:
        with reading(path, "named arrays"), _content(path) as content:
            listed = path.suffix.lower() in _TORCH and content.samples is not None
            return listed or set(CHOSEN) <= content.shapes.keys()
    except InputError:  # whoever reads it in another way has a better sentence
        return False


@contextmanager
def open_arrays(path: Path, choices: Choices) -> Iterator[Opened]:
    """The arrays, understood as far as their names say it, or the caller."""
    refuse_in_times(choices.in_times, "named arrays")
    with _content(path) as content:
        yield _Chosen(path, content, choices).opened()


class _Chosen:
    """Arrays, and which of them are what."""

    def __init__(self, path: Path, content: _Content, choices: Choices):
        self.path, self.content = path, content
        self.names: dict[str, tuple[str, ...]] = {
            role: tuple(getattr(choices, role)) or ((role,) if role in content.shapes else ()) for role in CHOSEN
        }
        for chosen in self.names.values():
            for name in chosen:
                if name not in content.shapes:
                    raise unknown_name("named array", name, content.shapes)
        self.extra = tuple(name for name in OPTIONAL if name in content.shapes)

    def opened(self) -> Opened:
        """The samples, or the names alone where nothing says yet what they are."""
        content, complete = self.content, all(self.names.values())
        count = self._count() if complete else content.samples or 0
        words = {name: f"{shape}{self._role(name)}" for name, shape in content.shapes.items()}
        if not complete:
            layout = Layout("arrays", content.format, words, count, 1, Card(self.path.name), None)
            return Opened(self.path, layout, lambda first, end: [], sources=content.sources)
        sample = self._take(0, 1)[0]
        known, wanted = sample.input.values.shape, sample.target.shape
        features = sample.query.values.shape[-1]
        said = () if "weights" in self.extra else ("All points weigh the same; an array `weights` would say more.",)
        places = [*(self.names["coords"] if len(self.names["coords"]) == 1 else ()), "query_coords"]
        turned = [name for name in places if _has_axes_first(content.shapes.get(name, ()))]
        said += tuple(f"`{name}` has a row for each axis of space." for name in turned)
        card = Card(
            f"Arrays of {self.path.name}",
            inputs=self._channel_names("inputs", sample.input.points),
            queries=tuple(f"query_features_{k}" for k in range(features)),
            targets=self._channel_names("targets", sample.query.points),
        )
        layout = Layout(
            kind="arrays",
            format=content.format,
            arrays=words,
            samples=count,
            times=wanted[0],
            card=card,
            spec=Spec(sample.input.coords.shape[-1], known[0], known[-1], wanted[0], wanted[-1], features),
            assumptions=said,
            sizes=(sample.input.points,),
        )
        return Opened(self.path, layout, self._take, sources=content.sources)

    def _count(self) -> int:
        shapes, count = self.content.shapes, self.content.samples
        if count is None:
            used = [name for role in ("inputs", "targets") for name in self.names[role]]
            count = max(shapes[name][0] for name in used)
            if any(shapes[name][0] != count and shapes[name] != (1, count) for name in used):
                said = ", ".join(f"{shapes[name][0]} in `{name}`" for name in used)
                raise InputError(
                    f"as many samples in each array of {self.path}",
                    said,
                    "The first axis is that of samples; where each has one number, a row or a column of them will do",
                )
        if count == 0:
            raise InputError(f"at least one sample in {self.path}", "none")
        return count

    def _role(self, name: str) -> str:
        roles = [role for role, chosen in self.names.items() if name in chosen]
        return f": {', '.join(roles)}" if roles else f": {name}" if name in self.extra else ""

    def _take(self, first: int, end: int) -> list[Sample]:
        places = self._places(self.names["coords"], first, end)
        elsewhere = self._places(("query_coords",), first, end) if "query_coords" in self.extra else None
        asked = places if elsewhere is None else elsewhere
        known = "query_features" in self.extra
        return samples_of(
            coords=places,
            inputs=self._values(self.names["inputs"], places, first, end),
            targets=self._values(self.names["targets"], asked, first, end),
            query_coords=elsewhere,
            query_values=self._values(("query_features",), asked, first, end) if known else None,
            **{name: self._weights(name, first, end) for name in ("weights", "query_weights") if name in self.extra},
        )

    def _places(self, names: Sequence[str], first: int, end: int) -> Any:
        """The points of all samples, or a list; several names are the axes."""
        content = self.content
        if content.samples is None and self._are_shared(names):
            return _side_by_side([content.whole(name) for name in names])
        columns = [content.column(name, first, end) for name in names]
        return [_side_by_side(axes) for axes in zip(*columns, strict=True)]

    def _are_shared(self, names: Sequence[str]) -> bool:
        """Whether all samples have the points of these arrays, in a file with an axis of samples."""
        shapes, count = [self.content.shapes[name] for name in names], self._count()
        if len(shapes) > 1:
            return all(map(_is_vector, shapes))
        shape = shapes[0]
        if len(shape) != 2 or _is_vector(shape):
            return len(shape) < 3
        if shape[0] == count and _has_axes_first(shape):
            raise InputError(
                f"`{names[0]}` of {self.path} of shape (points, dim)",
                f"{shape}, which may be {count} axes of space or points on a line for each of the {count} samples",
                f"Transpose it, or name one array for each axis: --coords {','.join('xyz'[:count])}",
            )
        return not (shape[0] == count and shape[1] > MOST_AXES)

    def _weights(self, name: str, first: int, end: int) -> Any:
        if self.content.samples is None and _is_vector(self.content.shapes[name]):
            return self.content.whole(name).reshape(-1)  # weights that all samples share
        return [weights.reshape(-1) for weights in self.content.column(name, first, end)]

    def _column(self, name: str, first: int, end: int) -> list[np.ndarray]:
        """An array of each sample, which is one number where those of all samples are a row."""
        if self.content.samples is None and self.content.shapes[name] == (1, self._count()):
            (row,) = self.content.column(name, 0, 1)
            return list(row.reshape(-1, 1)[first:end])
        return self.content.column(name, first, end)

    def _values(self, names: Sequence[str], places: Any, first: int, end: int) -> list[np.ndarray]:
        """(times, points, channels) of each sample, or less axes where there is one array."""
        columns = [self._column(name, first, end) for name in names]
        counts = [len(place) for place in places] if isinstance(places, list) else [len(places)] * (end - first)
        return [
            self._joined(names, parts, count) for parts, count in zip(zip(*columns, strict=True), counts, strict=True)
        ]

    def _joined(self, names: Sequence[str], parts: Sequence[np.ndarray], points: int) -> np.ndarray:
        shaped = [_at_points(part, points) for part in parts]
        if len(shaped) == 1:
            return shaped[0]
        shaped = [part[None, :, None] if part.ndim == 1 else part[None] if part.ndim == 2 else part for part in shaped]
        times = max(part.shape[0] for part in shaped)
        shapes = {part.shape[-2] for part in shaped}
        if len(shapes) > 1 or any(part.ndim != 3 or part.shape[0] not in (1, times) for part in shaped):
            said = ", ".join(f"`{n}` {part.shape}" for n, part in zip(names, parts, strict=True))
            raise InputError(f"the same points and frames in each of these arrays of {self.path}", said)
        return np.concatenate([np.broadcast_to(part, (times, *part.shape[1:])) for part in shaped], -1)

    def _channel_names(self, role: str, points: int) -> tuple[str, ...]:
        found: list[str] = []
        for name in self.names[role]:
            array = _at_points(self._column(name, 0, 1)[0], points)
            count = array.shape[-1] if array.ndim > 1 else 1
            found += [name] if count == 1 else [f"{name}_{k}" for k in range(count)]
        return tuple(found)


def _is_vector(shape: tuple[int, ...]) -> bool:
    """Whether an array has one axis; MATLAB, which knows no vectors, keeps it as a row or a column."""
    return sum(n > 1 for n in shape) <= 1


def _has_axes_first(shape: tuple[int, ...]) -> bool:
    """Whether points can only have been put side by side, as in MATLAB's [x; y]: space has no more axes than three."""
    return len(shape) > 1 and not _is_vector(shape) and shape[-2] <= MOST_AXES < shape[-1]


def _side_by_side(axes: Sequence[np.ndarray]) -> np.ndarray:
    if len(axes) > 1:
        return np.stack([axis.reshape(-1) for axis in axes], -1)
    only = axes[0]
    if _is_vector(only.shape) and only.size > MOST_AXES:
        return only.reshape(-1)  # a row: points on a line
    return only.T if only.ndim == 2 and _has_axes_first(only.shape) else only


def _at_points(values: np.ndarray, points: int) -> np.ndarray:
    """Values of a sample without what a file has to write otherwise: one number for all points, a row for a vector."""
    if values.size == 1:
        return np.full((points, 1), values.item())
    return values.reshape(-1) if values.shape == (1, points) else values


@contextmanager
def _content(path: Path) -> Iterator[_Content]:
    """The named arrays of a file, or of the files of a folder."""
    if path.is_dir():
        sources = files_in(path, SUFFIXES)
        with _named(sources[0]) as (format, arrays):
            shapes = _shapes(arrays)

        def column(name: str, first: int, end: int) -> list[np.ndarray]:
            return [_array_of(source, name) for source in sources[first:end]]

        yield _Content(f"a folder of {format}", shapes, len(sources), column, sources)
        return
    if path.suffix.lower() in (".h5", ".hdf5"):
        with open_hdf5(path) as file:
            if set(file.members.values()) == {"group"}:
                yield _grouped(file)
                return
    if path.suffix.lower() in _TORCH:
        with torch_arrays(path) as (file, count, read):
            if count is not None:
                yield _Content(
                    "torch tensors, a dictionary for each sample", _shapes(file.arrays), count,
                    lambda name, first, end: [read(name, sample, 0, None) for sample in range(first, end)], (path,),
                )  # fmt: skip
                return
    with _named(path) as (format, arrays):
        yield _Content(format, _shapes(arrays), None, lambda name, first, end: arrays[name][first:end], (path,))


def _grouped(file: Group) -> _Content:
    """A group for each sample in an HDF5 file."""
    groups = sorted(file)
    first_group = file.group(groups[0])

    def column(name: str, first: int, end: int) -> list[np.ndarray]:
        found = []
        for label in groups[first:end]:
            group = file.group(label)
            if name not in group:
                raise InputError(f"`{name}` in group `{label}` of {file.path}", str(group))
            found.append(np.asarray(group.numbers(name)[()]))
        return found

    shapes = _shapes({name: first_group.array(name) for name in first_group})
    return _Content("HDF5, a group for each sample", shapes, len(groups), column, (file.path,))


def _shapes(arrays: Numbers) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


@contextmanager
def _named(path: Path) -> Iterator[tuple[str, Numbers]]:
    """The arrays of numbers in one file."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        yield ".npz", _numeric(load_npz(path))
    elif suffix in NETCDF:
        yield "NetCDF", netcdf_arrays(path)
    elif suffix == ".mat":
        with matlab_arrays(path) as file:
            yield file.format, _with_numbers(file)
    elif suffix in _TORCH:
        with torch_arrays(path) as (file, _, _):
            yield file.format, _with_numbers(file)
    else:
        with open_hdf5(path) as file:
            yield "HDF5", _numeric({name: file.array(name) for name in file})


def _with_numbers(file: Named) -> Numbers:
    return {**file.arrays, **{name: np.array([number]) for name, number in file.numbers.items()}}


def _numeric(arrays: Numbers) -> Numbers:
    return {name: array for name, array in arrays.items() if array.dtype.kind in "fiub" and array.ndim > 0}


def _array_of(path: Path, name: str) -> np.ndarray:
    with _named(path) as (_, arrays):
        if name not in arrays:
            raise InputError(f"`{name}` in {path}", ", ".join(f"`{key}`" for key in arrays) or "nothing")
        return np.asarray(arrays[name][:])
