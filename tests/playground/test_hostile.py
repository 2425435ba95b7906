"""Clients that are slow, many, greedy or ambiguous: the others are answered all the same, and memory stays bounded."""

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.fields import Field
from oformer.playground import server as http_server
from oformer.playground.api import Limits, Service
from oformer.playground.openapi import NPZ
from oformer.playground.server import Server
from tests.playground.conftest import Client

ROOT = Path(__file__).resolve().parent.parent.parent
PREDICT = "/v1/models/burgers/predict"
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def serving(predictors, limits: Limits | None = None) -> Iterator[Server]:
    server = Server(Service({"burgers": predictors["burgers"]}, limits))
    loop = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    loop.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.stop(0)
        loop.join(60)


def opened(server: Server, text: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)
    connection.sendall(text)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


def head(length: object, path: str = PREDICT) -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def question(points: int) -> dict:
    x = np.linspace(0, 1, points, endpoint=False)
    return {"coords": x[:, None], "values": np.sin(x)[:, None]}


def as_json(points: int) -> bytes:
    return json.dumps({"input": {name: array.tolist() for name, array in question(points).items()}}).encode()


# ---- slow and many


def test_three_hundred_connections_that_never_end_their_head_do_not_keep_a_request_waiting(predictors):
    with serving(predictors) as server, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(opened(server, b"GET / HTTP/1.1\r\nHost: local"))
        start = time.monotonic()
        with Client(server, seconds=5) as client:
            assert client.get("/health")[0] == 200
        assert time.monotonic() - start < 4


