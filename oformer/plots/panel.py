"""What the figures of predictions are made of: a sample and what was said of it."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Sample
from oformer.metrics import relative_l2


@dataclass(frozen=True)
class Panel:
    """One sample and what was predicted for it, in physical units."""

    title: str  # "best", "median", "worst", or what makes this sample worth a look
    sample: Sample  # without a batch axis
    prediction: Float[Tensor, "times queries channels"]

    def __post_init__(self) -> None:
        if self.sample.target.ndim != 3:
            raise InputError(
                "one sample to draw",
                f"a target of shape {tuple(self.sample.target.shape)}",
                "Take one sample of the batch",
            )
        if self.prediction.shape != self.sample.target.shape:
            raise InputError(
                f"a prediction of the target's shape {tuple(self.sample.target.shape)}",
                str(tuple(self.prediction.shape)),
                "Predict at the sample's own query points",
            )

    def error(self, time: int, channel: int) -> float:
        """The relative L2 error of one frame and channel alone."""
        answer, truth = (v[None, time, None, :, channel, None].double() for v in (self.prediction, self.sample.target))
        return relative_l2(answer, truth, self.sample.query.weights[None].double()).item()


def check_dimension(panels: list[Panel], dim: int, advice: str) -> None:
    """Refuse an empty figure, and panels of a dimension that it cannot draw."""
    if not panels:
        raise InputError("at least one sample to draw", "none")
    for panel in panels:
        found = panel.sample.query.coords.shape[-1]
        if found != dim:
            raise InputError(f"samples of a {dim}-D problem to draw", f"{found} dimension(s)", advice)
