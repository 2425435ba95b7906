"""What all importers share: the layout of a file in words, arrays read a few samples at a time, and the grids."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from oformer.data.importers.apart import too_large, unreadable
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec, check_finite
from oformer.files import spare_memory
from oformer.meshes.grids import line_weights

SAMPLE = 4096  # bytes of a sample beside its values
IN_TIMES = 10  # frames that the papers give a model of the 20 to 50 there are

Block = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]  # inputs and targets (samples, times, *grid, channels)
Stored = Literal[
    "velocity", "momentum"
]  # what is kept of the airfoil files' "velocity", which is density times velocity


@dataclass(frozen=True)
class Choices:
    """What the caller says of a file, instead of our guess or default."""

    kind: str | None = None
    in_times: int | None = None
    stride: int | None = None  # keep one in so many frames
    stored: Stored | None = None
    inputs: tuple[str, ...] = ()  # names of fields or arrays
    targets: tuple[str, ...] = ()
    coords: tuple[str, ...] = ()

    def refuse(self, path: Path, *names: str) -> None:
        """Refuse what means nothing for this file, rather than ignore it."""
        for name in names:
            if getattr(self, name):
                raise InputError(f"`{name}` only where a file has use for it", f"one for {path}", "Leave it")


@dataclass(frozen=True)
class Layout:
    """What a foreign file is, as far as we understand it."""

    kind: str  # one of `KINDS`
    format: str  # how the file is written
    arrays: dict[str, str]  # by name, the axes in words
    samples: int
    times: int  # frames of a sample in the file
    channels: tuple[str, ...]  # names of the target's channels
    spec: Spec | None  # of the samples that an import makes; None as long as the caller has to choose the fields
    assumptions: tuple[str, ...] = ()  # what the file does not say, and we took as so
    warnings: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # points of each sample that is on no grid; of the first, if only that was looked at
    inputs: tuple[str, ...] = ()  # names of the input's channels, where they are not the target's

    @property
    def points(self) -> int:
        """How many points a sample has, or the largest of those known."""
        return max(self.sizes) if self.sizes else math.prod((self.spec and self.spec.grid) or ())

    @property
    def sample_bytes(self) -> int:
        """The values of a sample in float32."""
        spec = self.spec
        numbers = spec.in_times * spec.in_channels + spec.out_times * spec.out_channels if spec else 0
        return 4 * self.points * numbers

    def __str__(self) -> str:
        lines = [
            f"Layout: {self.kind}, {self.format}",
            *(f"  {name:12}  {words}" for name, words in self.arrays.items()),
            f"samples   {self.samples:,}",
            *self._shapes(),
            *(f"assumed   {sentence}" for sentence in self.assumptions),
            *(f"WARNING   {sentence}" for sentence in self.warnings),
        ]
        return "\n".join(lines)

    def _shapes(self) -> list[str]:
        spec, lines = self.spec, []
        if spec is not None:
            known = f": {', '.join(self.inputs)}" if self.inputs else ""
            lines += [
                f"input     {spec.in_times} frame(s) of {spec.in_channels} channel(s){known}",
                f"target    {spec.out_times} frame(s) of {spec.out_channels} channel(s): {', '.join(self.channels)}",
            ]
        if self.sizes:
            low, high = min(self.sizes), max(self.sizes)
            lines.append(f"points    {low:,}{f' to {high:,}' if high > low else ''}, scattered")
        elif spec is not None:
            wrapped = f", periodic with {' x '.join(f'{p:g}' for p in spec.periods)}" if spec.periods else ""
            lines.append(f"grid      {' x '.join(map(str, spec.grid or ()))}{wrapped}")
        return lines


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
    take: Callable[[int, int], list[Sample]]  # the samples from first to end, unchecked
    axes: tuple[np.ndarray, ...] = ()  # coordinates along each axis of the grid; none on scattered points
    sources: tuple[Path, ...] = ()  # the files, where `path` is a folder or leads to others

    def samples(self, first: int, end: int) -> list[Sample]:
        """The samples from `first` to `end`, all of finite numbers."""
        with reading(self.path, f"the samples {first} to {end - 1}"):
            check_room((end - first) * (2 * self.layout.sample_bytes + SAMPLE))
            samples = self.take(first, end)
        for i, sample in enumerate(samples, first):
            where = f"sample {i} of {self.path.name}"
            if not self.axes:
                check_finite(f"{where}, points", sample.input.coords)
                check_finite(f"{where}, query", sample.query.values)
            check_finite(f"{where}, input", sample.input.values)
            check_finite(f"{where}, target", sample.target)
        return samples


def on_grid(
    path: Path, layout: Layout, card: Card, axes: tuple[np.ndarray, ...], read: Callable[[int, int], Block]
) -> Opened:
    """A file whose samples live on one grid."""

    @functools.cache
    def place() -> Field:
        return _place(axes, layout.spec.periods if layout.spec else None)

    def take(first: int, end: int) -> list[Sample]:
        inputs, targets, parameters = read(first, end)
        numbers = {name: torch.from_numpy(np.array(value, np.float64)) for name, value in parameters.items()}
        where, samples = place(), []
        for i in range(end - first):
            known = Field(where.coords, single_floats(inputs[i]), where.weights)
            own = {name: value[i] for name, value in numbers.items()}
            samples.append(Sample(known, where, single_floats(targets[i]), own))
        return samples

    return Opened(path, layout, card, take, axes)


def _place(grid: tuple[np.ndarray, ...], periods: tuple[float, ...] | None) -> Field:
    """The points of a grid, row by row; equal weights, or those of the gaps where these differ."""
    axes = [torch.from_numpy(np.asarray(axis, np.float64)) for axis in grid]
    coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))
    if all(even(axis) for axis in grid):
        return Field.of(coords.float())
    weights = torch.ones((), dtype=torch.float64)
    for k, axis in enumerate(axes):
        weights = weights[..., None] * line_weights(axis[:, None], periods[k] if periods else None)
    return Field.of(coords.float(), None, weights.reshape(-1).float())


def single_floats(values: np.ndarray) -> Tensor:
    """(times, *points, channels) as (times, points, channels) in float32; what does not fit turns infinite."""
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
    except MemoryError as error:
        raise too_large(path, what) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise unreadable(path, what, f"{type(error).__name__}: {reason}") from error


def check_room(size: float) -> None:
    """Refuse to allocate so many bytes where they are more than there are to spare."""
    if size > spare_memory():
        raise MemoryError(f"{size / 2**30:.3g} GiB")


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


def cut(times: int, in_times: int | None, path: Path, default: int = IN_TIMES) -> tuple[int, list[str]]:
    """How many of the frames are input, and the sentence about it."""
    if in_times is None:
        count = default if times > default else 1
        said = [f"The first {count} of the {times} frames are input, the others target; change it with --in-times."]
    else:
        count, said = in_times, []
    if not 1 <= count < times:
        raise InputError(f"`in_times` between 1 and {times - 1}, as {path} has {times} frames", str(count))
    return count, said


def strided(times: int, stride: int | None, default: int, path: Path) -> tuple[range, list[str]]:
    """The frames that are kept of so many, and the sentence about it."""
    step = default if stride is None else stride
    if not 1 <= step <= max(times, 1):
        raise InputError(f"a `stride` between 1 and {times}, as {path} has {times} frames", str(step))
    kept = range(0, times, step)
    said = [f"One in {step} of the {times} frames is kept: {len(kept)}; change it with --stride."] if step > 1 else []
    return kept, said


def even(axis: np.ndarray) -> bool:
    """Whether points are equally far apart, as far as float32 files can say."""
    if len(axis) < 3:
        return True
    gaps = np.diff(np.asarray(axis, np.float64))
    return bool(np.abs(gaps - gaps.mean()).max() <= 1e-3 * abs(gaps.mean()))


def checked_axis(path: Path, name: str, stored: Any, points: int | None = None) -> np.ndarray:
    """Coordinates along an axis: finite, growing, one per point; only read where their count is right."""
    check_numbers(path, name, stored.dtype)
    if len(stored.shape) != 1 or stored.shape[0] == 0 or points not in (None, stored.shape[0]):
        raise InputError(f"{points or 'some'} coordinates on one axis in `{name}` of {path}", f"shape {stored.shape}")
    axis = np.asarray(stored[:], np.float64)
    if not np.isfinite(axis).all() or (np.diff(axis) <= 0).any():
        raise InputError(f"finite coordinates that grow in `{name}` of {path}", "others")
    return axis


def unit(points: int) -> np.ndarray:
    """The points j/n of a period of one, the end not repeated."""
    check_room(16 * points)
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
    return on_grid(path, layout, card, axes, read)


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
        return on_grid(self.path, layout, card, self.axes, read)
