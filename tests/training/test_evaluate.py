"""Scores of a split against numpy; the sweep over resolutions says what evaluating by hand says."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.data.dataset import PointDataset, View
from oformer.fields import Field
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.oformer import Propagator
from oformer.training.evaluate import errors, evaluate, resolution_sweep, summarize
from oformer.training.losses import Region
from tests.tiny import tiny_recipe

COUNTS = (9, 5, 7, 6)
PLAIN = Normalization(input="none", target="none", coords="as-is")


class Said(Operator):
    """Answers with its input, which holds what it is to say."""

    def forward(self, input: Field, query: Field, times: int | None = None, encoded_once=None) -> Tensor:
        return input.values


def case(unit: float) -> tuple[Operator, PointDataset, list[np.ndarray], list[np.ndarray]]:
    """Predictions and targets of three steps and two channels at points that differ; one channel in another unit."""
    random = np.random.default_rng(0)
    scale = np.array([unit, 1.0])
    said, true = ([scale * random.standard_normal((3, n, 2)) for n in COUNTS] for _ in range(2))
    data = PointDataset.from_arrays([random.random((n, 2)) for n in COUNTS], said, true)
    model = OFormerConfig(propagator=Propagator(depth=1)).build(data.spec)
    return Said(model, PLAIN), data, said, true


@pytest.mark.parametrize("batch", [1, 3])
def test_errors_are_those_of_numpy(batch):
    operator, data, said, true = case(1.0)
    found = errors(operator, data, batch)
    size = np.mean([(t**2).mean((0, 1)) for t in true], 0)
    both = list(zip(said, true, strict=True))
    relative = [np.sqrt((((p - t) ** 2) / size).sum() / ((t**2) / size).sum()) for p, t in both]
    by_step = [np.sqrt((((p - t) ** 2) / size).sum((1, 2)) / ((t**2) / size).sum((1, 2))) for p, t in both]
    np.testing.assert_allclose(found.relative, relative, rtol=1e-5)
    np.testing.assert_allclose(found.by_step, np.array(by_step), rtol=1e-5)
    np.testing.assert_allclose(found.squared, [((p - t) ** 2).mean((0, 1)) for p, t in both], rtol=1e-5)
    scores = evaluate(operator, data, batch)
    assert scores.error == pytest.approx(np.mean(relative), rel=1e-5)
    assert (scores.worst, scores.worst_sample) == (pytest.approx(max(relative), rel=1e-5), int(np.argmax(relative)))


def test_the_unit_of_a_channel_does_not_matter():
    """Pressure in pascals beside density in kilograms: neither may hide the other."""
    plain, scaled = (errors(*case(unit)[:2]) for unit in (1.0, 1e5))
    torch.testing.assert_close(plain.relative, scaled.relative, rtol=1e-5, atol=0)
    torch.testing.assert_close(plain.by_step, scaled.by_step, rtol=1e-5, atol=0)
    assert float(scaled.squared[0, 0]) == pytest.approx(1e10 * float(plain.squared[0, 0]), rel=1e-5)


def test_momentum_is_measured_over_the_split_and_over_batches_as_released():
    """On one mesh: the root of a mean over several samples, of which one is far worse than the others."""
    random = np.random.default_rng(1)
    points, true = random.random((20, 2)), random.uniform(1, 2, (5, 3, 20, 4))
    said = true + np.array([0.01, 1.0, 0.02, 0.1, 0.05])[:, None, None, None] * random.standard_normal(true.shape)
    data = PointDataset.from_arrays(np.tile(points, (5, 1, 1)), said, true)
    operator = Said(OFormerConfig(propagator=Propagator(depth=1)).build(data.spec), PLAIN)
    scores = evaluate(operator, data, batch=2, region=Region(box=(0.0, 0.6, -1.0, 2.0)))
    near = (points[:, 0] > 0) & (points[:, 0] < 0.6)
    p, t = said[:, :, near], true[:, :, near]
    wrong = p[..., :2] * p[..., 2:3] - t[..., :2] * t[..., 2:3]
    again = p[..., :2] * p[..., 2:3] ** 2 - t[..., :2] * t[..., 2:3] ** 2
    own = np.sqrt((wrong**2).mean((1, 2, 3)) / ((t[..., :2] * t[..., 2:3]) ** 2).mean((1, 2, 3)))
    batches = [np.sqrt((again[first : first + 2] ** 2).mean()) for first in (0, 2, 4)]
    assert scores.momentum is not None
    assert scores.momentum.rmse == pytest.approx(np.sqrt((wrong**2).mean()), rel=1e-5)
    assert scores.momentum.relative == pytest.approx(own.mean(), rel=1e-5)
    assert scores.momentum.as_released == pytest.approx(np.mean(batches), rel=1e-5)


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
        "oformer.training.evaluate.evaluate",
        lambda operator, data, batch: seen.append(data.view) or evaluate(operator, data),
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
