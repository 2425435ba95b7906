"""Recipes train end to end from what they generate, at a size that takes a second; their own shapes, losses and all."""

import dataclasses
import math

import pytest
import torch

from oformer.data.dataset import View
from oformer.problems import Burgers, Darcy
from oformer.problems.navier_stokes import INSTANCES
from oformer.recipes import recipe_named
from oformer.report import write_report
from oformer.training.datasets import open_data, train_and_test
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.recipe import Data, Recipe
from oformer.training.schedules import Horizon

SMALL = {
    "burgers-512": (Burgers(points=128, solver_points=128, steps=100), View(points=(64,)), None),
    "darcy-85": (Darcy(points=29), View(points=(15, 15)), None),
    "ns2-part": (
        dataclasses.replace(INSTANCES["ns2"], points=16, solver_points=32, duration=14, time_step=0.02),
        View(),
        Horizon(first=2, ramp=0.5),
    ),
    "ns3": (
        dataclasses.replace(INSTANCES["ns3"], points=16, solver_points=32, duration=13, time_step=0.02),
        View(),
        Horizon(first=1, ramp=0.5),
    ),
}


def small(name: str, **training) -> Recipe:
    """The recipe with its problem cut down; model, normalization and loss stay."""
    recipe = recipe_named(name)
    problem, view, horizon = SMALL[name]
    settings = dataclasses.replace(
        recipe.training,
        steps=8,
        batch=2,
        evaluate_every=8,
        checkpoint_every=8,
        log_every=1,
        horizon=horizon,
        **training,
    )
    return dataclasses.replace(recipe, problem=problem, data=Data(train=6, test=3, view=view), training=settings)


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_trains_evaluates_and_reports(name, tmp_path):
    recipe = small(name, augment=True)
    data = open_data(recipe, tmp_path / "data")
    splits = train_and_test(data, recipe)
    outcome = train(recipe, tmp_path / "run", splits, quiet=True, tensorboard=False)
    assert outcome.finished
    assert outcome.scores is not None
    assert 0 < outcome.scores.error < 2
    assert len(outcome.scores.by_step) == data.spec.out_times
    losses = [r["loss"] for r in read_journal(tmp_path / "run") if r["kind"] == "train"]
    assert len(losses) == 8
    assert all(math.isfinite(loss) for loss in losses)
    page = write_report(tmp_path / "run", splits[1]).read_text()
    assert page.count("data:image") >= 3


def test_darcy_answers_are_zero_on_the_ring_that_the_released_code_overwrites(tmp_path):
    recipe = small("darcy-85")
    data = open_data(recipe, tmp_path / "data")
    outcome = train(recipe, tmp_path / "run", train_and_test(data, recipe), quiet=True, tensorboard=False)
    sample = data[0]
    batch = sample.input.to(torch.float32)
    with torch.no_grad():
        answer = outcome.operator(
            type(batch)(batch.coords[None], batch.values[None], batch.weights[None]),
            type(batch)(sample.query.coords[None], sample.query.values[None], sample.query.weights[None]),
        )[0, 0, :, 0].reshape(15, 15)
    ring = torch.ones(15, 15, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    assert bool((answer[ring] == 0).all())
    assert bool((answer[~ring] != 0).all())


def test_the_viscosity_is_recorded_and_never_shown(tmp_path):
    recipe = small("ns2-part")
    data = open_data(recipe, tmp_path / "data")
    sample = data[0]
    assert sample.parameters["viscosity"].item() == pytest.approx(1e-4)
    assert data.spec.in_channels == 1
    assert data.spec.query_channels == 0
