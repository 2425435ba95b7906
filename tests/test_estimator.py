"""The estimator: learns from people's own arrays, answers anywhere, has scikit-learn's manners, says what is wrong."""

import importlib.util
import re
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
import torch

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.estimator import OperatorRegressor
from oformer.models import OFormer
from oformer.predict import Predictor
from oformer.training.optimizers import Descent
from oformer.training.recipe import Training

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "own-data.md"
SMALL = {"width": 32, "depth": 1, "batch_size": 4, "steps": 3, "quiet": True, "device": "cpu"}


def antiderivatives(count: int, seed: int) -> list[dict]:
    """The antiderivative from 0 of a random cosine pair, at random points, of which each sample has its own number."""
    random, w, samples = np.random.default_rng(seed), np.pi, []
    for _ in range(count):
        x, (a, b) = np.append(random.random(random.integers(40, 60)), [0.0, 1.0]), random.normal(size=2)
        x = np.sort(x)
        u = a * np.cos(w * x) + b * np.cos(2 * w * x)
        samples.append({"coords": x, "inputs": u, "targets": a / w * np.sin(w * x) + b / 2 / w * np.sin(2 * w * x)})
    return samples


def arrays(dim: int = 2, times: int = 2, channels: int = 2, count: int = 6) -> dict:
    """Random numbers of every axis there is."""
    random = np.random.default_rng(0)
    return {
        "coords": random.random((count, 10, dim)),
        "inputs": random.normal(size=(count, times, 10, channels)),
        "targets": random.normal(size=(count, 3, 10, channels)),
    }


@pytest.fixture(scope="module")
def learned() -> OperatorRegressor:
    settings = {**SMALL, "batch_size": 16, "steps": 200, "learning_rate": 4e-3}
    return OperatorRegressor(**settings).fit(antiderivatives(150, seed=0))


def test_learns_the_antiderivative_at_random_points(learned):
    """New functions at new points; answering zero would score 0, and a lookup of the training set would too."""
    assert learned.score(antiderivatives(40, seed=1)) > 0.95
    assert learned.errors_.mean() < 0.1
    assert learned.errors_.shape == learned.test_indices_.shape == (15,)


def test_the_score_is_one_minus_the_mean_relative_error(learned):
    (sample,) = antiderivatives(1, seed=2)
    gaps = np.append(np.diff(sample["coords"]), 0) + np.append(0, np.diff(sample["coords"]))
    error, size = (gaps @ values**2 for values in (learned.predict(sample) - sample["targets"], sample["targets"]))
    assert learned.score([sample]) == pytest.approx(1 - np.sqrt(error / size), abs=1e-5)


def test_answers_at_points_it_never_saw(learned):
    (sample,) = antiderivatives(1, seed=3)
    x = np.linspace(0.1, 0.9, 301)
    answer = learned.predict(sample, x)
    exact = np.interp(x, sample["coords"], sample["targets"])
    assert answer.shape == (301,)
    assert np.linalg.norm(answer - exact) < 0.15 * np.linalg.norm(exact)
    np.testing.assert_allclose(learned.predict(sample, x[::7]), answer[::7], rtol=1e-4, atol=1e-6)


def test_the_order_of_the_points_does_not_matter(learned):
    (sample,) = antiderivatives(1, seed=4)
    order = np.random.default_rng(0).permutation(len(sample["coords"]))
    mixed = {key: array[order] for key, array in sample.items()}
    np.testing.assert_allclose(learned.predict(mixed), learned.predict(sample)[order], atol=1e-5)


def test_ragged_lists_answer_as_single_samples_and_as_padded_ones(learned):
    """Padding is points of weight zero: whatever stands there is not felt."""
    samples = antiderivatives(3, seed=5)
    together = learned.predict(samples)
    assert isinstance(together, list)
    for sample, answer in zip(samples, together, strict=True):
        n = len(sample["coords"])
        x = sample["coords"]
        gaps = np.append(np.diff(x), 0) + np.append(0, np.diff(x))
        padded = {
            "coords": np.append(x, np.full(80 - n, 0.5)),
            "inputs": np.append(sample["inputs"], np.full(80 - n, 7.0)),
            "weights": np.append(gaps, np.zeros(80 - n)),
        }
        np.testing.assert_allclose(answer, learned.predict(sample), atol=1e-6)
        np.testing.assert_allclose(answer, learned.predict(padded)[:n], atol=1e-5)


