"""The command line: one verb per job. Nothing heavy is imported until a verb needs it."""

import contextlib
import dataclasses
import io
import json
import math
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_type_hints

import tyro

from oformer.errors import (
    DamagedCheckpoint,
    InputError,
    OutOfMemory,
    OutsideTraining,
    SolverDiverged,
    TrainingDiverged,
    unknown_name,
)
from oformer.terminal import say, show, table

if TYPE_CHECKING:
    from oformer.data.dataset import PointDataset
    from oformer.report import Measured
    from oformer.training.evaluate import Scores
    from oformer.training.recipe import Recipe

LEAST_MINUTES = 0.05  # of training: a command with --stop-after whose time went before it still gets further
# Seconds that a rank keeps a mistake to itself: torchrun ends all when one ends, and the first must have spoken.
SILENCE = 10.0
TRUTHS = ("true", "false")
# What torch and numpy say of sizes beyond memory, or beyond all numbers.
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed", "Maximum allowed dimension exceeded")
HELP = frozenset({"-h", "--help"})


@dataclass(frozen=True)
class Within:
    """The numbers that an option takes, as a mark of its type; they are finite, and whole ones fit into 64 bits."""

    low: float = -math.inf
    high: float = math.inf


Device = Literal["auto", "cpu", "cuda"]
Count = Annotated[int, Within(1)]
CountOrNone = Annotated[int, Within(0)]
Positive = Annotated[float, Within(sys.float_info.min)]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def _either(commands: dict[str, type]) -> Any:
    """One of several commands, by name."""
    members = [Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()]
    return Union[tuple(members)]  # noqa: UP007 - a union of a computed list has no other spelling


@dataclass
class List:
    """Show the named recipes, or everything about one of them and how to change it."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A recipe, or the Python file of one."""

    def run(self, rest: list[str]) -> int:
        """Print the table, or one recipe's settings."""
        from oformer.experiments.recipes import BASELINES, RECIPES, recipe_named

        if self.name is not None:
            _override(recipe_named(self.name), [*rest, "--help"], self.name)
        rows = {
            n: (n, f"{_size(r):,}", r.describe(), "yes" if r.problem else "from --data", r.paper)
            for n, r in RECIPES.items()
        }
        columns = ("parameters", "training", "generator", "paper")
        table(("recipe", *columns), [row for n, row in rows.items() if n not in BASELINES])
        table(("baseline: another model", *columns), [rows[n] for n in BASELINES])
        return 0


@dataclass
class New:
    """Begin a problem of your own: a folder with an equation, a recipe and a test that run as they stand."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """A new folder; its last part, such as heat-flow, is the name of the problem."""

    def run(self, rest: list[str]) -> int:
        """Write the files, and say what to type next."""
        from oformer.scaffold import new_project

        _no_more(rest)
        file = new_project(self.folder)
        say(f"Wrote {self.folder}. It trains as it stands, in about a minute on a CPU:")
        say(f"  {_program()} train {file}")
        return 0


@dataclass
class Generate:
    """Make the dataset of a recipe or a problem. Interrupt it at any time: the same command goes on."""

    name: Name
    """A recipe (burgers-2048) or the Python file of one, a problem (darcy, navier-stokes, airfoil...), or one of its
    instances (ns2, ns-mix)."""
    count: Count | None = None
    """Samples in all; by default those of the recipe, or 1000."""
    train: CountOrNone | None = None
    """The first so many are for training and the others for testing; by default as the recipe says, or nine tenths."""
    seed: CountOrNone | None = None
    """Of the dataset; by default that of the recipe, or 0."""
    out: Path | None = None
    """The dataset's folder; by default one under datasets/."""
    device: Device = "auto"
    shard: str | None = None
    """i/n makes the i-th of n shares (from 0), for several processes or machines on one disk; under torchrun, by
    default, that of the rank."""
    batch: Count | None = None
    """Samples solved at once; by default 64 on a GPU, and fewer on a CPU where samples are large."""
    workers: Count | None = None
    """Processes on a CPU; by default one per core for a dataset of many parts."""
    storage: Literal["float32", "float16"] | None = None
    """How values are kept; the cost of float16 is measured and written in the card."""

    def run(self, rest: list[str]) -> int:
        """Make the dataset."""
        from oformer.data.generate import estimate, first_and_last, generate
        from oformer.experiments.recipes import RECIPES, recipe_named
        from oformer.problems import PROBLEMS
        from oformer.problems.navier_stokes import INSTANCES
        from oformer.training.datasets import dataset_folder

        recipe = recipe_named(self.name) if self.name in RECIPES or ".py" in self.name else None
        if recipe is not None:
            settings = recipe.problem
        elif self.name in PROBLEMS or self.name in INSTANCES:
            settings = INSTANCES.get(self.name) or PROBLEMS[self.name]()
        else:
            raise unknown_name("recipe or problem", self.name, [*RECIPES, *PROBLEMS, *INSTANCES])
        if settings is None:
            raise InputError(f"a problem in recipe `{self.name}`", "data alone", "Use a dataset of your own")
        rest = _without_truths(rest, settings)
        problem = tyro.cli(type(settings), default=settings, args=rest, prog=f"{_program()} generate {self.name}")
        _check_numbers(problem)
        data = recipe.data if recipe else None
        train, test = (data.train, data.test) if data and self.count is None else (None, None)
        count = self.count if self.count is not None else (data.train + data.test if data else 1000)
        seed = self.seed if self.seed is not None else data.seed if data else 0
        storage = self.storage or (data.storage if data else "float32")
        if self.train is not None:
            train, test = self.train, None
        splits = first_and_last(count, train, test)
        problem = problem.split_after(splits["train"][1]) if "train" in splits else problem
        folder = self.out or dataset_folder(problem, count, seed, Path("datasets"))
        if _first_rank():
            say(f"{count:,} samples of {problem.card.title}, about {estimate(problem, count, storage) / 1e6:,.0f} MB.")
        store = generate(
            problem, count, seed=seed, folder=folder, splits=splits, device=_device(self.device),
            batch=self.batch, shard=_shard(self.shard), storage=storage, workers=self.workers,
        )  # fmt: skip
        if store is None:
            say(f"This share of {folder} is made; the others are still missing.")
        else:
            say(f"{folder} is complete. Look at it: oformer inspect {folder}")
        return 0


