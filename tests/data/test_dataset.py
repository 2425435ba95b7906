import json
import re

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oformer import config
from oformer.data import PointDataset, Store, View, generate
from oformer.data.importers import load_file
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample, Spec, collate
from oformer.meshes.grids import line_weights
from oformer.problems import Darcy


def quiet(done, total):
    pass


@pytest.fixture
def folder(tmp_path, waves):
    generate(waves, 10, seed=0, folder=tmp_path / "d", n_train=6, n_test=3, part_size=4, progress=quiet)
    return tmp_path / "d"


@pytest.fixture
def square():
    """Three samples on a grid of 5 x 9 with trapezoid weights, two frames in and three out."""
    axes = [torch.linspace(0, 1, n, dtype=torch.float64) for n in (5, 9)]
    coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    ends = [torch.tensor([0.5] + [1.0] * (n - 2) + [0.5], dtype=torch.float64) / (n - 1) for n in (5, 9)]
    weights = torch.outer(*ends).reshape(-1)
    place = Field.of(coords, None, weights)
    samples = []
    for k in range(3):
        frames = torch.stack([coords.sum(-1, keepdim=True) + 10 * t + k for t in range(5)])
        samples.append(Sample(Field(coords, frames[:2], weights), place, frames[2:]))
    return samples, Spec(2, 2, 1, 3, 1, grid=(5, 9))


# --- views ---


def test_plain(folder, waves, same_sample):
    dataset = PointDataset.open(folder)
    assert len(dataset) == 10
    assert dataset.spec == waves.spec
    assert dataset.periods == (1.0,)
    assert dataset.card == waves.card
    for i, sample in enumerate(dataset):
        same_sample(sample, waves.samples([i], 0)[0])
    assert dataset[-1].target.dtype == torch.float32
    with pytest.raises(IndexError):
        dataset[10]


def test_float64_samples_come_out_in_float32(waves):
    dataset = PointDataset(waves.samples(range(3), 0))
    sample = dataset[1]
    assert {t.dtype for t in (sample.input.coords, sample.input.weights, sample.target)} == {torch.float32}
    assert dataset[0].input.coords is dataset[2].input.coords  # what was shared still is


def test_thinned(folder, waves):
    dataset = PointDataset.open(folder, View(points=4))
    full = PointDataset.open(folder)
    assert dataset.spec.grid == (4,)
    sample, whole = dataset[3], full[3]
    assert torch.equal(sample.input.coords, whole.input.coords[::4])
    assert torch.equal(sample.input.values, whole.input.values[:, ::4])
    assert torch.equal(sample.target, whole.target[:, ::4])
    assert torch.equal(sample.query.coords, whole.query.coords[::4])
    assert float(sample.input.weights.sum()) == pytest.approx(1)
    assert float(sample.query.weights.sum()) == pytest.approx(1)
    assert dataset[0].input.coords is dataset[1].input.coords
    assert dataset.sizes().tolist() == [[4, 4]] * 10


def test_input_thinner_than_queries(folder):
    dataset = PointDataset.open(folder, View(points=4, query_points=16))
    assert (dataset[0].input.points, dataset[0].query.points) == (4, 16)
    assert dataset.spec.grid == (16,)
    dataset = PointDataset.open(folder, View(query_points=8))
    assert (dataset[0].input.points, dataset[0].query.points) == (16, 8)
    assert dataset.spec.grid == (8,)


def test_thinned_in_two_dimensions(square):
    samples, spec = square
    dataset = PointDataset(samples, View(points=(3, 5)), spec=spec)
    sample = dataset[1]
    assert dataset.spec.grid == (3, 5)
    axes = torch.linspace(0, 1, 3), torch.linspace(0, 1, 5)
    assert torch.allclose(sample.input.coords, torch.cartesian_prod(*axes))
    # The trapezoid rule of the coarse grid is the thinned and rescaled one of the fine grid.
    expected = torch.outer(torch.tensor([0.25, 0.5, 0.25]), torch.tensor([0.125, 0.25, 0.25, 0.25, 0.125]))
    assert torch.allclose(sample.input.weights.reshape(3, 5), expected)
    assert torch.allclose(sample.target[0, :, 0], sample.input.coords.sum(-1) + 21)