def test_each_sample_of_a_list_may_have_queries_of_its_own(learned):
    samples = antiderivatives(2, seed=6)
    own = learned.predict(samples, [np.array([0.2, 0.4]), np.array([0.3])])
    np.testing.assert_allclose(own[1], learned.predict(samples[1], np.array([0.3])), atol=1e-6)
    shared = learned.predict(samples, np.array([0.2, 0.4, 0.6]))
    assert [len(answer) for answer in own] == [2, 1]
    assert [len(answer) for answer in shared] == [3, 3]
    np.testing.assert_allclose(shared[0][:2], own[0], atol=1e-6)
    with pytest.raises(InputError, match="queries for each of the 2 samples"):
        learned.predict(samples, [np.array([0.2])])


def test_saved_and_loaded_it_answers_the_same(learned, tmp_path):
    learned.save(tmp_path / "mine")
    again = OperatorRegressor.load(tmp_path / "mine", device="cpu")
    (sample,) = antiderivatives(1, seed=7)
    assert np.array_equal(again.predict(sample), learned.predict(sample))
    assert again.get_params() == learned.get_params()
    assert again.sizes_ == learned.sizes_
    assert np.array_equal(again.errors_, learned.errors_)
    assert np.array_equal(again.test_indices_, learned.test_indices_)
    again.save(tmp_path / "mine")  # an older estimator may be replaced
    assert Predictor(tmp_path / "mine", "cpu").spec == learned.spec_


