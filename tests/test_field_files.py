"""Fields written for other programs: what these read back is what was written."""

import csv

import numpy as np
import pytest
import torch

from oformer import PointDataset
from oformer.errors import InputError
from oformer.field_files import save_field
from oformer.fields import Card, Field
from oformer.vtk.read_xml import read_xml

SQUARE = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [2, 0]], np.float32)
TRIANGLE, QUAD = np.array([[1, 4, 2]]), np.array([[0, 1, 2, 3]])
NAMES = ("velocity x", "velocity y", "p & <q>")


def flow(times=1, points=SQUARE):
    values = torch.arange(times * len(points) * 3.0).reshape(times, len(points), 3) / 7
    return Field.of(points, values)


def test_numpy_and_xarray_hold_the_values_of_the_field():
    xarray = pytest.importorskip("xarray")
    field = Field.of(SQUARE, flow(2).values.requires_grad_())
    for array, tensor in zip(field.numpy(), field.tensors, strict=True):
        np.testing.assert_array_equal(array, tensor.detach())
    data = field.to_xarray(NAMES)
    assert isinstance(data, xarray.Dataset)
    np.testing.assert_array_equal(data["p & <q>"].isel(time=1), field.values[1, :, 2].detach())
    np.testing.assert_array_equal(data["y"], SQUARE[:, 1])
    mean = data["velocity x"].weighted(data.weights).mean("point")
    np.testing.assert_allclose(mean, field.values[:, :, 0].detach().mean(1), rtol=1e-6)
    batch = Field.of(np.stack([SQUARE, SQUARE + 1]), np.zeros((2, 1, 5, 1), np.float32)).to_xarray()
    assert batch["value"].dims == ("sample", "time", "point")
    assert batch["x"].dims == ("sample", "point")
    with pytest.raises(InputError, match="3 different names for the channels in `names`, got u, v"):
        field.to_xarray(["u", "v"])


@pytest.mark.parametrize("name", ["a.vtu", "a.vtk"])
def test_meshio_and_vtk_read_what_is_written_for_paraview(tmp_path, name):
    field = flow()
    assert save_field(tmp_path / name, field, [TRIANGLE, QUAD], NAMES) == [tmp_path / name]
    values = field.values[0].numpy()
    vectors = np.pad(values[:, :2], ((0, 0), (0, 1)))
    meshio = pytest.importorskip("meshio")
    mesh = (meshio.vtu if name == "a.vtu" else meshio.vtk).read(tmp_path / name)
    np.testing.assert_array_equal(mesh.points[:, :2], SQUARE)
    assert {block.type: block.data.tolist() for block in mesh.cells} == {
        "triangle": [[1, 4, 2]],
        "quad": [[0, 1, 2, 3]],
    }
    (scalar,) = (array for array in mesh.point_data.values() if array.ndim == 1)
    np.testing.assert_array_equal(scalar, values[:, 2])
    np.testing.assert_array_equal(mesh.point_data["velocity"], vectors)
    vtk = pytest.importorskip("vtk")
    reader = vtk.vtkXMLUnstructuredGridReader() if name == "a.vtu" else vtk.vtkUnstructuredGridReader()
    reader.SetFileName(str(tmp_path / name))
    reader.Update()
    found = reader.GetOutput()
    assert [found.GetCellType(k) for k in range(found.GetNumberOfCells())] == [5, 9]
    arrays = found.GetPointData()
    from vtk.util.numpy_support import vtk_to_numpy

    np.testing.assert_array_equal(vtk_to_numpy(arrays.GetArray("velocity")), vectors)
    np.testing.assert_array_equal(vtk_to_numpy(arrays.GetArray("p & <q>")), values[:, 2])


def test_frames_are_a_series_that_is_read_back(tmp_path):
    field = flow(3)
    first, *frames = field.to_vtu(tmp_path / "run.vtu", QUAD, NAMES)
    assert (first.name, len(frames)) == ("run.pvd", 3)
    for mesh, values in zip(read_xml(str(first)), field.values.numpy(), strict=True):
        np.testing.assert_array_equal(mesh.at_points["p & <q>"], values[:, 2])
        assert mesh.blocks[0].corners.tolist() == QUAD.tolist()
    assert [path.name for path in save_field(tmp_path / "a.vtk", field)] == [f"a_000{k}.vtk" for k in range(3)]


def test_cells_are_told_by_their_corners_and_the_space(tmp_path):
    space = np.random.default_rng(0).random((8, 3))
    for points, cells, kinds in (
        (space, [[0, 1, 2, 3]], [10]), (space[:, :2], [[0, 1, 2, 3]], [9]), (space, [range(8)], [12]),
        (space[:, :1], [[0, 1]], [3]), (space, None, []),
    ):  # fmt: skip
        Field.of(points, points[:, 0]).to_vtu(tmp_path / "a.vtu", None if cells is None else np.array(cells))
        assert [block.type for block in read_xml(str(tmp_path / "a.vtu"))[0].blocks] == kinds
    for cells, words in (
        (np.array([[0, 8]]), "`cells` with indices from 0 to 7, got 0 to 8"),
        (np.zeros((2, 5), int), r"2, 3, 4 or 8 indices .* got int64 of shape \(2, 5\)"),
        (np.zeros((2, 3)), "got float64 of shape"),
    ):
        with pytest.raises(InputError, match=words):
            Field.of(space).to_vtu(tmp_path / "b.vtu", cells)
    assert not (tmp_path / "b.vtu").exists()


def test_tables_and_netcdf(tmp_path):
    xarray = pytest.importorskip("xarray")
    field = flow(2)
    save_field(tmp_path / "a.csv", field, names=NAMES)
    with (tmp_path / "a.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["time", "x", "y", *NAMES]
    table = np.array(rows, float).reshape(2, 5, 6)
    np.testing.assert_allclose(table[..., 3:], field.values, rtol=1e-7)
    np.testing.assert_allclose(table[1, :, 1:3], SQUARE)
    save_field(tmp_path / "a.nc", field, names=("u", "v/c", "p"))
    with xarray.open_dataset(tmp_path / "a.nc") as data:
        np.testing.assert_array_equal(data["p"], field.values[..., 2])
        assert "v per c" in data
        np.testing.assert_array_equal(data["x"], SQUARE[:, 0])


def test_an_unknown_ending_and_a_batch_are_refused(tmp_path):
    for name, words in (("a.xyz", "got `a.xyz`. Write a.npz"), ("a", "got `a`, which has no ending")):
        with pytest.raises(InputError, match=f"ends in .npz, .csv, .nc, .vtu, .pvd, .vtk, {words}"):
            save_field(tmp_path / name, flow())
    with pytest.raises(InputError, match=r"ends in .vtu, .pvd, got `a.csv`"):
        flow().to_vtu(tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"without a batch axis, got coords of shape \(1, 5, 2\)"):
        flow().batched().to_vtu(tmp_path / "a.vtu")


def test_objects_show_as_one_line_and_as_a_table():
    assert repr(flow(2)) == "Field(points=5, dim=2, times=2, channels=3, device='cpu')"
    assert repr(flow().batched()).startswith("Field(samples=1, points=5")
    samples = PointDataset.from_arrays(SQUARE, np.zeros((4, 5)), np.ones((4, 5)), card=Card("<b>", targets=("u",)))
    assert repr(samples) == (
        "PointDataset(samples=4, title='<b>', inputs='1 x 1 channel(s)', targets='1 x u', points='scattered in 2-D')"
    )
    assert "<tr><th>samples</th><td>4</td></tr><tr><th>title</th><td>&lt;b&gt;</td></tr>" in samples._repr_html_()
