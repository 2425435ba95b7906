"""Sizes, steps and a recipe for data of one's own, chosen from the data and from the speed of the machine."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.models import ModelConfig, OFormerConfig, SuperpositionConfig
from oformer.models.oformer import Decoder, Encoder, Query
from oformer.nn.attention import AttentionKind
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Data, Recipe, Training

TIMED_STEPS = 6  # enough to see past the slow first ones
MOST_STEPS = 100_000  # that a time budget is filled with
FEW_STEPS = 1000  # with fewer, a small model comes further
SMALL = (48, 2)  # width and depth of one
FEW_QUERIES = 64  # of a sample, which a step predicts at least
POINTS_AT_ONCE = 32_768  # in a batch, input points and queries times frames together: bounds memory


@dataclass(frozen=True)
class Sizes:
    """Size of a model and length of its training: chosen from the data, or told."""

    width: int
    depth: int
    batch: int
    steps: int
    attention: AttentionKind
    rate: float
    linear: tuple[int, ...] = ()  # input channels in which the answer is to be linear; none: an OFormer

    def model(self, dim: int, points: float) -> ModelConfig:
        """The library's defaults for one's own data, at this size.

        Args:
            dim: of space.
            points: mean number of input points of a sample.
        """
        # The finest wave has four points; there is a frequency for each pair of channels along an axis.
        modes = min(max(4, round(points ** (1 / dim) / 2)), self.width // (2 * dim))
        if self.linear:
            return SuperpositionConfig(linear=self.linear, width=self.width, depth=self.depth, modes=modes)
        # Rotary encoding turns pairs of channels along each axis, within each head.
        heads = next((n for n in (4, 2) if self.width % (2 * dim * n) == 0), 1)
        return OFormerConfig(
            attention=self.attention,
            rotary="uniform",
            rotary_modes=modes,
            encoder=Encoder(width=self.width, depth=self.depth, multipliers=(1.0,)),
            query=Query(
                width=self.width, fourier_features=self.width, hidden=(self.width,), heads=heads, multiplier=1.0
            ),
            decoder=Decoder(hidden=(max(2, self.width // 2),)),
        )

    def training(self, seed: int, queries: float = 1.0) -> Training:
        """One cycle of the learning rate over all steps, evaluated five times.

        Args:
            seed: of the training.
            queries: share of the query points that a step predicts.
        """
        return Training(
            steps=self.steps,
            batch=self.batch,
            queries=queries,
            optimizer=Optimizer(kind="muon", rate=self.rate, matrix_rate=2 * self.rate, clip=(("all", 1.0),)),
            evaluate_every=max(1, self.steps // 5),
            checkpoint_every=self.steps,
            log_every=max(1, self.steps // 10),
            seed=seed,
        )

    def recipe(self, name: str, learned: PointDataset, held: int, seed: int) -> Recipe:
        """A recipe of these sizes for samples of one's own.

        Args:
            name: of the recipe.
            learned: the samples to learn from.
            held: number of samples to test with.
            seed: of the training.
        """
        points, queries = learned.sizes().mean(0).tolist()
        # In time the cost of a step is at the queries, frame after frame: a quarter of them is as good a sample.
        share = min(1.0, max(0.25, FEW_QUERIES / queries)) if learned.spec.out_times > 1 else 1.0
        model = self.model(learned.spec.dim, points)
        return Recipe(name, Data(len(learned), held), model, self.training(seed, share))


def sizes_for(
    data: PointDataset,
    *,
    width: int | None = None,
    depth: int | None = None,
    batch: int | None = None,
    steps: int | None = None,
    attention: AttentionKind = "galerkin",
    rate: float = 1e-3,
    linear: tuple[int, ...] = (),
) -> Sizes:
    """Sizes from the number of samples, points and frames, where they are not told.

    Few samples teach a small model as much as a large one, and a linear map takes fewer weights. Widths that are
    multiples of 48 suit all dimensions.

    Args:
        data: the samples to learn from.
        width: channels of the model.
        depth: attention blocks of its encoder.
        batch: samples per step, no more than there are.
        steps: training steps.
        attention: of the model.
        rate: the peak learning rate.
        linear: input channels in which the answer is to be linear.
    """
    count, (points, queries) = len(data), data.sizes().max(0)
    work = int(points) + int(queries) * data.spec.out_times
    small = count < (1000 if linear else 50)
    wanted = 8 if count < 256 or linear else 16
    batch = batch or max(1, min(wanted, count, POINTS_AT_ONCE // work))
    return Sizes(
        width=width or (SMALL[0] if small else 96 if count < 4000 else 144),
        depth=depth or (SMALL[1] if small else 4),
        batch=min(batch, count),
        # Sixty looks at each sample, within what a person waits for.
        steps=steps or min(20_000, max(1000, 60 * count // batch)),
        attention=attention,
        rate=rate,
        linear=linear,
    )


def recipe_for(
    data: PointDataset,
    name: str,
    *,
    sizes: Callable[[PointDataset], Sizes] = sizes_for,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Recipe:
    """A recipe for a dataset of one's own, with sizes and steps chosen from it.

    Args:
        data: with splits named train and test; without them the last samples are for testing.
        name: of the recipe.
        sizes: chooses them from the samples to learn from.
        test_fraction: share of the samples for testing where there are no splits, at least one.
        seed: of the training.
    """
    if {"train", "test"} <= data.splits.keys():
        learned, held = data.split("train"), len(data.split("test"))
    else:
        held = max(1, round(test_fraction * len(data)))
        if held >= len(data):
            raise InputError("at least two samples, one to learn from and one to test", str(len(data)))
        learned = data.subset(range(len(data) - held))
    return sizes(learned).recipe(name, learned, held, seed)


def planned(
    sizes: Sizes,
    small: Sizes,
    data: tuple[PointDataset, PointDataset],
    *,
    deadline: float | None,
    most: int,
    seed: int,
    device: torch.device,
    folder: Path,
) -> tuple[Sizes, float]:
    """Sizes with as many steps as fit before a deadline at the measured speed, and the steps per second.

    Args:
        sizes: to be trained; without a deadline they stay as they are.
        small: taken in their place where few steps fit, because a small model then gets further.
        data: to learn from and to test with.
        deadline: by the clock of `time.monotonic`.
        most: steps, however much time there is.
        seed: of the training.
        device: where to train.
        folder: for the runs that are timed.
    """
    recipe = sizes.recipe("timed", data[0], len(data[1]), seed)
    speed = _steps_per_second(recipe, data, device, folder / f"timed-{sizes.width}-{sizes.depth}")
    if deadline is None:
        return sizes, speed
    room = max(1, int((deadline - time.monotonic()) * speed))
    if room < min(FEW_STEPS, most) and small != sizes:
        return planned(small, small, data, deadline=deadline, most=most, seed=seed, device=device, folder=folder)
    return dataclasses.replace(sizes, steps=min(room, most)), speed


def _steps_per_second(
    recipe: Recipe, data: tuple[PointDataset, PointDataset], device: torch.device, folder: Path
) -> float:
    """Speed of a few steps, whose weights are thrown away."""
    timed = dataclasses.replace(recipe.training, steps=TIMED_STEPS, log_every=2, evaluate_every=TIMED_STEPS)
    recipe = dataclasses.replace(recipe, training=timed)
    outcome = train(recipe, folder, data, device=device, quiet=True, tensorboard=False)
    if not outcome.finished:
        raise KeyboardInterrupt
    speeds = [record["steps_per_second"] for record in read_journal(folder) if record["kind"] == "train"]
    return float(np.mean(speeds[1:]))


def words_on_data(learned: PointDataset, held: int, names: tuple[str, ...]) -> str:
    """Number and shape of the samples, in a line.

    Args:
        learned: the samples to learn from.
        held: number of samples that are held out.
        names: of the parameters among the input channels.
    """
    spec, sizes = learned.spec, learned.sizes()
    low, high = sizes[:, 0].min(), sizes[:, 0].max()
    frames = "steady" if spec.in_times == spec.out_times == 1 else f"{spec.in_times} to {spec.out_times} frames"
    shown = f" and {', '.join(names)}" if names else ""
    return (
        f"Data: {len(learned):,} samples to learn from, {held:,} held out; {spec.dim}-D, "
        f"{low:,}{f' to {high:,}' if high > low else ''} input points, {frames}, "
        f"channels {spec.in_channels - len(names)}{shown} to {spec.out_channels}."
    )


def words_on_plan(sizes: Sizes, speed: float, device: torch.device) -> str:
    """Size, steps and duration of a training, in a line.

    Args:
        sizes: as planned.
        speed: steps per second.
        device: where to train.
    """
    seconds = sizes.steps / speed
    duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    model = f"linear={sizes.linear}" if sizes.linear else f"attention={sizes.attention!r}"
    return (
        f"Plan: width={sizes.width}, depth={sizes.depth}, {model}, steps={sizes.steps}, "
        f"batch_size={sizes.batch}; about {duration} on {device} at {speed:.3g} steps/s. Give any of these, or "
        "minutes=, to change it."
    )
