"""The requests that the service answers, on top of `Predictor` and the problems, without HTTP.

Requests are checked against the schemas of `openapi` before they come here. Conditions that a schema cannot express
(shapes that must agree, numbers that must be finite) are checked here, and refused with an `InputError`.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from oformer.checkpoint import parameter_count
from oformer.checks import check_codes
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field
from oformer.playground.requests import encoded
from oformer.playground.scenes import scene_of
from oformer.playground.scenes.base import Scene, Sensors, State
from oformer.playground.starting_resolution import AT_ONCE, Start, start_of
from oformer.predict import Predictor

KEPT = 32  # inputs, answers and solutions in memory: a change of sensors or resolution solves nothing again
FEW = 256  # points, up to which requests of one shape are answered together; more fill the processor alone
PAIRS = 2**24  # of an input point and a query where attention looks at each pair
SCENE_FACTS = ("kind", "resolutions", "resolution", "strides", "drafts", "solver", "slow", "tested")  # for the page

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    body: int = 16 * 2**20  # bytes
    json_body: int = 4 * 2**20  # bytes in JSON, which takes up to thirty times its size while it is parsed
    memory: int = 256 * 2**20  # bytes of bodies, of the arrays in them and of answers, of all requests together
    points: int = 65_536  # of the input, and of the queries
    times: int = 200  # frames
    answer: int = 2**21  # numbers: frames x queries x channels
    json_answer: int = 2**19  # numbers in JSON, where they take five times the bytes
    seconds: float = 60.0  # in the queue and at work
    solver_seconds: float = 900.0  # in the queue and at work of solvers: that of the airfoil takes minutes on a CPU
    waiting: int = 64  # requests in the queue
    connections: int = 256  # at once; one more takes the place of one whose client is slow, or is answered 503
    grace: float = 8.0  # seconds in which requests are finished when the server is told to stop; Docker kills after 10


class Checked(NamedTuple):
    """A request for a prediction that is known to have an answer."""

    predictor: Predictor
    known: Field
    query: Field
    times: int

    @property
    def key(self) -> Hashable:
        """The same for requests that are answered faster together."""
        few = max(self.known.points, self.query.points) <= FEW
        shapes = tuple(tensor.shape for field in (self.known, self.query) for tensor in field.tensors)
        return (shapes, self.times) if few else id(self)


@dataclass(frozen=True)
class Question:
    """A request for a prediction, as arrays in float64."""

    coords: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None = None
    query_coords: np.ndarray | None = None
    query_values: np.ndarray | None = None
    resolution: int | None = None
    times: int | None = None


class Served:
    """An operator that is served, loaded when it is first asked for.

    Args:
        name: in addresses.
        load: returns the operator.
    """

    def __init__(self, name: str, load: Callable[[], Predictor]):
        self.name, self.load = name, load

    @cached_property
    def predictor(self) -> Predictor:
        """The operator."""
        return self.load()

    @cached_property
    def scene(self) -> Scene | None:
        """None where the problem is not known, and where the model does not answer anywhere: the page adds sensors."""
        predictor = self.predictor
        anywhere = predictor.operator.model.answers_anywhere
        return scene_of(predictor.checkpoint.recipe, predictor.spec) if anywhere else None

    @property
    def card(self) -> Card:
        """Names of the channels, as far as they are known."""
        spec = self.predictor.spec
        return self.predictor.checkpoint.data or Card(
            title=self.name,
            inputs=tuple(f"input {i + 1}" for i in range(spec.in_channels)),
            targets=tuple(f"output {i + 1}" for i in range(spec.out_channels)),
        )

    def summary(self) -> dict[str, Any]:
        """Entry in the list of models."""
        checkpoint, spec, card = self.predictor.checkpoint, self.predictor.spec, self.card
        return {
            "name": self.name,
            "title": card.title,
            "text": card.text,
            "parameters": parameter_count(self.predictor.operator),
            "steps": checkpoint.step,
            "error": checkpoint.scores.get("error"),
            "scored": checkpoint.scores.get("split", "test"),  # the samples whose error it is
            "squares": checkpoint.scores.get("mean_squared_scaled"),
            "inputs": list(card.inputs),
            "queries": list(card.queries),
            "targets": list(card.targets),
            "spec": asdict(spec),
            "queries_independent": self.predictor.operator.model.queries_independent,
            "scene": None if self.scene is None else self.scene.kind,
        }


class Service:
    """The operators that are served, and the answers to all requests.

    Args:
        models: by name; operators, or functions that load them.
        limits: on requests.
    """

    def __init__(self, models: Mapping[str, Predictor | Callable[[], Predictor]], limits: Limits | None = None):
        self.limits = limits or Limits()
        loads = {name: (lambda model=m: model) if isinstance(m, Predictor) else m for name, m in models.items()}
        self.models = {name: Served(name, load) for name, load in loads.items()}
        self._kept = dict[tuple, Any]()
        self._lock = threading.Lock()

    def model(self, name: str) -> Served:
        """The operator with a name."""
        if name not in self.models:
            raise unknown_name("model that is served", name[:60], self.models)
        return self.models[name]

    def scene(self, name: str) -> Scene:
        """The scene of a model, refused where there is none."""
        served = self.model(name)
        if served.scene is None:
            model = served.predictor.operator.model
            where = "reads regular grids" if model.needs_grid else "answers at the points of its input"
            raise InputError(
                f"a problem behind `{name}` to play with",
                "data alone" if model.answers_anywhere else f"{model.name}, which {where} alone",
                "Ask it with `predict`, with fields of your own",
            )
        return served.scene

    def describe(self, name: str) -> dict[str, Any]:
        """All facts about a model that the page shows or needs for its tools."""
        served = self.model(name)
        scene, picture = served.scene, served.card.picture
        content: dict[str, Any] = {
            **served.summary(),
            "picture": {"input": picture.input, "target": picture.target},
            "limits": asdict(self.limits),
        }
        if scene is not None:
            start, draft = self._beginning(name)
            content["play"] = {
                **{fact: getattr(scene, fact) for fact in SCENE_FACTS},
                "state": scene.schema,
                "start": {**asdict(start), "reduced": start.reduced},
                "draft": {**draft, "resolution": scene.resolutions[0]},
                **scene.facts(),
            }
        return content

    def _beginning(self, name: str) -> tuple[Start, dict[str, Any]]:
        """The start of the page, and the sensors of the answers that are drafts; on a GPU nothing is left out."""
        scene, predictor = self.scene(name), self.model(name).predictor
        start = start_of(scene, predictor, AT_ONCE if predictor.device.type == "cpu" else math.inf)
        coarser = (stride for stride in scene.strides if start.stride > 1 and stride >= 2 * start.stride)
        return start, {"share": start.share, "stride": next(coarser, start.stride)}

    def warm(self, name: str) -> None:
        """Answer a model's first question in advance, coarsely."""
        scene = self.scene(name)
        self.play(name, scene.example(0), self._beginning(name)[1], scene.resolutions[0], draft=True)

    def checked(self, name: str, question: Question, most: int) -> "Checked":
        """A request for a prediction that can be answered, with at most `most` numbers."""
        predictor, limits = self.model(name).predictor, self.limits
        spec = predictor.spec
        known = self._field("input", question.coords, question.values, question.weights)
        if question.query_coords is not None:
            query = self._field("query", question.query_coords, question.query_values)
        elif question.resolution is not None:
            if question.resolution**spec.dim > limits.points:
                raise InputError(f"at most {limits.points:,} queries", f"{question.resolution} per axis")
            query = Field.of(predictor.grid(known, question.resolution))
        else:
            query = Field.of(known.coords, None, known.weights)
        # Here, and not only in the predictor: codes are read next, and sizes are counted.
        predictor.operator.check(known, query)
        check_codes("the input", known.values, spec.in_categories)
        check_codes("the query", query.values, spec.query_categories)
        times = question.times or spec.out_times
        self._check_size(predictor, known, query, times, most)
        return Checked(predictor, known, query, times)

    @staticmethod
    def answer(questions: Sequence["Checked"]) -> list[Field | InputError]:
        """The predictions of one operator for inputs of one shape, or what is wrong with some."""
        predictor, known, query, times = questions[0]
        if len(questions) == 1:
            return [_finite(predictor(known, query, times=times))]
        known, query = _stacked(one.known for one in questions), _stacked(one.query for one in questions)
        together = predictor(known, query, times=times)
        return [_finite(together.single(i)) for i in range(len(questions))]

    def draw(self, name: str, index: int) -> dict[str, Any]:
        """A state to begin with."""
        return self.scene(name).example(index)

    def play(
        self,
        name: str,
        state: State,
        sensors: Mapping[str, Any] | None = None,
        resolution: int | None = None,
        channel: int = 0,
        draft: bool = False,
    ) -> dict[str, Any]:
        """The operator's answer to a state; the arguments are those of the request (`openapi.play_schema`)."""
        served, scene = self.model(name), self.scene(name)
        marks = {key: _tuples(value) for key, value in (sensors or {}).items()}
        seen, predictor, resolution = Sensors(**marks), served.predictor, resolution or scene.resolution
        draft, key = draft and scene.drafts, json.dumps(state, sort_keys=True)
        start = time.perf_counter()
        make = scene.draft if draft else scene.known
        known = self._remembered((name, "known", draft, key), lambda: make(state))
        places = self._remembered((name, "places", resolution, key), lambda: scene.places(state, resolution))
        field = seen.of(known, predictor.spec)
        before = time.perf_counter()
        # All that is known of the state: sensors that are left out do not take it out of the range of training.
        outside = predictor.operator.outside(Sensors().of(known, predictor.spec).batched(), places.query.batched())
        # The first question was asked in advance, and may still be at work when a person asks it.
        question = (name, "answer", draft, seen, resolution, key)
        answer, seconds = self._remembered(question, lambda: _timed(lambda: _finite(predictor(field, places.query))))
        if isinstance(answer, InputError):
            raise answer
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
        """The solver's answer to a state, at the places of the operator's; arguments as those of `play`."""
        scene = self.scene(name)
        points = resolution or scene.resolution
        key = (name, "solution", points, json.dumps(state, sort_keys=True))
        values, seconds = self._remembered(key, lambda: _timed(lambda: scene.solve(state, points)))
        return {"solution": encoded(values[..., channel].numpy()), "seconds": seconds, "solver": scene.solver}

    def _field(
        self, where: str, coords: np.ndarray, values: np.ndarray | None, weights: np.ndarray | None = None
    ) -> Field:
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
        given = [array.shape for array in (None if values is None else values[0, :, 0], weights) if array is not None]
        if any(shape != (points,) for shape in given):
            got = " and ".join(map(str, given))
            raise InputError(f"as many values and weights as points in `{where}` ({points})", f"shapes {got}")
        if weights is not None:
            total = weights.sum() if np.isfinite(weights).all() else 0.0
            if not (np.isfinite(total) and total > 0 and (weights >= 0).all()):
                got = f"{weights.min():g} to {weights.max():g}"
                raise InputError(f"weights of `{where}` that are not negative and not all zero", got)
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
        model, pairs = predictor.operator.model, known.points * max(known.points, query.points)
        if model.compares_pairs and pairs > PAIRS:
            expected = f"at most {PAIRS:,} pairs of points, which {model.name} compares one by one"
            raise InputError(expected, f"{pairs:,}", "Ask for fewer points")

    def _remembered(self, key: tuple, make: Callable[[], Result]) -> Result:
        """The result of a function, or the one that was kept for the same key."""
        with self._lock:
            made = self._kept.pop(key, None)
        made = make() if made is None else made
        with self._lock:
            self._kept[key] = made  # behind all others
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return made


def _stacked(fields: Iterable[Field]) -> Field:
    return Field(*map(torch.stack, zip(*(field.tensors for field in fields), strict=True)))


def _tuples(value: Any) -> Any:
    return tuple(map(tuple, value)) if isinstance(value, list) else value


def _timed(make: Callable[[], Result]) -> tuple[Result, float]:
    """The result of a function, and the seconds that it took."""
    start = time.perf_counter()
    return make(), time.perf_counter() - start


def _finite(answer: Field) -> Field | InputError:
    if bool(torch.isfinite(answer.values).all()):
        return answer
    return InputError(
        "an input on the scale of the training data", "an input whose answer is not finite", "Check its units"
    )


def named(names: Iterable[str]) -> list[str]:
    """Names that differ and that an address can hold, in place of others."""
    found: list[str] = []
    for name in names:
        plain = re.sub("[^A-Za-z0-9._-]", "-", name) or "model"
        found.append(next(n for n in (plain, *(f"{plain}-{i + 2}" for i in range(len(found) + 1))) if n not in found))
    return found
