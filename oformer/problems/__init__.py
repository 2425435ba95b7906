"""One partial differential equation per file: what to draw, how to solve, what to learn.

A new problem is a file beside these and its name in `PROBLEMS`; the contract tests then ask it their
questions.
"""

from oformer.problems.airfoil import Airfoil
from oformer.problems.base import Problem
from oformer.problems.burgers import Burgers
from oformer.problems.darcy import Darcy
from oformer.problems.electrostatics import Electrostatics
from oformer.problems.magnetostatics import Magnetostatics
from oformer.problems.navier_stokes import NavierStokes

PROBLEMS: dict[str, type[Problem]] = {
    kind.name: kind for kind in (Burgers, Darcy, NavierStokes, Electrostatics, Magnetostatics, Airfoil)
}
