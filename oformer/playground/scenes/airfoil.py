"""The scene of the airfoil: a free stream that a person turns."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field, Spec
from oformer.meshes.cache import mesh_of
from oformer.meshes.triangles import Mesh
from oformer.playground.airfoil_starts import STARTS_FILE, free_flow, read_starts
from oformer.playground.requests import object_of
from oformer.playground.scenes.base import Known, Places, Scene, State
from oformer.playground.scenes.meshed import mesh_layout, refined
from oformer.problems import Airfoil
from oformer.solvers.euler_fv import EulerSolver
from oformer.solvers.median_dual import median_dual


class Stream(Scene):
    """Airfoil: the Mach number and the angle of the free stream."""

    kind = "stream"
    slow = True

    def __init__(self, problem: Airfoil, spec: Spec):
        super().__init__(spec)
        self.problem = problem

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema: Mach number and angle of the free stream."""
        bounds = {"mach": self.problem.mach, "angle": self.problem.angle}
        return object_of(
            {name: {"type": "number", "minimum": low, "maximum": high} for name, (low, high) in bounds.items()}
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The mesh of the solver, and one refinement."""
        return (1, 2)

    @property
    def resolution(self) -> int:
        """The mesh of the solver, which is fine enough."""
        return 1

    @property
    def sensors(self) -> int:
        """Nodes of the mesh."""
        return len(self._mesh.points)

    def queries(self, resolution: int) -> int:
        """Query points, approximately: each refinement makes four triangles of one."""
        return self.sensors * 4 ** (resolution - 1)

    @property
    def solver(self) -> str:
        """Description of the solver, for the page."""
        p = self.problem
        return f"finite volumes, {len(self._mesh.points):,} nodes, {p.steps} steps of {p.time_step:g} s, {p.precision}"

    def facts(self) -> dict[str, Any]:
        """Bounds of the free stream, and the streams whose first frames need no solver."""
        return {
            "mach": list(self.problem.mach),
            "angle": list(self.problem.angle),
            "ready": [list(stream) for stream in self._starts],
        }

    def example(self, index: int) -> dict[str, Any]:
        """A stream whose first frames need no solver, or the middle of the bounds."""
        if self._starts:
            mach, angle = list(self._starts)[(5 * index + 9) % len(self._starts)]
            return {"mach": mach, "angle": angle}
        return {name: sum(getattr(self.problem, name)) / 2 for name in ("mach", "angle")}

    def known(self, state: State) -> Known:
        """The input frames at the nodes."""
        frames = self.problem.frames[: self.problem.in_times]
        values = self._starts.get((round(state["mach"], 6), round(state["angle"], 6)))
        if values is None:
            values = self._march(state, frames)
        points, kind = self._mesh.points, self._kinds
        low, high = points.amin(0), points.amax(0)
        constant = torch.cat([(points - low) / (high - low), kind], 1).expand(len(frames), -1, -1)
        seen = torch.cat([values, constant], -1)[-self.spec.in_times :]  # a view may have cut the first ones off
        return Known(Field.of(points, seen), torch.arange(len(points)))

    def places(self, state: State, resolution: int) -> Places:
        """The nodes, and for finer resolutions the middles of edges."""
        mesh, kind = self._mesh, self._kinds
        for _ in range(resolution - 1):
            mesh, kind = refined(mesh, kind)
        return Places(Field.of(mesh.points, kind[None]), mesh_layout(mesh, self.problem.card.picture.window))

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated linearly between the nodes."""
        values = self._march(state, self.problem.frames)[self.problem.in_times :][: self.spec.out_times]
        mesh = self._mesh
        for _ in range(resolution - 1):
            values = torch.cat([values, values[:, mesh.edges].mean(2)], 1)
            mesh = refined(mesh, self._kinds)[0]
        return values

    @property
    def _mesh(self) -> Mesh:
        return mesh_of(self.problem.mesh)

    @property
    def _kinds(self) -> Float[Tensor, "points 1"]:
        return self._mesh.marks.double()[:, None]

    @cached_property
    def _starts(self) -> dict[tuple[float, float], Float[Tensor, "times points 4"]]:
        """First frames that come with the package; empty unless the problem is the default one."""
        usual = Airfoil()
        same = ("mesh", "time_step", "stride", "in_times", "numerics", "precision", "stored")
        if not STARTS_FILE.is_file() or any(getattr(usual, name) != getattr(self.problem, name) for name in same):
            return {}
        return read_starts()

    def _march(self, state: State, frames: Sequence[int]) -> Float[Tensor, "times points 4"]:
        """One trajectory by itself, where the problem marches a group of sixteen."""
        mesh, p = self._mesh, self.problem
        solver = EulerSolver(
            median_dual(mesh.points, mesh.triangles, mesh.marks),
            precision=p.precision, numerics=p.numerics, together=1,
        )  # fmt: skip
        free = free_flow(state["mach"], state["angle"])
        flow = solver.march(None, free, frames=frames, time_step=p.time_step)
        moving = flow.velocity if p.stored == "velocity" else flow.momentum
        return torch.cat([moving[0], flow.density[0, ..., None], flow.pressure[0, ..., None]], -1).double()
