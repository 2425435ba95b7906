"""Sums over the programs of a kernel: each leaves a row, and the rows are added up in the same order each time.

Atomic additions would need no rows, but add in another order whenever they run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 256, 16  # read at once by a program: many rows, since there are seldom many columns


def added_up(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in float32."""
    total = rows.new_empty(rows.shape[1:])
    if total.numel():
        with torch.cuda.device_of(rows):
            _add_up[(triton.cdiv(total.numel(), _COLUMNS),)](
                rows, total, len(rows), total.numel(), ROWS=_ROWS, COLUMNS=_COLUMNS,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
    return total


@triton.jit
def _add_up(table, result, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS).to(tl.int64)
    real, total = column < columns, tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, rows, ROWS):
        there = (row < rows - begin)[:, None] & real[None, :]
        total += tl.load(table + (begin + row)[:, None] * columns + column[None, :], there, 0.0)
    tl.store(result + column, tl.sum(total, 0), real)
