"""Scenes: what is drawn is what the problem would have drawn, and the solver's answer is the problem's."""

import dataclasses

import numpy as np
import pytest
import torch

from oformer.config import to_json
from oformer.errors import InputError, SolverDiverged
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.metrics import relative_l2
from oformer.playground.scenes import SEED, Known, Scene, Sensors, scene_of
from oformer.playground.starts import read_starts, save_starts
from oformer.playground.wire import check_json
from oformer.problems import Airfoil, NavierStokes

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


def test_a_lifted_curve_is_told_from_those_of_training(service):
    scene = service.models["burgers"].scene
    state = scene.example(0)
    assert not scene.unseen(state)
    assert "a mean of 0.2" in scene.unseen({"values": [value + 0.2 for value in state["values"]]})


def test_the_page_is_told_of_states_unlike_those_of_training(service, monkeypatch):
    """Whichever sensors see them."""
    operator, state = service.models["burgers"].predictor.operator, service.models["burgers"].scene.example(0)
    monkeypatch.setattr(operator, "seen", dataclasses.replace(operator.seen, samples=1000))
    large = max(map(abs, state["values"]))
    high = {"values": [3 * value / large for value in state["values"]]}
    for sensors in (Sensors(), Sensors(share=0.3)):
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


@pytest.mark.parametrize("name", ["electrostatics", "magnetostatics"])
def test_sources_are_placed_where_they_are_asked_for(name, service):
    scene = service.models[name].scene
    state = {**scene.example(0), "sources": [[0.1, 0.1], [0.9, 0.2]], "turn": 0}
    known = scene.known(state).input
    charged = known.coords[known.values[0, :, 2] == 1]
    distances = torch.cdist(charged, torch.tensor(state["sources"], dtype=torch.float64)).amin(1)
    assert len(charged) >= 2
    assert float(distances.max()) < 0.0708 + 0.07  # the disc, and half an edge to the node that is its center
    assert float(scene.known({**state, "sources": []}).input.values[0, :, 2].abs().max()) == 0
    assert float(scene.solve({**state, "sources": []}, 1).abs().max()) < 1e-12


def test_a_turned_shape_has_the_turned_solution(service):
    """The potential moves with the domain, the field turns with it."""
    scene = service.models["electrostatics"].scene
    state = scene.example(0)
    straight = scene.solve(state, 1)
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    turn = torch.tensor([[c, -s], [s, c]])
    centers = (torch.tensor(state["sources"], dtype=torch.float64) - 0.5) @ turn.mT + 0.5
    turned = scene.solve({**state, "turn": 30, "sources": centers.tolist()}, 1)
    torch.testing.assert_close(turned[..., 0], straight[..., 0], atol=1e-8, rtol=0)
    torch.testing.assert_close(turned[..., 1:], straight[..., 1:] @ turn.mT, atol=1e-7, rtol=0)
    assert "turned" in scene.unseen({**scene.example(1), "shape": "square", "numbers": [15.0, 0, 0], "turn": 30})
    assert scene.unseen(state) == "training had no U"


def test_a_finer_mesh_has_the_old_nodes_and_middles_that_touch_the_border(service):
    scene = service.models["electrostatics"].scene
    state = {"shape": "disc", "numbers": [15.0, 0.0, 0.0], "turn": 0, "sources": [[0.4, 0.6]]}
    coarse, fine = (scene.places(state, level).query for level in (1, 2))
    torch.testing.assert_close(fine.coords[: coarse.points], coarse.coords)
    assert fine.points > 3 * coarse.points
    rim = (fine.coords - 0.5).norm(dim=1) > 0.5 - 1e-9
    assert bool((fine.values[0, rim, 0] == 1).all())
    values = scene.solve(state, 2)
    assert float(values[0, rim, 0].abs().max()) < 1e-12  # held at zero, between nodes too
    torch.testing.assert_close(values[:, : coarse.points], scene.solve(state, 1))


