"""`oformer train`: a recipe, or data of one's own."""

import math
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from oformer.cli.options import (
    Count,
    CountOrNone,
    Device,
    Positive,
    override,
    program_name,
    refuse_unknown,
    remembered_data,
    torch_device,
)
from oformer.errors import InputError
from oformer.terminal import say

if TYPE_CHECKING:
    from oformer.training.recipe import Recipe

# A command whose time is over before training begins trains for so long with --stop-after, so that each command makes
# some progress, and not at all with --max-minutes.
MIN_TRAINING_MINUTES = 0.05


@dataclass
class Train:
    """Train a recipe, or your own data. What is missing is made first; what was stopped goes on.

    Your own data: oformer train --data my.h5 chooses a model and its steps from the data (docs/own-data.md).

    On several GPUs: torchrun --nproc-per-node 4 -m oformer train burgers-2048 (docs/scaling.md).

    Change any setting: oformer train burgers-2048 --model.encoder.width 128. All of them, with their values, are shown
    by oformer train burgers-2048 --help, and for your own data by oformer train --data my.h5 --help.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = ""
    """A recipe, or the Python file of one; may be left out where --data is given."""
    ablation: str | None = None
    """A change of the recipe that the paper studies, such as attention=softmax, or several with commas between them
    (oformer list --ablations). The run's folder is named after it."""
    out: Path | None = None
    """The run's folder; by default outputs/NAME."""
    data: Path | None = None
    """A dataset of your own instead of the recipe's, or a file that `oformer import` needs no hints for."""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """A trained operator to fine-tune, with its model and normalization: a run, a checkpoint folder, zoo:NAME. Freeze
    parts, or give them smaller rates: --training.optimizer.rates encoder 0 decoder 0.1"""
    datasets: Path = Path("datasets")
    """Where generated datasets are kept."""
    device: Device = "auto"
    max_minutes: float | None = None
    """A time budget: the best operator so many minutes after the command began, and then its report. Where the recipe's
    steps take longer, fewer steps go through the whole schedule of the learning rate, and that ends the run."""
    stop_after: float | None = None
    """Stop cleanly so many minutes after the command began, in the middle of the recipe's steps. The same command goes
    on as if it had not stopped: for machines that are lent for a time."""
    split: Literal["samples", "points"] = "samples"
    """What the processes of torchrun share out: the samples of a batch, or the points of each sample where one sample
    is too large for a GPU."""
    steps: Count | None = None
    """Short for --training.steps."""
    epochs: Positive | None = None
    """Steps in passes over the training samples."""
    batch: Count | None = None
    """Short for --training.batch."""
    lr: Positive | None = None
    """The peak learning rate: --training.optimizer.rate, and its matrix_rate by the same factor."""
    seed: CountOrNone | None = None
    """Short for --training.seed."""
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.name == "[]":  # tyro's value for a missing name next to arguments that it does not know
            self.name = ""

    def recipe(self, rest: list[str]) -> "Recipe":
        """The recipe of the command line, with its settings overridden by `rest`."""
        from oformer.experiments.ablations import varied
        from oformer.experiments.recipes import recipe_named
        from oformer.training.start import starting_from

        if not self.name and self.data is None:
            refuse_unknown(rest, "train", self)
        recipe = recipe_named(self.name) if self.name else _recipe_from_data(self.data, self.start is None)
        called = self.name or f"--data {shlex.quote(str(self.data))}"
        if self.ablation is not None and self.start is not None:
            advice = "The model comes from the start, and an ablation changes it: leave one out"
            raise InputError("--ablation or --from", "both", advice)
        if self.ablation is not None:
            recipe, called = varied(recipe, self.ablation), f"{called} --ablation {self.ablation}"
        if self.start is not None:
            recipe, _ = starting_from(recipe, self.start)
            assert recipe.start is not None
            say(f"Model, weights and normalization of {recipe.start.name}, trained for {recipe.start.step:,} steps.")
        return self._shortened(override(recipe, rest, called, self))

    def _shortened(self, recipe: "Recipe") -> "Recipe":
        """The recipe with the settings that have short names."""
        training, rate = recipe.training, recipe.training.optimizer.rate
        told = {"steps": self.steps, "batch": self.batch, "seed": self.seed}
        training = replace(training, **{name: value for name, value in told.items() if value is not None})
        if self.lr is not None:
            scaled = training.optimizer.matrix_rate * self.lr / rate
            training = replace(training, optimizer=replace(training.optimizer, rate=self.lr, matrix_rate=scaled))
        if self.epochs is not None:
            if self.steps is not None:
                raise InputError("--steps or --epochs", "both", "Leave one of them out")
            samples = recipe.data.trained_on
            training = replace(training, steps=math.ceil(self.epochs * samples / training.batch))
        return replace(recipe, training=training)

    def run(self, rest: list[str]) -> int:
        """Train the operator and write its report; the exit status is 130 if training was interrupted."""
        started = time.monotonic()  # before the imports, which take seconds
        from oformer.report import write_report
        from oformer.training.distributed import started_by_torchrun
        from oformer.training.find_data import open_data, train_and_scored, train_and_test
        from oformer.training.loop import train

        recipe = self.recipe(rest)
        device, out = torch_device(self.device), self.out or Path("outputs") / recipe.name
        own = self.data or remembered_data(out)
        with started_by_torchrun(device, self.split) as ranks:
            data = ranks.first_then_others(lambda: open_data(recipe, self.datasets, own=own, device=device, say=say))
            splits, test = train_and_scored(data, recipe), train_and_test(data, recipe)[1]
            budget, limit = (_remaining(minutes, started) for minutes in (self.max_minutes, self.stop_after))
            if ranks.highest(int(budget is not None and budget < MIN_TRAINING_MINUTES)):
                if ranks.first:
                    say(f"--max-minutes {self.max_minutes:g} were over before training: the data took them. "
                        "They are kept; the same command trains.")  # fmt: skip
                return 0
            outcome = train(
                recipe, out, splits, device=device, max_minutes=budget,
                stop_after=None if limit is None else max(limit, MIN_TRAINING_MINUTES), quiet=self.quiet,
                ranks=ranks, own=own, start=self.start,
            )  # fmt: skip
        # The first process alone writes the report and speaks.
        code = 0 if outcome.finished or outcome.reason == "time" else 130
        if not ranks.first:
            return code
        if outcome.finished or not recipe.data.validation:  # which leaves the test samples alone until the end
            say(f"Writing the report: predicting {len(test):,} test samples at several resolutions.")
            write_report(out, test, device=device)
        if not outcome.finished:
            command = " ".join([program_name(), *sys.argv[1:]]) if ranks.world == 1 else "the same command"
            say(f"Stopped ({outcome.reason}) at step {outcome.step:,}; everything is saved. Go on with: {command}")
            return code
        error = f", {recipe.data.scored} error {outcome.scores.error:.3%}" if outcome.scores else ""
        steps = f"{outcome.step:,} steps"
        if outcome.reason == "finished" and outcome.step < recipe.training.steps:
            steps += f" of {recipe.training.steps:,}, for which there was time"
        say(f"Finished {steps}{error}. See {out / 'report.html'}; next: oformer predict {out} INPUT.npz")
        return code


def _recipe_from_data(data: Path | None, chooses_model: bool) -> "Recipe":
    """Describe the user's own data, choose a recipe for them, and print both; the model only where it is chosen."""
    from oformer.cli.describe import describe
    from oformer.models import OFormerConfig
    from oformer.training.find_data import open_own
    from oformer.training.sizes import recipe_for

    if data is None:
        raise InputError("the name of a recipe, or --data", "neither", "See the recipes: oformer list")
    say(describe(data))
    recipe = recipe_for(open_own(data), data.stem)
    training, model = recipe.training, recipe.model
    assert isinstance(model, OFormerConfig)
    size = f", width {model.encoder.width}, depth {model.encoder.depth}" * chooses_model
    say(f"Chosen from the data, where you do not say otherwise: {training.steps:,} steps of {training.batch}{size}. "
        f"Change any: --steps{', --model.encoder.width' * chooses_model}...")  # fmt: skip
    return recipe


def _remaining(minutes: float | None, started: float) -> float | None:
    """Minutes of a time budget that remain, for a command that started at this reading of `time.monotonic`."""
    return None if minutes is None else minutes - (time.monotonic() - started) / 60
