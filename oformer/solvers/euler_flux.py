"""Fluxes of the Euler equations between median-dual volumes, and the linear equations of an implicit step.

    U = (rho, rho u, rho v, E),   p = (gamma - 1)(E - rho |u|^2/2),   H = (E + p)/rho

Through the face from i to j with normal n and length S flows, in the scheme `jst` (Jameson, Schmidt and Turkel, AIAA
81-1259), the flux of the arithmetic means of rho, u, v, p and H, plus the dissipation

    [e2 (U*_i - U*_j) - e4 (L_i - L_j)] lam phi,   L_i = sum_j (U*_j - U*_i),   U* = (rho, rho u, rho v, E + p)

lam is the mean of |u.n| + c S at both ends. phi = 4 Phi_i Phi_j/(Phi_i + Phi_j) with Phi_i = (Lambda_i/(4 lam))^0.3
stretches it on thin volumes; Lambda_i sums |u.n| + c S of means over all faces of i. A sensor of pressure,
nu_i = |sum (p_j - p_i)|/sum (p_j + p_i), switches from fourth to second differences at shocks: with
s = 3 (N_i + N_j)/(N_i N_j), N the number of neighbors, e2 = 0.5 s (nu_i + nu_j)/2 and e4 = max(0, 0.02 - e2) s^2/4.
On the border L and nu are summed over neighbors on the border alone.

The scheme `roe` is the flux of Roe (J. Comput. Phys. 43, 1981) between values that are carried to the middle of the
edge by least-squares gradients with the limiter of van Albada, of second order. No entropy fix.

Walls slip: the mirrored state enters through a Roe flux. That is momentum alone, (p + rho v_n (v_n + c)) n up to third
order in v_n, and so it is written.
At the far field the Riemann invariant that leaves comes from inside and the one that enters from the free stream,
entropy and tangential velocity come from upwind, and a Roe flux is taken to that state.
"""

from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from oformer.solvers.median_dual import MedianDual

GAMMA = 1.4


class Tables(NamedTuple):
    """The dual as the kernels read it: (slot, node, 1) or (node, 1), so that lanes are innermost."""

    neighbors: Int[Tensor, "slots points"]
    nx: Float[Tensor, "slots points 1"]
    ny: Float[Tensor, "slots points 1"]
    area: Float[Tensor, "slots points 1"]
    felt: Float[Tensor, "slots points 1"]  # one where a neighbor counts in L and nu
    spread: Float[Tensor, "slots points 1"]  # s of the head of this file
    hx: Float[Tensor, "slots points 1"]  # unit normal
    hy: Float[Tensor, "slots points 1"]
    dx: Float[Tensor, "slots points 1"]  # to the neighbor
    dy: Float[Tensor, "slots points 1"]
    gx: Float[Tensor, "slots points 1"]  # what its difference adds to a gradient
    gy: Float[Tensor, "slots points 1"]
    border_x: Float[Tensor, "points 1"]
    border_y: Float[Tensor, "points 1"]
    border_area: Float[Tensor, "points 1"]
    far: int
    wall: int


def tables_of(dual: MedianDual, dtype: torch.dtype, device: torch.device) -> Tables:
    """The tables of a mesh, from its dual."""
    n, degree = len(dual.volumes), dual.real.sum(0)  # degree: how many neighbors each node has
    area = dual.normals.norm(dim=0)
    unit = dual.normals / area.clamp_min(torch.finfo(torch.float64).tiny)
    inside = (torch.arange(n) < dual.far).double()
    felt = dual.real * torch.where(inside > 0, 1.0, 1.0 - inside[dual.neighbors])
    spread = 3 * (degree + degree[dual.neighbors]) / (degree * degree[dual.neighbors])
    # Least squares with weights 1/distance^2: the inverse of the 2 x 2 matrix of moments, times each way.
    rx, ry = dual.reaches
    near = dual.real / (rx**2 + ry**2 + (1 - dual.real))
    xx, xy, yy = ((near * a * b).sum(0) for a, b in ((rx, rx), (rx, ry), (ry, ry)))
    det = xx * yy - xy**2
    slopes = near * (yy * rx - xy * ry) / det, near * (xx * ry - xy * rx) / det
    faces = (*dual.normals, area, felt, spread, *unit, *dual.reaches, *slopes)
    borders = (*dual.border, dual.border.norm(dim=0))
    columns = [values[..., None].to(device, dtype) for values in (*faces, *borders)]
    return Tables(dual.neighbors.to(device), *columns, far=dual.far, wall=dual.wall)


# The kernels: pure functions of tensors (field, node, lane) that `torch.compile` fuses. The checks of shapes that the
# tests put on every function would be traced with them, hence `no_type_check`; docstrings give the shapes.


