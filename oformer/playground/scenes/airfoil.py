"""The scene of the airfoil: a free stream that a person turns.

The first frames of some flows come with the package (`tools/airfoil_starts.py`).
"""

import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field, Spec
from oformer.files import map_arrays
from oformer.meshes.cache import mesh_of
from oformer.meshes.triangles import Mesh
from oformer.playground.requests import number, object_of
from oformer.playground.scenes.base import Known, State
from oformer.playground.scenes.meshed import MeshScene
from oformer.problems import Airfoil
from oformer.solvers.euler_fv import EulerSolver, Flow, free_stream
from oformer.solvers.median_dual import median_dual

STARTS_FILE = Path(__file__).resolve().parent.parent / "airfoil_starts.safetensors"


class Stream(MeshScene):
    """Airfoil: the Mach number and the angle of the free stream."""

    kind = "stream"
    slow = True
    resolutions = (1, 2)

    def __init__(self, problem: Airfoil, spec: Spec):
        super().__init__(spec)
        self.problem = p = problem
        self.schema = object_of({"mach": number(*p.mach), "angle": number(*p.angle)})
        self.sensors = len(mesh_of(p.mesh).points)
        self.window = p.card.picture.window
        self.solver = f"finite volumes, {self.sensors:,} nodes, {p.steps} steps of {p.time_step:g} s, {p.precision}"

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
        points, kind = self.mesh(state).points, self.kinds(state)
        low, high = points.amin(0), points.amax(0)
        constant = torch.cat([(points - low) / (high - low), kind], 1).expand(len(frames), -1, -1)
        seen = torch.cat([values, constant], -1)[-self.spec.in_times :]  # a view may have cut the first ones off
        return Known(Field.of(points, seen), torch.arange(len(points)))

    def mesh(self, state: State) -> Mesh:
        """The mesh of the problem, in all states."""
        return mesh_of(self.problem.mesh)

    def kinds(self, state: State) -> Float[Tensor, "points 1"]:
        """Marks of the nodes: inside, on the wall or in the far field."""
        return self.mesh(state).marks.double()[:, None]

    def at_nodes(self, state: State) -> Float[Tensor, "times points channels"]:
        """The frames behind those of the input."""
        return self._march(state, self.problem.frames)[self.problem.in_times :][: self.spec.out_times]

    @cached_property
    def _starts(self) -> dict[tuple[float, float], Float[Tensor, "times points 4"]]:
        """First frames that come with the package; empty unless the problem is the default one."""
        usual = Airfoil()
        same = ("mesh", "time_step", "stride", "in_times", "numerics", "precision", "stored")
        differs = any(getattr(usual, name) != getattr(self.problem, name) for name in same)
        return {} if differs or not STARTS_FILE.is_file() else read_starts()

    def _march(self, state: State, frames: Sequence[int]) -> Float[Tensor, "times points 4"]:
        """One trajectory by itself, where the problem marches a group of sixteen."""
        mesh, p = self.mesh(state), self.problem
        solver = EulerSolver(
            median_dual(mesh.points, mesh.triangles, mesh.marks),
            precision=p.precision, numerics=p.numerics, together=1,
        )  # fmt: skip
        free = _free_flow(state["mach"], state["angle"])
        flow = solver.march(None, free, frames=frames, time_step=p.time_step)
        moving = flow.velocity if p.stored == "velocity" else flow.momentum
        return torch.cat([moving[0], flow.density[0, ..., None], flow.pressure[0, ..., None]], -1).double()


@cache
def read_starts(path: Path = STARTS_FILE) -> dict[tuple[float, float], Float[Tensor, "times points 4"]]:
    """First frames by Mach number and angle: velocity, density and pressure."""
    starts = {}
    for key, array in map_arrays(path).items():
        mach, angle = json.loads(key)
        shift, scale = free_channels(mach, angle)
        starts[mach, angle] = torch.from_numpy(array.astype(np.float64)) * scale + shift
    return dict(sorted(starts.items()))


def free_channels(mach: float, angle: float) -> tuple[Float[Tensor, "4"], Float[Tensor, "4"]]:
    """Velocity, density and pressure of a free stream, and the unit of each in the file of first frames."""
    free = _free_flow(mach, angle)
    state = torch.cat([free.density[0], free.pressure[0]])
    return torch.cat([free.velocity[0, 0], state]), torch.cat([torch.ones(2, dtype=torch.float64), state])


def _free_flow(mach: float, angle: float) -> Flow:
    """The free stream of one Mach number and angle in degrees."""
    return free_stream(*(torch.tensor([number], dtype=torch.float64) for number in (mach, angle)))
