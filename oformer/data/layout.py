"""Samples as rows of named arrays: what a part of a dataset holds, and how to read a sample out of it again.

Within a part samples are ragged: the rows `offsets[i]` to `offsets[i + 1]` of an array belong to sample i. An
array that a part lacks is among the shared ones; a `query.` array that is in neither is the `input.` array of
the same name. Coordinates and weights are float32, values float32 or float16 as asked, parameters float64,
cells int32.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec

AGAIN = "Copy the dataset again, or run its generation again: it makes the missing parts anew"

Storage = Literal["float32", "float16"]
NamedArrays = Mapping[str, np.ndarray]


def _arrays(sample: Sample, storage: Storage, where: str) -> dict[str, np.ndarray]:
    """A sample as named arrays, points first."""
    values, single = np.dtype(storage), np.dtype(np.float32)
    arrays = {
        "input.coords": _cast(sample.input.coords, single, where),
        "input.weights": _cast(sample.input.weights, single, where),
        "input.values": _cast(sample.input.values.transpose(0, 1), values, where),
        "query.coords": _cast(sample.query.coords, single, where),
        "query.weights": _cast(sample.query.weights, single, where),
        "query.values": _cast(sample.query.values.transpose(0, 1), values, where),
        "target": _cast(sample.target.transpose(0, 1), values, where),
    }
    for name, value in sample.parameters.items():
        arrays[f"parameters.{name}"] = _cast(value.reshape(1), np.dtype(np.float64), where)
    for block, cells in enumerate(sample.cells or ()):
        arrays[f"cells.{block}"] = cells.cpu().numpy().astype(np.int32)
    return arrays


def _cast(tensor: Tensor, dtype: np.dtype, where: str) -> np.ndarray:
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
    """What parts may leave out: the points, weights, query values and cells of sample 0.

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


def _kind(name: str) -> str:
    """Whose offsets cut an array: `input`, `query` or `cells.N`."""
    return "query" if name == "target" else name if name.startswith("cells.") else name.split(".")[0]


def pack(samples: Sequence[Sample], shared: NamedArrays, storage: Storage, first: int) -> dict[str, np.ndarray]:
    """The arrays of a part whose first sample has the number `first`."""
    rows = [_arrays(sample, storage, f"sample {first + i}") for i, sample in enumerate(samples)]
    cells = sorted(name for name in shared if name.startswith("cells."))
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys() or sorted(n for n in row if n.startswith("cells.")) != cells:
            raise InputError(
                f"the same parameters and blocks of cells in sample {first + i} as in the others",
                ", ".join(n for n in row if n.startswith(("parameters", "cells"))) or "none",
                "Give each sample all of them",
            )
    packed = {name: _joined(name, rows, first) for name in rows[0] if not _left_out(name, rows, shared)}
    owners = {"input": "input.values", "query": "target", **{name: name for name in cells if name in packed}}
    for kind, name in owners.items():
        packed[f"{kind}.offsets"] = np.cumsum([0, *(len(row[name]) for row in rows)], dtype=np.int64)
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
        norm = float(np.sqrt((exact**2).sum()))
        error = float(np.sqrt(((exact.astype(np.float16) - exact) ** 2).sum()))
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

    def find(name: str) -> Tensor | None:
        if name not in part:
            return shared.get(name)
        offsets = part.get(f"{_kind(name)}.offsets")
        if offsets is None:
            offsets = part["input.offsets"]
        return tensor_of(name, part[name][offsets[row] : offsets[row + 1]])

    def need(name: str) -> Tensor:
        found = find(name)
        if found is None:
            raise InputError(f"`{name}` in the dataset", "neither part nor shared file has it", AGAIN)
        return found

    coords, weights = need("input.coords"), need("input.weights")
    query_coords, query_weights = find("query.coords"), find("query.weights")
    cells = sorted({n for n in (*part, *shared) if n.startswith("cells.") and not n.endswith(".offsets")})
    return Sample(
        input=Field(coords, need("input.values"), weights),
        query=Field(
            coords if query_coords is None else query_coords,
            need("query.values"),
            weights if query_weights is None else query_weights,
        ),
        target=need("target"),
        parameters={
            name.removeprefix("parameters."): torch.tensor(float(part[name][row]), dtype=torch.float32)
            for name in part
            if name.startswith("parameters.")
        },
        cells=tuple(need(name) for name in cells) or None,
    )