@no_type_check
def residual(state, now, push, weight, free, t, scheme):
    """The balance of a BDF2 step and what the sweeps need: the flow, the diagonal, the blocks, and the first sweep.

    Args:
        state: (4, n, lanes), the iterate.
        now: (4, n, lanes), the state that the step begins with.
        push: (4, n, lanes), V/(2 dt) times the change of the step before.
        weight: (n, 1), 3 V/(2 dt).
        free: (4, 1, lanes), the free stream.
        t: tables of the mesh.
        scheme: of the fluxes inside.
    """
    flow = _primitive(state)
    faces = _jst(state, flow, t) if scheme == "jst" else _roe_second_order(flow, t)
    _, u, v, _, h, c = flow
    basis = torch.stack([u, v, h, c])
    total = (u * t.border_x + v * t.border_y).abs() + c * t.border_area
    for k in range(len(t.neighbors)):
        total = total + _fastest(u, v, c, t, k)
    inverse = 1 / (weight + 0.5 * total)
    flux, blocks = border(state, free, inverse, t)
    balance = weight * (state - now) - push + torch.stack(faces) + pad(flux, (0, 0, t.far, 0))
    return balance, basis, inverse, blocks, _divided(-balance, inverse, blocks, t)


@no_type_check
def border(state, free, inverse, t):
    """Fluxes through the border, (4, border nodes, lanes) with walls last, and the blocks of wall nodes."""
    flow, sides = _primitive(state), _border(t)
    far = _far_flux(
        [part[t.far : t.wall] for part in flow], _primitive(free), *(part[t.far : t.wall] for part in sides)
    )
    wall = _wall_flux([part[t.wall :] for part in flow], *(part[t.wall :] for part in sides))
    return torch.cat([torch.stack(far), wall], 1), _wall_blocks(flow, 1 / inverse, t)


@no_type_check
def sweep(d, balance, basis, inverse, blocks, t):
    """One Jacobi sweep for the linear equations of a Newton iteration with the Rusanov Jacobian."""
    u, v, h, c = basis.unbind(0)
    parts = [-part for part in balance.unbind(0)]
    d0, d1, d2, d3 = d.unbind(0)
    for k in range(len(t.neighbors)):
        j, nx, ny = t.neighbors[k], t.nx[k], t.ny[k]
        there = d0[j], d1[j], d2[j], d3[j]
        lam = _fastest(u, v, c, t, k)
        change = _flux_change(u[j], v[j], h[j], nx, ny, *there)
        parts = [part - 0.5 * (f - lam * e) for part, f, e in zip(parts, change, there, strict=True)]
    return _divided(torch.stack(parts), inverse, blocks, t)


@no_type_check
def update(state, d, change):
    """The state after an update, scaled down where density or pressure would change by more than a share `change`."""
    rho, u, v, p, _, _ = _primitive(state)
    d_p = (GAMMA - 1) * (d[3] - u * d[1] - v * d[2] + (u * u + v * v) / 2 * d[0])
    worst = torch.maximum((d[0] / rho).abs(), (d_p / p).abs())
    return state + d * (change / worst.clamp_min(change))


@no_type_check
def _primitive(state):
    """Density, velocity, pressure, enthalpy and the speed of sound."""
    rho, mx, my, energy = state.unbind(0)
    inverse = 1 / rho
    u, v = mx * inverse, my * inverse
    p = (GAMMA - 1) * (energy - (mx * u + my * v) / 2)
    return rho, u, v, p, (energy + p) * inverse, (GAMMA * p * inverse).sqrt()


@no_type_check
def _border(t):
    """Unit normals and lengths."""
    return t.border_x / t.border_area, t.border_y / t.border_area, t.border_area


@no_type_check
def _fastest(u, v, c, t, k):
    """The larger of |u.n| + c S at both ends of the faces in slot k."""
    j, nx, ny, area = t.neighbors[k], t.nx[k], t.ny[k], t.area[k]
    return torch.maximum((u * nx + v * ny).abs() + c * area, (u[j] * nx + v[j] * ny).abs() + c[j] * area)


