"""A report shows what measuring says, measures nothing twice, and computes where it is told."""

import dataclasses

import pytest
import torch

from oformer import report
from oformer.checkpoint import find_checkpoint, load_checkpoint
from oformer.errors import InputError
from oformer.metrics import Resolution
from oformer.plots.page import CAPTIONS
from oformer.training.evaluate import errors, evaluate, resolution_sweep
from oformer.training.find_data import train_and_scored, train_and_test
from oformer.training.loop import train
from tests.tiny import tiny_recipe


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """A finished run of the tiny recipe, and its test split."""
    recipe = tiny_recipe(steps=4, evaluate_every=4, checkpoint_every=4)
    folder, splits = tmp_path_factory.mktemp("runs") / "run", train_and_test(tiny_data, recipe)
    train(recipe, folder, splits, quiet=True, tensorboard=False)
    return folder, splits[1]


def test_the_page_shows_the_errors_of_the_run(run):
    folder, test = run
    page = report.write_report(folder, test, device="cpu").read_text()
    operator = load_checkpoint(find_checkpoint(folder)).operator
    for row in resolution_sweep(operator, test):
        assert row.label in page
        assert f"{row.error:.3%}" in page
    assert page.count("data:image") == 3  # curves, predictions, errors by resolution


def test_each_view_of_the_test_split_is_predicted_once(run, monkeypatch):
    folder, test = run
    seen = []
    monkeypatch.setattr(report, "errors", lambda *a: seen.append("as trained") or errors(*a))
    monkeypatch.setattr("oformer.training.evaluate.evaluate", lambda *a: seen.append(a[1].view) or evaluate(*a))
    report.write_report(folder, test, device="cpu")
    assert seen[0] == "as trained"
    assert [(view.points, view.keep) for view in seen[1:]] == [((16,), 1.0), ((64,), 1.0), ((32,), 0.3)]
    seen.clear()
    known = [Resolution("32 points", 32, 0.125, "trained")]
    page = report.write_report(folder, test, known, device="cpu").read_text()
    assert seen == ["as trained"]  # for the best, the median and the worst
    assert "12.500%" in page


def test_it_computes_where_it_is_told(run, monkeypatch):
    folder, test = run
    known = errors(load_checkpoint(find_checkpoint(folder)).operator, test)
    monkeypatch.setattr(report, "errors", lambda *a: known)  # the device of the test computes nothing
    seen = report.measure(folder, test, [], device="meta")
    assert {parameter.device for parameter in seen.predictor.operator.parameters()} == {torch.device("meta")}


HOSTILE = r"$\nosuch{x}$ [/red] <b>_^ \x1b[31m"


def test_names_are_text_in_pictures_and_on_the_page(run, monkeypatch):
    """A channel is called as it is in somebody's file; as a formula it broke the report after training."""
    folder, test = run
    names = dataclasses.replace(test.card, inputs=(HOSTILE,), targets=(f"_{HOSTILE}",), title=HOSTILE)
    monkeypatch.setattr(test, "card", names)
    page = report.write_report(folder, test, device="cpu").read_text()
    assert page.count("data:image") == 3
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


def test_the_report_of_a_run_that_held_samples_out_measures_the_test_samples(tmp_path, tiny_data):
    """Its curves are of the validation samples, and say so; everything else is of the test split."""
    recipe = tiny_recipe(steps=4, evaluate_every=4, checkpoint_every=4)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation=5))
    train(recipe, tmp_path, train_and_scored(tiny_data, recipe), quiet=True, tensorboard=False)
    test = train_and_test(tiny_data, recipe)[1]
    scores = evaluate(load_checkpoint(find_checkpoint(tmp_path)).operator, test)
    page = report.write_report(tmp_path, test, device="cpu").read_text()
    assert f"Relative L2 error of 4 test samples, in physical units: mean {scores.error:.3%}" in page
    assert "or on those held out for validation" in page
    curves = report.pictures(report.measure(tmp_path, test, [], "cpu"))["training"].axes[0].get_legend()
    assert [text.get_text() for text in curves.get_texts()] == ["training loss", "validation error"]


@pytest.mark.gpu
def test_a_report_from_a_gpu_says_the_same(run):
    folder, test = run
    row = report.measure(folder, test, device="cpu").sweep[1]
    seen = report.measure(folder, test, device="cuda")
    assert seen.predictor.device.type == "cuda"
    assert seen.sweep[1].error == pytest.approx(row.error, rel=1e-4)
    assert report.write_report(folder, test, device="cuda").read_text().count("data:image") == 3


def test_a_line_has_no_movie(run, tmp_path):
    folder, test = run
    with pytest.raises(InputError, match="two dimensions for a movie"):
        report.movie(report.measure(folder, test, [], "cpu"), tmp_path / "movie.gif")


def test_the_page_shows_results_first_and_checksums_last(run):
    folder, test = run
    page = report.write_report(folder, test, device="cpu").read_text()
    scores = evaluate(load_checkpoint(find_checkpoint(folder)).operator, test)
    order = [
        "<h1>tiny</h1>",
        f"mean {scores.error:.3%}, median {scores.median:.3%}, worst {scores.worst:.3%}",
        CAPTIONS["predictions"],
        "Mean test error (relative L2) by input points",
        CAPTIONS["by-resolution"],
        CAPTIONS["training"],
        "Load the operator in Python:",
        "<h2>Settings and provenance</h2>",
        "&quot;steps&quot;: 4",  # the recipe
        load_checkpoint(find_checkpoint(folder)).provenance["data checksum"],
    ]
    places = [page.index(words) for words in order]
    assert places == sorted(places)
    assert page.count("<h2>") == 6
