"""The currency: a function known at points.

Solvers make it, datasets store it, models map it, plots draw it. A `Field` carries quadrature weights that sum to one;
**a mask is a weight of zero**, so padding, dropped points and true quadrature are one argument everywhere.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.errors import InputError

MOST_AXES = 3  # of space
TURNED = "coords.swapaxes(-1, -2)"  # for arrays and tensors, with and without a batch axis

# Not `typing.Self`: the shape checks of the tests wrap methods one by one, where Self means nothing.
Kind = TypeVar("Kind", bound="Sample")


@dataclass(frozen=True)
class Field:
    """A function known at points (physical units)."""

    coords: Float[Tensor, "*batch points dim"]
    values: Float[Tensor, "*batch times points channels"]  # times = 1 when steady; channels = 0 when only points matter
    weights: Float[Tensor, "*batch points"]  # quadrature; sums to 1; padding weighs 0

    @classmethod
    def of(
        cls,
        coords: Tensor | np.ndarray,
        values: Tensor | np.ndarray | None = None,
        weights: Tensor | np.ndarray | None = None,
    ) -> "Field":
        """A field with the defaults filled in.

        Args:
            coords: (points, dim), with or without a batch axis before; arrays become tensors of float32.
            values: (times, points, channels), or of one frame (points, channels) or (points,), with the same batch
                axis; by default no channel.
            weights: (points,), which sum to one; by default the paper's 1/n for each of n points.
        """
        coords = as_tensor("coords", coords)
        if coords.ndim < 2 or coords.shape[-1] > MOST_AXES:
            on_a_line, turned = coords.ndim < 2, "coords.T" if coords.ndim == 2 else TURNED
            raise InputError(
                "`coords` of shape (points, dim) with dim 1, 2 or 3, or with a batch axis before",
                str(tuple(coords.shape)),
                "On a line give `coords[:, None]`" if on_a_line else how_to_turn(turned, coords.shape),
            )
        values = coords.new_zeros((*coords.shape[:-1], 0)) if values is None else as_tensor("values", values)
        if values.ndim == coords.ndim - 1:
            values = values.unsqueeze(-1)
        if values.ndim == coords.ndim:
            values = values.unsqueeze(-3)
        return cls(coords, values, uniform_weights(coords) if weights is None else as_tensor("weights", weights))

    @property
    def points(self) -> int:
        """How many points, padding included."""
        return self.coords.shape[-2]

    def batched(self) -> "Field":
        """The same field as a batch of one."""
        return Field(self.coords[None], self.values[None], self.weights[None])

    def single(self, index: int) -> "Field":
        """One field of a batch."""
        return Field(self.coords[index], self.values[index], self.weights[index])

    def sharing(self, other: "Field") -> "Field":
        """The field, with the other's tensor of coordinates where both lie at the same points.

        A model may then read the other field here without looking for the nearest points. Where the other field has a
        point of weight zero, which must not be read, this one must have one too.
        """
        if self.coords.shape != other.coords.shape or not torch.equal(self.coords, other.coords):
            return self
        if bool(((other.weights <= 0) & (self.weights > 0)).any()):
            return self
        return dataclasses.replace(self, coords=other.coords)

    def to(self, *args, **kwargs) -> "Field":
        """The same field on another device or in another floating type."""
        return Field(self.coords.to(*args, **kwargs), self.values.to(*args, **kwargs), self.weights.to(*args, **kwargs))


@dataclass(frozen=True)
class Sample:
    """One training example, in physical units. With a leading batch axis it is a `Batch`."""

    input: Field  # what is known
    query: Field  # where to answer; values = query features (node type...), often none
    target: Float[Tensor, "*batch times queries channels"]
    parameters: Mapping[str, Float[Tensor, "*batch"]] = field(default_factory=dict)  # nu, Mach...: hidden from models
    cells: tuple[Int[Tensor, "_cells _corners"], ...] | None = None  # for plots and weights only

    def to(self: Kind, *args, **kwargs) -> Kind:
        """The same sample on another device or in another floating type; `cells` stay where they are."""
        return dataclasses.replace(
            self,
            input=self.input.to(*args, **kwargs),
            query=self.query.to(*args, **kwargs),
            target=self.target.to(*args, **kwargs),
            parameters={name: value.to(*args, **kwargs) for name, value in self.parameters.items()},
        )


@dataclass(frozen=True)
class Batch(Sample):
    """A `Sample` with a batch axis; samples of fewer points are padded with weight zero."""

    @property
    def size(self) -> int:
        """How many samples."""
        return self.target.shape[0]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with each of its tensors changed; the cells stay."""

        def field(f: Field) -> Field:
            return Field(change(f.coords), change(f.values), change(f.weights))

        input, query = field(self.input), field(self.query)
        if self.query.coords is self.input.coords:
            query = dataclasses.replace(query, coords=input.coords)
        return Batch(
            input=input,
            query=query,
            target=change(self.target),
            parameters={name: change(value) for name, value in self.parameters.items()},
            cells=self.cells,
        )


