"""Several processes train as one does: same losses, same gradients, same scores, one writer, one end."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oformer.checkpoint import checkpoints, load_tensors
from oformer.data.dataset import PointDataset
from oformer.engine.runners import Plain
from oformer.errors import InputError, TrainingDiverged
from oformer.fields import Batch, Field, Sample, collate
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.training.distributed import ALONE, Ranks, started_by_torchrun
from oformer.training.evaluate import Errors, errors
from oformer.training.journal import read_journal
from oformer.training.loop import Outcome, train
from oformer.training.losses import Loss, Region
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.resume import STATE
from oformer.training.run import Run
from oformer.training.step import Scale, Stepper
from tests.ranks import pair
from tests.tiny import tiny_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with pair(tmp_path_factory.mktemp("meeting")) as both:
        yield both


# Gradients of one batch, in float64.


def ragged_samples(count: int) -> list[Sample]:
    """Samples of 5 to 11 points and 5 to 9 queries in the plane: no number of ranks divides them all."""
    draw = torch.Generator().manual_seed(3)

    def field(points: int, channels: int) -> Field:
        weights = torch.rand(points, generator=draw) + 0.1
        values = torch.randn(1, points, channels, generator=draw)
        return Field(torch.rand(points, 2, generator=draw), values, weights / weights.sum())

    samples = []
    for i in range(count):
        query = field(5 + (3 * i) % 5, 0)
        samples.append(Sample(field(5 + (4 * i) % 7, 2), query, torch.randn(2, query.points, 3, generator=draw) + 1))
    return samples


def ragged_recipe(attention: str = "galerkin", norm: str = "channels", loss: Loss | None = None, **training):
    model = OFormerConfig(
        attention=attention,
        norm=norm,
        encoder=Encoder(width=8, depth=2),
        query=Query(width=8, fourier_features=4, hidden=(8,), heads=2, mixing=True),
        propagator=Propagator(depth=1),
        decoder=Decoder(hidden=(8,)),
    )
    settings = {"steps": 4, "batch": 4, "evaluate_every": 4, "checkpoint_every": 2, "log_every": 1, **training}
    return Recipe("ragged", Data(train=4, test=5), model, Training(loss=loss or Loss(), **settings))


def operator_of(recipe: Recipe, data: PointDataset) -> Operator:
    torch.manual_seed(0)
    return Operator(recipe.model.build(data.spec), Normalization()).fit(data)


def gradients(ranks: Ranks, recipe: Recipe) -> dict[str, Tensor]:
    samples = ragged_samples(4)
    operator = operator_of(recipe, PointDataset(samples)).double()
    batch: Batch = collate(samples).to(torch.float64)
    rank, world = ranks.share
    share = batch.size // world
    batch = ranks.our_points(batch.samples(slice(rank * share, (rank + 1) * share)))
    with ranks.points_together():
        numbers = Stepper(operator, recipe.training, "cpu", ranks)(batch, 2)
    found = {name: p.grad for name, p in operator.named_parameters() if p.grad is not None}
    return {**{name: ranks.sum(n) / ranks.world for name, n in numbers.items()}, **found}


def gradients_of_rank(rank: int, split: str, recipe: Recipe) -> dict[str, Tensor]:
    return gradients(Ranks(rank, 2, split), recipe)


near = Loss("squared", region=Region((0.2, 0.9, 0.1, 0.8), density=2))


@pytest.mark.parametrize("split", ["samples", "points"])
@pytest.mark.parametrize(
    "recipe",
    [
        ragged_recipe("galerkin", "channels"),
        ragged_recipe("galerkin", "points"),
        ragged_recipe("galerkin", "points-detached", Loss("relative-step", "physical")),
        ragged_recipe("fourier", "points"),
        ragged_recipe("fourier", "points-detached", near),
        ragged_recipe("fourier", "channels", near, accumulate=2),
    ],
    ids=lambda recipe: f"{recipe.model.attention}-{recipe.model.norm}-{recipe.training.loss.kind}",
)
def test_loss_and_gradients_are_those_of_one_process(two, split, recipe):
    alone = gradients(ALONE, dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, accumulate=1)))
    for shared in two(gradients_of_rank, split, recipe):
        assert shared.keys() == alone.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(
                shared[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )


STEPS = 3  # the first as it is, the second recorded, the third replayed


def scaled_gradients(ranks: Ranks, recorded: bool, spoiled: int | None) -> tuple[Tensor, float]:
    """All gradients through float16 beside each other, and the scale afterwards; one rank's loss may be spoiled."""
    recipe, samples = ragged_recipe(), ragged_samples(4)
    operator = operator_of(recipe, PointDataset(samples))
    stepper = Stepper(operator, recipe.training, "cpu", ranks, (lambda work, _: work) if recorded else None)
    stepper.runner = Plain(operator, "float16")
    stepper.scale = Scale(torch.device("cpu"))
    rank, world = ranks.share
    share = len(samples) // world
    batch = collate(samples).samples(slice(rank * share, (rank + 1) * share))
    if ranks.rank == spoiled:
        batch.target[...] = torch.inf
    for _ in range(STEPS):
        stepper(batch, 2)
    found = torch.cat([p.grad.flatten() for p in operator.parameters() if p.grad is not None])
    return found, float(stepper.scale.value)


