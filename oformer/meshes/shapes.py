"""The domains of electro- and magnetostatics as triangle meshes: square, disc, disc with a hole, L and U.

All lie in the unit square. Points on circles lie exactly on them, and the mesh knows the circles. Points on a border
have the mark 1, those around a hole 2.

Each shape also says which points the published data hold at zero (`held`, the predicates of the generator of
gnn-bvp-solver, Lötzsch, Ohler and Otterbach 2022): its border with a tolerance, which on disc and annulus is so wide
that points near the border may belong to it.

Differs: the published meshes, but the square, are gmsh's; ours have about as many points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oformer.errors import InputError
from oformer.meshes.delaunay import Size, fill, graded, spread
from oformer.meshes.triangles import Mesh

BORDER, HOLE = 1, 2  # marks of points

CENTER, RADIUS = (0.5, 0.5), 0.5  # of disc and annulus
COARSE = 0.125  # the wished length of edges where nothing is said: counts near those of the published meshes
AROUND_HOLE = 8  # points at least
GROWTH = 0.35  # of edges away from finer borders

ON_SQUARE, ON_BOX = 1e-5, 1e-3  # how near to the border counts as on it
NEAR_DISC = (2 / 15) ** 2  # the same for squares of radii
NEAR_ANNULUS = (1 / 8) ** 2


@dataclass(frozen=True)
class Square:
    """The unit square in `cells` x `cells` squares, each cut from its lower left to its upper right corner."""

    cells: int = 15

    def __post_init__(self) -> None:
        if self.cells < 2:
            raise InputError("at least 2 `cells` per axis", str(self.cells))

    def build(self) -> Mesh:
        """The mesh; points row by row, x fastest."""
        n = self.cells
        axis = torch.arange(n + 1, dtype=torch.float64) / n
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        row, column = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
        low = (row * (n + 1) + column).flatten()
        right, up, across = low + 1, low + n + 1, low + n + 2
        points = torch.stack([x, y], -1).reshape(-1, 2)
        return Mesh(
            points=points,
            triangles=torch.cat([torch.stack([low, right, across], 1), torch.stack([low, across, up], 1)]),
            marks=((points == 0) | (points == 1)).any(1).long(),
        ).check()

    def held(self, points: Float[Tensor, "points 2"]) -> Bool[Tensor, "points"]:
        """On the border, to 1e-5."""
        return _near_border_of_square(points, ON_SQUARE)


@dataclass(frozen=True)
class Disc:
    """The disc of radius 1/2 about (1/2, 1/2), with edges of about 1/`resolution`."""

    resolution: int = 15

    def __post_init__(self) -> None:
        if self.resolution < 4:
            raise InputError("a `resolution` of 4 or more", str(self.resolution))

    def build(self) -> Mesh:
        """The mesh."""
        rim = _circle(CENTER, RADIUS, round(2 * math.pi * RADIUS * self.resolution))
        return fill([rim], (BORDER,), _constant(1 / self.resolution), [(*CENTER, RADIUS)])

    def held(self, points: Float[Tensor, "points 2"]) -> Bool[Tensor, "points"]:
        """Nearer to the border than 0.018."""
        return _square_distance(points, CENTER) > RADIUS**2 - NEAR_DISC


@dataclass(frozen=True)
class Annulus:
    """The same disc with a round hole."""

    radius: float = 0.12  # of the hole
    center: tuple[float, float] = CENTER  # of the hole
    size: float = COARSE  # of edges, where the hole does not ask for shorter ones

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0.01 <= self.radius <= 0.4 or self._gap < 0.01:
            raise InputError(
                "a hole of `radius` 0.01 to 0.4 that stays 0.01 away from the rim of the disc",
                f"{self.radius:g} about {self.center}",
            )

    @property
    def _gap(self) -> float:
        """Between the hole and the rim, where they are nearest."""
        return RADIUS - self.radius - math.dist(self.center, CENTER)

    def build(self) -> Mesh:
        """The mesh."""

        def rim_size(points: np.ndarray) -> np.ndarray:
            to_hole = np.hypot(*(points - self.center).T) - self.radius
            return np.minimum(self.size, np.maximum(to_hole, self._gap))

        def hole_size(points: np.ndarray) -> np.ndarray:
            to_rim = RADIUS - np.hypot(*(points - CENTER).T)
            return np.minimum(min(self.size, 2 * math.pi * self.radius / AROUND_HOLE), np.maximum(to_rim, self._gap))

        rim, hole = _spaced_circle(CENTER, RADIUS, rim_size), _spaced_circle(self.center, self.radius, hole_size)
        loops = [rim, hole[::-1]]
        circles = [(*CENTER, RADIUS), (*self.center, self.radius)]
        return fill(loops, (BORDER, HOLE), graded(loops, GROWTH, self.size), circles)

    def held(self, points: Float[Tensor, "points 2"]) -> Bool[Tensor, "points"]:
        """Nearer to the rim than 0.016, or near to the hole: 0.029 for one of 0.12, 0.05 for one of 0.05."""
        outer = _square_distance(points, CENTER) > RADIUS**2 - NEAR_ANNULUS
        return outer | (_square_distance(points, self.center) < self.radius**2 + NEAR_ANNULUS / 2)


@dataclass(frozen=True)
class LShape:
    """The unit square without a box at one of its corners."""

    width: float = 0.5  # of the box
    height: float = 0.5
    corner: int = 0  # where it is cut: 0 lower left, 1 lower right, 2 upper right, 3 upper left
    size: float = COARSE  # of edges

    def __post_init__(self) -> None:
        _check_size(self.size)
        _check_cut("width", self.width)
        _check_cut("height", self.height)
        if self.corner not in range(4):
            raise InputError("a `corner` 0, 1, 2 or 3", str(self.corner))

    def build(self) -> Mesh:
        """The mesh."""
        right, top = self.corner in (1, 2), self.corner in (2, 3)
        w, h = self.width, self.height
        corners = np.array([(w, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, h), (w, h)])
        corners = np.abs(np.array([right, top], float) - corners)
        return _polygon(corners[::-1] if right != top else corners, self.size)

    def held(self, points: Float[Tensor, "points 2"]) -> Bool[Tensor, "points"]:
        """On the border or within the cut, to 1e-3."""
        right, top = self.corner in (1, 2), self.corner in (2, 3)
        x = 1 - points[:, 0] if right else points[:, 0]
        y = 1 - points[:, 1] if top else points[:, 1]
        cut = (x < self.width + ON_BOX) & (y < self.height + ON_BOX)
        return _near_border_of_square(points, ON_BOX) | cut


@dataclass(frozen=True)
class UShape:
    """The unit square without a box in the middle of its upper side."""

    width: float = 0.5  # of the box
    depth: float = 0.75
    size: float = COARSE  # of edges

    def __post_init__(self) -> None:
        _check_size(self.size)
        _check_cut("width", self.width)
        _check_cut("depth", self.depth)

    def build(self) -> Mesh:
        """The mesh."""
        left, right, floor = 0.5 - self.width / 2, 0.5 + self.width / 2, 1 - self.depth
        corners = [(0, 0), (1, 0), (1, 1), (right, 1), (right, floor), (left, floor), (left, 1), (0, 1)]
        return _polygon(np.array(corners, float), self.size)

    def held(self, points: Float[Tensor, "points 2"]) -> Bool[Tensor, "points"]:
        """On the border or within the cut, to 1e-3."""
        x, y = points.unbind(1)
        cut = ((x - 0.5).abs() < self.width / 2 + ON_BOX) & (y > 1 - self.depth - ON_BOX)
        return _near_border_of_square(points, ON_BOX) | cut


Shape: TypeAlias = Square | Disc | Annulus | LShape | UShape


def _constant(size: float) -> Size:
    return lambda points: np.full(len(points), size)


def _circle(center: Sequence[float], radius: float, points: int) -> Float[np.ndarray, "points 2"]:
    """Counterclockwise, the first not repeated."""
    return _on_circle(center, radius, 2 * math.pi * np.arange(points) / points)


def _on_circle(
    center: Sequence[float], radius: float, angle: Float[np.ndarray, "points"]
) -> Float[np.ndarray, "points 2"]:
    return np.array(center) + radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def _spaced_circle(center: Sequence[float], radius: float, size: Size) -> Float[np.ndarray, "_ 2"]:
    """The same at distances that vary, and exactly on the circle: `spread` walks along chords."""
    walked = spread(_circle(center, radius, 4000)[np.arange(4001) % 4000], size)[:-1] - np.array(center)
    return _on_circle(center, radius, np.arctan2(walked[:, 1], walked[:, 0]))


def _polygon(corners: Float[np.ndarray, "corners 2"], size: float) -> Mesh:
    """The inside of straight sides, counterclockwise, each cut evenly."""
    sides = []
    for start, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        pieces = max(1, round(float(np.linalg.norm(end - start)) / size))
        sides.append(start + (end - start) * np.arange(pieces)[:, None] / pieces)
    return fill([np.concatenate(sides)], (BORDER,), _constant(size))


def _near_border_of_square(points: Float[Tensor, "points 2"], tolerance: float) -> Bool[Tensor, "points"]:
    return ((points < tolerance) | (points > 1 - tolerance)).any(1)


def _square_distance(points: Float[Tensor, "points 2"], center: Sequence[float]) -> Float[Tensor, "points"]:
    return (points - torch.tensor(center, dtype=points.dtype)).square().sum(1)


def _check_size(size: float) -> None:
    if not 0.005 <= size <= 0.25:
        raise InputError("a `size` of edges between 0.005 and 0.25", str(size))


def _check_cut(name: str, length: float) -> None:
    if not 0.1 <= length <= 0.9:
        raise InputError(f"a `{name}` of the cut between 0.1 and 0.9", str(length))
