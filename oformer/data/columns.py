"""Samples as dicts, as scikit-learn's X and y, or as keyword arrays of all samples: columns by key.

Values on a grid may keep its axes: points of shape (nx, ny, 2) and values of shape (nx, ny) are flattened alike.

Parameters of a sample (a viscosity, a Mach number) become input channels, constant over its points and frames, behind
the channels of `inputs` and in alphabetical order.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oformer.data.arrays import ArrayLike, Arrays, samples_of
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field, Sample
from oformer.meshes.grids import line_weights

NEEDED = ("coords", "inputs", "targets")
SHARED = ("coords", "query_coords", "weights", "query_weights")  # that all samples may have in common
KEYS = (*NEEDED, "query_coords", "query_features", "weights", "query_weights", "parameters")
Samples = Sequence[Mapping[str, Any]] | Arrays  # dicts, or the inputs of each sample


def columns_of(
    X: Samples | None, arrays: Mapping[str, Any], y: Arrays | None = None, points: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arrays by key.

    Args:
        X: a list of dicts, or the inputs of all samples.
        arrays: by keyword.
        y: the targets of all samples; a number for each is a function at one point.
        points: the `SHARED` of `fit`, for samples that come without `coords`.
    """
    X, y = entries(X), entries(y)
    given = {key: value for key, value in (("inputs", X), ("targets", y)) if value is not None}
    if X is None and not arrays:
        raise InputError("a list of samples, or keyword arrays", "neither", f"Keys: {', '.join(KEYS)}")
    if X is not None and holds_dicts(X):
        if arrays:
            raise InputError("a list of samples, or keyword arrays", "both", f"Keys: {', '.join(KEYS)}")
        del given["inputs"]
        columns = _columns_of_dicts([_placed(sample, points) for sample in X], [k for k in NEEDED if k not in given])
    else:
        columns = _placed(arrays, points if X is not None else None)
    if twice := given.keys() & columns.keys():
        raise InputError(f"the {twice.pop()} once", "them in two places", "Leave one of them out")
    columns |= given
    if "inputs" in given and columns.get("coords") is None:
        columns |= _even_points(given)
    _check_keys(columns, "the keyword arrays" if X is None else "X, y and the keyword arrays")
    if is_numbers(y):  # a function at the first of the points
        one = columns["coords"][0] if isinstance(columns["coords"], list) else np.asarray(columns["coords"])
        one = np.reshape(one, (-1, np.shape(one)[-1] if np.ndim(one) > 1 else 1))[:1]
        columns = {"query_coords": one, **columns, "targets": np.reshape(columns["targets"], (-1, 1))}
    return columns


def entries(given: Any) -> Any:
    """Something whose i-th entry is that of sample i: a list, a tensor or an array of numbers."""
    if hasattr(given, "toarray"):
        raise InputError("dense arrays", "a sparse matrix", "Give X.toarray()")
    if given is None or isinstance(given, (Tensor, Mapping)):
        return given
    if isinstance(given, (list, tuple)):
        return list(given)
    array = np.asarray(given)
    return list(array) if array.dtype == object and array.ndim == 1 else array


def holds_dicts(X: Any) -> bool:
    """Whether X is a list of dicts; refused where only some of its entries are."""
    if isinstance(X, list) and all(isinstance(sample, Mapping) for sample in X):
        if not X:
            raise InputError("at least one sample", "none")
        return True
    if isinstance(X, Mapping) or (isinstance(X, list) and any(isinstance(sample, Mapping) for sample in X)):
        raise InputError(
            "a list of samples, each a dict",
            f"a {type(X).__name__}" + " of others" * isinstance(X, list),
            "Arrays of all samples are given by keyword: coords=, inputs=, targets=",
        )
    return False


def is_numbers(y: Arrays | None) -> bool:
    """Whether targets are one number for each sample."""
    return y is not None and len(y) > 0 and all(np.ndim(item) == 0 for item in y)


def _placed(sample: Mapping[str, Any], points: Mapping[str, Any] | None) -> dict[str, Any]:
    """A sample at the points of `fit`, where it says nothing of its own."""
    return dict(sample) if sample.get("coords") is not None else {**(points or {}), **sample}


