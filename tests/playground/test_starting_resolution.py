"""The sensors and the resolution that the page begins with."""

import dataclasses
import math

import pytest
import torch

from oformer.checkpoint import zoo_names
from oformer.config import to_json
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field
from oformer.models import Operator
from oformer.playground.api import Service
from oformer.playground.scenes import scene_of
from oformer.playground.starting_resolution import AT_ONCE, Start, operations, start_of
from oformer.predict import Predictor
from tests.playground.conftest import FAMILIES


def untrained(recipe: str, predictor: Predictor) -> Predictor:
    """The full-size operator of a recipe, with random weights."""
    problem, view = RECIPES[recipe].problem, RECIPES[recipe].data.view
    assert problem is not None
    spec = view.apply_to_spec(problem.spec)
    operator = Operator(RECIPES[recipe].model.build(spec), RECIPES[recipe].normalization)
    content = dataclasses.replace(predictor.checkpoint, operator=operator, recipe={"problem": to_json(problem)})
    return Predictor(content, "cpu", warn=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_estimated_well_enough_to_choose(name, predictors):
    """Against those that torch counts in the products of matrices of the paper's operator."""
    from torch.utils.flop_counter import FlopCounterMode

    predictor, sensors, queries = untrained(FAMILIES[name][0], predictors[name]), 400, 300
    spec = predictor.spec
    known = Field.of(torch.rand(sensors, spec.dim), torch.zeros(spec.in_times, sensors, spec.in_channels))
    query = Field.of(torch.rand(queries, spec.dim), torch.zeros(1, queries, spec.query_channels))
    with FlopCounterMode(display=False) as counter:
        predictor(known, query)
    assert 0.6 < operations(predictor, sensors, queries) / counter.get_total_flops() < 1.6


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("darcy-141", (2, 141, True)),
        ("ns2-part", (1, 32, True)),
        ("ns1", (1, 32, True)),
        ("burgers-2048", (1, 512, False)),
        ("electro", (1, 1, False)),
        ("airfoil", (1, 1, False)),
    ],
)
def test_large_operators_begin_with_fewer_points_and_small_ones_with_all(recipe, expected, predictors):
    """As in the table of docs/serving.md; on a GPU, nothing is left out."""
    predictor = untrained(recipe, next(iter(predictors.values())))
    scene = scene_of(predictor.checkpoint.recipe, predictor.spec)
    assert scene is not None
    start = start_of(scene, predictor)
    assert (start.stride, start.resolution, start.reduced) == expected
    assert not start_of(scene, predictor, math.inf).reduced
    least = start_of(scene, predictor, most=1.0)
    assert least == Start(1, 1.0, scene.resolution, start.full, start.full) or least.operations <= start.full / 2


@pytest.mark.parametrize("name", zoo_names())
def test_shipped_operators_begin_with_an_answer_that_comes_at_once(name):
    """Or with all points, within a second on two cores, where nothing that could be left out would help."""
    predictor = Predictor(f"zoo:{name}", "cpu", warn=False)
    (served,) = Service({name: predictor}).models.values()
    if served.scene is not None:
        start = start_of(served.scene, predictor)
        assert start.operations <= AT_ONCE * (1 if start_of(served.scene, predictor, 1.0).reduced else 2.5)


def test_the_first_answer_is_made_in_advance_and_not_again(predictors, monkeypatch):
    """For each family: the answer that warming up has made is the one that the page asks for first."""
    for name, predictor in predictors.items():
        service = Service({name: predictor})
        service.warm(name)
        calls = []
        monkeypatch.setattr(type(predictor), "_answer", lambda *rest, calls=calls: calls.append(rest))
        play = service.describe(name)["play"]
        marks = {name: play["draft"][name] for name in ("share", "stride")}
        service.play(name, service.draw(name, 0), marks, play["draft"]["resolution"], draft=True)
        monkeypatch.undo()
        assert not calls
