"""A mesh as VTK numbers it: points, blocks of cells of one type, and fields at points and cells."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oformer.errors import InputError

LINE, TRIANGLE, QUAD, TETRA, HEXAHEDRON, WEDGE, PYRAMID, POLYHEDRON = 3, 5, 9, 10, 12, 13, 14, 42
_SPLIT = {  # by the number of a linear cell: its simplices
    LINE: ((0, 1),),
    TRIANGLE: ((0, 1, 2),),
    QUAD: ((0, 1, 2), (0, 2, 3)),
    TETRA: ((0, 1, 2, 3),),
    HEXAHEDRON: tuple((0, *pair, 6) for pair in ((1, 2), (2, 3), (3, 7), (7, 4), (4, 5), (5, 1))),
    WEDGE: ((0, 1, 2, 5), (0, 1, 5, 4), (0, 4, 5, 3)),
    PYRAMID: ((0, 1, 2, 4), (0, 2, 3, 4)),
}
# Quadratic and Lagrange cells begin with the corners of the linear cell, in its order.
_CURVED = {
    LINE: (21, 35, 68), TRIANGLE: (22, 34, 69), QUAD: (23, 28, 30, 70), TETRA: (24, 71), HEXAHEDRON: (25, 29, 33, 72),
    WEDGE: (26, 31, 32, 73), PYRAMID: (27, 37, 74),
}  # fmt: skip
CURVED = frozenset(itertools.chain(*_CURVED.values()))
SIMPLICES = _SPLIT | {number: _SPLIT[linear] for linear, numbers in _CURVED.items() for number in numbers}
_RING = ((0, 0), (0, 1), (1, 1), (1, 0))
_BOX = {1: ((0,), (1,)), 2: _RING, 3: (*((0, *k) for k in _RING), *((1, *k) for k in _RING))}


class Block(NamedTuple):
    """Cells of one type."""

    type: int  # VTK's number
    corners: np.ndarray  # (cells, corners): indices of points; of curved cells also those on edges and inside
    rows: np.ndarray  # (cells,): where in the file's list of cells each of them was

    @property
    def dim(self) -> int:
        """The dimension of the cells."""
        return len(SIMPLICES[self.type][0]) - 1


class Mesh(NamedTuple):
    """A mesh with fields (rows,) or (rows, components) by name; those at cells in the order of the file's cells."""

    points: np.ndarray  # (points, 3)
    blocks: list[Block]
    at_points: dict[str, np.ndarray]
    at_cells: dict[str, np.ndarray]


def blocks_of(
    types: np.ndarray, connectivity: np.ndarray, ends: np.ndarray, faces: Sequence[np.ndarray] | None = None
) -> list[Block]:
    """Blocks from VTK's lists of cells: polygons, strips, pixels, voxels and polyhedra are split into plain cells.

    Args:
        types: of each cell.
        connectivity: the points of all cells, one after another.
        ends: where those of each cell end.
        faces: of each cell VTK's list of faces, where polyhedra have it apart; legacy files have it in `connectivity`.
    """
    connectivity, ends = connectivity.astype(np.int64), ends.astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    if len(types) != len(ends) or (sizes < 0).any() or (len(ends) and ends[-1] > len(connectivity)):
        raise ValueError(f"{len(types)} cells with {len(connectivity)} corners, and offsets that do not fit them")
    kinds, blocks = types.astype(np.int64) << 32 | sizes, []
    for kind in np.unique(kinds):
        rows, number, size = np.flatnonzero(kinds == kind), int(kind >> 32), int(kind & 0xFFFFFFFF)
        corners = connectivity[(ends[rows] - size)[:, None] + np.arange(size)]
        if number == POLYHEDRON:
            blocks.append(_tetrahedra(corners if faces is None else [faces[int(row)] for row in rows], rows))
        elif number in SIMPLICES:
            blocks.append(Block(number, corners, rows))
        elif number > 2:  # vertices have no size
            blocks.append(_plain(number, corners, rows))
    return blocks


def _plain(number: int, corners: np.ndarray, rows: np.ndarray) -> Block:
    """Cells that are other ones in another notation, or several in one."""
    size = corners.shape[1]
    linear, parts = {
        4: (LINE, [(k, k + 1) for k in range(size - 1)]),
        6: (TRIANGLE, [(k, k + 1, k + 2) for k in range(size - 2)]),
        7: (QUAD, [(0, 1, 2, 3)]) if size == 4 else (TRIANGLE, [(0, k, k + 1) for k in range(1, size - 1)]),
        8: (QUAD, [(0, 1, 3, 2)]),
        11: (HEXAHEDRON, [(0, 1, 3, 2, 4, 5, 7, 6)]),
    }.get(number, (0, []))
    if not parts:
        known = "lines, triangles, quadrilaterals, polygons, tetrahedra, hexahedra, wedges, pyramids or polyhedra"
        got = f"cells of VTK's type {number} with {size} corners"
        raise InputError(known, got, "Convert them in ParaView (filter Tetrahedralize)")
    return Block(linear, corners[:, np.array(parts)].reshape(-1, len(parts[0])), np.repeat(rows, len(parts)))


def _tetrahedra(streams: Sequence[np.ndarray] | np.ndarray, rows: np.ndarray) -> Block:
    """Polyhedra, each given as VTK's list of faces, as tetrahedra between its first point and its other faces."""
    corners, found = [], []
    for row, stream in zip(rows, streams, strict=True):
        numbers = iter(stream.tolist())
        faces = [[next(numbers) for _ in range(next(numbers))] for _ in range(next(numbers))]
        apex = faces[0][0]
        parts = [(apex, f[0], f[k], f[k + 1]) for f in faces if apex not in f for k in range(1, len(f) - 1)]
        corners += parts
        found += [row] * len(parts)
    return Block(TETRA, np.array(corners, np.int64).reshape(-1, 4), np.array(found, np.int64))


def box(shape: Sequence[int]) -> list[Block]:
    """The lines, quadrilaterals or hexahedra between the points of a grid, its last axis fastest."""
    sides = [n for n in shape if n > 1]
    numbers = np.arange(np.prod(sides, dtype=int)).reshape(sides)
    corners = [
        numbers[tuple(slice(step, n - 1 + step) for step, n in zip(place, sides, strict=True))].reshape(-1)
        for place in _BOX.get(len(sides), ())
    ]
    number = (0, LINE, QUAD, HEXAHEDRON)[len(sides)]
    return [Block(number, np.stack(corners, -1), np.arange(len(corners[0])))] if corners else []


def joined(pieces: Sequence[Mesh]) -> Mesh:
    """The pieces of a mesh, one after another, with the fields that all of them have."""
    pieces = [piece for piece in pieces if len(piece.points)] or pieces[:1]
    blocks, points, cells = [], 0, 0
    for piece in pieces:
        blocks += [Block(b.type, b.corners + points, b.rows + cells) for b in piece.blocks]
        points, cells = points + len(piece.points), cells + max(map(len, piece.at_cells.values()), default=0)

    def common(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    at_points, at_cells = common([piece.at_points for piece in pieces]), common([piece.at_cells for piece in pieces])
    return Mesh(np.concatenate([piece.points for piece in pieces]), blocks, at_points, at_cells)