def scaled_gradients_of_rank(rank: int, recorded: bool, spoiled: int | None) -> tuple[Tensor, float]:
    return scaled_gradients(Ranks(rank, 2), recorded, spoiled)


@pytest.mark.parametrize("recorded", [False, True])
def test_ranks_agree_on_the_scale_of_float16(two, recorded):
    """A step in which the gradients of one rank leave the range is none for all, or else their weights part."""
    alone, scale = scaled_gradients(ALONE, recorded, None)
    for gradient, own in two(scaled_gradients_of_rank, recorded, None):
        assert float((gradient - alone).norm() / alone.norm()) < 2e-3
        assert own == scale > 2.0**16
    for spoiled in range(2):
        for gradient, own in two(scaled_gradients_of_rank, recorded, spoiled):
            assert not gradient.any()
            assert own == 2.0 ** (16 - STEPS)


def test_shares_of_points_are_of_equal_size_and_keep_the_weights_of_the_whole():
    batch = collate(ragged_samples(4))
    parts = [Ranks(rank, 3, "points").our_points(batch) for rank in range(3)]
    for role in ("input", "query"):
        fields = [getattr(part, role) for part in parts]
        assert len({field.points for field in fields}) == 1
        weights = sum(field.weights.sum(1) for field in fields)
        torch.testing.assert_close(weights, torch.ones(4))
    whole = torch.cat([part.target for part in parts], 2)
    assert torch.equal(whole[:, :, : batch.query.points], batch.target)
    assert not whole[:, :, batch.query.points :].any()
    # More ranks than points: the last ones hold nothing but padding.
    last = Ranks(15, 16, "points").our_points(batch)
    assert last.input.points == 1
    assert not last.input.weights.any()


def test_points_that_all_samples_share_stay_shared():
    sample = ragged_samples(1)[0]
    batch = collate([sample, sample])
    part = Ranks(1, 2, "points").our_points(batch)
    assert part.query.points * 2 > batch.query.points
    assert part.query.coords.stride(0) == 0


# Whole runs.


def still(recipe: Recipe) -> Recipe:
    """The recipe without anything random, so that it does not matter who draws."""
    encoder = dataclasses.replace(recipe.model.encoder, dropout=0.0, lift_dropout=0.0)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, encoder=encoder),
        training=dataclasses.replace(recipe.training, drop=None, augment=False),
    )


