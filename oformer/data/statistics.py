"""What the values of a dataset look like: per-channel numbers in one pass."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from oformer.fields import Sample
from oformer.moments import Moments


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
