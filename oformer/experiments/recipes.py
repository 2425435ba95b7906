"""The rows of OFormer in the paper's Tables 1 to 4, section 4.2 and Figure 6, recipes of our own, and baselines.

Of the other models in these tables, FNO and MWT have recipes for three problems each, the Galerkin Transformer for two
and the graph network for four. The paper's ablations are changes of recipes (`oformer/experiments/ablations.py`).

Model and training settings follow the released code where it differs from the paper's layer tables: the paper's
parameter counts are nearer to those of the code than to those of its tables. `docs/decisions.md` lists each reading,
and that `ns1` is trained with the settings of a public script instead.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from oformer.config import from_json
from oformer.data.dataset import View
from oformer.errors import InputError, unknown_name
from oformer.experiments.ablations import varied
from oformer.models import (
    MODELS,
    FNOConfig,
    GalerkinTransformerConfig,
    GraphNetworkConfig,
    MWTConfig,
    Normalization,
    OFormerConfig,
)
from oformer.models.base import Precision
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.models.operator import Values
from oformer.problems import PROBLEMS, Airfoil, Burgers, Darcy, Electrostatics, Magnetostatics, Problem
from oformer.problems.airfoil import REGION
from oformer.problems.navier_stokes import INSTANCES
from oformer.training.losses import Loss, Region
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.schedules import Drop, Halving, Horizon, OneCycle


def _burgers(points: int, *, error: str) -> Recipe:
    """1-D Burgers: 660,719 parameters at every resolution."""
    n = float(points)
    return Recipe(
        name=f"burgers-{points}",
        problem=Burgers(),
        data=Data(train=1024, test=100, view=View(points=(points,))),
        normalization=Normalization(input="none", target="none", coords="unit-box"),
        model=OFormerConfig(
            attention="fourier",
            encoder=Encoder(
                width=96, depth=4, heads=1, layernorm=False, multipliers=(8 * n, 4 * n, 4 * n, n), append_coords=True
            ),
            query=Query(
                width=96, fourier_features=96, sigma=2.0, activation_first=True, hidden=(), heads=8, multiplier=n
            ),
            propagator=Propagator(depth=3, layers=3, diagonal_start=True),
            decoder=Decoder(hidden=(48,)),
        ),
        training=Training(
            steps=20_000,
            batch=16,
            optimizer=Optimizer(kind="adam", rate=8e-4, weight_decay=1e-4),
            schedule=OneCycle(warmup=0.2, start=1e4, end=1e4),
            loss=Loss(kind="relative-sequence", scale="physical", epsilon=0.0, derivative=1e-3),
            precision="float16",
        ),
        paper=f"Table 2, Burgers at {points} points: {error}e-3",
    )  # fmt: skip


def _darcy(points: int, *, paper: str) -> Recipe:
    """2-D Darcy flow: 2,556,321 parameters."""
    n = float(points)
    return Recipe(
        name=f"darcy-{points}",
        problem=Darcy(),
        data=Data(train=1024, test=100, view=View(points=(points, points))),
        normalization=Normalization(input="pointwise", target="pointwise", coords="unit-box", boundary="zero"),
        model=OFormerConfig(
            attention="galerkin",
            encoder=Encoder(
                width=96, depth=6, heads=4, layernorm=True, multipliers=(n * n, (points // 4) * n, n),
                lift_dropout=0.05, dropout=0.03,
            ),
            query=Query(width=256, fourier_features=128, sigma=0.5, hidden=(256,), heads=4, multiplier=16 * n),
            propagator=Propagator(depth=0),
            decoder=Decoder(hidden=(256, 128), context=("coords",)),
        ),
        training=Training(
            steps=32_000,
            batch=8,
            optimizer=Optimizer(kind="adam", rate=8e-4, weight_decay=1e-4),
            schedule=OneCycle(warmup=0.2, start=1e2, end=1e5),
            loss=Loss(
                kind="relative-sequence", scale="physical", epsilon=1e-6, derivative=0.1,
                derivative_boundary="zero", derivative_rows=True,
            ),
            precision="bfloat16",
        ),
        paper=paper,
    )  # fmt: skip


def _navier_stokes(
    name: str,
    *,
    instance: str,
    steps: int,
    train: int,
    test: int,
    first: int,
    error: str = "",
    paper: str = "",
    batch: int = 16,
    rate: float = 5e-4,
    ramp: float = 0.16,
    precision: Precision = "bfloat16",
) -> Recipe:
    """2-D Navier-Stokes, ten frames in: 1,851,361 parameters."""
    return Recipe(
        name=name,
        problem=INSTANCES[instance],
        data=Data(train=train, test=test),
        normalization=Normalization(input="scalar", target="scalar", coords="unit-box"),
        model=OFormerConfig(
            attention="galerkin",
            encoder=Encoder(
                width=96, depth=5, heads=1, layernorm=True, multipliers=(2048.0, 1024.0, 512.0, 512.0, 64.0)
            ),
            query=Query(width=192, fourier_features=192, sigma=8.0, hidden=(384,), heads=4, multiplier=1024.0),
            propagator=Propagator(
                depth=1, width=384, expand_bias=True, layers=3, layernorm=True, context=("coords",)
            ),
            decoder=Decoder(hidden=(192, 192), layernorm=True),
        ),
        training=Training(
            steps=steps,
            batch=batch,
            optimizer=Optimizer(
                kind="adamw", rate=rate, weight_decay=1e-4, clip=(("encoder", 2.0), ("decoder", 2.0))
            ),
            schedule=OneCycle(warmup=0.3),
            loss=Loss(
                kind="relative-step", scale="normalized", epsilon=1e-6, derivative=0.05, derivative_rows=True
            ),
            horizon=Horizon(first=first, ramp=ramp),
            precision=precision,
        ),
        paper=paper or f"Table 1, {name}: {error}",
    )  # fmt: skip


def _poisson(name: str, problem: Electrostatics | Magnetostatics, *, width: int, seed: int, error: str) -> Recipe:
    """Electro- and magnetostatics on meshes: 170,627 and 316,643 parameters."""
    return Recipe(
        name=name,
        problem=problem,
        data=Data(train=8000, test=2000),
        normalization=Normalization(input="max-abs", target="max-abs", coords="as-is"),
        model=OFormerConfig(
            attention="galerkin",
            norm="layernorm",
            encoder=Encoder(
                width=64, depth=2, heads=1, layernorm=False, feedforward="relu", multipliers=(2500.0, 600.0),
                coords_as_features=False, lift_layers=2, lift_activation="relu", bottom_layers=2, lift_dropout=0.05,
            ),
            query=Query(
                width=width, fourier_features=0, hidden=(width, width), heads=4, multiplier=50.0,
                mixing=True, mixing_multiplier=200.0,
            ),
            propagator=Propagator(depth=0),
            decoder=Decoder(
                trunk=(width, width), trunk_gain=0.1, hidden=(width,), activation="relu", context=("features",),
                heads=(1, 2),
            ),
        ),
        training=Training(
            steps=32_000,
            batch=32,
            optimizer=Optimizer(
                kind="adamw", rate=5e-4, weight_decay=1e-4, amsgrad=True, clip=(("all", 2.0),)
            ),
            schedule=OneCycle(warmup=0.1, start=1e2, end=1e4),
            loss=Loss(kind="squared", scale="normalized"),
            seed=seed,
            precision="tf32",
        ),
        paper=f"Table 4, {name}: mean squared errors of potential and field {error} (x 1e-3)",
    )  # fmt: skip


def _airfoil() -> Recipe:
    """Compressible flow around an airfoil, four frames in: 1,370,116 parameters."""
    return Recipe(
        name="airfoil",
        problem=Airfoil(),
        data=Data(train=1000, test=100),
        normalization=Normalization(input="channel", target="channel", coords="from-zero"),
        model=OFormerConfig(
            attention="galerkin",
            encoder=Encoder(
                width=128, depth=4, heads=1, layernorm=True, multipliers=(6400.0, 3200.0, 3200.0, 200.0),
                coords_as_features=False, lift_layers=2, bottom_layers=2, long_skip=True,
            ),
            query=Query(
                width=128, fourier_features=64, sigma=2.0, hidden=(128,), heads=4, multiplier=6400.0,
                source_dropout=0.1, mixing=True, mixing_multiplier=6400.0,
            ),
            propagator=Propagator(
                depth=1, width=256, layers=4, layernorm=True, context=("features", "coords")
            ),
            decoder=Decoder(hidden=(256, 128), activation="relu", layernorm=True, context=("features",)),
        ),
        training=Training(
            steps=48_000,
            batch=16,
            optimizer=Optimizer(kind="adamw", rate=6e-4, weight_decay=1e-4, clip=(("all", 2.0),)),
            schedule=OneCycle(warmup=0.3),
            loss=Loss(kind="squared", scale="normalized", region=Region(box=REGION)),
            horizon=Horizon(first=8, ramp=0.2),
            precision="bfloat16",
        ),
        paper="Section 4.2, airfoil: RMSE near the foil 15.469, of density times momentum",
    )  # fmt: skip


def _plus(faithful: Recipe, aim: str, *, local: bool = False, **training: Any) -> Recipe:
    """A recipe of equal size and data on a periodic domain, better: frequencies that fit the period, and Muon.

    Args:
        faithful: the recipe to start from.
        aim: the figure to beat, with its source.
        local: whether queries start from the latents of the input at their place.
        training: settings that change beside these.
    """
    better = _with_muon(faithful, aim, **training)
    model = better.model
    assert isinstance(model, OFormerConfig)
    return dataclasses.replace(
        better,
        normalization=dataclasses.replace(faithful.normalization, coords="as-is"),
        model=dataclasses.replace(
            model,
            rotary="integer",
            encoder=dataclasses.replace(model.encoder, multipliers=(1.0,)),
            query=dataclasses.replace(model.query, multiplier=1.0, local=local),
        ),
    )


def _darcy_plus(faithful: Recipe) -> Recipe:
    """A Darcy recipe of the same size and data, better: Muon, the square's symmetries, latents of the query's place."""
    aim = "the best of Table 3 is the Galerkin Transformer, 0.84e-2 at 141 and at 211"
    model = faithful.model
    assert isinstance(model, OFormerConfig)
    model = dataclasses.replace(
        model,
        encoder=dataclasses.replace(model.encoder, multipliers=(256.0, 64.0, 16.0), lift_dropout=0.0, dropout=0.0),
        query=dataclasses.replace(model.query, multiplier=64.0, local=True),
    )
    return _with_muon(dataclasses.replace(faithful, model=model), aim, augment=True)


def _with_muon(faithful: Recipe, aim: str, **training: Any) -> Recipe:
    """The plus variant of a recipe as far as training goes; see `_plus`."""
    optimizer = dataclasses.replace(faithful.training.optimizer, kind="muon", rate=1e-3, matrix_rate=2e-3)
    settings = dataclasses.replace(faithful.training, optimizer=optimizer, **training)
    return dataclasses.replace(faithful, name=f"{faithful.name}-plus", training=settings, paper=f"no such row; {aim}")


def _fno(data: Recipe, model: FNOConfig, loss: Loss, paper: str, normalized: Values = "none") -> Recipe:
    """An FNO on the data of a recipe, as its authors train it: 500 epochs in batches of 20, a rate halved four times.

    Differs: the paper says of its baselines that they are trained as released, with minimal changes; which it made is
    not known.
    """
    return Recipe(
        name=f"{data.name}-fno",
        problem=data.problem,
        data=data.data,
        normalization=Normalization(input=normalized, target=normalized, coords="unit-box"),
        model=model,
        training=Training(
            steps=500 * data.data.train // 20,
            batch=20,
            optimizer=Optimizer(kind="adam", rate=1e-3, weight_decay=1e-4),
            schedule=Halving(),
            loss=loss,
        ),
        paper=paper,
    )


def _mwt(data: Recipe, model: MWTConfig, paper: str, normalized: Values = "none", batch: int = 10) -> Recipe:
    """An MWT on the data of a recipe, as its authors train it: 500 epochs, a rate halved four times.

    Differs: for Burgers no settings are published; these are those of Korteweg-de Vries. For Navier-Stokes to time 30
    they are published for 9,800 samples and 200 epochs; 500 are those for 1,000 samples to time 50. For Darcy they are
    published on other samples, at 512 x 512; 141 x 141 is padded to 256 x 256. The published statistics of a point are
    of each frame; ours are of all its frames.
    """
    return Recipe(
        name=f"{data.name}-mwt",
        problem=data.problem,
        data=data.data,
        normalization=Normalization(input=normalized, target=normalized, coords="unit-box"),
        model=model,
        training=Training(
            steps=500 * data.data.train // batch,
            batch=batch,
            optimizer=Optimizer(kind="adam", rate=1e-3, weight_decay=1e-4),
            schedule=Halving(),
            loss=_PHYSICAL,
        ),
        paper=paper,
    )


def _galerkin_transformer(
    data: Recipe, model: GalerkinTransformerConfig, batch: int, gradient: float, clip: float, warmup: float, paper: str
) -> Recipe:
    """A Galerkin or Fourier Transformer on the data of a recipe, as its author trains it: 100 epochs.

    Differs: the published loss adds sqrt(γ h) times the relative error of the gradient. Ours adds the relative errors
    of the derivatives along each axis, here with that weight divided by the number of axes. The published weights are
    those with the best test error of all epochs.

    Args:
        data: the recipe.
        model: the model.
        batch: samples in a step.
        gradient: γ; h is one over the points of an axis.
        clip: the largest norm of the gradient.
        warmup: the share of the steps in which the rate goes up.
        paper: the row of the paper.
    """
    grid = data.data_spec().grid
    assert grid is not None
    return Recipe(
        name=f"{data.name}-galerkin-transformer",
        problem=data.problem,
        data=data.data,
        normalization=data.normalization,
        model=model,
        training=Training(
            steps=100 * data.data.train // batch,
            batch=batch,
            optimizer=Optimizer(kind="adam", rate=1e-3, weight_decay=0.0, clip=(("all", clip),)),
            schedule=OneCycle(warmup=warmup, start=1e4, end=1e4),
            loss=dataclasses.replace(
                data.training.loss,
                epsilon=0.0,
                derivative=(gradient / grid[0]) ** 0.5 / len(grid),
                derivative_rows=False,
            ),
        ),
        paper=paper,
    )


def _graph_network(data: Recipe, paper: str) -> Recipe:
    """The graph network on the data of a recipe, as its authors train it: 150 epochs in batches of 32, rate 1e-3.

    Differs: the published weights are those with the least loss on validation samples.
    """
    return Recipe(
        name=f"{data.name}-gnn",
        problem=data.problem,
        data=data.data,
        normalization=data.normalization,
        model=GraphNetworkConfig(width=128, depth=3, order=5, skipped=2),
        training=Training(
            steps=150 * data.data.train // 32,
            batch=32,
            optimizer=Optimizer(kind="adam", rate=1e-3, weight_decay=0.0),
            schedule=Halving(parts=1),  # a constant rate
            loss=Loss(kind="squared", scale="normalized", by_points=True),
            seed=111,
            compile=False,  # edges come from the CPU
            capture=False,
        ),
        paper=paper,
    )


def _demo() -> Recipe:
    """A small Burgers operator that a laptop trains in minutes."""
    points = 256
    return Recipe(
        name="burgers-demo",
        problem=Burgers(points=1024, solver_points=512),
        data=Data(train=512, test=96, view=View(points=(points,))),
        normalization=Normalization(input="none", target="none", coords="as-is"),
        model=OFormerConfig(
            attention="fourier",
            rotary="integer",
            encoder=Encoder(width=64, depth=4, heads=1, layernorm=False, multipliers=(1.0,), append_coords=True),
            query=Query(
                width=64, fourier_features=64, sigma=2.0, activation_first=True, hidden=(), heads=4, multiplier=1.0
            ),
            propagator=Propagator(depth=2, layers=3, diagonal_start=True),
            decoder=Decoder(hidden=(32,)),
        ),
        training=Training(
            steps=2000,
            batch=8,
            optimizer=Optimizer(kind="muon", rate=1e-3, matrix_rate=2e-3),
            schedule=OneCycle(warmup=0.2, start=1e2, end=1e2),
            loss=Loss(kind="relative-sequence", scale="physical", epsilon=0.0, derivative=1e-3),
            drop=Drop(probability=0.3, keep=(0.3, 1.0), weights="gaps"),
            augment=True,
            evaluate_every=400,
            checkpoint_every=200,
            log_every=20,
        ),
        paper="none; our own small example",
    )  # fmt: skip


_BURGERS = [_burgers(512, error="1.42"), _burgers(2048, error="1.30"), _burgers(8192, error="1.54")]
_BEST_BURGERS = "the best of Table 2 is FNO+, 0.72e-3 at 512 and 2048 points and 0.70e-3 at 8192"
# Not as the paper's text has it, 32,000 steps of 16, but as its row seems to have been trained: docs/decisions.md.
_NS1 = _navier_stokes(
    "ns1", instance="ns1", steps=50_000, train=1000, test=200, first=16, error=".0104",
    batch=10, rate=6e-4, ramp=0.3, precision="float16",
)  # fmt: skip
_NS2_PART = _navier_stokes("ns2-part", instance="ns2", steps=32_000, train=1000, test=200, first=10, error=".1755")
_NS3 = _navier_stokes("ns3", instance="ns3", steps=32_000, train=1000, test=200, first=5, error=".1705")
_NS_LATENT = _navier_stokes(  # the paper gives no numbers of samples and steps for this study
    "ns-latent", instance="ns-latent", steps=32_000, train=2000, test=200, first=10,
    paper="Figure 6: the encodings hold the viscosity, log10 uniform in [-5.3, -3]",
)  # fmt: skip
_DARCY_85 = _darcy(85, paper="not in the paper; the grid on which later models report")
_DARCY_141 = _darcy(141, paper="Table 3, Darcy at 141 x 141: 1.26e-2")
_DARCY_211 = _darcy(211, paper="Table 3, Darcy at 211 x 211: 1.28e-2")

_ELECTRO = _poisson("electro", Electrostatics(), width=64, seed=6, error=".174 / 1.690")
_ELECTRO_AUG = _poisson("electro-aug", Electrostatics(randomized=True), width=64, seed=6, error=".019 / .328")
_MAGNETO = _poisson("magneto", Magnetostatics(), width=96, seed=7, error=".138 / 1.470")
_MAGNETO_AUG = _poisson("magneto-aug", Magnetostatics(randomized=True), width=96, seed=7, error=".016 / .195")
_BURGERS_GALERKIN = _galerkin_transformer(
    _BURGERS[1],
    GalerkinTransformerConfig(
        kind="fourier", width=96, heads=1, depth=4, feedforward=192, gain=1e-3, channels=48, modes=16, head=48
    ),
    batch=8, gradient=0.1, clip=0.999, warmup=0.2,
    paper="baseline, Table 2, Fourier Transformer at 2048 points: 1.12e-3",
)  # fmt: skip
_DARCY_GALERKIN = _galerkin_transformer(
    _DARCY_141,
    GalerkinTransformerConfig(
        kind="galerkin", width=128, heads=4, depth=6, feedforward=256, epsilon=1e-7, coarse=43,
        channels=32, modes=12, decoder_coords=True, head=128,
        dropout=0.05, feedforward_dropout=0.1, coarse_dropout=0.05,
    ),
    batch=4, gradient=0.5, clip=0.99, warmup=0.3,
    paper="baseline, Table 3, Galerkin Transformer at 141 x 141: 0.84e-2",
)  # fmt: skip

_PHYSICAL = Loss(kind="relative-sequence", scale="physical", epsilon=0.0)
BASELINES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _fno(_BURGERS[1], FNOConfig(width=64, modes=16), _PHYSICAL, "baseline, Table 2, FNO+ at 2048 points: 0.72e-3"),
        _fno(
            _DARCY_141,
            FNOConfig(width=32, modes=12, padding=9),
            _PHYSICAL,
            "baseline, Table 3, FNO at 141 x 141: 1.09e-2",
            "pointwise",
        ),
        _fno(
            _NS2_PART,
            FNOConfig(width=20, modes=8, activation="relu", batch_norm=True),
            dataclasses.replace(_PHYSICAL, kind="relative-step"),
            "baseline, Table 1, FNO-2D at ns2-part: .1559",
        ),
        _mwt(
            _BURGERS[1],
            MWTConfig(polynomials=4, channels=16, modes=10, depth=2, coords=False),
            "baseline, Table 2, MWT at 2048 points: 1.86e-3",
            batch=20,
        ),
        _mwt(
            _DARCY_141,
            MWTConfig(polynomials=4, channels=4, modes=12),
            "baseline, not in Table 3: its authors' code reads grids of 2^n points",
            "pointwise",
        ),
        _mwt(
            _NS2_PART,
            MWTConfig(polynomials=3, channels=4, modes=12, time_modes=10, batch_norm=True),
            "baseline, Table 1, MWT at ns2-part: .1518",
            "pointwise",
        ),
        _BURGERS_GALERKIN,
        _DARCY_GALERKIN,
        _graph_network(_ELECTRO, "baseline, Table 4, GNN at electro, potential and field: .327e-3 / 2.723e-3"),
        _graph_network(_MAGNETO, "baseline, Table 4, GNN at magneto, potential and field: .161e-3 / 2.640e-3"),
        _graph_network(_ELECTRO_AUG, "baseline, Table 4, GNN at electro-aug, potential and field: .006e-3 / 1.821e-3"),
        _graph_network(_MAGNETO_AUG, "baseline, Table 4, GNN at magneto-aug, potential and field: .006e-3 / 1.338e-3"),
    )
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _demo(),
        *_BURGERS,
        *(_plus(recipe, _BEST_BURGERS, augment=True, steps=60_000) for recipe in _BURGERS),
        _DARCY_85,
        _DARCY_141,
        _DARCY_211,
        *map(_darcy_plus, (_DARCY_85, _DARCY_141, _DARCY_211)),
        _NS1,
        _NS2_PART,
        _plus(_NS2_PART, "the best of Table 1 at ns2-part is the Galerkin Transformer, .1399", augment=True),
        _navier_stokes("ns2-full", instance="ns2-many", steps=128_000, train=9800, test=200, first=10, error=".0645"),
        _NS3,
        _plus(_NS3, "the best of Table 1 at ns3 is the Galerkin Transformer, .1340", local=True, augment=True),
        _navier_stokes("ns-mix", instance="ns-mix", steps=128_000, train=10_000, test=1000, first=10, error=".1402"),
        _NS_LATENT,
        _ELECTRO,
        _ELECTRO_AUG,
        _MAGNETO,
        _MAGNETO_AUG,
        _airfoil(),
        *BASELINES.values(),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe of that name, or of a Python file: `FILE.py` for its `recipe`, `FILE.py:NAME` for another variable.

    `RECIPE+ABLATION,ABLATION` is a named recipe with changes of `oformer/experiments/ablations.py`.
    """
    file, _, variable = name.rpartition(":") if ".py:" in name else (name, "", "recipe")
    if file.endswith(".py"):
        return _recipe_in(Path(file), variable)
    name, plus, changes = name.partition("+")
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return varied(RECIPES[name], changes) if plus else RECIPES[name]


