"""What a trained operator can do beyond its training grid, and which samples it predicts worst."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.fields import Card, Sample
from oformer.meshes.grids import thinning
from oformer.models import Operator
from oformer.plots.lines import Resolution
from oformer.training.evaluate import evaluate


def resolution_sweep(
    operator: Operator,
    dataset: PointDataset,
    shares: Sequence[float] = (0.3,),
    batch: int = 16,
    trained_error: float | None = None,
) -> list[Resolution]:
    """Errors at half, once and twice the trained resolution, and from random shares of the input points.

    Rows that the stored data cannot give (no finer grid, scattered points) or the model cannot read are left out.

    Args:
        operator: trained.
        dataset: the test split, under the view it was trained on.
        shares: of the input points, in (0, 1).
        batch: samples at once.
        trained_error: the mean error on the dataset as it is, where it was measured already.
    """
    rows = []
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
            if not _readable(operator, seen):
                continue
            if factor == 1.0 and trained_error is not None:
                error = trained_error
            else:
                error = evaluate(operator, seen, batch).error
            label = " x ".join(map(str, points)) + " points"
            kind = "trained" if factor == 1.0 else "resolution"
            rows.append(Resolution(label, math.prod(points), error, kind))
    for share in shares:
        view = dataclasses.replace(dataset.view, keep=share)
        sparse = dataset.with_view(view)
        if not _readable(operator, sparse):
            continue
        scores = evaluate(operator, sparse, batch)
        rows.append(Resolution(f"{share:.0%} of the input points", sparse[0].input.points, scores.error, "sparse"))
    return rows


def _readable(operator: Operator, dataset: PointDataset) -> bool:
    """Whether the model reads such points."""
    try:
        operator.model.check(dataset[0].input.batched(), dataset[0].query.batched())
    except InputError:
        return False
    return True


@dataclass(frozen=True)
class Trait:
    """A property of samples beside the errors on them."""

    name: str
    correlation: float  # Spearman's rank correlation with the error, over all samples
    typical: float  # median of the property over all samples
    worst: float  # median of the property over the worst samples


def worst_count(samples: int) -> int:
    """The number of samples that are called the worst: one in a hundred, at least one."""
    return max(1, samples // 100)


def traits(dataset: PointDataset, errors: Float[Tensor, " samples"]) -> list[Trait]:
    """Simple properties of the samples beside the errors; first the one that tells the worst samples from the others.

    Properties that are the same in all samples are left out.

    Args:
        dataset: the samples, under the view through which they were predicted.
        errors: of each.
    """
    table = [properties(sample, dataset.card, dataset.spec.grid) for sample in dataset]
    worst = errors.topk(worst_count(len(errors))).indices
    error_ranks, found = _ranks(errors), []
    for name in table[0]:
        values = torch.tensor([row[name] for row in table], dtype=torch.float64)
        ranks = _ranks(values)
        if ranks.min() == ranks.max():
            continue
        correlation = torch.corrcoef(torch.stack([ranks, error_ranks]))[0, 1].item()
        apart = (ranks[worst].mean() - ranks.mean()).abs().item()
        found.append((apart, Trait(name, correlation, values.median().item(), values[worst].median().item())))
    return [trait for _, trait in sorted(found, key=lambda item: -item[0])]


def properties(sample: Sample, card: Card, grid: tuple[int, ...] | None) -> dict[str, float]:
    """Size, slope and length scale of the last input frame and of the last target frame, by name.

    Args:
        sample: one.
        card: the names of its channels, and which of them to measure: those that pictures show.
        grid: of input and queries; slopes are measured on a grid alone.
    """
    picture, found = card.picture, {}
    for field, names, channel, values in (
        (sample.input, card.inputs or ("input",), picture.input, sample.input.values),
        (sample.query, card.targets or ("target",), picture.target, sample.target),
    ):
        name, known = names[channel], values[-1, :, channel].double()
        found[f"largest magnitude of {name}"] = known.abs().max().item()
        found[f"root mean square of {name}"] = known.square().mean().sqrt().item()
        if grid is not None and field.points == math.prod(grid):
            steepest = _steepest(known.view(grid), field.coords.double().view(*grid, len(grid)))
            found[f"steepest slope of {name}"] = steepest
            found[f"shortest length of {name} (range / steepest slope)"] = (
                (known.max() - known.min()).item() / steepest if steepest else math.inf
            )
    return found


def _steepest(values: Float[Tensor, "*grid"], coords: Float[Tensor, "*grid dim"]) -> float:
    """The largest difference between neighbors on a grid, over their distance."""
    slopes = (values.diff(dim=axis) / coords[..., axis].diff(dim=axis) for axis in range(values.ndim))
    return max(slope.abs().max().item() for slope in slopes)


def _ranks(values: Float[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Ranks from the smallest value on; equal values share the mean of theirs."""
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[places].double()
