"""Find the dataset of a recipe: generated before, generated now, or a person's own, whose path the run remembers.

Where the training samples were never generated, the test samples are generated alone; they are equal to those of the
whole dataset.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from oformer.config import from_json, to_json
from oformer.data.dataset import PointDataset, View
from oformer.data.generate import estimate, generate
from oformer.data.importers import is_importable_folder, load_file
from oformer.data.manifest import SIDECAR, read_manifest
from oformer.data.store import Store
from oformer.errors import InputError
from oformer.fields import Card, Sample, Spec
from oformer.files import read_json, write_json
from oformer.problems.base import Problem
from oformer.training.recipe import Recipe

# Written into the run, not into its checkpoints: those are given away, and paths of a machine are private.
WHERE = "data.json"


@dataclass(frozen=True)
class Where:
    """The path of a run's data, relative and absolute: one holds where both are moved, the other where the run is."""

    relative: str | None  # from the run; None on another drive
    absolute: str


@dataclass(frozen=True)
class Tail(Problem):
    """A problem whose sample 0 is the sample `first` of another problem."""

    name: ClassVar[str] = "tail"

    problem: Problem
    first: int

    @property
    def spec(self) -> Spec:
        """The shape of the problem's samples."""
        return self.problem.spec

    @property
    def card(self) -> Card:
        """The card of the problem."""
        return self.problem.card

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """The problem's draws for samples `first + index`."""
        return self.problem.draw([self.first + index for index in indices], seed)

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """The problem's samples for these draws."""
        return self.problem.solve(state)

    def typical(self) -> Sample:
        """The typical sample of the problem, by which sizes are estimated."""
        return self.problem.typical()


def dataset_folder(problem: Problem, count: int, seed: int, root: Path) -> Path:
    """The folder of a generated dataset; recipes that differ in their view alone share it."""
    settings = to_json(problem)
    name = f"{problem.name}-{count}-seed{seed}"
    if settings != to_json(type(problem)()):
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        name += f"-{digest[:6]}"
    return root / name


