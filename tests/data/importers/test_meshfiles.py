"""Mesh files and tables: the chosen fields at the points of the mesh; what cannot be read is one sentence."""

import os
import re
import struct
import sys

import h5py
import numpy as np
import pytest
import torch

from oformer.data.importers import import_file, is_importable_folder, recognize
from oformer.errors import InputError
from oformer.fields import Spec
from oformer.vtk.mesh import Block
from oformer.vtk.write import vtu

meshio = pytest.importorskip("meshio")

# A square of two triangles and a quadrilateral beside it, of twice their area; the last point belongs to no cell.
POINTS = np.array([[0, 0], [1, 0], [1, 1], [0, 1], [3, 0], [3, 1], [9, 9]], float)
TRIANGLES, QUADS = np.array([[0, 1, 2], [0, 2, 3]]), np.array([[1, 4, 5, 2]])


def mesh(shift=0.0, **changes):
    n = len(POINTS)
    at_points = {
        "temperature": np.arange(n) + shift,
        "velocity": np.stack([np.arange(n) + shift, -np.arange(n) - shift, np.zeros(n)], -1),
    }
    at_cells = {"source": [np.array([1.0, 2.0]) + shift, np.array([5.0]) + shift]}
    return meshio.Mesh(
        **{
            "points": np.pad(POINTS, ((0, 0), (0, 1))),
            "cells": [("triangle", TRIANGLES), ("quad", QUADS)],
            "point_data": at_points,
            "cell_data": at_cells,
            **changes,
        }
    )


def write_gmsh(path, m):
    meshio.gmsh.write(path, m, fmt_version="2.2", binary=False)
    # meshio 5.3.5 writes numbers as numpy 2 prints them; gmsh does not.
    path.write_text(re.sub(r"np\.float64\((.*?)\)", r"\1", path.read_text()))


WRITERS = {
    "vtu": lambda path, m: meshio.vtu.write(path, m),
    "vtk": lambda path, m: meshio.vtk.write(path, m, fmt_version="4.2"),
    "xdmf": lambda path, m: meshio.xdmf.write(path, m, data_format="XML"),
    "msh": write_gmsh,
}


@pytest.fixture(autouse=True)
def quiet(capfd):
    """Neither meshio nor we say anything on the terminal."""
    yield
    shown = capfd.readouterr()
    assert shown.out == ""


@pytest.mark.filterwarnings("ignore")  # of meshio, while it writes
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_is_a_sample(tmp_path, kind, capfd):
    path = tmp_path / f"one.{kind}"
    WRITERS[kind](path, mesh())
    capfd.readouterr()
    store = import_file(path, tmp_path / "out", inputs=["source"], targets=["velocity", "temperature"])
    assert store.spec == Spec(2, 1, 1, 1, 3)
    assert store.card.targets == ("velocity_x", "velocity_y", "temperature")
    (sample,) = store
    np.testing.assert_array_equal(sample.input.coords, POINTS[:6])
    k = np.arange(6)
    np.testing.assert_allclose(sample.target[0], np.stack([k, -k, k], -1))
    # By area: triangles of 1/2 with 1 and 2, a rectangle of 2 with 5.
    means = [1.5, (0.5 * 1 + 2 * 5) / 2.5, (0.5 * 1 + 0.5 * 2 + 2 * 5) / 3, 2, 5, 5]
    np.testing.assert_allclose(sample.input.values[0, :, 0], means, rtol=1e-6)
    corners = {tuple(sorted(c)) for c in sample.cells[0].tolist()}
    assert corners == {(0, 1, 2), (0, 2, 3), (1, 4, 5), (1, 2, 5)}
    assert "mean of its cells" in store.card.text
    assert "1 points that no cell uses are left out" in store.card.text


