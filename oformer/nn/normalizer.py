"""Affine maps between physical units and unit scale; their statistics are buffers, saved with the weights."""

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Normalizer(nn.Module):
    """(x - shift) / scale for each channel, and back."""

    shift: Tensor
    scale: Tensor

    def __init__(self, channels: int):
        """Start as the identity."""
        super().__init__()
        self.register_buffer("shift", torch.zeros(channels))
        self.register_buffer("scale", torch.ones(channels))

    def statistics(self, coords: Float[Tensor, "batch points dim"]) -> tuple[Tensor, Tensor]:
        """Shift and scale, broadcastable to (batch, times, points, channels)."""
        return self.shift, self.scale

    def forward(
        self, values: Float[Tensor, "batch times points channels"], coords: Float[Tensor, "batch points dim"]
    ) -> Float[Tensor, "batch times points channels"]:
        """From physical units to unit scale."""
        shift, scale = self.statistics(coords)
        return (values - shift) / scale

    def inverse(
        self, values: Float[Tensor, "batch times points channels"], coords: Float[Tensor, "batch points dim"]
    ) -> Float[Tensor, "batch times points channels"]:
        """From unit scale to physical units, in float32 or better."""
        shift, scale = self.statistics(coords)
        return values.to(torch.promote_types(values.dtype, shift.dtype)) * scale + shift


class GridNormalizer(Normalizer):
    """A shift and a scale for each grid point (the reference's Darcy normalizer), interpolated between the points.

    Between grid points the statistics are multilinear, outside the grid those of the nearest edge, so that an operator
    trained on one grid can be fed and asked anywhere.
    """

    origin: Tensor
    extent: Tensor

    def __init__(self, channels: int, grid: tuple[int, ...]):
        """Start as the identity on a grid over the unit box."""
        super().__init__(channels)
        self.grid = grid
        self.register_buffer("shift", torch.zeros(math.prod(grid), channels))
        self.register_buffer("scale", torch.ones(math.prod(grid), channels))
        self.register_buffer("origin", torch.zeros(len(grid)))
        self.register_buffer("extent", torch.ones(len(grid)))

    def statistics(self, coords: Float[Tensor, "batch points dim"]) -> tuple[Tensor, Tensor]:
        """Shift and scale at the given points."""
        position = (coords - self.origin) / self.extent
        lower, fraction = [], []
        for axis, n in enumerate(self.grid):
            along = (position[..., axis] * (n - 1)).clamp(0, n - 1)
            # A grid point computed in float32 may fall an ulp short of its cell: round what is a grid point.
            past = (along - along.round()).detach()  # a constant, or the slope would be lost
            along = along - torch.where(past.abs() < 1e-4, past, 0.0)
            cell = along.floor().clamp(max=max(n - 2, 0))
            lower.append(cell.long())
            fraction.append(along - cell)
        shift = scale = coords.new_zeros((*coords.shape[:-1], self.shift.shape[-1]))
        for corner in itertools.product((0, 1), repeat=len(self.grid)):
            index = torch.zeros_like(lower[0])
            weight = torch.ones_like(fraction[0])
            for axis, (n, upper) in enumerate(zip(self.grid, corner, strict=True)):
                index = index * n + (lower[axis] + upper).clamp(max=n - 1)
                weight = weight * (fraction[axis] if upper else 1 - fraction[axis])
            shift = shift + weight.unsqueeze(-1) * self.shift[index]
            scale = scale + weight.unsqueeze(-1) * self.scale[index]
        return shift.unsqueeze(1), scale.unsqueeze(1)
