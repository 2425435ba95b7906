"""What points read from the sums of linear attention: projection, turn, and the product with the sums, in one kernel.

For each point, with p its channels, M and S the matrices of a head, and T the turn by the angles of the point:

    q = T(M p),   the answer is the sum over heads of  Sᵀ q

The way back is the same with other matrices and the other way round: with g the gradient of the answer, that of M p is
d = T⁻¹(S g), and that of p the sum over heads of Mᵀ d. So one kernel goes both ways. Between the two products a head
stays on the chip; q and d are written beside the result, since the gradients of M and S are products of them with all
points, which the vendor's library makes. Factors of products are of the type of p, all else is float32.

The plain twin is what `Attention` does with queries that are not normalized; tests hold the two equal.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.nn.attention_kernels import (
    _both,
    _edges,
    _factors,
    _made,
    _no_tiles,
    _place,
    _precision,
    _product,
    _step,
    _store,
    _strides,
    _table,
    _tiles,
    of_factors,
)

_ROWS = 64  # points of a program: what the tensor cores of four warps take at a time
_WARPS = 4


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        seen: Tensor,
        dim: int,
        keep: bool,
    ) -> Tensor:
        result, queries = turned_between(x, matrix, seen, cos, sin, dim, False, keep)
        ctx.save_for_backward(x, matrix, cos, sin, seen, queries)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, cos, sin, seen, queries = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x, of_projection = turned_between(gradient, seen, matrix, cos, sin, ctx.dim, True, True)
        _, of_matrix = of_factors(of_projection, x, matrix, (False, ctx.needs_input_grad[1]))
        return of_x, of_matrix, None, None, queries.mT @ gradient, None, None


def looked_up(x: Tensor, matrix: Tensor, cos: Tensor | None, sin: Tensor | None, seen: Tensor, dim: int) -> Tensor:
    """What the points read from the sums, (batch, points, width).

    Args:
        x: (batch, points, width).
        matrix: (heads x width, width), of the queries and of the type of x.
        cos: (batch or 1, points, width / 2), of the angles that queries are turned by, or None.
        sin: likewise.
        seen: (batch, heads x width, width), of the type of x: what each channel of each head reads.
        dim: number of coordinates that the channels are shared out among.
    """
    # Inside of the function nobody could say whether a gradient will be asked for.
    return _LookedUp.apply(x, matrix, cos, sin, seen, dim, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


@torch.library.custom_op("oformer::turned_between", mutates_args=())
def turned_between(
    x: Tensor, first: Tensor, second: Tensor, cos: Tensor | None, sin: Tensor | None, dim: int, back: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    """T(x firstᵀ) second, and T(x firstᵀ) itself, (batch, points, heads x width), which is empty where not kept.

    Args:
        x: (batch, points, width).
        first: (heads x width, width), or such a matrix for each sample.
        second: likewise.
        cos: (batch or 1, points, width / 2), of the angles, or None.
        sin: likewise.
        dim: number of coordinates that the channels are shared out among.
        back: whether to turn the other way.
        keep: whether what lies between the products is asked for.
    """
    batch, points, width = x.shape
    result, between = _empty(x, first, keep)
    x = x if x.stride(-1) == 1 else x.contiguous()
    first, second = first.contiguous(), second.contiguous()
    tables = [x if table is None else table for table in (cos, sin)]  # or else not looked at
    tables = [table if table.stride(-1) == 1 else table.contiguous() for table in tables]
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _turn_between[(batch * triton.cdiv(points, _ROWS),)](
            x, first, second, *tables, batch, points, *x.stride()[:2], _by_sample(first), _by_sample(second),
            *_strides(tables[0]), *_strides(tables[1]), result, between,
            TURNED=cos is not None, BACK=back, KEEP=keep,
            HEADS=first.shape[-2] // width, WIDTH=width, PAIRS=width // (2 * dim), ROWS=_ROWS,
            EDGES=_edges(width // 2), COLUMNS=_edges(width), STEP=_step(width), STAGES=2, PRECISION=_precision(),
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    return result, between


@turned_between.register_fake
def _(x, first, second, cos, sin, dim, back, keep) -> tuple[Tensor, Tensor]:
    return _empty(x, first, keep)


def _empty(x: Tensor, first: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:2], first.shape[-2]) if keep else (0,))


def _by_sample(matrix: Tensor) -> int:
    """How far the matrices of samples are apart; one for all is read by all."""
    return matrix.stride(0) if matrix.dim() == 3 else 0


@triton.jit
def _turn_between(
    x, first, second, cos, sin, batch, points, by_sample, by_point, first_by_sample, second_by_sample,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, result, between,
    TURNED: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All heads of some points."""
    KIND: tl.constexpr = x.dtype.element_ty
    sample, row, exists = _place(batch, points, ROWS)
    first, second = first + sample * first_by_sample, second + sample * second_by_sample
    factors = _factors(x + sample * by_sample + row * by_point, exists, WIDTH, STEP)
    c, s, one = (), (), tl.full((ROWS, 1), 1.0, tl.float32)
    if TURNED:
        c = _table(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = _table(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    total = _no_tiles(ROWS, COLUMNS)
    for head in tl.range(HEADS, num_stages=STAGES):
        a, b = (), ()
        for piece in tl.static_range(len(EDGES) - 1):
            tiles = _tiles(first + head * (WIDTH * WIDTH), EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS, STEP)
            even, odd = _product(factors, tiles, PRECISION)
            a += (even,)
            b += (odd,)
        if BACK:
            a, b = b, a  # turned the other way, the two of a pair change places
        p, q = _made(a, b, one, first, c, s, one, TURNED, False, WIDTH, PAIRS, EDGES)
        if BACK:
            p, q = q, p
        if KEEP:
            to = between + ((sample * points + row) * HEADS + head) * WIDTH
            _store(to, p, q, exists, WIDTH, PAIRS, EDGES)
        total = _more(total, p, q, second + head * (WIDTH * WIDTH), KIND, WIDTH, PAIRS, EDGES, COLUMNS, PRECISION)
    for part in tl.static_range(len(COLUMNS) - 1):
        column = COLUMNS[part] + tl.arange(0, COLUMNS[part + 1] - COLUMNS[part])
        at = (sample * points + row)[:, None] * WIDTH + column[None, :]
        tl.store(result + at, total[part].to(KIND), mask=exists[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _more(
    total, p, q, matrix, KIND: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The result so far, some columns at a time, with what one more head adds."""
    for piece in tl.static_range(len(p)):
        joint = tl.permute(tl.join(p[piece].to(KIND), q[piece].to(KIND)), (0, 2, 1))
        joint = tl.reshape(joint, (joint.shape[0], joint.shape[1] * joint.shape[2]))
        channel, real = _both(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        found = ()
        for part in tl.static_range(len(total)):
            column = COLUMNS[part] + tl.arange(0, COLUMNS[part + 1] - COLUMNS[part])
            at, there = channel[:, None] * WIDTH + column[None, :], real[:, None] & (column < WIDTH)[None, :]
            tile = tl.load(matrix + at, mask=there, other=0.0)
            found += (tl.dot(joint, tile, total[part], input_precision=PRECISION),)
        total = found
    return total
