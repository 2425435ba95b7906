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
