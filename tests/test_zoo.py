"""The zoo: what a card says is what a measurement gives, test samples come back by their seed, damage is noticed."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer import zoo
from oformer.analysis import _ranks, traits
from oformer.cards import (
    CARD,
    DataRecord,
    Fresh,
    ModelCard,
    SeedRun,
    card_page,
    headline,
    measured,
    other_views,
    read_card,
    training_command,
)
from oformer.checkpoint import CHECKSUMS, WEIGHTS, load_checkpoint
from oformer.cli import _override, main, parse
from oformer.config import from_json
from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample
from oformer.files import map_arrays, save_arrays, sha256
from oformer.meshes.grids import thinning
from oformer.metrics import relative, squared
from oformer.models import Operator
from oformer.paper import BY_SHARE, DROPPED_IN_TRAINING, LARGEST, OURS, ROWS
from oformer.plots import style
from oformer.predict import Predictor, find_checkpoint
from oformer.problems import Burgers, Darcy, Electrostatics
from oformer.recipes import BASELINES, RECIPES, recipe_named
from oformer.results import HEADLINES, NOT_YET, OTHER_SETTINGS, between_marks, full_table, short_table, write_results
from oformer.shipped import zoo_folder, zoo_names
from oformer.training.datasets import open_data, open_fresh_samples, open_test_samples, train_and_test, whole_dataset
from oformer.training.evaluate import Momentum, Scores, errors, evaluate
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.recipe import Data, Recipe
from tests.tiny import TINY_FLOW, tiny_recipe
from tools.record_inputs import INPUT, seen_by

ROOT = Path(__file__).resolve().parent.parent


def seeded(seed: int):
    return tiny_recipe(steps=8, seed=seed, evaluate_every=4, checkpoint_every=8)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Datasets, two finished runs of the tiny recipe, and a zoo with the first of them in float32."""
    folder = tmp_path_factory.mktemp("zoo")
    data = open_data(seeded(1), folder / "datasets")
    own = folder / "of-ours"
    own.symlink_to(next((folder / "datasets").iterdir()))
    for seed in (1, 2):
        splits = train_and_test(data, seeded(seed))
        train(seeded(seed), folder / f"seed{seed}", splits, quiet=True, tensorboard=False, own=own)
    zoo.add(folder / "seed1", root=folder / "zoo", datasets=folder / "datasets", finer=True, average=2)
    return folder


@pytest.fixture
def here(work, tmp_path, monkeypatch):
    """A copy of that zoo, in which names are looked up; the working folder is an empty one."""
    shutil.copytree(work / "zoo", tmp_path / "zoo")
    monkeypatch.setenv("OFORMER_ZOO", str(tmp_path / "zoo"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "zoo"


def test_nothing_that_is_shipped_says_where_data_lay(work):
    """A run remembers it, in a file of its own that nobody else gets."""
    assert str(work) in (work / "seed1" / "data.json").read_text()
    shipped = [path for place in ("zoo", "seed1/checkpoints") for path in (work / place).rglob("*") if path.is_file()]
    assert {"card.json", "config.json", "model.safetensors", "README.md"} <= {path.name for path in shipped}
    for path in shipped:
        content = path.read_bytes()
        assert str(work).encode() not in content
        assert b"of-ours" not in content


def rewrite(folder: Path, **changes):
    content = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**content, **changes}))


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


def test_fresh_samples_follow_those_of_training_and_test(tmp_path):
    recipe = seeded(1)
    found = open_fresh_samples(recipe, tmp_path, 3)
    expected = PointDataset(recipe.problem.samples([16, 17, 18], 0), recipe.data.view, spec=recipe.problem.spec)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.input.values, other.input.values)
        torch.testing.assert_close(one.target, other.target)
    with pytest.raises(InputError, match="at least one fresh sample"):
        open_fresh_samples(recipe, tmp_path, 0)


