"""Predictor: any input points, any query points, any horizon, in physical units."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.checkpoint import CONFIG, Checkpoint, checkpoints, load_checkpoint
from oformer.errors import InputError
from oformer.fields import Field, Spec, check_field, check_finite
from oformer.files import load_npz
from oformer.meshes.grids import periodic_grid

CHUNK = 65_536  # queries answered at once when they are independent: bounds memory, costs no time


class Predictor:
    """A trained operator ready for use.

    The input is encoded once; queries are answered in chunks where the model answers each query on its own.
    """

    def __init__(self, source: str | Path | Checkpoint, device: torch.device | str | None = None):
        """Load a trained operator.

        Args:
            source: a run folder, a checkpoint folder, or a loaded checkpoint.
            device: where to compute; by default a GPU if there is one.
        """
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.checkpoint = (
            source if isinstance(source, Checkpoint) else load_checkpoint(find_checkpoint(source), self.device)
        )
        self.operator = self.checkpoint.operator.to(self.device).eval()

    @property
    def spec(self) -> Spec:
        """The shape of the problem it was trained for."""
        return self.operator.spec

    @torch.no_grad()
    def __call__(
        self,
        field: Field,
        query_points: Float[Tensor, "*batch queries dim"] | np.ndarray | Field | None = None,
        times: int | None = None,
        chunk: int | None = None,
    ) -> Field:
        """Predict.

        Args:
            field: what is known, with or without a batch axis.
            query_points: where to answer; a Field where the model wants query features; by default the input points.
            times: how many steps; by default as many as it was trained for.
            chunk: queries at once. Refused where the answers depend on which queries are asked together.
        """
        query = self._query(field, query_points)
        single = field.coords.ndim == 2
        if single:
            field, query = field.batched(), query.batched()
        field, query = field.to(self.device, torch.float32), query.to(self.device, torch.float32)
        if query.coords.shape[0] != field.coords.shape[0]:
            query = Field(
                *(t.expand(field.coords.shape[0], *t.shape[1:]) for t in (query.coords, query.values, query.weights))
            )
        self.operator.check(field, query)
        values = self._answer(field, query, times, chunk)
        answer = Field(query.coords, values, query.weights).to("cpu")
        return answer.single(0) if single else answer

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
                "Give Field.of(points, features)",
            )
        if points is None:
            return Field.of(field.coords, None, field.weights)
        points = torch.as_tensor(points).to(torch.float32)
        if points.ndim == 1 and self.spec.dim == 1:
            points = points.unsqueeze(-1)
        check_finite("query_points", points)
        if points.ndim not in (2, 3) or points.shape[-1] != self.spec.dim:
            raise InputError(
                f"query points of shape (queries, {self.spec.dim})",
                str(tuple(points.shape)),
                f"This model lives in {self.spec.dim} dimension(s)",
            )
        if field.coords.ndim == 3 and points.ndim == 2:
            points = points.unsqueeze(0)
        return Field.of(points)

    def _answer(self, field: Field, query: Field, times: int | None, chunk: int | None) -> Tensor:
        queries, independent = query.points, self.operator.model.queries_independent
        if chunk is not None and chunk < 1:
            raise InputError("a chunk of at least one query", str(chunk))
        if not independent:
            if chunk is not None and chunk < queries:
                raise InputError(
                    "all queries at once, since this model lets queries influence each other",
                    f"chunks of {chunk}",
                    "Leave `chunk` out, or train a model whose queries are independent",
                )
            return self.operator(field, query, times)
        size = chunk or CHUNK
        model = self.operator.model
        unit_field, unit_query = self.operator.normalized(field, query)
        latents = model.encode(unit_field)
        parts = []
        for first in range(0, queries, size):
            part = _slice(unit_query, first, first + size)
            values = model.answer(latents, unit_field, part, times)
            parts.append(self.operator.to_physical(values, query.coords[:, first : first + size]))
        return torch.cat(parts, 2)


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


def _slice(field: Field, first: int, last: int) -> Field:
    return Field(field.coords[:, first:last], field.values[:, :, first:last], field.weights[:, first:last])


def find_checkpoint(source: str | Path) -> Path:
    """The checkpoint folder that a path means: itself, or the newest one of a run."""
    folder = Path(source)
    if not folder.is_dir():
        raise InputError(
            "a run folder or a checkpoint folder",
            f"`{source}`, which is none",
            "Train one with `oformer train`, or check the path",
        )
    if (folder / CONFIG).is_file():
        return folder
    found = checkpoints(folder)
    if not found:
        raise InputError(f"a checkpoint in {folder}", "none yet", "Train longer, or give another folder")
    return found[-1]
