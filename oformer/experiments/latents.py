"""What the encoder knows of a quantity that no operator was told (paper, section 4.2 and Figure 6).

The latents at the input points are all that queries ever see of the input. A linear map that finds a recorded parameter
in them, on samples that it was not fitted to, shows that the encoder computed the parameter.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.errors import InputError, unknown_name
from oformer.fields import Batch, collate
from oformer.files import write_json
from oformer.models import Operator
from oformer.plots.studies import parameter_in_latents
from oformer.plots.style import save_figure

DECADE = 10.0  # a positive parameter that spans more than this factor is regressed by its logarithm


@dataclass(frozen=True)
class LatentStudy:
    """A parameter in the mean-pooled latents of an operator: principal components, and a linear regression."""

    name: str  # of the parameter, behind log10 where the values below are its logarithms
    channels: int  # of the latents
    r2: float  # of the regression, on the test samples; 1 is perfect, 0 no better than the mean
    variance: tuple[float, ...]  # the share of each principal component, the largest first
    components: tuple[tuple[float, float], ...]  # the first two of each training sample
    trained: tuple[float, ...]  # the parameter of each training sample
    predicted: tuple[float, ...]  # by the regression, for each test sample
    true: tuple[float, ...]  # the parameter of each test sample

    def write(self, folder: Path) -> list[Path]:
        """Write latents.json and latents.png into a folder."""
        numbers, picture = folder / "latents.json", folder / "latents.png"
        write_json(numbers, dataclasses.asdict(self))
        dots, regression = (self.components, self.trained, self.variance), (self.true, self.predicted, self.r2)
        save_figure(picture, parameter_in_latents(self.name, dots, regression))
        return [numbers, picture]


def study_latents(
    operator: Operator,
    train: PointDataset,
    test: PointDataset,
    parameter: str | None = None,
    logarithm: bool | None = None,
) -> LatentStudy:
    """Regress a recorded parameter on mean-pooled latents of training samples, and predict it for test samples.

    Args:
        operator: trained; any model.
        train: the samples that principal components and regression are fitted to.
        test: the samples that the regression is measured on.
        parameter: a recorded parameter of the samples; by default the only one that varies.
        logarithm: whether to regress log10 of it; by default where it is positive and spans more than a decade.
    """
    (seen, before), (asked, after) = pooled(operator, train), pooled(operator, test)
    if seen.shape[1] < 2:
        raise InputError("latents of at least 2 channels", f"{seen.shape[1]}", "This model encodes nothing")
    name = _chosen(before, parameter)
    fitted, true = before[name], after[name]
    low, high = torch.cat([fitted, true]).aminmax()
    if logarithm and low <= 0:
        raise InputError(f"a positive `{name}` for its logarithm", f"{low:g}", "Leave the logarithm out")
    if logarithm or (logarithm is None and low > 0 and high > DECADE * low):
        name, fitted, true = f"log10 {name}", fitted.log10(), true.log10()
    if len(seen) <= seen.shape[1] + 1:
        raise InputError(
            f"more training samples than the {seen.shape[1]} channels of the latents and a constant",
            f"{len(seen)}",
            "Give more samples: with fewer, a linear map fits anything",
        )
    predicted = linear_map(seen, fitted)(asked)
    components, variance = principal_components(seen)
    return LatentStudy(
        name=name,
        channels=seen.shape[1],
        r2=r_squared(predicted, true),
        variance=tuple(variance.tolist()),
        components=tuple((a, b) for a, b in components[:, :2].tolist()),
        trained=tuple(fitted.tolist()),
        predicted=tuple(predicted.tolist()),
        true=tuple(true.tolist()),
    )


def _chosen(recorded: dict[str, Tensor], parameter: str | None) -> str:
    """The parameter of that name, or the only one that varies."""
    varying = [name for name, values in recorded.items() if values.min() < values.max()]
    if parameter is None and len(varying) != 1:
        wanted = "one recorded parameter that varies from sample to sample"
        raise InputError(wanted, ", ".join(varying) or "none", "Name it")
    if parameter is not None and parameter not in varying:
        raise unknown_name("recorded parameter that varies", parameter, varying)
    return parameter or varying[0]


def encoded(operator: Operator, data: PointDataset, batch: int = 16) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of a dataset in its order, and what the encoder makes of them: (batch, points, ..., channels)."""
    device = operator.origin.device
    for first in range(0, len(data), batch):
        part = collate([data[i] for i in range(first, min(first + batch, len(data)))])
        with torch.no_grad():
            known, _ = operator.normalized(part.input.to(device), part.query.to(device))
            latents = operator.model.encode(known)
        yield part, latents


def pooled(
    operator: Operator, data: PointDataset, batch: int = 16
) -> tuple[Float[Tensor, "samples channels"], dict[str, Float[Tensor, " samples"]]]:
    """Latents averaged over the points of each sample, in float64 on the CPU, and the recorded parameters.

    Points count by their quadrature weights; latents at other points than those of the input count equally.

    Args:
        operator: in evaluation mode.
        data: its samples.
        batch: samples encoded at once.
    """
    rows, parameters = [], []
    for part, latents in encoded(operator, data, batch):
        z, weights = latents.double().cpu(), part.input.weights.double()
        z = torch.einsum("bp,bp...->b...", weights, z) if z.shape[1] == weights.shape[1] else z.mean(1)
        rows.append(z.flatten(1, -2).mean(1) if z.ndim > 2 else z)
        parameters.append(part.parameters)
    return torch.cat(rows), {name: torch.cat([p[name].double() for p in parameters]) for name in parameters[0]}


def linear_map(
    latents: Float[Tensor, "samples channels"], values: Float[Tensor, " samples"]
) -> Callable[[Float[Tensor, "others channels"]], Float[Tensor, " others"]]:
    """The affine map from latents to values by least squares; of latents that are not independent, the smallest."""
    shift, scale = latents.mean(0), latents.std(0)
    scale = torch.where(scale > 1e-12 * scale.max(), scale, torch.inf)  # a constant channel says nothing
    centered = (latents - shift) / scale
    weights = torch.linalg.lstsq(centered, (values - values.mean())[:, None], driver="gelsd").solution[:, 0]
    return lambda others: (others - shift) / scale @ weights + values.mean()


def principal_components(
    latents: Float[Tensor, "samples channels"],
) -> tuple[Float[Tensor, "samples components"], Float[Tensor, " components"]]:
    """The coordinates of samples along principal directions, and the share of the variance of each direction."""
    centered = latents - latents.mean(0)
    _, sizes, directions = torch.linalg.svd(centered, full_matrices=False)
    return centered @ directions.T, sizes.square() / sizes.square().sum().clamp_min(torch.finfo(sizes.dtype).tiny)


def r_squared(predicted: Float[Tensor, " samples"], true: Float[Tensor, " samples"]) -> float:
    """The share of the variance that a prediction explains."""
    return float(1 - (predicted - true).square().sum() / (true - true.mean()).square().sum())
