"""The scene of Burgers: a curve that a person bends."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid, thinning
from oformer.playground.requests import list_of, number, object_of
from oformer.playground.scenes.base import SEED, Known, Places, Scene, State, grid_of, rounded
from oformer.problems import Burgers
from oformer.solvers.fourier import resample

CONTROLS = 64  # points of a curve that a person bends


class Curve(Scene):
    """Burgers: a periodic curve, given at 64 points and smooth between them."""

    kind = "curve"
    schema = object_of({"values": list_of(number(-4, 4), CONTROLS, CONTROLS)})

    def __init__(self, problem: Burgers, spec: Spec):
        super().__init__(spec)
        self.problem = problem
        self.resolution = min(grid_of(spec)[0], 512)  # more points than a screen shows are of no use
        self.resolutions = tuple(sorted({64, 128, 256, 512, 1024, 2048, self.resolution}))
        self.solver = f"Fourier method, {problem.solver_points} points, {problem.steps} steps, float64"

    def example(self, index: int) -> dict[str, Any]:
        """A random initial state."""
        drawn = self.problem.draw([index], SEED)["initial"]
        return {"values": rounded(resample(drawn, CONTROLS)[0].clamp(-4, 4))}

    def known(self, state: State) -> Known:
        """The curve at all points of the problem, those of training among them."""
        points = self.problem.points
        coords = periodic_grid((points,), (1.0,))
        usual = thinning((points,), grid_of(self.spec), periodic=True)[0]
        return Known(Field.of(coords, self._curve(state, points)[..., None]), torch.arange(0, points, usual))

    def places(self, state: State, resolution: int) -> Places:
        """Equidistant points of the period."""
        return Places(Field.of(periodic_grid((resolution,), (1.0,))), {"kind": "line", "points": resolution})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated in Fourier space."""
        (sample,) = self.problem.solve({"initial": self._curve(state, self.problem.points)})
        return resample(sample.target[:, :, 0], resolution)[..., None]

    def unseen(self, state: State) -> str:
        """A mean other than zero: training had none, and the mean carries the whole curve along."""
        mean = sum(state["values"]) / CONTROLS
        return "" if abs(mean) < 0.005 else f"a mean of {mean:.3g}, where all curves of training have mean zero"

    def _curve(self, state: State, points: int) -> Float[Tensor, "1 points"]:
        return resample(torch.tensor([state["values"]], dtype=torch.float64), points)
