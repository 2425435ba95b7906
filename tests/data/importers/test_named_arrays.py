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


WRITERS = {
    "a.npz": write_npz, "a.h5": write_hdf5, "five.mat": write_matlab_5, "seven.mat": write_matlab_73,
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


@pytest.mark.parametrize("form", ["npz", "mat", "h5", "groups"])
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
