"""MeshGraphNets' files (Pfaff et al. 2021): trajectories in TFRecord, with a `meta.json` beside them; no TensorFlow.

A record is its length (8 bytes), the masked CRC-32C of these, the payload, and the payload's. The payload is a
tf.Example: a map of names to lists, here of one string of bytes each, whose type and shape `meta.json` tells. All
checksums are verified, and no length is believed before it is compared with the file's own.
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oformer.data.importers.common import Choices, Opened, check_room
from oformer.data.importers.crc32c import crc32c, masked
from oformer.data.importers.trajectories import Trajectory, airfoil
from oformer.errors import InputError
from oformer.files import read_json

META = "meta.json"
STRIDE = 24  # 601 frames become the paper's 26
_HEAD, _TAIL = 12, 4
_DAMAGED = "The file is damaged or cut short; copy it again"


@contextmanager
def open_tfrecord(path: Path, choices: Choices) -> Iterator[Opened]:
    """Trajectories around an airfoil, one record each, read one at a time."""
    if not (path.parent / META).is_file():
        raise InputError(f"{META} beside {path.name}", "none", "It tells the arrays' shapes; put it there")
    features, interval = _features(path.parent / META)
    records = _records(path)
    if not records:
        raise InputError(f"at least one record in {path}", "none")

    def trajectory(index: int) -> Trajectory:
        arrays = example(_payload(path, *records[index], index), f"record {index} of {path}")
        return _trajectory(path, features, arrays, index)

    words = {name: f"{feature.kind}, {feature.dtype} {feature.shape}" for name, feature in features.items()}
    said = f"A frame is {interval:g} seconds after the one before, by {META}." if interval else ""
    yield airfoil(
        path,
        "TFRecord of MeshGraphNets",
        words,
        len(records),
        trajectory,
        choices,
        stride=STRIDE,
        momentum="velocity",
        said=(said,) if said else (),
        sources=(path, path.parent / META),
    )


@dataclass(frozen=True)
class _Feature:
    """An array as `meta.json` tells it; a side of -1 is whatever the bytes give."""

    kind: str  # static or dynamic
    dtype: np.dtype
    shape: tuple[int, ...]


_NEEDED = {
    "cells": ("int32", 3), "mesh_pos": ("float32", 2), "node_type": ("int32", 1),
    "velocity": ("float32", 2), "density": ("float32", 1), "pressure": ("float32", 1),
}  # fmt: skip


def _features(path: Path) -> tuple[dict[str, _Feature], float | None]:
    """The arrays that an airfoil trajectory has, and the seconds between two frames."""
    content = read_json(path)
    described = content.get("features") if isinstance(content, dict) else None
    if not isinstance(described, dict):
        raise InputError(f"`features` in {path}", "none", "Is it the meta.json of MeshGraphNets?")
    features = {}
    for name, (dtype, last) in _NEEDED.items():
        entry = described.get(name)
        if not isinstance(entry, dict):
            raise InputError(
                f"`{name}` among the features of {path}",
                ", ".join(f"`{key}`" for key in list(described)[:8]) or "nothing",
                "Only the airfoil data of MeshGraphNets are read",
            )
        shape, kind = entry.get("shape"), entry.get("type")
        sides = [n for n in shape if type(n) is int and (n > 0 or n == -1)] if isinstance(shape, list) else []
        fits = sides == shape and len(sides) == 3 and sides[2] == last and sides.count(-1) < 2
        if not fits or kind not in ("static", "dynamic") or entry.get("dtype") != dtype:
            raise InputError(f"`{name}` as {dtype} of shape [times, rows, {last}] in {path}", str(entry)[:120])
        features[name] = _Feature(kind, np.dtype(dtype).newbyteorder("<"), tuple(sides))
    interval = content.get("dt")
    return features, float(interval) if isinstance(interval, (int, float)) else None


def _records(path: Path) -> list[tuple[int, int]]:
    """Where each payload begins and how long it is; only the heads are read."""
    size, place, found = path.stat().st_size, 0, []
    with path.open("rb") as file:
        while place < size:
            file.seek(place)
            head = file.read(_HEAD)
            where = f"record {len(found)} of {path}"
            if len(head) < _HEAD:
                raise InputError(f"the {_HEAD} bytes before {where}", f"{len(head)}", _DAMAGED)
            length, checksum = struct.unpack("<QI", head)
            if masked(crc32c(head[:8])) != checksum:
                raise InputError(f"the checksum of the length of {where}", "another", _DAMAGED)
            if length > size - place - _HEAD - _TAIL:
                raise InputError(f"{length} bytes in {where}", f"{size - place - _HEAD} left in the file", _DAMAGED)
            check_room(2 * length)
            found.append((place + _HEAD, length))
            place += _HEAD + length + _TAIL
    return found


def _payload(path: Path, place: int, length: int, index: int) -> bytes:
    with path.open("rb") as file:
        file.seek(place)
        payload, tail = file.read(length), file.read(_TAIL)
    if len(tail) < _TAIL or masked(crc32c(payload)) != struct.unpack("<I", tail)[0]:
        raise InputError(f"the checksum of record {index} of {path}", "another", _DAMAGED)
    return payload


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("a number that does not end")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value, place
    raise ValueError("a number of more than 64 bits")


def _members(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The number and the bytes of each length-delimited member of a message; others are skipped."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 2:
            length, place = _varint(data, place)
            end = place + length
            if end > len(data):
                raise ValueError("a member longer than its message")
            yield key >> 3, data[place:end]
        elif key & 7 == 0:
            _, end = _varint(data, place)
        elif key & 7 in (1, 5):
            end = place + (8 if key & 7 == 1 else 4)
        else:
            raise ValueError("a member of no known type")
        place = end


def example(payload: bytes, where: str) -> dict[str, memoryview]:
    """The first string of bytes of each feature of a tf.Example.

    Args:
        payload: of one record.
        where: what it is, for the message.
    """
    # Members by number: Example.features 1, Features.feature 1 (key 1, value 2), Feature.bytes_list 1, its value 1.
    found: dict[str, memoryview] = {}
    try:
        for number, features in _members(memoryview(payload)):
            for kind, entry in _members(features) if number == 1 else ():
                pair = dict(_members(entry)) if kind == 1 else {}
                lists = dict(_members(pair[2])) if 2 in pair else {}
                strings = [value for k, value in _members(lists[1]) if k == 1] if 1 in lists else []
                if strings and 1 in pair:
                    found[bytes(pair[1]).decode()] = strings[0]
    except ValueError as error:
        raise InputError(f"a tf.Example in {where}", f"other bytes ({error})", _DAMAGED) from error
    return found


def _trajectory(path: Path, features: Mapping[str, _Feature], found: Mapping[str, Any], index: int) -> Trajectory:
    where = f"record {index} of {path}"
    arrays: dict[str, np.ndarray] = {}
    for name, feature in features.items():
        if name not in found:
            raise InputError(f"`{name}` in {where}", ", ".join(f"`{key}`" for key in found) or "nothing")
        known = [n for n in feature.shape if n > 0]
        count, one = len(found[name]) // feature.dtype.itemsize, int(np.prod(known))
        open_sides = len(feature.shape) - len(known)
        if len(found[name]) % feature.dtype.itemsize or count % one or (open_sides == 0 and count != one):
            raise InputError(f"`{name}` of shape {feature.shape} in {where}", f"{len(found[name])} bytes", _DAMAGED)
        arrays[name] = np.frombuffer(found[name], feature.dtype).reshape(feature.shape)
    return Trajectory(
        points=arrays["mesh_pos"][0],
        cells=arrays["cells"][0],
        types=arrays["node_type"][0, :, 0],
        momentum=arrays["velocity"],
        density=arrays["density"],
        pressure=arrays["pressure"],
    )
