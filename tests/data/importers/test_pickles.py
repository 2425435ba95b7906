"""Pickles of electro- and magnetostatics: values as in the file; nothing in a pickle is ever run."""

import os
import pickle
import struct

import numpy as np
import pytest
import torch

from oformer.data import PointDataset
from oformer.data.importers import import_file, recognize
from oformer.errors import InputError
from oformer.fields import Spec


def entries(count=6, seed=0):
    """Ragged samples in the published layout; the fourth channel is the boundary flag with the usual overshoots."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        x = rng.standard_normal((5 + i, 11)).astype(np.float32)
        x[:, 3] = np.where(np.arange(5 + i) % 2, 0.99, 0.02)
        edges = rng.integers(0, 5, (2, 8))
        found.append({"data_x": x, "data_y": rng.standard_normal((5 + i, 3)).astype(np.float32), "edge_index": edges})
    return found


def write(path, content, protocol=4):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
def test_samples_come_as_they_stand(tmp_path, protocol, module):
    content = entries()
    raw = pickle.dumps(content, protocol=protocol)
    if protocol < 4:  # names end with a line there: the same pickle as an older or newer numpy writes it
        raw = raw.replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", module.encode())
    path = tmp_path / "es_train_no_ma.pkl"
    path.write_bytes(raw)
    store = import_file(path, tmp_path / "out", n_train=4, n_test=2)
    assert store.spec == Spec(2, 1, 11, 1, 3, query_channels=1)
    for sample, entry in zip(store, content, strict=True):
        np.testing.assert_array_equal(sample.input.values[0], entry["data_x"])
        np.testing.assert_array_equal(sample.input.coords, entry["data_x"][:, :2])
        np.testing.assert_array_equal(sample.target[0], entry["data_y"])
        np.testing.assert_array_equal(sample.query.values[0, :, 0], entry["data_x"][:, 3] > 0.5)
        assert torch.equal(sample.query.coords, sample.input.coords)
        assert float(sample.input.weights.sum()) == pytest.approx(1)
    store.verify()
    assert len(PointDataset.open(tmp_path / "out").split("test")) == 2


def test_order_of_bytes_and_of_axes_are_the_arrays_own(tmp_path):
    (entry,) = entries(1)
    odd = {"data_x": np.asfortranarray(entry["data_x"].astype(">f8")), "data_y": entry["data_y"][::-1]}
    store = import_file(write(tmp_path / "ms_test.pkl", [odd]), tmp_path / "out")
    np.testing.assert_array_equal(store[0].input.values[0], entry["data_x"])
    np.testing.assert_array_equal(store[0].target[0], entry["data_y"][::-1])


def test_the_name_tells_which_it_is_and_the_layout_what_was_assumed(tmp_path):
    content = entries()
    electro, magneto = (recognize(write(tmp_path / f"{name}.pkl", content)) for name in ("es_test", "ms_test_shape"))
    assert (electro.kind, electro.samples, electro.points) == ("electrostatics", 6, 10)
    assert electro.channels == ("potential", "E_x", "E_y")
    assert magneto.kind == "magnetostatics"
    assert magneto.inputs[2] == "current density"
    said = str(electro)
    for words in ("points    5 to 10, scattered", "divided by its largest size", "above 0.5", "edge_index    not used"):
        assert words in said
    path = write(tmp_path / "mine.pkl", content)
    with pytest.raises(InputError, match=r"begins with es_ or ms_.*`mine.pkl`.*electrostatics or magnetostatics"):
        recognize(path)
    assert recognize(path, kind="magnetostatics").kind == "magnetostatics"
    with pytest.raises(InputError, match="electrostatics or magnetostatics in the pickle"):
        recognize(path, kind="darcy")
    with pytest.raises(InputError, match="`stride` only where"):
        recognize(path, kind="magnetostatics", stride=2)


class Runs:
    """Unpickled the usual way, it would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Plain:
    pass


