"""The demo: the whole way at once, small in every run of the tests and in earnest among the slow ones."""

import dataclasses
import json
import re

import pytest

from oformer.data.dataset import View
from oformer.demo import demo
from oformer.experiments.recipes import recipe_named
from oformer.training.journal import read_journal
from tests.tiny import tiny_recipe


def scores_of(run):
    newest = sorted((run / "checkpoints").iterdir())[-1]
    return json.loads((newest / "config.json").read_text())["scores"]


def test_the_whole_way_in_small(tmp_path, capsys):
    recipe = tiny_recipe(steps=20)
    assert demo(recipe, tmp_path) == 0
    out, said = capsys.readouterr()
    for label in ("16 points", "32 points", "64 points", "30% of the input points", "(trained)"):
        assert label in out
    report = tmp_path / "run" / "report.html"
    assert str(report) in said
    assert report.read_text().count("data:image") == 3
    assert f"{scores_of(tmp_path / 'run')['error']:.3%}" in out
    # A second call trains nothing more; a fresh one begins again and comes to the same end.
    before = scores_of(tmp_path / "run")
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert demo(recipe, tmp_path) == 0
    assert (tmp_path / "run" / "journal.jsonl").read_text() == journal
    assert demo(recipe, tmp_path, fresh=True) == 0
    assert scores_of(tmp_path / "run") == before


def test_where_time_is_short_the_schedule_is_shortened_and_the_run_is_finished(tmp_path, capsys):
    recipe = tiny_recipe(steps=4000)
    assert demo(recipe, tmp_path, minutes=0.01) == 0
    (steps,) = re.findall(r"^0\.01 minutes had room for (\d+) of 4,000 steps.*--fresh", capsys.readouterr().err, re.M)
    records = read_journal(tmp_path / "run")
    assert (records[-1]["kind"], records[-1]["reason"], records[-1]["step"]) == ("stop", "finished", int(steps))
    (*_, last) = (record["rate"] for record in records if record["kind"] == "train")
    assert last == pytest.approx(recipe.training.optimizer.rate / 10 / 10)  # the end of the cycle
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert demo(recipe, tmp_path, minutes=0.01) == 0
    assert (tmp_path / "run" / "journal.jsonl").read_text() == journal


@pytest.mark.slow
def test_the_demo_in_earnest_stays_below_two_percent(tmp_path):
    """Its bar at the trained resolution and, since weights are quadratures, at half and double as well."""
    from oformer.predict import Predictor
    from oformer.training.evaluate import evaluate
    from oformer.training.find_data import open_data

    recipe = recipe_named("burgers-demo")
    assert demo(recipe, tmp_path, minutes=60.0) == 0
    assert scores_of(tmp_path / "run")["error"] < 0.01
    operator = Predictor(tmp_path / "run", "cpu").operator
    test = open_data(recipe, tmp_path / "datasets").split("test")
    for points in (128, 512):
        assert evaluate(operator, test.with_view(View(points=(points,)))).error < 0.01
    sparse = dataclasses.replace(recipe.data.view, keep=0.3)
    assert evaluate(operator, test.with_view(sparse)).error < 0.04
