"""The feed-forward half of a block in one pass over memory each way.

For each point, with x its channels, W and b the matrices and biases of `GatedGELU`, and D1, D2 its dropouts:

    r = gain (x - mean x) / sqrt(var x + epsilon) + shift,   or r = x where there is no norm,
    (u, g) = W1 r + b1,   a = D1(gelu(u) g),   y = r + D2(W2 a + b2)

The way there reads x, writes y, and keeps only the rounded matrices beside x. The way back computes all of this again
from x, and writes the gradient of x and beside it the factors of the gradients of the matrices, which the vendor's
library multiplies. Factors of products are rounded to one type; everything else inside is float32.

The plain twin is `GatedGELU` with the norm before it; tests hold the two equal. A program takes some points. Tiles have
to be powers of two, and widths seldom are, so the channels of a point are a tuple of tiles. Hidden channels come tile
by tile, each with its rows and columns of the matrices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.dropout_kernels import dropped, sequences
from oformer.engine.kernels.partial_sums_kernels import added_up

_ROWS = 64  # points of a program: as many as four warps multiply at once
_TILE = 32  # channels, at most: with more there are not enough registers


def supported(device: torch.device, width: int) -> bool:
    """Whether there are kernels for a width that pay; they fill the registers of a Hopper GPU, and wider ones more."""
    return width % 16 == 0 and width <= 128 and torch.cuda.get_device_capability(device)[0] == 9


@torch.library.custom_op("oformer::gated_residual", mutates_args=())
def gated_residual(
    x: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    gate: Tensor,
    gate_bias: Tensor,
    out: Tensor,
    out_bias: Tensor,
    seed: Tensor | None,
    dropout: float,
    epsilon: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The points, normalized, and what the network makes of them, added up; of the type of the points.

    Beside it W1 above W2, as rounded for both ways; empty where they are of that type already.

    Args:
        x: (..., width).
        gain: of the norm, (width,); None: no norm.
        shift: likewise.
        gate: W1, (2 width, width): first the rows before the GELU, then those of the gate.
        gate_bias: (2 width,).
        out: W2, (width, width).
        out_bias: (width,).
        seed: one int64 number that all random numbers follow from; None: no dropout.
        dropout: the share of channels that are dropped, less than one.
        epsilon: added to the variance.
        dtype: what the factors of products are rounded to. Products of float32 are those of TF32.
    """
    y, rounded = _empty_results(x, gate, dtype)
    factors = gate, out
    if len(rounded):
        factors = rounded.split((len(gate), len(out)))
        for factor, matrix in zip(factors, (gate, out), strict=True):
            factor.copy_(matrix)
    tensors, settings, grid = _launch(x.contiguous(), gain, shift, *factors, gate_bias, seed, dropout, epsilon)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _forward[grid](*tensors, out_bias, y, **settings, num_stages=2)
    return y, rounded


@gated_residual.register_fake
def _(x, gain, shift, gate, gate_bias, out, out_bias, seed, dropout, epsilon, dtype) -> tuple[Tensor, Tensor]:
    return _empty_results(x, gate, dtype)


