"""The operator around a model: physical units outside, unit scale inside.

Everything outside `Operator` speaks physical units. The statistics are buffers, saved with the weights.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.checks import check_field
from oformer.errors import InputError
from oformer.fields import Batch, Field, Sample, Spec
from oformer.models.base import OperatorModel
from oformer.models.outside import outside
from oformer.nn.feedforward import in_full
from oformer.nn.normalizer import GridNormalizer, Normalizer
from oformer.nn.shared_grids import once_per_grid
from oformer.statistics import Moments, Seen, SeenSoFar

Values = Literal["none", "scalar", "channel", "max-abs", "pointwise"]
SUM = 1e-3  # weights sum to one but for rounding


@dataclass(frozen=True)
class Normalization:
    """How an operator scales what goes in and out."""

    input: Values = "channel"
    target: Values = "channel"
    coords: Literal["as-is", "from-zero", "unit-box"] = "unit-box"
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
        if model.needs_period and normalization.coords == "unit-box":
            raise InputError(
                "coordinates that keep their period, for integer rotary frequencies or for query.local",
                "`unit-box`, which stretches a periodic grid by a cell",
                "Set normalization.coords to `as-is`",
            )
        self.model, self.normalization = model, normalization
        spec = model.spec
        self.input_scale = normalization.normalizer(normalization.input, spec.in_channels, spec)
        self.target_scale = normalization.normalizer(normalization.target, spec.out_channels, spec)
        self.register_buffer("origin", torch.zeros(spec.dim))
        self.register_buffer("extent", torch.ones(spec.dim))
        # The box of the training points, for zero boundaries and for saying when a query lies outside.
        self.register_buffer("box", torch.tensor([[0.0] * spec.dim, [1.0] * spec.dim]))
        # What the inputs of training were like; None for weights that are older than this.
        self.seen: Seen | None = None

    @property
    def spec(self) -> Spec:
        """The shape of the problem it was built for."""
        return self.model.spec

    def fit(self, samples: Iterable[Sample]) -> "Operator":
        """Set the statistics from the training samples, in one pass."""
        s, n = self.spec, self.normalization
        inputs, targets, seen = Moments(n.input == "pointwise"), Moments(n.target == "pointwise"), SeenSoFar()
        low = torch.full((s.dim,), torch.inf, dtype=torch.float64)
        high, query_low, query_high = -low, low, -low
        for sample in samples:
            self.model.check(sample.input.batched(), sample.query.batched())
            inputs.add(sample.input.values)
            seen.add(sample.input)
            targets.add(sample.target)
            low, high = _grow(low, high, sample.input.coords)
            query_low, query_high = _grow(query_low, query_high, sample.query.coords)
        if not inputs.count:
            raise InputError("at least one training sample", "none")
        self.seen = seen.ranges()
        _store(self.input_scale, n.input, inputs, (low, high), bool(s.in_categories))
        _store(self.target_scale, n.target, targets, (query_low, query_high), False)
        if self.model.linear_channels:
            _unshift(self.input_scale, self.model.linear_channels)
            _unshift(self.target_scale, range(s.out_channels))
        if n.coords != "as-is":
            self.origin.copy_(low)
        if n.coords == "unit-box":
            self.extent.copy_(_extent(low, high))
        self.box.copy_(torch.stack([torch.minimum(low, query_low), torch.maximum(high, query_high)]))
        return self

    def check(self, input: Field, query: Field) -> None:
        """Refuse fields that this operator was not built for."""
        s = self.spec
        check_field("input", input, s.dim, s.in_times, s.in_channels)
        check_field("query", query, s.dim, None, s.query_channels)
        self.model.check(*(field if field.coords.ndim == 3 else field.batched() for field in (input, query)))
        sums = input.weights.sum(-1)
        wrong = sums[(sums - 1).abs() > SUM]
        if len(wrong):
            raise InputError(
                "`input.weights` that sum to 1 over the points of each sample, as in training",
                f"a sum of {float(wrong.flatten()[0]):.4g}",
                "Divide them by their sum, or leave them out for equal weights",
            )

    def horizon(self, times: int | None) -> int:
        """How many frames to predict: as many as in training, or others if it has learned what a step is."""
        own = self.spec.out_times
        if times is not None and times < 1:
            raise InputError("at least one time step", f"times={times}", f"Leave it out for the {own} of training")
        if times is not None and times > 1 and own == 1:
            raise InputError(
                "one frame of an operator that was trained on one",
                f"times={times}",
                "Leave it out; to march on, give the answer as the next input",
            )
        return own if times is None else times

    def outside(self, input: Field, query: Field) -> list[str]:
        """Descriptions of what lies far from all that training has shown; the operator may answer nonsense there."""
        return outside(
            input, query, self.box, self.seen, self.input_scale, self.normalization.input, bool(self.spec.in_categories)
        )

    def normalized(self, input: Field, query: Field) -> tuple[Field, Field]:
        """Input and query on unit scale."""
        coords = self._coords(input.coords)
        return (
            Field(coords, self.input_scale(input.values, input.coords), input.weights),
            Field(coords if query.coords is input.coords else self._coords(query.coords), query.values, query.weights),
        )

    def _coords(self, coords: Tensor) -> Tensor:
        return once_per_grid(lambda x: (x - self.origin) / self.extent, coords)

    def to_physical(
        self,
        values: Float[Tensor, "batch times queries channels"],
        coords: Float[Tensor, "batch queries dim"],
    ) -> Float[Tensor, "batch times queries channels"]:
        """Values on unit scale in physical units, with the boundary value where one is imposed."""
        values = self.target_scale.inverse(values, coords)
        if self.normalization.boundary == "zero":
            tolerance = 1e-4 * (self.box[1] - self.box[0])
            edge = ((coords <= self.box[0] + tolerance) | (coords >= self.box[1] - tolerance)).any(-1)
            values = values.masked_fill(edge[:, None, :, None], 0.0)
        return values

    def forward(
        self,
        input: Field,
        query: Field,
        times: int | None = None,
        encoded_once: Callable[[Field, Field, int], Tensor] | None = None,
    ) -> Float[Tensor, "batch times queries channels"]:
        """Physical values at the query points; see `predict_normalized`."""
        return self.to_physical(self.predict_normalized(input, query, times, encoded_once), query.coords)

    def predict_normalized(
        self,
        input: Field,
        query: Field,
        times: int | None = None,
        encoded_once: Callable[[Field, Field, int], Tensor] | None = None,
    ) -> Float[Tensor, "batch times queries channels"]:
        """The model's values on its own unit scale, from physical fields, in float32 or better.

        Args:
            input: physical, with a batch axis.
            query: where to answer.
            times: how many steps; by default as many as in training.
            encoded_once: computes the frames that follow from one encoding; by default the model as it is. The runners
                of `oformer/engine/runners.py` give theirs.
        """
        times, frames = self.spec.out_times if times is None else times, self.model.frames_per_encoding
        encoded_once = encoded_once or self.encoded_once
        if frames is None or times <= frames:
            return encoded_once(input, query, times)
        blocks = rollout(encoded_once, lambda v: self.to_physical(v, input.coords), input, query, times, frames)
        return torch.cat(list(blocks), 1)

    def encoded_once(self, input: Field, query: Field, times: int) -> Float[Tensor, "batch times queries channels"]:
        """All frames from one encoding of the input, by the model as it is."""
        return in_full(self.model(*self.normalized(input, query), times))

    def on_scale(self, values: Tensor, batch: Batch, scale: Literal["physical", "normalized"]) -> tuple[Tensor, Tensor]:
        """Predicted and true values of the first frames of a batch, on the scale that a loss asks for.

        Args:
            values: predicted, on unit scale.
            batch: the samples.
            scale: of the loss.
        """
        target = batch.target[:, : values.shape[1]]
        if scale == "normalized":
            return values, self.target_scale(target, batch.query.coords)
        return self.to_physical(values, batch.query.coords), target


def rollout(
    answer: Callable[[Field, Field, int], Tensor],
    physical: Callable[[Tensor], Tensor],
    input: Field,
    query: Field,
    times: int,
    frames: int,
) -> Iterator[Float[Tensor, "batch _ queries channels"]]:
    """Answers of `frames` time steps after another, each from the latest frames that are known or were answered.

    Queries at the input points share the answer that becomes the next input; for queries elsewhere, the input points
    are asked as well.

    Args:
        answer: values at queries for a number of steps, from one encoding of the input.
        physical: what turns such values at the input points into physical units.
        input: physical, with a batch axis.
        query: where to answer.
        times: how many steps in all.
        frames: steps from one encoding.
    """
    here = query.coords is input.coords
    points = query if here else Field.of(input.coords, None, input.weights)
    for first in range(0, times, frames):
        count = min(frames, times - first)
        values = answer(input, query, count)
        yield values
        if first + count < times:
            new = physical(values if here else answer(input, points, count)).to(input.values.device)
            known = torch.cat([input.values, new.to(input.values.dtype)], 1)
            input = input.with_values(known[:, -input.values.shape[1] :])


def _grow(low: Tensor, high: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
    """The box enlarged to hold the points."""
    return torch.minimum(low, coords.amin(0).double()), torch.maximum(high, coords.amax(0).double())


def _store(normalizer: Normalizer, kind: Values, moments: Moments, box: tuple[Tensor, Tensor], code: bool) -> None:
    """Turn moments into the shift and scale that a kind of normalization asks for.

    Args:
        normalizer: to be filled.
        kind: of normalization.
        moments: of the training samples.
        box: the corners of their points.
        code: whether the last channel is a code, which is not a number and stays as it is.
    """
    if kind == "none":
        return
    shift, scale = moments.mean, moments.std
    largest = np.maximum(np.abs(moments.low), np.abs(moments.high))
    if kind == "scalar":
        # All channels share one scale: the spread within channels and between their means.
        means, spreads = (shift[:-1], scale[:-1]) if code else (shift, scale)
        scale = np.full_like(scale, np.sqrt((spreads**2 + (means - means.mean()) ** 2).mean()))
        shift = np.full_like(shift, means.mean())
    if kind == "max-abs":
        shift, scale = np.zeros_like(shift), largest
    if kind == "pointwise":
        scale = scale + 1e-5  # the reference's guard where the field never changes
    scale = np.where(scale > 1e-12 * largest, scale, 1.0)
    if code:
        shift[..., -1], scale[..., -1] = 0.0, 1.0
    normalizer.shift.copy_(torch.from_numpy(shift))
    normalizer.scale.copy_(torch.from_numpy(scale))
    if isinstance(normalizer, GridNormalizer):
        normalizer.origin.copy_(box[0])
        normalizer.extent.copy_(_extent(*box))


def _unshift(normalizer: Normalizer, channels: Iterable[int]) -> None:
    """Make the map of some channels linear: no shift, and the root mean square in place of the standard deviation."""
    for channel in channels:
        shift, scale = normalizer.shift[..., channel], normalizer.scale[..., channel]
        scale.copy_(torch.hypot(scale, shift))
        shift.zero_()


def _extent(low: Tensor, high: Tensor) -> Tensor:
    """The size of a box; a flat one counts as one."""
    return torch.where(high > low, high - low, torch.ones_like(low))
