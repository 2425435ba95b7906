"""The sum over points of linear attention, KᵀV, from the points alone: keys and values stay on the chip.

For each sample and head, with k and v the keys and values of a point as `attention_kernels.py` makes them:

    S = Σ k vᵀ,   and back, with G the gradient of S:   dk = G v,   dv = Gᵀ k

A program takes some of the points, one block after the other. It multiplies them by the matrices of one head,
normalizes, turns and weights, and adds k vᵀ to an S that stays in its registers. Afterwards the sums of all programs
are added up, in the same order each time. The gradient computes k and v again and writes only that of their projection.
Factors of products are of the type of the points; all else is float32, and so is S.

This is for keys and values that are both normalized or both not, and for values that are not turned.

The plain twin is what `Attention` does with keys and values; tests hold the two equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.attention_kernels import of_factors
from oformer.engine.kernels.partial_sums_kernels import added_up
from oformer.engine.kernels.tiles_kernels import (
    angle_tiles,
    apart,
    both_channels,
    centered,
    edges_of,
    factor_tiles,
    made_head,
    made_head_back,
    matrix_tiles,
    no_sums,
    pair_product,
    product_precision,
    size_of,
    step_of,
    store_gains,
    store_head,
)

_ROWS = 64  # points of a block: what the tensor cores of four warps take at a time
_WARPS = 4
_PROGRAMS = 256  # about as many as a large GPU runs at once, two on each multiprocessor


@torch.library.custom_op("oformer::summed", mutates_args=())
def summed(
    x: Tensor,
    matrix: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    normalized: bool,
    dim: int,
    epsilon: float,
) -> Tensor:
    """The sum over points (batch, heads, width, width) in float32.

    Args:
        x: (batch, points, width).
        matrix: (2 x heads x width, width), of keys and values, of the type of x.
        cos: (batch or 1, points, width / 2), of the angles that keys are turned by, or None.
        sin: likewise.
        root: (batch or 1, points), roots of the quadrature weights.
        gains: (2, 2, width), of keys and values: factors and shifts after the normalization; None: one and zero.
        normalized: keys and values, over the channels of a head.
        dim: number of coordinates that the channels are shared out among.
        epsilon: added to the variance.
    """
    shared, sizes, grid = _launch(x, matrix, cos, sin, root, gains, normalized, dim)
    batch, heads, width = x.shape[0], sizes["HEADS"], x.shape[2]
    sums = x.new_empty((grid[0] // (batch * heads), batch, heads, width, width), dtype=torch.float32)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _sum[grid](*shared, sums, **sizes, EPSILON=epsilon, num_warps=_WARPS)
    return sums.sum(0)


@summed.register_fake
def _(x, matrix, cos, sin, root, gains, normalized, dim, epsilon) -> Tensor:
    batch, _, width = x.shape
    return x.new_empty((batch, matrix.shape[0] // (2 * width), width, width), dtype=torch.float32)


@torch.library.custom_op("oformer::summed_back", mutates_args=())
def summed_back(
    gradient: Tensor,
    x: Tensor,
    matrix: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    normalized: bool,
    dim: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of the projection (batch, points, 2, heads, width) and of the gains, empty without any.

    Args:
        gradient: of the result of `summed`.
        x: as there, like all that follows.
    """
    shared, sizes, grid = _launch(x, matrix, cos, sin, root, gains, normalized, dim)
    result, of_gains = _empty_gradients(x, matrix, gains)
    sums = of_gains.new_empty((*grid, *of_gains.shape), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _sum_back[grid](*shared, gradient.contiguous(), result, sums, **sizes, EPSILON=epsilon, num_warps=_WARPS)
    return result, added_up(sums).to(of_gains.dtype)


@summed_back.register_fake
def _(gradient, x, matrix, cos, sin, root, gains, normalized, dim, epsilon) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, matrix, gains)


