"""From a border and a wish for the size of edges to a triangle mesh: Delaunay refinement, then smoothing.

Points are added at the centers of circumscribed circles that are too large, the worst first, as in Ruppert (1995) and
Chew (1993): a new point is at least a radius away from all others, which keeps angles wide. Then each inner point moves
to the mean of the triangles around it, weighed so that small triangles stay where small ones are wanted (the density of
Du, Faber and Gunzburger 1999). Border points stay where they are given.

Sizes may range over five decades, as around an airfoil. (netgen 6.2, which was tried first, leaves triangles of quality
below 0.03 around one when edges are to grow by 0.1 of the distance or less.) scipy's Delaunay (Qhull) gives the same
triangles for the same points.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from oformer.errors import InputError
from oformer.meshes.triangles import Mesh

Size = Callable[[np.ndarray], np.ndarray]  # points (n, 2) to the wished length of edges there, (n,)

TOO_LARGE = 0.72  # circumradius over wished edge from which on a triangle is refined; an equilateral one has 0.58
ROUNDS = 500  # of refinement; each adds at least a point, most double their number
SMOOTHING = 10  # moves of all points
FLAT = 1e-10  # twice the area over the square of the longest side, below which a triangle is none


def fill(
    loops: Sequence[Float[np.ndarray, "_ 2"]],
    marks: Sequence[int],
    size: Size,
    circles: Sequence[tuple[float, float, float]] = (),
) -> Mesh:
    """The mesh of what lies to the left of closed loops, with exactly their points on its border.

    Args:
        loops: the outer one counterclockwise, holes clockwise; the last point is joined with the first.
        marks: of the points of each loop.
        size: should agree with the spacing of the loops: a border edge much longer than it may be lost.
        circles: that the border follows.
    """
    fixed = np.concatenate(loops)
    starts, ends = fixed, np.concatenate([np.roll(loop, -1, axis=0) for loop in loops])
    points, triangles = _refine(fixed, starts, ends, size)
    points, triangles = _smooth(points, triangles, len(fixed), starts, ends, size)
    counts = [len(loop) for loop in loops]
    offsets = np.cumsum([0, *counts[:-1]]).tolist()
    mark = np.zeros(len(points), np.int64)
    mark[: len(fixed)] = np.repeat(marks, counts)
    mesh = Mesh(
        points=torch.from_numpy(points),
        triangles=torch.from_numpy(triangles),
        marks=torch.from_numpy(mark),
        circles=torch.tensor(list(circles), dtype=torch.float64).reshape(len(circles), 3),
    )
    ahead = torch.cat([torch.arange(len(loop)).roll(-1) + start for loop, start in zip(loops, offsets, strict=True)])
    wished = torch.stack([torch.arange(len(fixed)), ahead], 1)
    lost = len(fixed) - int((wished[:, None] == mesh.border).all(2).any(1).sum())
    if lost or len(mesh.border) != len(fixed):
        raise InputError(
            "loops whose edges can be sides of triangles",
            f"{lost} of {len(fixed)} that cannot",
            "Space the points of the border as `size` says, and more closely where two borders are near",
        )
    return mesh.check()


def spread(curve: Float[np.ndarray, "_ 2"], size: Size, count: int | None = None) -> Float[np.ndarray, "_ 2"]:
    """Points along a curve, ends included, at distances in proportion to `size`.

    Args:
        curve: dense points; between them it is straight.
        size: the wished distances.
        count: of intervals; by default so many that the distances are about the wished ones.
    """
    steps = np.linalg.norm(np.diff(curve, axis=0), axis=1)
    density = 1 / size(curve)
    wished = np.concatenate([[0], np.cumsum(steps * (density[1:] + density[:-1]) / 2)])
    count = count or max(1, round(wished[-1]))
    at = np.interp(np.linspace(0, wished[-1], count + 1), wished, np.arange(len(curve)))
    points = np.stack([np.interp(at, np.arange(len(curve)), curve[:, i]) for i in (0, 1)], 1)
    points[0], points[-1] = curve[0], curve[-1]
    return points


def graded(loops: Sequence[Float[np.ndarray, "_ 2"]], growth: float, largest: float) -> Size:
    """The size that the spacing of loops suggests: theirs on them, growing with the distance.

    Args:
        loops: closed.
        growth: of the size, per distance.
        largest: the size is never more.
    """
    points = np.concatenate(loops)
    ahead = np.concatenate([np.linalg.norm(np.roll(loop, -1, axis=0) - loop, axis=1) for loop in loops])
    behind = np.concatenate([np.linalg.norm(np.roll(loop, 1, axis=0) - loop, axis=1) for loop in loops])
    spacing = (ahead + behind) / 2

    def size(x: np.ndarray) -> np.ndarray:
        distance = np.hypot(x[:, :1] - points[:, 0], x[:, 1:] - points[:, 1])
        return np.minimum((spacing + growth * distance).min(1), largest)

    return size


def _refine(
    fixed: Float[np.ndarray, "_ 2"], starts: Float[np.ndarray, "_ 2"], ends: Float[np.ndarray, "_ 2"], size: Size
) -> tuple[Float[np.ndarray, "_ 2"], Int[np.ndarray, "_ 3"]]:
    from scipy.spatial import KDTree

    middles, halves = (starts + ends) / 2, np.linalg.norm(ends - starts, axis=1) / 2
    points = fixed
    for _ in range(ROUNDS):
        triangles = _triangulate(points, starts, ends)
        centers, radii = _circumscribed(points, triangles)
        excess = radii / size(centers)
        kept = excess > TOO_LARGE
        kept[kept] = _inside(centers[kept], starts, ends)
        # A point in the circle over a border edge would take the edge out of the triangulation.
        near = np.hypot(centers[kept, :1] - middles[:, 0], centers[kept, 1:] - middles[:, 1]) < halves
        kept[kept] = ~near.any(1)
        if not kept.any():
            return points, triangles
        centers, radii, excess = centers[kept], radii[kept], excess[kept]
        order = np.lexsort((centers[:, 1], centers[:, 0], -excess))  # places break ties: no order of triangles matters
        centers, radii = centers[order], radii[order]
        around = KDTree(centers).query_ball_point(centers, radii)
        free, chosen = np.ones(len(centers), bool), []
        for i, close in enumerate(around):
            if free[i]:
                chosen.append(i)
                free[close] = False
        points = np.concatenate([points, centers[chosen]])
    raise InputError(
        "a size of edges that refinement can reach",
        f"{len(points)} points after {ROUNDS} rounds",
        "Ask for larger edges",
    )


def _smooth(
    points: Float[np.ndarray, "_ 2"],
    triangles: Int[np.ndarray, "_ 3"],
    fixed: int,
    starts: Float[np.ndarray, "_ 2"],
    ends: Float[np.ndarray, "_ 2"],
    size: Size,
) -> tuple[Float[np.ndarray, "_ 2"], Int[np.ndarray, "_ 3"]]:
    for _ in range(SMOOTHING):
        corners = points[triangles]
        centroids = corners.mean(1)
        weight = _twice_areas(corners) / size(centroids) ** 3
        flat = triangles.ravel()
        sums = [np.bincount(flat, np.repeat(w, 3), len(points)) for w in (weight, *(weight * centroids.T))]
        points = np.concatenate([points[:fixed], np.stack([sums[1] / sums[0], sums[2] / sums[0]], 1)[fixed:]])
        triangles = _triangulate(points, starts, ends)
    return points, triangles


def _triangulate(
    points: Float[np.ndarray, "_ 2"], starts: Float[np.ndarray, "_ 2"], ends: Float[np.ndarray, "_ 2"]
) -> Int[np.ndarray, "_ 3"]:
    """The Delaunay triangles inside, counterclockwise."""
    from scipy.spatial import Delaunay

    triangles = Delaunay(points).simplices.astype(np.int64)
    corners = points[triangles]
    longest = ((corners - np.roll(corners, 1, axis=1)) ** 2).sum(2).max(1)
    # Rounding leaves flat triangles between border points on one line.
    kept = np.abs(_twice_areas(corners)) > FLAT * longest
    kept[kept] = _inside(corners[kept].mean(1), starts, ends)
    triangles = triangles[kept]
    clockwise = _twice_areas(points[triangles]) < 0
    triangles[clockwise] = triangles[clockwise, ::-1]
    return triangles


def _inside(
    points: Float[np.ndarray, "points 2"], starts: Float[np.ndarray, "sides 2"], ends: Float[np.ndarray, "sides 2"]
) -> Bool[np.ndarray, "points"]:
    """Whether a ray to the right crosses the border an odd number of times."""
    slope = (ends[:, 0] - starts[:, 0]) / np.where(ends[:, 1] == starts[:, 1], 1.0, ends[:, 1] - starts[:, 1])
    x, y = points[:, :1], points[:, 1:]
    crosses = ((starts[:, 1] > y) != (ends[:, 1] > y)) & (x < starts[:, 0] + (y - starts[:, 1]) * slope)
    return crosses.sum(1) % 2 == 1


def _circumscribed(
    points: Float[np.ndarray, "points 2"], triangles: Int[np.ndarray, "cells 3"]
) -> tuple[Float[np.ndarray, "cells 2"], Float[np.ndarray, "cells"]]:
    """Centers and radii of the circles through the corners."""
    a = points[triangles[:, 0]]
    u, v = points[triangles[:, 1]] - a, points[triangles[:, 2]] - a
    uu, vv = (u**2).sum(1), (v**2).sum(1)
    turned = np.stack([v[:, 1] * uu - u[:, 1] * vv, u[:, 0] * vv - v[:, 0] * uu], 1)
    offset = turned / (2 * _twice_areas(points[triangles]))[:, None]
    return a + offset, np.hypot(offset[:, 0], offset[:, 1])


def _twice_areas(corners: Float[np.ndarray, "cells 3 2"]) -> Float[np.ndarray, "cells"]:
    u, v = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
