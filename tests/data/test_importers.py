"""Published files, made here in their true layouts: values, axes, splits, coordinates; bad ones are one sentence."""

import pickle
import re

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from oformer.data import PointDataset
from oformer.data.importers import import_file, load_file, recognize, run
from oformer.data.importers.common import Opened
from oformer.errors import InputError
from oformer.fields import Spec


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def write_mat(path, version, **arrays):
    """As MATLAB does: 7.3 is HDF5 behind a header of 512 bytes, with the axes reversed."""
    if version == "5":
        scipy.io.savemat(path, arrays)
    elif version == "7":
        scipy.io.savemat(path, arrays, do_compression=True)
    else:
        with h5py.File(path, "w", userblock_size=512) as file:
            for name, array in arrays.items():
                file[name] = np.atleast_2d(array).T
        with path.open("r+b") as file:
            file.write(b"MATLAB 7.3 MAT-file".ljust(116) + b" " * 8 + b"\x00\x02IM")
    return path


VERSIONS = ("5", "7", "7.3")


def values(store, what="target"):
    """All samples of a store as (samples, times, points, channels)."""
    pick = {"target": lambda s: s.target, "input": lambda s: s.input.values}[what]
    return np.stack([pick(sample).numpy() for sample in store])


def same(store, what, expected):
    np.testing.assert_array_equal(values(store, what), expected.astype(np.float32))


def mesh(*axes):
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(axes)).astype(np.float32)


def leaves_nothing(folder):
    return [p.name for p in folder.iterdir() if p.name.startswith((".", "out"))] == []


# --- the equations of the papers ---


@pytest.mark.parametrize("version", VERSIONS)
def test_burgers(tmp_path, version):
    a, u = numbers(12, 32), numbers(13, 32)[1:]
    path = write_mat(tmp_path / "b.mat", version, a=a, u=u, a_smooth=a, visc=0.1)
    layout = recognize(path)
    assert (layout.kind, layout.samples, layout.points, layout.times) == ("burgers", 12, 32, 1)
    assert "(sample, x) = (12, 32)" in layout.arrays["a"]
    assert layout.spec == Spec(1, 1, 1, 1, 1, grid=(32,), periods=(1.0,))
    store = import_file(path, tmp_path / "out", n_train=7, n_test=3)
    assert store.spec == layout.spec
    assert store.splits == {"train": (0, 7), "test": (7, 10)}
    rows = [*range(7), *range(9, 12)]  # the first seven and the last three
    same(store, "input", a[rows][:, None, :, None])
    same(store, "target", u[rows][:, None, :, None])
    assert torch.equal(store[0].input.coords[:, 0], (torch.arange(32, dtype=torch.float64) / 32).float())
    assert float(store[3].parameters["visc"]) == pytest.approx(0.1)
    assert store[0].input.weights.tolist() == [pytest.approx(1 / 32)] * 32
    store.verify()
    text = store.manifest.card.text
    assert "test split is samples 9 to 11 of the 12 in b.mat" in text
    assert "j/n" in text
    assert len(PointDataset.open(tmp_path / "out").split("train")) == 7


@pytest.mark.parametrize("version", VERSIONS)
def test_darcy_of_the_published_size(tmp_path, version):
    coeff, sol = numbers(3, 421, 421), numbers(4, 421, 421)[1:]
    path = write_mat(tmp_path / "d.mat", version, coeff=coeff, sol=sol, Kcoeff=coeff[:, ::50, ::50])
    store = import_file(path, tmp_path / "out", n_train=2)
    assert store.spec == Spec(2, 1, 1, 1, 1, grid=(421, 421))
    assert store.splits == {"train": (0, 2), "test": (2, 3)}
    axis = (np.arange(421) + 0.5) / 421
    np.testing.assert_array_equal(store[0].query.coords.numpy(), mesh(axis, axis))
    same(store, "input", coeff.reshape(3, 1, -1, 1))
    same(store, "target", sol.reshape(3, 1, -1, 1))
    assert "(i + 1/2)/421" in recognize(path).assumptions[0]


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ((np.arange(20) + 0.5) / 20, "centres of 20 cells"),
        (np.arange(21) / 20, "nodes i/20"),
        ((5 * np.arange(85) + 0.5) / 421, "one in 5 of the centres of 421"),
        ((10 * np.arange(43) + 0.5) / 421, "one in 10 of the centres of 421"),
        ((16 * np.arange(32) + 0.5) / 512, "one in 16 of the centres of 512"),
    ],
)
def test_the_solution_tells_the_grid_of_darcy(tmp_path, axis, words):
    """It is zero on the boundary: how it falls off says how far the first and the last line are from there."""
    sol = np.outer(np.sin(np.pi * axis), axis * (1 - axis))[None].repeat(3, 0)
    path = write_mat(tmp_path / "d.mat", "5", coeff=np.ones_like(sol), sol=sol)
    layout = recognize(path)
    assert words in layout.assumptions[0]
    assert layout.warnings == ()
    store = import_file(path, tmp_path / "out")
    np.testing.assert_array_equal(store[0].input.coords.numpy(), mesh(axis, axis))