@dataclass
class Import:
    """Bring files of others into a dataset that `train --data` takes.

    MATLAB, .npy, .pt, PDEBench and The Well; pickles of electro- and magnetostatics; MeshGraphNets' tfrecord and
    folders of .npz; VTK, VTU, XDMF and gmsh files, one or a folder of them, with --inputs and --targets; arrays of your
    own in .npz, .mat and HDF5, with --coords as well (docs/data-formats.md).

    What is understood of the file is printed first; `oformer inspect FILE` prints that alone.
    """

    file: tyro.conf.Positional[Path]
    out: Path | None = None
    """The dataset's folder; by default one under datasets/."""
    kind: Literal[
        "burgers", "darcy", "navier-stokes", "pdebench", "the-well", "electrostatics", "magnetostatics", "airfoil",
        "mesh", "arrays",
    ] | None = None  # fmt: skip
    """What the file is, instead of our guess."""
    in_times: Count | None = None
    """How many frames of a trajectory are input; by default 10 (4 of an airfoil), or 1 where there are not
    more."""
    stride: Count | None = None
    """Keep one in so many frames of an airfoil's trajectory or of an XDMF series."""
    stored: Literal["velocity", "momentum"] | None = None
    """What to keep of the airfoil's "velocity", which in published files is momentum; by default the velocity."""
    inputs: str = ""
    """Fields of a mesh file, or arrays of a file, that are input; with commas between them."""
    targets: str = ""
    """And those that are to be predicted."""
    coords: str = ""
    """Arrays that are the points: one for all axes, or one for each."""
    train: CountOrNone | None = None
    """The first so many samples are for training; by default all but the test samples."""
    test: CountOrNone | None = None
    """The last so many samples are for testing; by default a tenth."""
    test_file: Path | None = None
    """Take the test samples from another file of the same layout; by default all of them."""
    storage: Literal["float32", "float16"] = "float32"
    """How values are kept; the cost of float16 is measured and written in the card."""

    def run(self, rest: list[str]) -> int:
        """Say what the file is, then write the dataset."""
        from oformer.data.importers import import_file, recognize

        _no_more(rest)
        choices: dict[str, Any] = {
            "kind": self.kind, "in_times": self.in_times, "stride": self.stride, "stored": self.stored,
            **{role: tuple(filter(None, getattr(self, role).split(","))) for role in ("inputs", "targets", "coords")},
        }  # fmt: skip
        show(str(recognize(self.file, **choices)))
        folder = self.out or Path("datasets") / self.file.stem
        import_file(
            self.file, folder, n_train=self.train, n_test=self.test, storage=self.storage, test_file=self.test_file,
            **choices,
            progress=lambda done, total: say(f"Imported {done:,} of {total:,} samples"),
        )  # fmt: skip
        say(f"{folder} is complete. Look at it: oformer inspect {folder}")
        return 0


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
    out: Path | None = None
    """The run's folder; by default outputs/NAME."""
    data: Path | None = None
    """A dataset of your own instead of the recipe's, or a file that `oformer import` needs no hints for."""
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
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.name == "[]":  # what tyro makes of an absent name beside arguments that it does not know
            self.name = ""

    def recipe(self, rest: list[str]) -> "Recipe":
        """What is trained, with the settings changed that the command line names."""
        from oformer.experiments.recipes import recipe_named

        if self.name:
            return _override(recipe_named(self.name), rest, self.name)
        return _override(_recipe_for(self.data), rest, f"--data {shlex.quote(str(self.data))}")

    def run(self, rest: list[str]) -> int:
        """Train, then report."""
        started = time.monotonic()  # before the imports, which take seconds
        from oformer.report import write_report
        from oformer.training.datasets import open_data, train_and_test
        from oformer.training.distributed import started_by_torchrun
        from oformer.training.loop import train

        recipe = self.recipe(rest)
        device, out = _device(self.device), self.out or Path("outputs") / recipe.name
        own = self.data or _remembered(out)
        with started_by_torchrun(device, self.split) as ranks:
            data = ranks.first_then_others(lambda: open_data(recipe, self.datasets, own=own, device=device, say=say))
            splits = train_and_test(data, recipe)
            budget, limit = (_left(minutes, started) for minutes in (self.max_minutes, self.stop_after))
            if ranks.highest(int(budget is not None and budget < LEAST_MINUTES)):
                if ranks.first:
                    say(f"--max-minutes {self.max_minutes:g} were over before training: the data took them. "
                        "They are kept; the same command trains.")  # fmt: skip
                return 0
            outcome = train(
                recipe, out, splits, device=device, max_minutes=budget,
                stop_after=None if limit is None else max(limit, LEAST_MINUTES), quiet=self.quiet, ranks=ranks, own=own,
            )  # fmt: skip
        code = 0 if outcome.finished or outcome.reason == "time" else 130
        if not ranks.first:
            return code
        say(f"Writing the report: predicting {len(splits[1]):,} test samples at several resolutions.")
        write_report(out, splits[1], device=device)
        if not outcome.finished:
            command = " ".join([_program(), *sys.argv[1:]]) if ranks.world == 1 else "the same command"
            say(f"Stopped ({outcome.reason}) at step {outcome.step:,}; everything is saved. Go on with: {command}")
            return code
        error = f", test error {outcome.scores.error:.3%}" if outcome.scores else ""
        steps = f"{outcome.step:,} steps"
        if outcome.reason == "finished" and outcome.step < recipe.training.steps:
            steps += f" of {recipe.training.steps:,}, for which there was time"
        say(f"Finished {steps}{error}. See {out / 'report.html'}; next: oformer predict {out} INPUT.npz")
        return code


