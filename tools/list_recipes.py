"""Write the table that `oformer list` prints, which builds no model: python tools/list_recipes.py."""

import json
from pathlib import Path

import torch

from oformer.experiments.recipes import BASELINES, RECIPES
from oformer.training.recipe import Recipe

TABLE = Path(__file__).resolve().parent.parent / "oformer" / "experiments" / "recipes.json"


def listing() -> dict[str, list[list[str]]]:
    """The rows of both tables, by the title of their first column."""
    tables: dict[str, list[list[str]]] = {"recipe": [], "baseline: another model": []}
    for name, recipe in RECIPES.items():
        generator = "yes" if recipe.problem else "from --data"
        row = [name, f"{_parameters(recipe):,}", recipe.describe(), generator, recipe.paper]
        tables["baseline: another model" if name in BASELINES else "recipe"].append(row)
    return tables


def _parameters(recipe: Recipe) -> int:
    """The number of parameters of the recipe's model."""
    with torch.device("meta"):  # without memory for the numbers
        return sum(p.numel() for p in recipe.model.build(recipe.data_spec()).parameters())


if __name__ == "__main__":
    tables = [
        f"{json.dumps(title)}: [\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"
        for title, rows in listing().items()
    ]
    TABLE.write_text("{\n" + ",\n".join(tables) + "\n}\n", encoding="utf-8")
