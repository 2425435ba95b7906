"""Learn the solution operator of a PDE from samples at scattered points, and query it anywhere.

The names below are the public surface. They are imported when first used, so that `import oformer` and
`oformer --help` cost nothing.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oformer.checkpoint import load_checkpoint, save_checkpoint
    from oformer.data.dataset import PointDataset, View
    from oformer.data.generate import generate
    from oformer.errors import InputError, SolverDiverged, TrainingDiverged
    from oformer.estimator import OperatorRegressor
    from oformer.experiments.recipes import RECIPES
    from oformer.fields import Batch, Card, Field, Sample, Spec
    from oformer.meshes.voronoi import cell_weights
    from oformer.models.base import Normalization, Operator
    from oformer.models.oformer import OFormer, OFormerConfig
    from oformer.predict import Predictor
    from oformer.problems import (
        PROBLEMS,
        Airfoil,
        Burgers,
        Darcy,
        Electrostatics,
        Magnetostatics,
        NavierStokes,
        Problem,
    )
    from oformer.training.evaluate import evaluate
    from oformer.training.loop import train
    from oformer.training.recipe import Data, Recipe, Training

_HOMES = {
    "oformer.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "oformer.data.dataset": ("PointDataset", "View"),
    "oformer.data.generate": ("generate",),
    "oformer.errors": ("InputError", "SolverDiverged", "TrainingDiverged"),
    "oformer.estimator": ("OperatorRegressor",),
    "oformer.fields": ("Batch", "Card", "Field", "Sample", "Spec"),
    "oformer.meshes.voronoi": ("cell_weights",),
    "oformer.models.base": ("Normalization", "Operator"),
    "oformer.models.oformer": ("OFormer", "OFormerConfig"),
    "oformer.predict": ("Predictor",),
    "oformer.problems": (
        "PROBLEMS",
        "Airfoil",
        "Burgers",
        "Darcy",
        "Electrostatics",
        "Magnetostatics",
        "NavierStokes",
        "Problem",
    ),
    "oformer.experiments.recipes": ("RECIPES",),
    "oformer.training.evaluate": ("evaluate",),
    "oformer.training.loop": ("train",),
    "oformer.training.recipe": ("Data", "Recipe", "Training"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PROBLEMS",
    "RECIPES",
    "Airfoil",
    "Batch",
    "Burgers",
    "Card",
    "Darcy",
    "Data",
    "Electrostatics",
    "Field",
    "InputError",
    "Magnetostatics",
    "NavierStokes",
    "Normalization",
    "OFormer",
    "OFormerConfig",
    "Operator",
    "OperatorRegressor",
    "PointDataset",
    "Predictor",
    "Problem",
    "Recipe",
    "Sample",
    "SolverDiverged",
    "Spec",
    "Training",
    "TrainingDiverged",
    "View",
    "cell_weights",
    "evaluate",
    "generate",
    "load_checkpoint",
    "save_checkpoint",
    "train",
]

try:
    __version__ = version("oformer")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'oformer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