@dataclass
class Evaluate:
    """Measure a trained operator on the test split, at its own and at other resolutions."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    data: Path | None = None
    """Another dataset than that which it was trained on."""
    recipe: str | None = None
    """The Python file that was trained, where the problem or the model is your own."""
    datasets: Path = Path("datasets")
    split: Literal["train", "test"] = "test"
    samples: Count | None = None
    """Only the first so many of the split."""
    batch: Count = 16
    average: Count = 1
    """Also measure the mean of predictions under so many exact symmetries of the problem."""
    device: Device = "auto"
    json: bool = False
    """Print JSON instead of a table."""

    def run(self, rest: list[str]) -> int:
        """Measure and print."""
        from oformer.checkpoint import find_checkpoint, load_checkpoint
        from oformer.training.evaluate import evaluate, resolution_sweep, watched

        _no_more(rest)
        device = _device(self.device)
        _import(self.recipe)
        folder = find_checkpoint(self.run_folder)
        checkpoint = load_checkpoint(folder, device)
        recipe = _recipe_of(checkpoint.recipe, self.recipe)
        split, expected = self._samples(recipe, folder, device)
        region = recipe.training.loss.region
        with watched(checkpoint.operator, len(split), say):
            scores = evaluate(checkpoint.operator, split, self.batch, region=region)
        if not self.json:  # at once: what follows may take several times as long
            self._print_scores(scores, expected, split)
        mean = None
        if self.average != 1:
            say(f"Averaging over {self.average} symmetries.")
            with watched(checkpoint.operator, self.average * len(split), say):
                mean = evaluate(checkpoint.operator, split, self.batch, recipe.problem, self.average, region)
        say("Looking at the same samples through other points.")
        with watched(checkpoint.operator, None, say):
            sweep = resolution_sweep(checkpoint.operator, split, batch=self.batch, trained_error=scores.error)
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
                *_mesh_rows(scores, split.card.targets if split.spec.grid is None else ()),
            ],
        )

    def _samples(self, recipe: "Recipe", folder: Path, device: str) -> tuple["PointDataset", float | None]:
        """What to measure on, and the error that a card promises there."""
        from oformer.checkpoint import run_of
        from oformer.training.datasets import open_split
        from oformer.zoo.card import CARD, read_card

        own, expected = self.data or _remembered(run_of(folder)), None
        if own is None and self.split == "test" and (folder / CARD).is_file():
            expected = read_card(folder).expected(self.samples)
        some = open_split(recipe, self.datasets, self.split, own=own, samples=self.samples, device=device, say=say)
        return some, expected


@dataclass
class Predict:
    """Predict from a file of your own.

    The input is a .npz with `coords` (points, dim) and `values` (points, channels), (points,) or (times, points,
    channels), in physical units; optional `weights` (points,).
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    input: tyro.conf.Positional[Path]
    """The .npz file."""
    queries: Path | None = None
    """A .npy of query points (queries, dim), or a .npz with `coords` and, where the model wants it, `values`."""
    resolution: Count | None = None
    """Or so many points per axis over the box of the input (the period of a periodic problem)."""
    times: Count | None = None
    out: Path = Path("prediction.npz")
    """The .npz to write: `coords` and `values` of the answer."""
    plot: Path | None = None
    """Also draw it, on a line or in the plane."""
    device: Device = "auto"
    precision: Literal["float32", "tf32", "float16", "bfloat16"] = "float32"
    """As trained, or faster on a GPU: products in TF32, or the model in float16 or bfloat16."""
    memory_gb: Positive | None = None
    """GiB to compute in; by default most of what is free. More points than fit pass in chunks."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Predict and write the file."""
        import numpy as np

        from oformer.files import save_npz
        from oformer.plots.style import picture_format
        from oformer.predict import Predictor, read_field

        _no_more(rest)
        if self.out.suffix.lower() != ".npz":
            raise InputError("a name that ends in .npz for --out", f"`{self.out}`", "Write --out prediction.npz")
        if self.plot is not None:
            picture_format(self.plot)  # refused before the time is spent
        device = None if self.device == "auto" else _device(self.device)
        _import(self.recipe)
        predictor = Predictor(self.run_folder, device, precision=self.precision, memory_gb=self.memory_gb)
        field = read_field(self.input)
        query = None
        if self.queries is not None:
            query = read_field(self.queries, values_needed=False)
        elif self.resolution is not None:
            query = predictor.grid(field, self.resolution)
        with _plain_warnings():
            answer = predictor(field, query, self.times)
        save_npz(self.out, coords=np.asarray(answer.coords), values=np.asarray(answer.values))
        say(f"Wrote {answer.values.shape[0]} frame(s) at {answer.points} points to {self.out}.")
        if self.plot is not None:
            from oformer.report import draw_prediction

            draw_prediction(predictor, field, answer, self.plot)
            say(f"Drew {self.plot}")
        return 0


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
        """Draw and write the pictures."""
        from oformer.checkpoint import find_checkpoint
        from oformer.report import measure

        _no_more(rest)
        run, device = self.run_folder, _device(self.device)
        if not run.is_dir():
            return self._draw_shipped(find_checkpoint(run), device)
        recipe = _recipe_of_run(run, self.recipe)
        test = self._test_samples(recipe, self.data or _remembered(run), device)
        return self._draw(measure(run, test, device=device), {}, self.out or run / "plots")

    def _test_samples(self, recipe: "Recipe", own: Path | None, device: str) -> "PointDataset":
        from oformer.training.datasets import open_split

        return open_split(recipe, self.datasets, "test", own=own, samples=self.samples, device=device, say=say)

    def _draw_shipped(self, folder: Path, device: str) -> int:
        """Draw a trained operator that was found by name; what its card says is not measured again."""
        from oformer.checkpoint import read_config
        from oformer.report import measure
        from oformer.zoo.card import read_card
        from oformer.zoo.table import card_pictures

        card, recipe = read_card(folder), _recipe_of(read_config(folder).recipe, self.recipe)
        test = self._test_samples(recipe, None, device)
        sweep = [row for row in card.views if row.kind != "sparse"]  # sparse input has a figure of its own
        seen = measure(folder, test, sweep, device)
        return self._draw(seen, card_pictures(card), self.out or Path("outputs") / "zoo" / card.name)

    def _draw(self, seen: "Measured", others: dict[str, Any], folder: Path) -> int:
        from oformer.plots.style import save_figure
        from oformer.report import movie, pictures

        figures = {**pictures(seen), **others}
        for name in self.only:
            if name not in figures:
                raise unknown_name("picture", name, figures)
        for name in self.only or figures:
            save_figure(folder / f"{name}.png", figures[name])
            say(f"Drew {folder / name}.png")
        if self.movie is not None:
            movie(seen, self.movie)
            say(f"Drew {self.movie}")
        return 0


