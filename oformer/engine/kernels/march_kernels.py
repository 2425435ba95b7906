"""The kernel of a latent rollout on a Hopper GPU: 128 points through all steps on one multiprocessor.

`rollout_kernels.py` says what it computes, lays the arena out and writes the schedule of tiles.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


def _either(module: Any, *names: str) -> Any:
    """What Triton calls by the first of these names that it has: they change with its versions."""
    found = [getattr(module, name) for name in names if hasattr(module, name)]
    if not found:
        raise ImportError(f"{module.__name__} has neither {' nor '.join(names)}")
    return found[0]


_barrier = _either(gl, "barrier", "thread_barrier")  # since Triton 3.7, before
_load_tile = _either(tma, "async_load", "async_copy_global_to_shared")  # since 3.8, before
_store_tile = _either(tma, "async_store", "async_copy_shared_to_global")

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16]))
_HALF = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_TILE, k_width=2))
_LEFT_HALF = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_HALF, k_width=2))


@gluon.jit
def _fetch(
    arena, ring, ready, schedule, item, wanted, program, shared_tiles,
    P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of the schedule."""
    slot = item % STAGES
    entry = schedule + (item % PER) * 3
    number = gl.load(entry) + program * gl.load(entry + 1) + (program % shared_tiles) * gl.load(entry + 2)
    mbarrier.expect(ready.index(slot), 128 * 128 * 2, pred=wanted)
    _load_tile(arena, [number // P * 128, number % P * 128], ready.index(slot), ring.index(slot), pred=wanted)


@gluon.jit
def _refill(at, queue, P: gl.constexpr, PER: gl.constexpr, STAGES: gl.constexpr):
    """Fill the place of the tile before the present one again."""
    arena, ring, ready, schedule, total, program, shared_tiles = queue
    ahead = at + (STAGES - 1)
    wanted = (ahead < total) & (at > 0)
    _fetch(arena, ring, ready, schedule, ahead, wanted, program, shared_tiles, P, PER, STAGES)


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
    x = ring.index(slot).load(_TILE)
    if KIND == "half":
        x = x.to(gl.float16, bitcast=True)
    x = x.to(gl.float32)
    _refill(at, queue, P, PER, STAGES)
    return x, at + 1


@gluon.jit
def _sigmoid(x):
    """Phi(x) nearly, as (1 + tanh u)/2."""
    square = gl.minimum(x * x, 36.0)
    u = x * (0.7974639937671736 + square * (0.036984517932366484 - 0.0003428631901071833 * square))
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [u], dtype=gl.float32, is_pure=True, pack=1)
    return 0.5 * t + 0.5


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "gelu":
        return x * _sigmoid(x)
    else:
        return gl.maximum(x, 0.0)


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
    _barrier()


@gluon.jit
def _begin(STAGES: gl.constexpr, P: gl.constexpr, NUMBER: gl.constexpr):
    state = gl.allocate_shared_memory(NUMBER, [P, 128, 128], SHARED)
    ring = gl.allocate_shared_memory(NUMBER, [STAGES, 128, 128], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    _barrier()
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
def _send_state(arena, state, line, P: gl.constexpr):
    """The state on its way to a line of the arena."""
    for j in gl.static_range(P):
        _store_tile(arena, [line * 128, j * 128], state.index(j))


@gluon.jit
def _normalize(a0, a1, a2, state, scale, epsilon, P: gl.constexpr, KEEP: gl.constexpr, NUMBER: gl.constexpr):
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
    _barrier()
    state.index(0).store((a0 * inverse[:, None]).to(NUMBER))
    if P > 1:
        state.index(1).store((a1 * inverse[:, None]).to(NUMBER))
    if P > 2:
        state.index(2).store((a2 * inverse[:, None]).to(NUMBER))
    _settle()
    if KEEP:
        gl.store(scale, inverse)


@gluon.jit(do_not_specialize=["rows", "tiles", "shared_tiles", "read_period", "n_line", "times"])
def march_kernel(
    arena, schedule, start, z, scale, read_drive, last, bias, values, rows, tiles, shared_tiles, read_period, n_line,
    times, epsilon, P: gl.constexpr, Q1: gl.constexpr, Q2: gl.constexpr, STEPS: gl.constexpr, CHANNELS: gl.constexpr,
    ACTIVATION: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """All steps of 128 points, and what is read of them."""
    WIDTH: gl.constexpr = P * 128
    # Widths that are read through, in halves of a tile: full tiles and perhaps one half.
    F1: gl.constexpr = Q1 // 2
    H1: gl.constexpr = Q1 % 2
    F2: gl.constexpr = Q2 // 2
    H2: gl.constexpr = Q2 % 2
    PER: gl.constexpr = P * P * STEPS + 2 * P + P * (F1 + H1) + (F1 + H1) * (F2 + H2)
    # The first tiles are on their way.
    state, ring, ready = _begin(STAGES, P, NUMBER)
    program = gl.program_id(0)
    queue = (arena, ring, ready, schedule, PER * times, program, shared_tiles)
    for i in gl.static_range(STAGES):
        _fetch(arena, ring, ready, schedule, i, True, program, shared_tiles, P, PER, STAGES)
    # The latents at the start, kept and normalized.
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
    _normalize(a0, a1, a2, state, scale + row, epsilon, P, KEEP, NUMBER)
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
            _barrier()
            state.index(0).store(_activate(a0, "gelu").to(NUMBER))
            if P > 1:
                state.index(1).store(_activate(a1, "gelu").to(NUMBER))
            if P > 2:
                state.index(2).store(_activate(a2, "gelu").to(NUMBER))
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
        _normalize(a0, a1, a2, state, scale + t * rows + row, epsilon, P, KEEP, NUMBER)
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
        b0 = gl.convert_layout(_activate(a0 + gl.load(beside), ACTIVATION).to(NUMBER), _LEFT)
        b1 = b0
        if F1 > 1:
            b1 = gl.convert_layout(_activate(a1 + gl.load(beside + 128), ACTIVATION).to(NUMBER), _LEFT)
        bh = gl.full([128, 64], 0.0, NUMBER, _LEFT_HALF)
        if H1:
            at_half = read_drive + (row_half % read_period)[:, None] * (Q1 * 64) + F1 * 128 + column_half[None, :]
            bh = gl.convert_layout(_activate(h + gl.load(at_half), ACTIVATION).to(NUMBER), _LEFT_HALF)
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
        # The last matrix has few rows: sums over the channels.
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
