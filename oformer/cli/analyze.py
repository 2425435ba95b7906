"""`oformer analyze`: what a trained operator has learned beside its task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oformer.cli.options import Count, Device, remembered_data, torch_device
from oformer.errors import InputError
from oformer.terminal import say, show


@dataclass
class Analyze:
    """Look into a trained operator: --latents regresses a recorded parameter, such as the viscosity, on its latents."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    latents: bool = False
    """Mean-pooled latents: principal components, and a linear regression measured on test samples."""
    parameter: str | None = None
    """The recorded parameter; by default the only one that varies (oformer inspect DATASET)."""
    logarithm: bool | None = None
    """Regress log10 of the parameter; by default where it spans more than a decade."""
    out: Path | None = None
    """The folder for latents.json and latents.png; by default RUN/plots, or outputs/zoo/NAME."""
    data: Path | None = None
    """Another dataset than that which it was trained on."""
    recipe: str | None = None
    """The Python file that was trained, where the problem or the model is your own."""
    datasets: Path = Path("datasets")
    samples: Count | None = None
    """Only the first so many training samples."""
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Make the study, print its R², and write its picture and numbers."""
        from oformer.checkpoint import find_checkpoint, load_checkpoint, run_of
        from oformer.experiments.latents import study_latents
        from oformer.experiments.recipes import stored_recipe
        from oformer.training.find_data import open_data, train_and_scored, train_and_test

        if not self.latents:
            raise InputError("an analysis to make", "none", "There is one: --latents")
        device, folder = torch_device(self.device), find_checkpoint(self.run_folder)
        checkpoint = load_checkpoint(folder, device)
        recipe, run = stored_recipe(checkpoint.recipe, self.recipe), run_of(folder)
        own = self.data or remembered_data(run)
        data = open_data(recipe, self.datasets, own=own, device=device, say=say)
        train, test = train_and_scored(data, recipe)[0], train_and_test(data, recipe)[1]
        if self.samples is not None and self.samples < len(train):
            train = train.subset(range(self.samples))
        say(f"Encoding {len(train):,} training and {len(test):,} test samples.")
        study = study_latents(checkpoint.operator, train, test, self.parameter, self.logarithm)
        show(
            f"{study.name}: R² {study.r2:.4f} on {len(test):,} test samples, by a linear map of {study.channels} mean-"
            f"pooled channels that was fitted to {len(train):,} training samples"
        )
        is_run = self.run_folder.is_dir()
        for path in study.write(self.out or (run / "plots" if is_run else Path("outputs") / "zoo" / checkpoint.name)):
            say(f"Wrote {path}")
        return 0
