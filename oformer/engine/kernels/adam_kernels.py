"""A step of Adam for all parameters in one kernel.

A model has a hundred tensors, most of them small, and what a step does to each number takes less time than starting a
kernel does. So one kernel visits them all: a table in memory says where the numbers of each program lie. The plain twin
is `Adam.move`; tests hold the two equal.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # numbers of a program


def blocks(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """For each program where its weights, gradients and moments begin, and how many there are.

    Weights and gradients are told by their addresses, so the table holds for as long as they stay where they are. The
    moments of all parameters lie side by side.
    """
    rows, place = [], 0
    for weight, gradient in zip(weights, gradients, strict=True):
        size = weight.element_size()
        for begin in range(0, weight.numel(), _BLOCK):
            count = min(weight.numel() - begin, _BLOCK)
            rows.append((weight.data_ptr() + begin * size, gradient.data_ptr() + begin * size, place + begin, count))
        place += weight.numel()
    return torch.tensor(rows, dtype=torch.int64).to(weights[0].device)


def move(
    table: Tensor,
    moments: Sequence[Tensor],
    numbers: Tensor,
    weight_decay: float,
    decoupled: bool,
    beta2: float,
    epsilon: float,
) -> None:
    """Move the weights of a table.

    Args:
        table: of `blocks`, of tensors in float32.
        moments: means and squares, and the largest squares so far where these count.
        numbers: what changes from step to step, as `Adam.fill` writes them.
        weight_decay: a part of the gradient, unless decoupled.
        decoupled: whether the decay is one of the numbers instead.
        beta2: the second decay.
        epsilon: added to the root of the squares.
    """
    with torch.cuda.device_of(table):  # Triton starts kernels on the current device
        _move[(len(table),)](
            table, moments[0], moments[1], moments[-1], numbers,
            LARGEST=len(moments) == 3, DECAY=weight_decay, DECOUPLED=decoupled, BETA2=beta2, EPSILON=epsilon,
            BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _move(
    table, means, squares, largest, numbers,
    LARGEST: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, BETA2: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * 4
    column = tl.arange(0, BLOCK)
    weights = tl.load(row).to(tl.pointer_type(tl.float32)) + column
    gradients = tl.load(row + 1).to(tl.pointer_type(tl.float32)) + column
    place, there = tl.load(row + 2) + column, column < tl.load(row + 3)
    beta1, rest, step_size = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    unbias, decay = tl.load(numbers + 3), tl.load(numbers + 4)
    weight, gradient = tl.load(weights, mask=there, other=0.0), tl.load(gradients, mask=there, other=0.0)
    if DECAY != 0 and not DECOUPLED:
        gradient += DECAY * weight
    mean = beta1 * tl.load(means + place, mask=there, other=0.0) + rest * gradient
    square = BETA2 * tl.load(squares + place, mask=there, other=0.0) + (1 - BETA2) * gradient * gradient
    tl.store(means + place, mean, mask=there)
    tl.store(squares + place, square, mask=there)
    if LARGEST:
        square = tl.maximum(square, tl.load(largest + place, mask=there, other=0.0))
        tl.store(largest + place, square, mask=there)
    change = step_size * (mean / (tl.sqrt_rn(square) * unbias + EPSILON))
    if DECAY != 0 and DECOUPLED:
        change += decay * weight
    tl.store(weights, weight + change, mask=there)
