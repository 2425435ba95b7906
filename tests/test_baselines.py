"""The baselines: exact where they can be, the same for points in another order, and refusing what they cannot do."""

import numpy as np
import pytest
import torch

import oformer
from oformer import baselines
from oformer.baselines import (
    BASELINES,
    Interpolation,
    NearestSample,
    Pca,
    PcaKernelRidge,
    PcaRidge,
    SuperpositionRidge,
    ThinPlateSpline,
    compare,
    linear_channels,
    resample,
)
from oformer.data.columns import columns_of, seen_samples
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.estimator import OperatorRegressor


def fields(count: int, seed: int, points: np.ndarray | None = None, dim: int = 2) -> list[dict]:
    """Smooth random functions at random points, and a nonlinear function of them, smooth as well."""
    random, samples = np.random.default_rng(seed), []
    for _ in range(count):
        x = random.random((random.integers(150, 200), dim)) if points is None else points
        weights = random.normal(size=3)
        u = np.cos(np.pi * x[:, :1] * np.arange(3)) @ weights
        samples.append({"coords": x, "inputs": u, "targets": np.sin(u) + np.mean(weights) ** 2 * x[:, -1]})
    return samples


def dataset(samples: list[dict]) -> PointDataset:
    return PointDataset(seen_samples(columns_of(samples, {}))[0])


@pytest.fixture(scope="module")
def scattered() -> list[dict]:
    return fields(60, seed=0)


def test_ridge_finds_a_linear_operator_to_rounding():
    """Any matrix, of two channels, to another number of points and frames, with quadrature weights."""
    random = np.random.default_rng(0)
    matrix, inputs = random.normal(size=(3, 15, 2, 10, 2)), random.normal(size=(60, 10, 2))
    targets = np.einsum("tqdpc,npc->ntqd", matrix, inputs) + 7
    given = {"coords": random.random((10, 2)), "query_coords": random.random((15, 2)), "weights": random.random(10)}
    model = PcaRidge().fit(**given, inputs=inputs[:40], targets=targets[:40])
    assert model.score(**given, inputs=inputs[40:], targets=targets[40:]) > 1 - 1e-5
    answer = model.predict({"coords": given["coords"], "query_coords": given["query_coords"], "inputs": inputs[50]})
    assert isinstance(answer, np.ndarray)
    np.testing.assert_allclose(answer, targets[50], atol=1e-4)


def test_the_nearest_sample_of_a_training_sample_is_itself(scattered):
    model = NearestSample().fit(scattered)
    for sample in scattered[::7]:
        np.testing.assert_array_equal(model.predict(sample), sample["targets"].astype(np.float32))
    assert model.score(scattered) == 1.0


