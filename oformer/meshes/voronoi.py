"""What points weigh by their cells: each the share of the domain that is nearer to it than to the others.

The cells are Voronoi's (1908). As weights they make a sum over scattered points a quadrature: the value at a point
stands for all that is near it. Equal weights on random points are a Monte-Carlo estimate, whose error falls with the
half order of their number only.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError
from oformer.fields import uniform_weights
from oformer.meshes.grids import line_weights

TIE = 1e-4  # receivers so little farther than the nearest share with it: on a grid rounding alone would choose one
PAIRS = 2**25  # of points at once, each a few numbers of memory
NEIGHBORS = 4  # asked of a tree at first; more where all of them are equally near
WALL = 1e-6  # of the box: how far its walls are moved out, for a point on a wall is its own mirror image


def given_to_nearest(
    givers: Float[Tensor, "batch givers dim"],
    weights: Float[Tensor, "batch givers"],
    receivers: Float[Tensor, "batch receivers dim"],
    valid: Bool[Tensor, "batch receivers"],
    periods: tuple[float, ...] | None = None,
) -> Float[Tensor, "batch receivers"]:
    """What each receiver gets when all points give their weight to the nearest, in equal parts where several are.

    The same on all devices: a tree of points on a CPU, which many points need; all pairs elsewhere, where they are
    quick, and where waiting for the host is not. Sums are in a fixed order.

    Args:
        givers: in any place; those of weight zero give nothing.
        weights: what they give.
        receivers: in any place.
        valid: which of them exist, at least one for each sample with givers.
        periods: of the domain.
    """
    search = _by_trees if givers.device.type == "cpu" else _by_pairs
    return search(givers, weights, receivers, valid, periods)


def _by_trees(
    givers: Float[Tensor, "batch givers dim"],
    weights: Float[Tensor, "batch givers"],
    receivers: Float[Tensor, "batch receivers dim"],
    valid: Bool[Tensor, "batch receivers"],
    periods: tuple[float, ...] | None,
) -> Float[Tensor, "batch receivers"]:
    from scipy.spatial import KDTree

    received = np.zeros(valid.shape)
    for sums, x, w, y, exists in zip(
        received, _wrapped(givers, periods), weights.double().numpy(), _wrapped(receivers, periods), valid.numpy(),
        strict=True,
    ):  # fmt: skip
        left, rows = np.flatnonzero(w), np.flatnonzero(exists)
        tree = KDTree(y[rows], boxsize=periods)
        count = NEIGHBORS
        while len(left):
            count = min(count, len(rows))
            distance, nearest = (np.reshape(found, (-1, count)) for found in tree.query(x[left], count))
            tied = distance <= distance[:, :1] * (1 + TIE)
            settled = ~tied[:, -1] | (count == len(rows))
            shares = tied * (w[left] / tied.sum(1))[:, None]
            sums += np.bincount(rows[nearest[settled]].ravel(), shares[settled].ravel(), len(sums))
            left, count = left[~settled], 2 * count
    return torch.from_numpy(received).to(weights.dtype)


def _wrapped(coords: Float[Tensor, "*batch points dim"], periods: tuple[float, ...] | None) -> np.ndarray:
    """In float64, and between zero and the period."""
    x = coords.double().numpy()
    if periods is None:
        return x
    x = x % periods
    return np.where(x < periods, x, 0.0)  # the rest of a tiny negative number is rounded up to the period


def _by_pairs(
    givers: Float[Tensor, "batch givers dim"],
    weights: Float[Tensor, "batch givers"],
    receivers: Float[Tensor, "batch receivers dim"],
    valid: Bool[Tensor, "batch receivers"],
    periods: tuple[float, ...] | None,
) -> Float[Tensor, "batch receivers"]:
    received = weights.new_zeros(valid.shape)
    chunk = max(1, PAIRS // max(1, valid.numel()))
    for x, w in zip(givers.split(chunk, 1), weights.split(chunk, 1), strict=True):
        squared = torch.zeros((), dtype=x.dtype, device=x.device)
        for axis in range(x.shape[-1]):
            apart = x[..., axis, None] - receivers[:, None, :, axis]
            if periods is not None:
                apart = apart - periods[axis] * (apart / periods[axis]).round()
            squared = squared + apart.square()
        squared = squared.masked_fill(~valid[:, None], torch.inf)
        tied = squared <= squared.amin(-1, keepdim=True) * (1 + TIE) ** 2
        received += (tied * (w / tied.sum(-1))[..., None]).sum(1)
    return received


def cell_weights(
    coords: Float[Tensor, "points dim"] | Float[np.ndarray, "points dim"],
    periods: tuple[float, ...] | None = None,
    box: Sequence[tuple[float, float]] | None = None,
) -> Float[Tensor, "points"]:
    """Quadrature weights of scattered points in a box: the share of it that is nearest to each.

    For points of your own that are denser in places, or random. They fill a box: where the domain has holes or inner
    corners, cells reach beyond it, and the weights of a mesh are better. On a line these are the half-gaps. In periodic
    space of three dimensions the work is that of 27 times the points.

    Args:
        coords: in one to three dimensions, in any order; points in one place share a cell.
        periods: of the domain along each axis, if it has them.
        box: the lowest and the highest coordinate along each axis; by default those of the points.

    Returns:
        Weights that sum to one, for `Field.of` and wherever weights are asked for.
    """
    x = torch.as_tensor(coords)
    if x.ndim != 2 or x.shape[1] not in (1, 2, 3) or not x.is_floating_point():
        raise InputError(
            "`coords` of shape (points, dim) in 1 to 3 dimensions, of floating-point numbers",
            f"{tuple(x.shape)} of {x.dtype}",
        )
    equal = uniform_weights(x)
    check_finite("coords", x)
    x = x.detach().cpu()
    if periods is not None:
        _check_axes("periods", periods, x.shape[-1])
        if box is not None:
            raise InputError("`periods` or `box`", "both", "A periodic domain has no walls; leave the box out")
        if not all(period > 0 for period in periods):
            raise InputError("periods above zero", str(periods))
    # The cells of places, which points in one place share.
    places, place, crowd = np.unique(_wrapped(x, periods), axis=0, return_inverse=True, return_counts=True)
    if len(places) == 1:
        return equal
    images = _walled(places, box) if periods is None else _repeated(places, periods)
    sizes = _cell_sizes(images, len(places))
    weights = (sizes / sizes.sum() / crowd)[place.reshape(-1)]
    return torch.from_numpy(weights).to(equal)


def _check_axes(name: str, given: Sequence, dim: int) -> None:
    if len(given) != dim:
        raise InputError(f"`{name}` with one entry per dimension ({dim})", str(given))


def _repeated(places: Float[np.ndarray, "places dim"], periods: tuple[float, ...]) -> Float[np.ndarray, "images dim"]:
    """The places first, then their copies on all sides."""
    steps = sorted(itertools.product((-1, 0, 1), repeat=len(periods)), key=np.count_nonzero)
    return np.concatenate([places + np.multiply(step, periods) for step in steps])


def _walled(
    places: Float[np.ndarray, "places dim"], box: Sequence[tuple[float, float]] | None
) -> Float[np.ndarray, "images dim"]:
    """The places first, then their mirror images behind each wall of the box: a wall lies halfway between the two."""
    low, high = places.min(0), places.max(0)
    if box is not None:
        _check_axes("box", box, places.shape[1])
        lowest, highest = np.array(box, np.float64).T
        if (low < lowest).any() or (high > highest).any():
            raise InputError("points inside the box", f"points from {low} to {high}", "Make the box larger")
        low, high = lowest, highest
    if not (low < high).all():
        raise InputError("a box with an extent along each axis", f"{low} to {high}", "Give the `box` of the domain")
    x, gap = places - low, WALL * (high - low)  # near zero, where floating-point numbers are dense
    images = [x]
    for axis, sides in enumerate(zip(-gap, high - low + gap, strict=True)):
        for side in sides:
            mirrored = x.copy()
            mirrored[:, axis] = 2 * side - x[:, axis]
            images.append(mirrored)
    return np.concatenate(images)


def _cell_sizes(images: Float[np.ndarray, "images dim"], count: int) -> Float[np.ndarray, "count"]:
    """Lengths, areas or volumes of the cells of the first so many points, up to a factor.

    A cell is made of pyramids over its faces, whose tip is the point; a face lies halfway to the neighbor behind it.
    """
    if images.shape[1] == 1:
        return line_weights(torch.from_numpy(images)).numpy()[:count]
    from scipy.spatial import Voronoi

    diagram = Voronoi(images)
    pairs, corners = diagram.ridge_points, diagram.ridge_vertices
    bounding = np.flatnonzero(pairs.min(1) < count)
    number = np.array([len(corners[row]) for row in bounding])
    sizes = np.zeros(len(images))
    for n in np.unique(number):
        rows = bounding[number == n]
        faces = _face_sizes(diagram.vertices[[corners[row] for row in rows]])
        one, other = pairs[rows].T
        pyramids = faces * np.linalg.norm(images[one] - images[other], axis=1)
        sizes += np.bincount(one, pyramids, len(images)) + np.bincount(other, pyramids, len(images))
    return sizes[:count]


def _face_sizes(corners: Float[np.ndarray, "faces corners dim"]) -> Float[np.ndarray, "faces"]:
    """The lengths of edges in the plane, the areas of polygons in space."""
    spokes = corners[:, 1:] - corners[:, :1]
    if corners.shape[2] == 2:
        return np.linalg.norm(spokes[:, 0], axis=1)
    return np.linalg.norm(np.cross(spokes[:, :-1], spokes[:, 1:]).sum(1), axis=1) / 2
