"""The scene of Navier-Stokes: a random state that a person stirs.

Differs from the problem's own settings: it is solved on at most twice the stored points with steps of 0.01, which takes
seconds on a CPU in place of minutes.
"""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import SolverDiverged
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid, thinning
from oformer.playground.requests import integer, list_of, number, object_of
from oformer.playground.scenes.base import SEED, Known, Places, Scene, State, grid_of
from oformer.problems import NavierStokes
from oformer.solvers.fourier import resample

DRAFT_STEP = 0.04  # of time, for an input that need not be exact
VORTEX = 0.05  # radius of one that a pointer leaves behind


class Vorticity(Scene):
    """Navier-Stokes: a random state at time 0 and the vortices that a pointer stirs into it."""

    kind = "vorticity"
    drafts = True
    schema = object_of(
        {
            "index": integer(0, 10**6, "of the random state"),
            "vortices": list_of({**list_of(number(-3, 3), 3, 3), "description": "x, y and strength"}, 0, 400),
        }
    )

    def __init__(self, problem: NavierStokes, spec: Spec):
        super().__init__(spec)
        points, usual = min(problem.solver_points, 2 * problem.points), grid_of(spec)[0]
        self.problem = p = dataclasses.replace(
            problem, points=points, solver_points=points, time_step=max(problem.time_step, 0.01)
        )
        self.resolution = usual
        self.resolutions = tuple(sorted({max(8, usual // 4), max(8, usual // 2), usual, 2 * usual}))
        self.solver = f"Fourier method, {points} x {points} points, steps of {p.time_step:g}, {p.precision}"

    def facts(self) -> dict[str, Any]:
        """Radius of a vortex."""
        return {"radius": VORTEX}

    def example(self, index: int) -> dict[str, Any]:
        """A random state without vortices."""
        return {"index": index, "vortices": []}

    def known(self, state: State) -> Known:
        """The input frames at all points of the solver."""
        return self._frames(state, self.problem)

    def draft(self, state: State) -> Known:
        """The input frames on half the points per axis with longer steps.

        At a viscosity of 1e-4 within 1e-3 of the exact ones, in a quarter of the time.
        """
        p = self.problem
        points = max(grid_of(self.spec)[0], p.points // 2)
        coarse = dataclasses.replace(p, points=points, solver_points=points, time_step=max(p.time_step, DRAFT_STEP))
        try:
            return self._frames(state, coarse)
        except SolverDiverged:  # a state that was stirred hard
            return self.known(state)

    def _frames(self, state: State, problem: NavierStokes) -> Known:
        short = dataclasses.replace(problem, duration=problem.in_times + 1)
        (sample,) = short.solve(self._drawn(state, problem))
        n = problem.points
        stride = thinning((n, n), grid_of(self.spec), periodic=True)[0]
        usual = torch.arange(n * n).view(n, n)[::stride, ::stride].flatten()
        frames = sample.input.values[-self.spec.in_times :]  # a view may have cut the first ones off
        return Known(Field.of(sample.input.coords, frames), usual)

    def places(self, state: State, resolution: int) -> Places:
        """A regular periodic grid."""
        grid = (resolution, resolution)
        return Places(Field.of(periodic_grid(grid, (1.0, 1.0))), {"kind": "grid", "points": list(grid)})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated in Fourier space."""
        (sample,) = self.problem.solve(self._drawn(state, self.problem))
        n = self.problem.points
        frames = sample.target[: self.spec.out_times].view(-1, n, n)
        along_y = resample(frames.reshape(-1, n), resolution).view(-1, n, resolution)
        both = resample(along_y.mT.reshape(-1, n), resolution).view(-1, resolution, resolution).mT
        return both.reshape(len(frames), -1, 1)

    def unseen(self, state: State) -> str:
        """Stirred states: training saw random fields."""
        return "a stirred state; training saw random fields" if state["vortices"] else ""

    def _drawn(self, state: State, problem: NavierStokes) -> dict[str, Tensor]:
        drawn = problem.draw([state["index"]], SEED)
        axis = torch.arange(problem.solver_points, dtype=torch.float64) / problem.solver_points
        initial = drawn["initial"][0].clone()
        for x, y, strength in state["vortices"]:
            bumps = [torch.exp(-(((axis - c + 0.5) % 1.0 - 0.5) ** 2) / (2 * VORTEX**2)) for c in (x, y)]
            initial += strength * torch.outer(*bumps)
        return {"initial": (initial - initial.mean())[None], "viscosity": drawn["viscosity"]}