def test_measuring_renews_the_errors_on_fresh_samples_and_nothing_else(here, work, capsys):
    before = read_card(here / "tiny")
    with pytest.raises(InputError, match="oformer zoo measure tiny"):
        zoo.compare("tiny", fresh=True)
    assert main(["zoo", "measure", "tiny", "--samples", "6", "--device", "cpu"]) == 0
    card = read_card(here / "tiny")
    fresh = card.fresh
    assert dataclasses.replace(card, fresh=None) == before
    assert fresh.first == 16
    dataset = open_fresh_samples(seeded(1), Path("datasets"), 6)
    by_hand = errors(load_checkpoint(here / "tiny").operator, dataset).relative
    assert fresh.by_sample == pytest.approx(by_hand.tolist(), rel=1e-5)
    page = (here / "tiny" / "README.md").read_text()
    for number in (fresh.mean, fresh.median, fresh.percentile(99), fresh.worst, card.scores.error):
        assert f"{number:.4e}" in page
    assert f"(sample {16 + int(by_hand.argmax())})" in page
    assert fresh.traits[0].name in page
    assert main(["zoo", "verify", "tiny", "--fresh", "--device", "cpu"]) == 0
    assert "6 samples" in capsys.readouterr().out
    assert abs(zoo.compare("tiny", fresh=True, samples=2).difference) < 2e-5
    shifted = {**dataclasses.asdict(fresh), "by_sample": [1.1 * error for error in fresh.by_sample]}
    rewrite(here / "tiny", fresh=shifted)
    assert main(["zoo", "verify", "tiny", "--fresh", "--device", "cpu"]) == 1
    assert main(["zoo", "verify", "tiny", "--device", "cpu"]) == 0
    added = read_card(zoo.add(work / "seed1", name="again", fresh=6, datasets=work / "datasets")).fresh
    assert added.by_sample == pytest.approx(fresh.by_sample, rel=1e-5)


def test_a_percentile_is_an_error_that_was_measured():
    fresh = Fresh(10, tuple(map(float, range(100, 0, -1))), ())
    assert (fresh.percentile(99), fresh.median, fresh.worst) == (99.0, 50.0, 100.0)
    assert fresh.worst_sample == 10
    assert Fresh(0, (3.0,), ()).percentile(99) == 3.0


def test_traits_begin_with_the_property_that_tells_the_worst_samples_from_the_others():
    """Waves of 1 to 40 cycles and equal size; the error grows with the number of cycles."""
    spec = Burgers(points=256).spec
    x = torch.arange(256)[:, None] / 256
    waves = [torch.sin(2 * torch.pi * (cycles * x + 0.1))[None] for cycles in range(1, 41)]
    samples = [Sample(Field.of(x, wave), Field.of(x), torch.linspace(0, 1, 256)[None, :, None]) for wave in waves]
    dataset = PointDataset(samples, View(), spec=spec, card=Card("waves", inputs=("u",), targets=("v",)))
    by_name = {trait.name: trait for trait in traits(dataset, torch.arange(40.0))}
    steepest = by_name["steepest slope of u"]
    assert next(iter(by_name)) in ("steepest slope of u", "shortest length of u (range / steepest slope)")
    assert steepest.correlation == pytest.approx(1.0)
    assert by_name["shortest length of u (range / steepest slope)"].correlation == pytest.approx(-1.0, abs=0.01)
    assert steepest.worst == pytest.approx(2 * torch.pi * 40, rel=0.05)
    assert steepest.typical == pytest.approx(2 * torch.pi * 20, rel=0.05)
    assert not any("of v" in name for name in by_name)  # the same in all samples


def test_equal_properties_share_a_rank():
    assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_a_shipped_operator_is_found_by_its_name_and_answers_as_its_run(here, work, tiny_data):
    field = tiny_data[0].input
    expected = Predictor(work / "seed1", "cpu")(field).values
    for name in ("tiny", "zoo:tiny"):
        torch.testing.assert_close(Predictor(name, "cpu")(field).values, expected)
    Path("tiny").mkdir()  # a folder of that name comes first, unless the zoo is meant
    with pytest.raises(InputError, match="none yet"):
        find_checkpoint("tiny")
    assert find_checkpoint("zoo:tiny") == here / "tiny"


def test_an_unknown_name_is_answered_with_those_that_exist(here, monkeypatch):
    with pytest.raises(InputError, match=r"which is none.*choose: tiny"):
        find_checkpoint("burgers-2048")
    with pytest.raises(InputError, match="Did you mean `tiny`"):
        find_checkpoint("zoo:tyni")
    monkeypatch.setenv("OFORMER_ZOO", str(here / "nothing"))
    with pytest.raises(InputError, match="none is here yet"):
        find_checkpoint("zoo:tiny")


def test_half_precision_costs_what_the_card_says(here, work):
    zoo.add(work / "seed1", name="small", half=True, datasets=work / "datasets")
    card, full = read_card(here / "small"), read_card(here / "tiny")
    assert (card.storage, full.storage) == ("float16", "float32")
    assert card.seeds[0].scores.error == pytest.approx(full.scores.error, rel=1e-6)
    assert 0 < abs(card.scores.error / full.scores.error - 1) < 0.01
    kinds = {name: array.dtype for name, array in map_arrays(here / "small" / WEIGHTS).items()}
    checkpoint = load_checkpoint(here / "small")
    model = checkpoint.operator.model
    hidden = {id(matrix) for matrix in model.hidden_matrices()}
    halved = {f"model.{name}" for name, parameter in model.named_parameters() if id(parameter) in hidden}
    assert {name for name, kind in kinds.items() if kind == np.float16} == halved
    # What sees raw values or makes final ones keeps its digits, and so do statistics.
    assert not halved & {"model.lift.layers.0.weight", "model.heads.0.layers.1.weight", "target_scale.scale"}
    assert {"model.lift.layers.0.weight", "model.heads.0.layers.1.weight", "target_scale.scale"} < kinds.keys()
    assert (here / "small" / WEIGHTS).stat().st_size < 0.65 * (here / "tiny" / WEIGHTS).stat().st_size
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint.operator.parameters())
    found = zoo.compare("small", datasets=work / "datasets")
    assert found.now == pytest.approx(card.scores.error, rel=1e-6)
    assert f"{full.scores.error:.4e} (float16 costs" in (here / "small" / "README.md").read_text()


