"""Runners: the ways to run an operator, which knows none of them.

    Plain       the model as it is
    Compiled    by torch.compile, once for each shape
    Chunked     a chunk of points at a time, for more points than memory holds, also with gradients

Each has `run(input, query, times)`, from physical fields to values on unit scale; calling a runner gives physical
values. All use the fused twins of the model's modules (`swap.py`), compute the model in half precision under autocast
where asked to, and give the same numbers but for rounding.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.checkpoint import Checkpoint
from oformer.engine.chunked import answers_in_chunks, answers_with_gradients, values_in_turn
from oformer.engine.pinned_copy import PinnedCopy
from oformer.engine.recompute import Recomputed, pieces_recomputed
from oformer.engine.swap import accelerate
from oformer.fields import Field
from oformer.models.base import MarchingModel, OperatorModel, Precision, autocast_of
from oformer.models.operator import Operator
from oformer.nn.feedforward import in_full

# Shapes that a model is compiled for, counting evaluation. torch's own limit, 8, would leave the others uncompiled.
COMPILED_SHAPES = 64


class Plain:
    """Runs the model as it is."""

    compiles = False  # whether each new shape of batch costs time

    def __init__(self, operator: Operator, precision: Precision = "float32", recompute: bool = False):
        """Take an operator on the device where it will run.

        Args:
            operator: the modules of its model get their fused twins.
            precision: of the model; scaling, statistics and losses stay in float32.
            recompute: activation checkpointing, which takes less memory and more time for gradients.
        """
        self.operator, self.autocast, self.recompute = operator, autocast_of(precision), recompute
        accelerate(operator.model, operator.origin.device)

    def __call__(
        self, input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch times queries channels"]:
        """Physical values at the query points."""
        return self.operator(input, query, times, self._encoded_once)

    def run(
        self, input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch times queries channels"]:
        """Values on unit scale from physical fields, in float32 or better."""
        return self.operator.predict_normalized(input, query, times, self._encoded_once)

    def in_turn(
        self, input: Field, query: Field, times: int, size: int
    ) -> Iterator[Float[Tensor, "batch times some channels"]]:
        """Physical values at `size` queries after another, from one encoding of the input.

        Args:
            input: physical, with a batch axis, on the operator's device.
            query: likewise; queries that feel each other must all be answered at once.
            times: how many steps.
            size: queries of each sample at once.
        """
        operator, device = self.operator, input.coords.device
        unit_input, unit_query = operator.normalized(input, query.sharing(input))
        with self._settings(device):
            latents = self._encode(unit_input)
        if query.points <= size:
            with self._settings(device):
                values = self._answer(latents, unit_input, unit_query, times)
            yield operator.to_physical(values, query.coords)
            return
        parts = values_in_turn(operator.model, latents, unit_input, unit_query, times, size)
        for first in range(0, query.points, size):
            with self._settings(device):
                values = next(parts)
            yield operator.to_physical(values, query.coords[:, first : first + size])

    def _encoded_once(self, input: Field, query: Field, times: int) -> Float[Tensor, "batch times queries channels"]:
        """All frames from one encoding of the input, in float32 or better."""
        with self._settings(input.coords.device):
            return in_full(self._values(input, query, times))

    def _values(self, input: Field, query: Field, times: int) -> Float[Tensor, "batch times queries channels"]:
        """The model's values from physical fields."""
        model, (input, query) = self.operator.model, self.operator.normalized(input, query)
        if not self.recompute or not _is_marched(model):
            return model(input, query, times)
        return _marched(model, *model.start(model.encode(input), input, query), times, Recomputed(model.step))

    def _encode(self, input: Field) -> Tensor:
        return self.operator.model.encode(input)

    def _answer(self, latents: Tensor, input: Field, query: Field, times: int) -> Tensor:
        return self.operator.model.answer(latents, input, query, times)

    @contextlib.contextmanager
    def _settings(self, device: torch.device) -> Iterator[None]:
        """Autocast, and activation checkpointing of the pieces of the model."""
        sparing = self.recompute and torch.is_grad_enabled()
        with (
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
            pieces_recomputed(self.operator.model) if sparing else contextlib.nullcontext(),
        ):
            yield


