"""Cards: what one says is what a measurement gives, and its page shows its numbers."""

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer import zoo
from oformer.checkpoint import find_checkpoint, load_checkpoint, zoo_folder
from oformer.cli import parse
from oformer.cli.options import override
from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.experiments.published import LARGEST, ROWS, headline
from oformer.experiments.recipes import recipe_named
from oformer.models import Operator
from oformer.problems import Darcy, Electrostatics
from oformer.training.evaluate import Momentum, errors, evaluate
from oformer.training.find_data import open_data, train_and_test, whole_dataset
from oformer.training.journal import read_journal
from oformer.zoo.add import other_views
from oformer.zoo.card import Fresh, card_page, percentile, read_card, training_command
from tests.tiny import TINY_FLOW, tiny_recipe
from tests.zoo.cards import card_of, rewrite, seeded

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_card_says_what_measuring_by_hand_says(work):
    card, recipe = read_card(work / "zoo" / "tiny"), seeded(1)
    checkpoint = load_checkpoint(find_checkpoint(work / "seed1"))
    test = train_and_test(open_data(recipe, work / "datasets"), recipe)[1]
    found = errors(checkpoint.operator, test, recipe.training.batch)
    assert card.data.checksum == whole_dataset(recipe, work / "datasets").checksum
    assert card.by_sample == pytest.approx(found.relative.tolist(), rel=1e-5)
    assert card.scores.error == pytest.approx(found.relative.mean().item(), rel=1e-6)
    assert card.scores.worst == pytest.approx(max(card.by_sample), rel=1e-5)
    assert max(card.by_sample) == card.by_sample[card.scores.worst_sample]
    assert card.scores.by_step == pytest.approx(found.by_step.mean(0).tolist(), rel=1e-6)
    assert card.seeds[0].scores.error == pytest.approx(card.scores.error, rel=1e-6)
    assert (card.data.seed, card.data.train, card.data.test) == (0, 12, 4)
    assert card.parameters == sum(p.numel() for p in checkpoint.operator.model.parameters())
    assert card.seeds[0].steps == 8
    assert card.averaged is not None
    assert card.averaged.error == pytest.approx(
        evaluate(checkpoint.operator, test, 4, recipe.problem, 2).error, rel=1e-6
    )
    views = {row.label: row.error for row in card.views}
    for share in (0.95, 0.75, 0.5, 0.25):
        sparse = test.with_view(View(points=(32,), keep=share))
        assert views[f"{share:.0%} of the input points"] == pytest.approx(evaluate(checkpoint.operator, sparse).error)
    assert views["16 points"] == pytest.approx(
        evaluate(checkpoint.operator, test.with_view(View(points=(16,)))).error, rel=1e-6
    )
    assert card.not_measured == {}
    records = read_journal(work / "zoo" / "tiny")
    assert [r["step"] for r in records if r["kind"] == "evaluate"] == [4, 8]


def test_the_page_of_a_card_shows_its_numbers(work):
    card, page = read_card(work / "zoo" / "tiny"), (work / "zoo" / "tiny" / "README.md").read_text()
    for number in (card.scores.error, card.scores.median, card.scores.worst, card.averaged.error, *(
        row.error for row in card.views
    )):  # fmt: skip
        assert f"{number:.4e}" in page
    sums = card.data.test_checksum, card.data.checksum
    for word in (*sums, "data seed 0", "8 steps, seed 1", "| licence | MIT |", "CPU"):
        assert word in page


def test_a_page_begins_with_what_it_predicts_and_how_to_call_it_and_ends_with_checksums(work):
    page = (work / "zoo" / "tiny" / "README.md").read_text()
    card = read_card(work / "zoo" / "tiny")
    order = [
        "# tiny\n\nPredicts u at time 1 from u at time 0.",
        f"**Test error:** relative L2 {100 * card.scores.error:.3g}%",
        'Predictor("tiny")',
        "## Problem",
        "## Errors",
        "## Error at other input points",
        "## Training and data",
        "SHA-256",
    ]
    assert [page.index(words) for words in order] == sorted(page.index(words) for words in order)
    assert page.startswith(order[0])


def test_a_percentile_is_an_error_that_was_measured():
    fresh = Fresh(10, tuple(map(float, range(100, 0, -1))), ())
    assert (percentile(fresh.by_sample, 99), fresh.median, fresh.worst) == (99.0, 50.0, 100.0)
    assert fresh.worst_sample == 10
    assert percentile((3.0,), 99) == 3.0


def test_a_card_of_another_version_is_one_sentence(here):
    rewrite(here / "tiny", something="new")
    with pytest.raises(InputError, match="unknown something"):
        read_card(here / "tiny")


def test_a_part_of_the_samples_is_compared_only_where_that_means_something():
    assert card_of().expected() == 0.1
    assert card_of().expected(2) == pytest.approx(0.15)
    with pytest.raises(InputError, match="several channels"):
        card_of(channels=3).expected(2)
    with pytest.raises(InputError, match="1 to 4"):
        card_of().expected(5)