def run(ranks: Ranks, recipe: Recipe, folder: Path, store: Path, **minutes: float | None) -> Outcome:
    data = PointDataset.open(store, recipe.data.view)
    splits = data.split("train"), data.split("test")
    return train(recipe, folder, splits, quiet=True, tensorboard=False, ranks=ranks, **minutes)


def run_on_rank(rank: int, split: str, recipe: Recipe, folder: Path, store: Path) -> dict[str, Any]:
    outcome = run(Ranks(rank, 2, split), recipe, folder, store)
    weights = [p.detach() for p in outcome.operator.parameters()]
    return {"weights": weights, "scores": dataclasses.asdict(outcome.scores), "seed": torch.initial_seed()}


def losses(folder: Path) -> list[float]:
    records = [r for r in read_journal(folder) if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))  # one writer
    return [r["loss"] for r in records]


@pytest.fixture
def store(tiny_data):
    return tiny_data._source.folder


@pytest.mark.parametrize("split", ["samples", "points"])
def test_a_run_of_two_ranks_is_a_run_of_one(two, tmp_path, store, split):
    loss = Loss(derivative=1e-3) if split == "samples" else Loss()
    recipe = still(tiny_recipe(steps=8, loss=loss, evaluate_every=8, checkpoint_every=8))
    alone = run(ALONE, recipe, tmp_path / "one", store)
    both = two(run_on_rank, split, recipe, tmp_path / "two", store)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert both[0]["scores"] == both[1]["scores"]
    assert both[0]["scores"]["error"] == pytest.approx(alone.scores.error, rel=1e-4)
    for a, b in zip(both[0]["weights"], both[1]["weights"], strict=True):
        assert torch.equal(a, b)  # the state is replicated to the last bit
    assert "2 x " in (checkpoints(tmp_path / "two")[-1] / "config.json").read_text()


def train_in_parts(rank: int, split: str, recipe: Recipe, folder: Path, store: Path) -> int:
    """Stop after every second step by a signal to the second rank, until the end; returns the number of calls."""
    descend, calls, finished = Run.descend, 0, False

    def disturbed(self, *arguments):
        if rank == 1 and self.step % 2:
            signal.raise_signal(signal.SIGTERM)
        return descend(self, *arguments)

    Run.descend = disturbed
    try:
        while not finished:
            torch.manual_seed(calls)
            outcome = run(Ranks(rank, 2, split), recipe, folder, store)
            calls, finished = calls + 1, outcome.finished
            assert finished or (outcome.reason, outcome.step) == ("SIGTERM", 2 * calls)
    finally:
        Run.descend = descend
    return calls


@pytest.mark.parametrize("split", ["samples", "points"])
def test_a_signal_to_one_rank_stops_both_and_resumed_equals_uninterrupted(two, tmp_path, store, split):
    """With dropout, dropped points, symmetries, Muon and an average: bit for bit."""
    loss = Loss(derivative=1e-3) if split == "samples" else Loss()
    recipe = tiny_recipe(steps=7, loss=loss, evaluate_every=4)
    whole = two(run_on_rank, split, recipe, tmp_path / "whole", store)
    assert whole[0]["seed"] != whole[1]["seed"]  # each rank has a dropout of its own
    assert two(train_in_parts, split, recipe, tmp_path / "parts", store) == [4, 4]
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for name in ("model.safetensors", STATE):
        one, other = (load_tensors(checkpoints(tmp_path / run)[-1] / name) for run in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[n], other[n]) for n in one)


def impatient(rank: int, recipe: Recipe, folder: Path, store: Path) -> tuple[int, str]:
    outcome = run(Ranks(rank, 2), recipe, folder, store, stop_after=0.0 if rank == 1 else None)
    return outcome.step, outcome.reason