def test_weights_beyond_float16_are_refused(tiny_data):
    recipe = tiny_recipe()
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization)
    with torch.no_grad():
        operator.model.hidden_matrices()[0].view(-1)[0] = 1e6
    with pytest.raises(InputError, match="range of float16"):
        zoo._round_weights(operator)


def test_seeds_are_recorded_with_their_journals(here, work):
    zoo.add(work / "seed1", seed_runs=[work / "seed2"], datasets=work / "datasets")
    card = read_card(here / "tiny")
    test = train_and_test(open_data(seeded(2), work / "datasets"), seeded(2))[1]
    other = evaluate(load_checkpoint(find_checkpoint(work / "seed2")).operator, test, 4)
    assert [run.seed for run in card.seeds] == [1, 2]
    assert card.seeds[1].scores.error == pytest.approx(other.error, rel=1e-6)
    page = (here / "tiny" / "README.md").read_text()
    first, second = card.scores.error, other.error
    assert f"Mean {(first + second) / 2:.4e}, standard deviation {abs(first - second) / 2**0.5:.1e}" in page
    assert set(card.files) == {"config.json", WEIGHTS, "journal.jsonl", "journal-seed2.jsonl"}
    assert zoo.damage("tiny") == []


def test_what_cannot_be_added_is_refused(here, work, tmp_path):
    data = {"datasets": work / "datasets"}
    with pytest.raises(InputError, match="different training seeds"):
        zoo.add(work / "seed1", seed_runs=[work / "seed1"], **data)
    with pytest.raises(InputError, match="run folder with its journal"):
        zoo.add(tmp_path / "nowhere", **data)
    cut = tmp_path / "cut"
    shutil.copytree(work / "seed2", cut)
    lines = (cut / "journal.jsonl").read_text().splitlines()
    (cut / "journal.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"a finished run in .*step 8"):
        zoo.add(cut, **data)
    config = next((work / "seed2" / "checkpoints").iterdir()) / "config.json"
    other = json.loads(config.read_text())
    other["recipe"]["training"]["batch"] = 3
    shutil.rmtree(cut)
    shutil.copytree(work / "seed2", cut)
    (cut / config.relative_to(work / "seed2")).write_text(json.dumps(other))
    (cut / config.relative_to(work / "seed2")).with_name(CHECKSUMS).unlink()
    with pytest.raises(InputError, match=r"other settings in .*cut"):
        zoo.add(work / "seed1", seed_runs=[cut], **data)


def test_a_card_alone_goes_to_runs_and_into_the_table(here, work):
    folder = zoo.add(work / "seed1", name="burgers-512", card_only=True, datasets=work / "datasets")
    assert folder == Path("runs/burgers-512")
    assert {path.name for path in folder.iterdir()} == {CARD, "README.md", "journal.jsonl"}
    assert not read_card(folder).with_weights
    assert "(not shipped)" in (folder / "README.md").read_text()
    cards = zoo.all_cards(Path("runs"))
    assert cards.keys() == {"burgers-512", "tiny"}
    (line,) = [row for row in full_table(cards).splitlines() if row.startswith("| `burgers-512`")]
    assert f"{read_card(folder).scores.error / 1e-3:.2f} (weights not shipped)" in line


def test_a_long_journal_is_thinned_and_keeps_its_ends():
    records = [{"kind": "start", "step": 0}]
    for step in range(1, 2001):
        records.append({"kind": "train", "step": step})
        if step % 500 == 0:
            records.append({"kind": "evaluate", "step": step})
    records.append({"kind": "stop", "step": 2000})
    kept = zoo.thinned(records, lines=300)
    assert [r for r in kept if r["kind"] != "train"] == [r for r in records if r["kind"] != "train"]
    steps = [r["step"] for r in kept if r["kind"] == "train"]
    assert len(steps) <= 300
    assert set(np.diff(steps)) == {7}
    assert steps[-1] == 2000
    assert zoo.thinned(records[:50], lines=300) == records[:50]


def test_verify_reproduces_the_card_from_the_seed_alone(here, capsys):
    """In a folder without any dataset: the test samples are made again."""
    found = zoo.compare("tiny")
    assert found.samples == 4
    assert abs(found.difference) < 1e-5
    part = zoo.compare("tiny", samples=2)
    card = read_card(here / "tiny")
    assert part.card == pytest.approx(sum(card.by_sample[:2]) / 2)
    assert abs(part.difference) < 1e-5
    assert main(["zoo", "verify", "--device", "cpu"]) == 0
    assert "4 samples" in capsys.readouterr().out
    rewrite(here / "tiny", scores={**dataclasses.asdict(card.scores), "error": 1.02 * card.scores.error})
    assert main(["zoo", "verify", "tiny", "--device", "cpu"]) == 1
    assert "-1.961%" in capsys.readouterr().out
    assert main(["zoo", "verify", "tiny", "--tolerance", "0.05", "--device", "cpu"]) == 0


@pytest.mark.parametrize("file", [WEIGHTS, "journal.jsonl", "config.json"])
def test_a_changed_or_missing_file_is_noticed_at_once(here, file, capsys):
    assert main(["zoo", "verify", "--quick"]) == 0
    assert "it predicts" in capsys.readouterr().out
    content = (here / "tiny" / file).read_bytes()
    (here / "tiny" / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if file == "config.json":
        (here / "tiny" / file).write_bytes(content + b"\n")
    assert main(["zoo", "verify", "--quick"]) == 1
    assert f"{file} was changed" in capsys.readouterr().out
    if file != "config.json":  # without which there is no operator of that name
        (here / "tiny" / file).unlink()
        assert zoo.damage("tiny") == [f"{file} is missing"]


def test_weights_that_are_not_finite_are_noticed(here):
    path = here / "tiny" / WEIGHTS
    arrays = {name: array.copy() for name, array in map_arrays(path).items()}
    next(array for name, array in arrays.items() if name.startswith("model.")).fill(np.nan)
    save_arrays(path, arrays)
    card = read_card(here / "tiny")
    rewrite(here / "tiny", files={**card.files, WEIGHTS: sha256(path)})
    (wrong,) = zoo.damage("tiny")
    assert "NaN or infinity in `model." in wrong


def test_damage_of_a_shipped_operator_is_refused_before_it_answers(here):
    path = here / "tiny" / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"model\.safetensors as it was written, with the SHA-256 in card\.json"):
        load_checkpoint(here / "tiny")
    assert load_checkpoint(here / "tiny", verify=False).name == "tiny"


def test_a_card_of_another_version_is_one_sentence(here):
    rewrite(here / "tiny", something="new")
    with pytest.raises(InputError, match="card of this version"):
        read_card(here / "tiny")


def card_of(name: str = "tiny", channels: int = 1, **scores) -> ModelCard:
    """A card that nobody measured."""
    known = {
        "count": 4, "error": 0.1, "median": 0.1, "worst": 0.2, "worst_sample": 0, "batch_mean": 0.1, "by_step": [0.1],
        "mean_squared": [1.0] * channels,
    }  # fmt: skip
    run = SeedRun(1, 10, 1.5, "a CPU", "journal.jsonl", Scores(**{**known, **scores}))
    return ModelCard(
        name=name, command=f"oformer train {name}", paper="", parameters=1234, storage="float32", precision="float32",
        torch="2", data=DataRecord("title", 0, 8, 4, None, "0"), scores=run.scores, by_sample=(0.2, 0.1, 0.05, 0.05),
        views=(), not_measured={}, averaged=None, fresh=None, seeds=(run,), files={WEIGHTS: "0"},
    )  # fmt: skip


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
        rows, missing = other_views(operator.eval(), test, shares=())
        return {row.label: row.kind for row in rows}, missing

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


def test_finer_samples_are_the_same_functions(tmp_path):
    recipe = dataclasses.replace(seeded(1), problem=TINY_FLOW, data=Data(train=5, test=2))
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, augment=False))
    twice = zoo._finer(recipe)
    assert twice is not None
    fine, coarse = (open_test_samples(r, tmp_path) for r in (twice, recipe))
    assert fine.spec.grid == (32, 32)
    thin = fine.with_view(View(points=(16, 16)))
    torch.testing.assert_close(thin[1].target, coarse[1].target)
    seen = dataclasses.replace(recipe.data, view=View(points=(8, 8)))
    assert zoo._finer(dataclasses.replace(recipe, data=seen)) is None  # the data have 16 already
    assert zoo._finer(dataclasses.replace(recipe, problem=Darcy(points=9))) is None