@dataclass(frozen=True)
class Spec:
    """What a model must know of a problem, and all it knows. Read off a dataset, never typed by hand."""

    dim: int
    in_times: int
    in_channels: int
    out_times: int
    out_channels: int
    query_channels: int = 0
    in_categories: int = 0  # if not 0, the last input channel is a code 0..in_categories-1 (a node type)
    query_categories: int = 0  # the same for the last query channel
    grid: tuple[int, ...] | None = None  # points per axis, row-major; None on scattered points
    periods: tuple[float, ...] | None = None  # the domain's period along each axis; None if it has none

    def __post_init__(self) -> None:
        if self.dim not in (1, 2, 3):
            raise InputError("1, 2 or 3 space dimensions", str(self.dim), "Give coordinates of shape (points, dim)")
        for name in ("in_times", "in_channels", "out_times", "out_channels"):
            if getattr(self, name) < 1:
                raise InputError(f"at least one in `{name}`", str(getattr(self, name)))
        for name in ("grid", "periods"):
            value = getattr(self, name)
            if value is not None and len(value) != self.dim:
                raise InputError(f"`{name}` with one entry per dimension ({self.dim})", str(value))
            if value is not None and not all(0 < entry < float("inf") for entry in value):
                raise InputError(f"entries above zero in `{name}`", str(value))
        for name in ("query_channels", "in_categories", "query_categories"):
            if getattr(self, name) < 0:
                raise InputError(f"zero or more in `{name}`", str(getattr(self, name)))


@dataclass(frozen=True)
class Picture:
    """What to look at first in a sample, of the many things that could be drawn."""

    input: int = 0  # which input channel
    target: int = 0  # which target channel
    vector: tuple[int, int] | None = None  # two target channels that are a vector of the plane
    window: tuple[float, float, float, float] | None = None  # left, right, bottom, top of a close-up


@dataclass(frozen=True)
class Card:
    """What people want to know of a dataset: its names and its story."""

    title: str
    text: str = ""
    inputs: tuple[str, ...] = ()  # a name per input channel
    queries: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    picture: Picture = Picture()


def as_tensor(name: str, numbers: Tensor | np.ndarray) -> Tensor:
    """Tensors as they are; arrays as float32, copied where torch cannot share them: reversed, read-only, byte-swapped.

    Args:
        name: how the caller calls it, for the message.
        numbers: of any shape.
    """
    if isinstance(numbers, Tensor):
        return numbers
    array = np.asarray(numbers)
    if array.dtype.kind not in "fiub":
        raise InputError(f"real numbers in `{name}`", f"the type {array.dtype}", "Convert them to float32")
    with np.errstate(over="ignore"):  # what becomes infinite is refused with the others that are
        return torch.from_numpy(np.require(array, np.float32, ("C", "W")))


def how_to_turn(turned: str, shape: Sequence[int]) -> str:
    """What to do with points whose two axes are swapped, as more axes than space has give away; nothing about others.

    Args:
        turned: the Python that swaps them.
        shape: as they came.
    """
    *batch, dim, points = shape
    return f"It looks transposed: give `{turned}`, of shape {(*batch, points, dim)}" * (dim <= MOST_AXES < points)


def uniform_weights(coords: Float[Tensor, "*batch points dim"]) -> Float[Tensor, "*batch points"]:
    """The paper's weight: 1/n for each of n points."""
    if coords.shape[-2] == 0:
        raise InputError("at least one point", "an empty point set", "Remove the sample or give its points")
    return torch.full(coords.shape[:-1], 1.0 / coords.shape[-2], dtype=coords.dtype, device=coords.device)