def test_with_nothing_said_the_fields_are_listed(tmp_path):
    path = tmp_path / "one.vtu"
    WRITERS["vtu"](path, mesh())
    layout = recognize(path)
    assert layout.spec is None
    said = str(layout)
    for words in (
        "temperature   1 component(s) at points, from 0 to 5",
        "velocity      3 component(s) at points, from -5 to 5",
        "source        1 component(s) at cells",
        "4 triangles",
        "points    6, scattered",
    ):
        assert words in said, words
    for chosen in ({}, {"inputs": ["source"]}, {"targets": ["source"]}):
        with pytest.raises(InputError, match=r"`temperature`, `velocity`, `source`.*--inputs temperature --targets so"):
            import_file(path, tmp_path / "out", **chosen)
    with pytest.raises(InputError, match=r"`velocty`.*Did you mean `velocity`.*Choices: source, temperature, vel"):
        recognize(path, inputs=["velocty"], targets=["source"])
    with pytest.raises(InputError, match="a file of trajectories for `in_times`"):
        recognize(path, inputs=["x", "y"], targets=["source"], in_times=2)
    assert recognize(path, inputs=["x", "y"], targets=["source"]).inputs == ("x", "y")


def test_a_folder_is_a_dataset_in_the_order_of_names(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in (2, 0, 1):
        WRITERS["vtu"](folder / f"{i}.vtu", mesh(10.0 * i))
    (folder / "notes.txt").write_text("not a mesh")
    assert is_importable_folder(folder)
    store = import_file(folder, tmp_path / "out", inputs=["x", "source"], targets=["temperature"], n_train=2)
    assert store.splits == {"train": (0, 2), "test": (2, 3)}
    assert [float(sample.target[0, 1, 0]) for sample in store] == [1, 11, 21]
    np.testing.assert_array_equal(store[0].input.values[0, :, 0], POINTS[:6, 0])
    store.verify()


@pytest.mark.parametrize("form", ["XML", "HDF"])
def test_a_series_gives_frames(tmp_path, form, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with meshio.xdmf.TimeSeriesWriter("run.xdmf", data_format=form) as writer:
        writer.write_points_cells(POINTS[:6], [("triangle", TRIANGLES), ("triangle", np.array([[1, 4, 5], [1, 5, 2]]))])
        for k in range(5):
            writer.write_data(0.1 * k, point_data={"u": np.arange(6.0) + 100 * k})
    store = import_file("run.xdmf", "out", inputs=["u"], targets=["u"], in_times=2)
    assert store.spec == Spec(2, 2, 1, 3, 1)
    np.testing.assert_allclose(store[0].input.values[:, 1, 0], [1, 101])
    np.testing.assert_allclose(store[0].target[:, 1, 0], [201, 301, 401])
    fewer = import_file("run.xdmf", "fewer", inputs=["u", "x"], targets=["u"], stride=2)
    assert fewer.spec == Spec(2, 1, 2, 2, 1)
    np.testing.assert_allclose(fewer[0].target[:, 0, 0], [200, 400])
    np.testing.assert_allclose(fewer[0].input.values[0, :, 1], POINTS[:6, 0])


def test_volumes_and_points_alone(tmp_path):
    corners = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, -3]], float)
    tetra = np.array([[0, 1, 2, 3], [0, 1, 2, 4]])
    u = {"u": np.arange(5.0)}
    solid = mesh(points=corners, cells=[("tetra", tetra)], point_data=u, cell_data={"c": [np.array([0, 1.0])]})
    WRITERS["vtu"](tmp_path / "solid.vtu", solid)
    (sample,) = import_file(tmp_path / "solid.vtu", tmp_path / "out", inputs=["c"], targets=["u"])
    assert sample.input.coords.shape == (5, 3)
    np.testing.assert_allclose(sample.input.values[0, :, 0], [0.75, 0.75, 0.75, 0, 1])  # volumes one to three
    cloud = mesh(points=corners, cells=[("vertex", np.arange(5)[:, None])], point_data=u, cell_data={})
    WRITERS["vtu"](tmp_path / "cloud.vtu", cloud)
    (sample,) = import_file(tmp_path / "cloud.vtu", tmp_path / "out2", inputs=["x"], targets=["u"])
    assert sample.cells is None
    assert torch.equal(sample.target[0, :, 0], torch.arange(5.0))


