"""Compressible flow without viscosity on triangles: the Euler equations by node-centered finite volumes.

    d/dt U + div F(U) = 0,   U = (rho, rho u, rho v, E),   p = (gamma - 1)(E - rho |u|^2/2),   H = (E + p)/rho

Unknowns live at the nodes and are balanced over their median-dual volumes; `euler_flux` has the schemes for the fluxes.

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
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError, SolverDiverged, unknown_name
from oformer.gpu import CudaGraphs, Work, fused_kernels
from oformer.solvers.euler_flux import GAMMA, border, residual, sweep, tables_of, update
from oformer.solvers.median_dual import MedianDual, median_dual

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
    # A solver for this mesh alone; whoever has several flows on one mesh keeps it.
    solver = EulerSolver(
        median_dual(points, triangles, marks),
        precision=precision,
        device=mach.device,
        numerics=numerics,
        compiled=compiled,
    )
    return solver.march(None, free_stream(mach.double(), angle.double()), frames=frames, time_step=time_step)


class EulerSolver:
    """The equations on one mesh: `march` in time, from any flow and in any free stream.

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
        self.tables = tables_of(dual, self.dtype, self.device)

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

        def advance(iterations: int = self.numerics.newton) -> None:
            """One step, in place."""
            push = (now - before) * half
            new = now
            for _ in range(iterations):
                new = self._newton(kernels, new, now, push, weight, group.free)
            before.copy_(now)
            now.copy_(new)

        steps, first = frames[-1] + 1, self.numerics.start_steps
        # On a GPU a step is some hundred short kernels. Recording it pays off after some steps; those of the start must
        # have compiled all that is in it.
        record = CudaGraphs(self.device) if self.device.type == "cuda" and 0 < first < steps - LOOK else None
        usual: Work = advance
        kept, records = set(frames), []
        for step in range(steps):
            if step == first and record is not None:
                usual = record(advance, 0)
            if step < first:
                advance(self.numerics.start_newton)
            else:
                usual()
            if step in kept:
                records.append(now[..., : group.size].clone())
            if step in kept or step % LOOK == 0:
                self._check(now, step + 1, (step + 1) * time_step)
        return torch.stack(records, -1)

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
            compilers = os.environ.get("CXX", "g++"), "g++", "clang++"  # those that torch.compile would find
            wanted = self.device.type == "cuda" or (enough and any(map(shutil.which, compilers)))
        if (
            wanted
            and fused_kernels(self.device, "euler")
            and self.dtype == torch.float32
            and self.numerics.scheme == "jst"
        ):
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
