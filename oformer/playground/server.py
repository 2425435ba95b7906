"""The HTTP of the service, with the standard library alone: addresses, limits, errors, and the files of the page.

Requests never name files: the page is read once at the start, and models are looked up in a dictionary. Names in the
Host header are refused, but for localhost and the one it is told of: a stranger's page that points its own name at this
machine (DNS rebinding) must use that name. Requests that another page sends are refused by their Origin, and no
answer carries a header that would let another page read it.
"""

import contextlib
import ipaddress
import json
import select
import signal
import socket
import sys
import threading
import time
import traceback
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from oformer.errors import InputError, SolverDiverged
from oformer.playground.api import Question, Served, Service, named
from oformer.playground.jobs import Busy, Line
from oformer.playground.openapi import (
    ARRAYS,
    NPZ,
    description,
    draw_schema,
    play_schema,
    predict_schema,
    solve_schema,
)
from oformer.playground.scenes import Sensors
from oformer.playground.wire import check_json, numbers, parse_json, read_npz, write_npz
from oformer.predict import Predictor

JSON = "application/json"
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
SILENCE = 20.0  # seconds without a byte after which a connection is closed
BODIES = 4  # times the limit of one body: what all bodies in memory may hold together
DRAINED = 2.0  # seconds of an unwanted body that are read and thrown away, so that its sender reads our answer


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, why: str, **headers: str):
        super().__init__(why)
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class Answer(NamedTuple):
    """What goes back."""

    body: bytes
    kind: str = JSON

    @classmethod
    def of(cls, content: Any) -> "Answer":
        """Something as JSON."""
        return cls(json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


class Server(ThreadingHTTPServer):
    """Listens, and hands requests to a service."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2048  # connections that the system keeps waiting for us

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0, name: str | None = None):
        """Bind to an address; `serve_forever` begins to answer.

        Args:
            service: what is served.
            host: the address; the default can be reached from this machine alone.
            port: 0 takes a free one.
            name: a host name besides localhost under which people reach it.
        """
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.service, limits = service, service.limits
        self.names = {"localhost", *filter(None, [name])}
        folder = files("oformer.playground") / "static"
        self.page = {path: Answer((folder / file).read_bytes(), kind) for path, (file, kind) in PAGE.items()}
        self.openapi = Answer.of(description(service, _version()))
        self.answers = Line("answers", waiting=limits.waiting, seconds=limits.seconds)
        self.solvers = Line("solvers", waiting=max(1, limits.waiting // 8), seconds=limits.solver_seconds)
        self._slots = threading.BoundedSemaphore(limits.connections)
        self._bytes, self._active, self._lock = 0, 0, threading.Lock()
        self._stopping = False
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                "an address that is free", f"{host} port {port} ({error})", "Choose another with --host and --port"
            ) from error

    @property
    def address(self) -> str:
        """For a browser."""
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in str(host) else str(host)
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, when there are not too many of them; until then the system keeps the others waiting."""
        while not self._slots.acquire(timeout=0.1):
            if self._stopping:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer all requests of one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its client's affair; what is our mistake is shown."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            traceback.print_exc()

    @contextlib.contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Count a body while it is in memory; refuse it where others fill that."""
        with self._lock:
            if self._bytes + size > BODIES * self.service.limits.body:
                raise Busy("Other large requests are being read.", 1)
            self._bytes += size
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= size

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request until its answer is sent, so that stopping can wait for it."""
        with self._lock:
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1

    def warm(self) -> None:
        """Answer each model's first question in advance, one by one and behind those of people."""
        for name, served in self.service.models.items():
            if served.scene is not None:
                for job in self.service.warm(name):
                    with contextlib.suppress(Busy, InputError, SolverDiverged):
                        self.answers.do(job)

    def stop(self, seconds: float = 5.0) -> bool:
        """Take no more requests, give those that are being answered some time, and close.

        Returns:
            Whether all work has ended; a solver cannot be interrupted.
        """
        self._stopping = True
        end = time.monotonic() + seconds
        while self._active and time.monotonic() < end:
            time.sleep(0.02)
        self.server_close()
        return all([line.close(max(0.0, end - time.monotonic())) for line in (self.answers, self.solvers)])


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "oformer", ""
    timeout = SILENCE
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for the first

    def do_GET(self) -> None:
        """The page, and what can be asked without a body."""
        with self.server.answering():
            self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Predictions and play."""
        with self.server.answering():
            self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each movement of a pointer helps nobody."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request, in our words; it is the client's mistake."""
        status = {501: HTTPStatus.METHOD_NOT_ALLOWED, 505: HTTPStatus.BAD_REQUEST}.get(code, HTTPStatus(code))
        self.close_connection = True
        self._refuse(Refused(status, f"Expected a request of HTTP/1.1 that is known here, got {message or 'another'}."))

    def _answer(self, find: Callable[[], Answer]) -> None:
        self._read = False  # whether the body, if any, has been taken off the connection
        try:
            self._check_sender()
            answer, refused = find(), None
        except Refused as error:
            answer, refused = None, error
        except (InputError, SolverDiverged) as error:
            answer, refused = None, Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except Busy as error:
            self.close_connection = True  # its place is for those who have not been heard yet
            answer, refused = None, Refused(HTTPStatus.SERVICE_UNAVAILABLE, str(error), Retry_After=str(error.retry))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
            return
        except Exception:
            traceback.print_exc()
            answer, refused = None, Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "A mistake of ours; see the terminal.")
        if not self._read and self._length_or_none() != 0:
            self.close_connection = True  # what follows is a body, and no request
        if answer is not None:
            self._send(HTTPStatus.OK, answer, {})
        elif refused is not None:
            self._refuse(refused)
        if self.close_connection and not self._read:
            self._drain()

    def _refuse(self, refused: Refused) -> None:
        self._send(refused.status, Answer.of({"error": str(refused)}), refused.headers)

    def _send(self, status: HTTPStatus, answer: Answer, headers: dict[str, str]) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            if self.request_version == "HTTP/0.9":  # has no headers, and no error either
                self.request_version = "HTTP/1.0"
            self.send_response(status)
            for name, value in {**HEADERS, **headers}.items():
                self.send_header(name, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                self.send_header("Allow", "GET, HEAD, POST")
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    def _check_sender(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Expected an address or {' or '.join(sorted(self.server.names))} in the Host header, got another "
                "name. Start the server with --name to be reached under it.",
            )
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise Refused(HTTPStatus.FORBIDDEN, "Expected a request of the page that is served here, got another's.")

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.server.names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _get(self) -> Answer:
        path = self.path.split("?")[0]
        server = self.server
        if path in server.page:
            return server.page[path]
        if path == "/openapi.json":
            return server.openapi
        if path == "/health":
            return Answer.of(
                {
                    "status": "ok",
                    "models": len(server.service.models),
                    "waiting": len(server.answers),
                    "solving": len(server.solvers),
                }
            )
        if path == "/v1/models":
            return Answer.of({"models": [served.summary() for served in server.service.models.values()]})
        served, action = self._model(path)
        if action in ACTIONS:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Expected POST here, got GET.")
        if action:
            raise self._no_such_place()
        return Answer.of(server.service.describe(served.name))

    def _post(self) -> Answer:
        path = self.path.split("?")[0]
        if path in (*self.server.page, "/openapi.json", "/health", "/v1/models"):
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Expected GET here, got POST.")
        served, action = self._model(path)
        if action not in ACTIONS:
            raise self._no_such_place() if action else Refused(HTTPStatus.METHOD_NOT_ALLOWED, "Expected GET here.")
        kind = (self.headers.get("Content-Type") or "").split(";")[0].strip().lower()
        kinds = (JSON, NPZ) if action == "predict" else (JSON,)
        if kind not in kinds:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Expected a Content-Type of {' or '.join(kinds)}, got another."
            )
        size = self._length()
        with self.server.room_for(size):
            body = self._body(size)
            return ACTIONS[action](self, served, body, kind)

    def _model(self, path: str) -> tuple[Served, str]:
        parts = path.split("/")
        if len(parts) not in (4, 5) or parts[:3] != ["", "v1", "models"]:
            raise self._no_such_place()
        name = unquote(parts[3])
        if name not in self.server.service.models:
            try:
                self.server.service.model(name)
            except InputError as error:
                raise Refused(HTTPStatus.NOT_FOUND, str(error)) from None
        return self.server.service.model(name), parts[4] if len(parts) == 5 else ""

    def _no_such_place(self) -> Refused:
        return Refused(HTTPStatus.NOT_FOUND, "Expected one of the addresses in /openapi.json, got another.")

    def _predict(self, served: Served, body: bytes, kind: str) -> Answer:
        service = self.server.service
        most = (
            service.limits.points * max(1, served.predictor.spec.in_times) * max(3, served.predictor.spec.in_channels)
        )
        question = _question_of_npz(body, most) if kind == NPZ else _question_of_json(body, most, service)
        start = time.perf_counter()
        room = service.limits.answer if kind == NPZ else service.limits.json_answer
        answer = self._do(lambda: service.predict(served.name, question, room))
        coords, values = answer.coords.numpy(), answer.values.numpy()
        if kind == NPZ:
            return Answer(write_npz({"coords": coords, "values": values}), NPZ)
        return Answer.of(
            {
                "coords": coords.astype(np.float64).tolist(),
                "values": values.astype(np.float64).tolist(),
                "channels": list(served.card.targets),
                "seconds": time.perf_counter() - start,
            }
        )

    def _draw(self, served: Served, body: bytes, kind: str) -> Answer:
        content = parse_json(body)
        check_json(content, draw_schema())
        return Answer.of(self._do(lambda: self.server.service.draw(served.name, content["index"])))

    def _play(self, served: Served, body: bytes, kind: str) -> Answer:
        content = parse_json(body)
        check_json(content, play_schema(served, self.server.service.scene(served.name)))
        sensors = {name: _tuples(value) for name, value in content.pop("sensors", {}).items()}
        return Answer.of(self._do(lambda: self.server.service.play(served.name, sensors=Sensors(**sensors), **content)))

    def _solve(self, served: Served, body: bytes, kind: str) -> Answer:
        content = parse_json(body)
        check_json(content, solve_schema(served, self.server.service.scene(served.name)))
        service = self.server.service
        return Answer.of(self.server.solvers.do(lambda: service.solve(served.name, **content), self._is_there))

    def _do(self, job: Callable[[], Any]) -> Any:
        return self.server.answers.do(job, self._is_there)

    def _length_or_none(self) -> int | None:
        """The size that a request says its body has; None where it does not say so properly."""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers:
            return None
        if not lengths:
            return 0
        plain = lengths[0].strip()
        return int(plain) if len(lengths) == 1 and plain.isascii() and plain.isdecimal() and len(plain) < 16 else None

    def _length(self) -> int:
        length = self._length_or_none()
        if length is None or "Content-Length" not in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Expected one Content-Length that is a number.")
        limit = self.server.service.limits.body
        if length > limit:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Expected a body of at most {limit:,} bytes, got {length:,}."
            )
        return length

    def _body(self, size: int) -> bytes:
        """As many bytes as were announced, within the time that a request has."""
        end = time.monotonic() + self.server.service.limits.seconds
        chunks, left = [], size
        while left:
            chunk = self.rfile.read1(min(left, 2**16))
            if not chunk or time.monotonic() > end:
                self.close_connection = True
                raise Refused(HTTPStatus.BAD_REQUEST, f"Expected {size} bytes in the body, got {size - left}.")
            chunks.append(chunk)
            left -= len(chunk)
        self._read = True
        return b"".join(chunks)

    def _drain(self) -> None:
        end = time.monotonic() + DRAINED
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAINED)
            while time.monotonic() < end and self.rfile.read1(2**16):
                pass

    def _is_there(self) -> bool:
        """Whether the client still waits: a page drops what it no longer needs."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False


ACTIONS: dict[str, Callable[[Handler, Served, bytes, str], Answer]] = {
    "predict": Handler._predict,
    "draw": Handler._draw,
    "play": Handler._play,
    "solve": Handler._solve,
}


def serve(
    sources: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8760,
    name: str | None = None,
    device: str | None = None,
    browse: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve trained operators until Ctrl-C or a request to end.

    Args:
        sources: run folders, checkpoints, or names of trained operators.
        host: the address to listen at.
        port: 0 takes a free one.
        name: a host name besides localhost under which people reach it.
        device: of the operators; by default a GPU if there is one.
        browse: open the page in a browser.
        say: told where it listens, and when it ends. A solver that is at work then goes on: it cannot be interrupted.
    """
    service = Service(named([Predictor(source, device, warn=False) for source in sources]))
    service.count()
    server = Server(service, host, port, name)
    say(f"{len(service.models)} operator{'s' * (len(service.models) != 1)}: {', '.join(service.models)}")
    say(f"Listening at {server.address} (Ctrl-C stops)")
    threading.Thread(target=server.warm, daemon=True).start()
    if browse:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt), _ends_like_an_interrupt():
        server.serve_forever(poll_interval=0.2)
    say("Stopping; what is being answered is finished first.")
    server.stop()


