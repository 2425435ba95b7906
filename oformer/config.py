"""Frozen dataclasses to JSON and back.

A configuration is written by the program and read by the program: an unknown key, or a value of the wrong type, is an
error that names its place. A key that is not there was written before the field existed, and takes its default; so the
default of a new field must be what was done before it (trained weights outlive versions).
"""

import dataclasses
import types
from collections.abc import Iterator
from numbers import Integral
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from oformer.errors import InputError

Config = TypeVar("Config")


def to_json(value: Any) -> Any:
    """A configuration as plain JSON values. Each dataclass carries its class name under `type`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Integral):  # of numpy
        return int(value)
    raise TypeError(f"A configuration holds plain values and dataclasses, not {type(value).__name__}.")


def from_json(kind: type[Config], content: Any, where: str = "config") -> Config:
    """Rebuild a configuration of the given type.

    Args:
        kind: the dataclass (or any annotation it may hold: unions, tuples, literals).
        content: what `to_json` wrote.
        where: the place in the file, for error messages.
    """
    return _read(kind, content, where)


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON contents differ, and what stands there in each."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where, a, b


def _wrong(where: str, expected: str, content: Any) -> InputError:
    return InputError(
        f"{expected} at `{where}`",
        repr(content)[:80],
        "The file was edited by hand or written by another version",
    )


def _read(kind: Any, content: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return content
    if origin in (Union, types.UnionType):
        return _read_union(arguments, content, where)
    if origin is Literal:
        if content not in arguments:
            raise _wrong(where, "one of " + ", ".join(map(repr, arguments)), content)
        return content
    if origin is tuple:
        return _read_tuple(arguments, content, where)
    if origin is list:
        return list(_read_tuple((arguments[0], ...), content, where))
    if origin is dict:
        if not isinstance(content, dict):
            raise _wrong(where, "an object", content)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in content.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(_named(kind, content, where), content, where)
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        return float(content)
    if kind is type(None) and content is None:
        return None
    if isinstance(kind, type) and type(content) is kind:
        return content
    raise _wrong(where, getattr(kind, "__name__", str(kind)), content)


def _read_union(arguments: tuple[Any, ...], content: Any, where: str) -> Any:
    known = {name: kind for argument in arguments for name, kind in by_name(argument).items()}
    if known and isinstance(content, dict) and "type" in content:
        kind = content["type"]
        if not isinstance(kind, str) or kind not in known:
            raise _wrong(f"{where}.type", "one of " + ", ".join(sorted(known)), kind)
        return _read(known[kind], content, where)
    for argument in arguments:
        try:
            return _read(argument, content, where)
        except InputError:
            continue
    raise _wrong(where, " or ".join(getattr(a, "__name__", str(a)) for a in arguments), content)


def _named(kind: type, content: Any, where: str) -> type:
    """The class that the content names: the one that is asked for, or one derived from it."""
    known = by_name(kind)
    written = content.get("type", kind.__name__) if isinstance(content, dict) else kind.__name__
    if not isinstance(written, str) or written not in known:
        raise _wrong(f"{where}.type", "one of " * (len(known) > 1) + ", ".join(sorted(known)), written)
    return known[written]


def by_name(kind: Any) -> dict[str, type]:
    """A dataclass and all that derive from it, as far as they are imported, by the names in files."""
    return {known.__name__: known for known in _with_subclasses(kind)}


def _with_subclasses(kind: Any) -> Iterator[Any]:
    """A dataclass and all that derive from it, as far as they are imported; nothing for other annotations."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for derived in kind.__subclasses__():
            yield from _with_subclasses(derived)


def _read_tuple(arguments: tuple[Any, ...], content: Any, where: str) -> tuple:
    if not isinstance(content, (list, tuple)):
        raise _wrong(where, "a list", content)
    kinds = [arguments[0]] * len(content) if arguments[1:] == (...,) else list(arguments)
    if len(kinds) != len(content):
        raise _wrong(where, f"{len(kinds)} values", content)
    return tuple(_read(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, content, strict=True)))


def _read_dataclass(kind: Any, content: Any, where: str) -> Any:
    if not isinstance(content, dict):
        raise _wrong(where, f"the fields of {kind.__name__}", content)
    content = {name: item for name, item in content.items() if name != "type"}
    hints = get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.init]
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    unknown, missing = set(content) - {f.name for f in fields}, needed - set(content)
    if unknown or missing:
        difference = [f"unknown {', '.join(sorted(unknown))}"] * bool(unknown) + [
            f"missing {', '.join(sorted(missing))}"
        ] * bool(missing)
        raise InputError(
            f"the fields of {kind.__name__} at `{where}`",
            "; ".join(difference),
            "The file was edited by hand or written by another version",
        )
    return kind(**{name: _read(hints[name], value, f"{where}.{name}") for name, value in content.items()})
