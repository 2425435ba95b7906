"""Gradients of a latent rollout from its normalized latents alone; everything between them is computed again.

With normalized latents n = (z - mean z) / std z a step and a reading are

    z' = z + W_L gelu(... gelu(W_1 n + drive)),      values' = R_3 a(R_2 a(R_1 n' + read drive)) + bias

Going back in time, each step is a chain of products of large matrices and of point-wise work between them, which waits
for memory. So an activation, its slope and what the slope multiplies come with the product before them, in one kernel
(`_layer_kernel`); what has nothing of that kind after it, the vendor's library multiplies. Both networks begin with the
same n, so the gradient of n is one product. Some of the points go back at a time, which bounds the memory.

Products are in the type of n, with sums in float32; so are the sums over points and steps.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.nn.feedforward_kernels import gelu

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of the products that a program does at a time
_WARPS, _STAGES = 8, 3
_EXACT: torch.dtype | None = torch.float32  # the type whose rounding does not hide that of a faster GELU
PART = 65_536  # points that go back together, as a rule: fewer take less memory, and products of them more time


class Chain(NamedTuple):
    """A network without its first normalization: matrices (out, in), and what is added after the first."""

    weights: tuple[Tensor, ...]
    drive: Tensor  # (rows, width) where rows divides the number of latents: one, a grid shared by samples, or all
    activation: str  # gelu or relu


class Gradients(NamedTuple):
    """Of all that a rollout depends on, in float32."""

    start: Tensor  # the latents before the first step
    step: list[Tensor]  # matrices
    drive: Tensor
    read: list[Tensor]
    read_drive: Tensor


def way_back(n: Tensor, scale: Tensor, step: Chain, read: Chain, of_values: Tensor, part: int = PART) -> Gradients:
    """The gradients of a rollout.

    Args:
        n: normalized latents (times + 1, rows, width), from the start to the last step.
        scale: 1 / std of the latents (times + 1, rows).
        step: the network of a step, with GELUs.
        read: the network that reads values, of three matrices.
        of_values: the gradient of the values (times, rows, channels), float32.
        part: points that go back together, about.
    """
    rows, width = n.shape[1:]
    step, read = (Chain(tuple(w.to(n.dtype) for w in c.weights), c.drive, c.activation) for c in (step, read))
    step = step._replace(drive=step.drive.to(n.dtype))  # as on the way there
    first = torch.cat([step.weights[0], read.weights[0]])
    totals = Gradients(
        n.new_empty(rows, width, dtype=torch.float32),
        [torch.zeros_like(w, dtype=torch.float32) for w in step.weights[1:]],
        torch.zeros_like(step.drive, dtype=torch.float32),
        [torch.zeros_like(w, dtype=torch.float32) for w in read.weights[1:]],
        torch.zeros_like(read.drive, dtype=torch.float32),
    )
    of_first = torch.zeros_like(first, dtype=torch.float32)
    size = _part(rows, (len(step.drive), len(read.drive)), part)
    room = _Room(n.new_empty, size, step, read)
    for begin in range(0, rows, size):
        here = slice(begin, min(begin + size, rows))
        _march_back(n[:, here], scale[:, here], here, step, read, first, of_values[:, here], room, totals, of_first)
    return totals._replace(step=[of_first[:width], *totals.step], read=[of_first[width:], *totals.read])


class _Room:
    """Memory for the layers of one step, with all matrices one row for each point."""

    def __init__(self, new, rows: int, step: Chain, read: Chain):
        width, inner, outer = len(step.weights[0]), len(read.weights[0]), len(read.weights[1])
        # The slopes of the first activations of both networks, side by side, which become the gradients before them.
        self.first = new(rows, width + inner)
        self.deeper = [new(rows, width) for _ in step.weights[2:]]  # likewise of the other activations of a step
        self.hidden = [new(rows, width) for _ in step.weights[1:]]  # after the activations
        self.inner, self.outer, self.of_outer = new(rows, inner), new(rows, outer), new(rows, outer)
        self.of_n, self.of_z = new(rows, width), new(rows, width)

    def of(self, rows: int) -> "_Room":
        """The same for fewer points."""
        fewer = object.__new__(_Room)
        for name, found in vars(self).items():
            setattr(fewer, name, found[:rows] if isinstance(found, Tensor) else [x[:rows] for x in found])
        return fewer


def _march_back(
    n: Tensor,
    scale: Tensor,
    here: slice,
    step: Chain,
    read: Chain,
    first: Tensor,
    of_values: Tensor,
    room: _Room,
    totals: Gradients,
    of_first: Tensor,
) -> None:
    """All steps of some points, the last one first; adds to the totals."""
    times, width = len(n) - 1, n.shape[2]
    room = room.of(n.shape[1])
    for t in range(times, -1, -1):
        # The last latents are only read, the first ones only marched on.
        columns = slice(width if t == times else 0, width if t == 0 else None)
        if t < times:
            _step_back(step, here, n[t], room, totals)
        if t > 0:
            _read_back(read, here, n[t], of_values[t - 1], room, totals)
        gradient = room.first[:, columns]
        _add_product(of_first[columns], gradient, n[t])
        torch.mm(gradient, first[columns], out=room.of_n)
        _through_norm(room.of_z, room.of_n, n[t], scale[t], fresh=t == times)
    totals.start[here] = room.of_z


def _step_back(step: Chain, here: slice, n: Tensor, room: _Room, totals: Gradients) -> None:
    """From the gradient of the latents after a step to that before its first activation."""
    activations = [room.first[:, : n.shape[1]], *room.deeper]
    drives, source = [step.drive, *[None] * len(room.deeper)], n
    for weight, drive, value, slope in zip(step.weights[:-1], drives, room.hidden, activations, strict=True):
        _forth(source, weight, drive, here, step.activation, value, slope)
        source = value
    after = room.of_z
    for total, weight, hidden, slope in reversed(
        list(zip(totals.step, step.weights[1:], room.hidden, activations, strict=True))
    ):
        _add_product(total, after, hidden)
        _back(after, weight, slope)
        after = slope
    _add_drive(totals.drive, after, here)


def _read_back(read: Chain, here: slice, n: Tensor, of_values: Tensor, room: _Room, totals: Gradients) -> None:
    """From the gradient of the values at one time to that before the first activation."""
    slope = room.first[:, n.shape[1] :]
    _forth(n, read.weights[0], read.drive, here, read.activation, room.inner, slope)
    last = of_values, read.weights[2]
    _forth(room.inner, read.weights[1], None, here, read.activation, room.outer, room.of_outer, last)
    _add_product(totals.read[1], of_values.to(n.dtype), room.outer)
    _add_product(totals.read[0], room.of_outer, room.inner)
    _back(room.of_outer, read.weights[1], slope)
    _add_drive(totals.read_drive, slope, here)


def _part(rows: int, periods: tuple[int, int], wanted: int) -> int:
    """Points that go back together: whole periods of the drives, or whole parts of one."""
    period = max(p for p in periods if p < rows) if min(periods) < rows else 1
    if period <= wanted:
        return min(wanted // period * period, rows)
    return next(size for size in range(wanted, 0, -1) if period % size == 0)


def _add_product(total: Tensor, out: Tensor, into: Tensor) -> None:
    """The gradient of a matrix: a sum over rows, in float32."""
    if out.dtype == torch.float32:
        total.addmm_(out.T, into)
    elif out.is_cuda:
        torch.addmm(total, out.T, into, out_dtype=torch.float32, out=total)
    else:
        total += out.T.float() @ into.float()


def _add_drive(total: Tensor, gradient: Tensor, here: slice) -> None:
    """The gradient of a drive, which some rows may share."""
    (rows, columns), period = gradient.shape, len(total)
    if period == 1:
        _add_product(total, gradient.new_ones(rows, 1), gradient)
        return
    if rows <= period:
        total = total[here.start % period : here.start % period + rows]
    _add_drive_kernel[(triton.cdiv(len(total), 8), triton.cdiv(columns, 128))](  # many programs: each has a loop
        total, gradient, len(total), rows // len(total), columns, gradient.stride(0), ROWS=8, COLUMNS=128
    )


@triton.jit
def _add_drive_kernel(
    total, gradient, period, repeats, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < period)[:, None] & (column < columns)[None, :]
    where = total + row[:, None] * columns + column[None, :]
    found = tl.load(where, there, 0.0)
    for i in range(repeats):
        found += tl.load(gradient + (row + i * period)[:, None] * stride + column[None, :], there, 0.0).to(tl.float32)
    tl.store(where, found, there)


def _forth(
    source: Tensor,
    weight: Tensor,
    drive: Tensor | None,
    here: slice,
    activation: str,
    value: Tensor,
    slope: Tensor,
    last: tuple[Tensor, Tensor] | None = None,
) -> None:
    """A layer again: what comes after its activation, and the slope of this.

    Args:
        source: what the layer takes.
        weight: (out, in).
        drive: to be added before the activation.
        here: which of all rows these are.
        activation: gelu or relu.
        value: gets what comes after the activation.
        slope: gets its derivative.
        last: the gradient (rows, channels) of a last layer and its matrix, which the slope is multiplied by: so `slope`
            gets the gradient before the activation.
    """
    of_values, matrix = (source, weight) if last is None else last  # or else not looked at
    _layer_kernel[_grid(slope)](
        source, weight, slope if drive is None else drive, value, slope, of_values, matrix,
        *slope.shape, source.shape[1], here.start, 1 if drive is None else len(drive),
        source.stride(0), weight.stride(1), weight.stride(0), 0 if drive is None else drive.stride(0),
        value.stride(0), slope.stride(0), of_values.stride(0),
        BACK=False, GELU=activation == "gelu", DRIVE=drive is not None, CHANNELS=0 if last is None else len(matrix),
        **_tiles(slope, source.shape[1]),
    )  # fmt: skip


def _back(gradient: Tensor, weight: Tensor, slope: Tensor) -> None:
    """From the gradient of what a layer gives to that before the activation which it takes, in place of the slope."""
    _layer_kernel[_grid(slope)](
        gradient, weight, slope, slope, slope, gradient, weight, *slope.shape, gradient.shape[1], 0, 1,
        gradient.stride(0), weight.stride(0), weight.stride(1), 0, 0, slope.stride(0), 0,
        BACK=True, GELU=False, DRIVE=False, CHANNELS=0, **_tiles(slope, gradient.shape[1]),
    )  # fmt: skip


def _grid(result: Tensor) -> tuple[int]:
    return (triton.cdiv(result.shape[0], _ROWS) * triton.cdiv(result.shape[1], _columns(result)),)


def _columns(result: Tensor) -> int:
    """Of a tile: half as many where a whole one would be half empty."""
    return _COLUMNS if result.shape[1] % _COLUMNS == 0 else _COLUMNS // 2


def _tiles(result: Tensor, depth: int) -> dict:
    """How the kernel is compiled for a result of this width and type."""
    return {
        "EXACT": result.dtype == _EXACT, "WHOLE": depth % _DEPTH == 0,
        "ROWS": _ROWS, "COLUMNS": _columns(result), "DEPTH": _DEPTH, "num_warps": _WARPS, "num_stages": _STAGES,
    }  # fmt: skip


@triton.jit
def _layer_kernel(
    source, weight, drive, value, slope, of_values, last, rows, columns, depth, first, period,
    source_stride, in_stride, out_stride, drive_stride, value_stride, slope_stride, of_values_stride,
    BACK: tl.constexpr, GELU: tl.constexpr, DRIVE: tl.constexpr, CHANNELS: tl.constexpr, EXACT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # Programs side by side take the same rows, which come from memory once.
    across = (columns + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0).to(tl.int64) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    here, real = (row < rows)[:, None], (column < columns)[None, :]
    left = source + row[:, None] * source_stride + deep[None, :]
    right = weight + deep[:, None] * in_stride + column[None, :] * out_stride
    x = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        if WHOLE:
            a, b = tl.load(left, here, 0.0), tl.load(right, real, 0.0)
        else:
            a = tl.load(left, here & (begin + deep < depth)[None, :], 0.0)
            b = tl.load(right, real & (begin + deep < depth)[:, None], 0.0)
        x = tl.dot(a, b, x, input_precision="ieee")
        left += DEPTH
        right += DEPTH * in_stride
    kind: tl.constexpr = slope.dtype.element_ty
    there = here & real
    slope += row[:, None] * slope_stride + column[None, :]
    if BACK:
        tl.store(slope, (x * tl.load(slope, there, 0.0).to(tl.float32)).to(kind), there)
    else:
        if DRIVE:
            beside = ((first + row) % period)[:, None] * drive_stride + column[None, :]
            x += tl.load(drive + beside, there, 0.0).to(tl.float32)
        bent, rise = _bent(x, GELU, EXACT)
        if CHANNELS > 0:
            g = tl.zeros([ROWS, COLUMNS], tl.float32)
            for channel in tl.static_range(CHANNELS):
                of_value = tl.load(of_values + row * of_values_stride + channel, row < rows, 0.0)
                factor = tl.load(last + channel * columns + column, column < columns, 0.0).to(tl.float32)
                g += of_value[:, None] * factor[None, :]
            rise *= g
        tl.store(slope, rise.to(kind), there)
        tl.store(value + row[:, None] * value_stride + column[None, :], bent.to(kind), there)


@triton.jit
def _bent(x, GELU: tl.constexpr, EXACT: tl.constexpr):
    """An activation and its slope."""
    if GELU:
        return gelu(x, EXACT)
    else:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


def _through_norm(of_z: Tensor, of_n: Tensor, n: Tensor, scale: Tensor, fresh: bool) -> None:
    """Add to the gradient of latents what comes through their normalization, or begin it."""
    rows, width = n.shape
    _through_norm_kernel[(triton.cdiv(rows, 8),)](
        of_z, of_n, n, scale, rows, WIDTH=width, COLUMNS=triton.next_power_of_2(width), FRESH=fresh, ROWS=8
    )


@triton.jit
def _through_norm_kernel(
    of_z, of_n, n, scale, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FRESH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < WIDTH)[None, :]
    where = row[:, None] * WIDTH + column[None, :]
    g = tl.load(of_n + where, there, 0.0).to(tl.float32)
    x = tl.load(n + where, there, 0.0).to(tl.float32)
    # The gradient of n loses its parts along the constant and along n, which the normalization does not feel.
    constant = tl.sum(g, 1) / WIDTH
    along = tl.sum(g * x, 1) / WIDTH
    g = (g - constant[:, None] - x * along[:, None]) * tl.load(scale + row, row < rows, 0.0)[:, None]
    if not FRESH:
        g += tl.load(of_z + where, there, 0.0).to(tl.float32)
    tl.store(of_z + where, g.to(of_z.dtype.element_ty), there)
