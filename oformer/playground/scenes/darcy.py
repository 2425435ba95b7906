"""The scene of Darcy flow: a medium that a person paints."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import cell_grid, thinning
from oformer.playground.requests import object_of
from oformer.playground.scenes.base import SEED, Known, Places, Scene, State, grid_of
from oformer.problems import Darcy


class Medium(Scene):
    """Darcy: a painted medium, a digit for each cell of the grid that training saw."""

    kind = "medium"

    def __init__(self, problem: Darcy, spec: Spec):
        super().__init__(spec)
        self.problem = problem
        self.side = grid_of(spec)[0]
        self.stride = thinning((problem.points,), (self.side,), periodic=False)[0]
        self.last = (self.side - 1) * self.stride  # number of the last cell on an axis that training saw
        length = self.side**2
        digits = {"type": "string", "minLength": length, "maxLength": length, "pattern": "^[01]*$"}
        self.schema = object_of({"cells": digits})  # row by row, y fastest
        self.resolution = self.side
        self.resolutions = tuple(
            sorted({max(4, self.side // 4), max(4, self.side // 2), self.side, min(256, 2 * self.side)})
        )
        self.solver = f"finite volumes, {problem.points} x {problem.points} cells, float64"

    def facts(self) -> dict[str, Any]:
        """Cells per axis that a person paints, and the two coefficients."""
        return {"side": self.side, "low": self.problem.low, "high": self.problem.high}

    def example(self, index: int) -> dict[str, Any]:
        """A random medium."""
        drawn = self.problem.draw([index], SEED)["coefficient"][0, :: self.stride, :: self.stride]
        return {"cells": "".join("1" if high else "0" for high in (drawn == self.problem.high).flatten().tolist())}

    def known(self, state: State) -> Known:
        """The coefficient in all cells of the problem, those of training among them."""
        n = self.problem.points
        rows = torch.arange(n * n).view(n, n)[:: self.stride, :: self.stride].flatten()
        return Known(Field.of(cell_grid((n, n), (1.0, 1.0)), self._medium(state).view(1, -1, 1)), rows)

    def places(self, state: State, resolution: int) -> Places:
        """A regular grid from the first to the last point of training."""
        axis = (torch.linspace(0, self.last, resolution, dtype=torch.float64) + 0.5) / self.problem.points
        coords = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
        return Places(Field.of(coords), {"kind": "grid", "points": [resolution, resolution]})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated bilinearly between the cells of the solver."""
        (sample,) = self.problem.solve({"coefficient": self._medium(state)[None]})
        n, size = self.problem.points, self.last + 1
        values = sample.target.view(1, 1, n, n)[..., :size, :size]
        return interpolate(values, (resolution, resolution), mode="bilinear", align_corners=True).view(1, -1, 1)

    def _medium(self, state: State) -> Float[Tensor, "points points"]:
        """Each cell of the problem has the phase of the nearest painted one."""
        cells = np.frombuffer(state["cells"].encode(), np.uint8)
        if not np.isin(cells, (ord("0"), ord("1"))).all():
            raise InputError("only the digits 0 and 1 in `cells`", "another character")
        high = torch.from_numpy(cells == ord("1")).view(self.side, self.side)
        nearest = ((torch.arange(self.problem.points) + self.stride // 2) // self.stride).clamp(max=self.side - 1)
        field = high[nearest][:, nearest]
        low = torch.full(field.shape, self.problem.low, dtype=torch.float64)
        return low.masked_fill(field, self.problem.high)
