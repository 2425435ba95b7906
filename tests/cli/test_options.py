"""True/false options, as other programs write them too."""

from dataclasses import replace
from pathlib import Path

import pytest

from oformer.cli import parse
from oformer.cli.options import override


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (["--training.recompute"], True),
        (["--training.recompute", "True"], True),
        (["--training.recompute=true"], True),
        (["--training.recompute", "false"], False),
        (["--training.recompute=False"], False),
        (["--training.no-recompute"], False),
    ],
)
def test_a_switch_of_a_recipe_takes_a_truth_or_none(written, value):
    """As other programs write it too, with the argument behind it left alone."""
    from oformer.experiments.recipes import recipe_named

    recipe = recipe_named("burgers-demo")
    recipe = replace(recipe, training=replace(recipe.training, recompute=not value))
    changed = override(recipe, [*written, "--training.steps", "7"])
    assert (changed.training.recompute, changed.training.steps) == (value, 7)


def test_a_switch_of_a_command_takes_a_truth_and_leaves_names_alone():
    for written in (["--quiet", "true"], ["--quiet=TRUE"], ["--quiet"]):
        command, rest = parse(["train", *written, "burgers-demo", "--training.steps", "7"])
        assert (command.quiet, command.name, rest) == (True, "burgers-demo", ["--training.steps", "7"])
    command, _ = parse(["train", "burgers-demo", "--quiet=false", "--out", "true"])
    assert (command.quiet, command.out) == (False, Path("true"))
    command, _ = parse(["inspect", "--verify", "x"])
    assert (command.verify, command.file) == (True, Path("x"))
    command, _ = parse(["zoo", "add", "outputs/a", "--card_only=true", "--half", "false"])
    assert (command.action.card_only, command.action.half) == (True, False)


def test_dropping_horizon_and_region_can_be_set_for_every_recipe_and_switched_off(capsys):
    from oformer.experiments.recipes import RECIPES
    from oformer.training.losses import Region
    from oformer.training.schedules import Drop, Horizon

    settings = [
        "--training.drop.keep", "0.4", "0.9", "--training.horizon.first", "2",
        "--training.loss.region.box", "0", "1", "0", "2", "--training.loss.scale", "normalized",
    ]  # fmt: skip
    for name in ("burgers-demo", "burgers-2048", "ns2-full", "airfoil", "darcy-141-fno", "electro-aug-gnn"):
        recipe = RECIPES[name]
        before = recipe.training
        changed = override(recipe, settings).training
        drop, horizon, region = before.drop or Drop(), before.horizon or Horizon(first=9), before.loss.region
        assert changed.drop == replace(drop, keep=(0.4, 0.9))
        assert changed.horizon == replace(horizon, first=2)
        assert changed.loss.region == replace(region or Region(box=(0, 0, 0, 0)), box=(0.0, 1.0, 0.0, 2.0))
        off = override(recipe, ["--training.drop", "none", "--training.horizon=none", "--training.steps", "7"]).training
        assert (off.drop, off.horizon, off.steps) == (None, None, 7)
    with pytest.raises(SystemExit):
        override(RECIPES["burgers-2048"], ["--training.horizon.ramp", "0.4"])
    assert "--training.horizon.first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        override(RECIPES["burgers-2048"], ["--training.loss.region.box", "0", "1", "0", "1"])
    assert "the scale `normalized` for a loss with a region" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        override(RECIPES["burgers-2048"], ["--help"])
    assert "Off in this recipe: --training.drop, --training.horizon," in " ".join(capsys.readouterr().out.split())
