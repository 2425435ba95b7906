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
from torch.nn import functional as F

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.models.base import ModelConfig
from oformer.models.grids import GridModel
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


def convolved(v: Float[Tensor, "batch *grid width"], weight: Tensor, m: int) -> Float[Tensor, "batch *grid width"]:
    """F⁻¹(R · F v), with m modes of each sign along each axis; R has the width twice, then real and imaginary parts."""
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

    def __init__(self, width: int, modes: int, axes: int):
        """Draw the matrices of 2 modes along each axis but the last, whose other half follows: values are real."""
        super().__init__()
        self.modes = modes
        # Real and imaginary part last, since optimizers and files hold real numbers.
        self.weight = nn.Parameter(torch.empty(*[2 * modes] * (axes - 1), modes, width, width, 2))
        nn.init.uniform_(self.weight, 0, 1 / width**2)

    def forward(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
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


class FNO(GridModel):
    """The model. Works on normalized fields; `Operator` in `models/base.py` wraps it for physical units."""

    config: FNOConfig

    def __init__(self, config: FNOConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__()
        self.config, self.spec = config, spec
        _check_problem(config, spec)
        assert spec.grid is not None
        self.block = config.time == "block" and spec.out_times > 1
        places = (spec.dim + self.block) if config.coords else 0
        axes = spec.dim + self.block
        self.lift = nn.Linear(spec.in_times * spec.in_channels + places, config.width)
        self.layers = nn.ModuleList(FourierLayer(config, axes, n + 1 == config.depth) for n in range(config.depth))
        self.hidden, self.values = nn.Linear(config.width, config.head), nn.Linear(config.head, spec.out_channels)
        self._padded(spec.grid)

    @property
    def mixes_samples(self) -> bool:
        """Whether in training the samples of a batch feel each other."""
        return self.config.batch_norm

    @property
    def recomputes(self) -> bool:
        """Yes, but for batch norms, which would count each batch twice."""
        return not self.config.batch_norm

    @property
    def frames_per_encoding(self) -> int | None:
        """One, where it marches: each answer is part of the next input."""
        return 1 if self.spec.out_times > 1 and not self.block else None

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters before and after the latents."""
        decoder = [*self.hidden.parameters(), *self.values.parameters()]
        return {"encoder": [*self.lift.parameters(), *self.layers.parameters()], "decoder": decoder}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices beside the modes, and the first of the two that make values."""
        return [p for p in [*self.layers.parameters(), self.hidden.weight] if p.ndim == 2]

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that are no regular grid, a grid with fewer points than modes, and other queries."""
        super().check(input, query)
        self._padded(self.grid_of(input))

    def encode(self, input: Field) -> Float[Tensor, "batch points *times width"]:
        """Latents at the points of the grid, at all times where time is one of its axes."""
        grid = self.grid_of(input)
        padded = self._padded(grid)
        features = input.values.permute(0, 2, 1, 3).flatten(2)
        if self.config.coords:
            features = torch.cat([features, input.coords.to(features.dtype)], -1)
        if self.block:
            features = self._over_time(features)
        v = in_full(self.lift(features)).unflatten(1, grid)
        sizes = v.shape[1:-1]
        behind = [more - points for more, points in zip(padded, sizes, strict=True)]
        # From the last axis, which is the channels, to the first: cells before it and cells behind it.
        v = F.pad(v, (0, 0, *(cells for count in reversed(behind) for cells in (0, count))))
        for layer in self.layers:
            v = self._sparing(layer)(v)
        for axis, points in enumerate(sizes, 1):
            v = v.narrow(axis, 0, points)
        return v.flatten(1, self.spec.dim)

    def answer(
        self, latents: Float[Tensor, "batch points *times width"], input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch _ points channels"]:
        """Values at the points of the grid: of the next frame where it marches, or of the first `times` of all."""
        self.check_queries(input, query)
        most = self.spec.out_times if self.block else 1
        times = most if times is None else times
        if times > most:
            raise InputError(
                f"at most {most} frame(s) from one encoding by {self.name}",
                f"times={times}",
                "It predicts a block of frames as long as in training" if self.block else "Call the Operator around it",
            )
        values = self.values(ACTIVATIONS[self.config.activation](self.hidden(latents)))
        return values.movedim(2, 1)[:, :times] if self.block else values.unsqueeze(1)

    def _over_time(self, features: Float[Tensor, "batch points numbers"]) -> Float[Tensor, "batch points times more"]:
        """The features of a point at each time of training, and the time as a fraction of the last."""
        times = self.spec.out_times
        features = features.unsqueeze(2).expand(-1, -1, times, -1)
        if not self.config.coords:
            return features
        time = torch.arange(1, times + 1, dtype=features.dtype, device=features.device) / times
        return torch.cat([features, time[:, None].expand(*features.shape[:-1], 1)], -1)

    def _padded(self, grid: tuple[int, ...]) -> tuple[int, ...]:
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


def _check_problem(config: FNOConfig, spec: Spec) -> None:
    """Refuse problems that the published model has no place for."""
    if spec.grid is None:
        raise InputError(
            "a problem on a regular grid for FNO, which transforms values to Fourier modes",
            "scattered points",
            "Train an OFormer, or say what grid the points form: PointDataset.from_arrays(..., grid=(64, 64))",
        )
    if spec.in_categories or spec.query_channels:
        raise InputError(
            "values alone at the points of a problem for FNO",
            f"{spec.in_categories} categories in the input and {spec.query_channels} query features",
            "Train an OFormer",
        )
    if spec.out_times > 1 and config.time == "march" and spec.in_channels != spec.out_channels:
        raise InputError(
            "an answer with the channels of the input for FNO that marches on its own frames",
            f"{spec.in_channels} channels in, {spec.out_channels} out",
            'Set time to "block"',
        )
