"""What every model answers to, and the operator that wraps it: physical units outside, unit scale inside.

Everything outside `Operator` speaks physical units. The statistics are buffers, saved with the weights.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oformer.errors import InputError, unknown_name
from oformer.fields import Batch, Field, Sample, Spec, check_field
from oformer.nn.feedforward import in_full
from oformer.nn.normalizer import GridNormalizer, Normalizer
from oformer.nn.rotary import expanded, once_per_grid
from oformer.statistics import Moments, Seen, SeenSoFar, mean_and_spread

# float32: as it says; tf32: float32 with 10 bits of the factors in products; float16: products and activations with 10
# bits, and losses scaled so that gradients stay in its range; bfloat16: the same with 7 bits and the range of float32.
# Phases, statistics, norms, residuals, losses, weights and their moments are float32 under each.
Precision = Literal["float32", "tf32", "float16", "bfloat16"]
_AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}
Values = Literal["none", "scalar", "channel", "max-abs", "pointwise"]


def autocast_of(precision: str) -> torch.dtype | None:
    """The type that a model computes in under autocast; None where it stays in float32."""
    if precision not in get_args(Precision):
        raise unknown_name("precision", precision, get_args(Precision))
    return _AUTOCAST.get(precision)


@contextlib.contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Products of float32 numbers as precise as is asked for; torch is as it was when the block ends."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class ModelConfig:
    """The base of all configurations of models: frozen dataclasses of plain values, stored by the name of the class."""

    def build(self, spec: Spec) -> "OperatorModel":
        """The model for a problem of the given shape."""
        raise NotImplementedError


class OperatorModel(nn.Module):
    """What a model promises: values at the queries from values at the input points, both on unit scale.

    A model must give `answer`, and set `config` and `spec`. Training, prediction, export and the playground ask the
    properties below what a model can do; their defaults promise as little as possible.
    """

    spec: Spec
    config: Any  # a ModelConfig; each model names its own
    recompute: bool = False  # in training, keep what enters the parts of the model and compute the rest again

    @property
    def name(self) -> str:
        """What messages and model cards call it."""
        return type(self).__name__

    @property
    def queries_independent(self) -> bool:
        """Whether a query's answer is the same whichever other queries are asked with it."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether it reads values on a regular grid, and answers there, alone (`models/grids.py`)."""
        return False

    @property
    def mixes_samples(self) -> bool:
        """Whether in training the samples of a batch feel each other, as under batch normalization."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether it obeys `recompute`, by calling its parts through `_sparing`."""
        return False

    @property
    def compares_pairs(self) -> bool:
        """Whether its time grows with the number of pairs of points."""
        return False

    @property
    def needs_all_points(self) -> str | None:
        """What needs all points of a sample at once, in words; None if they may pass in chunks.

        They may where points feel each other through sums that the model asks `over_points` for, and in no other way.
        """
        return self.name

    @property
    def needs_period(self) -> bool:
        """Whether it counts on coordinates that have the period of its spec."""
        return False

    @property
    def frames_per_encoding(self) -> int | None:
        """After how many frames a rollout encodes its own answer as the next input; None: it never does."""
        return None

    def _sparing(self, part: Callable[..., Any], random: bool = False) -> Callable[..., Any]:
        """A part of the model; with `recompute` one that keeps its arguments alone, and is computed again to go back.

        Args:
            part: to be called with tensors.
            random: whether it draws random numbers, which must then be the same again.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return part
        return functools.partial(checkpoint, part, use_reentrant=False, preserve_rng_state=random)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Named groups of parameters that training may treat apart (clipping)."""
        return {}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices between hidden channels: no tables, and no layer that sees raw values or makes final ones."""
        return []

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that the model cannot read; fields are physical and have a batch axis."""

    def encode(self, input: Field) -> Tensor:
        """What is computed of the input once, however many queries follow; by default nothing but its values."""
        return input.values

    def answer(self, latents: Tensor, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values of shape (batch, times, queries, channels), from what `encode` gave.

        Args:
            latents: what `encode` made of the input.
            input: the field that was encoded, on unit scale.
            query: where to answer.
            times: frames; by default as many as in training, or `frames_per_encoding` of them.
        """
        raise NotImplementedError

    def compiled(self, prepare: Callable[[Field, Field], tuple[Field, Field]]) -> Callable[..., Tensor]:
        """The forward pass, compiled for each shape that it meets, with what prepares input and query for it."""

        def forward(input: Field, query: Field, times: int | None = None) -> Tensor:
            return self.forward(*prepare(input, query), times)

        return torch.compile(forward, dynamic=False)

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values at the query points for `times` steps (the problem's own number where not given)."""
        return self.answer(self.encode(input), input, query, times)


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


# How far from training an input is said to lie outside: points in sizes of their box; values, means and spreads in
# sizes of their range over the training samples, and more where few samples say little of that range. On test samples
# that are scaled until they leave it, operators of Burgers have errors of 10 % and more, a hundred times the usual.
FAR, FEW = 0.25, 8
# Means and spreads may differ by a share of the largest spread as well, and by some standard errors of a mean over as
# many points at random: fewer sensors are nothing new, and a range may have no size (of means that are all zero).
OFF, ERRORS = 0.05, 3.0
SUM = 1e-3  # weights sum to one but for rounding
# Values in units of their scale, for weights that were trained before ranges were recorded.
FAR_VALUES: dict[Values, float] = {"channel": 15.0, "scalar": 15.0, "max-abs": 3.0}


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
        # The type the model computes in under autocast; scaling, statistics and losses stay in float32.
        self.autocast: torch.dtype | None = None
        # What computes `normalized` and the model's forward pass, for as long as somebody wants them compiled.
        self.compiled: Callable[..., Tensor] | None = None
        # The same, for as long as somebody wants few points in the model at once (`models/chunked.py`).
        self.chunked: Callable[..., Tensor] | None = None

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
        """What lies far beyond all that training has shown, in words; it may answer nonsense there."""
        found, margin = [], FAR * (self.box[1] - self.box[0])

        def corners(points: Tensor) -> tuple[Tensor, Tensor, bool]:
            low, high = (corner.to(self.box) for corner in _extremes(points))
            return low, high, bool(((low < self.box[0] - margin) | (high > self.box[1] + margin)).any())

        for name, field in (("input", input), ("query", query)):
            if corners(field.coords[:1] if expanded(field.coords) else field.coords)[2]:
                low, high, far = corners(field.coords[field.weights > 0])  # padding may lie anywhere
                found += [f"{name} points {_span(low, high)}, in training {_span(*self.box)}"] * far
        return found + (self._unlike_scale(input) if self.seen is None else self._unlike(self.seen, input))

    @property
    def _numbers(self) -> int:
        """How many input channels hold numbers; a code, if there is one, comes behind them."""
        return self.spec.in_channels - bool(self.spec.in_categories)

    @torch.no_grad()
    def _unlike(self, seen: Seen, input: Field) -> list[str]:
        """Channels whose values, or else whose mean or spread in some sample, lie far beyond those of training."""
        values, means, spreads = (torch.tensor(r).to(input.values) for r in (seen.values, seen.means, seen.spreads))
        mean, spread = mean_and_spread(input, means.mean(-1))
        points = (
            input.weights.sum(-1, keepdim=True) ** 2 / torch.einsum("bp,bp->b", input.weights, input.weights)[:, None]
        )
        slack, none = OFF * spreads[:, 1] + ERRORS * spread / points.sqrt(), torch.zeros_like(spread[:1])

        def far(numbers: Tensor, ranges: Tensor, slack: Tensor) -> Tensor:
            low, high = ranges.unbind(-1)
            margin = FAR * (1 + FEW / seen.samples) * (high - low) + rounding + slack
            return ((numbers < low - margin) | (numbers > high + margin)).any(0)

        # A channel that never changed has no size: what rounding makes of it, in float16 too, is forgiven.
        rounding, extremes = 1e-3 * values.abs().amax(-1), torch.stack(_extremes(input.values))
        if bool(far(extremes, values, none).any()):  # padding may hold anything
            extremes = torch.stack(_extremes(input.values.movedim(1, 2)[input.weights > 0]))
        found: dict[int, str] = {}
        for what, numbers, ranges, more in (
            ("", extremes, values, none),
            ("the mean of ", mean, means, slack),
            ("the standard deviation of ", spread, spreads, slack),
        ):
            for channel in far(numbers, ranges, more).nonzero().flatten().tolist():
                span = _span(numbers[:, channel].amin(), numbers[:, channel].amax())
                told = f"{what}input channel {channel} {span}, in training {_span(*ranges[channel])}"
                found.setdefault(channel, told)
        return [told for channel, told in sorted(found.items()) if channel < self._numbers]

    def _unlike_scale(self, input: Field) -> list[str]:
        """Channels with values of many units of their scale."""
        found, limit = [], FAR_VALUES.get(self.normalization.input)
        scale, shift = self.input_scale.scale, self.input_scale.shift
        if limit is not None and scale.ndim == 1:
            spans = torch.stack(_extremes(input.values), 1).to(scale)
            for channel in range(self._numbers):
                if bool(((spans[channel] - shift[channel]).abs() > limit * scale[channel]).any()):
                    typical = f"{float(shift[channel]):.3g} ± {float(scale[channel]):.3g}"
                    found.append(f"input channel {channel} {_span(*spans[channel])}, in training typically {typical}")
        return found

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

    def rounded(self, device: torch.device) -> torch.autocast:
        """What the model computes in there, as a context."""
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    def predict_normalized(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """What the model says of physical fields, on its own unit scale, in float32 or better."""
        times, frames = self.spec.out_times if times is None else times, self.model.frames_per_encoding
        if frames is None or times <= frames:
            return self._encoded_once(input, query, times)
        blocks = rollout(self._encoded_once, lambda v: self.to_physical(v, input.coords), input, query, times, frames)
        return torch.cat(list(blocks), 1)

    def _encoded_once(self, input: Field, query: Field, times: int) -> Tensor:
        """All frames from one encoding of the input."""
        run = self.chunked or self.compiled
        if run is None:
            return self.plainly(input, query, times)
        with self.rounded(input.coords.device):
            return in_full(run(input, query, times))

    def plainly(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """The same by the model as it is, neither compiled nor in chunks."""
        with self.rounded(input.coords.device):
            return in_full(self.model(*self.normalized(input, query), times))

    def on_scale(self, values: Tensor, batch: Batch, scale: Literal["physical", "normalized"]) -> tuple[Tensor, Tensor]:
        """What the model said of the first frames of a batch, and the target, on the scale that a loss asks for."""
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
            input = dataclasses.replace(input, values=known[:, -input.values.shape[1] :])


def _extremes(x: Float[Tensor, "*any channels"]) -> tuple[Float[Tensor, "channels"], Float[Tensor, "channels"]]:
    """The smallest and the largest number of each channel."""
    rows, together = x.reshape(-1, x.shape[-1]), 32
    whole = len(rows) // together * together
    if whole:  # a CPU is ten times slower at sums and the like that leave only a few numbers
        side_by_side = rows[:whole].reshape(-1, together * x.shape[-1])
        found = (side_by_side.amin(0), side_by_side.amax(0))
        low, high = (torch.cat((part.view(together, -1), rows[whole:])) for part in found)
    else:
        low = high = rows
    return low.amin(0), high.amax(0)


def _span(low: Tensor, high: Tensor) -> str:
    pairs = zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
    return "from " + ", ".join(f"{a:.3g} to {b:.3g}" for a, b in pairs)


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


def _extent(low: Tensor, high: Tensor) -> Tensor:
    """The size of a box; a flat one counts as one."""
    return torch.where(high > low, high - low, torch.ones_like(low))
