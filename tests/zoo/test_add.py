"""Adding to the zoo: runs are measured and recorded, and what is not finished or does not fit is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer import zoo
from oformer.checkpoint import CHECKSUMS, WEIGHTS, find_checkpoint, load_checkpoint
from oformer.cli import main
from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.files import map_arrays
from oformer.models import Operator
from oformer.problems import Darcy
from oformer.training.evaluate import errors, evaluate, watched
from oformer.training.find_data import open_data, open_fresh_samples, open_test_samples, train_and_test
from oformer.training.loop import train
from oformer.training.recipe import Data
from oformer.zoo import add as adding
from oformer.zoo import verify
from oformer.zoo.card import CARD, read_card
from oformer.zoo.table import full_table
from tests.tiny import TINY_FLOW, tiny_recipe
from tests.zoo.cards import rewrite, seeded


def test_nothing_that_is_shipped_says_where_data_lay(work):
    """A run remembers it, in a file of its own that nobody else gets."""
    assert str(work) in (work / "seed1" / "data.json").read_text()
    shipped = [path for place in ("zoo", "seed1/checkpoints") for path in (work / place).rglob("*") if path.is_file()]
    assert {"card.json", "config.json", "model.safetensors", "README.md"} <= {path.name for path in shipped}
    for path in shipped:
        content = path.read_bytes()
        assert str(work).encode() not in content
        assert b"of-ours" not in content


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
        verify.compare("tiny", fresh=True)
    assert main(["zoo", "measure", "tiny", "--samples", "6", "--device", "cpu"]) == 0
    card = read_card(here / "tiny")
    fresh = card.fresh
    assert dataclasses.replace(card, fresh=None) == before
    assert fresh.first == 16
    dataset = open_fresh_samples(seeded(1), Path("datasets"), 6)
    by_hand = errors(load_checkpoint(here / "tiny").operator, dataset).relative
    assert fresh.by_sample == pytest.approx(by_hand.tolist(), rel=1e-5)
    page = (here / "tiny" / "README.md").read_text()
    for number in (fresh.error, fresh.median, fresh.worst, card.scores.error):
        assert f"{number:.4e}" in page
    assert f"(sample {16 + int(by_hand.argmax())})" in page
    assert fresh.traits[0].name in page
    assert main(["zoo", "verify", "tiny", "--fresh", "--device", "cpu"]) == 0
    assert "6 samples" in capsys.readouterr().out
    assert abs(verify.compare("tiny", fresh=True, samples=2).difference) < 2e-5
    shifted = {**dataclasses.asdict(fresh), "by_sample": [1.1 * error for error in fresh.by_sample]}
    rewrite(here / "tiny", fresh=shifted)
    assert main(["zoo", "verify", "tiny", "--fresh", "--device", "cpu"]) == 1
    assert main(["zoo", "verify", "tiny", "--device", "cpu"]) == 0
    added = read_card(adding.add(work / "seed1", name="again", fresh=6, datasets=work / "datasets")).fresh
    assert added.by_sample == pytest.approx(fresh.by_sample, rel=1e-5)


def test_half_precision_costs_what_the_card_says(here, work):
    adding.add(work / "seed1", name="small", half=True, datasets=work / "datasets")
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
    found = verify.compare("small", datasets=work / "datasets")
    assert found.now == pytest.approx(card.scores.error, rel=1e-6)
    assert f"{full.scores.error:.4e} (float16 costs" in (here / "small" / "README.md").read_text()


def test_weights_beyond_float16_are_refused(tiny_data):
    recipe = tiny_recipe()
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization)
    with torch.no_grad():
        operator.model.hidden_matrices()[0].view(-1)[0] = 1e6
    with pytest.raises(InputError, match="range of float16"):
        adding._round_weights(operator)


def test_seeds_are_recorded_with_their_journals(here, work):
    adding.add(work / "seed1", seed_runs=[work / "seed2"], datasets=work / "datasets")
    card = read_card(here / "tiny")
    test = train_and_test(open_data(seeded(2), work / "datasets"), seeded(2))[1]
    other = evaluate(load_checkpoint(find_checkpoint(work / "seed2")).operator, test, 4)
    assert [run.seed for run in card.seeds] == [1, 2]
    assert card.seeds[1].scores.error == pytest.approx(other.error, rel=1e-6)
    page = (here / "tiny" / "README.md").read_text()
    first, second = card.scores.error, other.error
    assert f"Mean {(first + second) / 2:.4e}, standard deviation {abs(first - second) / 2**0.5:.1e}" in page
    assert set(card.files) == {"config.json", WEIGHTS, "journal.jsonl", "journal-seed2.jsonl"}
    assert verify.damage("tiny") == []


def test_what_cannot_be_added_is_refused(here, work, tmp_path):
    data = {"datasets": work / "datasets"}
    with pytest.raises(InputError, match="different training seeds"):
        adding.add(work / "seed1", seed_runs=[work / "seed1"], **data)
    with pytest.raises(InputError, match="run folder with its journal"):
        adding.add(tmp_path / "nowhere", **data)
    cut = tmp_path / "cut"
    shutil.copytree(work / "seed2", cut)
    lines = (cut / "journal.jsonl").read_text().splitlines()
    (cut / "journal.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"a finished run in .*step 8"):
        adding.add(cut, **data)
    config = next((work / "seed2" / "checkpoints").iterdir()) / "config.json"
    other = json.loads(config.read_text())
    other["recipe"]["training"]["batch"] = 3
    shutil.rmtree(cut)
    shutil.copytree(work / "seed2", cut)
    (cut / config.relative_to(work / "seed2")).write_text(json.dumps(other))
    (cut / config.relative_to(work / "seed2")).with_name(CHECKSUMS).unlink()
    with pytest.raises(InputError, match=r"other settings in .*cut"):
        adding.add(work / "seed1", seed_runs=[cut], **data)


def test_a_card_alone_goes_to_runs_and_into_the_table(here, work):
    folder = adding.add(work / "seed1", name="burgers-512", card_only=True, datasets=work / "datasets")
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
    kept = adding.thinned(records, lines=300)
    assert [r for r in kept if r["kind"] != "train"] == [r for r in records if r["kind"] != "train"]
    steps = [r["step"] for r in kept if r["kind"] == "train"]
    assert len(steps) <= 300
    assert set(np.diff(steps)) == {7}
    assert steps[-1] == 2000
    assert adding.thinned(records[:50], lines=300) == records[:50]


def test_finer_samples_are_the_same_functions(tmp_path):
    recipe = dataclasses.replace(seeded(1), problem=TINY_FLOW, data=Data(train=5, test=2))
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, augment=False))
    twice = adding.finer_recipe(recipe)
    assert twice is not None
    fine, coarse = (open_test_samples(r, tmp_path) for r in (twice, recipe))
    assert fine.spec.grid == (32, 32)
    thin = fine.with_view(View(points=(16, 16)))
    torch.testing.assert_close(thin[1].target, coarse[1].target)
    seen = dataclasses.replace(recipe.data, view=View(points=(8, 8)))
    assert adding.finer_recipe(dataclasses.replace(recipe, data=seen)) is None  # the data have 16 already
    assert adding.finer_recipe(dataclasses.replace(recipe, problem=Darcy(points=9))) is None


def test_double_resolution_of_a_run_that_sees_all_points(here, tmp_path):
    """The tiny recipe sees 32 of 64 points; one that sees all 64 is measured at 128, which are made for it."""
    recipe = dataclasses.replace(seeded(3), data=Data(train=12, test=4))
    data = open_data(recipe, tmp_path / "datasets")
    train(recipe, tmp_path / "run", train_and_test(data, recipe), quiet=True, tensorboard=False)
    folder = adding.add(tmp_path / "run", finer=True, datasets=tmp_path / "datasets")
    labels = [row.label for row in read_card(folder).views]
    assert "128 points" in labels
    assert "32 points" in labels
    assert "double resolution" in read_card(adding.add(tmp_path / "run", datasets=tmp_path / "datasets")).not_measured


def test_adding_by_the_command_line(here, work, capsys):
    arguments = ["zoo", "add", str(work / "seed1"), "--seed-run", str(work / "seed2"), "--half", "--name", "other"]
    assert main([*arguments, "--datasets", str(work / "datasets"), "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert "Measuring seed 2 on 4 test samples" in said
    card = read_card(here / "other")
    assert (len(card.seeds), card.storage, card.name) == (2, "float16", "other")


def test_progress_is_said_while_predicting(work, tiny_data):
    operator, said = load_checkpoint(find_checkpoint(work / "seed1")).operator, []
    with watched(operator, 6, said.append, every=0.0):
        evaluate(operator, tiny_data.subset(range(6)), 4)
    assert said == ["Predicted 4 of 6 samples", "Predicted 6 of 6 samples"]
    evaluate(operator, tiny_data.subset(range(2)), 4)
    assert len(said) == 2
