"""`oformer generate`: the dataset of a recipe or a problem."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from oformer.cli.options import (
    Count,
    CountOrNone,
    Device,
    Name,
    check_numbers,
    is_first_rank,
    normalize_flags,
    torch_device,
)
from oformer.errors import InputError
from oformer.terminal import say


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
        """Make the dataset, or the share of it that this process makes."""
        from oformer.data.generate import estimate, first_and_last, generate
        from oformer.experiments.recipes import problem_named
        from oformer.training.find_data import dataset_folder

        settings, data = problem_named(self.name)
        problem = tyro.cli(
            type(settings),
            default=settings,
            args=normalize_flags(rest, settings),
            prog=f"oformer generate {self.name}",
        )
        check_numbers(problem)
        count = self.count if self.count is not None else data.train + data.test
        train, test = (data.train, data.test) if self.count is None else (None, None)
        if self.train is not None:
            train, test = self.train, None
        seed = self.seed if self.seed is not None else data.seed
        storage = self.storage or data.storage
        splits = first_and_last(count, train, test)
        problem = problem.split_after(splits["train"][1]) if "train" in splits else problem
        folder = self.out or dataset_folder(problem, count, seed, Path("datasets"))
        if is_first_rank():
            say(f"{count:,} samples of {problem.card.title}, about {estimate(problem, count, storage) / 1e6:,.0f} MB.")
        store = generate(
            problem, count, seed=seed, folder=folder, splits=splits, device=torch_device(self.device),
            batch=self.batch, shard=_shard(self.shard), storage=storage, workers=self.workers,
        )  # fmt: skip
        if store is None:
            say(f"This share of {folder} is made; the others are still missing.")
        else:
            say(f"{folder} is complete. Look at it: oformer inspect {folder}")
        return 0


def _shard(text: str | None) -> tuple[int, int]:
    """Parse `i/n`; by default the rank of this process and the number of ranks, as torchrun sets them."""
    if text is None:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        i, n = (int(part) for part in text.split("/"))
    except ValueError:
        raise InputError("a shard i/n such as 0/4", text) from None
    return i, n