def test_half_and_double_resolution_where_the_data_have_no_such_grid(tiny_data):
    """421 points of Darcy flow thin to 211, 141, 106, 85...: of 141 half is 71, and 211 is the nearest finer one."""
    recipe = tiny_recipe()
    torch.manual_seed(0)

    def looked_at(problem, view, count=2):
        samples = problem.samples(range(count), 0)
        test = PointDataset(samples, view, spec=problem.spec)
        operator = Operator(
            dataclasses.replace(recipe.model, attention="galerkin").build(test.spec), recipe.normalization
        ).fit(test)
        rows, missing = other_views(operator.eval(), test)
        return {row.label: row.kind for row in rows if row.kind != "sparse"}, missing

    darcy = Darcy(points=31)  # strides 1, 2, 3 and 6 leave 31, 16, 11 and 6
    kinds, missing = looked_at(darcy, View(points=(11, 11)))
    assert kinds == {"11 x 11 points": "trained", "6 x 6 points": "resolution", "16 x 16 points": "resolution"}
    assert missing == {"double resolution": "the nearest grid in the data has 16 x 16 points"}
    kinds, missing = looked_at(TINY_FLOW, View())
    assert kinds == {"16 x 16 points": "trained", "8 x 8 points": "resolution"}
    assert missing == {"double resolution": "the data have 16 x 16 points"}
    kinds, missing = looked_at(Electrostatics(), View())
    assert kinds == {}
    assert set(missing.values()) == {"the points are no regular grid"}


def physical_squares(*errors: float) -> list[float]:
    """Squared errors of electrostatics in physical units, from those in the units of the paper's table."""
    return [error * scale**2 for error, scale in zip(errors, LARGEST["electro"], strict=True)]


def test_each_row_measures_what_the_paper_measures():
    scores = card_of(
        channels=3,
        error=0.5,
        mean_squared=physical_squares(2e-4, 1e-3, 3e-3),
        momentum=Momentum(rmse=12.0, relative=0.08, as_released=15.0),
    ).scores
    rows = {(row.recipe, row.quantity): row for row in ROWS}
    assert rows["electro", "squared error of potential"].measured(scores) == pytest.approx(0.2)
    assert rows["electro", "squared error of field"].measured(scores) == pytest.approx(2.0)
    assert rows["airfoil", "relative momentum"].measured(scores) == pytest.approx(8.0)
    assert rows["airfoil", "density times momentum"].measured(scores) == pytest.approx(15.0)
    assert rows["ns1", "relative L2"].measured(scores) == pytest.approx(0.5)
    assert rows["burgers-512", "relative L2"].measured(scores) == pytest.approx(500.0)
    with pytest.raises(InputError, match="relative momentum"):
        rows["airfoil", "relative momentum"].measured(card_of().scores)


def _headline(card):
    return headline(card.name, card.scores)


def test_the_error_of_a_card_in_a_few_words_is_the_paper_s_quantity():
    assert _headline(card_of("burgers-2048-plus", error=0.000674)) == "0.0674%"
    assert _headline(card_of("of-my-own", error=0.25)) == "25.0000%"
    physical = physical_squares(3.7e-5, 2e-4, 4e-4)
    squares = card_of("electro-aug", error=1.02, mean_squared=physical, mean_squared_scaled=[9.0] * 3)
    assert _headline(squares) == "squared 0.037e-3, 0.300e-3"
    near = Momentum(rmse=12.0, relative=0.0817, as_released=15.469)
    assert _headline(card_of("airfoil", channels=4, momentum=near)) == "momentum 8.17e-2, 15.469"


def test_the_command_of_a_card_trains_its_recipe():
    for name, change in (
        ("burgers-2048", ["--training.precision", "tf32", "--training.seed", "3", "--training.ema", "0.9"]),
        ("ns2-part", ["--model.encoder.multipliers", "2", "3", "--training.loss.no-derivative-rows"]),
        ("ns2-full", ["--training.optimizer.clip", "all", "1.5", "--training.augment", "--data.view.in-times", "5"]),
        ("darcy-141", []),
    ):
        recipe = override(recipe_named(name), change)
        command = training_command(recipe)
        verb, rest = parse(shlex.split(command)[1:])
        assert override(recipe_named(verb.name), rest) == recipe
        assert command.startswith(f"oformer train {name}")
    logged = override(recipe_named("ns1"), ["--training.log-every", "7"])
    assert training_command(logged) == "oformer train ns1"
    assert "of your own `tiny`" in training_command(tiny_recipe())
    ns1 = recipe_named("ns1")
    without = dataclasses.replace(ns1, training=dataclasses.replace(ns1.training, horizon=None))
    assert training_command(without) == "oformer train ns1 (and another training.horizon)"


def test_the_pages_are_those_of_the_cards(monkeypatch):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    for folder in zoo.card_folders(ROOT / "runs"):
        card = read_card(folder)
        page = card_page(card, load_checkpoint(folder) if card.with_weights else None)
        assert (folder / "README.md").read_text() == page, f"{folder.name}: run `oformer zoo table`"


@pytest.mark.filterwarnings("ignore::oformer.errors.OutsideTraining")
@pytest.mark.parametrize("name", ["burgers-demo", "darcy-141", "electro", "magneto-aug", "ns2-part-plus"])
def test_what_a_page_shows_works(name, monkeypatch):
    """Its code runs on arrays of the shapes that it tells, and answers with what it tells."""
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    page = (zoo_folder() / name / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    shapes = {
        array: tuple({"points": 50, "queries": 7}.get(size) or int(size) for size in shape.split(", "))
        for array, shape in re.findall(r"^\| `([\w.]+)` \| \((.*?)\) \|", page, re.MULTILINE)
    }
    told = shapes.pop("answer.values")
    known = {array: np.random.default_rng(0).random(shape) for array, shape in shapes.items()}
    exec(code, known)
    assert tuple(known["answer"].values.shape) == told
    assert torch.isfinite(known["answer"].values).all()
