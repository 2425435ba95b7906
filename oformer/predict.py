"""Predictor: any input points, any query points, any horizon, in physical units."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from oformer.checks import check_field, check_finite, count_not_finite
from oformer.engine.pinned_copy import PinnedCopy
from oformer.engine.runners import Chunked, Compiled, Plain
from oformer.errors import InputError, OutOfMemory, OutsideTraining
from oformer.fields import Card, Field, Spec, as_tensor, described, how_to_turn
from oformer.files import free_memory, load_npz
from oformer.gpu import compute_device
from oformer.meshes.grids import periodic_grid
from oformer.models.base import Precision, products_in
from oformer.models.operator import rollout
from oformer.terminal import Described

# Points, times samples, that are computed at once even where memory has room for more: more would gain little time.
TOGETHER_ON_CPU, TOGETHER_ON_GPU = 65_536, 1_048_576
HELD = 7  # tensors of the widest layer that live at once in a prediction: between five and seven were measured
BESIDE = 0.2  # of the memory to compute in: up to so much, input and queries as a whole are taken to the device
FREE_OF_CPU, FREE_OF_GPU = 0.5, 0.8  # parts of the free memory that are taken where nobody says how much
UNKNOWN_GB = 4.0  # of free memory, where the system does not tell


class Predictor(Described):
    """A trained operator ready for use.

    The input is encoded once, and queries are answered in chunks. What does not fit in memory goes through the model
    chunk by chunk, input points and queries alike, and gets the same answers (`engine/chunked.py`).
    """

    def __init__(
        self,
        source: str | Path | Checkpoint,
        device: torch.device | str | None = None,
        *,
        precision: Precision = "float32",
        compile: bool = False,
        memory_gb: float | None = None,
        warn: bool = True,
        differentiable: bool = False,
    ):
        """Load a trained operator.

        Args:
            source: a run folder, a checkpoint folder, the name of a trained operator, or a loaded checkpoint.
            device: where to compute; by default a GPU if there is one.
            precision: float32 as trained, or faster on a GPU: products in TF32, or the model in float16 or bfloat16.
            compile: compile the model at the first call, which takes a minute; pays for many calls of one shape.
            memory_gb: GiB to compute in, beside the weights; by default most of what is free when it is called.
            warn: whether to warn (`OutsideTraining`) of inputs far from all that training has shown.
            differentiable: keep the graph, so that answers have gradients by the input's values and coordinates and
                by the query points. All points are then in the model at once, and the answer stays on the device.
        """
        if memory_gb is not None and not memory_gb > 0:
            raise InputError("`memory_gb` above zero", str(memory_gb))
        if compile and differentiable:  # torch 2.13 returned other derivatives by coordinates than uncompiled code
            raise InputError("`compile` or `differentiable`", "both", "Leave `compile` out")
        self.device = compute_device(device)
        self.checkpoint = (
            source if isinstance(source, Checkpoint) else load_checkpoint(find_checkpoint(source), self.device)
        )
        self.operator = self.checkpoint.operator.to(self.device).eval()
        self.precision: Precision = precision
        self.memory_gb, self.warn, self.differentiable = memory_gb, warn, differentiable
        self.runner = (Compiled if compile else Plain)(self.operator, precision)

    @property
    def spec(self) -> Spec:
        """The shape of the problem it was trained for."""
        return self.operator.spec

    def _facts(self) -> dict[str, Any]:
        trained_for = described(self.checkpoint.data or Card(""), self.spec)
        name, model = self.checkpoint.name, self.operator.model.name
        return {"name": name, "model": model, **trained_for, "device": str(self.device)}

    def __call__(
        self,
        field: Field | Tensor | np.ndarray,
        values: Tensor | np.ndarray | Field | None = None,
        query_points: Float[Tensor, "*batch queries dim"] | np.ndarray | Field | None = None,
        *,
        times: int | None = None,
        chunk: int | None = None,
        answer_on: torch.device | str = "cpu",
    ) -> Field:
        """Predict: `predict(field, query_points)`, or with plain arrays `predict(coords, values, query_points)`.

        Args:
            field: what is known, with or without a batch axis, on any device; or the coordinates of its points.
            values: at these coordinates, shaped as for `Field.of`; after a Field, the query points.
            query_points: where to answer; a Field where the model wants query features; by default the input points.
            times: how many steps; by default as many as it was trained for.
            chunk: queries of a sample at once; by default what memory allows. It changes no answer.
            answer_on: the device on which the answer is put together.
        """
        if chunk is not None and chunk < 1:
            raise InputError("a chunk of at least one query", str(chunk))
        if isinstance(field, Field) and values is not None:
            if query_points is not None:
                raise InputError("a Field and query points", "a third argument", "The number of frames is `times=`")
            query_points = values
        elif not isinstance(field, Field):
            if values is None or isinstance(values, Field):
                raise InputError("a Field, or coordinates and their values", type(field).__name__, "Give both arrays")
            coords = as_tensor("coords", field)
            field = Field.of(coords[:, None] if coords.ndim == self.spec.dim == 1 else coords, values)
        # One batch of float32 fields, checked.
        times = self.operator.horizon(times)
        query = self._query(field, query_points)
        single = field.coords.ndim == 2
        if single:
            field, query = field.batched(), query.batched()
        field, query = field.to(torch.float32), query.to(torch.float32)
        batch = field.coords.shape[0]
        if query.coords.shape[0] != batch:
            query = Field(*(tensor.expand(batch, *tensor.shape[1:]) for tensor in query.tensors))
        self.operator.check(field, query)
        for words in self.operator.outside(field, query) if self.warn else ():
            warnings.warn(f"Outside of what it was trained on, and so perhaps wrong: {words}", OutsideTraining, 2)
        # The answer, with or without the graph that gradients need.
        if self.differentiable:
            answer = self._with_graph(field, query, times)
        else:
            given = (*field.tensors, query.coords, query.values)
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
                raise InputError(
                    "tensors without gradients for a Predictor that keeps none",
                    "one with requires_grad=True",
                    "Make it Predictor(..., differentiable=True), or give tensor.detach()",
                )
            with torch.no_grad():
                answer = self._without_graph(field, query, times, chunk, torch.device(answer_on))
        if self.warn and (bad := count_not_finite(answer.values.detach())):
            counted = f"{bad} NaN or infinite values of {answer.values.numel()}"
            warnings.warn(f"The answer holds {counted}; check the units of the input", OutsideTraining, 2)
        return answer.single(0) if single else answer

    def _with_graph(self, field: Field, query: Field, times: int) -> Field:
        """The answer on the operator's device, all points at once, and what leads to its gradients."""
        field, query = field.to(self.device), query.to(self.device)
        if not (field.coords.requires_grad or query.coords.requires_grad):
            query = query.sharing(field)
        with products_in(self.precision):
            return query.with_values(self.runner(field, query, times))

    def _without_graph(
        self, field: Field, query: Field, times: int, chunk: int | None, answer_on: torch.device
    ) -> Field:
        """The answer on any device, in as many pieces as memory asks for."""
        batch = field.coords.shape[0]
        try:
            with products_in(self.precision):
                values = self._marched(field, query, times, chunk, answer_on)
        except torch.OutOfMemoryError as error:
            what = f"a prediction of {batch} samples of {field.points:,} points at {query.points:,} queries"
            less = f"`memory_gb={0.5 * (self.memory_gb or _free_gb(self.device)):.2g}`"
            raise OutOfMemory(what, str(self.device), f"Give the Predictor less to compute in: {less}.") from error
        return PinnedCopy(answer_on).to_device(query).with_values(values)

    def grid(self, field: Field, points: int) -> Float[Tensor, "queries dim"]:
        """A regular grid of so many points per axis over the domain: the period, or the box of the input's points."""
        if points < 1:
            raise InputError("at least one point per axis", str(points))
        if self.spec.periods is not None:
            return periodic_grid((points,) * self.spec.dim, self.spec.periods).float()
        coords = field.coords.reshape(-1, field.coords.shape[-1])
        axes = [torch.linspace(float(x.min()), float(x.max()), points) for x in coords.unbind(-1)]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))

    def _query(self, field: Field, points: Tensor | np.ndarray | Field | None) -> Field:
        if isinstance(points, Field):
            return points
        if self.spec.query_channels:
            raise InputError(
                f"a Field with {self.spec.query_channels} feature(s) at each query point for this model",
                "points alone",
                "Give Field.of(points, features); on the command line, --queries with `coords` and `values` in a .npz",
            )
        if points is None:
            return Field.of(field.coords, None, field.weights)
        points = as_tensor("query_points", points).to(torch.float32)
        if points.ndim == 1 and self.spec.dim == 1:
            points = points.unsqueeze(-1)
        check_finite("query_points", points)
        if points.ndim not in (2, 3) or points.shape[-1] != self.spec.dim:
            raise InputError(
                f"query points of shape (queries, {self.spec.dim})",
                str(tuple(points.shape)),
                (points.ndim in (2, 3) and how_to_turn("query_points.swapaxes(-1, -2)", points.shape))
                or f"This model lives in {self.spec.dim} dimension(s)",
            )
        if field.coords.ndim == 3 and points.ndim == 2:
            points = points.unsqueeze(0)
        return Field.of(points)

    def _marched(
        self, field: Field, query: Field, times: int, chunk: int | None, answer_on: torch.device
    ) -> Float[Tensor, "batch times queries channels"]:
        """Values at all queries; where the model encodes its own answers, block after block of frames."""
        frames = self.operator.model.frames_per_encoding
        if frames is None or times <= frames:
            return self._answer(field, query, times, chunk, answer_on)

        def answer(known: Field, asked: Field, count: int) -> Tensor:
            return self._answer(known, asked, count, chunk, answer_on)

        blocks = rollout(answer, lambda values: values, field, query.sharing(field), times, frames)
        return torch.cat(list(blocks), 1)

    def _answer(
        self, field: Field, query: Field, times: int, chunk: int | None, answer_on: torch.device
    ) -> Float[Tensor, "batch times queries channels"]:
        """Values at all queries, for a few samples after the other."""
        batch, queries = query.weights.shape
        independent = self.operator.model.queries_independent
        # What the model must see of a sample at once, unless all points go through it in chunks.
        needed = field.points if independent else max(field.points, queries)
        budget = 2**30 * (self.memory_gb if self.memory_gb is not None else _free_gb(self.device))
        room = self._room(budget)
        copies = PinnedCopy(self.device)
        if _bytes(field) + _bytes(query) <= BESIDE * budget:  # chunks are read several times
            field, query = copies.to_device(field), copies.to_device(query)
        at_once = min(room, TOGETHER_ON_CPU if self.device.type == "cpu" else TOGETHER_ON_GPU)
        slices = -(-batch // max(1, at_once // needed))
        samples = -(-batch // slices)  # of equal slices, so that compiled shapes repeat
        size = chunk or max(1, at_once // samples)
        whole = needed <= room and (independent or chunk is None or chunk >= queries)
        values = torch.empty((batch, times, queries, self.spec.out_channels), device=answer_on)
        chunked = None if whole else Chunked(self.operator, size, self.precision, copies)
        for start in range(0, batch, samples):
            chosen = slice(start, start + samples)
            some, asked = field.samples(chosen), query.samples(chosen)
            if chunked is None:
                some, asked = copies.to_device(some), copies.to_device(asked)
                parts = self.runner.in_turn(some, asked, times, size if independent else queries)
            else:
                parts = chunked.in_turn(some, asked, times, size)
            first = 0
            for part in parts:
                copies.to_host(part, values[chosen, :, first : first + part.shape[2]])
                first += part.shape[2]
        copies.flush()
        return values

    def _room(self, budget: float) -> int:
        """How many points, times samples, the model can hold at once in so many bytes."""
        widest = max((p.shape[0] for p in self.operator.model.parameters() if p.ndim > 1), default=1)
        size = 4 if self.runner.autocast is None else self.runner.autocast.itemsize
        return max(1, int(budget / (size * HELD * widest)))


def read_field(path: Path, values_needed: bool = True) -> Field:
    """A field from a .npz with `coords` and `values` (and `weights`), or points alone from a .npy.

    Args:
        path: the file.
        values_needed: whether a file without values is an error.
    """
    arrays = load_npz(path)
    if "coords" not in arrays or (values_needed and "values" not in arrays):
        raise InputError(f"arrays `coords`{' and `values`' * values_needed} in {path}", ", ".join(arrays) or "none")
    tensors = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise InputError(f"numbers in `{name}` of {path}", str(array.dtype))
        tensors[name] = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    coords, values = tensors["coords"], tensors.get("values")
    if coords.ndim == 1:
        coords = coords.unsqueeze(-1)
    if values is not None and values.ndim == 1:
        values = values.unsqueeze(-1)
    if values is not None and values.ndim == 2:
        values = values.unsqueeze(0)  # a steady field
    if coords.ndim != 2 or (values is not None and values.ndim != 3):
        raise InputError(
            f"`coords` of shape (points, dim) and `values` (points, channels) or (times, points, channels) in {path}",
            f"{tuple(coords.shape)} and {None if values is None else tuple(values.shape)}",
        )
    weights = tensors.get("weights")
    for name, count in (
        ("values", None if values is None else values.shape[1]),
        ("weights", None if weights is None else weights.numel()),
    ):
        if count not in (None, len(coords)):
            raise InputError(f"as many `{name}` as points in {path} ({len(coords)})", str(count))
    field = Field.of(coords, values, None if weights is None else weights.flatten() / weights.sum())
    check_field(str(path), field)
    return field


def _bytes(field: Field) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in field.tensors)


def _free_gb(device: torch.device) -> float:
    """GiB that a prediction may take, of those that nobody uses now."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return FREE_OF_GPU * (torch.cuda.mem_get_info(device)[0] + kept) / 2**30
    free = free_memory()
    return UNKNOWN_GB if math.isinf(free) else FREE_OF_CPU * free / 2**30
