"""Mean, spread and range of a stream of samples, in one pass."""

from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError


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
