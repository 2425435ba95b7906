"""The HTTP of the service, with the standard library alone: addresses, limits, errors, and the files of the page.

Requests never name files: the page is read once at the start, and models are looked up in a dictionary. Names in the
Host header are refused, but for localhost and the one it is told of: a stranger's page that points its own name at this
machine (DNS rebinding) must use that name. Requests that another page sends are refused by their Origin, and no
answer carries a header that would let another page read it.

No client can keep the others waiting: a head must arrive before a deadline, bodies and answers must move at a least
pace, and when all connections are in use the one whose client is slowest is closed. Memory for bodies, for what they
become and for answers has one limit for all.
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
from oformer.playground.head import Refused, check_beginning, parse_head
from oformer.playground.openapi import (
    ARRAYS,
    NPZ,
    description,
    draw_schema,
    play_schema,
    predict_schema,
    solve_schema,
)
from oformer.playground.queue import Busy, Room, WorkQueue
from oformer.playground.requests import Buffer, check_json, numbers, parse_arrays, parse_json, read_npz, write_npz
from oformer.playground.scenes.base import Sensors
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
SILENCE = 20.0  # seconds that a connection may be idle between requests
HEAD = 10.0  # seconds from the first byte of a head to its last
FIRST, RATE = 10.0, 2**18  # a body or answer may take so many seconds, and one more for each so many bytes
PATIENCE = 1.0  # seconds that a client may take before its place is given to another, where all are taken
TURNED_AWAY = 64  # connections beyond the limit that are told so at once; more are closed without a word
PLAIN = 2**20  # bytes of a body in JSON that is no prediction's
SMALL = 2**16  # bytes of a body or answer that is not counted, and is converted beside others
DRAINED = 2.0  # seconds of an unwanted body that are read and thrown away, so that its sender reads our answer


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
        self.answers = WorkQueue("answers", waiting=limits.waiting, seconds=limits.seconds)
        self.solvers = WorkQueue("solvers", waiting=max(1, limits.waiting // 8), seconds=limits.solver_seconds)
        self.room = Room(limits.memory, SMALL)
        self.converting = threading.Lock()  # one large body or answer at a time: what that takes is not counted
        self.stopping = False
        self._slots = threading.BoundedSemaphore(limits.connections)
        self._refusals = threading.BoundedSemaphore(TURNED_AWAY)
        self._threads_left, self._slow, self._lock = 0, dict[Handler, float](), threading.Lock()
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
        """Begin a thread that answers the requests of a connection, or says that there are too many of them."""
        free = self._slots.acquire(blocking=False)
        while not free and self._closed_slowest():
            free = self._slots.acquire(timeout=PATIENCE / 10)
        if free:
            self._begin(Handler, self._slots, request, client_address)
        elif self._refusals.acquire(blocking=False):
            self._begin(TurnedAway, self._refusals, request, client_address)
        else:
            self.shutdown_request(request)

    def _begin(self, kind: "type[Handler]", places: threading.Semaphore, request: Any, client_address: Any) -> None:
        def answer() -> None:
            try:
                kind(request, client_address, self)
            except Exception:
                self.handle_error(request, client_address)
            finally:
                self.shutdown_request(request)
                leave()

        def leave() -> None:
            places.release()
            with self._lock:
                self._threads_left -= 1

        with self._lock:
            self._threads_left += 1
        try:
            threading.Thread(target=answer, daemon=True).start()
        except RuntimeError:  # the system has no more threads
            leave()
            raise

    def _closed_slowest(self) -> bool:
        """Close the connection whose client takes the longest over sending or reading; False where none does either."""
        with self._lock:
            slowest, since = next(iter(self._slow.items()), (None, 0.0))
            if slowest is None:
                return False
            if time.monotonic() - since > PATIENCE:
                del self._slow[slowest]
                slowest.disconnect(socket.SHUT_RDWR)
        return True

    @contextlib.contextmanager
    def waiting_for(self, handler: "Handler") -> Iterator[None]:
        """Within the block, a connection depends on its client, and may be closed in favor of another."""
        if isinstance(handler, TurnedAway):  # has no place that another could take
            yield
            return
        with self._lock:
            self._slow[handler] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._slow.pop(handler, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its client's affair; what is our mistake is shown."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            traceback.print_exc()

    def warm(self) -> None:
        """Answer each model's first question in advance, one by one and behind those of people."""
        for name, served in self.service.models.items():
            if served.scene is not None:
                for job in self.service.warm(name):
                    with contextlib.suppress(Busy, InputError, SolverDiverged):
                        self.answers.do(job)

    def stop(self, seconds: float | None = None) -> bool:
        """Refuse new connections, finish the requests that have arrived, and close.

        Args:
            seconds: for those requests, after which they are answered 503; by default `Limits.grace`.

        Returns:
            Whether all work has ended; a solver cannot be interrupted.
        """
        self.server_close()
        end = time.monotonic() + (self.service.limits.grace if seconds is None else seconds)
        with self._lock:
            self.stopping = True
            for handler in self._slow:
                handler.end_of_requests()
        self._wait_for_threads(end)
        ended = [queue.close(max(0.0, end - time.monotonic())) for queue in (self.answers, self.solvers)]
        self._wait_for_threads(time.monotonic() + min(1.0, self.service.limits.grace))
        return all(ended)

    def _wait_for_threads(self, end: float) -> None:
        while self._threads_left and time.monotonic() < end:
            time.sleep(0.02)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "oformer", ""
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for the first

    def setup(self) -> None:
        """Begin with nothing read."""
        super().setup()
        self._ahead = bytearray()  # received, and not yet taken as a head or body
        self._at_head = False
        self.command, self.requestline, self.request_version = "", "", self.protocol_version

    def handle_one_request(self) -> None:
        """Read a head, and answer it."""
        self.command, self.close_connection = "", True
        try:
            with self.server.waiting_for(self):
                text = self._head()
            if not text:
                return
            self.head = parse_head(text)
            if self.head.method not in METHODS:
                raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"Expected GET, HEAD or POST, got {self.head.method:.20}.")
        except Refused as error:
            self._refuse(error)
            self._drain()
            return
        except ConnectionError:
            return
        self.command, self.path = self.head.method, self.head.target
        self.close_connection = not self.head.persistent
        with self.server.room.share() as self._hold:
            self._answer(METHODS[self.command])

    def disconnect(self, how: int) -> None:
        """Wake whatever waits for the client."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(how)

    def end_of_requests(self) -> None:
        """Take those that have arrived whole, and no others."""
        if self._at_head:
            self.disconnect(socket.SHUT_RD)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each movement of a pointer helps nobody."""

    def _answer(self, find: "Callable[[Handler], Answer]") -> None:
        self._unread = self.head.length or 0  # bytes of the body that are still to come
        try:
            self._check_sender()
            answer, refused = find(self), None
            self._hold(len(answer.body))
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
        if self._unread or self.server.stopping:
            self.close_connection = True  # what follows is a body, and no request
        if answer is not None:
            self._send(HTTPStatus.OK, answer, {})
        elif refused is not None:
            self._refuse(refused)
        if self.close_connection and self._unread:
            self._drain()

    def _refuse(self, refused: Refused) -> None:
        self._send(refused.status, Answer.of({"error": str(refused)}), refused.headers)

    def _send(self, status: HTTPStatus, answer: Answer, headers: dict[str, str]) -> None:
        stays, self.close_connection = not self.close_connection, True  # also where only a part can be sent
        with contextlib.suppress(ConnectionError, TimeoutError), self.server.waiting_for(self):
            self.connection.settimeout(FIRST)
            self.send_response(status)
            for name, value in {**HEADERS, **headers}.items():
                self.send_header(name, value)
            if not stays:
                self.send_header("Connection", "close")
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                self.send_header("Allow", "GET, HEAD, POST")
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if self.command != "HEAD":
                self._write(answer.body)
            self.close_connection = not stays

    def _check_sender(self) -> None:
        hosts = self.head.all("host")
        if len(hosts) != 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"Expected one Host header, got {len(hosts)}.")
        if not self._is_ours(hosts[0]):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Expected an address or {' or '.join(sorted(self.server.names))} in the Host header, got another "
                "name. Start the server with --name to be reached under it.",
            )
        if any(origin != f"http://{hosts[0]}" for origin in self.head.all("origin")):
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
        kind = self.head.get("content-type").split(";")[0].strip().lower()
        kinds = (JSON, NPZ) if action == "predict" else (JSON,)
        if kind not in kinds:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Expected a Content-Type of {' or '.join(kinds)}, got another."
            )
        content = self._content(action, served, kind)
        return ACTIONS[action](self, served, content)

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

    def _content(self, action: str, served: Served, kind: str) -> Any:
        """What the body says, checked; nothing of the body itself is kept."""
        limit = self.server.service.limits.body
        body = self._body(self._length(limit if action == "predict" else min(limit, PLAIN)))
        with self._alone(self.server.service.limits.body if kind == NPZ else len(body)):  # an archive may be compressed
            if action == "predict":
                question = _question(body, kind, served, self.server.service)
                self._hold(question.nbytes)
                return question
            self._hold(0)
            return parse_json(body)

    def _predict(self, served: Served, question: Question) -> Answer:
        service = self.server.service
        binary = self.head.get("content-type").lower().startswith(NPZ)
        start = time.perf_counter()
        room = service.limits.answer if binary else service.limits.json_answer
        answer = self._do(lambda: service.predict(served.name, question, room))
        coords, values = answer.coords.numpy(), answer.values.numpy()
        with self._alone(values.nbytes):
            if binary:
                return Answer(write_npz({"coords": coords, "values": values}), NPZ)
            return Answer.of(
                {
                    "coords": coords.astype(np.float64).tolist(),
                    "values": values.astype(np.float64).tolist(),
                    "channels": list(served.card.targets),
                    "seconds": time.perf_counter() - start,
                }
            )

    def _alone(self, size: int) -> contextlib.AbstractContextManager[Any]:
        """Within the block, nothing else that is large is converted."""
        return self.server.converting if size > SMALL else contextlib.nullcontext()

    def _draw(self, served: Served, content: Any) -> Answer:
        check_json(content, draw_schema())
        return Answer.of(self._do(lambda: self.server.service.draw(served.name, content["index"])))

    def _play(self, served: Served, content: Any) -> Answer:
        check_json(content, play_schema(served, self.server.service.scene(served.name)))
        sensors = {name: _tuples(value) for name, value in content.pop("sensors", {}).items()}
        return Answer.of(self._do(lambda: self.server.service.play(served.name, sensors=Sensors(**sensors), **content)))

    def _solve(self, served: Served, content: Any) -> Answer:
        check_json(content, solve_schema(served, self.server.service.scene(served.name)))
        service = self.server.service
        return Answer.of(self.server.solvers.do(lambda: service.solve(served.name, **content), self._is_there))

    def _do(self, job: Callable[[], Any]) -> Any:
        return self.server.answers.do(job, self._is_there)

    def _length(self, limit: int) -> int:
        length = self.head.length
        if length is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Expected a Content-Length, got none.")
        if length > limit:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"Expected a body of at most {limit:,} bytes, got {length:,}."
            )
        return length

    def _head(self) -> bytes:
        """The next head without the empty line behind it; nothing where the client sends no more."""
        ahead, end = self._ahead, time.monotonic() + (HEAD if self._ahead else SILENCE)
        self._at_head = True
        if self.server.stopping:
            self.end_of_requests()
        try:
            while (length := ahead.find(b"\r\n\r\n")) < 0:
                check_beginning(ahead)
                before = len(ahead)
                ahead += self._received(2**16, end)
                if len(ahead) == before:  # the client has said all, or we are stopping
                    break
                if not before:
                    end = time.monotonic() + HEAD
        except TimeoutError:
            if ahead:
                raise Refused(
                    HTTPStatus.REQUEST_TIMEOUT, f"Expected the whole head of a request within {HEAD:g} seconds."
                ) from None
            return b""
        finally:
            self._at_head = False
        if length < 0:
            if ahead:
                raise Refused(HTTPStatus.BAD_REQUEST, "Expected a whole request, got the beginning of its head.")
            return b""
        head = bytes(ahead[:length])
        del ahead[: length + 4]
        return head

    def _body(self, size: int) -> memoryview:
        """As many bytes as were announced, at no less than the least pace.

        Memory is taken as they arrive, so that who announces a large body and sends none of it costs nothing.
        """
        body, got = np.empty(size, np.uint8).data, min(size, len(self._ahead))
        body[:got] = self._ahead[:got]
        del self._ahead[:got]
        if not got and self.head.get("expect").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        start = time.monotonic()
        with self.server.waiting_for(self):
            while got < size:
                try:
                    chunk = self._received(min(size - got, 2**16), start + FIRST + got / RATE)
                except TimeoutError:
                    raise Refused(
                        HTTPStatus.REQUEST_TIMEOUT,
                        f"Expected {size:,} bytes in the body at {RATE:,} a second or more, got {got:,}.",
                    ) from None
                if not chunk:
                    raise Refused(HTTPStatus.BAD_REQUEST, f"Expected {size:,} bytes in the body, got {got:,}.")
                body[got : got + len(chunk)] = chunk
                got += len(chunk)
                self._hold(got)
        self._unread = 0
        return body

    def _received(self, most: int, end: float) -> bytes:
        """The next bytes, when there are any before the given time."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv(most)

    def _write(self, content: bytes) -> None:
        """All of it, at no less than the least pace."""
        start = time.monotonic()
        for done in range(0, len(content), RATE // 4):
            self.connection.settimeout(max(start + FIRST + done / RATE - time.monotonic(), 0.001))
            self.wfile.write(content[done : done + RATE // 4])

    def _drain(self) -> None:
        end = time.monotonic() + DRAINED
        self.disconnect(socket.SHUT_WR)
        with contextlib.suppress(OSError), self.server.waiting_for(self):
            while self._received(2**16, end):
                pass

    def _is_there(self) -> bool:
        """Whether the client still waits: a page drops what it no longer needs."""
        if self.server.stopping:  # has ended our side of the connection itself
            return True
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False


class TurnedAway(Handler):
    """One connection too many."""

    def handle(self) -> None:
        """Say so without reading what it asks for."""
        self.close_connection = True
        limit = self.server.service.limits.connections
        why = f"Expected at most {limit} connections, got one more. Try again in a second."
        self._refuse(Refused(HTTPStatus.SERVICE_UNAVAILABLE, why, Retry_After="1"))
        self._drain()


METHODS: dict[str, Callable[[Handler], Answer]] = {"GET": Handler._get, "HEAD": Handler._get, "POST": Handler._post}
ACTIONS: dict[str, Callable[[Handler, Served, Any], Answer]] = {
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
) -> bool:
    """Serve trained operators until Ctrl-C or a request to end.

    Args:
        sources: run folders, checkpoints, or names of trained operators.
        host: the address to listen at.
        port: 0 takes a free one.
        name: a host name besides localhost under which people reach it.
        device: of the operators; by default a GPU if there is one.
        browse: open the page in a browser.
        say: told where it listens, and when it ends.

    Returns:
        Whether all work has ended; False where a solver, which cannot be interrupted, is still at work in its thread.
    """
    service = Service(named([Predictor(source, device, warn=False) for source in sources]))
    service.count()
    server = Server(service, host, port, name)
    say(f"{len(service.models)} operator{'s' * (len(service.models) != 1)}: {', '.join(service.models)}")
    say(f"Listening at {server.address} (Ctrl-C stops)")
    threading.Thread(target=server.warm, daemon=True).start()
    if browse:
        webbrowser.open(server.address)
    loop = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    loop.start()
    # Signals interrupt this thread, which only waits, and never the one that takes up connections.
    with contextlib.suppress(KeyboardInterrupt), _ends_like_an_interrupt():
        while loop.is_alive():
            loop.join(0.2)
    say(f"Stopping; what is being answered has {service.limits.grace:g} seconds to finish.")
    server.shutdown()
    return server.stop()


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


def _question(body: Buffer, kind: str, served: Served, service: Service) -> Question:
    spec = served.predictor.spec
    most = service.limits.points * max(1, spec.in_times) * max(3, spec.in_channels)
    return _question_of_npz(body, most) if kind == NPZ else _question_of_json(body, most, service)


def _question_of_json(body: Buffer, most: int, service: Service) -> Question:
    content, lists = parse_arrays(body)
    check_json(content, predict_schema(service.limits))
    given = [("", "input", content["input"]), ("query_", "query", content.get("query", {}))]
    arrays = {
        f"{prefix}{name}": numbers(value, lists, f"{part}.{name}", most)
        for prefix, part, values in given
        for name, value in values.items()
    }
    return Question(**arrays, resolution=content.get("resolution"), times=content.get("times"))


def _question_of_npz(body: Buffer, most: int) -> Question:
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