@torch.library.custom_op("oformer::gated_residual_back", mutates_args=())
def gated_residual_back(
    gradient: Tensor,
    x: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    gate: Tensor,
    gate_bias: Tensor,
    out: Tensor,
    seed: Tensor | None,
    dropout: float,
    epsilon: float,
    exact: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of W1 and of W2, and in rows of float32 those of b1 (two rows), b2, gain and shift.

    Args:
        gradient: of the result of `gated_residual`.
        x: as there, like all that follows.
        gate: as there, but rounded already.
        out: likewise.
        exact: the type of the matrices before, and of their gradients.
    """
    gradient, x, width, dtype = gradient.contiguous(), x.contiguous(), x.shape[-1], gate.dtype
    of_x, _, _, of_rows = _empty_gradients(x, gain, gate, out, exact)
    tensors, settings, grid = _launch(x, gain, shift, gate, out, gate_bias, seed, dropout, epsilon)

    def factor(width: int) -> Tensor:
        return x.new_empty(x.shape[:-1].numel(), width, dtype=dtype)

    # Written only where it is not there already.
    into_gate = factor(width) if gain is not None or x.dtype != dtype else x.view(-1, width)
    of_sum = factor(width) if seed is not None or x.dtype != dtype else gradient.view(-1, width)
    of_hidden, into_out = factor(2 * width), factor(width)
    sums = of_rows.new_empty(*grid, *of_rows.shape)
    written = gradient, of_x, into_gate, of_hidden, into_out, of_sum, sums
    with torch.cuda.device_of(x):
        # Of float32, two programs find room where matrices are not fetched ahead.
        _backward[grid](*tensors, *written, **settings, num_stages=1 if dtype == torch.float32 else 2)
    return of_x, _product(of_hidden, into_gate).to(exact), _product(of_sum, into_out).to(exact), added_up(sums)


@gated_residual_back.register_fake
def _(
    gradient, x, gain, shift, gate, gate_bias, out, seed, dropout, epsilon, exact
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(x, gain, gate, out, exact)


def _keep(ctx, inputs, output) -> None:
    x, gain, shift, gate, gate_bias, out, _, seed, dropout, epsilon, _ = inputs
    rounded = output[1]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rounded)
    ctx.save_for_backward(x, gain, shift, gate_bias, seed, *((rounded,) if len(rounded) else (gate, out)))
    ctx.settings = dropout, epsilon, gate.dtype


def _back(ctx, gradient, _):
    x, gain, shift, gate_bias, seed, *matrices = ctx.saved_tensors  # asked for once, or else recomputation fails
    width = x.shape[-1]
    gate, out = matrices if len(matrices) == 2 else matrices[0].split((2 * width, width))
    of_x, of_gate, of_out, rows = gated_residual_back(
        gradient, x, gain, shift, gate, gate_bias, out, seed, *ctx.settings
    )
    rows = rows.to(of_gate.dtype)
    of_gain, of_shift = (None, None) if len(rows) == 3 else rows[3:]
    return of_x, of_gain, of_shift, of_gate, rows[:2].flatten(), of_out, rows[2], None, None, None, None


gated_residual.register_autograd(_back, setup_context=_keep)


def _empty_results(x: Tensor, gate: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    return x.new_empty(x.shape), gate.new_empty((0 if gate.dtype == dtype else 3 * width, width), dtype=dtype)


def _empty_gradients(
    x: Tensor, gain: Tensor | None, gate: Tensor, out: Tensor, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.new_empty(3 if gain is None else 5, x.shape[-1], dtype=torch.float32)
    return x.new_empty(x.shape), gate.new_empty(gate.shape, dtype=exact), out.new_empty(out.shape, dtype=exact), rows


def _product(of_result: Tensor, into: Tensor) -> Tensor:
    """The gradient of a matrix: a sum over points, in float32."""
    with torch.autocast(into.device.type, enabled=False):
        if into.is_cuda and into.dtype != torch.float32:
            return torch.mm(of_result.T, into, out_dtype=torch.float32)
        return of_result.T.float() @ into.float()


def _launch(
    x: Tensor,
    gain: Tensor | None,
    shift: Tensor | None,
    gate: Tensor,
    out: Tensor,
    gate_bias: Tensor,
    seed: Tensor | None,
    dropout: float,
    epsilon: float,
) -> tuple[list, dict, tuple[int]]:
    """What both kernels take first, what they are compiled for, and how many programs there are."""
    width, dtype = x.shape[-1], gate.dtype
    points, tile = x.shape[:-1].numel(), min(width & -width, _TILE)
    tensors = [
        x, x if gain is None else gain, x if shift is None else shift,  # or else not looked at
        gate.contiguous(), gate_bias, out.contiguous(), x if seed is None else seed, points,
    ]  # fmt: skip
    settings = {
        "NORM": gain is not None, "EPSILON": epsilon, "DROPOUT": 0.0 if seed is None else dropout,
        "EXACT": dtype == torch.float32, "ROWS": _ROWS, "PARTS": width // tile, "TILE": tile,
        "num_warps": 4,
        # Three programs at once, where registers allow it: while one waits for memory, another one multiplies.
        "maxnreg": 168 if width <= 96 and dtype != torch.float32 else None,
    }  # fmt: skip
    return tensors, settings, (triton.cdiv(points, _ROWS),)


@triton.jit
def _channels(part, TILE: tl.constexpr):
    """The channels of a tile."""
    return part * TILE + tl.arange(0, TILE)


@triton.jit
def _read(table, there, ROWS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """The channels of the points of a program, tile by tile; zero where there are no more points."""
    at = table + tl.arange(0, ROWS)[:, None] * (PARTS * TILE)
    tiles = ()
    for part in tl.static_range(PARTS):
        tiles += (tl.load(at + _channels(part, TILE)[None, :], mask=there, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def _write(table, channel, there, values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Some channels of the points of a program."""
    at = table + tl.arange(0, ROWS)[:, None] * WIDTH + channel[None, :]
    tl.store(at, values.to(table.dtype.element_ty), mask=there)


@triton.jit
def _matrix(weight, row, column, WIDTH: tl.constexpr):
    """Some rows and columns of a matrix."""
    return tl.load(weight + row[:, None] * WIDTH + column[None, :])


@triton.jit
def _rows(weight, row, PARTS: tl.constexpr, TILE: tl.constexpr):
    """Some rows of a matrix, tile by tile."""
    tiles = ()
    for part in tl.static_range(PARTS):
        tiles += (_matrix(weight, row, _channels(part, TILE), PARTS * TILE),)
    return tiles


@triton.jit
def _vector(values, channel):
    return tl.load(values + channel).to(tl.float32)[None, :]


@triton.jit
def _statistics(x, PARTS: tl.constexpr, WIDTH: tl.constexpr, EPSILON: tl.constexpr):
    """The mean of all channels of each point, and one over their spread."""
    total = x[0]
    for part in tl.static_range(1, PARTS):
        total += x[part]
    mean = (tl.sum(total, 1) / WIDTH)[:, None]
    total = (x[0] - mean) * (x[0] - mean)
    for part in tl.static_range(1, PARTS):
        total += (x[part] - mean) * (x[part] - mean)
    return mean, tl.rsqrt(tl.sum(total, 1) / WIDTH + EPSILON)[:, None]


@triton.jit
def _residual(
    x, gain, shift, there,
    NORM: tl.constexpr, EPSILON: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the network reads, and is added to; and the statistics of x."""
    r, mean, inverse = _read(x, there, ROWS, PARTS, TILE), 0.0, 1.0
    if NORM:
        mean, inverse = _statistics(r, PARTS, PARTS * TILE, EPSILON)
        normal = ()
        for part in tl.static_range(PARTS):
            channel = _channels(part, TILE)
            normal += ((r[part] - mean) * inverse * _vector(gain, channel) + _vector(shift, channel),)
        r = normal
    return r, mean, inverse


@triton.jit
def _factors(tiles, there, factor: tl.constexpr, PARTS: tl.constexpr):
    """Tiles as factors of products."""
    rounded = ()
    for part in tl.static_range(PARTS):
        # A choice that changes nothing: what is only rounded, Triton would hold in registers, which are too few.
        rounded += (tl.where(there, tiles[part], 0.0).to(factor),)
    return rounded


@triton.jit
def _hidden(r, rows, bias, unit, PARTS: tl.constexpr):
    """Some hidden channels before their activation."""
    h = tl.dot(r[0], tl.trans(rows[0]), input_precision="tf32")
    for part in tl.static_range(1, PARTS):
        h = tl.dot(r[part], tl.trans(rows[part]), h, input_precision="tf32")
    return h + _vector(bias, unit)


@triton.jit
def gelu(x, EXACT: tl.constexpr):
    """GELU and its slope."""
    if EXACT:
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
        return x * share, share + 0.3989422804014327 * x * tl.exp(-0.5 * x * x)
    else:
        # A logistic function of a polynomial, 6e-5 from the normal distribution at most, in as few
        # instructions as possible: they, not the memory, set the time. A squared root replaces a division.
        square = tl.minimum(x * x, 36.0)
        root = tl.rsqrt(1.0 + tl.exp2(x * (-2.300994698 + square * (-0.1067147612 + 0.000989294048 * square))))
        rise = 1.594927988 + square * (0.2219071076 - 0.003428631901 * square)
        share = root * root
        bent = x * share
        return bent, share + (bent - bent * share) * rise


@triton.jit
def _add_up(sums, channel, values, ROWS: tl.constexpr):
    """Write the sum over the points of a program; of factors of products it is one more product, with ones."""
    if values.dtype == tl.float32:
        tl.store(sums + channel, tl.sum(values, 0))
    else:
        row = tl.arange(0, 16)[:, None]  # the least that tensor cores take, all the same
        total = tl.dot(tl.full([16, ROWS], 1.0, values.dtype), values)
        tl.store(sums + 0 * row + channel[None, :], total, mask=row == 0)


@triton.jit
def _forward(
    x, gain, shift, gate, gate_bias, out, seed, points, out_bias, y,
    NORM: tl.constexpr, EPSILON: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The results of some points."""
    WIDTH: tl.constexpr = PARTS * TILE
    point = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, start = (point < points)[:, None], sequences(seed, point, DROPOUT)
    begin = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    x, y = x + begin, y + begin
    r = _residual(x, gain, shift, there, NORM, EPSILON, ROWS, PARTS, TILE)[0]
    left = _factors(r, there, gate.dtype.element_ty, PARTS)
    total = ()
    for _ in tl.static_range(PARTS):
        total += (tl.zeros([ROWS, TILE], tl.float32),)
    for hidden in tl.range(PARTS):
        unit = _channels(hidden, TILE)
        u = _hidden(left, _rows(gate, unit, PARTS, TILE), gate_bias, unit, PARTS)
        g = _hidden(left, _rows(gate, WIDTH + unit, PARTS, TILE), gate_bias, WIDTH + unit, PARTS)
        a = dropped(gelu(u, EXACT)[0] * g, start, unit, DROPOUT).to(out.dtype.element_ty)
        more = ()
        for part in tl.static_range(PARTS):
            w = _matrix(out, _channels(part, TILE), unit, WIDTH)
            more += (tl.dot(a, tl.trans(w), total[part], input_precision="tf32"),)
        total = more
    for part in tl.static_range(PARTS):
        channel = _channels(part, TILE)
        added = dropped(total[part] + _vector(out_bias, channel), start, WIDTH + channel, DROPOUT)
        _write(y, channel, there, r[part] + added, ROWS, WIDTH)


@triton.jit
def _backward(
    x, gain, shift, gate, gate_bias, out, seed, points,
    gradient, of_x, into_gate, of_hidden, into_out, of_sum, sums,
    NORM: tl.constexpr, EPSILON: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of some points, the factors of those of the matrices, and the sums that the others are made of."""
    WIDTH: tl.constexpr = PARTS * TILE
    factor: tl.constexpr = gate.dtype.element_ty
    point = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, start = (point < points)[:, None], sequences(seed, point, DROPOUT)
    begin = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    x, gradient, of_x, of_hidden = x + begin, gradient + begin, of_x + begin, of_hidden + 2 * begin
    into_gate, into_out, of_sum = into_gate + begin, into_out + begin, of_sum + begin
    sums += tl.program_id(0).to(tl.int64) * ((5 if NORM else 3) * WIDTH)

    r, mean, inverse = _residual(x, gain, shift, there, NORM, EPSILON, ROWS, PARTS, TILE)
    total = _read(gradient, there, ROWS, PARTS, TILE)  # of r: along the residual, and through the network
    d = ()
    for part in tl.static_range(PARTS):
        d += (dropped(total[part], start, WIDTH + _channels(part, TILE), DROPOUT),)
    left, right = _factors(r, there, factor, PARTS), _factors(d, there, factor, PARTS)
    for part in tl.static_range(PARTS):
        channel = _channels(part, TILE)
        _add_up(sums, 2 * WIDTH + channel, right[part], ROWS)
        if NORM or x.dtype.element_ty != factor:
            _write(into_gate, channel, there, left[part], ROWS, WIDTH)
        if DROPOUT > 0 or x.dtype.element_ty != factor:
            _write(of_sum, channel, there, right[part], ROWS, WIDTH)

    for hidden in tl.range(PARTS):
        unit = _channels(hidden, TILE)
        rows, gate_rows = _rows(gate, unit, PARTS, TILE), _rows(gate, WIDTH + unit, PARTS, TILE)
        u = _hidden(left, rows, gate_bias, unit, PARTS)
        g = _hidden(left, gate_rows, gate_bias, WIDTH + unit, PARTS)
        of_a = tl.zeros([ROWS, TILE], tl.float32)
        for part in tl.static_range(PARTS):
            w = _matrix(out, _channels(part, TILE), unit, WIDTH)
            of_a = tl.dot(right[part], w, of_a, input_precision="tf32")
        of_a = dropped(of_a, start, unit, DROPOUT)
        bent, slope = gelu(u, EXACT)
        of_u, of_g = (of_a * g * slope).to(factor), (of_a * bent).to(factor)
        _write(into_out, unit, there, dropped(bent * g, start, unit, DROPOUT), ROWS, WIDTH)
        _write(of_hidden, unit, there, of_u, ROWS, 2 * WIDTH)
        _write(of_hidden, WIDTH + unit, there, of_g, ROWS, 2 * WIDTH)
        _add_up(sums, unit, of_u, ROWS)
        _add_up(sums, WIDTH + unit, of_g, ROWS)
        more = ()
        for part in tl.static_range(PARTS):
            through_u = tl.dot(of_u, rows[part], total[part], input_precision="tf32")
            more += (tl.dot(of_g, gate_rows[part], through_u, input_precision="tf32"),)
        total = more

    if NORM:
        x_again = _read(x, there, ROWS, PARTS, TILE)  # rather than in registers all the while
        n, of_n = (), ()
        constant, along = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            channel = _channels(part, TILE)
            n += ((x_again[part] - mean) * inverse,)
            of_n += (total[part] * _vector(gain, channel),)
            constant += tl.sum(of_n[part], 1) / WIDTH
            along += tl.sum(of_n[part] * n[part], 1) / WIDTH
            _add_up(sums, 3 * WIDTH + channel, total[part] * n[part], ROWS)
            _add_up(sums, 4 * WIDTH + channel, total[part], ROWS)
        # The gradient loses its parts along the constant and along n, which the normalization does not feel.
        total = ()
        for part in tl.static_range(PARTS):
            total += (inverse * (of_n[part] - constant[:, None] - n[part] * along[:, None]),)
    for part in tl.static_range(PARTS):
        _write(of_x, _channels(part, TILE), there, total[part], ROWS, WIDTH)
