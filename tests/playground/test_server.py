"""Over HTTP: the answers are the predictor's, everything else is refused with a sentence, and nothing is mixed up."""

import asyncio
import dataclasses
import gzip
import io
import json
import os
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.routing import Mount

from oformer.cli import main
from oformer.errors import InputError
from oformer.fields import Field
from oformer.playground import asgi
from oformer.playground.api import Limits, Service, named
from oformer.playground.asgi import Playground, create_app
from oformer.playground.openapi import NPZ, play_schema
from oformer.playground.requests import check_json
from oformer.playground.scenes.base import Sensors
from oformer.playground.server import listen
from oformer.predict import Predictor
from tests.playground.conftest import FAMILIES, Client, ask, decoded

JSON = {"Content-Type": "application/json"}
ROOT = Path(__file__).resolve().parent.parent.parent


def question(predictor, points: int = 12, seed: int = 0) -> dict[str, Any]:
    """A request to predict with valid random numbers, and the fields that it means."""
    spec = predictor.spec
    generator = torch.Generator().manual_seed(seed)
    coords = torch.rand(points, spec.dim, generator=generator)
    values = torch.rand(spec.in_times, points, spec.in_channels, generator=generator)
    if spec.in_categories:
        values[..., -1] = 1.0
    query = {"coords": torch.rand(5, spec.dim, generator=generator)}
    if spec.query_channels:
        query["values"] = torch.ones(1, 5, spec.query_channels)
    return {"input": {"coords": coords, "values": values}, "query": query}


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    return {part: {name: tensor.tolist() for name, tensor in fields.items()} for part, fields in content.items()}


def expected(predictor, content: dict[str, Any]) -> torch.Tensor:
    known, query = content["input"], content["query"]
    return predictor(Field.of(known["coords"], known["values"]), Field.of(query["coords"], query.get("values"))).values


@pytest.mark.parametrize("name", FAMILIES)
def test_predictions_in_json_and_in_binary_are_the_predictors(name, client, predictors):
    content = question(predictors[name])
    truth = expected(predictors[name], content).numpy()
    status, answer = client.post(f"/v1/models/{name}/predict", as_json(content))
    assert status == 200, answer
    np.testing.assert_allclose(answer["values"], truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())
    assert len(answer["channels"]) == truth.shape[-1]
    buffer = io.BytesIO()
    query = {f"query_{key}": tensor.numpy() for key, tensor in content["query"].items()}
    np.savez(buffer, **{key: tensor.numpy() for key, tensor in content["input"].items()}, **query)
    status, headers, body = client.raw("POST", f"/v1/models/{name}/predict", buffer.getvalue(), {"Content-Type": NPZ})
    assert (status, headers["content-type"]) == (200, NPZ)
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        np.testing.assert_allclose(arrays["values"], truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())
        np.testing.assert_array_equal(arrays["coords"], content["query"]["coords"].numpy())


