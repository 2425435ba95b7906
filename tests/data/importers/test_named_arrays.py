"""A person's own arrays by name: the same samples from every container, ragged ones too; mistakes are one sentence."""

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from oformer.cli import main
from oformer.data.dataset import PointDataset
from oformer.data.importers import import_file, load_file, recognize
from oformer.errors import InputError
from oformer.fields import Spec

RANDOM = np.random.default_rng(0)
SAMPLES, POINTS = 6, 9
KNOWN = {
    "coords": RANDOM.random((POINTS, 2)),
    "inputs": RANDOM.random((SAMPLES, POINTS, 3)),
    "targets": RANDOM.random((SAMPLES, POINTS, 2)),
}
OTHER = {
    "x": KNOWN["coords"][:, 0], "y": KNOWN["coords"][:, 1], "load": KNOWN["inputs"][..., 0],
    "mach": RANDOM.random(SAMPLES), "p": KNOWN["targets"][..., 0], "v": KNOWN["targets"],
}  # fmt: skip


def write_hdf5(path, arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def write_matlab_73(path, arrays):
    """As MATLAB does: all axes reversed, vectors as columns, behind a header of 512 bytes."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, array in arrays.items():
            file[name] = (array[:, None] if array.ndim == 1 else array).T
    head = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
    with path.open("r+b") as file:
        file.write(head)
    return path


def write_npz(path, arrays):
    np.savez(path, **arrays)
    return path


def write_matlab_5(path, arrays):
    scipy.io.savemat(path, arrays, oned_as="column")
    return path


def write_torch(path, arrays):
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    return path


def write_netcdf(path, arrays):
    xarray = pytest.importorskip("xarray")
    named = {SAMPLES: "sample", POINTS: "point", 2: "two", 3: "three"}
    data = {name: ([named[n] for n in array.shape], array) for name, array in arrays.items()}
    xarray.Dataset(data).to_netcdf(path, engine="scipy" if path.name == "three.nc" else "h5netcdf")
    return path


WRITERS = {
    "a.npz": write_npz, "a.h5": write_hdf5, "five.mat": write_matlab_5, "seven.mat": write_matlab_73,
    "a.pt": write_torch, "three.nc": write_netcdf, "four.nc": write_netcdf,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_every_container_gives_the_samples_of_from_arrays(tmp_path, name):
    path = WRITERS[name](tmp_path / name, KNOWN)
    assert recognize(path).spec == Spec(2, 1, 3, 1, 2)
    store = import_file(path, tmp_path / "data")
    expected = PointDataset.from_arrays(KNOWN["coords"], KNOWN["inputs"], KNOWN["targets"])
    assert store.splits == {"train": (0, 5), "test": (5, 6)}
    for ours, theirs in zip(PointDataset(store), expected, strict=True):
        for a, b in ((ours.input.coords, theirs.input.coords), (ours.input.values, theirs.input.values)):
            assert torch.equal(a, b)
        assert torch.equal(ours.target, theirs.target)
    loaded = load_file(path)
    assert len(loaded) == SAMPLES
    assert torch.equal(loaded[3].target, expected[3].target)


@pytest.mark.parametrize("name", WRITERS)
def test_names_are_chosen_and_single_numbers_are_constant_channels(tmp_path, name):
    path = WRITERS[name](tmp_path / name, OTHER)
    choices = {"kind": "arrays", "coords": ("x", "y"), "inputs": ("load", "mach"), "targets": ("p", "v")}
    layout = recognize(path, **choices)
    assert layout.spec == Spec(2, 1, 2, 1, 3)
    assert layout.inputs == ("load", "mach")
    assert layout.channels == ("p", "v_0", "v_1")
    store = import_file(path, tmp_path / "data", **choices)
    sample = store[4]
    np.testing.assert_allclose(sample.input.coords, KNOWN["coords"], rtol=1e-6)
    np.testing.assert_allclose(sample.input.values[0, :, 0], OTHER["load"][4], rtol=1e-6)
    np.testing.assert_allclose(sample.input.values[0, :, 1], np.full(POINTS, OTHER["mach"][4]), rtol=1e-6)
    np.testing.assert_allclose(sample.target[0, :, 1:], OTHER["v"][4], rtol=1e-6)


def ragged(i):
    n, m = 4 + i, 3 + 2 * i
    random = np.random.default_rng(i)
    return {
        "coords": random.random((n, 3)), "inputs": random.random((n, 1)), "targets": random.random((2, m, 1)),
        "query_coords": random.random((m, 3)), "query_features": random.random((m, 1)), "weights": np.arange(1, n + 1),
        "label": np.array(["a person's note"]),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["npz", "mat", "h5", "groups", "list"])
def test_samples_may_differ_in_their_points(tmp_path, form):
    """A folder with a file for each sample, or a file with a group for each."""
    samples = [ragged(i) for i in range(4)]
    if form == "groups":
        path = tmp_path / "all.h5"
        with h5py.File(path, "w") as file:
            for i, sample in enumerate(samples):
                for key, array in sample.items():
                    if key != "label":
                        file[f"{i:03d}/{key}"] = array
    elif form == "list":
        path = tmp_path / "all.pt"
        plain = [{key: torch.tensor(array) for key, array in sample.items() if key != "label"} for sample in samples]
        torch.save([{**sample, "number": i, "mach": torch.tensor(0.5)} for i, sample in enumerate(plain)], path)
        choices = {"coords": ["coords"], "targets": ["targets"]}
        assert recognize(path, inputs=["inputs", "mach", "number"], **choices).inputs == ("inputs", "mach", "number")
    else:
        path = tmp_path / "parts"
        path.mkdir()
        for i, sample in enumerate(samples):
            numbers = {key: array for key, array in sample.items() if key != "label" or form == "npz"}
            WRITERS[{"npz": "a.npz", "mat": "five.mat", "h5": "a.h5"}[form]](path / f"{i:03d}.{form}", numbers)
    store = import_file(path, tmp_path / "data", n_test=1)
    assert store.spec == Spec(3, 1, 1, 2, 1, 1)
    assert store.sizes().tolist() == [[4 + i, 3 + 2 * i] for i in range(4)]
    for known, found in zip(samples, store, strict=True):
        np.testing.assert_allclose(found.query.coords, known["query_coords"], rtol=1e-6)
        np.testing.assert_allclose(found.target, known["targets"], rtol=1e-6)
        np.testing.assert_allclose(found.query.values[0], known["query_features"], rtol=1e-6)
        np.testing.assert_allclose(found.input.weights, known["weights"] / known["weights"].sum(), rtol=1e-6)


def test_a_row_of_matlab_is_points_on_a_line(tmp_path):
    x = np.linspace(0, 1, 7)
    scipy.io.savemat(
        tmp_path / "rod.mat", {"x": x[None], "before": RANDOM.random((5, 7)), "after": RANDOM.random((5, 7))}
    )
    store = import_file(tmp_path / "rod.mat", tmp_path / "data", coords=("x",), inputs=("before",), targets=("after",))
    assert store.spec.dim == 1
    np.testing.assert_allclose(store[0].input.coords[:, 0], x, rtol=1e-6)


def same_samples(store, expected):
    for ours, theirs in zip(PointDataset(store), expected, strict=True):
        assert torch.equal(ours.input.coords, theirs.input.coords)
        assert torch.equal(ours.input.values, theirs.input.values)
        assert torch.equal(ours.query.values, theirs.query.values)
        assert torch.equal(ours.target, theirs.target)


@pytest.mark.parametrize("write", [write_matlab_5, write_matlab_73])
def test_rows_of_matlab_are_vectors_in_a_file_for_each_sample(tmp_path, write):
    """x, y, load and stress as 1 x N, a number as 1 x 1: the samples that columns and numbers of Python give."""
    folder = tmp_path / "parts"
    folder.mkdir()
    x, y, load, known, stress = (RANDOM.random((SAMPLES, POINTS)) for _ in range(5))
    mach = RANDOM.random(SAMPLES)
    for i in range(SAMPLES):
        rows = {"x": x, "y": y, "load": load, "query_features": known, "stress": stress, "mach": mach[:, None]}
        write(folder / f"{i}.mat", {name: array[i : i + 1] for name, array in rows.items()})
    choices = {"coords": ("x", "y"), "inputs": ("load", "mach"), "targets": ("stress",)}
    store = import_file(folder, tmp_path / "data", **choices)
    assert (store.card.inputs, store.card.targets) == (("load", "mach"), ("stress",))
    inputs = np.stack([load, np.broadcast_to(mach[:, None], load.shape)], -1)
    expected = PointDataset.from_arrays(np.stack([x, y], -1), inputs, stress, query_values=known)
    same_samples(store, expected)
    alone = import_file(folder, tmp_path / "alone", **{**choices, "inputs": ("load",)})
    assert alone.card.inputs == ("load",)
    same_samples(alone, PointDataset.from_arrays(np.stack([x, y], -1), load, stress, query_values=known))


@pytest.mark.parametrize("write", [write_matlab_5, write_matlab_73])
def test_a_row_with_a_number_for_each_sample_is_a_column(tmp_path, write):
    path = write(tmp_path / "a.mat", {**OTHER, "mach": OTHER["mach"][None]})
    choices = {"kind": "arrays", "coords": ("x", "y"), "inputs": ("load", "mach"), "targets": ("p",)}
    column = write_npz(tmp_path / "b.npz", OTHER)
    store = import_file(path, tmp_path / "data", **choices)
    assert store.card.inputs == ("load", "mach")
    same_samples(store, import_file(column, tmp_path / "other", **choices))
    uneven = write(tmp_path / "c.mat", {**OTHER, "mach": OTHER["mach"][None, :-1]})
    with pytest.raises(InputError, match=r"as many samples .* 1 in `mach`.*a row or a column of them will do"):
        import_file(uneven, tmp_path / "none", **choices)


def test_points_with_a_row_for_each_axis_are_turned_and_it_is_said(tmp_path):
    """MATLAB's [x; y] is 2 x N, which nothing else can be; in files for each sample too."""
    path = write_matlab_5(tmp_path / "a.mat", {**KNOWN, "coords": KNOWN["coords"].T})
    assert "`coords` has a row for each axis of space." in recognize(path).assumptions
    expected = PointDataset.from_arrays(**KNOWN)
    same_samples(import_file(path, tmp_path / "data"), expected)
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(SAMPLES):
        one = {"coords": KNOWN["coords"].T, "inputs": KNOWN["inputs"][i], "targets": KNOWN["targets"][i]}
        write_matlab_5(folder / f"{i}.mat", one)
    same_samples(import_file(folder, tmp_path / "other"), expected)


def test_points_on_lines_of_their_own_need_no_third_axis(tmp_path):
    """MATLAB drops a last axis of size one, and so a row for each sample is all that it can write."""
    x, before, after = (RANDOM.random((SAMPLES, POINTS)) for _ in range(3))
    path = write_matlab_5(tmp_path / "a.mat", {"x": x, "u": before, "v": after})
    choices = {"coords": ("x",), "inputs": ("u",), "targets": ("v",)}
    same_samples(import_file(path, tmp_path / "data", **choices), PointDataset.from_arrays(x[..., None], before, after))
    two = write_matlab_5(tmp_path / "b.mat", {"x": x[:2], "u": before[:2], "v": after[:2]})
    with pytest.raises(InputError, match=r"\(2, 9\), which may be 2 axes .* or points on a line .*--coords x,y"):
        import_file(two, tmp_path / "none", **choices)


def test_one_point_with_many_channels_stays_so(tmp_path):
    """A row of as many numbers as there are points is a vector; at a single point it can only be channels."""
    one = {"coords": RANDOM.random((1, 2)), "inputs": RANDOM.random((4, 1, 5)), "targets": RANDOM.random((4, 1, 5))}
    store = import_file(write_npz(tmp_path / "a.npz", one), tmp_path / "data")
    assert store.spec == Spec(2, 1, 5, 1, 5)
    assert store.card.inputs == tuple(f"inputs_{k}" for k in range(5))


def test_a_preview_lists_the_names_and_says_how_to_choose(tmp_path, capsys):
    path = write_npz(tmp_path / "mine.npz", OTHER)
    assert main(["import", str(path), "--out", str(tmp_path / "data")]) == 2
    shown = capsys.readouterr()
    assert "load" in shown.out
    assert str(OTHER["v"].shape) in shown.out
    assert f"Say so: oformer import {path} --coords x --inputs a --targets u" in shown.err
    chosen = ["--coords", "x,y", "--inputs", "load,mach", "--targets", "p"]
    assert main(["import", str(path), "--out", str(tmp_path / "data"), *chosen]) == 0
    shown = capsys.readouterr().out
    assert "input     1 frame(s) of 2 channel(s): load, mach" in shown
    assert "(9,): coords" in shown
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": RANDOM.random((SAMPLES - 1, POINTS, 2))}, "as many samples in each array"),
        ({"targets": RANDOM.random((SAMPLES, POINTS + 1, 2))}, "values at the 9"),
        ({"coords": RANDOM.random((POINTS, 4))}, "with dim 1, 2 or 3"),
        ({"inputs": np.full((SAMPLES, POINTS, 3), np.nan)}, "finite"),
        ({"weights": -np.ones(POINTS)}, "none negative"),
        ({"inputs": np.zeros((0, POINTS, 3)), "targets": np.zeros((0, POINTS, 2))}, "at least one sample"),
        ({"inputs": KNOWN["inputs"].astype(complex)}, "which arrays .* are points, input and target"),
    ],
)
def test_bad_arrays_are_one_sentence_and_leave_nothing(tmp_path, change, message):
    path = write_npz(tmp_path / "bad.npz", {**KNOWN, **change})
    with pytest.raises(InputError, match=message):
        import_file(path, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_unknown_and_useless_choices_are_refused(tmp_path):
    path = write_hdf5(tmp_path / "a.h5", KNOWN)
    with pytest.raises(InputError, match="`loads`"):
        recognize(path, inputs=("loads",))
    with pytest.raises(InputError, match="`stride` only where"):
        recognize(path, stride=2)
    with pytest.raises(InputError, match="in_times"):
        recognize(path, in_times=2)
    folder = tmp_path / "parts"
    folder.mkdir()
    write_npz(folder / "0.npz", {k: v for k, v in ragged(0).items() if k != "label"})
    write_npz(folder / "1.npz", {k: v for k, v in ragged(1).items() if k not in ("label", "targets")})
    with pytest.raises(InputError, match=r"`targets` in .*1\.npz"):
        import_file(folder, tmp_path / "data")


def test_links_out_of_the_file_are_not_followed(tmp_path):
    write_hdf5(tmp_path / "secret.h5", KNOWN)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in KNOWN:
            file[name] = h5py.ExternalLink("secret.h5", f"/{name}")
    with pytest.raises(InputError):
        import_file(tmp_path / "a.h5", tmp_path / "data", kind="arrays")


def test_train_needs_no_recipe_for_a_file_of_known_names(tmp_path, monkeypatch, capsys):
    """`oformer train --data my.h5`, and evaluation on the same samples."""
    monkeypatch.chdir(tmp_path)
    write_hdf5(tmp_path / "my.h5", KNOWN)
    tiny = ["--training.steps", "2", "--model.encoder.width", "16", "--model.query.width", "16"]
    assert main(["train", "--data", "my.h5", "--device", "cpu", *tiny]) == 0
    said = capsys.readouterr().err
    assert "Chosen from the data, where you do not say otherwise: 1,000 steps of 5, width 48, depth 2" in said
    assert "target    1 frame(s) of 2 channel(s): targets_0, targets_1" in said
    assert main(["evaluate", "outputs/my", "--device", "cpu"]) == 0
    assert "test split, 1 samples" in capsys.readouterr().out
    assert main(["train"]) == 2
    assert "the name of a recipe, or --data" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["scipy", "h5netcdf"])