def test_frames(square):
    samples, spec = square
    dataset = PointDataset(samples, View(in_times=1, out_times=2), spec=spec)
    assert (dataset.spec.in_times, dataset.spec.out_times) == (1, 2)
    assert torch.equal(dataset[0].input.values, samples[0].input.values[1:].float())  # the last
    assert torch.equal(dataset[0].target, samples[0].target[:2].float())  # the first
    assert PointDataset(samples, spec=spec)[0].input.values.shape[0] == 2


@given(keep=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_kept_points(keep, seed):
    coords = torch.rand(40, 1, dtype=torch.float64)
    values = torch.randn(6, 40)
    data = PointDataset.from_arrays(coords, values, values, periods=(1.0,))
    sparse = data.with_view(View(keep=keep, keep_seed=seed))
    sample, again = sparse[2], sparse[2]
    count = max(1, round(keep * 40))
    assert sample.input.points == count
    assert torch.equal(sample.input.coords, again.input.coords)
    assert sample.query.points == 40  # queries stay
    assert float(sample.input.weights.sum()) == pytest.approx(1, abs=1e-6)
    assert torch.equal(sample.input.weights, line_weights(sample.input.coords, 1.0))
    where = {float(x): float(v) for x, v in zip(data[2].input.coords[:, 0], values[2], strict=True)}
    kept = zip(sample.input.coords[:, 0], sample.input.values[0, :, 0], strict=True)
    assert all(where[float(x)] == float(v) for x, v in kept)
    assert sparse.sizes().tolist() == [[count, 40]] * 6


def test_kept_points_belong_to_the_sample_not_to_its_place(folder):
    sparse = PointDataset.open(folder, View(keep=0.5))
    assert not torch.equal(sparse[4].input.coords, sparse[5].input.coords)
    assert torch.equal(sparse.subset([7, 4])[1].input.coords, sparse[4].input.coords)
    another = sparse.with_view(View(keep=0.5, keep_seed=1))
    assert not torch.equal(another[4].input.coords, sparse[4].input.coords)
    assert sparse.spec.grid == (16,)


def test_kept_points_of_a_grid_weigh_what_their_cells_weigh(square):
    samples, spec = square
    kept, full = PointDataset(samples, View(keep=0.5), spec=spec)[0].input, samples[0].input.to(torch.float32)
    rows = (kept.coords[:, None] == full.coords[None]).all(-1).float().argmax(1)
    expected = full.weights[rows]
    for point, weight in zip(full.coords, full.weights, strict=True):
        distance = (point - kept.coords).norm(dim=1)
        near = (distance <= distance.min() * 1.001) & (distance > 0) & bool(distance.min() > 0)
        expected = expected + weight * near / max(int(near.sum()), 1)
    torch.testing.assert_close(kept.weights, expected)


def test_kept_points_of_a_grid_may_weigh_equally_as_in_the_paper():
    samples, spec = Darcy(points=8).samples([0, 1], 0), Darcy(points=8).spec
    views = View(keep=0.25), View(keep=0.25, keep_weights="scaled")
    cells, equal = (PointDataset(samples, view, spec=spec)[1].input for view in views)
    assert torch.equal(cells.values, equal.values)
    assert equal.weights.tolist() == pytest.approx([1 / 16] * 16)
    assert cells.weights.max() > 1.5 / 16
    assert cells.weights.sum().item() == pytest.approx(1)


def test_kept_points_of_a_mesh_keep_their_weights_in_proportion(scattered):
    samples = scattered.samples(range(3), 0)
    dataset = PointDataset(samples, View(keep=0.5))
    points = dataset[0].input.points
    assert points == round(samples[0].input.points / 2)
    kept, full = dataset[0].input, samples[0].input.to(torch.float32)
    rows = (kept.coords[:, None] == full.coords[None]).all(-1).float().argmax(1)
    old = full.weights[rows]
    torch.testing.assert_close(kept.weights, old / old.sum())
    assert dataset[0].cells is not None
    assert dataset.sizes()[:, 0].tolist() == [s.input.points for s in dataset]


def test_view_is_json():
    for view in (View(), View(points=(3, 5), keep=0.5), View(points=128, query_points=512, in_times=2)):
        text = json.dumps(config.to_json(view))
        assert config.from_json(View, json.loads(text)) == view


def test_view_of_a_spec(waves):
    assert View(points=4).apply_to_spec(waves.spec).grid == (4,)
    assert View().apply_to_spec(waves.spec) == waves.spec


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"keep": 0.0}, "`keep`"),
        ({"keep": 1.1}, "`keep`"),
        ({"keep": float("nan")}, "`keep`"),
        ({"in_times": 0}, "`in_times`"),
        ({"keep_seed": -1}, "`keep_seed`"),
        ({"in_times": 2}, "at most the 1 frames"),
        ({"out_times": 5}, "at most the 1 frames"),
        ({"points": 5}, "a stride through 16 gives, got 5. Near ones: 1, 2, 4, 8"),
        ({"points": 32}, "a stride through 16"),
        ({"points": (4, 4)}, r"one number per dimension \(1\)"),
    ],
)
def test_views_that_cannot_be(folder, view, message):
    with pytest.raises(InputError, match=message):
        PointDataset.open(folder, View(**view))


