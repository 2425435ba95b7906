"""VTK's XML files: `.vtu`, `.vtp`, `.vti`, `.vtr`, `.vts`, their parallel forms, and `.pvd` series; any encoding."""

import base64
import importlib
import itertools
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np

from oformer.errors import InputError, optional_module
from oformer.vtk.mesh import Block, Mesh, blocks_of, box, joined

_NUMBERS = re.compile(r"Float(32|64)|U?Int(8|16|32|64)")
_POLYGONS = {"Verts": 2, "Lines": 4, "Polys": 7, "Strips": 6}  # in the order of the values at cells


def read_xml(path: str) -> list[Mesh]:
    """The mesh of a file, or those of the frames of a series."""
    file = _File(Path(path))
    kind = file.tree.get("type", "")
    if kind == "Collection":
        entries = [(float(e.get("timestep") or 0), e.get("file")) for e in file.tree.iter("DataSet")]
        times = sorted({time for time, _ in entries})
        return [joined([file.other(name) for time, name in entries if time == now]) for now in times]
    grid = file.tree.find(kind)
    if grid is None or not {kind, kind[1:]} & _READERS.keys():  # parallel files have a P before it
        raise InputError(f"a VTK file of one of the types {', '.join(_READERS)} at {path}", f"`{kind}`")
    pieces = list(grid.iter("Piece"))
    if kind not in _READERS:
        return [joined([file.other(piece.get("Source")) for piece in pieces])]
    return [joined([Mesh(*_READERS[kind](file, grid, p), file.fields(p, "PointData"), file.fields(p, "CellData"))
                    for p in pieces])]  # fmt: skip


