"""The numbers of the paper's tables, as printed: every row that a recipe repeats, and every model in it.

Li, Meidani and Barati Farimani, Transformer for Partial Differential Equations' Operator Learning, TMLR 2023: tables 1
to 4, the airfoil of section 4.2, and the two tables of appendix C on dropped input points.

Differs: for the airfoil the paper prints the errors of density times what its data call velocity. That is momentum
already, so that the root mean square error belongs to density times momentum; the relative one we cannot tell apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OURS = "OFormer"  # the paper's own model in its tables

# What a row measures: a relative L2 error, mean squared errors of scaled values, or errors of momentum near a foil.
Quantity = Literal[
    "relative L2",
    "squared error of potential",
    "squared error of field",
    "relative momentum",
    "density times momentum",
]


@dataclass(frozen=True)
class Row:
    """One line of a table of the paper."""

    recipe: str
    table: str
    quantity: Quantity
    unit: float  # what the numbers are multiples of
    digits: int  # after the point, as printed
    errors: Mapping[str, float]  # by model
    spread: float  # of the paper's OFormer
    parameters: float  # of it, in millions
    scale: tuple[float, ...] = ()  # what values were divided by before their errors were squared, by channel

    @property
    def best(self) -> tuple[str, float]:
        """The model with the smallest error of the row, and the error."""
        return min(self.errors.items(), key=lambda item: item[1])

    @property
    def multiple(self) -> str:
        """The unit in words, after a number."""
        return {1.0: "", 1e-2: " × 10⁻²", 1e-3: " × 10⁻³"}[self.unit]

    def number(self, error: float) -> str:
        """An error in the unit of the row, with as many digits as the paper prints."""
        return f"{error:.{self.digits}f}"


def _navier_stokes(recipe: str, errors: tuple[float, float, float, float, float], spread: float) -> Row:
    models = ("FNO-2D", "FNO-3D", "MWT", "Galerkin Transformer", OURS)
    return Row(recipe, "Table 1", "relative L2", 1.0, 4, dict(zip(models, errors, strict=True)), spread, 1.85)


def _burgers(recipe: str, errors: tuple[float, float, float, float, float], spread: float) -> Row:
    models = ("FNO", "FNO+", "MWT", "Fourier Transformer", OURS)
    return Row(recipe, "Table 2", "relative L2", 1e-3, 2, dict(zip(models, errors, strict=True)), spread, 0.67)


def _darcy(recipe: str, errors: tuple[float, float, float], spread: float) -> Row:
    models = ("FNO", "Galerkin Transformer", OURS)
    return Row(recipe, "Table 3", "relative L2", 1e-2, 2, dict(zip(models, errors, strict=True)), spread, 2.51)


# The published samples of electro- and magnetostatics are divided by the largest values of both training sets, that
# with and that without randomized meshes. These are the largest of ours (data seed 0): potential, x and y of the field.
LARGEST: dict[str, tuple[float, float, float]] = {
    "electro": (0.0160164, 0.1108494, 0.1019337),
    "magneto": (0.0160164, 0.1019337, 0.1108494),  # the same gradient, turned by a right angle
}


def _poisson(recipe: str, quantity: Quantity, ours: float, spread: float, gnn: float) -> Row:
    problem = recipe.removesuffix("-aug")
    parameters, errors = {"electro": 0.17, "magneto": 0.31}[problem], {OURS: ours, "GNN": gnn}
    return Row(recipe, "Table 4", quantity, 1e-3, 3, errors, spread, parameters, LARGEST[problem])


ROWS: tuple[Row, ...] = (
    _navier_stokes("ns1", (0.0128, 0.0086, 0.0062, 0.0098, 0.0104), 0.0005),
    _navier_stokes("ns2-part", (0.1559, 0.1918, 0.1518, 0.1399, 0.1755), 0.0059),
    _navier_stokes("ns2-full", (0.0834, 0.0820, 0.0667, 0.0792, 0.0645), 0.0011),
    _navier_stokes("ns3", (0.1556, 0.1893, 0.1541, 0.1340, 0.1705), 0.0007),
    _navier_stokes("ns-mix", (0.1650, 0.1654, 0.1267, 0.1462, 0.1402), 0.0016),
    _burgers("burgers-512", (3.15, 0.72, 1.85, 1.14, 1.42), 0.03),
    _burgers("burgers-2048", (3.07, 0.72, 1.86, 1.12, 1.30), 0.07),
    _burgers("burgers-8192", (2.76, 0.70, 1.78, 1.07, 1.54), 0.10),
    _darcy("darcy-141", (1.09, 0.84, 1.26), 0.03),
    _darcy("darcy-211", (1.09, 0.84, 1.28), 0.02),
    _poisson("electro", "squared error of potential", 0.174, 0.083, 0.327),
    _poisson("electro", "squared error of field", 1.690, 0.201, 2.723),
    _poisson("electro-aug", "squared error of potential", 0.019, 0.004, 0.006),
    _poisson("electro-aug", "squared error of field", 0.328, 0.025, 1.821),
    _poisson("magneto", "squared error of potential", 0.138, 0.021, 0.161),
    _poisson("magneto", "squared error of field", 1.470, 0.172, 2.640),
    _poisson("magneto-aug", "squared error of potential", 0.016, 0.002, 0.006),
    _poisson("magneto-aug", "squared error of field", 0.195, 0.009, 1.338),
    Row("airfoil", "Section 4.2", "relative momentum", 1e-2, 2, {OURS: 8.17}, 0.06, 1.35),
    Row("airfoil", "Section 4.2", "density times momentum", 1.0, 3, {OURS: 15.469}, 0.074, 1.35),
)

# Relative L2 errors where input points were dropped at random while training, and where they were not.
DROPPED_IN_TRAINING: dict[str, tuple[float, float]] = {
    "ns1": (0.0133, 0.0104),
    "ns2-part": (0.1773, 0.1702),
    "ns2-full": (0.0672, 0.0646),
    "ns3": (0.1747, 0.1697),
    "ns-mix": (0.1413, 0.1400),
    "burgers-2048": (0.00142, 0.00126),
}

# Relative L2 errors on the test set of ns2-full by the share of the input points that the model is given, trained on
# inputs with dropped points and with all points.
BY_SHARE: dict[str, dict[float, float]] = {
    "dropped points": {1.0: 0.0672, 0.95: 0.0687, 0.75: 0.0772, 0.5: 0.0939, 0.25: 0.1294},
    "all points": {1.0: 0.0646, 0.95: 0.0795, 0.75: 0.1293, 0.5: 0.2065, 0.25: 0.3774},
}
