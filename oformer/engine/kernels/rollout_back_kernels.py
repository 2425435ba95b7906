"""Gradients of a latent rollout from its normalized latents alone; everything between them is computed again.

With normalized latents n = (z - mean z) / std z a step and a reading are

    z' = z + W_L gelu(... gelu(W_1 n + drive)),      values' = R_3 a(R_2 a(R_1 n' + read drive)) + bias

Going back in time, each step is a chain of products of large matrices, which the vendor's library does best, and of
point-wise work between them, which waits for memory. So everything of that kind between two products is one pass:
`_bend_kernel` for activations and their slopes, `_through_norm_kernel` for the norm. Sums over points that need no
product, the gradients of drives and of the few rows of the last matrix, are taken in the same pass, while the numbers
are at hand. Both networks begin with the same n, so their first layers are one product. Some of the points go back at a
time, which bounds the memory.

Products are in the type of n, with sums in float32; so are the sums over points and steps.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.engine.kernels.feedforward_kernels import gelu
from oformer.engine.kernels.partial_sums_kernels import added_up
from oformer.engine.kernels.tiles_kernels import edges_of

_ROWS, _COLUMNS = 32, 128  # of the tile of a program
_NORMED = 8  # points of a program that goes through the norm
# Whether there is a hyperbolic tangent in one instruction: an interpreter of kernels has none.
_TANH = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") != "1")
_TOGETHER = 4  # samples of a shared grid in a tile: a program visits them all, and memory likes to be asked for much
_EXACT: torch.dtype | None = torch.float32  # the type whose rounding does not hide that of a faster GELU
PART = 65_536  # points that go back together, as a rule: fewer take less memory, and products of them more time


class Chain(NamedTuple):
    """A network without its first normalization: matrices (out, in), and what is added after the first."""

    weights: tuple[Tensor, ...]
    drive: Tensor  # (rows, width) where rows divides the number of latents: one, a grid shared by samples, or all
    activation: str  # gelu or relu

    def plainly(self, n: Tensor) -> Tensor:
        """What it makes of normalized latents, in plain code."""
        activate = torch.nn.functional.gelu if self.activation == "gelu" else torch.relu
        h = n @ self.weights[0].T + self.drive.repeat(len(n) // len(self.drive), 1)
        for weight in self.weights[1:]:
            h = activate(h) @ weight.T
        return h


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
    step, read = (
        Chain(tuple(w.to(n.dtype) for w in c.weights), c.drive.contiguous(), c.activation) for c in (step, read)
    )
    first = torch.cat([step.weights[0], read.weights[0]])
    size = _part(rows, (len(step.drive), len(read.drive)), part)
    channels, outer = read.weights[2].shape
    blocks = triton.cdiv(size, _ROWS)
    # Sums over all points are rows of the programs at first.
    of_last = n.new_zeros(blocks, channels, outer, dtype=torch.float32)
    drives = [
        n.new_zeros(blocks if len(drive) == 1 else len(drive), drive.shape[1], dtype=torch.float32)
        for drive in (step.drive, read.drive)
    ]
    totals = Gradients(
        n.new_empty(rows, width, dtype=torch.float32),
        [torch.zeros_like(w, dtype=torch.float32) for w in step.weights[1:]],
        drives[0],
        [torch.zeros_like(read.weights[1], dtype=torch.float32), of_last],
        drives[1],
    )
    of_first = torch.zeros_like(first, dtype=torch.float32)
    room = _Room(n.new_empty, size, step, read)
    with torch.cuda.device_of(n):  # Triton starts kernels on the current device
        for begin in range(0, rows, size):
            here = slice(begin, min(begin + size, rows))
            _march_back(n[:, here], scale[:, here], here, step, read, first, of_values[:, here], room, totals, of_first)
    drives = [
        added_up(total)[None] if len(chain.drive) == 1 else total
        for chain, total in zip((step, read), drives, strict=True)
    ]
    return Gradients(
        totals.start, [of_first[:width], *totals.step], drives[0],
        [of_first[width:], totals.read[0], added_up(of_last)], drives[1],
    )  # fmt: skip


class _Room:
    """Memory for the layers of one step, with all matrices one row for each point."""

    def __init__(self, new, rows: int, step: Chain, read: Chain):
        width, inner, outer = len(step.weights[0]), len(read.weights[0]), len(read.weights[1])
        # Before the first activations of both networks, side by side, and the gradient there.
        self.before, self.of_before = new(rows, width + inner), new(rows, width + inner)
        self.deeper = [new(rows, width) for _ in step.weights[2:]]  # before the other activations of a step
        self.of_deeper = [new(rows, width) for _ in step.weights[2:]]
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
        before, of_before = room.before[:, columns], room.of_before[:, columns]
        torch.mm(n[t], first[columns].T, out=before)
        if t < times:
            _step_back(step, here, room, totals)
        if t > 0:
            _read_back(read, here, of_values[t - 1], room, totals)
        _add_product(of_first[columns], of_before, n[t])
        torch.mm(of_before, first[columns], out=room.of_n)
        _through_norm(room.of_z, room.of_n, n[t], scale[t], fresh=t == times)
    totals.start[here] = room.of_z


def _step_back(step: Chain, here: slice, room: _Room, totals: Gradients) -> None:
    """From the gradient of the latents after a step to that before its first activation."""
    width = room.of_z.shape[1]
    before = [room.before[:, :width], *room.deeper]
    of_before = [room.of_before[:, :width], *room.of_deeper]
    drives, last = [step.drive, *[None] * len(room.deeper)], len(before) - 1
    for i, hidden in enumerate(room.hidden):
        if i > 0:
            torch.mm(room.hidden[i - 1], step.weights[i].T, out=before[i])
        if i < last or i == 0:  # that of the last layer comes with its slope
            _bend(before[i], drives[i], here, step.activation, value=hidden)
    after = room.of_z
    for i in range(last, -1, -1):
        torch.mm(after, step.weights[i + 1], out=of_before[i])
        value, sums = room.hidden[i] if i == last > 0 else None, totals.drive if i == 0 else None
        _bend(before[i], drives[i], here, step.activation, value=value, gradient=of_before[i], sums=sums)
        _add_product(totals.step[i], after, room.hidden[i])
        after = of_before[i]


def _read_back(read: Chain, here: slice, of_values: Tensor, room: _Room, totals: Gradients) -> None:
    """From the gradient of the values at one time to that before the first activation."""
    width = room.of_z.shape[1]
    before, of_before = room.before[:, width:], room.of_before[:, width:]
    _bend(before, read.drive, here, read.activation, value=room.inner)
    torch.mm(room.inner, read.weights[1].T, out=room.outer)
    _bend(
        room.outer, None, here, read.activation, value=room.outer, gradient=room.of_outer,
        source=(of_values, read.weights[2]), sums=totals.read[1],
    )  # fmt: skip
    _add_product(totals.read[0], room.of_outer, room.inner)
    torch.mm(room.of_outer, read.weights[1], out=of_before)
    _bend(before, read.drive, here, read.activation, gradient=of_before, sums=totals.read_drive)


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


def _bend(
    before: Tensor,
    drive: Tensor | None,
    here: slice,
    activation: str,
    value: Tensor | None = None,
    gradient: Tensor | None = None,
    source: tuple[Tensor, Tensor] | None = None,
    sums: Tensor | None = None,
) -> None:
    """One pass over what stands before an activation.

    Args:
        before: without the drive.
        drive: to be added.
        here: which of all rows these are.
        activation: gelu or relu.
        value: gets what comes after the activation; may be `before` itself.
        gradient: that after the activation, to be turned into that before it.
        source: instead of a gradient that is there, the gradient (rows, channels) of a last product and its matrix.
        sums: to which sums over rows are added: with a source, those of the gradient of its matrix; otherwise those of
            the gradient of the drive. What all rows have in common comes in as many rows as there are programs.
    """
    rows, columns = before.shape
    period = 1 if drive is None else len(drive)
    # A program has some rows of a period, in each of the samples that share it.
    repeats = rows // period if 1 < period < rows else 1
    each, together = rows // repeats, min(triton.next_power_of_2(repeats), _TOGETHER)
    of_values, last = source if source is not None else (before, before)
    _bend_kernel[(triton.cdiv(each, _ROWS // together), triton.cdiv(columns, _COLUMNS))](
        before, before if drive is None else drive, before if value is None else value,
        before if gradient is None else gradient, of_values, last, before if sums is None else sums,
        each, repeats, columns, here.start % period,
        before.stride(0), 0 if period == 1 else columns, 0 if value is None else value.stride(0),
        0 if gradient is None else gradient.stride(0), of_values.stride(0),
        GELU=activation == "gelu", DRIVE=drive is not None, VALUE=value is not None, SLOPE=gradient is not None,
        CHANNELS=0 if source is None else len(last), SUMS=sums is not None, SHARED=period == 1,
        EXACT=before.dtype == _EXACT, TOGETHER=together, PLACES=_ROWS // together, COLUMNS=_COLUMNS,
    )  # fmt: skip


@triton.jit
def _bent(x, GELU: tl.constexpr, EXACT: tl.constexpr):
    """An activation and its derivative; the GELU as on the way there, where there is an instruction for it."""
    if GELU and _TANH and not EXACT:
        square = tl.minimum(x * x, 36.0)
        t = x * (0.7974640 + square * (0.03698451 - 0.0003428632 * square))
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [t], dtype=tl.float32, is_pure=True, pack=1)
        share = 0.5 + 0.5 * t
        bent = x * share
        rise = 1.594927988 + square * (0.2219071076 - 0.003428631901 * square)
        return bent, share + (bent - bent * share) * rise
    elif GELU:
        return gelu(x, EXACT)
    else:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _bend_kernel(
    before, drive, value, gradient, of_values, last, sums, each, repeats, columns, first,
    before_stride, drive_stride, value_stride, gradient_stride, of_values_stride,
    GELU: tl.constexpr, DRIVE: tl.constexpr, VALUE: tl.constexpr, SLOPE: tl.constexpr, CHANNELS: tl.constexpr,
    SUMS: tl.constexpr, SHARED: tl.constexpr, EXACT: tl.constexpr, TOGETHER: tl.constexpr, PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TOGETHER * PLACES
    index = tl.arange(0, ROWS)
    place = tl.program_id(0).to(tl.int64) * PLACES + index % PLACES
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (column < columns)[None, :]
    # The drive of these points, the same at all times and for all samples of a grid.
    added = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DRIVE:
        beside = (first + place)[:, None] * drive_stride + column[None, :]
        added = tl.load(drive + beside, (place < each)[:, None] & real, 0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, repeats, TOGETHER):
        repeat = begin + index // PLACES
        row, exists = place + repeat.to(tl.int64) * each, (place < each) & (repeat < repeats)
        there = exists[:, None] & real
        x = tl.load(before + row[:, None] * before_stride + column[None, :], there, 0.0).to(tl.float32)
        if DRIVE:
            x += added
        after, slope = _bent(x, GELU, EXACT)
        if SLOPE:
            # Gradient after the activation: read, or formed from that of the few values; then before it.
            where = gradient + row[:, None] * gradient_stride + column[None, :]
            if CHANNELS > 0:
                g = tl.zeros([ROWS, COLUMNS], tl.float32)
                for channel in tl.static_range(CHANNELS):
                    weight = tl.load(last + channel * columns + column, column < columns, 0.0).to(tl.float32)
                    of_value = tl.load(of_values + row * of_values_stride + channel, exists, 0.0)[:, None]
                    g += of_value * weight[None, :]
                    if SUMS:
                        at = sums + (tl.program_id(0) * CHANNELS + channel) * columns + column
                        found = tl.load(at, column < columns, 0.0) + tl.sum(of_value * after, 0)
                        tl.store(at, found, column < columns)
            else:
                g = tl.load(where, there, 0.0).to(tl.float32)
            g *= slope
            tl.store(where, g.to(gradient.dtype.element_ty), there)
            total += g
        if VALUE:
            where = value + row[:, None] * value_stride + column[None, :]
            tl.store(where, after.to(value.dtype.element_ty), there)
    # Gradients of the drives: one row for all points, or one for each.
    if SUMS and CHANNELS == 0:
        if SHARED:
            at = sums + tl.program_id(0) * columns + column
            tl.store(at, tl.load(at, column < columns, 0.0) + tl.sum(total, 0), column < columns)
        else:
            total = tl.sum(tl.reshape(total, (TOGETHER, PLACES, COLUMNS)), 0)
            place = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
            at = sums + (first + place)[:, None] * columns + column[None, :]
            there = (place < each)[:, None] & real
            tl.store(at, tl.load(at, there, 0.0) + total, there)


def _through_norm(of_z: Tensor, of_n: Tensor, n: Tensor, scale: Tensor, fresh: bool) -> None:
    """Add to the gradient of latents what comes through their normalization, or begin it."""
    rows, width = n.shape
    _through_norm_kernel[(triton.cdiv(rows, _NORMED),)](
        of_z, of_n, n, scale, rows, WIDTH=width, EDGES=edges_of(width), FRESH=fresh, ROWS=_NORMED
    )


@triton.jit
def _through_norm_kernel(
    of_z, of_n, n, scale, rows,
    WIDTH: tl.constexpr, EDGES: tl.constexpr, FRESH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    gradients, latents = (), ()
    constant, along = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for piece in tl.static_range(len(EDGES) - 1):
        where, there = _piece(row, rows, EDGES[piece], EDGES[piece + 1], WIDTH)
        g = tl.load(of_n + where, there, 0.0).to(tl.float32)
        x = tl.load(n + where, there, 0.0).to(tl.float32)
        constant += tl.sum(g, 1) / WIDTH
        along += tl.sum(g * x, 1) / WIDTH
        gradients += (g,)
        latents += (x,)
    factor = tl.load(scale + row, row < rows, 0.0)[:, None]
    for piece in tl.static_range(len(EDGES) - 1):
        where, there = _piece(row, rows, EDGES[piece], EDGES[piece + 1], WIDTH)
        # The gradient of n loses its parts along the constant and along n, which the normalization does not feel.
        g = (gradients[piece] - constant[:, None] - latents[piece] * along[:, None]) * factor
        if not FRESH:
            g += tl.load(of_z + where, there, 0.0).to(tl.float32)
        tl.store(of_z + where, g.to(of_z.dtype.element_ty), there)


@triton.jit
def _piece(row, rows, BEGIN: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr):
    """Where some columns of the rows lie, and which exist."""
    column = BEGIN + tl.arange(0, END - BEGIN)
    return row[:, None] * WIDTH + column[None, :], (row < rows)[:, None] & (column < WIDTH)[None, :]
