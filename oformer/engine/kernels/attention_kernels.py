"""From the points to the products of linear attention: projection, norm, turn and weight, in one kernel each way.

For each part (q, k, v) and each point and head, with p the channels of the point, M the matrix of the head and w the
weight of the point, where the part asks for it:

    x = M p,   n = (x - mean x) / sqrt(var x + epsilon),   y = gain n + shift,   z = y turned by its angles,   √w z

and the result lies as the products read it: (batch, points, heads, width), or (batch, heads, points, width), so that
sums over points are products of whole matrices. Products are of the type of p, everything else is float32. The
projection x is many times as large as p, and never in memory: the gradient keeps only p and computes x again. It writes
the gradient of x, from which plain products make those of p and M.

Multiplying takes a time that grows with the square of the width, reading x only with the width. Where heads are too
wide for it to pay, the caller projects: the same kernels then read x instead of p and M.

The plain twins are `Normalize`, `Rotary` and what `Attention` does with them; tests hold the two equal. A program takes
some points of one sample and all heads, since these have angles and weights in common. It has the channels of a head
as two tiles, the first and the second of each pair that is turned together, so that nothing moves between threads.
Tiles have powers of two for sides. Where it multiplies, it takes the 48 pairs of a head of 96 channels in two pieces,
of 32 and 16: in one of 64, a quarter of all work would be wasted.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.partial_sums_kernels import added_up

_ROWS = 64  # points of a program that multiplies: what the tensor cores of four warps take at a time
_TILE = 1024  # or else numbers of half the channels of a head, for the points of one program: eight for each thread
_WARPS = 4
_AHEAD = 2**15  # bytes; smaller matrices of heads are fetched while the head before is worked on


@torch.library.custom_op("oformer::arranged", mutates_args=())
def arranged(
    x: Tensor,
    matrix: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    normalized: Sequence[bool],
    turned: Sequence[bool],
    weighted: Sequence[bool],
    heads_first: Sequence[bool],
    dim: int,
    epsilon: float,
) -> list[Tensor]:
    """Each part of a joint projection as a product reads it, contiguous and of the type of x.

    Args:
        x: (batch, points, width); or, where there is no matrix, its projection (batch, points, parts, heads, width).
            Samples may share memory.
        matrix: (parts x heads x width, width), of one to three parts and of the type of x.
        cos: (batch or 1, points, width / 2), of the angles that pairs of channels are turned by; see `Rotary`.
        sin: likewise; both are needed where a part is turned.
        root: (batch or 1, points), roots of the quadrature weights.
        gains: (normalized parts, 2, width), factors and shifts after the normalization; None: one and zero.
        normalized: of each part: over the channels of a head.
        turned: of each part.
        weighted: of each part.
        heads_first: of each part: (batch, heads, points, width) instead of (batch, points, heads, width).
        dim: number of coordinates that the channels are shared out among.
        epsilon: added to the variance.
    """
    results = _empty_results(x, matrix, heads_first)
    choices = normalized, turned, weighted, heads_first
    shared, sizes, grid = _launch(x, matrix, cos, sin, root, gains, choices, dim)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _arrange[grid](*shared, *_three(results), **sizes, EPSILON=epsilon, num_warps=_WARPS)
    return results


@arranged.register_fake
def _(x, matrix, cos, sin, root, gains, normalized, turned, weighted, heads_first, dim, epsilon) -> list[Tensor]:
    return _empty_results(x, matrix, heads_first)


@torch.library.custom_op("oformer::arranged_back", mutates_args=())
def arranged_back(
    gradients: Sequence[Tensor | None],
    x: Tensor,
    matrix: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    normalized: Sequence[bool],
    turned: Sequence[bool],
    weighted: Sequence[bool],
    heads_first: Sequence[bool],
    dim: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of the projection and of the gains, which are empty where there are none.

    Args:
        gradients: of the results of `arranged`; None counts as zero.
        x: as there, like all that follows.
    """
    result, of_gains = _empty_gradients(x, matrix, gains, len(normalized))
    known = [None if gradient is None else gradient.contiguous() for gradient in gradients]
    choices = normalized, turned, weighted, heads_first
    shared, sizes, grid = _launch(x, matrix, cos, sin, root, gains, choices, dim)
    sums = of_gains.new_empty((*grid, *of_gains.shape), dtype=torch.float32)
    filled = [x if gradient is None else gradient for gradient in known]
    needed = _bits([gradient is not None for gradient in known])
    with torch.cuda.device_of(x):
        _arrange_back[grid](
            *shared, *_three(filled), result, sums, **sizes, EPSILON=epsilon, NEEDED=needed, num_warps=_WARPS
        )
    return result, added_up(sums).to(of_gains.dtype)


