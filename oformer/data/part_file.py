"""Samples as rows of named arrays: what a part of a dataset holds, and how to read a sample out of it again.

Within a part samples are ragged: the rows `offsets[i]` to `offsets[i + 1]` of an array belong to sample i. An
array that a part lacks is among the shared ones; a `query.` array that is in neither is the `input.` array of
the same name. The names, shapes and types of all arrays are those of `_described`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec

AGAIN = "Copy the dataset again, or run its generation again: it makes the missing parts anew"

Storage = Literal["float32", "float16"]
NamedArrays = Mapping[str, np.ndarray]
_ANY = -1  # a side of an array that may have any length


def _described(spec: Spec, storage: Storage) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array by name, without its first axis: that of rows, of samples, or of parameters."""
    return {
        "input.coords": ("float32", (spec.dim,)),
        "input.weights": ("float32", ()),
        "input.values": (storage, (spec.in_times, spec.in_channels)),
        "query.coords": ("float32", (spec.dim,)),
        "query.weights": ("float32", ()),
        "query.values": (storage, (_ANY, spec.query_channels)),
        "target": (storage, (spec.out_times, spec.out_channels)),
        "offsets": ("int64", ()),  # of `input`, `query` and each block of cells
        "parameters": ("float64", ()),  # `parameters.NAME`, one number for each sample
        "cells": ("int32", (_ANY,)),  # `cells.N`, the corners of the cells of block N
        "redrawn": ("int64", (2,)),  # (sample, attempt) of those that are not their first draw
        "rounding": ("float64", ()),  # by storing in float16: the largest error of input, query and target
    }


def _entry(name: str) -> str:
    """The entry of `_described` that describes an array."""
    first, last = name.split(".", 1)[0], name.rpartition(".")[2]
    return "offsets" if last == "offsets" else first if first in ("parameters", "cells") else name


def _arrays(sample: Sample, storage: Storage, where: str) -> dict[str, np.ndarray]:
    """A sample as named arrays, points first."""
    tensors = {"target": sample.target.transpose(0, 1)}
    for role, field in (("input", sample.input), ("query", sample.query)):
        tensors |= {f"{role}.coords": field.coords, f"{role}.weights": field.weights}
        tensors[f"{role}.values"] = field.values.transpose(0, 1)
    tensors |= {f"parameters.{name}": value.reshape(1) for name, value in sample.parameters.items()}
    tensors |= {f"cells.{block}": cells for block, cells in enumerate(sample.cells or ())}
    return {name: _cast(tensor, name, storage, where) for name, tensor in tensors.items()}


def _cast(tensor: Tensor, name: str, storage: Storage, where: str) -> np.ndarray:
    of_values = name == "target" or name.endswith(".values")
    dtype = np.dtype(storage if of_values else {"parameters": "float64", "cells": "int32"}.get(_entry(name), "float32"))
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype=dtype)
    if not np.isfinite(array).all():
        raise InputError(
            f"numbers below {np.finfo(dtype).max:g} in `{where}` to store them as {dtype}",
            "larger ones",
            "Store them as float32, or rescale them",
        )
    return array


def shared_arrays(first: Sample, storage: Storage) -> dict[str, np.ndarray]:
    """The arrays that parts may leave out: the points, weights, query values and cells of sample 0.

    Whether a part leaves them out depends on its own samples and on sample 0 alone, so its bytes do not
    depend on which part was made first.
    """
    arrays = _arrays(first, storage, "sample 0")
    twins = {name for name in arrays if (twin := _twin(name)) and _same(arrays[name], arrays[twin])}
    shareable = ("input.coords", "input.weights", "query.", "cells.")
    return {name: a for name, a in arrays.items() if name.startswith(shareable) and name not in twins}


def _twin(name: str) -> str | None:
    """The array of the input that a query's stands for, if it is in neither part nor shared file."""
    return name.replace("query", "input") if name in ("query.coords", "query.weights") else None


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _offsets(name: str) -> str:
    """The offsets that cut an array into samples."""
    return f"{'query' if name == 'target' else name if _entry(name) == 'cells' else name.split('.')[0]}.offsets"