def deep_tuples(depth):
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."  # a dictionary whose key is tuples within tuples


def claims(shape, kind="f4", data=b"\x00" * 8):
    """An array of eight bytes that says it is another."""
    raw = pickle.dumps(np.zeros(2, "f4"), protocol=2)
    assert raw.count(b"K\x02\x85") == 1
    sides = b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in shape) + b"t"
    return raw.replace(b"K\x02\x85", sides).replace(b"f4", kind.encode())


def test_what_is_not_arrays_is_refused_and_never_run(tmp_path):
    good = entries(2)
    trace = tmp_path / "trace"
    bad = {
        "run": (pickle.dumps([{"data_x": Runs(trace)}]), r"would run `(posix|nt).system`"),
        "run 0": (pickle.dumps([{"data_x": Runs(trace)}], protocol=0), r"would run `(posix|nt).system`"),
        "eval": (b"cbuiltins\neval\n(S'open(\"trace\", \"w\")'\ntR.", "would run `builtins.eval`"),
        "load": (b"cnumpy\nload\n(S'x'\ntR.", "would run `numpy.load`"),
        "dotted": (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "would run `numpy.ndarray.tofile`"),
        "inst": (b"(ios\nsystem\n.", "would run `os.system`"),
        "class": (pickle.dumps([Plain()]), "would run"),
        "outside": (b"Pname\n.", "damaged, cut short.*persistent"),
        "objects": (pickle.dumps([{"data_x": np.array([{}, 1], object)}]), "array of 'O8'"),
        "claims": (claims([10**12]), "bytes are not those"),
        "negative": (claims([-1, -2]), "bytes are not those"),
        "many sides": (claims([2**40, 2**40, 2**40]), "bytes are not those"),
        "memory": (b"\x80\x02K\x01r\xff\xff\xff\x7f.", "half of the memory|damaged, cut short"),
        "long text": (b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.", "half of the memory|damaged, cut short"),
        "deep": (deep_tuples(1_000_000), "the reader crashed|damaged, cut short"),
        "deep lists": (b"]" * 200_000 + b"a" * 199_999 + b".", "a dictionary with .* got a list"),
        "no stack": (b"\x80\x02\x85.", "damaged, cut short"),
        "text": (b"hello", "damaged, cut short"),
        "empty": (b"", "damaged, cut short"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "damaged, cut short"),
        "short": (pickle.dumps(good)[:-200], "damaged, cut short"),
        "number": (pickle.dumps(3.5), "a list of samples in .*got a float"),
        "no samples": (pickle.dumps([]), "an empty list"),
        "no dictionary": (pickle.dumps([good[0]["data_x"]]), "a dictionary with .* got an array"),
        "keys": (pickle.dumps([good[0], {"x": good[1]["data_x"]}]), "`data_x` in sample 1 of .*got `x`"),
        "columns": (pickle.dumps([{**good[0], "data_x": good[0]["data_x"][:, :9]}]), r"\(points, 11\).*got \(5, 9\)"),
        "rows": (pickle.dumps([{**good[0], "data_y": good[1]["data_y"]}]), "as many points .* got 5 and 6"),
        "none": (pickle.dumps([{**good[0], "data_x": np.zeros((0, 11))}]), r"got \(0, 11\)"),
        "nan": (pickle.dumps([good[0], {**good[1], "data_y": good[1]["data_y"] * np.nan}]), "sample 1 of .*18 NaN"),
        "huge": (pickle.dumps([{**good[0], "data_x": good[0]["data_x"].astype("f8") * 1e300}]), "NaN or infinite"),
    }  # fmt: skip
    path = tmp_path / "es_bad.pkl"
    for name, (raw, words) in bad.items():
        path.write_bytes(raw)
        with pytest.raises(InputError, match=words) as caught:
            import_file(path, tmp_path / "out")
        assert "\n" not in str(caught.value), name
        assert not (tmp_path / "out").exists(), name
    assert not trace.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["es_bad.pkl"]
