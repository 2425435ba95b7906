"""The errors of the baselines beside that of an operator, on the same held-out samples, in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oformer.baselines.methods import Baseline, NearestSample, PcaKernelRidge, PcaRidge, squares
from oformer.baselines.resample import Resampled, same
from oformer.baselines.superposition import FOUND, SuperpositionRidge
from oformer.data.dataset import PointDataset
from oformer.seeds import numpy_generator

BASELINES: tuple[type[Baseline], ...] = (NearestSample, PcaRidge, PcaKernelRidge, SuperpositionRidge)
# Limits of `compare`, for the samples to learn from and for those held out:
COMPARED_SAMPLES = 500
COMPARED_NUMBERS = 10_000_000  # values of inputs and targets, where samples share their points or lie on a line
COMPARED_POINTS = 250_000  # points, where each sample has to be interpolated in the plane or in space
FEW_COMPARED = 50  # samples that are taken in spite of the last two limits


@dataclass(frozen=True)
class Comparison:
    """The errors of the baselines on held-out samples."""

    errors: dict[str, float]  # the mean relative L2 error of each, by class name
    left_out: dict[str, str]  # the reason why a baseline is missing, by class name
    learned: int  # number of samples that the baselines learned from
    samples: int  # number of training samples
    tested: int  # number of held-out samples that were predicted, the first ones
    linear: tuple[int, ...] = ()  # input channels in which the targets seem to be linear

    def told(self, operator: Sequence[float] | np.ndarray) -> str:
        """The comparison in words, with advice where a baseline is better.

        Args:
            operator: errors of the operator on the held-out samples.
        """
        lines = [f"Baseline {name} was left out: {reason.rstrip('.')}." for name, reason in self.left_out.items()]
        if not self.errors:
            return "\n".join(lines)
        names = {kind.__name__: kind.name for kind in BASELINES}
        ours = float(np.mean(operator[: self.tested]))
        shown = ", ".join(f"{names[name]} {error:.2%}" for name, error in self.errors.items())
        limits = [f"fitted to {self.learned:,} of the {self.samples:,} training samples"] * (
            self.learned < self.samples
        )
        limits += [f"on the first {self.tested:,} held-out samples"] * (self.tested < len(operator))
        note = f" ({', '.join(limits)})" if limits else ""
        said = f"Baselines on the same samples: {shown}{note}; the operator {ours:.2%}."
        best = min(self.errors, key=lambda name: self.errors[name])
        if not ours <= self.errors[best]:  # also where the operator's error is not a number
            said += (
                f" The baseline {names[best]} is better than the operator: train for more minutes, give more samples, "
                f"or use oformer.baselines.{best}."
            )
        return "\n".join([said, *lines])


def compare(learned: PointDataset, test: PointDataset, *, share: float = 1.0, seed: int = 0) -> Comparison:
    """Fit each baseline and measure its error on held-out samples, in a few seconds.

    A map counts as linear in the channels that `SuperpositionRidge` finds if its leave-one-out error is below that of
    kernel ridge. A baseline that cannot be fitted is left out with the reason; no exception leaves this function but an
    interrupt. At most 500 samples are learned from, drawn at random, and fewer where each has many points.

    Args:
        learned: the samples to learn from.
        test: the held-out samples; the first 500 are predicted, and fewer where each has many points.
        share: of these limits, at most 1: less where a few seconds are too long.
        seed: of the draw.
    """
    errors, left_out = {}, {}
    fitted: dict[str, Any] = {}
    count = tested = 0
    try:
        count, tested = _affordable(learned, share), _affordable(test, share)
        data = _drawn(learned, share, seed)
        held = [test[i] for i in range(tested)]
        size = torch.cat([squares(sample.target.double(), sample) for sample in (test[i] for i in range(len(test)))])
    except Exception as error:
        return Comparison({}, {kind.__name__: _reason(error) for kind in BASELINES}, count, len(learned), 0)
    for kind in BASELINES:
        try:
            model = kind()
            model._fit(data)
            error = float(model._errors(held, size).mean())
            if np.isfinite(error):
                errors[kind.__name__], fitted[kind.__name__] = error, model
            else:
                left_out[kind.__name__] = "its error is not a finite number"
        except Exception as error:
            left_out[kind.__name__] = _reason(error)
    linear = _found(fitted.get(PcaKernelRidge.__name__), fitted.get(SuperpositionRidge.__name__))
    return Comparison(errors, left_out, count, len(learned), tested, linear)


def linear_channels(learned: PointDataset, *, share: float = 1.0, seed: int = 0) -> tuple[int, ...]:
    """The input channels in which the targets seem to be linear, as `compare` finds them.

    Args:
        learned: the samples to learn from.
        share: of the limit on samples, at most 1.
        seed: of the draw of samples.
    """
    try:
        data = _drawn(learned, share, seed)
        plain, linear = PcaKernelRidge(), SuperpositionRidge()
        plain._fit(data)
        linear._fit(data)
    except Exception:  # what a baseline cannot be fitted to is left out there, too
        return ()
    return _found(plain, linear)


def _found(plain: PcaKernelRidge | None, linear: SuperpositionRidge | None) -> tuple[int, ...]:
    if plain is None or linear is None or not linear.leave_one_out_ < FOUND * plain.leave_one_out_:
        return ()
    return linear.linear_


def _drawn(learned: PointDataset, share: float, seed: int) -> Resampled:
    """As many samples as `compare` may take, at random, on common points."""
    rows = numpy_generator(seed, len(learned)).permutation(len(learned))[: _affordable(learned, share)]
    return Resampled.of(learned.subset(np.sort(rows)))


def _affordable(data: PointDataset, share: float) -> int:
    """The number of samples that `compare` may take, at least three."""
    spec, (points, queries) = data.spec, data.sizes().mean(0).tolist()
    other, first = data[len(data) - 1], data[0]
    alike = same(first.input.coords, other.input.coords) and same(first.query.coords, other.query.coords)
    if alike or spec.dim == 1:
        numbers = points * spec.in_times * spec.in_channels + queries * spec.out_times * spec.out_channels
        most = COMPARED_NUMBERS / numbers
    else:
        most = COMPARED_POINTS / max(points, queries)
    return min(len(data), max(3, int(share * min(COMPARED_SAMPLES, max(FEW_COMPARED, most)))))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
