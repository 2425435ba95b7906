"""A person's own arrays as samples: every form they may come in, and one sentence for every mistake."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import MOST_AXES, Field, Sample, how_to_turn, uniform_weights


@runtime_checkable
class ArrayLike(Protocol):
    """What numpy can make an array of: a tensor, a DataFrame, a DataArray."""

    def __array__(self) -> np.ndarray: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...


Arrays = ArrayLike | Sequence[Any]  # an array for all samples, or a list with one for each

_RAGGED = "Where samples differ in their number of points, give a list with one array of numbers for each"


def samples_of(
    coords: Arrays,
    inputs: Arrays,
    targets: Arrays,
    query_coords: Arrays | None = None,
    query_values: Arrays | None = None,
    weights: Arrays | None = None,
    query_weights: Arrays | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Samples in float32 from arrays, lists or tensors; `PointDataset.from_arrays` says in which forms."""
    values, answers = _functions("inputs", inputs), _functions("targets", targets)
    count = len(values)
    _same_count("targets", len(answers), count)
    points = _point_sets("coords", coords, count)
    queries = points if query_coords is None else _point_sets("query_coords", query_coords, count)
    features = None if query_values is None else _functions("query_values", query_values)
    if features is not None:
        _same_count("query_values", len(features), count)
    in_weights = _weights("weights", weights, points)
    if query_weights is None and query_coords is None:
        out_weights = in_weights
    else:
        out_weights = _weights("query_weights", query_weights, queries)
    numbers = {name: _parameter(name, value, count) for name, value in (parameters or {}).items()}
    nothing = {id(q): q.new_zeros((1, len(q), 0)) for q in queries}
    samples = []
    for i in range(count):
        known = nothing[id(queries[i])] if features is None else features[i]
        _fits("inputs", values[i], points[i], i)
        _fits("targets", answers[i], queries[i], i)
        _fits("query_values", known, queries[i], i)
        sample = Sample(
            input=Field(points[i], values[i], in_weights[i]),
            query=Field(queries[i], known, out_weights[i]),
            target=answers[i],
            parameters={name: value[i] for name, value in numbers.items()},
        )
        samples.append(sample)
    return samples


def _numbers(name: str, array: Any) -> Tensor:
    """Real numbers as a float32 tensor of our own."""
    if isinstance(array, Tensor):
        if array.is_complex():
            raise InputError(f"real numbers in {name}", "complex ones", "Give real and imaginary part as two channels")
        return array.detach().to("cpu", torch.float32, copy=True)
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise InputError(f"one array in {name}", f"rows of differing length ({error})", _RAGGED) from error
    if array.dtype.kind not in "fiub":
        kind = "an array of objects" if array.dtype.kind == "O" else f"an array of {array.dtype}"
        raise InputError(f"real numbers in {name}", kind, _RAGGED)
    with np.errstate(over="ignore"):  # what does not fit is infinite, and refused with the rest
        return torch.from_numpy(np.array(array, dtype=np.float32))


def _items(name: str, arrays: Arrays) -> list[Tensor] | Tensor:
    """One tensor for each sample of a list, or the one of an array; a list of numbers is an array too."""
    nested = isinstance(arrays, (list, tuple)) and any(isinstance(i, (list, tuple)) or np.ndim(i) for i in arrays)
    if nested or (isinstance(arrays, (list, tuple)) and not arrays):
        return [_numbers(f"sample {i} of `{name}`", item) for i, item in enumerate(arrays)]
    return _numbers(f"`{name}`", arrays)


def _functions(name: str, arrays: Arrays) -> list[Float[Tensor, "times points channels"]]:
    """Values at points, one tensor per sample."""
    items = _items(name, arrays)
    if isinstance(items, list):
        for i, values in enumerate(items):
            if values.ndim not in (1, 2, 3):
                raise InputError(
                    f"sample {i} of `{name}` of shape (points,), (points, channels) or (times, points, channels)",
                    str(tuple(values.shape)),
                )
    elif items.ndim not in (2, 3, 4):
        raise InputError(
            f"`{name}` of shape (samples, points), (samples, points, channels) or (samples, times, points, channels)",
            str(tuple(items.shape)),
            "Put all points of a grid on one axis, row by row"
            if items.ndim > 4
            else "Reshape your data. Add the axis of samples",
        )
    if len(items) == 0:
        raise InputError(f"at least one sample in `{name}`", "none")
    return [_with_axes(values) for values in items]


def _with_axes(values: Tensor) -> Tensor:
    if values.ndim == 1:
        values = values[:, None]
    return values[None] if values.ndim == 2 else values


