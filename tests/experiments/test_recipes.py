"""Each row of OFormer in the paper's tables has a recipe, with the numbers of the paper's code."""

import dataclasses
import json
import re

import pytest
import torch

from oformer.config import differences, from_json, to_json
from oformer.errors import InputError
from oformer.experiments.items import BASELINE_ROWS
from oformer.experiments.published import ROWS
from oformer.experiments.recipes import BASELINES, RECIPES, problem_named, recipe_named, stored_recipe
from oformer.fields import Field
from oformer.meshes.grids import periodic_grid
from oformer.models import OFormerConfig, Operator
from oformer.problems import Darcy
from oformer.problems.navier_stokes import INSTANCES
from oformer.training.losses import Loss, Region
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.schedules import Horizon

PAPER = {
    "burgers-512", "burgers-2048", "burgers-8192", "darcy-141", "darcy-211", "ns1", "ns2-part", "ns2-full", "ns3",
    "ns-mix", "electro", "electro-aug", "magneto", "magneto-aug", "airfoil",
}  # fmt: skip

# Of the published models, as the papers and the released code have them.
PARAMETERS = {
    "burgers-2048-fno": 549_569, "darcy-141-fno": 2_368_001, "ns2-part-fno": 414_517,
    "burgers-2048-mwt": 500_137, "darcy-141-mwt": 9_807_873, "ns2-part-mwt": 179_186_009,
    "burgers-2048-galerkin-transformer": 530_305, "darcy-141-galerkin-transformer": 2_220_829,
    "electro-gnn": 280_835, "magneto-gnn": 280_835, "electro-aug-gnn": 280_835, "magneto-aug-gnn": 280_835,
}  # fmt: skip
UNPRINTED = {"darcy-141-mwt"}  # baselines of which the paper prints no error

each_recipe = pytest.mark.parametrize("name", RECIPES)


def test_each_row_of_oformer_in_the_paper_s_tables_has_a_recipe():
    assert {name for name, recipe in RECIPES.items() if recipe.paper.startswith(("Table", "Section"))} == PAPER


def test_baselines_are_other_models_of_published_size_with_the_errors_printed_for_them():
    assert set(BASELINES) == set(PARAMETERS)
    for name, recipe in BASELINES.items():
        assert not isinstance(recipe.model, OFormerConfig)
        with torch.device("meta"):
            model = recipe.model.build(recipe.data_spec())
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
        data = max((row.recipe for row in ROWS if name.startswith(f"{row.recipe}-")), key=len)
        rows = [row for row in ROWS if row.recipe == data]
        assert (recipe.data, recipe.problem) == (RECIPES[data].data, RECIPES[data].problem)
        if name in UNPRINTED:
            assert recipe.paper.startswith(f"baseline, not in {rows[0].table}: ")
            assert model.name not in rows[0].errors
            continue
        found = re.fullmatch(r"baseline, (Table \d), (.+?) at .*: (.+)", recipe.paper)
        assert found is not None
        table, other, printed = found.groups()
        assert table == rows[0].table
        assert BASELINE_ROWS[name] == (data, other)
        expected = [row.errors[other] * row.unit for row in rows]
        assert [float(number) for number in printed.split(" / ")] == pytest.approx(expected)


