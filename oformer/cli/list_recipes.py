"""`oformer list`: all recipes, or the settings of one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from oformer.cli.options import override
from oformer.terminal import table

if TYPE_CHECKING:
    from oformer.training.recipe import Recipe


@dataclass
class List:
    """Show the named recipes, or everything about one of them and how to change it."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe, or the Python file of one."""
    ablations: bool = False
    """Show the changes of a recipe that the paper studies, for oformer train NAME --ablation ABLATION."""

    def run(self, rest: list[str]) -> int:
        """Print the table of recipes, or the settings of one recipe and how to change them."""
        from oformer.experiments.ablations import ABLATIONS
        from oformer.experiments.recipes import BASELINES, RECIPES, recipe_named

        if self.ablations:
            table(
                ("ablation", "what it changes", "in the paper"),
                [(name, ablation.about, ablation.place) for name, ablation in ABLATIONS.items()],
            )
            return 0
        if self.name is not None:
            override(recipe_named(self.name), [*rest, "--help"], self.name)
        rows = {
            n: (n, f"{_parameters(r):,}", r.describe(), "yes" if r.problem else "from --data", r.paper)
            for n, r in RECIPES.items()
        }
        columns = ("parameters", "training", "generator", "paper")
        table(("recipe", *columns), [row for n, row in rows.items() if n not in BASELINES])
        table(("baseline: another model", *columns), [rows[n] for n in BASELINES])
        return 0


def _parameters(recipe: "Recipe") -> int:
    """The number of parameters of the recipe's model."""
    import torch

    with torch.device("meta"):  # without memory for the numbers
        return sum(p.numel() for p in recipe.model.build(recipe.data_spec()).parameters())
