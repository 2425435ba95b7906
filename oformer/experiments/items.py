"""The tables and figures of the paper that commands make, as lists of recipes: what `oformer reproduce` knows.

Those of the appendix have names in words, because the paper gives them no numbers in its text.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oformer.experiments.published import BY_SHARE, DROPPED, LARGER
from oformer.experiments.recipes import recipe_named
from oformer.training.recipe import Recipe

# What is shown of the runs: their errors beside the paper's table, errors of variants beside those of the recipe that
# they change, errors by the share of the input points, errors of each step, the latent study, or predictions.
Kind = Literal["errors", "variants", "shares", "trend", "latents", "pictures"]

# By recipe, the row of a table whose data a baseline is trained on, and what the table calls the model.
BASELINE_ROWS: dict[str, tuple[str, str]] = {
    "ns2-part-fno": ("ns2-part", "FNO-2D"),
    "ns2-part-mwt": ("ns2-part", "MWT"),
    "burgers-2048-fno": ("burgers-2048", "FNO+"),
    "burgers-2048-mwt": ("burgers-2048", "MWT"),
    "burgers-2048-galerkin-transformer": ("burgers-2048", "Fourier Transformer"),
    "darcy-141-fno": ("darcy-141", "FNO"),
    "darcy-141-mwt": ("darcy-141", "MWT"),
    "darcy-141-galerkin-transformer": ("darcy-141", "Galerkin Transformer"),
    "electro-gnn": ("electro", "GNN"),
    "magneto-gnn": ("magneto", "GNN"),
    "electro-aug-gnn": ("electro-aug", "GNN"),
    "magneto-aug-gnn": ("magneto-aug", "GNN"),
}


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper."""

    title: str
    kind: Kind
    recipes: tuple[str, ...]
    steps: Mapping[str, int] = field(default_factory=dict)  # by unchanged recipe, where an item trains for fewer
    printed: Mapping[str, float] = field(default_factory=dict)  # errors that the paper prints, by recipe
    shares: tuple[float, ...] = (1.0,)  # of the input points that are given, in pictures and tables by share

    def recipe(self, name: str) -> Recipe:
        """One of its recipes, with the steps that the item trains it for."""
        recipe = recipe_named(name)
        steps = self.steps.get(name.partition("+")[0], recipe.training.steps)
        return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=steps))


def _with(recipe: str, *changes: str) -> tuple[str, ...]:
    """A recipe and its variants."""
    return (recipe, *(f"{recipe}+{change}" for change in changes))


# Ten minutes of an H200 instead of fifty; the same for all bars of a figure.
_SHORTER = {"ns2-full": 24_000}
_CHANGES = ("size=small", "size=large", "position=appended", "norm=points", "norm=points-detached", "norm=layernorm",
            "norm=none")  # fmt: skip
_IN_TIME = ("ns1", "ns2-part", "ns2-full", "ns3", "ns-mix")

ITEMS: dict[str, Item] = {
    "table1": Item("Table 1, Navier-Stokes", "errors", (*_IN_TIME, "ns2-part-fno", "ns2-part-mwt")),
    "table2": Item(
        "Table 2, Burgers", "errors",
        ("burgers-512", "burgers-2048", "burgers-8192", "burgers-2048-fno", "burgers-2048-mwt",
         "burgers-2048-galerkin-transformer"),
    ),
    "table3": Item(
        "Table 3, Darcy flow", "errors",
        ("darcy-141", "darcy-211", "darcy-141-fno", "darcy-141-mwt", "darcy-141-galerkin-transformer"),
    ),
    "table4": Item(
        "Table 4, electro- and magnetostatics", "errors",
        ("electro", "electro-aug", "magneto", "magneto-aug", "electro-gnn", "magneto-gnn", "electro-aug-gnn",
         "magneto-aug-gnn"),
    ),
    "airfoil": Item("Section 4.2, flow around an airfoil", "errors", ("airfoil",)),
    "figure4": Item("Figure 4, predictions on meshes", "pictures", ("electro-aug", "airfoil")),
    "figure5": Item(
        "Figure 5, from all and from 25 % of the input points", "pictures", ("ns2-full+drop=on",), shares=(1.0, 0.25)
    ),
    "figure6": Item("Figure 6, the viscosity in the latents", "latents", ("ns-latent",)),
    "figure7": Item(
        "Figure 7, ablations", "variants",
        (*_with("ns2-full", "attention=fourier", "attention=softmax", *_CHANGES),
         *_with("burgers-2048", "attention=galerkin", "attention=softmax", *_CHANGES)),
        steps=_SHORTER, printed=LARGER,
    ),
    "figure8": Item(
        "Figure 8, with and without rotary encoding", "pictures", _with("ns2-full", "position=appended"), steps=_SHORTER
    ),
    "initialization": Item(
        "Appendix C, figure on initialization", "variants",
        _with("burgers-2048", "start=xavier-scaled", "start=orthogonal", "start=xavier"),
    ),
    "data": Item(
        "Appendix C, figure on the amount of data", "variants",
        _with("ns2-full", "samples=5000", "samples=2000", "samples=1000", "samples=500"), steps=_SHORTER,
    ),
    "features": Item(
        "Appendix C, figures on random Fourier features", "variants",
        tuple(name for base in ("burgers-2048", "darcy-141", "ns2-full") for name in _with(base, "features=off")),
        steps=_SHORTER,
    ),
    "feedforward": Item(
        "Section 3.2, the feed-forward network after cross-attention", "variants",
        tuple(name for base in ("burgers-2048", "darcy-141") for name in _with(base, "feedforward=off")),
    ),
    "dropping": Item(
        "Appendix C, table on dropping input points in training", "variants",
        tuple(name for base in (*_IN_TIME, "burgers-2048") for name in _with(base, "drop=on")), printed=DROPPED,
    ),
    "sparse": Item(
        "Appendix C, table on shares of the input points", "shares", _with("ns2-full", "drop=on"),
        shares=tuple(BY_SHARE["all points"]),
    ),
    "trend": Item("Appendix C, figure on error trends", "trend", (*_IN_TIME, "airfoil")),
    "predictions": Item(
        "Appendix E, predictions", "pictures",
        ("burgers-2048", "darcy-141", "ns1", "ns2-full", "ns3", "airfoil", "electro-aug", "magneto-aug"),
    ),
}  # fmt: skip