def test_thinning_needs_the_grid(scattered, waves):
    with pytest.raises(InputError, match="regular grid to thin with `points`, got scattered points"):
        PointDataset(scattered.samples(range(2), 0), View(points=4))
    samples = [
        Sample(Field.of(s.input.coords[:5], s.input.values[:, :5]), s.query, s.target)
        for s in waves.samples(range(2), 0)
    ]
    dataset = PointDataset(samples, View(points=4), spec=waves.spec)
    with pytest.raises(InputError, match=r"the input of sample 1 on the grid \(16,\) to thin it, got 5 points"):
        dataset[1]
    assert dataset.with_view(View(query_points=4))[1].query.points == 4


# --- parts of a dataset ---


def test_splits_and_subsets(folder, same_sample):
    dataset = PointDataset.open(folder, View(points=8))
    train, test = dataset.split("train"), dataset.split("test")
    assert (len(train), len(test)) == (6, 3)
    assert train.spec == dataset.spec
    same_sample(test[0], dataset[7])
    few = dataset.subset([9, -1, 2])
    assert len(few) == 3
    same_sample(few[1], dataset[9])
    assert len(few.split("test")) == 2
    same_sample(few.subset(np.array([2]))[0], dataset[2])
    same_sample(PointDataset(Store.open(folder), indices=[3])[0], PointDataset.open(folder)[3])
    with pytest.raises(InputError, match=r"Did you mean `train`\? Choices: test, train"):
        dataset.split("tarin")
    with pytest.raises(InputError, match="with splits, got one without"):
        PointDataset(list(dataset)).split("train")
    with pytest.raises(InputError, match="sample numbers below 10, got 10"):
        dataset.subset([3, 10])
    for nothing in ([], [0.5], [[1]]):
        with pytest.raises(InputError, match="a list of at least one sample number"):
            dataset.subset(np.array(nothing))
    with pytest.raises(InputError, match="at least one sample"):
        dataset.subset([0]).split("test")
    with pytest.raises(InputError, match="at least one sample"):
        PointDataset([])


def test_statistics(square):
    samples, spec = square
    stats = PointDataset(samples, View(in_times=1), spec=spec).statistics()
    values = np.stack([s.input.values[1:].float().numpy() for s in samples]).astype(np.float64)
    assert stats.input.mean == pytest.approx([values.mean()])
    assert stats.input.std == pytest.approx([values.std()])
    assert (stats.input.min[0], stats.input.max[0]) == (values.min(), values.max())
    assert stats.query.mean == ()


def test_save(folder, tmp_path, same_sample, scattered):
    seen = PointDataset.open(folder, View(points=8)).split("train")
    store = seen.save(tmp_path / "e", part_size=4)
    assert store.spec == seen.spec
    assert store.splits == {"train": (0, 6)}
    assert store.problem_settings is None  # generating would not give this
    for i, sample in enumerate(seen):
        same_sample(store[i], sample)
    whole = PointDataset.open(folder).save(tmp_path / "f")
    assert whole.splits == {"train": (0, 6), "test": (7, 10)}
    assert whole.problem_settings is not None
    with pytest.raises(InputError, match="no file or folder yet"):
        seen.save(tmp_path / "e")
    ragged = PointDataset(scattered.samples(range(5), 0), card=scattered.card)
    again = ragged.save(tmp_path / "e", splits={"test": (0, 5)}, overwrite=True)
    assert again.card == scattered.card
    assert [len(s.cells[0]) for s in again if s.cells] == [len(s.cells[0]) for s in ragged if s.cells]
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="no file or folder yet"):
        ragged.save(tmp_path / "mine", overwrite=True)
    bad = ragged[0].input.values.clone()
    bad[0, 0, 0] = 1e9
    broken = Sample(
        Field(ragged[0].input.coords, bad, ragged[0].input.weights),
        ragged[0].query,
        ragged[0].target,
        ragged[0].parameters,
        ragged[0].cells,
    )
    before = (tmp_path / "e" / "dataset.json").read_bytes()
    with pytest.raises(InputError, match="float16"):
        PointDataset([broken]).save(tmp_path / "e", storage="float16", overwrite=True)
    assert (tmp_path / "e" / "dataset.json").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"d", "e", "f", "mine"}


