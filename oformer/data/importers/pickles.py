"""Electro- and magnetostatics on meshes (Lötzsch et al. 2022), in the pickles that OFormer was trained on.

A file is a list of dictionaries: `data_x` (points, 11) and `data_y` (points, 3) in float32. A pickle is a program, so
it is not run but read: its operations are looked through first, and every name in it stands for a piece of ours that
can build an array of numbers from the bytes in the file and nothing else.

Differs: the boundary flag is `> 0.5`, where the released code asks for 1 to ten digits.
"""

import io
import math
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oformer.data.importers.common import (
    Choices,
    Layout,
    Opened,
    check_numbers,
    check_room,
    refuse_in_times,
    single_floats,
)
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample
from oformer.problems.electrostatics import Electrostatics
from oformer.problems.magnetostatics import Magnetostatics
from oformer.problems.poisson import PoissonProblem

LARGEST = 8 * 2**30  # bytes of a file; the published ones have some hundred million
_KINDS = {"es": "electrostatics", "ms": "magnetostatics"}
PROBLEMS: dict[str, type[PoissonProblem]] = {"electrostatics": Electrostatics, "magnetostatics": Magnetostatics}
_FLAG = 3  # the channel of the boundary

# Operations that make instances of classes, call for objects outside the file, or name code by number.
_REFUSED = {
    "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER",
    "EMPTY_SET", "ADDITEMS", "FROZENSET",
}  # fmt: skip
_DEEPEST = 32  # an array's own parts are six deep


class _Type:
    """Stands for numpy.dtype: of numbers only."""

    def __init__(self, code: Any, *_: Any):
        if not isinstance(code, str) or not re.fullmatch(r"[fiu][1248]|b1", code):
            raise pickle.UnpicklingError(f"an array of {code!r}"[:80])
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("a number type in an unknown order of bytes")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands for numpy.ndarray: empty until its state, the bytes in the file, is set."""

    def __init__(self) -> None:
        self.values: np.ndarray = np.zeros(0, np.float32)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array of unknown make")
        _, shape, kind, columns_first, content = state
        self.values = _numbers(content, kind, shape, "F" if columns_first else "C")


def _numbers(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    """An array over bytes of the file: its claims cannot be larger than they are."""
    sides = shape if isinstance(shape, tuple) else ()
    fits = (
        isinstance(kind, _Type)
        and isinstance(content, (bytes, bytearray))
        and order in ("C", "F")
        and all(type(n) is int and n >= 0 for n in sides)
        and math.prod(sides) * kind.dtype.itemsize == len(content)
    )
    if not fits:
        raise pickle.UnpicklingError("an array whose bytes are not those of its type and shape")
    return np.frombuffer(content, kind.dtype).reshape(sides, order=order)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.values = _numbers(content, kind, shape, order)
    return array


def _scalar(kind: Any, content: Any) -> float | int | bool:
    return _numbers(content, kind, (), "C").item()


# The old and the new name of numpy's inner modules: before and after numpy 2.
_STANDINS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _reconstruct for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    """Knows our stand-ins, and no other name."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._left = len(content)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("_codecs", "encode"):
            return self._encode
        found = _STANDINS.get((module_name, global_name))
        if found is None:
            raise _Foreign(f"{module_name}.{global_name}")
        return found

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """How Python 3 writes bytes for the older protocols; all of them together are no longer than the file."""
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError("text in an unknown encoding")
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("more bytes than the file has")
        return text.encode("latin1")


class _Foreign(Exception):
    """A name that is none of ours; its text is the name."""


def read_pickle(path: Path) -> Any:
    """Lists, dictionaries, text and numbers of a pickle, with `_Array` for arrays; nothing in it is run."""
    size = path.stat().st_size
    if size > LARGEST:
        raise InputError(f"a pickle of at most {LARGEST / 2**30:g} GiB at {path}", f"{size / 2**30:.1f} GiB")
    check_room(2 * size)
    content = path.read_bytes()
    advice = "Nothing in it was run. Save it anew as a list of dictionaries of numpy arrays"
    try:
        _look_through(content)
        return _Reader(content).load()
    except _Foreign as error:
        raise InputError(f"a pickle of nothing but arrays at {path}", f"one that would run `{error}`", advice) from None
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(
            f"a pickle of nothing but arrays at {path}",
            f"one that is damaged, cut short or holds something else ({reason})",
            advice,
        ) from error


