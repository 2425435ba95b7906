"""Sums over points, also where several processes hold one cloud of points together.

Linear attention and norms over points need nothing of the other points but sums. Inside `points_split` each process
holds some points of every sample, and `over_points` turns its part of a sum into the whole; elsewhere it does nothing.

The gradient of a sum is summed over the processes as well. Each process computes the same loss from the same sums, so
that what flows back is the gradient of world losses: the mean over the processes of the gradients of a parameter, and
not their sum, is the gradient that one process would have found.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

_split = False  # whether the points of a sample are spread over the processes of torch's default group


@contextlib.contextmanager
def points_split() -> Iterator[None]:
    """Take points as spread over all processes for a while; each process must ask for the same sums."""
    global _split
    before, _split = _split, True
    try:
        yield
    finally:
        _split = before


def points_are_split() -> bool:
    """Whether this process holds only some of the points."""
    return _split


def over_points(part: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The sum over all points, from the sum over those that this process holds."""
    return _summed(part) if _split else part


@torch.compiler.disable()  # a compiled graph would have to know the other processes
def _summed(part: Tensor) -> Tensor:
    return _Sum.apply(part)


class _Sum(torch.autograd.Function):
    """The sum over the processes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return _all_reduced(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _all_reduced(gradients[0])


def _all_reduced(part: Tensor) -> Tensor:
    """Added up in float32 or better: processes are many, and bfloat16 has three digits."""
    total = part.to(torch.promote_types(part.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total.to(part.dtype)
