"""The sensors and the resolution that the page begins with, so that its first answer comes at once."""

import math
from dataclasses import dataclass
from itertools import product

from oformer.checkpoint import parameter_count
from oformer.playground.scenes.base import Scene
from oformer.predict import Predictor

AT_ONCE = 6.5e10  # operations: half a second on two cores, more where the matrices are small
PER_PAIR = 2_000  # operations for each pair of points that a model compares


@dataclass(frozen=True)
class Start:
    """The sensors and the resolution that the page begins with."""

    stride: int
    share: float
    resolution: int
    operations: float
    full: float  # operations with all sensors of training, at the default resolution

    @property
    def reduced(self) -> bool:
        """Whether sensors or queries are left out."""
        return self.operations < self.full


def operations(predictor: Predictor, sensors: int, queries: int) -> float:
    """Estimated additions and multiplications of a prediction; for the paper's operators right within 30 %.

    A network reads a sensor with about two thirds of its parameters, and answers each frame of a query with a third,
    with one multiplication and one addition for each parameter.
    """
    model = predictor.operator.model
    pairs = PER_PAIR * sensors * max(sensors, queries) if model.compares_pairs else 0
    used = (2 * sensors + predictor.spec.out_times * queries) / 3
    return 2 * parameter_count(predictor.operator) * used + pairs


def start_of(scene: Scene, predictor: Predictor, most: float = AT_ONCE) -> Start:
    """All sensors at the default resolution if that comes at once; else the choice nearest to it that does.

    Fewer sensors make an operator less accurate, so if no choice comes at once, sensors are left out only where that
    saves half of the operations. An answer with at most `most` operations comes at once.
    """
    dim, usual = scene.spec.dim, scene.queries(scene.resolution)
    full = operations(predictor, scene.sensors, usual)
    choices: dict[Start, tuple[float, float]] = {}  # the points per axis that each keeps, as shares: least and sum
    for stride, resolution in product(scene.strides, (n for n in scene.resolutions if n <= scene.resolution)):
        sensors, queries = math.ceil(scene.sensors / stride**dim), scene.queries(resolution)
        kept = (sensors / scene.sensors) ** (1 / dim), (queries / usual) ** (1 / dim)
        choices[Start(stride, 1.0, resolution, operations(predictor, sensors, queries), full)] = min(kept), sum(kept)
    fitting = [start for start in choices if start.operations <= most]
    if fitting:
        return max(fitting, key=choices.__getitem__)
    least = min(choices, key=lambda start: start.operations)
    return least if least.operations <= full / 2 else Start(1, 1.0, scene.resolution, full, full)