@no_type_check
def _jst(state, flow, t):
    """What leaves each node through its faces: central fluxes and the dissipation of Jameson, Schmidt and Turkel."""
    rho, u, v, p, h, c = flow
    star = rho, state[1], state[2], rho * h
    laplace = [torch.zeros_like(rho) for _ in star]
    jump, level = torch.zeros_like(rho), torch.zeros_like(rho)
    total = (u * t.border_x + v * t.border_y).abs() + c * t.border_area
    for k in range(len(t.neighbors)):
        j, felt = t.neighbors[k], t.felt[k]
        laplace = [sum_ + felt * (part[j] - part) for sum_, part in zip(laplace, star, strict=True)]
        jump, level = jump + felt * (p[j] - p), level + felt * (p[j] + p)
        un = 0.5 * ((u + u[j]) * t.nx[k] + (v + v[j]) * t.ny[k])
        total = total + un.abs() + 0.5 * (c + c[j]) * t.area[k]
    sensor = jump.abs() / level
    stretch = total**0.3

    out = [torch.zeros_like(rho) for _ in star]
    for k in range(len(t.neighbors)):
        j, nx, ny, area, spread = t.neighbors[k], t.nx[k], t.ny[k], t.area[k], t.spread[k]
        mass = 0.25 * (rho + rho[j]) * ((u + u[j]) * nx + (v + v[j]) * ny)
        p_mean = 0.5 * (p + p[j])
        central = mass, 0.5 * mass * (u + u[j]) + p_mean * nx, 0.5 * mass * (v + v[j]) + p_mean * ny
        central = *central, 0.5 * mass * (h + h[j])
        lam = 0.5 * ((u * nx + v * ny).abs() + (u[j] * nx + v[j] * ny).abs() + (c + c[j]) * area)
        # lam phi in one power: (4 lam)^0.7 times the harmonic sum of Lambda^0.3.
        size = (4 * lam) ** 0.7 * (stretch * stretch[j]) / (stretch + stretch[j])
        e2 = 0.25 * spread * (sensor + sensor[j])
        e4 = (0.02 - e2).clamp_min(0) * spread * spread / 4
        e2, e4 = e2 * size, e4 * size
        out = [
            sum_ + f + e2 * (part - part[j]) - e4 * (bend - bend[j])
            for sum_, f, part, bend in zip(out, central, star, laplace, strict=True)
        ]
    return out


@no_type_check
def _roe_second_order(flow, t):
    """What leaves each node through its faces: Roe fluxes between limited values at the middle of the edges."""
    known = flow[:4]
    slopes_x, slopes_y = [torch.zeros_like(f) for f in known], [torch.zeros_like(f) for f in known]
    for k in range(len(t.neighbors)):
        steps = [f[t.neighbors[k]] - f for f in known]
        slopes_x = [g + t.gx[k] * step for g, step in zip(slopes_x, steps, strict=True)]
        slopes_y = [g + t.gy[k] * step for g, step in zip(slopes_y, steps, strict=True)]
    out = [torch.zeros_like(f) for f in known]
    for k in range(len(t.neighbors)):
        j, dx, dy = t.neighbors[k], t.dx[k], t.dy[k]
        left, right = [], []
        for f, gx, gy in zip(known, slopes_x, slopes_y, strict=True):
            step = f[j] - f
            left.append(f + 0.5 * _van_albada(2 * (gx * dx + gy * dy) - step, step))
            right.append(f[j] - 0.5 * _van_albada(2 * (gx[j] * dx + gy[j] * dy) - step, step))
        flux = _roe(left, right, t.hx[k], t.hy[k], t.area[k])
        out = [sum_ + f for sum_, f in zip(out, flux, strict=True)]
    return out


@no_type_check
def _van_albada(behind, ahead):
    """A mean of two differences of one sign, zero where their signs differ."""
    product = (behind * ahead).clamp_min(0)
    tiny = torch.finfo(ahead.dtype).tiny
    return product * (behind + ahead) / (behind * behind + ahead * ahead).clamp_min(tiny)


@no_type_check
def _roe(left, right, hx, hy, area):
    """The flux of Roe through faces of unit normal (hx, hy); states are (rho, u, v, p)."""
    (r1, u1, v1, p1), (r2, u2, v2, p2) = left, right
    h1, h2 = (GAMMA / (GAMMA - 1) * p / r + (u * u + v * v) / 2 for r, u, v, p in (left, right))
    w = (r2 / r1).sqrt()
    share = 1 / (1 + w)
    u, v, h = (u1 + w * u2) * share, (v1 + w * v2) * share, (h1 + w * h2) * share
    rho, q = w * r1, (u * u + v * v) / 2
    c2 = (GAMMA - 1) * (h - q)
    c, un = c2.sqrt(), u * hx + v * hy
    d_rho, d_u, d_v, d_p = r2 - r1, u2 - u1, v2 - v1, p2 - p1
    d_n = d_u * hx + d_v * hy
    slow = (un - c).abs() * (d_p - rho * c * d_n) / (2 * c2)
    fast = (un + c).abs() * (d_p + rho * c * d_n) / (2 * c2)
    entropy, shear = un.abs() * (d_rho - d_p / c2), un.abs() * rho
    jump = (
        slow + fast + entropy,
        slow * (u - c * hx) + fast * (u + c * hx) + entropy * u + shear * (d_u - d_n * hx),
        slow * (v - c * hy) + fast * (v + c * hy) + entropy * v + shear * (d_v - d_n * hy),
        slow * (h - c * un) + fast * (h + c * un) + entropy * q + shear * (u * d_u + v * d_v - un * d_n),
    )
    m1, m2 = r1 * (u1 * hx + v1 * hy), r2 * (u2 * hx + v2 * hy)
    both = m1 + m2, m1 * u1 + m2 * u2 + (p1 + p2) * hx, m1 * v1 + m2 * v2 + (p1 + p2) * hy, m1 * h1 + m2 * h2
    return [0.5 * area * (f - g) for f, g in zip(both, jump, strict=True)]