def test_a_darcy_grid_that_cannot_be_told_is_assumed_aloud(tmp_path):
    path = write_mat(tmp_path / "d.mat", "5", coeff=numbers(2, 20, 20), sol=1 + numbers(2, 20, 20) ** 2)
    assert "(i + 1/2)/20" in recognize(path).assumptions[0]
    assert "check the coordinates" in recognize(path).warnings[0]
    path = write_mat(tmp_path / "e.mat", "5", coeff=numbers(2, 4, 4), sol=numbers(2, 4, 4))
    assert "too little" in recognize(path).warnings[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_navier_stokes(tmp_path, version):
    u = numbers(14, 8, 8, 13)
    path = write_mat(tmp_path / "n.mat", version, u=u, a=numbers(14, 8, 8), t=np.arange(1.0, 14))
    layout = recognize(path)
    assert (layout.kind, layout.samples, layout.times) == ("navier-stokes", 14, 13)
    assert "(sample, x, y, time) = (14, 8, 8, 13)" in layout.arrays["u"]
    assert layout.spec == Spec(2, 10, 1, 3, 1, grid=(8, 8), periods=(1.0, 1.0))
    store = import_file(path, tmp_path / "out", n_train=5, n_test=2)
    frames = np.moveaxis(u, 3, 1).reshape(14, 13, 64, 1)[[0, 1, 2, 3, 4, 12, 13]]
    same(store, "input", frames[:, :10])
    same(store, "target", frames[:, 10:])
    np.testing.assert_array_equal(store[0].input.coords.numpy(), mesh(np.arange(8) / 8, np.arange(8) / 8))
    assert import_file(path, tmp_path / "other", in_times=4).spec.out_times == 9


def test_numpy_has_time_first_and_samples_last(tmp_path):
    u = numbers(12, 8, 8, 15).astype(np.float32)
    np.save(tmp_path / "n.npy", u)
    layout = recognize(tmp_path / "n.npy")
    assert (layout.samples, layout.times, layout.warnings) == (15, 12, ())
    store = import_file(tmp_path / "n.npy", tmp_path / "out", in_times=2)
    frames = u.transpose(3, 0, 1, 2).reshape(15, 12, 64, 1)
    same(store, "input", frames[:, :2])
    same(store, "target", frames[:, 2:])
    assert store.splits == {"train": (0, 14), "test": (14, 15)}
    np.save(tmp_path / "n.npy", u.transpose(3, 1, 2, 0))
    assert "check which axis is which" in recognize(tmp_path / "n.npy").warnings[0]


def test_torch(tmp_path):
    x, y = torch.randn(9, 16), torch.randn(9, 5, 16)
    y[:, 0] = x
    torch.save({"x": x, "y": y, "visc": torch.tensor([[0.01]])}, tmp_path / "b.pt")
    store = import_file(tmp_path / "b.pt", tmp_path / "out", n_test=2)
    assert store.spec == Spec(1, 1, 1, 4, 1, grid=(16,), periods=(1.0,))  # the first frame is the input again
    same(store, "target", y[:, 1:, :, None].numpy())
    assert float(store[0].parameters["visc"]) == pytest.approx(0.01)
    torch.save({"x": x, "y": y + 1}, tmp_path / "b.pt")
    assert recognize(tmp_path / "b.pt").spec.out_times == 5
    torch.save({"x": torch.randn(4, 8, 8), "y": torch.randn(4, 8, 8)}, tmp_path / "f.pt")
    with pytest.raises(InputError, match="say so with --kind"):
        recognize(tmp_path / "f.pt")
    assert recognize(tmp_path / "f.pt", kind="darcy").spec.periods is None
    assert recognize(tmp_path / "f.pt", kind="navier-stokes").spec.periods == (1.0, 1.0)


def test_x_and_y_beside_other_arrays_are_not_taken_for_burgers(tmp_path):
    """They may be points of the plane, and the others what is known there."""
    names = ("x", "y", "load", "pressure")
    torch.save({name: torch.rand(6, 16) for name in names}, tmp_path / "mine.pt")
    with pytest.raises(InputError, match=r"`pressure` \(6, 16\).*--coords x,y --inputs load --targets pressure"):
        recognize(tmp_path / "mine.pt")
    assert recognize(tmp_path / "mine.pt", kind="burgers").spec.dim == 1


@pytest.mark.parametrize(
    ("train", "test", "spec", "counts"),
    [
        ("darcy_train_16", "darcy_test_16", Spec(2, 1, 1, 1, 1, grid=(16, 16)), (1000, 50)),
        ("burgers_train_16", "burgers_test_16", Spec(1, 1, 1, 16, 1, grid=(16,), periods=(1.0,)), (800, 400)),
    ],
)
def test_the_real_small_files(shared_data, tmp_path, train, test, spec, counts):
    folder = shared_data / "neuraloperator_small"
    if not folder.is_dir():
        pytest.skip("shared/data/neuraloperator_small is absent")
    one, two = folder / f"{train}.pt", folder / f"{test}.pt"
    layout = recognize(one)
    assert (layout.samples, recognize(two).samples, layout.spec) == (*counts, spec)
    store = import_file(one, tmp_path / "out", test_file=two, n_train=60, n_test=40)
    assert store.spec == spec
    assert store.splits == {"train": (0, 60), "test": (60, 100)}
    content = torch.load(two, weights_only=True)
    inputs = np.concatenate([torch.load(one, weights_only=True)["x"][:60], content["x"][-40:]])
    same(store, "input", inputs.reshape(100, 1, -1, 1))
    last = content["y"][-1].reshape(-1, int(np.prod(spec.grid)))[-spec.out_times :]
    np.testing.assert_array_equal(store[-1].target[..., 0].numpy(), last.float().numpy())
    if "darcy" in train:
        assert store[0].input.coords[1].tolist() == pytest.approx([0.5 / 512, 32.5 / 512])
        with pytest.raises(InputError, match=r"points of .*darcy_train_16.pt in .*darcy_test_32.pt too"):
            import_file(one, tmp_path / "other", test_file=folder / "darcy_test_32.pt")


# --- PDEBench ---


def write_h5(path, attrs=None, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace("_coordinate", "-coordinate")] = array
        file.attrs.update(attrs or {})
    return path


def test_pdebench_tensor(tmp_path):
    x, u = np.linspace(-1, 1, 24, dtype=np.float32), numbers(6, 14, 24)
    path = write_h5(tmp_path / "p.hdf5", tensor=u, x_coordinate=x, t_coordinate=np.arange(15.0))
    layout = recognize(path)
    assert (layout.kind, layout.spec) == ("pdebench", Spec(1, 10, 1, 4, 1, grid=(24,)))
    assert layout.warnings == ()
    assert any("not periodic" in sentence for sentence in layout.assumptions)
    store = import_file(path, tmp_path / "out", in_times=1)
    same(store, "input", u[:, :1, :, None])
    same(store, "target", u[:, 1:, :, None])
    np.testing.assert_array_equal(store[0].input.coords.numpy()[:, 0], x)


def test_pdebench_darcy(tmp_path):
    x, y = (np.arange(8) + 0.5) / 8, (np.arange(6) + 0.5) / 6
    nu, u = numbers(5, 8, 6), numbers(5, 1, 8, 6)
    path = write_h5(tmp_path / "p.hdf5", {"beta": 0.1}, tensor=u, nu=nu, x_coordinate=x, y_coordinate=y)
    store = import_file(path, tmp_path / "out")
    assert store.spec == Spec(2, 1, 1, 1, 1, grid=(8, 6))
    same(store, "input", nu.reshape(5, 1, 48, 1))
    same(store, "target", u.reshape(5, 1, 48, 1))
    np.testing.assert_array_equal(store[0].input.coords.numpy(), mesh(x, y))
    assert float(store[0].parameters["beta"]) == pytest.approx(0.1)


def test_pdebench_named_fields(tmp_path):
    x, fields = np.linspace(0, 1, 6), {name: numbers(4, 3, 6, 6) for name in ("Vx", "Vy", "density", "pressure")}
    path = write_h5(tmp_path / "p.hdf5", **fields, x_coordinate=x, y_coordinate=x)
    store = import_file(path, tmp_path / "out", in_times=2)
    assert store.card.targets == ("density", "pressure", "Vx", "Vy")
    assert store.spec == Spec(2, 2, 4, 1, 4, grid=(6, 6))


def test_pdebench_seeds(tmp_path):
    x, y = np.linspace(-1, 1, 6), np.linspace(-1, 1, 4)
    u = numbers(11, 5, 6, 4, 2)
    arrays = {f"{seed:04d}/data": u[seed] for seed in range(11)}
    grids = {f"{seed:04d}/grid/{k}": v for seed in range(11) for k, v in (("x", x), ("y", y), ("t", np.arange(5.0)))}
    path = write_h5(tmp_path / "p.h5", **arrays, **grids)
    layout = recognize(path)
    assert "(time, x, y, channel) = (5, 6, 4, 2), and so on to 0010" in layout.arrays["0000/data"]
    store = import_file(path, tmp_path / "out", in_times=2, n_train=8, n_test=3)
    assert store.spec == Spec(2, 2, 2, 3, 2, grid=(6, 4))
    same(store, "input", u[:, :2].reshape(11, 2, 24, 2))
    same(store, "target", u[:, 2:].reshape(11, 3, 24, 2))
    np.testing.assert_array_equal(store[0].input.coords.numpy(), mesh(x, y))


# --- The Well ---


def write_well(path, periodic=("x", "y"), x=None, **changes):
    """Four samples, five frames, a grid of 6 x 4."""
    x = np.arange(6) / 6 * 2 if x is None else x
    y = np.arange(4) / 4 + 0.125
    fields = {
        "t0_fields/pressure": (numbers(4, 5, 6, 4), {}),
        "t0_fields/mask": (numbers(6, 4), {"sample_varying": False, "time_varying": False}),
        "t0_fields/depth": (numbers(4, 6), {"time_varying": False, "dim_varying": [True, False]}),
        "t1_fields/velocity": (numbers(4, 5, 6, 4, 2), {}),
        "t2_fields/strain": (numbers(4, 5, 6, 4, 2, 2), {}),
    }
    fields.update({name.replace("__", "/"): value for name, value in changes.items()})
    with h5py.File(path, "w") as file:
        file.attrs.update({"dataset_name": "soup", "grid_type": "cartesian", "n_trajectories": 4})
        for name, axis in (("time", np.arange(5.0)), ("x", x), ("y", y)):
            file[f"dimensions/{name}"] = axis
            file[f"dimensions/{name}"].attrs.update({"sample_varying": False, "time_varying": False})
        file["dimensions"].attrs["spatial_dims"] = ["x", "y"]
        for name, (array, attrs) in fields.items():
            file[name] = array
            default = {"sample_varying": True, "time_varying": True, "dim_varying": [True, True]}
            file[name].attrs.update({**default, **attrs})
        file["t0_fields"].attrs["field_names"] = ["pressure", "mask", "depth"]
        file["scalars/Reynolds"] = np.array([1.0, 2, 3, 4])
        file["scalars/gamma"] = 1.4
        for name in ("x", "y"):
            group = file.create_group(f"boundary_conditions/{name}_edge")
            group.attrs.update({"bc_type": "PERIODIC" if name in periodic else "WALL", "associated_dims": [name]})
    return path, {name: array for name, (array, _) in fields.items()}


def test_the_well(tmp_path):
    path, fields = write_well(tmp_path / "w.hdf5")
    layout = recognize(path)
    assert layout.channels == (
        "pressure", "velocity_x", "velocity_y", "strain_xx", "strain_xy", "strain_yx", "strain_yy",
    )  # fmt: skip
    assert layout.arrays["depth"] == "(sample, x) = (4, 6)"
    store = import_file(path, tmp_path / "out", in_times=2, n_train=3)
    assert store.spec == Spec(2, 2, 9, 3, 7, grid=(6, 4), periods=(2.0, 1.0))
    moving = np.concatenate(
        [
            fields["t0_fields/pressure"].reshape(4, 5, 24, 1),
            fields["t1_fields/velocity"].reshape(4, 5, 24, 2),
            fields["t2_fields/strain"].reshape(4, 5, 24, 4),
        ],
        -1,
    )
    same(store, "target", moving[:, 2:])
    got = values(store, "input")
    np.testing.assert_array_equal(got[..., :7], moving[:, :2].astype(np.float32))
    np.testing.assert_array_equal(got[3, 1, :, 7], fields["t0_fields/mask"].reshape(-1).astype(np.float32))
    np.testing.assert_array_equal(got[3, 1, :, 8], fields["t0_fields/depth"][3].repeat(4).astype(np.float32))
    assert store.card.inputs[-2:] == ("mask", "depth")
    assert [float(s.parameters["Reynolds"]) for s in store] == [1, 2, 3, 4]
    assert float(store[0].parameters["gamma"]) == pytest.approx(1.4)


def test_the_well_that_is_not_periodic_or_not_even(tmp_path):
    layout = recognize(write_well(tmp_path / "w.hdf5", periodic=("y",))[0])
    assert layout.spec.periods is None
    assert "Only y of x, y" in layout.warnings[0]
    path, _ = write_well(tmp_path / "v.hdf5", periodic=(), x=np.array([0.0, 1, 2, 4, 8, 16]))
    store = import_file(path, tmp_path / "out")
    assert store.spec.periods is None
    weights = store[0].input.weights.reshape(6, 4).sum(1)
    torch.testing.assert_close(weights, torch.tensor([0.5, 1, 1.5, 3, 6, 4]) / 16)  # the trapezoid rule


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", [(1, 50), (50, 1)], ids=["rows", "columns"])
@pytest.mark.parametrize("others", [("w",), (), ("a", "u")], ids=["w", "nothing", "a and u"])
def test_coordinates_named_x_and_y_are_not_taken_for_burgers(tmp_path, version, shape, others):
    """Scattered values beside their coordinates: one sample of one equation fits, and so does a field in the plane."""
    names = (*others, "x", "y")
    path = write_mat(tmp_path / "mine.mat", version, **{name: numbers(*shape) for name in names})
    for read in (recognize, load_file):
        with pytest.raises(InputError) as caught:
            read(path)
        said = str(caught.value)
        assert all(f"`{name}` {shape}" in said for name in names)
        chosen = f"--inputs {others[0]} --targets {others[-1]}" if others else "--inputs NAME --targets NAME"
        assert f"oformer import {path} --coords x,y {chosen}" in said
        assert "--kind burgers" in said
    if len(others) < 2 and shape == (1, 50):
        assert recognize(path, kind="burgers").spec == Spec(1, 1, 1, 1, 1, grid=(50,), periods=(1.0,))
    if others:
        layout = recognize(path, coords=["x", "y"], inputs=[others[0]], targets=[others[-1]])
        assert layout.spec.dim == 2


# --- splits, parts, failures ---


@pytest.fixture
def burgers(tmp_path):
    return write_mat(tmp_path / "b.mat", "7.3", a=numbers(11, 16), u=numbers(11, 16))


def test_parts_are_read_one_at_a_time(burgers, tmp_path, monkeypatch):
    whole = import_file(burgers, tmp_path / "whole", n_train=5, n_test=4)
    taken, take = [], Opened.samples

    def spy(self, first, end):
        taken.append((first, end))
        return take(self, first, end)

    monkeypatch.setattr(Opened, "samples", spy)
    monkeypatch.setattr(run, "PART_SAMPLES", 3)
    done = []
    store = import_file(burgers, tmp_path / "out", n_train=5, n_test=4, progress=lambda *a: done.append(a))
    assert taken == [(0, 3), (3, 5), (7, 8), (8, 11)]
    assert done == [(3, 9), (6, 9), (9, 9)]
    np.testing.assert_array_equal(values(store), values(whole))
    monkeypatch.setattr(run, "PART_BYTES", 300)
    assert import_file(burgers, tmp_path / "small").manifest.part_size == 2  # 128 bytes each


def test_float16_says_what_it_costs(burgers, tmp_path):
    store = import_file(burgers, tmp_path / "out", storage="float16")
    assert store.manifest.rounding is not None
    assert 0 < store.manifest.rounding["target"] < 1e-3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"n_train": 8, "n_test": 4}, "within the 11, got 8 and 4"),
        ({"n_train": 0, "n_test": 0}, "at least one sample"),
        ({"in_times": 3}, "a file of trajectories"),
        ({"kind": "darcy"}, r"axes \(sample, x, y\) for darcy"),
        ({"kind": "the-well"}, "never written so"),
        ({"kind": "burger"}, "Did you mean `burgers`"),
        ({"test_file": "nowhere.mat"}, "nothing there"),
    ],
)
def test_requests_that_cannot_be(burgers, tmp_path, request_, message):
    with pytest.raises(InputError, match=message):
        import_file(burgers, tmp_path / "out", **request_)
    assert leaves_nothing(tmp_path)


