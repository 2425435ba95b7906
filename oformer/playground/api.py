"""JSON in, JSON out, on top of `Predictor` and the problems: what the service can do, without a word of HTTP.

Requests are checked against the schemas of `openapi` before they come here; what those cannot say (shapes that must
agree, numbers that must be finite) is refused here, with the sentence of an `InputError`.
"""

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from oformer.checkpoint import parameter_count
from oformer.data.arrays import check_codes
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field
from oformer.playground.requests import encoded
from oformer.playground.scenes import scene_of
from oformer.playground.scenes.base import Known, Scene, Sensors, State
from oformer.playground.starting_resolution import AT_ONCE, Cost, Start, start_of
from oformer.predict import Predictor

KEPT = 32  # inputs, answers and solutions in memory: a change of sensors or resolution solves nothing again
PAIRS = 2**24  # of an input point and a query where attention looks at each pair

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    body: int = 16 * 2**20  # bytes
    memory: int = 256 * 2**20  # bytes of bodies, of the arrays in them and of answers, of all requests together
    points: int = 65_536  # of the input, and of the queries
    times: int = 200  # frames
    answer: int = 2**21  # numbers: frames x queries x channels
    json_answer: int = 2**19  # the same in JSON, which takes five times the bytes
    seconds: float = 60.0  # in line and at work
    solver_seconds: float = 900.0  # the same for solvers: that of the airfoil takes minutes on a CPU
    waiting: int = 64  # requests in line
    connections: int = 256  # at once; one more takes the place of one whose client is slow, or is answered 503
    grace: float = 8.0  # seconds in which requests are finished when the server is told to stop; Docker kills after 10


@dataclass(frozen=True)
class Question:
    """A prediction asked for, as arrays in float64."""

    coords: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None = None
    query_coords: np.ndarray | None = None
    query_values: np.ndarray | None = None
    resolution: int | None = None
    times: int | None = None

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))


@dataclass(frozen=True)
class Served:
    """An operator that is served."""

    name: str
    predictor: Predictor
    scene: Scene | None  # None where the problem is not known

    @property
    def card(self) -> Card:
        """Names of the channels, as far as they are known."""
        spec = self.predictor.spec
        return self.predictor.checkpoint.data or Card(
            title=self.name,
            inputs=tuple(f"input {i + 1}" for i in range(spec.in_channels)),
            targets=tuple(f"output {i + 1}" for i in range(spec.out_channels)),
        )

    @cached_property
    def start(self) -> Start:
        """What the page begins with; a GPU needs nothing left out."""
        assert self.scene is not None
        most = math.inf if self.predictor.device.type != "cpu" else AT_ONCE
        return start_of(self.scene, Cost(self.predictor), most)

    @property
    def draft(self) -> tuple[Sensors, int]:
        """Sensors and resolution of the first answer, and of those under a moving pointer."""
        assert self.scene is not None
        start, strides = self.start, self.scene.strides
        coarser = (stride for stride in strides if start.stride > 1 and stride >= 2 * start.stride)
        return Sensors(share=start.share, stride=next(coarser, start.stride)), self.scene.resolutions[0]

    def summary(self) -> dict[str, Any]:
        """For the list of models."""
        checkpoint, spec, card = self.predictor.checkpoint, self.predictor.spec, self.card
        return {
            "name": self.name,
            "title": card.title,
            "text": card.text,
            "parameters": parameter_count(self.predictor.operator),
            "steps": checkpoint.step,
            "error": checkpoint.scores.get("error"),
            "squares": checkpoint.scores.get("mean_squared_scaled"),
            "inputs": list(card.inputs),
            "queries": list(card.queries),
            "targets": list(card.targets),
            "spec": asdict(spec),
            "queries_independent": self.predictor.operator.model.queries_independent,
            "scene": None if self.scene is None else self.scene.kind,
        }


