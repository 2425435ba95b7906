import dataclasses
import json
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oformer import files
from oformer.data import PointDataset, Store, measure
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec


def write(folder, samples, spec, part_size=4, order=None, **settings):
    writer = Store.create(folder, spec=spec, card=Card("A test"), count=len(samples), part_size=part_size, **settings)
    writer.share(samples[0])
    for part in order or range(writer.parts):
        writer.write(part, [samples[i] for i in writer.indices(part)])
    return writer.finalize()


def test_roundtrip_shared(tmp_path, waves, same_sample):
    samples = waves.samples(range(10), 3)
    store = write(tmp_path / "d", samples, waves.spec)
    assert len(store) == len(list(store)) == 10
    assert store.spec == waves.spec
    for i, sample in enumerate(samples):
        same_sample(store[i], sample)
        assert store[i].target.dtype == torch.float32
    same_sample(store[-1], samples[-1])
    assert store[0].input.coords is store[9].query.coords  # one tensor for all
    shared = files.map_arrays(tmp_path / "d" / "shared.safetensors")
    part = files.map_arrays(tmp_path / "d" / "parts" / "part-00001.safetensors")
    assert set(shared) == {"input.coords", "input.weights", "query.values"}
    assert set(part) == {"input.values", "input.offsets", "target", "redrawn"}
    for index in (10, -11):
        with pytest.raises(IndexError):
            store[index]


def test_roundtrip_ragged(tmp_path, scattered, same_sample):
    samples = scattered.samples(range(11), 0)
    store = write(tmp_path / "d", samples, scattered.spec)
    for i, sample in enumerate(samples):
        same_sample(store[i], sample)
    assert store.sizes().tolist() == [[s.input.points, s.query.points] for s in samples]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    picks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=7),
    part_size=st.integers(1, 4),
    order_seed=st.integers(0, 99),
)
def test_roundtrip_whatever_is_shared(tmp_path_factory, same_sample, fingerprint, picks, part_size, order_seed):
    """Inputs and queries on one of three point sets each, or queries on those of the input: all come back."""
    random = np.random.default_rng(0)
    sets = [Field.of(torch.from_numpy(random.standard_normal((n, 2)))) for n in (3, 3, 5)]
    samples = []
    for i, j, same in picks:
        place, query = sets[i], sets[i if same else j]
        values = torch.from_numpy(random.standard_normal((1, place.points, 1)))
        target = torch.from_numpy(random.standard_normal((2, query.points, 1)))
        samples.append(Sample(Field(place.coords, values, place.weights), query, target))
    folder = tmp_path_factory.mktemp("store")
    spec = Spec(2, 1, 1, 2, 1)
    store = write(folder / "a", samples, spec, part_size)
    for i, sample in enumerate(samples):
        same_sample(store[i], sample)
    parts = len(store.manifest.parts)
    order = np.random.default_rng(order_seed).permutation(parts).tolist()
    write(folder / "b", samples, spec, part_size, order)
    assert fingerprint(folder / "a") == fingerprint(folder / "b")


def test_no_points_are_stored_twice(tmp_path, scattered):
    """Ragged samples whose queries are their input points keep one copy of them."""
    samples = [
        Sample(s.input, Field.of(s.input.coords, None, s.input.weights), s.input.values[:1])
        for s in scattered.samples(range(5), 0)
    ]
    store = write(tmp_path / "d", samples, Spec(2, 2, 3, 1, 3))
    part = files.map_arrays(tmp_path / "d" / "parts" / "part-00000.safetensors")
    assert not {"query.coords", "query.weights", "query.offsets"} & set(part)
    assert all(torch.equal(s.query.coords, s.input.coords) for s in store)


def test_files_can_be_read_without_us(tmp_path, scattered):
    safetensors = pytest.importorskip("safetensors.numpy")
    samples = scattered.samples(range(5), 0)
    write(tmp_path / "d", samples, scattered.spec)
    part = safetensors.load_file(tmp_path / "d" / "parts" / "part-00001.safetensors")
    first, end = part["query.offsets"][:2]
    expected = samples[4].target.float().numpy().transpose(1, 0, 2)
    assert np.array_equal(part["target"][first:end], expected)


