"""Galerkin and Fourier Transformers (Cao, "Choose a Transformer: Fourier or Galerkin", NeurIPS 2021) with a decoder of
spectral convolutions, for problems on a regular grid.

Each block adds attention without softmax and then a ReLU network to the latents x at points of weight w. In each head,
the coordinates of a point stand beside its query q, its key k and its value v, each `width / heads` channels wide:

    galerkin    u_i = Σ_j w_j (q_i · k_j) v_j           a LayerNorm per head on k and v
    fourier     u_i = Σ_j w_j (q_i · k_j) v_j / √d      a LayerNorm per head on q and k, d channels with coordinates

A linear layer joins the heads. The decoder applies SiLU( W v + F⁻¹( R · F v ) ) twice, where F⁻¹( R · F v ) is the
spectral convolution of `fno.py`, and then two linear layers with SiLU between them at each point.

In the plane attention may work on a coarse grid (`coarse`): four 3 x 3 convolutions and two bilinear interpolations
lead there in place of the linear lift, one convolution between two interpolations leads back.

The published layouts, as trainable numbers (a complex one counts twice):

    Burgers        fourier, width 96, 1 head, 4 blocks       decoder of 48 channels, 16 modes    530,305
    Darcy          galerkin, width 128, 4 heads, 6 blocks    decoder of 32 channels, 12 modes    2,220,829
    Navier-Stokes  galerkin, width 48, 1 head, 4 blocks      decoder of 20 channels, 12 modes    862,049
                   the same, width 96 (OFormer's Table 1)                                        1,566,161

Differs: the released code drops half of the attention matrix (of KᵀV, of QKᵀ) at random in evaluation as well, since
it calls the dropout function without a probability and without the mode of the module. Here no attention matrix is
dropped. Its spectral weights start from a normal distribution; here they start as those of `fno.py`. The intermediate
size of the interpolations is the geometric mean of both grids in points; the released code has a rounded factor.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.models.base import ModelConfig
from oformer.models.fno import SpectralConvolution
from oformer.models.grids import GridModel
from oformer.nn.attention import KINDS
from oformer.nn.feedforward import in_full
from oformer.nn.shared_grids import once_per_grid


@dataclass(frozen=True)
class GalerkinTransformerConfig(ModelConfig):
    """A Galerkin or Fourier Transformer, complete: with a `Spec` it is enough to build one."""

    kind: Literal["galerkin", "fourier"] = "galerkin"
    width: int = 96
    heads: int = 1
    depth: int = 4  # blocks
    feedforward: int = 192  # hidden channels of the ReLU networks
    # Where LayerNorms are: in the heads, as the equations have it, or on the latents after each of the two additions.
    norm: Literal["heads", "latents"] = "heads"
    epsilon: float = 1e-5  # of the LayerNorms
    coords: bool = False  # the coordinates of a point beside its values in the linear lift
    coarse: int | None = None  # points per axis of the grid that attention works on; None: all points
    channels: int = 48  # of the decoder
    modes: int = 16  # frequencies 0 to modes - 1 along each axis, and their negatives
    convolutions: int = 2  # spectral ones, in the decoder
    # A linear layer of latents and coordinates before the spectral convolutions; without, the first reads the latents.
    decoder_coords: bool = False
    head: int = 48  # channels between the two layers that make values
    gain: float = 1e-2  # of the Xavier start of the matrices for queries, keys and values
    diagonal: float = 1e-2  # added to the diagonals of these matrices
    dropout: float = 0.0  # of what a block adds
    feedforward_dropout: float = 0.0  # of the hidden channels of the ReLU networks
    coarse_dropout: float = 0.0  # after each convolution on the way to the coarse grid

    def __post_init__(self) -> None:
        for name in ("width", "heads", "depth", "feedforward", "channels", "modes", "convolutions", "head"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` of at least 1", str(getattr(self, name)))
        if self.width % self.heads:
            raise InputError("a `width` that is a multiple of `heads`", f"{self.width} and {self.heads}")
        if self.coarse is not None and (self.coarse < 2 or self.coords):
            found = f"{self.coarse} points" if self.coarse < 2 else "both"
            raise InputError("`coarse` of at least 2 points per axis, and no `coords` in a lift with it", found)

    def build(self, spec: Spec) -> "GalerkinTransformer":
        """The model for a problem."""
        return GalerkinTransformer(self, spec)


class HeadNorm(nn.Module):
    """A LayerNorm over the channels of each head, with a gain and a bias for each channel of each head."""

    def __init__(self, heads: int, width: int, epsilon: float):
        """Start with gain one and bias zero."""
        super().__init__()
        self.epsilon = epsilon
        self.weight, self.bias = nn.Parameter(torch.ones(heads, width)), nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Float[Tensor, "batch points heads width"]) -> Float[Tensor, "batch points heads width"]:
        """Normalize."""
        return F.layer_norm(x, x.shape[-1:], eps=self.epsilon) * self.weight + self.bias


class PositionalAttention(nn.Module):
    """Attention without softmax whose queries, keys and values hold the coordinates of their points."""

    def __init__(self, config: GalerkinTransformerConfig, dim: int):
        """Build it for points of `dim` coordinates."""
        super().__init__()
        self.kind, self.heads = KINDS[config.kind], config.heads
        each = config.width // config.heads
        self.scale = 1.0 if config.kind == "galerkin" else 1 / math.sqrt(each + dim)
        self.q, self.k, self.v = (nn.Linear(config.width, config.width) for _ in range(3))
        normed = self.kind.normalized if config.norm == "heads" else ()
        self.norms = nn.ModuleDict({name: HeadNorm(config.heads, each, config.epsilon) for name in normed})
        self.out = nn.Linear(config.width + config.heads * dim, config.width)
        for projection in (self.q, self.k, self.v):
            nn.init.xavier_uniform_(projection.weight, gain=config.gain)
            nn.init.zeros_(projection.bias)
            with torch.no_grad():
                projection.weight.diagonal().add_(config.diagonal)

    def forward(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch points width"]:
        """Attend from each point to all."""
        q, k, v = (self._project(name, x, coords) for name in ("q", "k", "v"))
        values = self.kind.attend(q * self.scale, k, v, weights, weights)
        return self.out(values.transpose(1, 2).flatten(2))

    def _project(
        self, name: str, x: Float[Tensor, "batch points width"], coords: Float[Tensor, "batch points dim"]
    ) -> Float[Tensor, "batch heads points both"]:
        """Queries, keys or values: projected, normalized where the kind asks for it, and behind the coordinates."""
        each = self.get_submodule(name)(x).unflatten(-1, (self.heads, -1))
        if name in self.norms:
            each = self.norms[name](each)
        places = coords.to(each.dtype).unsqueeze(2).expand(-1, -1, self.heads, -1)
        return torch.cat([places, each], -1).transpose(1, 2)


class Block(nn.Module):
    """x = x + attention(x); x = x + network(x), each followed by a LayerNorm where `norm` is "latents"."""

    def __init__(self, config: GalerkinTransformerConfig, dim: int):
        """Build it for points of `dim` coordinates."""
        super().__init__()
        self.attention = PositionalAttention(config, dim)
        self.network = nn.Sequential(
            nn.Linear(config.width, config.feedforward),
            nn.ReLU(),
            nn.Dropout(config.feedforward_dropout),
            nn.Linear(config.feedforward, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)
        normed = config.norm == "latents"
        self.norms = nn.ModuleList(
            nn.LayerNorm(config.width, eps=config.epsilon) if normed else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch points width"]:
        """Latents of the next block."""
        x = self.norms[0](x + self.dropout(self.attention(x, coords, weights)))
        return self.norms[1](x + self.dropout(self.network(x)))


class ToCoarse(nn.Module):
    """From values on the grid to latents on the coarse grid; the channels of the last three convolutions are joined."""

    def __init__(self, channels: int, width: int, dropout: float):
        """Build the four convolutions."""
        super().__init__()
        widths = (channels, width, width // 3, width // 3, width - 2 * (width // 3))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in itertools.pairwise(widths)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, v: Float[Tensor, "batch n m channels"], coarse: tuple[int, ...]
    ) -> Float[Tensor, "batch points width"]:
        """Latents at the points of the coarse grid."""
        first, *others = self.convolutions
        v = interpolated(self._next(first, v.movedim(-1, 1)), _between(v.shape[1:3], coarse))
        side_by_side = []
        for convolution in others:
            v = self._next(convolution, v)
            side_by_side.append(v)
        return interpolated(torch.cat(side_by_side, 1), coarse).flatten(2).mT

    def _next(self, convolution: nn.Module, v: Tensor) -> Tensor:
        return F.relu(self.dropout(convolution(v)))


class FromCoarse(nn.Module):
    """From latents on the coarse grid to latents on the grid of the input."""

    def __init__(self, width: int):
        """Build the convolution."""
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(
        self, x: Float[Tensor, "batch points width"], coarse: tuple[int, ...], grid: tuple[int, ...]
    ) -> Float[Tensor, "batch n m width"]:
        """Latents at the points of the grid; SiLU is applied twice, as in the released code."""
        v = interpolated(x.mT.unflatten(2, coarse), _between(grid, coarse))
        return interpolated(F.silu(F.silu(self.convolution(v))), grid).movedim(1, -1)


class SpectralLayer(nn.Module):
    """SiLU( W v + F⁻¹( R · F v ) )."""

    def __init__(self, channels: int, out: int, modes: int, axes: int):
        """Build it for a grid of `axes` axes."""
        super().__init__()
        self.spectral = SpectralConvolution(channels, modes, axes, out)
        self.beside = nn.Linear(channels, out)

    def forward(self, v: Float[Tensor, "batch *grid channels"]) -> Float[Tensor, "batch *grid out"]:
        """Values at the same points."""
        return F.silu(in_full(self.beside(v)) + self.spectral(in_full(v)))


class GalerkinTransformer(GridModel):
    """The model. Works on normalized fields; `Operator` in `models/operator.py` wraps it for physical units."""

    config: GalerkinTransformerConfig

    def __init__(self, config: GalerkinTransformerConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__()
        self.config, self.spec = config, spec
        self.refuse_problem("whose decoder transforms values to Fourier modes", "Train an OFormer")
        assert spec.grid is not None
        if config.coarse is not None and spec.dim != 2:
            found = f"{spec.dim} axes"
            raise InputError(f"a problem in the plane for {self.name} with `coarse`", found, "Leave `coarse` out")
        self._check_modes(spec.grid)
        c, dim, numbers = config, spec.dim, spec.in_times * spec.in_channels
        self.lift: nn.Module = (
            nn.Linear(numbers + dim * c.coords, c.width)
            if c.coarse is None
            else ToCoarse(numbers, c.width, c.coarse_dropout)
        )
        self.blocks = nn.ModuleList(Block(c, dim) for _ in range(c.depth))
        self.finer = None if c.coarse is None else FromCoarse(c.width)
        self.join = nn.Linear(c.width + dim, c.channels) if c.decoder_coords else None
        first = c.channels if c.decoder_coords else c.width
        self.layers = nn.ModuleList(
            SpectralLayer(c.channels if n else first, c.channels, c.modes, dim) for n in range(c.convolutions)
        )
        self.hidden, self.values = nn.Linear(c.channels, c.head), nn.Linear(c.head, spec.out_channels)

    @property
    def frames_per_encoding(self) -> int | None:
        """One, where time marches: each answer is part of the next input."""
        return 1 if self.spec.out_times > 1 else None

    def pieces(self) -> Sequence[nn.Module]:
        """The blocks and the spectral layers."""
        return [*self.blocks, *self.layers]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters before and after the latents that attention leaves."""
        encoder = [*self.lift.parameters(), *self.blocks.parameters()]
        known = {id(p) for p in encoder}
        return {"encoder": encoder, "decoder": [p for p in self.parameters() if id(p) not in known]}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices of the blocks and of the decoder, but the one that makes values."""
        inner = [self.blocks, self.layers, self.hidden, *([] if self.join is None else [self.join])]
        norms = {id(p) for module in self.modules() if isinstance(module, HeadNorm) for p in module.parameters()}
        return [p for module in inner for p in module.parameters() if p.ndim == 2 and id(p) not in norms]

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that are no regular grid, a grid with fewer points than modes, and other queries."""
        super().check(input, query)
        self._check_modes(self.grid_of(input))

    def encode(self, input: Field) -> Float[Tensor, "batch points width"]:
        """Latents at the points that attention works on."""
        grid = self.grid_of(input)
        self._check_modes(grid)
        features = input.values.permute(0, 2, 1, 3).flatten(2)
        coords, weights = input.coords, input.weights
        if self.config.coords:
            features = torch.cat([features, coords.to(features.dtype)], -1)
        coarse = self._coarse
        if coarse is None:
            x = self.lift(features)
        else:
            x = self.lift(features.unflatten(1, grid), coarse)
            coords = once_per_grid(lambda c: interpolated(c.mT.unflatten(2, grid), coarse).flatten(2).mT, coords)
            weights = torch.full_like(coords[..., 0], 1 / math.prod(coarse))
        x = in_full(x)
        for block in self.blocks:
            x = block(x, coords, weights)
        return x

    def answer(
        self, latents: Float[Tensor, "batch points width"], input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch one queries channels"]:
        """Values of one frame at the points of the grid."""
        self.check_queries(input, query)
        if times not in (None, 1):
            wanted = f"one frame from one encoding by {self.name}"
            raise InputError(wanted, f"times={times}", "Call the Operator around it")
        grid, coarse = self.grid_of(input), self._coarse
        v = latents.unflatten(1, grid) if self.finer is None else self.finer(latents, coarse, grid)
        if self.join is not None:
            v = self.join(torch.cat([v, input.coords.to(v.dtype).unflatten(1, grid)], -1))
        for layer in self.layers:
            v = layer(v)
        return self.values(F.silu(self.hidden(v))).flatten(1, self.spec.dim).unsqueeze(1)

    @property
    def _coarse(self) -> tuple[int, ...] | None:
        return None if self.config.coarse is None else (self.config.coarse,) * self.spec.dim

    def _check_modes(self, grid: tuple[int, ...]) -> None:
        """Refuse a grid of too few points for the modes of the decoder."""
        if min(grid) < 2 * self.config.modes:
            raise InputError(
                f"at least {2 * self.config.modes} points along each axis for {self.name} of {self.config.modes} modes",
                " x ".join(map(str, grid)),
                "Give the input on a finer grid, or train with fewer modes",
            )


def interpolated(v: Float[Tensor, "batch channels n m"], sizes: tuple[int, ...]) -> Float[Tensor, "batch channels _ _"]:
    """Values on a grid of other sizes between the same corners, bilinear."""
    return F.interpolate(v, size=sizes, mode="bilinear", align_corners=True)


def _between(grid: Sequence[int], coarse: Sequence[int]) -> tuple[int, ...]:
    """Points per axis half way between two grids: their geometric mean, rounded down."""
    return tuple(math.isqrt(a * b) for a, b in zip(grid, coarse, strict=True))
