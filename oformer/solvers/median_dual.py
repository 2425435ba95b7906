"""The median dual of a triangle mesh: the control volumes of node-centered finite volumes.

Each triangle is cut into three by the segments from its centroid to the midpoints of its edges, and a node owns the
pieces around it. The two segments beside an edge (one on the border) are the face between its ends; n is the integral
of the unit normal over it. All volumes close: the normals of a node's faces and of its share of the border sum to zero.

Nodes are kept as a table of neighbors, padded to the largest number of them. A padded slot names the node itself and
has a normal of zero, so that sums over slots need no scatter and are the same on every run. Nodes are renumbered:
interior ones first, in reverse Cuthill-McKee order, so that neighbors lie near in memory, then the far field, then
walls.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError

INTERIOR, WALL, FAR = 0, 1, 2  # marks of nodes


@dataclass(frozen=True)
class MedianDual:
    """Faces and volumes around the nodes, in float64 on the CPU; all but `order` is in the new numbering."""

    order: Int[Tensor, "points"]  # the old number of each node
    far: int  # the first node of the far field
    wall: int  # and of the wall, which goes to the end
    neighbors: Int[Tensor, "slots points"]
    normals: Float[Tensor, "2 slots points"]  # from the node to its neighbor, as long as the face
    reaches: Float[Tensor, "2 slots points"]  # the way to the neighbor
    real: Float[Tensor, "slots points"]  # one where there is a neighbor, zero in padded slots
    border: Float[Tensor, "2 points"]  # outward; zero inside
    volumes: Float[Tensor, "points"]


def median_dual(
    points: Float[Tensor, "points 2"], triangles: Int[Tensor, "cells 3"], marks: Int[Tensor, "points"]
) -> MedianDual:
    """Faces and volumes of a mesh.

    The numbering, and the order of each node's neighbors, depend on the connections alone: a mirrored mesh gives
    mirrored numbers, to the last bit.

    Args:
        points: the nodes.
        triangles: their corners, all one way around; both ways are taken.
        marks: 0 for nodes inside, 1 on a wall, 2 on the far field.
    """
    x, cells, kinds = points.double().cpu().numpy(), triangles.cpu().numpy(), marks.cpu().numpy()
    n = len(x)
    check_finite("points", points)
    _check_cells(cells, n)
    a, b, c = (x[cells[:, k]] for k in range(3))
    area = ((b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (b[:, 1] - a[:, 1]) * (c[:, 0] - a[:, 0])) / 2
    way = np.sign(area.sum())
    if not (area * way > 0).all():
        raise InputError(
            "triangles of positive area, all one way around",
            f"{int((area * way <= 0).sum())} others",
            "Turn or remove them",
        )
    volumes = np.bincount(cells.ravel(), np.repeat(area * way / 3, 3), n)

    # Half faces: the segment from an edge's midpoint to the centroid, its normal pointing from the first end on.
    centroid = (a + b + c) / 3
    ends = np.concatenate([cells[:, [k, (k + 1) % 3]] for k in range(3)])
    half = np.tile(centroid, (3, 1)) - x[ends].mean(1)
    half = way * np.stack([half[:, 1], -half[:, 0]], 1)
    forward = ends[:, 0] < ends[:, 1]
    key = np.where(forward, ends[:, 0] * n + ends[:, 1], ends[:, 1] * n + ends[:, 0])
    edge, first, place, count = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    if count.max() > 2:
        raise InputError("at most two triangles on an edge", f"{int(count.max())}", "Repair the mesh")
    half *= np.where(forward, 1.0, -1.0)[:, None]
    normal = np.stack([np.bincount(place, half[:, k], len(edge)) for k in range(2)], 1)

    outer = ends[first[count == 1]]
    border = _border(x, outer, kinds, way)
    order, far, wall = _numbering(edge // n, edge % n, kinds)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)

    # Both directions of each edge, sorted by node and then by edge, become the slots of the node.
    source = rank[np.concatenate([edge // n, edge % n])]
    target = rank[np.concatenate([edge % n, edge // n])]
    both = np.concatenate([normal, -normal])
    sorting = np.lexsort((target, source))
    source, target, both = source[sorting], target[sorting], both[sorting]
    degree = np.bincount(source, minlength=n)
    slot = np.arange(len(source)) - np.repeat(np.cumsum(degree) - degree, degree)
    slots = int(degree.max())
    neighbors = np.tile(np.arange(n), (slots, 1))
    normals, real = np.zeros((2, slots, n)), np.zeros((slots, n))
    neighbors[slot, source] = target
    normals[:, slot, source] = both.T
    real[slot, source] = 1.0
    new = x[order]
    return MedianDual(
        order=torch.from_numpy(order),
        far=far,
        wall=wall,
        neighbors=torch.from_numpy(neighbors),
        normals=torch.from_numpy(normals),
        reaches=torch.from_numpy(np.moveaxis(new[neighbors] - new, -1, 0).copy()),
        real=torch.from_numpy(real),
        border=torch.from_numpy(border[order].T.copy()),
        volumes=torch.from_numpy(volumes[order]),
    )


def _check_cells(cells: np.ndarray, n: int) -> None:
    if len(cells) == 0 or cells.min() < 0 or cells.max() >= n:
        raise InputError(f"triangles whose corners are numbers of the {n} points", "others or none")
    unused = n - len(np.unique(cells))
    if unused:
        raise InputError("points that are all corners of triangles", f"{unused} that are not", "Remove them")


def _border(x: np.ndarray, outer: np.ndarray, kinds: np.ndarray, way: float) -> np.ndarray:
    """The outward normal of each node's share of the border: half of both edges on it."""
    on_border = np.zeros(len(x), bool)
    on_border[outer] = True
    known = np.isin(kinds, (INTERIOR, WALL, FAR)).all()
    if not known or not np.array_equal(on_border, kinds != INTERIOR):
        raise InputError(
            "`marks` of 1 (wall) or 2 (far field) on the border of the mesh and 0 inside",
            f"{int((on_border != (kinds != INTERIOR)).sum())} nodes marked otherwise" if known else "other numbers",
        )
    if (kinds[outer[:, 0]] != kinds[outer[:, 1]]).any():
        raise InputError("borders that are wall or far field all around", "an edge from one to the other")
    along = x[outer[:, 1]] - x[outer[:, 0]]
    outward = way * np.stack([along[:, 1], -along[:, 0]], 1) / 2
    return np.stack([np.bincount(outer.ravel(), np.repeat(outward[:, k], 2), len(x)) for k in range(2)], 1)


def _numbering(one: np.ndarray, other: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Old numbers in the new order, and where the far field and the wall begin."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    n = len(kinds)
    graph = coo_array((np.ones(len(one)), (one, other)), (n, n)).tocsr()
    near = reverse_cuthill_mckee(graph + graph.T, symmetric_mode=True).astype(np.int64)
    groups = [near[kinds[near] == kind] for kind in (INTERIOR, FAR, WALL)]
    return np.concatenate(groups), len(groups[0]), n - len(groups[2])
