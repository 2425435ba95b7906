"""What all importers share: the layout of a file in words, arrays read a few samples at a time, and the grids."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec, check_finite
from oformer.meshes.grids import line_weights

IN_TIMES = 10  # frames that the papers give a model of the 20 to 50 there are

Block = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]  # inputs and targets (samples, times, *grid, channels)


@dataclass(frozen=True)
class Layout:
    """What a foreign file is, as far as we understand it."""

    kind: str  # burgers, darcy, navier-stokes, pdebench, the-well
    format: str  # how the file is written
    arrays: dict[str, str]  # by name, the axes in words
    samples: int
    times: int  # frames of a sample in the file
    channels: tuple[str, ...]  # names of the target's channels
    spec: Spec  # of the samples that an import makes
    assumptions: tuple[str, ...] = ()  # what the file does not say, and we took as so
    warnings: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """How many points a sample has."""
        return math.prod(self.spec.grid or ())

    def __str__(self) -> str:
        spec = self.spec
        lines = [
            f"Layout: {self.kind}, {self.format}",
            *(f"  {name:12}  {words}" for name, words in self.arrays.items()),
            f"samples   {self.samples:,}",
            f"input     {spec.in_times} frame(s) of {spec.in_channels} channel(s)",
            f"target    {spec.out_times} frame(s) of {spec.out_channels} channel(s): {', '.join(self.channels)}",
            f"grid      {' x '.join(map(str, spec.grid or ()))}"
            + (f", periodic with {' x '.join(f'{p:g}' for p in spec.periods)}" if spec.periods else ""),
            *(f"assumed   {sentence}" for sentence in self.assumptions),
            *(f"WARNING   {sentence}" for sentence in self.warnings),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Rows:
    """An array of a file with samples first, read a few of them at a time."""

    shape: tuple[int, ...]
    take: Callable[[int, int], np.ndarray]  # the samples from first to end
    dtype: np.dtype

    @property
    def axes(self) -> int:
        """How many axes, that of the samples included."""
        return len(self.shape)


@dataclass(frozen=True)
class Opened:
    """A foreign file that is understood and can be read."""

    path: Path
    layout: Layout
    card: Card
    axes: tuple[np.ndarray, ...]  # coordinates along each axis of the grid
    read: Callable[[int, int], Block]

    def samples(self, first: int, end: int, place: Field) -> list[Sample]:
        """The samples from `first` to `end`, at the points of `place`."""
        with reading(self.path, f"the samples {first} to {end - 1}"):
            inputs, targets, parameters = self.read(first, end)
        numbers = {name: torch.from_numpy(np.array(value, np.float64)) for name, value in parameters.items()}
        samples = []
        for i in range(end - first):
            known, answer = _flat(inputs[i]), _flat(targets[i])
            for role, values in (("input", known), ("target", answer)):
                check_finite(f"sample {first + i} of {self.path.name}, {role}", values)
            parameters = {name: value[i] for name, value in numbers.items()}
            samples.append(Sample(Field(place.coords, known, place.weights), place, answer, parameters))
        return samples

    def place(self) -> Field:
        """The points of the grid, row by row; equal weights, or those of the gaps where these differ."""
        axes = [torch.from_numpy(np.asarray(axis, np.float64)) for axis in self.axes]
        coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
        if all(even(axis) for axis in self.axes):
            return Field.of(coords.float())
        weights = torch.ones((), dtype=torch.float64)
        for k, axis in enumerate(axes):
            period = self.layout.spec.periods[k] if self.layout.spec.periods else None
            weights = weights[..., None] * line_weights(axis[:, None], period)
        return Field.of(coords.float(), None, weights.reshape(-1).float())


def _flat(values: np.ndarray) -> torch.Tensor:
    """(times, *grid, channels) as (times, points, channels) in float32; what does not fit is infinite, and refused."""
    with np.errstate(over="ignore"):
        array = np.array(values, np.float32, order="C")
    return torch.from_numpy(array).reshape(values.shape[0], -1, values.shape[-1])


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Say in one sentence that a file could not be read: foreign bytes make foreign libraries fail in every way."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise InputError(
            f"{what} in {path}",
            f"something that cannot be read ({type(error).__name__}: {reason})",
            "It is damaged, cut short or foreign; copy it again",
        ) from error


def check_numbers(path: Path, name: str, dtype: np.dtype) -> None:
    """Refuse what is no array of real numbers."""
    if dtype.kind not in "fiub":
        raise InputError(f"real numbers in `{name}` of {path}", f"an array of {dtype}")


def refuse_in_times(in_times: int | None, kind: str) -> None:
    """Where input and target are two arrays there is nothing to cut."""
    if in_times is not None:
        raise InputError(
            "a file of trajectories for `in_times` to cut", f"{kind}, whose input and target are two arrays", "Leave it"
        )


def cut(times: int, in_times: int | None, path: Path) -> tuple[int, list[str]]:
    """How many of the frames are input, and the sentence about it."""
    if in_times is None:
        count = IN_TIMES if times > IN_TIMES else 1
        said = [f"The first {count} of the {times} frames are input, the others target; change it with --in-times."]
    else:
        count, said = in_times, []
    if not 1 <= count < times:
        raise InputError(f"`in_times` between 1 and {times - 1}, as {path} has {times} frames", str(count))
    return count, said


def even(axis: np.ndarray) -> bool:
    """Whether points are equally far apart, as far as float32 files can say."""
    if len(axis) < 3:
        return True
    gaps = np.diff(np.asarray(axis, np.float64))
    return bool(np.abs(gaps - gaps.mean()).max() <= 1e-3 * abs(gaps.mean()))


def checked_axis(path: Path, name: str, axis: np.ndarray, points: int | None = None) -> np.ndarray:
    """Coordinates along an axis: finite, growing, one per point."""
    axis = np.asarray(axis)
    check_numbers(path, name, axis.dtype)
    axis = axis.astype(np.float64)
    if axis.ndim != 1 or len(axis) == 0 or points not in (None, len(axis)):
        raise InputError(f"{points or 'some'} coordinates on one axis in `{name}` of {path}", f"shape {axis.shape}")
    if not np.isfinite(axis).all() or (np.diff(axis) <= 0).any():
        raise InputError(f"finite coordinates that grow in `{name}` of {path}", "others")
    return axis


def unit(points: int) -> np.ndarray:
    """The points j/n of a period of one, the end not repeated."""
    return np.arange(points) / points


def repeated(numbers: Mapping[str, float], count: int) -> dict[str, np.ndarray]:
    """Single numbers of a file as parameters of so many samples."""
    return {name: np.full(count, value) for name, value in numbers.items()}


def said(numbers: Mapping[str, float]) -> dict[str, str]:
    """The same, in words."""
    return {name: f"{value:g}: a parameter of all samples" for name, value in numbers.items()}


def pair(
    path: Path,
    kind: str,
    format: str,
    names: tuple[str, str],
    arrays: Mapping[str, Rows],
    axes: tuple[np.ndarray, ...],
    *,
    card: Card,
    periods: tuple[float, ...] | None = None,
    assumptions: Sequence[str] = (),
    warnings: Sequence[str] = (),
    words: Mapping[str, str] | None = None,
    skip: int = 0,
    parameters: Mapping[str, float] | None = None,
) -> Opened:
    """An input array (sample, *grid) and a target array (sample, *grid) or (sample, time, *grid).

    Args:
        path: the file.
        kind: of the equation.
        format: how the file is written.
        names: of input and target.
        arrays: of the file.
        axes: coordinates along each axis of the grid.
        card: names and story.
        periods: of the domain.
        assumptions: what was assumed.
        warnings: what to look at.
        words: the axes of each array.
        skip: leave out so many of the first target frames.
        parameters: the same for all samples.
    """
    a, u = (arrays[name] for name in names)
    grid, numbers = tuple(len(axis) for axis in axes), parameters or {}
    timed = u.axes == len(grid) + 2
    times = u.shape[1] if timed else 1
    if a.shape[1:] != grid or u.shape[-len(grid) :] != grid or u.axes > len(grid) + 2 or a.shape[0] != u.shape[0]:
        raise InputError(
            f"`{names[0]}` and `{names[1]}` in {path} with the same samples and points", f"{a.shape} and {u.shape}"
        )
    if a.shape[0] == 0 or 0 in grid or times <= skip:
        raise InputError(f"at least one sample, point and target frame in {path}", f"{a.shape} and {u.shape}")

    def read(first: int, end: int) -> Block:
        inputs, targets = a.take(first, end)[:, None, ..., None], u.take(first, end)[..., None]
        targets = targets[:, skip:] if timed else targets[:, None]
        return inputs, targets, repeated(numbers, end - first)

    letters = ", ".join(("x", "y", "z")[: len(grid)])
    default = {
        names[0]: f"(sample, {letters}) = {a.shape}: the input",
        names[1]: f"(sample, {'time, ' if timed else ''}{letters}) = {u.shape}: the target",
    }
    layout = Layout(
        kind=kind,
        format=format,
        arrays={**default, **(words or {}), **said(numbers)},
        samples=a.shape[0],
        times=times,
        channels=card.targets,
        spec=Spec(len(grid), 1, 1, times - skip, 1, grid=grid, periods=periods),
        assumptions=tuple(assumptions),
        warnings=tuple(warnings),
    )
    return Opened(path, layout, card, axes, read)


@dataclass(frozen=True)
class March:
    """A file of trajectories: frames in a row, of which the first are input."""

    path: Path
    kind: str
    format: str
    arrays: dict[str, str]
    title: str
    samples: int
    times: int
    axes: tuple[np.ndarray, ...]
    channels: tuple[str, ...]  # that march
    take: Callable[[int, int], np.ndarray]  # (samples, times, *grid, channels)
    periods: tuple[float, ...] | None = None
    constants: tuple[str, ...] = ()  # channels that do not march: shown with each input frame
    constant: Callable[[int, int], np.ndarray] | None = None  # (samples, *grid, channels)
    parameters: Callable[[int, int], dict[str, np.ndarray]] | None = None
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def opened(self, in_times: int | None) -> Opened:
        """The file, its frames cut into input and target."""
        if self.samples == 0 or not all(len(axis) for axis in self.axes):
            raise InputError(f"at least one sample and one point in {self.path}", "none")
        count, said = cut(self.times, in_times, self.path)

        def read(first: int, end: int) -> Block:
            frames = self.take(first, end)
            inputs, targets = frames[:, :count], frames[:, count:]
            if self.constant is not None:
                still = self.constant(first, end)[:, None]
                still = np.broadcast_to(still, (*inputs.shape[:-1], still.shape[-1]))
                inputs = np.concatenate([inputs, still], -1)
            return inputs, targets, self.parameters(first, end) if self.parameters else {}

        grid = tuple(len(axis) for axis in self.axes)
        channels = len(self.channels)
        spec = Spec(
            dim=len(grid),
            in_times=count,
            in_channels=channels + len(self.constants),
            out_times=self.times - count,
            out_channels=channels,
            grid=grid,
            periods=self.periods,
        )
        layout = Layout(
            kind=self.kind,
            format=self.format,
            arrays=self.arrays,
            samples=self.samples,
            times=self.times,
            channels=self.channels,
            spec=spec,
            assumptions=(*said, *self.assumptions),
            warnings=self.warnings,
        )
        card = Card(self.title, inputs=(*self.channels, *self.constants), targets=self.channels)
        return Opened(self.path, layout, card, self.axes, read)
