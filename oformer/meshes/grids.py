"""Uniform grids with their quadrature weights, and weights for scattered points on a line."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oformer.errors import InputError


def periodic_grid(points: tuple[int, ...], periods: tuple[float, ...]) -> Float[Tensor, "points dim"]:
    """Points j/n of each period, the end not repeated; row-major, the last axis fastest."""
    return _grid([torch.arange(n, dtype=torch.float64) * (p / n) for n, p in zip(points, periods, strict=True)])


def thinning(full: tuple[int, ...], wanted: tuple[int, ...], periodic: bool) -> tuple[int, ...]:
    """The stride per axis that leaves `wanted` of `full` grid points, counting from the first.

    On a periodic grid the stride must divide the number of points, or the last gap would differ from the others.
    """
    strides = []
    for n, m in zip(full, wanted, strict=True):
        possible = {-(-n // stride): stride for stride in range(n, 0, -1) if not periodic or n % stride == 0}
        if m not in possible:
            near = sorted(sorted(possible, key=lambda p: abs(p - m))[:4])
            raise InputError(
                f"a number of points that a stride through {n} gives", str(m), f"Near ones: {', '.join(map(str, near))}"
            )
        strides.append(possible[m])
    return tuple(strides)


def line_weights(
    coords: Float[Tensor, "*batch points 1"],
    period: float | None = None,
    valid: Bool[Tensor, "*batch points"] | None = None,
) -> Float[Tensor, "*batch points"]:
    """Quadrature weights of scattered points on a line: each point weighs the half-gaps to its neighbors.

    Second order where the points are dense, against the half order of equal weights on random points.

    Args:
        coords: in any order.
        period: the period of the line; without it the ends weigh their inner half-gap only.
        valid: which points exist (the others get weight zero).
    """
    x = coords[..., 0]
    if valid is None:
        valid = torch.ones_like(x, dtype=torch.bool)
    count = valid.sum(-1, keepdim=True)
    # Missing points sort to the end, where no gap reaches them.
    last = torch.where(valid, x, x.new_tensor(-torch.inf)).amax(-1, keepdim=True)
    ordered, order = torch.where(valid, x, x.new_tensor(torch.inf)).sort(-1)
    ordered = torch.where(torch.isinf(ordered), last, ordered)
    gaps = ordered.diff(dim=-1)
    first = ordered[..., :1]
    wrap = torch.zeros_like(first) if period is None else (first + period - last).clamp_min(0)
    left = torch.cat([wrap, gaps], -1)
    right = torch.cat([gaps, torch.zeros_like(first)], -1)
    rank = torch.arange(x.shape[-1], device=x.device)
    right = torch.where(rank == count - 1, wrap, right)
    weights = torch.where(rank < count, (left + right) / 2, torch.zeros_like(left))
    total = weights.sum(-1, keepdim=True)
    # One lone point (or all in one place) spans no gap: fall back to equal weights, which are then exact.
    equal = (rank < count).to(weights.dtype) / count
    weights = torch.where(total > 0, weights / total.where(total > 0, torch.ones_like(total)), equal)
    return torch.zeros_like(weights).scatter(-1, order, weights)


def cell_grid(cells: tuple[int, ...], lengths: tuple[float, ...]) -> Float[Tensor, "points dim"]:
    """The centers (i + 1/2)/n of the cells of a box, none on its border; row-major, the last axis fastest."""
    return _grid([(torch.arange(n, dtype=torch.float64) + 0.5) * (p / n) for n, p in zip(cells, lengths, strict=True)])


def _grid(axes: list[Tensor]) -> Float[Tensor, "points dim"]:
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes))


def grid_sizes(coords: Float[Tensor, "points dim"], periods: tuple[float, ...] | None = None) -> tuple[int, ...] | None:
    """Points per axis of a regular grid, row-major and ascending; None where the points are none, but for rounding.

    Args:
        coords: of the points.
        periods: of the domain; the grid must then go once around, the end not repeated.
    """
    sizes, lines = [], []
    for axis, x in enumerate(coords.unbind(-1)):
        gaps = x.sort().values.diff()
        step = float(gaps.amax()) if len(gaps) else 0.0
        count = 1 + int((gaps > 0.5 * step).sum()) if step > 0 else 1
        if count > 1:
            step = float(x.amax() - x.amin()) / (count - 1)
        if periods is not None and count > 1 and abs(step * count - periods[axis]) > 0.01 * step:
            return None
        sizes.append(count)
        lines.append((x.amin() + step * torch.arange(count, dtype=x.dtype, device=x.device), 0.01 * step))
    if math.prod(sizes) != len(coords):
        return None
    grids = torch.meshgrid(*(line for line, _ in lines), indexing="ij")
    near = (
        (x - grid.reshape(-1)).abs() <= slack
        for x, grid, (_, slack) in zip(coords.unbind(-1), grids, lines, strict=True)
    )
    return tuple(sizes) if all(bool(close.all()) for close in near) else None
