"""Files that VTK itself writes, in every encoding, are read as VTK reads them; needs the package vtk."""

import numpy as np
import pytest

from oformer.data.importers import recognize
from oformer.errors import InputError
from oformer.vtk.read_legacy import read_legacy
from oformer.vtk.read_xml import read_xml

vtk = pytest.importorskip("vtk")
from vtk.util.numpy_support import numpy_to_vtk, vtk_to_numpy  # noqa: E402

# By VTK's number: a hexahedron, a voxel, a wedge, a pyramid, a tetrahedron and a polyhedron. What has a face above is a
# pyramid cut by a tilted plane: a wrong simplex would change the volume.
CUBE = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]]
CUT = [(1 + 0.5 * x) / (2 + 0.5 * x) for x, _, _ in CUBE]  # how far up to the top, at (0, 0, 2), if above
NARROW = [[x * (1 - z * s), y * (1 - z * s), 2 * z * s] for (x, y, z), s in zip(CUBE, CUT, strict=True)]
SHAPES = {
    12: NARROW,
    11: [CUBE[k] for k in (0, 1, 3, 2, 4, 5, 7, 6)],
    13: [NARROW[k] for k in (0, 1, 3, 4, 5, 7)],
    14: NARROW[:5],
    10: [CUBE[k] for k in (0, 1, 3, 4)],
    42: NARROW,
}
FACES = [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 5, 4], [1, 2, 6, 5], [2, 3, 7, 6], [3, 0, 4, 7]]


def with_fields(grid):
    """The mesh with a scalar, a vector and normals at its points, and a number for each cell."""
    n = grid.GetNumberOfPoints()
    grid.GetPointData().AddArray(named("pressure", np.sqrt(np.arange(n))))
    grid.GetPointData().AddArray(named("velocity field", np.arange(3.0 * n).reshape(n, 3) + 0.5))
    grid.GetPointData().SetNormals(named("n", np.tile([0.0, 0.6, 0.8], (n, 1)).astype(np.float32)))
    grid.GetCellData().AddArray(named("number", np.arange(grid.GetNumberOfCells()) ** 2))
    label = vtk.vtkStringArray()
    label.SetName("label")
    label.InsertNextValue("a word")
    grid.GetFieldData().AddArray(label)
    return grid


def named(name, values):
    array = numpy_to_vtk(values, deep=True)
    array.SetName(name)
    return array


def solid():
    points, grid = vtk.vtkPoints(), vtk.vtkUnstructuredGrid()
    points.SetDataTypeToDouble()
    grid.SetPoints(points)
    for place, (kind, corners) in enumerate(SHAPES.items()):
        ids = [points.InsertNextPoint(x + 2 * place, y, z) for x, y, z in corners]
        if kind == 42:
            stream = [len(FACES), *(number for face in FACES for number in (4, *(ids[k] for k in face)))]
            faces = vtk.vtkIdList()
            for number in stream:
                faces.InsertNextId(number)
            grid.InsertNextCell(42, faces)
        else:
            grid.InsertNextCell(kind, len(ids), ids)
    return with_fields(grid)


def surface():
    """Polygons of three to six corners, a strip, a line of three pieces and a vertex."""
    data, points = vtk.vtkPolyData(), vtk.vtkPoints()
    lists = {name: vtk.vtkCellArray() for name in ("Verts", "Lines", "Polys", "Strips")}
    for place, (name, size) in enumerate(
        [("Verts", 1), ("Lines", 4), ("Polys", 3), ("Polys", 4), ("Polys", 6), ("Strips", 5)]
    ):
        angles = 2 * np.pi * np.arange(size) / size
        ids = [points.InsertNextPoint(3 * place + np.cos(a), np.sin(a), 0) for a in angles]
        lists[name].InsertNextCell(size, ids)
    data.SetPoints(points)
    for name, cells in lists.items():
        getattr(data, f"Set{name}")(cells)
    return with_fields(data)


def image():
    data = vtk.vtkImageData()
    data.SetExtent(2, 4, 0, 3, -1, 1)
    data.SetOrigin(1, 2, 3)
    data.SetSpacing(0.5, 1, 2)
    return with_fields(data)


def rectilinear():
    data = vtk.vtkRectilinearGrid()
    data.SetDimensions(3, 4, 1)
    data.SetXCoordinates(named("x", np.array([0, 1, 3.0])))
    data.SetYCoordinates(named("y", np.array([0, 1, 3.0, 7.0])))
    data.SetZCoordinates(named("z", np.array([5.0])))
    return with_fields(data)


def structured():
    data, points = vtk.vtkStructuredGrid(), vtk.vtkPoints()
    data.SetDimensions(3, 2, 2)
    for z in range(2):
        for y in range(2):
            for x in range(3):
                points.InsertNextPoint(x + 0.1 * y, y, z)
    data.SetPoints(points)
    return with_fields(data)


