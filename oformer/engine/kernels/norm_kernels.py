"""LayerNorm before self-attention, in one pass over memory each way.

For each point, with x its channels:

    n = (x - mean x) / sqrt(var x + epsilon),   r = gain n + shift

The way there writes r twice: as it is, for the residual, and rounded, as the products of attention take it. Two kernels
read the rounded r, so the way back gets three gradients of r. It reads and adds them where a compiler would first add
two of them in a pass of their own, and it makes the sums over points for gain and shift in the same pass.

The plain twin is `nn.LayerNorm`; tests hold the two equal.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.partial_sums_kernels import added_up

_TILE = 2048  # numbers that a program of four warps reads at once: four times four for each thread
_PROGRAMS = 512  # of the way back, at most: four on each multiprocessor of a large GPU, and as many rows of sums


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, gain)
        ctx.epsilon = epsilon
        r, rounded = normalized_there(x, gain, shift, epsilon, dtype)
        return r, rounded, rounded.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, gain = ctx.saved_tensors
        of_x, rows = normalized_back(*gradients, x, gain, ctx.epsilon)
        of_gain, of_shift = rows.to(gain.dtype)
        return of_x, of_gain, of_shift, None, None


def normalized(
    x: Tensor, gain: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The points, normalized: of their own type, and twice the same rounded ones, for two that read them.

    Args:
        x: (..., width).
        gain: (width,).
        shift: likewise.
        epsilon: added to the variance.
        dtype: what is rounded to.
    """
    return _Normalized.apply(x, gain, shift, epsilon, dtype)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("oformer::normalized", mutates_args=())
def normalized_there(
    x: Tensor, gain: Tensor, shift: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The points, normalized, and the same rounded; all as in `normalized`."""
    r, rounded = _empty(x, dtype)
    settings, blocks = _launch(x, epsilon)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _normalize[(blocks,)](x.contiguous(), gain, shift, r, rounded, x.shape[:-1].numel(), **settings)
    return r, rounded


@normalized_there.register_fake
def _(x, gain, shift, epsilon, dtype) -> tuple[Tensor, Tensor]:
    return _empty(x, dtype)


@torch.library.custom_op("oformer::normalized_back", mutates_args=())
def normalized_back(
    of_r: Tensor, of_one: Tensor, of_other: Tensor, x: Tensor, gain: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and in two rows of float32 those of gain and shift.

    Args:
        of_r: gradient of the normalized points.
        of_one: gradient of the rounded ones, from one who reads them.
        of_other: likewise, from the other.
        x: as in `normalized`, like all that follows.
    """
    gradients = [gradient.contiguous() for gradient in (of_r, of_one, of_other)]
    settings, blocks = _launch(x, epsilon)
    of_x, rows = _empty_gradients(x)
    sums = rows.new_empty((min(blocks, _PROGRAMS), *rows.shape))
    with torch.cuda.device_of(x):
        _normalize_back[(len(sums),)](
            x.contiguous(), gain, *gradients, of_x, sums, x.shape[:-1].numel(), blocks, **settings
        )
    return of_x, added_up(sums)


@normalized_back.register_fake
def _(of_r, of_one, of_other, x, gain, epsilon) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x)


def _empty(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)


def _empty_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((2, x.shape[-1]), dtype=torch.float32)


def _launch(x: Tensor, epsilon: float) -> tuple[dict, int]:
    """What kernels are compiled for, and how many blocks of points there are."""
    columns = triton.next_power_of_2(x.shape[-1])
    rows = max(_TILE // columns, 1)
    settings = {"EPSILON": epsilon, "WIDTH": x.shape[-1], "ROWS": rows, "COLUMNS": columns, "num_warps": 4}
    return settings, triton.cdiv(x.shape[:-1].numel(), rows)


@triton.jit
def _place(block, points, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the channels of the points of a block lie, and which exist."""
    row, channel = block * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    return at, (row < points)[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def _read(table, at, there):
    return tl.load(table + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _vector(values, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    channel = tl.arange(0, COLUMNS)
    return tl.load(values + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _normal(x, there, EPSILON: tl.constexpr, WIDTH: tl.constexpr):
    """The points without gain and shift, zero where there is none; and one over their spread."""
    x = tl.where(there, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + EPSILON)[:, None]
    return x * inverse, inverse


@triton.jit
def _normalize(
    x, gain, shift, r, rounded, points,
    EPSILON: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of points."""
    at, there = _place(tl.program_id(0), points, WIDTH, ROWS, COLUMNS)
    n, _ = _normal(_read(x, at, there), there, EPSILON, WIDTH)
    y = n * _vector(gain, WIDTH, COLUMNS) + _vector(shift, WIDTH, COLUMNS)
    tl.store(r + at, y.to(r.dtype.element_ty), mask=there)
    tl.store(rounded + at, y.to(rounded.dtype.element_ty), mask=there)


@triton.jit
def _normalize_back(
    x, gain, of_r, of_one, of_other, of_x, sums, points, blocks,
    EPSILON: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some blocks of points, as far apart as there are programs."""
    gain = _vector(gain, WIDTH, COLUMNS)
    of_gain, of_shift = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at, there = _place(block, points, WIDTH, ROWS, COLUMNS)
        # Everything is asked for before anything is waited for.
        value, g = _read(x, at, there), _read(of_r, at, there)
        one, other = _read(of_one, at, there), _read(of_other, at, there)
        n, inverse = _normal(value, there, EPSILON, WIDTH)
        g += one + other
        of_gain += g * n
        of_shift += g
        g *= gain
        # The gradient loses its parts along the constant and along n, which the normalization does not feel.
        constant, along = (tl.sum(g, 1) / WIDTH)[:, None], (tl.sum(g * n, 1) / WIDTH)[:, None]
        tl.store(of_x + at, (inverse * (g - constant - n * along)).to(of_x.dtype.element_ty), mask=there)
    channel = tl.arange(0, COLUMNS)
    sums += tl.program_id(0).to(tl.int64) * (2 * WIDTH) + channel
    tl.store(sums, tl.sum(of_gain, 0), mask=channel < WIDTH)
    tl.store(sums + WIDTH, tl.sum(of_shift, 0), mask=channel < WIDTH)
