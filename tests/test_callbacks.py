"""The examples of the page on your own data with other people's tools: scikit-learn, W&B, MLflow and Optuna."""

import contextlib
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from oformer.estimator import OperatorRegressor

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "own-data.md"
TINY = {"steps": 5, "width": 24, "depth": 1, "batch_size": 8, "device": "cpu", "quiet": True}


def run(module: str, **changes: str) -> dict:
    """Run the block of the page that imports a module, with few samples and steps."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    (code,) = [block for block in blocks if re.search(rf"^(import|from) {module}\b", block, re.M)]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    random = np.random.default_rng(0)
    x, X = random.random(7), random.normal(size=(12, 7))
    y = np.cumsum(X, 1)
    names = {"X": X, "y": y, "x": x, "mine": {"x": x, "before": X, "after": y}}
    names["OperatorRegressor"] = lambda **settings: OperatorRegressor(**{**settings, **TINY})
    exec(code, names)
    return names


def test_the_example_for_scikit_learn_runs():
    pytest.importorskip("sklearn")
    names = run("sklearn", **{"n_jobs=2": "n_jobs=1"})
    assert np.isfinite(names["scores"]).all()
    assert names["answer"].shape == (5, 7)


def test_weights_and_biases_is_told_every_record_in_order(monkeypatch):
    """A stand-in that, like W&B, takes dictionaries by name and steps that never go back."""
    steps, logged = [], {}

    class Run:
        done = False

        def log(self, data, step):
            assert not self.done
            assert all(isinstance(name, str) for name in data)
            assert isinstance(step, int)
            assert not steps or step >= steps[-1]
            steps.append(step)
            logged.update(data)

        def finish(self):
            self.done = True

    wandb = ModuleType("wandb")
    wandb.init = lambda project: Run()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert run("wandb")["run"].done
    assert set(steps) == {1, 2, 3, 4, 5}
    assert {"train/loss", "train/rate", "evaluate/error"} <= set(logged)


def test_mlflow_is_told_numbers_within_a_run(monkeypatch):
    """A stand-in that, like MLflow, takes floats by names of some characters, while a run is active."""
    active, logged = [], []

    @contextlib.contextmanager
    def start_run():
        active.append(1)
        yield
        active.pop()

    def log_metrics(metrics, step):
        assert active
        for name, value in metrics.items():
            assert re.fullmatch(r"[\w\-. :/]+", name)
            float(value)
            logged.append((name, step))

    mlflow = ModuleType("mlflow")
    mlflow.start_run, mlflow.log_metrics = start_run, log_metrics  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run("mlflow")
    assert {("train/loss", 5), ("evaluate/error", 5)} <= set(logged)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optuna_stops_trials_that_fall_behind():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    changes = {
        "create_study(": "create_study(sampler=optuna.samplers.RandomSampler(seed=0), ",
        "n_trials=20": "n_trials=8",
    }
    trials = run("optuna", **changes)["study"].trials
    pruned = [trial for trial in trials if trial.state == optuna.trial.TrialState.PRUNED]
    complete = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert len(pruned) + len(complete) == 8
    assert pruned
    assert all(len(trial.intermediate_values) < 5 for trial in pruned)
    assert all(len(trial.intermediate_values) == 5 for trial in complete)
