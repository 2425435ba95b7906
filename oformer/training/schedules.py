"""Settings that change while training goes on: the learning rate, the horizon, the points that are dropped.

Each is a pure function of the position on the schedule (and a seed). The position, counted from zero, is the number of
the step, or a fraction between two of them where a time budget chooses it (`oformer/training/pace.py`).
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch
from oformer.meshes.subsets import SubsetWeights, keep_points


@dataclass(frozen=True)
class OneCycle:
    """Up along a half cosine, down along another; beta1 goes the other way (Smith and Topin, 2018).

    The same curve as torch's OneCycleLR, whose defaults every experiment of the paper used.
    """

    warmup: float = 0.3  # the share of the steps that go up
    start: float = 1e4  # the rate starts at peak / start
    end: float = 1e4  # and ends at peak / start / end
    beta1: tuple[float, float] = (0.95, 0.85)  # at the ends and at the peak

    def at(self, step: float, steps: int) -> tuple[float, float]:
        """The factor of the peak rate, and beta1, at a position on a schedule of `steps`."""
        low, floor = 1 / self.start, 1 / self.start / self.end
        top = self.warmup * steps - 1
        if step <= top:
            share = step / top if top > 0 else 1.0
            return _cosine(low, 1.0, share), _cosine(*self.beta1, share)
        share = min(1.0, (step - top) / max(steps - 1 - top, 1))
        return _cosine(1.0, floor, share), _cosine(self.beta1[1], self.beta1[0], share)


@dataclass(frozen=True)
class Halving:
    """The rate halves after each equal part of training; beta1 stays."""

    parts: int = 5
    beta1: float = 0.9

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise InputError("at least one part in `schedule.parts`", str(self.parts))

    def at(self, step: float, steps: int) -> tuple[float, float]:
        """The factor of the peak rate, and beta1, at a position on a schedule of `steps`."""
        return 0.5 ** min(int(self.parts * step / steps), self.parts - 1), self.beta1


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Horizon:
    """A growing number of steps to predict: `first` for half of the ramp, then two more at a time."""

    first: int
    ramp: float = 0.16  # the share of training after which the longest horizon is asked for
    last: int | None = None  # the longest one; None: all frames of a sample

    def at(self, step: float, steps: int, times: int) -> int:
        """The number of frames to predict, of `times` in all, at a position on a schedule of `steps`.

        A position before the first step counts as the first.
        """
        times, step = min(times, self.last or times), max(step, 0.0)
        if step >= self.ramp * steps:
            return times
        progress = 2 * step / (self.ramp * steps)
        return min(times, self.first + 2 * int(max(0.0, progress - 1) * (times - self.first) / 2))


def begin_later(batch: Batch, times: int, generator: torch.Generator) -> Batch:
    """Each sample from a random frame on, with as many known frames as before and `times` to predict.

    Frames that were to be predicted become known ones: more samples of the same law from the same data.

    Args:
        batch: of an autonomous problem, on any device.
        times: how many frames are predicted; where all are, the batch stays as it is.
        generator: on the CPU; the only source of randomness.
    """
    known, target = batch.input.values, batch.target
    starts = torch.randint(target.shape[1] - times + 1, (batch.size, 1), generator=generator)
    chosen = (starts + torch.arange(known.shape[1] + times)).to(target.device)
    frames = torch.cat([known, target], 1).take_along_dim(chosen[:, :, None, None], 1)
    known, target = frames.tensor_split([known.shape[1]], 1)
    return dataclasses.replace(batch, input=batch.input.with_values(known), target=target)


def with_noise(batch: Batch, level: float, scale: Tensor, generator: torch.Generator) -> Batch:
    """The batch with Gaussian noise on its input values, so that a rollout learns to live with errors of its own.

    Args:
        batch: on any device.
        level: standard deviation, in units of `scale`.
        scale: of each input channel.
        generator: on the CPU; the only source of randomness.
    """
    values = batch.input.values
    drawn = torch.Generator(values.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
    noise = torch.randn(values.shape, generator=drawn, device=values.device, dtype=values.dtype)
    values = values + level * scale.to(values) * noise
    return dataclasses.replace(batch, input=batch.input.with_values(values))


@dataclass(frozen=True)
class Drop:
    """Random dropping of input points: with some probability, a step sees only a part of each input."""

    probability: float = 0.2
    keep: tuple[float, float] = (0.5, 1.0)  # the share kept is uniform between these
    weights: SubsetWeights = "scaled"  # of the points that are left; the paper's are equal

    def __post_init__(self) -> None:
        if not 0 < self.keep[0] <= self.keep[1] <= 1:
            raise InputError("shares to keep between 0 and 1, the smaller first", str(self.keep))

    def __call__(self, batch: Batch, generator: torch.Generator, periods: tuple[float, ...] | None) -> Batch:
        """The batch with fewer input points, or as it is; queries and targets stay."""
        chance, share = torch.rand(2, generator=generator).tolist()
        if chance >= self.probability:
            return batch
        share = self.keep[0] + share * (self.keep[1] - self.keep[0])
        return dataclasses.replace(batch, input=keep_points(batch.input, share, generator, self.weights, periods))