def test_samples_of_a_list_must_agree(scattered, waves):
    one, two = scattered.samples(range(2), 0)
    shorter = Sample(one.input, one.query, one.target[:2], one.parameters)
    with pytest.raises(InputError, match=r"`sample 1.target` of shape \(4, queries, 2\), got \(2, "):
        PointDataset([two, shorter])
    unnamed = Sample(one.input, one.query, one.target)
    slow = Field(one.query.coords, one.query.values.expand(2, -1, -1), one.query.weights)
    with pytest.raises(InputError, match=r"1 frames in `sample 1.query.values`, got 2"):
        PointDataset([two, Sample(one.input, slow, one.target, one.parameters)])
    with pytest.raises(InputError, match="the parameters of sample 0 in sample 1"):
        PointDataset([two, unnamed])
    with pytest.raises(InputError, match=r"`sample 1.input.coords` of shape \(..., points, 2\)"):
        PointDataset([two, waves.samples([0], 0)[0]])
    with pytest.raises(InputError, match=r"3 queries of the grid \(3,\) in `sample 0`, got 16"):
        PointDataset(waves.samples([0], 0), spec=Spec(1, 1, 1, 1, 1, grid=(3,)))


# --- a person's own arrays ---

N, P, Q, C, T = 4, 7, 5, 2, 3
rng = np.random.default_rng(0)
LINE, PLANE = rng.random((P, 1)), rng.random((P, 2))
VALUES = rng.standard_normal((N, T, P, C))


@pytest.mark.parametrize("kind", ["numpy", "torch", "lists"])
@pytest.mark.parametrize(
    ("values", "shape"),
    [(VALUES[:, 0, :, 0], (1, P, 1)), (VALUES[:, 0], (1, P, C)), (VALUES, (T, P, C))],
)
@pytest.mark.parametrize("coords", [LINE[:, 0], LINE, PLANE, rng.random((N, P, 2)), rng.random((N, P, 1))])
def test_arrays_of_equal_size(kind, values, shape, coords):
    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "lists": list}[kind]
    given_coords = coords if kind == "lists" and coords.shape[-1] == 2 and coords.ndim == 2 else convert(coords)
    if kind == "lists" and coords.shape == (P, 1):
        given_coords = list(coords[:, 0])
    dataset = PointDataset.from_arrays(given_coords, convert(values), convert(values))
    dim = coords.shape[-1] if coords.ndim > 1 else 1
    assert dataset.spec == Spec(dim, shape[0], shape[2], shape[0], shape[2])
    sample = dataset[2]
    assert sample.input.values.shape == sample.target.shape == shape
    expected = np.asarray(values[2], np.float32).reshape(shape)
    assert np.array_equal(sample.target.numpy(), expected)
    place = coords[2] if coords.ndim == 3 else coords
    assert np.array_equal(sample.query.coords.numpy(), place.reshape(P, dim).astype(np.float32))
    assert sample.query.coords is sample.input.coords
    assert torch.allclose(sample.input.weights, torch.full((P,), 1 / P))
    if coords.ndim < 3:
        assert dataset[0].input.coords is dataset[3].input.coords


@pytest.mark.parametrize("axes", [0, 1, 2])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_arrays_of_differing_size(axes, dim):
    sizes = [3, 1, 6]
    shapes = {0: lambda n: (n,), 1: lambda n: (n, C), 2: lambda n: (T, n, C)}[axes]
    coords = [rng.random((n, dim)) for n in sizes]
    values = [rng.standard_normal(shapes(n)) for n in sizes]
    given_coords = [c[:, 0] for c in coords] if dim == 1 else coords
    dataset = PointDataset.from_arrays(given_coords, values, values)
    assert [s.input.points for s in dataset] == sizes
    assert dataset[2].target.shape == (T if axes == 2 else 1, 6, C if axes else 1)
    assert np.array_equal(dataset[2].input.coords.numpy(), coords[2].astype(np.float32))


