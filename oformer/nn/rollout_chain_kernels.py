"""Gradients of a latent rollout on a Hopper GPU: 128 points go back through one step on the chip.

Equations and notation are those of `rollout_back_kernels.py`. Going back from time t + 1 to t, a program takes points
whose normalized latents n it reads once: through the reading and back, through the inner layers of the step again, and
back through all of them. Activations and their gradients are operands of the next product, so they lie in shared memory
(the "state") anyway; asynchronous copies take them from there to memory, where library products make the gradients of
the matrices from them. Slopes of activations go to a place in memory that the program writes over with its next
points, so that they stay in the cache.

Tensor cores leave to each thread pairs of neighboring columns. What is written straight from registers is written with
the columns of each 32 in another order (`_lanes`), sixteen bytes at a time. The sums over points do not care, and the
order is undone in their small results.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oformer.nn.rollout_back_kernels import PART, Chain, Gradients, _add_drive, _add_product, _part

SIDE = 128
_STAGES = 4
_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_TILE, k_width=2))
_LEFT_HALF = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_HALF, k_width=2))
# The same numbers in the same threads, with the columns in the order of `_lanes`.
_LANES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
)
_LANES_HALF = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 64],
    )
)


class _Shape(NamedTuple):
    """Sizes that kernels are compiled for."""

    pieces: int  # tiles across the latents
    steps: int  # matrices of a step
    inner: int  # widths that are read through
    outer: int
    channels: int

    @classmethod
    def of(cls, step: Chain, read: Chain) -> "_Shape":
        first, second, last = (len(w) for w in read.weights)
        return cls(len(step.weights[0]) // SIDE, len(step.weights), first, second, last)

    def constants(self) -> dict[str, int]:
        return {
            "P": self.pieces, "Q1": self.inner // 64, "Q2": self.outer // 64, "CHANNELS": self.channels,
            "STEPS": self.steps,
        }  # fmt: skip

    @property
    def parts(self) -> tuple[int, int]:
        """Tiles, the last of which may be half full, across the widths that are read through."""
        return -(-self.inner // SIDE), -(-self.outer // SIDE)


def way_back(n: Tensor, scale: Tensor, step: Chain, read: Chain, of_values: Tensor, part: int = PART) -> Gradients:
    """The gradients of a rollout, as `rollout_back_kernels.way_back`; rows must be whole tiles."""
    times, (rows, width) = len(n) - 1, n.shape[1:]
    shape = _Shape.of(step, read)
    step_lines, read_lines = (max(len(chain.drive) // SIDE, 1) for chain in (step, read))
    size = SIDE * _part(rows // SIDE, (step_lines, read_lines), max(part // SIDE, 1))
    work = _Work.make(shape, step, read, size, n)
    totals = Gradients(
        n.new_empty(rows, width, dtype=torch.float32),
        [torch.zeros_like(w, dtype=torch.float32) for w in step.weights],
        torch.zeros_like(step.drive, dtype=torch.float32),
        [torch.zeros_like(w, dtype=torch.float32) for w in read.weights],
        torch.zeros_like(read.drive, dtype=torch.float32),
    )
    for begin in range(0, rows, size):
        here = slice(begin, min(begin + size, rows))
        for t in range(times, -1, -1):
            work.march(n, scale, of_values, here, t)
            work.add(totals, n, of_values, here, t)
        totals.start[here] = work.of_latents(0)[: here.stop - here.start]
    undone = [_undone(totals.read[0], 0), _undone(_undone(totals.read[1], 0), 1), _undone(totals.read[2], 1)]
    return totals._replace(read=undone, read_drive=_undone(totals.read_drive, 1))


def _undone(matrix: Tensor, dim: int) -> Tensor:
    """The columns or rows of a matrix in their own order again."""
    return matrix.unflatten(dim, (-1, 4, 4, 2)).transpose(dim + 1, dim + 2).flatten(dim, dim + 3)


def _done(matrix: Tensor) -> Tensor:
    """The columns of a matrix in the order of `_lanes`."""
    return matrix.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)


class _Work(NamedTuple):
    """Memory for one step back, in lines of tiles as wide as the latents."""

    shape: _Shape
    memory: Tensor
    size: int  # points
    drive_lines: int
    schedules: tuple[Tensor, ...]  # without a step, with both, without a reading
    slopes: Tensor
    reading: tuple[Tensor, Tensor, Tensor]  # inner, outer and its gradient
    floats: tuple[Tensor, Tensor]
    activation: str
    lines: tuple[int, ...]

    @classmethod
    def make(cls, shape: _Shape, step: Chain, read: Chain, size: int, n: Tensor) -> "_Work":
        width = n.shape[2]
        tape = _tape(shape, step, read).to(n.dtype)
        shared = step.drive if len(step.drive) > 1 else step.drive.expand(SIDE, -1)
        counts = [len(tape) // SIDE, len(shared) // SIDE, *[size // SIDE] * (2 * shape.steps + 1)]
        lines = [sum(counts[:i]) for i in range(len(counts))]
        memory = n.new_empty(sum(counts) * SIDE, width)
        memory[: len(tape)] = tape
        memory[lines[1] * SIDE :][: len(shared)] = shared
        programs = min(size // SIDE, torch.cuda.get_device_properties(n.device).multi_processor_count)
        return cls(
            shape, memory, size, counts[1],
            tuple(_schedule(shape, lines[1], n.device, reads, marches) for reads, marches in ((1, 0), (1, 1), (0, 1))),
            n.new_empty(programs, shape.steps - 1, SIDE * width),
            (n.new_empty(size, shape.inner), n.new_empty(size, shape.outer), n.new_empty(size, shape.outer)),
            (read.drive.detach().float().contiguous(), read.weights[2].detach().float().contiguous()),
            read.activation, tuple(lines[2:]),
        )  # fmt: skip

    def matrix(self, number: int) -> Tensor:
        return self.memory[self.lines[number] * SIDE :][: self.size]

    def of_latents(self, t: int) -> Tensor:
        """The gradient of the latents of time t; that of t + 1 is still there."""
        return self.matrix(t % 2)

    def of_inner(self) -> Tensor:
        return self.matrix(2)

    def march(self, n: Tensor, scale: Tensor, of_values: Tensor, here: slice, t: int) -> None:
        times, rows, width = len(n) - 1, n.shape[1], n.shape[2]
        shape, count = self.shape, (here.stop - here.start) // SIDE
        reads, marches = t > 0, t < times
        inner, outer, of_outer = self.reading
        gradient = of_values[t - 1 if reads else 0, here]
        tiles = [TensorDescriptor.from_tensor(x, [SIDE, SIDE], _SHARED.value) for x in (n.view(-1, width), self.memory)]
        lines = self.lines
        _back_kernel[(min(count, len(self.slopes)),)](
            *tiles, self.schedules[2 if not reads else 1 if marches else 0], self.slopes, scale[t, here], *self.floats,
            gradient, inner, outer, of_outer, self.matrix(2),
            count, here.start // SIDE, self.drive_lines, len(self.floats[0]), (t * rows + here.start) // SIDE,
            lines[t % 2], lines[(t + 1) % 2], lines[2], lines[3], self.size // SIDE,
            **shape.constants(), ACTIVATION=self.activation, READ=reads, STEP=marches, STAGES=_STAGES, num_warps=8,
        )  # fmt: skip

    def add(self, totals: Gradients, n: Tensor, of_values: Tensor, here: slice, t: int) -> None:
        """To the gradients of matrices and drives."""
        count, inner_layers = here.stop - here.start, self.shape.steps - 1

        def some(x: Tensor) -> Tensor:
            return x[:count]

        into = n[t, here]
        if t > 0:
            inner, outer, of_outer = map(some, self.reading)
            of_inner = some(self.of_inner())[:, : self.shape.inner]
            _add_product(totals.read[2], of_values[t - 1, here].to(n.dtype), outer)
            _add_product(totals.read[1], of_outer, inner)
            _add_product(totals.read[0], of_inner, into)
            _add_drive(totals.read_drive, of_inner, here)
        if t < len(n) - 1:
            hidden = [into, *(some(self.matrix(3 + i)) for i in range(inner_layers))]
            of_hidden = [some(self.matrix(3 + inner_layers + i)) for i in range(inner_layers)]
            of_hidden.append(some(self.of_latents(t + 1)))
            for total, out, source in zip(totals.step, of_hidden, hidden, strict=True):
                _add_product(total, out, source)
            _add_drive(totals.drive, of_hidden[0], here)


def _tiles(weight: Tensor, rows_first: bool) -> Tensor:
    """A matrix in tiles, filled up with zeros: row by row, or column by column."""
    out, into = weight.shape
    full = torch.nn.functional.pad(weight, (0, -into % SIDE, 0, -out % SIDE))
    apart = full.unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))  # (out, SIDE, in, SIDE)
    return apart.permute((0, 2, 1, 3) if rows_first else (2, 0, 1, 3)).flatten(0, 1)


def _tape(shape: _Shape, step: Chain, read: Chain) -> Tensor:
    """The matrices in tiles, in the order in which they are taken, in lines of the memory."""
    first, second = (w.detach() for w in read.weights[:2])
    steps = [w.detach() for w in step.weights]
    parts = [_tiles(first, False), _tiles(second, False), _tiles(second.T, False)]
    parts += [_tiles(w, True) for w in steps[:-1]] + [_tiles(w.T, True) for w in reversed(steps)]
    parts += [_tiles(_done(first.T), True)]
    tape = torch.cat(parts)
    fill = -len(tape) % shape.pieces
    tape = torch.nn.functional.pad(tape, (0, 0, 0, 0, 0, fill))
    return tape.unflatten(0, (-1, shape.pieces)).transpose(1, 2).flatten(2).flatten(0, 1)


# Made once for each arrangement: a captured graph cannot copy from the host.
@functools.lru_cache(maxsize=256)
def _schedule(shape: _Shape, drive: int, device: torch.device, reads: int, marches: int) -> Tensor:
    """Which tiles are taken for one tile of points, in their order.

    A row (base, a, b, c) is tile number base + a * tile of points + b * (the same modulo the period of the drive) of
    the memory, or with c > 0 of n, of whose gradient the place is c - 1 further.
    """
    p, (inner, outer) = shape.pieces, shape.parts
    rows: list[tuple[int, int, int, int]] = []

    def add(base: int, count: int, tile: int = 0, shared: int = 0, kept: int = 0) -> None:
        rows.extend((base + i, tile, shared, kept) for i in range(count))

    reading = p * inner + 2 * inner * outer
    marching = (2 * shape.steps - 1) * p * p
    if reads:
        add(0, reading)
    if marches:
        add(drive * p, p, shared=p)
        add(reading, marching)
    if reads:
        add(reading + marching, p * inner)
    add(0, p, tile=p, kept=1)
    if marches:
        add(0, p, tile=p, kept=2)
    return torch.tensor(rows, dtype=torch.int32, device=device)


@gluon.jit
def _fetch(
    n, work, ring, ready, schedule, item, wanted, place, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Ask for a tile of the schedule."""
    program, programs, first, shared_tiles, n_line, after_line = place
    slot = item % STAGES
    entry = schedule + (item % PER) * 4
    tile = program + item // PER * programs
    kind = gl.load(entry + 3)
    number = gl.load(entry) + tile * gl.load(entry + 1) + ((first + tile) % shared_tiles) * gl.load(entry + 2)
    number += gl.where(kind == 1, n_line * P, 0) + gl.where(kind == 2, after_line * P, 0)
    mbarrier.expect(ready.index(slot), 128 * 128 * 2, pred=wanted)
    where = [number // P * 128, number % P * 128]
    tma.async_copy_global_to_shared(work, where, ready.index(slot), ring.index(slot), pred=wanted & (kind != 1))
    tma.async_copy_global_to_shared(n, where, ready.index(slot), ring.index(slot), pred=wanted & (kind == 1))


@gluon.jit
def _refill(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """Fill the place of the tile before the present one again."""
    n, work, ring, ready, schedule, total, place = queue
    ahead = at + (STAGES - 1)
    _fetch(n, work, ring, ready, schedule, ahead, (ahead < total) & (at > 0), place, P, PER, STAGES)


@gluon.jit
def _turn(
    a, acc, at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr = 128,
    INTO: gl.constexpr = 128,
):  # fmt: skip
    """acc += a (next tile)^T; the place of the tile before it is filled again."""
    ring, ready = queue[2], queue[3]
    slot = at % STAGES
    mbarrier.wait(ready.index(slot), (at // STAGES) & 1)
    b = ring.index(slot)
    if OUT < 128:
        b = b.slice(0, OUT, dim=0)
    if INTO < 128:
        b = b.slice(0, INTO, dim=1)
    acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    _refill(at, queue, P, PER, STAGES)
    return acc, at + 1


@gluon.jit
def _row(state, acc, at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """acc += the whole state times the next tiles."""
    for k in range(P):
        acc, at = _turn(state.index(k), acc, at, queue, P, PER, STAGES)
    return acc, at


@gluon.jit
def _look(at, queue, STAGES: gl.constexpr):
    """A tile that is there or on its way, as numbers; no product may be under way."""
    ring, ready = queue[2], queue[3]
    slot = at % STAGES
    mbarrier.wait(ready.index(slot), (at // STAGES) & 1)
    return ring.index(slot).load(_TILE).to(gl.float32)


@gluon.jit
def _take(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """The next tile as numbers."""
    x = _look(at, queue, STAGES)
    _refill(at, queue, P, PER, STAGES)
    return x, at + 1


@gluon.jit
def _layer(state, a0, a1, a2, at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """All accumulators += the whole state times the next tiles, and the products are done."""
    a0, at = _row(state, a0, at, queue, P, PER, STAGES)
    if P > 1:
        a1, at = _row(state, a1, at, queue, P, PER, STAGES)
    if P > 2:
        a2, at = _row(state, a2, at, queue, P, PER, STAGES)
    a0, a1, a2 = warpgroup_mma_wait(0, deps=(a0, a1, a2))
    return a0, a1, a2, at


@gluon.jit
def _value_and_slope(x, ACTIVATION: gl.constexpr):
    """An activation and its derivative; GELU nearly, with (1 + tanh u)/2 for the normal distribution."""
    if ACTIVATION == "gelu":
        square = gl.minimum(x * x, 36.0)
        u = x * (0.7974639937671736 + square * (0.036984517932366484 - 0.0003428631901071833 * square))
        rise = 0.7974639937671736 + square * (3 * 0.036984517932366484 - 5 * 0.0003428631901071833 * square)
        t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [u], dtype=gl.float32, is_pure=True, pack=1)
        share = 0.5 * t + 0.5
        value = x * share
        return value, share + 2 * value * (1 - share) * rise
    else:
        positive = gl.where(x > 0, 1.0, 0.0)
        return x * positive, positive


@gluon.jit
def _lanes(x, WIDTH: gl.constexpr):
    """A tile with the columns of each 32 as threads hold them: columns 8 k + 2 l + e become 8 l + 2 k + e."""
    x = x.reshape([128, WIDTH // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([128, WIDTH])
    if WIDTH == 128:
        return gl.convert_layout(x, _LANES)
    else:
        return gl.convert_layout(x, _LANES_HALF)


@gluon.jit
def _own(x):
    """The columns of a tile in their own order again."""
    x = x.reshape([128, 4, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([128, 128])
    return gl.convert_layout(x, _TILE)


@gluon.jit
def _put(pointer, stride, x):
    """Write a tile of 128 columns from registers, in the order of `_lanes`."""
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, _LANES))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _LANES))
    gl.store(pointer + row[:, None] * stride + column[None, :], _lanes(x, 128))


@gluon.jit
def _put_half(pointer, stride, x):
    """Write a tile of 64 columns likewise."""
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, _LANES_HALF))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, _LANES_HALF))
    gl.store(pointer + row[:, None] * stride + column[None, :], _lanes(x, 64))


@gluon.jit
def _got(pointer):
    """A tile that `_put` has written with stride 128."""
    row = gl.arange(0, 128, layout=gl.SliceLayout(1, _LANES))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _LANES))
    return _own(gl.load(pointer + row[:, None] * 128 + column[None, :])).to(gl.float32)


@gluon.jit
def _settle():
    """What was stored in shared memory is seen by products and copies of all warps."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _idle():
    """The state may be written again: all copies from it are done, and all warps are here."""
    tma.store_wait(0)
    gl.thread_barrier()


@gluon.jit
def _send(work, state, line, P: gl.constexpr):
    """The state on its way to a line of the memory."""
    for j in gl.static_range(P):
        tma.async_copy_shared_to_global(work, [line * 128, j * 128], state.index(j))


@gluon.jit
def _load(tensor, state, loaded, line, phase, PIECES: gl.constexpr):
    """The state from a line of a matrix."""
    mbarrier.expect(loaded, PIECES * 128 * 128 * 2)
    for j in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(tensor, [line * 128, j * 128], loaded, state.index(j))
    mbarrier.wait(loaded, phase)
    return phase ^ 1


@gluon.jit
def _bend(a, state, slopes):
    """GELU into the state, its slope into memory."""
    value, slope = _value_and_slope(a, "gelu")
    state.store(value.to(gl.bfloat16))
    _put(slopes, 128, slope.to(gl.bfloat16))


@gluon.jit
def _read_back(
    state, read_drive, last, of_values, inner, outer, of_outer, of_inner, row0, read_row, read_period, at, queue,
    P: gl.constexpr, Q1: gl.constexpr, Q2: gl.constexpr, CHANNELS: gl.constexpr, ACTIVATION: gl.constexpr,
    PER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From the gradient of values to that before the first activation of the reading, with n in the state."""
    F1: gl.constexpr = Q1 // 2
    H1: gl.constexpr = Q1 % 2
    F2: gl.constexpr = Q2 // 2
    H2: gl.constexpr = Q2 % 2
    W1: gl.constexpr = Q1 * 64
    W2: gl.constexpr = Q2 * 64
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, _TILE))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))
    line_half = gl.arange(0, 128, layout=gl.SliceLayout(1, _HALF))
    column_half = gl.arange(0, 64, layout=gl.SliceLayout(0, _HALF))
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    a1 = a0
    h = gl.full([128, 64], 0.0, gl.float32, _HALF)
    for k in range(P):
        a0, at = _turn(state.index(k), a0, at, queue, P, PER, STAGES)
        if F1 > 1:
            a1, at = _turn(state.index(k), a1, at, queue, P, PER, STAGES)
        if H1:
            h, at = _turn(state.index(k), h, at, queue, P, PER, STAGES, 64)
    a0, a1, h = warpgroup_mma_wait(0, deps=(a0, a1, h))
    beside = read_drive + ((read_row + line) % read_period)[:, None] * W1 + column[None, :]
    value, slope = _value_and_slope(a0 + gl.load(beside), ACTIVATION)
    s0 = slope.to(gl.bfloat16)
    v0 = value.to(gl.bfloat16)
    _put(inner + row0 * W1, W1, v0)
    b0 = gl.convert_layout(v0, _LEFT)
    b1 = b0
    s1 = s0
    if F1 > 1:
        value, slope = _value_and_slope(a1 + gl.load(beside + 128), ACTIVATION)
        s1 = slope.to(gl.bfloat16)
        v0 = value.to(gl.bfloat16)
        _put(inner + row0 * W1 + 128, W1, v0)
        b1 = gl.convert_layout(v0, _LEFT)
    bh = gl.full([128, 64], 0.0, gl.bfloat16, _LEFT_HALF)
    sh = gl.full([128, 64], 0.0, gl.bfloat16, _HALF)
    if H1:
        at_half = read_drive + ((read_row + line_half) % read_period)[:, None] * W1 + F1 * 128 + column_half[None, :]
        value, slope = _value_and_slope(h + gl.load(at_half), ACTIVATION)
        sh = slope.to(gl.bfloat16)
        vh = value.to(gl.bfloat16)
        _put_half(inner + row0 * W1 + F1 * 128, W1, vh)
        bh = gl.convert_layout(vh, _LEFT_HALF)
    # Each part of the first width times its share of the second.
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    h = gl.full([128, 64], 0.0, gl.float32, _HALF)
    a0, at = _turn(b0, a0, at, queue, P, PER, STAGES)
    if H2:
        h, at = _turn(gl.convert_layout(b0, _LEFT_HALF), h, at, queue, P, PER, STAGES, 64)
    if F1 > 1:
        a0, at = _turn(b1, a0, at, queue, P, PER, STAGES)
        if H2:
            h, at = _turn(gl.convert_layout(b1, _LEFT_HALF), h, at, queue, P, PER, STAGES, 64)
    if H1:
        a0, at = _turn(gl.convert_layout(bh, _LEFT), a0, at, queue, P, PER, STAGES, 128, 64)
        if H2:
            h, at = _turn(bh, h, at, queue, P, PER, STAGES, 64, 64)
    a0, h = warpgroup_mma_wait(0, deps=(a0, h))
    # The last layer and the second activation, backwards.
    value, slope = _value_and_slope(a0, ACTIVATION)
    _put(outer + row0 * W2, W2, value.to(gl.bfloat16))
    g = gl.full([128, 128], 0.0, gl.float32, _TILE)
    for channel in gl.static_range(CHANNELS):
        of_value = gl.load(of_values + (row0 + line) * CHANNELS + channel)
        g += of_value[:, None] * gl.load(last + channel * W2 + column)[None, :]
    v0 = (g * slope).to(gl.bfloat16)
    _put(of_outer + row0 * W2, W2, v0)
    b0 = gl.convert_layout(v0, _LEFT)
    bh = gl.full([128, 64], 0.0, gl.bfloat16, _LEFT_HALF)
    if H2:
        value, slope_half = _value_and_slope(h, ACTIVATION)
        _put_half(outer + row0 * W2 + F2 * 128, W2, value.to(gl.bfloat16))
        h = gl.full([128, 64], 0.0, gl.float32, _HALF)
        for channel in gl.static_range(CHANNELS):
            of_value = gl.load(of_values + (row0 + line_half) * CHANNELS + channel)
            h += of_value[:, None] * gl.load(last + channel * W2 + F2 * 128 + column_half)[None, :]
        vh = (h * slope_half).to(gl.bfloat16)
        _put_half(of_outer + row0 * W2 + F2 * 128, W2, vh)
        bh = gl.convert_layout(vh, _LEFT_HALF)
    # The second layer backwards: from two parts, or one, to those of the first width.
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    a1 = a0
    h = gl.full([128, 64], 0.0, gl.float32, _HALF)
    a0, at = _turn(b0, a0, at, queue, P, PER, STAGES)
    if F1 > 1:
        a1, at = _turn(b0, a1, at, queue, P, PER, STAGES)
    if H1:
        h, at = _turn(gl.convert_layout(b0, _LEFT_HALF), h, at, queue, P, PER, STAGES, 64)
    if H2:
        a0, at = _turn(gl.convert_layout(bh, _LEFT), a0, at, queue, P, PER, STAGES, 128, 64)
        if F1 > 1:
            a1, at = _turn(gl.convert_layout(bh, _LEFT), a1, at, queue, P, PER, STAGES, 128, 64)
        if H1:
            h, at = _turn(bh, h, at, queue, P, PER, STAGES, 64, 64)
    a0, a1, h = warpgroup_mma_wait(0, deps=(a0, a1, h))
    WIDTH: gl.constexpr = P * 128
    _put(of_inner + row0 * WIDTH, WIDTH, (a0 * s0.to(gl.float32)).to(gl.bfloat16))
    if F1 > 1:
        _put(of_inner + row0 * WIDTH + 128, WIDTH, (a1 * s1.to(gl.float32)).to(gl.bfloat16))
    if H1:
        _put_half(of_inner + row0 * WIDTH + F1 * 128, WIDTH, (h * sh.to(gl.float32)).to(gl.bfloat16))
    # Copies that are asked for later see what this thread wrote to memory.
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [line], dtype=gl.int32, is_pure=False, pack=1
    )
    return at


