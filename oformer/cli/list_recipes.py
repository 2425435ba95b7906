"""`oformer list`: all recipes, or the settings of one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oformer.cli.options import override, refuse_unknown
from oformer.terminal import table

# Written by tools/list_recipes.py, since counting parameters would load torch and build every model.
RECIPES = Path(__file__).resolve().parent.parent / "experiments" / "recipes.json"


@dataclass
class List:
    """Show the named recipes, or everything about one of them and how to change it."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe, or the Python file of one."""
    ablations: bool = False
    """Show the changes of a recipe that the paper studies, for oformer train NAME --ablation ABLATION."""

    def run(self, rest: list[str]) -> int:
        """Print the table of recipes, or the settings of one recipe and how to change them."""
        if self.ablations:
            from oformer.experiments.ablations import ABLATIONS

            refuse_unknown(rest, "list", self)
            rows = [(name, ablation.about, ablation.place) for name, ablation in ABLATIONS.items()]
            table(("ablation", "what it changes", "in the paper"), rows)
            return 0
        if self.name is not None:
            from oformer.experiments.recipes import recipe_named

            override(recipe_named(self.name), [*rest, "--help"], self.name)
        refuse_unknown(rest, "list", self)
        from oformer.files import read_json

        for title, rows in read_json(RECIPES).items():
            table((title, "parameters", "training", "generator", "paper"), rows)
        return 0
