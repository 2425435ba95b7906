"""The one training loop. The run that it drives, its folder and its state are in `run.py`."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from oformer.checkpoint import Checkpoint
from oformer.data.dataset import PointDataset
from oformer.models import Operator
from oformer.training.distributed import ALONE, Ranks
from oformer.training.evaluate import Scores
from oformer.training.recipe import Recipe
from oformer.training.run import Callback, Run
from oformer.training.signals import REQUESTS, StopSignal, stop_signals
from oformer.training.start import refuse_layout, starting_from


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    operator: Operator  # ready for use, averaged where the recipe averages
    step: int
    reason: str  # "finished", "patience", "time", "callback", or the name of a signal
    scores: Scores | None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.reason in ("finished", "patience")


def train(
    recipe: Recipe,
    folder: Path | str,
    data: tuple[PointDataset, PointDataset],
    *,
    device: torch.device | str = "cpu",
    max_minutes: float | None = None,
    stop_after: float | None = None,
    quiet: bool = False,
    tensorboard: bool = True,
    ranks: Ranks = ALONE,
    own: Path | None = None,
    start: Checkpoint | str | Path | None = None,
    on: Callback | None = None,
) -> Outcome:
    """Train a recipe in a run folder, from the start or from where an earlier call stopped.

    The arguments are explained in `experiments/train.py`. `own` says where the data lie, if they are a person's own;
    the run remembers it for `oformer evaluate` and `oformer plot`.
    """
    begun = None
    if start is not None:
        recipe, begun = starting_from(recipe, start)
        refuse_layout(begun, data[0].spec)
    run = Run(recipe, Path(folder), data, torch.device(device), ranks, on)
    # To the last word between ranks: another one may have stopped before a signal to all reaches this one.
    with run.claimed(own), stop_signals() as arrived:
        run.begin(begun)
        reason = "finished"
        if not run.at_end:
            with run.opened(max_minutes=max_minutes, quiet=quiet, tensorboard=tensorboard):
                reason = _steps(run, arrived, stop_after)
            ranks.wait()  # for the files, which belong to all
        return Outcome(run.usable_operator(), run.step, reason, run.scores)


def _steps(run: Run, arrived: StopSignal, stop_after: float | None) -> str:
    """Train step by step until there is a reason to stop; return it."""
    settings, pace, reason = run.settings, run.pace, ""
    for batch in run.batches.stream(run.step):
        position = pace.next(run.reached)
        numbers = run.descend(batch, position)
        run.count(position)
        if run.due(settings.log_every):
            run.log(numbers)
        if run.at_end or (run.due(settings.evaluate_every) and pace.evaluates):
            with pace.aside("evaluation"):
                run.evaluate()
        reason = _reason_to_stop(run, arrived, stop_after)
        if reason or run.due(settings.checkpoint_every):
            with pace.aside("checkpoint"):
                run.save()
        if reason:
            break
    run.write("stop", reason=reason, minutes=run.minutes)
    return reason


def _reason_to_stop(run: Run, arrived: StopSignal, stop_after: float | None) -> str:
    """The reason to stop after this step, equal on all ranks; empty where there is none."""
    out_of_time = stop_after is not None and time.monotonic() - run.started > 60 * stop_after
    request = arrived.name or ("callback" if run.asked_to_stop else "time" if out_of_time else "")
    # A signal, a clock or a callback reaches ranks at different steps; what one wants, all do at this step.
    request = REQUESTS[run.ranks.highest(REQUESTS.index(request))]
    return "finished" if run.at_end else "patience" if run.out_of_patience else request
