"""What lies between the joint projection and the products of linear attention, in one pass over memory each way.

For each part of the projection (q, k, v) and each point and head, with x the channels of the head and w the weight of
the point, where the part asks for it:

    n = (x - mean x) / sqrt(var x + epsilon),   y = gain n + shift,   z = y turned by the angles of the point,   √w z

and the result lies as the products read it: (batch, points, heads, width), or (batch, heads, points, width), so that
sums over points are products of whole matrices. Everything inside is float32. The gradient keeps only the projection,
and computes n from it again.

The plain twins are `Normalize`, `Rotary` and what `Attention` does with them; tests hold the two equal. A program takes
some points of one sample and all heads, since these have angles and weights in common. It reads the channels of a head
as two tiles, the first and the second of each pair that is turned together, so that nothing moves between threads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # numbers of half the channels of a head, for the points of one program: eight for each of its threads
_WARPS = 4


@torch.library.custom_op("oformer::arranged", mutates_args=())
def arranged(
    projected: Tensor,
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
    """Each part of a joint projection as a product reads it, contiguous and of the type of the projection.

    Args:
        projected: (batch, points, parts, heads, width), of one to three parts; samples may share memory.
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
    results = _empty_results(projected, heads_first)
    choices = normalized, turned, weighted, heads_first
    shared, sizes, grid = _launch(projected, cos, sin, root, gains, choices, dim)
    with torch.cuda.device_of(projected):  # Triton starts kernels on the current device
        _arrange[grid](*shared, *_three(results), **sizes, EPSILON=epsilon, num_warps=_WARPS)
    return results


@arranged.register_fake
def _(projected, cos, sin, root, gains, normalized, turned, weighted, heads_first, dim, epsilon) -> list[Tensor]:
    return _empty_results(projected, heads_first)


