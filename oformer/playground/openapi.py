"""The service described once: the schemas that are published are those that requests are checked against."""

from typing import Any

from oformer.playground.api import Limits, Served, Service
from oformer.playground.requests import list_of, object_of
from oformer.playground.scenes.base import Scene

NPZ = "application/x-npz"
ARRAYS = {"coords": 2, "values": 3, "weights": 1, "query_coords": 2, "query_values": 3, "resolution": 0, "times": 0}
MARKS = 500  # of sensors erased, and as many added

Schema = dict[str, Any]


def predict_schema(limits: Limits) -> Schema:
    """Of a prediction in JSON."""
    lists = "in nested lists"
    field = {
        "coords": _numbers(f"(points, dim) {lists}"),
        "values": _numbers(f"(points, channels) or (times, points, channels) {lists}, in physical units"),
    }
    weights = _numbers("(points,): of a quadrature; equal if left out. They are divided by their sum")
    return object_of(
        {
            "input": object_of({**field, "weights": weights}, ["coords", "values"]),
            "query": object_of(field, ["coords"]),
            "resolution": _integer(1, limits.points, "points per axis of a grid, in place of `query`"),
            "times": _integer(1, limits.times, "frames; as many as in training if left out"),
        },
        ["input"],
    )


def draw_schema() -> Schema:
    """Of a state to begin with."""
    return object_of({"index": _integer(0, 10**6, "the same one for the same index")}, ["index"])


def solve_schema(served: Served, scene: Scene) -> Schema:
    """Of a solver's answer."""
    return object_of(
        {
            "state": scene.schema,
            "resolution": {"type": "integer", "enum": list(scene.resolutions)},
            "channel": _integer(0, served.predictor.spec.out_channels - 1, "of the target"),
        },
        ["state"],
    )


def play_schema(served: Served, scene: Scene) -> Schema:
    """Of an operator's answer to a state."""
    dim = served.predictor.spec.dim
    sensors = object_of(
        {
            "stride": {
                "type": "integer",
                "enum": list(scene.strides),
                "description": "on a regular grid of sensors, steps per axis from one to the next that is kept",
            },
            "share": {"type": "number", "minimum": 0.001, "maximum": 1, "description": "of these sensors"},
            "seed": _integer(0, 10**6, "of the choice among them"),
            "erased": _places(dim + 1, "coordinates and radius: sensors in there are gone"),
            "added": _places(dim, "a sensor at the nearest point where the input is known"),
        },
        [],
    )
    schema = solve_schema(served, scene)
    draft = {"type": "boolean", "description": "an input that is nearly the exact one will do, if it comes sooner"}
    return object_of({**schema["properties"], "sensors": sensors, "draft": draft}, ["state"])


def description(service: Service, version: str) -> Schema:
    """The whole as OpenAPI 3.1."""
    playing = [(served, served.scene) for served in service.models.values() if served.scene is not None]
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": list(service.models)}}

    def get(summary: str) -> Schema:
        return {"get": {"summary": summary, "responses": _responses("application/json")}}

    def post(summary: str, schema: Schema, *, binary: bool = False) -> Schema:
        content = {"application/json": {"schema": schema}}
        if binary:
            names = ", ".join(ARRAYS)
            archive = {"type": "string", "format": "binary", "description": f"numpy's archive with some of: {names}"}
            content[NPZ] = {"schema": archive}
        body = {"required": True, "content": content}
        return {
            "parameters": [name],
            "post": {"summary": summary, "requestBody": body, "responses": _responses(*content)},
        }

    paths = {
        "/health": get("Whether it works, and how many wait"),
        "/v1/models": get("The operators that are served"),
        "/v1/models/{name}": {"parameters": [name], **get("One of them, with the schema of its states")},
        "/v1/models/{name}/predict": post(
            "Values at any points from values at any points; a binary request has a binary answer",
            predict_schema(service.limits),
            binary=True,
        ),
    }
    if playing:
        paths |= {
            "/v1/models/{name}/draw": post("A state to play with", draw_schema()),
            "/v1/models/{name}/play": post(
                "The operator's answer to a state, arrays in base64", _one_of([play_schema(*pair) for pair in playing])
            ),
            "/v1/models/{name}/solve": post(
                "The solver's answer to a state, arrays in base64", _one_of([solve_schema(*pair) for pair in playing])
            ),
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oformer",
            "version": version,
            "description": f"Trained operators. Bodies hold at most {service.limits.body:,} bytes.",
        },
        "paths": paths,
    }


def _responses(*media: str) -> Schema:
    sentence = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    refused = {"description": "Refused, with a sentence", "content": {"application/json": {"schema": sentence}}}
    busy = {**refused, "description": "Too many are waiting, or it took too long; Retry-After says when to ask again"}
    return {
        "200": {"description": "The answer", "content": {kind: {} for kind in media}},
        "4XX": refused,
        "503": busy,
    }


def _numbers(text: str) -> Schema:
    return {"type": "array", "minItems": 1, "description": text, "x-numbers": True}


def _integer(low: int, high: int, text: str) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, "description": text}


def _places(numbers: int, text: str) -> Schema:
    place = list_of({"type": "number", "minimum": -100, "maximum": 100}, numbers, numbers)
    return {**list_of(place, 0, MARKS), "description": text}


def _one_of(schemas: list[Schema]) -> Schema:
    """One schema for all models; each once."""
    different = [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]
    return different[0] if len(different) == 1 else {"oneOf": different}
