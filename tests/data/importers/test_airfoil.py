"""MeshGraphNets' records and OFormer's folders: the same samples from both; damaged ones are one sentence."""

import json
import struct

import numpy as np
import pytest
import torch

from oformer.data.importers import import_file, is_importable_folder, load_file, recognize
from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.fields import Spec
from tests.data.importers.airfoils import example, member, record, trajectory, write_npz, write_tfrecord

CODES = {0: 0, 2: 1, 4: 2}


def check(store, trajectories, stride, stored="velocity"):
    """Against the definition: 4 frames in, the others out, velocity = momentum / density."""
    for sample, arrays in zip(store, trajectories, strict=True):
        pos, density = arrays["mesh_pos"][0], arrays["density"].astype(np.float64)
        flow = arrays["velocity"] / (density if stored == "velocity" else 1)
        frames = np.concatenate([flow, density, arrays["pressure"]], -1)[::stride]
        codes = np.array([CODES[t] for t in arrays["node_type"][0, :, 0]])
        box = (pos - pos.min(0)) / (pos.max(0) - pos.min(0))
        known = sample.input.values.numpy()
        np.testing.assert_allclose(known[..., :4], frames[:4], rtol=1e-6)
        np.testing.assert_allclose(known[..., 4:6], np.broadcast_to(box, (4, *box.shape)), rtol=1e-6)
        np.testing.assert_array_equal(known[..., 6], np.broadcast_to(codes, (4, len(codes))))
        np.testing.assert_allclose(sample.target, frames[4:], rtol=1e-6)
        np.testing.assert_array_equal(sample.query.values[0, :, 0], codes)
        np.testing.assert_array_equal(sample.input.coords, pos)
        np.testing.assert_array_equal(sample.cells[0], arrays["cells"][0])


def test_records_of_the_published_length_fit_the_recipe(tmp_path):
    runs = [trajectory(601, seed) for seed in range(3)]
    path = write_tfrecord(tmp_path / "airfoil", runs)
    layout = recognize(path)
    assert layout.spec == recipe_named("airfoil").data_spec()
    assert (layout.kind, layout.samples, layout.times, layout.points) == ("airfoil", 3, 601, 7)
    said = str(layout)
    for words in ("density times velocity", "divided by the density", "One in 24 of the 601 frames", "0.0002 seconds"):
        assert words in said
    store = import_file(path, tmp_path / "out", n_train=2)
    check(store, runs, 24)
    store.verify()
    assert store.card.targets == ("velocity x", "velocity y", "density", "pressure")
    assert store.card.queries == ("node type",)
    assert "meta.json" in store.card.text


def test_the_momentum_can_be_kept(tmp_path):
    runs = [trajectory(11, seed) for seed in range(2)]
    path = write_tfrecord(tmp_path / "airfoil", runs)
    store = import_file(path, tmp_path / "out", stride=2, stored="momentum")
    assert store.spec.out_times == 2
    assert store.card.targets[:2] == ("momentum x", "momentum y")
    assert "kept as it is" in store.card.text
    check(store, runs, 2, "momentum")


def test_a_folder_of_npz_gives_the_same_samples_in_the_order_of_names(tmp_path):
    runs = [trajectory(101, seed, points=6 + seed) for seed in range(3)]
    folder = write_npz(tmp_path / "dt6", runs)
    assert is_importable_folder(folder)
    layout = recognize(folder)
    assert layout.spec == recipe_named("airfoil").data_spec()
    assert "One in 4 of the 101 frames" in str(layout)
    assert "(time, triangle, corner) = (101, 5, 3)" in layout.arrays["cells"]
    store = import_file(folder, tmp_path / "out")
    check(store, runs, 4)
    more = import_file(folder, tmp_path / "more", test_file=folder, n_train=1, n_test=1)
    assert torch.equal(more[1].target, store[2].target)


