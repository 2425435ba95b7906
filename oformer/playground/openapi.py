"""All requests, each described once: the published schema is the one that requests are checked against."""

from collections.abc import Callable
from typing import Any

from oformer.errors import InputError
from oformer.playground.api import Limits, Question, Served, Service
from oformer.playground.requests import (
    Buffer,
    Schema,
    check_json,
    integer,
    list_of,
    number,
    numbers,
    object_of,
    parse_json,
    read_npz,
)
from oformer.playground.scenes.base import Scene

JSON, NPZ = "application/json", "application/x-npz"
ARRAYS = {"coords": 2, "values": 3, "weights": 1, "query_coords": 2, "query_values": 3, "resolution": 0, "times": 0}
MARKS = 500  # of sensors erased, and as many added


def predict_schema(limits: Limits) -> Schema:
    """Schema of a prediction in JSON."""

    def numbers(text: str) -> Schema:
        return {"type": "array", "minItems": 1, "description": text, "x-numbers": True}

    field = {
        "coords": numbers("(points, dim) in nested lists"),
        "values": numbers("(points, channels) or (times, points, channels) in nested lists, in physical units"),
    }
    weights = numbers("(points,): of a quadrature; equal if left out. They are divided by their sum")
    return object_of(
        {
            "input": object_of({**field, "weights": weights}, ["coords", "values"]),
            "query": object_of(field, ["coords"]),
            "resolution": integer(1, limits.points, "points per axis of a grid, in place of `query`"),
            "times": integer(1, limits.times, "frames; as many as in training if left out"),
        },
        ["input"],
    )


def read_question(body: Buffer, kind: str, served: Served, limits: Limits) -> Question:
    """The prediction that a body asks for; `kind` is its media type."""
    spec, schema = served.predictor.spec, predict_schema(limits)
    most = limits.points * max(1, spec.in_times) * max(3, spec.in_channels)
    if kind == NPZ:
        arrays = read_npz(body, ARRAYS, most)
        scalars = {name: arrays.pop(name).item() for name in ("resolution", "times") if name in arrays}
        whole: dict[str, Any] = {name: int(n) if n.is_integer() else n for name, n in scalars.items()}
        for name, value in whole.items():
            check_json(value, schema["properties"][name], name)
        if not arrays.keys() >= {"coords", "values"}:
            raise InputError("`coords` and `values` in the archive", ", ".join(arrays))
        return Question(**arrays, **whole)
    content = parse_json(body)
    check_json(content, schema)
    if b"true" in body or b"false" in body:  # which numpy takes for 1 and 0
        raise InputError("only numbers in the lists", "true or false among them")
    arrays = {
        f"{prefix}{name}": numbers(value, f"{part}.{name}", most)
        for prefix, part in (("", "input"), ("query_", "query"))
        for name, value in content.get(part, {}).items()
    }
    return Question(**arrays, resolution=content.get("resolution"), times=content.get("times"))


def draw_schema(served: Served, scene: Scene) -> Schema:
    """Schema of the request for a state to begin with."""
    return object_of({"index": integer(0, 10**6, "the same state for the same index")})


def solve_schema(served: Served, scene: Scene) -> Schema:
    """Schema of the request for a solver's answer."""
    return object_of(
        {
            "state": scene.schema,
            "resolution": {"type": "integer", "enum": list(scene.resolutions)},
            "channel": integer(0, served.predictor.spec.out_channels - 1, "of the target"),
        },
        ["state"],
    )


def play_schema(served: Served, scene: Scene) -> Schema:
    """Schema of the request for an operator's answer to a state."""
    dim = served.predictor.spec.dim
    thinned = "on a regular grid of sensors, steps per axis from one to the next that is kept"
    erased = "coordinates and radius: sensors in there are gone"
    added = "a sensor at the nearest point where the input is known"
    sensors = {
        "stride": {"type": "integer", "enum": list(scene.strides), "description": thinned},
        "share": {**number(0.001, 1), "description": "of these sensors"},
        "seed": integer(0, 10**6, "of the choice among them"),
        "erased": {**list_of(list_of(number(-100, 100), dim + 1, dim + 1), 0, MARKS), "description": erased},
        "added": {**list_of(list_of(number(-100, 100), dim, dim), 0, MARKS), "description": added},
    }
    draft = {"type": "boolean", "description": "an input that is nearly the exact one will do, if it comes sooner"}
    solve = solve_schema(served, scene)["properties"]
    return object_of({**solve, "sensors": object_of(sensors, []), "draft": draft}, ["state"])


# Requests of the page to one operator, by the name of the method of `Service` that answers them: summary and schema.
ACTIONS: dict[str, tuple[str, Callable[[Served, Scene], Schema]]] = {
    "draw": ("A state to play with", draw_schema),
    "play": ("The operator's answer to a state, arrays in base64", play_schema),
    "solve": ("The solver's answer to a state, arrays in base64", solve_schema),
}


def description(service: Service, version: str) -> Schema:
    """The service in OpenAPI 3.1."""
    named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": list(service.models)}}
    playing = [(served, served.scene) for served in service.models.values() if served.scene is not None]
    arrays = f"numpy's archive with some of: {', '.join(ARRAYS)}"
    bodies = {
        "predict": (
            "Values at any points from values at any points; a binary request has a binary answer",
            {JSON: predict_schema(service.limits), NPZ: {"type": "string", "format": "binary", "description": arrays}},
        )
    }
    for name, (summary, schema) in ACTIONS.items() if playing else ():
        bodies[name] = summary, {JSON: _one_of([schema(*pair) for pair in playing])}

    def get(summary: str) -> Schema:
        return {"get": {"summary": summary, "responses": _responses(JSON)}}

    paths = {
        "/health": get("Whether it works, and how many wait"),
        "/v1/models": get("The operators that are served"),
        "/v1/models/{name}": {"parameters": [named], **get("One of them, with the schema of its states")},
    }
    for name, (summary, schemas) in bodies.items():
        content = {kind: {"schema": schema} for kind, schema in schemas.items()}
        post = {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": _responses(*schemas),
        }
        paths[f"/v1/models/{{name}}/{name}"] = {"parameters": [named], "post": post}
    about = f"Trained operators. Bodies hold at most {service.limits.body:,} bytes."
    return {"openapi": "3.1.0", "info": {"title": "oformer", "version": version, "description": about}, "paths": paths}


def _responses(*kinds: str) -> Schema:
    sentence = object_of({"error": {"type": "string"}})
    refused = {"description": "Refused, with a sentence", "content": {JSON: {"schema": sentence}}}
    busy = {**refused, "description": "Too many are waiting, or it took too long; Retry-After says when to ask again"}
    answer = {"description": "The answer", "content": {kind: {} for kind in kinds}}
    return {"200": answer, "4XX": refused, "503": busy}


def _one_of(schemas: list[Schema]) -> Schema:
    """One schema for all models; each once."""
    different = [schema for i, schema in enumerate(schemas) if schema not in schemas[:i]]
    return different[0] if len(different) == 1 else {"oneOf": different}
