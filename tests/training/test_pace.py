"""A time budget: whatever the machine does, the run ends in time, and at the end of its schedule."""

import itertools
import signal
from types import SimpleNamespace

import pytest
import torch

from oformer.checkpoint import checkpoints
from oformer.files import read_json
from oformer.training import loop, pace, run
from oformer.training.distributed import ALONE
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.resume import PROGRESS
from oformer.training.run import MAX_CHECKPOINTS, Run
from oformer.training.schedules import OneCycle
from tests.tiny import tiny_recipe

STEPS, BUDGET = 400, 20.0  # of the recipe, and seconds


@pytest.fixture
def splits(tiny_data):
    return tiny_data.split("train"), tiny_data.split("test")


class Machine:
    """A clock and steps that take as long as somebody says, in place of the real ones; nothing is learned."""

    def __init__(self, monkeypatch, step, evaluation=0.2, checkpoint=0.05):
        self.now, self.positions, self.stop_at = 500.0, [], None
        self.clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in (loop, run, pace):
            monkeypatch.setattr(module, "time", self.clock)

        def descend(run, batch, position):
            self.now += step(self.now - 500.0)
            self.positions.append(position)
            if len(self.positions) == self.stop_at:
                signal.raise_signal(signal.SIGTERM)
            return {"loss": torch.tensor(1.0)}

        def slower(work, seconds):
            def slowly(*arguments):
                self.now += seconds
                return work(*arguments)

            return slowly

        monkeypatch.setattr(Run, "descend", descend)
        monkeypatch.setattr(Run, "evaluate", slower(Run.evaluate, evaluation))
        monkeypatch.setattr(Run, "save", slower(Run.save, checkpoint))

    def train(self, folder, splits, steps=STEPS, seconds=BUDGET, **settings):
        """Seconds that the call took, and how it ended."""
        settings = {"evaluate_every": steps // 5, "checkpoint_every": steps // 4, "log_every": steps // 10, **settings}
        began, minutes = self.now, None if seconds is None else seconds / 60
        recipe = tiny_recipe(steps=steps, **settings)
        outcome = train(recipe, folder, splits, max_minutes=minutes, quiet=True, tensorboard=False)
        return self.now - began, outcome


def in_bursts(now: float) -> float:
    """A core that others take for two of every three seconds."""
    return 0.06 if now % 3 < 1 else 0.18


# What a step takes at a time; what is possible in twenty seconds is always less than the 400 steps of the recipe.
MACHINES = {
    "a slow one": lambda now: 0.1,
    "a very slow one": lambda now: 1.1,
    "slower from the middle on": lambda now: 0.07 if now < 10 else 0.14,
    "slower near the end": lambda now: 0.07 if now < 17 else 0.21,
    "faster from the middle on": lambda now: 0.2 if now < 10 else 0.1,
    "busy in bursts": in_bursts,
    "slow to start": lambda now: 4.0 if now == 0 else 0.1,
    "one hiccup": lambda now: 5.0 if 8 < now < 8.1 else 0.1,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_ends_with_its_time_and_with_its_schedule(tmp_path, splits, monkeypatch, machine):
    here = Machine(monkeypatch, MACHINES[machine])
    seconds, outcome = here.train(tmp_path, splits)
    slowest = MACHINES[machine](19.9)
    assert 0.95 * BUDGET - slowest < seconds < 1.02 * BUDGET + slowest
    assert outcome.reason == "finished"
    assert outcome.finished
    assert outcome.step == len(here.positions) < STEPS
    assert here.positions[0] == 0
    assert here.positions[-1] == STEPS - 1
    rates = [record["rate"] for record in read_journal(tmp_path) if record["kind"] == "train"]
    assert rates[-1] == pytest.approx(2e-3 / 10 / 10)
    if machine == "a very slow one":  # too few steps to go smoothly
        return
    # The rate makes no jump when the speed changes.
    usual = STEPS / len(here.positions)
    assert min(advances(here.positions)[:-1]) >= 1  # a fraction may be left for the last
    assert max(advances(here.positions)) < 4 * usual
    rates = [OneCycle(warmup=0.3, start=10, end=10).at(position, STEPS)[0] for position in here.positions]
    assert max(abs(change) for change in advances(rates)) < 0.05


def advances(positions):
    return [b - a for a, b in itertools.pairwise(positions)]


def test_after_a_standstill_the_rate_comes_down_in_steps_and_the_run_is_late_by_a_twentieth(
    tmp_path, splits, monkeypatch
):
    here = Machine(monkeypatch, lambda now: 30.0 if 5 < now < 5.1 else 0.02)
    seconds, outcome = here.train(tmp_path, splits, steps=10_000)
    late = seconds - 35  # the last evaluation takes 0.2 of it, checkpoints 0.05 each
    assert 0.5 < late < pace.GRACE * BUDGET + 0.5
    assert max(advances(here.positions)) < 10_000 / 45  # a whole schedule of 50 steps
    assert here.positions[-1] == 10_000 - 1
    assert outcome.finished


@pytest.mark.parametrize("seconds", [BUDGET, 10 * BUDGET])
def test_a_fast_machine_does_the_steps_of_the_recipe_one_by_one(tmp_path, splits, monkeypatch, seconds):
    here = Machine(monkeypatch, lambda now: 0.005, evaluation=0.01)
    took, outcome = here.train(tmp_path, splits, steps=100, seconds=seconds)
    assert here.positions == list(range(100))
    assert outcome.step == 100
    assert took < 1


def test_with_more_time_than_it_needs_a_run_is_the_same_bit_for_bit(tmp_path, splits):
    from tests.training.test_loop import same_state

    recipe = tiny_recipe(steps=12, evaluate_every=4, log_every=2)
    for name, minutes in (("without", None), ("with", 600.0)):
        train(recipe, tmp_path / name, splits, max_minutes=minutes, quiet=True, tensorboard=False)
    assert same_state(tmp_path / "without", tmp_path / "with")
    without, given = (
        [(r["kind"], r["step"], r.get("loss"), r.get("rate"), r.get("error")) for r in read_journal(tmp_path / name)]
        for name in ("without", "with")
    )
    assert without == given


def test_no_time_at_all_is_one_step_at_the_end_of_the_schedule(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.1)
    _, outcome = here.train(tmp_path, splits, seconds=0.0)
    assert (outcome.step, outcome.finished, here.positions) == (1, True, [STEPS - 1])


def test_a_run_that_was_stopped_has_the_rest_of_its_budget(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.1)
    here.stop_at = 80
    first, outcome = here.train(tmp_path, splits)
    assert (outcome.reason, outcome.step, outcome.finished) == ("SIGTERM", 80, False)
    progress = read_json(checkpoints(tmp_path)[-1] / PROGRESS)
    assert progress["reached"] == here.positions[-1] + 1
    here.now += 1000  # which belong to nobody's budget
    second, outcome = here.train(tmp_path, splits)
    assert outcome.finished
    assert 0.95 * BUDGET < first + second < 1.02 * BUDGET
    assert here.positions[-1] == STEPS - 1
    assert max(advances(here.positions)) < 1.2 * STEPS / len(here.positions)
    assert here.train(tmp_path, splits)[0] == 0


def test_a_stopped_run_goes_on_without_a_budget_as_the_recipe_says(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.1)
    here.stop_at = 80
    here.train(tmp_path, splits)
    _, outcome = here.train(tmp_path, splits, seconds=None)
    reached = here.positions[79]
    assert advances(here.positions)[79:-1] == pytest.approx([1.0] * (len(here.positions) - 81))
    assert len(here.positions) == 80 + -(-(STEPS - 1 - reached) // 1)
    assert outcome.finished


def test_minutes_without_a_budget_are_not_taken_from_one_that_is_given_later(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.1)
    here.stop_at = 150
    here.train(tmp_path, splits, seconds=None)
    seconds, _ = here.train(tmp_path, splits, seconds=10)
    assert 9.5 < seconds < 10.2


def test_steps_that_are_launched_ahead_of_a_gpu_count_what_they_take_there(monkeypatch):
    now, behind, budget = [0.0], [0.0], 20.0

    def synchronize(device):
        now[0] += behind[0]
        behind[0] = 0.0

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    here = pace.Pace(
        10_000, 0.0, minutes=budget / 60, spent=0.0, evaluation=1, started=0.0, device=torch.device("cuda"), ranks=ALONE
    )
    positions = []
    while not positions or positions[-1] < 9_999:
        positions.append(here.next(positions[-1] + 1 if positions else 0.0))
        now[0] += 0.0001
        behind[0] += 1.0 if len(positions) < 3 else 0.005  # the first two compile and record
        here.stepped()
    synchronize(None)
    assert 0.95 * budget < now[0] < 1.02 * budget
    assert len(positions) > 18 / 0.0051 * 0.95
    assert max(advances(positions)) < 2 * 10_000 / len(positions)


def evaluations(folder):
    return [record["step"] for record in read_journal(folder) if record["kind"] == "evaluate"]


def test_evaluations_come_at_the_same_shares_of_a_shorter_run(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.2)
    _, outcome = here.train(tmp_path, splits)
    wanted = [outcome.step * share for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert evaluations(tmp_path) == pytest.approx(wanted, abs=5)
    assert len(checkpoints(tmp_path)) == MAX_CHECKPOINTS


def test_evaluations_that_would_eat_the_time_are_left_out_but_for_the_last(tmp_path, splits, monkeypatch):
    here = Machine(monkeypatch, lambda now: 0.1, evaluation=0.9)
    seconds, outcome = here.train(tmp_path, splits, evaluate_every=STEPS // 20)
    assert 0.95 * BUDGET < seconds < 1.02 * BUDGET
    assert evaluations(tmp_path)[-1] == outcome.step
    assert 1 <= len(evaluations(tmp_path)[:-1]) * 0.9 <= pace.EVALUATING * BUDGET + 0.9
