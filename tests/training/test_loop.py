"""The loop: resumed equals uninterrupted, nothing is lost, and it learns."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from oformer.checkpoint import checkpoints, load_checkpoint, load_tensors, save_checkpoint
from oformer.cli.describe import describe
from oformer.config import to_json
from oformer.data.dataset import PointDataset, View
from oformer.engine.runners import Chunked, Plain, runner_of
from oformer.errors import DamagedCheckpoint, InputError, OutOfMemory, TrainingDiverged
from oformer.files import held, read_json, save_arrays, write_json
from oformer.models import OFormerConfig
from oformer.training.distributed import ALONE, Ranks
from oformer.training.evaluate import Momentum, Scores, evaluate, summarize
from oformer.training.find_data import train_and_scored
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.losses import Loss
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Recipe
from oformer.training.resume import PROGRESS, STATE
from oformer.training.run import Run
from oformer.training.step import Stepper
from tests.tiny import tiny_recipe


@pytest.fixture
def splits(tiny_data):
    return tiny_data.split("train"), tiny_data.split("test")


def run(recipe, folder, splits, **options):
    return train(recipe, folder, splits, quiet=True, tensorboard=False, **options)


@pytest.fixture(scope="module")
def whole(tiny_data, tmp_path_factory):
    """The tiny recipe, trained to its end: what no interruption may change."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(tiny_recipe(), folder, (tiny_data.split("train"), tiny_data.split("test")))


def stop_after(monkeypatch, steps, number=signal.SIGTERM):
    """Send this process a signal in the middle of a step, as a scheduler or a person would."""
    descend, done = Run.descend, []

    def counted(*arguments):
        done.append(1)
        if len(done) == steps:
            signal.raise_signal(number)
        return descend(*arguments)

    monkeypatch.setattr(Run, "descend", counted)


def same_state(a: Path, b: Path) -> bool:
    """Whether two runs ended in the same weights, averages, moments and random states, bit for bit."""
    last_a, last_b = checkpoints(a)[-1], checkpoints(b)[-1]
    for name in ("model.safetensors", STATE):
        one, two = load_tensors(last_a / name), load_tensors(last_b / name)
        if one.keys() != two.keys() or not all(torch.equal(one[n], two[n]) for n in one):
            return False
    return last_a.name == last_b.name


def losses(folder):
    return [(r["step"], r["loss"]) for r in read_journal(folder) if r["kind"] == "train"]


@pytest.mark.parametrize(("number", "stop"), [(signal.SIGTERM, 33), (signal.SIGINT, 17), (signal.SIGUSR1, 20)])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, splits, monkeypatch, whole, number, stop):
    with monkeypatch.context() as patch:
        stop_after(patch, stop, number)
        first = run(tiny_recipe(), tmp_path, splits)
    assert (first.step, first.reason, first.finished) == (stop, number.name, False)
    assert checkpoints(tmp_path)[-1].name == f"{stop:08}"
    torch.manual_seed(12345)  # what another process would have
    second = run(tiny_recipe(), tmp_path, splits)
    assert second.finished
    assert second.step == 40
    folder, outcome = whole
    assert same_state(folder, tmp_path)
    assert losses(folder) == losses(tmp_path)
    assert outcome.scores == second.scores


def without_dropout(recipe: Recipe) -> Recipe:
    encoder = dataclasses.replace(recipe.model.encoder, dropout=0.0, lift_dropout=0.0)
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, encoder=encoder))