class _File:
    """A file: its tree of elements, and how its arrays are encoded."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        # Raw appended data are no XML: what comes before them is.
        found = re.search(rb"<AppendedData([^>]*)>\s*_", content)
        head = content[: found.start()] + b"</VTKFile>" if found else content
        self.path, self.tree = path, ElementTree.fromstring(head)
        self._appended = memoryview(content)[found.end() :] if found else memoryview(b"")
        self._is_raw = found is not None and b"base64" not in found[1]
        places = (int(array.get("offset", 0)) for array in self.tree.iter("DataArray"))
        self._places = sorted({*places, len(self._appended) if self._is_raw else bytes(self._appended).find(b"<")})
        self._order: Literal["<", ">"] = ">" if self.tree.get("byte_order") == "BigEndian" else "<"
        self._word = np.dtype(self.tree.get("header_type", "UInt32").lower()).newbyteorder(self._order)
        self._compressor = self.tree.get("compressor")

    def other(self, name: str | None) -> Mesh:
        """The mesh of a file that this one names, which must lie in its folder or below."""
        folder = self.path.resolve().parent
        place = (folder / (name or "")).resolve()
        if not place.is_relative_to(folder) or not place.is_file():
            raise InputError(f"the parts of {self.path} in files beside it or in folders there", f"`{name}`")
        if not re.fullmatch(r"\.p?vt[upirs]" if self.path.suffix == ".pvd" else r"\.vt[upirs]", place.suffix):
            raise InputError(f".vtu, .vtp, .vti, .vtr or .vts files as the parts of {self.path}", f"`{name}`")
        return read_xml(str(place))[0]

    def array(self, element: Any) -> np.ndarray:
        """The numbers of a DataArray, (rows,) or (rows, components)."""
        kind = np.dtype(element.get("type").lower())
        form, text = element.get("format", "ascii"), (element.text or "").encode()
        if form == "ascii":
            values = np.fromstring(text, kind, sep=" ")  # in text mode, which is not deprecated
            if len(values) != (wanted := len(text.split())):
                raise ValueError(f"{wanted} words in array {element.get('Name')}, of which {len(values)} are numbers")
        else:
            raw: Any = text
            if form == "appended":
                place = int(element.get("offset"))
                raw = self._appended[place : next((p for p in self._places if p > place), None)]
            if form == "binary" or not self._is_raw:
                raw = _from_base64(bytes(raw))
            values = np.frombuffer(self._unpacked(raw), kind.newbyteorder(self._order)).astype(kind)
        components = int(element.get("NumberOfComponents") or 1)
        return values.reshape(-1, components) if components > 1 else values

    def _unpacked(self, raw: bytes | memoryview) -> bytes | memoryview:
        """The bytes behind a header of their size, or of the sizes of compressed blocks."""
        size = self._word.itemsize
        count = int(np.frombuffer(raw, self._word, 1)[0])
        if self._compressor is None:
            return _exactly(raw[size : size + count], count)
        if count == 0:
            return b""
        _, whole, last, *packed = np.frombuffer(raw, self._word, 3 + count).tolist()
        ends = itertools.accumulate(packed, initial=(3 + count) * size)
        unpack, sizes = _decompressor(self._compressor), [whole] * (count - 1) + [last or whole]
        blocks = zip(itertools.pairwise(ends), sizes, strict=True)
        return b"".join(_exactly(unpack(bytes(raw[a:b]), n), n) for (a, b), n in blocks)

    def fields(self, parent: Any, tag: str) -> dict[str, np.ndarray]:
        """The arrays of numbers in a child of an element, by name."""
        arrays = [a for a in parent.iterfind(f"{tag}/DataArray") if _NUMBERS.fullmatch(a.get("type", ""))]
        return {array.get("Name", f"{tag} {k}"): self.array(array) for k, array in enumerate(arrays)}


def _exactly(content: Any, size: int) -> Any:
    if len(content) != size:
        raise ValueError(f"an array of {size} bytes, of which {len(content)} are there: the file is cut short")
    return content


def _from_base64(text: bytes) -> bytes:
    """The bytes of one or several texts in base64, one after another: headers are often encoded apart."""
    return b"".join(map(base64.b64decode, re.findall(rb"[A-Za-z0-9+/]+=*", text.translate(None, b" \t\r\n"))))


def _decompressor(name: str) -> Callable[[bytes, int], bytes]:
    if name == "vtkLZ4DataCompressor":
        optional_module("lz4", "VTK files that are packed with LZ4", "pip install 'oformer[io]'")
        return importlib.import_module("lz4.block").decompress
    unpack = lzma.decompress if name == "vtkLZMADataCompressor" else zlib.decompress
    return lambda content, _: unpack(content)


def _points(file: _File, piece: Any) -> np.ndarray:
    element = piece.find("Points/DataArray")
    return np.zeros((0, 3)) if element is None else file.array(element).reshape(-1, 3)


def _unstructured(file: _File, grid: Any, piece: Any) -> tuple[np.ndarray, list[Block]]:
    lists = file.fields(piece, "Cells")
    faces = None
    if "faces" in lists and "faceoffsets" in lists:
        # -1 stands at cells that are no polyhedra; a list begins where the last one ended.
        ends = np.maximum.accumulate(lists["faceoffsets"].astype(np.int64).clip(0))
        faces = np.split(lists["faces"], ends[:-1])
    elif "polyhedron_offsets" in lists:  # by VTK 9.4 and later: the points of each face, and the faces of each cell
        each = np.split(lists["face_connectivity"], lists["face_offsets"][:-1])
        each = [np.concatenate([[len(face)], face]) for face in each]
        cells = np.split(lists["polyhedron_to_faces"], lists["polyhedron_offsets"][:-1])
        faces = [np.concatenate([[len(cell)], *(each[face] for face in cell)]) for cell in cells]
    return _points(file, piece), blocks_of(lists["types"], lists["connectivity"], lists["offsets"], faces)


def _polygons(file: _File, grid: Any, piece: Any) -> tuple[np.ndarray, list[Block]]:
    lists = {number: file.fields(piece, tag) for tag, number in _POLYGONS.items()}
    found = ((number, each["connectivity"], each["offsets"]) for number, each in lists.items() if each)
    return _points(file, piece), surface(found)


def surface(lists: Any) -> list[Block]:
    """Blocks from lists of cells that have a type each: (type, connectivity, ends)."""
    blocks, first = [], 0
    for number, connectivity, ends in lists:
        found = blocks_of(np.full(len(ends), number), connectivity, ends)
        blocks += [block._replace(rows=block.rows + first) for block in found]
        first += len(ends)
    return blocks


def _sides(piece: Any) -> list[range]:
    """The indices along x, y and z."""
    numbers = [int(word) for word in piece.get("Extent").split()]
    return [range(first, last + 1) for first, last in zip(numbers[::2], numbers[1::2], strict=True)]


def _image(file: _File, grid: Any, piece: Any) -> tuple[np.ndarray, list[Block]]:
    origin, spacing, turned = (
        np.array(grid.get(name, default).split(), float)
        for name, default in (("Origin", "0 0 0"), ("Spacing", "1 1 1"), ("Direction", "1 0 0 0 1 0 0 0 1"))
    )
    points, blocks = grid_points(*_sides(piece))
    return origin + (points * spacing) @ turned.reshape(3, 3).T, blocks


def _rectilinear(file: _File, grid: Any, piece: Any) -> tuple[np.ndarray, list[Block]]:
    return grid_points(*(file.array(array).reshape(-1) for array in piece.iterfind("Coordinates/DataArray")))


def _structured(file: _File, grid: Any, piece: Any) -> tuple[np.ndarray, list[Block]]:
    return _points(file, piece), grid_points(*_sides(piece))[1]


def grid_points(x: Any, y: Any, z: Any) -> tuple[np.ndarray, list[Block]]:
    """The points of a grid, x fastest, and its cells."""
    planes = np.meshgrid(z, y, x, indexing="ij")
    return np.stack([plane.reshape(-1) for plane in planes[::-1]], -1).astype(float), box([len(z), len(y), len(x)])


_READERS = {
    "UnstructuredGrid": _unstructured, "PolyData": _polygons, "ImageData": _image, "RectilinearGrid": _rectilinear,
    "StructuredGrid": _structured,
}  # fmt: skip