def test_frames_can_be_chosen(tmp_path):
    folder = write_npz(tmp_path / "in", [trajectory(12)])
    assert recognize(folder, stride=3, in_times=1).spec == Spec(
        2, 1, 7, 3, 4, query_channels=1, in_categories=3, query_categories=3
    )
    for request, words in (
        ({"stride": 0}, "`stride` between 1 and 12"),
        ({"stride": 13}, "`stride` between 1 and 12"),
        ({"in_times": 3}, "`in_times` between 1 and 2"),
        ({"kind": "darcy"}, "`darcy`"),
        ({"inputs": ("a",)}, "`inputs` only where"),
    ):
        with pytest.raises(InputError, match=words):
            recognize(folder, **request)


def test_a_lone_folder_of_records_names_them(tmp_path):
    write_tfrecord(tmp_path / "airfoil", [trajectory(11)])
    with pytest.raises(InputError, match=r"name one of its files: train.tfrecord"):
        recognize(tmp_path / "airfoil")


def test_sides_that_meta_leaves_open_come_from_the_bytes(tmp_path):
    runs = [trajectory(11, seed, points=6 + seed) for seed in range(2)]
    path = write_tfrecord(tmp_path / "airfoil", runs)
    content = json.loads((path.parent / "meta.json").read_text())
    for feature in content["features"].values():
        feature["shape"][1] = -1
    (path.parent / "meta.json").write_text(json.dumps(content))
    check(import_file(path, tmp_path / "out", stride=2), runs, 2)


def changed(**changes):
    return {**trajectory(11), **changes}


def test_every_damaged_record_is_one_sentence(tmp_path):
    good = trajectory(11)
    raw = record(example(good))
    longer, shorter = (struct.pack("<Q", len(raw) - 16 + by) + raw[8:] for by in (1, -1))
    nan = good["pressure"].copy()
    nan[0, 2] = np.nan
    types = good["node_type"].copy()
    types[0, 3] = 6
    far = good["cells"].copy()
    far[0, 0, 0] = 99
    files = {
        "empty": (b"", "at least one record"),
        "head": (raw[:7], "the 12 bytes before record 0.*got 7"),
        "cut": (raw[:-9], "cut short"),
        "second cut": (raw + raw[: len(raw) // 2], "record 1 of"),
        "zeros": (bytes(2**20), "a payload in record 0 .*got 0 bytes"),
        "longer": (longer, f"{len(raw) - 15} bytes in record 0 .*got {len(raw) - 12} left"),
        "shorter": (shorter, "the 12 bytes before record 1"),
        "claim": (struct.pack("<QI", 2**40, 0), "1099511627776 bytes in record 0"),
        "text": (b"not a record at all, " * 9, "bytes in record 0 .*left in the file"),
        "varint": (record(b"\x0a" + b"\xff" * 12), "a number of more than 64 bits"),
        "endless": (record(b"\x0a\x80"), "a number that does not end"),
        "too long": (record(b"\x0a\x7f"), "a member longer than its message"),
        "group": (record(b"\x0b"), "no known type"),
        "nothing": (record(member(2, b"")), "`cells` in record 0.*got nothing"),
        "keys": (record(example({"cells": good["cells"]})), "`mesh_pos` in record 0"),
        "bytes": (record(example(changed(density=good["density"][:-1]))), r"`density` of shape \(11, 7, 1\)"),
        "floats": (record(member(1, member(1, member(1, b"cells") + member(2, member(2, b"\0" * 4))))), "`cells` in"),
        "nan": (record(example(changed(pressure=nan))), "sample 0 of .*1 NaN or infinite"),
        "vacuum": (record(example(changed(density=good["density"] * 0))), "positive densities"),
        "types": (record(example(changed(node_type=types))), "node types 0 .*6 among them"),
        "corners": (record(example(changed(cells=far))), "corners of cells among the 7 points"),
        "flat": (record(example(changed(mesh_pos=(good["mesh_pos"] * [1, 0]).astype("f4")))), "span a plane"),
    }  # fmt: skip
    path = write_tfrecord(tmp_path / "in", [good])
    for name, (content, words) in files.items():
        path.write_bytes(content)
        with pytest.raises(InputError, match=words) as caught:
            import_file(path, tmp_path / "out", stride=2)
        assert "\n" not in str(caught.value), name
        assert not (tmp_path / "out").exists(), name


def test_a_changed_byte_is_refused_or_read_within_bounds(tmp_path):
    """No checksum tells it: a number may be another one, but lengths, names and shapes stay those of meta.json."""
    path = write_tfrecord(tmp_path / "in", [trajectory(121)])
    raw, whole = path.read_bytes(), load_file(path)
    read, refused = 0, []
    for place in (*range(0, 400, 3), *range(400, len(raw), 401)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0xFF]) + raw[place + 1 :])
        try:
            found = load_file(path)
        except InputError as error:
            refused.append(str(error))
        else:
            assert found.spec == whole.spec
            assert found[0].target.shape == whole[0].target.shape
            read += 1
    assert not any("\n" in sentence for sentence in refused)
    assert read > 0 < len(refused)