def test_time_running_out_on_one_rank_stops_both_and_one_process_goes_on(two, tmp_path, store):
    recipe = still(tiny_recipe(steps=4, evaluate_every=4))
    assert two(impatient, recipe, tmp_path / "parts", store) == [(1, "time")] * 2
    assert two(impatient, recipe, tmp_path / "parts", store) == [(2, "time")] * 2
    rest = run(ALONE, recipe, tmp_path / "parts", store)
    whole = run(ALONE, recipe, tmp_path / "whole", store)
    assert rest.finished
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert rest.scores.error == pytest.approx(whole.scores.error, rel=1e-4)


def hurried(rank: int, recipe: Recipe, folder: Path, store: Path) -> tuple[list[float], int, bool]:
    """Positions on the schedule where the time budget of the first rank is over at once, that of the second never."""
    descend, positions = Run.descend, []

    def noted(self, batch, position):
        positions.append(position)
        return descend(self, batch, position)

    Run.descend = noted
    try:
        outcome = run(Ranks(rank, 2), recipe, folder, store, max_minutes=0.0001 if rank == 0 else 60.0)
    finally:
        Run.descend = descend
    return positions, outcome.step, outcome.finished


def test_the_clock_of_the_first_rank_sets_the_pace_of_all(two, tmp_path, store):
    first, second = two(hurried, still(tiny_recipe(steps=200, evaluate_every=50)), tmp_path, store)
    assert first == second
    positions, steps, finished = first
    assert (len(positions), positions[-1], finished) == (steps, 199, True)
    assert steps < 50


def test_two_ranks_go_on_where_one_stopped(two, tmp_path, store):
    recipe = still(tiny_recipe(steps=4, evaluate_every=4))
    run(ALONE, recipe, tmp_path / "parts", store, stop_after=0.0)
    two(run_on_rank, "samples", recipe, tmp_path / "parts", store)
    run(ALONE, recipe, tmp_path / "whole", store)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def refused(rank: int, recipe: Recipe, folder: Path, store: Path) -> str:
    with pytest.raises(InputError) as caught:
        run(Ranks(rank, 2), recipe, folder, store)
    return str(caught.value)


def test_what_the_first_rank_refuses_no_rank_waits_for(two, tmp_path, store):
    run(ALONE, tiny_recipe(steps=1), tmp_path, store)
    sentences = two(refused, tiny_recipe(steps=1, seed=9), tmp_path, store)
    assert sentences[0] == sentences[1]
    assert "training.seed" in sentences[0]


def diverged(rank: int, recipe: Recipe, folder: Path, store: Path) -> int:
    with pytest.raises(TrainingDiverged) as caught:
        run(Ranks(rank, 2), recipe, folder, store)
    return int(str(caught.value).split("near step ")[1].split(".")[0])


@pytest.mark.parametrize("log_every", [1, 40])  # seen in the loss; seen in the weights when they are to be saved
def test_divergence_ends_all_ranks_at_one_step(two, tmp_path, store, log_every):
    recipe = tiny_recipe(optimizer=Optimizer(rate=1e30), ema=None, log_every=log_every, checkpoint_every=4)
    steps = two(diverged, recipe, tmp_path, store)
    assert steps[0] == steps[1]


def test_a_batch_in_slices_gives_the_run_of_the_batch_at_once(tmp_path, store):
    recipe = still(tiny_recipe(steps=6, evaluate_every=6, ema=None))
    for turns in (1, 2, 4):
        settings = dataclasses.replace(recipe.training, accumulate=turns)
        run(ALONE, dataclasses.replace(recipe, training=settings), tmp_path / str(turns), store)
    for turns in ("2", "4"):
        # The first loss is that of the same weights; later ones feel six steps of Muon, which amplifies rounding.
        assert losses(tmp_path / turns)[0] == pytest.approx(losses(tmp_path / "1")[0], rel=1e-6)
        assert losses(tmp_path / turns) == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


# Scores.


def errors_of(ranks: Ranks, recipe: Recipe, count: int) -> Errors:
    data = PointDataset(ragged_samples(7))
    operator = operator_of(recipe, data)
    return errors(operator, data.subset(range(count)), 4, region=recipe.training.loss.region, ranks=ranks)