def _even_points(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Points from 0 to 1 at equal distances, for inputs and targets (samples, points) without coordinates."""
    found = {}
    for key, values in given.items():
        shapes = {np.shape(row) for row in values}
        if len(shapes) != 1 or len(shape := shapes.pop()) > 1:
            raise InputError(f"`coords=` beside {key} that are not of shape (samples, points)", "none")
        if shape and (key == "inputs" or shape != found["coords"].shape):
            found["coords" if key == "inputs" else "query_coords"] = np.linspace(0, 1, *shape)
    return found


def _columns_of_dicts(samples: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> dict[str, Any]:
    for i, sample in enumerate(samples):
        _check_keys(sample, f"sample {i}", needed)
    used = [key for key in KEYS if any(sample.get(key) is not None for sample in samples)]
    columns: dict[str, Any] = {}
    for key in used:
        column = [sample.get(key) for sample in samples]
        without = [i for i, item in enumerate(column) if item is None]
        if without:
            raise InputError(
                f"`{key}` in all samples or in none", f"none in sample {without[0]}", "Give it to each sample"
            )
        columns[key] = _parameter_columns(column) if key == "parameters" else _shared(key, column)
    return columns


def _check_keys(given: Mapping[str, Any], where: str, needed: Sequence[str] = NEEDED) -> None:
    for key in given:
        if key not in KEYS:
            raise unknown_name(f"part of a sample in {where}", str(key), KEYS)
    missing = [key for key in needed if given.get(key) is None]
    if missing:
        raise InputError(f"`{missing[0]}` in {where}", ", ".join(given) or "nothing")


def _shared(key: str, column: list[Any]) -> Any:
    """One array where all samples hold the very same points or weights: they are then computed on once."""
    if key not in SHARED or any(item is not column[0] for item in column):
        return column
    nested = isinstance(column[0], (list, tuple)) and not any(getattr(item, "ndim", 0) for item in column[0])
    return _array(column[0]) if nested else column[0]


def _parameter_columns(column: list[Any]) -> dict[str, list[Any]]:
    for i, item in enumerate(column):
        if not isinstance(item, Mapping):
            raise InputError(f"`parameters` of sample {i} as numbers by name", f"a {type(item).__name__}")
        if item.keys() != column[0].keys():
            raise InputError(
                f"the parameters of sample 0 ({', '.join(column[0])}) in sample {i}", ", ".join(item) or "none"
            )
    return {name: [item[name] for item in column] for name in column[0]}


def flattened(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with the axes of grids made one: points (nx, ny, 2), values (nx, ny), with times and channels."""
    flat, groups = dict(columns), {"coords": ["inputs", "weights"]}
    own = "coords" if columns.get("query_coords") is None else "query_coords"
    groups[own] = [*groups.get(own, []), "targets", "query_features", "query_weights"]
    for name, names in groups.items():
        points, values = _rows(columns[name]), _rows(columns[names[0]])
        shared = not isinstance(points, list) and _is_one_grid(name, points, values)
        if not shared and not (isinstance(points, list) and any(getattr(place, "ndim", 0) > 2 for place in points)):
            continue
        grids = [np.shape(points)[:-1]] * len(values) if shared else [place.shape[:-1] for place in points]
        flat[name] = _line(points) if shared else [_line(place) for place in points]
        for key in (key for key in names if columns.get(key) is not None):
            rows = _rows(columns[key])
            if shared and key in SHARED and np.shape(rows) == grids[0]:
                flat[key] = rows.reshape(-1)
            else:
                flat[key] = [_one_axis(key, i, *pair) for i, pair in enumerate(zip(rows, grids, strict=True))]
    return flat


def _array(given: Any) -> Any:
    with contextlib.suppress(ValueError):  # rows of differing length, which are refused in words later on
        return given if isinstance(given, Tensor) else np.asarray(given)
    return given


def _rows(given: Any) -> Any:
    """An array for all samples, or a list with one for each."""
    listed = isinstance(given, (list, tuple)) and any(isinstance(i, (list, tuple)) or np.ndim(i) for i in given)
    return [_array(item) for item in given] if listed else _array(given)


def _line(points: Any) -> Any:
    return points.reshape(-1, points.shape[-1])


def _is_one_grid(name: str, points: Any, values: Any) -> bool:
    """Whether points (nx, ny, dim) are a grid for all samples, rather than (samples, points, dim); as values tell."""
    lead = tuple(np.shape(points)[:-1])
    if len(lead) < 2:
        return False
    shape = np.shape(values[0])

    def holds(axes: tuple[int, ...]) -> bool:  # alone, before channels, or between times and channels
        first = int(len(shape) == len(axes) + 2)
        return shape[first : first + len(axes)] == axes and len(shape) <= len(axes) + 2

    grid, each = holds(lead), lead[0] == len(values) and holds(lead[1:])
    if grid and each:
        raise InputError(f"`{name}` of one grid, or of each sample", f"{lead}, which may be both", "Flatten it")
    return grid or (isinstance(values, list) and not each)


def _one_axis(name: str, i: int, values: Any, grid: tuple[int, ...]) -> Any:
    """The values of a sample with the axes of its grid made one."""
    first = int(values.ndim == len(grid) + 2)  # times come before
    end = first + len(grid)
    if values.shape[first:end] != grid or values.ndim > len(grid) + 2:
        do = "Times come before them and channels behind"
        raise InputError(f"sample {i} of `{name}` with the axes {grid} of its grid", f"{tuple(values.shape)}", do)
    return values.reshape(*values.shape[:first], -1, *values.shape[end:])


def shared_points(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The points and weights that all samples have in common, as they were given."""
    flat = flattened(columns)
    shared = [n for n in SHARED if isinstance(flat.get(n), ArrayLike) and np.ndim(flat[n]) <= 1 + ("coords" in n)]
    return {name: np.asarray(columns[name]) for name in shared}


def seen_samples(columns: dict[str, Any]) -> tuple[list[Sample], tuple[str, ...]]:
    """Samples with their parameters as constant input channels, and the names of those; from `flattened` columns."""
    columns = {"query_values" if key == "query_features" else key: value for key, value in columns.items()}
    found = _weighed_by_gaps(samples_of(**columns), "weights" not in columns, "query_weights" not in columns)
    names = tuple(sorted(found[0].parameters))
    return [_with_channels(sample, names) for sample in found], names


def _weighed_by_gaps(samples: list[Sample], inputs: bool, queries: bool) -> list[Sample]:
    """Samples whose points, if on a line, weigh their half-gaps where no weights were given.

    Sums over random points of equal weight are Monte Carlo; these are quadrature. What samples share stays shared.
    """
    known: dict[int, Tensor] = {}

    def weighed(field: Field, wanted: bool) -> Field:
        if not wanted or field.coords.shape[-1] != 1:
            return field
        if (key := id(field.coords)) not in known:
            known[key] = line_weights(field.coords)
        return dataclasses.replace(field, weights=known[key])

    found = []
    for sample in samples:
        # Targets at the input points are compared with the weights that were given for those.
        same = sample.query.coords is sample.input.coords and not inputs
        input, query = weighed(sample.input, inputs), weighed(sample.query, queries and not same)
        found.append(dataclasses.replace(sample, input=input, query=query))
    return found


def _with_channels(sample: Sample, names: tuple[str, ...]) -> Sample:
    if not names:
        return sample
    values = sample.input.values
    constant = torch.stack([sample.parameters[name] for name in names]).expand(*values.shape[:2], len(names))
    known = sample.input.with_values(torch.cat([values, constant], -1))
    return dataclasses.replace(sample, input=known, parameters={})


def samples_like(
    X: Samples | None,
    arrays: Mapping[str, Any],
    parameters: tuple[str, ...],
    y: Arrays | None = None,
    points: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Samples as the model sees them, refused where they have other parameters than those of `fit`.

    Args:
        X: a list of dicts, the inputs of all samples, or None where there are keyword arrays.
        arrays: the keyword arrays.
        parameters: the names of `fit`.
        y: the targets of all samples, where X does not hold them.
        points: those of `fit`, for samples without `coords`.
    """
    found, names = seen_samples(flattened(columns_of(X, arrays, y, points)))
    if names != parameters:
        raise InputError(f"the parameters of `fit` ({', '.join(parameters) or 'none'})", ", ".join(names) or "none")
    return found


def questions(
    X: Mapping[str, Any] | Samples, queries: Arrays | None, points: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The samples that `predict` is asked about, one or several, with their queries.

    Args:
        X: a dict, a list of dicts, or the inputs of several samples.
        queries: where to answer, instead of the places that a sample names.
        points: those of `fit`, for samples without `coords`.
    """
    if isinstance(X, Mapping):
        return [question(_placed(X, points), 0, queries)]
    X = entries(X)
    samples = X if holds_dicts(X) else [{"inputs": values} for values in X]
    places = per_sample(queries, len(samples))
    asked = enumerate(zip(samples, places, strict=True))
    return [question(_placed(sample, points), i, place) for i, (sample, place) in asked]


def as_given(values: np.ndarray, axes: int, asked: Mapping[str, Any]) -> np.ndarray:
    """An answer (times, queries, channels) with as many axes as the targets of `fit` had, and those of a grid.

    Args:
        values: the answer.
        axes: of the targets of a sample, with one axis for its points; 0 for a number.
        asked: what it answers.
    """
    if axes == 0:
        return values.reshape(())
    grid = np.shape(_queries(asked))[:-1]
    if len(grid) > 1:
        values = values.reshape(values.shape[0], *grid, values.shape[-1])
    return values[0, ..., 0] if axes == 1 else values[0] if axes == 2 else values


def _queries(asked: Mapping[str, Any]) -> Any:
    return asked["coords"] if asked.get("query_coords") is None else asked["query_coords"]


def axes_of(name: str, arrays: Arrays) -> int:
    """How many axes the values of one sample were given with."""
    if not isinstance(arrays, (list, tuple)):
        return np.ndim(arrays) - 1
    found = [np.ndim(item) for item in arrays]
    for i, count in enumerate(found):
        if count != found[0]:
            raise InputError(
                f"as many axes in sample {i} of `{name}` as in sample 0 ({found[0]})",
                str(count),
                "Shapes are (points,), (points, channels) or (times, points, channels) in all samples alike",
            )
    return found[0]


def per_sample(queries: Arrays | None, count: int) -> list[Any]:
    """The queries of each sample: a list or an array of three axes has one entry for each."""
    listed = isinstance(queries, (list, tuple)) and len(queries) > 0 and np.ndim(queries[0]) > 0
    if queries is None or not (listed or np.ndim(queries) == 3):
        return [queries] * count
    if len(queries) != count:
        raise InputError(f"queries for each of the {count} samples", f"{len(queries)} point sets")
    return list(queries)


def question(sample: Mapping[str, Any], i: int, queries: Any) -> dict[str, Any]:
    """A sample with zeros for targets, which nobody reads, and with other queries where they are given."""
    if not isinstance(sample, Mapping):
        raise InputError(f"sample {i} as a dict with `coords` and `inputs`", f"a {type(sample).__name__}")
    _check_keys(sample, f"sample {i}", ("coords", "inputs"))
    asked = dict(sample)
    if queries is not None:
        asked.pop("query_weights", None)
        asked["query_coords"] = queries
    shape = np.shape(_queries(asked))
    if not shape:
        raise InputError(f"query points of shape (queries, dim) for sample {i}", repr(_queries(asked))[:40])
    return {**asked, "targets": np.zeros(shape[:-1] or shape)}


def card_of(sample: Sample, names: tuple[str, ...]) -> Card:
    """Names for the channels of arrays that have none.

    Args:
        sample: the first one.
        names: of the parameters, which are the last input channels.
    """

    def numbered(name: str, count: int) -> tuple[str, ...]:
        return (name,) if count == 1 else tuple(f"{name} {i}" for i in range(count))

    known = numbered("input", sample.input.values.shape[-1] - len(names))
    features, targets = sample.query.values.shape[-1], sample.target.shape[-1]
    return Card(
        "Arrays given to OperatorRegressor",
        inputs=(*known, *names),
        queries=numbered("feature", features),
        targets=numbered("target", targets),
    )