def test_all_that_arrays_can_say(tmp_path, same_sample):
    types = rng.integers(0, 3, (N, Q, 1))
    dataset = PointDataset.from_arrays(
        PLANE,
        VALUES,
        rng.standard_normal((N, Q, 1)),
        query_coords=rng.random((N, Q, 2)),
        query_values=types,
        weights=np.arange(1, P + 1),
        query_weights=rng.random((N, Q)),
        parameters={"mach": np.arange(N), "gravity": 9.81},
        periods=(1.0, 2.0),
        card=Card("Mine"),
        query_categories=3,
    )
    assert dataset.spec == Spec(2, T, C, 1, 1, query_channels=1, query_categories=3, periods=(1.0, 2.0))
    sample = dataset[3]
    assert float(sample.input.weights[-1]) == pytest.approx(P / sum(range(P + 1)))
    assert float(sample.query.weights.sum()) == pytest.approx(1)
    assert float(sample.parameters["mach"]) == 3
    assert float(sample.parameters["gravity"]) == pytest.approx(9.81)
    assert sample.query.values.flatten().tolist() == types[3].flatten().tolist()
    assert dataset.card.title == "Mine"
    store = dataset.save(tmp_path / "d")
    for i in range(N):
        same_sample(store[i], dataset[i])


def test_grid_and_shared_weights():
    values = rng.standard_normal((N, 12))
    coords = rng.random((12, 2))
    dataset = PointDataset.from_arrays(coords, values, values, grid=(3, 4), weights=[1.0] * 12)
    assert dataset.spec.grid == (3, 4)
    assert dataset[0].query.weights is dataset[3].input.weights
    assert dataset.with_view(View(points=(3, 2)))[0].input.points == 6


def test_arrays_are_copied():
    values = VALUES[:, 0].astype(np.float32)
    dataset = PointDataset.from_arrays(PLANE, values, values)
    values[:] = 0
    assert float(dataset[0].target.abs().sum()) > 0


def spoiled(array, index, value=np.nan):
    array = np.array(array, dtype=float)
    array[index] = value
    return array