def _empty_gradients(x: Tensor, matrix: Tensor, gains: Tensor | None) -> tuple[Tensor, Tensor]:
    projection = x.new_empty((*x.shape[:2], 2, matrix.shape[0] // (2 * x.shape[2]), x.shape[2]))
    return projection, x.new_empty(0) if gains is None else torch.empty_like(gains)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _back(ctx, gradient):
    x, matrix, *others = ctx.saved_tensors
    gradient, of_gains = summed_back(gradient, x, matrix, *others, *ctx.settings)
    of_x, of_matrix = of_factors(gradient, x, matrix, ctx.needs_input_grad)
    # Angles and weights are data.
    return of_x, of_matrix, None, None, None, of_gains if ctx.needs_input_grad[5] else None, *[None] * len(ctx.settings)


summed.register_autograd(_back, setup_context=_keep)


def _launch(
    x: Tensor,
    matrix: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    normalized: bool,
    dim: int,
) -> tuple[list, dict, tuple[int]]:
    """What both kernels take first, what they are compiled for, and how many programs there are."""
    batch, points, width = x.shape
    heads = matrix.shape[0] // (2 * width)
    turned = cos is not None
    data, strides = zip(*(_dense(root if table is None else table) for table in (x, cos, sin, root)), strict=True)
    each = triton.cdiv(points, _ROWS)
    blocks = max(triton.cdiv(each, max(_PROGRAMS // (batch * heads), 1)), 1)
    shared = [
        data[0], matrix.contiguous(), *data[1:], root if gains is None else gains.contiguous(),
        batch, points, blocks, *strides,
    ]  # fmt: skip
    sizes = {
        "NORMALIZED": normalized, "TURNED": turned, "AFFINE": gains is not None,
        "HEADS": heads, "WIDTH": width, "PAIRS": width // (2 * dim),
        "ROWS": _ROWS, "EDGES": edges_of(width // 2), "STEP": step_of(width), "PRECISION": product_precision(),
    }  # fmt: skip
    return shared, sizes, (triton.cdiv(each, blocks) * batch * heads,)


def _dense(table: Tensor) -> tuple[Tensor, int]:
    """The table with the points of a sample side by side, and how far samples are apart; one for all is read by all."""
    table = table if table[0].is_contiguous() else table.contiguous()
    return table, 0 if table.shape[0] == 1 else table.stride(0)


@triton.jit
def _place(batch, points, blocks, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Head, sample and blocks of a program; heads come first, so that programs side by side share their points."""
    program = tl.program_id(0)
    first = program // HEADS // batch * blocks
    last = tl.minimum(first + blocks, (points + ROWS - 1) // ROWS)
    return program % HEADS, (program // HEADS % batch).to(tl.int64), first, last


@triton.jit
def _matrix(matrix, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr):
    """All tiles of the matrix of a head, for all blocks."""
    pieces = ()
    for piece in tl.static_range(len(EDGES) - 1):
        pieces += (matrix_tiles(matrix, EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS, STEP),)
    return pieces


@triton.jit
def _projected(
    factors, matrix, NORMALIZED: tl.constexpr, WIDTH: tl.constexpr, EDGES: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """The projected channels of a head, centered if they are to be normalized, and one over their spread."""
    a, b = (), ()
    for piece in tl.static_range(len(matrix)):
        first, second = pair_product(factors, matrix[piece], PRECISION)
        a += (first,)
        b += (second,)
    inverse = tl.full((factors[0].shape[0], 1), 1.0, tl.float32)
    if NORMALIZED:
        a, b, inverse = centered(a, b, WIDTH, EDGES, EPSILON)
    return a, b, inverse


@triton.jit
def _factor(
    a, b, inverse, gains, c, s, w, KIND: tl.constexpr, TURNED: tl.constexpr, AFFINE: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Keys or values as a factor of a product, a tile for each piece, with the channels as `both_channels` has them."""
    p, q = made_head(a, b, inverse, gains, c, s, w, TURNED, AFFINE, WIDTH, PAIRS, EDGES)
    tiles = ()
    for piece in tl.static_range(len(p)):
        joint = tl.permute(tl.join(p[piece].to(KIND), q[piece].to(KIND)), (0, 2, 1))
        tiles += (tl.reshape(joint, (joint.shape[0], joint.shape[1] * joint.shape[2])),)
    return tiles


@triton.jit
def _sum(
    x, matrix, cos, sin, root, gains, batch, points, blocks, by_sample, cos_by_sample, sin_by_sample, root_by_sample,
    result,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """The sum over some blocks of the points of a sample, for one head."""
    KIND: tl.constexpr = x.dtype.element_ty
    head, sample, begin, end = _place(batch, points, blocks, HEADS, ROWS)
    x, cos, sin, root = (
        x + sample * by_sample, cos + sample * cos_by_sample, sin + sample * sin_by_sample,
        root + sample * root_by_sample,
    )  # fmt: skip
    of_keys = _matrix(matrix + head * (WIDTH * WIDTH), WIDTH, PAIRS, EDGES, STEP)
    of_values = _matrix(matrix + (HEADS + head) * (WIDTH * WIDTH), WIDTH, PAIRS, EDGES, STEP)
    total = _nothing(EDGES)
    for block in tl.range(begin, end, num_stages=2):
        factors, c, s, w, _ = _block(x, cos, sin, root, block, points, TURNED, WIDTH, ROWS, EDGES, STEP)
        a, b, inverse = _projected(factors, of_keys, NORMALIZED, WIDTH, EDGES, PRECISION, EPSILON)
        k = _factor(a, b, inverse, gains, c, s, w, KIND, TURNED, AFFINE, WIDTH, PAIRS, EDGES)
        a, b, inverse = _projected(factors, of_values, NORMALIZED, WIDTH, EDGES, PRECISION, EPSILON)
        v = _factor(a, b, inverse, gains + 2 * WIDTH, c, s, w, KIND, False, AFFINE, WIDTH, PAIRS, EDGES)
        total = _more(total, k, v, PRECISION)
    result += tl.program_id(0).to(tl.int64) * (WIDTH * WIDTH)
    for i in tl.static_range(len(EDGES) - 1):
        key, real_key = both_channels(EDGES[i], EDGES[i + 1], WIDTH, PAIRS)
        for j in tl.static_range(len(EDGES) - 1):
            value, real_value = both_channels(EDGES[j], EDGES[j + 1], WIDTH, PAIRS)
            if i > j:
                at, there = key[None, :] * WIDTH + value[:, None], real_key[None, :] & real_value[:, None]
            else:
                at, there = key[:, None] * WIDTH + value[None, :], real_key[:, None] & real_value[None, :]
            tl.store(result + at, total[i][j], mask=there)


@triton.jit
def _block(
    x, cos, sin, root, block, points, TURNED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    EDGES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """What is read of the points of a block; what differs from block to block is one number for all threads."""
    first, row = tl.cast(block, tl.int64) * ROWS, tl.arange(0, ROWS)
    exists = row < points - block * ROWS
    w = tl.load(root + first + row, mask=exists, other=0.0).to(tl.float32)[:, None]
    factors = factor_tiles(x + first * WIDTH + row * WIDTH, exists, WIDTH, STEP)
    c, s = (), ()
    if TURNED:
        c = angle_tiles(cos + first * (WIDTH // 2) + row * (WIDTH // 2), exists, WIDTH, EDGES)
        s = angle_tiles(sin + first * (WIDTH // 2) + row * (WIDTH // 2), exists, WIDTH, EDGES)
    return factors, c, s, w, exists


@triton.jit
def _nothing(EDGES: tl.constexpr):
    """Zeros for `_more` to begin with."""
    total = ()
    for i in tl.static_range(len(EDGES) - 1):
        line = ()
        for j in tl.static_range(len(EDGES) - 1):
            if i > j:
                line += (tl.zeros((2 * size_of(EDGES, j), 2 * size_of(EDGES, i)), tl.float32),)
            else:
                line += (tl.zeros((2 * size_of(EDGES, i), 2 * size_of(EDGES, j)), tl.float32),)
        total += (line,)
    return total


@triton.jit
def _more(total, k, v, PRECISION: tl.constexpr):
    """Sums by pieces of keys and of values, with those over one more block.

    Pieces become smaller. Below the diagonal the sum is turned over, since tensor cores take 64 rows at a time and any
    number of columns. The smallest product comes first: so fewer copies of k and v are in shared memory at once.
    """
    found = ()
    for i in tl.static_range(len(k) - 1, -1, -1):
        line = ()
        for j in tl.static_range(len(v) - 1, -1, -1):
            if i > j:
                sums = (tl.dot(tl.trans(v[j]), k[i], total[i][j], input_precision=PRECISION),)
            else:
                sums = (tl.dot(tl.trans(k[i]), v[j], total[i][j], input_precision=PRECISION),)
            line = sums + line
        lines = (line,)
        found = lines + found
    return found


@triton.jit
def _sum_back(
    x, matrix, cos, sin, root, gains, batch, points, blocks, by_sample, cos_by_sample, sin_by_sample, root_by_sample,
    gradient, result, sums,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """The gradient of the projection of some blocks of the points of a sample, for one head of keys and values."""
    KIND: tl.constexpr = x.dtype.element_ty
    head, sample, begin, end = _place(batch, points, blocks, HEADS, ROWS)
    x, cos, sin, root = (
        x + sample * by_sample, cos + sample * cos_by_sample, sin + sample * sin_by_sample,
        root + sample * root_by_sample,
    )  # fmt: skip
    of_keys = _matrix(matrix + head * (WIDTH * WIDTH), WIDTH, PAIRS, EDGES, STEP)
    of_values = _matrix(matrix + (HEADS + head) * (WIDTH * WIDTH), WIDTH, PAIRS, EDGES, STEP)
    of_sum = _gradient(gradient + (sample * HEADS + head) * (WIDTH * WIDTH), KIND, WIDTH, PAIRS, EDGES)
    # Keys and values of each block are projected again; nothing of them was kept.
    result += sample * points * (2 * HEADS * WIDTH) + head * WIDTH
    key_gains, value_gains = no_sums(EDGES), no_sums(EDGES)
    for block in tl.range(begin, end, num_stages=2):
        factors, c, s, w, exists = _block(x, cos, sin, root, block, points, TURNED, WIDTH, ROWS, EDGES, STEP)
        a_v, b_v, inverse_v = _projected(factors, of_values, NORMALIZED, WIDTH, EDGES, PRECISION, EPSILON)
        v = _factor(a_v, b_v, inverse_v, gains + 2 * WIDTH, c, s, w, KIND, False, AFFINE, WIDTH, PAIRS, EDGES)
        a_k, b_k, inverse_k = _projected(factors, of_keys, NORMALIZED, WIDTH, EDGES, PRECISION, EPSILON)
        k = _factor(a_k, b_k, inverse_k, gains, c, s, w, KIND, TURNED, AFFINE, WIDTH, PAIRS, EDGES)
        out = result + tl.cast(block, tl.int64) * (ROWS * 2 * HEADS * WIDTH)
        out += tl.arange(0, ROWS) * (2 * HEADS * WIDTH)
        # The gradient of keys, through values and the gradient of the sum, back through rotation, norm and weight.
        g, h = _through(v, of_sum, True, PRECISION)
        g, h, key_gains = made_head_back(
            g, h, a_k, b_k, inverse_k, key_gains, gains, c, s, w, NORMALIZED, TURNED, AFFINE, WIDTH, PAIRS, EDGES
        )
        store_head(out, g, h, exists, WIDTH, PAIRS, EDGES)
        # That of values, through keys.
        g, h = _through(k, of_sum, False, PRECISION)
        g, h, value_gains = made_head_back(
            g, h, a_v, b_v, inverse_v, value_gains, gains + 2 * WIDTH, c, s, w,
            NORMALIZED, False, AFFINE, WIDTH, PAIRS, EDGES,
        )  # fmt: skip
        store_head(out + HEADS * WIDTH, g, h, exists, WIDTH, PAIRS, EDGES)
    if AFFINE:
        sums += tl.program_id(0).to(tl.int64) * (4 * WIDTH)
        store_gains(sums, key_gains, WIDTH, PAIRS, EDGES)
        store_gains(sums + 2 * WIDTH, value_gains, WIDTH, PAIRS, EDGES)


@triton.jit
def _gradient(gradient, KIND: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """The gradient of the sum as a factor, tiles by pieces of keys and of values."""
    tiles = ()
    for i in tl.static_range(len(EDGES) - 1):
        key, real_key = both_channels(EDGES[i], EDGES[i + 1], WIDTH, PAIRS)
        line = ()
        for j in tl.static_range(len(EDGES) - 1):
            value, real_value = both_channels(EDGES[j], EDGES[j + 1], WIDTH, PAIRS)
            at, there = key[:, None] * WIDTH + value[None, :], real_key[:, None] & real_value[None, :]
            line += (tl.load(gradient + at, mask=there, other=0.0).to(KIND),)
        tiles += (line,)
    return tiles


@triton.jit
def _through(factor, of_sum, TO_KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """The gradient of keys from values, or of values from keys: first and second channels of each pair, by piece."""
    g, h = (), ()
    for to in tl.static_range(len(factor)):
        total = tl.zeros(factor[to].shape, tl.float32)
        for piece in tl.static_range(len(factor)):
            tile = tl.trans(of_sum[to][piece]) if TO_KEYS else of_sum[piece][to]
            total = tl.dot(factor[piece], tile, total, input_precision=PRECISION)
        first, second = apart(total)
        g += (first,)
        h += (second,)
    return g, h
