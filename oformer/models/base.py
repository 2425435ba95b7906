"""What every model answers to, and the operator that wraps it: physical units outside, unit scale inside.

Everything outside `Operator` speaks physical units. The statistics are buffers, saved with the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Batch, Field, Sample, Spec, check_field
from oformer.nn.normalizer import GridNormalizer, Normalizer
from oformer.nn.rotary import once_per_grid

Values = Literal["none", "scalar", "channel", "max-abs", "pointwise"]


class ModelConfig(Protocol):
    """A configuration that can build its model."""

    def build(self, spec: Spec) -> "OperatorModel":
        """The model for a problem of the given shape."""
        ...


class OperatorModel(nn.Module):
    """What a model promises: values at the queries from values at the input points, both on unit scale."""

    spec: Spec
    config: Any  # a ModelConfig; each model names its own

    @property
    def queries_independent(self) -> bool:
        """Whether a query's answer is the same whichever other queries are asked with it."""
        raise NotImplementedError

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Named groups of parameters that training may treat apart (clipping)."""
        raise NotImplementedError

    def encode(self, input: Field) -> Tensor:
        """What is computed of the input once, however many queries follow."""
        raise NotImplementedError

    def answer(self, latents: Tensor, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values of shape (batch, times, queries, channels), from what `encode` gave."""
        raise NotImplementedError

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values at the query points for `times` steps (the problem's own number where not given)."""
        return self.answer(self.encode(input), input, query, times)


@dataclass(frozen=True)
class Normalization:
    """How an operator scales what goes in and out."""

    input: Values = "channel"
    target: Values = "channel"
    coords: Literal["as-is", "from-zero", "unit-box"] = "as-is"
    boundary: Literal["free", "zero"] = "free"  # zero: the answer vanishes on the faces of the training box

    def normalizer(self, kind: Values, channels: int, spec: Spec) -> Normalizer:
        """An empty normalizer of the right shape, for statistics to be fitted or loaded into."""
        if kind != "pointwise":
            return Normalizer(channels)
        if spec.grid is None:
            raise InputError("a regular grid for pointwise normalization", "scattered points", "Use `channel`")
        return GridNormalizer(channels, spec.grid)


class Operator(nn.Module):
    """A model with its normalization: physical fields in, physical values out."""

    origin: Tensor
    extent: Tensor
    box: Tensor

    def __init__(self, model: OperatorModel, normalization: Normalization):
        """Wrap a model; statistics are the identity until `fit` or a checkpoint sets them."""
        super().__init__()
        self.model, self.normalization = model, normalization
        spec = model.spec
        self.input_scale = normalization.normalizer(normalization.input, spec.in_channels, spec)
        self.target_scale = normalization.normalizer(normalization.target, spec.out_channels, spec)
        self.register_buffer("origin", torch.zeros(spec.dim))
        self.register_buffer("extent", torch.ones(spec.dim))
        # The box of the training points, for zero boundaries and for saying when a query lies outside.
        self.register_buffer("box", torch.tensor([[0.0] * spec.dim, [1.0] * spec.dim]))
        # The type the model computes in under autocast; scaling, statistics and losses stay in float32.
        self.autocast: torch.dtype | None = None

    @property
    def spec(self) -> Spec:
        """The shape of the problem it was built for."""
        return self.model.spec

    def fit(self, samples: Iterable[Sample]) -> "Operator":
        """Set the statistics from the training samples, in one pass."""
        s, n = self.spec, self.normalization
        inputs, targets = _Moments(n.input), _Moments(n.target)
        low = torch.full((s.dim,), torch.inf, dtype=torch.float64)
        high, query_low, query_high = -low, low, -low
        for sample in samples:
            inputs.add(sample.input.values)
            targets.add(sample.target)
            low, high = _grow(low, high, sample.input.coords)
            query_low, query_high = _grow(query_low, query_high, sample.query.coords)
        inputs.store(self.input_scale, low, high, skip=s.in_channels - 1 if s.in_categories else None)
        targets.store(self.target_scale, query_low, query_high)
        if n.coords != "as-is":
            self.origin.copy_(low)
        if n.coords == "unit-box":
            self.extent.copy_(torch.where(high > low, high - low, torch.ones_like(low)))
        self.box.copy_(torch.stack([torch.minimum(low, query_low), torch.maximum(high, query_high)]))
        return self

    def check(self, input: Field, query: Field) -> None:
        """Refuse fields that this operator was not built for."""
        s = self.spec
        check_field("input", input, s.dim, s.in_times, s.in_channels)
        check_field("query", query, s.dim, None, s.query_channels)

    def normalized(self, input: Field, query: Field) -> tuple[Field, Field]:
        """Input and query on unit scale."""
        return (
            Field(self._coords(input.coords), self.input_scale(input.values, input.coords), input.weights),
            Field(self._coords(query.coords), query.values, query.weights),
        )

    def _coords(self, coords: Tensor) -> Tensor:
        return once_per_grid(lambda x: (x - self.origin) / self.extent, coords)

    def to_physical(
        self,
        values: Float[Tensor, "batch times queries channels"],
        coords: Float[Tensor, "batch queries dim"],
    ) -> Float[Tensor, "batch times queries channels"]:
        """What the model said, in physical units, with the boundary value where one is imposed."""
        values = self.target_scale.inverse(values, coords)
        if self.normalization.boundary == "zero":
            tolerance = 1e-4 * (self.box[1] - self.box[0])
            edge = ((coords <= self.box[0] + tolerance) | (coords >= self.box[1] - tolerance)).any(-1)
            values = values.masked_fill(edge[:, None, :, None], 0.0)
        return values

    def forward(
        self, input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch times queries channels"]:
        """Physical values at the query points."""
        return self.to_physical(self.predict_normalized(input, query, times), query.coords)

    def predict_normalized(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """What the model says of physical fields, on its own unit scale, in float32 or better."""
        input, query = self.normalized(input, query)
        with torch.autocast(input.coords.device.type, self.autocast, enabled=self.autocast is not None):
            values = self.model(input, query, times)
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def compare(self, batch: Batch, times: int, scale: Literal["physical", "normalized"]) -> tuple[Tensor, Tensor]:
        """Prediction and target of the first `times` frames on the scale that a loss asks for."""
        target = batch.target[:, :times]
        prediction = self.predict_normalized(batch.input, batch.query, times)
        if scale == "normalized":
            return prediction, self.target_scale(target, batch.query.coords)
        return self.to_physical(prediction, batch.query.coords), target


def _grow(low: Tensor, high: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
    """The box enlarged to hold the points."""
    return torch.minimum(low, coords.amin(0).double()), torch.maximum(high, coords.amax(0).double())


class _Moments:
    """Mean, spread and largest magnitude, gathered sample by sample in float64.

    Deviations are taken from the first sample's mean, so that a large common offset costs no digits.
    """

    def __init__(self, kind: Values):
        self.kind = kind
        self.count = 0.0
        self.reference = self.total = self.squares = self.largest = torch.zeros(())

    def add(self, values: Float[Tensor, "times points channels"]) -> None:
        values = values.double()
        if self.kind == "none":
            return
        axes = (0,) if self.kind == "pointwise" else (0, 1)
        if not self.count:
            self.reference = values.mean(axes)
        elif self.kind == "pointwise" and values.shape[1:] != self.reference.shape:
            raise InputError(
                "the same grid in every sample for pointwise normalization",
                "different point counts",
                "Use `channel`",
            )
        deviation = values - self.reference
        self.count += values.shape[0] * (1 if self.kind == "pointwise" else values.shape[1])
        self.total = self.total + deviation.sum(axes)
        self.squares = self.squares + deviation.square().sum(axes)
        self.largest = torch.maximum(self.largest, values.abs().amax((0, 1)))

    def store(self, normalizer: Normalizer, low: Tensor, high: Tensor, skip: int | None = None) -> None:
        if self.kind == "none":
            return
        if not self.count:
            raise InputError("at least one training sample", "none")
        offset = self.total / self.count
        mean = self.reference + offset
        variance = (self.squares / self.count - offset.square()).clamp_min(0)
        if self.kind == "scalar":
            # All channels share one scale: the spread within channels and between their means.
            variance = (variance + (mean - mean.mean()).square()).mean().expand_as(mean)
            mean = mean.mean().expand_as(mean)
        shift, scale = mean, variance.sqrt()
        if self.kind == "max-abs":
            shift, scale = torch.zeros_like(mean), self.largest
        if self.kind == "pointwise":
            scale = scale + 1e-5  # the reference's guard where the field never changes
        scale = torch.where(scale > 1e-12 * self.largest.clamp_min(1e-300), scale, torch.ones_like(scale))
        if skip is not None:  # a code is not a number
            shift, scale = shift.clone(), scale.clone()
            shift[..., skip], scale[..., skip] = 0.0, 1.0
        normalizer.shift.copy_(shift)
        normalizer.scale.copy_(scale)
        if isinstance(normalizer, GridNormalizer):
            normalizer.origin.copy_(low)
            normalizer.extent.copy_(torch.where(high > low, high - low, torch.ones_like(low)))
