"""What only sockets show: clients that are slow, many or ambiguous, and the end of the process."""

import contextlib
import functools
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oformer.playground import asgi, server
from oformer.playground.api import Limits
from oformer.playground.asgi import Playground
from oformer.playground.server import Connection
from tests.playground.conftest import serving

ROOT = Path(__file__).resolve().parent.parent.parent
PREDICT = "/v1/models/burgers/predict"
JSON = {"Content-Type": "application/json"}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
DRAW = b"POST /v1/models/burgers/draw HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def opened(port: int, text: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(text)
    return connection


def received(connection: socket.socket, answers: int = sys.maxsize) -> bytes:
    """What the server sends, until it closes the connection or has begun so many answers."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while answer.count(b"HTTP/1.1 ") < answers and (chunk := connection.recv(65536)):
            answer += chunk
    return answer


# ---- slow and many


def test_where_all_places_are_taken_the_slowest_client_loses_its_own(port, monkeypatch):
    monkeypatch.setattr(Connection, "most", 20)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(opened(port, b"GET / HTTP/1.1\r\nHost: local")) for _ in range(60)]
        start = time.monotonic()
        for _ in range(3):
            with opened(port, HEALTH) as connection:
                assert received(connection, 1).startswith(b"HTTP/1.1 200 ")
        assert time.monotonic() - start < 2
        assert received(slow[0]) == b""  # it is closed


def test_a_head_that_trickles_and_a_connection_without_one_are_ended(port, monkeypatch):
    monkeypatch.setattr(server, "SILENCE", 0.3)
    with opened(port, HEALTH[:20]) as trickling, opened(port) as idle:
        start = time.monotonic()
        assert idle.recv(1) == b""
        with contextlib.suppress(OSError):
            while time.monotonic() - start < 5:
                trickling.sendall(b"A")
                time.sleep(0.05)
        assert time.monotonic() - start < 3


def test_an_answer_that_nobody_reads_is_ended_and_its_memory_is_free(service, monkeypatch):
    monkeypatch.setattr(server, "FIRST", 0.3)
    monkeypatch.setattr(server, "RATE", 1e9)
    monkeypatch.setattr(server, "WATCHED", 0.05)
    app = Playground(service)
    app.description = lambda: {"large": "x" * 2**25}
    with serving(app) as port, opened(port, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        start = time.monotonic()
        while not app.counts["/openapi.json", "", 200]:
            time.sleep(0.01)
            assert time.monotonic() - start < 5
        assert time.monotonic() - start > 0.3  # it was waited for
        assert not app.active


def test_the_proxy_says_what_the_browser_sees(port):
    """As nginx in front of it does, on the same machine."""
    origin = b"Origin: https://localhost\r\nContent-Length: 12\r\n"
    for proto, status in ((b"X-Forwarded-Proto: https\r\n", b"200"), (b"", b"403")):
        with opened(port, DRAW + origin + proto + b'\r\n{"index": 0}') as connection:
            assert received(connection, 1)[9:12] == status


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


@pytest.mark.parametrize("method", [b"GET /health", b"POST " + PREDICT.encode()], ids=["GET", "POST"])
@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_its_connection_closed(case, method, port):
    """One answer, and then the end: what follows is no request. Behind another request, too."""
    start = method + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for before in (b"", HEALTH):
        with opened(port, before + start + AMBIGUOUS[case] + b"\r\n" + SMUGGLED) as connection:
            answer = received(connection)
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
        assert statuses == [b"200", b"400"][not before :], answer[:300]
        assert b'{"error":"Expected' in answer
        assert b"onnection: close" in answer


@pytest.mark.parametrize("case", REQUEST_LINES)
def test_a_request_line_is_one_in_the_form_of_the_standard(case, port):
    with opened(port, REQUEST_LINES[case] + b"\r\nHost: localhost\r\n\r\n" + SMUGGLED) as connection:
        answer = received(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"400"]


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n", b"421"),
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\n", b"405"),
        (b"PUT /health HTTP/1.1\r\nHost: localhost\r\n", b"405"),
        (DRAW.replace(b"application/json", b"text/plain"), b"415"),
        (DRAW + b"Origin: http://x\r\n", b"403"),
        (DRAW.replace(b"burgers", b"unheard"), b"404"),
    ],
)
def test_a_body_that_was_not_read_is_never_taken_for_the_next_request(start, status, port):
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    for body in (LENGTH + b"\r\n" + SMUGGLED, chunks):
        last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        with opened(port, start + body + last) as connection:
            answer = received(connection)
        assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [status, b"200"], answer


def test_a_body_is_asked_for_where_the_client_waits_for_that(port):
    text = DRAW + b"Content-Length: 12\r\nExpect: 100-continue\r\n\r\n"
    with opened(port, text) as connection:
        assert received(connection, 1).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b'{"index": 0}')
        assert received(connection, 1).startswith(b"HTTP/1.1 200 ")
    with opened(port, text.replace(b"burgers", b"unheard")) as connection:
        assert received(connection, 1).startswith(b"HTTP/1.1 404 ")


# ---- the end

SLOW = """
import sys, time, torch
from oformer.cli import main
from oformer.playground.api import Limits, Service

