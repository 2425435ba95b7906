"""The same code on a GPU: same data, same answers, same training, within what its arithmetic allows."""

import dataclasses

import pytest
import torch

from oformer.engine.runners import Plain
from oformer.fields import collate
from oformer.models import Operator
from oformer.predict import Predictor
from oformer.problems import Burgers, Darcy
from oformer.problems.navier_stokes import INSTANCES
from oformer.solvers.vorticity_spectral import solve
from oformer.training.find_data import open_data
from oformer.training.journal import read_journal
from oformer.training.loop import train
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.gpu


def test_generated_samples_agree_with_the_cpu():
    problem = Burgers(points=1024)
    here, there = (problem.samples(range(8), 0, device) for device in ("cpu", "cuda"))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.input.values, b.input.values)
        torch.testing.assert_close(a.target, b.target, rtol=1e-9, atol=1e-11)


def test_darcy_agrees_with_the_cpu():
    problem = Darcy(points=85)
    here, there = (problem.samples(range(4), 0, device) for device in ("cpu", "cuda"))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.input.values, b.input.values)
        torch.testing.assert_close(a.target, b.target, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("points", [64, 128, 256])
def test_navier_stokes_by_fused_and_plain_steps(points):
    """Both within what float32 costs, and the fused ones with the same bits in any batch."""
    problem = dataclasses.replace(INSTANCES["ns-mix"], solver_points=points)
    state = {name: value.cuda() for name, value in problem.draw(range(5), 0).items()}
    settings = {"viscosity": state["viscosity"], "times": [1.0, 2.0], "time_step": 0.005}
    exact = solve(state["initial"], **settings)
    initial = state["initial"].float()
    fused, plain = (solve(initial, **settings, fused=fused) for fused in (True, False))
    assert torch.equal(fused, solve(initial, **settings))
    size = exact.norm()
    assert (fused - exact).norm() < 2e-5 * size
    assert (plain - exact).norm() < 2e-5 * size
    alone = solve(initial[3:4], **{**settings, "viscosity": state["viscosity"][3:4]})
    assert torch.equal(alone[0], fused[3])


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_an_operator_answers_as_on_the_cpu(tiny_data, precision, tolerance):
    recipe = tiny_recipe()
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data).eval()
    batch = collate([tiny_data[0], tiny_data[1]])
    with torch.no_grad():
        expected = operator(batch.input, batch.query)
        moved = batch.to("cuda")
        answer = Plain(operator.cuda(), precision)(moved.input, moved.query).cpu()
    assert (answer - expected).norm() < tolerance * expected.norm()


def test_training_runs_stops_and_goes_on_there(tmp_path):
    recipe = tiny_recipe(steps=30, precision="tf32", compile=False)  # shape checks cannot be compiled
    data = open_data(recipe, tmp_path / "data", device="cuda")
    splits = data.split("train"), data.split("test")
    first = train(recipe, tmp_path / "run", splits, device="cuda", stop_after=0.0, quiet=True, tensorboard=False)
    last = train(recipe, tmp_path / "run", splits, device="cuda", quiet=True, tensorboard=False)
    assert (first.step, last.step) == (1, 30)
    losses = [r["loss"] for r in read_journal(tmp_path / "run") if r["kind"] == "train"]
    assert len(losses) == 30
    assert sum(losses[-5:]) < sum(losses[:5])
    answer = Predictor(tmp_path / "run", "cuda")(data[0].input)
    assert answer.values.device.type == "cpu"
    assert bool(torch.isfinite(answer.values).all())
