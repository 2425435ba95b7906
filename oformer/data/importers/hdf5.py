"""HDF5 files, read in the child process, and opened so that they cannot lead to other files."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.apart import ask, kept_open
from oformer.data.importers.common import check_numbers
from oformer.errors import InputError


@dataclass(frozen=True)
class Attributes:
    """The attributes of a group or an array, each read when it is asked for."""

    path: Path
    handle: int
    place: str
    names: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        return ask(self.path, "hdf5_attribute", self.handle, self.place, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or `default` where there is none."""
        return self[name] if name in self.names else default


@dataclass(frozen=True)
class Array:
    """An array of an HDF5 file, of which slices are read."""

    path: Path
    handle: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    attrs: Attributes

    @property
    def ndim(self) -> int:
        """How many axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    def __getitem__(self, part: Any) -> np.ndarray:
        size = self.size * self.dtype.itemsize
        return ask(self.path, "hdf5_read", self.handle, self.name, part, what=f"`{self.name}`", expected=size)


@dataclass(frozen=True)
class Group:
    """A group of an HDF5 file: the kinds of its members by name (group, array, type, or link for what is elsewhere)."""

    path: Path
    handle: int
    place: str
    members: Mapping[str, str]
    attrs: Attributes

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __contains__(self, name: str) -> bool:
        return name in self.members


@contextmanager
def open_hdf5(path: Path) -> Iterator[Group]:
    """The root of the file, read-only."""
    with kept_open(path, "hdf5_open") as handle:
        root = _look(path, handle, "/")
        assert isinstance(root, Group)
        yield root


def _look(path: Path, handle: int, place: str) -> Group | Array:
    kind, content, dtype, names = ask(path, "hdf5_look", handle, place)
    attributes = Attributes(path, handle, place, frozenset(names))
    if kind == "group":
        return Group(path, handle, place, content, attributes)
    if kind == "elsewhere":
        raise InputError(f"`{place}` in {path} itself", "data kept in other files", "Copy the data into one file")
    return Array(path, handle, place, content, np.dtype(dtype), attributes)


def _member(path: Path, group: Group, name: str) -> Group | Array:
    kind = group.members.get(name)
    if kind is None:
        raise InputError(f"`{name}` in {path}", names_in(group))
    if kind == "link":
        raise InputError(f"`{name}` in {path} itself", "a link that leads elsewhere", "Copy the data into one file")
    if kind == "type":
        raise InputError(f"an array or a group `{name}` in {path}", "a type")
    return _look(path, group.handle, f"{group.place.rstrip('/')}/{name}")


def names_in(group: Group) -> str:
    """What a group holds, for a message."""
    names = list(group)
    return (", ".join(f"`{name}`" for name in names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"


def dataset_in(path: Path, group: Group, name: str) -> Array:
    """An array of the file."""
    found = _member(path, group, name)
    if not isinstance(found, Array):
        raise InputError(f"an array `{name}` in {path}", "a group")
    return found


def numbers_in(path: Path, group: Group, name: str) -> Array:
    """An array of real numbers."""
    found = dataset_in(path, group, name)
    check_numbers(path, name, found.dtype)
    return found


def group_in(path: Path, group: Group, name: str) -> Group:
    """A group of the file."""
    found = _member(path, group, name)
    if not isinstance(found, Group):
        raise InputError(f"a group `{name}` in {path}", "an array")
    return found


def words(value: Any) -> list[str]:
    """An attribute as a list of strings, however it was written."""
    values = np.atleast_1d(np.asarray(value, dtype=object)).tolist()
    return [v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values]
