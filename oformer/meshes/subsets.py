"""Some of the points of a field."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oformer.fields import Field
from oformer.meshes.grids import line_weights

# What the chosen points weigh: their old weights scaled up to sum one, or, on a line, the half-gaps to their neighbors.
SubsetWeights = Literal["scaled", "gaps"]


def keep_points(
    field: Field,
    share: float,
    generator: torch.Generator,
    weights: SubsetWeights = "scaled",
    periods: tuple[float, ...] | None = None,
) -> Field:
    """A random share of each sample's points, the same share for all, other points for each; at least one.

    Args:
        field: a batch; padding is never chosen.
        share: between 0 and 1.
        generator: on the CPU.
        weights: of the points that are left.
        periods: of the domain, for `gaps`.
    """
    exists = field.weights > 0
    counts = (exists.sum(1, keepdim=True).double() * share).round().clamp_min(1).long()
    keys = torch.rand(field.weights.shape, generator=generator).to(field.weights.device)
    order = keys.masked_fill(~exists, 2.0).argsort(1)[:, : int(counts.max())]
    rank = torch.arange(order.shape[1], device=order.device)
    valid = rank < counts
    coords = field.coords.gather(1, order.unsqueeze(-1).expand(-1, -1, field.coords.shape[-1]))
    index = order[:, None, :, None].expand(-1, field.values.shape[1], -1, field.values.shape[-1])
    if weights == "gaps":
        kept = line_weights(coords, periods[0] if periods else None, valid)
    else:
        kept = field.weights.gather(1, order) * valid
        kept = kept / kept.sum(1, keepdim=True)
    return Field(coords, field.values.gather(2, index), kept)


def inside(
    coords: Float[Tensor, "*batch points 2"], box: tuple[float, float, float, float]
) -> Bool[Tensor, "*batch points"]:
    """Which points lie between left and right, bottom and top; the border is outside."""
    x, y = coords.unbind(-1)
    left, right, bottom, top = box
    return (left < x) & (x < right) & (bottom < y) & (y < top)
