"""The currency: a function known at points.

Solvers make it, datasets store it, models map it, plots draw it. A `Field` carries quadrature weights that sum to one;
**a mask is a weight of zero**, so padding, dropped points and true quadrature are one argument everywhere.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.errors import InputError, optional_module
from oformer.nn.shared_grids import once_per_grid
from oformer.terminal import Described

if TYPE_CHECKING:
    import xarray

MOST_AXES = 3  # of space
TURNED = "coords.swapaxes(-1, -2)"  # for arrays and tensors, with and without a batch axis

# Not `typing.Self`: the shape checks of the tests wrap methods one by one, where Self means nothing.
Kind = TypeVar("Kind", bound="Sample")


@dataclass(frozen=True, repr=False)
class Field(Described):
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
        """The number of points, padding included."""
        return self.coords.shape[-2]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates, values and weights, in the order in which `Field` takes them."""
        return self.coords, self.values, self.weights

    def map(self, function: Callable[[Tensor], Tensor]) -> "Field":
        """The field with `function(tensor)` in place of each of its three tensors.

        In a batch, a tensor that all samples share (a grid) is passed to the function as one sample, and the result is
        expanded: it is computed once and stays shared.

        Args:
            function: for a batch, one that keeps the batch axis and treats each sample alone.
        """
        return self.map_points(lambda tensor, _: function(tensor))

    def map_points(self, function: Callable[[Tensor, int], Tensor]) -> "Field":
        """As `map`, with `function(tensor, axis)`, where `axis` is that of the points: -2, or -1 for the weights."""

        def changed(tensor: Tensor, axis: int) -> Tensor:
            if self.coords.ndim != 3:  # without a batch axis
                return function(tensor, axis)
            return once_per_grid(lambda one: function(one, axis), tensor)

        return Field(changed(self.coords, -2), changed(self.values, -2), changed(self.weights, -1))

    def take(self, points: slice) -> "Field":
        """Some points of each sample, with the weights that they have among all; a shared grid stays shared."""
        return Field(self.coords[..., points, :], self.values[..., points, :], self.weights[..., points])

    def samples(self, chosen: slice) -> "Field":
        """Some samples of a batch; a grid that they share stays shared."""
        return Field(*(tensor[chosen] for tensor in self.tensors))

    def with_values(self, values: Float[Tensor, "*batch times points channels"]) -> "Field":
        """Other values at the same points, with the same weights."""
        return dataclasses.replace(self, values=values)

    def batched(self) -> "Field":
        """The field as a batch of one sample."""
        return Field(*(tensor[None] for tensor in self.tensors))

    def single(self, index: int) -> "Field":
        """One field of a batch."""
        return Field(*(tensor[index] for tensor in self.tensors))

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
        """The field on another device or in another floating type; a grid that a batch shares stays shared."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def numpy(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Coordinates, values and weights as arrays of numpy: of the same shapes, on the CPU, without gradients."""
        coords, values, weights = (tensor.detach().cpu().numpy() for tensor in self.tensors)
        return coords, values, weights

    def to_xarray(self, names: Sequence[str] | None = None) -> "xarray.Dataset":
        """A Dataset with a variable (time, point) for each channel; of a batch (sample, time, point).

        Args:
            names: of the channels; by default `value`, or `value_0`, `value_1`...
        """
        from oformer.field_files import channel_names

        library = optional_module("xarray", "Field.to_xarray", "pip install 'oformer[io]'")
        coords, values, weights = self.numpy()
        batch = ("sample",) * (coords.ndim - 2)
        axes = {axis: ((*batch, "point"), coords[..., k]) for k, axis in enumerate("xyz"[: coords.shape[-1]])}
        channels = channel_names(names, values.shape[-1])
        data = {name: ((*batch, "time", "point"), values[..., k]) for k, name in enumerate(channels)}
        return library.Dataset(data, {**axes, "weights": ((*batch, "point"), weights)})

    def to_vtu(self, path: Path | str, cells: Any = None, names: Sequence[str] | None = None) -> list[Path]:
        """Write a `.vtu` for ParaView; of several frames a `.pvd`, which is the file to open, and a `.vtu` for each.

        Args:
            path: ends in `.vtu` or `.pvd`.
            cells: indices of points: (cells, 2) of lines, (cells, 3) of triangles, (cells, 4) of quadrilaterals in the
                plane and of tetrahedra in space, (cells, 8) of hexahedra; a list of such arrays where kinds are mixed.
                Without cells, ParaView shows points.
            names: of the channels; `v_x` and `v_y` become a vector `v`.

        Returns:
            The files that were written, the one to open first.
        """
        from oformer.field_files import check_ending, save_field

        check_ending(Path(path), (".vtu", ".pvd"))
        return save_field(Path(path), self, cells, names)

    def _facts(self) -> dict[str, Any]:
        *batch, times, points, channels = self.values.shape
        facts = dict(zip(["samples"], batch, strict=False)) | {"points": points, "dim": self.coords.shape[-1]}
        return facts | {"times": times, "channels": channels, "device": str(self.values.device)}


