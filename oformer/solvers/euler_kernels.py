"""The iterations of `euler_fv` on a GPU: a kernel for sums over neighbors, one for the balance, one for a sweep.

Same arithmetic and same arguments as `residual` (with JST) and `sweep` of `euler_flux`, which are the plain twins
that the tests hold these equal to. A program takes a few nodes and all trajectories of a group: the values of a node
lie side by side, so that fetching a neighbor is one read. What happens at the border, on a twentieth of the nodes, is
left to the plain functions, compiled.

`torch.compile` alone would unroll the loops over neighbors into kernels that take minutes to compile.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NODES = 4  # per program


def fused_residual(state: Tensor, now: Tensor, push: Tensor, weight: Tensor, free: Tensor, t: Any, border: Callable):
    """The balance of a step with JST and what the sweeps need, with the arguments of `euler_flux.residual`.

    `border` takes (state, free, inverse, t) and gives the fluxes at border nodes and the blocks at wall nodes.
    """
    _, n, lanes = state.shape
    state, now, push = state.contiguous(), now.contiguous(), push.contiguous()
    sums, basis = state.new_empty((6, n, lanes)), torch.empty_like(state)
    inverse = state.new_empty((n, lanes))
    shape = {"N": n, "LANES": lanes, "BLOCK": triton.next_power_of_2(lanes), "NODES": _NODES, "SLOTS": len(t.neighbors)}
    grid = (triton.cdiv(n, _NODES),)
    balance, d = torch.empty_like(state), torch.empty_like(state)
    with torch.cuda.device_of(state):  # Triton starts kernels on the current device
        _sums[grid](
            state, t.neighbors, t.nx, t.ny, t.area, t.felt, t.border_x, t.border_y, t.border_area, weight,
            sums, basis, inverse, **shape, num_warps=4,
        )  # fmt: skip
        flux, blocks = border(state, free, inverse, t)
        _balance[grid](
            state, now, push, weight, t.neighbors, t.nx, t.ny, t.area, t.spread, sums, inverse, flux, blocks, balance,
            d, FAR=t.far, WALL=t.wall, **shape, num_warps=4,
        )  # fmt: skip
    return balance, basis, inverse, blocks, d


def fused_sweep(d: Tensor, balance: Tensor, basis: Tensor, inverse: Tensor, blocks: Tensor, t: Any) -> Tensor:
    """One Jacobi sweep; see `euler_flux.sweep`."""
    _, n, lanes = d.shape
    out = torch.empty_like(d)
    with torch.cuda.device_of(d):
        _sweep[(triton.cdiv(n, _NODES),)](
            d, balance, basis, inverse, blocks, t.neighbors, t.nx, t.ny, t.area, out,
            WALL=t.wall, N=n, LANES=lanes, BLOCK=triton.next_power_of_2(lanes), NODES=_NODES, SLOTS=len(t.neighbors),
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _primitive(state, at, field, mask):
    """Density, velocity, pressure, enthalpy and the speed of sound."""
    rho = tl.load(state + at, mask=mask, other=1.0)
    mx = tl.load(state + field + at, mask=mask, other=0.0)
    my = tl.load(state + 2 * field + at, mask=mask, other=0.0)
    energy = tl.load(state + 3 * field + at, mask=mask, other=1.0)
    inverse = 1 / rho
    u, v = mx * inverse, my * inverse
    p = 0.4 * (energy - (mx * u + my * v) / 2)
    return rho, u, v, p, (energy + p) * inverse, tl.sqrt(1.4 * p * inverse)


@triton.jit
def _power(x, exponent):
    return tl.exp2(exponent * tl.log2(x))


@triton.jit
def _sums(
    state, neighbors, nx, ny, area, felt, border_x, border_y, border_area, weight, sums, basis, inverse,
    N: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sums over neighbors: of star differences (four), the sensor, Lambda^0.3; the basis of sweeps; 1/diagonal."""
    node, lane = tl.program_id(0) * NODES + tl.arange(0, NODES), tl.arange(0, BLOCK)
    exists = node < N
    mask = exists[:, None] & (lane < LANES)[None, :]
    at = node[:, None] * LANES + lane[None, :]
    field: tl.constexpr = N * LANES
    rho, u, v, p, h, c = _primitive(state, at, field, mask)
    # Spectral radius through the border of the domain.
    length = tl.load(border_area + node, mask=exists, other=0.0)[:, None]
    bx = tl.load(border_x + node, mask=exists, other=0.0)[:, None]
    by = tl.load(border_y + node, mask=exists, other=0.0)[:, None]
    total = tl.abs(u * bx + v * by) + c * length
    fastest = total
    bend0 = tl.zeros((NODES, BLOCK), tl.float32)
    bend1, bend2, bend3, jump, level = bend0, bend0, bend0, bend0, bend0
    # Differences to each neighbor, and the spectral radius through the face between.
    for k in range(SLOTS):
        j = tl.load(neighbors + k * N + node, mask=exists, other=0)
        x = tl.load(nx + k * N + node, mask=exists, other=0.0)[:, None]
        y = tl.load(ny + k * N + node, mask=exists, other=0.0)[:, None]
        size = tl.load(area + k * N + node, mask=exists, other=0.0)[:, None]
        counts = tl.load(felt + k * N + node, mask=exists, other=0.0)[:, None]
        rho_j, u_j, v_j, p_j, h_j, c_j = _primitive(state, j[:, None] * LANES + lane[None, :], field, mask)
        bend0 += counts * (rho_j - rho)
        bend1 += counts * (rho_j * u_j - rho * u)
        bend2 += counts * (rho_j * v_j - rho * v)
        bend3 += counts * (rho_j * h_j - rho * h)
        jump += counts * (p_j - p)
        level += counts * (p_j + p)
        total += tl.abs(0.5 * ((u + u_j) * x + (v + v_j) * y)) + 0.5 * (c + c_j) * size
        fastest += tl.maximum(tl.abs(u * x + v * y) + c * size, tl.abs(u_j * x + v_j * y) + c_j * size)
    tl.store(sums + at, bend0, mask=mask)
    tl.store(sums + field + at, bend1, mask=mask)
    tl.store(sums + 2 * field + at, bend2, mask=mask)
    tl.store(sums + 3 * field + at, bend3, mask=mask)
    tl.store(sums + 4 * field + at, tl.abs(jump) / level, mask=mask)
    tl.store(sums + 5 * field + at, _power(total, 0.3), mask=mask)
    tl.store(basis + at, u, mask=mask)
    tl.store(basis + field + at, v, mask=mask)
    tl.store(basis + 2 * field + at, h, mask=mask)
    tl.store(basis + 3 * field + at, c, mask=mask)
    diagonal = tl.load(weight + node, mask=exists, other=1.0)[:, None] + 0.5 * fastest
    tl.store(inverse + at, 1 / diagonal, mask=mask)


