"""Random changes of a training batch: symmetries of the problem, first frames, noise, dropped points, fewer queries.

Each change draws from a generator of its own, keyed by (seed, step, purpose). A step that is done again after an
interruption sees the same batch.
"""

import dataclasses
from dataclasses import dataclass

import torch

from oformer.data.loader import padded
from oformer.fields import Batch
from oformer.meshes.subsets import keep_points
from oformer.models import Operator
from oformer.seeds import torch_generator
from oformer.training.distributed import Ranks
from oformer.training.recipe import Recipe
from oformer.training.schedules import Drop, begin_later, with_noise

# Purposes of the draws of a step.
SYMMETRY, DROPPED_POINTS, DROPOUT, FIRST_FRAME, NOISE, QUERIES = range(6)


@dataclass(frozen=True)
class Draws:
    """The random generators of one training step, by purpose."""

    seed: int
    step: int
    ranks: Ranks

    def generator(self, purpose: int) -> torch.Generator:
        """A generator for a change of the batch.

        Ranks that hold different samples draw on their own; those that hold points of the same samples draw alike.
        """
        key = () if self.ranks.share == (0, 1) else (self.ranks.rank,)
        return torch_generator(self.seed, self.step, purpose, *key)

    def seed_dropout(self) -> None:
        """Seed torch's own generator, from which dropout draws, where several ranks must draw differently."""
        if self.ranks.world > 1:
            torch.manual_seed(torch_generator(self.seed, self.step, DROPOUT, self.ranks.rank).initial_seed())


def perturbed(batch: Batch, times: int, recipe: Recipe, operator: Operator, draws: Draws, *, few_shapes: bool) -> Batch:
    """The batch with all random changes that the recipe asks for.

    Args:
        batch: this rank's samples, on the device.
        times: number of frames to predict.
        recipe: whose training settings and problem.
        operator: whose input scale is the unit of noise, and whose spec knows the periods.
        draws: the generators of the step.
        few_shapes: round the number of points that dropping leaves, since each new shape costs time.
    """
    settings = recipe.training
    if settings.augment and recipe.problem is not None:
        batch = recipe.problem.augment(batch, draws.generator(SYMMETRY))
    if settings.windows:
        batch = begin_later(batch, times, draws.generator(FIRST_FRAME))
    if settings.noise:
        batch = with_noise(batch, settings.noise, operator.input_scale.scale, draws.generator(NOISE))
    if settings.drop is not None:
        batch = _dropped(batch, settings.drop, operator, draws, few_shapes)
    if settings.queries < 1:
        batch = _fewer_queries(batch, settings.queries, draws)
    return batch


def _fewer_queries(batch: Batch, share: float, draws: Draws) -> Batch:
    """The batch with a random share of the queries of each sample, which stand for all of them in the loss."""
    everywhere = batch.query, batch.query.with_values(batch.target)
    query, target = (keep_points(field, share, draws.generator(QUERIES)) for field in everywhere)
    return dataclasses.replace(batch, query=query, target=target.values)


def _dropped(batch: Batch, drop: Drop, operator: Operator, draws: Draws, few_shapes: bool) -> Batch:
    """The batch with fewer input points, padded to a multiple of an eighth of them where few shapes are wanted."""
    points = batch.input.points
    batch = drop(batch, draws.generator(DROPPED_POINTS), operator.spec.periods)
    if not few_shapes:
        return batch
    eighth = -(-points // 8)
    return padded(batch, (-(-batch.input.points // eighth) * eighth, batch.query.points))
