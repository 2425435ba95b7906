"""Datasets of functions known at points, your own or a store's, and the view through which models see it."""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from oformer import files
from oformer.checks import check_field, check_sample
from oformer.data.arrays import Arrays, samples_of
from oformer.data.exchange import as_xarray, write_hdf5
from oformer.data.manifest import Splits
from oformer.data.part_file import Storage
from oformer.data.store import Store
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field, Sample, Spec, described
from oformer.meshes.grids import thinning
from oformer.meshes.subsets import SubsetWeights, keep_points, usual_weights
from oformer.seeds import torch_generator
from oformer.statistics import Statistics, measure
from oformer.terminal import Described

if TYPE_CHECKING:
    import xarray


@runtime_checkable
class Source(Protocol):
    """Any sequence of samples: a `Store`, a list."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """One of the samples."""
        ...


@dataclass(frozen=True)
class View:
    """A subset of the points and frames of a dataset, through which a model sees it. Nothing on disk changes."""

    points: tuple[int, ...] | int | None = None  # thin the regular grid of input and queries to so many per axis
    query_points: tuple[int, ...] | int | None = None  # the same for queries only
    keep: float = 1.0  # a random fraction of the input points, the same ones of a sample each time it is seen
    keep_seed: int = 0
    keep_weights: SubsetWeights | None = None  # of these points; None: those of a quadrature. The paper's are `scaled`
    in_times: int | None = None  # the last so many input frames
    out_times: int | None = None  # the first so many target frames

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise InputError("a fraction `keep` of the input points above 0 and at most 1", f"{self.keep:g}")
        if self.keep_seed < 0:
            raise InputError("a `keep_seed` of zero or more", str(self.keep_seed))
        for name in ("in_times", "out_times"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"at least one frame in `{name}`", str(value))

    def apply_to_spec(self, spec: Spec) -> Spec:
        """The spec of what is seen; its grid is that of the queries, also where inputs have other points."""
        for name in ("in_times", "out_times"):
            if (value := getattr(self, name)) is not None and value > getattr(spec, name):
                raise InputError(f"at most the {getattr(spec, name)} frames there are in `{name}`", str(value))
        grid = spec.grid
        for name in ("points", "query_points"):
            if (wanted := getattr(self, name)) is not None:
                grid = _thinned_grid(name, wanted, spec)
        return dataclasses.replace(
            spec,
            grid=grid,
            in_times=self.in_times or spec.in_times,
            out_times=self.out_times or spec.out_times,
        )


class PointDataset(Described, Dataset[Sample]):
    """A sequence of samples in float32 with their spec, seen through a view; batched by `collate` in a DataLoader."""

    def __init__(
        self,
        source: Source,
        view: View | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        spec: Spec | None = None,
        card: Card | None = None,
    ):
        """Look at samples.

        Args:
            source: where they come from.
            view: how to look at them.
            indices: which ones, in which order; by default all.
            spec: the shapes in the source. By default the source's own, or read off the first sample; then
                all samples are checked to agree with it.
            card: names and story; by default the source's own.
        """
        if len(source) == 0:
            raise InputError("at least one sample in a dataset", "none")
        known: Spec | None = getattr(source, "spec", None)
        self._source, self._source_spec = source, spec or known or _spec_of(source)
        if known is None:
            _check_all(source, self._source_spec)
        self.card: Card = card or getattr(source, "card", None) or Card("Untitled dataset")
        self._look(view or View(), np.arange(len(source)))
        if indices is not None:
            self._look(self.view, _checked_indices(indices, len(source)))

    @property
    def checksum(self) -> str | None:
        """The SHA-256 of all samples of the source, whatever the view; None where they have no files."""
        return getattr(self._source, "checksum", None)

    def _look(self, view: View, indices: np.ndarray) -> None:
        if len(indices) == 0:
            raise InputError("at least one sample in a dataset", "none")
        full = self._source_spec
        self.view, self.spec, self._indices = view, view.apply_to_spec(full), indices
        self._input_rows = _rows("points", view.points, full)
        wanted = view.points if view.query_points is None else view.query_points
        self._query_rows = _rows("query_points", wanted, full)
        # What samples share stays one tensor when it is thinned: (before, after) of the last one, by name.
        self._memory: dict[str, tuple[Tensor, Tensor]] = {}
        self._statistics: Statistics | None = None

    @classmethod
    def open(cls, folder: Path | str, view: View | None = None) -> "PointDataset":
        """A dataset that was generated or saved before."""
        return cls(Store.open(folder), view)

    @classmethod
    def from_arrays(
        cls,
        coords: Arrays,
        inputs: Arrays,
        targets: Arrays,
        *,
        query_coords: Arrays | None = None,
        query_values: Arrays | None = None,
        weights: Arrays | None = None,
        query_weights: Arrays | None = None,
        parameters: Mapping[str, Any] | None = None,
        periods: tuple[float, ...] | None = None,
        grid: tuple[int, ...] | None = None,
        card: Card | None = None,
        in_categories: int = 0,
        query_categories: int = 0,
    ) -> "PointDataset":
        """A dataset from your own arrays (numpy, torch, or lists), with any number of points per sample.

        Args:
            coords: (points, dim) for all samples, (samples, points, dim), or a list of (points_i, dim). On a
                line the last axis may be missing in what all samples share and in lists.
            inputs: (samples, points), (samples, points, channels) or (samples, times, points, channels), or a
                list of (points_i,), (points_i, channels) or (times, points_i, channels).
            targets: the same at the query points.
            query_coords: where the targets are; by default at the input points. Forms as for `coords`.
            query_values: what is known there (a node type...). Forms as for `inputs`.
            weights: quadrature weights of the input points, scaled to sum 1: (points,) for all samples,
                (samples, points), or a list; by default equal ones.
            query_weights: the same at the query points; by default those of the input where the points are
                the same, else equal ones.
            parameters: numbers by name, (samples,) or one for all; not shown to models.
            periods: the domain's period along each axis.
            grid: points per axis if the queries form a regular grid, row by row.
            card: names and story.
            in_categories: if not 0, the last input channel is a code 0..in_categories-1.
            query_categories: the same for the last channel of `query_values`.
        """
        samples = samples_of(coords, inputs, targets, query_coords, query_values, weights, query_weights, parameters)
        spec = _spec_of(samples, grid, periods, in_categories, query_categories)
        return cls(samples, spec=spec, card=card)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(self._indices[index])
        sample, view = self._source[number], self.view
        inputs = self._seen("input", sample.input, self._input_rows, number)
        query = self._seen("query", sample.query, self._query_rows, number)
        target = sample.target.to(torch.float32)
        if self._query_rows is not None:
            target = target[:, self._query_rows]
        if view.keep < 1:
            random, weights = torch_generator(view.keep_seed, number), view.keep_weights or usual_weights(self.spec)
            inputs = keep_points(inputs.batched(), view.keep, random, weights, self.spec.periods).single(0)
        values = inputs.values[-(view.in_times or 0) :]
        thinned = self._input_rows is not None or self._query_rows is not None
        return Sample(
            input=inputs.with_values(values),
            query=query,
            target=target[: self.spec.out_times],
            parameters={name: value.to(torch.float32) for name, value in sample.parameters.items()},
            cells=None if thinned else sample.cells,
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def _facts(self) -> dict[str, Any]:
        changed = {name: value for name, value in vars(self.view).items() if value != getattr(View(), name)}
        return {"samples": len(self), **described(self.card, self.spec), **changed}

    @property
    def source_spec(self) -> Spec:
        """The shapes in the source, before any view."""
        return self._source_spec

    @property
    def periods(self) -> tuple[float, ...] | None:
        """The domain's period along each axis."""
        return self.spec.periods

    @property
    def splits(self) -> Splits:
        """The splits of the source, as [first, end) of its samples."""
        return self._source.splits if isinstance(self._source, Store) else {}

    def split(self, name: str) -> "PointDataset":
        """The samples of a split that this dataset has."""
        splits = self.splits
        if not splits:
            raise InputError("a dataset with splits", "one without", "Use `subset`")
        if name not in splits:
            raise unknown_name("split", name, splits)
        first, end = splits[name]
        return self._with(indices=self._indices[(self._indices >= first) & (self._indices < end)])

    def subset(self, indices: Sequence[int] | np.ndarray) -> "PointDataset":
        """A dataset of some of the samples, by their place in this dataset."""
        return self._with(indices=self._indices[_checked_indices(indices, len(self))])

    def with_view(self, view: View) -> "PointDataset":
        """A dataset of the same samples, seen through another view (which replaces the present one)."""
        return self._with(view=view)

    def _with(self, view: View | None = None, indices: np.ndarray | None = None) -> "PointDataset":
        other = copy.copy(self)
        other._look(view or self.view, self._indices if indices is None else indices)
        return other

    def sizes(self) -> Int[np.ndarray, "samples 2"]:
        """The numbers of input points and of queries of each sample."""
        source = self._source
        if isinstance(source, Store):
            sizes = source.sizes()[self._indices]
        else:
            sizes = np.array([[source[i].input.points, source[i].query.points] for i in map(int, self._indices)])
        for column, rows in enumerate((self._input_rows, self._query_rows)):
            if rows is not None:
                sizes[:, column] = len(rows)
        if self.view.keep < 1:
            sizes[:, 0] = [max(1, round(self.view.keep * int(n))) for n in sizes[:, 0]]
        return sizes

    def statistics(self) -> Statistics:
        """Mean, standard deviation and range of each channel as seen, measured once in float64."""
        if self._statistics is None:
            self._statistics = measure(self)
        return self._statistics

    def save(
        self,
        folder: Path | str,
        *,
        splits: Splits | None = None,
        part_size: int = 64,
        storage: Storage = "float32",
        overwrite: bool = False,
    ) -> Store:
        """Write the dataset, as seen, as a store.

        Args:
            folder: where; it appears there complete or not at all.
            splits: [first, end) by name; by default those of the source if all of it is here, else all is for
                training.
            part_size: samples per file.
            storage: how values are kept.
            overwrite: replace a dataset that is already there.
        """
        folder = Path(folder)
        if folder.exists() and not (overwrite and (folder / "dataset.json").exists()):
            raise InputError(
                f"no file or folder yet at {folder}",
                "one",
                "Choose another name, or replace a dataset with overwrite=True",
            )
        # Splits and settings stay those of the source where nothing of it was left out.
        whole = np.array_equal(self._indices, np.arange(len(self._source)))
        same = self._source if whole and self.view == View() and isinstance(self._source, Store) else None
        if splits is None and whole and self.splits:
            splits = self.splits
        with files.new_folder(folder) as place:
            writer = Store.create(
                place,
                spec=self.spec,
                card=self.card,
                count=len(self),
                splits=splits,
                part_size=part_size,
                storage=storage,
                problem=same.problem_settings if same is not None else None,
                seed=same.manifest.seed if same is not None else None,
            )
            for part in range(writer.parts):
                writer.write(part, [self[i] for i in writer.indices(part)])
            writer.finalize()
        return Store.open(folder)

    def to_hdf5(self, path: Path | str) -> None:
        """Write the dataset, as seen, as an HDF5 file with a group for each sample, which `oformer train --data` takes.

        A group has `coords`, `inputs`, `weights`, `query_coords`, `query_weights`, `targets`, and `query_features` if
        there are some; parameters are its attributes.
        """
        write_hdf5(self, Path(path))

    def to_xarray(self) -> "xarray.Dataset":
        """All samples, as seen, in one Dataset: `input`, `target`, their points and weights, and the parameters.

        Samples of fewer points are padded; a point of padding has weight zero.
        """
        return as_xarray(self)

    def _seen(self, role: str, field: Field, rows: Tensor | None, number: int) -> Field:
        """A field in float32, thinned to some of its rows."""
        if rows is not None and field.points != math.prod(self._source_spec.grid or ()):
            raise InputError(
                f"the {role} of sample {number} on the grid {self._source_spec.grid} to thin it",
                f"{field.points} points",
                "Thin the queries alone with `query_points`" if role == "input" else "Use no `points` in the view",
            )

        def thinner(name: str, tensor: Tensor, axis: int) -> Tensor:
            before, after = self._memory.get(f"{role}.{name}", (None, tensor))
            if before is tensor:
                return after
            after = tensor.to(torch.float32)
            after = after if rows is None else after.index_select(axis, rows)
            if name == "weights" and rows is not None:
                after = after / after.sum()
            self._memory[f"{role}.{name}"] = (tensor, after)
            return after

        coords, weights = thinner("coords", field.coords, 0), thinner("weights", field.weights, 0)
        return Field(coords, thinner("values", field.values, 1), weights)


