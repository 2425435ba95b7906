"""The shape checks of the tests: what is passed and returned has the shape that its annotation says.

Each combination of shapes and types that a function meets is checked once: jaxtyping's own decorator binds every call
and checks its arguments twice, and took more than half of the time of the tests. Annotations that hold no tensor are
left to pyright.
"""

import dataclasses
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Hashable
from typing import Any

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype
from torch._subclasses.fake_tensor import FakeTensor

# An int is a float, as Python's own typing rules say.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped
_ONE_AT_A_TIME = threading.RLock()


def install(modules: list[str]) -> None:
    """Check the shapes of these modules, which must not be loaded yet."""
    jaxtyping.install_import_hook(modules, "tests.typecheck.check")
    jaxtyping.jaxtyped = lambda **_: checked  # the hook writes its name above every function and class


def checked(given: Any) -> Any:
    """A function that checks shapes when it is called, a dataclass that does when it is made, or the rest as it is."""
    match given:
        case classmethod() | staticmethod():
            return type(given)(checked(given.__func__))
        case property():
            return property(*(part and checked(part) for part in (given.fget, given.fset, given.fdel)))
        case type():
            if dataclasses.is_dataclass(given) and "__init__" in vars(given):
                given.__init__ = checked(given.__init__)
            return given
    annotations = getattr(given, "__annotations__", {}).values()
    if not any(map(_has_shapes, annotations)):
        return given
    if any("{" in str(annotation) for annotation in annotations):  # an axis as long as an argument says
        return _jaxtyped(given, typechecker=check)
    return _checked_once(given)


def _has_shapes(annotation: Any) -> bool:
    array = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return array or any(map(_has_shapes, typing.get_args(annotation)))


def _checked_once(given: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose arguments and result are looked at where such shapes did not come together before."""
    passed, results = set(), []

    @functools.wraps(given)
    def result(*_: Any, **__: Any) -> Any:
        return results[-1]

    @functools.cache
    def checker() -> Callable[..., Any]:
        return check(result)

    @functools.wraps(given)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        out = given(*args, **kwargs)
        try:
            key = tuple(kwargs), _shapes((args, tuple(kwargs.values()), out))
        except _Traced:
            return out
        except _Unknown:
            key = None
        if key is None or key not in passed:
            with _ONE_AT_A_TIME, _jaxtyped("context"):
                results.append(out)
                try:
                    checker()(*args, **kwargs)
                finally:
                    results.pop()
            if key is not None:
                passed.add(key)
        return out

    return call


class _Unknown(Exception):
    """Of a value that may pass one time and not the next."""


class _Traced(Exception):
    """Of a tensor without numbers, whose sizes may be symbols; what is traced was run with numbers before."""


def _shapes(value: Any) -> Hashable:
    """All of a value that checks of it depend on."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter, np.ndarray):
        return kind, value.shape, value.dtype
    if kind in (tuple, list):
        return kind, *map(_shapes, value)
    if isinstance(value, FakeTensor):
        raise _Traced
    if isinstance(value, torch.Tensor | dict | set):
        raise _Unknown
    return kind
