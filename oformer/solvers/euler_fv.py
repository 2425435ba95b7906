"""Compressible flow without viscosity on triangles: the Euler equations by node-centered finite volumes.

    d/dt U + div F(U) = 0,   U = (rho, rho u, rho v, E),   p = (gamma - 1)(E - rho |u|^2/2),   H = (E + p)/rho

Unknowns live at the nodes and are balanced over their median-dual volumes. Through the face from i to j with normal n
and length S flows, in the scheme `jst` (Jameson, Schmidt and Turkel, AIAA 81-1259), the flux of the arithmetic means
of rho, u, v, p and H, plus the dissipation

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

In time BDF2: (3 U - 4 U' + U'')/(2 dt) + R(U)/V = 0. Both past states are the first one, an impulsive start. Each step
is solved by Newton's method with the Jacobian of the first-order Rusanov scheme, approximately, by Jacobi sweeps that
never form it; a node's update is scaled down where it would change rho or p by more than 0.3 of itself.

The data of an airfoil that everybody uses (MeshGraphNets, Pfaff et al. 2021) behave like this scheme, down to the wall.

Differs: the solver behind those data converges each step; here the number of iterations is fixed, and the error of
that is below 1 % (docs/problems/airfoil.md).
"""

import functools
import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from oformer.errors import InputError, SolverDiverged, unknown_name
from oformer.fields import check_finite
from oformer.gpu import fused_kernels
from oformer.solvers.median_dual import MedianDual, median_dual

GAMMA = 1.4
GAS_CONSTANT = 287.058  # of air, J/(kg K)
PRESSURE, TEMPERATURE = 101325.0, 288.15  # of the free stream, Pa and K

TOGETHER = {"cpu": 16, "cuda": 64}  # trajectories at once: the lanes of a core; what stays in the cache of a GPU
LOOK = 12  # steps between two looks at the state; each makes the host wait for the device
WORTH_COMPILING = 2_000_000  # nodes times steps from which a CPU gains more than the compiler takes

Scheme = Literal["jst", "roe"]
Precision = Literal["float32", "float64"]


@dataclass(frozen=True)
class Flow:
    """The state of a gas at points, in SI units."""

    density: Float[Tensor, "*axes points"]
    velocity: Float[Tensor, "*axes points 2"]
    pressure: Float[Tensor, "*axes points"]

    @property
    def momentum(self) -> Float[Tensor, "*axes points 2"]:
        """Per volume: density times velocity."""
        return self.density[..., None] * self.velocity


@dataclass(frozen=True)
class Numerics:
    """How the equations are discretized and how far each step is iterated."""

    scheme: Scheme = "jst"
    newton: int = 6  # iterations of a step
    sweeps: int = 12  # of Jacobi in each; 8 leave 1.3 % in the hardest case
    start_steps: int = 5  # at the start, where the flow is far from steady,
    start_newton: int = 24  # so many
    change: float = 0.3  # the most that an update may change density or pressure, relative

    def __post_init__(self) -> None:
        if self.scheme not in ("jst", "roe"):
            raise unknown_name("scheme", self.scheme, ("jst", "roe"))
        if min(self.newton, self.sweeps, self.start_newton) < 1 or self.start_steps < 0:
            raise InputError("at least one Newton iteration and sweep", str(self))
        if not 0 < self.change < 1:
            raise InputError("a `change` between 0 and 1", str(self.change))


PUBLISHED = Numerics()  # as the published data were made, but for the number of iterations


def free_stream(mach: Float[Tensor, "batch"], angle: Float[Tensor, "batch"]) -> Flow:
    """Air at sea level that flows with the Mach number at the angle of attack, in degrees, as one point per sample."""
    sound = math.sqrt(GAMMA * GAS_CONSTANT * TEMPERATURE)
    turn = torch.deg2rad(angle)
    return Flow(
        density=torch.full_like(mach, PRESSURE / (GAS_CONSTANT * TEMPERATURE))[:, None],
        velocity=(mach * sound)[:, None, None] * torch.stack([torch.cos(turn), torch.sin(turn)], -1)[:, None],
        pressure=torch.full_like(mach, PRESSURE)[:, None],
    )