def test_samples_must_agree(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    WRITERS["vtu"](folder / "0.vtu", mesh())
    across = mesh().point_data["velocity"] + [0, 0, 1]
    raised = np.pad(POINTS, ((0, 0), (0, 1)))
    raised[2, 2] = 1
    for changes, words in (
        ({"point_data": {"velocity": across}}, r"nothing across the plane in `velocity` of .*1.vtu"),
        (
            {"point_data": {"temperature": np.arange(7.0)}},
            r"a field `velocity` of 3 component\(s\) in .*1.vtu, got none",
        ),
        ({"point_data": {"velocity": np.arange(7.0)}}, "got one of 1"),
        ({"points": raised}, "points that vary along x, y alone"),
        ({"point_data": {"velocity": across * [np.nan, 1, 0]}}, "6 NaN"),
    ):
        WRITERS["vtu"](folder / "1.vtu", mesh(**changes))
        with pytest.raises(InputError, match=words):
            import_file(folder, tmp_path / "out", inputs=["x"], targets=["velocity"])
        assert not (tmp_path / "out").exists()


def test_every_bad_file_is_one_sentence(tmp_path, capfd):
    folder = tmp_path / "in"
    folder.mkdir()
    for kind in ("vtu", "vtk", "xdmf", "msh"):
        (folder / f"text.{kind}").write_bytes(b"not a mesh at all\n" * 9)
        (folder / f"empty.{kind}").write_bytes(b"")
        WRITERS["vtu" if kind == "msh" else kind](folder / f"cut.{kind}", mesh())
        whole = (folder / f"cut.{kind}").read_bytes()
        (folder / f"cut.{kind}").write_bytes(whole[: len(whole) * 2 // 3])
    prism = Block(15, np.arange(10)[None], np.zeros(1))
    (folder / "prism.vtu").write_bytes(vtu(np.random.default_rng(0).random((10, 3)), [prism], {}))
    WRITERS["vtu"](folder / "alone.vtu", mesh(point_data={}, cell_data={}))
    one_place = mesh(points=np.zeros((7, 3)))
    WRITERS["vtu"](folder / "place.vtu", one_place)
    far = mesh(cells=[("triangle", TRIANGLES + 5), ("quad", QUADS)])
    WRITERS["vtu"](folder / "far.vtu", far)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["data0"] = np.zeros((3, 2))
    plain = (
        '<Xdmf Version="3.0"><Domain><Grid Name="g"><Geometry GeometryType="XY"><DataItem DataType="Float" '
        'Dimensions="3 2" Format="{}" Precision="8">{}</DataItem></Geometry></Grid></Domain></Xdmf>'
    )
    (folder / "elsewhere.xdmf").write_text(plain.format("HDF", "../secret.h5:/data0"))
    (folder / "binary.xdmf").write_text(plain.format("Binary", str(tmp_path / "secret.h5")))
    (folder / "missing.xdmf").write_text(plain.format("HDF", "none.h5:/data0"))
    bombs = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    (folder / "bomb.vtu").write_text(f'<!DOCTYPE x [<!ENTITY a0 "ha">{bombs}]><VTKFile>&a11;</VTKFile>')
    words = {
        "prism.vtu": "got cells of VTK's type 15 with 10 corners. Convert them in ParaView",
        "empty.vtk": "begins with `# vtk DataFile Version`",
        "text.vtk": "begins with `# vtk DataFile Version`",
        "alone.vtu": "a mesh alone",
        "place.vtu": "all in one place",
        "far.vtu": "corners among the 7 points",
        "elsewhere.xdmf": r"in a file beside it, got `\.\./secret.h5",
        "binary.xdmf": "`Binary`",
        "missing.xdmf": "a file none.h5 beside .*, got none",
    }
    capfd.readouterr()
    files = sorted(folder.iterdir())
    assert len(files) == 20
    for path in files:
        with pytest.raises(InputError, match=words.get(path.name, "cannot be read")) as caught:
            import_file(path, tmp_path / "out")
        assert "\n" not in str(caught.value), path
        assert not (tmp_path / "out").exists(), path


def test_without_meshio_it_is_named_where_it_is_needed(tmp_path, monkeypatch):
    for kind in ("xdmf", "vtu"):
        WRITERS[kind](tmp_path / f"one.{kind}", mesh())
    for name in ("meshio", "meshlane"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="pip install meshio"):
        recognize(tmp_path / "one.xdmf")
    assert recognize(tmp_path / "one.vtu").sizes == (6,)


ITEM = '<{tag} Dimensions="{n}" DataType="Float" Precision="8" Format="{form}">{text}</{tag}>'
GRID = (
    '<Xdmf Version="3.0"><Domain>{begin}<Grid Name="g" GridType="Uniform">{time}'
    '<Geometry GeometryType="XY"><DataItem Dimensions="3 2" DataType="Float" Precision="8" Format="XML">'
    "0 0 1 0 0 1</DataItem></Geometry>"
    '<Topology TopologyType="Triangle"><DataItem Dimensions="1 3" DataType="Int" Precision="8" Format="XML">'
    "0 1 2</DataItem></Topology>"
    '<Attribute Name="u" AttributeType="Scalar" Center="Node">{item}</Attribute></Grid>{end}</Domain></Xdmf>'
)
ALONE = {"begin": "", "time": "", "end": ""}
SERIES = {
    "begin": '<Grid GridType="Collection" CollectionType="Temporal">',
    "time": '<Time Value="0"/>',
    "end": "</Grid>",
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("around", [ALONE, SERIES], ids=["grid", "series"])
@pytest.mark.parametrize("tag", ["DataItem", "Item", "Anything"])
def test_xdmf_reads_nothing_but_hdf5_beside_it(tmp_path, tag, around):
    folder, outside = tmp_path / "in", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret").write_bytes(np.array([1.5, 2.5, 3.5]).tobytes())
    for place in (outside / "secret.h5", folder / "good.h5"):
        with h5py.File(place, "w") as file:
            file["group/data"] = np.array([1.5, 2.5, 3.5])
            file["soft"] = h5py.SoftLink("/group/data")
            file["external"] = h5py.ExternalLink(str(outside / "secret.h5"), "group/data")
    (folder / "link.h5").symlink_to(outside / "secret.h5")
    os.mkfifo(folder / "pipe.h5")
    for form, text in (
        ("Binary", outside / "secret"),
        ("HDF", f"{outside}/secret.h5:/group/data"),
        ("HDF", "../outside/secret.h5:/group/data"),
        ("HDF", "link.h5:/group/data"),
        ("HDF", "pipe.h5:/group/data"),
        ("HDF", "/dev/zero:/group/data"),
        ("HDF", "..:/group/data"),
        ("HDF", "good.h5:/external"),
        ("HDF", "good.h5:/soft"),
        ("HDF", "good.h5:/group"),
    ):
        path = folder / "a.xdmf"
        path.write_text(GRID.format(item=ITEM.format(tag=tag, n=3, form=form, text=text), **around))
        with pytest.raises(InputError, match=r"beside it|beside|itself|in the file itself") as caught:
            recognize(path)
        assert "1.5" not in str(caught.value), (form, text)
    path.write_text(GRID.format(item=ITEM.format(tag=tag, n=3, form="HDF", text="good.h5:/group/data"), **around))
    assert "from 1.5 to 3.5" in recognize(path).arrays["u"]


def as_su2_writes(path):
    """A .vtu with raw appended data, whose offsets are padded with spaces: ParaView reads it, meshio does not."""
    values = [
        np.pad(POINTS[:3], ((0, 0), (0, 1))),
        np.arange(3),
        np.array([3]),
        np.array([5], np.uint8),
        np.arange(3.0),
    ]
    blocks = [struct.pack("<I", value.nbytes) + value.tobytes() for value in values]
    places = [f'"{sum(map(len, blocks[:k])):>12}"' for k in range(5)]
    array = '<DataArray type="{}" Name="{}" NumberOfComponents="{}" format="appended" offset={}/>'
    head = (
        '<VTKFile type="UnstructuredGrid" version="0.1" byte_order="LittleEndian"><UnstructuredGrid>'
        '<Piece NumberOfPoints="3" NumberOfCells="1"><Points>' + array.format("Float64", "", 3, places[0]) + "</Points>"
        "<Cells>"
        + array.format("Int64", "connectivity", 1, places[1])
        + array.format("Int64", "offsets", 1, places[2])
        + array.format("UInt8", "types", 1, places[3])
        + "</Cells><PointData>"
        + array.format("Float64", "pressure", 1, places[4])
        + '</PointData></Piece></UnstructuredGrid><AppendedData encoding="raw">_'
    )
    path.write_bytes(head.encode() + b"".join(blocks) + b"\n</AppendedData></VTKFile>\n")
    return path


def test_a_file_with_raw_data_at_its_end_is_read_as_solvers_write_it(tmp_path):
    layout = recognize(as_su2_writes(tmp_path / "raw.vtu"), inputs=["x"], targets=["pressure"])
    assert layout.arrays == {"pressure": "1 component(s) at points, from 0 to 2", "(cells)": "1 triangles"}
    cut = (tmp_path / "raw.vtu").read_bytes()
    (tmp_path / "raw.vtu").write_bytes(cut[: cut.index(b"<AppendedData") + 60])
    with pytest.raises(InputError, match=r"cannot be read .* It is damaged or cut short"):
        recognize(tmp_path / "raw.vtu")


def test_a_table_is_points_and_columns_and_frames_where_it_has_times(tmp_path):
    random = np.random.default_rng(0)
    place = random.random((7, 2))
    tables = {
        "plain": ("x,y,p", ","), "fluent": ("x-coordinate;y-coordinate;p", ";"),
        "paraview": ("p,Points:0,Points:1", ","),
        "comsol": ("% By: a b\n% x   y  p", "   "), "cfx": ('"X [ m ]"\t"Y [ m ]"\tp', "\t"),
    }  # fmt: skip
    for name, (head, mark) in tables.items():
        columns = [place[:, 0], place[:, 1], place.sum(1)]
        if name == "paraview":
            columns = [columns[2], *columns[:2]]
        rows = [mark.join(f"{value:.17g}" for value in row) for row in zip(*columns, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n", encoding="utf-8-sig")
        (sample,) = import_file(tmp_path / f"{name}.csv", tmp_path / name, inputs=["x"], targets=["p"])
        np.testing.assert_allclose(sample.input.coords, place, rtol=1e-6)
        np.testing.assert_allclose(sample.target[0, :, 0], place.sum(1), rtol=1e-6)
    path, moved = tmp_path / "times.csv", tmp_path / "moved.csv"
    rows = [f"{t},{p},{q},{p + t}" for t in (2, 0, 1) for p, q in place]
    path.write_text("\n".join(["time,a,b,T", *rows]))
    (sample,) = import_file(path, tmp_path / "out", coords=["a", "b"], inputs=["T"], targets=["T"], in_times=1)
    np.testing.assert_allclose(sample.target[:, :, 0], place[:, 0] + [[1], [2]], rtol=1e-6)
    moved.write_text("\n".join(["time,x,y,T", *rows[:-1], "1,5,5,5"]))
    (tmp_path / "no-names.csv").write_text("1,2,3\n4,5,6\n")
    for bad, words in (
        (path, "columns x, y, z in .*, got `time`, `a`, `b`, `T`.*--coords"),
        (moved, "the same points in the same order at all times of .*, got others at time 1"),
        (tmp_path / "no-names.csv", "a line with 3 different names above the numbers"),
    ):
        with pytest.raises(InputError, match=words):
            recognize(bad)
    with pytest.raises(InputError, match=r"`coords` only where a file has use for it"):
        recognize(as_su2_writes(tmp_path / "raw.vtu"), coords=["x"])


def test_a_mesh_of_su2_is_read(tmp_path):
    (tmp_path / "a.su2").write_text(
        "NDIME= 2\nNELEM= 2\n5 0 1 2 0\n5 0 2 3 1\nNPOIN= 4\n0 0 0\n1 0 1\n1 1 2\n0 1 3\nNMARK= 0\n"
    )
    layout = recognize(tmp_path / "a.su2", inputs=["x"], targets=["y"])
    assert (layout.arrays["(cells)"], layout.sizes) == ("2 triangles", (4,))
