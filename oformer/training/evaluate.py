"""One table of errors for a split, in physical units."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.data.loader import Loader
from oformer.errors import InputError
from oformer.fields import Batch
from oformer.metrics import mean_squared_error, relative_l2, relative_l2_by_step
from oformer.models.base import Operator
from oformer.problems.base import Problem


@dataclass(frozen=True)
class Errors:
    """The errors of every sample of a split, in its order."""

    relative: Float[Tensor, " samples"]  # relative L2 over the whole sequence
    by_step: Float[Tensor, "samples times"]  # relative L2 of each step
    squared: Float[Tensor, "samples channels"]  # mean squared error
    batch: int  # how many were predicted at once


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


@torch.no_grad()
def errors(
    operator: Operator, dataset: PointDataset, batch: int = 16, problem: Problem | None = None, average: int = 1
) -> Errors:
    """Predict every sample of the dataset and compare, on the device where the operator lives.

    Args:
        operator: trained.
        dataset: whose samples are predicted.
        batch: samples at once.
        problem: whose symmetries are averaged over.
        average: over how many of them; 1 is the plain prediction.
    """
    if average != 1 and problem is None:
        raise InputError("a problem whose symmetries are known for an average over them", "data alone")

    def predict(part: Batch) -> Tensor:
        return operator(part.input, part.query, part.target.shape[1])

    device = next(operator.parameters()).device
    was_training = operator.training
    operator.eval()
    relative, by_step, squared = [], [], []
    try:
        with Loader(dataset, batch, seed=0, device=device, shuffle=False) as loader:
            for part in loader.epoch():
                if problem is None or average == 1:
                    prediction = predict(part)
                else:
                    prediction = problem.averaged(predict, part, average)
                relative.append(relative_l2(prediction, part.target, part.query.weights))
                by_step.append(relative_l2_by_step(prediction, part.target, part.query.weights))
                squared.append(mean_squared_error(prediction, part.target, part.query.weights))
    finally:
        operator.train(was_training)
    return Errors(*(torch.cat(parts).double().cpu() for parts in (relative, by_step, squared)), batch=batch)


def evaluate(
    operator: Operator, dataset: PointDataset, batch: int = 16, problem: Problem | None = None, average: int = 1
) -> Scores:
    """The scores of an operator on a dataset; see `errors`."""
    return summarize(errors(operator, dataset, batch, problem, average))


def summarize(errors: Errors) -> Scores:
    """The numbers to report."""
    relative = errors.relative
    return Scores(
        count=len(relative),
        error=relative.mean().item(),
        median=relative.median().item(),
        worst=relative.max().item(),
        worst_sample=int(relative.argmax()),
        batch_mean=torch.stack([part.mean() for part in relative.split(errors.batch)]).mean().item(),
        by_step=errors.by_step.mean(0).tolist(),
        mean_squared=errors.squared.mean(0).tolist(),
    )
