"""Random changes of a batch depend on seed, step, purpose and, where samples are shared out, on the rank alone."""

import itertools

import pytest
import torch

from oformer.errors import InputError
from oformer.fields import collate
from oformer.models import Operator
from oformer.training.distributed import ALONE, Ranks
from oformer.training.losses import Loss
from oformer.training.perturb import DROPOUT, DROPPED_POINTS, FIRST_FRAME, NOISE, QUERIES, SYMMETRY, Draws, perturbed
from oformer.training.recipe import Training
from oformer.training.schedules import Drop
from tests.tiny import tiny_recipe

PURPOSES = (SYMMETRY, DROPPED_POINTS, DROPOUT, FIRST_FRAME, NOISE, QUERIES)


def number(draws: Draws, purpose: int) -> int:
    return draws.generator(purpose).initial_seed()


def test_each_step_purpose_and_seed_draws_on_its_own_and_the_same_again():
    keys = list(itertools.product((1, 2), (0, 7), PURPOSES))
    numbers = [number(Draws(seed, step, ALONE), purpose) for seed, step, purpose in keys]
    assert len(set(numbers)) == len(keys)
    assert numbers == [number(Draws(seed, step, ALONE), purpose) for seed, step, purpose in keys]


def test_ranks_draw_differently_for_other_samples_and_alike_for_points_of_the_same():
    for split, alike in (("samples", False), ("points", True)):
        one, two = (number(Draws(1, 7, Ranks(rank, 2, split)), SYMMETRY) for rank in (0, 1))
        assert (one == two) == alike


def test_dropout_of_several_ranks_is_seeded_by_step_and_rank_and_that_of_one_process_goes_on():
    def drawn(ranks: Ranks, step: int) -> float:
        torch.manual_seed(0)
        Draws(1, step, ranks).seed_dropout()
        return float(torch.rand(()))

    for split in ("samples", "points"):
        draws = [drawn(Ranks(rank, 2, split), step) for rank in (0, 1) for step in (3, 4)]
        assert len(set(draws)) == 4
    torch.manual_seed(0)
    assert drawn(ALONE, 3) == drawn(ALONE, 4) == float(torch.rand((), generator=torch.Generator().manual_seed(0)))


def test_a_batch_is_changed_as_the_recipe_asks_and_the_same_again(tiny_data):
    recipe = tiny_recipe(noise=0.1, drop=Drop(probability=1.0, keep=(0.5, 0.5)))
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    batch = collate([tiny_data[i] for i in range(4)])
    one, again, later = (
        perturbed(batch, 1, recipe, operator, Draws(1, step, ALONE), few_shapes=False) for step in (3, 3, 4)
    )
    assert one.input.points == 16
    assert torch.equal(one.input.values, again.input.values)
    assert not torch.equal(one.input.values, later.input.values)
    assert not torch.equal(one.target, batch.target)  # a symmetry changes both
    still = tiny_recipe(augment=False, drop=None)
    assert perturbed(batch, 1, still, operator, Draws(1, 3, ALONE), few_shapes=False) is batch


def test_few_shapes_round_the_points_up_to_an_eighth(tiny_data):
    recipe = tiny_recipe(augment=False, drop=Drop(probability=1.0, keep=(0.55, 0.55)))
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    batch = collate([tiny_data[i] for i in range(4)])
    plain, rounded = (
        perturbed(batch, 1, recipe, operator, Draws(1, 3, ALONE), few_shapes=few) for few in (False, True)
    )
    kept = plain.input.points
    assert kept % 4
    assert rounded.input.points == -(-kept // 4) * 4  # an eighth of 32 points
    assert torch.equal(rounded.input.values[:, :, :kept], plain.input.values)
    assert not rounded.input.weights[:, kept:].any()


def test_fewer_queries_keep_their_targets_and_the_mean_of_the_loss(tiny_data):
    recipe = tiny_recipe(augment=False, drop=None, queries=0.25, loss=Loss())
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    batch = collate([tiny_data[i] for i in range(4)])
    squares = []
    for step in range(400):
        some = perturbed(batch, 1, recipe, operator, Draws(1, step, ALONE), few_shapes=False)
        assert some.query.points == batch.query.points // 4
        same = (some.query.coords[:, :, None] == batch.query.coords[:, None]).all(-1)  # (batch, chosen, points)
        assert same.sum(2).eq(1).all()
        rows = same.int().argmax(2)[:, None, :, None].expand_as(some.target)
        assert torch.equal(some.target, batch.target.gather(2, rows))
        squares.append((some.target.square() * some.query.weights[:, None, :, None]).sum((1, 2, 3)))
    expected = (batch.target.square() * batch.query.weights[:, None, :, None]).sum((1, 2, 3))
    torch.testing.assert_close(torch.stack(squares).mean(0), expected, rtol=0.05, atol=0)


def test_fewer_queries_and_derivatives_exclude_each_other():
    with pytest.raises(InputError, match=r"all query points for a loss with derivatives.*got training.queries 0.5"):
        Training(steps=1, queries=0.5, loss=Loss(derivative=0.1))
