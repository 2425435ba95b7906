"""Refusals of a training run: settings, data and states that cannot be trained, each with a way out."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from oformer.checkpoint import not_finite
from oformer.config import differences, from_json, to_json
from oformer.data.dataset import PointDataset
from oformer.errors import InputError, OutOfMemory, TrainingDiverged
from oformer.fields import Batch, Spec
from oformer.files import read_json
from oformer.models import OperatorModel
from oformer.training.distributed import Ranks
from oformer.training.recipe import Recipe, Training
from oformer.training.resume import newest_in_words

# Settings that may change when a run is continued: the weights stay the same but for rounding and dropout's draws.
WITHOUT_EFFECT = (
    "log_every", "evaluate_every", "checkpoint_every", "compile", "capture", "accumulate", "recompute", "chunk",
)  # fmt: skip


def refuse_settings(settings: Training, model: OperatorModel, ranks: Ranks) -> None:
    """Refuse settings that the model cannot follow, or that cannot be shared out among the ranks."""
    world = ranks.share[1]
    if settings.batch % (world * settings.accumulate):
        raise InputError(
            "a batch that ranks and training.accumulate share out evenly",
            f"{settings.batch} over {world} and {settings.accumulate}",
            f"Take a multiple of {world * settings.accumulate}",
        )
    _refuse_for_model(settings, model, ranks)
    if ranks.splits_points:
        _refuse_for_split_points(settings)


def _refuse_for_model(settings: Training, model: OperatorModel, ranks: Ranks) -> None:
    """Refuse settings that the model, by its properties, cannot follow."""
    world = ranks.share[1]
    if not model.answers_anywhere and (settings.drop is not None or settings.queries < 1):
        raise InputError(
            f"all points of a {'regular grid' if model.needs_grid else 'mesh'} for {model.name}",
            f"training.{'queries' if settings.drop is None else 'drop'}, which leaves some out",
            "Leave it out, or train an OFormer",
        )
    if settings.queries < 1 and not model.queries_independent:
        raise InputError(
            "a model whose answer at one query is independent of the other queries, for training.queries below 1",
            f"{model.name} with query.mixing, or with a norm over points",
            "Set training.queries to 1",
        )
    if model.mixes_samples and (world > 1 or settings.accumulate > 1):
        raise InputError(
            f"the whole batch at once for the batch normalization of {model.name}",
            f"{world} process(es), and batches in {settings.accumulate} slice(s)",
            "Train without it, or in one process with training.accumulate 1",
        )
    if settings.recompute and not model.pieces():
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


def _refuse_for_split_points(settings: Training) -> None:
    """Refuse settings that need all points of a sample in one process."""
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


def refuse_counts(recipe: Recipe, data: tuple[PointDataset, PointDataset]) -> None:
    """Refuse datasets whose numbers of samples contradict the recipe, and so the record of the run."""
    settings, given = recipe.data, (len(data[0]), len(data[1]))
    asked = (settings.trained_on, settings.validation or settings.test)
    if asked != given:
        raise InputError(
            f"the samples of the recipe: {asked[0]:,} to train on and {asked[1]:,} to score",
            f"{given[0]:,} and {given[1]:,}",
            "Set `data` of the recipe: Data(train=..., test=...)"
            + f", or hold out its {settings.validation:,} validation samples by `train_and_scored`"
            * bool(settings.validation),
        )


def refuse_other_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder whose recipe.json differs from the recipe in more than `WITHOUT_EFFECT`."""
    # Read as a recipe, so that settings which were added since count as their defaults.
    theirs = to_json(from_json(Recipe, read_json(folder / "recipe.json"), "recipe"))
    free = {f"training.{name}" for name in WITHOUT_EFFECT}
    different = [where for where, _, _ in differences(theirs, to_json(recipe)) if where not in free]
    if different:
        raise InputError(
            f"the recipe that {folder} was started with",
            f"other settings ({', '.join(different[:5])})",
            "Choose another --out folder, or the same settings to go on",
        )


def refuse_other_spec(folder: Path, begun: Spec, given: Spec) -> None:
    """Refuse data whose shape differs from that of the run's checkpoint."""
    if begun != given:
        raise InputError(f"data of the shape that {folder} was begun with", str(given), f"It was {begun}")


def refuse_diverged(tensors: Mapping[str, Tensor], step: int, folder: Path, ranks: Ranks) -> None:
    """Stop all ranks where the weights, their average or the moments of one of them hold NaN or infinity."""
    name = not_finite(tensors)
    if ranks.highest(int(name is not None)):
        tensor = f"The tensor `{name}`" if name else "A tensor of another rank"
        raise TrainingDiverged(step, newest_in_words(folder), tensor)


def out_of_memory(settings: Training, model: OperatorModel, batch: Batch, device: torch.device) -> OutOfMemory:
    """The error for a training step that exceeds the memory, with the settings that would make it fit."""
    points = max(batch.input.points, batch.query.points)
    if settings.chunk is not None:
        ways = [f"--training.chunk {max(1, settings.chunk // 2)} (fewer points at once)"]
    else:
        halves = batch.size // settings.accumulate % 2 == 0 and not model.mixes_samples
        ways = [f"--training.accumulate {2 * settings.accumulate} (half as many samples at once)"] * halves
        if model.pieces() and not settings.recompute:
            ways.append("--training.recompute (keep less, compute it again)")
        chunk = f"--training.chunk {max(1, batch.size * points // 8)} (any number of points, in more time)"
        ways += [chunk] * (model.needs_all_points is None)
    what = f"a training step of {batch.size} samples of {points:,} points"
    instead = ", or ".join(ways) or "more memory"
    return OutOfMemory(what, str(device), f"What was saved stays; the same command goes on with {instead}.")
