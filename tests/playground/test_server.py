"""Over HTTP: the answers are the predictor's, everything else is refused with a sentence, and nothing is mixed up."""

import dataclasses
import functools
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oformer.cli import main
from oformer.errors import InputError
from oformer.fields import Field
from oformer.playground.api import Limits, Service, named
from oformer.playground.openapi import NPZ, play_schema
from oformer.playground.requests import check_json
from oformer.playground.scenes.base import Sensors
from oformer.playground.server import Server, serve
from oformer.predict import Predictor
from tests.playground.conftest import FAMILIES, Client, decoded

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
    assert (status, headers["Content-Type"]) == (200, NPZ)
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        np.testing.assert_allclose(arrays["values"], truth, rtol=1e-5, atol=1e-6 * np.abs(truth).max())
        np.testing.assert_array_equal(arrays["coords"], content["query"]["coords"].numpy())


def test_the_examples_of_the_docs_work_as_they_stand(client, server, predictors):
    """But for the address and the name of the operator."""
    text = (ROOT / "docs" / "serving.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    address = server.address.rstrip("/")
    exec(code.replace("http://127.0.0.1:8760", address).replace("burgers-demo", "burgers"), names)
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
            status, _, _ = client.raw(
                method.upper(), path.replace("{name}", "burgers"), b"{}" if method == "post" else None
            )
            assert (status == 405) == (method not in methods), (method, path)


def test_the_page_comes_with_its_files_and_nothing_from_elsewhere(client):
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/style.css", "text/css")):
        status, headers, body = client.raw("GET", path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert not re.findall(rb"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", body)
    status, headers, body = client.raw("HEAD", "/")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


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
    assert client.get("/health")[0] == 200  # on the same connection


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


def test_other_hosts_and_other_pages_are_turned_away(client, server):
    port = client.port
    for host, status in (
        (f"127.0.0.1:{port}", 200), (f"localhost:{port}", 200), (f"[::1]:{port}", 200), ("evil.example", 421),
        (f"localhost.evil.example:{port}", 421), ("", 421), ("[::1", 421), ("127.0.0.1.nip.io", 421),
    ):  # fmt: skip
        assert client.raw("GET", "/health", headers={"Host": host})[0] == status, host
    body = json.dumps({"index": 0}).encode()
    ours, theirs = f"http://127.0.0.1:{port}", "https://evil.example"
    path = "/v1/models/burgers/draw"
    assert client.raw("POST", path, body, {**JSON, "Origin": ours})[0] == 200
    status, headers, _ = client.raw("POST", path, body, {**JSON, "Origin": theirs})
    assert status == 403
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert client.raw("OPTIONS", path, headers={"Origin": theirs})[0] == 405
    named_server = Server(server.service, name="lab.example")
    assert "lab.example" in named_server.names
    named_server.stop(0)


def test_bodies_are_bounded_and_typed(client):
    path = "/v1/models/burgers/predict"
    assert client.raw("POST", path, b"{}", {"Content-Type": "text/plain"})[0] == 415
    assert client.raw("POST", path, b"{}", {**JSON, "Content-Length": "x"})[0] == 400
    client.connection.close()
    status, _, body = client.raw("POST", path, b" " * (2**20 + 1), JSON)
    assert status == 413
    assert "1,048,576" in json.loads(body)["error"]
    client.connection.close()
    assert client.raw("POST", path, b"{}", {**JSON, "Transfer-Encoding": "chunked"})[0] == 411
    client.connection.close()
    assert client.raw("POST", "/v1/models/unheard/predict", b"{}", JSON)[0] == 404
    assert client.raw("GET", path)[0] == 405
    assert client.raw("POST", "/health", b"{}", JSON)[0] == 405
    assert client.raw("DELETE", path)[0] == 405


def spoken(server: Server, text: bytes, wait: float = 5.0) -> bytes:
    """What the server says to bytes that no library would send."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=wait) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionError):
            pass
        return answer


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"BREW /pot HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"POST /v1/models/burgers/draw HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         b"Content-Length: 50\r\n\r\n{}", 400),
    ],
)  # fmt: skip
def test_requests_that_are_hardly_any(text, status, server):
    answer = spoken(server, text)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:80]
    assert b'{"error":"Expected' in answer


def test_a_client_that_leaves_costs_nothing(server, client):
    """Its request is taken off the line without being answered."""
    begun, end = threading.Event(), threading.Event()
    threading.Thread(target=lambda: server.answers.do(lambda: (begun.set(), end.wait(10))), daemon=True).start()
    assert begun.wait(60)
    body = json.dumps({"index": 0}).encode()
    drawn = []
    service = server.service
    original, service.draw = service.draw, lambda name, index: drawn.append(name)
    try:
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
            head = "POST /v1/models/burgers/draw HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while not len(server.answers):
                time.sleep(0.01)
        end.set()
        server.answers.do(lambda: None)
    finally:
        service.draw = original
    assert not drawn


def asked(server: Server):
    with Client(server) as client:
        return client.raw("POST", "/v1/models/burgers/draw", b'{"index": 0}', JSON)


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


def test_a_full_line_is_a_503_that_says_when_to_come_again(predictors):
    server = Server(Service({"burgers": predictors["burgers"]}, Limits(waiting=1)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begun, end = threading.Event(), threading.Event()
    threading.Thread(target=lambda: server.answers.do(lambda: (begun.set(), end.wait(10))), daemon=True).start()
    assert begun.wait(60)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(asked, server) for _ in range(4)]
        while sum(future.done() for future in futures) < 3:
            time.sleep(0.01)
        end.set()
        answers = [future.result() for future in futures]
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200, 503, 503, 503]
    refused = next(answer for answer in answers if answer[0] == 503)
    assert int(refused[1]["Retry-After"]) >= 1
    assert "waiting" in json.loads(refused[2])["error"]
    server.shutdown()
    server.stop()


def test_a_mistake_of_ours_is_a_500_without_its_story(client, server, monkeypatch, capsys):
    monkeypatch.setattr(server.service, "draw", lambda name, index: 1 / 0)
    status, answer = client.post("/v1/models/burgers/draw", {"index": 0})
    assert status == 500
    assert "ZeroDivision" not in answer["error"]
    assert "ZeroDivisionError" in capsys.readouterr().err


# ---- many at once, and many that are wrong


def concurrent(server: Server, predictors, count: int, threads: int) -> None:
    """Each of many clients asks something else at the same moment, and gets its own answer, after a no or at once."""
    name = "burgers"
    contents = [question(predictors[name], points=4 + i % 9, seed=i) for i in range(count)]
    gate = threading.Barrier(threads)

    def one(i: int) -> np.ndarray:
        if i < threads:
            gate.wait(60)
        request = json.dumps(as_json(contents[i])).encode()
        with Client(server, seconds=600) as client:
            while True:
                status, headers, body = client.raw("POST", f"/v1/models/{name}/predict", request, JSON)
                if status != 503:
                    assert status == 200, body
                    return np.array(json.loads(body)["values"])
                time.sleep(int(headers["Retry-After"]) * (0.5 + i % 100 / 100))  # as told, and not all at once

    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(one, range(count)))
    for content, answer in zip(contents, answers, strict=True):
        truth = expected(predictors[name], content).numpy()
        np.testing.assert_allclose(answer, truth, rtol=1e-4, atol=1e-6)


def test_answers_are_neither_lost_nor_mixed(server, predictors):
    concurrent(server, predictors, 48, 48)


@pytest.mark.slow
def test_a_thousand_at_once(server, predictors):
    concurrent(server, predictors, 1000, 1000)


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


def fuzz(server: Server, predictors, service, count: int, seed: int) -> dict[int, int]:
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
    client = Client(server)
    for _ in range(count):
        kind = dice.random()
        if kind < 0.05:
            noise = dice.randbytes(dice.randrange(1, 200))
            head = dice.choice(
                [b"", b"GET ", b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\n", b"GET / HTTP/1.1\r\n"]
            )
            answer = spoken(server, head + noise + b"\r\n\r\n", 3.0)
            status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 400
        else:
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
                path = dice.choice(
                    ["/", "/v1", path + "/x", path.replace("models", "m"), "/%ff", "/v1/models/%00/play"]
                )
            if dice.random() < 0.05:
                headers[dice.choice(["Host", "Content-Type", "Origin", "Expect"])] = dice.choice(
                    ["x", "", "100-continue"]
                )
            try:
                status = client.raw(dice.choice(["POST"] * 9 + ["PUT"]), path, body, headers)[0]
            except OSError:
                client.connection.close()
                continue
        seen[status] = seen.get(status, 0) + 1
    client.connection.close()
    return seen


def resident() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_fuzz(seen: dict[int, int], count: int) -> None:
    assert sum(seen.values()) > 0.97 * count, seen
    assert not [status for status in seen if status >= 500], seen
    assert sum(n for status, n in seen.items() if 400 <= status < 500) > 0.8 * count, seen


def test_malformed_requests_never_break_it(server, predictors, service):
    check_fuzz(fuzz(server, predictors, service, 300, seed=1), 300)


@pytest.mark.slow
def test_ten_thousand_malformed_requests(server, predictors, service):
    fuzz(server, predictors, service, 500, seed=2)  # what is kept is filled first
    before = resident()
    check_fuzz(fuzz(server, predictors, service, 10_000, seed=3), 10_000)
    assert resident() - before < 150e6
    with Client(server) as client:
        assert client.get("/health")[0] == 200


# ---- starting and stopping


def test_names_differ_and_fit_into_an_address(predictors):
    checkpoint = predictors["burgers"].checkpoint
    strange = dataclasses.replace(checkpoint, name="my run/é")
    operators = [Predictor(content, "cpu") for content in (checkpoint, checkpoint, strange)]
    assert list(named(operators)) == ["burgers", "burgers-2", "my-run--"]


def test_an_operator_of_data_alone_is_served_without_a_scene(predictors):
    alone = Predictor(dataclasses.replace(predictors["burgers"].checkpoint, recipe=None, data=None), "cpu", warn=False)
    server = Server(Service({"mine": alone}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with Client(server) as client:
        assert client.get("/v1/models")[1]["models"][0]["scene"] is None
        assert "play" not in client.get("/v1/models/mine")[1]
        assert client.post("/v1/models/mine/predict", as_json(question(alone)))[0] == 200
        status, answer = client.post("/v1/models/mine/draw", {"index": 0})
        assert status == 422
        assert "data alone" in answer["error"]
        assert list(client.get("/openapi.json")[1]["paths"])[-1].endswith("/predict")
    server.shutdown()
    server.stop()


def test_a_port_that_is_taken_is_said_plainly(server, checkpoints):
    with pytest.raises(InputError, match="--port"):
        serve([checkpoints["burgers"]], port=server.server_address[1])


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_the_command_serves_until_it_is_told_to_stop(checkpoints):
    command = [sys.executable, "-m", "oformer", "serve", str(checkpoints["burgers"]), "--port", "0", "--device", "cpu"]
    # Who runs the tests in the background may have it ignore this signal, and children would do so, too.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heard)
    assert process.stderr is not None
    try:
        lines = [process.stderr.readline() for _ in range(2)]
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", lines[1])
        assert found, lines
        with urllib.request.urlopen(f"{found[0]}health", timeout=30) as response:
            assert json.load(response)["status"] == "ok"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "Stopping" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_what_is_being_answered_is_answered_before_it_stops(predictors, monkeypatch):
    server = Server(Service({"burgers": predictors["burgers"]}))
    loop = threading.Thread(target=server.serve_forever, daemon=True)
    loop.start()
    begun, end = threading.Event(), threading.Event()
    monkeypatch.setattr(server.service, "draw", lambda name, index: {"late": begun.set() or end.wait(10)})
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(asked, server)
        assert begun.wait(60)
        server.shutdown()
        stopped = pool.submit(server.stop)
        time.sleep(0.1)
        assert not stopped.done()
        end.set()
        assert answer.result()[::2] == (200, b'{"late":true}')
        assert stopped.result()
    loop.join(60)


def test_without_anything_to_serve_the_command_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OFORMER_ZOO", str(tmp_path))
    assert main(["serve"]) == 2
    assert "demo" in capsys.readouterr().err