class Compiled(Plain):
    """Runs the model by torch.compile, once for each shape.

    A model that marches is compiled in two graphs, up to the start and one step: a longer horizon compiles nothing
    again.
    """

    compiles = True

    def __init__(self, operator: Operator, precision: Precision = "float32", recompute: bool = False):
        """Prepare compilation, which happens at the first call with each shape; see `Plain`."""
        super().__init__(operator, precision, recompute)
        import torch._dynamo

        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, COMPILED_SHAPES)
        model = operator.model
        # Of a steady problem normalization is in the same graph: the statistics of a grid are hundreds of operations.
        self._whole = torch.compile(super()._values, dynamic=False)
        self._encoded = torch.compile(model.encode, dynamic=False)
        self._started = torch.compile(_started, dynamic=False)
        self._step = torch.compile(model.step, dynamic=False) if _is_marched(model) else None

    def _values(self, input: Field, query: Field, times: int) -> Float[Tensor, "batch times queries channels"]:
        model = self.operator.model
        if self.operator.spec.out_times == 1 or self._step is None or not _is_marched(model):
            return self._whole(input, query, times)
        input, query = self.operator.normalized(input, query)
        step = Recomputed(self._step) if self.recompute else self._step
        return _marched(model, *self._started(model, input, query), times, step)

    def _encode(self, input: Field) -> Tensor:
        return self._encoded(input)

    def _answer(self, latents: Tensor, input: Field, query: Field, times: int) -> Tensor:
        model = self.operator.model
        if self._step is None or not _is_marched(model):
            return model.answer(latents, input, query, times)
        return _marched(model, *model.start(latents, input, query), times, self._step)


class Chunked(Plain):
    """Runs the model on a chunk of points at a time (`chunked.py`).

    More points than a chunk are never in the model at once. The backward pass runs it again, and adds to the gradients
    of the parameters; there is none for the fields.
    """

    def __init__(
        self, operator: Operator, size: int, precision: Precision = "float32", copies: PinnedCopy | None = None
    ):
        """Take an operator.

        Args:
            operator: see `Plain`.
            size: points at once, of all samples of a batch together; input and queries alike.
            precision: see `Plain`.
            copies: to the operator's device, for fields that `in_turn` is given elsewhere.
        """
        super().__init__(operator, precision)
        self.size, self.copies = size, copies or PinnedCopy(operator.origin.device)

    def in_turn(
        self, input: Field, query: Field, times: int, size: int
    ) -> Iterator[Float[Tensor, "batch times some channels"]]:
        """Physical values at `size` queries after another, with so many points of each sample in the model at once.

        Args:
            input: physical, with a batch axis, on any device; chunks of it are copied to the operator's.
            query: likewise.
            times: how many steps.
            size: points of each sample at once.
        """
        operator = self.operator

        @torch.no_grad()
        def run(known: Field, asked: Field, times: int) -> Tensor:
            known, asked = self.copies.to_device(known), self.copies.to_device(asked)
            with self._settings(known.coords.device):
                values = in_full(operator.model(*operator.normalized(known, asked), times))
            return operator.to_physical(values, asked.coords)

        yield from answers_in_chunks(operator.model, run, input, query, times, size)

    def _values(self, input: Field, query: Field, times: int) -> Float[Tensor, "batch times queries channels"]:
        model, (input, query) = self.operator.model, self.operator.normalized(input, query)
        size = max(1, self.size // input.coords.shape[0])
        if max(input.points, query.points) <= size:
            return model(input, query, times)

        def run(known: Field, asked: Field, times: int) -> Tensor:
            with self._settings(known.coords.device):  # the backward pass comes here too
                return model(known, asked, times)

        seed = int(torch.randint(2**62, ())) if self.operator.training else None
        return answers_with_gradients(model, run, input, query, times, size, seed)


def runner_of(checkpoint: Checkpoint, precision: Precision = "float32") -> Plain:
    """The runner for a checkpoint: an operator that was trained in chunks is evaluated in chunks.

    Args:
        checkpoint: on the device where it will run.
        precision: of the model.
    """
    if checkpoint.chunk is None:
        return Plain(checkpoint.operator, precision)
    return Chunked(checkpoint.operator, checkpoint.chunk, precision)


def _is_marched(model: OperatorModel) -> TypeGuard[MarchingModel]:
    """Whether a model consists of `encode`, `start` and `march`, and nobody has replaced what puts them together."""
    whole = {"forward": OperatorModel.forward, "answer": MarchingModel.answer}
    if not isinstance(model, MarchingModel):
        return False
    return all(getattr(type(model), name) is method and name not in model.__dict__ for name, method in whole.items())


def _started(model: MarchingModel, input: Field, query: Field) -> tuple[Tensor, Any]:
    """Latents at the queries at the time of the input, and the context of all steps; fields are on unit scale."""
    return model.start(model.encode(input), input, query)


def _marched(
    model: MarchingModel, z: Tensor, context: Any, times: int, step: Callable[..., Any] | None
) -> Float[Tensor, "batch times queries channels"]:
    """Values at all times."""
    return torch.stack(list(model.march(z, context, times, step)), 1)
