"""What is measured is what is meant: counted products, batches of the right shape, every section on a tiny case."""

import dataclasses
import itertools
import math

import measure
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from oformer.experiments.recipes import RECIPES

CPU = torch.device("cpu")


def case(what: str, **changes) -> measure.Case:
    made = measure.Case(what, "burgers-2048", "cpu", "float32", "eager", 2, (8,), 1)
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("ns2-full", 104.5e9, 207.8e9), ("darcy-141", 139.9e9, 277.1e9), ("burgers-2048", 3.6e9, 7.1e9)],
)
def test_products_are_at_most_as_many_as_were_counted_in_the_released_code(name, forward, backward):
    """Of one sample at the recipe's own grid; attention forms its small matrices first, which saves some."""
    recipe = RECIPES[name]
    spec = recipe.data_spec()
    points = math.prod(spec.grid)
    assert 0.75 * forward < measure.prediction_flops(recipe, spec, 1, points) <= 1.01 * forward
    whole = forward + backward
    assert 0.75 * whole < measure.training_flops(recipe, spec, 1, points) <= 1.01 * whole


@pytest.mark.parametrize("name", ["burgers-2048", "electro"])
def test_products_are_counted_alike_from_other_numbers_of_points(name, monkeypatch):
    """Which is why they may be counted on few."""
    recipe = RECIPES[name]
    few = measure.training_flops(recipe, recipe.data_spec(), 2, 1000)
    monkeypatch.setattr(measure, "FEW", 7)
    assert measure.training_flops(recipe, recipe.data_spec(), 2, 1000) == pytest.approx(few, rel=1e-12)


def test_the_random_batch_has_the_shape_of_the_recipe_and_shares_its_grid():
    spec = dataclasses.replace(RECIPES["ns2-full"].data_spec(), grid=(4, 4))
    batch = measure.random_batch(spec, 3, CPU, 16)
    assert batch.input.values.shape == (3, 10, 16, 1)
    assert batch.target.shape == (3, 20, 16, 1)
    assert batch.query.coords.shape == (3, 16, 2)
    assert batch.query.coords.stride(0) == 0  # as in training, where a shared grid is stored once


def test_the_random_batch_of_a_mesh_has_points_of_its_own_and_codes():
    batch = measure.random_batch(RECIPES["airfoil"].data_spec(), 2, CPU, 9)
    assert batch.input.values.shape == (2, 4, 9, 7)
    assert set(batch.input.values[..., -1].unique().tolist()) <= {0.0, 1.0, 2.0}
    assert not torch.equal(batch.query.coords[0], batch.query.coords[1])


def test_inference_is_measured_on_the_device_and_from_host_memory():
    found = list(measure.measure(case("infer"), 0.0))
    assert [n["what"] for n in found] == ["infer", "infer-host"]
    assert all(n["tflops"] > 0 and n["of_peak"] > 0 for n in found)


def test_growth_measures_each_series_at_each_size(monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 10)
    found = list(measure.measure(case("growth", sizes=(20, 40)), 0.0))
    series = ("growth-bounded", "growth-predict", "growth-train", "growth-train-chunks")
    assert [(n["what"], n["points"]) for n in found] == [(what, size) for what in series for size in ("20", "40")]
    assert all(n["milliseconds"] > 0 for n in found)


def test_growth_ends_where_memory_does(monkeypatch):
    timed = measure.Trainer.timed

    def small_card(self, batch, steps):
        if batch.input.points > 30:
            raise torch.OutOfMemoryError
        return timed(self, batch, steps)

    monkeypatch.setattr(measure.Trainer, "timed", small_card)
    found = [n for n in measure.measure(case("growth", sizes=(20, 40, 80)), 0.0) if n["what"] == "growth-train"]
    assert [(n["points"], n.get("failure")) for n in found] == [("20", None), ("40", "out of memory")]


def test_a_longer_horizon_is_more_work():
    """Counted in products: on a busy machine the shorter one may take longer."""
    found, work = [], [0]
    with FlopCounterMode(display=False) as products:
        for numbers in measure.measure(case("horizon", sizes=(1, 40)), 0.0):
            found.append((numbers["what"], numbers["times"]))
            work.append(products.get_total_flops())
    assert found == [(what, times) for what in ("horizon-predict", "horizon-train") for times in (1, 40)]
    one, forty, trained_one, trained_forty = (after - before for before, after in itertools.pairwise(work))
    assert forty > 2 * one
    assert trained_forty > 2 * trained_one


def test_a_mode_other_than_the_recipes_is_taken_from_the_case():
    recipe = dataclasses.replace(
        RECIPES["burgers-2048"],
        training=dataclasses.replace(RECIPES["burgers-2048"].training, compile=True, recompute=True),
    )
    assert measure._settings(case("train", mode="recipe"), recipe).recompute
    own = RECIPES["burgers-2048"]
    assert not measure._settings(case("train", mode="recipe"), own).recompute
    sparing = measure._settings(case("train", mode="sparing"), own)
    assert sparing == dataclasses.replace(measure._settings(case("train", mode="recipe"), own), recompute=True)
    plain = measure._settings(case("train", mode="plain"), recipe)
    assert not plain.compile
    assert not plain.recompute
    assert measure._settings(case("train", mode="compiled"), recipe).compile