def test_float16_says_what_it_costs(tmp_path, scattered):
    samples = scattered.samples(range(6), 0)
    store = write(tmp_path / "d", samples, scattered.spec, storage="float16")
    errors = [float((store[i].target - s.target).norm() / s.target.norm()) for i, s in enumerate(samples)]
    assert store.manifest.rounding is not None
    assert store.manifest.rounding["target"] == pytest.approx(max(errors), rel=1e-6)
    assert 0 < max(errors) < 2**-11
    assert torch.equal(store[2].input.coords, samples[2].input.coords.float())  # coordinates are not rounded
    assert "float16" in (tmp_path / "d" / "README.md").read_text()
    big = samples[1].to(torch.float64)
    huge = Sample(big.input, big.query, big.target * 1e6, big.parameters, big.cells)
    with pytest.raises(InputError, match=r"below 65504 in `sample 1` to store them as float16"):
        write(tmp_path / "e", [samples[0], huge], scattered.spec, storage="float16")


def test_statistics_are_those_of_the_training_split(tmp_path, scattered):
    samples = scattered.samples(range(9), 0)
    store = write(tmp_path / "d", samples, scattered.spec, splits={"train": (0, 6), "test": (6, 9)})
    values = torch.cat([s.input.values.float().double().flatten(0, 1) for s in samples[:6]])
    assert store.statistics is not None
    stats = store.statistics.input
    assert stats.mean == pytest.approx(values.mean(0).tolist(), rel=1e-12)
    assert stats.std == pytest.approx(values.std(0, correction=0).tolist(), rel=1e-12)
    assert stats.min == tuple(values.amin(0).tolist())
    assert stats.max == tuple(values.amax(0).tolist())
    assert store.statistics == PointDataset(store).split("train").statistics()


def test_statistics_keep_their_digits_far_from_zero():
    values = 1e6 + torch.randn(50, 1, 40, 1, dtype=torch.float64)
    coords = torch.zeros(40, 1, dtype=torch.float64)
    stats = measure(Sample(Field.of(coords, v), Field.of(coords), v) for v in values)
    assert stats.target.std[0] == pytest.approx(float(values.std(correction=0)), rel=1e-9)
    with pytest.raises(InputError, match="at least one sample"):
        measure([])


def test_no_training_split(tmp_path, waves):
    store = write(tmp_path / "d", waves.samples(range(3), 0), waves.spec, splits={"test": (0, 3)})
    assert store.statistics is None
    assert store.splits == {"test": (0, 3)}
    assert "| input | 1 | 0 |" in (tmp_path / "d" / "README.md").read_text()


def test_pickle_and_threads(tmp_path, scattered, same_sample):
    samples = scattered.samples(range(12), 0)
    store = write(tmp_path / "d", samples, scattered.spec)
    copy = pickle.loads(pickle.dumps(store))
    assert copy._parts == {}
    same_sample(copy[7], samples[7])
    fresh, failed = Store.open(tmp_path / "d"), []

    def read(start):
        try:
            for i in range(60):
                same_sample(fresh[(start + i) % 12], samples[(start + i) % 12])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_verify(tmp_path, waves):
    store = write(tmp_path / "d", waves.samples(range(9), 0), waves.spec)
    store.verify()
    path = tmp_path / "d" / "parts" / "part-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Store.open(tmp_path / "d")  # opening looks at sizes only
    with pytest.raises(InputError, match=r"part-00001.safetensors, got another"):
        store.verify()


def test_open_what_is_none(tmp_path, waves):
    with pytest.raises(InputError, match="nothing there"):
        Store.open(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="got a file"):
        Store.open(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"without dataset.json"):
        Store.open(tmp_path / "empty")
    sidecar = tmp_path / "empty" / "dataset.json"
    for content, message in [
        ("{", "unreadable"),
        ("[1]", "something foreign"),
        ('{"format": "zarr"}', "something foreign"),
        ('{"format": "oformer dataset", "version": "1"}', "a version from 1 to 1 in"),
        ('{"format": "oformer dataset", "version": 1}', "missing card, complete, count"),
        ('{"format": "oformer dataset", "version": 1, "problem": 3}', "settings of a problem or null"),
    ]:
        sidecar.write_text(content)
        with pytest.raises(InputError, match=message):
            Store.open(tmp_path / "empty")


def test_newer_version(tmp_path, waves):
    write(tmp_path / "d", waves.samples(range(2), 0), waves.spec)
    sidecar = tmp_path / "d" / "dataset.json"
    content = json.loads(sidecar.read_text()) | {"version": 7, "written_by": "oformer 9.1", "new": 1}
    sidecar.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"got version 7, written by oformer 9.1. .*; upgrade this one"):
        Store.open(tmp_path / "d")


