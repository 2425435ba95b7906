"""The sweep over resolutions says what evaluating by hand says, and leaves out what the data cannot give."""

import dataclasses

import pytest
import torch

from oformer.analysis import resolution_sweep
from oformer.data.dataset import PointDataset, View
from oformer.models import Operator
from oformer.training.evaluate import errors, evaluate, summarize
from tests.tiny import tiny_recipe


@pytest.fixture
def operator(tiny_data):
    recipe = tiny_recipe()
    torch.manual_seed(0)
    return Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data).eval()


def test_each_row_is_an_evaluation_under_that_view(operator, tiny_data):
    rows = resolution_sweep(operator, tiny_data, shares=(0.5,), batch=5)
    assert [(row.points, row.kind) for row in rows] == [
        (16, "resolution"), (32, "trained"), (64, "resolution"), (16, "sparse"),
    ]  # fmt: skip
    for row, view in zip(
        rows, (View(points=(16,)), View(points=(32,)), View(points=(64,)), View(points=(32,), keep=0.5)), strict=True
    ):
        assert row.error == pytest.approx(evaluate(operator, tiny_data.with_view(view)).error, rel=1e-6)


def test_what_was_measured_already_is_not_measured_again(operator, tiny_data, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "oformer.analysis.evaluate", lambda operator, data, batch: seen.append(data.view) or evaluate(operator, data)
    )
    rows = resolution_sweep(operator, tiny_data, shares=(), trained_error=0.25)
    assert [(row.points, row.error == 0.25) for row in rows] == [(16, False), (32, True), (64, False)]
    assert seen == [View(points=(16,)), View(points=(64,))]


def test_rows_that_the_data_cannot_give_are_left_out(operator, tiny_data):
    finest = tiny_data.with_view(View(points=(64,)))
    assert [row.points for row in resolution_sweep(operator, finest, shares=())] == [32, 64]
    scattered = PointDataset([tiny_data[i] for i in range(3)])
    assert [row.kind for row in resolution_sweep(operator, scattered, shares=(0.5,))] == ["sparse"]


def test_batches_change_the_released_mean_of_means_and_nothing_else(operator, tiny_data):
    found = errors(operator, tiny_data.subset(range(5)), batch=4)
    scores = summarize(found)
    assert scores.error == pytest.approx(found.relative.mean().item())
    assert scores.batch_mean == pytest.approx((found.relative[:4].mean() + found.relative[4]).item() / 2)
    assert scores.worst == found.relative.max().item() == found.relative[scores.worst_sample].item()
    whole = summarize(errors(operator, tiny_data.subset(range(5)), batch=5))
    assert dataclasses.replace(whole, batch_mean=0.0).error == pytest.approx(scores.error, rel=1e-6)
    assert whole.batch_mean == pytest.approx(whole.error)


def test_evaluating_leaves_the_mode_of_the_model_as_it_was(operator, tiny_data):
    operator.train()
    evaluate(operator, tiny_data.subset([0]))
    assert operator.training
