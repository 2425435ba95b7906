"""Inputs and queries that lie far outside of what training has shown: an operator may answer nonsense there."""

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field
from oformer.nn.normalizer import Normalizer
from oformer.nn.shared_grids import expanded
from oformer.statistics import Seen, mean_and_spread

# How far from training an input is said to lie outside: points in sizes of their box; values, means and spreads in
# sizes of their range over the training samples, and more where few samples say little of that range. On test samples
# that are scaled until they leave it, operators of Burgers have errors of 10 % and more, a hundred times the usual.
FAR, FEW = 0.25, 8
# Means and spreads may differ by a share of the largest spread as well, and by some standard errors of a mean over as
# many points at random: fewer sensors are nothing new, and a range may have no size (of means that are all zero).
OFF, ERRORS = 0.05, 3.0
# Values in units of their scale, for weights that were trained before ranges were recorded.
FAR_VALUES = {"channel": 15.0, "scalar": 15.0, "max-abs": 3.0}


def outside(
    input: Field, query: Field, box: Tensor, seen: Seen | None, scale: Normalizer, kind: str, code: bool
) -> list[str]:
    """Descriptions of all points and channels that lie far from those of training.

    Args:
        input: physical, with a batch axis.
        query: likewise.
        box: corners (low and high) of the training points.
        seen: ranges of the training inputs; None for weights that are older than their records.
        scale: the operator's scale of inputs, which then stands for them.
        kind: of that normalization.
        code: whether the last input channel is a code, which has no range.
    """
    found, margin = [], FAR * (box[1] - box[0])

    def corners(points: Tensor) -> tuple[Tensor, Tensor, bool]:
        low, high = (corner.to(box) for corner in _extremes(points))
        return low, high, bool(((low < box[0] - margin) | (high > box[1] + margin)).any())

    for name, field in (("input", input), ("query", query)):
        if corners(field.coords[:1] if expanded(field.coords) else field.coords)[2]:
            low, high, far = corners(field.coords[field.weights > 0])  # padding may lie anywhere
            found += [f"{name} points {_span(low, high)}, in training {_span(*box)}"] * far
    numbers = input.values.shape[-1] - code
    return found + (_unlike_scale(input, scale, kind, numbers) if seen is None else _unlike(input, seen, numbers))


@torch.no_grad()
def _unlike(input: Field, seen: Seen, numbers: int) -> list[str]:
    """Channels whose values, or else whose mean or spread in some sample, lie far beyond those of training."""
    values, means, spreads = (torch.tensor(r).to(input.values) for r in (seen.values, seen.means, seen.spreads))
    mean, spread = mean_and_spread(input, means.mean(-1))
    points = input.weights.sum(-1, keepdim=True) ** 2 / torch.einsum("bp,bp->b", input.weights, input.weights)[:, None]
    slack, none = OFF * spreads[:, 1] + ERRORS * spread / points.sqrt(), torch.zeros_like(spread[:1])

    def far(found: Tensor, ranges: Tensor, slack: Tensor) -> Tensor:
        low, high = ranges.unbind(-1)
        margin = FAR * (1 + FEW / seen.samples) * (high - low) + rounding + slack
        return ((found < low - margin) | (found > high + margin)).any(0)

    # A channel that never changed has no size: what rounding makes of it, in float16 too, is forgiven.
    rounding, extremes = 1e-3 * values.abs().amax(-1), torch.stack(_extremes(input.values))
    if bool(far(extremes, values, none).any()):  # padding may hold anything
        extremes = torch.stack(_extremes(input.values.movedim(1, 2)[input.weights > 0]))
    told: dict[int, str] = {}
    for what, found, ranges, more in (
        ("", extremes, values, none),
        ("the mean of ", mean, means, slack),
        ("the standard deviation of ", spread, spreads, slack),
    ):
        for channel in far(found, ranges, more).nonzero().flatten().tolist():
            span = _span(found[:, channel].amin(), found[:, channel].amax())
            told.setdefault(channel, f"{what}input channel {channel} {span}, in training {_span(*ranges[channel])}")
    return [words for channel, words in sorted(told.items()) if channel < numbers]


def _unlike_scale(input: Field, scale: Normalizer, kind: str, numbers: int) -> list[str]:
    """Channels with values of many units of their scale."""
    limit = FAR_VALUES.get(kind)
    if limit is None or scale.scale.ndim > 1:
        return []
    told, spans = [], torch.stack(_extremes(input.values), 1).to(scale.scale)
    for channel, (span, shift, unit) in enumerate(zip(spans[:numbers], scale.shift, scale.scale, strict=False)):
        if bool(((span - shift).abs() > limit * unit).any()):
            typical = f"{float(shift):.3g} ± {float(unit):.3g}"
            told.append(f"input channel {channel} {_span(*span)}, in training typically {typical}")
    return told


def _extremes(x: Float[Tensor, "*any channels"]) -> tuple[Float[Tensor, "channels"], Float[Tensor, "channels"]]:
    """The smallest and the largest number of each channel."""
    rows, together = x.reshape(-1, x.shape[-1]), 32
    whole = len(rows) // together * together
    if whole:  # a CPU is ten times slower at sums and the like that leave only a few numbers
        side_by_side = rows[:whole].reshape(-1, together * x.shape[-1])
        found = (side_by_side.amin(0), side_by_side.amax(0))
        low, high = (torch.cat((part.view(together, -1), rows[whole:])) for part in found)
    else:
        low = high = rows
    return low.amin(0), high.amax(0)


def _span(low: Tensor, high: Tensor) -> str:
    pairs = zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
    return "from " + ", ".join(f"{a:.3g} to {b:.3g}" for a, b in pairs)
