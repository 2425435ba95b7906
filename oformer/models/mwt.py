"""MWT: multiwavelet operator (Gupta, Xiao and Bogdan, "Multiwavelet-based operator learning for differential
equations", NeurIPS 2021), for problems on a regular grid of one or two dimensions.

On level n, a function has k coefficients s on each of 2ⁿ blocks l: those of the Legendre polynomials of degree below k.
Two neighboring blocks are one block of the level below, with the coefficients s of the polynomials on the whole block,
and the coefficients d of wavelets: piecewise polynomials that are orthogonal to all polynomials of degree below k.

    decomposition      sⁿ_l = H₀ sⁿ⁺¹_2l + H₁ sⁿ⁺¹_2l+1,       dⁿ_l = G₀ sⁿ⁺¹_2l + G₁ sⁿ⁺¹_2l+1
    operator           pⁿ = A dⁿ + B sⁿ,   qⁿ = C dⁿ           on each level;   u⁰ = T s⁰   on the lowest
    reconstruction     uⁿ⁺¹_2l = H₀ᵀ (uⁿ + qⁿ)_l + G₀ᵀ pⁿ_l,   uⁿ⁺¹_2l+1 = H₁ᵀ (uⁿ + qⁿ)_l + G₁ᵀ pⁿ_l

The filters H and G are fixed; together they are an orthogonal matrix. A, B, C and T are learned; A, B and C are the
same on all levels. Each point of the grid is a block of the highest level: a linear layer makes the coefficients of
c channels from its values. Between two multiwavelet layers is a ReLU. Two linear layers with a ReLU between them make
values of the coefficients of a point.

In two dimensions a block has k² coefficients, and the filters are Kronecker products. As published, d then holds the
products of two wavelets alone: the 2k² coefficients of a polynomial along one axis and a wavelet along the other are
dropped on each level.

    axes                            A                  B and C                    T
    1-D                             F                  F                          linear, within each channel
    2-D                             F, ReLU, linear    3 x 3 conv, ReLU, linear   linear
    1-D or 2-D, and time ("block")  F, ReLU, linear    F, ReLU, linear            linear

F multiplies the lowest Fourier modes over the blocks of a level by matrices, as in `fno.py`. Time has Fourier modes and
no wavelets. A grid has 2ⁿ points along each axis; another is padded with zeros to such a size, behind its points, and
refused where it has a period. Other resolutions have more or fewer levels, and so other answers.

The published layouts, as trainable numbers (a complex one counts twice):

    1-D, k 4, c 16, 10 modes, 2 layers, no coordinates   500,137       Korteweg-de Vries; for Burgers none is published
    2-D, k 4, c 4, 12 modes, 4 layers                    9,807,873     Darcy, counted from the published settings
    2-D and time, k 3, c 4, 12 modes, 4 layers,
        batch norm, 20 frames, 10 modes of time          179,186,009   Navier-Stokes to time 30
        batch norm, 40 frames, 12 modes of time          215,017,817   Navier-Stokes to time 50

Differs: on levels with fewer blocks than modes, the published code gives a negative frequency another matrix on each
level, and overwrites some frequencies; here each frequency has one matrix, the same on all levels. The published code
knows Chebyshev polynomials too.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.polynomial import legendre
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.errors import InputError
from oformer.fields import Spec
from oformer.models.base import ModelConfig
from oformer.models.grids import LayeredGridModel
from oformer.nn.feedforward import in_full


@dataclass(frozen=True)
class MWTConfig(ModelConfig):
    """An MWT, complete: with a `Spec` it is enough to build one."""

    polynomials: int = 4  # k: of degrees 0 to k - 1 along each axis of space
    channels: int = 4  # c: functions that are decomposed side by side
    modes: int = 12  # frequencies 0 to modes - 1 along each axis of space, and their negatives
    time_modes: int = 10  # the same along time, where it is an axis; at most those that the frames have
    depth: int = 4
    head: int = 128  # channels between the two layers that make values
    batch_norm: bool = False  # after each layer, as in the experiments with Navier-Stokes
    coords: bool = True  # the coordinates of a point beside its values
    # Of a problem in time: all frames at once, with time as one more axis of the grid, as published; or predict one
    # frame from the latest `in_times` and so on.
    time: Literal["march", "block"] = "block"

    def __post_init__(self) -> None:
        for name in ("polynomials", "channels", "modes", "time_modes", "depth", "head"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` of at least 1", str(getattr(self, name)))

    def build(self, spec: Spec) -> "MWT":
        """The model for a problem."""
        return MWT(self, spec)


def filters(k: int, dim: int = 1) -> Float[np.ndarray, "kinds coefficients halves"]:
    """The filters from the coefficients of 2^dim neighboring blocks to those of their union, as an orthogonal matrix.

    Of 2^dim kinds of coefficients, the first is that of polynomials along all axes (H), the last that of wavelets along
    all axes (G).

    Args:
        k: polynomials along each axis.
        dim: axes of space.
    """
    nodes, weights = legendre.leggauss(k)  # exact for degrees to 2k - 1
    nodes, weights = (nodes + 1) / 2, weights / 2

    def polynomials(x: np.ndarray) -> np.ndarray:
        return legendre.legvander(2 * x - 1, k - 1) * np.sqrt(2 * np.arange(k) + 1)  # orthonormal on [0, 1]

    # H_ij is the integral of φ_i(x) times √2 φ_j(2x - half), which is zero outside its half of [0, 1].
    halves = [(polynomials((nodes + half) / 2).T * weights) @ polynomials(nodes) for half in (0, 1)]
    smooth = np.concatenate(halves, 1) / math.sqrt(2)
    # The wavelets, by Gram-Schmidt from the polynomials of the left half; twice, against rounding.
    rows = smooth
    for left in np.eye(k, 2 * k):
        for _ in range(2):
            left = left - rows.T @ (rows @ left)
        rows = np.concatenate([rows, left[None] / np.linalg.norm(left)])
    all_axes = one = rows.reshape(2, k, 2, k)
    for _ in range(dim - 1):
        kinds, coefficients, blocks, _ = all_axes.shape
        product = np.einsum("aibj,ckdl->acikbdjl", all_axes, one)
        all_axes = product.reshape(2 * kinds, k * coefficients, 2 * blocks, k * coefficients)
    return all_axes.reshape(2**dim, k**dim, 2**dim * k**dim)


def decomposed(
    s: Float[Tensor, "batch *grid numbers"], filters: Float[Tensor, "kinds coefficients halves"], dim: int
) -> Float[Tensor, "kinds batch *coarse numbers"]:
    """The coefficients of each kind on half as many blocks along each axis of space, the first axes of the grid."""
    s = s.unflatten(-1, (-1, filters.shape[1]))
    for axis in range(1, dim + 1):
        s = s.unflatten(axis, (-1, 2)).movedim(axis + 1, -2)
    kinds = F.linear(s.flatten(-dim - 1), filters.flatten(0, 1)).unflatten(-1, filters.shape[:2])
    return in_full(kinds.movedim(-2, 0).flatten(-2))


def reconstructed(
    kinds: Float[Tensor, "kinds batch *coarse numbers"], filters: Float[Tensor, "kinds coefficients halves"], dim: int
) -> Float[Tensor, "batch *grid numbers"]:
    """The coefficients on twice as many blocks along each axis of space: the transpose of `decomposed`."""
    coefficients = filters.shape[1]
    s = kinds.unflatten(-1, (-1, coefficients)).movedim(0, -2).flatten(-2) @ filters.flatten(0, 1)
    s = s.unflatten(-1, (*[2] * dim, coefficients))
    for axis in range(dim, 0, -1):
        s = s.movedim(-2, axis + 1).flatten(axis, axis + 1)
    return in_full(s.flatten(-2))


def convolved(v: Float[Tensor, "batch *grid width"], weight: Tensor) -> Float[Tensor, "batch *grid width"]:
    """F⁻¹(R · F v); R has the modes of each axis, the width twice, then real and imaginary parts.

    Along each axis but the last, the frequencies are 0, 1, ... and then ..., -2, -1; the last has no negative ones. A
    grid with fewer frequencies than R uses the matrices of its own.
    """
    grid, axes = v.shape[1:-1], tuple(range(1, v.ndim - 1))
    matrices, spectrum = torch.view_as_complex(weight), torch.fft.rfftn(v, dim=axes)
    counts = []
    for axis, points in zip(axes[:-1], grid[:-1], strict=True):
        most = matrices.shape[axis - 1] // 2
        counts.append((min(most, (points + 1) // 2), min(most, points // 2)))
        spectrum, matrices = _ends(spectrum, axis, *counts[-1]), _ends(matrices, axis - 1, *counts[-1])
    last = min(matrices.shape[len(grid) - 1], spectrum.shape[axes[-1]])
    spectrum, matrices = spectrum.narrow(axes[-1], 0, last), matrices.narrow(len(grid) - 1, 0, last)
    mixed = torch.einsum("b...i,...io->b...o", spectrum, matrices)
    for axis, points, (low, high) in zip(axes[:-1], grid[:-1], counts, strict=True):
        zeros = mixed.new_zeros(*mixed.shape[:axis], points - low - high, *mixed.shape[axis + 1 :])
        mixed = torch.cat([mixed.narrow(axis, 0, low), zeros, mixed.narrow(axis, low, high)], axis)
    return torch.fft.irfftn(mixed, s=grid, dim=axes)  # which fills the last axis with zeros


def _ends(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    """The first and the last entries along an axis."""
    size = x.shape[axis]
    return x if low + high == size else torch.cat([x.narrow(axis, 0, low), x.narrow(axis, size - high, high)], axis)


class SpectralConvolution(nn.Module):
    """F: each of the lowest Fourier modes over the blocks of a level, times a matrix of its own."""

    def __init__(self, width: int, modes: tuple[int, ...]):
        """Draw the matrices, with the published scale.

        Args:
            width: channels times coefficients.
            modes: of each axis of the grid; each axis but the last has as many negative ones.
        """
        super().__init__()
        # Real and imaginary part last, since optimizers and files hold real numbers.
        self.weight = nn.Parameter(torch.empty(*(2 * m for m in modes[:-1]), modes[-1], width, width, 2))
        if len(modes) == 1:
            nn.init.uniform_(self.weight, 0, 1 / width**2)
        else:
            nn.init.normal_(self.weight, 0, (2 * width * math.prod(modes)) ** -0.5)

    def forward(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Values on the same blocks."""
        # torch's compiler has no complex numbers, and warns of them. Not said at the definition: that takes seconds.
        run = torch.compiler.disable(convolved) if torch.compiler.is_compiling() else convolved
        return run(in_full(v), self.weight)  # pyright: ignore[reportCallIssue]