@dataclass
class Export:
    """Write a trained operator as one file for programs without this package: .onnx or .pt2."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    out: Path = Path("model.onnx")
    """The file; its ending chooses the format."""
    times: Count | None = None
    """Steps that the file answers; by default as many as it was trained for."""
    tolerance: Positive = 1e-4
    """The largest relative difference from the operator."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Export, check, and say how close the file is."""
        from oformer.export import export

        _no_more(rest)
        _import(self.recipe)
        seen = export(self.run_folder, self.out, self.times, self.tolerance)
        say(f"Wrote {self.out}: within {seen.error:.1e} of the operator at {len(seen.sizes)} sizes.")
        return 0


@dataclass
class Inspect:
    """Say what a file or folder is: a dataset, a run, a checkpoint, arrays, or a published file to import."""

    file: tyro.conf.Positional[Path]
    verify: bool = False
    """Also recompute the checksums of a dataset."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Look and print."""
        from oformer.checkpoint import find_checkpoint
        from oformer.inspection import describe

        _no_more(rest)
        _import(self.recipe)
        named = str(self.file).startswith("zoo:")
        show(describe(find_checkpoint(self.file) if named else self.file, verify=self.verify))
        return 0


@dataclass
class Demo:
    """Generate, train, evaluate and draw a small operator: a few minutes on two cores."""

    out: Path = Path("outputs/demo")
    """Where data, run and report go."""
    minutes: float = 4.0
    """A time budget for training: a slow machine goes through the whole schedule in fewer steps."""
    fresh: bool = False
    """Begin again instead of going on with what is there."""

    def run(self, rest: list[str]) -> int:
        """Run the demo."""
        import torch

        from oformer.demo import demo
        from oformer.experiments.recipes import recipe_named

        # Its small model is as fast in one thread as in two, and many times faster where others use the same cores.
        torch.set_num_threads(1)
        recipe = _override(recipe_named("burgers-demo"), rest)
        return demo(recipe, self.out, minutes=self.minutes, fresh=self.fresh, program=_program())


