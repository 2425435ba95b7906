"""What strangers send: no size is believed, nothing is evaluated, every refusal is a sentence."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest

from oformer.errors import InputError
from oformer.playground.requests import (
    check_json,
    encoded,
    list_of,
    numbers,
    object_of,
    parse_json,
    read_npz,
    write_npz,
)
from tests.playground.conftest import decoded

KNOWN = {"coords": 2, "values": 3}


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_numpy_are_read_whatever_their_types(save):
    arrays = {
        "coords": np.arange(6, dtype=">f4").reshape(3, 2),
        "values": np.asfortranarray(np.ones((2, 3, 4), np.int16)),
    }
    buffer = io.BytesIO()
    save(buffer, **arrays)
    for name, array in read_npz(buffer.getvalue(), KNOWN, 100).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == np.float64
    assert read_npz(write_npz(arrays), KNOWN, 100).keys() == arrays.keys()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"PK\x03\x04 hello",
        archive(),
        archive(other=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8)),
        archive(coords=b"hello"),
        archive(coords=npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80\x04N.")),
        archive(coords=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (999999999, 999999999), }")),
        archive(coords=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", b"\0" * 8)),
        archive(coords=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }")),
        archive(coords=npy("{'descr': '<c16', 'fortran_order': False, 'shape': (1,), }", b"\0" * 16)),
        archive(coords=npy("__import__('os').system('true')")),
        archive(coords=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1, 1), }", b"\0" * 8)),
        archive(coords=b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{"),
        archive(**{f"a{i}": b"" for i in range(9)}),
    ],
    ids=range(14),
)
def test_other_archives_are_refused(body):
    with pytest.raises(InputError):
        read_npz(body, KNOWN, 100)


def test_a_small_body_that_unpacks_to_a_large_one_is_not_unpacked():
    body = archive(coords=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (8000000,), }", b"\0" * 64_000_000))
    assert len(body) < 100_000
    with pytest.raises(InputError, match="at most 100 numbers"):
        read_npz(body, KNOWN, 100)
    # A directory that lies about the size gets no further.
    with zipfile.ZipFile(io.BytesIO(body)) as file:
        size = file.infolist()[0].file_size
    lying = body.replace(struct.pack("<I", size), struct.pack("<I", 800))
    assert lying != body
    with pytest.raises(InputError):
        read_npz(lying, KNOWN, 100)


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"NaN", b'{"a": Infinity}', b"[" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_refused(body):
    with pytest.raises(InputError, match="JSON"):
        parse_json(body)


@pytest.mark.parametrize(
    "content", [[], [[]], [1, "2"], [1, None], [True], [[1], [2, 3]], [[1], 2], [10**400], [[[[[1]]]]], [1] * 11]
)
def test_lists_that_are_no_arrays_are_refused(content):
    with pytest.raises(InputError, match="`x`"):
        numbers(content, "x", 10)


def test_lists_become_arrays():
    for array in (np.arange(7) / 7, -np.arange(12.0).reshape(4, 3) * 1e-12, np.arange(24).reshape(2, 3, 4)):
        found = numbers(parse_json(json.dumps(array.tolist()).encode()), "x", 24)
        np.testing.assert_array_equal(found, array)
        assert found.dtype == np.float64


SCHEMA = object_of(
    {
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
        "x": list_of({"type": "number", "minimum": -1, "maximum": 1}, 1, 2),
        "s": {"type": "string", "enum": ["a", "b"]},
        "t": {"type": "string", "minLength": 2, "maxLength": 2},
    },
    ["n"],
)


def test_a_schema_allows_what_it_says_and_nothing_else():
    check_json({"n": 1, "x": [0.5, -1], "s": "a", "t": "xy"}, SCHEMA)
    check_json({"n": 3}, SCHEMA)
    for content, where in (
        ({}, "`n`"),
        ({"n": 0}, "body.n"),
        ({"n": 1.5}, "body.n"),
        ({"n": True}, "body.n"),
        ({"n": 10**400}, "body.n"),
        ({"n": 1, "x": []}, "body.x"),
        ({"n": 1, "x": [0, 0, 0]}, "body.x"),
        ({"n": 1, "x": [2]}, r"body.x\[0\]"),
        ({"n": 1, "s": "c"}, "body.s"),
        ({"n": 1, "t": "xyz"}, "body.t"),
        ({"n": 1, "more": 1}, "body"),
        ([], "body"),
    ):
        with pytest.raises(InputError, match=where):
            check_json(content, SCHEMA)


def test_arrays_arrive_at_the_page_to_the_last_bit():
    for array in (np.random.default_rng(0).random((3, 4)).astype(np.float32), np.arange(5)):
        content = json.loads(json.dumps(encoded(array)))
        np.testing.assert_array_equal(decoded(content), array)