def test_incomplete(tmp_path, waves):
    samples = waves.samples(range(10), 0)
    writer = Store.create(tmp_path / "d", spec=waves.spec, card=waves.card, count=10, part_size=4)
    writer.write(0, samples[:4])
    with pytest.raises(InputError, match=r"2 of 3 parts missing. Run its generation again"):
        Store.open(tmp_path / "d")
    with pytest.raises(InputError, match="2 missing"):
        writer.finalize()
    writer.write(1, samples[4:8])
    writer.write(2, samples[8:])
    with pytest.raises(InputError, match="all there but not yet checked"):
        Store.open(tmp_path / "d")
    writer.finalize()
    assert len(Store.open(tmp_path / "d")) == 10


@pytest.mark.parametrize("name", ["parts/part-00001.safetensors", "shared.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_files_are_found_when_opening(tmp_path, waves, name, damage):
    write(tmp_path / "d", waves.samples(range(9), 0), waves.spec)
    path = tmp_path / "d" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    with pytest.raises(InputError, match=rf"bytes in .*{path.name}, got .*Copy the dataset again"):
        Store.open(tmp_path / "d")


def test_a_foreign_part_is_refused(tmp_path, waves):
    samples = waves.samples(range(8), 0)
    writer = Store.create(tmp_path / "d", spec=waves.spec, card=waves.card, count=8, part_size=4)
    writer.write(0, samples[:4])
    writer.write(1, samples[4:])
    path = tmp_path / "d" / "parts" / "part-00001.safetensors"
    good = dict(files.map_arrays(path))
    one = np.zeros(4)
    for change, message in [
        ({"target": None}, "`target`"),
        ({"input.offsets": np.array([0, 9, 3, 1, 64])}, "5 growing numbers"),
        ({"target": good["target"][:-1]}, "64 rows in `target`.*got 63"),
        ({"target": good["target"][..., 0]}, r"`target` as \(rows, 1, 1\) of float32 .*got \(64, 1\) of float32"),
        ({"target": good["target"].view(np.int32)}, r"`target` as .* of float32 .* got .* of int32"),
        ({"input.offsets": good["input.offsets"].astype(float)}, r"`input.offsets` as \(rows\) of int64"),
        ({"redrawn": one}, "`redrawn`"),
        ({"extra": one}, "a dataset knows.*`extra`"),
        ({"cells.0": np.zeros((2, 3), np.int32)}, r"`cells\.0\.offsets`.*got none"),
        ({"parameters.mach": one}, "the parameters of part 0"),
        ({"input.offsets": np.array([0, 10, 32, 48, 64])}, "the 16 points of `input.coords`"),
    ]:
        changed = {k: v for k, v in (good | change).items() if v is not None}
        files.save_arrays(path, changed)
        with pytest.raises(InputError, match=message):
            writer.finalize()
    files.save_arrays(path, good)
    writer.finalize()


def replaced(folder, name, **changes):
    """Change arrays of a file of a finished dataset, and what dataset.json says of its length."""
    path, sidecar = folder / name, folder / "dataset.json"
    good = {key: array.copy() for key, array in files.map_arrays(path).items()}
    files.save_arrays(path, {key: change(good[key]) for key, change in changes.items()} | {
        key: array for key, array in good.items() if key not in changes
    })  # fmt: skip
    manifest = json.loads(sidecar.read_text())
    for record in (manifest["shared"], *manifest["parts"]):
        record["bytes"] = (folder / record["file"]).stat().st_size
    sidecar.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "array", "change", "message"),
    [
        ("parts/part-00001.safetensors", "target", lambda a: a[:-1], "64 rows in `target` in .*part-00001"),
        ("parts/part-00001.safetensors", "input.offsets", lambda a: a[::-1].copy(), "5 growing numbers"),
        (
            "shared.safetensors",
            "input.coords",
            lambda a: a[:, 0],
            r"`input\.coords` as \(rows, 1\) of float32 in .*shared",
        ),
        (
            "shared.safetensors",
            "input.weights",
            lambda a: a.astype(np.float64),
            r"`input\.weights` as \(rows\) of float32",
        ),
        ("shared.safetensors", "input.coords", lambda a: a[:-1], "the 15 points of `input.coords`"),
    ],
)
def test_a_finished_part_that_contradicts_the_manifest_is_refused_when_read(
    tmp_path, waves, name, array, change, message
):
    write(tmp_path / "d", waves.samples(range(9), 0), waves.spec)
    replaced(tmp_path / "d", name, **{array: change})
    store = Store.open(tmp_path / "d")
    with pytest.raises(InputError, match=message):
        store[5]
    with pytest.raises(InputError, match=message):
        store.sizes()


