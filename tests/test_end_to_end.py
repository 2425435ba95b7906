"""Recipes train end to end from what they generate, at a size that takes a second; their own shapes, losses and all."""

import dataclasses
import math

import pytest
import torch

from oformer.data.dataset import View
from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.fields import Batch, collate
from oformer.meshes.airfoil import Naca
from oformer.models import Operator
from oformer.problems import Airfoil, Burgers, Darcy, Electrostatics, Magnetostatics
from oformer.problems.navier_stokes import INSTANCES
from oformer.report import write_report
from oformer.solvers.euler_fv import Numerics
from oformer.training.find_data import open_data, train_and_test
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
    "electro": (Electrostatics(), View(), None),
    "airfoil": (
        Airfoil(
            mesh=Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3),
            steps=16,
            stride=2,
            numerics=Numerics(newton=2, sweeps=3, start_newton=2),
        ),
        View(),
        Horizon(first=2, ramp=0.5),
    ),
    "magneto-aug": (Magnetostatics(randomized=True), View(), None),
}


def small(name: str, **training) -> Recipe:
    """The recipe with its problem cut down; model, normalization and loss stay."""
    recipe = recipe_named(name)
    problem, view, horizon = SMALL[name]
    settings = dataclasses.replace(
        recipe.training,
        steps=4,
        batch=2,
        evaluate_every=4,
        checkpoint_every=4,
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
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
    near = outcome.scores.momentum
    assert (near is not None) == (name == "airfoil")
    if near is not None:
        assert 0 < near.relative < 5
        assert near.rmse < near.as_released  # air weighs more than one kilogram per cubic meter
    page = write_report(tmp_path / "run", splits[1]).read_text()
    assert page.count("data:image") >= 3


def test_windows_are_for_problems_that_may_begin_at_any_frame(tmp_path):
    name = next(name for name in SMALL if name.startswith("ns"))
    recipe = small(name, windows=True)
    splits = train_and_test(open_data(recipe, tmp_path / "data"), recipe)
    losses = []
    for run, settings in (("with", recipe), ("without", small(name))):
        train(settings, tmp_path / run, splits, quiet=True, tensorboard=False)
        losses.append([r["loss"] for r in read_journal(tmp_path / run) if r["kind"] == "train"])
    assert losses[0][0] != losses[1][0]  # while the horizon is short
    with pytest.raises(InputError, match=r"may begin at any frame .* got airfoil"):
        small("airfoil", windows=True)
    with pytest.raises(InputError, match="horizon that begins shorter"):
        dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, horizon=None))


@pytest.mark.parametrize("name", ["electro", "magneto-aug"])
def test_a_step_on_a_ragged_batch_is_the_mean_of_steps_on_its_samples(name, tmp_path, float64):
    recipe = small(name)
    data = open_data(recipe, tmp_path / "data")
    samples = [data[i].to(torch.float64) for i in range(4)]
    assert len({sample.input.points for sample in samples}) > 1
    torch.manual_seed(0)
    operator = Operator(recipe.model.build(data.spec), recipe.normalization).fit(data).eval()  # no dropout

    def gradients(batch: Batch) -> torch.Tensor:
        operator.zero_grad()
        recipe.training.loss(operator, batch, data.spec.out_times)[0].backward()
        return torch.cat([p.grad.flatten() for p in operator.parameters() if p.grad is not None])

    together = gradients(collate(samples))
    alone = torch.stack([gradients(collate([sample])) for sample in samples]).mean(0)
    assert float((together - alone).norm()) < 1e-10 * float(alone.norm())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "steps"), [("electro", 2000), ("magneto-aug", 2000), ("airfoil", 600)])
def test_a_recipe_learns_eight_samples_by_heart(name, steps, tmp_path):
    recipe = small(name)
    settings = dataclasses.replace(
        recipe.training, steps=steps, batch=8, evaluate_every=steps, checkpoint_every=steps, log_every=1000,
        optimizer=dataclasses.replace(recipe.training.optimizer, kind="muon", rate=2e-3, weight_decay=0.0),
    )  # fmt: skip
    recipe = dataclasses.replace(
        recipe,
        training=settings,
        data=Data(train=8, test=1),
        model=dataclasses.replace(
            recipe.model,
            encoder=dataclasses.replace(recipe.model.encoder, lift_dropout=0.0),
            query=dataclasses.replace(recipe.model.query, source_dropout=0.0),
        ),
    )
    data = open_data(recipe, tmp_path / "data")
    seen = data.split("train")
    outcome = train(recipe, tmp_path / "run", (seen, seen), quiet=True, tensorboard=False)
    assert outcome.scores is not None
    assert outcome.scores.error < 0.01


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
