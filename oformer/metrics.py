"""Errors between fields, weighted by quadrature, in whatever units they are given: one number per sample.

All of them ignore padding, because a padded point has weight zero.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Values = Float[Tensor, "batch times points channels"]
Weights = Float[Tensor, "batch points"]


def squared(values: Values, weights: Weights) -> Float[Tensor, "batch times channels"]:
    """The mean square over the points, for each step and channel."""
    return torch.einsum("btnc,bn->btc", values.square(), weights.to(values.dtype))


def relative_l2(prediction: Values, target: Values, weights: Weights) -> Float[Tensor, " batch"]:
    """||error|| / ||target|| over all steps, points and channels of a sample: the paper's test metric."""
    return relative(squared(prediction - target, weights).sum((1, 2)), squared(target, weights).sum((1, 2)))


def relative(error: Float[Tensor, "*any"], size: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The ratio of two norms from their squares, finite where the size is zero."""
    return (error / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()


def relative_by_channel(
    error: Float[Tensor, "samples times channels"], size: Float[Tensor, "samples times channels"]
) -> Float[Tensor, " samples"]:
    """||error|| / ||target|| of each sample, each channel in units of its root mean square over all samples.

    Args:
        error: mean squares of the error over the points, from `squared`.
        size: those of the target.
    """
    unit = channel_units(size)
    return relative((error / unit).sum((1, 2)), (size / unit).sum((1, 2)))


def channel_units(size: Float[Tensor, "samples times channels"]) -> Float[Tensor, " channels"]:
    """The mean square of each channel over all samples, from the mean squares of each: channels may differ in unit."""
    return size.mean((0, 1)).clamp_min(torch.finfo(size.dtype).tiny)


@dataclass(frozen=True)
class Resolution:
    """The error of an operator at one number of input points."""

    label: str
    points: int
    error: float
    kind: Literal["trained", "resolution", "sparse"]

    @property
    def title(self) -> str:
        """The label, and whether the operator was trained there."""
        return self.label + " (trained)" * (self.kind == "trained")
