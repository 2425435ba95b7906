"""The one training loop.

A run is a folder: recipe.json, journal.jsonl, checkpoints/STEP/, and data.json where the data are a person's own.
Everything random is a function of (seed, step) or is saved, so a run that was stopped and resumed equals one that was
not, bit for bit on a CPU.

Several processes may run it together (docs/scaling.md). The state is the same on all ranks; the first one writes.
"""

import contextlib
import dataclasses
import json
import math
import platform
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from oformer.checkpoint import (
    Checkpoint,
    check_files,
    checkpoints,
    load_checkpoint,
    load_tensors,
    not_finite,
    parameter_count,
    save_checkpoint,
)
from oformer.config import differences, from_json, to_json
from oformer.data.dataset import PointDataset
from oformer.data.loader import Loader, few_sizes, padded
from oformer.errors import DamagedCheckpoint, InputError, OutOfMemory, TrainingDiverged
from oformer.fields import Batch
from oformer.files import held, read_json, remove_leftovers, write_json
from oformer.models import Operator, OperatorModel
from oformer.models.base import autocast_of, products_in
from oformer.seeds import torch_generator
from oformer.training.datasets import remember_own
from oformer.training.distributed import ALONE, Ranks
from oformer.training.evaluate import Scores, errors_of, summarize
from oformer.training.journal import Console, Journal
from oformer.training.optimizers import Average, Descent
from oformer.training.pace import Pace
from oformer.training.recipe import Recipe, Training
from oformer.training.schedules import begin_later, with_noise
from oformer.training.step import Stepper, used_precision

STATE, PROGRESS = "training.safetensors", "training.json"
KEPT = 2  # checkpoints of a run; one would do, two forgive a bad disk
# What may change when a run is continued: the weights that come out are the same but for rounding and dropout's draws.
WITHOUT_EFFECT = (
    "log_every", "evaluate_every", "checkpoint_every", "compile", "capture", "accumulate", "recompute", "chunk",
)  # fmt: skip
# Why a rank may want to stop before the end, the strongest reason last.
_WISHES = ("", "time", "SIGINT", "SIGUSR1", "SIGTERM")


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    operator: Operator  # ready for use, averaged where the recipe averages
    step: int
    reason: str  # "finished", "patience", "time", or the name of a signal
    scores: Scores | None

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.reason in ("finished", "patience")


@dataclass
class _State:
    """All that changes while training goes on."""

    operator: Operator
    stepper: Stepper
    descent: Descent
    average: Average | None
    startup_seconds: float | None = None  # from the call to the end of the first step, until it is written down
    step: int = 0
    reached: float = 0.0  # how much of the schedule is trained, in steps of the recipe: without a time budget, `step`
    minutes: float = 0.0
    minutes_of_budget: float = 0.0  # those of calls with a time budget
    best: float | None = None
    evaluations_since_best: int = 0
    scores: Scores | None = None


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
) -> Outcome:
    """Train a recipe in a run folder, from the start or from where an earlier call stopped.

    Args:
        recipe: what to train.
        folder: the run; what is there is continued, never thrown away.
        data: the training and the test split.
        device: where to compute.
        max_minutes: a time budget for the whole run: where the recipe's steps take longer, fewer steps go through its
            whole schedule, so that the run ends with the learning rate at its end (`oformer/training/pace.py`). A run
            that is stopped and resumed has the rest of its budget. Which weights come out depends on the clock.
        stop_after: stop this call cleanly after so many minutes; another one goes on with the recipe's steps.
        quiet: show nothing.
        tensorboard: also write TensorBoard events, where it is installed.
        ranks: the processes that make this call together.
        own: where the data lie, if they are one's own; the run remembers it for `oformer evaluate` and `oformer plot`.
    """
    folder, device = Path(folder), torch.device(device)
    started = time.monotonic()
    _check(recipe, recipe.model.build(data[0].spec), ranks)
    _check_counts(recipe, data)
    # To the last word between ranks: another one may have stopped before a signal to all reaches this one.
    with _claimed(folder, recipe, own, ranks), _asked_to_stop() as asked:
        return _go_on(recipe, folder, data, device, started, max_minutes, stop_after, quiet, tensorboard, ranks, asked)


