"""Training by name, as the command does it."""

import torch

from oformer.experiments.train import train
from oformer.training.find_data import open_data, train_and_scored
from tests.tiny import tiny_recipe


def test_a_name_is_enough_and_trains_what_its_parts_train(tmp_path, monkeypatch):
    """Into outputs/NAME, on data that are made where they are missing; another call goes on there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from tests.tiny import tiny_recipe\n\nrecipe = tiny_recipe(steps=3)\n")
    quiet = {"quiet": True, "tensorboard": False, "device": "cpu"}
    named = train("mine.py", **quiet)
    assert (tmp_path / "outputs" / "tiny" / "recipe.json").is_file()
    recipe = tiny_recipe(steps=3)
    data = train_and_scored(open_data(recipe, tmp_path / "datasets"), recipe)
    parts = train(recipe, tmp_path / "run", data, **quiet)
    pairs = zip(named.operator.parameters(), parts.operator.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert train("mine.py", **quiet).step == 3