@dataclass
class ZooList:
    """Show the trained operators that come with the package."""

    def run(self, rest: list[str]) -> int:
        """Print the table."""
        from oformer.checkpoint import zoo_folder
        from oformer.zoo import shipped, size_of
        from oformer.zoo.card import headline

        _no_more(rest)
        rows = [
            (
                name, shorten(card.data.title, 24, placeholder="..."), headline(card), f"{card.parameters:,}",
                f"{size_of(name) / 1e6:.1f} MB",
            )
            for name, card in shipped().items()
        ]  # fmt: skip
        if not rows:
            say(f"No trained operators in {zoo_folder()} yet. Add one: oformer zoo add RUN")
            return 0
        table(("name", "problem", "test error", "parameters", "size"), rows)
        say(
            "% is relative L2; squared: mean squared errors of potential and field, scaled; momentum near the\n"
            f"foil: relative, and of density times it. More of each: {_program()} zoo show NAME"
        )
        return 0


@dataclass
class ZooShow:
    """Print the card of a trained operator: its data, training, errors and licence."""

    name: Name

    def run(self, rest: list[str]) -> int:
        """Print the page."""
        from oformer.checkpoint import CARD, find_checkpoint

        _no_more(rest)
        show((find_checkpoint(f"zoo:{self.name}") / CARD).read_text())
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
        """Check and print."""
        from oformer.checkpoint import zoo_names
        from oformer.zoo.verify import compare, damage

        _no_more(rest)
        rows, good = [], True
        for name in self.names or zoo_names():
            wrong = damage(name)
            words = "; ".join(wrong) or "files as written, and it predicts"
            if not wrong and not self.quick:
                found = compare(
                    name, samples=self.samples, fresh=self.fresh, datasets=self.datasets,
                    device=_device(self.device), batch=self.batch, say=say,
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
        """Measure and write."""
        from oformer.zoo.add import add

        _no_more(rest)
        folder = add(
            self.run_folder, name=self.name, seed_runs=self.seed_run, half=self.half, card_only=self.card_only,
            finer=self.finer, average=self.average, fresh=self.fresh, datasets=self.datasets, root=self.zoo,
            device=_device(self.device), batch=self.batch, say=say,
        )  # fmt: skip
        say(f"Wrote {folder}. Read {folder / 'README.md'}; renew the table of results: {_program()} zoo table")
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
        """Measure and write."""
        from oformer.zoo.add import renew

        _no_more(rest)
        device = _device(self.device)
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
        """Rewrite both files."""
        from oformer.zoo import all_cards, card_folders
        from oformer.zoo.add import write_page
        from oformer.zoo.table import write_results

        _no_more(rest)
        for folder in card_folders(self.runs):
            say(f"Wrote {write_page(folder)}")
        for path in write_results(all_cards(self.runs), self.results, self.readme, self.images):
            say(f"Wrote {path}")
        return 0


@dataclass
class Serve:
    """Answer over HTTP, and show a page in which to play with trained operators (docs/serving.md). Ctrl-C stops it."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ()
    """Run folders, checkpoints, or names of trained operators; by default all that come with the package."""
    host: str = "127.0.0.1"
    """The address to listen at; the default is reached from this machine alone."""
    port: Annotated[int, Within(0, 65535)] = 8760
    """0 takes a free one."""
    name: str | None = None
    """A host name besides localhost under which people reach it."""
    open: bool = False
    """Open the page in a browser."""
    device: Device = "auto"
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Serve until stopped."""
        from oformer.checkpoint import zoo_folder, zoo_names
        from oformer.playground.server import serve

        _no_more(rest)
        _import(self.recipe)
        sources = self.models or tuple(f"zoo:{name}" for name in zoo_names())
        if not sources:
            raise InputError(
                f"a trained operator to serve, or some in {zoo_folder()}",
                "none",
                f"Train one in minutes with `{_program()} demo`, then: `{_program()} serve outputs/demo/run`",
            )
        ended = serve(
            sources, host=self.host, port=self.port, name=self.name, device=_device(self.device), browse=self.open,
            say=say,
        )  # fmt: skip
        if not ended:
            sys.stderr.flush()
            os._exit(0)  # the interpreter's own end would abort in the thread of a solver that is still at work
        return 0


ZOO = {"list": ZooList, "show": ZooShow, "verify": ZooVerify, "add": ZooAdd, "measure": ZooMeasure, "table": ZooTable}


@dataclass
class Zoo:
    """The trained operators that come with the package: list, show, verify, add, measure, table."""

    action: tyro.conf.OmitSubcommandPrefixes[_either(ZOO)]  # pyright: ignore[reportInvalidTypeForm]
    """What to do."""

    def run(self, rest: list[str]) -> int:
        """Do what is asked."""
        return self.action.run(rest)


COMMANDS = {
    "list": List, "new": New, "generate": Generate, "import": Import, "train": Train, "evaluate": Evaluate,
    "predict": Predict, "plot": Plot, "export": Export, "inspect": Inspect, "zoo": Zoo, "demo": Demo,
    "serve": Serve,
}  # fmt: skip


def _first_rank() -> bool:
    """Whether this process is the one that speaks, of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _said_by_first_rank() -> Iterator[None]:
    """Keep what tyro prints to ourselves on the other ranks. Its own switch for that lets some refusals through."""
    with contextlib.ExitStack() as stack:
        if not _first_rank():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def program() -> NoReturn:
    """The command line as a program of its own, which ends where its command does.

    All is written and closed then. Threads of torch, or a solver that cannot be interrupted, may outlive what they work
    on while the interpreter tidies up: that aborts a program now and then, and what was done would look like a failure.
    """
    code = main()
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake prints one sentence and returns 2, on all ranks of torchrun."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    if "--version" in arguments:
        from oformer import __version__

        print(f"oformer {__version__}")
        return 0
    try:
        if arguments[:1] == ["train"] and not HELP.isdisjoint(arguments):
            command, rest = parse([a for a in arguments if a not in HELP])
            if command.name or command.data is not None:
                command.recipe([*rest, "--help"])  # its settings are what is asked for
        command, rest = parse(arguments)
        return command.run(rest)
    except (InputError, SolverDiverged, TrainingDiverged, OutOfMemory, ImportError) as error:
        if traceback or (isinstance(error, ImportError) and not _is_extra(error)):
            raise
        if _first_rank() or not _of_all_ranks(error):
            say(f"oformer: {error}")
        else:
            time.sleep(SILENCE)
        return 2
    except SystemExit as refused:  # by tyro, which said why
        if refused.code and not _first_rank():
            time.sleep(SILENCE)
        raise
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a disk: what is full, forbidden or gone, the system says in its own words
        if traceback or error.errno is None:
            raise
        where = f"{os.fsdecode(error.filename)[:200]}: " if error.filename else ""
        say(
            f"oformer: {where}{error.strerror}. What was complete is not lost. Mend this and run the same command "
            "again; --traceback shows where it was met."
        )
        return 2
    except KeyboardInterrupt:
        say("oformer: interrupted; nothing that was complete is lost. Run the same command again.")
        return 130
    except Exception as error:
        told = _told(error)
        if told is not None and not traceback:
            say(f"oformer: {told}")
            return 2
        if _of_the_gpu(error):
            error.add_note(
                "oformer: what was saved stays. Perhaps a fused kernel does not suit this GPU, torch or Triton: "
                "OFORMER_FUSED=0 before the same command uses plain code. If that helps, please report it."
            )
        raise


def _told(error: Exception) -> InputError | None:
    """What the memory or the system's encoding of names refused, as a sentence; None for other errors."""
    if isinstance(error, UnicodeEncodeError):
        return InputError("names that can be written as UTF-8", ascii(error.object)[:200], "Choose another name")
    said = str(error)
    if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
        return InputError("sizes that memory holds", said[:200], "Ask for fewer points, samples or channels")
    return None


def _of_the_gpu(error: Exception) -> bool:
    """Whether a kernel failed, or did not compile."""
    said = str(error)
    return type(error).__module__.startswith("triton") or "CUDA error" in said or "Triton Error" in said


_PLAIN = (OutsideTraining, DamagedCheckpoint)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print our own warnings as one sentence, without the line of Python that it came from."""
    with warnings.catch_warnings():
        for category in _PLAIN:
            warnings.simplefilter("always", category)
        show = warnings.showwarning

        def plainly(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, _PLAIN):
                say(f"oformer: {message}")
            else:
                show(message, category, *rest)

        warnings.showwarning = plainly
        yield


@_said_by_first_rank()
def parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that is asked for, and the arguments that only a recipe can understand."""
    _check_words(arguments)
    verb = _named("command", arguments, COMMANDS)
    if verb is Zoo:
        verb = _named("command of zoo", arguments[1:], ZOO)
    if verb is not None:
        arguments = _without_truths(arguments, verb)
    command, rest = tyro.cli(
        _either(COMMANDS),
        prog=_program(),
        description="Learn the solution operator of a PDE from samples at points, and query it anywhere.\n\n"
        "Start with: oformer demo",
        args=arguments,
        return_unknown_args=True,
    )
    _check_numbers(command.action if isinstance(command, Zoo) else command)
    return command, rest


def _named(kind: str, arguments: Sequence[str], commands: dict[str, type]) -> type | None:
    """The command that the first argument names; None where it is an option or there is none."""
    if not arguments or arguments[0].startswith("-"):
        return None
    if arguments[0] not in commands:
        raise unknown_name(kind, arguments[0], commands)
    return commands[arguments[0]]


def _check_words(arguments: Sequence[str]) -> None:
    """Refuse what no option means: nothing at all, as of a variable of the shell that is not set, and NUL."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if (equals or not option) and not value:
            before = option or (arguments[place - 1] if place else "the command")
            raise InputError(f"something after `{before}`", "an empty argument", "Give it a value or leave it out")
        if "\0" in argument:
            raise InputError("arguments without the character NUL", repr(argument), "Leave it out")


def _check_numbers(settings: Any, prefix: str = "--") -> None:
    """Refuse numbers that options of a dataclass, and of those that it holds, cannot have."""
    kinds = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name)
        limits = _limits(kinds[field.name])
        for number in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(number):
                _check_numbers(number, f"{name}.")
            elif isinstance(number, (int, float)):
                beyond = 2**63 if isinstance(number, int) else math.inf
                if not (abs(number) < beyond and limits.low <= number <= limits.high):
                    raise InputError(f"{_words(limits)} for `{name}`", str(number))


def _limits(kind: Any) -> Within:
    """The mark of a type, or of one in it."""
    inside = (_limits(part) for part in get_args(kind))
    return kind if isinstance(kind, Within) else next((found for found in inside if found != Within()), Within())


def _words(limits: Within) -> str:
    """What an option takes, as the beginning of a sentence."""
    if limits.low == -math.inf:
        return "a finite number of at most 64 bits"
    if limits.high < math.inf:
        return f"a number from {limits.low} to {limits.high}"
    return f"a number of at least {limits.low}" if isinstance(limits.low, int) else "a finite number above zero"


def _switches(settings: Any, prefix: str = "--") -> set[str]:
    """The options of a dataclass, and of those that it holds, that are given alone."""
    found: set[str] = set()
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name, None)
        if field.type in (bool, "bool"):  # the second in a file of one's own that puts off its annotations
            found.add(name)
        elif dataclasses.is_dataclass(value):
            found |= _switches(value, f"{name}.")
    return found


def _without_truths(arguments: Sequence[str], settings: Any) -> list[str]:
    """The arguments with `--flag true` and `--flag=false`, as other programs want it, written `--flag`, `--no-flag`.

    Only beside switches: elsewhere `true` may be a name.
    """
    switches, plain, left = _switches(settings), [], list(arguments)
    while left:
        argument = left.pop(0)
        option, equals, value = argument.partition("=")
        option = option.replace("_", "-")
        if option not in switches:
            plain.append(argument)
            continue
        if not equals and left and left[0].lower() in TRUTHS:
            equals, value = "=", left.pop(0)
        last = max(option.rfind("."), 1) + 1
        negated = f"{option[:last]}no-{option[last:]}"
        if equals and value.lower() not in TRUTHS:
            raise InputError(
                f"`{option}` alone, or with true or false", f"`{argument}`", f"Write {option} or {negated}"
            )
        plain.append(negated if value.lower() == "false" else option)
    return plain


def _of_all_ranks(error: Exception) -> bool:
    """Whether every rank meets it: they are told the same, but each has disks and solvers of its own."""
    return isinstance(error, (InputError, TrainingDiverged)) and not isinstance(error.__cause__, OSError)


def _program() -> str:
    """How this command line is called here, so that what we print can be typed."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m oformer"
    if called.stem != "oformer":
        return "oformer"  # a script of somebody who imports us
    found = shutil.which("oformer")
    return "oformer" if found and Path(found).resolve() == called.resolve() else os.path.relpath(called)


def _is_extra(error: ImportError) -> bool:
    """Whether what is missing is a package that one installs, and not a mistake of ours."""
    return error.name is not None and not error.name.startswith("oformer")


@_said_by_first_rank()
def _override(recipe: "Recipe", rest: list[str], called: str | None = None) -> "Recipe":
    """The recipe with the settings changed that the command line names; `called` is how `train` is told of it."""
    from oformer.training.recipe import Recipe

    if not rest:
        return recipe
    paper = f"{recipe.paper}\n\n" if recipe.paper else ""
    changed = tyro.cli(
        Recipe,
        default=recipe,
        args=_without_truths(rest, recipe),
        prog=f"{_program()} train {called or recipe.name}",
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
        description=f"{paper}Every setting of this recipe, with its value. What `train` itself takes "
        f"(--out, --data, --device, --max-minutes...) is in: {_program()} train --help",
    )
    _check_numbers(changed)
    return changed


def _recipe_for(data: Path | None) -> "Recipe":
    """A recipe for a dataset of one's own: sizes and steps chosen from it."""
    from oformer.inspection import describe
    from oformer.models import OFormerConfig
    from oformer.training.datasets import open_own
    from oformer.training.sizes import recipe_for

    if data is None:
        raise InputError("the name of a recipe, or --data", "neither", "See the recipes: oformer list")
    say(describe(data))
    recipe = recipe_for(open_own(data), data.stem)
    t, model = recipe.training, recipe.model
    assert isinstance(model, OFormerConfig)
    say(f"Chosen from the data, where you do not say otherwise: {t.steps:,} steps of {t.batch}, "
        f"width {model.encoder.width}, depth {model.encoder.depth}. "
        "Change any: --training.steps, --model.encoder.width...")  # fmt: skip
    return recipe


def _no_more(rest: list[str]) -> None:
    if rest:
        raise InputError("known options", " ".join(rest), "See --help")


def _size(recipe: "Recipe") -> int:
    return sum(p.numel() for p in recipe.model.build(recipe.data_spec()).parameters())


def _device(choice: Device) -> str:
    import torch

    if choice == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "a GPU that torch can use for --device cuda",
            "none",
            "Use --device cpu, or install torch with CUDA",
        )
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    # torchrun starts a process for each GPU and tells it which is its own.
    return f"cuda:{os.environ['LOCAL_RANK']}" if choice == "cuda" and "LOCAL_RANK" in os.environ else choice


