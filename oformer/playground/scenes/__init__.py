"""The state that a person changes in each problem, and the input of the operator: one scene per kind of problem.

A new scene is a file beside these and its line in `SCENES`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from oformer.config import from_json
from oformer.fields import Spec
from oformer.playground.scenes.airfoil import Stream
from oformer.playground.scenes.base import Scene
from oformer.playground.scenes.burgers import Curve
from oformer.playground.scenes.darcy import Medium
from oformer.playground.scenes.navier_stokes import Vorticity
from oformer.playground.scenes.poisson import Sources
from oformer.problems import PROBLEMS, Airfoil, Burgers, Darcy, NavierStokes, Problem
from oformer.problems.poisson import PoissonProblem

SCENES: dict[type[Problem], Callable[[Any, Spec], Scene]] = {
    Burgers: Curve,
    Darcy: Medium,
    NavierStokes: Vorticity,
    PoissonProblem: Sources,
    Airfoil: Stream,
}


def scene_of(recipe: Mapping[str, Any] | None, spec: Spec) -> Scene | None:
    """The scene of the problem in a checkpoint's recipe; None where there is no problem, or one without a scene."""
    content = (recipe or {}).get("problem")
    kinds = {kind.__name__: kind for kind in PROBLEMS.values() if issubclass(kind, tuple(SCENES))}
    if not isinstance(content, dict) or content.get("type") not in kinds:
        return None
    problem = from_json(kinds[content["type"]], content, "recipe.problem")
    return next(scene(problem, spec) for kind, scene in SCENES.items() if isinstance(problem, kind))
