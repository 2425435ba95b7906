"""`oformer list`."""

import json

from oformer.cli import main


def test_list_shows_every_recipe_with_its_size(capsys):
    from oformer.experiments.recipes import RECIPES

    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
    assert "660,719" in shown
    assert "1,851,361" in shown


def test_the_table_is_that_of_the_recipes():
    """It is written down, so that `oformer list` builds no model."""
    from tools.list_recipes import TABLE, listing

    stored = json.loads(TABLE.read_text(encoding="utf-8"))
    assert stored == listing(), "write it again: python tools/list_recipes.py"