def check_field(
    name: str,
    field: Field,
    dim: int | None = None,
    times: int | None = None,
    channels: int | None = None,
) -> None:
    """Refuse a field that no model can use: wrong counts, empty, NaN or infinite.

    Args:
        name: how the caller calls it, for the message.
        field: with or without a batch axis.
        dim: the space dimension it must have, if known.
        times: the number of frames it must have, if known.
        channels: the number of channels it must have, if known.
    """
    coords, values, weights = field.coords, field.values, field.weights
    if coords.ndim < 2 or values.ndim != coords.ndim + 1 or weights.ndim != coords.ndim - 1:
        raise InputError(
            f"`{name}` with coords (..., points, dim), values (..., times, points, channels), weights (..., points)",
            f"{tuple(coords.shape)}, {tuple(values.shape)}, {tuple(weights.shape)}",
            "Add the missing axis; it may have size 1",
        )
    points = coords.shape[-2]
    if points == 0:
        raise InputError(
            f"at least one point in `{name}`", "an empty point set", "Remove the sample or give its points"
        )
    if dim is not None and coords.shape[-1] != dim:
        lives = (
            f"This model or dataset lives in {dim} dimension{'s' * (dim > 1)}; use data or a recipe of that dimension"
        )
        raise InputError(
            f"`{name}.coords` of shape (..., points, {dim})",
            str(tuple(coords.shape)),
            how_to_turn(TURNED, coords.shape) or lives,
        )
    if values.shape[-2] != points or weights.shape[-1] != points:
        raise InputError(
            f"as many values and weights as points in `{name}` ({points})",
            f"{values.shape[-2]} values and {weights.shape[-1]} weights",
            "Coords have shape (..., points, dim), values (..., times, points, channels), weights (..., points)",
        )
    for label, wanted, axis in (("frames", times, -3), ("channels", channels, -1)):
        if wanted is not None and values.shape[axis] != wanted:
            raise InputError(
                f"{wanted} {label} in `{name}.values`",
                f"{values.shape[axis]} (shape {tuple(values.shape)})",
                "Values have shape (..., times, points, channels)",
            )
    for label, tensor in (("coords", coords), ("values", values), ("weights", weights)):
        check_finite(f"{name}.{label}", tensor)
    if bool((weights < 0).any()) or bool((weights.sum(-1) <= 0).any()):
        raise InputError(
            f"weights of `{name}` that are not negative and not all zero",
            "others",
            "Leave them out for equal weights",
        )


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinite values, and say how many."""
    if bad := count_not_finite(tensor):
        raise InputError(
            f"finite numbers in `{name}`", f"{bad} NaN or infinite values of {tensor.numel()}", "Remove or fill them"
        )


def count_not_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite."""
    # The smallest and the largest number tell it in a fraction of the time of looking at each; a NaN is both.
    if not tensor.numel() or bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
        return 0
    return int((~torch.isfinite(tensor)).sum())


def check_sample(sample: Sample, spec: Spec | None = None, where: str = "sample") -> None:
    """Refuse a sample whose parts contradict each other or, where given, the spec."""
    s = spec
    check_field(f"{where}.input", sample.input, *((s.dim, s.in_times, s.in_channels) if s else ()))
    check_field(f"{where}.query", sample.query, sample.input.coords.shape[-1], None, s.query_channels if s else None)
    if sample.target.ndim != sample.query.values.ndim:
        raise InputError(
            f"`{where}.target` of shape (..., times, queries, channels)",
            str(tuple(sample.target.shape)),
            "Add the missing axis",
        )
    if sample.target.shape[-2] != sample.query.points:
        raise InputError(
            f"one target value per query point in `{where}` ({sample.query.points})",
            f"{sample.target.shape[-2]}",
            "Targets have shape (times, queries, channels)",
        )
    if s and (sample.target.shape[-3] != s.out_times or sample.target.shape[-1] != s.out_channels):
        raise InputError(
            f"`{where}.target` of shape ({s.out_times}, queries, {s.out_channels})",
            str(tuple(sample.target.shape)),
            "All samples share frames and channels",
        )
    check_finite(f"{where}.target", sample.target)


def _padded(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Stack tensors that differ along one axis, filling with zeros."""
    longest = max(t.shape[axis] for t in tensors)
    shape = list(tensors[0].shape)
    shape[axis] = longest
    stacked = tensors[0].new_zeros((len(tensors), *shape))
    for row, tensor in zip(stacked, tensors, strict=True):
        row.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return stacked


def _repeated(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """The same, but a tensor that all samples share is expanded, not copied: models then compute on it once."""
    if len(tensors) > 1 and all(t is tensors[0] for t in tensors):
        return tensors[0].expand(len(tensors), *tensors[0].shape)
    return _padded(tensors, axis)


def _collate_fields(fields: Sequence[Field], stack_values: Callable[[Sequence[Tensor], int], Tensor]) -> Field:
    return Field(
        coords=_repeated([f.coords for f in fields], -2),
        values=stack_values([f.values for f in fields], -2),
        weights=_repeated([f.weights for f in fields], -1),
    )


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples into a batch; points and queries may differ in number, the rest is padded with weight zero.

    Coordinates, weights and query values that are one tensor in all samples stay one: they are expanded.
    """
    if not samples:
        raise InputError("at least one sample in a batch", "none")
    names = samples[0].parameters.keys()
    if any(sample.parameters.keys() != names for sample in samples):
        raise InputError(
            "the same parameters in all samples of a batch", "differing names", "Give each sample all of them"
        )
    cells = tuple(sample.cells[0] for sample in samples if sample.cells)
    return Batch(
        input=_collate_fields([s.input for s in samples], _padded),
        query=_collate_fields([s.query for s in samples], _repeated),
        target=_padded([s.target for s in samples], -2),
        parameters={name: torch.stack([s.parameters[name] for s in samples]) for name in names},
        cells=cells if len(cells) == len(samples) else None,
    )