def contradiction(
    part: NamedArrays,
    shared: NamedArrays,
    first: NamedArrays,
    count: int,
    spec: Spec,
    storage: Storage,
) -> tuple[str, str] | None:
    """What a part should have and what it has instead, or None.

    Args:
        part: its arrays.
        shared: those of the shared file.
        first: those of part 0, whose parameters all parts have.
        count: samples of the part.
        spec: of the dataset.
        storage: of its values.
    """
    for name in ("input.offsets", "input.values", "target", "redrawn"):
        if name not in part:
            return f"`{name}`", "none"
    parameters, others = (sorted(n for n in arrays if n.startswith("parameters.")) for arrays in (first, part))
    if parameters != others:
        return f"the parameters of part 0, {', '.join(parameters) or 'none'}", ", ".join(others) or "none"
    for name, array in part.items():
        if wrong := _wrong_kind(name, array, spec, storage):
            return wrong
    ends = {name: part[name] for name in part if name.endswith(".offsets")}
    for name, offsets in ends.items():
        if offsets.shape != (count + 1,) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            return (
                f"{count + 1} growing numbers in `{name}`",
                f"{len(offsets)} numbers: {', '.join(map(str, offsets[:4].tolist()))}…",
            )
    ends.setdefault("query.offsets", part["input.offsets"])
    for name, array in part.items():
        if name.endswith(".offsets") or name in ("redrawn", "rounding"):
            continue
        owner = f"{_kind(name)}.offsets"
        if owner not in ends and not name.startswith("parameters."):
            return f"`{owner}`", "none"
        rows = count if name.startswith("parameters.") else ends[owner][-1]
        if len(array) != rows:
            return f"{rows} rows in `{name}`", str(len(array))
    for name in ("input.coords", "input.weights", "query.coords", "query.weights", "query.values"):
        if name not in part and name in shared:
            sizes = np.diff(ends[f"{_kind(name)}.offsets"])
            if (sizes != len(shared[name])).any():
                return (
                    f"the {len(shared[name])} points of `{name}` that samples share",
                    f"{sizes.min()} to {sizes.max()}",
                )
        elif name not in part and name not in ("query.coords", "query.weights"):
            return f"`{name}`", "none"
    return None


def shared_contradiction(shared: NamedArrays, spec: Spec, storage: Storage) -> tuple[str, str] | None:
    """What the shared file should have and what it has instead, or None."""
    for name, array in shared.items():
        if name.endswith(".offsets") or not name.startswith(("input.", "query.", "cells.")):
            return "points, weights, query values and cells alone", f"`{name}`"
        if wrong := _wrong_kind(name, array, spec, storage):
            return wrong
    return None


def _wrong_kind(name: str, array: np.ndarray, spec: Spec, storage: Storage) -> tuple[str, str] | None:
    """The type and the shape that an array should have behind its rows, and those it has; None where they agree."""
    any_size = -1
    if name.endswith(".offsets"):
        kind, behind = "int64", ()
    elif name.startswith("cells."):
        kind, behind = "int32", (any_size,)
    elif name.startswith("parameters."):
        kind, behind = "float64", ()
    else:
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {
            "input.coords": ("float32", (spec.dim,)),
            "input.weights": ("float32", ()),
            "input.values": (storage, (spec.in_times, spec.in_channels)),
            "query.coords": ("float32", (spec.dim,)),
            "query.weights": ("float32", ()),
            "query.values": (storage, (any_size, spec.query_channels)),
            "target": (storage, (spec.out_times, spec.out_channels)),
            "redrawn": ("int64", (2,)),
            "rounding": ("float64", ()),
        }
        if name not in kinds:
            return "arrays that a dataset knows", f"`{name}`"
        kind, behind = kinds[name]
    there = array.shape[1:]
    fits = array.ndim == 1 + len(behind) and all(n in (m, any_size) for n, m in zip(behind, there, strict=True))
    if array.dtype == kind and fits:
        return None
    asked = ", ".join("any" if n == any_size else str(n) for n in ("rows", *behind))
    return f"`{name}` as ({asked}) of {kind}", f"{array.shape} of {array.dtype}"


def largest_rounding(parts: Sequence[NamedArrays]) -> dict[str, float] | None:
    """The worst of all parts for input, query and target; None where values are not rounded to float16."""
    if "rounding" not in parts[0]:
        return None
    largest = np.stack([part["rounding"] for part in parts]).max(0)
    return dict(zip(("input", "query", "target"), map(float, largest), strict=True))