def _go_on(
    recipe: Recipe,
    folder: Path,
    data: tuple[PointDataset, PointDataset],
    device: torch.device,
    started: float,
    max_minutes: float | None,
    stop_after: float | None,
    quiet: bool,
    tensorboard: bool,
    ranks: Ranks,
    asked: "_Asked",
) -> Outcome:
    """Train in a folder that is ours, from its newest checkpoint or from the start."""
    settings = recipe.training
    state = _begin(recipe, folder, data[0], device, ranks)
    if state.reached >= settings.steps:
        return Outcome(_usable(state), state.step, "finished", state.scores)
    journal = Journal(folder, state.step, tensorboard) if ranks.first else None
    console = Console(recipe.name, settings.steps, state.step, quiet or not ranks.first)
    if journal is not None:
        journal.write("start", state.step, **_provenance(recipe, state, data[0], device, ranks))
    loader, test = (_loader(recipe, split, state, device, ranks) for split in data)
    reason, first = "finished", state.step
    mark, before = (time.monotonic(), state.step), (state.minutes, state.minutes_of_budget)
    pace = Pace(
        settings.steps, state.reached, minutes=max_minutes, spent=state.minutes_of_budget,
        evaluation=-(-len(data[1]) // settings.batch), started=started, device=device, ranks=ranks,
    )  # fmt: skip
    try:
        with _precision(recipe, state.operator, device):
            for batch in loader.stream(state.step):
                position, reached = pace.next(state.reached), state.reached
                try:
                    numbers = _descend(recipe, state, batch, position, ranks)
                except torch.OutOfMemoryError as error:
                    raise _out_of_memory(settings, state.operator.model, batch, device) from error
                if state.step == first:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    state.startup_seconds = time.monotonic() - started
                pace.stepped()
                state.step += 1
                state.reached = position + 1
                minutes = (time.monotonic() - started) / 60
                state.minutes = before[0] + minutes
                state.minutes_of_budget = before[1] + (0.0 if max_minutes is None else minutes)
                last = state.reached >= settings.steps
                logs, evaluates, saves = (
                    state.reached // every > reached // every
                    for every in (settings.log_every, settings.evaluate_every, settings.checkpoint_every)
                )
                if logs or last:
                    console.steps = state.step + math.ceil((settings.steps - state.reached) / pace.advance)
                    mark = _log(recipe, state, numbers, mark, journal, console, folder, ranks)
                if (evaluates and pace.evaluates) or last:
                    with pace.aside("evaluation"):
                        _evaluate(recipe, state, test, journal, console, ranks)
                out_of_patience = settings.patience is not None and state.evaluations_since_best >= settings.patience
                out_of_time = stop_after is not None and time.monotonic() - started > 60 * stop_after
                # A signal or a clock reaches ranks at different steps; what one wants, all do at this step.
                wish = _WISHES[ranks.highest(_WISHES.index(asked.name or ("time" if out_of_time else "")))]
                stop = last or out_of_patience or bool(wish)
                if saves or stop:
                    with pace.aside("checkpoint"):
                        _save(recipe, state, folder, data[0], device, ranks)
                if stop:
                    reason = "finished" if last else "patience" if out_of_patience else wish
                    break
        if journal is not None:
            journal.write("stop", state.step, reason=reason, minutes=state.minutes)
    finally:
        loader.close()
        test.close()
        console.close()
        if journal is not None:
            journal.close()
    ranks.wait()  # for the files, which belong to all
    return Outcome(_usable(state), state.step, reason, state.scores)


def _check(recipe: Recipe, model: OperatorModel, ranks: Ranks) -> None:
    """Refuse what the model cannot do and what cannot be shared out, before anything is written."""
    settings, (_, world) = recipe.training, ranks.share
    if settings.batch % (world * settings.accumulate):
        raise InputError(
            "a batch that ranks and training.accumulate share out evenly",
            f"{settings.batch} over {world} and {settings.accumulate}",
            f"Take a multiple of {world * settings.accumulate}",
        )
    if model.needs_grid and settings.drop is not None:
        raise InputError(
            f"all points of a regular grid for {model.name}",
            "training.drop, which leaves some out",
            "Leave it out, or train an OFormer",
        )
    if model.mixes_samples and (world > 1 or settings.accumulate > 1):
        raise InputError(
            f"the whole batch at once for the batch normalization of {model.name}",
            f"{world} process(es), and batches in {settings.accumulate} slice(s)",
            "Train without it, or in one process with training.accumulate 1",
        )
    if settings.recompute and not model.recomputes:
        raise InputError(
            "a model that can be computed again in parts for training.recompute",
            f"{model.name}" + " with batch normalization" * model.mixes_samples,
            "Leave it out",
        )
    if model.needs_all_points is not None and (ranks.splits_points or settings.chunk is not None):
        raise InputError(
            "a model that reads sums over points alone (galerkin or fourier attention, query.local off) where the "
            "points of a sample are not all together",
            model.needs_all_points,
            "Use --split samples" if ranks.splits_points else "Leave training.chunk out",
        )
    if not ranks.splits_points:
        return
    if settings.chunk is not None:
        raise InputError(
            "all points of a sample in one process for training.chunk",
            "points split over ranks",
            "Leave it out: more ranks hold fewer points each; or use --split samples",
        )
    if settings.loss.derivative:
        raise InputError(
            "a loss without derivatives, which need neighbors, where points are split over ranks",
            f"training.loss.derivative {settings.loss.derivative:g}",
            "Set it to 0, or use --split samples",
        )


def _check_counts(recipe: Recipe, data: tuple[PointDataset, PointDataset]) -> None:
    """Refuse splits of which the recipe, and so the record of the run, says something else."""
    asked, given = (recipe.data.train, recipe.data.test), (len(data[0]), len(data[1]))
    if asked != given:
        raise InputError(
            f"the samples of the recipe: {asked[0]:,} to train on and {asked[1]:,} to test on",
            f"{given[0]:,} and {given[1]:,}",
            "Set `data` of the recipe: Data(train=..., test=...)",
        )


def _out_of_memory(settings: Training, model: OperatorModel, batch: Batch, device: torch.device) -> OutOfMemory:
    """What did not fit, and the settings that would make it."""
    points = max(batch.input.points, batch.query.points)
    if settings.chunk is not None:
        ways = [f"--training.chunk {max(1, settings.chunk // 2)} (fewer points at once)"]
    else:
        halves = batch.size // settings.accumulate % 2 == 0 and not model.mixes_samples
        ways = [f"--training.accumulate {2 * settings.accumulate} (half as many samples at once)"] * halves
        ways += ["--training.recompute (keep less, compute it again)"] * (model.recomputes and not settings.recompute)
        chunk = f"--training.chunk {max(1, batch.size * points // 8)} (any number of points, in more time)"
        ways += [chunk] * (model.needs_all_points is None)
    what = f"a training step of {batch.size} samples of {points:,} points"
    instead = ", or ".join(ways) or "more memory"
    return OutOfMemory(what, str(device), f"What was saved stays; the same command goes on with {instead}.")


@contextlib.contextmanager
def _claimed(folder: Path, recipe: Recipe, own: Path | None, ranks: Ranks) -> Iterator[None]:
    """Make the folder this recipe's, and keep other processes out of it within the block."""
    with contextlib.ExitStack() as stack:

        def claim() -> None:
            if ranks.first:
                stack.enter_context(held(folder))
                _claim(folder, recipe, own)

        ranks.first_then_others(claim)
        yield


def _claim(folder: Path, recipe: Recipe, own: Path | None) -> None:
    """Make the folder this recipe's, or refuse if it is another's."""
    path, ours = folder / "recipe.json", to_json(recipe)
    if path.exists():
        remove_leftovers(folder / "checkpoints")
        # Read as a recipe, so that settings which were added since count as their defaults.
        theirs = to_json(from_json(Recipe, read_json(path), "recipe"))
        free = {f"training.{name}" for name in WITHOUT_EFFECT}
        different = [where for where, _, _ in differences(theirs, ours) if where not in free]
        if different:
            raise InputError(
                f"the recipe that {folder} was started with",
                f"other settings ({', '.join(different[:5])})",
                "Choose another --out folder, or the same settings to go on",
            )
    write_json(path, ours)
    if own is not None:
        remember_own(folder, own)


def _begin(recipe: Recipe, folder: Path, data: PointDataset, device: torch.device, ranks: Ranks) -> _State:
    """A fresh state, or that of the newest checkpoint."""
    saved = ranks.first_then_others(lambda: _newest_intact(folder))
    if saved is not None:
        operator = saved.operator
        if operator.spec != data.spec:
            raise InputError(
                f"data of the shape that {folder} was begun with", str(data.spec), f"It was {operator.spec}"
            )
    else:
        torch.manual_seed(recipe.training.seed)
        operator = Operator(recipe.model.build(data.spec), recipe.normalization).fit(data)
    settings = recipe.training
    operator.to(device).train()
    operator.model.recompute = settings.recompute
    ranks.take_from_first(operator.state_dict().values())  # other processors may round a seeded start otherwise
    stepper = Stepper(operator, settings, device, ranks)
    descent = Descent(operator, settings.optimizer, stepper.recorder())
    state = _State(operator, stepper, descent, Average(operator, settings.ema) if settings.ema else None)
    if saved is not None:
        _restore(state, saved)
    return state


@dataclass(frozen=True)
class _Progress:
    """The content of training.json."""

    step: int
    minutes: float
    best: float | None
    evaluations_since_best: int
    average_updates: int
    scores: dict[str, Any] | None
    reached: float | None = None  # None: as many as `step`, in runs that were begun before there were time budgets
    minutes_of_budget: float = 0.0


@dataclass(frozen=True)
class _Saved:
    """A checkpoint with all that is needed to go on."""

    folder: Path
    operator: Operator
    tensors: dict[str, Tensor]
    progress: _Progress


def _newest_intact(folder: Path) -> _Saved | None:
    """The newest checkpoint of a run that can be read; damaged newer ones are put aside under another name."""
    refused: dict[Path, InputError] = {}
    for path in reversed(checkpoints(folder)):
        try:
            saved = _read(path)
        except InputError as error:
            refused[path] = error
            continue
        for damaged, error in refused.items():
            aside = damaged.with_name(f"damaged-{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            warnings.warn(f"{error} Training goes on from {path}; the other is kept as {aside}", DamagedCheckpoint, 2)
        return saved
    if refused:
        raise next(iter(refused.values()))
    return None


def _read(path: Path) -> _Saved:
    """A checkpoint whose files are as they were written."""
    check_files(path, (STATE, PROGRESS))
    operator, tensors = load_checkpoint(path).operator, load_tensors(path / STATE)
    if name := not_finite(tensors):
        raise InputError(f"finite numbers in {path / STATE}", f"NaN or infinity in `{name}`", "Its training diverged")
    progress = from_json(_Progress, read_json(path / PROGRESS), str(path / PROGRESS))
    return _Saved(path, operator, tensors, progress)


def _restore(state: _State, saved: _Saved) -> None:
    """Go on where a checkpoint was written."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.tensors.items():
        group, _, rest = name.partition("/")
        groups.setdefault(group, {})[rest] = tensor
    progress = saved.progress
    _check_state(state, groups, saved.folder / STATE)
    state.descent.load(groups.get("optimizer", {}))
    if state.average is not None:
        # The checkpoint's own weights are the average; the weights that training moves lie in the state.
        state.average.updates = progress.average_updates
        with torch.no_grad():
            for i, parameter in enumerate(state.average.parameters):
                parameter.copy_(groups["weights"][str(i)])
    state.step, state.minutes, state.best = progress.step, progress.minutes, progress.best
    state.reached = float(state.step) if progress.reached is None else progress.reached
    state.minutes_of_budget = progress.minutes_of_budget
    state.evaluations_since_best = progress.evaluations_since_best
    state.scores = Scores.of(progress.scores) if progress.scores else None
    if state.stepper.scale is not None and "scale" in groups:
        state.stepper.scale.value.copy_(groups["scale"]["value"])
    torch.set_rng_state(groups["random"]["cpu"])
    if "cuda" in groups["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(groups["random"]["cuda"])


def _check_state(state: _State, groups: dict[str, dict[str, Tensor]], path: Path) -> None:
    """Refuse the tensors of a training state that are not of this model and its optimizer."""
    needed: dict[str, torch.Size | None] = {"random/cpu": torch.get_rng_state().shape}
    if state.average is not None:
        needed |= {f"weights/{i}": parameter.shape for i, parameter in enumerate(state.average.parameters)}
    if "scale" in groups:
        needed["scale/value"] = torch.Size()
    owners = {
        f"{n}.{index}": parameter.shape
        for n, optimizer in enumerate(state.descent.optimizers)
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
    }
    for moment, tensor in groups.get("optimizer", {}).items():
        owner = owners.get(moment.rpartition(".")[0])
        needed[f"optimizer/{moment}"] = tensor.shape if owner is not None and not tensor.ndim else owner
    for name, shape in needed.items():
        group, _, rest = name.partition("/")
        found = groups.get(group, {}).get(rest)
        if found is None or found.shape != shape:
            raise InputError(
                f"`{name}` in {path} {'of a parameter of this model' if shape is None else f'of shape {tuple(shape)}'}",
                "none" if found is None else f"shape {tuple(found.shape)}",
                "The file is damaged or of another run",
            )


def _save(recipe: Recipe, state: _State, folder: Path, data: PointDataset, device: torch.device, ranks: Ranks) -> None:
    """Write a checkpoint with all that is needed to go on, then let the oldest go.

    All ranks call it, the first one writes. Nothing is written, and nothing let go, once training has diverged.
    """
    tensors = {f"optimizer/{name}": tensor for name, tensor in state.descent.state().items()}
    if state.stepper.scale is not None:
        tensors["scale/value"] = state.stepper.scale.value
    _refuse_diverged(state, tensors, folder, ranks)
    if not ranks.first:
        return
    tensors["random/cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    if state.average is not None:
        tensors.update({f"weights/{i}": p for i, p in enumerate(state.average.parameters)})
    scores = state.scores.to_json() if state.scores else None
    progress = _Progress(
        step=state.step,
        reached=state.reached,
        minutes=state.minutes,
        minutes_of_budget=state.minutes_of_budget,
        best=state.best,
        evaluations_since_best=state.evaluations_since_best,
        average_updates=state.average.updates if state.average else 0,
        scores=scores,
    )
    extra = {
        STATE: save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}),
        PROGRESS: (json.dumps(dataclasses.asdict(progress), indent=2, allow_nan=False) + "\n").encode(),
    }
    with state.average.applied() if state.average else contextlib.nullcontext():
        save_checkpoint(
            folder / "checkpoints" / f"{state.step:08}",
            Checkpoint(
                operator=state.operator,
                name=recipe.name,
                step=state.step,
                scores=scores or {},
                recipe=to_json(recipe),
                data=data.card,
                provenance=_provenance(recipe, state, data, device, ranks),
            ),
            extra,
        )
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old)


def _refuse_diverged(state: _State, moments: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Stop all ranks where the weights, their average or the moments of one of them hold NaN or infinity."""
    average = enumerate(state.average.shadow) if state.average else ()
    name = not_finite({**state.operator.state_dict(), **moments, **{f"average/{i}": t for i, t in average}})
    if ranks.highest(int(name is not None)):
        what = f"The tensor `{name}`" if name else "A tensor of another rank"
        raise TrainingDiverged(state.step, _last_good(folder), what)


def _last_good(folder: Path) -> str:
    """The newest checkpoint, in words: none is written of what is not finite."""
    newest = checkpoints(folder)
    return str(newest[-1]) if newest else "the start"


def _loader(recipe: Recipe, data: PointDataset, state: _State, device: torch.device, ranks: Ranks) -> Loader:
    """The batches of a split; in few sizes where each size costs time."""
    settings, (rank, world) = recipe.training, ranks.share
    round_to = few_sizes(data) if state.stepper.prefers_few_shapes else 1
    return Loader(data, settings.batch, seed=settings.seed, device=device, rank=rank, world=world, round_to=round_to)


def _descend(recipe: Recipe, state: _State, batch: Batch, position: float, ranks: Ranks) -> dict[str, Tensor]:
    """One training step at a position on the schedule: change the batch as the recipe asks, compare, move.

    Returns this rank's loss and its parts.
    """
    settings, spec, step = recipe.training, state.operator.spec, state.step
    # Ranks that hold other samples draw on their own; those that hold other points of the same samples draw alike.
    key = () if ranks.share == (0, 1) else (ranks.rank,)
    if settings.augment and recipe.problem is not None:
        batch = recipe.problem.augment(batch, torch_generator(settings.seed, step, 0, *key))
    times = spec.out_times
    if settings.horizon is not None:
        before, times = (
            settings.horizon.at(at, settings.steps, spec.out_times) for at in (state.reached - 1, position)
        )
        if times > before:
            state.stepper.forget()  # the shorter horizon does not come back
    if settings.windows:
        batch = begin_later(batch, times, torch_generator(settings.seed, step, 3, *key))
    if settings.noise:
        scale = state.operator.input_scale.scale
        batch = with_noise(batch, settings.noise, scale, torch_generator(settings.seed, step, 4, *key))
    if settings.drop is not None:
        points = batch.input.points
        batch = settings.drop(batch, torch_generator(settings.seed, step, 1, *key), spec.periods)
        if state.stepper.prefers_few_shapes:  # eight of them instead of as many as there are points
            eighth = -(-points // 8)
            batch = padded(batch, (-(-batch.input.points // eighth) * eighth, batch.query.points))
    if ranks.world > 1:  # dropout: another for each rank, and the same whenever the step is done
        torch.manual_seed(torch_generator(settings.seed, step, 2, ranks.rank).initial_seed())
    batch = ranks.our_points(batch)
    with ranks.points_together():
        numbers = state.stepper(batch, times)
    state.descent.step(*settings.schedule.at(position, settings.steps))
    if state.average is not None:
        state.average.update()
    return numbers


def _log(
    recipe: Recipe,
    state: _State,
    numbers: dict[str, Tensor],
    mark: tuple[float, int],
    journal: Journal | None,
    console: Console,
    folder: Path,
    ranks: Ranks,
) -> tuple[float, int]:
    """Write the mean loss of all ranks down; the only place where the loop waits for the device."""
    means = (ranks.sum(torch.stack(list(numbers.values()))) / ranks.world).tolist()
    written = dict(zip(numbers, means, strict=True))
    if not math.isfinite(written["loss"]):
        raise TrainingDiverged(state.step, _last_good(folder))
    factor, _ = recipe.training.schedule.at(state.reached - 1, recipe.training.steps)
    rate = recipe.training.optimizer.rate * factor
    now = time.monotonic()
    speed = (state.step - mark[1]) / max(now - mark[0], 1e-9)
    written.update(rate=rate, steps_per_second=speed, minutes=state.minutes)
    if state.startup_seconds is not None:
        written["startup_seconds"], state.startup_seconds = state.startup_seconds, None
    if journal is not None:
        journal.write("train", state.step, **written)
    console.show(state.step, loss=written["loss"], rate=rate, steps_per_second=speed)
    return now, state.step


def _evaluate(
    recipe: Recipe, state: _State, test: Loader, journal: Journal | None, console: Console, ranks: Ranks
) -> None:
    with state.average.applied() if state.average else contextlib.nullcontext():
        scores = summarize(errors_of(state.operator, test, region=recipe.training.loss.region, ranks=ranks))
    state.scores = scores
    better = math.isfinite(scores.error) and (state.best is None or scores.error < state.best)
    state.best = scores.error if better else state.best
    state.evaluations_since_best = 0 if better else state.evaluations_since_best + 1
    if journal is not None:
        journal.write("evaluate", state.step, **dataclasses.asdict(scores), minutes=state.minutes)
    console.say(
        f"step {state.step}: test error {scores.error:.3%} (median {scores.median:.3%}, worst {scores.worst:.3%})"
    )


def _usable(state: _State) -> Operator:
    """The operator as a checkpoint would hold it."""
    if state.average is not None:
        with torch.no_grad():
            torch._foreach_copy_(state.average.parameters, state.average.shadow)
    state.operator.compiled = None  # for the shapes of training; it will be asked for others
    return state.operator.eval()


def _provenance(
    recipe: Recipe, state: _State, data: PointDataset, device: torch.device, ranks: Ranks
) -> dict[str, Any]:
    gpu = device.type == "cuda"
    hardware = (
        torch.cuda.get_device_name(device) if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return {
        "parameters": parameter_count(state.operator),
        "training samples": len(data),
        "data seed": recipe.data.seed if recipe.problem is not None else None,
        "data checksum": data.checksum,
        "minutes": round(state.minutes, 2),
        "hardware": hardware if ranks.world == 1 else f"{ranks.world} x {hardware}",
        "precision": used_precision(recipe.training, device),
        "torch": torch.__version__,
    }


@dataclass
class _Asked:
    name: str | None = None


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[_Asked]:
    """Note Ctrl-C, SIGTERM and SIGUSR1, which schedulers send before the time limit of a job.

    The loop stops at the end of a step; a second Ctrl-C stops at once.
    """
    asked = _Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may listen to signals
        return

    def note(number: int, frame: Any) -> None:
        if asked.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.name = signal.Signals(number).name

    # Windows has no SIGUSR1.
    numbers = [getattr(signal, name) for name in _WISHES if name.startswith("SIG") and hasattr(signal, name)]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _precision(recipe: Recipe, operator: Operator, device: torch.device) -> Iterator[None]:
    """Compute as precisely as the recipe says for this device, and leave torch and the operator as they were."""
    precision = used_precision(recipe.training, device)
    operator.autocast = autocast_of(precision)
    try:
        with products_in(precision):
            yield
    finally:
        operator.autocast = None