@each_recipe
def test_a_recipe_knows_its_own_name_and_says_what_it_is(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe.paper
    assert f"{recipe.training.steps:,} steps" in recipe.describe()


def test_a_problem_is_found_by_the_name_of_a_recipe_of_a_problem_or_of_an_instance():
    assert problem_named("ns1") == (RECIPES["ns1"].problem, RECIPES["ns1"].data)
    assert problem_named("darcy") == (Darcy(), Data(train=900, test=100))
    assert problem_named("ns2") == (INSTANCES["ns2"], Data(train=900, test=100))
    with pytest.raises(InputError, match=r"recipe or problem.*Did you mean `darcy`"):
        problem_named("darci")


def test_a_stored_recipe_is_the_one_that_was_written():
    recipe = RECIPES["burgers-demo"]
    content = to_json(recipe)
    assert stored_recipe(content) == recipe
    with pytest.raises(InputError, match="a checkpoint that knows its recipe"):
        stored_recipe(None)
    with pytest.raises(InputError, match=r"a problem of this package in the recipe, got `Heat`.*--recipe FILE\.py"):
        stored_recipe({**content, "problem": {"type": "Heat"}})


@each_recipe
def test_it_goes_through_json_and_comes_back_the_same(name):
    recipe = RECIPES[name]
    written = json.dumps(to_json(recipe), allow_nan=False)
    again = from_json(Recipe, json.loads(written))
    assert again == recipe
    assert to_json(again) == json.loads(written)
    assert isinstance(again.training.loss, Loss)
    assert type(again.model) is type(recipe.model)


@each_recipe
def test_it_builds_an_operator_that_answers(name):
    recipe = RECIPES[name]
    spec = recipe.data_spec()
    operator = Operator(recipe.model.build(spec), recipe.normalization).eval()
    known, asked = torch.rand(2, 5, spec.dim), torch.rand(2, 3, spec.dim)
    if operator.model.needs_grid:  # of any resolution that has its modes
        known = asked = periodic_grid((32,) * spec.dim, (1.0,) * spec.dim).float().expand(2, -1, -1)
    if not operator.model.answers_anywhere:
        asked = known
    values = torch.randn(2, spec.in_times, known.shape[1], spec.in_channels)
    if spec.in_categories:
        values[..., -1] = torch.randint(0, spec.in_categories, (2, 1, 5))
    flags = torch.randint(0, max(spec.query_categories, 2), (2, 1, asked.shape[1], spec.query_channels)).float()
    input, query = Field.of(known, values), Field.of(asked, flags)
    operator.check(input, query)
    with torch.no_grad():
        answer = operator(input, query)
    assert answer.shape == (2, spec.out_times, asked.shape[1], spec.out_channels)
    assert torch.isfinite(answer).all()


# Section 7 of the facts: kind, peak, weight decay, warm-up, first rate, last rate, clipping, batch, steps, horizon.
BOTH, WHOLE = (("encoder", 2.0), ("decoder", 2.0)), (("all", 2.0),)
SCHEDULES = {
    "burgers-512": ("adam", 8e-4, 0.2, 8e-8, 8e-12, (), 16, 20_000, None),
    "burgers-2048": ("adam", 8e-4, 0.2, 8e-8, 8e-12, (), 16, 20_000, None),
    "burgers-8192": ("adam", 8e-4, 0.2, 8e-8, 8e-12, (), 16, 20_000, None),
    "darcy-141": ("adam", 8e-4, 0.2, 8e-6, 8e-11, (), 8, 32_000, None),
    "darcy-211": ("adam", 8e-4, 0.2, 8e-6, 8e-11, (), 8, 32_000, None),
    "ns1": ("adamw", 6e-4, 0.3, 6e-8, 6e-12, BOTH, 10, 50_000, Horizon(16, 0.3)),  # docs/decisions.md: not as printed
    "ns2-part": ("adamw", 5e-4, 0.3, 5e-8, 5e-12, BOTH, 16, 32_000, Horizon(10, 0.16)),
    "ns2-full": ("adamw", 5e-4, 0.3, 5e-8, 5e-12, BOTH, 16, 128_000, Horizon(10, 0.16)),
    "ns3": ("adamw", 5e-4, 0.3, 5e-8, 5e-12, BOTH, 16, 32_000, Horizon(5, 0.16)),
    "ns-mix": ("adamw", 5e-4, 0.3, 5e-8, 5e-12, BOTH, 16, 128_000, Horizon(10, 0.16)),
    "electro": ("adamw", 5e-4, 0.1, 5e-6, 5e-10, WHOLE, 32, 32_000, None),
    "electro-aug": ("adamw", 5e-4, 0.1, 5e-6, 5e-10, WHOLE, 32, 32_000, None),
    "magneto": ("adamw", 5e-4, 0.1, 5e-6, 5e-10, WHOLE, 32, 32_000, None),
    "magneto-aug": ("adamw", 5e-4, 0.1, 5e-6, 5e-10, WHOLE, 32, 32_000, None),
    "airfoil": ("adamw", 6e-4, 0.3, 6e-8, 6e-12, WHOLE, 16, 48_000, Horizon(8, 0.2)),
}


@pytest.mark.parametrize("name", sorted(PAPER))
def test_training_is_that_of_the_schedule_table(name):
    kind, peak, warmup, first, last, clip, batch, steps, horizon = SCHEDULES[name]
    training = RECIPES[name].training
    optimizer, schedule = training.optimizer, training.schedule
    assert (optimizer.kind, optimizer.rate, optimizer.weight_decay) == (kind, peak, 1e-4)
    assert optimizer.clip == clip
    assert optimizer.amsgrad == name.startswith(("electro", "magneto"))
    assert (training.batch, training.steps, training.horizon) == (batch, steps, horizon)
    assert schedule.warmup == warmup
    rates = [optimizer.rate * schedule.at(step, steps)[0] for step in (0, int(warmup * steps) - 1, steps - 1)]
    assert rates == pytest.approx([first, peak, last], rel=1e-6)
    assert [schedule.at(step, steps)[1] for step in (0, int(warmup * steps) - 1, steps - 1)] == pytest.approx(
        [0.95, 0.85, 0.95]
    )
    # Nothing of our own is mixed into a row of the paper.
    assert training.drop is None
    assert training.ema is None
    assert not training.augment
    precision = {"burgers": "float16", "ns1": "float16", "electro": "tf32", "magneto": "tf32"}.get(
        name.partition("-")[0], "bfloat16"
    )
    assert training.precision == precision
    assert RECIPES[name].model.rotary == "ladder"


@pytest.mark.parametrize(
    ("names", "loss"),
    [
        (["burgers-512", "burgers-2048", "burgers-8192"], Loss("relative-sequence", "physical", 0.0, 1e-3)),
        (
            ["darcy-141", "darcy-211"],
            Loss("relative-sequence", "physical", 1e-6, 0.1, derivative_boundary="zero", derivative_rows=True),
        ),
        (
            ["ns1", "ns2-part", "ns2-full", "ns3", "ns-mix"],
            Loss("relative-step", "normalized", 1e-6, 0.05, derivative_boundary="periodic", derivative_rows=True),
        ),
        (["electro", "electro-aug", "magneto", "magneto-aug"], Loss("squared", "normalized")),
        (["airfoil"], Loss("squared", "normalized", region=Region(box=(-0.1, 1.4, -1.2, 1.2), weight=2.0))),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_losses_are_those_of_the_released_code(names, loss):
    for name in names:
        assert RECIPES[name].training.loss == loss


@pytest.mark.parametrize(
    ("name", "train", "test", "frames_in", "frames_out", "grid"),
    [
        ("burgers-512", 1024, 100, 1, 1, (512,)),
        ("burgers-8192", 1024, 100, 1, 1, (8192,)),
        ("darcy-141", 1024, 100, 1, 1, (141, 141)),
        ("darcy-211", 1024, 100, 1, 1, (211, 211)),
        ("ns1", 1000, 200, 10, 40, (64, 64)),
        ("ns2-part", 1000, 200, 10, 20, (64, 64)),
        ("ns2-full", 9800, 200, 10, 20, (64, 64)),
        ("ns3", 1000, 200, 10, 10, (64, 64)),
        ("ns-mix", 10_000, 1000, 10, 20, (64, 64)),
        ("electro", 8000, 2000, 1, 1, None),
        ("magneto-aug", 8000, 2000, 1, 1, None),
        ("airfoil", 1000, 100, 4, 22, None),
    ],
)
def test_data_are_those_of_the_paper(name, train, test, frames_in, frames_out, grid):
    recipe = RECIPES[name]
    spec = recipe.data_spec()
    assert (recipe.data.train, recipe.data.test) == (train, test)
    assert (spec.in_times, spec.out_times, spec.grid) == (frames_in, frames_out, grid)


@pytest.mark.parametrize(
    ("wrong", "near"), [("burgers2048", "burgers-2048"), ("ns2full", "ns2-full"), ("Electro", "electro")]
)
def test_an_unknown_name_shows_the_nearest(wrong, near):
    with pytest.raises(InputError, match=rf"the name of a recipe, got `{wrong}`\. Did you mean `{near}`\?") as caught:
        recipe_named(wrong)
    for name in RECIPES:
        assert name in str(caught.value)


def test_a_plus_has_the_size_and_the_data_of_the_faithful_recipe():
    """A variant may be better; not larger, not taught by more samples, and trained for longer only where it says so."""
    longer = {"burgers-512-plus": 3, "burgers-2048-plus": 3, "burgers-8192-plus": 3}
    variants = [name for name in RECIPES if name.endswith("-plus")]
    assert variants
    for name in variants:
        ours, faithful = RECIPES[name], RECIPES[name.removesuffix("-plus")]
        assert (ours.data, ours.problem) == (faithful.data, faithful.problem)
        steps = longer.get(name, 1) * faithful.training.steps
        assert (ours.training.steps, ours.training.batch) == (steps, faithful.training.batch)
        ours, faithful = (recipe.model.build(recipe.data_spec()) for recipe in (ours, faithful))
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in faithful.parameters())


def _changes(faithful: str) -> dict:
    """The settings in which the plus recipe differs from the faithful one."""
    before, after = (json.loads(json.dumps(to_json(RECIPES[faithful + end]))) for end in ("", "-plus"))
    return {where: new for where, _, new in differences(before, after) if where not in ("name", "paper")}


@pytest.mark.parametrize("name", ["burgers-512", "burgers-2048", "burgers-8192"])
def test_burgers_plus_differs_in_frequencies_optimizer_symmetries_and_steps_alone(name):
    assert _changes(name) == {
        "model.rotary": "integer",
        "normalization.coords": "as-is",
        "model.encoder.multipliers": [1.0],
        "model.query.multiplier": 1.0,
        "training.optimizer.kind": "muon",
        "training.optimizer.rate": 1e-3,
        "training.augment": True,
        "training.steps": 60_000,
    }
    assert RECIPES[f"{name}-plus"].training.optimizer.matrix_rate == 2e-3


@pytest.mark.parametrize("name", ["darcy-85", "darcy-141", "darcy-211"])
def test_darcy_plus_differs_in_frequencies_dropout_local_latents_optimizer_and_symmetries_alone(name):
    assert _changes(name) == {
        "model.encoder.multipliers": [256.0, 64.0, 16.0],
        "model.encoder.lift_dropout": 0.0,
        "model.encoder.dropout": 0.0,
        "model.query.multiplier": 64.0,
        "model.query.local": True,
        "training.optimizer.kind": "muon",
        "training.optimizer.rate": 1e-3,
        "training.augment": True,
    }
    assert RECIPES[f"{name}-plus"].training.optimizer.matrix_rate == 2e-3


@pytest.mark.parametrize(("name", "more"), [("ns2-part", {}), ("ns3", {"model.query.local": True})])
def test_navier_stokes_plus_differs_in_frequencies_optimizer_symmetries_and_local_latents_alone(name, more):
    assert _changes(name) == {
        "model.rotary": "integer",
        "normalization.coords": "as-is",
        "model.encoder.multipliers": [1.0],
        "model.query.multiplier": 1.0,
        "training.optimizer.kind": "muon",
        "training.optimizer.rate": 1e-3,
        "training.augment": True,
        **more,
    }
    assert RECIPES[f"{name}-plus"].training.optimizer.matrix_rate == 2e-3


def test_no_recipe_holds_out_training_samples():
    """The paper has no validation samples: `data.validation` is for whoever chooses settings."""
    assert not [name for name, recipe in RECIPES.items() if recipe.data.validation]


def test_a_recipe_that_holds_samples_out_says_how_many():
    recipe = RECIPES["ns3"]
    held_out = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation=100))
    assert recipe.describe().endswith("1,000 + 200 samples")
    assert held_out.describe().endswith("1,000 (100 held out) + 200 samples")