class Service:
    """The operators that are served, and what can be asked of them."""

    def __init__(self, models: Mapping[str, Predictor], limits: Limits | None = None):
        """Take them up.

        Args:
            models: by name.
            limits: on what may be asked.
        """
        self.limits = limits or Limits()
        self.models = {
            # To play is to add and erase sensors, and to ask elsewhere.
            name: Served(
                name,
                predictor,
                None if predictor.operator.model.needs_grid else scene_of(predictor.checkpoint.recipe, predictor.spec),
            )
            for name, predictor in models.items()
        }
        self._kept: OrderedDict[tuple, Any] = OrderedDict()
        self._lock = threading.Lock()

    def model(self, name: str) -> Served:
        """One of them."""
        if name not in self.models:
            raise unknown_name("model that is served", name[:60], self.models)
        return self.models[name]

    def count(self) -> None:
        """Find out what all models cost, which takes a tenth of a second each, before anybody waits for it."""
        for served in self.models.values():
            if served.scene is not None:
                served.start  # noqa: B018

    def describe(self, name: str) -> dict[str, Any]:
        """All that the page must know of a model."""
        served = self.model(name)
        scene, picture = served.scene, served.card.picture
        content: dict[str, Any] = {
            **served.summary(),
            "picture": {"input": picture.input, "target": picture.target},
            "limits": asdict(self.limits),
        }
        if scene is not None:
            sensors, coarse = served.draft
            content["play"] = {
                "kind": scene.kind,
                "state": scene.schema,
                "resolutions": list(scene.resolutions),
                "resolution": scene.resolution,
                "strides": list(scene.strides),
                "start": {**asdict(served.start), "reduced": served.start.reduced},
                "draft": {"stride": sensors.stride, "share": sensors.share, "resolution": coarse},
                "drafts": scene.drafts,
                "solver": scene.solver,
                "slow": scene.slow,
                "tested": scene.tested,
                **scene.facts(),
            }
        return content

    def predict(self, name: str, question: Question, most: int | None = None) -> Field:
        """What `Predictor` says.

        Args:
            name: of the model.
            question: what is known, and where to answer.
            most: numbers in the answer; by default the limit.
        """
        predictor = self.model(name).predictor
        spec = predictor.spec
        known = self._field("input", question.coords, question.values, question.weights)
        if question.query_coords is not None:
            query = self._field("query", question.query_coords, question.query_values, None)
        elif question.resolution is not None:
            if question.resolution**spec.dim > self.limits.points:
                raise InputError(f"at most {self.limits.points:,} queries", f"{question.resolution} per axis")
            query = Field.of(predictor.grid(known, question.resolution))
        else:
            query = Field.of(known.coords, None, known.weights)
        # Here, and not only in the predictor: codes are looked at next, and sizes are counted.
        predictor.operator.check(known, query)
        check_codes("the input", known.values, spec.in_categories)
        check_codes("the query", query.values, spec.query_categories)
        times = question.times or spec.out_times
        self._check_size(predictor, known, query, times, self.limits.answer if most is None else most)
        return self._finite(predictor(known, query, times))

    def draw(self, name: str, index: int) -> dict[str, Any]:
        """A state to begin with."""
        return self.scene(name).example(index)

    def play(
        self,
        name: str,
        state: State,
        sensors: Sensors | None = None,
        resolution: int | None = None,
        channel: int = 0,
        draft: bool = False,
    ) -> dict[str, Any]:
        """What the operator says of a state, seen by some sensors.

        Args:
            name: of the model.
            state: as its scene has it.
            sensors: which points are seen; those of training if left out.
            resolution: one that the scene offers.
            channel: of the target, to be sent.
            draft: an input that is nearly that of the state will do, where it comes sooner.
        """
        served, scene = self.model(name), self.scene(name)
        predictor = served.predictor
        resolution = resolution or scene.resolution
        scene.check_resolution(resolution)
        self._check_channel(served, channel)
        start = time.perf_counter()
        known = self._known(name, state, draft)
        places = self._remembered((name, "places", resolution, _key(state)), lambda: scene.places(state, resolution))
        sensors = sensors or Sensors()
        field = sensors.of(known, predictor.spec)
        before = time.perf_counter()

        def timed() -> tuple[Field, float]:
            start = time.perf_counter()
            return self._finite(predictor(field, places.query)), time.perf_counter() - start

        # Of all that is known of the state: that some sensors are gone is nothing that it has.
        outside = predictor.operator.outside(Sensors().of(known, predictor.spec).batched(), places.query.batched())
        # The first question was asked in advance, and may still be at work when a person asks it.
        question = (name, "answer", draft and scene.drafts, sensors, resolution, _key(state))
        answer, seconds = self._remembered(question, timed)
        return {
            "sensors": {
                "coords": encoded(field.coords.numpy()),
                "values": encoded(field.values[..., served.card.picture.input].numpy()),
                "usual": len(known.usual),
            },
            "places": places.layout,
            "prediction": encoded(answer.values[..., channel].numpy()),
            "seconds": {"input": before - start, "prediction": seconds},
            "unseen": scene.unseen(state) or "; ".join(outside),
        }

    def solve(self, name: str, state: State, resolution: int | None = None, channel: int = 0) -> dict[str, Any]:
        """What the solver says of the same state at the same places.

        Args:
            name: of the model.
            state: as its scene has it.
            resolution: one that the scene offers.
            channel: of the target, to be sent.
        """
        scene = self.scene(name)
        resolution = resolution or scene.resolution
        scene.check_resolution(resolution)
        self._check_channel(self.model(name), channel)

        def timed() -> tuple[Tensor, float]:
            start = time.perf_counter()
            return scene.solve(state, resolution), time.perf_counter() - start

        values, seconds = self._remembered((name, "solution", resolution, _key(state)), timed)
        return {"solution": encoded(values[..., channel].numpy()), "seconds": seconds, "solver": scene.solver}

    def warm(self, name: str) -> Iterator[Callable[[], object]]:
        """What answers a model's first question in advance, coarsely: short jobs, after which all it needs is there."""
        scene, (sensors, resolution) = self.scene(name), self.model(name).draft
        yield lambda: self._known(name, scene.example(0), draft=True)
        yield lambda: self.play(name, scene.example(0), sensors, resolution, draft=True)

    def scene(self, name: str) -> Scene:
        """The scene of a model, refused where there is none."""
        served = self.model(name)
        scene, model = served.scene, served.predictor.operator.model
        if scene is None:
            raise InputError(
                f"a problem behind `{name}` to play with",
                f"{model.name}, which reads regular grids alone" if model.needs_grid else "data alone",
                "Ask it with `predict`, with fields of your own",
            )
        return scene

    def _known(self, name: str, state: State, draft: bool) -> Known:
        scene = self.scene(name)
        make = scene.draft if draft and scene.drafts else scene.known
        return self._remembered((name, make.__name__, _key(state)), lambda: make(state))

    def _check_channel(self, served: Served, channel: int) -> None:
        channels = served.predictor.spec.out_channels
        if not 0 <= channel < channels:
            raise InputError(f"a channel from 0 to {channels - 1}", str(channel))

    def _field(self, where: str, coords: np.ndarray, values: np.ndarray | None, weights: np.ndarray | None) -> Field:
        """Arrays as a field; one axis of coordinates and up to two of values may be left out."""
        coords = coords[:, None] if coords.ndim == 1 else coords
        if values is not None and values.ndim < 3:
            values = (values[:, None] if values.ndim == 1 else values)[None]
        if coords.ndim != 2 or (values is not None and values.ndim != 3):
            raise InputError(
                f"`{where}` with coords (points, dim) and values (points, channels) or (times, points, channels)",
                f"{coords.shape} and {None if values is None else values.shape}",
            )
        points = len(coords)
        if points > self.limits.points:
            raise InputError(f"at most {self.limits.points:,} points in `{where}`", f"{points:,}")
        if (values is not None and values.shape[1] != points) or (weights is not None and weights.shape != (points,)):
            raise InputError(f"as many values and weights as points in `{where}` ({points})", "others")
        if weights is not None:
            total = weights.sum() if np.isfinite(weights).all() else 0.0
            if not (np.isfinite(total) and total > 0 and (weights >= 0).all()):
                raise InputError(f"weights of `{where}` that are not negative and not all zero", "others")
            weights = weights / total
        tensors = [None if array is None else torch.from_numpy(array).float() for array in (coords, values, weights)]
        return Field.of(*tensors)  # pyright: ignore[reportArgumentType]

    def _check_size(self, predictor: Predictor, known: Field, query: Field, times: int, most: int) -> None:
        if times > self.limits.times:
            raise InputError(f"at most {self.limits.times} frames", str(times))
        wanted = times * query.points * predictor.spec.out_channels
        if wanted > most:
            more = "Ask in binary, which may have more" if most < self.limits.answer else "Ask for fewer points"
            raise InputError(f"an answer of at most {most:,} numbers", f"{wanted:,}", more)
        pairwise = predictor.operator.model.compares_pairs
        if pairwise and known.points * max(known.points, query.points) > PAIRS:
            raise InputError(
                f"at most {PAIRS:,} pairs of points, which {predictor.operator.model.name} compares one by one",
                f"{known.points * max(known.points, query.points):,}",
                "Ask for fewer points",
            )

    def _finite(self, answer: Field) -> Field:
        if not bool(torch.isfinite(answer.values).all()):
            raise InputError(
                "an input on the scale of the training data", "one whose answer is not finite", "Check its units"
            )
        return answer

    def _remembered(self, key: tuple, make: Callable[[], Result]) -> Result:
        """What was made for the same key not long ago, or made now."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made


def named(predictors: Sequence[Predictor]) -> dict[str, Predictor]:
    """Operators by names that differ and that an address can hold."""
    names: dict[str, Predictor] = {}
    for predictor in predictors:
        given = predictor.checkpoint.name
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "-._") else "-" for c in given) or "model"
        name, number = plain, 1
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names[name] = predictor
    return names


def _key(state: State) -> str:
    return json.dumps(state, sort_keys=True)