@contextlib.contextmanager
def _ends_like_an_interrupt() -> Iterator[None]:
    """Within the block, a system that asks us to end (SIGTERM) is heard like Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there are signals heard
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _question_of_json(body: bytes, most: int, service: Service) -> Question:
    content = parse_json(body)
    check_json(content, predict_schema(service.limits))
    arrays = {name: numbers(value, f"input.{name}", most) for name, value in content["input"].items()}
    query = {f"query_{name}": numbers(value, f"query.{name}", most) for name, value in content.get("query", {}).items()}
    return Question(**arrays, **query, resolution=content.get("resolution"), times=content.get("times"))


def _question_of_npz(body: bytes, most: int) -> Question:
    arrays = read_npz(body, ARRAYS, most)
    for name in ("coords", "values"):
        if name not in arrays:
            raise InputError("`coords` and `values` in the archive", ", ".join(arrays))
    whole = {}
    for name in ("resolution", "times"):
        if name in arrays:
            number = float(arrays.pop(name))
            if not 1 <= number <= 2**31 or number != int(number):
                raise InputError(f"a whole number of at least 1 for `{name}`", f"{number:g}")
            whole[name] = int(number)
    return Question(**arrays, **whole)


def _tuples(value: Any) -> Any:
    return tuple(tuple(place) for place in value) if isinstance(value, list) else value


def _version() -> str:
    try:
        return version("oformer")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
