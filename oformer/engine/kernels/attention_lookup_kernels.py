"""What points read from the sums of linear attention: projection, turn, and the product with the sums, in one kernel.

For each point, with p its channels, M and S the matrices of a head, and T the turn by the angles of the point:

    q = T(M p),   the answer is  D(b + the sum over heads of  Sᵀ q),   and r + that, with a residual r

where b is the bias of the projection of the heads, which S contains, and D its dropout. The way back is the same with
other matrices and the other way round: with g the gradient of the answer, that of M p is d = T⁻¹(S D(g)), and that of p
the sum over heads of Mᵀ d. So one kernel goes both ways. Between the two products a head stays on the chip; q and d are
written beside the result, since the gradients of M and S are products of them with all points, which the vendor's
library makes. Factors of products are of the type of p, all else is float32.

The plain twin is what `Attention` does with queries that are not normalized; tests hold the two equal.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.attention_kernels import _strides, of_factors
from oformer.engine.kernels.dropout_kernels import dropped, sequences
from oformer.engine.kernels.partial_sums_kernels import added_up
from oformer.engine.kernels.tiles_kernels import (
    angle_tiles,
    both_channels,
    edges_of,
    factor_tiles,
    made_head,
    matrix_tiles,
    no_tiles,
    pair_product,
    place_of,
    product_precision,
    size_of,
    step_of,
    store_head,
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
        residual: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        dropout: float,
        dim: int,
        keep: bool,
    ) -> Tensor:
        result, queries = answers(x, matrix, seen, cos, sin, residual, bias, seed, dropout, dim, keep)
        ctx.save_for_backward(x, matrix, cos, sin, seen, bias, seed, queries)
        ctx.dropout, ctx.dim = dropout, dim
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, matrix, cos, sin, seen, bias, seed, queries = ctx.saved_tensors
        of_x, of_projection, factor, of_bias = answers_back(
            gradient, matrix, seen, cos, sin, bias is not None, seed, ctx.dropout, ctx.dim
        )
        if not _rounds(gradient, seen, seed):
            factor = gradient
        _, of_matrix = of_factors(of_projection, x, matrix, (False, ctx.needs_input_grad[1]))
        of_residual = gradient if ctx.needs_input_grad[5] else None
        of_bias = None if bias is None else of_bias.to(bias.dtype)
        return of_x, of_matrix, None, None, queries.mT @ factor, of_residual, of_bias, None, None, None, None


def looked_up(
    x: Tensor,
    matrix: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    seen: Tensor,
    dim: int,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    seed: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What the points read from the sums, (batch, points, width), of the type of the residual, or else of x.

    Args:
        x: (batch, points, width).
        matrix: (heads x width, width), of the queries and of the type of x.
        cos: (batch or 1, points, width / 2), of the angles that queries are turned by, or None.
        sin: likewise.
        seen: (batch, heads x width, width), of the type of x: what each channel of each head reads.
        dim: number of coordinates that the channels are shared out among.
        residual: what the answer is added to, shaped as x, or None.
        bias: (width,), added before the dropout, or None.
        seed: one int64 number that all random numbers follow from; None: no dropout.
        dropout: the share of channels that are dropped, less than one.
    """
    # Inside of the function nobody could say whether a gradient will be asked for.
    operands = x, matrix, cos, sin, seen, residual, bias, seed, dropout, dim, torch.is_grad_enabled()
    return _LookedUp.apply(*operands)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("oformer::answers", mutates_args=())
