"""Kernel ridge regression for maps that are linear in some input channels, and the search for these channels."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oformer.baselines.methods import (
    KERNEL_WIDTHS,
    Baseline,
    LeftOut,
    Pca,
    check_positive,
    least_left_out,
    median_distance,
)
from oformer.baselines.resample import CONSTANT, Resampled, squared_distances
from oformer.errors import InputError

# A share of a leave-one-out error; what is less counts as a gain. Where a channel of benchmarks/own_data.py is linear,
# its error is 0.58 to 0.96 of that of kernel ridge, and elsewhere 1.9.
FOUND = 0.97
MOST_CHANNELS = 8  # that are tried one by one; each takes about a second with 500 samples
Vectors = Float[np.ndarray, "samples _"]  # one a row


class SuperpositionRidge(Baseline):
    """Kernel ridge regression whose answer is linear in some input channels f, and smooth in the others a.

    Its kernel is exp(-|a - a'|² / 2w²) ⟨f, f'⟩: that of maps u = T(a) f with a Gaussian prior on T. Samples are divided
    by the length of f, and answers multiplied by it.

    Fitted attributes: `linear_` (the channels of f), `width_` of the kernel relative to the median distance between
    inputs, `regularization_`, and `leave_one_out_`, the mean relative error by which all of them were chosen.
    """

    name = "superposition ridge"

    def __init__(
        self, linear: Sequence[int] | None = None, regularization: float | None = None, width: float | None = None
    ):
        """Keep the settings.

        Args:
            linear: the channels of f; by default those with the smallest leave-one-out error: the best channel, then
                others with it as long as the error falls by 3 %. Channels that are constant over the points of each
                sample, as parameters are, are not tried.
            regularization: added to the diagonal of the kernel matrix; by default chosen by the leave-one-out error.
            width: of the Gaussian, relative to the median distance between the a; by default chosen as well.
        """
        check_positive("regularization", regularization)
        check_positive("width", width)
        self.linear, self.regularization, self.width = linear, regularization, width

    def _learn(self, data: Resampled) -> None:
        if data.count < 3:
            raise InputError(f"at least 3 samples for {type(self).__name__}", str(data.count))
        channels = data.spec.in_channels
        if self.linear is not None and not set(self.linear) <= set(range(channels)):
            raise InputError(f"`linear`: input channels from 0 to {channels - 1}", str(self.linear))
        self._channels = channels
        best = self._tried(data, tuple(self.linear)) if self.linear is not None else self._searched(data)
        self.leave_one_out_, self.linear_, self.width_, self.regularization_ = best
        a, f, size = self._parts(data.inputs, self.linear_)
        self._center = a.mean(0)
        self._a, self._f = a - self._center, f
        self._unit = median_distance(squared_distances(self._a, self._a))
        gram = self._kernel(self._a, self._f)
        gram[np.diag_indices_from(gram)] += self.regularization_
        self._coefficients = np.linalg.solve(gram, data.targets / size)

    def _searched(self, data: Resampled) -> tuple[float, tuple[int, ...], float, float]:
        shape = (data.count, data.spec.in_times, -1, self._channels)
        values = data.inputs.reshape(shape) / data.known.roots[:, None]
        varies = np.ptp(values, axis=2).max((0, 1)) > CONSTANT * np.abs(values).max((0, 1, 2))
        tried = [channel for channel in range(self._channels) if varies[channel]][:MOST_CHANNELS]
        if not tried:
            raise InputError(f"an input channel that varies over the points, for {type(self).__name__}", "none")
        best = min(self._tried(data, (channel,)) for channel in tried)
        for _ in tried[1:]:
            others = [channel for channel in tried if channel not in best[1]]
            more = [self._tried(data, tuple(sorted((*best[1], channel)))) for channel in others]
            if not more or min(more)[0] > FOUND * best[0]:
                break
            best = min(more)
        return best

    def _tried(self, data: Resampled, linear: tuple[int, ...]) -> tuple[float, tuple[int, ...], float, float]:
        """The smallest leave-one-out error with these channels, and the width and the regularization that give it."""
        a, f, size = self._parts(data.inputs, linear)
        targets = data.targets / size
        norms = np.linalg.norm(targets, axis=1)
        seen = LeftOut.of(Pca.of(targets, centered=False), np.where(norms > 0, norms, 1.0))
        apart, gram = squared_distances(a, a), f @ f.T
        unit = median_distance(apart)
        widths = [1.0] if not a.size else KERNEL_WIDTHS if self.width is None else [self.width]
        error, width, ridge = least_left_out(
            lambda width: np.exp(-apart / (2 * width**2 * unit)) * gram, widths, self.regularization, seen
        )
        return error, linear, width, ridge

    def _parts(self, inputs: Vectors, linear: Sequence[int]) -> tuple[Vectors, Vectors, Float[np.ndarray, "samples 1"]]:
        """The channels a and f of inputs, f divided by its length, and this length."""
        values = inputs.reshape(len(inputs), -1, self._channels)
        f = values[..., list(linear)].reshape(len(inputs), -1)
        a = np.delete(values, list(linear), axis=-1).reshape(len(inputs), -1)
        size = np.linalg.norm(f, axis=1, keepdims=True)
        size = np.maximum(size, np.finfo(np.float64).eps * max(size.max(), np.finfo(np.float64).tiny))
        return a, f / size, size

    def _kernel(self, a: Vectors, f: Vectors) -> Float[np.ndarray, "samples _"]:
        apart = squared_distances(a, self._a)
        return np.exp(-apart / (2 * self.width_**2 * self._unit)) * (f @ self._f.T)

    def _at(
        self, vector: Float[np.ndarray, " numbers"], queries: Tensor
    ) -> Float[np.ndarray, "times queries channels"]:
        a, f, size = self._parts(vector[None], self.linear_)
        answer = self._kernel(a - self._center, f)[0] @ self._coefficients
        return self._data.wanted.at(answer * size[0, 0], queries)
