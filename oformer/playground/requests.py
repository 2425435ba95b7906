"""Untrusted bodies: JSON and .npz to arrays and back, with every size checked before memory is allocated.

JSON is checked against the published schema (`openapi`), an archive against the sizes in its directory, an array
against the number of its bytes. Pickles are never read.
"""

import base64
import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Num
from numpy.lib import format as npy

from oformer.errors import InputError

ARRAYS = 8  # in one archive
DEEPEST = 4  # nesting of lists of numbers
HEADER = 1024  # bytes of an array's header in an archive

_KINDS: dict[str, tuple[tuple[type, ...], str, str, str]] = {  # Python's types, keywords of the bounds, and their unit
    "object": ((dict,), "", "", ""),
    "boolean": ((bool,), "", "", ""),
    "array": ((list,), "minItems", "maxItems", " entries"),
    "string": ((str,), "minLength", "maxLength", " characters"),
    "integer": ((int,), "minimum", "maximum", ""),
    "number": ((int, float), "minimum", "maximum", ""),
}

Schema = dict[str, Any]
Buffer = bytes | bytearray


def parse_json(body: Buffer) -> Any:
    """Parse a JSON body; NaN and infinity are refused."""
    try:
        return json.loads(str(body, "utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError("a body of JSON in UTF-8", f"a body that is not ({error})"[:200]) from error


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def object_of(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> Schema:
    """Schema of an object with these entries and no others; all are required unless `required` names some."""
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": dict(properties), "required": needed, "additionalProperties": False}


def list_of(item: Schema, least: int, most: int) -> Schema:
    """Schema of a list of `least` to `most` items."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def number(low: float, high: float) -> Schema:
    """Schema of a number between two bounds, which it may reach."""
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int, high: int, text: str) -> Schema:
    """Schema of a whole number between two bounds, which it may reach."""
    return {"type": "integer", "minimum": low, "maximum": high, "description": text}


def check_json(content: Any, schema: Schema, where: str = "body") -> None:
    """Refuse content that a schema does not allow, at the first place that differs.

    Supported keywords: `type`, `enum`, `properties` with `required` and no others allowed, `items`, and the bounds of
    numbers and lengths. Lists under `x-numbers` are left to `numbers`.
    """
    kind = schema["type"]
    types, least, most, unit = _KINDS[kind]
    if not isinstance(content, types) or isinstance(content, bool) != (kind == "boolean"):
        raise InputError(f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} at `{where}`", _short(content))
    if "enum" in schema and content not in schema["enum"]:
        raise InputError(f"one of {', '.join(map(str, schema['enum']))} at `{where}`", _short(content))
    low, high = schema.get(least, -math.inf), schema.get(most, math.inf)
    if least and not low <= (len(content) if unit else content) <= high:
        got = f"{len(content)}" if unit else _short(content)
        raise InputError(f"{'' if unit else 'a number '}from {low:g} to {high:g}{unit} at `{where}`", got)
    if kind == "object":
        known = schema["properties"]
        for name in schema["required"]:
            if name not in content:
                raise InputError(f"`{name}` in `{where}`", f"only {_short(sorted(content))}" if content else "nothing")
        for name, item in content.items():
            if name not in known:
                raise InputError(f"only {', '.join(known)} in `{where}`", _short(name))
            check_json(item, known[name], f"{where}.{name}")
    elif "items" in schema:
        for i, item in enumerate(content):
            check_json(item, schema["items"], f"{where}[{i}]")


def numbers(content: Any, where: str, most: int) -> Float64[np.ndarray, "..."]:
    """An array from a list of numbers, or of such lists of one length.

    Args:
        content: the list.
        where: the place of the list, for messages.
        most: limit on the count of numbers.
    """
    try:
        array = np.asarray(content)
    except (ValueError, OverflowError) as error:
        raise InputError(f"numbers in rows of one length at `{where}`", f"other lists ({error})"[:100]) from error
    if array.dtype.kind not in "fiu":
        raise InputError(f"only numbers in the list at `{where}`", "null, text, an object or a huge number among them")
    if array.ndim > DEEPEST or not 0 < array.size <= most:
        raise InputError(f"1 to {most:,} numbers in lists {DEEPEST} deep at `{where}`", f"shape {array.shape}"[:60])
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise InputError(f"finite numbers at `{where}`", "a number beyond 1e308")
    return array


def read_npz(body: Buffer, known: Mapping[str, int], most: int) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz body, in float64.

    Args:
        body: the archive; compressed or not.
        known: the allowed names, with the largest number of axes of each.
        most: limit on the count of numbers in one array.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            names = [entry.filename.removesuffix(".npy") for entry in entries]
            if not 1 <= len(names) <= ARRAYS or len(set(names)) < len(names) or not known.keys() >= set(names):
                got = _short(", ".join(names)) if names else "none"
                raise InputError(f"arrays named {', '.join(known)} in the archive, each at most once", got)
            arrays = {}
            for name, entry in zip(names, entries, strict=True):
                largest = 8 * most + HEADER
                if entry.file_size > largest:
                    raise InputError(f"at most {most:,} numbers in `{name}`", f"{entry.file_size:,} bytes")
                with archive.open(entry) as file:  # the size in the directory may be false
                    arrays[name] = _array(file.read(largest + 1), name, known[name], most)
            return arrays
    except InputError:
        raise
    except Exception as error:  # zipfile, zlib and numpy have many ways to refuse a damaged archive
        raise InputError("a .npz archive of plain arrays", f"a body that cannot be read ({error})"[:200]) from error


def _array(content: bytes, name: str, axes: int, most: int) -> np.ndarray:
    """Array in the format .npy; its header is trusted only where the number of bytes behind it agrees."""
    file = io.BytesIO(content)
    read_header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(file, max_header_size=HEADER)
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise InputError(f"real numbers of at most 64 bits in `{name}`", f"{dtype}"[:60])
    if len(shape) > axes or math.prod(shape) > most or min(shape, default=1) < 1:
        raise InputError(f"an array of up to {axes} axes and {most:,} numbers in `{name}`", f"shape {shape}"[:60])
    data = file.read()
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{math.prod(shape) * dtype.itemsize} bytes for shape {shape} in `{name}`", str(len(data)))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C").astype(np.float64)


def write_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Write a .npz body, not compressed: its reader is usually on the same machine."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def encoded(array: Num[np.ndarray, "..."]) -> dict[str, Any]:
    """An array within JSON in the form that a page decodes fastest: its bytes, little-endian, in base64."""
    kind = "int32" if array.dtype.kind in "iu" else "float32"
    data = np.ascontiguousarray(array, np.dtype(kind).newbyteorder("<"))
    return {"type": kind, "shape": list(array.shape), "base64": base64.b64encode(data.tobytes()).decode("ascii")}


def _short(content: Any) -> str:
    """A few characters that stand for content of any size."""
    if isinstance(content, (list, dict)):
        return f"{'a list' if isinstance(content, list) else 'an object'} of {len(content)}"
    if isinstance(content, int) and abs(content) > 10**20:
        return "a number with many digits"
    return f"`{content!r}`"[:60] if not isinstance(content, str) else f"`{content[:40]!r}`"