@pytest.mark.parametrize(
    ("place", "name", "ended"),
    [(Run, "begin", (1, "SIGTERM")), (Ranks, "wait", (3, "finished"))],
    ids=["before the first step", "after the last step"],
)
def test_a_signal_outside_of_the_steps_kills_no_run(tmp_path, splits, monkeypatch, place, name, ended):
    original = getattr(place, name)

    def signalled(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(place, name, signalled)
    outcome = run(tiny_recipe(steps=3), tmp_path, splits)
    assert (outcome.step, outcome.reason) == ended
    assert int(checkpoints(tmp_path)[-1].name) == outcome.step


def test_the_callback_is_told_what_the_journal_is_told(tmp_path, splits):
    told = []
    run(tiny_recipe(steps=20), tmp_path / "a", splits, on=lambda *record: told.append(record))
    journal = read_journal(tmp_path / "a")
    assert [(kind, step) for kind, step, _ in told] == [(r["kind"], r["step"]) for r in journal]
    assert {kind for kind, _, _ in told} == {"start", "train", "evaluate", "stop"}
    assert all(
        json.loads(json.dumps(numbers)).items() <= record.items()
        for (_, _, numbers), record in zip(told, journal, strict=True)
    )


def test_a_callback_that_returns_true_stops_a_run_that_goes_on(tmp_path, splits):
    """With the weights and moments of a run that was never stopped; other answers of a callback stop nothing."""
    recipe = tiny_recipe(steps=20)
    stopped = run(recipe, tmp_path / "a", splits, on=lambda event, step, numbers: (event, step) == ("train", 7))
    assert (stopped.step, stopped.reason, stopped.finished) == (7, "callback", False)
    assert run(recipe, tmp_path / "a", splits, on=lambda *record: record).finished
    run(recipe, tmp_path / "b", splits)
    assert same_state(tmp_path / "a", tmp_path / "b")


def test_a_run_in_chunks_is_a_run_at_once(tmp_path, splits):
    """With a loss that asks for neighbors, dropped points, and evaluation; dropout draws other numbers."""
    whole = run(without_dropout(tiny_recipe(steps=8)), tmp_path / "whole", splits)
    parts = run(without_dropout(tiny_recipe(steps=8, chunk=4 * 10)), tmp_path / "parts", splits)
    for (step, a), (_, b) in zip(losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True):
        assert b == pytest.approx(a, rel=1e-3), step
    assert parts.scores.error == pytest.approx(whole.scores.error, rel=1e-3)
    in_chunks = runner_of(load_checkpoint(checkpoints(tmp_path / "parts")[-1]))
    assert isinstance(in_chunks, Chunked)
    assert in_chunks.size == 40
    assert type(runner_of(load_checkpoint(checkpoints(tmp_path / "whole")[-1]))) is Plain


def test_a_run_in_chunks_goes_on_bit_for_bit(tmp_path, splits, monkeypatch):
    recipe = tiny_recipe(steps=6, chunk=4 * 10)
    run(recipe, tmp_path / "whole", splits)
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGTERM)
        run(recipe, tmp_path / "parts", splits)
    torch.manual_seed(12345)
    assert run(recipe, tmp_path / "parts", splits).finished
    assert same_state(tmp_path / "whole", tmp_path / "parts")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path, splits):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tiny_recipe(steps=6, seed=seed), tmp_path / name, splits)
    assert same_state(tmp_path / "a", tmp_path / "b")
    assert not same_state(tmp_path / "a", tmp_path / "c")


def test_a_new_run_builds_its_model_once_from_its_seed(tmp_path, splits, monkeypatch):
    recipe, built, build = tiny_recipe(seed=3), [], OFormerConfig.build
    torch.manual_seed(3)
    expected = build(recipe.model, splits[0].spec).state_dict()
    monkeypatch.setattr(OFormerConfig, "build", lambda self, spec: built.append(spec) or build(self, spec))
    torch.manual_seed(12345)
    new = Run(recipe, tmp_path, splits, torch.device("cpu"), ALONE)
    with new.claimed(None):
        new.begin()
    assert len(built) == 1
    found = new.operator.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_journal_line_beyond_the_checkpoint_is_written_again_once(tmp_path, splits, monkeypatch):
    recipe = tiny_recipe(steps=9, checkpoint_every=4)

    def crash(self, *arguments):
        if self.step == 6:
            raise RuntimeError("power cut")
        return descend(self, *arguments)

    descend = Run.descend
    with monkeypatch.context() as patch:
        patch.setattr(Run, "descend", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            run(recipe, tmp_path, splits)
    assert losses(tmp_path)[-1][0] == 6
    run(recipe, tmp_path, splits)
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 10))