def pack(samples: Sequence[Sample], shared: NamedArrays, storage: Storage, first: int) -> dict[str, np.ndarray]:
    """The arrays of a part whose first sample has the number `first`."""
    rows = [_arrays(sample, storage, f"sample {first + i}") for i, sample in enumerate(samples)]
    cells = {name for name in shared if _entry(name) == "cells"}
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys() or {name for name in row if _entry(name) == "cells"} != cells:
            raise InputError(
                f"the same parameters and blocks of cells in sample {first + i} as in the others",
                ", ".join(name for name in row if _entry(name) in ("parameters", "cells")) or "none",
                "Give each sample all of them",
            )
    packed = {name: _joined(name, rows, first) for name in rows[0] if not _left_out(name, rows, shared)}
    for name in ("input.values", "target", *sorted(cells & packed.keys())):
        packed[_offsets(name)] = np.cumsum([0, *(len(row[name]) for row in rows)], dtype=np.int64)
    if np.array_equal(packed["query.offsets"], packed["input.offsets"]):
        del packed["query.offsets"]
    if storage == "float16":
        packed["rounding"] = np.array([_rounding(sample) for sample in samples]).max(0)
    return packed


def _left_out(name: str, rows: Sequence[NamedArrays], shared: NamedArrays) -> bool:
    if name in shared:
        return all(_same(row[name], shared[name]) for row in rows)
    # Only where sample 0 has no queries of its own: a missing array would mean those.
    twin = _twin(name)
    return twin is not None and all(_same(row[name], row[twin]) for row in rows)


def _joined(name: str, rows: Sequence[NamedArrays], first: int) -> np.ndarray:
    for i, row in enumerate(rows):
        if row[name].shape[1:] != rows[0][name].shape[1:]:
            raise InputError(
                f"`{name}` of sample {first + i} in the shape of the others, (…, {rows[0][name].shape[1:]})",
                str(row[name].shape[1:]),
            )
    return np.concatenate([row[name] for row in rows])


def _rounding(sample: Sample) -> list[float]:
    """Relative L2 error of float16 in input, query and target."""
    errors = []
    for values in (sample.input.values, sample.query.values, sample.target):
        exact = values.detach().cpu().numpy().astype(np.float64)
        norm, error = (float(np.sqrt((a**2).sum())) for a in (exact, exact.astype(np.float16) - exact))
        errors.append(error / norm if norm else 0.0)
    return errors


def tensor_of(name: str, array: np.ndarray) -> Tensor:
    """Rows as a tensor of its own: a map is read-only, and torch cannot say so."""
    if name.startswith("cells."):
        return torch.from_numpy(np.array(array, dtype=np.int64))
    axes = (1, 0, 2) if array.ndim == 3 else tuple(range(array.ndim))
    return torch.from_numpy(np.array(array.transpose(axes), dtype=np.float32, order="C"))


def unpack(part: NamedArrays, row: int, shared: Mapping[str, Tensor]) -> Sample:
    """Sample `row` of a part."""

    def find(name: str) -> Tensor:
        if name in part:
            offsets = part.get(_offsets(name), part["input.offsets"])
            return tensor_of(name, part[name][offsets[row] : offsets[row + 1]])
        twin = _twin(name)
        return shared[name] if name in shared or twin is None else known[twin]

    known = {name: find(name) for name in ("input.coords", "input.values", "input.weights")}
    query = [find(f"query.{name}") for name in ("coords", "values", "weights")]
    cells = sorted({n for n in (*part, *shared) if _entry(n) == "cells"})
    return Sample(
        input=Field(*known.values()),
        query=Field(*query),
        target=find("target"),
        parameters={
            name.removeprefix("parameters."): torch.tensor(float(part[name][row]), dtype=torch.float32)
            for name in part
            if name.startswith("parameters.")
        },
        cells=tuple(map(find, cells)) or None,
    )