def errors_of_rank(rank: int, split: str, recipe: Recipe, count: int) -> Errors:
    return errors_of(Ranks(rank, 2, split), recipe, count)


@pytest.mark.parametrize("split", ["samples", "points"])
@pytest.mark.parametrize("count", [7, 5, 1])  # of the last batch of 5, and of 1 at all, the second rank has nothing
def test_errors_of_every_sample_are_those_of_one_process(two, split, count):
    recipe = ragged_recipe("fourier", "points", near)
    alone = errors_of(ALONE, recipe, count)
    for shared in two(errors_of_rank, split, recipe, count):
        for name in ("relative", "by_step", "squared", "momentum"):
            torch.testing.assert_close(getattr(shared, name), getattr(alone, name), rtol=1e-5, atol=1e-7)


# What is refused.


@pytest.mark.parametrize(
    ("recipe", "ranks", "sentence"),
    [
        (ragged_recipe(batch=6), Ranks(0, 4), "Take a multiple of 4"),
        (ragged_recipe(batch=6, accumulate=2), Ranks(0, 2), "6 over 2 and 2"),
        (ragged_recipe(batch=6, accumulate=4), Ranks(0, 2, "points"), "6 over 1 and 4"),
        (ragged_recipe(loss=Loss(derivative=0.1)), Ranks(0, 2, "points"), "without derivatives.*--split samples"),
        (ragged_recipe("softmax"), Ranks(0, 2, "points"), "galerkin or fourier.*got softmax.*--split samples"),
        (ragged_recipe("softmax", chunk=9), Ranks(0, 1), "galerkin or fourier.*got softmax.*Leave training.chunk out"),
        (ragged_recipe(chunk=9), Ranks(0, 2, "points"), "all points of a sample in one process for training.chunk"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_anything_is_written(tmp_path, recipe, ranks, sentence):
    data = PointDataset(ragged_samples(4))
    with pytest.raises(InputError, match=sentence):
        train(recipe, tmp_path / "run", (data, data), quiet=True, ranks=ranks)
    assert not (tmp_path / "run").exists()


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="from 0 to 1"):
        Ranks(2, 2)


@pytest.mark.parametrize(
    ("variables", "alone"),
    [
        ({"SLURM_NTASKS": "2"}, False),
        ({"SLURM_NTASKS": "1"}, True),
        ({"SLURM_NTASKS": "2", "WORLD_SIZE": "1"}, True),
        ({}, True),
    ],
)
def test_tasks_of_srun_that_no_torchrun_connects_are_refused(monkeypatch, variables, alone):
    """They know nothing of each other, and each would train the whole run."""
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        contextlib.nullcontext() if alone else pytest.raises(InputError, match=r"got SLURM_NTASKS=2 .*srun .*torchrun"),
        started_by_torchrun("cpu") as ranks,
    ):
        assert ranks.world == 1


# The command.


def test_torchrun_trains_and_one_process_reports(tmp_path):
    """Data made by one rank while the other waits, one journal, one report, one voice."""
    settings = "--problem.points 64 --problem.solver-points 64 --problem.steps 20 --data.view.points 32 --data.train 8 \
        --data.test 4 --training.batch 4 --model.encoder.width 16 --model.encoder.depth 1"
    common = ["train", "burgers-demo", "--device", "cpu", *settings.split()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "oformer"]
    done = subprocess.run(
        [*command, *common, "--training.steps", "3", "--split", "points", "--training.loss.derivative", "0"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "burgers-demo"
    assert (folder / "report.html").exists()
    assert [r["kind"] for r in read_journal(folder)] == ["start", "train", "evaluate", "stop"]
    assert done.stderr.count("Finished 3 steps") + done.stdout.count("Finished 3 steps") == 1