def _left(minutes: float | None, started: float) -> float | None:
    """What is left of the minutes that a command was given when it began."""
    return None if minutes is None else minutes - (time.monotonic() - started) / 60


def _mesh_rows(scores: "Scores", channels: Sequence[str]) -> list[tuple[str, str]]:
    """Lines of the table that the paper has for problems on meshes."""
    rows = [
        (f"mean squared error of {channel}, on unit scale", f"{error:.4g}")
        for channel, error in zip(channels, scores.mean_squared_scaled or (), strict=False)
    ]
    near = scores.momentum
    if near is None:
        return rows
    return [
        *rows,
        ("momentum near the foil, relative", f"{near.relative:.4%}"),
        ("momentum near the foil, root mean square error", f"{near.rmse:.4g} kg/(m2 s)"),
        ("the same times density, mean over batches (as the released code)", f"{near.as_released:.4g}"),
    ]


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:  # torchrun tells each of its processes who it is
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        i, n = (int(part) for part in text.split("/"))
    except ValueError:
        raise InputError("a shard i/n such as 0/4", text) from None
    return i, n


def _recipe_of(content: dict[str, Any] | None, file: str | None = None) -> "Recipe":
    """The recipe that a run or checkpoint holds; `file` makes a problem or model known that is not one of ours."""
    from oformer.config import from_json
    from oformer.models import MODELS
    from oformer.problems import PROBLEMS
    from oformer.training.recipe import Recipe

    if content is None:
        raise InputError("a checkpoint that knows its recipe", "one without", "Give its data with --data")
    _import(file)
    ours = {"problem": {kind.__name__ for kind in PROBLEMS.values()}, "model": set(MODELS)}
    for part, known in ours.items():
        if file is None and content[part] and content[part]["type"] not in known:
            raise InputError(
                f"a {part} of this package in the recipe",
                f"`{content[part]['type']}`",
                "Name the Python file that defines it: --recipe FILE.py",
            )
    return from_json(Recipe, content, "recipe")


def _import(file: str | None) -> None:
    """Make the problems and models of a person's own file known."""
    from oformer.experiments.recipes import recipe_named

    if file is not None:
        recipe_named(file)


def _recipe_of_run(run: Path, file: str | None = None) -> "Recipe":
    from oformer.files import read_json

    return _recipe_of(read_json(run / "recipe.json"), file)


def _remembered(run: Path) -> Path | None:
    """The data of one's own that a run was trained on, which is said: nobody named them now."""
    from oformer.training.datasets import remembered_own

    own = remembered_own(run)
    if own is not None and _first_rank():
        say(f"On the data that {run} was trained on: {own}")
    return own
