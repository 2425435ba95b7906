"""Rotary position encoding of real coordinates (paper, section 3.2), in one, two or three dimensions.

A pair of channels is turned by an angle proportional to the coordinate, so that the product of a rotated query and a
rotated key depends on the difference of their coordinates alone. The channels are shared out equally among the axes.

Differs: the paper multiplies coordinates by the number of points; the released code by a number of its own for each
layer (`multiplier`). Neither is periodic; `integer` frequencies are our addition for periodic domains, and `uniform`
ones for others: a ladder turns two thirds of the channels by less than half a cycle over the whole domain.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.nn.shared_grids import once_per_grid

Frequencies = Literal["ladder", "integer", "uniform"]
Tables = tuple[Float[Tensor, "batch points angles"], Float[Tensor, "batch points angles"]]


class Appended(nn.Module):
    """Appends the coordinates to each head of queries and keys: the paper's alternative to rotary encoding.

    Differs: the released code appends them to values too.
    """

    def tables(self, coords: Float[Tensor, "batch points dim"]) -> Float[Tensor, "batch points dim"]:
        """The coordinates themselves."""
        return coords

    def forward(
        self, x: Float[Tensor, "batch points heads width"], tables: Float[Tensor, "batch points dim"]
    ) -> Float[Tensor, "batch points heads _"]:
        """Channels, then coordinates; q · k grows by the product of the coordinates."""
        return torch.cat([x, tables.to(x.dtype).unsqueeze(2).expand(-1, -1, x.shape[2], -1)], -1)


class Rotary(nn.Module):
    """Turns channel pairs by angles that grow with the coordinates."""

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        width: int,
        multiplier: float = 1.0,
        frequencies: Frequencies = "ladder",
        periods: tuple[float, ...] | None = None,
        modes: int = 32,
    ):
        """Prepare the frequencies.

        Args:
            dim: number of coordinates.
            width: channels to rotate; a multiple of 2 * dim.
            multiplier: how fast the angles grow, the paper's lambda.
            frequencies: `ladder`, the geometric ladder 10000^(-2l/width) of the released code; or `integer`, whole
                cycles per period (0, 1, ..., modes-1, repeated over the pairs), exact on periodic domains; or
                `uniform`, as many half cycles per unit of the coordinates.
            periods: the period along each axis, needed for `integer`.
            modes: how many different frequencies `integer` and `uniform` have.
        """
        super().__init__()
        if width % (2 * dim):
            raise InputError(
                f"a head width that is a multiple of {2 * dim} for {dim}-D rotary encoding",
                str(width),
                "Choose another width",
            )
        pairs = width // (2 * dim)
        if frequencies == "ladder":
            base = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
            per_axis = [base * multiplier] * dim
        elif frequencies == "uniform":
            per_axis = [torch.arange(pairs, dtype=torch.float64) % modes * (multiplier * math.pi)] * dim
        else:
            if periods is None:
                raise InputError(
                    "a periodic domain for integer rotary frequencies",
                    "one without periods",
                    "Use `ladder` frequencies",
                )
            if multiplier != int(multiplier):
                raise InputError(
                    "a whole multiplier with integer rotary frequencies",
                    str(multiplier),
                    "Others would break the period",
                )
            cycles = torch.arange(pairs, dtype=torch.float64) % modes
            per_axis = [cycles * multiplier * (2 * math.pi / period) for period in periods]
        # Rebuilt from the configuration, so it is not part of the weights. The exact copy is no buffer: some devices
        # have no float64.
        self._exact = torch.stack(per_axis)
        self.register_buffer("frequencies", self._exact.float(), persistent=False)

    def tables(self, coords: Float[Tensor, "batch points dim"]) -> Tables:
        """Cosine and sine of every angle, differentiable by the coordinates.

        Phases reach tens of thousands of radians, so they are float32 or better under any autocast.
        """
        with torch.autocast(coords.device.type, enabled=False):
            exact = coords.to(torch.promote_types(coords.dtype, torch.float32))
            angles = once_per_grid(self._angles, exact)
            return once_per_grid(torch.cos, angles), once_per_grid(torch.sin, angles)

    def _angles(self, coords: Float[Tensor, "batch points dim"]) -> Float[Tensor, "batch points angles"]:
        """Each coordinate times each frequency of its axis."""
        double = coords.dtype == torch.float64
        frequencies = self._exact.to(coords.device) if double else self.frequencies.float()
        return (coords.unsqueeze(-1) * frequencies).flatten(-2)

    def forward(
        self, x: Float[Tensor, "batch points heads width"], tables: Tables
    ) -> Float[Tensor, "batch points heads width"]:
        """Rotate; channel l of an axis is paired with channel l + half, as in the released code."""
        dim, pairs = self.frequencies.shape
        cos, sin = (table.unflatten(-1, (dim, pairs)).unsqueeze(2) for table in tables)
        first, second = x.unflatten(-1, (dim, 2, pairs)).unbind(-2)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -2)
        return turned.flatten(-3).to(x.dtype)
