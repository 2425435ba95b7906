"""`oformer reproduce`: a table or figure of the paper, from data to page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oformer.cli.options import Count, Device, override, torch_device
from oformer.errors import unknown_name
from oformer.terminal import say, table


@dataclass
class Reproduce:
    """Make a table or figure of the paper: its data, all of its trainings, and a page beside the paper's numbers.

    What is made is kept: an interrupted command goes on where it stopped. Settings change all recipes of the item, for
    example --training.precision tf32.
    """

    item: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[ITEM]")] = ""
    """table1 to table4, figure4 to figure8 or one of the appendix; left out, all are listed."""
    quick: bool = False
    """Scaled down to minutes on a CPU: shows that each step works, and nothing about the models."""
    plan: bool = False
    """Print what would be made, and stop."""
    seeds: Count = 1
    """Trainings of each recipe, which differ in their seed; a table states mean and standard deviation."""
    out: Path | None = None
    """The folder of runs and pages; by default outputs/reproduce, or outputs/reproduce-quick."""
    datasets: Path = Path("datasets")
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Print the plan, make the item, and say where its page is; 130 where training was interrupted."""
        from oformer.experiments.items import ITEMS
        from oformer.reproduce import announce, plan, reproduce

        name = "" if self.item == "[]" else self.item  # tyro's value for a missing name next to unknown arguments
        if not name:
            table(("item", "in the paper", "recipes"), [(n, i.title, ", ".join(i.recipes)) for n, i in ITEMS.items()])
            return 0
        if name not in ITEMS:
            raise unknown_name("table or figure", name, ITEMS)
        out, device = self.out or Path("outputs") / f"reproduce{'-quick' * self.quick}", torch_device(self.device)
        item = ITEMS[name]
        runs = plan(item, out / "runs", quick=self.quick, seeds=self.seeds, change=lambda r: override(r, rest))
        say(f"{item.title}: {len(runs)} runs in {out / 'runs'}, the page in {out / name}.")
        announce(runs, self.datasets, device)
        if self.plan:
            return 0
        page = reproduce(item, runs, out / name, self.datasets, device)
        if page is None:
            say("Stopped; everything is saved. The same command goes on.")
            return 130
        say(f"Wrote {page}")
        return 0
