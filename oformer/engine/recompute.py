"""Activation checkpointing: store the inputs of blocks and time steps, recompute the rest in the backward pass."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oformer.models.base import OperatorModel


class Recomputed:
    """A function whose arguments alone are stored, and which is computed again in the backward pass."""

    def __init__(self, function: Callable[..., Any], random: bool = False):
        """Wrap a function of tensors.

        Args:
            function: to be computed twice.
            random: whether it draws random numbers, which must then be drawn alike.
        """
        self.function, self.random = function, random

    def __call__(self, *arguments: Any) -> Any:
        """The value of the function."""
        if not torch.is_grad_enabled():
            return self.function(*arguments)
        return checkpoint(self.function, *arguments, use_reentrant=False, preserve_rng_state=self.random)


@contextlib.contextmanager
def pieces_recomputed(model: OperatorModel) -> Iterator[None]:
    """Within the block, compute the pieces of a model twice: forward, and again in the backward pass."""
    pieces = [piece for piece in model.pieces() if "forward" not in piece.__dict__]
    for piece in pieces:
        piece.__dict__["forward"] = Recomputed(piece.forward, _draws(piece))
    try:
        yield
    finally:
        for piece in pieces:
            del piece.__dict__["forward"]


def _draws(piece: nn.Module) -> bool:
    """Whether a piece has dropout."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in piece.modules())
