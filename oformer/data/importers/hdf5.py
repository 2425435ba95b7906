"""HDF5 files, read in the child process, and opened so that they cannot lead to other files."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.apart import ask, kept_open
from oformer.data.importers.common import Choices, check_numbers
from oformer.errors import InputError


@dataclass(frozen=True)
class Item:
    """A group or an array of an HDF5 file."""

    path: Path
    handle: int
    place: str
    attributes: frozenset[str]  # their names; each is read when it is asked for

    def attribute(self, name: str, default: Any = None) -> Any:
        """The attribute of this name, or `default` where there is none."""
        return ask(self.path, "hdf5_attribute", self.handle, self.place, name) if name in self.attributes else default


@dataclass(frozen=True)
class Array(Item):
    """An array of an HDF5 file, of which slices are read."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, part: Any) -> np.ndarray:
        size = self.size * self.dtype.itemsize
        return ask(self.path, "hdf5_read", self.handle, self.place, part, what=f"`{self.place}`", expected=size)


@dataclass(frozen=True)
class Group(Item):
    """A group of an HDF5 file: the kinds of its members by name (group, array, type, or link for what is elsewhere)."""

    members: Mapping[str, str]

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def __str__(self) -> str:
        names = list(self)
        return (", ".join(f"`{name}`" for name in names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"

    def array(self, name: str) -> Array:
        """The array of this name in the group."""
        found = self._member(name)
        if not isinstance(found, Array):
            raise InputError(f"an array `{name}` in {self.path}", "a group")
        return found

    def numbers(self, name: str) -> Array:
        """The array of real numbers of this name in the group."""
        found = self.array(name)
        check_numbers(self.path, name, found.dtype)
        return found

    def group(self, name: str) -> "Group":
        """The group of this name in the group."""
        found = self._member(name)
        if not isinstance(found, Group):
            raise InputError(f"a group `{name}` in {self.path}", "an array")
        return found

    def _member(self, name: str) -> Item:
        kind = self.members.get(name)
        if kind is None:
            raise InputError(f"`{name}` in {self.path}", str(self))
        if kind == "link":
            raise InputError(
                f"`{name}` in {self.path} itself", "a link that leads elsewhere", "Copy the data into one file"
            )
        if kind == "type":
            raise InputError(f"an array or a group `{name}` in {self.path}", "a type")
        return _look(self.path, self.handle, f"{self.place.rstrip('/')}/{name}")


def is_hdf5(path: Path, head: bytes, choices: Choices) -> bool:
    """Whether a file begins as HDF5 does."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


@contextmanager
def open_hdf5(path: Path) -> Iterator[Group]:
    """The root group of a file, opened for reading."""
    with kept_open(path, "hdf5_open") as handle:
        root = _look(path, handle, "/")
        assert isinstance(root, Group)
        yield root


def _look(path: Path, handle: int, place: str) -> Item:
    kind, content, dtype, names = ask(path, "hdf5_look", handle, place)
    if kind == "elsewhere":
        raise InputError(f"`{place}` in {path} itself", "data kept in other files", "Copy the data into one file")
    if kind == "group":
        return Group(path, handle, place, frozenset(names), content)
    return Array(path, handle, place, frozenset(names), content, np.dtype(dtype))


def words(value: Any) -> list[str]:
    """An attribute as a list of strings, however it was written."""
    values = np.atleast_1d(np.asarray(value, dtype=object)).tolist()
    return [v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values]