def draw(self, name, index):
    print("begun", file=sys.stderr, flush=True)
    time.sleep(0.5)
    x = torch.eye(1000)
    while index:  # as a solver that nothing can interrupt
        x = x @ x
    return {"late": True}

Service.draw = draw
Limits.grace = 1.5
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--device", "cpu"]))
"""


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that serves, once its address is printed; and its port."""
    # Who runs the tests in the background may have it ignore this signal, and children would do so, too.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=heard
    )
    assert process.stderr is not None
    try:
        yield process, next(int(line.rsplit(":", 1)[1].split("/")[0]) for line in process.stderr if "http://" in line)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def drawing(port: int, index: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/models/burgers/draw", b'{"index": %d}' % index, JSON)
    return connection


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_on_sigterm_what_ends_in_time_is_answered_the_rest_is_told_so_and_the_code_is_zero(checkpoints):
    with command("-c", SLOW, str(checkpoints["burgers"])) as (process, port), contextlib.ExitStack() as stack:
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        connections = []
        for index in (0, 1, 2):
            connections.append(stack.enter_context(contextlib.closing(drawing(port, index))))
            while not index and "begun" not in process.stderr.readline():
                pass
        process.send_signal(signal.SIGTERM)
        while "Stopping" not in process.stderr.readline():
            pass
        with pytest.raises(OSError):  # noqa: PT011, PT012 - refused, or reset on its way
            while True:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
        assert idle.recv(1) == b""
        answers = [connection.getresponse() for connection in connections]
        assert [answer.status for answer in answers] == [200, 503, 503]
        assert answers[0].read() == b'{"late":true}'
        assert all(b"stopping" in answer.read() for answer in answers[1:])
        assert process.wait(60) == 0


INTERRUPTED = """
import os, signal, sys
from oformer.cli import main
from oformer.playground import server

def say(text, said=server.say):
    said(text)
    if "operator" not in text:  # but "Listening at" and "Stopping"
        os.kill(os.getpid(), signal.SIGINT)

server.say = say
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--device", "cpu"]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_ctrl_c_ends_it_with_code_zero_from_the_moment_its_address_is_printed(checkpoints):
    with command("-c", INTERRUPTED, str(checkpoints["burgers"])) as (process, _):
        assert process.wait(60) == 0
        assert re.fullmatch("Stopping.*\n", process.stderr.read())


# ---- the page


def test_the_limits_on_the_page_are_those_of_the_code():
    limits = Limits()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*\d[^|]*) \|$", (ROOT / "docs" / "serving.md").read_text(), re.M))
    pace = f"{asgi.FIRST:g} s, and a second for each {asgi.RATE // 2**10} KiB"
    expected = {
        "body of a prediction": f"{limits.body // 2**20} MiB in binary, {limits.json_body // 2**20} MiB in JSON",
        "body of another request": f"{asgi.PLAIN // 2**20} MiB",
        "points of the input, and of the query": f"{limits.points:,} each",
        "frames": f"{limits.times}",
        "numbers in an answer": f"{limits.json_answer:,} in JSON, {limits.answer:,} in binary",
        "time for an answer, waiting included": f"{limits.seconds:g} s; {limits.solver_seconds:g} s for the solver",
        "requests that wait": f"{limits.waiting}; {limits.waiting // 8} for the solver",
        "open connections": f"{limits.connections}",
        "time for a body, and for an answer to be read": pace,
        "time until the whole head of a request is there, since the last answer": f"{server.SILENCE:g} s",
        "memory of large bodies and answers together": f"{limits.memory // 2**20} MiB",
        "time to finish when the server is stopped": f"{limits.grace:g} s",
    }
    assert {name: rows.get(name) for name in expected} == expected