def answers(
    x: Tensor,
    matrix: Tensor,
    seen: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    residual: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout: float,
    dim: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The answers, and the queries (batch, points, heads x width), which are empty where not kept.

    Args:
        x: as in `looked_up`, like all that follows.
        keep: whether queries are asked for.
    """
    result, queries = _empty(x, matrix, residual, keep)
    tensors, settings, grid = _launch(x, matrix, seen, cos, sin, dim, seed, dropout)
    read = [x if tensor is None else tensor.contiguous() for tensor in (residual, bias)]  # or else not looked at
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _turn_between[grid](
            *tensors, *read, result, queries, x, x,
            **settings, BACK=False, KEEP=keep, RESIDUAL=residual is not None, BIASED=bias is not None, ROUNDS=False,
        )  # fmt: skip
    return result, queries


@answers.register_fake
def _(x, matrix, seen, cos, sin, residual, bias, seed, dropout, dim, keep) -> tuple[Tensor, Tensor]:
    return _empty(x, matrix, residual, keep)


@torch.library.custom_op("oformer::answers_back", mutates_args=())
def answers_back(
    gradient: Tensor,
    matrix: Tensor,
    seen: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    biased: bool,
    seed: Tensor | None,
    dropout: float,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients: of x, but not along the residual; of the projection; of the product with the sums; of the bias.

    The third is the factor of more products. It is empty where the gradient is that already; and so is the last, which
    is float32, where there is no bias.

    Args:
        gradient: of the answers.
        matrix: as in `looked_up`, like all that follows.
        biased: whether there is a bias.
    """
    results = _empty_gradients(gradient, matrix, seen, biased, seed)
    of_x, of_projection, factor, of_bias = results
    tensors, settings, grid = _launch(gradient, seen, matrix, cos, sin, dim, seed, dropout)
    sums = of_bias.new_empty((*grid, len(of_bias)))
    with torch.cuda.device_of(gradient):
        _turn_between[grid](
            *tensors, gradient, gradient, of_x, of_projection, factor, sums,
            **settings, BACK=True, KEEP=True, RESIDUAL=False, BIASED=biased, ROUNDS=_rounds(gradient, seen, seed),
        )  # fmt: skip
    return of_x, of_projection, factor, added_up(sums)


@answers_back.register_fake
def _(gradient, matrix, seen, cos, sin, biased, seed, dropout, dim) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(gradient, matrix, seen, biased, seed)


def _empty(x: Tensor, matrix: Tensor, residual: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    result = x.new_empty(x.shape, dtype=x.dtype if residual is None else residual.dtype)
    return result, x.new_empty((*x.shape[:2], len(matrix)) if keep else (0,))


def _empty_gradients(
    gradient: Tensor, matrix: Tensor, seen: Tensor, biased: bool, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, points, width = gradient.shape
    of_x, of_projection = seen.new_empty((batch, points, width)), seen.new_empty((batch, points, len(matrix)))
    factor = torch.empty_like(of_x) if _rounds(gradient, seen, seed) else seen.new_empty(0)
    return of_x, of_projection, factor, seen.new_empty(width if biased else 0, dtype=torch.float32)


def _rounds(gradient: Tensor, seen: Tensor, seed: Tensor | None) -> bool:
    """Whether the factor of products on the way back is another than the gradient itself."""
    return seed is not None or gradient.dtype != seen.dtype


def _launch(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    dim: int,
    seed: Tensor | None,
    dropout: float,
) -> tuple[list, dict, tuple[int]]:
    """What the kernel takes first, what it is compiled for, and how many programs there are."""
    batch, points, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    first, second = first.contiguous(), second.contiguous()
    tables = [x if table is None else table for table in (cos, sin)]  # or else not looked at
    tables = [table if table.stride(-1) == 1 else table.contiguous() for table in tables]
    tensors = [
        x, first, second, *tables, x if seed is None else seed, batch, points,
        *x.stride()[:2], _by_sample(first), _by_sample(second), *_strides(tables[0]), *_strides(tables[1]),
    ]  # fmt: skip
    settings = {
        "TURNED": cos is not None, "DROPOUT": 0.0 if seed is None else dropout,
        "HEADS": first.shape[-2] // width, "WIDTH": width, "PAIRS": width // (2 * dim), "ROWS": _ROWS,
        "EDGES": edges_of(width // 2), "COLUMNS": _columns(width), "STEP": step_of(width), "STAGES": 2,
        "PRECISION": product_precision(), "num_warps": _WARPS,
    }  # fmt: skip
    return tensors, settings, (batch * triton.cdiv(points, _ROWS),)


def _columns(width: int) -> tuple[int, ...]:
    """Where pieces of the columns of a result begin, and where the last one ends: two at most, the small one first.

    With more of them, or the large one first, ptxas 12.8 reads a register of the way back that nothing has written.
    """
    edges = edges_of(width)
    if len(edges) > 3:
        return 0, triton.next_power_of_2(width)
    return tuple(edges[-1] - edge for edge in reversed(edges))


def _by_sample(matrix: Tensor) -> int:
    """How far the matrices of samples are apart; one for all is read by all."""
    return matrix.stride(0) if matrix.dim() == 3 else 0


@triton.jit
def _turn_between(
    x, first, second, cos, sin, seed, batch, points, by_sample, by_point, first_by_sample, second_by_sample,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, residual, bias, result, between, factor, sums,
    TURNED: tl.constexpr, DROPOUT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, BACK: tl.constexpr, KEEP: tl.constexpr, RESIDUAL: tl.constexpr, BIASED: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """All heads of some points: T(x firstᵀ) second."""
    KIND: tl.constexpr = first.dtype.element_ty
    sample, row, exists = place_of(batch, points, ROWS)
    first, second = first + sample * first_by_sample, second + sample * second_by_sample
    point = sample * points + row
    here, start = x + sample * by_sample + row * by_point, sequences(seed, point, DROPOUT)
    # The left factor: points, or gradients of their answers behind the dropout.
    if BACK:
        sums += tl.program_id(0).to(tl.int64) * WIDTH
        factors = _dropped_factors(
            here, exists, start, factor + point * WIDTH, sums, KIND, DROPOUT, BIASED, ROUNDS, WIDTH, STEP
        )
    else:
        factors = factor_tiles(here, exists, WIDTH, STEP)
    c, s, one = (), (), tl.full((ROWS, 1), 1.0, tl.float32)
    if TURNED:
        c = angle_tiles(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = angle_tiles(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    # Head by head: project, rotate (or rotate back), multiply by the matrix of the head, add up.
    total = no_tiles(ROWS, COLUMNS)
    for head in tl.range(HEADS, num_stages=STAGES):
        a, b = (), ()
        for piece in tl.static_range(len(EDGES) - 1):
            tiles = matrix_tiles(first + head * (WIDTH * WIDTH), EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS, STEP)
            even, odd = pair_product(factors, tiles, PRECISION)
            a += (even,)
            b += (odd,)
        if BACK:
            a, b = b, a  # turned the other way, the two of a pair change places
        p, q = made_head(a, b, one, first, c, s, one, TURNED, False, WIDTH, PAIRS, EDGES)
        if BACK:
            p, q = q, p
        if KEEP:
            store_head(between + (point * HEADS + head) * WIDTH, p, q, exists, WIDTH, PAIRS, EDGES)
        total = _more(total, p, q, second + head * (WIDTH * WIDTH), KIND, WIDTH, PAIRS, EDGES, COLUMNS, PRECISION)
    # Bias, dropout and residual of an answer; a gradient has none.
    for part in tl.static_range(len(COLUMNS) - 1):
        column = COLUMNS[part] + tl.arange(0, size_of(COLUMNS, part))
        real = column < WIDTH
        at, there, found = point[:, None] * WIDTH + column[None, :], exists[:, None] & real[None, :], total[part]
        if not BACK:
            if BIASED:
                found += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
            found = dropped(found, start, column, DROPOUT)
            if RESIDUAL:
                found += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        tl.store(result + at, found.to(result.dtype.element_ty), mask=there)


@triton.jit
def _dropped_factors(
    here, exists, start, factor, sums, KIND: tl.constexpr, DROPOUT: tl.constexpr, BIASED: tl.constexpr,
    ROUNDS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The gradient of the points before dropout, STEP channels at a time; written, and added up for the bias."""
    tiles = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        channel = step * STEP + tl.arange(0, STEP)
        real = channel < WIDTH
        there = exists[:, None] & real[None, :]
        tile = tl.load(here[:, None] + channel[None, :], mask=there, other=0.0)
        if BIASED or ROUNDS:
            exact = dropped(tile.to(tl.float32), start, channel, DROPOUT)
            if BIASED:
                tl.store(sums + channel, tl.sum(exact, 0), mask=real)
            # A choice that changes nothing: what is only rounded, Triton would hold in registers, which are too few.
            tile = tl.where(there, exact, 0.0).to(KIND)
        if ROUNDS:
            tl.store(factor[:, None] + channel[None, :], tile, mask=there)
        tiles += (tile,)
    return tiles


@triton.jit
def _more(
    total, p, q, matrix, KIND: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The result so far, some columns at a time, with what one more head adds."""
    for piece in tl.static_range(len(p)):
        joint = tl.permute(tl.join(p[piece].to(KIND), q[piece].to(KIND)), (0, 2, 1))
        joint = tl.reshape(joint, (joint.shape[0], joint.shape[1] * joint.shape[2]))
        channel, real = both_channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        found = ()
        for part in tl.static_range(len(total)):
            column = COLUMNS[part] + tl.arange(0, size_of(COLUMNS, part))
            at, there = channel[:, None] * WIDTH + column[None, :], real[:, None] & (column < WIDTH)[None, :]
            tile = tl.load(matrix + at, mask=there, other=0.0)
            found += (tl.dot(joint, tile, total[part], input_precision=PRECISION),)
        total = found
    return total
