"""The sensors and the resolution that the page begins with, so that its first answer comes at once.

Additions and multiplications in matrix products are counted on six small questions. They are a polynomial of second
degree in the numbers of sensors and of queries, whatever the attention, so that these six say what any other costs.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from oformer.fields import Field
from oformer.playground.scenes.base import Scene
from oformer.predict import Predictor

AT_ONCE = 5.5e10  # operations: half a second on two cores, more where the matrices are small
SIZES = ((1, 1), (9, 1), (17, 1), (1, 9), (1, 17), (9, 9))  # sensors and queries of the questions that are counted
SHARES = (1.0, 0.5, 0.25, 0.1)  # of sensors on a mesh, where there is nothing regular to leave out

Count = Callable[[int, int], float]


@dataclass(frozen=True)
class Start:
    """The sensors and the resolution that the page begins with."""

    stride: int
    share: float
    resolution: int
    operations: float
    full: float  # operations with all sensors of training, at the usual resolution

    @property
    def reduced(self) -> bool:
        """Whether sensors or queries are left out."""
        return self.operations < self.full


class Cost:
    """Operations of one prediction by its numbers of sensors and queries; counted when it is first asked."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def __call__(self, sensors: int, queries: int) -> float:
        """Operations of a prediction from `sensors` points at `queries` points."""
        return float(self._coefficients @ _powers(sensors, queries))

    @cached_property
    def _coefficients(self) -> np.ndarray:
        return np.linalg.solve([_powers(*size) for size in SIZES], [self._counted(*size) for size in SIZES])

    def _counted(self, sensors: int, queries: int) -> float:
        """Operations of all frames, from those of the first two: each further frame costs as much as the second."""
        frames = self.predictor.spec.out_times
        first = self._run(sensors, queries, 1)
        return first if frames == 1 else first + (frames - 1) * (self._run(sensors, queries, 2) - first)

    def _run(self, sensors: int, queries: int, frames: int) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        spec = self.predictor.spec
        known = Field.of(_line(sensors, spec.dim), torch.zeros(spec.in_times, sensors, spec.in_channels))
        query = Field.of(_line(queries, spec.dim), torch.zeros(1, queries, spec.query_channels))
        # The fused softmax attention of a CPU is not counted; the plain one is.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.predictor(known, query, frames)
        return float(counter.get_total_flops())


def start_of(scene: Scene, count: Count, most: float = AT_ONCE) -> Start:
    """All sensors at the default resolution if that comes at once; else the most even choice that does.

    Where none does, the least; but all of them where even that would take more than half as long, as where the frames
    to be marched at the nodes of a mesh are what takes its time: fewer sensors make an operator less accurate.

    Args:
        scene: what can be chosen.
        count: operations by sensors and queries.
        most: the operations that come at once.
    """
    dim, usual = scene.spec.dim, scene.queries(scene.resolution)
    full = count(scene.sensors, usual)

    def choices() -> Iterable[tuple[tuple[float, float], Start]]:
        shares = SHARES if scene.spec.grid is None else (1.0,)
        resolutions = [n for n in scene.resolutions if n <= scene.resolution]
        for stride, share, resolution in product(scene.strides, shares, resolutions):
            sensors, queries = math.ceil(scene.sensors * share / stride**dim), scene.queries(resolution)
            kept = [(n / m) ** (1 / dim) for n, m in ((sensors, scene.sensors), (queries, usual))]  # per axis
            yield (min(kept), sum(kept)), Start(stride, share, resolution, count(sensors, queries), full)

    every = list(choices())
    fitting = [choice for choice in every if choice[1].operations <= most]
    if fitting:
        return max(fitting, key=lambda choice: choice[0])[1]
    least = min(every, key=lambda choice: choice[1].operations)[1]
    return least if least.operations <= full / 2 else Start(1, 1.0, scene.resolution, full, full)


def _powers(sensors: int, queries: int) -> np.ndarray:
    return np.array([1, sensors, queries, sensors**2, sensors * queries, queries**2], np.float64)


def _line(points: int, dim: int) -> torch.Tensor:
    return torch.linspace(0, 1, points)[:, None].expand(points, dim).contiguous()