@arranged_back.register_fake
def _(
    gradients, x, matrix, cos, sin, root, gains, normalized, turned, weighted, heads_first, dim, epsilon
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, matrix, gains, len(normalized))


def _keep(ctx, inputs, output) -> None:
    *tensors, normalized, turned, weighted, heads_first, dim, epsilon = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.settings = normalized, turned, weighted, heads_first, dim, epsilon


def _back(ctx, gradients):
    x, matrix, *others = ctx.saved_tensors
    of_x, of_gains = arranged_back(gradients, x, matrix, *others, *ctx.settings)
    of_matrix = None
    if matrix is not None:
        of_x, of_matrix = of_factors(of_x, x, matrix, ctx.needs_input_grad)
    # Angles and weights are data.
    return of_x, of_matrix, None, None, None, of_gains if ctx.needs_input_grad[5] else None, *[None] * len(ctx.settings)


def of_factors(
    gradient: Tensor, x: Tensor, matrix: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """From the gradient of the projection those of x and of the matrix, where needed."""
    rows = gradient.flatten(2)
    of_x = rows @ matrix if needed[0] else None
    return of_x, rows.flatten(0, 1).mT @ x.flatten(0, 1) if needed[1] else None


arranged.register_autograd(_back, setup_context=_keep)


def _heads(x: Tensor, matrix: Tensor | None, parts: int) -> int:
    return x.shape[3] if matrix is None else matrix.shape[0] // (parts * x.shape[-1])


def _empty_results(x: Tensor, matrix: Tensor | None, heads_first: Sequence[bool]) -> list[Tensor]:
    batch, points, *_, width = x.shape
    heads = _heads(x, matrix, len(heads_first))
    return [
        x.new_empty((batch, heads, points, width) if first else (batch, points, heads, width)) for first in heads_first
    ]


def _empty_gradients(x: Tensor, matrix: Tensor | None, gains: Tensor | None, parts: int) -> tuple[Tensor, Tensor]:
    batch, points, *_, width = x.shape
    projection = x.new_empty((batch, points, parts, _heads(x, matrix, parts), width))
    return projection, x.new_empty(0) if gains is None else torch.empty_like(gains)


def _bits(chosen: Sequence[bool]) -> int:
    """A choice for each part as one number, which kernels are compiled for; the first part is the lowest bit."""
    return sum(choice << part for part, choice in enumerate(chosen))


def _three(tensors: list[Tensor]) -> list[Tensor]:
    """As many as kernels take; those beyond the last part are not looked at."""
    return tensors + tensors[:1] * (3 - len(tensors))


def _edges(pairs: int) -> tuple[int, ...]:
    """Where pieces of the pairs of a head begin, and where the last one ends, which may be beyond the last pair.

    The sizes are powers of two, as large as fit, but none is below 16, the least that tensor cores take.
    """
    edges = [0]
    while edges[-1] < pairs:
        edges.append(edges[-1] + max(2 ** int(math.log2(pairs - edges[-1])), 16))
    return tuple(edges)


def _step(width: int) -> int:
    """How many channels of x are multiplied at a time: a power of two that wastes little, as above."""
    return max(math.gcd(width, 64), 16)


def _precision() -> str:
    """Of products of float32 numbers."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _launch(
    x: Tensor,
    matrix: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    choices: Sequence[Sequence[bool]],
    dim: int,
) -> tuple[list, dict, tuple[int]]:
    """What both kernels take first, what they are compiled for, and how many programs there are."""
    parts = len(choices[0])
    batch, points, *_, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = (root if table is None else table for table in (cos, sin))  # or else not looked at
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    shared = [
        x, x if matrix is None else matrix.contiguous(), cos, sin, root,
        root if gains is None else gains.contiguous(), batch, points,
        *x.stride()[:2], *(x.stride()[2:4] if matrix is None else (0, 0)),
        *_strides(cos), *_strides(sin), *_strides(root),
    ]  # fmt: skip
    if matrix is None:
        half = triton.next_power_of_2(width // 2)
        rows, edges, step, stages = max(_TILE // half, 1), (0, half), 0, 1
    else:
        rows, edges, step = _ROWS, _edges(width // 2), _step(width)
        stages = 2 if width**2 * matrix.element_size() < _AHEAD else 1
    sizes = {
        **dict(zip(("NORMALIZED", "TURNED", "WEIGHTED", "HEADS_FIRST"), map(_bits, choices), strict=True)),
        "GAINS": 0 if gains is None else len(gains),
        "PARTS": parts, "HEADS": _heads(x, matrix, parts), "WIDTH": width, "PAIRS": width // (2 * dim),
        "ROWS": rows, "EDGES": edges, "STEP": step, "STAGES": stages,
        "PRECISION": _precision(),
    }  # fmt: skip
    return shared, sizes, (batch * triton.cdiv(points, rows),)


def _strides(table: Tensor) -> tuple[int, int]:
    """Along samples and points; one sample for all is read by all."""
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)


@triton.constexpr_function  # a plain difference is no shape in Triton 3.5
def _size(edges, piece):
    """How much lies between an edge and the next."""
    return edges[piece + 1] - edges[piece]


@triton.jit
def _place(batch, points, ROWS: tl.constexpr):
    """Sample and points of a program; samples come first, so that programs side by side share their tables."""
    program = tl.program_id(0)
    row = program // batch * ROWS + tl.arange(0, ROWS)
    return (program % batch).to(tl.int64), row.to(tl.int64), row < points


@triton.jit
def _channels(BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where the first channel of each pair of a piece lies, and which exist; the second lies PAIRS further."""
    pair = BEGIN + tl.arange(0, END - BEGIN)
    return pair // PAIRS * (2 * PAIRS) + pair % PAIRS, pair < WIDTH // 2


@triton.jit
def _table(here, exists, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """Cosines or sines of the points, one tile for each piece."""
    tiles = ()
    for piece in tl.static_range(len(EDGES) - 1):
        angle = EDGES[piece] + tl.arange(0, _size(EDGES, piece))
        there = exists[:, None] & (angle < WIDTH // 2)[None, :]
        tiles += (tl.load(here[:, None] + angle[None, :], mask=there, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def _factors(here, exists, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """The channels of the points before the projection, STEP at a time."""
    tiles = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        channel = step * STEP + tl.arange(0, STEP)
        there = exists[:, None] & (channel < WIDTH)[None, :]
        tiles += (tl.load(here[:, None] + channel[None, :], mask=there, other=0.0),)
    return tiles


@triton.jit
def _both(BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where all channels of a piece lie, and which exist: the first of each pair, and then the second."""
    SIZE: tl.constexpr = END - BEGIN
    column = tl.arange(0, 2 * SIZE)
    pair = BEGIN + column % SIZE
    return pair // PAIRS * (2 * PAIRS) + pair % PAIRS + column // SIZE * PAIRS, pair < WIDTH // 2


@triton.jit
def _apart(x):
    """First and second channels of a piece; what belongs together lies in one thread."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _tiles(
    matrix, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr
):
    """What makes a piece in the matrix of a head, STEP channels of what it takes at a time."""
    to, real = _both(BEGIN, END, WIDTH, PAIRS)
    tiles = ()
    for step in tl.static_range((WIDTH + STEP - 1) // STEP):
        channel = step * STEP + tl.arange(0, STEP)
        there = (channel < WIDTH)[:, None] & real[None, :]
        tiles += (tl.load(matrix + to[None, :] * WIDTH + channel[:, None], mask=there, other=0.0),)
    return tiles


@triton.jit
def _product(factors, tiles, PRECISION: tl.constexpr):
    """First and second channels of a piece, from one product."""
    total = tl.zeros((factors[0].shape[0], tiles[0].shape[1]), tl.float32)
    for step in tl.static_range(len(factors)):
        total = tl.dot(factors[step], tiles[step], total, input_precision=PRECISION)
    return _apart(total)


@triton.jit
def _head(
    factors, matrix, here, exists, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The projected channels of a head, multiplied or read: the first and the second of each pair, tiles by piece."""
    a, b = (), ()
    for piece in tl.static_range(len(EDGES) - 1):
        if STEP:
            tiles = _tiles(matrix, EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS, STEP)
            first, second = _product(factors, tiles, PRECISION)
        else:
            channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
            at, there = here[:, None] + channel[None, :], exists[:, None] & real[None, :]
            first = tl.load(at, mask=there, other=0.0).to(tl.float32)
            second = tl.load(at + PAIRS, mask=there, other=0.0).to(tl.float32)
        a += (first,)
        b += (second,)
    return a, b


@triton.jit
def _mean(a, b, WIDTH: tl.constexpr):
    """Over the channels of a head."""
    total = tl.sum(a[0] + b[0], 1)
    for piece in tl.static_range(1, len(a)):
        total += tl.sum(a[piece] + b[piece], 1)
    return (total / WIDTH)[:, None]


@triton.jit
def _centered(a, b, WIDTH: tl.constexpr, EDGES: tl.constexpr, EPSILON: tl.constexpr):
    """A head less its mean, and one over its spread."""
    mean = _mean(a, b, WIDTH)
    p, q, squares_p, squares_q = (), (), (), ()
    for piece in tl.static_range(len(a)):
        first, second = a[piece] - mean, b[piece] - mean
        if EDGES[piece + 1] > WIDTH // 2:  # what lies beyond the last pair stays zero
            real = EDGES[piece] + tl.arange(0, _size(EDGES, piece)) < WIDTH // 2
            first, second = tl.where(real[None, :], first, 0.0), tl.where(real[None, :], second, 0.0)
        p += (first,)
        q += (second,)
        squares_p += (first * first,)
        squares_q += (second * second,)
    return p, q, tl.rsqrt(_mean(squares_p, squares_q, WIDTH) + EPSILON)


@triton.jit
def _made(
    a, b, inverse, gains, c, s, w, TURNED: tl.constexpr, AFFINE: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """A head of a part as the product takes it, from centered channels; factors in a row are multiplied first."""
    p, q = (), ()
    for piece in tl.static_range(len(a)):
        if AFFINE:
            channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
            gain = gains + channel
            first = a[piece] * inverse * tl.load(gain, mask=real, other=0.0).to(tl.float32)[None, :]
            second = b[piece] * inverse * tl.load(gain + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
            first += tl.load(gain + WIDTH, mask=real, other=0.0).to(tl.float32)[None, :]
            second += tl.load(gain + WIDTH + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
            first, second = first * w, second * w
        else:
            first, second = a[piece] * (inverse * w), b[piece] * (inverse * w)
        if TURNED:
            first, second = first * c[piece] - second * s[piece], second * c[piece] + first * s[piece]
        p += (first,)
        q += (second,)
    return p, q


@triton.jit
def _made_back(
    g, h, a, b, inverse, of_gains, gains, c, s, w, NORMALIZED: tl.constexpr, TURNED: tl.constexpr,
    AFFINE: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """From the gradient of a part to that of its projection, with the sums for the gradients of factors and shifts."""
    if TURNED:
        p, q = (), ()
        for piece in tl.static_range(len(g)):
            p += (g[piece] * c[piece] + h[piece] * s[piece],)
            q += (h[piece] * c[piece] - g[piece] * s[piece],)
        g, h = p, q
    if AFFINE:
        of_gains = _added(of_gains, g, h, a, b, w, w * inverse)
        g, h = _scaled(g, gains, WIDTH, PAIRS, EDGES), _scaled(h, gains + PAIRS, WIDTH, PAIRS, EDGES)
    if NORMALIZED:
        g, h = _straight(g, h, a, b, inverse, w, WIDTH)
    else:
        g, h = _times(g, w), _times(h, w)
    return g, h, of_gains


@triton.jit
def _times(g, factor):
    """Times the factors of the points."""
    tiles = ()
    for piece in tl.static_range(len(g)):
        tiles += (g[piece] * factor,)
    return tiles


@triton.jit
def _result_at(sample, row, head, points, FIRST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the channels of a head begin in a result, for each point."""
    if FIRST:
        return ((sample * HEADS + head) * points + row) * WIDTH
    else:
        return ((sample * points + row) * HEADS + head) * WIDTH


@triton.jit
def _arrange(
    x, matrix, cos, sin, root, gains, batch, points,
    by_sample, by_point, by_part, by_head,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, root_by_sample, root_by_point,
    result0, result1, result2,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    GAINS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """All parts and heads of some points."""
    sample, row, exists = _place(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    here = x + sample * by_sample + row * by_point
    c, s, factors = (), (), ()
    if TURNED:
        c = _table(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = _table(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    if STEP:
        factors = _factors(here, exists, WIDTH, STEP)
    for part in tl.static_range(PARTS):
        _arrange_part(
            factors, matrix + part * (HEADS * WIDTH * WIDTH), here + part * by_part, by_head, gains, c, s, w,
            (result0, result1, result2)[part], sample, row, exists, points,
            NORMALIZED >> part & 1, TURNED >> part & 1, WEIGHTED >> part & 1, HEADS_FIRST >> part & 1, GAINS > 0,
            HEADS, WIDTH, PAIRS, ROWS, EDGES, STEP, STAGES, PRECISION, EPSILON,
        )  # fmt: skip
        gains += (NORMALIZED >> part & 1) * 2 * WIDTH


@triton.jit
def _arrange_part(
    factors, matrix, here, by_head, gains, c, s, w, result, sample, row, exists, points,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    EDGES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """All heads of one part."""
    one = tl.full((ROWS, 1), 1.0, tl.float32)
    if not WEIGHTED:
        w = one
    for head in tl.range(HEADS, num_stages=STAGES):
        inverse = one
        a, b = _head(
            factors, matrix + head * (WIDTH * WIDTH), here + head * by_head, exists,
            WIDTH, PAIRS, EDGES, STEP, PRECISION,
        )  # fmt: skip
        if NORMALIZED:
            a, b, inverse = _centered(a, b, WIDTH, EDGES, EPSILON)
        p, q = _made(a, b, inverse, gains, c, s, w, TURNED, NORMALIZED and AFFINE, WIDTH, PAIRS, EDGES)
        to = result + _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
        _store(to, p, q, exists, WIDTH, PAIRS, EDGES)


@triton.jit
def _store(to, p, q, exists, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """All tiles of a head."""
    for piece in tl.static_range(len(p)):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        at, there = to[:, None] + channel[None, :], exists[:, None] & real[None, :]
        tl.store(at, p[piece].to(to.dtype.element_ty), mask=there)
        tl.store(at + PAIRS, q[piece].to(to.dtype.element_ty), mask=there)


@triton.jit
def _arrange_back(
    x, matrix, cos, sin, root, gains, batch, points,
    by_sample, by_point, by_part, by_head,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, root_by_sample, root_by_point,
    gradient0, gradient1, gradient2, result, sums,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    GAINS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """The gradient of all parts and heads of some points."""
    sample, row, exists = _place(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    here = x + sample * by_sample + row * by_point
    c, s, factors = (), (), ()
    if TURNED:
        c = _table(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = _table(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    if STEP:
        factors = _factors(here, exists, WIDTH, STEP)
    out = result + (sample * points + row) * (PARTS * HEADS * WIDTH)
    sums += tl.program_id(0).to(tl.int64) * (GAINS * 2 * WIDTH)
    for part in tl.static_range(PARTS):
        _arrange_part_back(
            factors, matrix + part * (HEADS * WIDTH * WIDTH), here + part * by_part, by_head, gains, c, s, w,
            (gradient0, gradient1, gradient2)[part], out + part * (HEADS * WIDTH), sums, sample, row, exists, points,
            NORMALIZED >> part & 1, TURNED >> part & 1, WEIGHTED >> part & 1, HEADS_FIRST >> part & 1,
            NEEDED >> part & 1, GAINS > 0, HEADS, WIDTH, PAIRS, ROWS, EDGES, STEP, STAGES, PRECISION, EPSILON,
        )  # fmt: skip
        gains += (NORMALIZED >> part & 1) * 2 * WIDTH
        sums += (NORMALIZED >> part & 1) * 2 * WIDTH


@triton.jit
def _arrange_part_back(
    factors, matrix, here, by_head, gains, c, s, w, gradient, out, sums, sample, row, exists, points,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    NEEDED: tl.constexpr, AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """The gradient of all heads of one part."""
    of_gains = _no_sums(EDGES)
    one = tl.full((ROWS, 1), 1.0, tl.float32)
    if not WEIGHTED:
        w = one
    for head in tl.range(HEADS, num_stages=STAGES):
        inverse = one
        g, h = _no_tiles(ROWS, EDGES), _no_tiles(ROWS, EDGES)
        if NEEDED:
            a, b = g, h
            if NORMALIZED:
                a, b = _head(
                    factors, matrix + head * (WIDTH * WIDTH), here + head * by_head, exists,
                    WIDTH, PAIRS, EDGES, STEP, PRECISION,
                )  # fmt: skip
                a, b, inverse = _centered(a, b, WIDTH, EDGES, EPSILON)
            come = gradient + _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
            g, h = _head((), matrix, come, exists, WIDTH, PAIRS, EDGES, 0, PRECISION)
            g, h, of_gains = _made_back(
                g, h, a, b, inverse, of_gains, gains, c, s, w,
                NORMALIZED, TURNED, NORMALIZED and AFFINE, WIDTH, PAIRS, EDGES,
            )  # fmt: skip
        _store(out + head * WIDTH, g, h, exists, WIDTH, PAIRS, EDGES)
    if AFFINE and NORMALIZED:
        _store_gains(sums, of_gains, WIDTH, PAIRS, EDGES)


@triton.jit
def _no_tiles(ROWS: tl.constexpr, EDGES: tl.constexpr):
    """Zeros for some rows, tile by tile: for half of the channels of a head, or for all columns of a result."""
    tiles = ()
    for piece in tl.static_range(len(EDGES) - 1):
        tiles += (tl.zeros((ROWS, _size(EDGES, piece)), tl.float32),)
    return tiles


@triton.jit
def _store_gains(sums, of_gains, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """The sums of one part, for factors and then for shifts."""
    for piece in tl.static_range(len(EDGES) - 1):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        gain_a, gain_b, shift_a, shift_b = of_gains[piece]
        tl.store(sums + channel, gain_a, mask=real)
        tl.store(sums + channel + PAIRS, gain_b, mask=real)
        tl.store(sums + channel + WIDTH, shift_a, mask=real)
        tl.store(sums + channel + WIDTH + PAIRS, shift_b, mask=real)


@triton.jit
def _straight(g, h, a, b, inverse, w, WIDTH: tl.constexpr):
    """Back through a norm: a gradient without what would move or stretch together all channels of a head, a and b.

    The two sums are taken as one: so the gradient is dealt out to the threads as the product is, and not twice.
    """
    total = tl.sum(tl.join(g[0] + h[0], g[0] * a[0] + h[0] * b[0]), 1)
    for piece in tl.static_range(1, len(g)):
        total += tl.sum(tl.join(g[piece] + h[piece], g[piece] * a[piece] + h[piece] * b[piece]), 1)
    mean, along = tl.split(total / WIDTH)
    scale = w * inverse
    mean, along = mean[:, None] * scale, along[:, None] * (scale * inverse * inverse)
    p, q = (), ()
    for piece in tl.static_range(len(g)):
        p += (g[piece] * scale - mean - a[piece] * along,)
        q += (h[piece] * scale - mean - b[piece] * along,)
    return p, q


@triton.jit
def _scaled(g, gains, WIDTH: tl.constexpr, PAIRS: tl.constexpr, EDGES: tl.constexpr):
    """Times the factors of an affine norm."""
    tiles = ()
    for piece in tl.static_range(len(g)):
        channel, real = _channels(EDGES[piece], EDGES[piece + 1], WIDTH, PAIRS)
        tiles += (g[piece] * tl.load(gains + channel, mask=real, other=0.0).to(tl.float32)[None, :],)
    return tiles


@triton.jit
def _no_sums(EDGES: tl.constexpr):
    """Zeros for `_added` to begin with."""
    sums = ()
    for piece in tl.static_range(len(EDGES) - 1):
        zero = tl.zeros((_size(EDGES, piece),), tl.float32)
        sums += ((zero, zero, zero, zero),)
    return sums


@triton.jit
def _added(sums, g, h, a, b, of_shift, of_gain):
    """Sums over points for the gradients of factors and shifts, by piece, with those of one more head.

    The gradient g, h and the centered channels a, b lack the factors of the points that come last.
    """
    found = ()
    for piece in tl.static_range(len(g)):
        gain_a, gain_b, shift_a, shift_b = sums[piece]
        p, q = g[piece], h[piece]
        gain_a, gain_b = gain_a + tl.sum(p * a[piece] * of_gain, 0), gain_b + tl.sum(q * b[piece] * of_gain, 0)
        shift_a, shift_b = shift_a + tl.sum(p * of_shift, 0), shift_b + tl.sum(q * of_shift, 0)
        found += ((gain_a, gain_b, shift_a, shift_b),)
    return found
