"""The numbers of the paper's tables, as printed: every row that a recipe repeats, and every model in it.

Li, Meidani and Barati Farimani, Transformer for Partial Differential Equations' Operator Learning, TMLR 2023: tables 1
to 4, the airfoil of section 4.2, section 4.3 on ablations, and the tables of appendix C on dropped input points.

Differs: for the airfoil the paper prints the errors of density times what its data call velocity. That is momentum
already, so that the root mean square error belongs to density times momentum; the relative one we cannot tell apart.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oformer.errors import InputError

PLUS = "-plus"  # ends the name of a variant that is better than the faithful recipe at equal size and data
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

    def measured(self, scores: Any) -> float:
        """What the row measures, in its unit, from our `Scores`, or from what has their attributes."""
        near, errors = scores.momentum, {"relative L2": scores.error}
        if self.scale and len(scores.mean_squared) == len(self.scale):
            squares = [error / scale**2 for error, scale in zip(scores.mean_squared, self.scale, strict=True)]
            errors |= {
                "squared error of potential": squares[0],
                "squared error of field": statistics.fmean(squares[1:]),
            }
        if near is not None:
            errors |= {"relative momentum": near.relative, "density times momentum": near.as_released}
        if self.quantity not in errors:
            raise InputError(
                f"scores of {self.recipe} with its {self.quantity}",
                f"{len(scores.mean_squared)} channel(s), {'with' if near else 'without'} errors of momentum",
                "Add the run to the zoo again",
            )
        return errors[self.quantity] / self.unit

    def number(self, error: float) -> str:
        """An error in the unit of the row, with as many digits as the paper prints."""
        return f"{error:.{self.digits}f}"


def _relative(table: str, unit: float, digits: int, parameters: float, *models: str) -> Callable[..., Row]:
    """A function that makes a row of a table of relative errors from recipe, errors of the models, and spread."""

    def row(recipe: str, errors: tuple[float, ...], spread: float) -> Row:
        known = dict(zip((*models, OURS), errors, strict=True))
        return Row(recipe, table, "relative L2", unit, digits, known, spread, parameters)

    return row


_navier_stokes = _relative("Table 1", 1.0, 4, 1.85, "FNO-2D", "FNO-3D", "MWT", "Galerkin Transformer")
_burgers = _relative("Table 2", 1e-3, 2, 0.67, "FNO", "FNO+", "MWT", "Fourier Transformer")
_darcy = _relative("Table 3", 1e-2, 2, 2.51, "FNO", "Galerkin Transformer")


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

# Relative L2 errors on the test set of ns2-full by the share of the input points that the model is given, trained on
# inputs with dropped points and with all points.
BY_SHARE: dict[str, dict[float, float]] = {
    "dropped points": {1.0: 0.0672, 0.95: 0.0687, 0.75: 0.0772, 0.5: 0.0939, 0.25: 0.1294},
    "all points": {1.0: 0.0646, 0.95: 0.0795, 0.75: 0.1293, 0.5: 0.2065, 0.25: 0.3774},
}

# Relative L2 errors of the table of appendix C on training with and without dropped input points, by recipe.
DROPPED: dict[str, float] = {
    "ns1": 0.0104, "ns1+drop=on": 0.0133,
    "ns2-part": 0.1702, "ns2-part+drop=on": 0.1773,
    "ns2-full": 0.0646, "ns2-full+drop=on": 0.0672,
    "ns3": 0.1697, "ns3+drop=on": 0.1747,
    "ns-mix": 0.1400, "ns-mix+drop=on": 0.1413,
    "burgers-2048": 0.00126, "burgers-2048+drop=on": 0.00142,
}  # fmt: skip

# The errors that section 4.3 prints of the ablations; Figure 7 draws the others without numbers.
LARGER: dict[str, float] = {"ns2-full": 0.0645, "ns2-full+size=large": 0.0625, "burgers-2048": 1.30e-3}


def rows_of_their_own(name: str) -> list[Row]:
    """The rows of the paper that a trained operator repeats, of those that measure something else than relative L2."""
    return [row for row in ROWS if row.recipe == name.removesuffix(PLUS) and row.quantity != "relative L2"]


def headline(name: str, scores: Any) -> str:
    """The test error of a trained operator in a few words: relative L2 in percent, or what the paper's row measures."""
    rows = rows_of_their_own(name)
    if not rows:
        return f"{scores.error:.4%}"
    power = {1.0: "", 1e-2: "e-2", 1e-3: "e-3"}
    errors = (row.number(row.measured(scores)) + power[row.unit] for row in rows)
    return f"{'squared' if 'squared' in rows[0].quantity else 'momentum'} {', '.join(errors)}"
