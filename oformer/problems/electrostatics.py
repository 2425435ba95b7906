"""The electric potential and field of charged discs in grounded domains (paper, table 4).

Differs: see `oformer.problems.poisson`.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from oformer.problems.poisson import PoissonProblem


@dataclass(frozen=True)
class Electrostatics(PoissonProblem):
    """Electrostatics: -Δu = ρ in a domain, u = 0 on its border, E = -∇u, with discs of charge.

    Learned map: the charge ρ and the place of the border, seen from each mesh point → u, E.

    What is hard: the domain of the test is none of those in training. The charge is a disc of radius 0.07 on meshes
    whose edges are as long or twice that, so that one point may hold all of it; the field is largest there, and at the
    inner corners, where that of the equation is infinite.

    Values that work: the defaults, with 8000 samples for training and 2000 for testing; `randomized` with the same is
    the paper's mesh augmentation. `discs=(4, 5)` makes the published test of superposition.
    """

    name: ClassVar[str] = "electrostatics"
    title: ClassVar[str] = "Electrostatics"
    equation: ClassVar[str] = "-div grad u = rho with u = 0 on the border, E = -grad u"
    source: ClassVar[str] = "charge density"
    material: ClassVar[str] = "permittivity"
    targets: ClassVar[tuple[str, str, str]] = ("potential", "E_x", "E_y")
    mirror: ClassVar[int] = 1

    def field(self, gradient: Float[Tensor, "batch points 2"]) -> Float[Tensor, "batch points 2"]:
        """E = -∇u."""
        return -gradient