@gluon.jit(
    do_not_specialize=[
        "count", "first", "shared_tiles", "read_period", "n_line", "line", "after_line", "inner_line", "hidden_line",
        "room",
    ]
)  # fmt: skip
def _back_kernel(
    n, work, schedule, slopes, scale, read_drive, last, of_values, inner, outer, of_outer, of_inner,
    count, first, shared_tiles, read_period, n_line, line, after_line, inner_line, hidden_line, room,
    P: gl.constexpr, Q1: gl.constexpr, Q2: gl.constexpr, STEPS: gl.constexpr, CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr, READ: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = P * 128
    F1: gl.constexpr = Q1 // 2
    H1: gl.constexpr = Q1 % 2
    R1: gl.constexpr = F1 + H1
    R2: gl.constexpr = Q2 // 2 + Q2 % 2
    READING: gl.constexpr = 2 * P * R1 + 2 * R1 * R2
    MARCHING: gl.constexpr = (2 * STEPS - 1) * P * P + 2 * P
    PER: gl.constexpr = P + (READING if READ else 0) + (MARCHING if STEP else 0)
    state = gl.allocate_shared_memory(gl.bfloat16, [P, 128, 128], _SHARED)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], _SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    _settle()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    mine = (count - program + programs - 1) // programs
    place = (program, programs, first, shared_tiles, n_line, after_line)
    queue = (n, work, ring, ready, schedule, PER * mine, place)
    for i in gl.static_range(STAGES):
        _fetch(n, work, ring, ready, schedule, i, True, place, P, PER, STAGES)
    loaded = ready.index(STAGES)
    slopes += program * ((STEPS - 1) * 128 * WIDTH)
    phase = 0
    at = 0
    for turn in range(mine):
        tile = program + turn * programs
        _idle()
        phase = _load(n, state, loaded, n_line + tile, phase, P)
        if READ:
            at = _read_back(
                state, read_drive, last, of_values, inner, outer, of_outer, of_inner, tile * 128,
                (first + tile) * 128, read_period, at, queue, P, Q1, Q2, CHANNELS, ACTIVATION, PER, STAGES,
            )  # fmt: skip
        a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
        a1 = a0
        a2 = a0
        if STEP:
            # The inner layers again; the first begins with its drive.
            a0, at = _take(at, queue, P, PER, STAGES)
            if P > 1:
                a1, at = _take(at, queue, P, PER, STAGES)
            if P > 2:
                a2, at = _take(at, queue, P, PER, STAGES)
            # Then back through all; one loop, since instructions that are met once have to be fetched as often.
            for stage in range(2 * STEPS - 1):
                a0, a1, a2, at = _layer(state, a0, a1, a2, at, queue, P, PER, STAGES)
                if stage < 2 * STEPS - 2:
                    again = stage < STEPS - 1
                    layer = stage if again else 2 * STEPS - 3 - stage
                    beside = slopes + layer * (128 * WIDTH)
                    _idle()
                    if again:
                        _bend(a0, state.index(0), beside)
                        if P > 1:
                            _bend(a1, state.index(1), beside + 128 * 128)
                        if P > 2:
                            _bend(a2, state.index(2), beside + 2 * 128 * 128)
                    else:
                        state.index(0).store((a0 * _got(beside)).to(gl.bfloat16))
                        if P > 1:
                            state.index(1).store((a1 * _got(beside + 128 * 128)).to(gl.bfloat16))
                        if P > 2:
                            state.index(2).store((a2 * _got(beside + 2 * 128 * 128)).to(gl.bfloat16))
                    _settle()
                    _send(work, state, hidden_line + (layer if again else STEPS - 1 + layer) * room + tile, P)
                    if stage == STEPS - 2:
                        _idle()
                        phase = _load(work, state, loaded, after_line + tile, phase, P)
                    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
                    a1 = a0
                    a2 = a0
        if READ:
            # What the reading adds to the gradient of n.
            _idle()
            phase = _load(work, state, loaded, inner_line + tile, phase, R1)
            for k in range(F1):
                a0, at = _turn(state.index(k), a0, at, queue, P, PER, STAGES)
            if H1:
                a0, at = _turn(state.index(F1).slice(0, 64, dim=1), a0, at, queue, P, PER, STAGES, 128, 64)
            if P > 1:
                for k in range(F1):
                    a1, at = _turn(state.index(k), a1, at, queue, P, PER, STAGES)
                if H1:
                    a1, at = _turn(state.index(F1).slice(0, 64, dim=1), a1, at, queue, P, PER, STAGES, 128, 64)
            if P > 2:
                for k in range(F1):
                    a2, at = _turn(state.index(k), a2, at, queue, P, PER, STAGES)
                if H1:
                    a2, at = _turn(state.index(F1).slice(0, 64, dim=1), a2, at, queue, P, PER, STAGES, 128, 64)
            a0, a1, a2 = warpgroup_mma_wait(0, deps=(a0, a1, a2))
        # It loses its parts along the constant and along n, which the normalization does not feel.
        constant = gl.sum(a0, 1)
        along = gl.sum(a0 * _look(at, queue, STAGES), 1)
        if P > 1:
            constant += gl.sum(a1, 1)
            along += gl.sum(a1 * _look(at + 1, queue, STAGES), 1)
        if P > 2:
            constant += gl.sum(a2, 1)
            along += gl.sum(a2 * _look(at + 2, queue, STAGES), 1)
        inverse = gl.load(scale + tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, _TILE)))
        constant = constant * (inverse / WIDTH)
        along = along * (inverse / WIDTH)
        x, at = _take(at, queue, P, PER, STAGES)
        a0 = a0 * inverse[:, None] - constant[:, None] - x * along[:, None]
        if P > 1:
            x, at = _take(at, queue, P, PER, STAGES)
            a1 = a1 * inverse[:, None] - constant[:, None] - x * along[:, None]
        if P > 2:
            x, at = _take(at, queue, P, PER, STAGES)
            a2 = a2 * inverse[:, None] - constant[:, None] - x * along[:, None]
        if STEP:
            x, at = _take(at, queue, P, PER, STAGES)
            a0 += x
            if P > 1:
                x, at = _take(at, queue, P, PER, STAGES)
                a1 += x
            if P > 2:
                x, at = _take(at, queue, P, PER, STAGES)
                a2 += x
        _idle()
        state.index(0).store(a0.to(gl.bfloat16))
        if P > 1:
            state.index(1).store(a1.to(gl.bfloat16))
        if P > 2:
            state.index(2).store(a2.to(gl.bfloat16))
        _settle()
        _send(work, state, line + tile, P)
    tma.store_wait(0)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))
