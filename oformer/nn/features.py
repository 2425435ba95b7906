"""Random Fourier features (paper, section 3.3): a query point becomes sines and cosines of random waves."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RandomFourier(nn.Module):
    """[sin(2 pi x B), cos(2 pi x B)] with a frozen Gaussian matrix B, saved with the weights."""

    directions: Tensor

    def __init__(self, dim: int, features: int, sigma: float):
        """Draw B.

        Args:
            dim: number of coordinates.
            features: number of waves; the output has twice as many channels.
            sigma: standard deviation of the entries of B, the scale of the waves.
        """
        super().__init__()
        self.register_buffer("directions", torch.randn(dim, features) * sigma)

    def forward(self, coords: Float[Tensor, "batch points dim"]) -> Float[Tensor, "batch points channels"]:
        """Sines first, then cosines; phases in float32 or better under any autocast."""
        with torch.autocast(coords.device.type, enabled=False):
            exact = coords.to(torch.promote_types(coords.dtype, torch.float32))
            phases = 2 * math.pi * (exact @ self.directions.to(exact.dtype))
            return torch.cat([phases.sin(), phases.cos()], -1)
