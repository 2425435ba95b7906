"""A training run: a recipe in a folder, and all that changes while it is trained. `loop.train` drives it.

The folder holds recipe.json, journal.jsonl, checkpoints/STEP/, and data.json where the data are a person's own.
Everything random is a function of (seed, step) or is saved, so a run that was stopped and resumed equals one that was
not, bit for bit on a CPU.

Several processes may train it together (docs/scaling.md). The state is the same on all ranks; the first one writes.
"""

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oformer.checkpoint import Checkpoint, checkpoints, parameter_count, save_checkpoint
from oformer.config import to_json
from oformer.data.dataset import PointDataset
from oformer.data.loader import Loader, few_sizes
from oformer.errors import InputError, TrainingDiverged
from oformer.fields import Batch
from oformer.files import held, remove_leftovers, write_json
from oformer.models import Operator
from oformer.models.base import products_in
from oformer.training.distributed import Ranks
from oformer.training.evaluate import Scores, errors_of, summarize
from oformer.training.find_data import remember_own
from oformer.training.journal import Console, Journal, hardware
from oformer.training.optimizers import Average, Descent
from oformer.training.pace import Pace
from oformer.training.perturb import Draws, perturbed
from oformer.training.recipe import Recipe
from oformer.training.refusals import (
    out_of_memory,
    refuse_counts,
    refuse_diverged,
    refuse_other_recipe,
    refuse_other_spec,
    refuse_settings,
)
from oformer.training.resume import (
    Progress,
    Saved,
    newest_in_words,
    newest_intact,
    random_states,
    refuse_foreign_state,
    restore_random_states,
    state_files,
)
from oformer.training.start import begin_from
from oformer.training.step import Stepper, used_precision

# Called with the kind of a record of the journal ("start", "train", "evaluate", "stop"), the step and what it holds.
Callback = Callable[[str, int, dict[str, Any]], Any]
Splits = tuple[PointDataset, PointDataset]  # to train on, and to score
MAX_CHECKPOINTS = 2  # of a run; one would do, two forgive a bad disk


