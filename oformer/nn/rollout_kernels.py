"""A latent rollout on a Hopper GPU: residual point-wise networks that march and are read at each step, on the chip.

With normalized latents n = (z - mean z) / std z a step and a reading are

    z' = z + W_L gelu(... gelu(W_1 n + drive)),      values' = R_3 a(R_2 a(R_1 n' + read drive)) + bias

where the affine part of the layer norms is folded into W_1, R_1 and the drives by the caller. No point sees another, so
a program takes 128 points through all steps. Their activations stay in shared memory (the "state") and in registers,
while the weights stream past in tiles of 128 x 128 through a ring of four places, filled by asynchronous copies. Which
tile comes when is a schedule, a table that the host writes in the order in which a kernel takes them.

Everything that comes in tiles lies in one "arena" of bfloat16 numbers, as wide as the latents: weights, drives, latents
(as float16, which rounds eight times finer), n of each step. To go back only n is needed, and 1 / std: inner layers are
computed again, but not the last of a step. That takes one step at a time, for some of the points: `_read_back_kernel`
and `_step_back_kernel` leave activations and gradients in the arena, whose products are the gradients of the weights,
added up in float32.

Products are bfloat16 with sums in float32; sums over channels and times are float32 throughout. The plain twin is
`OFormer.propagate` and `decode`; tests hold the two equal, values and gradients.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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

_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_TILE, k_width=2))
_LEFT_HALF = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_HALF, k_width=2))

SIDE = 128  # of a tile; products of it keep the tensor cores busy while the next one is on its way
_STAGES = 4  # places of the ring; they and the state fill the shared memory
_CHUNK = 256  # tiles of points that go back together: bounds the memory for activations and gradients


class Chain(NamedTuple):
    """A network without its first normalization: matrices (out, in), and what is added after the first."""

    weights: tuple[Tensor, ...]
    drive: Tensor  # (rows, width) where rows divides the number of latents: one, a grid shared by samples, or all
    activation: str  # gelu or relu


def supported(device: torch.device, step: Sequence[tuple[int, int]], read: Sequence[tuple[int, int]]) -> bool:
    """Whether kernels exist for networks with matrices of these shapes (out, in) on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    width = step[0][1]
    if width not in (2 * SIDE, 3 * SIDE) or len(step) < 2 or any(shape != (width, width) for shape in step):
        return False
    if len(read) != 3 or any(shape[0] % (SIDE // 2) for shape in read[:2]):
        return False
    inner, outer = read[0][0], read[1][0]
    return SIDE <= inner <= width and SIDE <= outer < 2 * SIDE and read[2][0] <= 8


def march(z: Tensor, step: Chain, read: Chain, bias: Tensor, times: int, epsilon: float) -> Tensor:
    """Values (times, rows, channels) in float32 at each step after latents z (rows, width).

    Args:
        z: latents at the start.
        step: the network of a step, with GELUs; its last matrix returns to the width of z.
        read: the network that reads values, of three matrices.
        bias: of the values.
        times: number of steps.
        epsilon: of the normalization.
    """
    rows = len(z)
    padded = -rows % SIDE
    drives = [_fitting(chain.drive, rows) for chain in (step, read)]
    if padded:
        z = torch.nn.functional.pad(z, (0, 0, 0, padded))
        drives = [torch.nn.functional.pad(d, (0, 0, 0, padded)) if len(d) == rows else d for d in drives]
    shape = _Shape(z.shape[1] // SIDE, len(step.weights), len(read.weights[0]), len(read.weights[1]), len(bias))
    plan = _Plan(shape, times, epsilon, read.activation, torch.is_grad_enabled())
    return _March.apply(plan, z, *drives, bias, *step.weights, *read.weights)[:, :rows]  # pyright: ignore


def _fitting(drive: Tensor, rows: int) -> Tensor:
    """A drive whose rows repeat in whole tiles, or not at all."""
    if len(drive) in (1, rows) or len(drive) % SIDE == 0:
        return drive
    return drive.repeat(rows // len(drive), 1)


class _Shape(NamedTuple):
    """Sizes that kernels are compiled for."""

    pieces: int  # tiles across the latents
    steps: int  # matrices of a step
    inner: int  # widths that are read through
    outer: int
    channels: int

    def constants(self) -> dict[str, int]:
        return {"P": self.pieces, "Q1": self.inner // 64, "Q2": self.outer // 64, "CHANNELS": self.channels}

    @property
    def parts(self) -> tuple[int, int]:
        """Tiles, the last of which may be half full, across the widths that are read through."""
        return -(-self.inner // SIDE), -(-self.outer // SIDE)


class _Plan(NamedTuple):
    shape: _Shape
    times: int
    epsilon: float
    activation: str
    keep: bool


class _Arena(NamedTuple):
    """Where things lie, in lines of tiles."""

    memory: Tensor
    drive: int
    latents: int
    n: int
    scratch: int  # activations, slopes and gradients of the inner layers, the gradients of n and, twice, of z

    @property
    def tiles(self) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.memory, [SIDE, SIDE], _SHARED.value)

    def lines(self, first: int, count: int) -> Tensor:
        """A part of it as a matrix."""
        return self.memory[first * SIDE : (first + count) * SIDE]


class _March(torch.autograd.Function):
    """The rollout with its gradient."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, z: Tensor, drive: Tensor, read_drive: Tensor, bias: Tensor, *weights: Tensor):
        shape = plan.shape
        rows, width = z.shape
        tiles = rows // SIDE
        tape = _tape(shape, weights)
        shared = drive if len(drive) > 1 else drive.expand(SIDE, -1)
        tape_lines, drive_lines = len(tape) // SIDE, len(shared) // SIDE
        kept = (plan.times + 1) * tiles if plan.keep else 0
        scratch = (3 * (shape.steps - 1) + 3) * _chunk(tiles, drive_lines) if plan.keep else 0
        memory = z.new_empty((tape_lines + drive_lines + tiles + kept + scratch) * SIDE, width, dtype=torch.bfloat16)
        first = tape_lines + drive_lines
        arena = _Arena(memory, tape_lines, first, first + tiles, first + tiles + kept)
        arena.lines(0, tape_lines).copy_(tape)
        arena.lines(arena.drive, drive_lines).copy_(shared)
        scale = z.new_empty(plan.times + 1 if plan.keep else 1, rows, dtype=torch.float32)
        values = z.new_empty(plan.times, rows, shape.channels, dtype=torch.float32)
        floats = [x.detach().float().contiguous() for x in (read_drive, weights[-1], bias)]
        _march_kernel[(tiles,)](
            arena.tiles, _forward_schedule(shape, arena.drive, arena.latents, z.device),
            z.detach().float().contiguous(),
            arena.lines(arena.latents, tiles).view(torch.float16), scale, *floats, values,
            rows, tiles, drive_lines, len(read_drive), arena.n, plan.times, plan.epsilon,
            **shape.constants(), STEPS=shape.steps, ACTIVATION=plan.activation, KEEP=plan.keep, STAGES=_STAGES,
            num_warps=8,
        )  # fmt: skip
        ctx.plan, ctx.places, ctx.drive_lines = plan, arena[1:], drive_lines
        ctx.save_for_backward(memory, scale, read_drive, drive, *weights)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        plan: _Plan = ctx.plan
        memory, scale, read_drive, drive, *weights = ctx.saved_tensors
        arena, values = _Arena(memory, *ctx.places), gradients[0].contiguous()
        rows, width = values.shape[1], memory.shape[1]
        start = memory.new_empty(rows, width, dtype=torch.float32)
        sums = [torch.zeros(w.shape, device=w.device) for w in weights]
        drives = [torch.zeros(d.shape, device=d.device) for d in (drive, read_drive)]
        tiles = rows // SIDE
        chunk = _chunk(tiles, ctx.drive_lines)
        for first in range(0, tiles, chunk):
            part = _Part(plan, arena, scale, values, first, min(chunk, tiles - first), chunk)
            part.back(read_drive, weights, ctx.drive_lines, sums, drives, start)
        return (
            None,
            start,
            *drives,
            values.sum((0, 1)),
            *(total.to(w.dtype) for total, w in zip(sums, weights, strict=True)),
        )


class _Part(NamedTuple):
    """Some of the points on their way back."""

    plan: _Plan
    arena: _Arena
    scale: Tensor
    values: Tensor  # their gradient
    first: int  # tile of points
    count: int
    room: int  # tiles of points that the scratch holds

    def back(
        self,
        read_drive: Tensor,
        weights: Sequence[Tensor],
        drive_lines: int,
        sums: Sequence[Tensor],
        drives: Sequence[Tensor],
        start: Tensor,
    ) -> None:
        """March back in time, and add to the gradients of weights and drives.

        Args:
            read_drive: of the reading.
            weights: all matrices.
            drive_lines: tiles after which the drive of a step repeats.
            sums: the gradients of the matrices.
            drives: the gradients of both drives.
            start: gets the gradient of the latents at the start.
        """
        plan, arena, shape, room = self.plan, self.arena, self.plan.shape, self.room
        rows, tiles = self.count * SIDE, self.values.shape[1] // SIDE
        here = slice(self.first * SIDE, self.first * SIDE + rows)
        inner_layers = shape.steps - 1
        hidden, slopes, before = (arena.scratch + i * inner_layers * room for i in range(3))
        of_n, total, spare = (arena.scratch + (3 * inner_layers + i) * room for i in range(3))
        new = functools.partial(arena.memory.new_empty, rows)
        inner, inner_gradient, outer, outer_gradient = (new(n) for n in (*[shape.inner] * 2, *[shape.outer] * 2))
        floats = [x.detach().float().contiguous() for x in (read_drive, weights[-1])]
        tape = arena.tiles
        matrix = functools.partial(arena.lines, count=self.count)
        last = len(weights) - 1
        for t in range(plan.times, -1, -1):
            n = matrix(arena.n + t * tiles + self.first)
            if t > 0:
                gradient = self.values[t - 1, here]
                _read_back_kernel[(self.count,)](
                    tape, _read_schedule(shape, gradient.device), *floats, gradient,
                    inner, inner_gradient, outer, outer_gradient,
                    tiles, self.first, len(read_drive), arena.n, of_n, t,
                    **shape.constants(), ACTIVATION=plan.activation, STAGES=_STAGES, num_warps=8,
                )  # fmt: skip
                _add_product(sums[last], gradient.bfloat16(), outer)
                _add_product(sums[last - 1], outer_gradient, inner)
                _add_product(sums[last - 2], inner_gradient, n)
                _add_drive(drives[1], inner_gradient, here)
            if t == plan.times:
                matrix(total).copy_(_through_norm(matrix(of_n), n, self.scale[t, here]))
                continue
            places = (arena.drive, arena.n, tiles, slopes, room, of_n, total)
            _step_back_kernel[(self.count,)](
                tape, _step_schedule(shape, places, t > 0, n.device), self.scale, 0.0,
                tiles, room, self.first, drive_lines, arena.n, total, spare, hidden, slopes, before, t,
                P=shape.pieces, STEPS=shape.steps, ADD=t > 0, STAGES=_STAGES, num_warps=8,
            )  # fmt: skip
            layers = [n, *(matrix(hidden + i * room) for i in range(inner_layers))]
            of_layers = [*(matrix(before + i * room) for i in range(inner_layers)), matrix(total)]
            for weight, into, out in zip(sums, layers, of_layers, strict=False):
                _add_product(weight, out, into)
            _add_drive(drives[0], of_layers[0], here)
            total, spare = spare, total
        start[here] = matrix(total)


def _add_product(total: Tensor, out: Tensor, into: Tensor) -> None:
    """The gradient of a matrix: a sum over rows, in float32."""
    torch.addmm(total, out.T, into, out_dtype=torch.float32, out=total)


def _add_drive(total: Tensor, gradient: Tensor, here: slice) -> None:
    """The gradient of a drive, which some rows may share; a product with ones is the fastest sum over them."""
    period = len(total)
    if period == 1 or len(gradient) > period:
        shared = gradient.view(-1, total.numel())
        ones = shared.new_ones(len(shared), 1)
        _add_product(total.view(1, -1), ones, shared)
    else:
        total[here.start % period : here.start % period + len(gradient)] += gradient


def _through_norm(gradient: Tensor, n: Tensor, scale: Tensor) -> Tensor:
    """The gradient of z from that of n: it loses its parts along the constant and along n."""
    g, n = gradient.float(), n.float()
    return scale.unsqueeze(1) * (g - g.mean(1, keepdim=True) - n * (g * n).mean(1, keepdim=True))


def _chunk(tiles: int, drive_lines: int) -> int:
    """Tiles of points that go back together: whole periods of the drive, or a whole part of one."""
    if drive_lines <= _CHUNK:
        return min(max(_CHUNK // drive_lines, 1) * drive_lines, tiles)
    return next(n for n in range(_CHUNK, 0, -1) if drive_lines % n == 0)


def _tiles(weight: Tensor, rows_first: bool) -> Tensor:
    """A matrix in tiles, filled up with zeros: row by row, or column by column."""
    out, into = weight.shape
    full = torch.nn.functional.pad(weight, (0, -into % SIDE, 0, -out % SIDE))
    apart = full.unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))  # (out, SIDE, in, SIDE)
    return apart.permute((0, 2, 1, 3) if rows_first else (2, 0, 1, 3)).flatten(0, 1)


def _tape(shape: _Shape, weights: Sequence[Tensor]) -> Tensor:
    """All matrices in tiles, forward and backward, in lines of the arena."""
    *step, first, second = [w.detach() for w in weights[:-1]]
    parts = [_tiles(w, True) for w in step] + [_tiles(w, False) for w in (first, second)]
    parts += [_tiles(w.T, True) for w in reversed(step)] + [_tiles(second.T, False), _tiles(first.T, True)]
    tape = torch.cat(parts)
    fill = -len(tape) % shape.pieces
    tape = torch.nn.functional.pad(tape, (0, 0, 0, 0, 0, fill))
    return tape.unflatten(0, (-1, shape.pieces)).transpose(1, 2).flatten(2).flatten(0, 1)


class _Entries:
    """A schedule in the making: number of a tile = base + strides . (program, tile of points, shared tile, time)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []

    def add(self, base: int, count: int, program: int = 0, tile: int = 0, shared: int = 0, time: int = 0) -> None:
        self.rows += [(base + i, program, tile, shared, time) for i in range(count)]

    def on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int32, device=device)


class _Numbers(NamedTuple):
    """Where matrices begin on the tape, in tiles."""

    read: int
    back: int
    read_back: int

    @classmethod
    def of(cls, shape: _Shape) -> "_Numbers":
        square, (inner, outer) = shape.pieces**2, shape.parts
        read = shape.steps * square
        back = read + shape.pieces * inner + inner * outer
        return cls(read, back, back + shape.steps * square)


# Schedules are made once for each arrangement: a captured graph cannot copy from the host.
@functools.lru_cache(maxsize=256)
def _forward_schedule(shape: _Shape, drive: int, latents: int, device: torch.device) -> Tensor:
    """For each step: the drive, the inner layers, the latents, the last layer, and what is read."""
    p, square, entries, numbers = shape.pieces, shape.pieces**2, _Entries(), _Numbers.of(shape)
    entries.add(drive * p, p, shared=p)
    entries.add(0, (shape.steps - 1) * square)
    entries.add(latents * p, p, tile=p)
    entries.add((shape.steps - 1) * square, square)
    entries.add(numbers.read, numbers.back - numbers.read)
    return entries.on(device)


@functools.lru_cache(maxsize=256)
def _step_schedule(shape: _Shape, places: tuple[int, ...], add: bool, device: torch.device) -> Tensor:
    """The inner layers again; back through all layers, with slopes; the gradient of n, then n, and that of z."""
    drive, n, tiles, slopes, room, of_n, total = places
    p, square, entries, numbers = shape.pieces, shape.pieces**2, _Entries(), _Numbers.of(shape)
    entries.add(drive * p, p, shared=p)
    entries.add(0, (shape.steps - 1) * square)
    for i in range(shape.steps - 1):
        entries.add(numbers.back + i * square, square)
        entries.add((slopes + (shape.steps - 2 - i) * room) * p, p, program=p)
    if add:
        entries.add(of_n * p, p, program=p)
    entries.add(numbers.back + (shape.steps - 1) * square, square)
    entries.add(n * p, p, tile=p, time=tiles * p)
    for j in range(p):
        entries.add(n * p + j, 1, tile=p, time=tiles * p)
        entries.add(total * p + j, 1, program=p)
    return entries.on(device)


@functools.lru_cache(maxsize=256)
def _read_schedule(shape: _Shape, device: torch.device) -> Tensor:
    """Both layers again, and back through both."""
    entries, numbers = _Entries(), _Numbers.of(shape)
    entries.add(numbers.read, numbers.back - numbers.read)
    entries.add(numbers.read_back, numbers.back - numbers.read)
    return entries.on(device)


@gluon.jit
def _fetch(
    arena, ring, ready, schedule, item, wanted, program, first, shared_tiles, time,
    P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of the schedule."""
    slot = item % STAGES
    entry = schedule + (item % PER) * 5
    tile = first + program
    number = gl.load(entry) + program * gl.load(entry + 1) + tile * gl.load(entry + 2)
    number += (tile % shared_tiles) * gl.load(entry + 3) + (item // PER + time) * gl.load(entry + 4)
    mbarrier.expect(ready.index(slot), 128 * 128 * 2, pred=wanted)
    tma.async_copy_global_to_shared(
        arena, [number // P * 128, number % P * 128], ready.index(slot), ring.index(slot), pred=wanted
    )


@gluon.jit
def _refill(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """Fill the place of the tile before the present one again."""
    arena, ring, ready, schedule, total, program, first, shared_tiles, time = queue
    ahead = at + (STAGES - 1)
    _fetch(
        arena, ring, ready, schedule, ahead, (ahead < total) & (at > 0), program, first, shared_tiles, time, P, PER,
        STAGES,
    )  # fmt: skip


@gluon.jit
def _turn(
    a, acc, at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr, OUT: gl.constexpr = 128,
    INTO: gl.constexpr = 128,
):  # fmt: skip
    """acc += a (next tile)^T; the place of the tile before it is filled again."""
    ring, ready = queue[1], queue[2]
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
def _take(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr):
    """The next tile as numbers; no product may be under way."""
    ring, ready = queue[1], queue[2]
    slot = at % STAGES
    mbarrier.wait(ready.index(slot), (at // STAGES) & 1)
    if KIND == "half":
        x = ring.index(slot)._reinterpret(gl.float16, [128, 128], _SHARED).load(_TILE).to(gl.float32)
    else:
        x = ring.index(slot).load(_TILE).to(gl.float32)
    _refill(at, queue, P, PER, STAGES)
    return x, at + 1


@gluon.jit
def _sigmoid(x):
    """Phi(x) nearly, as (1 + tanh u)/2, and u'."""
    square = gl.minimum(x * x, 36.0)
    u = x * (0.7974639937671736 + square * (0.036984517932366484 - 0.0003428631901071833 * square))
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [u], dtype=gl.float32, is_pure=True, pack=1)
    return 0.5 * t + 0.5, 0.7974639937671736 + square * (3 * 0.036984517932366484 - 5 * 0.0003428631901071833 * square)


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "gelu":
        phi, _ = _sigmoid(x)
        return x * phi
    else:
        return gl.maximum(x, 0.0)


@gluon.jit
def _activate_and_slope(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "gelu":
        phi, rise = _sigmoid(x)
        value = x * phi
        return value, phi + 2 * value * (1 - phi) * rise
    else:
        positive = gl.where(x > 0, 1.0, 0.0)
        return x * positive, positive


@gluon.jit
def _seen_by_copies(row):
    """What this thread wrote to memory is seen by copies that are asked for later."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [row], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _settle():
    """What was stored in shared memory is seen by products and copies of all warps."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _begin(STAGES: gl.constexpr, P: gl.constexpr):
    state = gl.allocate_shared_memory(gl.bfloat16, [P, 128, 128], _SHARED)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 128], _SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return state, ring, ready


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
def _take_row(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr):
    """The next tiles as numbers, one for each accumulator."""
    a0, at = _take(at, queue, P, PER, STAGES, KIND)
    a1 = a0
    a2 = a0
    if P > 1:
        a1, at = _take(at, queue, P, PER, STAGES, KIND)
    if P > 2:
        a2, at = _take(at, queue, P, PER, STAGES, KIND)
    return a0, a1, a2, at


@gluon.jit
def _load_state(arena, state, loaded, line, P: gl.constexpr):
    """Ask for the state from a line of the arena."""
    mbarrier.expect(loaded, P * 128 * 128 * 2)
    for j in gl.static_range(P):
        tma.async_copy_global_to_shared(arena, [line * 128, j * 128], loaded, state.index(j))


@gluon.jit
def _send_state(arena, state, line, P: gl.constexpr):
    """The state on its way to a line of the arena."""
    for j in gl.static_range(P):
        tma.async_copy_shared_to_global(arena, [line * 128, j * 128], state.index(j))


@gluon.jit
def _store_state(arena, state, a0, a1, a2, line, P: gl.constexpr):
    """Numbers into the state, and on their way to a line of the arena."""
    state.index(0).store(a0.to(gl.bfloat16))
    if P > 1:
        state.index(1).store(a1.to(gl.bfloat16))
    if P > 2:
        state.index(2).store(a2.to(gl.bfloat16))
    _settle()
    _send_state(arena, state, line, P)


@gluon.jit
def _stored():
    """Wait until copies to the arena have arrived there, not only left."""
    one = gl.full([128], 0, gl.int32, gl.SliceLayout(1, _TILE))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, $1;", "=r,r", [one], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


@gluon.jit
def _slope(x):
    """The derivative of GELU, nearly."""
    phi, rise = _sigmoid(x)
    return phi + 2 * x * phi * (1 - phi) * rise


@gluon.jit
def _normalize(a0, a1, a2, state, scale, epsilon, P: gl.constexpr, KEEP: gl.constexpr):
    """Latents, normalized, into the state."""
    WIDTH: gl.constexpr = P * 128
    mean = gl.sum(a0, 1)
    if P > 1:
        mean += gl.sum(a1, 1)
    if P > 2:
        mean += gl.sum(a2, 1)
    mean = mean * (1 / WIDTH)
    a0 -= mean[:, None]
    square = gl.sum(a0 * a0, 1)
    if P > 1:
        a1 -= mean[:, None]
        square += gl.sum(a1 * a1, 1)
    if P > 2:
        a2 -= mean[:, None]
        square += gl.sum(a2 * a2, 1)
    inverse = gl.rsqrt(square * (1 / WIDTH) + epsilon)
    gl.thread_barrier()
    state.index(0).store((a0 * inverse[:, None]).to(gl.bfloat16))
    if P > 1:
        state.index(1).store((a1 * inverse[:, None]).to(gl.bfloat16))
    if P > 2:
        state.index(2).store((a2 * inverse[:, None]).to(gl.bfloat16))
    _settle()
    if KEEP:
        gl.store(scale, inverse)


@gluon.jit(do_not_specialize=["rows", "tiles", "shared_tiles", "read_period", "n_line", "times"])
def _march_kernel(
    arena, schedule, start, z, scale, read_drive, last, bias, values, rows, tiles, shared_tiles, read_period, n_line,
    times, epsilon, P: gl.constexpr, Q1: gl.constexpr, Q2: gl.constexpr, STEPS: gl.constexpr, CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = P * 128
    # Widths that are read through, in halves of a tile: full tiles and perhaps one half.
    F1: gl.constexpr = Q1 // 2
    H1: gl.constexpr = Q1 % 2
    F2: gl.constexpr = Q2 // 2
    H2: gl.constexpr = Q2 % 2
    PER: gl.constexpr = P * P * STEPS + 2 * P + P * (F1 + H1) + (F1 + H1) * (F2 + H2)
    state, ring, ready = _begin(STAGES, P)
    program = gl.program_id(0)
    queue = (arena, ring, ready, schedule, PER * times, program, 0, shared_tiles, 1)
    for i in gl.static_range(STAGES):
        _fetch(arena, ring, ready, schedule, i, True, program, 0, shared_tiles, 1, P, PER, STAGES)
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, _TILE))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))
    row = program * 128 + line
    where = row[:, None] * WIDTH + column[None, :]
    kept = z + where
    at = 0
    a0 = gl.load(start + where)
    gl.store(kept, a0.to(gl.float16))
    a1 = a0
    a2 = a0
    if P > 1:
        a1 = gl.load(start + where + 128)
        gl.store(kept + 128, a1.to(gl.float16))
    if P > 2:
        a2 = gl.load(start + where + 256)
        gl.store(kept + 256, a2.to(gl.float16))
    _seen_by_copies(row)
    _normalize(a0, a1, a2, state, scale + row, epsilon, P, KEEP)
    if KEEP:
        _send_state(arena, state, n_line + program, P)
    for t in range(1, times + 1):
        # The inner layers of a step; the first begins with its drive.
        for layer in range(STEPS - 1):
            a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
            a1 = a0
            a2 = a0
            if layer == 0:
                a0, a1, a2, at = _take_row(at, queue, P, PER, STAGES, "plain")
            a0, a1, a2, at = _layer(state, a0, a1, a2, at, queue, P, PER, STAGES)
            if KEEP:
                tma.store_wait(0)
            gl.thread_barrier()
            state.index(0).store(_activate(a0, "gelu").to(gl.bfloat16))
            if P > 1:
                state.index(1).store(_activate(a1, "gelu").to(gl.bfloat16))
            if P > 2:
                state.index(2).store(_activate(a2, "gelu").to(gl.bfloat16))
            _settle()
        # The last layer adds to the latents.
        a0, a1, a2, at = _take_row(at, queue, P, PER, STAGES, "half")
        a0, a1, a2, at = _layer(state, a0, a1, a2, at, queue, P, PER, STAGES)
        gl.store(kept, a0.to(gl.float16))
        if P > 1:
            gl.store(kept + 128, a1.to(gl.float16))
        if P > 2:
            gl.store(kept + 256, a2.to(gl.float16))
        _seen_by_copies(row)
        _normalize(a0, a1, a2, state, scale + t * rows + row, epsilon, P, KEEP)
        if KEEP:
            _send_state(arena, state, n_line + t * tiles + program, P)
        # What is read of them; the state stays for the next step.
        a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
        a1 = a0
        h = gl.full([128, 64], 0.0, gl.float32, _HALF)
        for k in range(P):
            if F1 > 0:
                a0, at = _turn(state.index(k), a0, at, queue, P, PER, STAGES)
            if F1 > 1:
                a1, at = _turn(state.index(k), a1, at, queue, P, PER, STAGES)
            if H1:
                h, at = _turn(state.index(k), h, at, queue, P, PER, STAGES, 64)
        a0, a1, h = warpgroup_mma_wait(0, deps=(a0, a1, h))
        beside = read_drive + (row % read_period)[:, None] * (Q1 * 64) + column[None, :]
        row_half = program * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, _HALF))
        column_half = gl.arange(0, 64, layout=gl.SliceLayout(0, _HALF))
        b0 = gl.convert_layout(_activate(a0 + gl.load(beside), ACTIVATION).to(gl.bfloat16), _LEFT)
        b1 = b0
        if F1 > 1:
            b1 = gl.convert_layout(_activate(a1 + gl.load(beside + 128), ACTIVATION).to(gl.bfloat16), _LEFT)
        bh = gl.full([128, 64], 0.0, gl.bfloat16, _LEFT_HALF)
        if H1:
            at_half = read_drive + (row_half % read_period)[:, None] * (Q1 * 64) + F1 * 128 + column_half[None, :]
            bh = gl.convert_layout(_activate(h + gl.load(at_half), ACTIVATION).to(gl.bfloat16), _LEFT_HALF)
        # Each part of the first width times its share of the second.
        a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
        h = gl.full([128, 64], 0.0, gl.float32, _HALF)
        if F2 > 0:
            a0, at = _turn(b0, a0, at, queue, P, PER, STAGES)
        if H2:
            h, at = _turn(gl.convert_layout(b0, _LEFT_HALF), h, at, queue, P, PER, STAGES, 64)
        if F1 > 1:
            if F2 > 0:
                a0, at = _turn(b1, a0, at, queue, P, PER, STAGES)
            if H2:
                h, at = _turn(gl.convert_layout(b1, _LEFT_HALF), h, at, queue, P, PER, STAGES, 64)
        if H1:
            if F2 > 0:
                a0, at = _turn(gl.convert_layout(bh, _LEFT), a0, at, queue, P, PER, STAGES, 128, 64)
            if H2:
                h, at = _turn(bh, h, at, queue, P, PER, STAGES, 64, 64)
        a0, h = warpgroup_mma_wait(0, deps=(a0, h))
        a0 = _activate(a0, ACTIVATION)
        h = _activate(h, ACTIVATION)
        for channel in gl.static_range(CHANNELS):
            weight = last + channel * (Q2 * 64)
            value = gl.sum(a0 * gl.load(weight + column)[None, :], 1)
            if H2:
                more = gl.sum(h * gl.load(weight + F2 * 128 + column_half)[None, :], 1)
                value += gl.convert_layout(more, gl.SliceLayout(1, _TILE))
            value += gl.load(bias + channel)
            gl.store(values + ((t - 1) * rows + row) * CHANNELS + channel, value)
    if KEEP:
        tma.store_wait(0)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))


