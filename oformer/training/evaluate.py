"""Errors of an operator on a split, in physical units: one table of them, and how they change with the input points."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.data.loader import Loader
from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.fields import Batch
from oformer.files import finite_json
from oformer.meshes.grids import thinning
from oformer.metrics import Resolution, channel_units, relative, relative_by_channel, squared
from oformer.models.operator import Operator
from oformer.problems.base import Problem
from oformer.training.distributed import ALONE, Ranks
from oformer.training.losses import Region


@dataclass(frozen=True)
class Errors:
    """The errors of every sample of a split, in its order."""

    relative: Float[Tensor, " samples"]  # relative L2 over the whole sequence and all channels, each in its own unit
    by_step: Float[Tensor, "samples times"]  # relative L2 of each step
    squared: Float[Tensor, "samples channels"]  # mean squared error
    batch: int  # how many were predicted at once
    momentum: Float[Tensor, "samples 3"] | None = None  # in the loss's region: error, relative, and times density
    scale: Float[Tensor, " channels"] | None = (
        None  # the operator's units of the target, where they are the same anywhere
    )


@dataclass(frozen=True)
class Momentum:
    """Errors of density times velocity in a region, over both components and all steps.

    A root of a mean over several samples is larger than the mean of their roots, by half where samples differ as much
    as flows around an airfoil: so it matters that the released code takes the root for each batch.
    """

    rmse: float  # physical units, the root of the mean over all samples
    relative: float  # of a sample, over the root mean square of its momentum there; the mean over samples
    # The released code's figure: the error of density times momentum, since the published fields hold momentum already
    # and were multiplied again; root mean square of each batch, mean over batches.
    as_released: float


@dataclass(frozen=True)
class Scores:
    """What is reported of a split: relative L2 errors, and mean squared errors per channel."""

    count: int
    error: float  # the true mean over samples
    median: float
    worst: float
    worst_sample: int
    batch_mean: float  # the released code's figure: the mean of batch means, in which a short last batch weighs more
    by_step: list[float]
    mean_squared: list[float]
    mean_squared_scaled: list[float] | None = (
        None  # in the operator's units: what the paper reports of Poisson problems
    )
    momentum: Momentum | None = None

    @classmethod
    def of(cls, content: dict[str, Any]) -> "Scores":
        """From what `to_json` or `dataclasses.asdict` made of them."""
        optional = ("mean_squared_scaled", "momentum")
        known = {n: value if value is None and n in optional else _number(value) for n, value in content.items()}
        momentum = known.get("momentum")
        if momentum is not None and "as_released" not in momentum:  # older files had means of roots in its place
            momentum = None
        return cls(**{**known, "momentum": Momentum(**momentum) if momentum else None})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: a number that is not finite is null."""
        return finite_json(dataclasses.asdict(self))