def test_the_axes_of_netcdf_tell_points_frames_and_samples_apart(tmp_path, engine):
    """On a grid, whose points are those between its axes; packed in 16 bits, which are unpacked."""
    xarray = pytest.importorskip("xarray")
    random = np.random.default_rng(0)
    x, y = np.linspace(0, 1, 6), np.array([0.0, 1, 4, 9])
    a, u = random.random((4, 5, 6)), random.random((5, 3, 6, 4))
    data = xarray.Dataset(
        {"a": (("y", "sample", "x"), a), "u": (("sample", "time", "x", "y"), u)},
        {"x": x, "y": y, "time": np.arange(3.0)},
    )
    data["a"].encoding = {"dtype": "int16", "scale_factor": 1e-4, "_FillValue": -1}
    data.to_netcdf(tmp_path / "grid.nc", engine=engine)
    with pytest.raises(InputError, match=r"which arrays of .*grid.nc are points, input and target"):
        import_file(tmp_path / "grid.nc", tmp_path / "none")
    store = import_file(tmp_path / "grid.nc", tmp_path / "out", coords=["x", "y"], inputs=["a"], targets=["u"])
    assert store.spec == Spec(2, 1, 1, 3, 1)
    for k, sample in enumerate(store):
        at = [(int(np.argmin(abs(x - p))), int(np.argmin(abs(y - q)))) for p, q in sample.input.coords.tolist()]
        assert len(set(at)) == 24
        np.testing.assert_allclose(sample.input.values[0, :, 0], [a[j, k, i] for i, j in at], atol=6e-5)
        np.testing.assert_allclose(
            sample.target[:, :, 0], [[u[k, t, i, j] for i, j in at] for t in range(3)], rtol=1e-6
        )


