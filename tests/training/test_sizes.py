"""Recipes for data of one's own: what is learned from, and what is held out."""

import numpy as np
import pytest

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.training.recipe import Data
from oformer.training.sizes import recipe_for


def curves(count: int) -> PointDataset:
    x, values = np.linspace(0, 1, 6), np.random.default_rng(0).normal(size=(count, 6))
    return PointDataset.from_arrays(coords=x, inputs=values, targets=values)


def test_without_splits_the_last_tenth_is_held_out():
    recipe = recipe_for(curves(40), "mine")
    assert (recipe.name, recipe.data) == ("mine", Data(36, 4))
    assert (recipe.training.batch, recipe.training.steps) == (8, 1000)
    assert recipe_for(curves(2), "mine").data == Data(1, 1)


def test_one_sample_cannot_be_both_learned_from_and_tested():
    with pytest.raises(InputError, match="at least two samples, one to learn from and one to test, got 1"):
        recipe_for(curves(1), "mine")
