"""Answers for more points than memory holds: points pass chunk by chunk, and only sums over them are kept.

A model on points treats each of them alone, but for sums over all of them (`nn/sums.py`): the small matrices KᵀWV of
linear attention and the statistics of norms over points. It asks for these sums in a fixed order. So each is found by
running the model itself on one chunk after the other, with the sums before it known, up to the place where it asks for
the new one; when all are known, each chunk of queries is answered on its own.

Memory holds one chunk and the sums, however many points there are. Time is linear in the points; what precedes a sum is
computed again for every later one, about (depth/2 + 1) times the encoder for norms over channels, and more for norms
over points, which ask for five sums in each layer. No layer has a second version for this.
"""

import threading
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field
from oformer.models.base import Operator, OperatorModel
from oformer.models.ferry import Ferry
from oformer.nn.sums import points_split

_ONE_AT_A_TIME = threading.Lock()  # how points are split is a setting of the whole process


class _UnknownSum(Exception):
    """The model asked for a sum that is not complete yet."""


class _Kept:
    """The sums of one run, which further runs get instead of their own."""

    def __init__(self) -> None:
        self.known: list[Tensor] = []
        self.asked = 0  # in this run

    def __call__(self, part: Tensor) -> Tensor:
        """The next sum of a run."""
        if self.asked == len(self.known):
            self.known.append(part)
        self.asked += 1
        return self.known[self.asked - 1]


class _Sums:
    """The sums that a model asks for, in order; the first unknown one is being added up."""

    def __init__(self) -> None:
        self.known: list[Tensor] = []
        self.asked = 0
        self.growing: Tensor | None = None

    def __call__(self, part: Tensor) -> Tensor:
        """The next sum of a run, if it is known; otherwise the part is added to it and the run ends."""
        if self.asked < len(self.known):
            self.asked += 1
            return self.known[self.asked - 1].to(part.dtype)
        # In float32 or better: chunks are many, and bfloat16 has three digits.
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        self.growing = part.clone() if self.growing is None else self.growing.add_(part)
        raise _UnknownSum

    def complete(self) -> None:
        """All chunks have given their part."""
        if self.growing is not None:
            self.known.append(self.growing)
        self.growing = None


def answered_in_chunks(
    operator: Operator, input: Field, query: Field, times: int, size: int, ferry: Ferry
) -> Iterator[Float[Tensor, "batch times _ channels"]]:
    """Physical values at the queries, `size` of them after another, with at most so many points in the model at once.

    Args:
        operator: the trained operator, in evaluation mode, since chunks are computed several times.
        input: what is known, with a batch axis, anywhere; chunks of it are taken to the operator's device.
        query: where to answer, likewise.
        times: how many steps.
        size: points of each sample at once.
        ferry: that takes them there.
    """
    if not operator.model.reads_sums_alone:
        raise InputError(
            f"at most {size:,} points at once where not all is a sum over points: softmax needs every pair of them",
            f"{max(input.points, query.points):,}",
            "Give fewer points or more memory, or train with attention galerkin or fourier",
        )
    sums = _Sums()

    def run(known: Field, asked: Field, times: int) -> Tensor | None:
        sums.asked = 0
        known, asked = ferry.over(known), ferry.over(asked)
        with _ONE_AT_A_TIME, torch.no_grad(), points_split(sums):
            try:
                return operator(known, asked, times)
            except _UnknownSum:
                return None

    # Queries that do not feel each other are part of no sum: one stands for all of them.
    coupled = query if not operator.model.queries_independent else _weightless(query)
    chunks = range(0, max(input.points, coupled.points), size)
    pairs = [(_chunk(input, first, size), _chunk(coupled, first, size)) for first in chunks]
    while run(*pairs[0], 1) is None:
        for pair in pairs[1:]:
            run(*pair, 1)
        sums.complete()
    source = _weightless(input)  # all that is needed of the others is in the sums
    for first in range(0, query.points, size):
        answer = run(source, _chunk(query, first, size), times)
        assert answer is not None
        yield answer


def answered_in_turn(
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
    kept = _Kept()
    for first in range(0, query.points, size):
        asked = points_of(query, first, first + size)
        if not model.reads_sums_alone:
            yield model.answer(latents, input, asked, times)
            continue
        kept.asked = 0
        with _ONE_AT_A_TIME, points_split(kept):
            values = model.answer(latents, input, asked, times)
        latents, input = latents[:, :1], _weightless(input)
        yield values


def points_of(field: Field, first: int, last: int) -> Field:
    """Some points of each sample, with the weights that they have among all."""
    return Field(field.coords[:, first:last], field.values[:, :, first:last], field.weights[:, first:last])


def _chunk(field: Field, first: int, size: int) -> Field:
    """So many points; beyond the last one, a point that adds nothing."""
    return points_of(field, first, first + size) if first < field.points else _weightless(field)


def _weightless(field: Field) -> Field:
    """One point that adds nothing to a sum."""
    point = points_of(field, 0, 1)
    return Field(point.coords, point.values, torch.zeros_like(point.weights))