MAKERS = {"vtu": solid, "vtp": surface, "vti": image, "vtr": rectilinear, "vts": structured}
LEGACY = {
    "vtu": vtk.vtkUnstructuredGridWriter, "vtp": vtk.vtkPolyDataWriter, "vti": vtk.vtkStructuredPointsWriter,
    "vtr": vtk.vtkRectilinearGridWriter, "vts": vtk.vtkStructuredGridWriter,
}  # fmt: skip
XML = {
    "vtu": vtk.vtkXMLUnstructuredGridWriter, "vtp": vtk.vtkXMLPolyDataWriter, "vti": vtk.vtkXMLImageDataWriter,
    "vtr": vtk.vtkXMLRectilinearGridWriter, "vts": vtk.vtkXMLStructuredGridWriter,
}  # fmt: skip


def check_as_vtk_has_it(mesh, data):
    """Points, fields and the size of the cells, each of which has its own number as a field."""
    points = np.array([data.GetPoint(k) for k in range(data.GetNumberOfPoints())])
    np.testing.assert_allclose(mesh.points, points, rtol=1e-5, atol=1e-9)
    at_points = data.GetPointData()
    for k in range(at_points.GetNumberOfArrays()):
        array = at_points.GetArray(k)
        np.testing.assert_allclose(mesh.at_points[array.GetName()], vtk_to_numpy(array), rtol=1e-5)
    assert mesh.at_points.keys() == {"pressure", "velocity field", "n"}
    np.testing.assert_array_equal(mesh.at_cells["number"], np.arange(data.GetNumberOfCells()) ** 2)
    sizes = vtk.vtkCellSizeFilter()
    sizes.SetInputData(data)
    sizes.Update()
    found = sizes.GetOutput().GetCellData()
    wanted = sum(vtk_to_numpy(found.GetArray(name)) for name in ("Length", "Area", "Volume"))
    np.testing.assert_allclose(measured(mesh, data.GetNumberOfCells()), wanted, rtol=1e-4)


def measured(mesh, count):
    """The length, area or volume of each cell of the file."""
    from oformer.data.importers.meshfiles import _sizes

    found = np.zeros(count)
    for block in mesh.blocks:
        np.add.at(found, block.rows, _sizes(mesh.points, block))
    return found


def write_xml(path, data, mode, compressor=None, wide=False, encoded=False, big=False):
    writer = XML[path.suffix[1:]]()
    writer.SetFileName(str(path))
    writer.SetInputData(data)
    getattr(writer, f"SetDataModeTo{mode}")()
    getattr(writer, f"SetCompressorTypeTo{compressor}")()
    getattr(writer, "SetHeaderTypeToUInt64" if wide else "SetHeaderTypeToUInt32")()
    getattr(writer, "SetByteOrderToBigEndian" if big else "SetByteOrderToLittleEndian")()
    writer.SetEncodeAppendedData(encoded)
    writer.SetBlockSize(64)
    assert writer.Write()
    return path