@torch.library.custom_op("oformer::arranged_back", mutates_args=())
def arranged_back(
    gradients: Sequence[Tensor | None],
    projected: Tensor,
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
        projected: as there, like all that follows.
    """
    known = [None if gradient is None else gradient.contiguous() for gradient in gradients]
    choices = normalized, turned, weighted, heads_first
    shared, sizes, grid = _launch(projected, cos, sin, root, gains, choices, dim)
    result, of_gains = _empty_gradients(projected, gains)
    # One row of sums per program, added up afterwards: in the same order each time, as atomic additions would not be.
    sums = of_gains.new_empty((*grid, *of_gains.shape), dtype=torch.float32)
    filled = [projected if gradient is None else gradient for gradient in known]
    sizes["NEEDED"] = _bits([gradient is not None for gradient in known])
    with torch.cuda.device_of(projected):
        _arrange_back[grid](*shared, *_three(filled), result, sums, **sizes, EPSILON=epsilon, num_warps=_WARPS)
    return result, sums.sum(0).to(of_gains.dtype)


@arranged_back.register_fake
def _(
    gradients, projected, cos, sin, root, gains, normalized, turned, weighted, heads_first, dim, epsilon
) -> tuple[Tensor, Tensor]:
    return _empty_gradients(projected, gains)


def _keep(ctx, inputs, output) -> None:
    *tensors, normalized, turned, weighted, heads_first, dim, epsilon = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.settings = normalized, turned, weighted, heads_first, dim, epsilon


def _back(ctx, gradients):
    projected, gains = arranged_back(gradients, *ctx.saved_tensors, *ctx.settings)
    # Angles and weights are data.
    return projected, None, None, None, gains if ctx.needs_input_grad[4] else None, *[None] * len(ctx.settings)


arranged.register_autograd(_back, setup_context=_keep)


def _empty_results(projected: Tensor, heads_first: Sequence[bool]) -> list[Tensor]:
    batch, points, _, heads, width = projected.shape
    return [
        projected.new_empty((batch, heads, points, width) if first else (batch, points, heads, width))
        for first in heads_first
    ]


def _empty_gradients(projected: Tensor, gains: Tensor | None) -> tuple[Tensor, Tensor]:
    return projected.new_empty(projected.shape), projected.new_empty(0) if gains is None else torch.empty_like(gains)


def _bits(chosen: Sequence[bool]) -> int:
    """A choice for each part as one number, which kernels are compiled for; the first part is the lowest bit."""
    return sum(choice << part for part, choice in enumerate(chosen))


def _three(tensors: list[Tensor]) -> list[Tensor]:
    """As many as kernels take; those beyond the last part are not looked at."""
    return tensors + tensors[:1] * (3 - len(tensors))


def _launch(
    projected: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    root: Tensor,
    gains: Tensor | None,
    choices: Sequence[Sequence[bool]],
    dim: int,
) -> tuple[list, dict, tuple[int]]:
    """What both kernels take first, what they are compiled for, and how many programs there are."""
    batch, points, parts, heads, width = projected.shape
    projected = projected if projected.stride(-1) == 1 else projected.contiguous()
    cos, sin = (root if table is None else table for table in (cos, sin))  # or else not looked at
    cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in (cos, sin))
    half = triton.next_power_of_2(width // 2)
    rows = max(_TILE // half, 1)
    shared = [
        projected, cos, sin, root, root if gains is None else gains.contiguous(), batch, points,
        *projected.stride()[:4], *_strides(cos), *_strides(sin), *_strides(root),
    ]  # fmt: skip
    sizes = {
        **dict(zip(("NORMALIZED", "TURNED", "WEIGHTED", "HEADS_FIRST"), map(_bits, choices), strict=True)),
        "GAINS": 0 if gains is None else len(gains),
        "PARTS": parts, "HEADS": heads, "WIDTH": width, "PAIRS": width // (2 * dim), "ROWS": rows, "HALF": half,
    }  # fmt: skip
    return shared, sizes, (batch * triton.cdiv(points, rows),)


def _strides(table: Tensor) -> tuple[int, int]:
    """Along samples and points; one sample for all is read by all."""
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)


@triton.jit
def _place(batch, points, ROWS: tl.constexpr):
    """Sample and points of a program; samples come first, so that programs side by side share their tables."""
    program = tl.program_id(0)
    row = program // batch * ROWS + tl.arange(0, ROWS)
    return (program % batch).to(tl.int64), row.to(tl.int64), row < points


@triton.jit
def _table(table, sample, row, exists, by_sample, by_point, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Cosines or sines of the points, (ROWS, HALF)."""
    angle = tl.arange(0, HALF)
    at = (sample * by_sample + row * by_point)[:, None] + angle[None, :]
    return tl.load(table + at, mask=exists[:, None] & (angle < WIDTH // 2)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _channels(WIDTH: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """Where the first channel of each pair lies, and which pairs there are; the second lies PAIRS further."""
    pair = tl.arange(0, HALF)
    return pair // PAIRS * (2 * PAIRS) + pair % PAIRS, pair < WIDTH // 2


@triton.jit
def _normal(a, b, there, WIDTH: tl.constexpr, EPSILON: tl.constexpr):
    """Both halves normalized together, and one over their spread."""
    mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / WIDTH)[:, None]
    a = tl.where(there, a - mean, 0.0)
    b = tl.where(there, b - mean, 0.0)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / WIDTH + EPSILON)[:, None]
    return a * inverse, b * inverse, inverse


@triton.jit
def _result_at(sample, row, head, points, FIRST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the channels of a head begin in a result, for each point."""
    if FIRST:
        return ((sample * HEADS + head) * points + row) * WIDTH
    else:
        return ((sample * points + row) * HEADS + head) * WIDTH


@triton.jit
def _arrange(
    projected, cos, sin, root, gains, batch, points,
    by_sample, by_point, by_part, by_head,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, root_by_sample, root_by_point,
    result0, result1, result2,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    GAINS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """All parts and heads of some points."""
    sample, row, exists = _place(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    if TURNED:
        c = _table(cos, sample, row, exists, cos_by_sample, cos_by_point, WIDTH, HALF)
        s = _table(sin, sample, row, exists, sin_by_sample, sin_by_point, WIDTH, HALF)
    else:
        c, s = w, w
    here = projected + sample * by_sample + row * by_point
    for part in tl.static_range(PARTS):
        _arrange_part(
            here + part * by_part, by_head, gains, c, s, w, (result0, result1, result2)[part],
            sample, row, exists, points,
            NORMALIZED >> part & 1, TURNED >> part & 1, WEIGHTED >> part & 1, HEADS_FIRST >> part & 1, GAINS > 0,
            HEADS, WIDTH, PAIRS, HALF, EPSILON,
        )  # fmt: skip
        gains += (NORMALIZED >> part & 1) * 2 * WIDTH


@triton.jit
def _arrange_part(
    here, by_head, gains, c, s, w, result, sample, row, exists, points,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    """All heads of one part."""
    channel, real = _channels(WIDTH, PAIRS, HALF)
    there = exists[:, None] & real[None, :]
    factors = gains + channel
    for head in range(HEADS):
        at = (here + head * by_head)[:, None] + channel[None, :]
        a = tl.load(at, mask=there, other=0.0).to(tl.float32)
        b = tl.load(at + PAIRS, mask=there, other=0.0).to(tl.float32)
        if NORMALIZED:
            a, b, _ = _normal(a, b, there, WIDTH, EPSILON)
            if AFFINE:
                a = a * tl.load(factors, mask=real, other=0.0).to(tl.float32)[None, :]
                b = b * tl.load(factors + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
                a += tl.load(factors + WIDTH, mask=real, other=0.0).to(tl.float32)[None, :]
                b += tl.load(factors + WIDTH + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
        if TURNED:
            a, b = a * c - b * s, b * c + a * s
        if WEIGHTED:
            a, b = a * w, b * w
        begin = _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
        to = result + begin[:, None] + channel[None, :]
        tl.store(to, a.to(result.dtype.element_ty), mask=there)
        tl.store(to + PAIRS, b.to(result.dtype.element_ty), mask=there)


@triton.jit
def _arrange_back(
    projected, cos, sin, root, gains, batch, points,
    by_sample, by_point, by_part, by_head,
    cos_by_sample, cos_by_point, sin_by_sample, sin_by_point, root_by_sample, root_by_point,
    gradient0, gradient1, gradient2, result, sums,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    GAINS: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, EPSILON: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """The gradient of all parts and heads of some points."""
    sample, row, exists = _place(batch, points, ROWS)
    w = tl.load(root + sample * root_by_sample + row * root_by_point, mask=exists, other=0.0).to(tl.float32)[:, None]
    if TURNED:
        c = _table(cos, sample, row, exists, cos_by_sample, cos_by_point, WIDTH, HALF)
        s = _table(sin, sample, row, exists, sin_by_sample, sin_by_point, WIDTH, HALF)
    else:
        c, s = w, w
    here = projected + sample * by_sample + row * by_point
    out = result + (sample * points + row) * (PARTS * HEADS * WIDTH)
    sums += tl.program_id(0).to(tl.int64) * (GAINS * 2 * WIDTH)
    for part in tl.static_range(PARTS):
        _arrange_part_back(
            here + part * by_part, by_head, gains, c, s, w, (gradient0, gradient1, gradient2)[part],
            out + part * (HEADS * WIDTH), sums, sample, row, exists, points,
            NORMALIZED >> part & 1, TURNED >> part & 1, WEIGHTED >> part & 1, HEADS_FIRST >> part & 1,
            NEEDED >> part & 1, GAINS > 0, HEADS, WIDTH, PAIRS, HALF, EPSILON,
        )  # fmt: skip
        gains += (NORMALIZED >> part & 1) * 2 * WIDTH
        sums += (NORMALIZED >> part & 1) * 2 * WIDTH


@triton.jit
def _arrange_part_back(
    here, by_head, gains, c, s, w, gradient, out, sums, sample, row, exists, points,
    NORMALIZED: tl.constexpr, TURNED: tl.constexpr, WEIGHTED: tl.constexpr, HEADS_FIRST: tl.constexpr,
    NEEDED: tl.constexpr, AFFINE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    """The gradient of all heads of one part: a turn goes back, and a norm takes its two directions out."""
    channel, real = _channels(WIDTH, PAIRS, HALF)
    there = exists[:, None] & real[None, :]
    factors = gains + channel
    zero = tl.zeros(there.shape, tl.float32)
    gain_a, gain_b, shift_a, shift_b = zero, zero, zero, zero
    for head in range(HEADS):
        g, h = zero, zero
        if NEEDED:
            begin = _result_at(sample, row, head, points, HEADS_FIRST, HEADS, WIDTH)
            come = gradient + begin[:, None] + channel[None, :]
            g = tl.load(come, mask=there, other=0.0).to(tl.float32)
            h = tl.load(come + PAIRS, mask=there, other=0.0).to(tl.float32)
            if WEIGHTED:
                g, h = g * w, h * w
            if TURNED:
                g, h = g * c + h * s, h * c - g * s
            if NORMALIZED:
                at = (here + head * by_head)[:, None] + channel[None, :]
                a = tl.load(at, mask=there, other=0.0).to(tl.float32)
                b = tl.load(at + PAIRS, mask=there, other=0.0).to(tl.float32)
                a, b, inverse = _normal(a, b, there, WIDTH, EPSILON)
                if AFFINE:
                    gain_a += g * a
                    gain_b += h * b
                    shift_a += g
                    shift_b += h
                    g = g * tl.load(factors, mask=real, other=0.0).to(tl.float32)[None, :]
                    h = h * tl.load(factors + PAIRS, mask=real, other=0.0).to(tl.float32)[None, :]
                mean = ((tl.sum(g, 1) + tl.sum(h, 1)) / WIDTH)[:, None]
                along = ((tl.sum(g * a, 1) + tl.sum(h * b, 1)) / WIDTH)[:, None]
                g, h = inverse * (g - mean - a * along), inverse * (h - mean - b * along)
        to = (out + head * WIDTH)[:, None] + channel[None, :]
        tl.store(to, g.to(out.dtype.element_ty), mask=there)
        tl.store(to + PAIRS, h.to(out.dtype.element_ty), mask=there)
    if AFFINE and NORMALIZED:
        to = sums + channel
        tl.store(to, tl.sum(gain_a, 0), mask=real)
        tl.store(to + PAIRS, tl.sum(gain_b, 0), mask=real)
        tl.store(to + WIDTH, tl.sum(shift_a, 0), mask=real)
        tl.store(to + WIDTH + PAIRS, tl.sum(shift_b, 0), mask=real)