def test_every_wrong_meta_is_one_sentence(tmp_path):
    path = write_tfrecord(tmp_path / "in", [trajectory(11)])
    place = path.parent / "meta.json"
    right = json.loads(place.read_text())

    def with_density(**changes):
        features = {**right["features"], "density": {**right["features"]["density"], **changes}}
        return json.dumps({**right, "features": features})

    for content, words in (
        ("{", "JSON in"),
        ("[1]", "`features` in"),
        (json.dumps({"features": {}}), "`cells` among the features"),
        (json.dumps({"features": {"world_pos": {}}}), "got `world_pos`"),
        (with_density(shape=[11, 7]), r"`density` as float32 of shape \[times, rows, 1\]"),
        (with_density(shape=[11, 7, 2]), "`density` as float32"),
        (with_density(shape=[-1, -1, 1]), "`density` as float32"),
        (with_density(shape="7"), "`density` as float32"),
        (with_density(dtype="object"), "`density` as float32"),
        (with_density(type="dynamic_varlen"), "`density` as float32"),
        (with_density(shape=[11, 9, 1]), r"`density` of shape \(11, 9, 1\)"),
    ):
        place.write_text(content)
        with pytest.raises(InputError, match=words):
            recognize(path)
    place.unlink()
    with pytest.raises(InputError, match=r"meta.json beside train.tfrecord"):
        recognize(path)


def test_every_bad_npz_is_one_sentence(tmp_path):
    folder = write_npz(tmp_path / "in", [trajectory(12), trajectory(12, 1)])
    second = folder / "001.npz"
    good = dict(np.load(second))
    moved = good["pos"].copy()
    moved[3] += 1
    nan = good["prs"].copy()
    nan[0] = np.inf
    for arrays, words in (
        ({k: v for k, v in good.items() if k != "dns"}, "`dns` in .*001.npz, got"),
        ({**good, "pos": moved}, "`pos` that differs between frames"),
        ({**good, "vel": good["vel"][..., :1]}, r"`vel` of shape \(times, rows, 2\)"),
        ({**good, "vel": good["vel"][:5]}, r"velocity of shape \(12, 7, 2\)"),
        ({**good, "dns": np.array([["a"]])}, "real numbers"),
        ({**good, "cells": good["cells"] + 0.5}, "whole numbers in `cells`"),
        ({k: v[:8] for k, v in good.items()}, "12 frames in trajectory 1"),
        ({**good, "prs": nan}, r"sample 1 of in\.input\.values.*7 NaN"),
        ({**good, "dns": np.array([{}], object)}, "plain arrays"),
    ):
        np.savez(second, **arrays)
        with pytest.raises(InputError, match=words) as caught:
            import_file(folder, tmp_path / "out", stride=1)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
    second.write_bytes(b"PK\x03\x04 not much of an archive")
    with pytest.raises(InputError, match=r"a \.npz or \.npy file of plain arrays"):
        import_file(folder, tmp_path / "out", stride=1)
