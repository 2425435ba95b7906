"""What is refused of fields and samples: wrong shapes, empty point sets, NaN and infinite values, negative weights.

And, where the spec is known, codes that are none and queries that are not the points of the grid.
"""

import math

import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import TURNED, Field, Sample, Spec, how_to_turn


def check_field(
    name: str,
    field: Field,
    dim: int | None = None,
    times: int | None = None,
    channels: int | None = None,
) -> None:
    """Refuse a field that no model can use: wrong counts, empty, NaN or infinite.

    Args:
        name: how the caller calls it, for the message.
        field: with or without a batch axis.
        dim: the space dimension it must have, if known.
        times: the number of frames it must have, if known.
        channels: the number of channels it must have, if known.
    """
    # Shapes among themselves, and then those that the model needs.
    coords, values, weights = field.coords, field.values, field.weights
    if coords.ndim < 2 or values.ndim != coords.ndim + 1 or weights.ndim != coords.ndim - 1:
        raise InputError(
            f"`{name}` with coords (..., points, dim), values (..., times, points, channels), weights (..., points)",
            f"{tuple(coords.shape)}, {tuple(values.shape)}, {tuple(weights.shape)}",
            "Add the missing axis; it may have size 1",
        )
    points = coords.shape[-2]
    if points == 0:
        raise InputError(
            f"at least one point in `{name}`", "an empty point set", "Remove the sample or give its points"
        )
    if dim is not None and coords.shape[-1] != dim:
        lives = (
            f"This model or dataset lives in {dim} dimension{'s' * (dim > 1)}; use data or a recipe of that dimension"
        )
        raise InputError(
            f"`{name}.coords` of shape (..., points, {dim})",
            str(tuple(coords.shape)),
            how_to_turn(TURNED, coords.shape) or lives,
        )
    if values.shape[-2] != points or weights.shape[-1] != points:
        raise InputError(
            f"as many values and weights as points in `{name}` ({points})",
            f"{values.shape[-2]} values and {weights.shape[-1]} weights",
            "Coords have shape (..., points, dim), values (..., times, points, channels), weights (..., points)",
        )
    for label, wanted, axis in (("frames", times, -3), ("channels", channels, -1)):
        if wanted is not None and values.shape[axis] != wanted:
            raise InputError(
                f"{wanted} {label} in `{name}.values`",
                f"{values.shape[axis]} (shape {tuple(values.shape)})",
                "Values have shape (..., times, points, channels)",
            )
    # Numbers.
    for label, tensor in (("coords", coords), ("values", values), ("weights", weights)):
        check_finite(f"{name}.{label}", tensor)
    if bool((weights < 0).any()) or bool((weights.sum(-1) <= 0).any()):
        raise InputError(
            f"weights of `{name}` that are not negative and not all zero",
            "others",
            "Leave them out for equal weights",
        )


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinite values, and say how many."""
    if bad := count_not_finite(tensor):
        raise InputError(
            f"finite numbers in `{name}`", f"{bad} NaN or infinite values of {tensor.numel()}", "Remove or fill them"
        )


def count_not_finite(tensor: Tensor) -> int:
    """The number of values that are NaN or infinite."""
    # The smallest and the largest number tell it in a fraction of the time of looking at each; a NaN is both.
    if not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def check_sample(sample: Sample, spec: Spec | None = None, where: str = "sample") -> None:
    """Refuse a sample whose parts contradict each other or, where given, the spec."""
    s = spec
    check_field(f"{where}.input", sample.input, *((s.dim, s.in_times, s.in_channels) if s else ()))
    check_field(f"{where}.query", sample.query, sample.input.coords.shape[-1], None, s.query_channels if s else None)
    if sample.target.ndim != sample.query.values.ndim:
        raise InputError(
            f"`{where}.target` of shape (..., times, queries, channels)",
            str(tuple(sample.target.shape)),
            "Add the missing axis",
        )
    if sample.target.shape[-2] != sample.query.points:
        raise InputError(
            f"one target value per query point in `{where}` ({sample.query.points})",
            f"{sample.target.shape[-2]}",
            "Targets have shape (times, queries, channels)",
        )
    if s and (sample.target.shape[-3] != s.out_times or sample.target.shape[-1] != s.out_channels):
        raise InputError(
            f"`{where}.target` of shape ({s.out_times}, queries, {s.out_channels})",
            str(tuple(sample.target.shape)),
            "All samples share frames and channels",
        )
    check_finite(f"{where}.target", sample.target)
    for name, value in sample.parameters.items():
        check_finite(f"{where}, parameter {name}", value)
    if s:
        check_codes(f"the input of {where}", sample.input.values, s.in_categories)
        check_codes(f"the query of {where}", sample.query.values, s.query_categories)
    if s and s.grid is not None and sample.query.points != math.prod(s.grid):
        raise InputError(
            f"the {math.prod(s.grid)} queries of the grid {s.grid} in `{where}`",
            str(sample.query.points),
            "Give the points of the whole grid, row by row, or no grid",
        )


def check_codes(where: str, values: Tensor, categories: int) -> None:
    """Refuse a last channel that is not a code below `categories`; zero means that it is none."""
    if categories:
        if values.shape[-1] == 0:
            raise InputError(f"a last channel with codes in {where}", "no channel")
        codes = values[..., -1]
        wrong = codes[~((codes == codes.round()) & (codes >= 0) & (codes < categories))]
        if len(wrong):
            raise InputError(f"codes 0 to {categories - 1} in the last channel of {where}", f"{float(wrong[0]):g}")