class LocalConvolution(nn.Module):
    """A convolution with the 3 x 3 blocks around each block, with zeros outside of the grid."""

    def __init__(self, width: int):
        """Build it with a bias."""
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, v: Float[Tensor, "batch rows columns width"]) -> Float[Tensor, "batch rows columns width"]:
        """Values on the same blocks."""
        return self.conv(v.movedim(-1, 1)).movedim(1, -1)


class MultiwaveletLayer(nn.Module):
    """Decomposition down to one block, the learned maps on each level, and reconstruction."""

    filters: Tensor

    def __init__(self, config: MWTConfig, dim: int, modes: tuple[int, ...]):
        """Build it.

        Args:
            config: of the model.
            dim: axes of space.
            modes: of each axis of the grid, time among them where it is an axis.
        """
        super().__init__()
        self.dim, k = dim, config.polynomials
        width = config.channels * k**dim
        kept = torch.tensor(filters(k, dim)[[0, -1]].tolist(), dtype=torch.get_default_dtype())
        self.register_buffer("filters", kept, persistent=False)

        def learned(first: nn.Module) -> nn.Module:
            return first if len(modes) == 1 else nn.Sequential(first, nn.ReLU(), nn.Linear(width, width))

        def near() -> nn.Module:
            return LocalConvolution(width) if dim == len(modes) == 2 else SpectralConvolution(width, modes)

        self.a = learned(SpectralConvolution(width, modes))
        self.b, self.c = learned(near()), learned(near())
        self.lowest = nn.Linear(k, k) if len(modes) == 1 else nn.Linear(width, width)
        if len(modes) > 1:
            nn.init.xavier_normal_(self.lowest.weight)
        self.norm = nn.BatchNorm1d(width) if config.batch_norm else None

    def forward(self, s: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Coefficients of the answer on the same blocks; grids have powers of two along the axes of space."""
        levels = []
        while min(s.shape[1 : 1 + self.dim]) > 1:
            s, d = decomposed(s, self.filters, self.dim)
            levels.append((self.c(d), self.a(d) + self.b(s)))
        s = in_full(self.lowest(s.unflatten(-1, (-1, self.lowest.in_features))).flatten(-2))
        for smooth, detail in reversed(levels):
            s = reconstructed(torch.stack([s + smooth, in_full(detail)]), self.filters, self.dim)
        return s if self.norm is None else self.norm(s.flatten(0, -2)).view_as(s)


class MWT(LayeredGridModel):
    """The model. Works on normalized fields; `Operator` in `models/operator.py` wraps it for physical units."""

    config: MWTConfig

    def __init__(self, config: MWTConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__(config, spec, "which decomposes values by halving the grid")
        assert spec.grid is not None
        if spec.dim > 2:
            raise InputError("a problem in one or two dimensions for MWT", f"{spec.dim}", "Train an FNO or an OFormer")
        modes = (config.modes,) * spec.dim
        if self.block:
            modes += (min(config.time_modes, spec.out_times // 2 + 1),)
        width = config.channels * config.polynomials**spec.dim
        self.lift = nn.Linear(self.features, width)
        self.layers = nn.ModuleList(MultiwaveletLayer(config, spec.dim, modes) for _ in range(config.depth))
        self.hidden, self.values = nn.Linear(width, config.head), nn.Linear(config.head, spec.out_channels)
        for layer in (self.hidden, self.values):
            nn.init.xavier_normal_(layer.weight)
        self.padded(spec.grid)

    def transformed(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Coefficients behind the multiwavelet layers."""
        for n, layer in enumerate(self.layers):
            v = layer(F.relu(v) if n else v)
        return v

    def activated(self, hidden: Tensor) -> Tensor:
        """The ReLU between the two layers that make values."""
        return F.relu(hidden)

    def padded(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The points along each axis with padding to a power of two, refused where an axis has a period."""
        sizes = tuple(max(2, 2 ** (points - 1).bit_length()) for points in grid)
        if self.spec.periods is not None and sizes != grid:
            raise InputError(
                f"2, 4, 8, ... points along each axis for {self.name} over a period, which zeros behind it would break",
                " x ".join(map(str, grid)),
                f"Give the input on a grid of such a size, {' x '.join(map(str, sizes))} for example",
            )
        return sizes + (self.spec.out_times,) * self.block
