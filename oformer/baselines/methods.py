"""The baselines: nearest sample, PCA with ridge regression, PCA with kernel ridge regression."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.baselines.resample import Resampled, as_numbers, resampled, squared_distances
from oformer.data.arrays import Arrays
from oformer.data.columns import as_given, axes_of, columns_of, flattened, questions, samples_like, seen_samples
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Field, Sample
from oformer.metrics import relative_by_channel, squared

MOST_SAMPLES = 4000  # of the regressions, whose time grows with the cube and memory with the square of the samples
RANK = 1e-14  # share of the largest eigenvalue of a covariance, below which the others are rounding errors
SCORED = 64  # leading PCA scores of the targets that the leave-one-out error is computed from
SATURATED = 1e-8  # 1 - H_ii below which a leave-one-out error is rounding
RIDGES = 10.0 ** np.arange(-14, 1.5, 0.5)  # tried by PcaRidge, relative to the largest eigenvalue of the covariance
KERNEL_RIDGES = 10.0 ** np.arange(-10, 1.5)  # tried by PcaKernelRidge; the kernel is 1 on the diagonal
KERNEL_WIDTHS = 2.0 ** np.arange(-3, 6)  # tried by PcaKernelRidge, relative to the median distance of the inputs
Regressor = TypeVar("Regressor", bound="Baseline")


class Baseline:
    """What the baselines share: the forms of data, the common points, the error.

    Fitted attributes: `spec_` (the shapes), `points_` (number of common points of inputs and of targets) and
    `ignored_` (parts of the data without effect on the answer, by name).
    """

    name: ClassVar[str]  # as it is called in tables
    most_samples: ClassVar[int | None] = MOST_SAMPLES

    def fit(
        self: Regressor, samples: PointDataset | Sequence[Mapping[str, Any]] | None = None, **arrays: Any
    ) -> Regressor:
        """Learn from samples; none of them is held out.

        Args:
            samples: a list of dicts as for `OperatorRegressor.fit`, or a dataset.
            **arrays: or keyword arrays as for `OperatorRegressor.fit`.
        """
        if isinstance(samples, PointDataset):
            data, axes, names = samples, 3, ()
        else:
            columns = flattened(columns_of(samples, arrays))
            found, names = seen_samples(columns)
            data, axes = PointDataset(found), axes_of("targets", columns["targets"])
        self._fit(Resampled.of(data, self.most_samples, type(self).__name__))
        self._target_axes, self._parameter_names = axes, names
        return self

    def _fit(self, data: "Resampled") -> None:
        self._learn(data)
        self._data = data
        self.spec_, self.points_ = data.spec, (len(data.known.coords), len(data.wanted.coords))
        self.ignored_ = ("query_features",) if data.spec.query_channels else ()

    def predict(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        queries: Arrays | None = None,
        times: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """The answer to one sample, or a list with one for each; shaped as the targets were in `fit`.

        Args:
            inputs: a dict or a list of dicts with the keys of `fit`; targets are ignored.
            queries: where to answer, as for `OperatorRegressor.predict`.
            times: frames; a baseline has those of `fit` and no others.
        """
        self._check_fitted()
        if times is not None and times != self.spec_.out_times:
            raise InputError(
                f"times={self.spec_.out_times}, the frames {type(self).__name__} was fitted with",
                f"times={times}",
                "Leave `times` out, or use OperatorRegressor, which predicts further frames",
            )
        asked = questions(inputs, queries)
        answers = [
            as_given(self._answer(sample.input, sample.query.coords), self._target_axes, question)
            for sample, question in zip(samples_like(asked, {}, self._parameter_names), asked, strict=True)
        ]
        return answers[0] if isinstance(inputs, Mapping) else answers

    def score(self, samples: PointDataset | Sequence[Mapping[str, Any]] | None = None, **arrays: Any) -> float:
        """One minus the mean relative L2 error, as `OperatorRegressor.score`.

        Args:
            samples: with targets, as in `fit`.
            **arrays: or keyword arrays, as in `fit`.
        """
        self._check_fitted()
        if not isinstance(samples, PointDataset):
            samples = PointDataset(samples_like(samples, arrays, self._parameter_names), spec=self.spec_)
        return 1.0 - float(self.errors(samples).mean())

    def errors(self, data: PointDataset) -> Float[np.ndarray, " samples"]:
        """The relative L2 error of each sample, as `oformer.evaluate` measures it for operators.

        Args:
            data: samples with targets.
        """
        self._check_fitted()
        return self._errors([data[i] for i in range(len(data))])

    def _errors(
        self, samples: Sequence[Sample], size: Float[Tensor, "all times channels"] | None = None
    ) -> Float[np.ndarray, " samples"]:
        """`errors`, with the squares of the targets of more samples, the first of which are `samples`."""
        answers = [self._answer(sample.input, sample.query.coords) for sample in samples]
        rows = [
            squares(torch.from_numpy(answer) - sample.target.double(), sample)
            for answer, sample in zip(answers, samples, strict=True)
        ]
        size = torch.cat([squares(sample.target.double(), sample) for sample in samples]) if size is None else size
        error = torch.cat([torch.cat(rows), torch.zeros_like(size[len(rows) :])])
        return relative_by_channel(error, size).numpy()[: len(rows)]

    def _check_fitted(self) -> None:
        if not hasattr(self, "_data"):
            raise InputError(f"a fitted {type(self).__name__}", "one without data", "Call `fit` first")

    def _answer(self, known: Field, queries: Tensor) -> Float[np.ndarray, "times queries channels"]:
        """The values at query points."""
        spec = self.spec_
        for what, wanted, got in (
            ("space dimension(s)", spec.dim, known.coords.shape[-1]),
            ("space dimension(s) of the queries", spec.dim, queries.shape[-1]),
            ("frame(s) in `inputs`", spec.in_times, known.values.shape[0]),
            ("channel(s) in `inputs`, parameters among them", spec.in_channels, known.values.shape[-1]),
        ):
            if got != wanted:
                raise InputError(f"{wanted} {what}, as in `fit`", str(got))
        return self._at(self._data.known.vector(known.coords, known.weights, known.values), queries)

    def _learn(self, data: "Resampled") -> None:
        raise NotImplementedError

    def _at(
        self, vector: Float[np.ndarray, " numbers"], queries: Tensor
    ) -> Float[np.ndarray, "times queries channels"]:
        raise NotImplementedError


class NearestSample(Baseline):
    """The target of the training sample whose input is nearest to the question.

    Distances are L2 over points, times and channels, each channel divided by its spread over the training samples.
    """

    name = "nearest sample"
    most_samples = None

    def _learn(self, data: "Resampled") -> None:
        self._inputs = data.inputs
        self._squares = (data.inputs**2).sum(1)

    def _at(
        self, vector: Float[np.ndarray, " numbers"], queries: Tensor
    ) -> Float[np.ndarray, "times queries channels"]:
        # The constant |vector|² does not change which is nearest.
        nearest = self._data.samples[int((self._squares - 2 * self._inputs @ vector).argmin())]
        return resampled(
            nearest.query.coords, nearest.query.weights, nearest.target, as_numbers(queries), self._data.spec.periods
        )


class _Regression(Baseline):
    """A linear map, to scores of the targets, of features of the inputs."""

    def _learn(self, data: "Resampled") -> None:
        if data.count < 3:
            raise InputError(f"at least 3 samples for {type(self).__name__}", str(data.count))
        self._inputs, self._targets = Pca.of(data.inputs), Pca.of(data.targets)
        if not len(self._inputs.roots):
            raise InputError(
                f"inputs that differ from sample to sample for {type(self).__name__}", f"{data.count} equal ones"
            )
        norms = np.linalg.norm(data.targets, axis=1)
        self._regress(LeftOut.of(self._targets, np.where(norms > 0, norms, 1.0)))

    def _regress(self, seen: "LeftOut") -> None:
        raise NotImplementedError

    def _scores(self, scores: Float[np.ndarray, " rank"]) -> Float[np.ndarray, " target_rank"]:
        raise NotImplementedError

    def _at(
        self, vector: Float[np.ndarray, " numbers"], queries: Tensor
    ) -> Float[np.ndarray, "times queries channels"]:
        answer = self._targets.vector(self._scores(self._inputs.scores(vector)))
        return self._data.wanted.at(answer, queries)


class PcaRidge(_Regression):
    """Ridge regression from the PCA scores of the input to those of the target: the best linear map.

    Fitted attributes: `regularization_`, relative to the largest eigenvalue of the inputs' covariance, and
    `leave_one_out_`, the mean relative error by which it was chosen.
    """

    name = "ridge"

    def __init__(self, regularization: float | None = None):
        """Keep the setting.

        Args:
            regularization: relative to the largest eigenvalue of the covariance of the inputs; by default chosen by the
                leave-one-out error.
        """
        check_positive("regularization", regularization)
        self.regularization = regularization

    def _regress(self, seen: "LeftOut") -> None:
        left, roots = self._inputs.left, self._inputs.roots
        power = (roots / roots[0]) ** 2
        onto = left.T @ self._targets.left  # the targets' own scores are these times their singular values
        moved = left.T @ seen.scores
        found = []
        for ridge in RIDGES if self.regularization is None else [self.regularization]:
            share = power / (power + ridge)
            rest = 1 - 1 / len(left) - (left**2) @ share
            residual = seen.scores - left @ (share[:, None] * moved)
            found.append((seen.error(residual, rest), float(ridge)))
        self.leave_one_out_, self.regularization_ = min(found)
        gain = power / (power + self.regularization_) / roots
        self._matrix = gain[:, None] * onto * self._targets.roots

    def _scores(self, scores: Float[np.ndarray, " rank"]) -> Float[np.ndarray, " target_rank"]:
        return scores @ self._matrix


class PcaKernelRidge(_Regression):
    """Kernel ridge regression with a Gaussian kernel from the PCA scores of the input to those of the target.

    Fitted attributes: `width_` of the kernel, relative to the median distance between inputs, `regularization_`, and
    `leave_one_out_`, the mean relative error by which both were chosen.
    """

    name = "kernel ridge"

    def __init__(self, regularization: float | None = None, width: float | None = None):
        """Keep the settings.

        Args:
            regularization: added to the diagonal of the kernel matrix, which is 1; by default chosen by the
                leave-one-out error.
            width: of the kernel exp(-d²/2w²), relative to the median distance between inputs; by default chosen with
                the regularization.
        """
        check_positive("regularization", regularization)
        check_positive("width", width)
        self.regularization, self.width = regularization, width

    def _regress(self, seen: "LeftOut") -> None:
        from scipy.linalg import cho_factor, cho_solve

        places = self._inputs.left * self._inputs.roots
        apart = squared_distances(places, places)
        self._unit = median_distance(apart)
        targets = self._targets.left * self._targets.roots

        def kernel_of(width: float) -> np.ndarray:
            return np.exp(-apart / (2 * width**2 * self._unit))

        widths = KERNEL_WIDTHS if self.width is None else [self.width]
        chosen = least_left_out(kernel_of, widths, self.regularization, seen)
        self.leave_one_out_, self.width_, self.regularization_ = chosen
        kernel = kernel_of(self.width_)
        kernel[np.diag_indices_from(kernel)] += self.regularization_
        self._places, self._coefficients = places, cho_solve(cho_factor(kernel), targets)

    def _scores(self, scores: Float[np.ndarray, " rank"]) -> Float[np.ndarray, " target_rank"]:
        apart = squared_distances(scores[None], self._places)[0]
        return np.exp(-apart / (2 * self.width_**2 * self._unit)) @ self._coefficients


def median_distance(apart: Float[np.ndarray, "samples samples"]) -> float:
    """The median squared distance of different samples, by which widths of kernels are measured."""
    return float(np.median(apart[np.triu_indices(len(apart), 1)])) or float(apart.max()) or 1.0


def least_left_out(
    kernel_of: Callable[[float], Float[np.ndarray, "samples samples"]],
    widths: Iterable[float],
    regularization: float | None,
    seen: "LeftOut",
) -> tuple[float, float, float]:
    """The smallest leave-one-out error of kernel ridge regressions, and the width and regularization that give it.

    Args:
        kernel_of: the kernel between all samples, by its width.
        widths: to try.
        regularization: added to the diagonal; None to try those of `KERNEL_RIDGES`.
        seen: the targets.
    """
    from scipy.linalg import eigh

    found = []
    for width in widths:
        values, vectors = eigh(kernel_of(width))
        values, moved = values.clip(0), vectors.T @ seen.scores
        for ridge in KERNEL_RIDGES if regularization is None else [regularization]:
            kept = ridge / (values + ridge)
            residual, rest = vectors @ (kept[:, None] * moved), (vectors**2) @ kept
            found.append((seen.error(residual, rest), float(width), float(ridge)))
    return min(found)


@dataclass(frozen=True)
class Pca:
    """Principal components of vectors: centered, they are left · diag(roots) · right."""

    mean: Float[np.ndarray, " numbers"]
    left: Float[np.ndarray, "samples rank"]
    roots: Float[np.ndarray, " rank"]  # singular values, the largest first
    right: Float[np.ndarray, "rank numbers"]

    @classmethod
    def of(cls, vectors: Float[np.ndarray, "samples numbers"], centered: bool = True) -> "Pca":
        """From the eigenvectors of the smaller of the two products of the centered matrix with itself.

        Args:
            vectors: one a row.
            centered: whether their mean is subtracted; else the mean counts as zero.
        """
        from scipy.linalg import eigh

        mean = vectors.mean(0) if centered else np.zeros(vectors.shape[1])
        moved = vectors - mean
        wide = vectors.shape[0] <= vectors.shape[1]
        values, found = eigh(moved @ moved.T if wide else moved.T @ moved)
        rounding = (16 * np.finfo(np.float64).eps) ** 2 * (vectors**2).sum()
        kept = np.flatnonzero(values > max(RANK * values[-1], rounding, np.finfo(np.float64).tiny))[::-1]
        roots, found = np.sqrt(values[kept]), found[:, kept]
        if wide:
            return cls(mean, found, roots, (found / roots).T @ moved)
        return cls(mean, moved @ (found / roots), roots, np.ascontiguousarray(found.T))

    def scores(self, vector: Float[np.ndarray, " numbers"]) -> Float[np.ndarray, " rank"]:
        """The coefficients of a vector."""
        return self.right @ (vector - self.mean)

    def vector(self, scores: Float[np.ndarray, " rank"]) -> Float[np.ndarray, " numbers"]:
        """The vector of coefficients."""
        return scores @ self.right + self.mean


@dataclass(frozen=True)
class LeftOut:
    """Targets of which leave-one-out errors are computed: the leading scores; the others count as predicted by zero."""

    scores: Float[np.ndarray, "samples scores"]
    tail: Float[np.ndarray, " samples"]  # squared length of the other scores
    norms: Float[np.ndarray, " samples"]  # lengths of the whole targets, mean and all

    @classmethod
    def of(cls, targets: Pca, norms: Float[np.ndarray, " samples"]) -> "LeftOut":
        """From the scores of the targets, and the lengths that errors are relative to."""
        scores = targets.left * targets.roots
        return cls(scores[:, :SCORED], (scores[:, SCORED:] ** 2).sum(1), norms)

    def error(self, residual: Float[np.ndarray, "samples scores"], rest: Float[np.ndarray, " samples"]) -> float:
        """The mean relative error; infinite where a sample is met exactly, whatever its target.

        Args:
            residual: of the fit to all samples.
            rest: 1 - H_ii.
        """
        if rest.min() < SATURATED:
            return float("inf")
        return float((np.sqrt((residual**2).sum(1) / rest**2 + self.tail) / self.norms).mean())


def squares(values: Float[Tensor, "times queries channels"], sample: Sample) -> Float[Tensor, "1 times channels"]:
    """Mean squares over the query points of a sample."""
    return squared(values[None], sample.query.weights[None])


def check_positive(name: str, value: float | None) -> None:
    """Refuse a setting that is neither above zero nor left to be chosen."""
    if value is not None and not value > 0:
        raise InputError(f"a `{name}` above zero, or None to have it chosen", repr(value))
