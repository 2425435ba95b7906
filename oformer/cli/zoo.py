"""`oformer zoo`: the trained operators that come with the package."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Annotated

import tyro

from oformer.cli.options import (
    Count,
    CountOrNone,
    Device,
    Name,
    Positive,
    program_name,
    subcommands,
    torch_device,
)
from oformer.errors import unknown_name
from oformer.terminal import say, show, table


@dataclass
class ZooList:
    """Show the trained operators that come with the package."""

    def run(self, rest: list[str]) -> int:
        """Print the table of trained operators."""
        from oformer.experiments.published import headline
        from oformer.files import MODEL_CARD, read_json, zoo_folder, zoo_names

        rows = []
        for name in zoo_names():
            # As plain JSON: its dataclasses would load torch.
            card, files = read_json(zoo_folder() / name / MODEL_CARD), (zoo_folder() / name).iterdir()
            near, size = card["scores"]["momentum"], sum(path.stat().st_size for path in files)
            scores = SimpleNamespace(**card["scores"] | {"momentum": near and SimpleNamespace(**near)})
            title = shorten(card["data"]["title"], 24, placeholder="...")
            rows.append((name, title, headline(name, scores), f"{card['parameters']:,}", f"{size / 1e6:.1f} MB"))
        if not rows:
            say(f"No trained operators in {zoo_folder()} yet. Add one: oformer zoo add RUN")
            return 0
        table(("name", "problem", "test error", "parameters", "size"), rows)
        say(
            "% is relative L2; squared: mean squared errors of potential and field, scaled; momentum near the\n"
            f"foil: relative, and of density times it. More of each: {program_name()} zoo show NAME"
        )
        return 0


@dataclass
class ZooShow:
    """Print the card of a trained operator: its data, training, errors and licence."""

    name: Name

    def run(self, rest: list[str]) -> int:
        """Print the card."""
        from oformer.files import CARD, zoo_folder, zoo_names

        if self.name.removeprefix("zoo:") not in zoo_names():
            raise unknown_name("trained operator", self.name, zoo_names())
        show((zoo_folder() / self.name.removeprefix("zoo:") / CARD).read_text(encoding="utf-8"))
        return 0


@dataclass
class ZooVerify:
    """Make test samples again by their seed and compare the errors with the cards; exit status 1 where they differ."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME [NAME ...]]")] = ()
    """Trained operators; by default all."""
    quick: bool = False
    """Only recompute the checksums of the files, and see that they predict."""
    samples: Count | None = None
    """Only the first so many test samples, where all would take too long (Navier-Stokes on a CPU)."""
    fresh: bool = False
    """Compare the error on the card's fresh samples instead of the test samples."""
    tolerance: Positive = 0.01
    """The largest relative difference."""
    datasets: Path = Path("datasets")
    """Where the test samples are kept."""
    batch: Count = 16
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Print what was verified of each operator; the exit status is 1 if any differs from its card."""
        from oformer.checkpoint import zoo_names
        from oformer.zoo.verify import compare, damage

        rows, good = [], True
        for name in self.names or zoo_names():
            wrong = damage(name)
            words = "; ".join(wrong) or "files as written, and it predicts"
            if not wrong and not self.quick:
                found = compare(
                    name, samples=self.samples, fresh=self.fresh, datasets=self.datasets,
                    device=torch_device(self.device), batch=self.batch, say=say,
                )  # fmt: skip
                good &= abs(found.difference) <= self.tolerance
                words = f"card {found.card:.4%}, now {found.now:.4%} ({found.difference:+.3%}), {found.samples} samples"
            good &= not wrong
            rows.append((name, words))
        table(("name", "verified"), rows)
        return 0 if good else 1


@dataclass
class ZooAdd:
    """Measure a finished run and put its weights, card and journal into the zoo."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    seed_run: tuple[Path, ...] = ()
    """Other runs of the same recipe with other seeds; their errors and journals are recorded beside."""
    name: str | None = None
    """In the zoo; by default that of the recipe."""
    half: bool = False
    """Ship the weights in float16, all but first and last layers; the card says what that costs."""
    card_only: bool = False
    """Write the card and the journals without the weights, into runs/."""
    finer: bool = False
    """Make the test samples at twice their resolution too, where they are not stored so finely."""
    average: Count = 1
    """Also measure the mean of predictions under so many exact symmetries of the problem."""
    fresh: CountOrNone = 0
    """Also measure so many samples after the test split, and say which of them have the largest errors."""
    zoo: Path | None = None
    """The folder to write into; by default the one in which names are looked up."""
    datasets: Path = Path("datasets")
    batch: Count | None = None
    """Samples at once; by default as in training."""
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Measure the run, and write it into the zoo."""
        from oformer.zoo.add import add

        folder = add(
            self.run_folder, name=self.name, seed_runs=self.seed_run, half=self.half, card_only=self.card_only,
            finer=self.finer, average=self.average, fresh=self.fresh, datasets=self.datasets, root=self.zoo,
            device=torch_device(self.device), batch=self.batch, say=say,
        )  # fmt: skip
        say(f"Wrote {folder}. Read {folder / 'README.md'}; renew the table of results: {program_name()} zoo table")
        return 0


@dataclass
class ZooMeasure:
    """Measure a trained operator of the zoo on fresh samples, after those of its test split, and renew its card."""

    name: Name
    samples: Count = 1000
    """The number of fresh samples."""
    datasets: Path = Path("datasets")
    """Where the samples are kept."""
    batch: Count = 16
    device: Device = "auto"

    def run(self, rest: list[str]) -> int:
        """Measure the operator, and write its card and its page."""
        from oformer.zoo.add import renew

        device = torch_device(self.device)
        folder = renew(
            self.name, self.samples, datasets=self.datasets, device=device, batch=self.batch, say=say
        )  # fmt: skip
        say(f"Wrote {folder / 'card.json'} and {folder / 'README.md'}")
        return 0


@dataclass
class ZooTable:
    """Write the cards beside the numbers of the paper: into docs/results.md and README.md, between their marks.

    The page of each card is written anew too.
    """

    results: Path = Path("docs/results.md")
    readme: Path = Path("README.md")
    images: Path = Path("docs/images")
    """The folder of the figures that show all operators. Those of one that `oformer plot NAME --out IMAGES/NAME` has
    left in it are shown too."""
    runs: Path = Path("runs")
    """The folder of cards without weights."""

    def run(self, rest: list[str]) -> int:
        """Write the pages of all cards, then the tables of both files."""
        from oformer.zoo import all_cards, card_folders
        from oformer.zoo.add import write_page
        from oformer.zoo.table import write_results

        for folder in card_folders(self.runs):
            say(f"Wrote {write_page(folder)}")
        for path in write_results(all_cards(self.runs), self.results, self.readme, self.images):
            say(f"Wrote {path}")
        return 0


ZOO = {"list": ZooList, "show": ZooShow, "verify": ZooVerify, "add": ZooAdd, "measure": ZooMeasure, "table": ZooTable}


@dataclass
class Zoo:
    """The trained operators that come with the package: list, show, verify, add, measure, table."""

    action: tyro.conf.OmitSubcommandPrefixes[subcommands(ZOO)]  # pyright: ignore[reportInvalidTypeForm]
    """What to do."""

    def run(self, rest: list[str]) -> int:
        """Run the command of the zoo."""
        return self.action.run(rest)
