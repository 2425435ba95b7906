"""What the values of a dataset look like: per-channel numbers in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Sample


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
    moments = {"input": _Moments(), "query": _Moments(), "target": _Moments()}
    for sample in samples:
        moments["input"].add(sample.input.values)
        moments["query"].add(sample.query.values)
        moments["target"].add(sample.target)
    return Statistics(**{name: m.result() for name, m in moments.items()})


class _Moments:
    """Running mean and spread, merging those of each sample (Chan, Golub and LeVeque), which loses no digits.

    In numpy: its sums do not depend on the number of threads, so a dataset's JSON is the same everywhere.
    """

    def __init__(self):
        self.count = 0
        self.mean: Any = 0.0
        self.squares: Any = 0.0
        self.low: Any = np.inf
        self.high: Any = -np.inf

    def add(self, values: Float[Tensor, "times points channels"]) -> None:
        numbers = values.numpy().astype(np.float64)
        count, mean = numbers.shape[0] * numbers.shape[1], numbers.mean((0, 1))
        total, apart = self.count + count, mean - self.mean
        self.squares = self.squares + ((numbers - mean) ** 2).sum((0, 1)) + apart**2 * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.low = np.minimum(self.low, numbers.min((0, 1)))
        self.high = np.maximum(self.high, numbers.max((0, 1)))
        self.count = total

    def result(self) -> ChannelStatistics:
        if not self.count:
            raise InputError("at least one sample to measure", "none")
        std = np.sqrt(self.squares / self.count)
        columns = (self.mean, std, self.low, self.high)
        return ChannelStatistics(*(tuple(float(x) for x in column) for column in columns))
