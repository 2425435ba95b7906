"""`oformer list`."""

from oformer.cli import main


def test_list_shows_every_recipe_with_its_size(capsys):
    from oformer.experiments.recipes import RECIPES

    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
    assert "660,719" in shown
    assert "1,851,361" in shown
