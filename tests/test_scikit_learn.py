"""The estimator among those of scikit-learn, and the forms in which its users bring data."""

import os
import pickle
import subprocess
import sys
import unittest
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.estimator import OperatorRegressor

TINY = {"width": 24, "depth": 1, "batch_size": 8, "steps": 2, "quiet": True, "device": "cpu"}

# The checks of scikit-learn that fail, and why they may.
NOT_APPLICABLE = {
    "check_n_features_in": "entries of X are functions, whose points may differ in number",
    "check_n_features_in_after_fitting": "entries of X are functions, whose points may differ in number",
    "check_complex_data": "refused in words of our own",
    "check_dtype_object": "arrays of objects are refused, since they are mostly ragged",
    "check_estimators_empty_data_messages": "refused in words of our own",
    "check_regressor_multioutput": "answers are float32, as the weights",
}
LONG = (
    "check_regressors_train",
    "check_regressor_data_not_an_array",
    "check_estimators_dtypes",
    "check_regressors_int",
)


def curves(count: int = 12, points: int = 10) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(count, points))
    return inputs, np.cumsum(inputs, 1)


def dicts(count: int = 12) -> list[dict]:
    random = np.random.default_rng(0)
    return [
        {"coords": random.random((n, 2)), "inputs": random.normal(size=n), "targets": random.normal(size=n)}
        for n in random.integers(5, 9, count)
    ]


@pytest.fixture
def learn():
    pytest.importorskip("sklearn")


@pytest.mark.filterwarnings("ignore:Estimator OperatorRegressor does not inherit:UserWarning")
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_passes_the_checks_of_scikit_learn(learn, long):
    from sklearn.utils.estimator_checks import estimator_checks_generator

    model, failed, done = OperatorRegressor(**{**TINY, "steps": 1}), set(), 0
    for estimator, check in estimator_checks_generator(model):
        name = getattr(check, "func", check).__name__
        if (name in LONG) != long:
            continue
        try:
            check(estimator)
            done += 1
        except (AssertionError, TypeError, ValueError):
            if name not in NOT_APPLICABLE:
                raise
            failed.add(name)
        except unittest.SkipTest:
            pass
    assert long or failed == set(NOT_APPLICABLE)
    assert done >= (6 if long else 30)


def test_cross_validation_scores_samples_of_any_form(learn):
    """Each fold is scored as by hand; dicts that hold their targets need no y."""
    from sklearn.model_selection import KFold, cross_val_score

    folds = KFold(3)
    (X, y), samples, model = curves(), dicts(), OperatorRegressor(**TINY)
    scores = cross_val_score(model, X, y, cv=folds)
    by_hand = [model.fit(X[rest], y[rest]).score(X[test], y[test]) for rest, test in folds.split(X)]
    assert scores == pytest.approx(by_hand, abs=0)
    without = [{key: sample[key] for key in ("coords", "inputs")} for sample in samples]
    scores = cross_val_score(model, samples, cv=folds)
    assert np.isfinite(scores).all()
    assert scores == pytest.approx(
        cross_val_score(model, without, [s["targets"] for s in samples], cv=folds, error_score="raise"), abs=0
    )


def test_a_search_in_two_processes_finds_what_one_finds(learn):
    """With numbers of numpy as settings, one grid for all samples, and the best one fit anew and saved."""
    from sklearn.model_selection import GridSearchCV

    X, y = curves(9, 7)
    grid = {"depth": np.array([1, 2]), "learning_rate": [1e-3]}
    searches = [
        GridSearchCV(OperatorRegressor(**TINY), grid, cv=2, n_jobs=n).fit(X, y, coords=np.arange(7.0)) for n in (1, 2)
    ]
    one, two = (search.cv_results_["mean_test_score"] for search in searches)
    assert one == pytest.approx(two, abs=1e-6)
    assert len(set(one)) == 2
    best = searches[0].best_estimator_
    assert np.array_equal(best.points_["coords"], np.arange(7.0))
    assert best.sizes_.depth == searches[0].best_params_["depth"]
    assert searches[0].predict(X).shape == y.shape


