"""Fields on a mesh as files that ParaView opens: `.vtu` with raw appended data, binary legacy `.vtk`, `.pvd` series."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np

from oformer.errors import InputError
from oformer.vtk.mesh import HEXAHEDRON, LINE, QUAD, TETRA, TRIANGLE, Block


def as_blocks(cells: Any, points: int, dim: int) -> list[Block]:
    """Blocks from arrays of indices of points.

    Args:
        cells: (cells, corners) of lines, triangles, quadrilaterals (in the plane), tetrahedra or hexahedra; a list of
            these, also of blocks, where kinds are mixed; None for points alone.
        points: how many there are.
        dim: of space, which tells quadrilaterals from tetrahedra.
    """
    if cells is None:
        return [Block(1, np.arange(points)[:, None], np.arange(points))]
    blocks = []
    for given in cells if isinstance(cells, (list, tuple)) else [cells]:
        corners = given.corners if isinstance(given, Block) else np.asarray(given)
        by_corners = {2: LINE, 3: TRIANGLE, 4: QUAD if dim == 2 else TETRA, 8: HEXAHEDRON}
        number = given.type if isinstance(given, Block) else by_corners.get(corners.shape[-1])
        if corners.ndim != 2 or number is None or corners.dtype.kind not in "iu":
            wanted = (
                "`cells` of shape (cells, corners) with 2, 3, 4 or 8 indices of points each, or a list of such arrays"
            )
            raise InputError(wanted, f"{corners.dtype} of shape {corners.shape}")
        if corners.size and not 0 <= corners.min() <= corners.max() < points:
            raise InputError(f"`cells` with indices from 0 to {points - 1}", f"{corners.min()} to {corners.max()}")
        blocks.append(Block(number, corners, np.arange(len(corners))))
    return blocks


def with_vectors(channels: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Channels (points,) by name, where `v_x` and `v_y` (and `v_z`) become a vector `v` of three components."""
    found, left = {}, dict(channels)
    for name in channels:
        stem, parts = re.sub(r"[_ ]x$", "", name), [name[:-1] + axis for axis in "xyz" if name[:-1] + axis in left]
        if stem not in ("", *channels) and len(parts) > 1:
            vector = np.stack([left.pop(part) for part in parts], -1)
            found[stem] = np.pad(vector, ((0, 0), (0, 3 - len(parts))))
        elif name in left:
            found[name] = left.pop(name)
    return found


def _lists(blocks: Sequence[Block]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """VTK's lists of cells: corners one after another, how many each cell has, and its type."""
    each = [(block.corners, np.full(len(block.corners), block.type, np.uint8)) for block in blocks]
    corners = np.concatenate([np.zeros(0, np.int64), *(corners.reshape(-1) for corners, _ in each)])
    sizes = [np.full(len(corners), corners.shape[1]) for corners, _ in each]
    types = np.concatenate([np.zeros(0, np.uint8), *(types for _, types in each)])
    return corners, np.concatenate([np.zeros(0, np.int64), *sizes]), types


def vtu(points: np.ndarray, blocks: Sequence[Block], fields: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a `.vtu`: points (points, 3), cells, and fields (points,) or (points, components) by name."""
    corners, sizes, types = _lists(blocks)
    data = bytearray()

    def array(name: str, values: np.ndarray) -> str:
        content, place = values.astype(values.dtype.newbyteorder("<")).tobytes(), len(data)
        data.extend(len(content).to_bytes(8, "little") + content)
        kind = {"f": "Float", "i": "Int", "u": "UInt"}[values.dtype.kind] + str(8 * values.dtype.itemsize)
        about = f'type="{kind}" Name={quoteattr(name)}'
        about += f' NumberOfComponents="{values.shape[1]}"' if values.ndim > 1 else ""
        return f'<DataArray {about} format="appended" offset="{place}"/>'

    head = [
        '<?xml version="1.0"?>',
        '<VTKFile type="UnstructuredGrid" version="1.0" byte_order="LittleEndian" header_type="UInt64">',
        f'<UnstructuredGrid><Piece NumberOfPoints="{len(points)}" NumberOfCells="{len(types)}">',
        f"<Points>{array('Points', points)}</Points>",
        f"<Cells>{array('connectivity', corners)}{array('offsets', np.cumsum(sizes))}{array('types', types)}</Cells>",
        f"<PointData>{''.join(array(name, values) for name, values in fields.items())}</PointData>",
        '</Piece></UnstructuredGrid><AppendedData encoding="raw">_',
    ]
    return "\n".join(head).encode() + data + b"\n</AppendedData></VTKFile>\n"


def legacy(points: np.ndarray, blocks: Sequence[Block], fields: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a `.vtk` of version 4.2, which every version of ParaView opens; arguments as for `vtu`."""
    corners, sizes, types = _lists(blocks)
    cells = np.insert(corners, np.cumsum(sizes) - sizes, sizes)
    chunks = ["# vtk DataFile Version 4.2\nwritten by oformer\nBINARY\nDATASET UNSTRUCTURED_GRID"]
    chunks += [f"\nPOINTS {len(points)} float\n", points.astype(">f4").tobytes()]
    chunks += [f"\nCELLS {len(types)} {len(cells)}\n", cells.astype(">i4").tobytes()]
    chunks += [f"\nCELL_TYPES {len(types)}\n", types.astype(">i4").tobytes()]
    chunks += [f"\nPOINT_DATA {len(points)}\nFIELD FieldData {len(fields)}"]
    for name, values in fields.items():
        about = f"\n{quote(name)} {values[:1].size} {len(points)} float\n"
        chunks += [about, values.astype(">f4").tobytes()]
    return b"".join(chunk.encode() if isinstance(chunk, str) else chunk for chunk in [*chunks, "\n"])


def series(frames: Mapping[str, float]) -> str:
    """The text of a `.pvd`: which file shows which time."""
    entries = "\n".join(f'<DataSet timestep="{time:g}" file={quoteattr(name)}/>' for name, time in frames.items())
    return f'<?xml version="1.0"?>\n<VTKFile type="Collection"><Collection>\n{entries}\n</Collection></VTKFile>\n'