def test_a_head_that_trickles_is_ended_at_its_deadline(predictors, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD", 0.5)
    with serving(predictors) as server, opened(server, b"GET /health HTTP/1.1\r\n") as connection:
        start = time.monotonic()
        connection.settimeout(0.1)
        answer = b""
        while not answer:
            connection.sendall(b"A")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
            assert time.monotonic() - start < 3
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_four_slow_bodies_leave_room_for_large_and_small_ones(predictors):
    with serving(predictors) as server, contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(opened(server, head(server.service.limits.body) + b'{"input"'))
        time.sleep(0.2)
        start = time.monotonic()
        with Client(server, seconds=10) as client:
            for points in (16, 16_384):
                status, _, answer = client.raw("POST", PREDICT, as_json(points), JSON)
                assert status == 200, answer
        assert time.monotonic() - start < 5


def test_a_body_below_the_least_pace_is_ended(predictors, monkeypatch):
    monkeypatch.setattr(http_server, "FIRST", 0.3)
    monkeypatch.setattr(http_server, "RATE", 1000)
    with serving(predictors) as server, opened(server, head(100_000)) as connection:
        start = time.monotonic()
        connection.settimeout(0.05)
        sent, answer = 0, b""
        while not answer:
            connection.sendall(b" " * 10)  # 200 bytes a second
            sent += 10
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
            assert time.monotonic() - start < 3
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert sent > 40  # and those at the pace are not


def test_connections_beyond_the_limit_are_told_so_where_all_others_are_at_work(predictors, monkeypatch):
    with serving(predictors, Limits(connections=2)) as server:
        begun, end = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(server.service, "model", lambda name: (begun.release(), end.wait(10)))
        with ThreadPoolExecutor(2) as pool:

            def ask() -> None:
                with Client(server) as client:
                    client.raw("GET", "/v1/models/burgers")

            waiting = [pool.submit(ask) for _ in range(2)]
            assert begun.acquire(timeout=60)
            assert begun.acquire(timeout=60)
            with opened(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
                answer = received(connection)
            end.set()
            for one in waiting:
                one.result()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer
        assert b'{"error":"' in answer
        with Client(server) as client:
            assert client.get("/health")[0] == 200


# ---- memory


def peak(server: Server, bodies: list[bytes], headers: dict[str, str]) -> int:
    """Bytes that were allocated at once while all bodies were answered at the same time."""

    def send(body: bytes) -> int:
        with Client(server) as client:
            return client.raw("POST", PREDICT, body, headers)[0]

    tracemalloc.start()
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            statuses = list(pool.map(send, bodies))
        return tracemalloc.get_traced_memory()[1] if statuses == [200] * len(bodies) else sys.maxsize
    finally:
        tracemalloc.stop()


def test_four_large_bodies_at_once_take_a_few_times_their_size(predictors, monkeypatch):
    points = 40_000
    with serving(predictors, Limits(body=2**21, points=points)) as server:
        monkeypatch.setattr(server.service, "predict", lambda name, question, room: small)
        small = Field.of(torch.zeros(4, 1), torch.zeros(1, 4, 1))
        whole = json.dumps({"input": {"coords": [[0.5]] * points, "values": [[0.25]] * points}})
        body = whole.replace(" ", "").encode()
        assert peak(server, 4 * [body], JSON) < 6 * 4 * len(body)


def test_an_archive_that_unpacks_to_much_is_counted_as_what_it_becomes(predictors, monkeypatch):
    """While one of them is at work, another is told to come again."""
    limits = Limits(points=10_000, memory=300_000)
    zeros = np.zeros((10_000, 1))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, coords=zeros, values=zeros)
    assert len(buffer.getvalue()) < 2000
    with serving(predictors, limits) as server:
        begun, end = threading.Event(), threading.Event()
        small = Field.of(torch.zeros(4, 1), torch.zeros(1, 4, 1))
        monkeypatch.setattr(server.service, "predict", lambda *arguments: begun.set() or (end.wait(10) and small))

        def send() -> int:
            with Client(server) as client:
                return client.raw("POST", PREDICT, buffer.getvalue(), {"Content-Type": NPZ})[0]

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(send)
            assert begun.wait(60)
            assert send() == 503
            end.set()
            assert first.result() == 200
        assert send() == 200


# ---- where a request ends

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(SMUGGLED)
AMBIGUOUS = {
    "a length and chunks": LENGTH + b"Transfer-Encoding: chunked\r\n",
    "chunks and a length": b"Transfer-Encoding: chunked\r\n" + LENGTH,
    "a length and unknown coding": LENGTH + b"Transfer-Encoding: xchunked\r\n",
    "two lengths": b"Content-Length: 0\r\n" + LENGTH,
    "a length twice": LENGTH + LENGTH,
    "a list of lengths": b"Content-Length: 0, 0\r\n",
    "a signed length": b"Content-Length: +0\r\n",
    "a negative length": b"Content-Length: -1\r\n",
    "a length with an underscore": b"Content-Length: 0_0\r\n",
    "a hexadecimal length": b"Content-Length: 0x0\r\n",
    "a length with a space inside": b"Content-Length: 0 0\r\n",
    "a length behind a vertical tab": b"Content-Length: \x0b0\r\n",
    "an empty length": b"Content-Length:\r\n",
    "a length in other digits": "Content-Length: ٠\r\n".encode(),
    "a length of many digits": b"Content-Length: 0000000000000000\r\n",
    "a space before the colon": LENGTH.replace(b":", b" :"),
    "a tab before the colon": LENGTH.replace(b":", b"\t:"),
    "a folded length": b"Content-Length:\r\n 0\r\n",
    "a folded field that hides a length": b"A: b\r\n " + LENGTH,
    "a first line that is folded": b" A: b\r\n" + LENGTH,
    "a line feed alone": b"A: b\n" + LENGTH,
    "a line feed alone at the end": LENGTH + b"A: b\n",
    "a carriage return alone": b"A: b\r" + LENGTH,
    "a zero byte": b"A: b\0" + LENGTH,
    "a line without a colon": b"hello\r\n" + LENGTH,
    "a name that is none": b"A(: b\r\n" + LENGTH,
    "no name": b": b\r\n" + LENGTH,
}
REQUEST_LINES = {
    "two spaces": b"GET  /health HTTP/1.1",
    "a tab": b"GET\t/health HTTP/1.1",
    "no version": b"GET /health",
    "another version": b"GET /health HTTP/1.10",
    "a version with a sign": b"GET /health HTTP/+1.1",
    "a space at the end": b"GET /health HTTP/1.1 ",
    "a space at the beginning": b" GET /health HTTP/1.1",
    "a line before": b"\r\nGET /health HTTP/1.1",
    "a control character": b"GET /hea\x01lth HTTP/1.1",
    "a method that is none": b"G@T /health HTTP/1.1",
}


def check_refused(server: Server, text: bytes, status: int = 400) -> None:
    """One answer, and then the end: what follows is no request."""
    with opened(server, text) as connection:
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"Server: ") == 1, answer
    assert b"Connection: close" in answer


@pytest.mark.parametrize("method", [b"GET /health", b"POST " + PREDICT.encode()], ids=["GET", "POST"])
@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_its_connection_closed(case, method, server):
    start = method + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    check_refused(server, start + AMBIGUOUS[case] + b"\r\n" + SMUGGLED)


@pytest.mark.parametrize("case", REQUEST_LINES)
def test_a_request_line_is_one_in_the_form_of_the_standard(case, server):
    check_refused(server, REQUEST_LINES[case] + b"\r\nHost: localhost\r\n\r\n" + SMUGGLED)


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + LENGTH, 200),  # answered, but its body is none
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n" + LENGTH, 421),
        (b"GET /health HTTP/1.1\r\n" + LENGTH, 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n" + LENGTH, 400),
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\n" + LENGTH, 405),
        (b"PUT /health HTTP/1.1\r\nHost: localhost\r\n" + LENGTH, 405),
        (b"POST /v1/models/burgers/draw HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n" + LENGTH, 415),
        (b"POST /v1/models/burgers/draw HTTP/1.1\r\nHost: localhost\r\nOrigin: http://x\r\n" + LENGTH, 403),
        (b"POST /v1/models/unheard/draw HTTP/1.1\r\nHost: localhost\r\n" + LENGTH, 404),
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n", 411),
        (b"POST /health HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n", 400),
    ],
)
def test_a_body_that_was_not_read_is_never_taken_for_the_next_request(start, status, server):
    check_refused(server, start + b"\r\n" + SMUGGLED, status)