def test_what_is_there_stays(burgers, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="no file or folder yet"):
        import_file(burgers, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


class Hostile:
    def __reduce__(self):
        return print, ("this must never be printed",)


def _bad_files(folder):
    """By name: a file, and words of the sentence it must give."""
    good = numbers(6, 16)
    nan = good.copy()
    nan[4, 7] = np.nan
    steps = np.linspace(0, 1, 16)
    v5 = write_mat(folder / "5.mat", "5", a=good, u=good)
    v7 = write_mat(folder / "7.mat", "7", a=good, u=good)
    v73 = write_mat(folder / "73.mat", "7.3", a=good, u=good)
    np.save(folder / "good.npy", numbers(12, 8, 8, 4))
    torch.save({"x": torch.tensor(good), "y": torch.tensor(good)}, folder / "good.pt")
    h5 = write_h5(folder / "good.h5", tensor=numbers(3, 4, 16), x_coordinate=steps)
    bad = {}
    for path in (v5, v7, v73, folder / "good.npy", folder / "good.pt", h5):
        cut = folder / f"cut-{path.name}"
        cut.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        bad[f"cut {path.name}"] = cut, "cannot be read|damaged"
    for name, content, word in (
        ("text.mat", b"not a matrix at all\n" * 20, "begins with"),
        ("text.pt", b"not tensors", "nothing but tensors"),
        ("text.h5", b"nor this", "begins with"),
        ("empty.mat", b"", "an empty file"),
        ("lfs.mat", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("pickle.pt", pickle.dumps({"x": Hostile()}), "nothing but tensors"),
    ):
        (folder / name).write_bytes(content)
        bad[name] = folder / name, word
    torch.save({"x": torch.zeros(2, 8), "y": Hostile()}, folder / "hostile.pt")
    bad["hostile.pt"] = folder / "hostile.pt", "would run `(builtins.)?print`"
    torch.save([1, 2], folder / "list.pt")
    bad["list.pt"] = folder / "list.pt", "a dictionary of tensors"
    torch.save({"x": torch.zeros(4, 8, dtype=torch.complex64), "y": torch.zeros(4, 8)}, folder / "complex.pt")
    bad["complex.pt"] = folder / "complex.pt", "dense real numbers"
    np.save(folder / "object.npy", np.array([Hostile()], dtype=object), allow_pickle=True)
    bad["object.npy"] = folder / "object.npy", "cannot be read"
    np.save(folder / "flat.npy", np.zeros((3, 4)))
    bad["flat.npy"] = folder / "flat.npy", r"\(time, x, y, sample\)"
    for version in ("5", "7.3"):
        mats = {
            "keys": ({"foo": good, "bar": good}, "`bar` .6, 16., `foo`"),
            "counts": ({"a": good, "u": good[:5]}, "the same samples and points"),
            "points": ({"a": good, "u": good[:, :9]}, "the same samples and points"),
            "oblong": ({"coeff": numbers(3, 8, 9), "sol": numbers(3, 8, 9)}, "square grid"),
            "frames": ({"u": numbers(3, 7, 8, 2)}, "square grid"),
            "nan": ({"a": good, "u": nan}, "sample 4 of nan-.*mat\\.target.*1 NaN or infinite"),
            "huge": ({"a": good * 1e60, "u": good}, "NaN or infinite"),
        }
        for name, (arrays, word) in mats.items():
            path = write_mat(folder / f"{name}-{version}.mat", version, **arrays)
            bad[f"{name} {version}"] = path, word
    hdf5 = {
        "unknown": ({"foo": good}, "PDEBench or The Well"),
        "no-axis": ({"tensor": numbers(3, 4, 5, 6), "x_coordinate": steps[:5]}, "`y-coordinate`"),
        "short-axis": ({"tensor": numbers(3, 4, 16), "x_coordinate": steps[:5]}, "16 coordinates"),
        "still": ({"tensor": numbers(3, 4, 16), "x_coordinate": steps * 0}, "that grow"),
        "strings": ({"tensor": np.array([b"a", b"b"]), "x_coordinate": steps}, "real numbers"),
        "flat": ({"tensor": good, "x_coordinate": steps}, "up to three axes"),
        "nan-h5": ({"tensor": np.stack([nan[:4], nan[2:]]), "x_coordinate": steps}, "NaN or infinite"),
        "nu": ({"tensor": numbers(3, 2, 4, 4), "nu": numbers(3, 4, 4), "x_coordinate": steps}, r"\(sample, 1, x, y\)"),
        "no-grid": ({"0000/data": numbers(3, 4, 1)}, "`grid`"),
        "uneven": ({"0000/data": numbers(3, 4, 1), "0000/grid/x": steps[:4], "0001/data": good}, "shape .3, 4, 1. of"),
    }
    for name, (arrays, word) in hdf5.items():
        bad[name] = write_h5(folder / f"{name}.h5", **arrays), word
    with h5py.File(folder / "link.h5", "w") as file:
        file["x-coordinate"] = steps
        file["tensor"] = h5py.ExternalLink("good.h5", "tensor")
    bad["link"] = folder / "link.h5", "a link that leads elsewhere"
    with h5py.File(folder / "outside.h5", "w") as file:
        file["x-coordinate"] = steps
        file.create_dataset("tensor", (1, 2, 16), "f4", external=[(str(folder / "good.pt"), 0, 128)])
    bad["outside"] = folder / "outside.h5", "kept in other files"
    wells = {
        "well-shape": ({"t0_fields__pressure": (numbers(4, 5, 6), {})}, "as its attributes say"),
        "well-attrs": ({"t0_fields__mask": (numbers(6, 4), {"dim_varying": [True]})}, "as its attributes say"),
    }
    for name, (changes, word) in wells.items():
        bad[name] = write_well(folder / f"{name}.h5", **changes)[0], word
    with h5py.File(folder / "well-empty.h5", "w") as file:
        file.create_group("dimensions")
        file.create_group("t0_fields")
    bad["well-empty"] = folder / "well-empty.h5", "spatial_dims"
    bad["absent"] = folder / "absent.mat", "nothing there"
    bad["folder"] = folder, "a folder"
    return bad


def test_every_bad_file_is_one_sentence_and_leaves_nothing(tmp_path, capfd):
    (tmp_path / "in").mkdir()
    (tmp_path / "to").mkdir()
    bad = _bad_files(tmp_path / "in")
    assert len(bad) > 35
    for name, (path, words) in bad.items():
        with pytest.raises(InputError) as caught:
            import_file(path, tmp_path / "to" / "out")
        said = str(caught.value)
        assert re.search(words, said), (name, said)
        assert "\n" not in said, name
        assert list((tmp_path / "to").iterdir()) == [], name
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""  # the hostile ones have not run
