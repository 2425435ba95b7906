"""A checkpoint comes back as it went, and says so when it cannot."""

import json
import time

import numpy as np
import pytest
import torch

from oformer.checkpoint import CHECKSUMS, CONFIG, WEIGHTS, Checkpoint, load_checkpoint, save_checkpoint
from oformer.config import to_json
from oformer.errors import InputError
from oformer.fields import Card, collate
from oformer.files import map_arrays, save_arrays
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
    (path / CHECKSUMS).unlink()
    assert load_checkpoint(path).operator.seen is None


def test_the_folder_holds_readable_files_and_no_pickle(folder):
    path, operator = folder
    assert sorted(p.name for p in path.iterdir()) == ["README.md", "checksums.json", "config.json", "model.safetensors"]
    card = (path / "README.md").read_text()
    assert f"{sum(p.numel() for p in operator.model.parameters()):,}" in card
    assert "50.0000%" in card
    assert json.loads((path / CONFIG).read_text())["model"]["type"] == "OFormerConfig"


def edit(path, **changes):
    """Change config.json as somebody would who knows what they do: without checksums that tell it."""
    config = json.loads((path / CONFIG).read_text())
    config.update(changes)
    (path / CONFIG).write_text(json.dumps(config))
    (path / CHECKSUMS).unlink(missing_ok=True)


def edit_model(path, part, **changes):
    model = json.loads((path / CONFIG).read_text())["model"]
    model[part].update(changes)
    edit(path, model=model)


def edit_weights(path, change):
    """Replace arrays of model.safetensors by what a function makes of them."""
    save_arrays(path / WEIGHTS, {n: change(n, array.copy()) for n, array in map_arrays(path / WEIGHTS).items()})
    (path / CHECKSUMS).unlink(missing_ok=True)


def test_a_newer_version_is_refused_with_advice(folder):
    edit(folder[0], version=99)
    with pytest.raises(InputError, match=r"version 99.*upgrade"):
        load_checkpoint(folder[0])


def test_foreign_and_broken_files_are_refused(folder, tmp_path):
    path, _ = folder
    with pytest.raises(InputError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    weights = (path / WEIGHTS).read_bytes()
    (path / CHECKSUMS).unlink()
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
    edit_model(folder[0], "encoder", width=8)
    with pytest.raises(InputError, match="do not belong together"):
        load_checkpoint(folder[0])


def test_an_unknown_setting_is_an_error_not_a_default(folder):
    edit_model(folder[0], "encoder", widht=16)
    with pytest.raises(InputError, match="widht"):
        load_checkpoint(folder[0])


def test_saving_over_a_checkpoint_replaces_it_whole(folder):
    path, operator = folder
    save_checkpoint(path, Checkpoint(operator, "second", 8))
    assert load_checkpoint(path).name == "second"
    assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_flipped_bit_is_refused_unless_the_checksums_are_skipped(folder, name):
    path, _ = folder
    content = bytearray((path / name).read_bytes())
    place = content.rindex(b"0.5") + 2 if name == CONFIG else len(content) - 1  # a score; a digit of a weight
    content[place] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} as it was written.*one that was changed.*verify=False"):
        load_checkpoint(path)
    assert load_checkpoint(path, verify=False).name == "tiny"
    (path / CHECKSUMS).unlink()  # as in folders of older versions
    assert load_checkpoint(path).name == "tiny"


def test_a_checksum_that_is_missing_or_no_list_is_refused(folder):
    path, _ = folder
    for content in ({"files": {}}, {"files": [1]}, [], {}):
        (path / CHECKSUMS).write_text(json.dumps(content))
        with pytest.raises(InputError, match="checksums"):
            load_checkpoint(path)


