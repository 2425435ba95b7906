"""Interpolation between scattered points: moving least squares over the nearest ones.

The value at y is that of the line or plane that fits the values v_j at the nearest points x_j best, each weighted by

    φ_j = w_j (1 - d_j / R)²₊ / (d_j² + δ R²),    d_j = |x_j - y|,

with the quadrature weights w_j and the distance R of the 3^dim-th of the nearest points (Franke and Little's weights;
Lancaster and Šalkauskas, 1981). So linear functions are reproduced, values at the points are met up to δ, a point at
distance R counts nothing (the answer is continuous where the nearest points change), a point of weight zero is not
felt, and a point split in two of half the weight changes nothing, since points at the same place are counted once.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

SOFTENING = 1e-8  # δ: at a point itself, others keep this share
RIDGE = 1e-6  # of the spread of the nearest points, where they lie on a line or at one place
PAIRS = 2**26  # of a query and a point, whose distances are computed at once: 256 MiB in float32


def interpolate(
    values: Float[Tensor, "batch points channels"],
    coords: Float[Tensor, "batch points dim"],
    weights: Float[Tensor, "batch points"],
    at: Float[Tensor, "batch queries dim"],
    periods: tuple[float, ...] | None = None,
) -> Float[Tensor, "batch queries channels"]:
    """Values at other points.

    Args:
        values: at the points.
        coords: of the points.
        weights: of quadrature; a point of weight zero counts as absent.
        at: where values are wanted.
        periods: of the domain along each axis, in the unit of the coordinates; distances are then across them.
    """
    shared = all(t.shape[0] > 1 and t.stride(0) == 0 for t in (coords, weights, at))
    if shared:  # one set of points and queries for the whole batch
        coords, weights, at = coords[:1], weights[:1], at[:1]
    chunk = max(1, PAIRS // (coords.shape[0] * coords.shape[1]))
    parts = [_stencils(coords, weights, some, periods) for some in at.split(chunk, 1)]
    nearest, share = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    found = torch.zeros((values.shape[0], at.shape[1], values.shape[2]), dtype=values.dtype, device=values.device)
    rows = nearest.expand(values.shape[0], -1, -1)
    for j in range(nearest.shape[2]):
        of_point = values.gather(1, rows[:, :, j, None].expand(-1, -1, values.shape[2]))
        found = found + share[:, :, j, None].to(values.dtype) * of_point
    return found


def _stencils(
    coords: Float[Tensor, "batch points dim"],
    weights: Float[Tensor, "batch points"],
    at: Float[Tensor, "batch queries dim"],
    periods: tuple[float, ...] | None,
) -> tuple[Int[Tensor, "batch queries near"], Float[Tensor, "batch queries near"]]:
    """Which points each query reads, and the share of each in its value; the shares sum to one."""
    dim = coords.shape[-1]
    wanted = 3**dim
    with torch.no_grad():
        # Twice as many, since some may lie at the same place.
        nearest = _nearest(coords, weights, at, periods, min(2 * wanted, coords.shape[1]))
        rows = nearest.flatten(1)
    near = coords.gather(1, rows[..., None].expand(-1, -1, dim)).unflatten(1, nearest.shape[1:])
    mass = weights.gather(1, rows).unflatten(1, nearest.shape[1:])
    offset = _shortest(near - at[:, :, None], periods)
    distance_squared = offset.square().sum(-1)

    with torch.no_grad():  # which point gives R, of those that are there and not at the place of a nearer one
        same = (near[:, :, :, None] == near[:, :, None]).all(-1)
        new = ~torch.tril(same, -1).any(-1) & (mass > 0)
        counted = new.cumsum(-1)
        enough = counted[..., -1:] >= wanted
        furthest = torch.where(new & (counted <= wanted), distance_squared, -1.0).argmax(-1, keepdim=True)
    radius_squared = distance_squared.gather(-1, furthest)
    radius = torch.where(enough, radius_squared, 4 * radius_squared).clamp_min(1e-30).sqrt()

    # In units of R from here on.
    offset = offset / radius[..., None]
    d2 = distance_squared / radius.square()
    distance = torch.where(d2 > 0, d2, 1.0).sqrt() * (d2 > 0)  # whose gradient at zero would be infinite
    phi = mass * (1 - distance).clamp_min(0).square() / (d2 + SOFTENING)
    phi = phi / phi.sum(-1, keepdim=True)
    mean = (phi[..., None] * offset).sum(-2, keepdim=True)
    centered = offset - mean
    spread = (phi[..., None, None] * centered[..., :, None] * centered[..., None, :]).sum(-3)
    slope = _solved(spread, -mean.squeeze(-2))
    return nearest, phi * (1 + (centered * slope[..., None, :]).sum(-1))


def _nearest(
    coords: Float[Tensor, "batch points dim"],
    weights: Float[Tensor, "batch points"],
    at: Float[Tensor, "batch queries dim"],
    periods: tuple[float, ...] | None,
    count: int,
) -> Int[Tensor, "batch queries near"]:
    """The nearest points of positive weight for each query, then any others where there are too few.

    On a CPU they come from a k-d tree, in n log n operations. Elsewhere the distances of all pairs are compared, and so
    are those of tensors that are traced or transformed, which have no numbers to build a tree of.
    """
    if not all(_has_numbers(tensor) for tensor in (coords, weights, at)):
        squares = _squares(coords, at, periods).masked_fill((weights <= 0)[:, None], torch.inf)
        return squares.topk(count, -1, largest=False).indices
    found = [_by_tree(x, w > 0, y, periods, count) for x, w, y in zip(coords, weights, at, strict=True)]
    return torch.stack([torch.from_numpy(rows) for rows in found])


def _has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is plain memory of the CPU: not on a GPU, being compiled, exported or under `torch.func`."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    if not plain or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # torch has no public name for the question.
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _by_tree(
    coords: Float[Tensor, "points dim"],
    present: Bool[Tensor, "points"],
    at: Float[Tensor, "queries dim"],
    periods: tuple[float, ...] | None,
    count: int,
) -> Int[np.ndarray, "queries near"]:
    """`_nearest` for one sample."""
    from scipy.spatial import KDTree

    points, queries = coords.detach().double().numpy(), at.detach().double().numpy()
    if periods is not None:
        points, queries = (np.mod(x, periods) % periods for x in (points, queries))  # twice: -1e-20 rounds to a period
    there, absent = np.flatnonzero(present.numpy()), np.flatnonzero(~present.numpy())
    near = min(count, len(there))
    if not near:
        return np.broadcast_to(absent[:count], (len(queries), count)).copy()
    tree = KDTree(points[there], boxsize=periods)
    _, rows = tree.query(queries, k=near, workers=torch.get_num_threads())
    others = np.broadcast_to(absent[: count - near], (len(queries), count - near))
    return np.concatenate([there[rows].reshape(-1, near), others], 1)


def _squares(coords: Tensor, at: Tensor, periods: tuple[float, ...] | None) -> Float[Tensor, "batch queries points"]:
    """Squared distances of all pairs, axis by axis."""
    total = torch.zeros((), dtype=coords.dtype, device=coords.device)
    for axis in range(coords.shape[-1]):
        difference = coords[:, None, :, axis] - at[:, :, None, axis]
        total = total + _shortest(difference[..., None], periods and periods[axis : axis + 1])[..., 0].square()
    return total


def _shortest(difference: Float[Tensor, "*any dim"], periods: tuple[float, ...] | None) -> Float[Tensor, "*any dim"]:
    """Differences of coordinates, the short way round where the domain is periodic."""
    if periods is None:
        return difference
    period = torch.tensor(periods, dtype=difference.dtype, device=difference.device)
    return difference - period * (difference / period).round()


def _solved(matrix: Float[Tensor, "*any dim dim"], right: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any dim"]:
    """Solution of small symmetric systems, positive after a ridge is added, by elimination."""
    dim = matrix.shape[-1]
    trace = sum(matrix[..., i, i] for i in range(dim))
    ridge = RIDGE * trace + torch.finfo(matrix.dtype).tiny
    rows = [[matrix[..., i, j] + (ridge if i == j else 0.0) for j in range(dim)] for i in range(dim)]
    b = [right[..., i] for i in range(dim)]
    for i in range(dim):
        for k in range(i + 1, dim):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
            b[k] = b[k] - factor * b[i]
    found: list[Tensor] = []
    for i in reversed(range(dim)):
        later = sum((rows[i][j] * found[dim - 1 - j] for j in range(i + 1, dim)), torch.zeros_like(b[i]))
        found.append((b[i] - later) / rows[i][i])
    return torch.stack(found[::-1], -1)