def test_save_and_load_leave_foreign_folders_alone(learned, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="nothing yet at"):
        learned.save(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(InputError, match=r"a folder that OperatorRegressor\.save wrote"):
        OperatorRegressor.load(tmp_path)


def test_parameters_are_seen_by_the_model():
    """The targets depend on the parameter alone; without it, the best answer is wrong by half of them."""
    random = np.random.default_rng(0)
    numbers = random.uniform(-1, 1, 100)
    x, noise = random.random((100, 12, 2)), random.normal(size=(100, 12))
    targets = 2 * numbers[:, None] * np.cos(3 * x[..., 0])
    settings = {**SMALL, "batch_size": 16, "steps": 150, "learning_rate": 4e-3}
    model = OperatorRegressor(**settings)
    model.fit(coords=x, inputs=noise, targets=targets, parameters={"strength": numbers})
    assert model.parameter_names_ == ("strength",)
    assert model.spec_.in_channels == 2
    question = {"coords": x[0], "inputs": noise[0]}
    for strength in (-0.8, 0.4, 0.9):
        answer = model.predict({**question, "parameters": {"strength": strength}})
        exact = 2 * strength * np.cos(3 * x[0, :, 0])
        assert np.linalg.norm(answer - exact) < 0.15 * np.linalg.norm(exact)
    with pytest.raises(InputError, match=r"the parameters of `fit` \(strength\), got none"):
        model.predict(question)


def test_parameters_are_constant_channels_in_alphabetical_order():
    """The same data with the parameters written as channels by hand give the same weights, bit for bit."""
    given = arrays()
    numbers = {"viscosity": np.arange(6.0), "angle": np.arange(6.0) ** 2}
    model = OperatorRegressor(**SMALL).fit(**given, parameters=numbers)
    by_hand = [np.broadcast_to(numbers[name][:, None, None, None], (6, 2, 10, 1)) for name in ("angle", "viscosity")]
    other = OperatorRegressor(**SMALL).fit(**{**given, "inputs": np.concatenate([given["inputs"], *by_hand], -1)})
    assert np.array_equal(model.errors_, other.errors_)


def test_dicts_and_keyword_arrays_are_the_same_data():
    given, numbers = arrays(), np.arange(6.0)
    dicts = [{**{k: v[i] for k, v in given.items()}, "parameters": {"a": numbers[i]}} for i in range(6)]
    model = OperatorRegressor(**SMALL).fit(dicts)
    other = OperatorRegressor(**SMALL).fit(**given, parameters={"a": numbers})
    assert np.array_equal(model.errors_, other.errors_)
    assert model.score(dicts) == other.score(**given, parameters={"a": numbers})


def test_the_same_seed_gives_the_same_and_a_second_fit_starts_anew():
    given = arrays()
    model = OperatorRegressor(**SMALL).fit(**given)
    first = model.errors_
    before = torch.get_rng_state()
    assert np.array_equal(model.fit(**given).errors_, first)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers are not touched
    assert not np.array_equal(model.set_params(random_state=1).fit(**given).errors_, first)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("shape", [(10,), (10, 2), (3, 10, 2)])
def test_answers_have_the_shape_of_the_targets(dim, shape):
    random = np.random.default_rng(0)
    targets = random.normal(size=(3, *shape))
    x, inputs = random.random((3, 10, dim)), random.normal(size=(3, 10))
    model = OperatorRegressor(**{**SMALL, "width": 24, "steps": 1}).fit(coords=x, inputs=inputs, targets=targets)
    question = {"coords": x[0], "inputs": inputs[0]}
    assert model.predict(question).shape == shape
    queries = random.random((7, dim))
    assert model.predict(question, queries).shape == tuple(7 if n == 10 else n for n in shape)
    if len(shape) == 3:
        assert model.predict(question, times=5).shape == (5, 10, 2)
    else:
        with pytest.raises(InputError, match="`times` only after targets"):
            model.predict(question, times=2)


def test_query_points_and_features_of_their_own():
    random = np.random.default_rng(0)
    samples = [
        {
            "coords": random.random((8 + i, 2)),
            "inputs": random.normal(size=(8 + i, 3)),
            "query_coords": random.random((5 + i, 2)),
            "query_features": random.normal(size=(5 + i, 2)),
            "targets": random.normal(size=(5 + i, 1)),
        }
        for i in range(4)
    ]
    model = OperatorRegressor(**SMALL).fit(samples)
    assert [answer.shape for answer in model.predict(samples)] == [(5, 1), (6, 1), (7, 1), (8, 1)]
    changed = {**samples[0], "query_features": samples[0]["query_features"] + 1}
    assert not np.allclose(model.predict(changed), model.predict(samples[0]))
    with pytest.raises(InputError, match=r"2 channel\(s\) in `query_features` of sample 0, as in `fit`, got 0"):
        model.predict({"coords": samples[0]["coords"], "inputs": samples[0]["inputs"]})


def test_sizes_follow_the_data_and_settings_come_first():
    x, few = np.linspace(0, 1, 6), np.random.default_rng(0).normal(size=(4, 6))
    model = OperatorRegressor(steps=1, quiet=True, device="cpu").fit(coords=x, inputs=few, targets=few)
    many = np.random.default_rng(0).normal(size=(80, 6))
    other = OperatorRegressor(steps=1, linear=(), quiet=True, device="cpu").fit(coords=x, inputs=many, targets=many)
    told = OperatorRegressor(**{**SMALL, "steps": 1, "attention": "fourier"}).fit(coords=x, inputs=few, targets=few)
    assert model.sizes_.width < other.sizes_.width
    assert model.sizes_.depth < other.sizes_.depth
    assert model.sizes_.batch == 3  # no more than there are to learn from
    assert (told.sizes_.width, told.sizes_.depth, told.sizes_.steps, told.sizes_.attention) == (32, 1, 1, "fourier")
    assert told.predictor_.operator.model.config.attention == "fourier"


def test_a_linear_map_is_seen_and_learned_as_one():
    x, random = np.linspace(0, 1, 12), np.random.default_rng(0)
    a, f = np.sin(np.pi * x) * random.normal(size=(60, 1)), random.normal(size=(60, 12))
    kernel = np.exp(-np.abs(x[:, None] - x))
    given = {"coords": x, "inputs": np.stack([a, f], -1), "targets": (f * np.exp(a)) @ kernel}
    model = OperatorRegressor(width=16, depth=1, steps=2, quiet=True, device="cpu").fit(**given)
    assert model.sizes_.linear == (1,)
    sample = {"coords": x, "inputs": given["inputs"][0]}
    doubled = {"coords": x, "inputs": given["inputs"][0] * [1, -2]}
    np.testing.assert_allclose(model.predict(doubled), -2 * np.asarray(model.predict(sample)), rtol=1e-4)
    assert model.recipe(PointDataset.from_arrays(x, given["inputs"], given["targets"])).model.linear == (1,)
    told = OperatorRegressor(width=16, depth=1, steps=2, linear=(), quiet=True, device="cpu").fit(**given)
    assert isinstance(told.predictor_.operator.model, OFormer)


def test_a_time_budget_is_filled_and_ends_with_the_schedule(capsys, monkeypatch):
    given, rates, step = arrays(count=20), [], Descent.step
    monkeypatch.setattr(Descent, "step", lambda self, factor, beta1: (rates.append(factor), step(self, factor, beta1)))
    started = monotonic()
    model = OperatorRegressor(width=24, depth=1, minutes=0.05, device="cpu").fit(**given)
    assert monotonic() - started > 2.5
    said = capsys.readouterr().err
    assert 1 <= model.step_ < 1000
    cycle = Training(steps=1).schedule
    assert rates[-1] == pytest.approx(cycle.at(1, 1)[0])
    assert max(rates) > 0.9
    assert re.search(r"^Data: 18 samples to learn from, 2 held out; 2-D, 10 input points, 2 to 3 frames", said, re.M)
    assert re.search(rf"^Plan: width=24, depth=1, .*steps={model.sizes_.steps}, .*about \d+ s on cpu", said, re.M)
    assert re.search(rf"^Done: {model.step_} steps,.* mean \d+\.\d+%, worst \d+\.\d+%", said, re.M)


def test_a_budget_of_few_steps_is_spent_on_a_small_model_unless_told_otherwise():
    given = arrays(count=60)
    short = {"minutes": 0.01, "quiet": True, "device": "cpu"}
    model, told = OperatorRegressor(**short).fit(**given), OperatorRegressor(**short, width=64, depth=3).fit(**given)
    assert (model.sizes_.width, model.sizes_.depth) == (48, 2)
    assert (told.sizes_.width, told.sizes_.depth) == (64, 3)


def test_quiet_is_quiet(capfd):
    OperatorRegressor(**SMALL).fit(**arrays())
    assert capfd.readouterr() == ("", "")


def test_keeps_the_manners_of_scikit_learn():
    model = OperatorRegressor(width=32, random_state=3)
    assert not [name for name in vars(model) if name.endswith("_")]
    assert type(model)(**model.get_params()).get_params() == model.get_params()
    assert model.set_params(depth=2) is model
    assert repr(model) == "OperatorRegressor(width=32, depth=2, random_state=3)"
    with pytest.raises(InputError, match=r"got `widht`\. Did you mean `width`\?"):
        model.set_params(widht=64)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_scikit_learn_can_clone_it():
    from sklearn.base import clone  # pyright: ignore[reportMissingImports]

    model = OperatorRegressor(width=32, minutes=0.5)
    assert clone(model).get_params() == model.get_params()


def test_draws_lines_and_maps(learned):
    sample = antiderivatives(1, seed=8)[0]
    figure = learned.plot(sample)
    assert any("relative L2" in text.get_text() for axis in figure.axes for text in axis.texts)
    del sample["targets"]
    assert len(learned.plot(sample).axes) == 1
    given = arrays()
    plane = OperatorRegressor(**SMALL).fit(**given)
    one = {key: array[0] for key, array in given.items()}
    labels = [axis.get_xlabel() for axis in plane.plot(one, channel=1, time=0).axes]
    assert any("relative L2" in label for label in labels)
    with pytest.raises(InputError, match="a `channel` below 2, got 2"):
        plane.plot(one, channel=2)


def test_draws_what_it_predicts_in_the_plane_where_nobody_knows_the_truth():
    """The colors are those of the input's last frame and of the answer's frame and channel, at the queries."""
    given = arrays()
    plane = OperatorRegressor(**SMALL).fit(**given)
    sample = {"coords": given["coords"][0], "inputs": given["inputs"][0]}
    elsewhere = {**sample, "query_coords": np.random.default_rng(1).random((15, 2))}
    for question, time in ((sample, -1), (elsewhere, 0)):
        figure = plane.plot(question, channel=1, time=time)
        known, answer = (axis for axis in figure.axes if axis.get_title("left"))
        assert [known.get_title("left"), answer.get_title("left")] == ["input", "prediction"]
        (shown,) = answer.collections
        np.testing.assert_allclose(shown.get_array(), plane.predict(question)[time, :, 1], rtol=1e-5)
        np.testing.assert_allclose(known.collections[0].get_array(), sample["inputs"][-1, :, 0], rtol=1e-5)


def test_predict_before_fit_is_a_sentence(tmp_path):
    model = OperatorRegressor()
    place = tmp_path / "a"
    calls = (lambda: model.predict([]), lambda: model.score([]), lambda: model.plot({}), lambda: model.save(place))
    for call in calls:
        with pytest.raises(InputError, match="a fitted estimator"):
            call()
    assert not place.exists()


def broken(change):
    samples = antiderivatives(4, seed=0)
    change(samples)
    return samples


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s[1].update(target=s[1].pop("targets")), r"part of a sample in sample 1, got `target`.*`targets`\?"),
        (lambda s: s[2].pop("inputs"), r"`inputs` in sample 2, got coords, targets"),
        (lambda s: s[3]["inputs"].__setitem__(0, np.nan), r"finite numbers in `sample 3\.input\.values`"),
        (lambda s: s[0]["coords"].__setitem__(0, np.inf), r"finite numbers in `sample 0\.input\.coords`"),
        (lambda s: s[1].update(inputs=s[1]["inputs"][:-1]), r"values at the \d+ points of sample 1 in `inputs`"),
        (lambda s: s[1].update(inputs=np.stack([s[1]["inputs"]] * 2, -1)), r"1 channels in `sample 1\.input\.values`"),
        (lambda s: s[1].update(targets=s[1]["targets"][:, None]), r"as many axes in sample 1 of `targets`"),
        (lambda s: s[1].update(weights=np.ones(3)), r"`weights` in all samples or in none, got none in sample 0"),
        (lambda s: s[1].update(parameters={"a": 1.0}), r"`parameters` in all samples or in none"),
        (lambda s: [t.update(parameters={"ab"[i % 2]: 1.0}) for i, t in enumerate(s)], r"the parameters of sample 0"),
        (lambda s: [t.update(parameters=1.0) for t in s], r"`parameters` of sample 0 as numbers by name"),
        (lambda s: [t.update(parameters={"a": np.nan}) for t in s], r"a finite parameter `a` in sample 0"),
        (lambda s: s.__delitem__(slice(1, None)), r"at least two samples, one to learn from and one to test, got 1"),
        (lambda s: s.clear(), r"at least one sample, got none"),
        (lambda s: s.__setitem__(0, np.zeros(3)), r"a list of samples, each a dict"),
    ],
)  # fmt: skip
def test_mistakes_in_samples_are_sentences(change, sentence):
    with pytest.raises(InputError, match=sentence):
        OperatorRegressor(**SMALL).fit(broken(change))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 0}, "a whole `width` of at least 1"),
        ({"width": 33}, "an even `encoder.width`"),
        ({"steps": 1.5}, "a whole `steps`"),
        ({"minutes": 0}, "`minutes` above zero"),
        ({"test_fraction": 1.0}, "a `test_fraction` between 0 and 1"),
        ({"attention": "galerkn"}, r"the name of a attention, got `galerkn`\. Did you mean `galerkin`"),
        ({"learning_rate": -1.0}, "a `learning_rate` above zero"),
        ({"linear": 1}, r"`linear`: a list of input channels, such as \[0\], or None to look for them, got 1"),
        ({"linear": (7,)}, r"`linear`: input channels from 0 to \d, got \(7,\)"),
    ],
)
def test_mistakes_in_settings_are_sentences(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        OperatorRegressor(quiet=True).set_params(**settings).fit(antiderivatives(3, seed=0))


def test_mistakes_in_what_is_asked_are_sentences(learned):
    (sample,) = antiderivatives(1, seed=0)
    with pytest.raises(InputError, match="`inputs` in sample 0, got coords"):
        learned.predict({"coords": sample["coords"]})
    with pytest.raises(InputError, match=r"1 space dimension\(s\) of the queries of sample 0, as in `fit`, got 2"):
        learned.predict(sample, np.zeros((3, 2)))
    with pytest.raises(InputError, match=r"1 frame\(s\) in `inputs` of sample 0, as in `fit`, got 4"):
        learned.predict({**sample, "inputs": np.zeros((4, len(sample["coords"]), 1))})
    with pytest.raises(InputError, match="query points of shape"):
        learned.predict(sample, np.array(0.5))
    with pytest.raises(InputError, match="a list of samples, or keyword arrays, got both"):
        OperatorRegressor().fit([sample, sample], coords=np.zeros(3))
    with pytest.raises(InputError, match="a list of samples, or keyword arrays, got neither"):
        OperatorRegressor().fit()


def test_swapped_coordinates_are_said_to_be():
    """Those of `fit`, of a sample that is asked about, and of the queries."""
    given = arrays()
    swapped = given["coords"].swapaxes(1, 2)
    with pytest.raises(InputError, match=r"transposed: give `coords\.swapaxes\(1, 2\)`, of shape \(10, 2\)"):
        OperatorRegressor(**SMALL).fit(**{**given, "coords": swapped})
    dicts = [{key: array[i] for key, array in {**given, "coords": swapped}.items()} for i in range(6)]
    with pytest.raises(InputError, match=r"transposed: give `\[x\.T for x in coords\]`, of shape \(10, 2\)"):
        OperatorRegressor(**SMALL).fit(dicts)
    model = OperatorRegressor(**SMALL).fit(**given)
    with pytest.raises(InputError, match=r"got \(2, 10\)\. It looks transposed: give `coords\.T`, of shape \(10, 2\)"):
        model.predict(dicts[0])
    one = {**dicts[0], "coords": given["coords"][0]}
    with pytest.raises(InputError, match=r"transposed: give `query_coords\.T`, of shape \(30, 2\)"):
        model.predict(one, np.zeros((2, 30)))
    with pytest.raises(InputError, match=r"give `np\.stack\(query_coords, -1\)`, of shape \(30, 2\)"):
        model.predict(one, [np.zeros(30), np.zeros(30)])


def test_the_guide_goes_from_five_arrays_to_an_operator_and_a_picture_in_ten_lines(tmp_path, monkeypatch):
    """Exactly what stands there, with less time to learn."""
    make, use = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)[:2]
    assert len([line for line in use.splitlines() if line.strip()]) <= 10
    assert "minutes=2" in use
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(make, {})
    with np.load("mine.npz") as mine:
        assert len(mine.files) == 5
    exec(use.replace("minutes=2", "minutes=0.05"), names)
    assert names["answer"].shape == (1000,)
    assert np.isfinite(names["answer"]).all()
    assert (tmp_path / "my-operator.png").stat().st_size > 5000
    again = OperatorRegressor.load(tmp_path / "my-operator")
    assert np.array_equal(again.predict(names["sample"], np.linspace(0, 1, 1000)), names["answer"])


def test_the_weights_of_the_page_integrate():
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "cell_weights" in code]
    names: dict = {}
    exec(code, names)
    said = [float(number) for number in re.findall(r"# ([\d.]+) and ([\d.]+),", code)[0]]
    assert [round(names["equal"], 2), round(names["by_cells"], 2)] == said
    OperatorRegressor(**SMALL).fit(
        coords=names["points"], inputs=np.random.default_rng(0).normal(size=(4, 500)),
        targets=np.ones((4, 500)), weights=names["weights"],
    )  # fmt: skip
