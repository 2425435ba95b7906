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
from jaxtyping import Num

from oformer.errors import InputError

ARRAYS = 8  # in one archive
DEEPEST = 4  # nesting of lists of numbers
LONGEST_HEADER = 1000  # of an array in an archive, in bytes
_HEADER = re.compile(
    r"""\s*\{\s*['"]descr['"]:\s*['"](?P<kind>[<>|=](?:f[248]|[iu][1248]))['"],"""
    r"""\s*['"]fortran_order['"]:\s*(?P<fortran>True|False),"""
    r"""\s*['"]shape['"]:\s*\((?P<shape>(?:\d{1,9},\s*)*(?:\d{1,9})?)\s*\),?\s*\}\s*"""
)
SCHEMA_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}

Schema = Mapping[str, Any]


def parse_json(body: bytes) -> Any:
    """The content of a JSON body; NaN and infinity are none."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse)
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


def numbers(content: Any, where: str, most: int) -> np.ndarray:
    """Nested lists of numbers as an array in float64.

    Args:
        content: lists within lists, all of one shape.
        where: their place, for messages.
        most: numbers there may be.
    """
    shape: list[int] = []
    level = content
    while isinstance(level, list):
        shape.append(len(level))
        if not level or len(shape) > DEEPEST:
            raise InputError(f"lists of numbers at `{where}`", "an empty list" if not level else "too many levels")
        level = level[0]
    if not shape or math.prod(shape) > most:
        raise InputError(f"a list of at most {most:,} numbers at `{where}`", _short(content) if not shape else "more")
    flat = content
    for size in shape[1:]:
        if not all(type(row) is list and len(row) == size for row in flat):
            raise InputError(f"rows of one length at `{where}`", "others")
        flat = [item for row in flat for item in row]
    if not all(type(item) in (int, float) for item in flat):
        raise InputError(f"only numbers at `{where}`", "something else among them")
    try:
        return np.array(flat, np.float64).reshape(shape)
    except OverflowError:
        raise InputError(f"numbers of a usual size at `{where}`", "an integer beyond them") from None


def read_npz(body: bytes, known: Mapping[str, int], most: int) -> dict[str, np.ndarray]:
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