def _look_through(content: bytes) -> None:
    """Refuse operations that data do not need, large places in a pickle's memory, and deep nesting.

    The last two can end the process: Python reserves the place without asking, and hashes tuples within tuples without
    counting. So the stack is followed, with the depth of each object in place of the object.
    """
    marked, count = pickletools.markobject, 0
    stack: list[int | None] = []  # None is a mark
    memory: dict[int, int] = {}
    for operation, argument, _ in pickletools.genops(io.BytesIO(content)):
        name, count = operation.name, count + 1
        if name in _REFUSED:
            raise pickle.UnpicklingError(f"the operation {name}")
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memory) if argument is None else int(argument)
            if place > count:
                raise pickle.UnpicklingError("a place in its memory that it does not need")
            memory[place] = stack[-1] or 0
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memory.get(int(argument or 0), 0))
        elif name == "MARK":
            stack.append(None)
        else:
            taken, before = [0], operation.stack_before
            if marked in before:
                while (top := stack.pop()) is not None:
                    taken.append(top)
                before = before[: before.index(marked)]
            taken += [stack.pop() or 0 for _ in before]
            # What is put into a list or dictionary is one deeper than it; anything else is made of what it takes.
            grows = name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS")
            depth = max(taken[-1], max(taken[:-1]) + 1) if grows else max(taken) + 1
            if depth > _DEEPEST:
                raise pickle.UnpicklingError(f"objects in objects, more than {_DEEPEST} deep")
            stack += [depth] * len(operation.stack_after)


@contextmanager
def open_pickle(path: Path, choices: Choices) -> Iterator[Opened]:
    """A list of samples on scattered points, read whole."""
    kind = _kind(path, choices.kind)
    refuse_in_times(choices.in_times, kind)
    choices.refuse(path, "stride", "stored", "inputs", "targets", "coords")
    content = read_pickle(path)
    if not isinstance(content, list) or not content:
        raise InputError(f"a list of samples in {path}", _described(content))
    problem = PROBLEMS[kind]()  # has the same channels, whose names are one
    inputs, queries, targets = problem.card.inputs, problem.card.queries, problem.card.targets
    samples = [_arrays(path, i, entry, (len(inputs), len(targets))) for i, entry in enumerate(content)]
    extra = sorted({str(key) for entry in content for key in entry} - {"data_x", "data_y"})
    layout = Layout(
        kind=kind,
        format="pickled arrays",
        arrays={
            "data_x": f"(point, channel) = (n, {len(inputs)}): the input",
            "data_y": f"(point, channel) = (n, {len(targets)}): the target",
            **{name: "not used" for name in extra},
        },
        samples=len(samples),
        times=1,
        channels=targets,
        spec=problem.spec,
        assumptions=(
            "Values stay as in the file: in the published ones each channel, coordinates too, was divided by its "
            "largest size in the training sets.",
            f"A query's feature is 1 where the {inputs[_FLAG]} is above 0.5, otherwise 0.",
        ),
        sizes=tuple(len(x) for x, _ in samples),
        inputs=inputs,
    )
    card = Card(f"{kind.capitalize()}, from {path.name}", inputs=inputs, queries=queries, targets=targets)
    yield Opened(path, layout, card, lambda first, end: [_sample(*pair) for pair in samples[first:end]])


def _kind(path: Path, kind: str | None) -> str:
    """Electro- or magnetostatics: said by the caller or by the file's name."""
    if kind is not None and kind not in PROBLEMS:
        raise InputError(f"electrostatics or magnetostatics in the pickle {path}", f"`{kind}`")
    found = kind or _KINDS.get(re.split(r"[^a-z]", path.stem.lower())[0])
    if found is None:
        raise InputError(
            f"a name that begins with es_ or ms_ for the pickle {path}",
            f"`{path.name}`",
            "Say which it is with `kind`: electrostatics or magnetostatics",
        )
    return found


def _described(content: Any) -> str:
    if isinstance(content, list):
        return "an empty list" if not content else "a list"
    return "an array" if isinstance(content, _Array) else f"a {type(content).__name__}"


def _arrays(path: Path, index: int, entry: Any, channels: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    where = f"sample {index} of {path}"
    if not isinstance(entry, dict):
        raise InputError(f"a dictionary with `data_x` and `data_y` as {where}", _described(entry))
    found: dict[str, np.ndarray] = {}
    for name, count in zip(("data_x", "data_y"), channels, strict=True):
        array = entry.get(name)
        if not isinstance(array, _Array):
            have = ", ".join(f"`{key}`" for key in list(entry)[:8]) or "nothing"
            raise InputError(f"an array `{name}` in {where}", f"{have}"[:120])
        check_numbers(path, name, array.values.dtype)
        if array.values.ndim != 2 or array.values.shape[1] != count or len(array.values) == 0:
            raise InputError(f"`{name}` of shape (points, {count}) in {where}", str(array.values.shape))
        found[name] = array.values
    x, y = found["data_x"], found["data_y"]
    if len(x) != len(y):
        raise InputError(f"as many points in `data_x` as in `data_y` of {where}", f"{len(x)} and {len(y)}")
    return x, y


def _sample(x: np.ndarray, y: np.ndarray) -> Sample:
    known = single_floats(x[None])
    coords = known[0, :, :2].contiguous()
    flag = (known[:, :, _FLAG : _FLAG + 1] > 0.5).to(torch.float32)
    return Sample(Field.of(coords, known), Field.of(coords, flag), single_floats(y[None]))
