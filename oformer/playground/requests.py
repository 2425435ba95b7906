"""Numbers from strangers: JSON and .npz to arrays and back, with every size known before memory is taken.

Nothing here trusts what a body says of itself. JSON is checked against the schema that is published (`openapi`), an
archive against the sizes in its directory, an array against the bytes that are there. Pickles are never read.
"""

import base64
import io
import json
import math
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Num

from oformer.errors import InputError

ARRAYS = 8  # in one archive
DEEPEST = 4  # nesting of lists of numbers
REST = 2**16  # bytes of a body with arrays besides these
PIECE = 2**16  # bytes of a list of numbers that are Python's objects at once
LONGEST_HEADER = 1000  # of an array in an archive, in bytes
_HEADER = re.compile(
    r"""\s*\{\s*['"]descr['"]:\s*['"](?P<kind>[<>|=](?:f[248]|[iu][1248]))['"],"""
    r"""\s*['"]fortran_order['"]:\s*(?P<fortran>True|False),"""
    r"""\s*['"]shape['"]:\s*\((?P<shape>(?:\d{1,9},\s*)*(?:\d{1,9})?)\s*\),?\s*\}\s*"""
)
# A string (also one without an end), or what begins like a list of numbers and goes on like one.
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|\[[\[\]0-9+\-.eE, \t\r\n]*+', re.DOTALL)
_EMPTY = re.compile(rb"\[[ \t\r\n]*\]")
_MISPLACED = re.compile(rb"[0-9.eE+\-\]][ \t\r\n]*\[|\][ \t\r\n]*[0-9.eE+\-]")  # without a comma between
_WITHIN = b"0123456789+-.eE \t\r\n"
_FLAT = bytes.maketrans(b"[]", b"  ")
SCHEMA_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}

Schema = Mapping[str, Any]
Buffer = bytes | memoryview


