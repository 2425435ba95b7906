"""MeshGraphNets' files (Pfaff et al. 2021): trajectories in TFRecord, with a `meta.json` beside them; no TensorFlow.

A record is its length (8 bytes), a checksum of the length (4), the payload, and a checksum of the payload (4). The
payload is a tf.Example: a map of names to lists, here of one string of bytes each, whose type and shape `meta.json`
tells. Every length is compared with the bytes that are there; the checksums are not verified.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from oformer.data.importers.common import Choices, Opened, check_room
from oformer.data.importers.trajectories import ARRAYS, AirfoilFile, Trajectory
from oformer.errors import InputError
from oformer.files import read_json

META = "meta.json"
STRIDE = 24  # 601 frames become the paper's 26
_HEAD, _TAIL = 12, 4
_DAMAGED = "The file is damaged or cut short; copy it again"


@contextmanager
def open_tfrecord(path: Path, choices: Choices) -> Iterator[Opened]:
    """Trajectories around an airfoil, one record each, mapped into memory."""
    if not (path.parent / META).is_file():
        raise InputError(f"{META} beside {path.name}", "none", "It tells the arrays' shapes; put it there")
    shapes, interval = _shapes(path.parent / META)
    records = _records(path) if path.stat().st_size else []
    if not records:
        raise InputError(f"at least one record in {path}", "none")

    def trajectory(index: int) -> Trajectory:
        where, found = f"record {index} of {path}", {}
        payload = example(records[index], where)
        for name, shape in shapes.items():
            if name not in payload:
                raise InputError(f"`{name}` in {where}", ", ".join(f"`{key}`" for key in payload) or "nothing")
            known, size = int(np.prod([n for n in shape if n > 0])) * 4, len(payload[name])
            if size % known or (size != known and min(shape) > 0):
                raise InputError(f"`{name}` of shape {shape} in {where}", f"{size} bytes", _DAMAGED)
            found[name] = np.frombuffer(payload[name], ARRAYS[name][0]).reshape(shape)
        return Trajectory.of(found)

    words = {name: f"{np.dtype(ARRAYS[name][0]).name} {shape}" for name, shape in shapes.items()}
    said = f"A frame is {interval:g} seconds after the one before, by {META}." if interval else ""
    yield AirfoilFile(
        path, "TFRecord of MeshGraphNets", words, len(records), trajectory, STRIDE, "velocity",
        (path, path.parent / META), (said,) if said else (),
    ).opened(choices)  # fmt: skip


def _shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], float | None]:
    """The shapes of a trajectory's arrays, where -1 is whatever the bytes give, and the seconds between two frames."""
    content = read_json(path)
    described = content.get("features") if isinstance(content, dict) else None
    if not isinstance(described, dict):
        raise InputError(f"`features` in {path}", "none", "Is it the meta.json of MeshGraphNets?")
    shapes = {}
    for name, (dtype, last) in ARRAYS.items():
        entry = described.get(name)
        if not isinstance(entry, dict):
            raise InputError(
                f"`{name}` among the features of {path}",
                ", ".join(f"`{key}`" for key in list(described)[:8]) or "nothing",
                "Only the airfoil data of MeshGraphNets are read",
            )
        shape = entry.get("shape")
        sides = [n for n in shape if type(n) is int and (n > 0 or n == -1)] if isinstance(shape, list) else []
        fits = sides == shape and len(sides) == 3 and sides[2] == last and sides.count(-1) < 2
        if not fits or entry.get("type") not in ("static", "dynamic") or entry.get("dtype") != np.dtype(dtype).name:
            wanted = f"`{name}` as {np.dtype(dtype).name} of shape [times, rows, {last}] in {path}"
            raise InputError(wanted, str(entry)[:120])
        shapes[name] = tuple(sides)
    interval = content.get("dt")
    return shapes, float(interval) if isinstance(interval, (int, float)) else None


def _records(path: Path) -> list[memoryview]:
    """The payload of each record, as bytes of the mapped file; only the heads are read."""
    data, place, found = np.memmap(path, np.uint8, mode="r").data, 0, []
    while place < len(data):
        where, left = f"record {len(found)} of {path}", len(data) - place - _HEAD
        if left < 0:
            raise InputError(f"the {_HEAD} bytes before {where}", f"{left + _HEAD}", _DAMAGED)
        (length,) = struct.unpack_from("<Q", data, place)
        if length == 0:  # a file that was set aside and not filled is all zeros: records without end
            raise InputError(f"a payload in {where}", "0 bytes", _DAMAGED)
        if length > left - _TAIL:
            raise InputError(f"{length} bytes in {where}", f"{left} left in the file", _DAMAGED)
        check_room(2 * length)
        found.append(data[place + _HEAD : place + _HEAD + length])
        place += _HEAD + length + _TAIL
    return found


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


def example(payload: memoryview, where: str) -> dict[str, memoryview]:
    """The first string of bytes of each feature of a tf.Example; `where` names it in an error."""
    # Members by number: Example.features 1, Features.feature 1 (key 1, value 2), Feature.bytes_list 1, its value 1.
    found: dict[str, memoryview] = {}
    try:
        for number, features in _members(payload):
            for kind, entry in _members(features) if number == 1 else ():
                pair = dict(_members(entry)) if kind == 1 else {}
                lists = dict(_members(pair[2])) if 2 in pair else {}
                strings = [value for k, value in _members(lists[1]) if k == 1] if 1 in lists else []
                if strings and 1 in pair:
                    found[bytes(pair[1]).decode()] = strings[0]
    except ValueError as error:
        raise InputError(f"a tf.Example in {where}", f"other bytes ({error})", _DAMAGED) from error
    return found
