"""A graded mesh around an airfoil of the NACA 4-digit family, to a circle far away.

The profile MPXX has the thickness XX in percent of the chord and, where M is not 0, a camber line of M percent whose
highest point lies at P tenths (Jacobs, Ward and Pinkerton, NACA Report 460, 1933). The last coefficient of the
thickness is 0.1036 in place of 0.1015, which closes the trailing edge.

The mesh is of the kind, the size and the grading of the published one (200 points on the wall, 50 on a circle of 20
chords, 5,233 in all): fine at the trailing edge, less so at the leading edge, and edges that grow with the distance.

Differs: of the published mesh these counts and a few lengths are known, not the points. Ours lie on the wall at
distances that grow as the triangles around them do, which keeps these near to equilateral.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from oformer.errors import InputError
from oformer.meshes.delaunay import fill, graded, spread
from oformer.meshes.triangles import Mesh

INSIDE, WALL, FAR_FIELD = 0, 1, 2  # marks of points

THICKNESS = (0.2969, -0.1260, -0.3516, 0.2843, -0.1036)  # of sqrt(x), x, x^2, x^3, x^4
DENSE = 20_000  # points of a curve on which those of the mesh are placed


@dataclass(frozen=True)
class Naca:
    """Around an airfoil of chord 1 from (0, 0) to (1, 0), to a circle about the origin.

    Points are marked `INSIDE`, `WALL` or `FAR_FIELD`. Those on the wall of a symmetric profile lie symmetrically;
    with `mirrored` the whole mesh is its own mirror image, bit by bit, with points on the axis.

    Values that work: the defaults. `growth` sets the number of points, which falls with its square, about.
    """

    profile: str = "0012"
    wall: int = 200  # points, half of them on each side
    far_field: int = 50  # points
    radius: float = 20.0  # of the far field
    trailing: float = 3.2e-4  # length of the edges at the trailing edge
    leading: float = 2.8e-3  # and at the leading edge
    growth: float = 0.1352  # of the length of edges, per distance
    mirrored: bool = False

    def __post_init__(self) -> None:
        if len(self.profile) != 4 or not self.profile.isdecimal() or not 1 <= int(self.profile[2:]) <= 40:
            raise InputError("a NACA `profile` of 4 digits, the last two 01 to 40", f"`{self.profile}`", "Try 0012")
        if (self.profile[0] == "0") != (self.profile[1] == "0"):
            raise InputError("both of the first two digits of `profile` 0, or none", f"`{self.profile}`", "Try 2412")
        if self.mirrored and self.profile[0] != "0":
            raise InputError("a symmetric `profile` for a `mirrored` mesh", f"`{self.profile}`", "Try 0012")
        for name in ("wall", "far_field"):
            if getattr(self, name) < 16 or getattr(self, name) % 2:
                raise InputError(f"an even number, 16 or more, of points for `{name}`", str(getattr(self, name)))
        if not (math.isfinite(self.radius) and self.radius >= 3):
            raise InputError("a `radius` of 3 chords or more", str(self.radius))
        for name in ("trailing", "leading", "growth"):
            if not 0 < getattr(self, name) <= 0.3:
                raise InputError(f"a `{name}` between 0 and 0.3", str(getattr(self, name)))

    def build(self) -> Mesh:
        """The mesh; takes seconds."""
        upper, lower = (self._side(up) for up in (True, False))  # both from the leading to the trailing edge
        angle = 2 * math.pi * np.arange(self.far_field) / self.far_field
        circle = self.radius * np.stack([np.cos(angle), np.sin(angle)], 1)
        body = np.concatenate([upper[:-1], lower[:0:-1]])  # clockwise: the fluid is on the left
        size = graded([circle, body], self.growth, 1.25 * self.radius * angle[1])
        circles = ((0.0, 0.0, self.radius),)
        if not self.mirrored:
            return fill([circle, body], (FAR_FIELD, WALL), size, circles)

        half = circle[: self.far_field // 2 + 1].copy()
        half[-1] = -self.radius, 0.0
        front = spread(_line((-self.radius, 0.0), (0.0, 0.0)), size)
        back = spread(_line((1.0, 0.0), (self.radius, 0.0)), size)
        pieces = [half[:-1], front[:-1], upper[:-1], back[:-1]]
        loop = np.concatenate(pieces)
        marks = np.repeat((FAR_FIELD, INSIDE, WALL, INSIDE), [len(piece) for piece in pieces])
        marks[[len(half) - 1, len(loop) - len(back) + 1]] = FAR_FIELD, WALL  # the corners begin the next piece
        return _reflected(fill([loop], (INSIDE,), size, circles), torch.from_numpy(marks))

    def _side(self, up: bool) -> Float[np.ndarray, "_ 2"]:
        """One side of the wall, spaced by its length: leading and trailing size, growing towards the middle."""
        curve = profile(self.profile, 0.5 * (1 - np.cos(np.linspace(0, math.pi, DENSE))), up)
        length = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(curve, axis=0), axis=1))])
        ends = np.minimum(self.leading + self.growth * length, self.trailing + self.growth * (length[-1] - length))
        # The largest size that makes the wished number of points: more points where it is smaller.
        low, high = length[-1] / self.wall, 1.0
        steps = np.diff(length)
        for _ in range(60):
            middle = math.sqrt(low * high)
            density = 1 / np.minimum(ends, middle)
            too_many = (steps * (density[1:] + density[:-1]) / 2).sum() > self.wall // 2
            low, high = (middle, high) if too_many else (low, middle)
        sizes = np.minimum(ends, high)
        return spread(curve, lambda _: sizes, self.wall // 2)


def profile(digits: str, x: Float[np.ndarray, "points"], up: bool) -> Float[np.ndarray, "points 2"]:
    """The upper or lower side of a NACA 4-digit profile.

    Args:
        digits: its name.
        x: along the chord, 0 to 1; with camber, points are moved along it.
        up: the upper side.
    """
    camber, place, thickness = int(digits[0]) / 100, int(digits[1]) / 10, int(digits[2:]) / 100
    a, b, c, d, e = THICKNESS
    half = 5 * thickness * (a * np.sqrt(x) + x * (b + x * (c + x * (d + x * e))))
    half = np.where(x == 1, 0.0, half)  # closed, not to round-off but exactly
    side = half if up else -half
    if camber == 0:
        return np.stack([x, side], 1)
    ahead = x < place
    span = np.where(ahead, place, 1 - place)
    line = camber / span**2 * np.where(ahead, 2 * place * x - x**2, 1 - 2 * place + 2 * place * x - x**2)
    tilt = np.arctan(2 * camber / span**2 * (place - x))
    return np.stack([x - side * np.sin(tilt), line + side * np.cos(tilt)], 1)


def _line(start: tuple[float, float], end: tuple[float, float]) -> Float[np.ndarray, "points 2"]:
    # Dense at both ends: near the airfoil sizes change by decades within a percent of the line.
    share = 0.5 * (1 - np.cos(np.linspace(0, math.pi, DENSE)))[:, None]
    return np.array(start) * (1 - share) + np.array(end) * share


def _reflected(half: Mesh, marks: torch.Tensor) -> Mesh:
    """The mesh of the upper half and its mirror image, which share the points on the axis."""
    points = half.points.clone()
    n, border = len(points), len(marks)
    below = torch.arange(n)
    moved = points[:, 1] != 0
    below[moved] = torch.arange(n, n + int(moved.sum()))
    image = points[moved] * torch.tensor([1.0, -1.0], dtype=points.dtype)
    all_marks = torch.cat([marks, half.marks.new_zeros(n - border)])
    return Mesh(
        points=torch.cat([points, image]),
        triangles=torch.cat([half.triangles, below[half.triangles].flip(1)]),
        marks=torch.cat([all_marks, all_marks[moved]]),
        circles=half.circles,
    ).check()
