"""Steady Darcy flow through a medium of two phases on the unit square (paper, section 4.1 and table 3).

Differs: the published data (`piececonst_r421`) have their values at cell centers (i + 1/2)/n, and so have we; the
released code feeds linspace(0, 1, n) per axis and forces the border ring of its output to zero, where the data are not
zero. The papers solve on nodes with interpolated coefficients (see `darcy_fd` for what that changes).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch, Card, Field, Sample, Spec
from oformer.meshes.grids import cell_grid
from oformer.problems.base import Problem, Undo, permuted
from oformer.seeds import numpy_generator
from oformer.solvers.darcy_fd import solve
from oformer.solvers.random_fields import Matern, neumann_square


@dataclass(frozen=True)
class Darcy(Problem):
    """Steady Darcy flow: -∇·(a ∇u) = f on the unit square, u = 0 on its border, a of two values.

    Learned map: a → u.

    What is hard: the coefficient jumps along curves that are rough down to the grid, and the solution has a kink along
    each; between them it is smooth. All of the coefficient acts on every value.

    Values that work: the defaults, which are those of the published data. A contrast high/low of 4 takes the solver 24
    iterations on any grid, and one of 100 takes it 90.
    """

    name: ClassVar[str] = "darcy"
    cpu_batch: ClassVar[int] = 8

    points: int = 421  # per axis
    high: float = 12.0  # the coefficient where the random field is not negative
    low: float = 3.0  # and where it is
    inverse_length: float = 3.0  # tau of the field
    exponent: float = 2.0  # alpha of the field
    source: float = 1.0

    def __post_init__(self) -> None:
        if self.points < 2:
            raise InputError("at least 2 `points` per axis", str(self.points))
        for name in ("high", "low"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InputError(f"a positive `{name}`", str(getattr(self, name)))
        if not math.isfinite(self.source):
            raise InputError("a finite `source`", str(self.source))
        _ = self.law  # refuses what is none

    @property
    def law(self) -> Matern:
        """Of the random field; its amplitude does not matter to its sign."""
        return Matern(amplitude=1.0, inverse_length=self.inverse_length, exponent=self.exponent)

    @property
    def spec(self) -> Spec:
        """One value per cell of a square grid, in and out."""
        grid = (self.points, self.points)
        return Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=grid)

    @property
    def card(self) -> Card:
        """Names and story."""
        return Card(
            title="Darcy flow",
            text=(
                f"-div(a grad u) = {self.source:g} on the unit square with u = 0 on the border. "
                f"The input is the coefficient a, {self.high:g} where a Gaussian random field is positive and "
                f"{self.low:g} elsewhere; the target is u, at the same {self.points} x {self.points} cell centers. "
                "Solved by finite volumes on these cells in float64."
            ),
            inputs=("a",),
            targets=("u",),
        )

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """The media, `coefficient` of shape (batch, points, points)."""
        grid = (self.points, self.points)
        noise = np.stack([numpy_generator(seed, index).standard_normal(grid) for index in indices])
        field = neumann_square(torch.from_numpy(noise), grid, self.law)
        return {"coefficient": torch.full_like(field, self.low).masked_fill(field >= 0, self.high)}

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """Solve on the stored cells; all samples share one tensor of coordinates."""
        a = state["coefficient"].to(torch.float64)
        grid = (self.points, self.points)
        if a.ndim != 3 or a.shape[1:] != grid:
            raise InputError(f"`coefficient` of shape (batch, {grid[0]}, {grid[1]})", str(tuple(a.shape)))
        u = solve(a, self.source)
        query = Field.of(cell_grid(grid, (1.0, 1.0)).to(a.device))
        return [
            Sample(query.with_values(medium.reshape(1, -1, 1)), query, pressure.reshape(1, -1, 1))
            for medium, pressure in zip(a, u, strict=True)
        ]

    def symmetries(self, batch: Batch) -> int:
        """The eight symmetries of the square: rows and columns reversed, swapped, or not.

        Exact on the grid: values are permuted, coordinates stay. Hence input and query must be the same square grid
        that the symmetries map onto itself, in order; every r-th of 421 points is one where r divides 420.
        """
        _check_grid(batch)
        return 8

    def transformed(self, batch: Batch, which: Int[Tensor, "batch"]) -> tuple[Batch, Undo]:
        """The three bits of `which` say: rows reversed, columns reversed, then both swapped."""
        _check_grid(batch)
        n = math.isqrt(batch.input.points)
        place = torch.arange(n * n, device=which.device)
        row, column = place // n, place % n
        reverse_rows, reverse_columns, swap = ((which[:, None] >> bit) % 2 == 1 for bit in range(3))
        row = torch.where(reverse_rows, n - 1 - row, row)
        column = torch.where(reverse_columns, n - 1 - column, column)
        return permuted(batch, torch.where(swap, column * n + row, row * n + column))


def _check_grid(batch: Batch) -> None:
    """Refuse points that the symmetries of the square do not map onto themselves."""
    x, y = batch.input.coords, batch.query.coords
    points = x.shape[-2]
    n = math.isqrt(points)
    square = n * n == points == y.shape[-2]
    if square and x.device.type == "cpu":  # elsewhere a look at the numbers would stall the queue
        axis = x[0, :n, 1]
        expected = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        close = 0.01 / n  # coordinates in single precision are rounded
        centered = bool(((axis + axis.flip(0) - 1).abs() < close).all()) and bool((axis.diff() > 0).all())
        square = centered and bool(((x - expected).abs() < close).all()) and torch.equal(x, y)
    if not square:
        raise InputError(
            "input and query on the same square grid, centered, for the symmetries of Darcy flow",
            f"{points} input points and {y.shape[-2]} queries" + " that are none" * (points == y.shape[-2]),
            "Augment a batch before points are dropped from it, and thin its grid by a divisor of the points less one",
        )