def check_part(
    path: Path, part: NamedArrays, shared: NamedArrays, first: NamedArrays, count: int, spec: Spec, storage: Storage
) -> None:
    """Refuse a part that a sample cannot be read from.

    Args:
        path: its file, for the message.
        part: its arrays.
        shared: those of the shared file.
        first: those of part 0, whose parameters all parts have.
        count: samples of the part.
        spec: of the dataset.
        storage: of its values.
    """
    shareable = ("input.coords", "input.weights", "query.values")
    needed = ("input.offsets", "input.values", "target", "redrawn", *(n for n in shareable if n not in shared))
    _check_arrays(path, part, needed, spec, storage)
    parameters, others = (sorted(n for n in arrays if _entry(n) == "parameters") for arrays in (first, part))
    if parameters != others:
        raise _other(path, f"the parameters of part 0, {', '.join(parameters) or 'none'}", ", ".join(others) or "none")
    ends = {"query.offsets": part["input.offsets"]} | {n: a for n, a in part.items() if _entry(n) == "offsets"}
    for name, offsets in ends.items():
        if offsets.shape != (count + 1,) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            got = f"{len(offsets)} numbers: {', '.join(map(str, offsets[:4].tolist()))}…"
            raise _other(path, f"{count + 1} growing numbers in `{name}`", got)
    for name, array in part.items():
        if _entry(name) in ("offsets", "redrawn", "rounding"):
            continue
        owner = _offsets(name)
        if owner not in ends and _entry(name) != "parameters":
            raise _other(path, f"`{owner}`", "none")
        rows = count if _entry(name) == "parameters" else ends[owner][-1]
        if len(array) != rows:
            raise _other(path, f"{rows} rows in `{name}`", str(len(array)))
    for name, array in shared.items():
        sizes = np.zeros(0) if name in part or _entry(name) == "cells" else np.diff(ends[_offsets(name)])
        if (sizes != len(array)).any():
            wanted = f"the {len(array)} points of `{name}` that samples share"
            raise _other(path, wanted, f"{sizes.min()} to {sizes.max()}")


def check_shared(path: Path, shared: NamedArrays, spec: Spec, storage: Storage) -> None:
    """Refuse a shared file that holds anything but points, weights, query values and cells."""
    for name in shared:
        if _entry(name) == "offsets" or not name.startswith(("input.", "query.", "cells.")):
            raise _other(path, "points, weights, query values and cells alone", f"`{name}`")
    _check_arrays(path, shared, (), spec, storage)


def _check_arrays(path: Path, arrays: NamedArrays, needed: Sequence[str], spec: Spec, storage: Storage) -> None:
    """Refuse arrays that are not as `_described`, or lack one that is needed."""
    described = _described(spec, storage)
    for name in needed:
        if name not in arrays:
            raise _other(path, f"`{name}`", "none")
    for name, array in arrays.items():
        if _entry(name) not in described:
            raise _other(path, "arrays that a dataset knows", f"`{name}`")
        kind, behind = described[_entry(name)]
        there = array.shape[1:]
        fits = array.ndim == 1 + len(behind) and all(n in (m, _ANY) for n, m in zip(behind, there, strict=True))
        if array.dtype != kind or not fits:
            asked = ", ".join("any" if n == _ANY else str(n) for n in ("rows", *behind))
            raise _other(path, f"`{name}` as ({asked}) of {kind}", f"{array.shape} of {array.dtype}")


def _other(path: Path, wanted: str, got: str) -> InputError:
    return InputError(f"{wanted} in {path}", got, f"Delete it. {AGAIN}")


def largest_rounding(parts: Sequence[NamedArrays]) -> dict[str, float] | None:
    """The worst of all parts for input, query and target; None where values are not rounded to float16."""
    if "rounding" not in parts[0]:
        return None
    largest = np.stack([part["rounding"] for part in parts]).max(0)
    return dict(zip(("input", "query", "target"), map(float, largest), strict=True))