class Run:
    """A recipe that is trained in a folder."""

    # Set by `begin`, and changed by every step.
    stepper: Stepper
    descent: Descent
    average: Average | None
    # Set by `opened`, for the steps of one call.
    batches: Loader
    scored_batches: Loader
    journal: Journal | None = None  # None on all ranks but the first
    console: Console
    pace: Pace

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        data: Splits,
        device: torch.device,
        ranks: Ranks,
        on: Callback | None = None,
    ):
        """Build the model from its seed, and refuse what cannot be trained; nothing is written.

        Args:
            recipe: what to train.
            folder: where the run is written.
            data: the samples to train on, and those to score.
            device: where to compute.
            ranks: the processes that train together.
            on: told what the journal is told, by the first rank; may ask to stop.
        """
        self.on, self.asked_to_stop = on, False
        self.started = time.monotonic()
        self.recipe, self.settings, self.folder = recipe, recipe.training, folder
        self.train_data, self.scored_data = data
        self.device, self.ranks = device, ranks
        torch.manual_seed(self.settings.seed)
        self.operator = Operator(recipe.model.build(self.train_data.spec), recipe.normalization)
        refuse_settings(self.settings, self.operator.model, ranks)
        refuse_counts(recipe, data)

        # Progress, which every checkpoint holds.
        self.step = 0  # training steps that are done
        self.reached = 0.0  # how much of the schedule they cover, in steps of the recipe: without a budget, `step`
        self.minutes = 0.0
        self.minutes_of_budget = 0.0  # those of calls with a time budget
        self.best: float | None = None
        self.evaluations_since_best = 0
        self.scores: Scores | None = None

    # The beginning: claim the folder, then a seeded start or the newest checkpoint.

    @contextlib.contextmanager
    def claimed(self, own: Path | None) -> Iterator[None]:
        """Lock the folder within the block, and write the recipe into it; refused where another one lies there.

        Args:
            own: where the data lie, if they are a person's own; noted in data.json.
        """
        with contextlib.ExitStack() as stack:

            def claim() -> None:
                if self.ranks.first:
                    stack.enter_context(held(self.folder))
                    self._write_recipe(own)

            self.ranks.first_then_others(claim)
            yield

    def _write_recipe(self, own: Path | None) -> None:
        path = self.folder / "recipe.json"
        if path.exists():
            remove_leftovers(self.folder / "checkpoints")
            refuse_other_recipe(self.folder, self.recipe)
        write_json(path, to_json(self.recipe))
        if own is not None:
            remember_own(self.folder, own)

    def begin(self, start: Checkpoint | None = None) -> None:
        """Load the newest checkpoint of the folder, or fit the seeded operator to the training samples.

        Args:
            start: whose weights a new run begins with, in place of seeded ones.
        """
        saved = self.ranks.first_then_others(lambda: newest_intact(self.folder))
        if saved is None and start is not None:
            begin_from(self.operator, start, self.train_data)
        elif saved is None and self.recipe.start is not None:
            raise InputError(f"the operator {self.recipe.start.name} to start from", "none", "Give `start`, or --from")
        elif saved is None:
            self.operator.fit(self.train_data)
        else:
            self.operator = saved.operator
            refuse_other_spec(self.folder, self.operator.spec, self.train_data.spec)
        self.operator.to(self.device).train()
        # Other processors may round a seeded start otherwise.
        self.ranks.take_from_first(self.operator.state_dict().values())
        self.stepper = Stepper(self.operator, self.settings, self.device, self.ranks)
        self.descent = Descent(self.operator, self.settings.optimizer, self.stepper.recorder())
        self.average = Average(self.operator, self.settings.ema) if self.settings.ema else None
        if saved is not None:
            self._restore(saved)

    def _restore(self, saved: Saved) -> None:
        """Copy a saved state into optimizer, average, progress and random generators."""
        refuse_foreign_state(saved, self.descent, self.average)
        groups, progress = saved.groups(), saved.progress
        self.descent.load(groups.get("optimizer", {}))
        if self.average is not None:
            # The checkpoint's own weights are the average; the weights that training moves lie in the state.
            self.average.updates = progress.average_updates
            with torch.no_grad():
                for i, parameter in enumerate(self.average.parameters):
                    parameter.copy_(groups["weights"][str(i)])
        self.step, self.minutes, self.best = progress.step, progress.minutes, progress.best
        self.reached = float(self.step) if progress.reached is None else progress.reached
        self.minutes_of_budget = progress.minutes_of_budget
        self.evaluations_since_best = progress.evaluations_since_best
        self.scores = Scores.of(progress.scores) if progress.scores else None
        if self.stepper.scale is not None and "scale" in groups:
            self.stepper.scale.value.copy_(groups["scale"]["value"])
        restore_random_states(groups["random"])

    def usable_operator(self) -> Operator:
        """The operator in evaluation mode, with the weights that a checkpoint would hold; training is over then."""
        if self.average is not None:
            with torch.no_grad():
                torch._foreach_copy_(self.average.parameters, self.average.shadow)
        return self.operator.eval().requires_grad_(True)  # frozen parts as well

    # The steps of one call of `train`.

    @contextlib.contextmanager
    def opened(self, *, max_minutes: float | None, quiet: bool, tensorboard: bool) -> Iterator[None]:
        """Open journal, console and loaders within the block, and set the precision.

        Args:
            max_minutes: the time budget of the whole run; None: without one.
            quiet: show nothing.
            tensorboard: also write TensorBoard events, where it is installed.
        """
        first = self.ranks.first
        with contextlib.ExitStack() as stack:
            if first:
                self.journal = stack.enter_context(contextlib.closing(Journal(self.folder, self.step, tensorboard)))
            console = Console(self.recipe.name, self.settings.steps, self.step, quiet or not first)
            self.console = stack.enter_context(contextlib.closing(console))
            self.write("start", **self.provenance())
            self.scored_batches = stack.enter_context(self._loader(self.scored_data))
            self.batches = stack.enter_context(self._loader(self.train_data))
            self._begin_clocks(max_minutes)
            stack.enter_context(products_in(used_precision(self.settings, self.device)))
            yield

    def _loader(self, data: PointDataset) -> Loader:
        """The batches of a dataset; in few sizes where each size costs time."""
        (rank, world), s = self.ranks.share, self.settings
        round_to = few_sizes(data) if self.stepper.prefers_few_shapes else 1
        return Loader(data, s.batch, seed=s.seed, device=self.device, rank=rank, world=world, round_to=round_to)

    def _begin_clocks(self, max_minutes: float | None) -> None:
        """Begin to measure time: of the budget, of the first step, and between two logs."""
        evaluation = -(-len(self.scored_data) // self.settings.batch)
        self.pace = Pace(
            self.settings.steps, self.reached, minutes=max_minutes, spent=self.minutes_of_budget,
            evaluation=evaluation, started=self.started, device=self.device, ranks=self.ranks,
        )  # fmt: skip
        self._minutes_before = (self.minutes, self.minutes_of_budget)  # of earlier calls
        self._first_step = self.step
        self._startup_seconds: float | None = None  # to the end of the first step, until it is logged
        self._reached_before = self.reached  # before the latest step
        self._last_log = (time.monotonic(), self.step)

    @property
    def at_end(self) -> bool:
        """Whether the whole schedule is trained."""
        return self.reached >= self.settings.steps

    @property
    def out_of_patience(self) -> bool:
        """Whether the recipe's number of evaluations without a better one is reached."""
        return self.settings.patience is not None and self.evaluations_since_best >= self.settings.patience

    def due(self, every: int) -> bool:
        """Whether the latest step completed an interval of so many schedule steps, or the schedule."""
        return self.at_end or self.reached // every > self._reached_before // every

    def descend(self, batch: Batch, position: float) -> dict[str, Tensor]:
        """Do one training step: change the batch as the recipe asks, compute gradients, move the weights.

        Args:
            batch: this rank's samples.
            position: of the step on the schedule, in steps of the recipe.

        Returns:
            This rank's loss and its parts.
        """
        try:
            times, draws = self._horizon(position), Draws(self.settings.seed, self.step, self.ranks)
            few_shapes = self.stepper.prefers_few_shapes
            changed = perturbed(batch, times, self.recipe, self.operator, draws, few_shapes=few_shapes)
            draws.seed_dropout()
            changed = self.ranks.our_points(changed)
            with self.ranks.points_together():
                numbers = self.stepper(changed, times)
            self.descent.step(*self.settings.schedule.at(position, self.settings.steps))
            if self.average is not None:
                self.average.update()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.settings, self.operator.model, batch, self.device) from error
        return numbers

    def _horizon(self, position: float) -> int:
        """The number of frames to predict at a position on the schedule; recordings of a shorter one are dropped."""
        horizon, frames = self.settings.horizon, self.operator.spec.out_times
        if horizon is None:
            return frames
        before, times = (horizon.at(at, self.settings.steps, frames) for at in (self.reached - 1, position))
        if times > before:
            self.stepper.forget()  # the shorter horizon does not come back
        return times

    def count(self, position: float) -> None:
        """Count the step at a position on the schedule as done, and its time."""
        if self.step == self._first_step:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._startup_seconds = time.monotonic() - self.started
        self.pace.stepped()
        self.step += 1
        self._reached_before, self.reached = self.reached, position + 1
        minutes, (before, before_of_budget) = (time.monotonic() - self.started) / 60, self._minutes_before
        self.minutes = before + minutes
        self.minutes_of_budget = before_of_budget + (0.0 if self.pace.minutes is None else minutes)

    # What a run writes.

    def write(self, kind: str, **content: Any) -> None:
        """Append a record to the journal and pass it on; on ranks without one, nothing."""
        if self.journal is not None:
            self.journal.write(kind, self.step, **content)
            if self.on is not None and isinstance(stop := self.on(kind, self.step, dict(content)), (bool, np.bool_)):
                self.asked_to_stop |= bool(stop)

    def log(self, numbers: dict[str, Tensor]) -> None:
        """Write the mean loss of all ranks to journal and console; the only place that waits for the device."""
        means = (self.ranks.sum(torch.stack(list(numbers.values()))) / self.ranks.world).tolist()
        written = dict(zip(numbers, means, strict=True))
        if not math.isfinite(written["loss"]):
            raise TrainingDiverged(self.step, newest_in_words(self.folder))
        factor, _ = self.settings.schedule.at(self.reached - 1, self.settings.steps)
        rate = self.settings.optimizer.rate * factor
        now, (time_before, step_before) = time.monotonic(), self._last_log
        speed = (self.step - step_before) / max(now - time_before, 1e-9)
        self._last_log = (now, self.step)
        written.update(rate=rate, steps_per_second=speed, minutes=self.minutes)
        if self._startup_seconds is not None:
            written["startup_seconds"], self._startup_seconds = self._startup_seconds, None
        self.write("train", **written)
        self.console.steps = self.step + math.ceil((self.settings.steps - self.reached) / self.pace.advance)
        self.console.show(self.step, loss=written["loss"], rate=rate, steps_per_second=speed)

    def evaluate(self) -> None:
        """Score the test or validation samples with the weights that a checkpoint would hold."""
        region = self.settings.loss.region
        with self._average_applied():
            scores = summarize(errors_of(self.stepper.runner, self.scored_batches, region=region, ranks=self.ranks))
        self.scores = scores
        better = math.isfinite(scores.error) and (self.best is None or scores.error < self.best)
        self.best = scores.error if better else self.best
        self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1
        self.write("evaluate", **dataclasses.asdict(scores), **self._split(), minutes=self.minutes)
        more = f"(median {scores.median:.3%}, worst {scores.worst:.3%})"
        self.console.say(f"step {self.step}: {self.recipe.data.scored} error {scores.error:.3%} {more}")

    def _split(self) -> dict[str, str]:
        """The split of the scores, for journal and checkpoint, which leave "test" out."""
        return {"split": self.recipe.data.scored} if self.recipe.data.validation else {}

    def _average_applied(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the operator has the averaged weights where the recipe averages."""
        return self.average.applied() if self.average else contextlib.nullcontext()

    def save(self) -> None:
        """Write a checkpoint with the state that continues the run, then delete the oldest.

        All ranks call it, the first one writes. Nothing is written, and nothing deleted, once training has diverged.
        """
        tensors = {f"optimizer/{name}": tensor for name, tensor in self.descent.state().items()}
        if self.stepper.scale is not None:
            tensors["scale/value"] = self.stepper.scale.value
        shadow = {f"average/{i}": t for i, t in enumerate(self.average.shadow)} if self.average else {}
        refuse_diverged({**self.operator.state_dict(), **tensors, **shadow}, self.step, self.folder, self.ranks)
        if not self.ranks.first:
            return
        tensors |= random_states(self.device)
        if self.average is not None:
            tensors |= {f"weights/{i}": p for i, p in enumerate(self.average.parameters)}
        files = state_files(tensors, self._progress())
        with self._average_applied():
            save_checkpoint(self.folder / "checkpoints" / f"{self.step:08}", self._checkpoint(), files)
        for old in checkpoints(self.folder)[:-MAX_CHECKPOINTS]:
            shutil.rmtree(old)

    def _progress(self) -> Progress:
        return Progress(
            step=self.step, reached=self.reached, minutes=self.minutes, minutes_of_budget=self.minutes_of_budget,
            best=self.best, evaluations_since_best=self.evaluations_since_best,
            average_updates=self.average.updates if self.average else 0,
            scores=self.scores.to_json() if self.scores else None,
        )  # fmt: skip

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            operator=self.operator, name=self.recipe.name, step=self.step,
            scores={**self.scores.to_json(), **self._split()} if self.scores else {}, recipe=to_json(self.recipe),
            data=self.train_data.card, provenance=self.provenance(),
        )  # fmt: skip

    def provenance(self) -> dict[str, Any]:
        """Size, data, time, hardware and versions, as journal and checkpoints state them."""
        start = self.recipe.start
        return {
            "parameters": parameter_count(self.operator),
            "training samples": len(self.train_data),
            "started from": None if start is None else f"{start.name}, step {start.step:,}",
            "data seed": self.recipe.data.seed if self.recipe.problem is not None else None,
            "data checksum": self.train_data.checksum,
            "minutes": round(self.minutes, 2),
            "hardware": hardware(self.device, self.ranks.world),
            "precision": used_precision(self.settings, self.device),
            "torch": torch.__version__,
        }