@pytest.mark.parametrize(("array", "value"), [("target", np.nan), ("input.values", np.inf)])
def test_a_sample_that_is_not_finite_is_refused_by_name(tmp_path, waves, array, value):
    write(tmp_path / "d", waves.samples(range(9), 0), waves.spec)

    def spoil(a):
        a[3 * 16 + 2] = value  # in the last of the four samples
        return a

    replaced(tmp_path / "d", "parts/part-00001.safetensors", **{array: spoil})
    store = Store.open(tmp_path / "d")
    assert torch.isfinite(store[6].target).all()
    message = rf"finite numbers in `sample 7 of .*part-00001.safetensors.{array}`, got 1 NaN or infinite"
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            store[7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 10**9, "part_size": 1}, "1000000000 parts listed"),
        ({"complete": False, "count": 10**9, "part_size": 1}, "999999997 of 1000000000 parts missing"),
        ({"count": 10**9, "part_size": 10**9, "parts": 1}, "'parts/part-00000.safetensors', 0, 1000000000"),
        ({"count": 10**9, "part_size": 10**9, "parts": 1, "counted": 10**9}, "at least 76 bytes a sample"),
        ({"parts": [1, 0, 2]}, r"part 0 in .*'parts/part-00000\.safetensors', 0, 4\), got .*part-00001"),
        ({"grid": [10**9]}, "bytes a sample"),
        ({"statistics": []}, r"1 numbers in `statistics\.target\.mean`.*got 0"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_at_once(tmp_path, waves, change, message):
    write(tmp_path / "d", waves.samples(range(9), 0), waves.spec)
    sidecar = tmp_path / "d" / "dataset.json"
    content = json.loads(sidecar.read_text())
    listed = change.pop("parts", None)
    if listed is not None:
        content["parts"] = (
            content["parts"][:listed] if isinstance(listed, int) else [content["parts"][i] for i in listed]
        )
    if "counted" in change:
        content["parts"][0]["count"] = change.pop("counted")
    if "grid" in change:
        content["spec"]["grid"] = change.pop("grid")
    if "statistics" in change:
        content["statistics"]["target"]["mean"] = change.pop("statistics")
    sidecar.write_text(json.dumps(content | change))
    start = time.monotonic()
    with pytest.raises(InputError, match=message):
        Store.open(tmp_path / "d")
    assert time.monotonic() - start < 5


def test_samples_that_do_not_fit(tmp_path, waves, scattered):
    def begin(problem, name="d", count=2, **settings):
        return Store.create(tmp_path / name, spec=problem.spec, card=problem.card, count=count, **settings)

    samples = waves.samples(range(2), 0)
    writer = begin(waves)
    with pytest.raises(InputError, match="2 samples in part 0, got 1"):
        writer.write(0, samples[:1])
    broken = Sample(samples[1].input, samples[1].query, samples[1].target * float("nan"))
    with pytest.raises(InputError, match=r"finite numbers in `sample 1.target`"):
        writer.write(0, [samples[0], broken])
    assert not (tmp_path / "d" / "parts").exists()
    short = [Sample(s.input, Field.of(s.query.coords[:5]), s.target[:, :5]) for s in samples]
    with pytest.raises(InputError, match=r"the 16 queries of the grid \(16,\) in `sample 0`, got 5"):
        writer.write(0, short)
    ragged = scattered.samples(range(2), 0)
    bare = Sample(ragged[1].input, ragged[1].query, ragged[1].target, {"mach": torch.tensor(1.0)})
    with pytest.raises(InputError, match="same parameters and blocks of cells in sample 1"):
        begin(scattered, "e").write(0, [ragged[0], bare])
    frames = Field(ragged[1].query.coords, ragged[1].query.values.expand(3, -1, -1), ragged[1].query.weights)
    frames = Sample(ragged[1].input, frames, ragged[1].target, ragged[1].parameters, ragged[1].cells)
    with pytest.raises(InputError, match=r"`query.values` of sample 1 in the shape of the others"):
        begin(scattered, "f").write(0, [ragged[0], frames])
    with pytest.raises(InputError, match="before other parts"):
        begin(waves, "g", part_size=1).write(1, samples[1:])


def test_create_refuses(tmp_path, waves):
    def begin(folder=tmp_path / "d", **changes):
        wanted = dict(spec=waves.spec, card=waves.card, count=8, part_size=4, seed=1, problem={"a": {"b": 1.0}})
        return Store.create(folder, **(wanted | changes))

    begin()
    begin(card=Card("Another story"))  # a corrected text does not stop a run
    for changes, message in [
        ({"seed": 2}, "seed 2 instead of 1"),
        ({"count": 9}, "count 9 instead of 8"),
        ({"part_size": 2}, "part_size 2 instead of 4"),
        ({"storage": "float16"}, "storage 'float16' instead of 'float32'"),
        ({"problem": {"a": {"b": 2.0}}}, r"problem\.a\.b 2\.0 instead of 1\.0"),
        ({"problem": None}, "problem None instead of"),
        ({"splits": {"train": (0, 7)}}, "splits.train"),
        ({"spec": Spec(1, 1, 1, 1, 1)}, "spec.grid None instead of"),
    ]:
        with pytest.raises(InputError, match=message):
            begin(**changes)
    other = tmp_path / "other"
    for changes, message in [
        ({"count": 0}, "at least one sample"),
        ({"splits": {"train": (0, 9)}}, "split `train` within the 8 samples"),
        ({"splits": {"train": (0, 5), "test": (4, 8)}}, "without common samples"),
        ({"splits": {"train": (3, 3)}}, "split `train` within"),
    ]:
        with pytest.raises(InputError, match=message):
            begin(other, **changes)
    assert not other.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="new or empty folder"):
        begin(tmp_path / "mine")


