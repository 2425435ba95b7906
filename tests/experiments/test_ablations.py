"""Each ablation changes exactly what its name says, trains, runs on fused modules too, and is found again."""

import dataclasses

import pytest
import torch

from oformer.checkpoint import checkpoints, load_checkpoint
from oformer.config import differences, to_json
from oformer.engine.swap import accelerate
from oformer.errors import InputError
from oformer.experiments.ablations import ABLATIONS, varied
from oformer.experiments.recipes import RECIPES, problem_named, recipe_named, stored_recipe
from oformer.experiments.scaled_down import scaled_down
from oformer.fields import collate
from oformer.training.find_data import open_data, train_and_scored
from oformer.training.loop import train
from oformer.training.schedules import Drop
from oformer.zoo.card import training_command

NS2, BURGERS = "ns2-full", "burgers-2048"
# By ablation, a recipe and all settings in which the variant differs from it.
CHANGES = {
    "attention=galerkin": (BURGERS, {"model.attention": "galerkin"}),
    "attention=fourier": (NS2, {"model.attention": "fourier"}),
    "attention=softmax": (NS2, {"model.attention": "softmax"}),
    "size=small": (NS2, {
        "model.encoder.width": 64, "model.query.width": 128, "model.query.fourier_features": 128,
        "model.query.hidden": [256], "model.propagator.width": 256, "model.decoder.hidden": [128, 128],
    }),
    "size=large": (NS2, {
        "model.encoder.width": 128, "model.query.width": 256, "model.query.fourier_features": 256,
        "model.query.hidden": [512], "model.propagator.width": 512, "model.decoder.hidden": [256, 256],
    }),
    "position=appended": (NS2, {"model.position": "appended"}),
    "norm=points": (NS2, {"model.norm": "points"}),
    "norm=points-detached": (BURGERS, {"model.norm": "points-detached"}),
    "norm=channels": ("electro", {"model.norm": "channels"}),
    "norm=layernorm": (BURGERS, {"model.norm": "layernorm"}),
    "norm=none": (NS2, {"model.norm": "none"}),
    "start=xavier-scaled": (BURGERS, {"model.start": "xavier-scaled"}),
    "start=orthogonal": (BURGERS, {"model.start": "orthogonal"}),
    "start=xavier": (BURGERS, {"model.start": "xavier"}),
    "features=off": (BURGERS, {
        "model.query.fourier_features": 0, "model.query.activation_first": False, "model.query.hidden": [96],
    }),
    "feedforward=off": ("darcy-141", {"model.query.feedforward": False}),
    "drop=on": (NS2, {"training.drop": to_json(Drop(0.2, (0.5, 1.0), "scaled"))}),
    **{f"samples={count}": (NS2, {"data.limit": count}) for count in (500, 1000, 2000, 5000)},
}  # fmt: skip
# Of Burgers; it has the others already, or too few samples.
TRAINED = [n for n in ABLATIONS if n not in ("attention=fourier", "norm=channels", "samples=2000", "samples=5000")]


def test_each_ablation_changes_what_its_name_says_and_nothing_else():
    assert set(CHANGES) == set(ABLATIONS)
    for name, (base, expected) in CHANGES.items():
        variant = recipe_named(f"{base}+{name}")
        found = {w: new for w, _, new in differences(to_json(RECIPES[base]), to_json(variant)) if w != "paper"}
        assert found == {"name": f"{base}+{name}", **expected}
        assert variant.paper.startswith(ABLATIONS[name].place)
        assert training_command(variant) == f"oformer train {base}+{name}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The scaled-down samples that all variants of Burgers share."""
    small = scaled_down(RECIPES[BURGERS])
    folder = tmp_path_factory.mktemp("datasets")
    return open_data(dataclasses.replace(small, data=dataclasses.replace(small.data, train=12, test=4)), folder)


@pytest.mark.parametrize("name", TRAINED)
def test_a_variant_trains_and_is_found_again_from_its_checkpoint(name, data, tmp_path):
    recipe = scaled_down(recipe_named(f"{BURGERS}+{name}"))
    limit = 5 if recipe.data.limit else None
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, train=12, test=4, limit=limit),
        training=dataclasses.replace(recipe.training, steps=2, batch=2, log_every=1),
    )
    torch.manual_seed(recipe.training.seed)
    start = recipe.model.build(recipe.data_spec())
    splits = train_and_scored(data, recipe)
    assert len(splits[0]) == (limit or 12)
    outcome = train(recipe, tmp_path / "run", splits, quiet=True, tensorboard=False)
    assert outcome.finished
    again = load_checkpoint(checkpoints(tmp_path / "run")[-1])
    assert stored_recipe(again.recipe) == recipe
    batch = collate([data[i] for i in range(3)])
    ours, theirs = outcome.operator.state_dict(), again.operator.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    with torch.no_grad():
        fields = batch.input.to(torch.float64), batch.query.to(torch.float64)
        exact = again.operator.double()(*fields)
        assert torch.allclose(accelerate(again.operator)(*fields), exact, rtol=1e-9, atol=1e-12)
    moved = {n for n, p in start.named_parameters() if not torch.equal(p, outcome.operator.model.get_parameter(n))}
    assert {"lift.layers.0.weight", "blocks.0.attention.q.weight", "cross.attention.v.weight"} <= moved


def test_changes_are_joined_in_their_order_and_are_part_of_the_name():
    both = recipe_named("ns2-full+norm=none,attention=softmax")
    assert (both.model.norm, both.model.attention) == ("none", "softmax")
    assert both == varied(varied(RECIPES[NS2], "norm=none"), "attention=softmax")
    assert problem_named("ns2-full+norm=none") == (RECIPES[NS2].problem, RECIPES[NS2].data)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "ns2-full+attention=sofmax",
            r"a change of a recipe, got `attention=sofmax`\. Did you mean `attention=softmax`",
        ),
        ("ns2-full+norm=channels", r"an ablation that changes `ns2-full`, got norm=channels, which it already has"),
        ("ns2-part-fno+attention=softmax", r"a recipe of OFormer for this ablation, got `ns2-part-fno`, of FNO"),
        ("burgers-2048+samples=5000", r"`data.limit` from 1 to 1024.*got 5000"),
        ("ns2-fulll+norm=none", r"the name of a recipe, got `ns2-fulll`"),
    ],
)
def test_what_does_not_fit_is_refused(name, sentence):
    with pytest.raises(InputError, match=sentence):
        recipe_named(name)