def solve(
    points: Float[Tensor, "points 2"],
    triangles: Int[Tensor, "cells 3"],
    marks: Int[Tensor, "points"],
    *,
    mach: Float[Tensor, "batch"],
    angle: Float[Tensor, "batch"],
    frames: Sequence[int],
    time_step: float = 2e-4,
    precision: Precision = "float32",
    numerics: Numerics = PUBLISHED,
    compiled: bool | None = None,
) -> Flow:
    """The flow around a body that is put into a free stream at once, at the frames asked for.

    On the CPU, with one thread, a trajectory is the same to the last bit whatever the batch it is solved in.

    Args:
        points: the nodes of the mesh, in meters.
        triangles: their corners.
        marks: 0 for nodes inside, 1 on a wall, 2 on the far field.
        mach: of the free stream; its device is where all is computed.
        angle: of attack, in degrees.
        frames: in order; frame k is the state after k + 1 steps, as in the published data.
        time_step: in seconds.
        precision: of all arithmetic.
        numerics: the scheme and its iterations.
        compiled: fuse the arithmetic with `torch.compile`; by default on a GPU, and on a CPU where there is a compiler
            and enough to do.

    Returns:
        A flow of shape (batch, frames, points) in the order of the points given.

    Raises:
        SolverDiverged: density or pressure were no longer positive and finite.
    """
    _check_stream(mach, angle)
    solver = EulerSolver(
        median_dual(points, triangles, marks),
        precision=precision,
        device=mach.device,
        numerics=numerics,
        compiled=compiled,
    )
    return solver.march(None, free_stream(mach.double(), angle.double()), frames=frames, time_step=time_step)