def test_the_examples_of_the_docs_work_as_they_stand(client, port, predictors):
    """But for the address and the name of the operator."""
    text = (ROOT / "docs" / "serving.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "urlopen" in code)
    names: dict[str, Any] = {}
    exec(code.replace("127.0.0.1:8760", f"127.0.0.1:{port}").replace("burgers-demo", "burgers"), names)
    assert names["answer"]["values"].shape == (1, 1000, 1)
    names["answer"].close()
    (content,) = re.findall(r"```json\n(.*?)```", text, re.S)
    status, answer = client.post("/v1/models/burgers/predict", json.loads(content))
    assert status == 200
    known = json.loads(content)["input"]
    field = Field.of(torch.tensor(known["coords"]), torch.tensor([known["values"]]))
    truth = predictors["burgers"](field, np.array([0.1, 0.2]))
    np.testing.assert_allclose(answer["values"], truth.values, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_playground_says_what_the_predictor_says(name, client, predictors, service):
    predictor, scene = predictors[name], service.models[name].scene
    status, state = client.post(f"/v1/models/{name}/draw", {"index": 1})
    assert status == 200
    sensors = {"share": 0.5, "seed": 4}
    channel = predictor.spec.out_channels - 1
    request = {"state": state, "sensors": sensors, "channel": channel}
    status, answer = client.post(f"/v1/models/{name}/play", request)
    assert status == 200, answer
    field = Sensors(**sensors).of(scene.known(state), predictor.spec)
    truth = predictor(field, scene.places(state, scene.resolution).query).values[..., channel].numpy()
    np.testing.assert_allclose(decoded(answer["prediction"]), truth, atol=1e-5 * np.abs(truth).max(), rtol=0)
    assert len(decoded(answer["sensors"]["coords"])) == field.points < answer["sensors"]["usual"]
    status, solved = client.post(f"/v1/models/{name}/solve", {"state": state, "channel": channel})
    assert status == 200, solved
    np.testing.assert_allclose(
        decoded(solved["solution"]), scene.solve(state, scene.resolution)[..., channel], rtol=1e-4, atol=1e-6
    )


def test_the_description_lists_what_there_is_and_is_what_is_checked(client, service):
    status, description = client.get("/openapi.json")
    assert status == 200
    assert description["openapi"].startswith("3.1")
    assert client.get("/health")[1]["models"] == len(FAMILIES)
    models = client.get("/v1/models")[1]["models"]
    assert [model["name"] for model in models] == list(FAMILIES)
    published = description["paths"]["/v1/models/{name}/play"]["post"]["requestBody"]["content"]["application/json"]
    for name, served in service.models.items():
        details = client.get(f"/v1/models/{name}")[1]
        assert details["play"]["state"] == json.loads(json.dumps(served.scene.schema))
        schema = play_schema(served, served.scene)
        assert json.loads(json.dumps(schema)) in published["schema"]["oneOf"]
        check_json({"state": served.scene.example(0)}, schema)
    # Every address that it names answers, and with no method that it does not name.
    for path, methods in description["paths"].items():
        for method in ("get", "post"):
            status, _, _ = client.raw(method.upper(), path.replace("{name}", "burgers"), b"{}")
            assert (status == 405) == (method not in methods), (method, path)


def test_the_page_comes_with_its_files_and_nothing_from_elsewhere(client):
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")):
        status, headers, body = client.raw("GET", path)
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert not re.findall(rb"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", body)
        status, headers, packed = client.raw("GET", path, headers={"Accept-Encoding": "gzip"})
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed) == body
        assert len(packed) < len(body) / 2


@pytest.mark.parametrize(
    "path",
    ["/..", "/../api.py", "/static/app.js", "//etc/passwd", "/%2e%2e/api.py", "/app.js/", "/v1/models/../health", "/v1",
     "/v1/models/burgers/other", "/v1/models/%2e%2e%2fburgers", "/v1/models/", "/v1/models/burgers/predict/more"],
)  # fmt: skip
def test_no_address_leads_to_a_file(path, client):
    status, _, body = client.raw("GET", path)
    assert status == 404
    assert "Expected" in json.loads(body)["error"]


def bad(change, name: str = "burgers"):
    """A request to predict that one change has spoilt."""

    def request(predictors) -> tuple[str, dict[str, Any]]:
        content: Any = as_json(question(predictors[name]))
        change(content)
        return f"/v1/models/{name}/predict", content

    return request


REFUSED = {
    "no input": (bad(lambda c: c.pop("input")), "`input`"),
    "no values": (bad(lambda c: c["input"].pop("values")), "`values`"),
    "an unknown key": (bad(lambda c: c.update(color=1)), "only input, query, resolution, times"),
    "too few values": (bad(lambda c: c["input"]["values"][0].pop()), "as many values"),
    "a wrong dimension": (bad(lambda c: c["input"].update(coords=[[0, 0]] * 12)), r"\(\.\.\., points, 1\)"),
    "wrong frames": (bad(lambda c: c["input"]["values"].append(c["input"]["values"][0])), "1 frames"),
    "wrong channels": (bad(lambda c: c["input"].update(values=[[1, 2]] * 12)), "1 channels"),
    "a huge number": (bad(lambda c: c["input"]["values"][0][0].__setitem__(0, 1e300)), "finite"),
    "numbers that overflow inside": (bad(lambda c: c["input"].update(values=[3e38] * 12)), "finite"),
    "words": (bad(lambda c: c["input"]["values"][0][0].__setitem__(0, "1")), "only numbers"),
    "negative weights": (bad(lambda c: c["input"].update(weights=[-1] * 12)), "not negative"),
    "no weight at all": (bad(lambda c: c["input"].update(weights=[0] * 12)), "not all zero"),
    "weights of a wrong shape": (bad(lambda c: c["input"].update(weights=[[1]] * 12)), "as many values and weights"),
    "too many frames": (bad(lambda c: c.update(times=10**9)), "from 1 to 200"),
    "no frame": (bad(lambda c: c.update(times=0)), "from 1 to 200"),
    "too many queries": (bad(lambda c: (c.pop("query"), c.update(resolution=4097))), "4096"),
    "queries by the square": (bad(lambda c: (c.pop("query"), c.update(resolution=65)), "darcy"), "4,096 queries"),
    "no query feature": (bad(lambda c: c["query"].pop("values"), "electrostatics"), "1 channels"),
    "no query at all": (bad(lambda c: c.pop("query"), "electrostatics"), "1 channels"),
    "a code that is none": (bad(lambda c: c["query"].update(values=[[[7.0]] * 5]), "airfoil"), "codes 0 to 2"),
    "a code between": (bad(lambda c: c["query"].update(values=[[[0.5]] * 5]), "airfoil"), "codes 0 to 2"),
    "an infinite answer's worth": (bad(lambda c: c["input"].update(coords=[[1e39]] * 12)), "finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_question_is_answered_with_a_sentence(case, client, predictors):
    request, sentence = REFUSED[case]
    path, content = request(predictors)
    status, answer = client.post(path, content)
    assert status == 422, answer
    assert re.search(sentence, answer["error"]), answer["error"]


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("burgers", {"values": [0.0] * 63}, "64 to 64 entries"),
        ("burgers", {"values": [9.0] * 64}, "from -4 to 4"),
        ("darcy", {"cells": "0" * 224}, "225 to 225"),
        ("darcy", {"cells": "2" * 225}, "digits 0 and 1"),
        ("darcy", {"cells": "é" * 225}, "digits 0 and 1"),
        ("navier-stokes", {"vortices": [[0, 0]]}, "3 to 3"),
        ("electrostatics", {"shape": "star"}, "square, disc"),
        ("electrostatics", {"numbers": [1e9, 0, 0]}, "from 0 to 32"),
        ("airfoil", {"mach": 2.0}, "from 0.2 to 0.7"),
    ],
)
def test_a_state_that_is_none_is_refused(name, change, sentence, client):
    _, state = client.post(f"/v1/models/{name}/draw", {"index": 0})
    for action in ("play", "solve"):
        status, answer = client.post(f"/v1/models/{name}/{action}", {"state": {**state, **change}})
        assert status == 422, answer
        assert sentence in answer["error"]


def test_playing_knows_its_choices(client):
    _, state = client.post("/v1/models/burgers/draw", {"index": 0})
    for change in (
        {"resolution": 77},
        {"channel": 1},
        {"sensors": {"share": 0}},
        {"sensors": {"erased": [[0.5, 9.0]]}},
    ):
        status, answer = client.post("/v1/models/burgers/play", {"state": state, **change})
        assert status == 422, answer
        assert "Expected" in answer["error"]


def test_other_hosts_are_turned_away(client, service, runner):
    lab = Client(Playground(service, ["lab.example"]), runner)
    for host, status in (
        ("127.0.0.1", 200), ("localhost:80", 200), ("[::1]:8760", 200), ("evil.example", 421), ("lab.example", 421),
        ("localhost.evil.example:80", 421), ("", 421), ("[::1", 421), ("127.0.0.1.nip.io", 421),
    ):  # fmt: skip
        assert client.raw("GET", "/health", headers={"Host": host})[0] == status, host
        assert lab.raw("GET", "/health", headers={"Host": host})[0] == (200 if host == "lab.example" else status), host


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:81"}, 403),
        # Behind a proxy that ends TLS: it says so, the browser does, or nobody.
        ({"Origin": "https://lab.example", "Host": "lab.example", "X-Forwarded-Proto": "https"}, 200),
        ({"Origin": "http://lab.example", "Host": "lab.example", "X-Forwarded-Proto": "https"}, 403),
        ({"Origin": "https://lab.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "https://lab.example", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://lab.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://lab.example", "Host": "lab.example"}, 403),
    ],
)
def test_other_pages_are_turned_away_and_ones_own_is_not_behind_a_proxy(headers, status, service, runner):
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware  # as uvicorn has it before the application

    client = Client(ProxyHeadersMiddleware(Playground(service, ["lab.example"]), "*"), runner)
    got, answered, _ = client.raw("POST", "/v1/models/burgers/draw", b'{"index": 0}', {**JSON, **headers})
    assert got == status
    assert not [name for name in answered if name.startswith("access-control")]
    assert client.raw("OPTIONS", "/v1/models/burgers/draw", headers=headers)[0] == (405 if status == 200 else 403)


def test_bodies_are_bounded_and_typed(client):
    path = "/v1/models/burgers/predict"
    assert client.raw("POST", path, b"{}", {"Content-Type": "text/plain"})[0] == 415
    for body, headers in ((b" " * (2**20 + 1), JSON), (17 * [b" " * 2**16] + [b""], JSON)):  # announced, and in chunks
        status, _, answer = client.raw("POST", path, body, headers)
        assert status == 413
        assert "1,048,576" in json.loads(answer)["error"]
    for method, target, status in (
        ("POST", "/v1/models/unheard/predict", 404), ("GET", path, 405), ("POST", "/health", 405), ("DELETE", path, 405)
    ):  # fmt: skip
        code, headers, answer = client.raw(method, target, b"{}", JSON)
        assert code == status
        assert "Expected" in json.loads(answer)["error"]
        assert ("allow" in headers) == (status == 405)


def test_a_body_in_chunks_is_one_body(client, predictors):
    content = question(predictors["burgers"])
    body = json.dumps(as_json(content)).encode()
    parts = [body[:40], 0.01, body[40:90], body[90:], b""]
    status, _, answer = client.raw("POST", "/v1/models/burgers/predict", parts, JSON)
    assert status == 200, answer
    np.testing.assert_allclose(json.loads(answer)["values"], expected(predictors["burgers"], content), rtol=1e-4)


def test_a_body_below_the_least_pace_is_ended_and_one_at_the_pace_is_not(client, monkeypatch):
    monkeypatch.setattr(asgi, "FIRST", 0.1)
    monkeypatch.setattr(asgi, "RATE", 100)
    slow = [b'{"index"', 0.05, *([b" ", 0.05] * 20), b": 0}", b""]
    status, _, answer = client.raw("POST", "/v1/models/burgers/draw", slow, JSON)
    assert status == 408, answer
    paced = [b'{"index"', *([b" " * 10, 0.05] * 6), b": 0}", b""]  # 200 bytes a second
    assert client.raw("POST", "/v1/models/burgers/draw", paced, JSON)[0] == 200


def test_it_is_mounted_in_another_application_under_a_prefix(app, runner, predictors):
    client = Client(Starlette(routes=[Mount("/pde", app)]), runner)
    assert client.get("/pde/health")[1]["models"] == len(FAMILIES)
    content = question(predictors["darcy"])
    status, answer = client.post("/pde/v1/models/darcy/predict", as_json(content))
    assert status == 200, answer
    np.testing.assert_allclose(answer["values"], expected(predictors["darcy"], content), rtol=1e-4)
    assert client.get("/pde/openapi.json")[1]["servers"] == [{"url": "/pde"}]
    status, answer = client.get("/pde/unheard")
    assert (status, "Expected" in answer["error"]) == (404, True)
    page = client.raw("GET", "/pde/")[2].decode() + client.raw("GET", "/pde/app.js")[2].decode()
    assert not re.findall(r"""(?:href|src)="/|ask\([`"']/""", page)  # the page asks relative to itself


def test_what_is_served_is_counted_for_prometheus(service, runner):
    client = Client(Playground(service), runner)
    client.post("/v1/models/burgers/draw", {"index": 0})
    client.post("/v1/models/burgers/draw", {"index": -1})
    client.post("/v1/models/unheard/draw", {"index": 0})
    client.get('/"no{such}address')
    status, headers, body = client.raw("GET", "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert values['oformer_requests_total{route="draw",model="burgers",status="200"}'] == "1"
    assert values['oformer_requests_total{route="draw",model="burgers",status="422"}'] == "1"
    assert values['oformer_requests_total{route="draw",model="",status="404"}'] == "1"
    assert values['oformer_requests_total{route="none",model="",status="404"}'] == "1"
    assert float(values['oformer_request_seconds_total{route="draw",model="burgers"}']) > 0
    assert values["oformer_active"] == "1"


def test_operators_are_loaded_when_they_are_asked_for(predictors, runner):
    loaded = []
    models = {name: lambda name=name: loaded.append(name) or predictors[name] for name in ("burgers", "darcy")}
    client = Client(Playground(Service(models)), runner)
    assert client.get("/health")[0] == 200
    assert not loaded
    assert client.post("/v1/models/darcy/draw", {"index": 0})[0] == 200
    assert client.post("/v1/models/darcy/draw", {"index": 1})[0] == 200
    assert loaded == ["darcy"]
    assert [model["name"] for model in client.get("/v1/models")[1]["models"]] == ["burgers", "darcy"]
    assert loaded == ["darcy", "burgers"]


def test_what_many_ask_at_once_is_answered_in_batches_and_each_gets_its_own(app, runner, predictors, monkeypatch):
    """Of one shape; another shape, and what is refused, disturb nobody."""
    predictor, sizes = predictors["burgers"], []
    original = type(predictor).__call__

    def record(self, field, *rest, **options):
        sizes.append(field.coords.shape[0] if field.coords.ndim == 3 else 1)
        return original(self, field, *rest, **options)

    monkeypatch.setattr(type(predictor), "__call__", record)
    contents = [question(predictor, points=7 if i == 5 else 12, seed=i) for i in range(16)]
    requests = [as_json(content) for content in contents]
    requests[3]["input"]["values"] = [3e38] * 12

    async def all_of_them():
        path, bodies = "/v1/models/burgers/predict", [json.dumps(request).encode() for request in requests]
        return await asyncio.gather(*(ask(app, "POST", path, body, JSON) for body in bodies))

    answers = runner.run(all_of_them())
    monkeypatch.undo()
    assert max(sizes) > 4
    assert sum(sizes) == 16
    for i, (status, _, body) in enumerate(answers):
        assert status == (422 if i == 3 else 200), body
        if i != 3:
            truth = expected(predictor, contents[i]).numpy()
            np.testing.assert_allclose(json.loads(body)["values"], truth, rtol=1e-4, atol=1e-6)


def test_a_large_answer_is_for_binary_alone(predictors, client):
    """4,096 queries in 200 frames are more than JSON may hold, and less than an archive may."""
    name = "navier-stokes"
    content = as_json(question(predictors[name]))
    del content["query"]
    status, answer = client.post(f"/v1/models/{name}/predict", {**content, "resolution": 64, "times": 200})
    assert status == 422
    assert "524,288 numbers, got 819,200. Ask in binary" in answer["error"]
    buffer = io.BytesIO()
    np.savez(buffer, **content["input"], resolution=64, times=200)
    status, _, body = client.raw("POST", f"/v1/models/{name}/predict", buffer.getvalue(), {"Content-Type": NPZ})
    assert status == 200
    with np.load(io.BytesIO(body)) as arrays:
        assert arrays["values"].shape == (200, 4096, 1)


def occupied(app: Playground) -> threading.Event:
    """Give the queue a job that ends when told to."""
    end = threading.Event()
    app.answers._thread.submit(end.wait, 60)
    return end


def test_a_full_queue_is_a_503_that_says_when_to_come_again_and_who_leaves_costs_nothing(predictors, runner):
    app = Playground(Service({"burgers": predictors["burgers"]}, Limits(waiting=1)))
    end, drawn = occupied(app), []
    app.service.draw = lambda name, index: drawn.append(index) or {}

    async def test():
        def draw(index):
            return asyncio.create_task(ask(app, "POST", "/v1/models/burgers/draw", b'{"index": %d}' % index, JSON))

        leaves = asyncio.create_task(ask(app, "POST", "/v1/models/burgers/draw", [b'{"index": 9}', b"", 0.05], JSON))
        while not len(app.answers):
            await asyncio.sleep(0.01)
        assert (await leaves)[0] == 499
        tasks = [draw(i) for i in range(4)]
        refused = [await task for task in tasks[1:]]  # the first one waits
        end.set()
        return [await tasks[0], *refused]

    answers = runner.run(test())
    assert [status for status, _, _ in answers] == [200, 503, 503, 503]
    assert int(answers[1][1]["retry-after"]) >= 1
    assert "waiting" in json.loads(answers[1][2])["error"]
    assert drawn == [0]


def test_a_mistake_of_ours_is_a_500_without_its_story(client, service, monkeypatch):
    monkeypatch.setattr(service, "draw", lambda name, index: 1 / 0)
    status, answer = client.post("/v1/models/burgers/draw", {"index": 0})
    assert status == 500
    assert "ZeroDivision" not in answer["error"]


# ---- memory


def test_large_bodies_and_answers_share_the_memory(predictors, runner, monkeypatch):
    """While one is at work, another is told to come again; small ones are answered."""
    app = Playground(Service({"burgers": predictors["burgers"]}, Limits(memory=300_000)))
    end, body = occupied(app), json.dumps(as_json(question(predictors["burgers"]))).encode()

    async def test():
        path = "/v1/models/burgers/predict"
        large = asyncio.create_task(ask(app, "POST", path, body + b" " * 200_000, JSON))
        small = asyncio.create_task(ask(app, "POST", path, body, JSON))
        while len(app.answers) < 2:
            await asyncio.sleep(0.01)
        assert (await ask(app, "POST", path, body + b" " * 200_000, JSON))[0] == 503
        end.set()
        assert (await large)[0] == (await small)[0] == (await ask(app, "POST", path, body, JSON))[0] == 200
        assert app.room.held == 0

    runner.run(test())


# ---- many that are wrong


JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2.5, 1e308, -1e308, 10**30, "", "x", "\ud800", "0" * 300, [], [[]], [1, [2]], [None], {},
    {"a": 1}, [[0.0]] * 50, [[1e39, 1]],
)  # fmt: skip


def spoilt(content: Any, dice: random.Random) -> Any:
    """The same with something in it replaced, removed or added."""
    if dice.random() < 0.3 or not isinstance(content, (dict, list)) or not content:
        return dice.choice(JUNK)
    if isinstance(content, dict):
        changed = dict(content)
        key = dice.choice(list(changed))
        kind = dice.random()
        if kind < 0.2:
            del changed[key]
        elif kind < 0.4:
            changed[dice.choice(["x", "state", "sensors", "times", "resolution", ""])] = dice.choice(JUNK)
        else:
            changed[key] = spoilt(changed[key], dice)
        return changed
    changed = list(content)
    place = dice.randrange(len(changed))
    if dice.random() < 0.2:
        del changed[place]
    else:
        changed[place] = spoilt(changed[place], dice)
    return changed


def fuzz(client: Client, predictors, service, count: int, seed: int) -> dict[int, int]:
    """Malformed requests of all kinds, one after another; the statuses that came back, with how often."""
    dice = random.Random(seed)
    valid: dict[str, list[dict[str, Any]]] = {"predict": [], "play": [], "solve": [], "draw": [{"index": 0}]}
    names = [name for name in FAMILIES if name != "airfoil"]
    bodies = {}
    for name in names:
        state = service.models[name].scene.example(1)
        sensors = {"share": 0.5, "seed": 1, "erased": [[0.5] * (predictors[name].spec.dim + 1)], "added": []}
        bodies[name] = {
            "predict": {**as_json(question(predictors[name])), "times": 1},
            "play": {"state": state, "sensors": sensors, "channel": 0},
            "solve": {"state": state},
            "draw": {"index": 0},
        }
    buffer = io.BytesIO()
    np.savez(buffer, coords=np.random.default_rng(0).random((9, 1)), values=np.ones((1, 9, 1)), times=np.array(1))
    archive = buffer.getvalue()
    seen: dict[int, int] = {}
    for _ in range(count):
        kind = dice.random()
        name, action = dice.choice(names), dice.choice(list(valid))
        headers, path = dict(JSON), f"/v1/models/{name}/{action}"
        if kind < 0.75:
            content = bodies[name][action]
            for _ in range(dice.randrange(1, 4)):
                content = spoilt(content, dice)
            body = json.dumps(content).encode()
        elif kind < 0.85:
            body = bytearray(json.dumps(bodies[name][action]).encode())
            for _ in range(dice.randrange(1, 6)):
                body[dice.randrange(len(body))] = dice.randrange(256)
            body = bytes(body)
        else:
            body = bytearray(archive)
            for _ in range(dice.randrange(1, 8)):
                body[dice.randrange(len(body))] = dice.randrange(256)
            body = bytes(body[: dice.choice([len(body), dice.randrange(len(body))])])
            headers, path = {"Content-Type": NPZ}, "/v1/models/burgers/predict"
        if dice.random() < 0.05:
            path = dice.choice(["/", "/v1", path + "/x", path.replace("models", "m"), "/%ff", "/v1/models/%00/play"])
        if dice.random() < 0.05:
            headers[dice.choice(["Host", "Content-Type", "Origin", "Expect"])] = dice.choice(["x", "", "100-continue"])
        status = client.raw(dice.choice(["POST"] * 9 + ["PUT"]), path, body, headers)[0]
        seen[status] = seen.get(status, 0) + 1
    return seen


def resident() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_fuzz(seen: dict[int, int], count: int) -> None:
    assert sum(seen.values()) == count, seen
    assert not [status for status in seen if status >= 500], seen
    assert sum(n for status, n in seen.items() if 400 <= status < 500) > 0.8 * count, seen


def test_malformed_requests_never_break_it(client, predictors, service):
    check_fuzz(fuzz(client, predictors, service, 300, seed=1), 300)


@pytest.mark.slow
def test_ten_thousand_malformed_requests(client, predictors, service):
    fuzz(client, predictors, service, 500, seed=2)  # what is kept is filled first
    before = resident()
    check_fuzz(fuzz(client, predictors, service, 10_000, seed=3), 10_000)
    assert resident() - before < 150e6
    assert client.get("/health")[0] == 200


# ---- starting


def test_names_differ_and_fit_into_an_address():
    assert named(["burgers", "burgers", "my run/é", ""]) == ["burgers", "burgers-2", "my-run--", "model"]


def test_an_operator_of_data_alone_is_served_without_a_scene(predictors, runner):
    alone = Predictor(dataclasses.replace(predictors["burgers"].checkpoint, recipe=None, data=None), "cpu", warn=False)
    client = Client(Playground(Service({"mine": alone})), runner)
    assert client.get("/v1/models")[1]["models"][0]["scene"] is None
    assert "play" not in client.get("/v1/models/mine")[1]
    assert client.post("/v1/models/mine/predict", as_json(question(alone)))[0] == 200
    status, answer = client.post("/v1/models/mine/draw", {"index": 0})
    assert status == 422
    assert "data alone" in answer["error"]
    assert list(client.get("/openapi.json")[1]["paths"])[-1].endswith("/predict")


def test_the_environment_says_what_an_application_serves(checkpoints, monkeypatch, runner):
    monkeypatch.setenv("OFORMER_SERVE_MODELS", f"{checkpoints['burgers']},{checkpoints['darcy']}")
    monkeypatch.setenv("OFORMER_SERVE_NAMES", "lab.example,pde.example")
    monkeypatch.setenv("OFORMER_SERVE_DEVICE", "cpu")
    _, _, body = Client(create_app(), runner).raw("GET", "/v1/models", headers={"Host": "pde.example"})
    assert [model["name"] for model in json.loads(body)["models"]] == ["burgers", "darcy"]
    monkeypatch.setenv("OFORMER_SERVE_MODELS", "unheard-of")
    with pytest.raises(InputError, match="unheard-of"):
        asgi.app  # noqa: B018
    monkeypatch.delenv("OFORMER_SERVE_MODELS")
    assert set(create_app([checkpoints["burgers"]]).service.models) == {"burgers"}


def test_a_port_that_is_taken_is_said_plainly(port):
    with pytest.raises(InputError, match="--port"):
        listen("127.0.0.1", port)


def test_without_anything_to_serve_the_command_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OFORMER_ZOO", str(tmp_path))
    assert main(["serve"]) == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_the_extra_the_command_names_it(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["serve"]) == 2
    assert "'oformer[serve]'" in capsys.readouterr().err