def test_kill_nine_loses_at_most_one_interval(tmp_path, splits, tiny_data, whole):
    """A process killed at a random moment, twice, then resumed, equals one that never was."""
    recipe = tiny_recipe(checkpoint_every=5)
    folder, script = tmp_path / "killed", tmp_path / "script.py"
    write_json(tmp_path / "recipe.json", to_json(recipe))
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from oformer.config import from_json\n"
        "from oformer.data.dataset import PointDataset\n"
        "from oformer.files import read_json\n"
        "from oformer.training.loop import train\n"
        "from oformer.training.recipe import Recipe\n"
        "recipe = from_json(Recipe, read_json(Path(sys.argv[1])))\n"
        "data = PointDataset.open(sys.argv[2], recipe.data.view)\n"
        "train(recipe, Path(sys.argv[3]), (data.split('train'), data.split('test')), quiet=True, tensorboard=False)\n"
    )
    arguments = [
        sys.executable,
        str(script),
        str(tmp_path / "recipe.json"),
        str(store_folder(tiny_data)),
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        process = subprocess.Popen(arguments, env=environment)
        seen = len(losses(folder)) if folder.exists() else 0
        while process.poll() is None and (not folder.exists() or len(losses(folder)) <= seen + 8):
            time.sleep(0.01)
        time.sleep(random.Random().uniform(0, 0.1))  # a moment that nobody chose
        process.kill()
        process.wait()
        reached, kept = losses(folder)[-1][0], int(checkpoints(folder)[-1].name)
        assert reached - kept <= 2 * recipe.training.checkpoint_every
        load_checkpoint(checkpoints(folder)[-1])
    torch.set_num_threads(1)
    run(recipe, folder, splits)
    assert same_state(folder, whole[0])


def store_folder(data) -> Path:
    return data._source.folder


def test_time_limit_stops_cleanly_and_goes_on(tmp_path, splits):
    recipe = tiny_recipe(steps=5)
    steps = []
    for _ in range(5):
        outcome = run(recipe, tmp_path, splits, stop_after=0.0)
        steps.append((outcome.step, outcome.reason))
    assert steps == [(1, "time"), (2, "time"), (3, "time"), (4, "time"), (5, "finished")]
    assert run(recipe, tmp_path, splits).step == 5


def test_crash_while_writing_keeps_the_previous_checkpoint(tmp_path, splits, monkeypatch):
    recipe = tiny_recipe(steps=8, checkpoint_every=3)
    save, calls = save_checkpoint, []

    def fails_at_last(folder, checkpoint, extra):
        calls.append(folder)
        if len(calls) == 2:
            extra = {**extra, "no/such/place": None}  # fails after the other files are written
        return save(folder, checkpoint, extra)

    with monkeypatch.context() as patch:
        patch.setattr("oformer.training.run.save_checkpoint", fails_at_last)
        with pytest.raises(TypeError):
            run(recipe, tmp_path, splits)
    assert [p.name for p in checkpoints(tmp_path)] == ["00000003"]
    assert run(recipe, tmp_path, splits).finished


def test_two_processes_do_not_train_into_one_folder(tmp_path, splits):
    recipe = tiny_recipe(steps=1)
    with held(tmp_path), pytest.raises(InputError, match=f"no other process, got a lock of process {os.getpid()} on"):
        run(recipe, tmp_path, splits)
    assert not (tmp_path / "recipe.json").exists()
    assert run(recipe, tmp_path, splits).finished


def test_a_run_that_is_deleted_while_it_trains_ends_with_a_sentence(tmp_path, splits, monkeypatch):
    descend, folder = Run.descend, tmp_path / "run"

    def deleted(self, *arguments):
        if self.step == 5:
            shutil.rmtree(folder)
        return descend(self, *arguments)

    monkeypatch.setattr(Run, "descend", deleted)
    with pytest.raises(InputError, match=r"journal.jsonl to stay .*, got nothing there"):
        run(tiny_recipe(), folder, splits)
    assert not folder.exists()


def test_only_the_newest_checkpoints_are_kept(whole):
    assert [p.name for p in checkpoints(whole[0])] == ["00000030", "00000040"]


def test_another_recipe_in_the_same_folder_is_refused_by_name(tmp_path, splits):
    run(tiny_recipe(steps=3), tmp_path, splits)
    other = tiny_recipe(steps=3, optimizer=Optimizer(rate=0.5))
    with pytest.raises(InputError, match=r"training\.optimizer"):
        run(other, tmp_path, splits)
    # What does not change the weights may change.
    assert run(tiny_recipe(steps=3, log_every=7, checkpoint_every=2), tmp_path, splits).finished


def test_a_run_of_an_older_version_goes_on(tmp_path, splits):
    """Its recipe lacks settings that were added since; they count as their defaults."""
    recipe = tiny_recipe(steps=3, augment=True)
    run(recipe, tmp_path, splits)
    older = read_json(tmp_path / "recipe.json")
    del older["training"]["windows"]
    write_json(tmp_path / "recipe.json", older)
    assert run(recipe, tmp_path, splits).finished
    del older["training"]["augment"]
    write_json(tmp_path / "recipe.json", older)
    with pytest.raises(InputError, match=r"training\.augment"):
        run(recipe, tmp_path, splits)


def test_divergence_is_named_and_the_last_good_state_stays(tmp_path, splits):
    recipe = tiny_recipe(optimizer=Optimizer(rate=1e30), checkpoint_every=1, ema=None)
    with pytest.raises(TrainingDiverged, match="finite"):
        run(recipe, tmp_path, splits)
    shutil.rmtree(tmp_path)


def test_divergence_between_two_logs_leaves_the_good_checkpoints(tmp_path, splits, monkeypatch):
    """What is not finite is neither saved nor called the last good state, and nothing goes to make room for it."""
    recipe = tiny_recipe(steps=12, checkpoint_every=2, log_every=40, evaluate_every=40)
    descend = Run.descend

    def spoilt(self, *arguments):
        numbers = descend(self, *arguments)
        if self.step == 8:
            with torch.no_grad():
                self.operator.model.lift.layers[0].weight[0, 0] = torch.nan
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(Run, "descend", spoilt)
        with pytest.raises(TrainingDiverged, match=r"model\.lift\.layers\.0\.weight.* near step 10.*00000008"):
            run(recipe, tmp_path, splits)
    assert [p.name for p in checkpoints(tmp_path)] == ["00000006", "00000008"]
    assert run(recipe, tmp_path, splits).finished


@pytest.mark.parametrize("where", ["exp_avg_sq", "shadow"])
def test_moments_and_average_that_are_not_finite_are_not_saved(tmp_path, splits, monkeypatch, where):
    descend = Run.descend

    def spoilt(self, *arguments):
        numbers = descend(self, *arguments)
        moments = next(iter(self.descent.optimizers[0].state.values()))["exp_avg_sq"]
        (self.average.shadow[0] if where == "shadow" else moments).fill_(torch.inf)
        return numbers

    monkeypatch.setattr(Run, "descend", spoilt)
    with pytest.raises(TrainingDiverged, match=rf"`.*({where}|average/0)` left .*The last good state is the start"):
        run(tiny_recipe(checkpoint_every=1, log_every=40), tmp_path, splits)
    assert not checkpoints(tmp_path)


def holding_out(recipe: Recipe, validation: int) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation=validation))


