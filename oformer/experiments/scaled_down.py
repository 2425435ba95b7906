"""Any recipe of the paper small enough for a minute on a CPU: the same code from data to error, and no result.

Grids, samples, widths and steps shrink; kinds of layers, losses and schedules stay, and so do the changes of ablations.
"""

import dataclasses
import math
from typing import Any

from oformer.experiments.ablations import scaled
from oformer.meshes.airfoil import Naca
from oformer.models import (
    FNOConfig,
    GalerkinTransformerConfig,
    GraphNetworkConfig,
    ModelConfig,
    MWTConfig,
    OFormerConfig,
)
from oformer.problems import Airfoil, Burgers, Darcy, NavierStokes, Problem
from oformer.training.recipe import Recipe

SAMPLES, MORE_SAMPLES, TEST_SAMPLES = 64, 128, 16
STEPS = 200
# Upper bounds of the settings of baselines.
LIMITS: dict[type[ModelConfig], dict[str, int]] = {
    FNOConfig: {"width": 12, "modes": 4, "depth": 2, "head": 16, "padding": 2},
    MWTConfig: {"polynomials": 2, "channels": 2, "modes": 3, "time_modes": 2, "depth": 1, "head": 16},
    GalerkinTransformerConfig: {
        "width": 16, "feedforward": 32, "depth": 2, "channels": 8, "modes": 4, "head": 8, "coarse": 8,
    },
    GraphNetworkConfig: {"width": 16, "depth": 2, "order": 3},
}  # fmt: skip


def scaled_down(recipe: Recipe) -> Recipe:
    """The recipe with less of everything; its name ends in `-quick`."""
    data, training = recipe.data, recipe.training
    train = MORE_SAMPLES if data.train >= 2000 else SAMPLES
    limit = None if data.limit is None else max(2, data.limit * train // data.train)
    problem, points = _problem(recipe.problem, data.view.points)
    small = dataclasses.replace(
        recipe,
        name=f"{recipe.name}-quick",
        problem=problem,
        data=dataclasses.replace(
            data, train=train, test=TEST_SAMPLES, limit=limit, view=dataclasses.replace(data.view, points=points)
        ),
        training=dataclasses.replace(
            training, steps=STEPS, batch=min(training.batch, 8),
            evaluate_every=STEPS, checkpoint_every=50, log_every=10,
            horizon=training.horizon and dataclasses.replace(training.horizon, first=2),
        ),
    )  # fmt: skip
    before, after = recipe.data_spec().grid, small.data_spec().grid
    return dataclasses.replace(small, model=_model(recipe.model, after[0] / before[0] if before and after else 1.0))


def _problem(problem: Problem | None, seen: tuple[int, ...] | int | None) -> tuple[Problem | None, Any]:
    """A smaller problem, and the points per axis that the model sees of it."""
    if isinstance(problem, Burgers) and isinstance(seen, tuple):
        return dataclasses.replace(problem, points=256, solver_points=128, steps=200), (math.isqrt(2 * seen[0]),)
    if isinstance(problem, Darcy) and isinstance(seen, tuple):  # every tenth point, as far as grids allow
        return dataclasses.replace(problem, points=43), tuple(n // 10 + 1 for n in seen)
    if isinstance(problem, NavierStokes):
        return dataclasses.replace(problem, duration=14, points=16, solver_points=32, time_step=1 / 16), seen
    if isinstance(problem, Airfoil):
        mesh = Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3)
        return dataclasses.replace(problem, mesh=mesh, steps=25, stride=4), seen
    return problem, seen  # meshes of electro- and magnetostatics are small


def _model(model: ModelConfig, finer: float) -> ModelConfig:
    """A quarter of all widths; rotary angles grow with the number of points per axis, as in the recipes."""
    if not isinstance(model, OFormerConfig):
        less = {n: min(most, getattr(model, n)) for n, most in LIMITS[type(model)].items() if getattr(model, n)}
        return dataclasses.replace(model, **less)
    model = scaled(model, 1 / 4, step=8)
    encoder = dataclasses.replace(
        model.encoder, depth=2, multipliers=tuple(m * finer for m in model.encoder.multipliers)
    )
    query = dataclasses.replace(model.query, multiplier=model.query.multiplier * finer)
    return dataclasses.replace(model, encoder=encoder, query=query)