ONE = VALUES[:, 0]
MISTAKES = {
    "targets count": ({"targets": ONE[:3]}, r"samples in `targets` as in `inputs` \(4\), got 3. Sample 3 is"),
    "coords count": ({"coords": rng.random((5, P, 2))}, r"`coords` as in `inputs` \(4\), got 5. Sample 4 is"),
    "coords list count": ({"coords": [PLANE] * 3}, "Sample 3 is the first"),
    "nan input": (
        {"inputs": spoiled(ONE, (2, 3, 1))},
        r"finite numbers in `sample 2.input.values`, got 1 NaN",
    ),
    "inf target": ({"targets": spoiled(ONE, (1, 0, 0), np.inf)}, r"finite numbers in `sample 1.target`"),
    "float64 too large": (
        {"targets": spoiled(ONE, (1, 0, 0), 1e300)},
        r"finite numbers in `sample 1.target`",
    ),
    "nan coords": ({"coords": spoiled(PLANE, (2, 0))}, r"finite numbers in `sample 0.input.coords`"),
    "empty sample": (
        {"coords": [PLANE, np.zeros((0, 2)), PLANE, PLANE]},
        "at least one point in sample 1 of `coords`",
    ),
    "dimension": (
        {"coords": rng.random((P, 4))},
        r"`coords` of shape \(points, dim\) with dim 1, 2 or 3, got",
    ),
    "dimension of one": (
        {"coords": [PLANE, PLANE, LINE, PLANE]},
        r"`sample 2.input.coords` of shape \(..., points, 2\)",
    ),
    "dimension of a list": (
        {"coords": [PLANE, rng.random((P, 5)), PLANE, PLANE]},
        "sample 1 of `coords` of shape",
    ),
    "few points transposed": (
        {"coords": PLANE[:3].T, "inputs": ONE[:, :3, 0]},
        r"values at the 2 points .* got 3 .*It looks as if the points were transposed",
    ),
    "line per sample": ({"coords": rng.random((N, P))}, r"have shape \(samples, points, 1\)"),
    "coords 4-D": ({"coords": rng.random((1, N, P, 2))}, r"`coords` of shape \(points, dim\), \(samples"),
    "points": ({"coords": PLANE[:-1]}, "values at the 6 points of sample 0 in `inputs`, got 7"),
    "points of one": (
        {"inputs": [ONE[0], ONE[1], ONE[2, :3], ONE[3]]},
        "values at the 7 points of sample 2 in `inputs`, got 3",
    ),
    "targets at queries": (
        {"query_coords": rng.random((Q, 2))},
        "values at the 5 query points of sample 0 in `targets`, got 7",
    ),
    "points last": ({"inputs": np.swapaxes(ONE, 1, 2)}, "It looks as if points came last"),
    "5-D": ({"inputs": VALUES[None]}, r"got \(1, 4, 3, 7, 2\). Put all points of a grid on one axis"),
    "1-D": ({"targets": np.zeros(4)}, "Add the axis of samples"),
    "4-D in a list": ({"targets": list(VALUES[:, None])}, r"sample 0 of `targets` of shape \(points,\)"),
    "numbers in a list": ({"targets": [1.0, 2.0, 3.0, 4.0]}, r"`targets` of shape \(samples, points\)"),
    "objects": (
        {"inputs": np.array([ONE[0], ONE[1, :3], ONE[2], ONE[3]], dtype=object)},
        "real numbers in `inputs`, got an array of objects. Where samples differ",
    ),
    "ragged nested": ({"inputs": [[[1, 2], [3]], [1], [1], [1]]}, "one array in sample 0 of `inputs`"),
    "words": ({"inputs": np.full((N, P), "a")}, "real numbers in `inputs`, got an array of <U1"),
    "complex": ({"inputs": ONE.astype(complex)}, "got an array of complex128"),
    "complex tensor": ({"inputs": torch.zeros(N, P, dtype=torch.complex64)}, "got complex ones"),
    "no samples": ({"inputs": []}, "at least one sample in `inputs`, got none"),
    "frames differ": (
        {"targets": [ONE[0][None], ONE[1][None], VALUES[2], ONE[3][None]]},
        r"`sample 2.target` of shape \(1, queries, 2\)",
    ),
    "channels differ": (
        {"inputs": [ONE[0], ONE[1], ONE[2], ONE[3, :, :1]]},
        r"2 channels in `sample 3.input.values`, got 1",
    ),
    "query dimension": ({"query_coords": LINE}, r"`sample 0.query.coords` of shape \(..., points, 2\)"),
    "query values": (
        {"query_values": ONE[:, :3]},
        "values at the 7 query points of sample 0 in `query_values`",
    ),
    "query values count": ({"query_values": ONE[:3]}, "`query_values` as in `inputs`"),
    "weights shape": ({"weights": np.ones(P - 1)}, "7 numbers in sample 0 of `weights`"),
    "weights of one": ({"weights": [np.ones(P)] * 3 + [np.ones(2)]}, "7 numbers in sample 3 of `weights`"),
    "weights negative": ({"weights": spoiled(np.ones((N, P)), (2, 1), -1)}, "in sample 2 of `weights`"),
    "weights zero": ({"weights": np.zeros(P)}, "not all zero, in sample 0 of `weights`"),
    "weights nan": ({"query_weights": spoiled(np.ones((N, P)), (1, 1))}, "in sample 1 of `query_weights`"),
    "weights 3-D": ({"weights": np.ones((N, P, 1))}, r"`weights` of shape \(points,\)"),
    "weights count": ({"weights": np.ones((3, P))}, "as many samples in `weights`"),
    "parameter count": ({"parameters": {"mach": [1.0, 2.0]}}, r"`parameters\['mach'\]` as in `inputs`"),
    "parameter nan": ({"parameters": {"mach": [0, 0, np.nan, 0]}}, "finite parameter `mach` in sample 2"),
    "parameter shape": ({"parameters": {"mach": np.ones((4, 1))}}, r"parameter `mach` of shape \(samples,\)"),
    "grid": ({"grid": (2, 3)}, r"the 6 queries of the grid \(2, 3\) in `sample 0`, got 7"),
    "grid dimension": ({"grid": (7,)}, "`grid` with one entry per dimension"),
    "periods": ({"periods": (1.0,)}, "`periods` with one entry per dimension"),
    "codes": ({"in_categories": 2}, "codes 0 to 1 in the last channel of the input of sample 0"),
    "no codes": (
        {"query_categories": 2},
        "a last channel with codes in the query of sample 0, got no channel",
    ),
}


