"""The pace of a run: how far each training step advances the schedule, so that a time budget ends with the schedule.

A position on the schedule is counted in steps of the recipe, from zero. Without a time budget each training step
advances it by one. With a budget it advances by as much as brings the run to the end of the schedule when the time is
over, at the speed measured lately; by at least one, so that a fast machine trains exactly the recipe's steps and ends
before its time. Learning rate, horizon, and the intervals of log, evaluation and checkpoint all follow the position.
So the learning rate is continuous when the speed of the machine changes, and each run ends at the end of its schedule.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Literal

import torch

from oformer.training.distributed import Ranks

BLOCK = 1 / 200  # of the budget: the shortest time over which the speed is measured
TRUSTED = 3  # blocks that are measured before the pace follows them: the first steps may compile and record
RECENT = 5  # blocks whose median is the speed: a standstill in one or two of them is no slower machine
EVALUATING = 0.1  # of the budget: the most that evaluations take, the last one aside; those beyond are left out
# Of the budget, for a whole schedule: the fastest pace. Where a machine stood still for most of its time, the learning
# rate still comes down in so many steps, and the run ends late by no more than this share of the budget.
GRACE = 0.05


class Pace:
    """Chooses the position of each step on the schedule."""

    def __init__(
        self,
        steps: int,
        reached: float,
        *,
        minutes: float | None,
        spent: float,
        evaluation: int,
        started: float,
        device: torch.device,
        ranks: Ranks,
    ):
        """Begin a call of `train`.

        Args:
            steps: the length of the schedule.
            reached: how much of it earlier calls trained.
            minutes: the time budget of the whole run; None: each training step is a step of the recipe.
            spent: the minutes of the budget that earlier calls took.
            evaluation: batches of the scored samples: a guess of the duration of an evaluation, in training steps.
            started: `time.monotonic()` at the beginning of the call.
            device: where steps are computed, to wait for it before the clock is read.
            ranks: the processes that train together; the clock of the first one counts for all.
        """
        self.steps, self.minutes, self.device, self.ranks = steps, minutes, device, ranks
        self.advance = 1.0
        self.evaluates = True  # whether there is time for an evaluation after the step
        self._budget = 60 * (minutes or 0.0)
        self._first, self._started, self._end = reached, started, started + self._budget - 60 * spent
        self._evaluation = evaluation
        self._mark: float | None = None  # where the block began; the first step, which compiles, belongs to none
        self._count = 0  # training steps since then
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds per training step, block by block
        self._aside = {"evaluation": 0.0, "checkpoint": 0.0}  # seconds in all
        self._latest: dict[str, float] = {}  # seconds of the latest one

    def next(self, reached: float) -> float:
        """The position of the next step, once `reached` steps of the schedule are trained; all ranks get the same."""
        if self.minutes is None:
            return reached
        # Rounding must not leave a little of the schedule to one more step.
        rest = self.steps - reached
        advance = self._advance(rest)
        position = self.steps - 1.0 if advance >= rest else reached + advance - 1
        agreed = torch.tensor([position, self._affords_evaluation(position)], dtype=torch.float64)
        self.ranks.take_from_first([agreed])
        position, evaluates = agreed.tolist()
        self.advance, self.evaluates = position + 1 - reached, bool(evaluates)
        return position

    def _advance(self, rest: float) -> float:
        now = self._now()
        left = self._end - now
        if len(self._recent) < TRUSTED:
            return 1.0 if left > 0 else rest
        # Evaluations and checkpoints are taken to need the same share of the time as up to now.
        training = 1 - sum(self._aside.values()) / max(now - self._started, 1e-9)
        at_the_end = self._evaluation_seconds() + self._latest.get("checkpoint", 0.0)
        room = max((left - at_the_end) * training, GRACE * self._budget * rest / self.steps)
        return max(1.0, rest / max(1, int(room / self._seconds())))

    def _affords_evaluation(self, position: float) -> bool:
        """Whether evaluations up to a position keep to their share of the time."""
        share = (position + 1 - self._first) / (self.steps - self._first)
        time_for_it = EVALUATING * share * (self._end - self._started)
        return self._now() < self._end and self._aside["evaluation"] + self._evaluation_seconds() <= time_for_it

    def _now(self) -> float:
        """The time, or that at which all launched steps should be done: a GPU may be far behind."""
        now = time.monotonic()
        return now if self._mark is None else max(now, self._mark + self._count * self._seconds())

    def _seconds(self) -> float:
        """Of a training step, lately; zero before any is measured."""
        if not self._recent:
            return 0.0
        return max(statistics.median(self._recent) if len(self._recent) == RECENT else min(self._recent), 1e-9)

    def _evaluation_seconds(self) -> float:
        return self._latest.get("evaluation", self._evaluation * self._seconds())

    def stepped(self) -> None:
        """Note that a training step is over."""
        if self.minutes is None:
            return
        self._count += 1
        if len(self._recent) < TRUSTED or self._mark is None or self._now() - self._mark >= BLOCK * self._budget:
            self._end_block()

    def _end_block(self) -> float:
        """Measure the block and begin another; returns the time."""
        if self.device.type == "cuda":  # steps are launched ahead of being computed
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        if self._mark is not None and self._count:
            self._recent.append((now - self._mark) / self._count)
        self._mark, self._count = now, 0
        return now

    @contextlib.contextmanager
    def aside(self, what: Literal["evaluation", "checkpoint"]) -> Iterator[None]:
        """Keep the time of an evaluation or a checkpoint out of that of training steps."""
        if self.minutes is None:
            yield
            return
        began = self._end_block()
        yield
        self._mark = time.monotonic()
        self._latest[what] = self._mark - began
        self._aside[what] += self._latest[what]
