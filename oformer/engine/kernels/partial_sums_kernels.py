"""Sums over the programs of a kernel: each leaves a row, and the rows are added up in the same order each time.

Atomic additions would need no rows, but add in another order whenever they run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 256, 16  # read at once by a program: many rows, since there are seldom many columns
_MANY, _GROUP = 512, 64  # more rows are first added up in groups: a program for some columns each leaves a GPU idle


def added_up(rows: Tensor) -> Tensor:
    """The sum over the first dimension, in float32."""
    while len(rows) > _MANY:
        rows = _in_groups(rows, triton.cdiv(len(rows), _GROUP), _GROUP, _GROUP)
    return _in_groups(rows, 1, len(rows), _ROWS)[0]


def _in_groups(rows: Tensor, groups: int, each: int, at_once: int) -> Tensor:
    """A row for each group of rows side by side, of which a program reads some at once."""
    total = rows.new_empty((groups, *rows.shape[1:]))
    columns = rows.shape[1:].numel()
    if columns:
        with torch.cuda.device_of(rows):
            _add_up[(triton.cdiv(columns, _COLUMNS), groups)](
                rows, total, len(rows), each, columns, ROWS=at_once, COLUMNS=_COLUMNS,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )  # fmt: skip
    return total


@triton.jit
def _add_up(table, result, rows, each, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one group."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, first = tl.arange(0, ROWS).to(tl.int64), group * each
    real, total = column < columns, tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.minimum(first + each, rows)
    for begin in range(first, last, ROWS):
        there = (row < last - begin)[:, None] & real[None, :]
        total += tl.load(table + (begin + row)[:, None] * columns + column[None, :], there, 0.0)
    tl.store(result + group * columns + column, tl.sum(total, 0), real)
