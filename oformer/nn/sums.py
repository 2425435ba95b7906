"""Sums over points, also where the points of one cloud are not all here at once.

Linear attention and norms over points need nothing of the other points but sums. Inside `points_split` only some points
of every sample are here, and `over_points` turns their part of a sum into the whole; elsewhere it does nothing. The
other points lie with other processes, or their turn comes later (`engine/chunked.py`).

The gradient of a sum is summed over the processes as well. Each process computes the same loss from the same sums, so
that what flows back is the gradient of world losses: the mean over the processes of the gradients of a parameter, and
not their sum, is the gradient that one process would have found.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

Whole = Callable[[Tensor], Tensor]  # from a part of a sum to all of it
_whole: Whole | None = None  # None: all points are here
_thread: int | None = None  # the only thread that this holds for; None: all, since gradients have threads of their own


@contextlib.contextmanager
def points_split(whole: Whole | None = None) -> Iterator[None]:
    """Take points as spread out for a while; whoever holds some must ask for the same sums in the same order.

    Args:
        whole: what makes the sum over all points of a part of it, for the thread that says so; by default the
            processes of torch's default group add their parts up, and so do they with the gradients.
    """
    global _whole, _thread
    before = _whole, _thread
    _whole, _thread = (_summed_by_processes, None) if whole is None else (whole, threading.get_ident())
    try:
        yield
    finally:
        _whole, _thread = before


def points_are_split() -> bool:
    """Whether only some of the points are here."""
    return _whole is not None and _thread in (None, threading.get_ident())


def over_points(part: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The sum over all points, from the sum over those that are here."""
    # A compiled graph would have to know who holds the other points. Not said at its definition: that takes seconds.
    return part if _whole is None else torch.compiler.disable(_summed)(part)  # pyright: ignore


def _summed(part: Tensor) -> Tensor:
    return _whole(part) if _whole is not None and points_are_split() else part


def _summed_by_processes(part: Tensor) -> Tensor:
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