@gluon.jit(
    do_not_specialize=[
        "tiles", "chunk", "first", "shared_tiles", "n_line", "total_line", "new_total_line", "hidden_line",
        "slope_line", "gradient_line", "t",
    ]
)  # fmt: skip
def _step_back_kernel(
    arena, schedule, scale, nothing,
    tiles, chunk, first, shared_tiles, n_line, total_line, new_total_line, hidden_line, slope_line, gradient_line,
    t,
    P: gl.constexpr, STEPS: gl.constexpr, ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From the gradient of the latents after step t + 1 to that before it.

    Inner layers are computed again from n of time t; their outputs and the gradients before their activations go to
    the arena, for the gradients of the weights.
    """
    WIDTH: gl.constexpr = P * 128
    PER: gl.constexpr = P + P * P * (2 * STEPS - 1) + P * (STEPS - 1) + P * (4 if ADD else 3)
    state, ring, ready = _begin(STAGES, P)
    program = gl.program_id(0)
    queue = (arena, ring, ready, schedule, PER, program, first, shared_tiles, t)
    loaded = ready.index(STAGES)
    _load_state(arena, state, loaded, n_line + t * tiles + first + program, P)
    for i in gl.static_range(STAGES):
        _fetch(arena, ring, ready, schedule, i, True, program, first, shared_tiles, t, P, PER, STAGES)
    line = gl.arange(0, 128, layout=gl.SliceLayout(1, _TILE))
    at = 0
    mbarrier.wait(loaded, 0)
    a0, a1, a2, at = _take_row(at, queue, P, PER, STAGES, "plain")
    for layer in range(STEPS - 1):
        a0, a1, a2, at = _layer(state, a0, a1, a2, at, queue, P, PER, STAGES)
        tma.store_wait(0)
        gl.thread_barrier()
        state.index(0).store(_slope(a0).to(gl.bfloat16))
        if P > 1:
            state.index(1).store(_slope(a1).to(gl.bfloat16))
        if P > 2:
            state.index(2).store(_slope(a2).to(gl.bfloat16))
        _settle()
        _send_state(arena, state, slope_line + layer * chunk + program, P)
        _stored()
        # The compiler would keep, in registers that are not there, what it knows of the same numbers.
        state.index(0).store(_activate(a0 + nothing, "gelu").to(gl.bfloat16))
        if P > 1:
            state.index(1).store(_activate(a1 + nothing, "gelu").to(gl.bfloat16))
        if P > 2:
            state.index(2).store(_activate(a2 + nothing, "gelu").to(gl.bfloat16))
        _settle()
        _send_state(arena, state, hidden_line + layer * chunk + program, P)
        a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
        a1 = a0
        a2 = a0
    tma.store_wait(0)
    gl.thread_barrier()
    _load_state(arena, state, loaded, total_line + program, P)
    mbarrier.wait(loaded, 1)
    for back in range(STEPS - 1):
        a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
        a0, a1, a2, at = _layer(state, a0, a0, a0, at, queue, P, PER, STAGES)
        tma.store_wait(0)
        gl.thread_barrier()
        x, at = _take(at, queue, P, PER, STAGES, "plain")
        state.index(0).store((a0 * x).to(gl.bfloat16))
        if P > 1:
            x, at = _take(at, queue, P, PER, STAGES, "plain")
            state.index(1).store((a1 * x).to(gl.bfloat16))
        if P > 2:
            x, at = _take(at, queue, P, PER, STAGES, "plain")
            state.index(2).store((a2 * x).to(gl.bfloat16))
        _settle()
        _send_state(arena, state, gradient_line + (STEPS - 2 - back) * chunk + program, P)
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    a1 = a0
    a2 = a0
    if ADD:
        a0, a1, a2, at = _take_row(at, queue, P, PER, STAGES, "plain")
    a0, a1, a2, at = _layer(state, a0, a1, a2, at, queue, P, PER, STAGES)
    # The gradient of n loses its parts along the constant and along n, which the normalization does not feel.
    constant = gl.sum(a0, 1)
    x, at = _take(at, queue, P, PER, STAGES, "plain")
    along = gl.sum(a0 * x, 1)
    if P > 1:
        constant += gl.sum(a1, 1)
        x, at = _take(at, queue, P, PER, STAGES, "plain")
        along += gl.sum(a1 * x, 1)
    if P > 2:
        constant += gl.sum(a2, 1)
        x, at = _take(at, queue, P, PER, STAGES, "plain")
        along += gl.sum(a2 * x, 1)
    inverse = gl.load(scale + (t * tiles + first + program) * 128 + line)
    constant = constant * (inverse / WIDTH)
    along = along * (inverse / WIDTH)
    a0, at = _less(a0, inverse, constant, along, at, queue, P, PER, STAGES)
    if P > 1:
        a1, at = _less(a1, inverse, constant, along, at, queue, P, PER, STAGES)
    if P > 2:
        a2, at = _less(a2, inverse, constant, along, at, queue, P, PER, STAGES)
    tma.store_wait(0)
    gl.thread_barrier()
    _store_state(arena, state, a0, a1, a2, new_total_line + program, P)
    tma.store_wait(0)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))


@gluon.jit
def _less(g, inverse, constant, along, at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """inverse g - constant - n along, and the gradient of z that there was."""
    x, at = _take(at, queue, P, PER, STAGES, "plain")
    g = g * inverse[:, None] - constant[:, None] - x * along[:, None]
    x, at = _take(at, queue, P, PER, STAGES, "plain")
    return g + x, at


@gluon.jit(do_not_specialize=["tiles", "first", "read_period", "n_line", "out_line", "t"])
def _read_back_kernel(
    arena, schedule, read_drive, last, gradient, inner, inner_gradient, outer, outer_gradient, tiles, first,
    read_period, n_line, out_line, t, P: gl.constexpr, Q1: gl.constexpr, Q2: gl.constexpr, CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """From the gradient of the values at time t to what they add to that of n; layers are computed again."""
    F1: gl.constexpr = Q1 // 2
    H1: gl.constexpr = Q1 % 2
    F2: gl.constexpr = Q2 // 2
    H2: gl.constexpr = Q2 % 2
    PER: gl.constexpr = 2 * P * (F1 + H1) + 2 * (F1 + H1) * (F2 + H2)
    W1: gl.constexpr = Q1 * 64
    W2: gl.constexpr = Q2 * 64
    state, ring, ready = _begin(STAGES, P)
    program = gl.program_id(0)
    loaded = ready.index(STAGES)
    _load_state(arena, state, loaded, n_line + t * tiles + first + program, P)
    for i in gl.static_range(STAGES):
        _fetch(arena, ring, ready, schedule, i, True, program, first, 1, 0, P, PER, STAGES)
    queue = (arena, ring, ready, schedule, PER, program, first, 1, 0)
    row = program * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, _TILE))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _TILE))
    row_half = program * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, _HALF))
    column_half = gl.arange(0, 64, layout=gl.SliceLayout(0, _HALF))
    at = 0
    mbarrier.wait(loaded, 0)
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
    beside = ((first * 128 + row) % read_period)[:, None] * W1 + column[None, :]
    where = row[:, None] * W1 + column[None, :]
    beside_half = ((first * 128 + row_half) % read_period)[:, None] * W1 + F1 * 128 + column_half[None, :]
    where_half = row_half[:, None] * W1 + F1 * 128 + column_half[None, :]
    value, rise = _activate_and_slope(a0 + gl.load(read_drive + beside), ACTIVATION)
    s0 = rise.to(gl.bfloat16)
    v0 = value.to(gl.bfloat16)
    gl.store(inner + where, v0)
    b0 = gl.convert_layout(v0, _LEFT)
    b1 = b0
    s1 = s0
    if F1 > 1:
        value, rise = _activate_and_slope(a1 + gl.load(read_drive + beside + 128), ACTIVATION)
        s1 = rise.to(gl.bfloat16)
        v0 = value.to(gl.bfloat16)
        gl.store(inner + where + 128, v0)
        b1 = gl.convert_layout(v0, _LEFT)
    bh = gl.full([128, 64], 0.0, gl.bfloat16, _LEFT_HALF)
    sh = gl.full([128, 64], 0.0, gl.bfloat16, _HALF)
    if H1:
        value, rise = _activate_and_slope(h + gl.load(read_drive + beside_half), ACTIVATION)
        sh = rise.to(gl.bfloat16)
        vh = value.to(gl.bfloat16)
        gl.store(inner + where_half, vh)
        bh = gl.convert_layout(vh, _LEFT_HALF)
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
    value, rise = _activate_and_slope(a0, ACTIVATION)
    gl.store(outer + row[:, None] * W2 + column[None, :], value.to(gl.bfloat16))
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    for channel in gl.static_range(CHANNELS):
        g = gl.load(gradient + row * CHANNELS + channel)
        a0 += g[:, None] * gl.load(last + channel * W2 + column)[None, :]
    v0 = (a0 * rise).to(gl.bfloat16)
    gl.store(outer_gradient + row[:, None] * W2 + column[None, :], v0)
    b0 = gl.convert_layout(v0, _LEFT)
    bh = gl.full([128, 64], 0.0, gl.bfloat16, _LEFT_HALF)
    if H2:
        value, rise_half = _activate_and_slope(h, ACTIVATION)
        place = row_half[:, None] * W2 + F2 * 128 + column_half[None, :]
        gl.store(outer + place, value.to(gl.bfloat16))
        h = gl.full([128, 64], 0.0, gl.float32, _HALF)
        for channel in gl.static_range(CHANNELS):
            g = gl.load(gradient + row_half * CHANNELS + channel)
            h += g[:, None] * gl.load(last + channel * W2 + F2 * 128 + column_half)[None, :]
        vh = (h * rise_half).to(gl.bfloat16)
        gl.store(outer_gradient + place, vh)
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
    gl.thread_barrier()
    v0 = (a0 * s0.to(gl.float32)).to(gl.bfloat16)
    gl.store(inner_gradient + where, v0)
    state.index(0).store(v0)
    if F1 > 1:
        v0 = (a1 * s1.to(gl.float32)).to(gl.bfloat16)
        gl.store(inner_gradient + where + 128, v0)
        state.index(1).store(v0)
    if H1:
        vh = (h * sh.to(gl.float32)).to(gl.bfloat16)
        gl.store(inner_gradient + where_half, vh)
        state.index(F1).slice(0, 64, dim=1).store(vh)
    _settle()
    # The first layer backwards.
    a0 = gl.full([128, 128], 0.0, gl.float32, _TILE)
    a1 = a0
    a2 = a0
    for j in gl.static_range(P):
        g = gl.full([128, 128], 0.0, gl.float32, _TILE)
        for k in gl.static_range(F1):
            g, at = _turn(state.index(k), g, at, queue, P, PER, STAGES)
        if H1:
            g, at = _turn(state.index(F1).slice(0, 64, dim=1), g, at, queue, P, PER, STAGES, 128, 64)
        if j == 0:
            a0 = g
        if j == 1:
            a1 = g
        if j == 2:
            a2 = g
    a0, a1, a2 = warpgroup_mma_wait(0, deps=(a0, a1, a2))
    gl.thread_barrier()
    _store_state(arena, state, a0, a1, a2, out_line + program, P)
    tma.store_wait(0)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(ready.index(i))