def test_requests_behind_each_other_are_answered_in_their_order(server):
    body = b'{"index": 0}'
    texts = [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head(len(body), "/v1/models/burgers/draw") + body,
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]
    with opened(server, b"".join(texts)) as connection:
        answers = received(connection).split(b"HTTP/1.1 200 OK\r\n")
    assert len(answers) == 4
    assert [
        word in answer for word, answer in zip((b"status", b"values", b"models"), answers[1:], strict=True)
    ] == 3 * [True]


def test_a_body_is_asked_for_where_the_client_waits_for_that(server):
    body = b'{"index": 0}'
    text = head(len(body), "/v1/models/burgers/draw").replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
    with opened(server, text) as connection:
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    with opened(server, text.replace(b"burgers", b"unheard")) as connection:
        assert received(connection).startswith(b"HTTP/1.1 404 ")


# ---- the end

SLOW = """
import functools, sys, time, torch
from oformer.cli import main
from oformer.playground import server
from oformer.playground.api import Limits, Service

def draw(self, name, index):
    print("begun", file=sys.stderr, flush=True)
    {work}
    return {{"late": True}}

Service.draw = draw
Service.warm = lambda self, name: None
server.Service = functools.partial(Service, limits=Limits(grace={grace}))
sys.exit(main(["serve", {source!r}, "--port", "0", "--device", "cpu"]))
"""


@contextlib.contextmanager
def command(source: Path, work: str, grace: float) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command in a process of its own, where drawing a state takes its time; and its port."""
    code = SLOW.format(work=work, source=str(source), grace=grace)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        yield process, next(int(line.rsplit(":", 1)[1].split("/")[0]) for line in process.stderr if "http://" in line)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def drawing(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/models/burgers/draw", b'{"index": 0}', JSON)
    return connection


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_on_sigterm_what_runs_is_answered_new_connections_are_refused_and_the_code_is_zero(checkpoints):
    with command(checkpoints["burgers"], "time.sleep(1)", 8) as (process, port):
        idle = socket.create_connection(("127.0.0.1", port), timeout=10)
        with idle, contextlib.closing(drawing(port)) as connection:
            assert "begun" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            assert "Stopping" in process.stderr.readline()
            time.sleep(0.3)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            response = connection.getresponse()
            assert (response.status, response.read()) == (200, b'{"late":true}')
            assert idle.recv(1) == b""
            assert process.wait(60) == 0


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_what_does_not_end_in_the_time_of_grace_is_answered_503_and_the_code_is_zero_all_the_same(checkpoints):
    endless = "x = torch.eye(1000)\n    while True: x = x @ x"
    with command(checkpoints["burgers"], endless, 0.5) as (process, port):
        with contextlib.closing(drawing(port)) as connection:
            assert "begun" in process.stderr.readline()
            process.send_signal(signal.SIGTERM)
            response = connection.getresponse()
            assert response.status == 503
            assert b"stopping" in response.read()
        assert process.wait(60) == 0


# ---- the page


def test_the_limits_on_the_page_are_those_of_the_code():
    limits = Limits()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*\d[^|]*) \|$", (ROOT / "docs" / "serving.md").read_text(), re.M))
    pace = f"{http_server.FIRST:g} s, and a second for each {http_server.RATE // 2**10} KiB"
    expected = {
        "body": f"{limits.body // 2**20} MiB of a prediction, {http_server.PLAIN // 2**20} MiB of other requests",
        "points of the input, and of the query": f"{limits.points:,} each",
        "frames": f"{limits.times}",
        "numbers in an answer": f"{limits.json_answer:,} in JSON, {limits.answer:,} in binary",
        "time for an answer, waiting included": f"{limits.seconds:g} s; {limits.solver_seconds:g} s for the solver",
        "requests that wait": f"{limits.waiting}; {limits.waiting // 8} for the solver",
        "open connections": f"{limits.connections}",
        "time from the first to the last byte of a request's head": f"{http_server.HEAD:g} s",
        "time for a body, and for an answer to be read": pace,
        "idle time of a connection between requests": f"{http_server.SILENCE:g} s",
        "memory of large bodies, inputs and answers together": f"{limits.memory // 2**20} MiB",
        "time to finish when the server is stopped": f"{limits.grace:g} s",
    }
    assert {name: value for name, value in rows.items() if name in expected} == expected