def _checked_indices(indices: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    array = np.asarray(indices)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InputError("a list of at least one sample number", f"an array of {array.dtype} of shape {array.shape}")
    if array.min() < -count or array.max() >= count:
        raise InputError(f"sample numbers below {count}", str(array[(array < -count) | (array >= count)][0]))
    return array.astype(np.int64) % count


def _thinned_grid(name: str, wanted: tuple[int, ...] | int, spec: Spec) -> tuple[int, ...]:
    if spec.grid is None:
        raise InputError(
            f"a regular grid to thin with `{name}`", "scattered points", "Use `keep` for a random fraction"
        )
    grid = (wanted,) * spec.dim if isinstance(wanted, int) else tuple(wanted)
    if len(grid) != spec.dim:
        raise InputError(f"`{name}` with one number per dimension ({spec.dim})", str(wanted))
    return grid


def _rows(name: str, wanted: tuple[int, ...] | int | None, spec: Spec) -> Int[Tensor, "rows"] | None:
    """The rows that a thinned grid keeps."""
    if wanted is None:
        return None
    grid = _thinned_grid(name, wanted, spec)
    full = spec.grid or ()
    strides = thinning(full, grid, spec.periods is not None)
    if set(strides) == {1}:
        return None
    numbers = torch.arange(math.prod(full)).reshape(full)
    return numbers[tuple(slice(None, None, stride) for stride in strides)].reshape(-1)


def _spec_of(
    samples: Source,
    grid: tuple[int, ...] | None = None,
    periods: tuple[float, ...] | None = None,
    in_categories: int = 0,
    query_categories: int = 0,
) -> Spec:
    """The spec that the first sample has."""
    sample = samples[0]
    check_sample(sample, None, "sample 0")
    return Spec(
        dim=sample.input.coords.shape[-1],
        in_times=sample.input.values.shape[0],
        in_channels=sample.input.values.shape[-1],
        out_times=sample.target.shape[0],
        out_channels=sample.target.shape[-1],
        query_channels=sample.query.values.shape[-1],
        in_categories=in_categories,
        query_categories=query_categories,
        grid=grid,
        periods=periods,
    )


def _check_all(samples: Source, spec: Spec) -> None:
    names, query_times = samples[0].parameters.keys(), samples[0].query.values.shape[0]
    for i in range(len(samples)):
        sample, where = samples[i], f"sample {i}"
        check_sample(sample, spec, where)
        check_field(f"{where}.query", sample.query, times=query_times)
        if sample.parameters.keys() != names:
            raise InputError(f"the parameters of sample 0 in {where}", "other names", "Give each sample all of them")