SWAPPED = {
    "for all": PLANE.T,
    "for each": np.stack([PLANE.T] * N),
    "listed": [PLANE.T] * N,
    "axes": [PLANE[:, 0], PLANE[:, 1]],
    "lists of axes": PLANE.T.tolist(),
    "lists of points": PLANE.tolist(),
    "tensors of axes": list(torch.as_tensor(PLANE.T)),
}


@pytest.mark.parametrize("name", ["coords", "query_coords"])
@pytest.mark.parametrize("form", SWAPPED)
def test_swapped_coordinates_are_answered_with_what_to_write(form, name):
    """Which, written in Python, gives the samples that were meant."""
    given = {"coords": PLANE, "inputs": ONE, "targets": ONE}
    with pytest.raises(InputError, match="It looks") as refused:
        PointDataset.from_arrays(**{**given, name: SWAPPED[form]})
    written, shape = re.findall(r"give `(.*)`, of shape (.*)\.", str(refused.value))[0]
    turned = eval(written, {"np": np, name: SWAPPED[form]})
    assert shape in (str(np.shape(turned)), str(np.shape(turned[0])))
    data = PointDataset.from_arrays(**{**given, name: turned})
    for sample in data:
        for points in (sample.input.coords, sample.query.coords):
            np.testing.assert_allclose(points, PLANE, rtol=1e-6)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_arrays(name):
    change, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        PointDataset.from_arrays(**({"coords": PLANE, "inputs": ONE, "targets": ONE} | change))


# --- to other programs ---


@pytest.mark.parametrize("shared", [True, False])
def test_hdf5_is_read_back_and_holds_shared_points_once(tmp_path, shared):
    random = np.random.default_rng(0)
    sizes = [9, 9, 9] if shared else [9, 11, 10]
    coords = random.random((9, 2)) if shared else [random.random((n, 2)) for n in sizes]
    weights = random.random(9) if shared else [random.random(n) for n in sizes]
    dataset = PointDataset.from_arrays(
        coords, [random.random(n) for n in sizes], [random.random((2, n, 3)) for n in sizes], weights=weights,
        query_values=[random.random(n) for n in sizes], parameters={"nu": [1.0, 2.0, 3.0]},
    )  # fmt: skip
    dataset.to_hdf5(tmp_path / "a.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
    for ours, theirs in zip(dataset, load_file(tmp_path / "a.h5"), strict=True):
        for a, b in zip(ours.tensors[:7], theirs.tensors, strict=True):
            torch.testing.assert_close(a, b)
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file["00000000/coords"] == file["00000001/coords"]) == shared  # the same place in the file
        assert file["00000002"].attrs["nu"] == 3


def test_xarray_pads_with_points_of_weight_zero():
    pytest.importorskip("xarray")
    random = np.random.default_rng(0)
    values = [random.random((1, n, 2)) for n in (4, 6)]
    card = Card("pairs", inputs=("a", "b"), targets=("u",))
    coords, targets = [random.random((n, 1)) for n in (4, 6)], [v[..., :1] * 2 for v in values]
    dataset = PointDataset.from_arrays(coords, values, targets, parameters={"nu": 0.5}, card=card)
    data = dataset.to_xarray()
    assert data["input"].dims == ("sample", "input_time", "input_point", "input_channel")
    np.testing.assert_allclose(data["input"].sel(input_channel="b")[0, 0, :4], values[0][0, :, 1], rtol=1e-6)
    assert data["input_weights"][0].values.tolist() == [0.25] * 4 + [0, 0]
    found = (data["target"] * data["query_weights"]).sum("query_point").values.ravel()
    np.testing.assert_allclose(found, [2 * v[0, :, 0].mean() for v in values], rtol=1e-6)
    assert data["nu"].values.tolist() == [0.5, 0.5]


def test_a_loader_of_torch_batches_a_dataset(tiny_data):
    batches = list(torch.utils.data.DataLoader(tiny_data, batch_size=3, collate_fn=collate))
    assert isinstance(tiny_data, torch.utils.data.Dataset)
    assert sum(batch.size for batch in batches) == len(tiny_data)
    assert torch.equal(batches[1].target[0], tiny_data[3].target)
