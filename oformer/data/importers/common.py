"""The parts that importers share: the layout of a file in words, arrays read a few samples at a time, and grids."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from oformer.checks import check_sample
from oformer.data.importers.apart import too_large, unreadable
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec
from oformer.files import spare_memory
from oformer.meshes.grids import line_weights

SAMPLE = 4096  # bytes of a sample beside its values
IN_TIMES = 10  # frames that the papers give a model of the 20 to 50 there are

Block = tuple[np.ndarray, np.ndarray]  # inputs and targets (samples, times, *grid, channels)
Stored = Literal["velocity", "momentum"]  # what to keep of the airfoil files' momentum, which they call velocity


@dataclass(frozen=True)
class Choices:
    """What the caller of an import says, instead of guesses and defaults."""

    kind: str | None = None  # one of `KINDS`
    # How many frames of a trajectory are input; by default ten, or one where there are not more; four for the airfoil.
    in_times: int | None = None
    stride: int | None = None  # keep one frame in this many of an airfoil's trajectory or of an XDMF series
    stored: Stored | None = None  # keep the airfoil's velocity, which is the default, or its momentum
    inputs: Sequence[str] = ()  # fields of a mesh file, or arrays of a file of one's own, that are input
    targets: Sequence[str] = ()  # those that are target
    coords: Sequence[str] = ()  # arrays that are the points; in a mesh file they are known

    def refuse(self, path: Path, *names: str) -> None:
        """Refuse options that do not apply to this file, rather than ignore them."""
        for name in names:
            if getattr(self, name):
                raise InputError(f"`{name}` only where a file has use for it", f"one for {path}", "Leave it")


@dataclass(frozen=True)
class Layout:
    """The content of a foreign file, as far as it is understood."""

    kind: str  # one of `KINDS`
    format: str  # how the file is written
    arrays: dict[str, str]  # by name, the axes in words
    samples: int
    times: int  # frames of a sample in the file
    card: Card
    spec: Spec | None  # of the samples that an import makes; None as long as the caller has to choose the fields
    assumptions: tuple[str, ...] = ()  # what the file does not say, and we took as so
    warnings: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()  # points of each sample that is on no grid; of the first, if only that was looked at

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the target's channels."""
        return self.card.targets

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input's channels."""
        return self.card.inputs

    @property
    def points(self) -> int:
        """The number of points of a sample; the largest known one where samples differ."""
        return max(self.sizes) if self.sizes else math.prod((self.spec and self.spec.grid) or ())

    @property
    def sample_bytes(self) -> int:
        """Bytes of the values of a sample in float32."""
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
            known = f": {', '.join(self.inputs)}" if self.inputs and self.sizes else ""
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

    def __getitem__(self, part: slice) -> np.ndarray:
        first, end, _ = part.indices(self.shape[0])
        return self.take(first, end)

    @property
    def axes(self) -> int:
        """The number of axes, that of the samples included."""
        return len(self.shape)


@dataclass(frozen=True)
class Named:
    """The arrays of a file by name, before anything is known of their meaning."""

    path: Path
    format: str  # how the file is written
    arrays: Mapping[str, Rows]  # those of real numbers
    numbers: Mapping[str, float]  # single numbers, the same for all samples


@dataclass(frozen=True)
class Opened:
    """A foreign file that is understood and can be read."""

    path: Path
    layout: Layout
    take: Callable[[int, int], list[Sample]]  # the samples from first to end, unchecked
    axes: tuple[np.ndarray, ...] = ()  # coordinates along each axis of the grid; none on scattered points
    sources: tuple[Path, ...] = ()  # the files, where `path` is a folder or leads to others

    def samples(self, first: int, end: int) -> list[Sample]:
        """The samples from `first` to `end`, checked."""
        with reading(self.path, f"the samples {first} to {end - 1}"):
            check_room((end - first) * (2 * self.layout.sample_bytes + SAMPLE))
            samples = self.take(first, end)
        for i, sample in enumerate(samples, first):
            check_sample(sample, self.layout.spec, f"sample {i} of {self.path.name}")
        return samples


