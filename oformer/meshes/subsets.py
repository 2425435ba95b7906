"""Some of the points of a field."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import line_weights
from oformer.meshes.voronoi import given_to_nearest

# What the chosen points weigh: their old weights scaled up to sum one; on a line, the half-gaps to their neighbors; or
# their old weights and those of the points left out that are nearest to them.
SubsetWeights = Literal["scaled", "gaps", "cells"]


def usual_weights(spec: Spec) -> SubsetWeights:
    """What some of the points of a problem weigh where nobody says otherwise.

    On a grid they make a sum over the points a quadrature. On a mesh every point weighs the same, small or large as its
    triangles are, and the same is left of them.
    """
    return "gaps" if spec.dim == 1 else "cells" if spec.grid is not None else "scaled"


def keep_points(
    field: Field,
    share: float,
    generator: torch.Generator,
    weights: SubsetWeights = "scaled",
    periods: tuple[float, ...] | None = None,
) -> Field:
    """A random share of each sample's points, the same share for all, other points for each; at least one.

    Of the weights, `gaps` is right on a line, where a sum with half-gaps is the trapezoidal rule. In the plane and in
    space `cells` is: a point that is left out gives its weight to the nearest that is not, so that a sum remains a
    quadrature. `scaled`, the paper's, weighs random points of a grid equally: a Monte-Carlo estimate.

    Args:
        field: a batch; padding is never chosen.
        share: between 0 and 1.
        generator: on the CPU.
        weights: of the points that are left.
        periods: of the domain, for `gaps` and `cells`.
    """
    if weights == "gaps" and field.coords.shape[-1] != 1:
        raise InputError(
            "points on a line to weigh by `gaps`", f"{field.coords.shape[-1]} dimensions", "Weigh them by `cells`"
        )
    # The points of each sample in a random order, padding last; the first of them stay.
    exists = field.weights > 0
    counts = (exists.sum(1, keepdim=True).double() * share).round().clamp_min(1).long()
    keys = torch.rand(field.weights.shape, generator=generator).to(field.weights.device)
    order = keys.masked_fill(~exists, 2.0).argsort(1)
    rank = torch.arange(order.shape[1], device=order.device)
    most = int(counts.max())
    chosen, valid = order[:, :most], rank[:most] < counts
    coords = _gathered(field.coords, chosen)
    index = chosen[:, None, :, None].expand(-1, field.values.shape[1], -1, field.values.shape[-1])
    # Their weights.
    if weights == "gaps":
        kept = line_weights(coords, periods[0] if periods else None, valid)
    else:
        kept = field.weights.gather(1, chosen) * valid
    if weights == "scaled":
        kept = kept / kept.sum(1, keepdim=True)
    if weights == "cells":
        fewest = int(counts.min())
        rest, dropped = order[:, fewest:], rank[fewest:] >= counts
        given = field.weights.gather(1, rest) * dropped
        kept = kept + given_to_nearest(_gathered(field.coords, rest), given, coords, valid, periods)
    return Field(coords, field.values.gather(2, index), kept)


def _gathered(
    coords: Float[Tensor, "batch points dim"], rows: Int[Tensor, "batch rows"]
) -> Float[Tensor, "batch rows dim"]:
    return coords.gather(1, rows.unsqueeze(-1).expand(-1, -1, coords.shape[-1]))


def inside(
    coords: Float[Tensor, "*batch points 2"], box: tuple[float, float, float, float]
) -> Bool[Tensor, "*batch points"]:
    """Which points lie between left and right, bottom and top; the border is outside."""
    x, y = coords.unbind(-1)
    left, right, bottom, top = box
    return (left < x) & (x < right) & (bottom < y) & (y < top)
