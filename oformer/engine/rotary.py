"""Rotary encoding, faster: angles once per grid, also under torch.compile, and in a kernel on a GPU."""

import functools
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.gpu import kernels_on
from oformer.nn.rotary import Rotary, Tables
from oformer.nn.shared_grids import expanded, once_per_grid


def _turns(coords: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of coordinates times frequencies (dim, pairs)."""
    angles = (coords.unsqueeze(-1) * frequencies).flatten(-2)
    return angles.cos(), angles.sin()


@torch.library.custom_op("oformer::turns", mutates_args=())
def turns(coords: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """`_turns` as an opaque custom op, so that torch.compile does not compute the angles again for each head."""
    kernels = _kernels(coords.device)
    if kernels is None or coords.dtype != torch.float32:
        return _turns(coords, frequencies)
    return kernels.turns(coords, frequencies)


@turns.register_fake
def _(coords: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*coords.shape[:-1], frequencies.numel())
    return coords.new_empty(shape), coords.new_empty(shape)


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    return kernels_on(device, "rotary")


class FusedRotary(Rotary):
    """`Rotary` whose tables torch.compile takes as they are, and which rotates values that samples share once."""

    def tables(self, coords: Float[Tensor, "batch points dim"]) -> Tables:
        """Cosine and sine of every angle, in float32 or better."""
        if not torch.compiler.is_dynamo_compiling() or coords.requires_grad:  # the custom op has no derivative
            return super().tables(coords)
        with torch.autocast(coords.device.type, enabled=False):
            exact = coords.to(torch.promote_types(coords.dtype, torch.float32))
            double = exact.dtype == torch.float64
            frequencies = self._exact.to(exact.device) if double else self.frequencies.float()
            cos, sin = turns(exact[:1] if expanded(exact) else exact, frequencies)
            return cos.expand(len(exact), -1, -1), sin.expand(len(exact), -1, -1)

    def forward(
        self, x: Float[Tensor, "batch points heads width"], tables: Tables
    ) -> Float[Tensor, "batch points heads width"]:
        """Rotate; once where the samples of a batch share both values and coordinates."""
        if not (expanded(x) and expanded(tables[0])):
            return super().forward(x, tables)
        cos, sin = (table[:1] for table in tables)
        return once_per_grid(lambda one: super(FusedRotary, self).forward(one, (cos, sin)), x)
