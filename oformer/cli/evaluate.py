"""`oformer evaluate`: the errors of a trained operator."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from oformer.cli.options import Count, Device, import_recipe_file, remembered_data, torch_device
from oformer.terminal import say, table

if TYPE_CHECKING:
    from oformer.data.dataset import PointDataset
    from oformer.training.evaluate import Scores
    from oformer.training.recipe import Recipe


@dataclass
class Evaluate:
    """Measure a trained operator on the test split or another one, at its own and at other resolutions."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    data: Path | None = None
    """Another dataset than that which it was trained on."""
    recipe: str | None = None
    """The Python file that was trained, where the problem or the model is your own."""
    datasets: Path = Path("datasets")
    split: Literal["train", "validation", "test"] = "test"
    """Validation: the training samples that the recipe held out (`data.validation`)."""
    samples: Count | None = None
    """Only the first so many of the split."""
    batch: Count = 16
    average: Count = 1
    """Also measure the mean of predictions under so many exact symmetries of the problem."""
    device: Device = "auto"
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, rest: list[str]) -> int:
        """Measure the operator, and print tables or JSON."""
        from oformer.checkpoint import find_checkpoint, load_checkpoint
        from oformer.engine.runners import runner_of
        from oformer.experiments.recipes import stored_recipe
        from oformer.training.evaluate import evaluate, resolution_sweep, watched

        device = torch_device(self.device)
        import_recipe_file(self.recipe)
        folder = find_checkpoint(self.run_folder)
        checkpoint = load_checkpoint(folder, device)
        recipe, runner = stored_recipe(checkpoint.recipe, self.recipe), runner_of(checkpoint)
        split, expected = self._samples(recipe, folder, device)
        region = recipe.training.loss.region
        with watched(checkpoint.operator, len(split), say):
            scores = evaluate(runner, split, self.batch, region=region)
        if not self.json:  # at once: the other measurements may take several times as long
            self._print_scores(scores, expected, split)
        mean = None
        if self.average != 1:
            say(f"Averaging over {self.average} symmetries.")
            with watched(checkpoint.operator, self.average * len(split), say):
                mean = evaluate(runner, split, self.batch, recipe.problem, self.average, region)
        say("Looking at the same samples through other points.")
        with watched(checkpoint.operator, None, say):
            sweep = resolution_sweep(runner, split, batch=self.batch, trained_error=scores.error)
        if self.json:
            content = {**dataclasses.asdict(scores), "sweep": [dataclasses.asdict(row) for row in sweep]}
            if mean is not None:
                content["averaged"] = {"symmetries": self.average, **dataclasses.asdict(mean)}
            if expected is not None:
                content["card"] = {"error": expected, "difference": scores.error / expected - 1}
            print(json.dumps(content, indent=2))
            return 0
        rows = [(r.label, str(r.points), f"{r.error:.4%}") for r in sweep]
        if mean is not None:
            rows.append((f"{self.average} symmetries, averaged", str(split[0].input.points), f"{mean.error:.4%}"))
        table(("looked at with", "input points", "error"), rows)
        return 0

    def _print_scores(self, scores: "Scores", expected: float | None, split: "PointDataset") -> None:
        from oformer.zoo.card import errors_on_meshes

        card = []
        if expected:
            card.append(("mean, as its card says", f"{expected:.4%} (now {scores.error / expected - 1:+.3%})"))
        table(
            ("relative L2 error", f"{self.split} split, {scores.count} samples"),
            [
                ("mean", f"{scores.error:.4%}"),
                *card,
                ("median", f"{scores.median:.4%}"),
                ("worst", f"{scores.worst:.4%} (sample {scores.worst_sample})"),
                ("mean of batch means (as the released code)", f"{scores.batch_mean:.4%}"),
                *errors_on_meshes(scores, split.card.targets),
            ],
        )

    def _samples(self, recipe: "Recipe", folder: Path, device: str) -> tuple["PointDataset", float | None]:
        """The samples to measure, and their error as the operator's card states it; None without a card."""
        from oformer.checkpoint import run_of
        from oformer.training.find_data import open_split
        from oformer.zoo.card import CARD, read_card

        own, expected = self.data or remembered_data(run_of(folder)), None
        if own is None and self.split == "test" and (folder / CARD).is_file():
            expected = read_card(folder).expected(self.samples)
        samples = open_split(recipe, self.datasets, self.split, own=own, samples=self.samples, device=device, say=say)
        return samples, expected