def test_a_remark_in_the_readme_is_no_damage(folder):
    path, _ = folder
    (path / "README.md").write_text("Mine.")
    assert load_checkpoint(path).name == "tiny"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder, value):
    path, operator = folder

    def spoil(name, array):
        if name == "model.lift.layers.0.weight":
            array.flat[3] = value
        return array

    edit_weights(path, spoil)
    with pytest.raises(InputError, match=r"NaN or infinity in `model\.lift\.layers\.0\.weight`"):
        load_checkpoint(path)
    with torch.no_grad():
        operator.model.lift.layers[0].weight[0, 0] = value
    with pytest.raises(InputError, match=r"`model\.lift\.layers\.0\.weight`"):
        save_checkpoint(path, Checkpoint(operator, "spoilt"))
    assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize(
    "key", ["version", "name", "step", "model", "spec", "normalization", "scores", "data", "recipe"]
)
@pytest.mark.parametrize("value", ["absent", {"type": ["odd"]}, 1.5])
def test_a_missing_or_mistyped_key_is_named(folder, key, value):
    path, _ = folder
    edit(path, **{key: value})
    if value == "absent":
        config = json.loads((path / CONFIG).read_text())
        del config[key]
        (path / CONFIG).write_text(json.dumps(config))
    if value == {"type": ["odd"]} and key in ("scores", "recipe"):
        load_checkpoint(path)  # these hold whatever was written: nobody computes with them here
        return
    with pytest.raises(InputError, match=key):
        load_checkpoint(path)


def test_the_chunk_of_a_recipe_must_be_a_number_of_points(folder):
    edit(folder[0], recipe={"training": {"chunk": "many"}})
    with pytest.raises(InputError, match=r"number of points or null at `recipe\.training\.chunk`.*'many'"):
        load_checkpoint(folder[0])


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("encoder", {"width": 20_000}),
        ("encoder", {"depth": 1_000_000}),
        ("encoder", {"depth": 300}),
        ("encoder", {"lift_layers": 10**12}),
        ("query", {"hidden": [4000, 4000]}),
        ("query", {"fourier_features": 10**9}),
        ("propagator", {"layers": 10**9}),
        ("decoder", {"hidden": [10**15]}),
    ],
)
def test_a_model_far_larger_than_its_weights_is_refused_before_it_is_built(folder, part, changes):
    edit_model(folder[0], part, **changes)
    start = time.monotonic()
    with pytest.raises(InputError, match=r"config\.json.*model\.safetensors"):
        load_checkpoint(folder[0])
    assert time.monotonic() - start < 5  # hours, or all memory, if it were built first


@pytest.mark.parametrize(
    "changes",
    [
        {"in_channels": 10**10},
        {"out_channels": 10**10},
        {"in_categories": 10**10},
        {"in_times": 10**10},
        {"grid": [10**10]},
    ],
)
def test_a_problem_far_larger_than_the_weights_is_refused_before_the_model_is_built(folder, changes):
    config = json.loads((folder[0] / CONFIG).read_text())
    scales = {**config["normalization"], "input": "pointwise" if "grid" in changes else "channel"}
    edit(folder[0], spec=config["spec"] | changes, normalization=scales)
    with pytest.raises(InputError, match=r"sizes at `model` and `spec` of .*config\.json.*10,000,000,000"):
        load_checkpoint(folder[0])


@pytest.mark.parametrize("change", [{"heads": 3}, {"dropout": 7.0}, {"width": 18}])
def test_a_model_that_cannot_be_built_is_one_sentence(folder, change):
    edit_model(folder[0], "encoder", **change)
    with pytest.raises(InputError, match="Expected"):
        load_checkpoint(folder[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, a: a.reshape(-1) if name == "model.lift.layers.0.weight" else a, "shape"),
        (lambda name, a: a.view(np.int32) if name == "model.lift.layers.0.weight" else a, "of integers and shape"),
    ],
)
def test_weights_of_another_shape_or_kind_are_refused(folder, change, message):
    edit_weights(folder[0], change)
    with pytest.raises(InputError, match=rf"model\.lift\.layers\.0\.weight.*of floats and shape.*{message}"):
        load_checkpoint(folder[0])
