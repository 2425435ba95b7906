"""Functions on points that differ, as vectors on common points, and back to any points."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Sample, Spec
from oformer.nn.interpolation import interpolate
from oformer.seeds import numpy_generator

COMMON_POINTS = 600  # at least, where points differ and all samples together have them; at most twice as many
SPLINE_POINTS = 600  # of a thin-plate spline, whose time grows with their cube
OVERSHOOT = 0.5  # of the range of values that an interpolation may go beyond them
MOST_NUMBERS = 2**26  # of all resampled inputs, or targets: half a GiB in float64
CONSTANT = 1e-9  # spread of an input channel over its largest value, below which it counts as constant


@dataclass(frozen=True)
class Side:
    """Inputs or targets as vectors: values at common points, times the root of a weight, over the unit of a channel."""

    coords: Float[np.ndarray, "points dim"]
    roots: Float[np.ndarray, " points"]  # of quadrature weights that sum to 1: lengths of vectors are L2 norms
    units: Float[np.ndarray, " channels"]
    times: int
    periods: tuple[float, ...] | None

    def vector(
        self, coords: Tensor, weights: Tensor, values: Float[Tensor, "times points channels"]
    ) -> Float[np.ndarray, " numbers"]:
        """A function, interpolated to the common points."""
        found = resampled(coords, weights, values, self.coords, self.periods)
        return (found * (self.roots[:, None] / self.units)).ravel()

    def at(self, vector: Float[np.ndarray, " numbers"], queries: Tensor) -> Float[np.ndarray, "times queries channels"]:
        """The values of a vector, interpolated to query points."""
        values = vector.reshape(self.times, len(self.coords), len(self.units)) * (self.units / self.roots[:, None])
        return self._interpolation(values, as_numbers(queries))

    @cached_property
    def _interpolation(self) -> "Interpolation":
        return Interpolation(self.coords, self.periods, most=2 * COMMON_POINTS)  # factorized once


@dataclass(frozen=True)
class Resampled:
    """Training samples as vectors of one length."""

    samples: list[Sample]
    spec: Spec
    known: Side
    wanted: Side
    inputs: Float[np.ndarray, "samples numbers"]
    targets: Float[np.ndarray, "samples target_numbers"]

    @property
    def count(self) -> int:
        """How many samples."""
        return len(self.samples)

    @classmethod
    def of(cls, data: PointDataset, most: int | None = None, who: str = "a baseline") -> "Resampled":
        """Interpolate all samples to the common points.

        Args:
            data: the samples.
            most: samples.
            who: has that limit.
        """
        if most is not None and len(data) > most:
            raise InputError(f"at most {most:,} samples for {who}", f"{len(data):,}", "Fit it to some of them")
        spec, samples = data.spec, [data[i] for i in range(len(data))]
        place = common_points([(s.input.coords, s.input.weights) for s in samples])
        together = all(same(s.input.coords, s.query.coords) for s in samples)
        answers = place if together else common_points([(s.query.coords, s.query.weights) for s in samples])
        for what, numbers in (
            ("inputs", len(place[0]) * spec.in_times * spec.in_channels),
            ("targets", len(answers[0]) * spec.out_times * spec.out_channels),
        ):
            if numbers * len(samples) > MOST_NUMBERS:
                raise InputError(
                    f"at most {MOST_NUMBERS:,} numbers in the resampled {what} of all samples for {who}",
                    f"{numbers * len(samples):,}",
                    "Fit it to fewer samples or frames",
                )
        known, wanted = [], []
        for sample in samples:
            given, target = sample.input.values, sample.target
            if together:  # one interpolation for both
                rows = torch.cat([given.movedim(0, 1).flatten(1), target.movedim(0, 1).flatten(1)], 1)[None]
                found = resampled(sample.input.coords, sample.input.weights, rows, place[0], spec.periods)[0]
                cut = spec.in_times * spec.in_channels
                known.append(found[:, :cut].reshape(-1, spec.in_times, spec.in_channels).swapaxes(0, 1))
                wanted.append(found[:, cut:].reshape(-1, spec.out_times, spec.out_channels).swapaxes(0, 1))
            else:
                known.append(resampled(sample.input.coords, sample.input.weights, given, place[0], spec.periods))
                wanted.append(resampled(sample.query.coords, sample.query.weights, target, answers[0], spec.periods))
        inputs, targets = np.stack(known), np.stack(wanted)
        spread = np.sqrt(np.einsum("ntpc,p->c", (inputs - inputs.mean(0)) ** 2, place[1]) / len(inputs))
        # A channel that is the same in all samples differs by rounding, which must not be its unit.
        spread[spread < CONSTANT * np.abs(inputs).max((0, 1, 2))] = 0
        size = np.sqrt(np.einsum("ntpc,p->c", targets**2, answers[1]) / len(targets))
        sides = [
            Side(points, np.sqrt(weights), np.where(units > 0, units, 1.0), times, spec.periods)
            for (points, weights), units, times in (
                (place, spread, spec.in_times),
                (answers, size, spec.out_times),
            )
        ]
        vectors = [
            (values * (side.roots[:, None] / side.units)).reshape(len(samples), -1)
            for values, side in zip((inputs, targets), sides, strict=True)
        ]
        return cls(samples, spec, sides[0], sides[1], vectors[0], vectors[1])


def common_points(
    point_sets: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Float[np.ndarray, "points dim"], Float[np.ndarray, " points"]]:
    """Points for all samples, with quadrature weights that sum to 1.

    Where all samples have the same points, these. Otherwise the points of several samples together, drawn with a fixed
    seed, and with equal weights: they are denser where the points of the samples are.

    Args:
        point_sets: coordinates and weights of the points of each sample. Points of weight zero count as absent.
    """
    first, mass = point_sets[0]
    if all(same(coords, first) and same(weights, mass) for coords, weights in point_sets):
        there = as_numbers(mass) > 0
        weights = as_numbers(mass)[there]
        return as_numbers(first)[there], weights / weights.sum()
    random = numpy_generator(0, len(point_sets))
    chosen: list[np.ndarray] = []
    for i in random.permutation(len(point_sets)):
        coords, weights = point_sets[i]
        chosen.append(as_numbers(coords)[as_numbers(weights) > 0])
        if sum(map(len, chosen)) >= COMMON_POINTS:
            break
    points = np.unique(np.concatenate(chosen), axis=0)
    if len(points) > 2 * COMMON_POINTS:
        points = points[np.sort(random.permutation(len(points))[: 2 * COMMON_POINTS])]
    return points, np.full(len(points), 1 / len(points))


def resampled(
    coords: Tensor,
    weights: Tensor,
    values: Float[Tensor, "times points channels"],
    at: Float[np.ndarray, "queries dim"],
    periods: tuple[float, ...] | None = None,
) -> Float[np.ndarray, "times queries channels"]:
    """Values of a function at other points; at its own points they stay as they are.

    Args:
        coords: of the points.
        weights: of the points, zero for those that count as absent.
        values: at the points.
        at: the other points.
        periods: of the domain.
    """
    points, there = as_numbers(coords), as_numbers(weights) > 0
    numbers = values.detach().cpu().double().numpy()
    if there.all():
        return Interpolation(points, periods)(numbers, at)
    return Interpolation(points[there], periods)(numbers[:, there], at)


class Interpolation:
    """From values at points to values anywhere."""

    def __init__(
        self,
        points: Float[np.ndarray, "points dim"],
        periods: tuple[float, ...] | None = None,
        most: int = SPLINE_POINTS,
    ):
        """Keep the points.

        Args:
            points: in any order; of several at one place the first counts.
            periods: of the domain.
            most: points of a spline.
        """
        self.points, self.periods, self.most = points, periods, most
        self._spline: ThinPlateSpline | None = None

    def __call__(
        self, values: Float[np.ndarray, "times points channels"], at: Float[np.ndarray, "queries dim"]
    ) -> Float[np.ndarray, "times queries channels"]:
        """Values at other points; at the points themselves they stay as they are.

        Args:
            values: at the points.
            at: the other points.
        """
        points, periods = self.points, self.periods
        if points.shape == at.shape and np.array_equal(points, at):
            return values
        if points.shape[1] == 1:
            return _on_a_line(points[:, 0], values, at[:, 0], None if periods is None else periods[0])
        rows = np.moveaxis(values, 0, 1).reshape(len(points), -1)
        found = self._by_spline(rows, at)
        if found is None:
            mass = torch.full((1, len(points)), 1 / len(points), dtype=torch.float64)
            places = (torch.from_numpy(np.ascontiguousarray(x))[None] for x in (rows, points, at))
            given, here, there = places
            found = interpolate(given, here, mass, there, periods)[0].numpy()
        low, high = rows.min(0), rows.max(0)
        found = np.clip(found, low - OVERSHOOT * (high - low), high + OVERSHOOT * (high - low))
        return np.moveaxis(found.reshape(len(at), len(values), -1), 1, 0)

    def _by_spline(
        self, rows: Float[np.ndarray, "points numbers"], at: Float[np.ndarray, "queries dim"]
    ) -> Float[np.ndarray, "queries numbers"] | None:
        """Nothing where a spline would take too long, or points do not determine it."""
        if self.periods is not None or not self.points.shape[1] + 2 <= len(self.points) <= self.most:
            return None
        self._spline = self._spline or ThinPlateSpline(self.points)
        return self._spline(rows, at)


class ThinPlateSpline:
    """The sum of a linear function and of c_j r_j² ln r_j, r_j the distance to point j, that meets the values."""

    def __init__(self, points: Float[np.ndarray, "points dim"]):
        """Factorize the matrix.

        Args:
            points: of several at one place the first counts.
        """
        from scipy.linalg import lu_factor

        points, self._rows = np.unique(points, axis=0, return_index=True)
        self._middle = (points.min(0) + points.max(0)) / 2
        self._size = float((points.max(0) - points.min(0)).max()) / 2 or 1.0
        self._points = (points - self._middle) / self._size
        count = len(points)
        self._matrix = np.zeros((count + points.shape[1] + 1,) * 2)
        self._matrix[:count] = self._terms(points)
        self._matrix[count:, :count] = self._matrix[:count, count:].T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of singular matrices, which `__call__` recognizes
            self._factors = lu_factor(self._matrix)

    def _terms(self, at: Float[np.ndarray, "queries dim"]) -> Float[np.ndarray, "queries terms"]:
        scaled = (at - self._middle) / self._size
        squares = squared_distances(scaled, self._points)
        radial = squares * np.log(np.maximum(squares, np.finfo(np.float64).tiny))
        return np.concatenate([radial, np.ones((len(at), 1)), scaled], 1)

    def __call__(
        self, rows: Float[np.ndarray, "points numbers"], at: Float[np.ndarray, "queries dim"]
    ) -> Float[np.ndarray, "queries numbers"] | None:
        """Values at other points; nothing where the points lie on a line or in a plane, and do not determine a spline.

        Args:
            rows: values at the points.
            at: the other points.
        """
        from scipy.linalg import lu_solve

        wanted = np.zeros((len(self._matrix), rows.shape[1]))
        wanted[: len(self._rows)] = rows[self._rows]
        with np.errstate(all="ignore"):
            weights = lu_solve(self._factors, wanted, check_finite=False)
            missed = np.abs(self._matrix @ weights - wanted).max()
        if not missed <= 1e-6 * np.abs(rows).max():
            return None
        return self._terms(at) @ weights


def _on_a_line(
    x: Float[np.ndarray, " points"],
    values: Float[np.ndarray, "times points channels"],
    at: Float[np.ndarray, " queries"],
    period: float | None,
) -> Float[np.ndarray, "times queries channels"]:
    """Piecewise linear, constant beyond the ends."""
    if period is not None:
        x, at = x % period, at % period
    x, first = np.unique(x, return_index=True)
    values = values[:, first]
    if period is not None:
        x = np.concatenate([[x[-1] - period], x, [x[0] + period]])
        values = np.concatenate([values[:, -1:], values, values[:, :1]], 1)
    if len(x) == 1:
        return np.repeat(values, len(at), 1)
    right = np.searchsorted(x, at).clip(1, len(x) - 1)
    share = ((at - x[right - 1]) / (x[right] - x[right - 1])).clip(0, 1)[:, None]
    return (1 - share) * values[:, right - 1] + share * values[:, right]


def squared_distances(
    a: Float[np.ndarray, "ours rank"], b: Float[np.ndarray, "theirs rank"]
) -> Float[np.ndarray, "ours theirs"]:
    """Squared distances of all pairs of rows."""
    return ((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T).clip(0)


def as_numbers(tensor: Tensor) -> np.ndarray:
    """A tensor as a float64 array."""
    return tensor.detach().cpu().double().numpy()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return a is b or (a.shape == b.shape and torch.equal(a, b))