def _point_sets(name: str, arrays: Arrays, count: int) -> list[Float[Tensor, "points dim"]]:
    """Coordinates, one tensor per sample; what all samples share is one tensor in all of them."""
    items = _items(name, arrays)
    if isinstance(items, list):
        _same_count(name, len(items), count, _meant_for_all(name, items))
        turned = f"[x.T for x in {name}]"
    elif items.ndim == 3:
        _same_count(name, len(items), count)
        turned = f"{name}.swapaxes(1, 2)"
    elif items.ndim in (1, 2):
        return [_checked_points(f"`{name}`", items, f"{name}.T")] * count
    else:
        raise InputError(f"`{name}` of shape (points, dim), (samples, points, dim), or a list", str(tuple(items.shape)))
    return [_checked_points(f"sample {i} of `{name}`", points, turned) for i, points in enumerate(items)]


def _meant_for_all(name: str, items: list[Tensor]) -> str:
    """What to write where a list, which has an array for each sample, holds the axes of one point set or its points."""
    if len({item.shape for item in items}) != 1 or items[0].ndim != 1:
        return ""
    rows, columns = len(items), len(items[0])
    if rows <= MOST_AXES < columns:
        return (
            f"It looks like the axes of points for all samples: give `np.stack({name}, -1)`, of shape {columns, rows}"
        )
    if columns <= MOST_AXES < rows:
        return f"It looks like points for all samples: give `np.array({name})`, of shape {rows, columns}"
    return ""


def _checked_points(name: str, points: Tensor, turned: str) -> Tensor:
    if points.ndim == 1:
        points = points[:, None]
    if points.ndim != 2 or points.shape[1] not in (1, 2, 3):
        raise InputError(
            f"{name} of shape (points, dim) with dim 1, 2 or 3",
            str(tuple(points.shape)),
            (points.ndim == 2 and how_to_turn(turned, points.shape))
            or "On a line, points that differ from sample to sample have shape (samples, points, 1)",
        )
    if len(points) == 0:
        raise InputError(f"at least one point in {name}", "an empty point set", "Remove the sample")
    return points


def _weights(name: str, arrays: Arrays | None, points: list[Tensor]) -> list[Float[Tensor, "points"]]:
    """Weights that sum to one, one tensor per sample; shared like the points."""
    if arrays is None:
        equal = {id(p): uniform_weights(p) for p in points}
        return [equal[id(p)] for p in points]
    items = _items(name, arrays)
    if not isinstance(items, list) and items.ndim not in (1, 2):
        raise InputError(f"`{name}` of shape (points,), (samples, points), or a list", str(tuple(items.shape)))
    sets = [items] * len(points) if isinstance(items, Tensor) and items.ndim == 1 else list(items)
    _same_count(name, len(sets), len(points))
    scaled: dict[int, Tensor] = {}
    for i, (weights, place) in enumerate(zip(sets, points, strict=True)):
        if weights.shape != place.shape[:1]:
            raise InputError(
                f"{len(place)} numbers in sample {i} of `{name}`, one per point", str(tuple(weights.shape))
            )
        if id(weights) not in scaled:
            total = weights.sum()
            if not (bool(torch.isfinite(total)) and bool((weights >= 0).all()) and bool(total > 0)):
                wanted = f"finite weights, none negative and not all zero, in sample {i} of `{name}`"
                raise InputError(wanted, f"{float(weights.min()):g} to {float(weights.max()):g}")
            scaled[id(weights)] = weights / total
    return [scaled[id(weights)] for weights in sets]


def _parameter(name: str, value: Any, count: int) -> Float[Tensor, "samples"]:
    numbers = _numbers(f"parameter `{name}`", value)
    if numbers.ndim == 0:
        numbers = numbers.expand(count)
    if numbers.ndim != 1:
        raise InputError(f"parameter `{name}` of shape (samples,)", str(tuple(numbers.shape)))
    _same_count(f"parameters[{name!r}]", len(numbers), count)
    bad = (~torch.isfinite(numbers)).nonzero()
    if len(bad):
        raise InputError(f"a finite parameter `{name}` in sample {int(bad[0])}", str(float(numbers[bad[0]])))
    return numbers


def _same_count(name: str, got: int, count: int, do: str = "") -> None:
    if got != count:
        raise InputError(
            f"as many samples in `{name}` as in `inputs` ({count})",
            str(got),
            do or f"Sample {min(got, count)} is the first that only one of them has",
        )


def _fits(name: str, values: Tensor, points: Tensor, i: int) -> None:
    if values.shape[1] != len(points):
        where = "query points" if name != "inputs" else "points"
        hint = "Values have shape (points, channels) or (times, points, channels) per sample"
        if values.shape[0] == 1 and values.shape[2] == len(points):
            hint = "It looks as if points came last: give (times, points, channels) per sample"
        elif values.shape[1] == points.shape[1]:
            hint = f"It looks as if the {where} were transposed: their shape is (points, dim)"
        shape = f"{values.shape[1]} (times, points, channels = {tuple(values.shape)})"
        raise InputError(f"values at the {len(points)} {where} of sample {i} in `{name}`", shape, hint)
