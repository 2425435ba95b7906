"""HDF5 files, opened so that they cannot lead to other files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.common import check_numbers
from oformer.errors import InputError


@contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """The file, read-only."""
    import h5py

    with h5py.File(path, "r") as file:
        yield file


def _member(path: Path, group: Any, name: str) -> Any:
    import h5py

    link = group.get(name, getlink=True)
    if link is None:
        raise InputError(f"`{name}` in {path}", names_in(group))
    if not isinstance(link, h5py.HardLink):
        raise InputError(f"`{name}` in {path} itself", "a link that leads elsewhere", "Copy the data into one file")
    return group[name]


def names_in(group: Any) -> str:
    """What a group holds, for a message."""
    names = list(group)
    return (", ".join(f"`{name}`" for name in names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"


def dataset_in(path: Path, group: Any, name: str) -> Any:
    """An array of the file, as h5py gives it."""
    import h5py

    found = _member(path, group, name)
    if not isinstance(found, h5py.Dataset):
        raise InputError(f"an array `{name}` in {path}", "a group")
    if found.external or found.is_virtual:
        raise InputError(f"`{name}` in {path} itself", "data kept in other files", "Copy the data into one file")
    return found


def numbers_in(path: Path, group: Any, name: str) -> Any:
    """An array of real numbers."""
    found = dataset_in(path, group, name)
    check_numbers(path, name, found.dtype)
    return found


def group_in(path: Path, group: Any, name: str) -> Any:
    """A group of the file."""
    import h5py

    found = _member(path, group, name)
    if not isinstance(found, h5py.Group):
        raise InputError(f"a group `{name}` in {path}", "an array")
    return found


def words(value: Any) -> list[str]:
    """An attribute as a list of strings, however it was written."""
    values = np.atleast_1d(np.asarray(value, dtype=object)).tolist()
    return [v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values]
