"""VTK's legacy files, `.vtk`: text or binary, versions 2 to 5.1, meshes, surfaces and grids."""

from pathlib import Path
from urllib.parse import unquote

import numpy as np

from oformer.errors import InputError
from oformer.vtk.mesh import Block, Mesh, blocks_of
from oformer.vtk.read_xml import grid_points, surface

_TYPES = {
    "unsigned_char": "u1", "char": "i1", "unsigned_short": "u2", "short": "i2", "unsigned_int": "u4", "int": "i4",
    "unsigned_long": "u8", "long": "i8", "float": "f4", "double": "f8", "vtkidtype": "i4", "vtktypeint64": "i8",
    "vtktypeuint64": "u8", "vtktypeint32": "i4", "vtktypeuint32": "u4",
}  # fmt: skip
_SURFACES = {"vertices": 2, "lines": 4, "polygons": 7, "triangle_strips": 6}
_COMPONENTS = {
    "vectors": 3, "normals": 3, "tensors": 9, "tensors6": 6, "global_ids": 1, "pedigree_ids": 1, "edge_flags": 1,
}  # fmt: skip


def read_legacy(path: str) -> Mesh:
    """The mesh of a file."""
    return _File(Path(path)).read()


class _File:
    """A file that is read from its beginning to its end."""

    def __init__(self, path: Path):
        self._content, self._at = path.read_bytes(), 0
        if not self._content.startswith(b"# vtk DataFile Version"):
            raise InputError(f"a file that begins with `# vtk DataFile Version` at {path}", repr(self._content[:22]))
        _, _, form = self._line(), self._line(), self._line()
        self._is_text = form.upper() == "ASCII"
        self._numbers: dict[str, np.ndarray] = {}  # points, axes, types of cells, and what describes a grid
        self._lists: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # of cells: their corners, and where each ends
        self._fields: dict[str, dict[str, np.ndarray]] = {"": {}, "point_data": {}, "cell_data": {}}
        self._place, self._count = "", 0  # of the fields that are read now, and how many rows they have

    def read(self) -> Mesh:
        """The points, the cells and the fields."""
        while words := self._words():
            self._section(*words)
        points, blocks = self._geometry()
        return Mesh(points, blocks, self._fields["point_data"], self._fields["cell_data"])

    def _line(self) -> str:
        end = self._content.find(b"\n", self._at)
        end = len(self._content) if end < 0 else end
        line, self._at = self._content[self._at : end], end + 1
        return line.decode("latin1").strip()

    def _words(self) -> list[str]:
        """Those of the next line that has some, without metadata; none at the end."""
        while self._at < len(self._content):
            words = self._line().split()
            if words and words[0].upper() == "METADATA":
                while self._line():  # up to an empty line
                    pass
            elif words:
                return words
        return []

    def _array(self, kind: str, count: int, components: int = 1) -> np.ndarray:
        """The numbers that come next; of arrays of text, none."""
        begin, size, name = self._at, count * components, kind.lower()
        if name == "string":
            for _ in range(size):
                self._skip_text()
            return np.zeros(0)
        if name not in _TYPES:
            raise ValueError(f"an array of type `{kind}`")
        if self._is_text:
            found = 0
            while found < size and self._at < len(self._content):
                found += len(self._line().split())
            # In text mode, which is not deprecated; wide integers keep their digits.
            wide = np.float64 if "f" in _TYPES[name] else np.int64
            values = np.fromstring(self._content[begin : self._at], wide, sep=" ")
        else:
            dtype = np.dtype(">" + _TYPES[name])
            self._at = begin + size * dtype.itemsize
            values = np.frombuffer(self._content[begin : self._at], dtype).astype(dtype.newbyteorder("="))
        if len(values) != size:
            raise ValueError(f"an array of {size} numbers, of which {len(values)} are there")
        return values.reshape(count, components) if components > 1 else values

    def _skip_text(self) -> None:
        """Pass over a word of an array of text: a line, or a length, whose first two bits tell its width, and bytes."""
        if self._is_text:
            self._line()
            return
        width = (8, 4, 2, 1)[self._content[self._at] >> 6]
        length = int.from_bytes(self._content[self._at : self._at + width]) & ((1 << 8 * width - 2) - 1)
        self._at += width + length

    def _section(self, keyword: str, *words: str) -> None:
        key = keyword.lower()
        if key in ("dimensions", "origin", "spacing", "aspect_ratio"):
            self._numbers["spacing" if key == "aspect_ratio" else key] = np.array(words, float)
        elif key == "points":
            self._numbers[key] = self._array(words[1], int(words[0]), 3).astype(np.float64)
        elif key in ("x_coordinates", "y_coordinates", "z_coordinates"):
            self._numbers[key] = self._array(words[1], int(words[0]))
        elif key == "cell_types":
            self._numbers[key] = self._array("int", int(words[0]))
        elif key == "cells" or key in _SURFACES:
            self._lists[key] = self._cells(int(words[0]), int(words[1]))
        elif key in ("point_data", "cell_data"):
            self._place, self._count = key, int(words[0])
        elif key == "field":
            for _ in range(int(words[1])):
                name, components, count, kind = self._words()
                self._keep(name, self._array(kind, int(count), int(components)))
        elif key == "lookup_table":  # colors, which nobody needs
            self._array("float" if self._is_text else "unsigned_char", int(words[1]), 4)
        elif key in _COMPONENTS:
            self._keep(words[0], self._array(words[1], self._count, _COMPONENTS[key]))
        elif key == "scalars":
            before = self._at
            if not self._line().lower().startswith("lookup_table"):
                self._at = before
            self._keep(words[0], self._array(words[1], self._count, int(words[2]) if words[2:] else 1))
        elif key == "color_scalars":
            kind = "float" if self._is_text else "unsigned_char"
            self._keep(words[0], self._array(kind, self._count, int(words[1])))
        elif key == "texture_coordinates":
            self._keep(words[0], self._array(words[2], self._count, int(words[1])))
        elif key != "dataset":
            raise ValueError(f"a section `{keyword[:40]}`")

    def _keep(self, name: str, values: np.ndarray) -> None:
        if len(values):
            self._fields[self._place][unquote(name)] = values

    def _cells(self, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The corners of a list of cells one after another, and where those of each cell end."""
        before = self._at
        words = self._words()
        if words[:1] and words[0].upper() == "OFFSETS":  # version 5: one offset more than cells, the first is zero
            ends = self._array(words[1], count)[1:]
            return self._array(self._words()[1], size), ends
        self._at = before
        numbers = self._array("int", size)
        # Each cell begins with the number of its corners, which tells where the next one begins.
        listed, sizes, place = numbers.tolist(), [], 0
        for _ in range(count):
            sizes.append(listed[place])
            place += listed[place] + 1
        if place != size:
            raise ValueError(f"{count} cells in {size} numbers, which fill {place}")
        ends = np.cumsum(sizes, dtype=np.int64)
        return np.delete(numbers, ends - sizes + np.arange(count)), ends

    def _geometry(self) -> tuple[np.ndarray, list[Block]]:
        numbers, lists = self._numbers, self._lists
        if "x_coordinates" in numbers:
            return grid_points(*(numbers[f"{axis}_coordinates"] for axis in "xyz"))
        if "dimensions" in numbers:
            steps, blocks = grid_points(*(range(int(n)) for n in numbers["dimensions"]))
            return numbers["points"] if "points" in numbers else steps * numbers["spacing"] + numbers["origin"], blocks
        if "cells" in lists:
            return numbers["points"], blocks_of(numbers["cell_types"], *lists["cells"])
        return numbers["points"], surface((n, *lists[key]) for key, n in _SURFACES.items() if key in lists)