def open_data(
    recipe: Recipe,
    root: Path,
    *,
    own: Path | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> PointDataset:
    """The dataset that a recipe trains on, under its view, with its splits.

    Args:
        recipe: whose data.
        root: the folder of generated datasets.
        own: a dataset to use instead of the recipe's own, or a file that can be imported.
        device: where to generate.
        say: told what generation will cost before it begins.
    """
    if own is not None:
        return open_own(own, recipe.data.view)
    if recipe.problem is None:
        raise InputError(
            f"a dataset for `{recipe.name}`",
            "none, and this version has no generator for it",
            "Give one of your own with --data FOLDER",
        )
    # Generated, or as much of it as is missing.
    data = recipe.data
    count, problem = data.train + data.test, recipe.problem.split_after(data.train)
    folder = dataset_folder(problem, count, data.seed, root)
    if not (folder / "dataset.json").exists():
        size = estimate(problem, count, data.storage) / 1e6
        say(f"Making {count:,} samples of {problem.card.title} in {folder} ({size:,.0f} MB).")
    made = generate(
        problem,
        count,
        seed=data.seed,
        folder=folder,
        n_train=data.train,
        n_test=data.test,
        device=device,
        storage=data.storage,
        workers=None,
    )
    return PointDataset(made if made is not None else Store.open(folder), recipe.data.view)


def whole_dataset(recipe: Recipe, root: Path) -> Store | None:
    """The dataset that a recipe trains on, if it was generated completely; otherwise None."""
    problem, data = _problem_of(recipe), recipe.data
    count = data.train + data.test
    store = _complete(dataset_folder(problem, count, data.seed, root))
    split = {"train": (0, data.train), "test": (data.train, count)}
    return store if store is not None and store.splits == split else None


def open_test_samples(
    recipe: Recipe,
    root: Path,
    *,
    samples: int | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> PointDataset:
    """The test samples of a recipe under its view; generated without the training samples where there are none.

    Args:
        recipe: whose data.
        root: the folder of generated datasets, where they are looked for and kept.
        samples: only the first so many.
        device: where to generate.
        say: told what generation will cost before it begins.
    """
    problem, data = _problem_of(recipe), recipe.data
    wanted = data.test if samples is None else samples
    if not 1 <= wanted <= data.test:
        raise InputError(f"1 to {data.test} test samples", str(wanted))
    store = whole_dataset(recipe, root)
    if store is not None:
        return PointDataset(store, data.view, range(data.train, data.train + wanted))
    base = dataset_folder(problem, data.train + data.test, data.seed, root)
    folders = [base.with_name(f"{base.name}-test{count}") for count in (data.test, wanted)]
    store = _complete(folders[0]) or _complete(folders[1])
    if store is None:
        what = f"{wanted:,} test sample{'s' * (wanted > 1)}"
        store = _made_alone(recipe, data.train, wanted, folders[1], what, device, say)
    return PointDataset(store, data.view, range(wanted))


def open_fresh_samples(
    recipe: Recipe,
    root: Path,
    samples: int,
    *,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> PointDataset:
    """Samples after the last test sample, under the view of the recipe: same problem and seed, in neither split.

    Args:
        recipe: whose problem.
        root: the folder of generated datasets, where they are looked for and kept.
        samples: their number.
        device: where to generate.
        say: told what generation will cost before it begins.
    """
    if samples < 1:
        raise InputError("at least one fresh sample", str(samples))
    problem, data = _problem_of(recipe), recipe.data
    first = data.train + data.test
    base = dataset_folder(problem, first, data.seed, root)
    folder = base.with_name(f"{base.name}-fresh{samples}")
    store = _complete(folder)
    if store is None:
        what = f"{samples:,} fresh sample{'s' * (samples > 1)}"
        store = _made_alone(recipe, first, samples, folder, what, device, say)
    return PointDataset(store, data.view)


def _made_alone(
    recipe: Recipe,
    first: int,
    count: int,
    folder: Path,
    what: str,
    device: torch.device | str,
    say: Callable[[str], None],
) -> Store:
    """Generate samples `first` to `first + count - 1` of a recipe's problem, without those before them."""
    problem, data = _problem_of(recipe), recipe.data
    say(f"Making {what} of {problem.card.title} in {folder} ({estimate(problem, count, data.storage) / 1e6:,.0f} MB).")
    store = generate(
        Tail(problem, first), count, seed=data.seed, folder=folder, splits={"test": (0, count)},
        device=device, batch=problem.cpu_batch if torch.device(device).type == "cpu" else None,
        part_size=_part_size(folder, problem, device), storage=data.storage, workers=None,
    )  # fmt: skip
    assert store is not None  # there is one shard
    return store


def open_split(
    recipe: Recipe,
    root: Path,
    split: Literal["train", "validation", "test"],
    *,
    own: Path | None = None,
    samples: int | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> PointDataset:
    """One split of a recipe's data; generated test samples are made alone if nobody made all.

    Args:
        recipe: whose data.
        root: the folder of generated datasets.
        split: the samples to train on, those of them that the recipe holds out for validation, or the test samples.
        own: a dataset to use instead of the recipe's own, or a file that can be imported.
        samples: only the first so many.
        device: where to generate.
        say: told what generation will cost before it begins.
    """
    if split == "test" and own is None and recipe.problem is not None:
        return open_test_samples(recipe, root, samples=samples, device=device, say=say)
    if split == "validation" and not recipe.data.validation:
        raise InputError(
            f"samples that recipe `{recipe.name}` holds out for validation",
            "data.validation 0",
            "Take the split test or train, or train with --data.validation COUNT",
        )
    data = open_data(recipe, root, own=own, device=device, say=say)
    found = train_and_test(data, recipe)[1] if split == "test" else train_and_scored(data, recipe)[split != "train"]
    return found if samples is None else found.subset(range(samples))


def open_own(path: Path, view: View | None = None) -> PointDataset:
    """Open a person's own dataset: a folder in our format, or an importable file or folder, read into memory."""
    foreign = path.is_file() or (path.is_dir() and not (path / SIDECAR).exists() and is_importable_folder(path))
    return load_file(path).with_view(view or View()) if foreign else PointDataset.open(path, view)


def remember_own(run: Path, own: Path) -> None:
    """Write the path of a person's own data into the run that is trained on them."""
    # Symbolic links stay: a link that is changed later leads to the data's new place.
    absolute = os.path.abspath(own)
    try:
        relative = Path(os.path.relpath(absolute, os.path.abspath(run))).as_posix()
    except ValueError:  # Windows, and another drive
        relative = None
    write_json(run / WHERE, to_json(Where(relative, absolute)))


def remembered_own(run: Path) -> Path | None:
    """The path of a person's own data that a run was trained on; None for generated data."""
    if not (run / WHERE).is_file():
        return None
    where = from_json(Where, read_json(run / WHERE), WHERE)
    places = [Path(where.absolute)]
    if where.relative is not None:
        # By name alone: behind a link, `..` would lead elsewhere.
        places.insert(0, Path(os.path.normpath(os.path.join(os.path.abspath(run), where.relative))))
    for place in places:
        if place.exists():
            return place
    raise InputError(
        f"the data that {run} was trained on, at {where.absolute}",
        "nothing there",
        "Say where they are now: --data FILE or FOLDER",
    )


def train_and_test(data: PointDataset, recipe: Recipe) -> tuple[PointDataset, PointDataset]:
    """The training and the test split: the dataset's own, or its first and last samples as the recipe counts them."""
    if {"train", "test"} <= data.splits.keys():
        return data.split("train"), data.split("test")
    train, test = recipe.data.train, recipe.data.test
    if len(data) < train + test:
        raise InputError(
            f"splits named train and test, or the {train} + {test} samples of recipe `{recipe.name}`",
            f"{len(data)} samples without splits",
            "Save it with splits, or set --data.train and --data.test",
        )
    return data.subset(range(train)), data.subset(range(len(data) - test, len(data)))


def train_and_scored(data: PointDataset, recipe: Recipe) -> tuple[PointDataset, PointDataset]:
    """The samples to train on, the first `data.limit` of them where the recipe has it, and those to score meanwhile.

    The second are the test samples or, where the recipe has `data.validation`, the last of the training samples, which
    the first then lack.
    """
    train, test = train_and_test(data, recipe)
    held_out, limit = recipe.data.validation, recipe.data.limit
    if held_out >= len(train):
        raise InputError(
            f"more than the {held_out:,} training samples that `data.validation` of recipe `{recipe.name}` holds out",
            f"{len(train):,}",
            "Set --data.validation to a smaller number",
        )
    first = len(train) - held_out
    if limit is not None and limit > first:
        raise InputError(
            f"at least the {limit:,} training samples of `data.limit` of recipe `{recipe.name}`", f"{first:,}",
            "Set --data.limit to a smaller number",
        )  # fmt: skip
    scored = train.subset(range(first, len(train))) if held_out else test
    return train if limit is None and not held_out else train.subset(range(limit or first)), scored


def _part_size(folder: Path, problem: Problem, device: torch.device | str) -> int:
    """Samples in a file: one batch on a CPU, so that little is lost and shown late; that of the folder if begun."""
    if (folder / SIDECAR).exists():
        return read_manifest(folder)[0].part_size
    return problem.cpu_batch if torch.device(device).type == "cpu" else 64


def _problem_of(recipe: Recipe) -> Problem:
    if recipe.problem is None:
        raise InputError(
            f"a problem in recipe `{recipe.name}`, by which its test samples can be made again",
            "data alone",
            "Keep such weights as a checkpoint of your own",
        )
    return recipe.problem.split_after(recipe.data.train)


def _complete(folder: Path) -> Store | None:
    with contextlib.suppress(InputError):  # nothing there, or not all of it yet
        return Store.open(folder)
    return None
