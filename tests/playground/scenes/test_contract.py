"""Scenes: what is drawn is what the problem would have drawn, and the solver's answer is the problem's."""

import dataclasses

import pytest
import torch

from oformer.metrics import relative_l2
from oformer.playground.requests import check_json
from oformer.playground.scenes import scene_of
from oformer.playground.scenes.base import SEED, Scene

KINDS = ("burgers", "darcy", "navier-stokes", "electrostatics", "magnetostatics", "airfoil")


@pytest.fixture(params=KINDS)
def scene(request, service) -> Scene:
    found = service.models[request.param].scene
    assert found is not None
    return found


def test_every_problem_has_a_scene_whose_examples_keep_its_schema(scene):
    for index in (0, 1, 4):
        state = scene.example(index)
        check_json(state, scene.schema)
        assert state == scene.example(index)
    assert scene.resolution in scene.resolutions
    assert scene.solver


def test_the_input_is_what_the_operator_was_built_for(scene):
    state, spec = scene.example(0), scene.spec
    known = scene.known(state)
    assert known.input.coords.shape[1] == spec.dim
    assert known.input.values.shape[0] == spec.in_times
    assert known.input.values.shape[2] == spec.in_channels
    for resolution in scene.resolutions:
        places = scene.places(state, resolution)
        assert places.query.values.shape[2] == spec.query_channels
        if resolution == scene.resolution:
            solution = scene.solve(state, resolution)
            assert solution.shape == (spec.out_times, places.query.points, spec.out_channels)
            assert bool(torch.isfinite(solution).all())


def test_the_page_is_told_of_states_unlike_those_of_training(service, monkeypatch):
    """Whichever sensors see them."""
    operator, state = service.models["burgers"].predictor.operator, service.models["burgers"].scene.example(0)
    monkeypatch.setattr(operator, "seen", dataclasses.replace(operator.seen, samples=1000))
    large = max(map(abs, state["values"]))
    high = {"values": [3 * value / large for value in state["values"]]}
    for sensors in ({}, {"share": 0.3}):
        assert not service.play("burgers", state, sensors)["unseen"]
        assert "input channel 0 from -" in service.play("burgers", high, sensors)["unseen"]


@pytest.mark.parametrize("name", ["burgers", "darcy", "navier-stokes"])
def test_at_the_points_of_training_it_is_a_sample_of_the_problem(name, service):
    """Input and solution of a drawn state, against `Problem.samples` thinned as the recipe views it."""
    scene = service.models[name].scene
    (sample,) = scene.problem.samples([3], SEED)
    state = scene.example(3)
    known, solution = scene.known(state), scene.solve(state, scene.resolution)
    rows = known.usual
    if name == "darcy":  # painted on the grid of training: cells between its points are those of the nearest
        expected = scene.problem.solve({"coefficient": known.input.values.view(1, 29, 29)})[0].target[:, rows]
        torch.testing.assert_close(known.input.values[:, rows], sample.input.values[:, rows])
    else:
        expected = sample.target[:, rows]
        torch.testing.assert_close(known.input.values[:, rows], sample.input.values[:, rows], atol=1e-4, rtol=0)
    error = relative_l2(solution[None], expected[None], torch.full((1, len(rows)), 1 / len(rows)))
    assert float(error) < 1e-4
    torch.testing.assert_close(scene.places(state, scene.resolution).query.coords, known.input.coords[rows])


def test_what_has_no_problem_has_no_scene(predictors):
    spec = predictors["burgers"].spec
    assert scene_of(None, spec) is None
    assert scene_of({"problem": None}, spec) is None
    assert scene_of({"problem": {"type": "Unheard"}}, spec) is None