@triton.jit
def _balance(
    state, now, push, weight, neighbors, nx, ny, area, spread, sums, inverse, border, blocks, balance, d,
    FAR: tl.constexpr, WALL: tl.constexpr,
    N: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Central fluxes, JST dissipation, the border's fluxes and the time derivative; then the first sweep."""
    node, lane = tl.program_id(0) * NODES + tl.arange(0, NODES), tl.arange(0, BLOCK)
    exists = node < N
    mask = exists[:, None] & (lane < LANES)[None, :]
    at = node[:, None] * LANES + lane[None, :]
    field: tl.constexpr = N * LANES
    rho, u, v, p, h, c = _primitive(state, at, field, mask)
    bend0, bend1 = tl.load(sums + at, mask=mask), tl.load(sums + field + at, mask=mask)
    bend2, bend3 = tl.load(sums + 2 * field + at, mask=mask), tl.load(sums + 3 * field + at, mask=mask)
    sensor = tl.load(sums + 4 * field + at, mask=mask, other=0.0)
    stretch = tl.load(sums + 5 * field + at, mask=mask, other=1.0)
    out0 = tl.zeros((NODES, BLOCK), tl.float32)
    out1, out2, out3 = out0, out0, out0
    for k in range(SLOTS):
        j = tl.load(neighbors + k * N + node, mask=exists, other=0)
        x = tl.load(nx + k * N + node, mask=exists, other=0.0)[:, None]
        y = tl.load(ny + k * N + node, mask=exists, other=0.0)[:, None]
        size = tl.load(area + k * N + node, mask=exists, other=0.0)[:, None]
        wide = tl.load(spread + k * N + node, mask=exists, other=0.0)[:, None]
        there = j[:, None] * LANES + lane[None, :]
        rho_j, u_j, v_j, p_j, h_j, c_j = _primitive(state, there, field, mask)
        mass = 0.25 * (rho + rho_j) * ((u + u_j) * x + (v + v_j) * y)
        pressure = 0.5 * (p + p_j)
        speed = 0.5 * (tl.abs(u * x + v * y) + tl.abs(u_j * x + v_j * y) + (c + c_j) * size)
        stretch_j = tl.load(sums + 5 * field + there, mask=mask, other=1.0)
        # lam phi in one power: (4 lam)^0.7 times the harmonic sum of Lambda^0.3.
        strength = _power(4 * speed, 0.7) * (stretch * stretch_j) / (stretch + stretch_j)
        second = 0.25 * wide * (sensor + tl.load(sums + 4 * field + there, mask=mask, other=0.0))
        fourth = tl.maximum(0.02 - second, 0.0) * wide * wide / 4 * strength
        second *= strength
        out0 += mass + second * (rho - rho_j) - fourth * (bend0 - tl.load(sums + there, mask=mask))
        out1 += 0.5 * mass * (u + u_j) + pressure * x + second * (rho * u - rho_j * u_j)
        out1 -= fourth * (bend1 - tl.load(sums + field + there, mask=mask))
        out2 += 0.5 * mass * (v + v_j) + pressure * y + second * (rho * v - rho_j * v_j)
        out2 -= fourth * (bend2 - tl.load(sums + 2 * field + there, mask=mask))
        out3 += 0.5 * mass * (h + h_j) + second * (rho * h - rho_j * h_j)
        out3 -= fourth * (bend3 - tl.load(sums + 3 * field + there, mask=mask))
    # Nodes of the border come last; its fluxes are an array of their own.
    flows = mask & (node >= FAR)[:, None]
    edge, rest = at - FAR * LANES, (N - FAR) * LANES
    out0 += tl.load(border + edge, mask=flows, other=0.0)
    out1 += tl.load(border + rest + edge, mask=flows, other=0.0)
    out2 += tl.load(border + 2 * rest + edge, mask=flows, other=0.0)
    out3 += tl.load(border + 3 * rest + edge, mask=flows, other=0.0)
    rate = tl.load(weight + node, mask=exists, other=0.0)[:, None]
    out0 += rate * (tl.load(state + at, mask=mask) - tl.load(now + at, mask=mask)) - tl.load(push + at, mask=mask)
    place = field + at
    out1 += rate * (tl.load(state + place, mask=mask) - tl.load(now + place, mask=mask))
    out1 -= tl.load(push + place, mask=mask)
    place = 2 * field + at
    out2 += rate * (tl.load(state + place, mask=mask) - tl.load(now + place, mask=mask))
    out2 -= tl.load(push + place, mask=mask)
    place = 3 * field + at
    out3 += rate * (tl.load(state + place, mask=mask) - tl.load(now + place, mask=mask))
    out3 -= tl.load(push + place, mask=mask)
    tl.store(balance + at, out0, mask=mask)
    tl.store(balance + field + at, out1, mask=mask)
    tl.store(balance + 2 * field + at, out2, mask=mask)
    tl.store(balance + 3 * field + at, out3, mask=mask)
    over = tl.load(inverse + at, mask=mask, other=0.0)
    _divide(-out0, -out1, -out2, -out3, over, blocks, d, node, at, mask, field, WALL, N, LANES)


@triton.jit
def _divide(
    a, b, c, d, inverse, blocks, out, node, at, mask, field,
    WALL: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The right-hand side over the diagonal, at wall nodes over the blocks; they are the last nodes."""
    wall = mask & (node >= WALL)[:, None]
    edge = at - WALL * LANES
    rest: tl.constexpr = (N - WALL) * LANES
    for row in tl.static_range(4):
        plain = (a, b, c, d)[row] * inverse
        turned = a * tl.load(blocks + 4 * row * rest + edge, mask=wall, other=0.0)
        turned += b * tl.load(blocks + (4 * row + 1) * rest + edge, mask=wall, other=0.0)
        turned += c * tl.load(blocks + (4 * row + 2) * rest + edge, mask=wall, other=0.0)
        turned += d * tl.load(blocks + (4 * row + 3) * rest + edge, mask=wall, other=0.0)
        tl.store(out + row * field + at, tl.where(wall, turned, plain), mask=mask)


@triton.jit
def _sweep(
    d, balance, basis, inverse, blocks, neighbors, nx, ny, area, out, WALL: tl.constexpr,
    N: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What neighbors ask of each node, with the Rusanov Jacobian."""
    node, lane = tl.program_id(0) * NODES + tl.arange(0, NODES), tl.arange(0, BLOCK)
    exists = node < N
    mask = exists[:, None] & (lane < LANES)[None, :]
    at = node[:, None] * LANES + lane[None, :]
    field: tl.constexpr = N * LANES
    u, v = tl.load(basis + at, mask=mask, other=0.0), tl.load(basis + field + at, mask=mask, other=0.0)
    c = tl.load(basis + 3 * field + at, mask=mask, other=0.0)
    part0 = -tl.load(balance + at, mask=mask, other=0.0)
    part1 = -tl.load(balance + field + at, mask=mask, other=0.0)
    part2 = -tl.load(balance + 2 * field + at, mask=mask, other=0.0)
    part3 = -tl.load(balance + 3 * field + at, mask=mask, other=0.0)
    for k in range(SLOTS):
        j = tl.load(neighbors + k * N + node, mask=exists, other=0)
        x = tl.load(nx + k * N + node, mask=exists, other=0.0)[:, None]
        y = tl.load(ny + k * N + node, mask=exists, other=0.0)[:, None]
        size = tl.load(area + k * N + node, mask=exists, other=0.0)[:, None]
        there = j[:, None] * LANES + lane[None, :]
        u_j, v_j = tl.load(basis + there, mask=mask, other=0.0), tl.load(basis + field + there, mask=mask, other=0.0)
        h_j = tl.load(basis + 2 * field + there, mask=mask, other=0.0)
        c_j = tl.load(basis + 3 * field + there, mask=mask, other=0.0)
        d0, d1 = tl.load(d + there, mask=mask, other=0.0), tl.load(d + field + there, mask=mask, other=0.0)
        d2 = tl.load(d + 2 * field + there, mask=mask, other=0.0)
        d3 = tl.load(d + 3 * field + there, mask=mask, other=0.0)
        through = u_j * x + v_j * y
        speed = tl.maximum(tl.abs(u * x + v * y) + c * size, tl.abs(through) + c_j * size)
        mass = d1 * x + d2 * y
        pressure = 0.4 * (d3 - u_j * d1 - v_j * d2 + (u_j * u_j + v_j * v_j) / 2 * d0)
        part0 -= 0.5 * (mass - speed * d0)
        part1 -= 0.5 * (mass * u_j + through * (d1 - u_j * d0) + pressure * x - speed * d1)
        part2 -= 0.5 * (mass * v_j + through * (d2 - v_j * d0) + pressure * y - speed * d2)
        part3 -= 0.5 * (mass * h_j + through * (d3 + pressure - h_j * d0) - speed * d3)
    over = tl.load(inverse + at, mask=mask, other=0.0)
    _divide(part0, part1, part2, part3, over, blocks, out, node, at, mask, field, WALL, N, LANES)
