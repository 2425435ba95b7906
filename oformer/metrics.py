"""Errors between fields, weighted by quadrature, in whatever units they are given: one number per sample.

All of them ignore padding, because a padded point has weight zero.
"""

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
    error, size = squared(prediction - target, weights).sum((1, 2)), squared(target, weights).sum((1, 2))
    return (error / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