def _number(content: Any) -> Any:
    """NaN in place of each null of a JSON content."""
    if isinstance(content, dict):
        return {name: _number(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_number(value) for value in content]
    return math.nan if content is None else content


def errors(
    operator: Operator | Plain,
    dataset: PointDataset,
    batch: int = 16,
    problem: Problem | None = None,
    average: int = 1,
    region: Region | None = None,
    ranks: Ranks = ALONE,
) -> Errors:
    """Predict every sample of the dataset and compare, on the device where the operator lives.

    Args:
        operator: trained, or a runner of it.
        dataset: whose samples are predicted.
        batch: samples at once.
        problem: whose symmetries are averaged over.
        average: over how many of them; 1 is the plain prediction.
        region: where to measure the momentum, if anywhere.
        ranks: who share the work; each returns the errors of all samples.
    """
    rank, world = ranks.share
    runner = _runner(operator)
    device = runner.operator.origin.device
    with Loader(dataset, batch, seed=0, device=device, rank=rank, world=world, shuffle=False) as loader:
        return errors_of(runner, loader, problem, average, region, ranks)


@torch.no_grad()
def errors_of(
    operator: Operator | Plain,
    loader: Loader,
    problem: Problem | None = None,
    average: int = 1,
    region: Region | None = None,
    ranks: Ranks = ALONE,
) -> Errors:
    """`errors` with a loader that is kept from one evaluation to the next; it gives each rank its share."""
    if average != 1 and problem is None:
        raise InputError("a problem whose symmetries are known for an average over them", "data alone")

    runner = _runner(operator)

    def predict(part: Batch) -> Tensor:
        ours = ranks.our_points(part)
        with ranks.points_together():
            prediction = runner(ours.input, ours.query, part.target.shape[1])
        return ranks.all_points(prediction, part.query.points)

    dataset, was_training = loader.dataset, runner.operator.training
    runner.operator.eval()
    rows = []
    try:
        # A compiled model would be compiled once more for a short last batch.
        for part in loader.epoch(filled=runner.compiles):
            prediction = predict(part) if problem is None or average == 1 else problem.averaged(predict, part, average)
            fields = (prediction - part.target, part.target)
            found = [squared(values, part.query.weights).flatten(1) for values in fields]
            if region is not None:
                found.append(_momentum(region, prediction, part))
            rows.append(torch.cat(found, 1))
    finally:
        runner.operator.train(was_training)
    indices, (_, world) = loader.epoch_indices(), ranks.share
    shape = dataset.spec.out_times, dataset.spec.out_channels
    widths = [math.prod(shape), math.prod(shape), 0 if region is None else 3]
    table = torch.zeros(len(dataset), sum(widths), dtype=torch.float64)
    if rows:  # of few samples a rank may have none
        table[indices] = torch.cat(rows)[: len(indices)].double().cpu()
    if world > 1:  # each row is zero on all ranks but one
        table = ranks.sum(table)
    error, size, momentum = table.split(widths, 1)
    error, size = error.unflatten(1, shape), size.unflatten(1, shape)
    unit = channel_units(size)
    scale = runner.operator.target_scale.scale
    return Errors(
        relative=relative_by_channel(error, size),
        by_step=relative((error / unit).sum(2), (size / unit).sum(2)),
        squared=error.mean(1),
        batch=loader.batch,
        momentum=None if region is None else momentum,
        scale=scale.double().cpu() if scale.ndim == 1 else None,
    )


def _momentum(region: Region, prediction: Tensor, part: Batch) -> Float[Tensor, "batch 3"]:
    """The root mean square error of each sample, the same relative to its momentum, and times density."""
    weights = region.weights(part.query)
    said, true = region.momentum(prediction), region.momentum(part.target)

    def size(values: Tensor) -> Tensor:
        return squared(values, weights).mean((1, 2)).sqrt()

    rmse = size(said - true)
    if region.density is None:
        again = rmse
    else:
        again = size(said * prediction[..., region.density, None] - true * part.target[..., region.density, None])
    return torch.stack([rmse, rmse / size(true), again], 1)


def evaluate(
    operator: Operator | Plain,
    dataset: PointDataset,
    batch: int = 16,
    problem: Problem | None = None,
    average: int = 1,
    region: Region | None = None,
    ranks: Ranks = ALONE,
) -> Scores:
    """The scores of an operator on a dataset; see `errors`."""
    return summarize(errors(operator, dataset, batch, problem, average, region, ranks))


def summarize(errors: Errors) -> Scores:
    """The numbers to report."""
    error = errors.relative
    return Scores(
        count=len(error),
        error=error.mean().item(),
        median=error.median().item(),
        worst=error.max().item(),
        worst_sample=int(error.argmax()),
        batch_mean=torch.stack([part.mean() for part in error.split(errors.batch)]).mean().item(),
        by_step=errors.by_step.mean(0).tolist(),
        mean_squared=errors.squared.mean(0).tolist(),
        mean_squared_scaled=None if errors.scale is None else (errors.squared.mean(0) / errors.scale**2).tolist(),
        momentum=None if errors.momentum is None else _near(errors.momentum, errors.batch),
    )


def _near(momentum: Float[Tensor, "samples 3"], batch: int) -> Momentum:
    error, share, again = momentum.unbind(1)
    batches = [part.square().mean().sqrt() for part in again.split(batch)]
    return Momentum(
        rmse=error.square().mean().sqrt().item(),
        relative=share.mean().item(),
        as_released=torch.stack(batches).mean().item(),
    )


def resolution_sweep(
    operator: Operator | Plain,
    dataset: PointDataset,
    shares: Sequence[float] = (0.3,),
    batch: int = 16,
    trained_error: float | None = None,
) -> list[Resolution]:
    """Errors at half, once and twice the trained resolution, and from random shares of the input points.

    Rows that the stored data cannot give (no finer grid, scattered points) or the model cannot read are left out.

    Args:
        operator: trained, or a runner of it.
        dataset: the test split, under the view it was trained on.
        shares: of the input points, in (0, 1).
        batch: samples at once.
        trained_error: the mean error on the dataset as it is, where it was measured already.
    """
    rows, runner = [], _runner(operator)
    # Coarser and finer grids, as far as the stored one holds them.
    trained, full = dataset.spec.grid, dataset.source_spec.grid
    if trained is not None and full is not None:
        for factor in (0.5, 1.0, 2.0):
            points = tuple(round(n * factor) for n in trained)
            if factor != 1.0:
                try:
                    thinning(full, points, dataset.spec.periods is not None)
                except InputError:
                    continue
            seen = dataset.with_view(dataclasses.replace(dataset.view, points=points))
            if not _readable(runner, seen):
                continue
            if factor == 1.0 and trained_error is not None:
                error = trained_error
            else:
                error = evaluate(runner, seen, batch).error
            label = " x ".join(map(str, points)) + " points"
            kind = "trained" if factor == 1.0 else "resolution"
            rows.append(Resolution(label, math.prod(points), error, kind))
    # Random points.
    for share in shares:
        view = dataclasses.replace(dataset.view, keep=share)
        sparse = dataset.with_view(view)
        if not _readable(runner, sparse):
            continue
        scores = evaluate(runner, sparse, batch)
        rows.append(Resolution(f"{share:.0%} of the input points", sparse[0].input.points, scores.error, "sparse"))
    return rows


def _runner(operator: Operator | Plain) -> Plain:
    """The runner itself, or one for the operator."""
    return operator if isinstance(operator, Plain) else Plain(operator)


def _readable(runner: Plain, dataset: PointDataset) -> bool:
    """Whether the model reads such points."""
    try:
        runner.operator.model.check(dataset[0].input.batched(), dataset[0].query.batched())
    except InputError:
        return False
    return True


@contextlib.contextmanager
def watched(operator: Operator, total: int | None, say: Callable[[str], None], every: float = 10.0) -> Iterator[None]:
    """Say now and then how many samples an operator has predicted.

    Args:
        operator: whose calls are counted.
        total: samples in all, if known.
        say: told.
        every: so many seconds.
    """
    done, last = 0, time.monotonic()

    def count(module: torch.nn.Module, arguments: Any, values: Tensor) -> None:
        nonlocal done, last
        done += len(values)
        if time.monotonic() - last >= every:
            last = time.monotonic()
            say(f"Predicted {done:,}{f' of {total:,}' if total else ''} samples")

    handle = operator.register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()