def test_a_run_scores_the_samples_that_it_holds_out_and_says_so(tmp_path, tiny_data, capsys):
    recipe = holding_out(tiny_recipe(steps=4, evaluate_every=2, checkpoint_every=4), 5)
    learned, scored = train_and_scored(tiny_data, recipe)
    outcome = train(recipe, tmp_path, (learned, scored), tensorboard=False)
    assert outcome.scores.count == 5
    newest = checkpoints(tmp_path)[-1]
    held_out = tiny_data.subset(range(7, 12))
    saved = load_checkpoint(newest)
    assert evaluate(saved.operator, held_out, 4).error == pytest.approx(outcome.scores.error, rel=1e-6)
    # Console, journal, checkpoint, model card and `oformer inspect` name the split.
    said = capsys.readouterr().err
    assert f"step 4: validation error {outcome.scores.error:.3%}" in said
    assert "test error" not in said
    assert [r["split"] for r in read_journal(tmp_path) if r["kind"] == "evaluate"] == ["validation"] * 2
    assert (saved.scores["split"], saved.scores["count"], saved.provenance["training samples"]) == ("validation", 5, 7)
    card = (newest / "README.md").read_text()
    assert "| validation error (relative L2, mean over 5 samples) |" in card
    assert "test error" not in card
    assert "mean over 5 validation samples" in describe(tmp_path)
    assert train(recipe, tmp_path, (learned, scored), quiet=True).scores == outcome.scores


def test_a_run_without_held_out_samples_scores_the_test_samples_and_says_so(tmp_path, splits, capsys):
    outcome = train(tiny_recipe(steps=2, evaluate_every=2), tmp_path, splits, tensorboard=False)
    assert f"step 2: test error {outcome.scores.error:.3%}" in capsys.readouterr().err
    newest = checkpoints(tmp_path)[-1]
    assert "| test error (relative L2, mean over 4 samples) |" in (newest / "README.md").read_text()
    assert "split" not in load_checkpoint(newest).scores
    assert "mean over 4 test samples" in describe(tmp_path)


def test_splits_that_do_not_hold_the_samples_out_are_refused(tmp_path, splits):
    with pytest.raises(InputError, match=r"7 to train on and 5 to score, got 12 and 4.*5 .* by `train_and_scored`"):
        run(holding_out(tiny_recipe(), 5), tmp_path / "run", splits)
    assert not (tmp_path / "run").exists()


