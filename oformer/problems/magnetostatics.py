"""The vector potential and magnetic field of currents through discs (paper, table 4).

Currents flow along z, normal to the domain; so does the vector potential A. Its curl lies in the plane.

Differs: see `oformer.problems.poisson`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.problems.poisson import PoissonProblem


@dataclass(frozen=True)
class Magnetostatics(PoissonProblem):
    """Magnetostatics: -ΔA = I in a domain, A = 0 on its border, B = (∂A/∂y, -∂A/∂x), with discs of current.

    Learned map: the current I and the place of the border, seen from each mesh point → A, B.

    What is hard: what is hard in electrostatics; the potential is the same, and the field its electric one, turned by
    a right angle. Mirrored domains have fields that are mirrored and turned round.

    Values that work: those of electrostatics.
    """

    name: ClassVar[str] = "magnetostatics"
    title: ClassVar[str] = "Magnetostatics"
    equation: ClassVar[str] = "-div grad A = I with A = 0 on the border, B = (A_y, -A_x)"
    source: ClassVar[str] = "current density"
    material: ClassVar[str] = "permeability"
    targets: ClassVar[tuple[str, str, str]] = ("vector potential", "B_x", "B_y")
    mirror: ClassVar[int] = -1

    def field(self, gradient: Float[Tensor, "batch points 2"]) -> Float[Tensor, "batch points 2"]:
        """B = (∂A/∂y, -∂A/∂x)."""
        return torch.stack([gradient[..., 1], -gradient[..., 0]], -1)
