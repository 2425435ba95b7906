"""Mean, spread and range of a stream of samples in one pass, per channel or per point, and those of a dataset."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Sample

Ranges = tuple[tuple[float, float], ...]  # the smallest and the largest number, for each channel


@dataclass(frozen=True)
class Seen:
    """What the inputs of training were like: ranges over its samples, by which an input unlike them is recognized."""

    samples: int
    values: Ranges
    means: Ranges  # of a sample, over its points and frames
    spreads: Ranges  # standard deviations, likewise


class SeenSoFar:
    """The ranges of the samples that were added."""

    def __init__(self) -> None:
        """Start empty."""
        self.samples = 0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, input: Field) -> None:
        """Take in the input of one sample, without a batch axis."""
        field = input.to(torch.float64).batched()
        mean, spread = mean_and_spread(field, torch.zeros((), dtype=torch.float64))
        low, high = (extreme(field.values, (0, 1, 2)) for extreme in (torch.amin, torch.amax))
        self.low = np.minimum(self.low, torch.stack([low, mean[0], spread[0]]).numpy())
        self.high = np.maximum(self.high, torch.stack([high, mean[0], spread[0]]).numpy())
        self.samples += 1

    def ranges(self) -> Seen:
        """All of them, with the digits that count: sums are rounded otherwise by other processors."""
        values, means, spreads = (
            tuple((float(f"{low:.6g}"), float(f"{high:.6g}")) for low, high in channels)
            for channels in np.stack([self.low, self.high], -1).tolist()
        )
        return Seen(self.samples, values, means, spreads)


def mean_and_spread(
    field: Field, center: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "batch channels"], Float[Tensor, "batch channels"]]:
    """Mean and standard deviation of each sample and channel, over points as they weigh and over frames.

    Args:
        field: with a batch axis.
        center: a number near the mean, for all channels or each: digits are lost to what the mean lies away from it.
    """
    apart, total = field.values - center, field.weights.sum(-1, keepdim=True) * field.values.shape[1]
    mean = torch.einsum("bp,btpc->bc", field.weights, apart) / total
    squares = torch.einsum("bp,btpc->bc", field.weights, apart.square_()) / total
    return mean + center, (squares - mean**2).clamp(min=0).sqrt()


class Moments:
    """Running moments, merging those of each sample (Chan, Golub and LeVeque), which loses no digits.

    In numpy: its sums do not depend on the number of threads, so what is computed from them is the same everywhere.
    """

    def __init__(self, pointwise: bool = False):
        """Start empty.

        Args:
            pointwise: keep the moments of each point apart (all samples then have the same points).
        """
        self.axes = (0,) if pointwise else (0, 1)
        self.count = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, values: Float[Tensor, "times points channels"]) -> None:
        """Take in the values of one sample."""
        numbers = values.numpy().astype(np.float64)
        mean = numbers.mean(self.axes)
        if self.count and mean.shape != self.mean.shape:
            raise InputError(
                f"the {len(self.mean)} points of the first sample in every sample for pointwise statistics",
                str(len(mean)),
                "Use statistics per channel",
            )
        count = int(np.prod([numbers.shape[axis] for axis in self.axes]))
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + ((numbers - mean) ** 2).sum(self.axes) + apart**2 * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.low = np.minimum(self.low, numbers.min(self.axes))
        self.high = np.maximum(self.high, numbers.max(self.axes))
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """The standard deviation, of the values themselves (not an estimate for more of them)."""
        if not self.count:
            raise InputError("at least one sample to measure", "none")
        return np.sqrt(self.squares / self.count)


@dataclass(frozen=True)
class ChannelStatistics:
    """Numbers per channel; each stored value counts the same."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]


@dataclass(frozen=True)
class Statistics:
    """What the values of a dataset look like, in physical units."""

    input: ChannelStatistics
    query: ChannelStatistics
    target: ChannelStatistics


def measure(samples: Iterable[Sample]) -> Statistics:
    """Mean, standard deviation and range of each channel, in one pass in float64."""
    moments = {"input": Moments(), "query": Moments(), "target": Moments()}
    for sample in samples:
        moments["input"].add(sample.input.values)
        moments["query"].add(sample.query.values)
        moments["target"].add(sample.target)
    return Statistics(**{name: _columns(m) for name, m in moments.items()})


def _columns(moments: Moments) -> ChannelStatistics:
    columns = (moments.mean, moments.std, moments.low, moments.high)
    return ChannelStatistics(*(tuple(float(x) for x in np.atleast_1d(column)) for column in columns))
