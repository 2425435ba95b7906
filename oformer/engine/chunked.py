"""Answers and gradients for more points than memory holds: points pass in chunks, and only sums over them are kept.

A model on points treats each of them alone, but for sums over all of them (`nn/sums.py`): the small matrices KᵀWV of
linear attention and the statistics of norms over points. It asks for these sums in a fixed order. So each is found by
running the model itself on one chunk after the other, with the sums before it known, up to the place where it asks for
the new one; when all are known, each chunk of queries is answered on its own.

Gradients go the same way back. The answers of a chunk of queries give their part of the gradients of the parameters and
of the sums. When that of the last sum is complete, each chunk runs once more up to its part of that sum, and hands the
gradient on to the parameters and to the sums before it; and so on to the first sum.

Memory holds one chunk and the sums, however many points there are. Time is linear in the points; what precedes a sum is
computed again for every later one, about (depth/2 + 1) times the encoder for norms over channels, and more for norms
over points, which ask for five sums in each layer. No layer has a second version for this.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field
from oformer.models.base import OperatorModel
from oformer.nn.sums import points_split

Run = Callable[[Field, Field, int], Tensor]  # from input, queries and how many steps to the values there
_ONE_AT_A_TIME = threading.Lock()  # how points are split is a setting of the whole process


class _UnknownSum(Exception):
    """The model asked for a sum that is not known yet."""

    def __init__(self, part: Tensor):
        super().__init__()
        self.part = part  # of the points that it was run on


class _Known:
    """Gives a run the sums that are known instead of its own, in order, and ends it when it asks for one more."""

    def __init__(self, sums: Sequence[Tensor]):
        self.sums, self.asked = sums, 0

    def __call__(self, part: Tensor) -> Tensor:
        """The next sum of the run."""
        if self.asked == len(self.sums):
            raise _UnknownSum(part)
        self.asked += 1
        return self.sums[self.asked - 1].to(part.dtype)


def _noted(sums: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Leave a run its own sums, and note them."""

    def note(part: Tensor) -> Tensor:
        sums.append(part)
        return part

    return note


class Chunks:
    """Input and queries in chunks, and the sums over them."""

    def __init__(self, model: OperatorModel, run: Run, input: Field, query: Field, size: int, seed: int | None = None):
        """Cut them.

        Args:
            model: that is run.
            run: that runs it.
            input: what is known, with a batch axis.
            query: where to answer, likewise.
            size: points of each sample at once.
            seed: of what is drawn at random in a chunk, which must be the same each time; None: nothing is.
        """
        if model.needs_all_points is not None:
            raise InputError(
                f"at most {size:,} points at once where all of a sample must be together for {model.needs_all_points}",
                f"{max(input.points, query.points):,}",
                "Give fewer points or more memory; attention galerkin or fourier reads points in chunks",
            )
        self.run, self.query, self.size, self.seed = run, query, size, seed
        # Queries that do not feel each other are part of no sum: one stands for all of them.
        coupled = query if not model.queries_independent else _weightless(query)
        chunks = range(0, max(input.points, coupled.points), size)
        self.pairs = [(_chunk(input, first, size), _chunk(coupled, first, size)) for first in chunks]
        self.source = _weightless(input)  # all that is needed of the others is in the sums
        self.starts = range(0, query.points, size)
        self.sums: list[Tensor] = []

    @torch.no_grad()
    def add_up(self) -> None:
        """Find all sums."""
        while (first := self.part(0, self.sums)) is not None:
            # In float32 or better: chunks are many, and bfloat16 has three digits.
            total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
            for index in range(1, len(self.pairs)):
                part = self.part(index, self.sums)
                assert part is not None
                total += part
            self.sums.append(total)

    def part(self, index: int, sums: Sequence[Tensor]) -> Tensor | None:
        """The part that a chunk has in the sum after those that are given; None where there is none."""
        try:
            self._run(*self.pairs[index], 1, sums, index)
        except _UnknownSum as unknown:
            return unknown.part
        return None

    def answer(self, first: int, times: int, sums: Sequence[Tensor]) -> Float[Tensor, "batch times _ channels"]:
        """Values at the queries from one of them on."""
        return self._run(self.source, _chunk(self.query, first, self.size), times, sums, len(self.pairs) + first)

    def go_back(self, gradient: Float[Tensor, "batch times queries channels"]) -> None:
        """Add to the gradients of the parameters, from those of the answers."""
        sums = [total.detach().requires_grad_() for total in self.sums]
        for first in self.starts:
            answer = self.answer(first, gradient.shape[1], sums)
            answer.backward(gradient[:, :, first : first + self.size].to(answer.dtype))
        for last in reversed(range(len(sums))):
            arrived = sums[last].grad
            if arrived is None:  # statistics that gradients do not pass
                continue
            for index in range(len(self.pairs)):
                part = self.part(index, sums[:last])
                assert part is not None
                if part.requires_grad:
                    part.backward(arrived.to(part.dtype))

    def _run(self, known: Field, asked: Field, times: int, sums: Sequence[Tensor], key: int) -> Tensor:
        with _ONE_AT_A_TIME, self._drawn(known.coords.device, key), points_split(_Known(sums)):
            return self.run(known, asked, times)

    @contextlib.contextmanager
    def _drawn(self, device: torch.device, key: int) -> Iterator[None]:
        """Draw the same numbers whenever a chunk is run, and leave the generators of others where they are."""
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            # To seed devices that are not there takes longer than a small chunk.
            seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
            seed(self.seed + key)
            yield


