"""Training by name: a recipe with its data and its folder, as the command `oformer train` has them."""

from pathlib import Path

import torch

from oformer.checkpoint import Checkpoint
from oformer.experiments.recipes import recipe_named
from oformer.gpu import compute_device
from oformer.terminal import say
from oformer.training import loop
from oformer.training.distributed import ALONE, Ranks
from oformer.training.find_data import open_data, train_and_scored
from oformer.training.loop import Outcome
from oformer.training.recipe import Recipe
from oformer.training.run import Callback, Splits


def train(
    recipe: Recipe | str,
    folder: Path | str | None = None,
    data: Splits | Path | str | None = None,
    *,
    datasets: Path | str = "datasets",
    device: torch.device | str | None = None,
    max_minutes: float | None = None,
    stop_after: float | None = None,
    quiet: bool = False,
    tensorboard: bool = True,
    ranks: Ranks = ALONE,
    start: Checkpoint | str | Path | None = None,
    on: Callback | None = None,
) -> Outcome:
    """Train a recipe in a run folder, from the start or from where an earlier call stopped.

    Args:
        recipe: what to train, or its name (`oformer list`), or the Python file of one.
        folder: the run; what is there is continued, never thrown away. By default outputs/NAME.
        data: the samples to train on and those to score, or a dataset or file of your own; by default those of the
            recipe, which are made where they are missing.
        datasets: where generated datasets are kept.
        device: where to compute; by default a GPU if there is one.
        max_minutes: a time budget for the whole run: where the recipe's steps take longer, fewer steps go through its
            whole schedule, so that the run ends with the learning rate at its end. A run that is stopped and resumed
            has the rest of its budget. Which weights come out depends on the clock.
        stop_after: stop this call cleanly after so many minutes; another one goes on with the recipe's steps.
        quiet: show nothing.
        tensorboard: also write TensorBoard events, where it is installed.
        ranks: the processes that make this call together.
        start: a trained operator to fine-tune: a run or checkpoint folder, a name, or a loaded checkpoint. Its model
            and normalization take the place of the recipe's.
        on: called as `on(event, step, numbers)` where the journal is written, with "start", "train", "evaluate" or
            "stop". Where it returns True, the run is saved and stops after this step; another call goes on with it.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    device, own = compute_device(device), None
    if not isinstance(data, tuple):
        own = None if data is None else Path(data)
        tell = (lambda text: None) if quiet else say
        opened = ranks.first_then_others(lambda: open_data(recipe, Path(datasets), own=own, device=device, say=tell))
        data = train_and_scored(opened, recipe)
    return loop.train(
        recipe, folder or Path("outputs") / recipe.name, data, device=device, max_minutes=max_minutes,
        stop_after=stop_after, quiet=quiet, tensorboard=tensorboard, ranks=ranks, own=own, start=start, on=on,
    )  # fmt: skip
