"""Triangle meshes of the plane: what they are made of, and whether they can be trusted.

Triangles run counterclockwise, so that border edges have the domain on their left. Where the border follows a circle,
the mesh knows the circle: its points lie on it, and a solver may bend the edges between them.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError

ON_CIRCLE = 1e-9  # how far from its circle a point on it may lie, relative to radius and place


# Compared and hashed by identity: what depends on a mesh alone is kept with it, and arrays are slow to compare.
@dataclass(frozen=True, eq=False)
class Mesh:
    """Points, the triangles between them, a mark for each point, and the circles that the border follows."""

    points: Float[Tensor, "points 2"]
    triangles: Int[Tensor, "cells 3"]
    marks: Int[Tensor, "points"]  # 0 inside; what the others mean, the geometry says
    circles: Float[Tensor, "circles 3"] = torch.zeros(0, 3, dtype=torch.float64)  # center x, center y, radius

    @cached_property
    def areas(self) -> Float[Tensor, "cells"]:
        """Of the straight triangles, negative where they run clockwise."""
        return _areas(self.points, self.triangles)

    @cached_property
    def edges(self) -> Int[Tensor, "edges 2"]:
        """Each once, the smaller index first, in order."""
        return torch.unique(self._sides.sort(1).values, dim=0)

    @cached_property
    def border(self) -> Int[Tensor, "sides 2"]:
        """Edges with a triangle on one side only, with the domain on their left."""
        sides, n = self._sides, len(self.points)
        alone = ~torch.isin(sides[:, 0] * n + sides[:, 1], sides[:, 1] * n + sides[:, 0])
        return sides[alone]

    @cached_property
    def outer(self) -> Bool[Tensor, "edges"]:
        """Which of `edges` are on the border."""
        sides, n = self.border.sort(1).values, len(self.points)
        return torch.isin(self.edges[:, 0] * n + self.edges[:, 1], sides[:, 0] * n + sides[:, 1])

    def moved(self, matrix: Float[Tensor, "2 2"], center: Float[Tensor, "2"]) -> "Mesh":
        """The mesh turned or mirrored by an orthogonal matrix about `center`; triangles stay counterclockwise."""
        if not torch.allclose(matrix @ matrix.mT, torch.eye(2, dtype=matrix.dtype), atol=1e-12):
            raise InputError("an orthogonal `matrix`, so that circles stay circles", str(matrix.tolist()))

        def move(points: Tensor) -> Tensor:
            return (points - center) @ matrix.mT + center

        mirrored = bool(torch.linalg.det(matrix) < 0)
        return Mesh(
            points=move(self.points),
            triangles=self.triangles.flip(1) if mirrored else self.triangles,
            marks=self.marks,
            circles=torch.cat([move(self.circles[:, :2]), self.circles[:, 2:]], 1),
        )

    def check(self) -> "Mesh":
        """The mesh itself, if a solver can use it; otherwise an error that says why not."""
        if len(self.triangles) == 0:
            raise InputError("at least one triangle in a mesh", "none")
        check_finite("mesh.points", self.points)
        n = len(self.points)
        if self.triangles.min() < 0 or self.triangles.max() >= n:
            raise InputError(
                f"triangles between the points 0 to {n - 1}",
                f"{int(self.triangles.min())} to {int(self.triangles.max())}",
                "Count points from zero",
            )
        if len(self.marks) != n:
            raise InputError(f"a mark for each of {n} points", str(len(self.marks)))
        unused = n - len(torch.unique(self.triangles))
        if unused:
            raise InputError("every point in some triangle", f"{unused} points in none", "Remove them")
        flat = int((self.areas <= 0).sum())
        if flat:
            raise InputError(
                "triangles that run counterclockwise, of positive area",
                f"{flat} others",
                "Turn them round, or mesh again",
            )
        self._check_conforming()
        return self

    @cached_property
    def _sides(self) -> Int[Tensor, "sides 2"]:
        """The three sides of each triangle, as they run around it."""
        return torch.cat([self.triangles[:, [0, 1]], self.triangles[:, [1, 2]], self.triangles[:, [2, 0]]])

    def _check_conforming(self) -> None:
        """Whether triangles meet in whole sides."""
        n = len(self.points)
        if len(torch.unique(self._sides[:, 0] * n + self._sides[:, 1])) < len(self._sides):
            raise InputError("triangles that do not overlap", "a side with two triangles on the same side of it")
        border = self.border
        ends = torch.unique(border)
        a, b = self.points[border[:, 0]], self.points[border[:, 1]]
        along = b - a
        # Where a point lies on a side of whose ends it is none, triangles meet in half a side: the point hangs.
        offset = self.points[ends][:, None] - a
        position = (offset * along).sum(2) / along.square().sum(1)
        away = (offset - position.clamp(0, 1)[..., None] * along).norm(dim=2)
        own = (ends[:, None] == border[:, 0]) | (ends[:, None] == border[:, 1])
        hanging = int(((away < 1e-9 * along.norm(dim=1)) & ~own).any(1).sum())
        if hanging:
            raise InputError(
                "triangles that meet in whole sides", f"{hanging} points within a side of another triangle",
                "Merge points that are the same, and split the triangle beside a hanging one",
            )  # fmt: skip


def edge_middles(mesh: Mesh) -> Float[Tensor, "edges 2"]:
    """The middle of each of `mesh.edges`: on the circle where a border edge follows one, halfway elsewhere."""
    ends = mesh.points[mesh.edges]
    middles = ends.mean(1)
    for x, y, radius in mesh.circles.tolist():
        center = torch.tensor([x, y], dtype=middles.dtype)
        on = (((ends - center).norm(dim=2) - radius).abs() < ON_CIRCLE * max(radius, math.hypot(x, y))).all(
            1
        ) & mesh.outer
        spoke = middles[on] - center
        middles[on] = center + spoke * (radius / spoke.norm(dim=1, keepdim=True))
    return middles


def _areas(points: Float[Tensor, "points 2"], triangles: Int[Tensor, "cells 3"]) -> Float[Tensor, "cells"]:
    a, b, c = points[triangles].unbind(1)
    u, v = b - a, c - a
    return (u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]) / 2
