"""A latent rollout on a Hopper GPU: residual point-wise networks that march and are read at each step, on the chip.

The equations are those of `rollout_back_kernels.py`, which has the way back; the affine part of the layer norms is
folded into W_1, R_1 and the drives by the caller. No point sees another, so a program takes 128 points through all
steps. Their activations stay in shared memory (the "state") and in registers, while the weights stream past in tiles
of 128 x 128 through a ring of four places, filled by asynchronous copies. Which tile comes when is a schedule, a table
that the host writes in the order in which the kernel takes them.

Everything that comes in tiles lies in one "arena" of bfloat16 or float16 numbers, as wide as the latents: weights,
drives, latents (always float16, which rounds eight times finer). To go back only the normalized latents n of each step
are kept there, and 1 / std beside.

Products are in the type of the arena with sums in float32; sums over channels and times are float32 throughout. The
plain twin is `OFormer.propagate` and `decode`; tests hold the two equal, values and gradients.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oformer.engine.kernels.march_kernels import SHARED, march_kernel
from oformer.engine.kernels.rollout_back_kernels import PART, Chain, way_back

SIDE = 128  # of a tile; products of it keep the tensor cores busy while the next one is on its way
_NUMBERS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}  # of the arena
_STAGES = 4  # places of the ring; they and the state fill the shared memory


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


def agrees(
    device: torch.device,
    step: Sequence[tuple[int, int]],
    read: Sequence[tuple[int, int]],
    activation: str,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernels say what plain code says: one tile of points, two steps of random networks.

    They are written in a part of Triton whose names, and perhaps whose meaning, change with its versions.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def chain(shapes: Sequence[tuple[int, int]], activation: str) -> Chain:
        weights = tuple(drawn(*shape) / shape[1] ** 0.5 for shape in shapes)
        return Chain(weights, drawn(1, shapes[0][0]), activation)

    with torch.autocast(device.type, enabled=False):
        networks = chain(step, "gelu"), chain(read, activation)
        z, bias = drawn(SIDE, step[0][1]), drawn(read[-1][0])
        found, expected = march(z, *networks, bias, 2, 1e-5, dtype), march_plainly(z, *networks, bias, 2, 1e-5)
        return bool((found - expected).norm() < 0.05 * expected.norm())


def march_plainly(z: Tensor, step: Chain, read: Chain, bias: Tensor, times: int, epsilon: float) -> Tensor:
    """The plain twin of `march`."""

    def normalized(z: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(z, z.shape[1:], eps=epsilon)

    values = []
    for _ in range(times):
        z = z + step.plainly(normalized(z))
        values.append(read.plainly(normalized(z)) + bias)
    return torch.stack(values)


def march(
    z: Tensor,
    step: Chain,
    read: Chain,
    bias: Tensor,
    times: int,
    epsilon: float,
    dtype: torch.dtype,
    part: int = PART,
) -> Tensor:
    """Values (times, rows, channels) in float32 at each step after latents z (rows, width).

    Args:
        z: latents at the start.
        step: the network of a step, with GELUs; its last matrix returns to the width of z.
        read: the network that reads values, of three matrices.
        bias: of the values.
        times: number of steps.
        epsilon: of the normalization.
        dtype: that of products, bfloat16 or float16.
        part: points that go back together for the gradient.
    """
    rows = len(z)
    padded = -rows % SIDE
    drives = [_fitting(chain.drive, rows) for chain in (step, read)]
    if padded:
        z = torch.nn.functional.pad(z, (0, 0, 0, padded))
        drives = [torch.nn.functional.pad(d, (0, 0, 0, padded)) if len(d) == rows else d for d in drives]
    shape = _Shape(z.shape[1] // SIDE, len(step.weights), len(read.weights[0]), len(read.weights[1]), len(bias))
    plan = _Plan(shape, times, epsilon, read.activation, torch.is_grad_enabled(), dtype, part)
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
    dtype: torch.dtype
    part: int


class _Arena(NamedTuple):
    """Where things lie, in lines of tiles."""

    memory: Tensor
    drive: int
    latents: int
    n: int

    @property
    def tiles(self) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(self.memory, [SIDE, SIDE], SHARED.value)

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
        memory = z.new_empty((tape_lines + drive_lines + tiles + kept) * SIDE, width, dtype=plan.dtype)
        first = tape_lines + drive_lines
        arena = _Arena(memory, tape_lines, first, first + tiles)
        arena.lines(0, tape_lines).copy_(tape)
        arena.lines(arena.drive, drive_lines).copy_(shared)
        scale = z.new_empty(plan.times + 1 if plan.keep else 1, rows, dtype=torch.float32)
        values = z.new_empty(plan.times, rows, shape.channels, dtype=torch.float32)
        floats = [x.detach().float().contiguous() for x in (read_drive, weights[-1], bias)]
        with torch.cuda.device_of(z):  # Triton starts kernels on the current device
            march_kernel[(tiles,)](
                arena.tiles, _schedule(shape, arena.drive, arena.latents, z.device),
                z.detach().float().contiguous(),
                arena.lines(arena.latents, tiles).view(torch.float16), scale, *floats, values,
                rows, tiles, drive_lines, len(read_drive), arena.n, plan.times, plan.epsilon,
                **shape.constants(), STEPS=shape.steps, ACTIVATION=plan.activation, KEEP=plan.keep, STAGES=_STAGES,
                NUMBER=_NUMBERS[plan.dtype], num_warps=8,
            )  # fmt: skip
        ctx.plan = plan
        n = arena.lines(arena.n, kept).view(-1, rows, width)
        ctx.save_for_backward(n, scale, drive, read_drive, *weights)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        plan: _Plan = ctx.plan
        n, scale, drive, read_drive, *weights = ctx.saved_tensors
        step = Chain(tuple(weights[: plan.shape.steps]), drive, "gelu")
        read = Chain(tuple(weights[plan.shape.steps :]), read_drive, plan.activation)
        of_values = gradients[0].contiguous()
        found = way_back(n, scale, step, read, of_values, plan.part)
        return None, found.start, found.drive, found.read_drive, of_values.sum((0, 1)), *found.step, *found.read


def _tiles(weight: Tensor, rows_first: bool) -> Tensor:
    """A matrix in tiles, filled up with zeros: row by row, or column by column."""
    out, into = weight.shape
    full = torch.nn.functional.pad(weight, (0, -into % SIDE, 0, -out % SIDE))
    apart = full.unflatten(1, (-1, SIDE)).unflatten(0, (-1, SIDE))  # (out, SIDE, in, SIDE)
    return apart.permute((0, 2, 1, 3) if rows_first else (2, 0, 1, 3)).flatten(0, 1)


def _tape(shape: _Shape, weights: Sequence[Tensor]) -> Tensor:
    """The matrices in tiles, in lines of the arena."""
    *step, first, second = [w.detach() for w in weights[:-1]]
    parts = [_tiles(w, True) for w in step] + [_tiles(w, False) for w in (first, second)]
    tape = torch.cat(parts)
    fill = -len(tape) % shape.pieces
    tape = torch.nn.functional.pad(tape, (0, 0, 0, 0, 0, fill))
    return tape.unflatten(0, (-1, shape.pieces)).transpose(1, 2).flatten(2).flatten(0, 1)


# Made once for each arrangement: a captured graph cannot copy from the host.
@functools.lru_cache(maxsize=256)
def _schedule(shape: _Shape, drive: int, latents: int, device: torch.device) -> Tensor:
    """Which tiles a step takes: the drive, the inner layers, the latents, the last layer, and what is read.

    A row (base, a, b) is tile number base + a * program + b * (program modulo the period of the drive).
    """
    p, square, (inner, outer) = shape.pieces, shape.pieces**2, shape.parts
    rows: list[tuple[int, int, int]] = []

    def add(base: int, count: int, program: int = 0, shared: int = 0) -> None:
        rows.extend((base + i, program, shared) for i in range(count))

    add(drive * p, p, shared=p)
    add(0, (shape.steps - 1) * square)
    add(latents * p, p, program=p)
    add((shape.steps - 1) * square, square)
    add(shape.steps * square, p * inner + inner * outer)
    return torch.tensor(rows, dtype=torch.int32, device=device)