def problem_named(name: str) -> tuple[Problem, Data]:
    """The problem of a recipe, of `PROBLEMS` or of an instance such as `ns2`, and the data to make of it.

    Args:
        name: as `recipe_named` takes it, or that of a problem or an instance, whose data are 900 training and 100 test
            samples.
    """
    if name.partition("+")[0] in RECIPES or ".py" in name:
        recipe = recipe_named(name)
        if recipe.problem is None:
            raise InputError(f"a problem in recipe `{name}`", "data alone", "Use a dataset of your own")
        return recipe.problem, recipe.data
    if name not in PROBLEMS and name not in INSTANCES:
        raise unknown_name("recipe or problem", name, [*RECIPES, *PROBLEMS, *INSTANCES])
    return INSTANCES.get(name) or PROBLEMS[name](), Data(train=900, test=100)


def stored_recipe(content: dict[str, Any] | None, file: str | None = None) -> Recipe:
    """The recipe of a run or of a checkpoint.

    Args:
        content: `recipe.json` of a run, or the recipe in the configuration of a checkpoint, which may have none.
        file: the Python file that defines its problem or model, if they are not part of this package.
    """
    if content is None:
        raise InputError("a checkpoint that knows its recipe", "one without", "Give its data with --data")
    if file is not None:
        recipe_named(file)
    ours = {"problem": {kind.__name__ for kind in PROBLEMS.values()}, "model": set(MODELS)}
    for part, known in ours.items():
        if file is None and content[part] and content[part]["type"] not in known:
            raise InputError(
                f"a {part} of this package in the recipe",
                f"`{content[part]['type']}`",
                "Name the Python file that defines it: --recipe FILE.py",
            )
    return from_json(Recipe, content, "recipe")


def _recipe_in(path: Path, variable: str) -> Recipe:
    """A recipe that a person's own file defines; running the file also makes its problems known."""
    if not path.is_file():
        raise InputError(f"a Python file at {path}", "nothing there", "Check the path, or begin one: oformer new NAME")
    # Imported by its name from its folder, so that the processes that make data find its classes too.
    folder, module = str(path.resolve().parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.import_module(module) if module.isidentifier() else None
    if found is None or Path(found.__file__ or "").resolve() != path.resolve():
        raise InputError(
            f"a file name that Python can import for {path}", f"`{module}`, which is no name or another module's"
        )
    recipe = getattr(found, variable, None)
    if not isinstance(recipe, Recipe):
        recipes = [name for name, value in vars(found).items() if isinstance(value, Recipe)]
        raise InputError(
            f"a Recipe called `{variable}` in {path}", ", ".join(recipes) or "none", "Name another: FILE.py:NAME"
        )
    return recipe