def test_two_processes_begin_at_once(tmp_path, waves, monkeypatch):
    """Another process begins the same dataset while we look whether the folder is empty."""
    wanted = dict(spec=waves.spec, card=waves.card, count=2, seed=1)
    original = Path.iterdir

    def meanwhile(self):
        monkeypatch.setattr(Path, "iterdir", original)
        Store.create(self, **wanted).write(0, waves.samples(range(2), 1))
        return original(self)

    monkeypatch.setattr(Path, "iterdir", meanwhile)
    assert Store.create(tmp_path, **wanted).missing() == []


def test_manifest_is_what_the_card_says(tmp_path, waves):
    store = write(
        tmp_path / "d",
        waves.samples(range(6), 0),
        waves.spec,
        seed=5,
        problem={"type": "Waves", "points": 16},
    )
    content = json.loads((tmp_path / "d" / "dataset.json").read_text())
    assert content["format"] == "oformer dataset"
    assert content["complete"] is True
    assert content["problem"] == store.problem_settings == {"type": "Waves", "points": 16}
    assert [p["count"] for p in content["parts"]] == [4, 2]
    assert content["parts"][1]["sha256"] == files.sha256(tmp_path / "d" / "parts" / "part-00001.safetensors")
    text = (tmp_path / "d" / "README.md").read_text()
    assert text.startswith("# A test\n")
    assert '"points": 16' in text
    assert "Seed 5" in text
    assert store.card == Card("A test")
    assert "samples=6" in repr(store)


def test_codes_beyond_the_categories_are_refused_when_written_and_when_read(tmp_path, waves):
    samples = [dataclasses.replace(s, input=Field(s.input.coords, s.input.values.round().abs(), s.input.weights))
               for s in waves.samples(range(3), 0)]  # fmt: skip
    most = int(max(sample.input.values.max() for sample in samples))
    spec = dataclasses.replace(waves.spec, in_categories=most + 1)
    write(tmp_path / "d", samples, spec)
    with pytest.raises(InputError, match=f"codes 0 to {most - 1} in the last channel of the input of sample"):
        write(tmp_path / "few", samples, dataclasses.replace(spec, in_categories=most))
    sidecar = tmp_path / "d" / "dataset.json"
    sidecar.write_text(sidecar.read_text().replace(f'"in_categories": {most + 1}', f'"in_categories": {most}'))
    with pytest.raises(InputError, match=r"last channel of the input of sample \d of .*part-00000"):
        list(Store.open(tmp_path / "d"))