@no_type_check
def _far_flux(flow, free, hx, hy, area):
    """The Roe flux to the state of the far field: what enters is the free stream's, what leaves is from inside."""
    (r1, u1, v1, p1, _, c1), (r2, u2, v2, p2, _, c2) = flow, free
    n1, n2 = u1 * hx + v1 * hy, u2 * hx + v2 * hy
    leaving = torch.where(n2 < -c2, n2 + 5 * c2, n1 + 5 * c1)  # 5 = 2/(gamma - 1)
    entering = torch.where(n2 > c2, n1 - 5 * c1, n2 - 5 * c2)
    un, c = (leaving + entering) / 2, (leaving - entering) / 10
    out = un > 0
    ratio = c / torch.where(out, c1, c2)
    rho = torch.where(out, r1, r2) * ratio**5
    p = torch.where(out, p1, p2) * ratio**7
    shift = un - torch.where(out, n1, n2)
    ghost = rho, torch.where(out, u1, u2) + shift * hx, torch.where(out, v1, v2) + shift * hy, p
    return _roe((r1, u1, v1, p1), ghost, hx, hy, area)


@no_type_check
def _wall_flux(flow, hx, hy, area):
    """The Roe flux to the mirrored state, in closed form."""
    rho, u, v, p, _, c = flow
    vn = u * hx + v * hy
    push = (p + rho * vn * (vn + c)) * area
    none = torch.zeros_like(push)
    return torch.stack([none, push * hx, push * hy, none])


@no_type_check
def _flux_change(u, v, h, nx, ny, d0, d1, d2, d3):
    """The Jacobian of the flux through n times a change of (rho, rho u, rho v, E)."""
    un, d_n = u * nx + v * ny, d1 * nx + d2 * ny
    d_p = (GAMMA - 1) * (d3 - u * d1 - v * d2 + (u * u + v * v) / 2 * d0)
    return (
        d_n,
        d_n * u + un * (d1 - u * d0) + d_p * nx,
        d_n * v + un * (d2 - v * d0) + d_p * ny,
        d_n * h + un * (d3 + d_p - h * d0),
    )


@no_type_check
def _wall_blocks(flow, diagonal, t):
    """The inverse 4 x 4 blocks of the Jacobian at wall nodes, of shape (4, 4, nodes, lanes).

    Inside, the derivatives of a node's own fluxes cancel around its closed volume. On a wall half of those through
    the border is left over, and the pressure and the mirrored state are added. Border faces of the far field
    cancel the former, and their wave speed is part of the diagonal.
    """
    rho, u, v, _, h, c = (part[t.wall :] for part in flow)
    hx, hy, area = (part[t.wall :] for part in _border(t))
    # The wave speed of the border is in the diagonal for the far field alone.
    own = diagonal[t.wall :] - 0.5 * ((u * hx + v * hy).abs() + c) * area
    one, none = torch.ones_like(rho), torch.zeros_like(rho)
    columns = []
    for k in range(4):
        d = [one if i == k else none for i in range(4)]
        change = _flux_change(u, v, h, hx * area, hy * area, *d)
        d_p = (GAMMA - 1) * (d[3] - u * d[1] - v * d[2] + (u * u + v * v) / 2 * d[0])
        push = (d_p + c * (d[1] * hx + d[2] * hy)) * area
        added = none, push * hx, push * hy, none
        columns.append([own * e - 0.5 * f + g for e, f, g in zip(d, change, added, strict=True)])
    rows = [[columns[k][i] for k in range(4)] + [one if k == i else none for k in range(4)] for i in range(4)]
    for k in range(4):  # Gauss and Jordan, without pivots: the diagonal outweighs the rest
        scale = 1 / rows[k][k]
        rows[k] = [value * scale for value in rows[k]]
        for i in range(4):
            if i != k:
                factor = rows[i][k]
                rows[i] = [value - factor * pivot for value, pivot in zip(rows[i], rows[k], strict=True)]
    return torch.stack([torch.stack(row[4:]) for row in rows])


@no_type_check
def _divided(right, inverse, blocks, t):
    """The right-hand side over the diagonal, on walls over the blocks."""
    inner, wall = right[:, : t.wall], right[:, t.wall :]
    return torch.cat([inner * inverse[: t.wall], (blocks * wall).sum(1)], 1)
