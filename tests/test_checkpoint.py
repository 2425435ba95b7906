"""A checkpoint comes back as it went, and says so when it cannot."""

import json

import pytest
import torch

from oformer.checkpoint import CONFIG, WEIGHTS, Checkpoint, load_checkpoint, save_checkpoint
from oformer.config import to_json
from oformer.errors import InputError
from oformer.fields import Card, collate
from oformer.models import Operator
from tests.tiny import tiny_recipe


@pytest.fixture
def folder(tmp_path, tiny_data):
    recipe = tiny_recipe()
    torch.manual_seed(3)
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    scores = {"error": 0.5, "median": 0.4, "worst": 0.9, "count": 4}
    save_checkpoint(
        tmp_path / "saved",
        Checkpoint(operator, "tiny", 7, scores, to_json(recipe), Card("Burgers"), {"data seed": 0}),
    )
    return tmp_path / "saved", operator.eval()


def test_save_load_same_answer_and_same_story(folder, tiny_data):
    path, operator = folder
    loaded = load_checkpoint(path)
    batch = collate([tiny_data[0], tiny_data[1]])
    with torch.no_grad():
        assert torch.equal(loaded.operator(batch.input, batch.query), operator(batch.input, batch.query))
    assert (loaded.name, loaded.step, loaded.scores["error"]) == ("tiny", 7, 0.5)
    assert loaded.recipe == to_json(tiny_recipe())
    assert loaded.data == Card("Burgers")


def test_what_training_saw_is_kept_and_missing_in_what_is_older(folder):
    path, operator = folder
    assert operator.seen is not None
    assert load_checkpoint(path).operator.seen == operator.seen
    config = json.loads((path / CONFIG).read_text())
    del config["seen"]
    (path / CONFIG).write_text(json.dumps(config))
    assert load_checkpoint(path).operator.seen is None


def test_the_folder_holds_three_readable_files_and_no_pickle(folder):
    path, operator = folder
    assert sorted(p.name for p in path.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (path / "README.md").read_text()
    assert f"{sum(p.numel() for p in operator.model.parameters()):,}" in card
    assert "50.0000%" in card
    assert json.loads((path / CONFIG).read_text())["model"]["type"] == "OFormerConfig"


def edit(path, **changes):
    config = json.loads((path / CONFIG).read_text())
    config.update(changes)
    (path / CONFIG).write_text(json.dumps(config))


def test_a_newer_version_is_refused_with_advice(folder):
    edit(folder[0], version=99)
    with pytest.raises(InputError, match=r"version 99.*upgrade"):
        load_checkpoint(folder[0])


def test_foreign_and_broken_files_are_refused(folder, tmp_path):
    path, _ = folder
    with pytest.raises(InputError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    weights = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(weights[:-100])
    with pytest.raises(InputError, match="truncated"):
        load_checkpoint(path)
    (path / WEIGHTS).write_bytes(weights)
    edit(path, format="something-else")
    with pytest.raises(InputError, match="foreign"):
        load_checkpoint(path)
    (path / CONFIG).write_text("{")
    with pytest.raises(InputError, match="JSON"):
        load_checkpoint(path)


def test_weights_of_another_model_are_refused(folder):
    path, _ = folder
    config = json.loads((path / CONFIG).read_text())
    config["model"]["encoder"]["width"] = 32
    (path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError, match="do not belong together"):
        load_checkpoint(path)


def test_an_unknown_setting_is_an_error_not_a_default(folder):
    path, _ = folder
    config = json.loads((path / CONFIG).read_text())
    config["model"]["encoder"]["widht"] = 16
    (path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InputError, match="widht"):
        load_checkpoint(path)


def test_saving_over_a_checkpoint_replaces_it_whole(folder):
    path, operator = folder
    save_checkpoint(path, Checkpoint(operator, "second", 8))
    assert load_checkpoint(path).name == "second"
    assert not list(path.parent.glob(".*"))