@dataclass(frozen=True)
class GridFile:
    """A file whose samples live on one grid."""

    path: Path
    kind: str  # of the data
    format: str  # how the file is written
    title: str  # of its card
    axes: tuple[np.ndarray, ...]  # coordinates along each axis of the grid
    arrays: Mapping[str, str] = field(default_factory=dict)  # by name, the axes in words
    periods: tuple[float, ...] | None = None
    parameters: Mapping[str, float | np.ndarray] = field(default_factory=dict)  # single numbers, or one for each sample
    assumptions: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of points along each axis."""
        return tuple(len(axis) for axis in self.axes)

    def pair(
        self, names: tuple[str, str], arrays: Mapping[str, Rows], channels: tuple[str, str], skip: int = 0
    ) -> Opened:
        """An input array (sample, *grid) and a target array (sample, *grid) or (sample, time, *grid).

        Args:
            names: of both in the file.
            arrays: of the file.
            channels: names of the input's and the target's channel.
            skip: the number of target frames, from the first, that are left out.
        """
        a, u = (arrays[name] for name in names)
        grid, path = self.grid, self.path
        timed = u.axes == len(grid) + 2
        times = u.shape[1] if timed else 1
        if a.shape[1:] != grid or u.shape[-len(grid) :] != grid or u.axes > len(grid) + 2 or a.shape[0] != u.shape[0]:
            raise InputError(
                f"`{names[0]}` and `{names[1]}` in {path} with the same samples and points", f"{a.shape} and {u.shape}"
            )
        if a.shape[0] == 0 or 0 in grid or times <= skip:
            raise InputError(f"at least one sample, point and target frame in {path}", f"{a.shape} and {u.shape}")

        def read(first: int, end: int) -> Block:
            targets = u.take(first, end)[..., None]
            return a.take(first, end)[:, None, ..., None], targets[:, skip:] if timed else targets[:, None]

        letters = ", ".join("xyz"[: len(grid)])
        words = {
            names[0]: f"(sample, {letters}) = {a.shape}: the input",
            names[1]: f"(sample, {'time, ' if timed else ''}{letters}) = {u.shape}: the target",
        }
        file = dataclasses.replace(self, arrays={**words, **self.arrays})
        return file._opened((a.shape[0], times), (1, times - skip), channels[:1], channels[1:], read)

    def march(
        self,
        in_times: int | None,
        shape: tuple[int, int],
        channels: tuple[str, ...],
        take: Callable[[int, int], np.ndarray],
        constants: tuple[str, ...] = (),
        constant: Callable[[int, int], np.ndarray] | None = None,
    ) -> Opened:
        """Trajectories: frames in a row, of which the first are input.

        Args:
            in_times: the number of input frames that the caller wants.
            shape: the numbers of samples and of frames.
            channels: names of those that change in time.
            take: their values (samples, times, *grid, channels) in the samples from first to end.
            constants: names of the channels that do not change in time, which each input frame repeats.
            constant: their values (samples, 1, *grid, channels).
        """
        samples, times = shape
        if 0 in (samples, *self.grid):
            raise InputError(f"at least one sample and one point in {self.path}", "none")
        count, said = cut(times, in_times, self.path)

        def read(first: int, end: int) -> Block:
            frames = take(first, end)
            inputs, targets = frames[:, :count], frames[:, count:]
            if constant is not None:
                still = constant(first, end)
                still = np.broadcast_to(still, (*inputs.shape[:-1], still.shape[-1]))
                inputs = np.concatenate([inputs, still], -1)
            return inputs, targets

        file = dataclasses.replace(self, assumptions=(*said, *self.assumptions))
        return file._opened(shape, (count, times - count), (*channels, *constants), channels, read)

    def _opened(
        self,
        shape: tuple[int, int],
        frames: tuple[int, int],
        inputs: tuple[str, ...],
        targets: tuple[str, ...],
        read: Callable[[int, int], Block],
    ) -> Opened:
        numbers, (samples, times) = self.parameters, shape
        single = {name: f"{n:g}: a parameter of all samples" for name, n in numbers.items() if isinstance(n, float)}
        sizes = (len(self.grid), frames[0], len(inputs), frames[1], len(targets))
        layout = Layout(
            self.kind, self.format, {**self.arrays, **single}, samples, times,
            Card(self.title, inputs=inputs, targets=targets), Spec(*sizes, grid=self.grid, periods=self.periods),
            assumptions=tuple(self.assumptions), warnings=tuple(self.warnings),
        )  # fmt: skip
        place = functools.cache(lambda: _place(self.axes, self.periods))

        def take(first: int, end: int) -> list[Sample]:
            known, wanted = read(first, end)
            own = {name: np.broadcast_to(n, samples)[first:end].astype(np.float64) for name, n in numbers.items()}
            return [
                Sample(
                    Field(place().coords, single_floats(known[i]), place().weights),
                    place(),
                    single_floats(wanted[i]),
                    {name: torch.tensor(value[i]) for name, value in own.items()},
                )
                for i in range(end - first)
            ]

        return Opened(self.path, layout, take, self.axes)


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
    """Turn any error of a library into one sentence about the file: damaged bytes make libraries fail in every way."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise too_large(path, what) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise unreadable(path, what, f"{type(error).__name__}: {reason}") from error


def files_in(folder: Path, suffixes: Sequence[str]) -> tuple[Path, ...]:
    """The files of a folder with one of these suffixes, by name; hidden ones are left out."""
    return tuple(sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes and not p.name.startswith(".")))


def check_room(size: float) -> None:
    """Refuse to allocate more bytes than there are to spare."""
    if size > spare_memory():
        raise MemoryError(f"{size / 2**30:.3g} GiB")


def check_numbers(path: Path, name: str, dtype: np.dtype) -> None:
    """Refuse an array of anything but real numbers."""
    if dtype.kind not in "fiub":
        raise InputError(f"real numbers in `{name}` of {path}", f"an array of {dtype}")


def refuse_in_times(in_times: int | None, kind: str) -> None:
    """Refuse `in_times` for a file whose input and target are two arrays: there are no frames to cut."""
    if in_times is not None:
        raise InputError(
            "a file of trajectories for `in_times` to cut", f"{kind}, whose input and target are two arrays", "Leave it"
        )


def cut(times: int, in_times: int | None, path: Path, default: int = IN_TIMES) -> tuple[int, list[str]]:
    """The number of input frames, and the sentence about it."""
    if in_times is None:
        count = default if times > default else 1
        said = [f"The first {count} of the {times} frames are input, the others target; change it with --in-times."]
    else:
        count, said = in_times, []
    if not 1 <= count < times:
        raise InputError(f"`in_times` between 1 and {times - 1}, as {path} has {times} frames", str(count))
    return count, said


def strided(times: int, stride: int | None, default: int, path: Path) -> tuple[range, list[str]]:
    """The indices of the frames that are kept, and the sentence about them."""
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
        worst = "NaN or infinity" if not np.isfinite(axis).all() else f"steps down to {np.diff(axis).min():.4g}"
        raise InputError(f"finite coordinates that grow in `{name}` of {path}", worst)
    return axis


def unit(points: int) -> np.ndarray:
    """The points j/n of a period of one, the end not repeated."""
    check_room(16 * points)
    return np.arange(points) / points
