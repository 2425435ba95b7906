"""`oformer plot`: the pictures of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from oformer.cli.options import Count, Device, remembered_data, torch_device
from oformer.errors import unknown_name
from oformer.terminal import say

if TYPE_CHECKING:
    from oformer.data.dataset import PointDataset
    from oformer.report import Measured
    from oformer.training.recipe import Recipe


@dataclass
class Plot:
    """Draw a run: its curves, its predictions, its errors by resolution."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, or the name of a trained operator (oformer zoo list)."""
    out: Path | None = None
    """The folder for the pictures; by default RUN/plots, or outputs/zoo/NAME."""
    only: tuple[str, ...] = ()
    """Only the pictures of these names, such as predictions; by default all."""
    movie: Path | None = None
    """Also write the median prediction over time as a .gif or .mp4 (problems in time in two dimensions)."""
    data: Path | None = None
    """Another dataset than that which it was trained on."""
    recipe: str | None = None
    """The Python file that was trained, where the problem or the model is your own."""
    datasets: Path = Path("datasets")
    samples: Count | None = None
    """Only the first so many test samples, where making all would take too long; what a card says is of all."""
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Draw the pictures of a run folder, or of a trained operator found by name."""
        from oformer.checkpoint import find_checkpoint
        from oformer.experiments.recipes import stored_recipe
        from oformer.files import read_json
        from oformer.report import measure

        run, device = self.run_folder, torch_device(self.device)
        if not run.is_dir():
            return self._draw_shipped(find_checkpoint(run), device)
        recipe = stored_recipe(read_json(run / "recipe.json"), self.recipe)
        test = self._test_samples(recipe, self.data or remembered_data(run), device)
        return self._draw(measure(run, test, device=device), {}, self.out or run / "plots")

    def _test_samples(self, recipe: "Recipe", own: Path | None, device: str) -> "PointDataset":
        from oformer.training.find_data import open_split

        return open_split(recipe, self.datasets, "test", own=own, samples=self.samples, device=device, say=say)

    def _draw_shipped(self, folder: Path, device: str) -> int:
        """Draw a trained operator of the zoo; its errors at other resolutions are read from its card."""
        from oformer.checkpoint import read_config
        from oformer.experiments.recipes import stored_recipe
        from oformer.report import measure
        from oformer.zoo.card import read_card
        from oformer.zoo.table import card_pictures

        card, recipe = read_card(folder), stored_recipe(read_config(folder).recipe, self.recipe)
        test = self._test_samples(recipe, None, device)
        sweep = [row for row in card.views if row.kind != "sparse"]  # sparse input has a figure of its own
        measured = measure(folder, test, sweep, device)
        return self._draw(measured, card_pictures(card), self.out or Path("outputs") / "zoo" / card.name)

    def _draw(self, measured: "Measured", others: dict[str, Any], folder: Path) -> int:
        from oformer.plots.style import save_figure
        from oformer.report import movie, pictures

        figures = {**pictures(measured), **others}
        for name in self.only:
            if name not in figures:
                raise unknown_name("picture", name, figures)
        for name in self.only or figures:
            save_figure(folder / f"{name}.png", figures[name])
            say(f"Drew {folder / name}.png")
        if self.movie is not None:
            movie(measured, self.movie)
            say(f"Drew {self.movie}")
        return 0