def spoiled_targets(data, factor):
    samples = [dataclasses.replace(sample, target=sample.target * factor) for sample in data]
    return PointDataset(samples, spec=data.spec, card=data.card)


@pytest.mark.parametrize("factor", [0.0, 1e25])
def test_scores_that_are_not_finite_break_no_save(tmp_path, splits, factor):
    held_out = (splits[0], spoiled_targets(splits[1], factor))
    recipe = tiny_recipe(steps=4, evaluate_every=2, checkpoint_every=2, patience=5)
    outcome = run(recipe, tmp_path, held_out)
    assert outcome.finished
    again = run(recipe, tmp_path, held_out)  # from the checkpoint
    assert again.scores.to_json() == outcome.scores.to_json()
    assert Scores.of(json.loads(json.dumps(outcome.scores.to_json(), allow_nan=False))).count == 4
    assert "test error" in (checkpoints(tmp_path)[-1] / "README.md").read_text()


def test_scores_without_finite_numbers_are_null_and_come_back_as_nan():
    nan = float("nan")
    scores = Scores(2, nan, 0.5, float("inf"), 1, nan, [nan, 1.0], [0.1], None, Momentum(nan, 0.1, 0.2))
    written = json.dumps(scores.to_json(), allow_nan=False)
    back = Scores.of(json.loads(written))
    assert json.dumps(back.to_json()) == written
    assert math.isnan(back.error)
    assert math.isnan(back.by_step[0])
    assert (back.median, back.mean_squared_scaled, back.momentum.relative) == (0.5, None, 0.1)


def test_only_a_finite_error_is_the_best(tmp_path, splits, monkeypatch):
    found = iter([float("nan"), 0.5, float("nan"), 0.7])

    def scored(errors):
        return dataclasses.replace(summarize(errors), error=next(found))

    monkeypatch.setattr("oformer.training.run.summarize", scored)
    run(tiny_recipe(steps=8, evaluate_every=2), tmp_path, splits)
    progress = read_json(checkpoints(tmp_path)[-1] / PROGRESS)
    assert (progress["best"], progress["evaluations_since_best"]) == (0.5, 2)


@pytest.mark.parametrize("name", ["model.safetensors", STATE, "config.json", PROGRESS])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, splits, whole, name):
    shutil.copytree(whole[0], tmp_path / "cut")
    newest = checkpoints(tmp_path / "cut")[-1]
    content = bytearray((newest / name).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / name).write_bytes(content)
    with pytest.warns(DamagedCheckpoint, match=rf"{name} as it was written.*goes on from .*00000030.*damaged-00000040"):
        assert run(tiny_recipe(), tmp_path / "cut", splits).finished
    assert same_state(whole[0], tmp_path / "cut")
    assert (newest.with_name("damaged-00000040") / name).read_bytes() == content
    assert [p.name for p in checkpoints(tmp_path / "cut")] == ["00000030", "00000040"]


def test_where_every_checkpoint_is_damaged_a_run_is_not_begun_anew(tmp_path, splits):
    recipe = tiny_recipe(steps=8, checkpoint_every=4)
    run(recipe, tmp_path, splits)
    for path in checkpoints(tmp_path):
        (path / STATE).write_bytes(b"")
    with pytest.raises(InputError, match=rf"00000008/{STATE} as it was written.*the checkpoint before, .*00000004"):
        run(recipe, tmp_path, splits)
    assert len(checkpoints(tmp_path)) == 2


def rewritten_state(folder, change):
    """Change the training state of the newest checkpoint, which then has no checksums."""
    newest = checkpoints(folder)[-1]
    tensors, progress = load_tensors(newest / STATE), read_json(newest / PROGRESS)
    change(tensors, progress)
    save_arrays(newest / STATE, {name: tensor.numpy() for name, tensor in tensors.items()})
    write_json(newest / PROGRESS, progress)
    for path in checkpoints(folder):
        if path == newest:
            (path / "checksums.json").unlink()
        else:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, progress: tensors.pop("random/cpu"), "`random/cpu`"),
        (lambda tensors, progress: tensors.pop("weights/3"), "`weights/3`.*got none"),
        (lambda tensors, progress: tensors.update({"weights/3": torch.zeros(2, 2)}), r"`weights/3`.*shape \(2, 2\)"),
        (lambda tensors, progress: tensors.update({"optimizer/0.0.exp_avg": torch.ones(7)}), "`optimizer/0.0.exp_avg`"),
        (lambda tensors, progress: tensors.update({"optimizer/7": torch.ones(7)}), "`optimizer/7`"),
        (lambda tensors, progress: tensors.update({"weights/3": torch.tensor([torch.nan])}), "NaN .*`weights/3`"),
        (lambda tensors, progress: progress.pop("best"), "missing best"),
        (lambda tensors, progress: progress.update(step="ten"), r"training\.json\.step.*'ten'"),
    ],
)
def test_a_state_that_contradicts_its_model_is_one_sentence(tmp_path, splits, whole, change, message):
    shutil.copytree(whole[0], tmp_path / "changed")
    rewritten_state(tmp_path / "changed", change)
    with pytest.raises(InputError, match=message):
        run(tiny_recipe(), tmp_path / "changed", splits)