def parse_json(body: Buffer) -> Any:
    """The content of a JSON body; NaN and infinity are none."""
    try:
        return json.loads(str(body, "utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError("a body of JSON in UTF-8", f"something else ({error})"[:200]) from error


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def object_of(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """The schema of an object that has these entries and no others.

    Args:
        properties: the schemas of its entries.
        required: those that must be there; all, if left out.
    """
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


def list_of(item: Schema, least: int, most: int) -> dict[str, Any]:
    """The schema of a list of so many things of one kind."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def check_json(content: Any, schema: Schema, where: str = "body") -> None:
    """Refuse what a schema does not allow, at the first place that differs.

    Of JSON Schema it knows `type`, `enum`, `properties` with `required` and no others allowed, `items`, `minItems`,
    `maxItems`, `minLength`, `maxLength`, `minimum` and `maximum`. Lists under `x-numbers` are left to `numbers`.
    """
    kind = schema["type"]
    if not isinstance(content, SCHEMA_TYPES[kind]) or isinstance(content, bool) != (kind == "boolean"):
        raise InputError(f"{_with_article(kind)} at `{where}`", _short(content))
    if "enum" in schema and content not in schema["enum"]:
        raise InputError(f"one of {', '.join(map(str, schema['enum']))} at `{where}`", _short(content))
    if kind == "object":
        _check_object(content, schema, where)
    elif kind in ("array", "string"):
        _check_length(content, schema, where)
        if "items" in schema and "x-numbers" not in schema:
            for i, item in enumerate(content):
                check_json(item, schema["items"], f"{where}[{i}]")
    else:
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= content <= high:
            raise InputError(f"a number from {low:g} to {high:g} at `{where}`", _short(content))


def _check_object(content: dict[str, Any], schema: Schema, where: str) -> None:
    known = schema["properties"]
    for name in schema.get("required", ()):
        if name not in content:
            raise InputError(f"`{name}` in `{where}`", f"only {_short(sorted(content))}" if content else "nothing")
    for name, item in content.items():
        if name not in known:
            raise InputError(f"only {', '.join(known)} in `{where}`", _short(name))
        check_json(item, known[name], f"{where}.{name}")


def _check_length(content: list | str, schema: Schema, where: str) -> None:
    unit, least, most = (
        ("entries", schema.get("minItems", 0), schema.get("maxItems", math.inf))
        if isinstance(content, list)
        else ("characters", schema.get("minLength", 0), schema.get("maxLength", math.inf))
    )
    if not least <= len(content) <= most:
        raise InputError(f"{least} to {most} {unit} at `{where}`", str(len(content)))


def parse_arrays(body: Buffer) -> tuple[Any, list[memoryview]]:
    """The content of a JSON body whose lists of numbers are left as text, to be read by `numbers`.

    As objects of Python, numbers take thirty times the bytes of their text. So only what remains of the body is parsed
    here, and may be no more than a few kilobytes.

    Args:
        body: UTF-8.

    Returns:
        The content, in which the i-th list of numbers (or of such lists) is `[i]`; and the texts of these lists.
    """
    body, rest, lists, size, done = memoryview(body), [], [], 0, 0
    for token in _TOKENS.finditer(body):
        start, text = token.start(), token[0]
        _check_rest(size + start - done)
        length = text.rfind(b"]") + 1
        if text[:1] == b'"' or not length or text.count(b"[") != text.count(b"]"):
            continue  # a string, or a list in which text, null or the like follows
        rest += [bytes(body[done:start]), b"[%d]" % len(lists)]
        lists.append(body[start : start + length])
        size, done = size + start - done + len(rest[-1]), start + length
    _check_rest(size + len(body) - done)
    return parse_json(b"".join([*rest, bytes(body[done:])])), lists


def _check_rest(size: int) -> None:
    if size > REST:
        raise InputError(
            f"at most {REST:,} bytes of JSON besides lists of numbers",
            f"{size:,}",
            "A list with null, NaN or text in it is none of numbers",
        )


def numbers(content: Any, lists: Sequence[Buffer], where: str, most: int) -> Float64[np.ndarray, "..."]:
    """A list of numbers, or of such lists of one length, as an array.

    Args:
        content: what `parse_arrays` put in the place of the list.
        lists: the texts that it returned.
        where: the place of the list, for messages.
        most: numbers there may be.
    """
    if not (isinstance(content, list) and len(content) == 1 and type(content[0]) is int):
        raise InputError(f"only numbers in the list at `{where}`", "null, NaN, text or an object among them")
    text = bytes(lists[content[0]])
    shape = _shape(text, where, most)
    array, filled, start = np.empty(math.prod(shape)), 0, 0
    while start < len(text):
        end = text.find(b",", start + PIECE)
        end = len(text) if end < 0 else end
        try:
            piece = json.loads(b"[%b]" % text[start:end].translate(_FLAT))
            array[filled : filled + len(piece)] = piece
        except OverflowError:
            raise InputError(f"numbers of a usual size at `{where}`", "an integer beyond them") from None
        except ValueError as error:
            raise InputError(f"only numbers of JSON at `{where}`", f"others ({error})"[:200]) from None
        filled, start = filled + len(piece), end + 1
    if filled != len(array):
        raise InputError(f"only numbers of JSON at `{where}`", "a comma with none behind it")
    return array.reshape(shape)


def _shape(text: bytes, where: str, most: int) -> list[int]:
    """The shape of nested lists, from the brackets and commas alone."""
    if _EMPTY.search(text):
        raise InputError(f"lists of numbers at `{where}`", "an empty list")
    brackets = text.translate(None, _WITHIN)
    depth = len(brackets) - len(brackets.lstrip(b"["))
    if depth > DEEPEST:
        raise InputError(f"lists nested at most {DEEPEST} deep at `{where}`", f"{depth} levels")
    shape, expected = [], b""  # both from the inside to the outside
    for level in range(1, depth + 1):
        first = brackets[depth - level : brackets.find(b"]" * level) + level]
        shape.insert(0, (len(first) - 1) // (len(expected) + 1))
        expected = b"[%b]" % ((expected + b",") * shape[0])[:-1]
    if expected != brackets or _MISPLACED.search(text):
        raise InputError(f"rows of one length at `{where}`", "rows that differ")
    if math.prod(shape) > most:
        raise InputError(f"a list of at most {most:,} numbers at `{where}`", f"{math.prod(shape):,}")
    return shape


def read_npz(body: Buffer, known: Mapping[str, int], most: int) -> dict[str, np.ndarray]:
    """The arrays of a .npz body, in float64.

    Args:
        body: the archive; compressed or not.
        known: the names there may be, and how many axes each has at most.
        most: numbers in one array.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            if not 1 <= len(entries) <= ARRAYS:
                raise InputError(f"1 to {ARRAYS} arrays in the archive", str(len(entries)))
            found = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name not in known or name in found:
                    raise InputError(f"each of {', '.join(known)} at most once in the archive", _short(name))
                largest = 8 * most + 1024
                if entry.file_size > largest:
                    raise InputError(f"at most {most:,} numbers in `{name}`", f"{entry.file_size:,} bytes")
                # What a directory says of sizes may be a lie: no more than that is unpacked.
                with archive.open(entry) as file:
                    found[name] = _array(file.read(largest + 1), name, known[name], most)
            return found
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("a .npz archive of plain arrays", f"another body ({error})"[:200]) from error


def _array(content: bytes, name: str, axes: int, most: int) -> np.ndarray:
    """One .npy, whose header is believed only where the bytes behind it agree.

    Read by hand and not by numpy, which evaluates the header as Python and takes memory for the shape that it names.
    """
    length = 2 if content[6:8] == b"\x01\x00" else 4  # of the length itself; version 1 has short headers
    start = 8 + length + int.from_bytes(content[8 : 8 + length], "little")
    plausible = content[:6] == b"\x93NUMPY" and start <= LONGEST_HEADER
    header = _HEADER.fullmatch(content[8 + length : start].decode("latin-1")) if plausible else None
    if header is None:
        raise InputError(f"numbers of at most 64 bits as numpy saves them in `{name}`", "something else")
    dtype, fortran = np.dtype(header["kind"]), header["fortran"] == "True"
    shape = tuple(int(size) for size in header["shape"].split(",") if size.strip())
    if len(shape) > axes or math.prod(shape) > most or min(shape, default=1) < 1:
        raise InputError(f"an array of up to {axes} axes and {most:,} numbers in `{name}`", f"shape {shape}")
    data = content[start:]
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{math.prod(shape) * dtype.itemsize} bytes for shape {shape} in `{name}`", str(len(data)))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C").astype(np.float64)


def write_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as a .npz body, not compressed: what sends it is on the same machine as a rule."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def encoded(array: Num[np.ndarray, "..."]) -> dict[str, Any]:
    """An array within JSON as a page reads it quickest: its bytes, little-endian, in base64."""
    kind = "int32" if array.dtype.kind in "iu" else "float32"
    data = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
    return {"type": kind, "shape": list(array.shape), "base64": base64.b64encode(data.tobytes()).decode("ascii")}


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _short(content: Any) -> str:
    """A few characters of something that may be huge."""
    if isinstance(content, (list, dict)):
        return f"{'a list' if isinstance(content, list) else 'an object'} of {len(content)}"
    if isinstance(content, int) and abs(content) > 10**20:
        return "a number with many digits"
    return f"`{content!r}`"[:60] if not isinstance(content, str) else f"`{content[:40]!r}`"