class _Answers(torch.autograd.Function):
    """All answers in chunks; nothing of how they came about is kept."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, chunks: Chunks, times: int) -> Tensor:
        ctx.chunks = chunks
        return torch.cat([chunks.answer(first, times, chunks.sums) for first in chunks.starts], 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        with torch.enable_grad():
            ctx.chunks.go_back(gradients[0])
        return None, None, None


def answers_with_gradients(
    model: OperatorModel, run: Run, input: Field, query: Field, times: int, size: int, seed: int | None
) -> Float[Tensor, "batch times queries channels"]:
    """Values on unit scale, a chunk of points at a time, with gradients of the parameters but none of the fields.

    Args:
        model: that is run.
        run: that runs it, forward and again in the backward pass.
        input: on unit scale, with a batch axis.
        query: likewise.
        times: how many steps.
        size: points of each sample at once, input and queries alike.
        seed: of random numbers in a chunk; None: there are none.
    """
    chunks = Chunks(model, run, input, query, size, seed)
    chunks.add_up()
    begin = input.coords.new_zeros((), requires_grad=torch.is_grad_enabled())
    return _Answers.apply(begin, chunks, times)


def answers_in_chunks(
    model: OperatorModel, run: Run, input: Field, query: Field, times: int, size: int
) -> Iterator[Float[Tensor, "batch times _ channels"]]:
    """Values at `size` queries after another, with at most so many points of each sample in the model at once.

    Args:
        model: in evaluation mode, since chunks are computed several times.
        run: that runs it.
        input: what is known, with a batch axis.
        query: likewise.
        times: how many steps.
        size: points of each sample at once.
    """
    chunks = Chunks(model, run, input, query, size)
    chunks.add_up()
    for first in chunks.starts:
        yield chunks.answer(first, times, chunks.sums)


def values_in_turn(
    model: OperatorModel, latents: Tensor, input: Field, query: Field, times: int, size: int
) -> Iterator[Float[Tensor, "batch times _ channels"]]:
    """Values on unit scale at queries that do not feel each other, `size` of them after another.

    Where it can, the model sums over the input points once. Further queries read the same sums, so that the time of
    many queries of many points grows with the sum of the two and not with their product.

    Args:
        model: with `queries_independent`.
        latents: what `encode` made of the input.
        input: on unit scale.
        query: likewise.
        times: how many steps.
        size: queries of each sample at once.
    """
    sums: list[Tensor] = []
    for first in range(0, query.points, size):
        asked = query.take(slice(first, first + size))
        if model.needs_all_points is not None:
            yield model.answer(latents, input, asked, times)
            continue
        with _ONE_AT_A_TIME, points_split(_Known(sums) if first else _noted(sums)):
            values = model.answer(latents, input, asked, times)
        latents, input = latents[:, :1], _weightless(input)
        yield values


def _chunk(field: Field, first: int, size: int) -> Field:
    """So many points; beyond the last one, a point that adds nothing."""
    return field.take(slice(first, first + size)) if first < field.points else _weightless(field)


def _weightless(field: Field) -> Field:
    """One point that adds nothing to a sum."""
    point = field.take(slice(1))
    return dataclasses.replace(point, weights=torch.zeros_like(point.weights))