def test_patience_stops_a_run_that_no_longer_improves(tmp_path, splits):
    still = Optimizer(kind="adamw", rate=0.0, weight_decay=0.0)
    outcome = run(tiny_recipe(evaluate_every=2, patience=3, optimizer=still, ema=None), tmp_path, splits)
    assert (outcome.step, outcome.reason) == (8, "patience")
    assert outcome.finished


def test_the_average_is_what_is_saved_and_returned(tmp_path, splits):
    outcome = run(tiny_recipe(steps=12, log_every=1), tmp_path, splits)
    newest = checkpoints(tmp_path)[-1]
    saved = load_checkpoint(newest).operator
    for a, b in zip(outcome.operator.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b)
    raw = load_tensors(newest / STATE)["weights/0"]
    assert not torch.equal(raw, next(iter(saved.model.parameters())))
    again = evaluate(saved, splits[1], 4)
    assert again.error == pytest.approx(outcome.scores.error, rel=1e-6)


def test_it_learns(tmp_path, splits):
    """From a relative error of about one to a small share of it, on the samples it was shown."""
    recipe = tiny_recipe(
        steps=300, drop=None, augment=False, loss=Loss(), evaluate_every=300, checkpoint_every=300, ema=None
    )
    quiet_model = dataclasses.replace(
        recipe.model, encoder=dataclasses.replace(recipe.model.encoder, dropout=0.0, lift_dropout=0.0)
    )
    recipe = dataclasses.replace(recipe, model=quiet_model)
    outcome = run(recipe, tmp_path, splits)
    assert evaluate(outcome.operator, splits[0], 4).error < 0.15


def test_going_on_with_data_of_another_shape_is_refused(tmp_path, splits, tiny_data):
    run(tiny_recipe(steps=2), tmp_path, splits, stop_after=0.0)
    finer = tiny_data.with_view(View(points=(64,)))
    with pytest.raises(InputError, match=r"was begun with.*grid=\(64,\).*grid=\(32,\)"):
        run(tiny_recipe(steps=2), tmp_path, (finer.split("train"), finer.split("test")))


@pytest.mark.parametrize("other", [{"compile": True}, {"capture": True}, {"recompute": True}])
def test_chunks_go_with_no_other_way_of_running_the_model(other):
    with pytest.raises(InputError, match=rf"no training.{next(iter(other))} with training.chunk"):
        tiny_recipe(chunk=8, **other)
    with pytest.raises(InputError, match=r"whole number for training.chunk, got 0\. Leave it out"):
        tiny_recipe(chunk=0)


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({}, r"--training.accumulate 2 .*--training.recompute .*--training.chunk 16 "),
        ({"accumulate": 4, "recompute": True}, r"goes on with --training.chunk 16 "),
        ({"chunk": 40}, r"goes on with --training.chunk 20 "),
    ],
)
def test_too_little_memory_is_said_with_ways_out(tmp_path, splits, monkeypatch, settings, ways):
    def full(self, batch, times):
        raise torch.OutOfMemoryError("CUDA out of memory")

    recipe = tiny_recipe(steps=3, drop=None, checkpoint_every=1, **settings)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        run(recipe, tmp_path, splits)
    monkeypatch.setattr(Stepper, "__call__", full)
    with pytest.raises(OutOfMemory, match=rf"4 samples of 32 points is not there on cpu.*{ways}"):
        run(recipe, tmp_path, splits)
    monkeypatch.undo()
    assert checkpoints(tmp_path)[-1].name == "00000002"
    # Each way may be taken by the run that is there.
    other = tiny_recipe(steps=3, drop=None, checkpoint_every=1, accumulate=2, chunk=16)
    assert run(other, tmp_path, splits).finished