def test_stirring_adds_vorticity_of_no_mean_and_is_called_new(service):
    scene = service.models["navier-stokes"].scene
    state = scene.example(2)
    stirred = {**state, "vortices": [[0.25, 0.5, 1.0], [0.98, 0.02, -0.5]]}
    plain, changed = (scene._drawn(s, scene.problem)["initial"][0] for s in (state, stirred))
    difference = changed - plain
    assert abs(float(changed.mean())) < 1e-12
    n = len(difference)
    peak = np.unravel_index(int(difference.argmax()), difference.shape)
    assert peak == (n // 4, n // 2)
    assert scene.unseen(stirred)
    assert not scene.unseen(state)
    assert not torch.equal(scene.known(stirred).input.values, scene.known(state).input.values)


def test_a_draft_is_nearly_the_input(service):
    """At half the points, with the same steps: the tiny problem's are long already."""
    scene = service.models["navier-stokes"].scene
    state = scene.example(1)
    exact, draft = scene.known(state), scene.draft(state)
    assert draft.input.points < exact.input.points
    torch.testing.assert_close(draft.input.coords[draft.usual], exact.input.coords[exact.usual])
    near, far = draft.input.values[:, draft.usual], exact.input.values[:, exact.usual]
    error = float((near - far).norm() / far.norm())
    assert 0 < error < 0.05


def test_a_draft_that_diverges_is_the_input_itself(service, monkeypatch):
    scene = service.models["navier-stokes"].scene
    state, solve = scene.example(1), NavierStokes.solve

    def fails(self, drawn):
        if self.points < scene.problem.points:
            raise SolverDiverged("too coarse a one", 1, 0.5, 1e9)
        return solve(self, drawn)

    monkeypatch.setattr(NavierStokes, "solve", fails)
    torch.testing.assert_close(scene.draft(state).input.values, scene.known(state).input.values)


def test_first_frames_from_the_package_are_those_of_the_solver():
    """Of one stream, one step after the start: the later frames take the solver a minute."""
    problem = Airfoil()
    scene = scene_of({"problem": to_json(problem)}, problem.spec)
    assert scene is not None
    streams = scene.facts()["ready"]
    assert len(streams) == 28
    mach, angle = streams[20]
    known = scene.known({"mach": mach, "angle": angle})
    solved = scene._march({"mach": mach, "angle": angle}, [0])  # pyright: ignore[reportAttributeAccessIssue]
    first = known.input.values[:1, :, :4]
    change = (solved - solved.mean(1, keepdim=True)).norm(dim=1)
    error = (first - solved).norm(dim=1) / change
    assert float(error.max()) < 2e-3  # half precision, of what differs from the free stream
    assert known.input.values.shape == (4, len(known.usual), 7)


def test_first_frames_are_written_and_read_in_half_precision(tmp_path, service):
    problem, streams = service.models["airfoil"].scene.problem, ((0.3, -10.0), (0.6, 20.0))
    save_starts(tmp_path / "starts", problem, streams)
    mach, angle = torch.tensor(streams, dtype=torch.float64).unbind(1)
    samples = problem.solve({"mach": mach, "angle": angle})
    for (key, values), sample in zip(read_starts(tmp_path / "starts").items(), samples, strict=True):
        solved = sample.input.values[..., :4]
        assert key in streams
        assert values.shape == solved.shape
        assert float(((values - solved).norm(dim=(0, 1)) / solved.std((0, 1))).max()) < 1e-3 * solved.shape[1] ** 0.5


def sensors_on_a_line(**marks) -> Field:
    known = Known(Field.of(torch.arange(8.0)[:, None] / 8, torch.arange(8.0)[None, :, None]), torch.arange(0, 8, 2))
    return Sensors(**marks).of(known, Spec(1, 1, 1, 1, 1, grid=(4,), periods=(1.0,)))


def test_sensors_are_chosen_erased_and_added():
    assert sensors_on_a_line().values.flatten().tolist() == [0, 2, 4, 6]
    assert sensors_on_a_line(erased=((0.5, 0.2),)).values.flatten().tolist() == [0, 2, 6]
    added = sensors_on_a_line(added=((0.4,), (0.41,)))
    assert added.values.flatten().tolist() == [0, 2, 3, 4, 6]
    # Weights are half-gaps around the period: unequal once the points are.
    torch.testing.assert_close(added.weights, torch.tensor([2.0, 1.5, 1.0, 1.5, 2.0]) / 8)
    assert sensors_on_a_line(stride=2).values.flatten().tolist() == [0, 4]
    assert sensors_on_a_line(stride=2, added=((0.3,),)).values.flatten().tolist() == [0, 2, 4]
    half = sensors_on_a_line(share=0.5, seed=3)
    assert half.points == 2
    torch.testing.assert_close(half.coords, sensors_on_a_line(share=0.5, seed=3).coords)
    with pytest.raises(InputError, match="at least one sensor"):
        sensors_on_a_line(erased=((0.5, 5.0),))


def test_sensors_of_the_plane_answer_for_those_that_are_missing():
    """Each weighs its cell; where all are there, or a stride leaves every other one, all weigh the same."""
    known = Known(
        Field.of(periodic_grid((4, 4), (1.0, 1.0)).float(), torch.arange(16.0)[None, :, None]), torch.arange(16)
    )
    spec = Spec(2, 1, 1, 1, 1, grid=(4, 4), periods=(1.0, 1.0))
    for sensors, count in ((Sensors(), 16), (Sensors(stride=2), 4)):
        torch.testing.assert_close(sensors.of(known, spec).weights, torch.full((count,), 1 / count))
    erased = Sensors(erased=((0.0, 0.0, 0.1),)).of(known, spec)
    nearest = torch.isin(erased.values.flatten(), torch.tensor([1.0, 3.0, 4.0, 12.0]))  # two of them across the period
    torch.testing.assert_close(erased.weights * 16, torch.where(nearest, 1.25, 1.0))
    few = Sensors(share=0.4, seed=1).of(known, spec)
    assert few.points == 6
    assert len(set(few.weights.tolist())) > 1
    assert float(few.weights.sum()) == pytest.approx(1)


def test_what_has_no_problem_has_no_scene(predictors):
    spec = predictors["burgers"].spec
    assert scene_of(None, spec) is None
    assert scene_of({"problem": None}, spec) is None
    assert scene_of({"problem": {"type": "Unheard"}}, spec) is None


def test_shapes_that_cannot_be_meshed_are_refused(service):
    scene = service.models["electrostatics"].scene
    for shape, numbers in (
        ("square", [0.0, 0, 0]),
        ("disc", [1.0, 0, 0]),
        ("annulus", [0.3, 0.0, 0.0]),
        ("l", [0.0, 0.5, 0]),
    ):
        with pytest.raises(InputError):
            scene.known({"shape": shape, "numbers": numbers, "turn": 0, "sources": []})