def test_double_resolution_of_a_run_that_sees_all_points(here, tmp_path):
    """The tiny recipe sees 32 of 64 points; one that sees all 64 is measured at 128, which are made for it."""
    recipe = dataclasses.replace(seeded(3), data=Data(train=12, test=4))
    data = open_data(recipe, tmp_path / "datasets")
    train(recipe, tmp_path / "run", train_and_test(data, recipe), quiet=True, tensorboard=False)
    folder = zoo.add(tmp_path / "run", finer=True, datasets=tmp_path / "datasets")
    labels = [row.label for row in read_card(folder).views]
    assert "128 points" in labels
    assert "32 points" in labels
    assert "double resolution" in read_card(zoo.add(tmp_path / "run", datasets=tmp_path / "datasets")).not_measured


def test_the_command_line_takes_the_name(here, capsys, tmp_path):
    assert main(["evaluate", "zoo:tiny", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "as its card says" in shown.out
    assert "Making 4 test samples" in shown.err
    assert main(["evaluate", "tiny", "--samples", "2", "--json", "--device", "cpu"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["count"] == 2
    assert content["card"]["error"] == pytest.approx(sum(read_card(here / "tiny").by_sample[:2]) / 2)
    assert abs(content["card"]["difference"]) < 1e-5
    x = np.arange(40) / 40
    np.savez("in.npz", coords=x[:, None], values=np.sin(2 * np.pi * x)[:, None])
    assert main(["predict", "tiny", "in.npz", "--device", "cpu"]) == 0
    assert np.load("prediction.npz")["values"].shape == (1, 40, 1)
    assert main(["plot", "zoo:tiny", "--device", "cpu"]) == 0
    drawn = {path.stem for path in Path("outputs/zoo/tiny").iterdir()}
    assert drawn == {"training", "predictions", "by-resolution", "by-share"}
    assert not (here / "tiny" / "plots").exists()
    capsys.readouterr()
    assert main(["zoo", "list"]) == 0
    assert f"{read_card(here / 'tiny').scores.error:.4%}" in capsys.readouterr().out
    assert main(["zoo", "show", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == (here / "tiny" / "README.md").read_text().strip()
    for wrong in (["evaluate", "zoo:tyni"], ["zoo", "show", "tyni"], ["predict", "zoo:tyni", "in.npz"]):
        assert main(wrong) == 2
        assert "Did you mean `tiny`" in capsys.readouterr().err


def test_few_samples_make_the_pictures_and_the_card_the_curves(here, work, capsys, monkeypatch):
    figures = {}
    monkeypatch.setattr(style, "save_figure", lambda path, figure: figures.update({path.stem: figure}))
    arguments = ["--samples", "2", "--only", "predictions", "by-resolution", "--device", "cpu"]
    assert main(["plot", "zoo:tiny", *arguments]) == 0
    assert "Making 2 test samples" in capsys.readouterr().err
    titles = {axis.get_title() or axis.get_title("left") for axis in figures["predictions"].axes}
    assert {"best of 2", "worst of 2"} <= titles
    drawn = {float(y) for line in figures["by-resolution"].axes[0].get_lines() for y in np.ravel(line.get_ydata())}
    of_all = [row.error for row in read_card(here / "tiny").views if row.kind != "sparse"]
    assert len(of_all) == 3
    assert set(of_all) <= drawn
    run = ["plot", str(work / "seed1"), "--datasets", str(work / "datasets"), "--out", "drawn"]
    assert main([*run, *arguments]) == 0
    assert "best of 2" in {axis.get_title("left") for axis in figures["predictions"].axes}
    for wrong in ("0", "5"):
        assert main(["plot", "zoo:tiny", "--samples", wrong, "--device", "cpu"]) == 2
        assert "1 to 4 test samples" in capsys.readouterr().err


def test_adding_by_the_command_line(here, work, capsys):
    arguments = ["zoo", "add", str(work / "seed1"), "--seed-run", str(work / "seed2"), "--half", "--name", "other"]
    assert main([*arguments, "--datasets", str(work / "datasets"), "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert "Measuring seed 2 on 4 test samples" in said
    card = read_card(here / "other")
    assert (len(card.seeds), card.storage, card.name) == (2, "float16", "other")


def test_progress_is_said_while_predicting(work, tiny_data):
    operator, said = load_checkpoint(find_checkpoint(work / "seed1")).operator, []
    with zoo.watched(operator, 6, said.append, every=0.0):
        evaluate(operator, tiny_data.subset(range(6)), 4)
    assert said == ["Predicted 4 of 6 samples", "Predicted 6 of 6 samples"]
    evaluate(operator, tiny_data.subset(range(2)), 4)
    assert len(said) == 2


def test_the_paper_s_numbers_are_those_of_the_recipes():
    """Written down twice, once as data and once in words."""
    for row in ROWS:
        ours = f"{row.errors[OURS]:.{row.digits}f}"
        if row.quantity != "relative momentum":
            assert ours.removeprefix("0") in RECIPES[row.recipe].paper, row
        assert row.best[1] <= row.errors[OURS]
    assert {row.recipe for row in ROWS} == set(RECIPES) - set(BASELINES) - {"burgers-demo", "darcy-85"} - {
        name for name in RECIPES if name.endswith("-plus")
    }
    best = {row.recipe: row.best for row in ROWS}
    assert best["ns2-part"] == ("Galerkin Transformer", 0.1399)
    assert best["burgers-2048"] == ("FNO+", 0.72)
    assert best["ns2-full"] == (OURS, 0.0645)
    for name, (dropped, all_points) in DROPPED_IN_TRAINING.items():
        assert name in RECIPES
        assert dropped > all_points
    assert BY_SHARE["dropped points"][1.0] == DROPPED_IN_TRAINING["ns2-full"][0]
    assert BY_SHARE["all points"][1.0] == DROPPED_IN_TRAINING["ns2-full"][1]


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
    assert measured(rows["electro", "squared error of potential"], scores) == pytest.approx(0.2)
    assert measured(rows["electro", "squared error of field"], scores) == pytest.approx(2.0)
    assert measured(rows["airfoil", "relative momentum"], scores) == pytest.approx(8.0)
    assert measured(rows["airfoil", "density times momentum"], scores) == pytest.approx(15.0)
    assert measured(rows["ns1", "relative L2"], scores) == pytest.approx(0.5)
    assert measured(rows["burgers-512", "relative L2"], scores) == pytest.approx(500.0)
    with pytest.raises(InputError, match="relative momentum"):
        measured(rows["airfoil", "relative momentum"], card_of().scores)


def test_the_error_of_a_card_in_a_few_words_is_the_paper_s_quantity():
    assert headline(card_of("burgers-2048-plus", error=0.000674)) == "0.0674%"
    assert headline(card_of("of-my-own", error=0.25)) == "25.0000%"
    physical = physical_squares(3.7e-5, 2e-4, 4e-4)
    squares = card_of("electro-aug", error=1.02, mean_squared=physical, mean_squared_scaled=[9.0] * 3)
    assert headline(squares) == "squared 0.037e-3, 0.300e-3"
    near = Momentum(rmse=12.0, relative=0.0817, as_released=15.469)
    assert headline(card_of("airfoil", channels=4, momentum=near)) == "momentum 8.17e-2, 15.469"


def test_the_list_fits_into_a_hundred_columns(monkeypatch, capsys):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    assert main(["zoo", "list"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "squared 0.029e-3" in shown
    assert "102.07" not in shown


def test_the_table_shows_ours_beside_the_paper_s(tmp_path):
    second = dataclasses.replace(card_of().seeds[0], seed=2, scores=card_of(error=0.3).scores)
    faithful = dataclasses.replace(card_of("ns2-part"), seeds=(card_of().seeds[0], second))
    cards = {"ns2-part": faithful, "ns2-part-plus": card_of("ns2-part-plus", error=0.12, by_step=[0.1, 0.14])}
    lines = {line.split("`")[1]: line for line in full_table(cards).splitlines()[2:]}
    assert lines["ns1"].count(NOT_YET) == 1
    assert "| 0.1755 ± 0.0059 | 0.1399 (Galerkin Transformer) | 0.2000 ± 0.1414 | 0.1200 |" in lines["ns2-part"]
    assert "`oformer train ns2-part`<br>`oformer train ns2-part-plus`" in lines["ns2-part"]
    short = short_table(cards)
    assert "(`ns2-part`) | relative L2, % | 17.55 | 13.99 (Galerkin Transformer) | 20.00 ± 14.14 | 12.00 |" in short
    assert "lower in 0 and higher in 1. Not trained yet: `ns1`, `ns2-full`" in short


def test_the_front_page_counts_what_is_lower_and_higher_than_the_paper():
    cards = {"darcy-141": card_of("darcy-141", error=0.0125), "ns3": card_of("ns3", error=0.1706)}
    assert "lower in 1 and higher in 1." in short_table(cards)
    every = {row.recipe: card_of(row.recipe, error=0.0, channels=3) for row in ROWS if row.table != "Section 4.2"}
    assert short_table(every).endswith(" Not trained yet: `airfoil`.")


def test_each_problem_of_the_front_page_can_be_measured_again():
    problems = {row.recipe.partition("-")[0].rstrip("123") for row in ROWS}
    assert {name.partition("-")[0].rstrip("123") for name in HEADLINES} == problems
    assert set(HEADLINES) <= set(zoo_names())


def test_a_row_with_settings_of_others_says_so_beside_what_those_of_the_paper_give():
    (line,) = [line for line in full_table({"ns1": card_of("ns1", error=0.011)}).splitlines() if "`ns1`" in line]
    assert "0.0110 (settings of a public script; 0.0127 with those of the paper's text)" in line
    lines = (ROOT / "runs" / "ns1-as-printed" / "journal.jsonl").read_text().splitlines()
    last = [entry for entry in map(json.loads, lines) if entry["kind"] == "evaluate"][-1]
    assert f"{last['error']:.4f}" == f"{OTHER_SETTINGS['ns1'][1]:.4f}"


def test_results_are_rewritten_between_their_marks_and_nothing_else(here, tmp_path):
    shutil.copy(ROOT / "docs" / "results.md", tmp_path / "results.md")
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    card = read_card(here / "tiny")
    flow = dataclasses.replace(card, name="ns2-part", scores=dataclasses.replace(card.scores, by_step=[0.1, 0.2]))
    paths = tmp_path / "results.md", tmp_path / "README.md", tmp_path / "images"
    (tmp_path / "images" / "ns2-part").mkdir(parents=True)
    for name in ("predictions.png", "training.png", "movie.gif"):
        (tmp_path / "images" / "ns2-part" / name).write_bytes(b"\x89PNG")
    write_results({"ns2-part": flow}, *paths)
    page = paths[0].read_text()
    assert "each point has the weight of its cell; the paper's two curves are from its appendix C, with equal" in page
    assert page.count("![") == 4  # two of all operators, and two of those that were drawn of this one
    assert page.index("](images/ns2-part/predictions.png)") < page.index("](images/ns2-part/movie.gif)")
    for image in re.findall(r"\]\((images/[^)]*)\)", page):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    before = (ROOT / "docs" / "results.md").read_text()
    for mark in ("results", "pictures"):
        page, before = (between_marks(text, mark, "", paths[0]) for text in (page, before))
    assert page == before
    assert f"{100 * card.scores.error:.2f}" in paths[1].read_text()
    with pytest.raises(InputError, match="0 pairs of them"):
        between_marks("no marks", "results", "text", paths[0])


def test_the_command_of_a_card_trains_its_recipe():
    for name, change in (
        ("burgers-2048", ["--training.precision", "tf32", "--training.seed", "3", "--training.ema", "0.9"]),
        ("ns2-part", ["--model.encoder.multipliers", "2", "3", "--training.loss.no-derivative-rows"]),
        ("ns2-full", ["--training.optimizer.clip", "all", "1.5", "--training.augment", "--data.view.in-times", "5"]),
        ("darcy-141", []),
    ):
        recipe = _override(recipe_named(name), change)
        command = training_command(recipe)
        verb, rest = parse(shlex.split(command)[1:])
        assert _override(recipe_named(verb.name), rest) == recipe
        assert command.startswith(f"oformer train {name}")
    logged = _override(recipe_named("ns1"), ["--training.log-every", "7"])
    assert training_command(logged) == "oformer train ns1"
    assert "of your own `tiny`" in training_command(tiny_recipe())
    ns1 = recipe_named("ns1")
    without = dataclasses.replace(ns1, training=dataclasses.replace(ns1.training, horizon=None))
    assert training_command(without) == "oformer train ns1 (and another training.horizon)"


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "runs").glob("*.sh")))
def test_the_scripts_say_what_the_command_line_understands(script, tmp_path):
    """With a program in place of `oformer` that writes down how it was called."""
    calls = tmp_path / "calls"
    (tmp_path / "oformer").write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {calls}\necho >> {calls}\n')
    (tmp_path / "oformer").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", str(ROOT / "runs" / script), "--training.precision", "tf32"], env=environment, check=True)
    trained, added = set(), set()
    for line in calls.read_text().splitlines():
        command, rest = parse(shlex.split(line))
        if command.__class__.__name__ == "Train":
            recipe = _override(recipe_named(command.name), rest)
            assert recipe.training.precision == "tf32"
            trained.add(command.out)
            continue
        assert rest == []
        if command.action.__class__.__name__ == "ZooAdd":
            added |= {command.action.run_folder, *command.action.seed_run}
    assert trained == added
    assert line.startswith("zoo table")


def test_each_row_of_oformer_in_the_paper_s_tables_has_a_script():
    text = " ".join(path.read_text() for path in (ROOT / "runs").glob("*.sh"))
    assert all(re.search(rf"[ /]{row.recipe}\b", text) for row in ROWS)


# What is shipped, as it is in this checkout.


def test_the_tables_are_those_of_the_cards(monkeypatch):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    cards = zoo.all_cards(ROOT / "runs")
    assert full_table(cards) in (ROOT / "docs" / "results.md").read_text(), "run `oformer zoo table`"
    assert short_table(cards) in (ROOT / "README.md").read_text(), "run `oformer zoo table`"


def test_the_zoo_is_small_and_whole(monkeypatch):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    assert sum(path.stat().st_size for path in zoo_folder().rglob("*")) < 30e6
    for name in zoo_names():
        assert zoo.damage(name) == [], name
        assert read_card(zoo_folder() / name).name == name


@pytest.mark.parametrize("name", ["burgers-demo", "burgers-512", "burgers-2048", "burgers-2048-plus", "darcy-141"])
def test_operators_whose_scale_says_nothing_know_inputs_unlike_those_of_training(name, monkeypatch):
    """And raise no alarm over test samples, neither whole nor at a quarter of their points."""
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    predictor = Predictor(zoo_folder() / name, "cpu")
    recipe = from_json(Recipe, predictor.checkpoint.recipe, "recipe")
    problem, data, points = recipe.problem, recipe.data, predictor.spec.grid
    every = tuple(slice(None, None, n) for n in thinning(problem.spec.grid, points, problem.spec.periods is not None))
    drawn = problem.draw(range(data.train, data.train + 8), data.seed)[INPUT[problem.name]]
    values = drawn[(slice(None), *every)].reshape(8, 1, -1, 1).float()
    low, high = predictor.operator.box
    axes = [torch.linspace(float(a), float(b), n) for a, b, n in zip(low, high, points, strict=True)]
    coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, -1, len(points)).expand(8, -1, -1)

    def outside(values, kept=slice(None)):
        field = Field.of(coords[:, kept], values[:, :, kept])
        return predictor.operator.outside(field, field)

    quarter = torch.randperm(values.shape[2], generator=torch.Generator().manual_seed(0))[: values.shape[2] // 4]
    assert outside(values) == outside(values, quarter) == []
    assert "input channel 0 from" in outside(1e6 * values)[0]
    moved = values + 0.5 if problem.name == "burgers" else 0.5 * values
    assert outside(moved)[0].startswith("the mean of input channel 0 from ")
    even = torch.full_like(values, 7.0)
    assert "input channel 0 from" in outside(even)[0]


def test_inputs_that_are_drawn_again_are_those_that_a_new_run_records():
    demo = RECIPES["burgers-demo"]
    recipe = dataclasses.replace(demo, data=dataclasses.replace(demo.data, train=6))
    samples = PointDataset(recipe.problem.samples(range(6), 0), recipe.data.view, spec=recipe.problem.spec)
    fitted = Operator(recipe.model.build(samples.spec), recipe.normalization).fit(samples).seen
    drawn = seen_by(recipe)
    assert (drawn.samples, drawn.values, drawn.spreads) == (6, fitted.values, fitted.spreads)
    np.testing.assert_allclose(drawn.means, fitted.means, atol=1e-7)


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


@pytest.mark.slow
def test_shipped_burgers_operators_reproduce_their_cards(tmp_path):
    names = [name for name in zoo_names() if name.startswith("burgers")]
    if not names:
        pytest.skip("none is shipped yet")
    for name in names:
        assert abs(zoo.compare(name, datasets=tmp_path).difference) < zoo.TOLERANCE, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_shipped_navier_stokes_operator_reproduces_its_card(tmp_path):
    """One sample, which takes a CPU about a minute."""
    name = next((name for name in ("ns3", "ns2-part", "ns2-full", "ns1") if name in zoo_names()), None)
    if name is None:
        pytest.skip("none is shipped yet")
    assert abs(zoo.compare(name, samples=1, datasets=tmp_path).difference) < zoo.TOLERANCE


def test_the_shipped_burgers_operator_on_a_published_pair(shared_data):
    if "burgers-2048" not in zoo_names():
        pytest.skip("it is not shipped yet")
    pair = np.load(shared_data / "burgers_r10_real_pair.npz")
    a, u = (torch.from_numpy(pair[name][0]).float()[None, :, None] for name in ("a", "u"))
    field = Field.of(torch.arange(512).float()[:, None] / 512, a)
    answer = Predictor("zoo:burgers-2048", "cpu")(field).values
    weights = field.weights[None]
    error = relative(squared((answer - u)[None], weights).sum(), squared(u[None], weights).sum()).item()
    assert error < max(read_card(zoo_folder() / "burgers-2048").by_sample)


@pytest.mark.slow
def test_a_wheel_carries_the_zoo(work, tmp_path):
    """Built from a copy with the tiny operator in it, unpacked elsewhere, and asked by name, offline."""
    source, target = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "oformer", source / "oformer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(work / "zoo", source / "zoo")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    environment = {name: value for name, value in os.environ.items() if name not in ("OFORMER_ZOO", "PYTHONPATH")}
    ask = f"import sys; sys.path.insert(0, {str(target)!r}); from oformer.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["zoo", "list"], ["zoo", "verify", "--quick"]):
        done = subprocess.run(
            [sys.executable, "-c", ask, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "tiny" in done.stdout
    assert (target / "oformer" / "weights" / "tiny" / CARD).is_file()
