"""What a trained operator can do beyond its training grid."""

import dataclasses
import math
from collections.abc import Sequence

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
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

    Rows that the stored data cannot give (no finer grid, scattered points) are left out.

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
            if factor == 1.0 and trained_error is not None:
                error = trained_error
            else:
                view = dataclasses.replace(dataset.view, points=points)
                error = evaluate(operator, dataset.with_view(view), batch).error
            label = " x ".join(map(str, points)) + " points"
            kind = "trained" if factor == 1.0 else "resolution"
            rows.append(Resolution(label, math.prod(points), error, kind))
    for share in shares:
        view = dataclasses.replace(dataset.view, keep=share)
        sparse = dataset.with_view(view)
        scores = evaluate(operator, sparse, batch)
        rows.append(Resolution(f"{share:.0%} of the input points", sparse[0].input.points, scores.error, "sparse"))
    return rows