def test_transformers_and_graph_networks_are_trained_as_their_authors_do():
    burgers, darcy = (RECIPES[f"{name}-galerkin-transformer"].training for name in ("burgers-2048", "darcy-141"))
    network = RECIPES["magneto-aug-gnn"].training
    assert [(t.steps, t.batch) for t in (burgers, darcy, network)] == [(12_800, 8), (25_600, 4), (37_500, 32)]
    for t in (burgers, darcy, network):
        assert (t.optimizer.kind, t.optimizer.rate, t.optimizer.weight_decay) == ("adam", 1e-3, 0.0)
    assert [t.optimizer.clip for t in (burgers, darcy, network)] == [(("all", 0.999),), (("all", 0.99),), ()]
    # The published weights of the relative error of the gradient, shared out over the axes.
    assert burgers.loss.derivative == pytest.approx((0.1 / 2048) ** 0.5)
    assert darcy.loss.derivative == pytest.approx((0.5 / 141) ** 0.5 / 2)
    for t, ends, warmup in ((burgers, 1e-7, 0.2), (darcy, 1e-7, 0.3)):
        rates = [1e-3 * t.schedule.at(step, t.steps)[0] for step in (0, int(warmup * t.steps) - 1, t.steps - 1)]
        assert rates == pytest.approx([ends, 1e-3, ends / 1e4])
    assert {network.schedule.at(step, network.steps) for step in (0, 20_000, 37_499)} == {(1.0, 0.9)}


