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
some points of one sample and all heads, since these have angles and weights in common; `tiles_kernels.py` has what it
does with a head.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.partial_sums_kernels import added_up
from oformer.engine.kernels.tiles_kernels import (
    angle_tiles,
    centered,
    edges_of,
    factor_tiles,
    head_tiles,
    made_head,
    made_head_back,
    no_sums,
    no_tiles,
    place_of,
    product_precision,
    step_of,
    store_gains,
    store_head,
)

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
        rows, edges, step = _ROWS, edges_of(width // 2), step_of(width)
        stages = 2 if width**2 * matrix.element_size() < _AHEAD else 1
    sizes = {
        **dict(zip(("NORMALIZED", "TURNED", "WEIGHTED", "HEADS_FIRST"), map(_bits, choices), strict=True)),
        "GAINS": 0 if gains is None else len(gains),
        "PARTS": parts, "HEADS": _heads(x, matrix, parts), "WIDTH": width, "PAIRS": width // (2 * dim),
        "ROWS": rows, "EDGES": edges, "STEP": step, "STAGES": stages,
        "PRECISION": product_precision(),
    }  # fmt: skip
    return shared, sizes, (batch * triton.cdiv(points, rows),)


def _strides(table: Tensor) -> tuple[int, int]:
    """Along samples and points; one sample for all is read by all."""
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)


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
    sample, row, exists = place_of(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    here = x + sample * by_sample + row * by_point
    c, s, factors = (), (), ()
    if TURNED:
        c = angle_tiles(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = angle_tiles(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    if STEP:
        factors = factor_tiles(here, exists, WIDTH, STEP)
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
        a, b = head_tiles(
            factors, matrix + head * (WIDTH * WIDTH), here + head * by_head, exists,
            WIDTH, PAIRS, EDGES, STEP, PRECISION,
        )  # fmt: skip
        if NORMALIZED:
            a, b, inverse = centered(a, b, WIDTH, EDGES, EPSILON)
        p, q = made_head(a, b, inverse, gains, c, s, w, TURNED, NORMALIZED and AFFINE, WIDTH, PAIRS, EDGES)
        to = result + _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
        store_head(to, p, q, exists, WIDTH, PAIRS, EDGES)


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
    sample, row, exists = place_of(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    here = x + sample * by_sample + row * by_point
    c, s, factors = (), (), ()
    if TURNED:
        c = angle_tiles(cos + sample * cos_by_sample + row * cos_by_point, exists, WIDTH, EDGES)
        s = angle_tiles(sin + sample * sin_by_sample + row * sin_by_point, exists, WIDTH, EDGES)
    if STEP:
        factors = factor_tiles(here, exists, WIDTH, STEP)
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
    of_gains = no_sums(EDGES)
    one = tl.full((ROWS, 1), 1.0, tl.float32)
    if not WEIGHTED:
        w = one
    for head in tl.range(HEADS, num_stages=STAGES):
        inverse = one
        g, h = no_tiles(ROWS, EDGES), no_tiles(ROWS, EDGES)
        if NEEDED:
            a, b = g, h
            if NORMALIZED:
                a, b = head_tiles(
                    factors, matrix + head * (WIDTH * WIDTH), here + head * by_head, exists,
                    WIDTH, PAIRS, EDGES, STEP, PRECISION,
                )  # fmt: skip
                a, b, inverse = centered(a, b, WIDTH, EDGES, EPSILON)
            come = gradient + _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
            g, h = head_tiles((), matrix, come, exists, WIDTH, PAIRS, EDGES, 0, PRECISION)
            g, h, of_gains = made_head_back(
                g, h, a, b, inverse, of_gains, gains, c, s, w,
                NORMALIZED, TURNED, NORMALIZED and AFFINE, WIDTH, PAIRS, EDGES,
            )  # fmt: skip
        store_head(out + head * WIDTH, g, h, exists, WIDTH, PAIRS, EDGES)
    if AFFINE and NORMALIZED:
        store_gains(sums, of_gains, WIDTH, PAIRS, EDGES)
