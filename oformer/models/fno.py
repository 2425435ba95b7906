"""FNO: Fourier neural operator (Li et al., "Fourier neural operator for parametric partial differential equations",
ICLR 2021), for problems on a regular grid.

With the values and the coordinates of each point as the channels of v0 after a linear layer, each layer does

    v_{l+1} = σ( W v_l + F⁻¹( R_l · F v_l ) ),

where F is the discrete Fourier transform over the grid and R_l holds a complex matrix between channels for each of the
lowest modes; higher modes pass through W alone. The last layer has no σ. Two linear layers with σ between them make
values of the channels of a point.

Modes are those of the whole domain, whatever the number of points, so that weights serve every resolution: give the
input on another grid, and the answer is on that grid. It is never anywhere else: an FNO has no answer between points.

The published layouts, as trainable numbers (a complex one counts twice):

    1-D, 16 modes, width 64                     549,569     Burgers
    2-D, 12 modes, width 32, 9 cells of padding 2,368,001   Darcy
    2-D, 8 modes, width 20, batch norm          414,517     Navier-Stokes, one frame from ten ("march")
    2-D, 12 modes, width 32, batch norm         2,368,545   the same for large data
    3-D, 8 modes, width 20, batch norm          6,558,537   Navier-Stokes, all frames at once ("block"), 6 of padding
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Spec
from oformer.models.base import ModelConfig
from oformer.models.grids import LayeredGridModel
from oformer.nn.feedforward import ACTIVATIONS, Activation, in_full


@dataclass(frozen=True)
class FNOConfig(ModelConfig):
    """An FNO, complete: with a `Spec` it is enough to build one."""

    width: int = 64
    modes: int = 16  # frequencies 0 to modes - 1 along each axis, and their negatives
    depth: int = 4
    head: int = 128  # channels between the two layers that make values
    activation: Activation = "gelu"
    batch_norm: bool = False  # after each layer, as in the first experiments with Navier-Stokes
    coords: bool = True  # the coordinates of a point beside its values; without, a periodic FNO commutes with shifts
    padding: int = 0  # cells of zeros behind each axis that has no period, time among them
    # Of a problem in time: predict one frame from the latest `in_times` and so on, or all frames at once, with time as
    # one more axis of the grid.
    time: Literal["march", "block"] = "march"

    def __post_init__(self) -> None:
        for name in ("width", "modes", "depth", "head"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` of at least 1", str(getattr(self, name)))
        if self.padding < 0:
            raise InputError("`padding` of zero or more cells", str(self.padding))

    def build(self, spec: Spec) -> "FNO":
        """The model for a problem."""
        return FNO(self, spec)


def convolved(v: Float[Tensor, "batch *grid width"], weight: Tensor, m: int) -> Float[Tensor, "batch *grid out"]:
    """F⁻¹(R · F v), with m modes of each sign along each axis; R has both widths, then real and imaginary parts."""
    grid, axes = v.shape[1:-1], tuple(range(1, v.ndim - 1))
    spectrum = torch.fft.rfftn(v, dim=axes).narrow(axes[-1], 0, m)
    for axis in axes[:-1]:
        high = spectrum.shape[axis] - m
        spectrum = torch.cat([spectrum.narrow(axis, 0, m), spectrum.narrow(axis, high, m)], axis)
    mixed = torch.einsum("b...i,...io->b...o", spectrum, torch.view_as_complex(weight))
    for axis, points in zip(axes[:-1], grid[:-1], strict=True):
        zeros = mixed.new_zeros(*mixed.shape[:axis], points - 2 * m, *mixed.shape[axis + 1 :])
        mixed = torch.cat([mixed.narrow(axis, 0, m), zeros, mixed.narrow(axis, m, m)], axis)
    return torch.fft.irfftn(mixed, s=grid, dim=axes)  # which fills the last axis with zeros


class SpectralConvolution(nn.Module):
    """A convolution with a kernel of few Fourier modes: each mode of the channels times a matrix of its own."""

    def __init__(self, width: int, modes: int, axes: int, out: int | None = None):
        """Draw the matrices of 2 modes along each axis but the last, whose other half follows: values are real.

        Args:
            width: channels of the values that are convolved.
            modes: frequencies 0 to modes - 1 along each axis, and their negatives.
            axes: of the grid.
            out: channels of the result; by default as many.
        """
        super().__init__()
        self.modes = modes
        # Real and imaginary part last, since optimizers and files hold real numbers.
        self.weight = nn.Parameter(torch.empty(*[2 * modes] * (axes - 1), modes, width, out or width, 2))
        nn.init.uniform_(self.weight, 0, 1 / (width * (out or width)))

    def forward(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid out"]:
        """Values at the same points."""
        # torch's compiler has no complex numbers, and warns of them. Not said at the definition: that takes seconds.
        run = torch.compiler.disable(convolved) if torch.compiler.is_compiling() else convolved
        return run(v, self.weight, self.modes)  # pyright: ignore[reportCallIssue]


class FourierLayer(nn.Module):
    """W v + F⁻¹(R · F v), and what follows."""

    def __init__(self, config: FNOConfig, axes: int, last: bool):
        """Build it; the last layer ends without an activation."""
        super().__init__()
        self.spectral = SpectralConvolution(config.width, config.modes, axes)
        self.beside = nn.Linear(config.width, config.width)
        self.norm = nn.BatchNorm1d(config.width) if config.batch_norm else None
        self.activation = None if last else ACTIVATIONS[config.activation]

    def forward(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Latents of the next layer."""
        v = in_full(self.beside(v)) + self.spectral(v)
        if self.norm is not None:
            v = self.norm(v.flatten(0, -2)).view_as(v)
        return v if self.activation is None else self.activation(v)


class FNO(LayeredGridModel):
    """The model. Works on normalized fields; `Operator` in `models/operator.py` wraps it for physical units."""

    config: FNOConfig

    def __init__(self, config: FNOConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__(config, spec, "which transforms values to Fourier modes")
        assert spec.grid is not None
        axes = spec.dim + self.block
        self.lift = nn.Linear(self.features, config.width)
        self.layers = nn.ModuleList(FourierLayer(config, axes, n + 1 == config.depth) for n in range(config.depth))
        self.hidden, self.values = nn.Linear(config.width, config.head), nn.Linear(config.head, spec.out_channels)
        self.padded(spec.grid)

    def transformed(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Latents behind the Fourier layers."""
        for layer in self.layers:
            v = layer(v)
        return v

    def activated(self, hidden: Tensor) -> Tensor:
        """The activation between the two layers that make values."""
        return ACTIVATIONS[self.config.activation](hidden)

    def padded(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The cells along each axis with padding, refused where they are too few for the modes."""
        padding, periodic = self.config.padding, self.spec.periods is not None
        sizes = tuple(points + (0 if periodic else padding) for points in grid)
        if self.block:
            sizes += (self.spec.out_times + padding,)
        if min(sizes) < 2 * self.config.modes:
            raise InputError(
                f"at least {2 * self.config.modes} points along each axis for {self.name} of {self.config.modes} modes",
                " x ".join(map(str, sizes)) + " with padding" * bool(padding),
                "Give the input on a finer grid, or train with fewer modes",
            )
        return sizes