def forces(
    points: Float[Tensor, "points 2"],
    triangles: Int[Tensor, "cells 3"],
    marks: Int[Tensor, "points"],
    pressure: Float[Tensor, "batch points"],
    *,
    mach: Float[Tensor, "batch"],
    angle: Float[Tensor, "batch"],
    chord: float = 1.0,
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Lift and drag of all walls, from their pressure, over the dynamic pressure of the free stream and the chord."""
    dual = median_dual(points, triangles, marks)
    outward = dual.border[:, dual.wall :].to(pressure.device)
    # Around a closed body a constant pressure does nothing; without it, less is lost in rounding.
    excess = pressure[:, dual.order[dual.wall :].to(pressure.device)].double() - PRESSURE
    force = excess @ outward.T / (GAMMA / 2 * PRESSURE * mach.double()[:, None] ** 2 * chord)
    turn = torch.deg2rad(angle.double())
    lift = force[:, 1] * torch.cos(turn) - force[:, 0] * torch.sin(turn)
    return lift, force[:, 0] * torch.cos(turn) + force[:, 1] * torch.sin(turn)


class EulerSolver:
    """The equations on one mesh: `march` in time or to the `steady` state, from any flow and in any free stream.

    Trajectories are solved in groups of fixed size, the last one filled up with repetitions: lanes of a processor then
    see the same arithmetic whoever is beside them, and one compiled function serves all groups.
    """

    def __init__(
        self,
        dual: MedianDual,
        *,
        precision: Precision = "float32",
        device: torch.device | str = "cpu",
        numerics: Numerics = PUBLISHED,
        compiled: bool | None = None,
        together: int | None = None,
    ):
        """For one mesh.

        Args:
            dual: of the mesh.
            precision: of all arithmetic.
            device: where it is done.
            numerics: the scheme and its iterations.
            compiled: as in `solve`.
            together: trajectories in a group; by default what suits the device.
        """
        if precision not in ("float32", "float64"):
            raise unknown_name("`precision`", precision, ("float32", "float64"))
        self.dual, self.numerics, self.compiled = dual, numerics, compiled
        self.device, self.dtype = torch.device(device), getattr(torch, precision)
        if together is None:
            together = TOGETHER["cuda" if self.device.type == "cuda" else "cpu"]
        self.together = together
        self.tables = _tables(dual, self.dtype, self.device)

    @torch.no_grad()
    def march(
        self,
        initial: Flow | None,
        free: Flow,
        *,
        frames: Sequence[int],
        time_step: float,
        previous: Flow | None = None,
    ) -> Flow:
        """The flow at the frames asked for, of shape (batch, frames, points).

        Args:
            initial: of shape (batch, points); the free stream if left out.
            free: the free stream, of shape (batch, 1).
            frames: in order; frame k is the state after k + 1 steps.
            time_step: in seconds.
            previous: the flow one step before the initial one; the same as that if left out.
        """
        _check_frames(frames, time_step)
        kernels = self._kernels(frames[-1] + 1)
        groups = self._groups(initial, free, previous)
        return self._flow(torch.cat([self._march(kernels, group, frames, time_step) for group in groups], 2))

    def _march(
        self, kernels: "_Kernels", group: "_Group", frames: Sequence[int], time_step: float
    ) -> Float[Tensor, "4 points lanes frames"]:
        now, before = group.now, group.before
        weight = self._column(1.5 / time_step * self.dual.volumes)
        half = self._column(0.5 / time_step * self.dual.volumes)

        def advance(iterations: int) -> None:
            """One step, in place."""
            push = (now - before) * half
            new = now
            for _ in range(iterations):
                new = self._newton(kernels, new, now, push, weight, group.free)
            before.copy_(now)
            now.copy_(new)

        steps, first = frames[-1] + 1, self.numerics.start_steps
        # Recording a step pays off after some; the steps of the start must have compiled all that is in it.
        graph = self.device.type == "cuda" and first > 0 and steps > first + LOOK
        usual = _replayed(advance, self.numerics.newton) if graph else advance
        kept, records = set(frames), []
        for step in range(steps):
            if step < first:
                advance(self.numerics.start_newton)
            else:
                usual(self.numerics.newton)
            if step in kept:
                records.append(now[..., : group.size].clone())
            if step in kept or step % LOOK == 0:
                self._check(now, step + 1, (step + 1) * time_step)
        return torch.stack(records, -1)

    @torch.no_grad()
    def steady(
        self,
        initial: Flow | None,
        free: Flow,
        *,
        tolerance: float = 1e-6,
        courant: float = 20.0,
        iterations: int = 5000,
    ) -> Flow:
        """The steady flow, of shape (batch, points), by the same iteration with a local time step that grows.

        Args:
            initial: of shape (batch, points); the free stream if left out.
            free: the free stream, of shape (batch, 1).
            tolerance: of the residual of density, relative to that of the start, in the Euclidean norm.
            courant: the Courant number that the local step grows to.
            iterations: at most.

        Raises:
            SolverDiverged: the iterations were used up, or density or pressure were no longer positive and finite.
        """
        kernels = self._kernels(iterations)
        length = self._column((self.dual.normals.norm(dim=0).sum(0)) + self.dual.border.norm(dim=0))
        speed = float((free.velocity.norm(dim=-1) + (GAMMA * free.pressure / free.density).sqrt()).max())
        done = []
        for group in self._groups(initial, free, None):
            now, still = group.now, torch.zeros_like(group.now)
            start, worst = None, math.inf
            for step in range(iterations):
                ramp = min(1.0, 0.05 * 1.05**step)
                now = self._newton(kernels, now, now, still, length * (speed / (courant * ramp)), group.free)
                if step % 50 and step < iterations - 1:
                    continue
                self._check(now, step + 1, 0.0)
                balance = kernels.residual(now, now, still, length, group.free, self.tables, self.numerics.scheme)[0]
                norm = (balance[0] / self._column(self.dual.volumes)).norm(dim=0)
                start = norm.clamp_min(torch.finfo(norm.dtype).tiny) if start is None else start
                worst = float((norm / start).max())
                if worst <= tolerance:
                    break
            else:
                raise SolverDiverged("euler_fv, not yet steady,", iterations, 0.0, worst)
            done.append(now[..., : group.size])
        return self._flow(torch.cat(done, -1))

    def _newton(
        self, kernels: "_Kernels", state: Tensor, now: Tensor, push: Tensor, weight: Tensor, free: Tensor
    ) -> Tensor:
        """One iteration: the balance, sweeps for its linear equations (the first is part of it), the update."""
        balance, basis, inverse, blocks, d = kernels.residual(
            state, now, push, weight, free, self.tables, self.numerics.scheme
        )
        for _ in range(self.numerics.sweeps - 1):
            d = kernels.sweep(d, balance, basis, inverse, blocks, self.tables)
        return kernels.update(state, d, self.numerics.change)

    def _kernels(self, steps: int) -> "_Kernels":
        wanted = self.compiled
        if wanted is None:
            enough = steps * len(self.dual.volumes) >= WORTH_COMPILING
            wanted = self.device.type == "cuda" or (enough and _has_compiler())
        if wanted and fused_kernels(self.device) and self.dtype == torch.float32 and self.numerics.scheme == "jst":
            return _fused_kernels()
        return _compiled_kernels() if wanted else _Kernels(residual, sweep, update)

    def _column(self, values: Float[Tensor, "points"]) -> Float[Tensor, "points 1"]:
        return values[:, None].to(self.device, self.dtype)

    def _groups(self, initial: Flow | None, free: Flow, previous: Flow | None) -> "Iterator[_Group]":
        """Conserved variables (field, node, lane) of so many trajectories at once, in the numbering of the dual."""
        count, n = len(free.density), len(self.dual.volumes)
        for flow in (initial, previous):
            if flow is not None and flow.density.shape != (count, n):
                raise InputError(f"flows of shape ({count}, {n})", str(tuple(flow.density.shape)))
        stream = _conserved(free)
        first = stream.expand(-1, n, -1) if initial is None else _conserved(initial)[:, self.dual.order]
        before = first if previous is None else _conserved(previous)[:, self.dual.order]
        for flow in (first, before):
            if not _healthy(flow):
                raise InputError("flows of positive density and pressure, all finite", "others")
        for begin in range(0, count, self.together):
            lanes = torch.arange(begin, begin + self.together).clamp_max(count - 1)

            def take(values: Tensor, lanes: Tensor = lanes) -> Tensor:
                return values[..., lanes.to(values.device)].to(self.device, self.dtype).contiguous()

            yield _Group(take(first), take(before), take(stream), min(self.together, count - begin))

    def _flow(self, state: Float[Tensor, "4 points lanes *frames"]) -> Flow:
        """Back to the numbering of the mesh, and to physical names; the points last."""
        rank = torch.empty_like(self.dual.order)
        rank[self.dual.order] = torch.arange(len(rank))
        rho, mx, my, energy = state[:, rank.to(state.device)].movedim(1, -1).unbind(0)
        u, v = mx / rho, my / rho
        pressure = (GAMMA - 1) * (energy - (mx * u + my * v) / 2)
        return Flow(rho.contiguous(), torch.stack([u, v], -1), pressure)

    def _check(self, state: Float[Tensor, "4 points lanes"], step: int, time: float) -> None:
        if not _healthy(state):
            raise SolverDiverged("euler_fv", step, time, float(state.double().norm()))


def _healthy(state: Float[Tensor, "4 points lanes"]) -> bool:
    """Whether density and pressure are positive and all is finite."""
    rho, mx, my, energy = state.unbind(0)
    inner = rho * energy - (mx * mx + my * my) / 2  # of the sign of the pressure where rho is positive
    return bool(((torch.minimum(rho, inner) > 0) & torch.isfinite(energy)).all())


class _Group(NamedTuple):
    now: Float[Tensor, "4 points lanes"]
    before: Float[Tensor, "4 points lanes"]
    free: Float[Tensor, "4 1 lanes"]
    size: int  # lanes that are not repetitions


def _replayed(advance: Callable[[int], None], iterations: int) -> Callable[[int], None]:
    """The same step, recorded at its first call and replayed: on a GPU it is some hundred short kernels."""
    graph: torch.cuda.CUDAGraph | None = None

    def replay(wanted: int) -> None:
        nonlocal graph
        assert wanted == iterations, "a recorded step has the iterations it was recorded with"
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # runs nothing
                advance(iterations)
        graph.replay()

    return replay


class _Kernels(NamedTuple):
    residual: Callable
    sweep: Callable
    update: Callable


def _compiled(*kernels: Callable) -> list[Callable]:
    # Every mesh, precision and scheme is compiled for itself, and there may be many in one process.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return [torch.compile(kernel, fullgraph=True, dynamic=False) for kernel in kernels]


@functools.cache
def _compiled_kernels() -> _Kernels:
    return _Kernels(*_compiled(residual, sweep, update))


@functools.cache
def _fused_kernels() -> _Kernels:
    from oformer.solvers.euler_kernels import fused_residual, fused_sweep  # needs Triton

    at_border, changed = _compiled(border, update)

    def balance(state, now, push, weight, free, t, scheme):
        return fused_residual(state, now, push, weight, free, t, at_border)

    return _Kernels(balance, fused_sweep, changed)


def _has_compiler() -> bool:
    """Whether there is a compiler for C++ that `torch.compile` would find."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


class _Tables(NamedTuple):
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


def _tables(dual: MedianDual, dtype: torch.dtype, device: torch.device) -> _Tables:
    n, degree = len(dual.volumes), dual.degrees
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
    return _Tables(dual.neighbors.to(device), *columns, far=dual.far, wall=dual.wall)


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
    """The state after an update that changes neither density nor pressure by more than so much of themselves."""
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


def _conserved(flow: Flow) -> Float[Tensor, "4 points lanes"]:
    """Density, momentum and energy; trajectories last."""
    rho, p = flow.density, flow.pressure
    u, v = flow.velocity.unbind(-1)
    energy = p / (GAMMA - 1) + rho * (u**2 + v**2) / 2
    return torch.stack([rho, rho * u, rho * v, energy]).mT


def _check_stream(mach: Tensor, angle: Tensor) -> None:
    check_finite("mach", mach)
    check_finite("angle", angle)
    if len(mach) == 0 or len(mach) != len(angle):
        raise InputError("one `angle` for each of at least one `mach`", f"{len(angle)} and {len(mach)}")
    if not bool((mach > 0).all()):
        raise InputError("a positive `mach`", f"{float(mach.min()):g}", "Turn the flow with `angle`")


def _check_frames(frames: Sequence[int], time_step: float) -> None:
    if not frames or frames[0] < 0 or any(a >= b for a, b in itertools.pairwise(frames)):
        raise InputError("`frames` that grow from 0 on", str(list(frames)))
    if not (math.isfinite(time_step) and time_step > 0):
        raise InputError("a positive `time_step`", str(time_step))