def test_a_known_name_gives_the_recipe():
    assert recipe_named("ns3") is RECIPES["ns3"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Training(steps=0), "`training.steps` of at least 1, got 0"),
        (lambda: Training(steps=1, log_every=0), "`training.log_every` of at least 1, got 0"),
        (lambda: Data(train=0, test=1), "at least one training and one test sample, got 0 and 1"),
        (lambda: Data(train=8, test=1, validation=8), "`data.validation` from 0 to 7, got 8. At least one of the 8"),
        (lambda: Data(train=8, test=1, validation=-1), "`data.validation` from 0 to 7, got -1"),
    ],
)
def test_refuses_settings_that_cannot_work(change, message):
    with pytest.raises(InputError, match=message):
        change()


def test_a_recipe_without_data_says_so():
    recipe = Recipe(name="mine", data=Data(1, 1), model=RECIPES["ns3"].model, training=Training(steps=1))
    with pytest.raises(InputError, match="a problem or a spec in recipe `mine`"):
        recipe.data_spec()


def test_an_edited_recipe_is_refused_with_its_place():
    content = to_json(RECIPES["ns3"])
    content["model"]["encoder"]["widht"] = content["model"]["encoder"].pop("width")
    with pytest.raises(InputError, match=r"model\.encoder.*unknown widht"):
        from_json(Recipe, content)