def test_pipelines_clones_pickles_and_saved_folders_answer_alike(learn, tmp_path):
    from sklearn.base import clone, is_regressor
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.validation import check_is_fitted

    X, y = curves()
    pipe = make_pipeline(StandardScaler(), OperatorRegressor(**TINY, random_state=np.int64(3))).fit(X, y)
    model, scaled = pipe[-1], pipe[0].transform(X)
    answer = model.predict(scaled)
    assert np.array_equal(pipe.predict(X), answer)
    assert answer.shape == y.shape
    assert np.array_equal(clone(model).fit(scaled, y).predict(scaled), answer)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(scaled), answer)
    model.save(tmp_path / "mine")
    again = OperatorRegressor.load(tmp_path / "mine", device="cpu")
    assert np.array_equal(again.predict(scaled), answer)
    assert again.random_state == 3
    assert is_regressor(model)
    check_is_fitted(model)
    with pytest.raises(NotFittedError):
        OperatorRegressor().predict(X)


def test_works_as_before_where_scikit_learn_is_absent():
    code = (
        "import sys\nsys.modules['sklearn'] = None\nimport numpy as np\n"
        "from oformer import InputError, OperatorRegressor\n"
        f"X = np.random.rand(4, 5)\nmodel = OperatorRegressor(**{TINY!r})\n"
        "try:\n    model.predict(X)\nexcept InputError as error:\n    assert 'Call `fit`' in str(error)\n"
        "assert model.fit(X, X).predict(X).shape == (4, 5)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_random_state_may_be_drawn():
    """None draws another seed at each fit; a generator of numpy goes on from call to call."""
    X, y = curves(4, 5)
    model = OperatorRegressor(**TINY, random_state=None)
    assert model.fit(X, y).seed_ != model.fit(X, y).seed_
    seeds = [OperatorRegressor(**TINY, random_state=np.random.RandomState(0)).fit(X, y).seed_ for _ in range(2)]
    assert seeds[0] == seeds[1]
    with pytest.raises(InputError, match="a `random_state` of zero or more"):
        OperatorRegressor(**TINY, random_state="zero").fit(X, y)


def test_settings_of_older_folders_are_read(tmp_path):
    X, y = curves(4, 5)
    OperatorRegressor(**TINY).fit(X, y).save(tmp_path / "old")
    file = tmp_path / "old" / "estimator.json"
    text = file.read_text()
    for new, old in (("batch_size", "batch"), ("learning_rate", "rate"), ("random_state", "seed")):
        text = text.replace(f'"{new}"', f'"{old}"')
    file.write_text(text)
    for name in ("checksums.json", "points.safetensors"):
        (tmp_path / "old" / name).unlink()
    again = OperatorRegressor.load(tmp_path / "old", device="cpu")
    assert (again.batch_size, again.learning_rate, again.random_state) == (8, 1e-3, 0)


FORMS = ("arrays", "lists", "tensors", "DataFrames", "DataArrays", "dicts of lists")


@pytest.mark.parametrize("form", FORMS)
def test_every_container_holds_the_same_numbers(form):
    X, y = curves(4, 6)
    x = np.linspace(0, 1, 6)
    expected = OperatorRegressor(**TINY).fit(coords=x, inputs=X, targets=y)
    if form == "dicts of lists":
        given = ([{"coords": x.tolist(), "inputs": u.tolist()} for u in X], y.tolist())
    elif form == "DataFrames":
        pandas = pytest.importorskip("pandas")
        given = (pandas.DataFrame(X), pandas.DataFrame(y))
    elif form == "DataArrays":
        xarray = pytest.importorskip("xarray")
        given = (xarray.DataArray(X, dims=("sample", "x")), xarray.DataArray(y, dims=("sample", "x")))
    else:
        change = {"arrays": lambda a: a, "lists": np.ndarray.tolist, "tensors": torch.from_numpy}[form]
        given = (change(X), change(y))
    model = OperatorRegressor(**TINY).fit(*given)
    assert np.array_equal(model.errors_, expected.errors_)
    assert np.array_equal(model.predict(given[0]), expected.predict([{"coords": x, "inputs": u} for u in X]))


def test_images_are_their_points_in_rows():
    """(samples, nx, ny) with the grid's coordinates learn what the flat arrays learn, and answers are images again."""
    random = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.linspace(0, 1, 4), np.linspace(0, 2, 3), indexing="ij"), -1)
    X, y = random.normal(size=(5, 4, 3)), random.normal(size=(5, 2, 4, 3, 2))  # two times, two channels
    flat = {"coords": grid.reshape(12, 2), "inputs": X.reshape(5, 12), "targets": y.reshape(5, 2, 12, 2)}
    expected = OperatorRegressor(**TINY).fit(**flat)
    model = OperatorRegressor(**TINY).fit(X, y, coords=grid)
    as_dicts = [{"coords": grid, "inputs": u, "targets": v} for u, v in zip(X, y, strict=True)]
    assert np.array_equal(model.errors_, expected.errors_)
    assert np.array_equal(OperatorRegressor(**TINY).fit(as_dicts).errors_, expected.errors_)
    assert np.array_equal(model.predict(X), expected.predict(X.reshape(5, 12)).reshape(y.shape))
    assert model.score(X, y) == expected.score(**flat)
    assert model.fit(X[:4], y[:4], coords=grid).points_["coords"].shape == (4, 3, 2)  # as many samples as rows
    finer = np.zeros((6, 5, 2))
    assert model.predict(as_dicts[0], finer).shape == (2, 6, 5, 2)
    each = OperatorRegressor(**TINY).fit(coords=list(np.stack([grid] * 5)), inputs=X, targets=y)
    assert np.array_equal(each.errors_, expected.errors_)
    with pytest.raises(InputError, match=r"sample 0 of `inputs` with the axes \(4, 3\) of its grid, got \(3, 4\)"):
        model.predict({"coords": grid, "inputs": X[0].T})
    with pytest.raises(InputError, match="`coords` of one grid, or of each sample"):
        model.fit(random.normal(size=(3, 3, 3)), random.normal(size=(3, 3, 3)), coords=random.random((3, 3, 2)))