ENCODINGS = {
    "text": ("Ascii",), "base64": ("Binary",), "base64, packed": ("Binary", "ZLib", True),
    "raw": ("Appended",), "raw, LZ4": ("Appended", "LZ4"), "raw, LZMA": ("Appended", "LZMA", True),
    "base64 at the end": ("Appended", None, False, True), "base64 at the end, packed": ("Appended", "ZLib", True, True),
    "big end first": ("Appended", "ZLib", False, True, True),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", MAKERS)
def test_xml_in_every_encoding(tmp_path, kind, encoding):
    mode, compressor, *rest = (*ENCODINGS[encoding], None)[: max(2, len(ENCODINGS[encoding]))]
    if compressor == "LZ4":
        pytest.importorskip("lz4")
    data = MAKERS[kind]()
    (mesh,) = read_xml(str(write_xml(tmp_path / f"a.{kind}", data, mode, compressor, *rest)))
    check_as_vtk_has_it(mesh, data)


@pytest.mark.parametrize("text", [True, False], ids=["text", "binary"])
@pytest.mark.parametrize("version", [42, 51])
@pytest.mark.parametrize("kind", MAKERS)
def test_legacy_files(tmp_path, kind, version, text):
    data, writer = MAKERS[kind](), LEGACY[kind]()
    writer.SetFileName(str(tmp_path / "a.vtk"))
    writer.SetInputData(data)
    writer.SetFileVersion(version)
    getattr(writer, "SetFileTypeToASCII" if text else "SetFileTypeToBinary")()
    assert writer.Write()
    check_as_vtk_has_it(read_legacy(str(tmp_path / "a.vtk")), data)


def test_curved_cells_keep_their_points_and_are_straight_between_corners(tmp_path):
    lagrange = vtk.vtkLagrangeTriangle()
    lagrange.GetPointIds().SetNumberOfIds(10)
    lagrange.GetPoints().SetNumberOfPoints(10)
    lagrange.Initialize()
    for cell, size in (
        (vtk.vtkQuadraticTriangle(), 1 / 2), (vtk.vtkBiQuadraticQuad(), 1), (vtk.vtkQuadraticHexahedron(), 1),
        (vtk.vtkQuadraticTetra(), 1 / 6), (vtk.vtkQuadraticWedge(), 1 / 2), (vtk.vtkQuadraticPyramid(), 1 / 3),
        (lagrange, 1 / 2),
    ):  # fmt: skip
        grid, points, count = vtk.vtkUnstructuredGrid(), vtk.vtkPoints(), cell.GetNumberOfPoints()
        for place in np.array(cell.GetParametricCoords()).reshape(-1, 3)[:count]:
            points.InsertNextPoint(*place)
        grid.SetPoints(points)
        grid.InsertNextCell(cell.GetCellType(), count, range(count))
        path = write_xml(tmp_path / "curved.vtu", with_fields(grid), "Appended")
        (mesh,) = read_xml(str(path))
        np.testing.assert_allclose(measured(mesh, 1), size, rtol=1e-6)
        layout = recognize(path, inputs=["pressure"], targets=["number"])
        assert layout.sizes == (count,)
        assert "1 curved cells are straight between their corners here" in str(layout)


def test_polyhedra_of_older_versions(tmp_path):
    """Before VTK 9.4, the faces of polyhedra were one list, in which OpenFOAM still writes them."""
    data = solid()
    text = write_xml(tmp_path / "new.vtu", data, "Ascii").read_text()
    first = data.GetNumberOfPoints() - 8
    stream = [len(FACES), *(n for face in FACES for n in (4, *(k + first for k in face)))]
    ends = [-1] * (len(SHAPES) - 1) + [len(stream)]
    array = '<DataArray type="Int64" Name="{}" format="ascii">{}</DataArray>'
    arrays = array.format("faces", " ".join(map(str, stream))) + array.format("faceoffsets", " ".join(map(str, ends)))
    for name in ("face_connectivity", "face_offsets", "polyhedron_to_faces", "polyhedron_offsets"):
        begin = text.index(f'<DataArray type="Int64" Name="{name}"')
        text = text[:begin] + text[text.index("</DataArray>", begin) + len("</DataArray>") :]
    assert "polyhedron" not in text
    (tmp_path / "old.vtu").write_text(text.replace("</Cells>", arrays + "</Cells>"))
    check_as_vtk_has_it(read_xml(str(tmp_path / "old.vtu"))[0], data)


def test_pieces_are_put_together_and_a_series_gives_frames(tmp_path):
    data, folder = solid(), tmp_path / "run"
    folder.mkdir()
    for time in range(3):
        data.GetPointData().GetArray("pressure").SetValue(0, 7.0 + time)
        data.GetPointData().GetArray("pressure").Modified()
        write_xml(folder / f"a{time}.vtu", data, "Appended")
    head = '<VTKFile type="{0}"><{0}>{1}</{0}></VTKFile>'
    parts = "".join(f'<Piece Source="run/a{k}.vtu"/>' for k in range(2))
    (tmp_path / "all.pvtu").write_text(head.format("PUnstructuredGrid", parts))
    (both,) = read_xml(str(tmp_path / "all.pvtu"))
    points, cells = data.GetNumberOfPoints(), data.GetNumberOfCells()
    assert [float(both.at_points["pressure"][k]) for k in (0, points)] == [7, 8]
    np.testing.assert_allclose(
        np.split(measured(both, 2 * cells), 2)[1], measured(read_xml(str(folder / "a1.vtu"))[0], cells)
    )
    frames = "".join(f'<DataSet timestep="{t / 10}" file="run/a{t}.vtu"/>' for t in (2, 0, 1))
    (tmp_path / "all.pvd").write_text(head.format("Collection", frames))
    layout = recognize(tmp_path / "all.pvd", inputs=["pressure"], targets=["pressure"])
    assert (layout.times, layout.spec.out_times) == (3, 2)
    assert [float(mesh.at_points["pressure"][0]) for mesh in read_xml(str(tmp_path / "all.pvd"))] == [7, 8, 9]
    for name in ("../a.vtu", "/dev/zero", "all.pvd", "none.vtu"):
        (tmp_path / "bad.pvd").write_text(head.format("Collection", f'<DataSet timestep="0" file="{name}"/>'))
        with pytest.raises(InputError, match=r"the parts of .*bad.pvd"):
            read_xml(str(tmp_path / "bad.pvd"))