@dataclass(frozen=True)
class Sample:
    """One training example, in physical units. With a leading batch axis it is a `Batch`."""

    input: Field  # what is known
    query: Field  # where to answer; values = query features (node type...), often none
    target: Float[Tensor, "*batch times queries channels"]
    parameters: Mapping[str, Float[Tensor, "*batch"]] = field(default_factory=dict)  # nu, Mach...: hidden from models
    cells: tuple[Int[Tensor, "_cells _corners"], ...] | None = None  # for plots and weights only

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of input and query, the target, and the parameters; not the cells."""
        return (*self.input.tensors, *self.query.tensors, self.target, *self.parameters.values())

    def with_tensors(self: Kind, tensors: Sequence[Tensor]) -> Kind:
        """The sample or batch with other tensors, in the order of `tensors`; `cells` stay."""
        input, query, target, parameters = Field(*tensors[:3]), Field(*tensors[3:6]), tensors[6], tensors[7:]
        named = dict(zip(self.parameters, parameters, strict=True))
        return dataclasses.replace(self, input=input, query=query, target=target, parameters=named)

    def map(self: Kind, function: Callable[[Tensor], Tensor]) -> Kind:
        """The sample or batch with `function(tensor)` in place of each of its tensors, as `Field.map`; `cells` stay.

        A tensor that is there twice, such as coordinates of both input and query, is passed to the function once.
        """
        batched = self.target.ndim == 4
        changed = {id(t): once_per_grid(function, t) if batched else function(t) for t in self.tensors}
        return self.with_tensors([changed[id(tensor)] for tensor in self.tensors])

    def to(self: Kind, *args, **kwargs) -> Kind:
        """The sample or batch on another device or in another floating type; `cells` stay where they are."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))


@dataclass(frozen=True)
class Batch(Sample):
    """A `Sample` with a batch axis; samples of fewer points are padded with weight zero."""

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.target.shape[0]

    def samples(self, chosen: slice) -> "Batch":
        """Some samples of the batch; a grid that they share stays shared, and so does the query's with the input."""
        taken = {id(tensor): tensor[chosen] for tensor in self.tensors}
        some = self.with_tensors([taken[id(tensor)] for tensor in self.tensors])
        return dataclasses.replace(some, cells=self.cells and self.cells[chosen])


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


def described(card: Card, spec: Spec) -> dict[str, str]:
    """What people ask first of a dataset or an operator, by name."""
    return {
        "title": card.title,
        "inputs": f"{spec.in_times} x {', '.join(card.inputs) or f'{spec.in_channels} channel(s)'}",
        "targets": f"{spec.out_times} x {', '.join(card.targets) or f'{spec.out_channels} channel(s)'}",
        "points": " x ".join(map(str, spec.grid)) if spec.grid else f"scattered in {spec.dim}-D",
    }


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
    """As `_padded`, but a tensor that all samples share is expanded, not copied: models then compute on it once."""
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