def test_a_number_for_each_sample_is_a_target_too():
    """The level of a noisy function, which the model knows better than one who answers the mean of all."""
    random = np.random.default_rng(0)
    y = random.normal(size=60)
    X = y[:, None] + 0.1 * random.normal(size=(60, 6))
    model = OperatorRegressor(**{**TINY, "steps": 60, "learning_rate": 4e-3}).fit(X[:40], y[:40])
    answer = model.predict(X[40:])
    assert answer.shape == (20,)
    assert np.square(answer - y[40:]).mean() < 0.2 * y.var()
    assert model.predict({"inputs": X[40]}) == pytest.approx(answer[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda X, y: {"X": X}, "`targets` in X, y and the keyword arrays"),
        (lambda X, y: {"X": X, "y": y, "inputs": X}, "the inputs once"),
        (lambda X, y: {"X": np.stack([X, X], -1), "y": y}, "`coords=` beside inputs that are not of shape"),
        (
            lambda X, y: {"X": [{"coords": u, "inputs": u, "targets": u} for u in X], "y": y},
            "the targets once, got them in two places",
        ),
        (lambda X, y: {"X": X, "y": y[:-1]}, r"as many samples in `targets` as in `inputs` \(4\), got 3"),
    ],
)
def test_mistakes_with_x_and_y_are_sentences(arguments, sentence):
    X, y = curves(4, 5)
    with pytest.raises(InputError, match=sentence):
        OperatorRegressor(**TINY).fit(**arguments(X, y))
