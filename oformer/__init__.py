"""Learn the solution operator of a PDE from samples at scattered points, and query it anywhere.

The names below are the public surface. They are imported when first used, so that `import oformer` and
`oformer --help` cost nothing.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # to type checkers, `as` marks a name as public
    from oformer.checkpoint import load_checkpoint as load_checkpoint
    from oformer.checkpoint import save_checkpoint as save_checkpoint
    from oformer.data.dataset import PointDataset as PointDataset
    from oformer.data.dataset import View as View
    from oformer.data.generate import generate as generate
    from oformer.errors import InputError as InputError
    from oformer.errors import SolverDiverged as SolverDiverged
    from oformer.errors import TrainingDiverged as TrainingDiverged
    from oformer.estimator import OperatorRegressor as OperatorRegressor
    from oformer.experiments.recipes import RECIPES as RECIPES
    from oformer.experiments.train import train as train
    from oformer.fields import Batch as Batch
    from oformer.fields import Card as Card
    from oformer.fields import Field as Field
    from oformer.fields import Sample as Sample
    from oformer.fields import Spec as Spec
    from oformer.fields import collate as collate
    from oformer.meshes.voronoi import cell_weights as cell_weights
    from oformer.models.oformer import OFormer as OFormer
    from oformer.models.oformer import OFormerConfig as OFormerConfig
    from oformer.models.operator import Normalization as Normalization
    from oformer.models.operator import Operator as Operator
    from oformer.predict import Predictor as Predictor
    from oformer.problems import PROBLEMS as PROBLEMS
    from oformer.problems import Airfoil as Airfoil
    from oformer.problems import Burgers as Burgers
    from oformer.problems import Darcy as Darcy
    from oformer.problems import Electrostatics as Electrostatics
    from oformer.problems import Magnetostatics as Magnetostatics
    from oformer.problems import NavierStokes as NavierStokes
    from oformer.problems import Problem as Problem
    from oformer.training.evaluate import evaluate as evaluate
    from oformer.training.recipe import Data as Data
    from oformer.training.recipe import Recipe as Recipe
    from oformer.training.recipe import Training as Training

_HOMES = {
    "oformer.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "oformer.data.dataset": ("PointDataset", "View"),
    "oformer.data.generate": ("generate",),
    "oformer.errors": ("InputError", "SolverDiverged", "TrainingDiverged"),
    "oformer.estimator": ("OperatorRegressor",),
    "oformer.experiments.recipes": ("RECIPES",),
    "oformer.experiments.train": ("train",),
    "oformer.fields": ("Batch", "Card", "Field", "Sample", "Spec", "collate"),
    "oformer.meshes.voronoi": ("cell_weights",),
    "oformer.models.operator": ("Normalization", "Operator"),
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
    "oformer.training.evaluate": ("evaluate",),
    "oformer.training.recipe": ("Data", "Recipe", "Training"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
if not TYPE_CHECKING:  # they understand only a list that is written out
    __all__ = sorted(_HOME_OF)

try:
    __version__ = version("oformer")
except PackageNotFoundError:  # run from a checkout that was not installed
    __version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'oformer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
