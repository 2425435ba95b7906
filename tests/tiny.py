"""The smallest recipe that has everything in it: all that is random, all that is saved. And a flow for its place."""

import dataclasses
from typing import Any

from oformer.data.dataset import View
from oformer.models import FNOConfig, GraphNetworkConfig, ModelConfig, Normalization, OFormerConfig
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.problems import Burgers, Electrostatics, NavierStokes
from oformer.training.losses import Loss
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.schedules import Drop, OneCycle

TINY_FLOW = NavierStokes(duration=3, points=16, solver_points=32, time_step=0.05, in_times=1)


def tiny_recipe(**training: Any) -> Recipe:
    """Burgers at 32 points with dropout, dropped points, symmetries, Muon and an average of the weights."""
    settings = Training(
        steps=40,
        batch=4,
        optimizer=Optimizer(kind="muon", rate=2e-3, matrix_rate=2e-3, clip=(("encoder", 1.0), ("all", 5.0))),
        schedule=OneCycle(warmup=0.3, start=10, end=10),
        loss=Loss(derivative=1e-3),
        drop=Drop(probability=0.5, keep=(0.5, 0.9), weights="gaps"),
        augment=True,
        ema=0.9,
        evaluate_every=20,
        checkpoint_every=10,
        log_every=1,
    )
    return Recipe(
        name="tiny",
        problem=Burgers(points=64, solver_points=64, modes=6, steps=40),
        data=Data(train=12, test=4, view=View(points=(32,))),
        normalization=Normalization(input="channel", target="channel", coords="unit-box"),
        model=OFormerConfig(
            attention="fourier",
            encoder=Encoder(width=16, depth=2, multipliers=(32.0, 8.0), dropout=0.1, lift_dropout=0.1),
            query=Query(width=16, fourier_features=8, hidden=(16,), heads=2, multiplier=32.0),
            propagator=Propagator(depth=1),
            decoder=Decoder(hidden=(8,)),
        ),
        training=dataclasses.replace(settings, **training),
    )


def tiny_fno(model: ModelConfig | None = None, **training: Any) -> Recipe:
    """The same data for an FNO, or for another model that needs all points of its grid."""
    model = model or FNOConfig(width=12, modes=6, depth=2, head=16)
    return dataclasses.replace(tiny_recipe(drop=None, **training), name="tiny-fno", model=model)


def tiny_graph_network(**training: Any) -> Recipe:
    """Electrostatics for a graph network, which answers at the points of a mesh alone."""
    settings = {"drop": None, "augment": False, "loss": Loss(kind="squared"), **training}
    return dataclasses.replace(
        tiny_recipe(**settings),
        name="tiny-graph-network",
        problem=Electrostatics(),
        data=Data(train=12, test=4),
        normalization=Normalization(input="max-abs", target="max-abs", coords="as-is"),
        model=GraphNetworkConfig(width=12, depth=2, order=3, skipped=2),
    )