def test_a_list_in_a_torch_file_is_asked_about_and_a_lack_is_named(tmp_path, capsys):
    path = tmp_path / "cars.pt"
    cars = [{"vertices": torch.rand(n, 3), "press": torch.rand(1, n)} for n in (5, 7, 6)]
    torch.save(cars, path)
    assert main(["import", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "which arrays of" in (said := capsys.readouterr().err)
    assert "`vertices`, `press`" in said
    choices = {"coords": ["vertices"], "inputs": ["press"], "targets": ["press"]}
    assert import_file(path, tmp_path / "out", **choices).sizes()[:, 0].tolist() == [5, 7, 6]
    for bad, words in (
        ([*cars, {"vertices": torch.rand(3, 3)}], "`press` in each dictionary of the list, got none in number 3"),
        ([*cars, torch.rand(3)], "a list with a Tensor"),
    ):
        torch.save(bad, path)
        with pytest.raises(InputError, match=words):
            import_file(path, tmp_path / "other", **choices)


def test_scattered_points_in_matlab_are_asked_about_and_no_sample_of_burgers(tmp_path):
    random = np.random.default_rng(0)
    place = random.random((2, 400))
    scipy.io.savemat(tmp_path / "flow.mat", {"x": place[:1], "y": place[1:], "w": random.random((1, 400))})
    with pytest.raises(InputError, match=r"say which are points, input and target: .* --coords x,y --inputs w"):
        recognize(tmp_path / "flow.mat")
    layout = recognize(tmp_path / "flow.mat", coords=["x", "y"], inputs=["w"], targets=["w"])
    assert (layout.samples, layout.sizes, layout.spec) == (1, (400,), Spec(2, 1, 1, 1, 1))
