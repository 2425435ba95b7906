"""What training minimizes: relative errors, with terms for the derivatives on regular grids.

Differs: the paper names the relative L2 error alone; its released code adds derivative terms (Burgers 1e-3, Darcy 0.1,
Navier-Stokes 0.05), which in two dimensions are relative to each grid row instead of each sample, and trains the
problems on irregular meshes on plain squared errors, averaged over all points of a batch (`by_points`).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch, Field
from oformer.meshes.subsets import inside
from oformer.metrics import squared
from oformer.models.operator import Operator
from oformer.nn.sums import over_points

Kind = Literal["relative-sequence", "relative-step", "squared"]
Boundary = Literal["periodic", "zero"]


@dataclass(frozen=True)
class Region:
    """A part of the plane where the momentum, density times velocity, counts once more and is measured.

    Differs: the released code multiplies the z-scored density and velocity, which is no momentum; `normalized` does so.
    """

    box: tuple[float, float, float, float]  # left, right, bottom, top; its border is outside
    weight: float = 2.0
    velocity: tuple[int, int] = (0, 1)  # channels of the target
    density: int | None = 2  # None: the channels above are momentum already
    products: Literal["physical", "normalized"] = "physical"  # physical ones in mean density times spread of velocity

    def weights(self, query: Field) -> Float[Tensor, "batch queries"]:
        """Those of the points inside, with the sum one."""
        weights = query.weights * inside(query.coords, self.box)
        total = over_points(weights.sum(-1, keepdim=True))
        return weights / total.clamp_min(torch.finfo(weights.dtype).tiny)

    def momentum(self, values: Float[Tensor, "batch times queries channels"]) -> Float[Tensor, "batch times queries 2"]:
        """Of values in whatever units they have."""
        # Not by a list of channels: it would be sent to the device, and a GPU cannot be recorded while it waits.
        moving = torch.stack([values[..., channel] for channel in self.velocity], -1)
        return moving if self.density is None else moving * values[..., self.density, None]

    def error(self, operator: Operator, batch: Batch, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean squared error of the momentum, over both components; values are on the operator's unit scale."""
        if self.products == "physical":
            prediction = operator.to_physical(prediction, batch.query.coords)
            target = operator.to_physical(target, batch.query.coords)
        error = self.momentum(prediction) - self.momentum(target)
        if self.products == "physical":
            shift, scale = operator.target_scale.shift, operator.target_scale.scale
            unit = torch.stack([scale[channel] for channel in self.velocity])
            error = error / (unit if self.density is None else unit * shift[self.density])
        return over_points(squared(error, self.weights(batch.query))).mean()


@dataclass(frozen=True)
class Loss:
    """A loss and its terms."""

    kind: Kind = (
        "relative-sequence"  # per sample over the whole sequence; per step; or plain squares summed over channels
    )
    scale: Literal["physical", "normalized"] = "normalized"
    epsilon: float = 1e-6  # added to the mean square of the target under the root, so that a zero target is no infinity
    derivative: float = 0.0  # weight of the same error of the first derivatives
    derivative_boundary: Boundary = "periodic"
    derivative_rows: bool = False  # the derivative's error relative to each grid row, as released
    region: Region | None = None  # where the momentum counts once more
    by_points: bool = False  # a sample of more points weighs more: the mean is over the points of a batch, as released

    def __post_init__(self) -> None:
        if self.region is not None and self.scale != "normalized":
            raise InputError("the scale `normalized` for a loss with a region", f"`{self.scale}`")

    def __call__(self, operator: Operator, batch: Batch, times: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch and its parts, each a mean over samples."""
        return self.of(operator, batch, operator.predict_normalized(batch.input, batch.query, times))

    def of(self, operator: Operator, batch: Batch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch and its parts, given predictions on the operator's unit scale."""
        prediction, target = operator.on_scale(values, batch, self.scale)
        errors = self.error(prediction, target, batch.query.weights)
        if self.by_points:
            counts = over_points((batch.query.weights > 0).sum(-1).to(errors.dtype))
            errors = errors * (counts / counts.mean()).view(-1, *[1] * (errors.ndim - 1))
        value = errors.mean()
        parts = {"error": value.detach()}
        if self.derivative:
            grid = operator.spec.grid
            if grid is None or batch.query.points != math.prod(grid):
                raise InputError(
                    f"queries on the whole regular grid {grid} for a derivative loss",
                    f"{batch.query.points} points",
                    "Set training.loss.derivative to 0, or leave the grid whole",
                )
            slope = self.slope(prediction, target, grid)
            parts["derivative"] = slope.detach()
            value = value + self.derivative * slope
        if self.region is not None:
            near = self.region.error(operator, batch, prediction, target)
            parts["region"] = near.detach()
            value = value + self.region.weight * near
        return value, parts

    def error(
        self,
        prediction: Float[Tensor, "batch times queries channels"],
        target: Float[Tensor, "batch times queries channels"],
        weights: Float[Tensor, "batch queries"],
    ) -> Float[Tensor, "..."]:
        """The error per sample, or per sample and step."""
        error = over_points(squared(prediction - target, weights))
        if self.kind == "squared":
            return error.sum(-1).mean(-1)
        size = over_points(squared(target, weights))
        axes = (1, 2) if self.kind == "relative-sequence" else (2,)
        return _ratio(error.mean(axes), size.mean(axes), self.epsilon)

    def slope(self, prediction: Tensor, target: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The mean relative error of the first derivatives, summed over the axes."""
        total = prediction.new_zeros(())
        shape = (*prediction.shape[:2], *grid, prediction.shape[-1])
        for axis, n in enumerate(grid):
            # The derivative is linear: differentiate the error once instead of both fields.
            e = difference(prediction.reshape(shape) - target.reshape(shape), 2 + axis, n, self.derivative_boundary)
            y = difference(target.reshape(shape), 2 + axis, n, self.derivative_boundary)
            keep = (-2, -1) if self.derivative_rows else tuple(range(2, 3 + len(grid)))
            if self.kind == "relative-sequence" and not self.derivative_rows:
                keep = (1, *keep)
            if self.kind == "squared":
                total = total + e.square().sum(-1).mean()
            else:
                total = total + _ratio(e.square().mean(keep), y.square().mean(keep), self.epsilon).mean()
        return total


def _ratio(error: Tensor, size: Tensor, epsilon: float) -> Tensor:
    """sqrt(error / size), with a gradient of zero instead of NaN where the error is zero."""
    tiny = torch.finfo(error.dtype).tiny
    return ((error + tiny) / (size + epsilon).clamp_min(tiny)).sqrt()


def difference(values: Tensor, axis: int, points: int, boundary: Boundary) -> Tensor:
    """Central differences along a grid axis of unit length; beyond its ends the field repeats or is zero."""
    ahead, behind = values.roll(-1, axis), values.roll(1, axis)
    if boundary == "zero":
        ahead.narrow(axis, points - 1, 1).zero_()
        behind.narrow(axis, 0, 1).zero_()
    return (ahead - behind) * (points / 2)
