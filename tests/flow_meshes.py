"""Meshes for tests of flow solvers: (points, triangles, marks) as tensors, made with numpy alone; and measures."""

import dataclasses
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from oformer.fields import Sample
from oformer.meshes.cache import mesh_of
from oformer.meshes.triangles import Mesh
from oformer.problems import Airfoil

Arrays = tuple[Tensor, Tensor, Tensor]
WALL, FAR = 1, 2


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def upside_down(mesh: Mesh) -> Mesh:
    """The mirror image; corners stay in their order, which the solver's numbering follows."""
    return dataclasses.replace(mesh, points=mesh.points * doubles(1.0, -1.0))


def solve_mirrored(problem: Airfoil, mach: Tensor, angle: Tensor, mirrored: Tensor) -> list[Sample]:
    """Samples of these free streams, on a mesh that is upside down for some of them."""
    plain = problem.solve({"mach": mach, "angle": angle})
    with mock.patch("oformer.problems.airfoil.mesh_of", lambda geometry: upside_down(mesh_of(geometry))):
        turned = problem.solve({"mach": mach, "angle": angle})
    return [b if flip else a for a, b, flip in zip(plain, turned, mirrored.tolist(), strict=True)]


def quality(mesh: Mesh) -> Tensor:
    """Twice the radius of the inscribed over that of the circumscribed circle: 1 if equilateral, 0 if flat."""
    corners = mesh.points[mesh.triangles]
    a, b, c = ((corners[:, i] - corners[:, j]).norm(dim=1) for i, j in ((1, 2), (2, 0), (0, 1)))
    return (b + c - a) * (c + a - b) * (a + b - c) / (a * b * c)


def areas_around(mesh: Mesh) -> Tensor:
    """A third of the triangles around each point: quadrature weights, exact for piecewise linear functions."""
    third = mesh.areas.repeat_interleave(3) / 3
    return torch.zeros(len(mesh.points), dtype=third.dtype).index_add_(0, mesh.triangles.flatten(), third)


def o_mesh(
    around: int = 64, layers: int = 20, radius: float = 20.0, shake: float = 0.0, symmetric: bool = False
) -> Arrays:
    """Rings around NACA 0012 with a closed trailing edge, chord 1; the quadrilaterals are split in two.

    Args:
        around: nodes on the wall, and on each ring.
        layers: rings between the wall and the circle of the far field.
        radius: of that circle.
        shake: inner nodes are moved along both axes by up to this share of the gaps to their neighbors.
        symmetric: split such that the mesh is its own mirror image; `around` is then even.
    """
    theta = 2 * np.pi * np.arange(around) / around
    x = (1 + np.cos(theta)) / 2
    half = 5 * 0.12 * (0.2969 * np.sqrt(x) - 0.1260 * x - 0.3516 * x**2 + 0.2843 * x**3 - 0.1036 * x**4)
    half[0] = 0.0
    wall = np.stack([x, np.where(theta <= np.pi, half, -half)], 1)
    circle = np.stack([0.5 + radius * np.cos(theta), radius * np.sin(theta)], 1)
    growth = np.geomspace(1.0, 1.0 + 20 * radius, layers + 1) - 1
    share = (growth / growth[-1])[:, None, None]
    grid = wall + share * (circle - wall)
    if shake:
        generator = np.random.default_rng(0)
        below = np.linalg.norm(grid[1:-1] - grid[:-2], axis=-1, keepdims=True)
        beside = np.linalg.norm(grid - np.roll(grid, 1, 1), axis=-1, keepdims=True)[1:-1]
        beside = np.minimum(beside, np.roll(beside, -1, 1))
        grid[1:-1] += shake * np.minimum(below, beside) * generator.uniform(-1, 1, grid[1:-1].shape)
    points = grid.reshape(-1, 2)

    layer, place = np.meshgrid(np.arange(layers), np.arange(around), indexing="ij")
    a = (layer * around + place).ravel()
    b = (layer * around + (place + 1) % around).ravel()
    c, d = a + around, b + around
    turned = (place.ravel() < around // 2) & symmetric
    first = np.where(turned[:, None], np.stack([a, c, b], 1), np.stack([a, c, d], 1))
    second = np.where(turned[:, None], np.stack([b, c, d], 1), np.stack([a, d, b], 1))
    marks = np.zeros(len(points), np.int64)
    marks[:around], marks[-around:] = WALL, FAR
    return torch.from_numpy(points), torch.from_numpy(np.concatenate([first, second])), torch.from_numpy(marks)


def box(columns: int, rows: int, width: float, height: float, mark: int, shake: float = 0.0) -> Arrays:
    """The box (0, width) x (0, height), its diagonals in both directions; the border is all marked."""
    i, j = np.meshgrid(np.arange(columns + 1), np.arange(rows + 1), indexing="ij")
    inside = (i > 0) & (i < columns) & (j > 0) & (j < rows)
    points = np.stack([i * (width / columns), j * (height / rows)], -1)
    step = shake * np.array([width / columns, height / rows])
    points = points + step * inside[..., None] * np.random.default_rng(0).uniform(-1, 1, points.shape)
    a = (i[:-1, :-1] * (rows + 1) + j[:-1, :-1]).ravel()
    b, c, d = a + rows + 1, a + rows + 2, a + 1
    even = ((i + j)[:-1, :-1].ravel() % 2 == 0)[:, None]
    first = np.where(even, np.stack([a, b, c], 1), np.stack([a, b, d], 1))
    second = np.where(even, np.stack([a, c, d], 1), np.stack([b, c, d], 1))
    marks = np.where(inside, 0, mark).ravel()
    return (
        torch.from_numpy(points.reshape(-1, 2)),
        torch.from_numpy(np.concatenate([first, second])),
        torch.from_numpy(marks),
    )
