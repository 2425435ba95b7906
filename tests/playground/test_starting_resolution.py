"""Operations of a prediction, and the sensors and resolution that the page begins with."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from oformer.checkpoint import zoo_names
from oformer.config import to_json
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field
from oformer.playground.api import Service
from oformer.playground.scenes import scene_of
from oformer.playground.scenes.base import Sensors
from oformer.playground.starting_resolution import AT_ONCE, Cost, Start, start_of
from oformer.predict import Predictor
from tests.playground.conftest import FAMILIES


def counted(predictor: Predictor, sensors: int, queries: int) -> float:
    spec = predictor.spec
    values = torch.zeros(spec.in_times, sensors, spec.in_channels)
    query = Field.of(torch.rand(queries, spec.dim), torch.zeros(1, queries, spec.query_channels))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predictor(Field.of(torch.rand(sensors, spec.dim), values), query)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
def test_any_size_costs_what_six_small_ones_say(name, predictors):
    cost = Cost(predictors[name])
    for sensors, queries in ((50, 30), (7, 120)):
        assert cost(sensors, queries) == pytest.approx(counted(predictors[name], sensors, queries), rel=1e-9)


def test_pairs_of_points_are_counted_where_attention_looks_at_each(predictors):
    checkpoint = predictors["darcy"].checkpoint
    model = dataclasses.replace(checkpoint.operator.model.config, attention="softmax")
    operator = copy.deepcopy(checkpoint.operator)
    operator.model = model.build(operator.spec)
    predictor = Predictor(dataclasses.replace(checkpoint, operator=operator), "cpu", warn=False)
    assert Cost(predictor)(200, 100) == pytest.approx(counted(predictor, 200, 100), rel=1e-9)
    assert Cost(predictor)(20_000, 1) > 1.5 * 100 * Cost(predictor)(200, 1)


def start(recipe: str, per_sensor: float, per_query: float, most: float = AT_ONCE) -> Start:
    """For a full-size scene and an operator whose cost is known."""
    problem, view = RECIPES[recipe].problem, RECIPES[recipe].data.view
    assert problem is not None
    scene = scene_of({"problem": to_json(problem)}, view.apply_to_spec(problem.spec))
    assert scene is not None
    return start_of(scene, lambda sensors, queries: per_sensor * sensors + per_query * queries, most)


def test_large_operators_begin_with_fewer_points_and_small_ones_with_all():
    """Per point as counted on the paper's layouts."""
    darcy = start("darcy-141", 4.17e6, 1.90e6)
    assert (darcy.stride, darcy.share, darcy.resolution, darcy.reduced) == (2, 1.0, 70, True)
    flow = start("ns2-part", 1.66e6, 23.5e6)
    assert (flow.stride, flow.resolution, flow.reduced) == (1, 32, True)
    small = start("burgers-2048", 0.83e6, 0.56e6)
    assert (small.stride, small.resolution, small.reduced) == (1, 512, False)
    charges = start("electro", 0.24e6, 0.18e6)
    assert (charges.stride, charges.share, charges.resolution, charges.reduced) == (1, 1.0, 1, False)
    foil = start("airfoil", 10e6, 4e6)
    assert foil.share < 1
    assert foil.operations <= AT_ONCE


def test_no_sensors_are_left_out_for_little():
    """Per point as counted on the airfoil's layout: a tenth of the sensors would save a twelfth of the work."""
    foil = start("airfoil", 1.61e6, 16.7e6)
    assert foil.full > AT_ONCE
    assert (foil.stride, foil.share, foil.resolution, foil.reduced) == (1, 1.0, 1, False)


@pytest.mark.parametrize("name", zoo_names())
def test_what_is_shipped_begins_with_what_comes_at_once(name):
    predictor = Predictor(f"zoo:{name}", "cpu", warn=False)
    (served,) = Service({name: predictor}).models.values()
    if served.scene is not None and start_of(served.scene, Cost(predictor), most=1.0).reduced:
        assert served.start.operations <= AT_ONCE
    elif served.scene is not None:  # nothing that could be left out would help: all of it, within a second on two cores
        assert served.start.operations <= 2 * AT_ONCE


def test_the_first_answer_is_made_in_advance_and_not_again(predictors, monkeypatch):
    """For each family: what warming up has answered is what the page asks first."""
    for name, predictor in predictors.items():
        service = Service({name: predictor})
        for job in service.warm(name):
            job()
        calls = []
        monkeypatch.setattr(type(predictor), "__call__", lambda self, *rest, calls=calls: calls.append(rest))
        play = service.describe(name)["play"]
        monkeypatch.undo()
        assert not calls  # what it costs is known by then
        monkeypatch.setattr(type(predictor), "_answer", lambda *rest, calls=calls: calls.append(rest))
        marks = Sensors(play["draft"]["share"], 0, (), (), play["draft"]["stride"])
        service.play(name, service.draw(name, 0), marks, play["draft"]["resolution"], draft=True)
        monkeypatch.undo()
        assert not calls


def test_a_gpu_leaves_nothing_out_and_what_never_fits_is_the_least():
    assert not start("darcy-141", 4.17e6, 1.90e6, most=math.inf).reduced
    least = start("darcy-141", 4.17e6, 1.90e6, most=1.0)
    assert (least.stride, least.resolution) == (8, 35)