def test_the_nearest_sample_is_that_of_the_smallest_distance():
    """By hand, on one grid: channels count by their spread over the samples, and what all samples share does not."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(20, 30, 2)) * [1.0, 1e4] + [0.0, 1e6]
    inputs[..., 1] += 1e5 * np.arange(30)
    targets = random.normal(size=(20, 30))
    model = NearestSample().fit(coords=random.random((30, 1)), inputs=inputs[:19], targets=targets[:19])
    near = (((inputs[:19] - inputs[19]) / inputs[:19].std(0).mean(0)) ** 2).sum((1, 2)).argmin()
    x = model._data.samples[0].input.coords.numpy()
    found = model.predict({"coords": x, "inputs": inputs[19], "weights": np.ones(30)})
    np.testing.assert_allclose(found, targets[near], rtol=1e-6)


def test_kernel_ridge_beats_the_others_on_a_smooth_nonlinear_operator(scattered):
    new = fields(20, seed=1)
    error = {kind: 1 - kind().fit(scattered).score(new) for kind in BASELINES}
    assert error[PcaKernelRidge] < 0.3 * min(error[PcaRidge], error[NearestSample])
    assert error[PcaKernelRidge] < 0.1


@pytest.mark.parametrize("kind", BASELINES)
def test_neither_the_order_nor_the_number_of_the_points_matters(kind, scattered):
    model = kind().fit(scattered)
    (coarse,) = fields(1, seed=2, points=np.random.default_rng(0).random((150, 2)))
    (fine,) = fields(1, seed=2, points=np.random.default_rng(1).random((500, 2)))
    order = np.random.default_rng(0).permutation(150)
    mixed = {key: array[order] for key, array in coarse.items()}
    np.testing.assert_allclose(model.predict(mixed), model.predict(coarse)[order], atol=1e-8)
    queries = np.random.default_rng(2).uniform(0.1, 0.9, (200, 2))
    one, other = model.predict(coarse, queries), model.predict(fine, queries)
    assert np.linalg.norm(one - other) < 0.06 * np.linalg.norm(other)


@pytest.mark.parametrize("kind", [PcaRidge, PcaKernelRidge, SuperpositionRidge])
def test_leave_one_out_errors_are_those_of_fits_without_the_sample(kind):
    """On one grid, where leaving a sample out changes no unit; all but the mean, which counts for little."""
    random = np.random.default_rng(0)
    inputs, x = random.normal(size=(25, 6)), np.linspace(0, 1, 6)
    targets = np.tanh(inputs @ random.normal(size=(6, 6)))
    model = kind(regularization=0.05).fit(coords=x, inputs=inputs, targets=targets)
    settings = {name: getattr(model, f"{name}_") for name in model.__dict__ if name in ("regularization", "width")}
    left = []
    for i in range(25):
        rest = np.arange(25) != i
        without = kind(**settings).fit(coords=x, inputs=inputs[rest], targets=targets[rest])
        left.append(1 - without.score(coords=x, inputs=inputs[[i]], targets=targets[[i]]))
    assert model.leave_one_out_ == pytest.approx(np.mean(left), rel=0.1)


def superposed(count: int, seed: int) -> dict:
    """u = (1 + a³) K f + ∫g, nonlinear in the number a, linear in f and g; `noise` has no say, which is linear, too."""
    random, x = np.random.default_rng(seed), np.linspace(0, 1, 20)
    a = np.broadcast_to(random.normal(size=(count, 1)), (count, 20)) + 0.1 * x
    f, g, noise = random.normal(size=(3, count, 20)) + np.array([3, 3, 0])[:, None, None]
    kernel = np.exp(-np.abs(x[:, None] - x))
    targets = (1 + a[:, :1] ** 3) * (f @ kernel) + g.mean(1, keepdims=True)
    return {"coords": x, "inputs": np.stack([f, a, g, noise], -1), "targets": targets}


def test_a_superposition_is_found_and_is_exactly_linear():
    model = SuperpositionRidge().fit(**superposed(120, seed=0))
    assert model.linear_ == (0, 2, 3)
    assert linear_channels(PointDataset.from_arrays(**columns_of(None, superposed(120, seed=0)))) == (0, 2, 3)
    sample = {key: array if key == "coords" else array[0] for key, array in superposed(1, seed=1).items()}
    doubled = {**sample, "inputs": sample["inputs"] * [-2, 1, -2, -2]}
    np.testing.assert_allclose(model.predict(doubled), -2 * np.asarray(model.predict(sample)), rtol=1e-6)
    learned, new = superposed(120, seed=0), superposed(50, seed=1)
    assert 1 - model.score(**new) < 0.5 * (1 - PcaKernelRidge().fit(**learned).score(**new))


def test_nothing_is_linear_in_a_nonlinear_map_or_in_a_number_of_the_sample(scattered):
    assert linear_channels(dataset(scattered)) == ()
    numbers = {**superposed(40, seed=0), "inputs": np.ones((40, 20, 1)) * np.arange(40)[:, None, None]}
    with pytest.raises(InputError, match="an input channel that varies over the points, for SuperpositionRidge"):
        SuperpositionRidge().fit(**numbers)


def test_errors_are_measured_as_those_of_operators_are():
    """The same metric: several channels of other units, and weights."""
    random = np.random.default_rng(0)
    x, inputs = random.random((12, 9, 2)), random.normal(size=(12, 9))
    targets, weights = random.normal(size=(12, 2, 9, 2)) * [1.0, 1e3], random.random((12, 9))
    data = PointDataset.from_arrays(x, inputs, targets, weights=weights)
    model = PcaRidge().fit(data)
    answers = torch.stack([torch.from_numpy(model._answer(s.input, s.query.coords)) for s in data])
    truth = torch.stack([s.target for s in data]).double()
    w = torch.stack([s.query.weights for s in data]).double()[:, None, :, None]
    unit = (w * truth**2).sum((1, 2), keepdim=True).mean(0)
    expected = ((w * (answers - truth) ** 2 / unit).sum((1, 2, 3)) / (w * truth**2 / unit).sum((1, 2, 3))).sqrt()
    np.testing.assert_allclose(model.errors(data), expected.numpy(), rtol=1e-6)
    np.testing.assert_allclose(model.score(data), 1 - expected.mean().item(), rtol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("shape", [(10,), (10, 2), (3, 10, 2)])
def test_answers_have_the_shape_of_the_targets(dim, shape):
    random = np.random.default_rng(0)
    x, inputs, targets = random.random((6, 10, dim)), random.normal(size=(6, 10)), random.normal(size=(6, *shape))
    for kind in BASELINES:
        model = kind().fit(coords=x, inputs=inputs, targets=targets, query_features=inputs)
        assert model.ignored_ == ("query_features",)
        question = {"coords": x[0], "inputs": inputs[0], "query_features": inputs[0]}
        assert model.predict(question).shape == shape
        queries = {**question, "query_features": np.zeros(7)}
        assert model.predict(queries, random.random((7, dim))).shape == tuple(7 if n == 10 else n for n in shape)
        assert [answer.shape for answer in model.predict([question, question])] == [shape, shape]


def test_parameters_are_seen():
    """The targets depend on the parameter alone."""
    random = np.random.default_rng(0)
    numbers, x = random.uniform(-1, 1, 80), random.random((80, 30, 1))
    targets = numbers[:, None] * np.cos(3 * x[..., 0])
    model = PcaRidge().fit(coords=x, inputs=np.zeros((80, 30)), targets=targets, parameters={"strength": numbers})
    question = {"coords": x[0], "inputs": np.zeros(30)}
    answer = model.predict({**question, "parameters": {"strength": 0.7}})
    np.testing.assert_allclose(answer, 0.7 * np.cos(3 * x[0, :, 0]), atol=0.05)
    with pytest.raises(InputError, match=r"the parameters of `fit` \(strength\), got none"):
        model.predict(question)


def test_splines_meet_values_and_linear_functions_and_converge():
    random = np.random.default_rng(0)
    points, at = random.random((200, 2)), random.uniform(0.1, 0.9, (100, 2))
    spline = ThinPlateSpline(points * 1e-6)
    rows = np.stack([np.sin(3 * points[:, 0] + points[:, 1]), 5 + points @ [2.0, -1.0]], 1)
    np.testing.assert_allclose(spline(rows, points * 1e-6), rows, atol=1e-9)
    found = spline(rows, at * 1e-6)
    np.testing.assert_allclose(found[:, 1], 5 + at @ [2.0, -1.0], atol=1e-8)
    np.testing.assert_allclose(found[:, 0], np.sin(3 * at[:, 0] + at[:, 1]), atol=1e-2)


def test_points_on_a_line_and_points_twice_are_interpolated_all_the_same():
    x = np.linspace(0, 1, 30)
    line = np.stack([x, 2 * x], 1)
    found = Interpolation(line)(x[None, :, None], line[:-1] + np.array([0.01, 0.02]))
    np.testing.assert_allclose(found[0, :, 0], x[:-1] + 0.01, atol=1e-3)
    points = np.random.default_rng(0).random((40, 2))
    twice = Interpolation(np.concatenate([points, points]))
    np.testing.assert_allclose(twice(np.tile(points[None], (1, 2, 1)), points)[0], points, atol=1e-9)


@pytest.mark.parametrize("dim", [1, 2])
def test_a_periodic_domain_has_no_edge(dim):
    random = np.random.default_rng(0)
    x = random.random((200, dim))
    points = PointDataset.from_arrays(
        [x, x[::-1].copy()], [np.sin(2 * np.pi * x[:, 0])] * 2, [np.sin(2 * np.pi * x[:, 0])] * 2, periods=(1.0,) * dim
    )
    at = np.full((1, dim), 0.5)
    at[0, 0] = 0.999
    here, there = (Interpolation(x, points.spec.periods)(np.sin(2 * np.pi * x[None, :, :1]), a) for a in (at, at - 1))
    np.testing.assert_allclose(here, there, atol=1e-9)
    assert abs(here.item() - np.sin(2 * np.pi * 0.999)) < 0.05


def test_pca_of_more_samples_than_numbers_and_of_fewer_is_the_same():
    random = np.random.default_rng(0)
    vectors = random.normal(size=(8, 5))
    tall, wide = Pca.of(vectors), Pca.of(np.concatenate([vectors, np.zeros((8, 20))], 1))
    np.testing.assert_allclose(tall.roots, wide.roots)
    for pca in (tall, wide):
        whole = (pca.left * pca.roots) @ pca.right + pca.mean
        np.testing.assert_allclose(whole[:, :5], vectors, atol=1e-9)


def test_what_they_cannot_do_they_refuse_with_a_sentence(scattered):
    model = PcaRidge().fit(scattered)
    with pytest.raises(InputError, match="2 space dimension"):
        model.predict({"coords": np.zeros((4, 1)), "inputs": np.zeros(4)})
    with pytest.raises(InputError, match=r"1 channel\(s\) in `inputs`.*got 2"):
        model.predict({"coords": np.zeros((4, 2)), "inputs": np.zeros((4, 2))})
    with pytest.raises(InputError, match="times=1, the frames PcaRidge was fitted with, got times=3"):
        model.predict(scattered[0], times=3)
    with pytest.raises(InputError, match="a fitted NearestSample"):
        NearestSample().predict(scattered[0])
    unfitted = PcaKernelRidge()
    with pytest.raises(InputError, match="at least 3 samples for PcaKernelRidge, got 2"):
        unfitted.fit(scattered[:2])
    with pytest.raises(InputError, match="a fitted PcaKernelRidge"):
        unfitted.score(scattered)
    with pytest.raises(InputError, match="inputs that differ"):
        PcaRidge().fit([scattered[0]] * 3)
    with pytest.raises(InputError, match="a `width` above zero"):
        PcaKernelRidge(width=0)


def test_too_much_data_is_refused_before_it_is_resampled(scattered, monkeypatch):
    monkeypatch.setattr(PcaRidge, "most_samples", 50)
    with pytest.raises(InputError, match="at most 50 samples for PcaRidge, got 60"):
        PcaRidge().fit(scattered)
    monkeypatch.setattr(resample, "MOST_NUMBERS", 1000)
    with pytest.raises(InputError, match="at most 1,000 numbers in the resampled inputs"):
        NearestSample().fit(scattered)


def test_comparing_gives_the_errors_of_fits_on_the_same_samples(scattered):
    learned, test = dataset(scattered[:50]), dataset(scattered[50:])
    found = compare(learned, test)
    assert found.errors == pytest.approx({kind.__name__: 1 - kind().fit(learned).score(test) for kind in BASELINES})
    assert (found.learned, found.samples, found.tested, found.left_out) == (50, 50, 10, {})


def test_comparing_is_capped_and_says_so(scattered):
    found = compare(dataset(scattered[:50]), dataset(scattered[50:]), share=0.01)
    assert (found.learned, found.tested) == (5, 5)
    assert found.errors.keys() == {kind.__name__ for kind in BASELINES}
    said = found.told(np.zeros(10))
    assert "fitted to 5 of the 50 training samples, on the first 5 held-out samples" in said


def test_a_baseline_that_fails_is_left_out_with_its_reason(scattered, monkeypatch):
    def broken(*_):
        raise MemoryError("no room for it")

    monkeypatch.setattr(PcaKernelRidge, "_regress", broken)
    found = compare(dataset(scattered[:50]), dataset(scattered[50:]))
    assert found.errors.keys() == {"NearestSample", "PcaRidge", "SuperpositionRidge"}
    assert found.linear == ()
    assert found.told(np.zeros(10)).endswith("Baseline PcaKernelRidge was left out: no room for it.")
    monkeypatch.setattr(resample, "common_points", broken)
    assert compare(dataset(scattered[:50]), dataset(scattered[50:])).errors == {}


def test_the_words_say_which_is_better_and_what_to_do(scattered):
    found = compare(dataset(scattered[:50]), dataset(scattered[50:]))
    worse = found.told(np.ones(10))
    assert "the operator 100.00%. The baseline kernel ridge is better than the operator: train for more" in worse
    assert worse.endswith("or use oformer.baselines.PcaKernelRidge.")
    assert found.told(np.zeros(10)).endswith("the operator 0.00%.")
    assert "is better than the operator" in found.told(np.full(10, np.nan))


def test_fit_reports_them_on_the_samples_that_it_holds_out(scattered, capsys, tmp_path):
    model = OperatorRegressor(width=16, depth=1, steps=2, device="cpu").fit(scattered)
    learned = [sample for i, sample in enumerate(scattered) if i not in model.test_indices_]
    held = dataset([scattered[i] for i in model.test_indices_])
    assert model.baselines_ == pytest.approx(
        {kind.__name__: 1 - kind().fit(learned).score(held) for kind in BASELINES}, rel=1e-4
    )
    said = capsys.readouterr().err
    assert f", kernel ridge {model.baselines_['PcaKernelRidge']:.2%}, " in said
    assert f"; the operator {model.errors_.mean():.2%}" in said
    assert "use oformer.baselines.PcaKernelRidge" in said
    model.save(tmp_path / "mine")
    assert OperatorRegressor.load(tmp_path / "mine", device="cpu").baselines_ == model.baselines_


def test_they_are_found_in_the_package():
    assert oformer.baselines is baselines
