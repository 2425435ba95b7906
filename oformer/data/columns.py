"""Samples as dicts, or as keyword arrays of all samples: columns by key, and parameters as input channels.

Parameters of a sample (a viscosity, a Mach number) become input channels, constant over its points and frames, behind
the channels of `inputs` and in alphabetical order.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oformer.data.arrays import Arrays, samples_of
from oformer.errors import InputError, unknown_name
from oformer.fields import Field, Sample
from oformer.meshes.grids import line_weights

NEEDED = ("coords", "inputs", "targets")
KEYS = (*NEEDED, "query_coords", "query_features", "weights", "query_weights", "parameters")


def columns_of(samples: Sequence[Mapping[str, Any]] | None, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by key, from dicts or from keywords."""
    if (samples is None) == (not arrays):
        got = "neither" if samples is None else "both"
        raise InputError("a list of samples, or keyword arrays", got, f"Keys: {', '.join(KEYS)}")
    if samples is None:
        _check_keys(arrays, "the keyword arrays")
        return dict(arrays)
    if isinstance(samples, Mapping) or not all(isinstance(sample, Mapping) for sample in samples):
        raise InputError(
            "a list of samples, each a dict",
            f"a {type(samples).__name__}" + " of others" * (not isinstance(samples, Mapping)),
            "Arrays of all samples are given by keyword: coords=, inputs=, targets=",
        )
    if not samples:
        raise InputError("at least one sample", "none")
    for i, sample in enumerate(samples):
        _check_keys(sample, f"sample {i}")
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
    one_for_all = key in ("coords", "query_coords", "weights", "query_weights")
    return column[0] if one_for_all and all(item is column[0] for item in column) else column


def _parameter_columns(column: list[Any]) -> dict[str, list[Any]]:
    for i, item in enumerate(column):
        if not isinstance(item, Mapping):
            raise InputError(f"`parameters` of sample {i} as numbers by name", f"a {type(item).__name__}")
        if item.keys() != column[0].keys():
            raise InputError(
                f"the parameters of sample 0 ({', '.join(column[0])}) in sample {i}", ", ".join(item) or "none"
            )
    return {name: [item[name] for item in column] for name in column[0]}


def seen_samples(columns: dict[str, Any]) -> tuple[list[Sample], tuple[str, ...]]:
    """Samples with their parameters as constant input channels, and the names of those."""
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
    samples: Sequence[Mapping[str, Any]] | None, arrays: Mapping[str, Any], parameters: tuple[str, ...]
) -> list[Sample]:
    """Samples as the model sees them, refused where they have other parameters than those of `fit`.

    Args:
        samples: a list of dicts, or None where there are keyword arrays.
        arrays: the keyword arrays.
        parameters: the names of `fit`.
    """
    found, names = seen_samples(columns_of(samples, arrays))
    if names != parameters:
        raise InputError(f"the parameters of `fit` ({', '.join(parameters) or 'none'})", ", ".join(names) or "none")
    return found


def questions(inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], queries: Arrays | None) -> list[dict[str, Any]]:
    """The samples that `predict` is asked about, one or several, with their queries."""
    single = isinstance(inputs, Mapping)
    samples = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    places = [queries] if single else per_sample(queries, len(samples))
    return [question(sample, i, place) for i, (sample, place) in enumerate(zip(samples, places, strict=True))]


def as_given(values: np.ndarray, axes: int) -> np.ndarray:
    """An answer (times, queries, channels) with as many axes as the targets of `fit` were given with."""
    return values[0, :, 0] if axes == 1 else values[0] if axes == 2 else values


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
    points = asked["coords"] if asked.get("query_coords") is None else asked["query_coords"]
    if np.ndim(points) == 0:
        raise InputError(f"query points of shape (queries, dim) for sample {i}", repr(points)[:40])
    return {**asked, "targets": np.zeros(len(points))}
