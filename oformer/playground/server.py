"""The HTTP of the service, with the standard library alone: addresses, limits, errors, and the files of the page.

Requests never name files: the page is read once at the start, and models are looked up in a dictionary. Names in the
Host header are refused, except localhost and the one given at the start: a foreign page that points its own name at
this machine (DNS rebinding) must use that name. Requests that another page sends are refused by their Origin, and no
answer carries a header that would let another page read it.

No client can keep the others waiting: a head must arrive before a deadline, bodies and answers must move at a least
pace, and when all connections are in use the one whose client is slowest is closed. Memory for bodies, for the arrays
in them and for answers has one limit for all.
"""

import contextlib
import ipaddress
import json
import math
import re
import select
import socket
import sys
import threading
import time
import traceback
import webbrowser
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from oformer import __version__
from oformer.errors import InputError, SolverDiverged
from oformer.playground.api import Question, Served, Service, named
from oformer.playground.head import LONGEST, Head, Refused, parse_head
from oformer.playground.openapi import ACTIONS, ARRAYS, JSON, NPZ, description, predict_schema
from oformer.playground.queue import Busy, Room, WorkQueue
from oformer.playground.requests import Buffer, check_json, numbers, parse_arrays, parse_json, read_npz, write_npz
from oformer.predict import Predictor

PAGE = {"index.html": "text/html", "app.js": "text/javascript", "style.css": "text/css"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
EMPTY_LINE = re.compile(rb"\r?\n\r?\n")
METHODS = ("GET", "HEAD", "POST")
SILENCE = 20.0  # seconds that a connection may be idle between requests
HEAD = 10.0  # seconds from the first byte of a head to its last
FIRST, RATE = 10.0, 2**18  # a body or answer may take FIRST seconds, and one more for each RATE bytes
PATIENCE = 1.0  # seconds that a client may take before its place is given to another, where all are taken
TURNED_AWAY = 64  # connections beyond the limit that are answered 503 at once; more are closed without an answer
PLAIN = 2**20  # bytes of a body in JSON, other than that of a prediction
SMALL = 2**16  # bytes of a body or answer that is not counted, and is converted beside others
DRAINED = 2.0  # seconds of an unwanted body that are read and dropped, so that its sender reads our answer


class Answer(NamedTuple):
    """Body and media type of a response."""

    body: bytes
    kind: str = JSON

    @classmethod
    def of(cls, content: Any) -> "Answer":
        """Content as JSON."""
        return cls(json.dumps(content, allow_nan=False, separators=(",", ":")).encode())


class Server(ThreadingHTTPServer):
    """Listens, and passes requests to a service.

    Args:
        service: answers the requests.
        host: the address; the default can be reached from this machine alone.
        port: 0 takes a free one.
        name: a host name besides localhost under which people reach it.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 2048  # connections that the system keeps waiting for us

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0, name: str | None = None):
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.service, limits = service, service.limits
        self.names = {"localhost", *filter(None, [name])}
        self.pages = _pages(self)
        self.answers = WorkQueue("answers", waiting=limits.waiting, seconds=limits.seconds)
        self.solvers = WorkQueue("solvers", waiting=max(1, limits.waiting // 8), seconds=limits.solver_seconds)
        self.room = Room(limits.memory, SMALL)
        self.converting = threading.Lock()  # one large body or answer at a time: the memory for that is not counted
        self.stopping = False
        self._changed = threading.Condition()  # guards the three below
        self._connections = dict[socket.socket, float]()  # with the time since which each waits for its client, or inf
        self._at_head = set[socket.socket]()  # those of them that have no request
        self.turned_away = set[socket.socket]()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            got = f"{host} port {port} ({error})"
            raise InputError("an address that is free", got, "Choose another with --host and --port") from error

    @property
    def address(self) -> str:
        """Address for a browser."""
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in str(host) else str(host)
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread that answers the requests of a connection, or says that there are too many connections."""
        with self._changed:
            while (full := len(self._connections) >= self.service.limits.connections) and self._close_slowest():
                self._changed.wait(PATIENCE / 10)
            if not full:
                self._connections[request] = math.inf
            elif len(self.turned_away) < TURNED_AWAY:
                self.turned_away.add(request)
        if request in self._connections or request in self.turned_away:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and free its place."""
        super().shutdown_request(request)
        with self._changed:
            self._connections.pop(request, None)
            self.turned_away.discard(request)
            self._changed.notify_all()

    def _close_slowest(self) -> bool:
        """Close the connection that waits longest for its client, if too long; False where none waits for a client."""
        slowest = min(self._connections, key=self._connections.__getitem__)
        since = self._connections[slowest]
        if time.monotonic() - since > PATIENCE:
            self._connections[slowest] = math.inf
            _wake(slowest, socket.SHUT_RDWR)
        return since < math.inf

    @contextlib.contextmanager
    def waiting_for(self, request: socket.socket, *, head: bool = False) -> Iterator[None]:
        """Within the block, a connection depends on its client, and may be closed in favor of another.

        A connection that waits for the head of a request is also closed when the server stops.
        """
        with self._changed:
            if request in self._connections:
                self._connections[request] = time.monotonic()
            if head:
                self._at_head.add(request)
                if self.stopping:
                    _wake(request, socket.SHUT_RD)
        try:
            yield
        finally:
            with self._changed:
                self._at_head.discard(request)
                if request in self._connections:
                    self._connections[request] = math.inf

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless the client has broken the connection."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            traceback.print_exc()

    def warm(self) -> None:
        """Answer each model's first question in advance, one by one and behind those of people."""
        for name, served in self.service.models.items():
            if served.scene is not None:
                with contextlib.suppress(Busy, InputError, SolverDiverged):
                    self.answers.do(lambda name=name: self.service.warm(name))

    def stop(self, seconds: float | None = None) -> bool:
        """Refuse new connections, finish the requests that have arrived, and close.

        Args:
            seconds: for those requests, after which they are answered 503; by default `Limits.grace`.

        Returns:
            Whether all work has ended; a solver cannot be interrupted.
        """
        self.server_close()
        end = time.monotonic() + (self.service.limits.grace if seconds is None else seconds)
        with self._changed:
            self.stopping = True
            for request in self._at_head:
                _wake(request, socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._connections, end - time.monotonic())
        ended = [queue.close(max(0.0, end - time.monotonic())) for queue in (self.answers, self.solvers)]
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, min(1.0, self.service.limits.grace))
        return all(ended)


def _wake(connection: socket.socket, how: int) -> None:
    """Shut one or both directions of a connection down, which ends the calls that wait for its client."""
    with contextlib.suppress(OSError):
        connection.shutdown(how)


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection, one after another."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "oformer", ""
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for the first
    requestline, request_version = "", protocol_version
    _ahead = b""  # received behind the last head, and not yet taken

    def handle(self) -> None:
        """Answer the requests; a connection beyond the limit is answered 503 whatever it asks for."""
        if self.request not in self.server.turned_away:
            return super().handle()
        self.command, self.close_connection, self._unread = "", True, True
        limit = self.server.service.limits.connections
        self._refuse(Busy(f"Expected at most {limit} connections, got one more. Try again in a second.", 1))
        self._drain()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the page sends a request for each movement of a pointer."""

    def handle_one_request(self) -> None:
        """Read a request and answer it; `close_connection` then says whether it was the last."""
        self.command, self.close_connection = "", True
        self._unread = True  # whether the client may still send bytes that are no request
        with self.server.room.share() as self._hold:
            try:
                if text := self._read_head():
                    self._take(parse_head(text))
                    answer = self._answer()
                    self._hold(len(answer.body))
                    self._send(HTTPStatus.OK, answer)
            except Refused as error:
                self._refuse(error)
            except (InputError, SolverDiverged) as error:
                self._refuse(Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)))
            except (ConnectionError, TimeoutError):
                self.close_connection, self._unread = True, False
            except Exception:
                traceback.print_exc()
                why = "A mistake of ours; see the terminal."
                self._refuse(Refused(HTTPStatus.INTERNAL_SERVER_ERROR, why))
        if self.close_connection and self._unread:
            self._drain()

    def _take(self, head: Head) -> None:
        """Begin a request; refuse other methods, other pages, and names that others have given to this machine."""
        if head.method not in METHODS:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"Expected GET, HEAD or POST, got {head.method:.20}.")
        self.head, self.command, self._unread = head, head.method, bool(head.length)
        self.close_connection = not head.persistent
        hosts = head.fields.get("host", [])
        if len(hosts) != 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"Expected one Host header, got {len(hosts)}.")
        if not _is_ours(hosts[0], self.server.names):
            names = " or ".join(sorted(self.server.names))
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Expected an address or {names} in the Host header, got {hosts[0]!r:.60}. "
                "Start the server with --name to be reached under another name.",
            )
        if any(origin != f"http://{hosts[0]}" for origin in head.fields.get("origin", [])):
            raise Refused(HTTPStatus.FORBIDDEN, "Expected a request of the page that is served here, got another's.")

    def _refuse(self, refused: Refused) -> None:
        if isinstance(refused, Busy):
            self.close_connection = True  # its place is for those that have no answer yet
        self._send(refused.status, Answer.of({"error": str(refused)}), refused.headers)

    def _send(self, status: HTTPStatus, answer: Answer, headers: Mapping[str, str] | None = None) -> None:
        stays = not (self.close_connection or self._unread or self.server.stopping)
        self.close_connection = True  # also where only a part can be sent
        with contextlib.suppress(ConnectionError, TimeoutError), self.server.waiting_for(self.connection):
            self.connection.settimeout(FIRST)
            self.send_response(status)
            allowed = {"Allow": ", ".join(METHODS)} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
            length = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
            end = {} if stays else {"Connection": "close"}
            for name, value in {**HEADERS, **(headers or {}), **end, **allowed, **length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self._write(answer.body)
            self.close_connection = not stays

    def _answer(self) -> Answer:
        """Find the address of a request, check its method, and answer it."""
        path = self.head.target.split("?")[0]
        page = self.server.pages.get(path)
        name, action = ("", "") if page else self._model(path)
        if (self.command == "POST") != bool(action):
            why = f"Expected {'POST' if action else 'GET'} here, got {self.command}."
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, why)
        if page:
            return page()
        if not action:
            return Answer.of(self.server.service.describe(name))
        kind = self.head.get("content-type").split(";")[0].strip().lower()
        kinds = (JSON, NPZ) if action == "predict" else (JSON,)
        if kind not in kinds:
            why = f"Expected a Content-Type of {' or '.join(kinds)}, got {kind!r:.60}."
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
        served = self.server.service.models[name]
        return self._predict(served, kind) if action == "predict" else self._act(served, action)

    def _model(self, path: str) -> tuple[str, str]:
        """Name of an operator and action of an address; without an action, the operator itself is asked for."""
        parts = path.split("/")
        action = parts[4] if len(parts) == 5 else ""
        known = action == "predict" or action in ACTIONS
        if parts[:3] != ["", "v1", "models"] or not (len(parts) == 4 or known):
            raise Refused(HTTPStatus.NOT_FOUND, "Expected one of the addresses in /openapi.json, got another.")
        try:
            return self.server.service.model(unquote(parts[3])).name, action
        except InputError as error:
            raise Refused(HTTPStatus.NOT_FOUND, str(error)) from None

    def _act(self, served: Served, action: str) -> Answer:
        """Answer a request of the page."""
        service, server = self.server.service, self.server
        body = self._read_body(min(service.limits.body, PLAIN))
        with self._alone(len(body)):
            content = parse_json(body)
            self._hold(0)
        check_json(content, ACTIONS[action][1](served, service.scene(served.name)))
        queue = server.solvers if action == "solve" else server.answers
        return Answer.of(queue.do(lambda: getattr(service, action)(served.name, **content), self._is_there))

    def _predict(self, served: Served, kind: str) -> Answer:
        service, start = self.server.service, time.perf_counter()
        question = self._question(served, kind)
        most = service.limits.answer if kind == NPZ else service.limits.json_answer
        answer = self.server.answers.do(partial(service.predict, served.name, question, most), self._is_there)
        coords, values = answer.coords.numpy(), answer.values.numpy()
        with self._alone(values.nbytes):
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

    def _question(self, served: Served, kind: str) -> Question:
        """Read the body of a prediction; nothing of the body itself is kept."""
        limit = self.server.service.limits.body
        body = self._read_body(limit)
        with self._alone(limit if kind == NPZ else len(body)):  # an archive may be compressed
            question = read_question(body, kind, served, self.server.service)
            self._hold(question.nbytes)
        return question

    def _alone(self, size: int) -> contextlib.AbstractContextManager[Any]:
        """Within the block, nothing else that is large is converted."""
        return self.server.converting if size > SMALL else contextlib.nullcontext()

    def _read_head(self) -> bytes:
        """The next head, with the empty line at its end; nothing where the client sends no more."""
        head, end, found = bytearray(), time.monotonic() + (HEAD if self._ahead else SILENCE), None
        try:
            with self.server.waiting_for(self.connection, head=True):
                while not found and len(head) <= LONGEST:
                    chunk = self._received(2**16, end)
                    if not chunk and head:
                        raise Refused(HTTPStatus.BAD_REQUEST, "Expected a whole request, got a part of its head.")
                    if not chunk:  # the client has sent all, or the server is stopping
                        return b""
                    end = end if head else time.monotonic() + HEAD
                    head += chunk
                    found = EMPTY_LINE.search(head, max(0, len(head) - len(chunk) - 3))
        except TimeoutError:
            if not head:
                return b""
            why = f"Expected the whole head of a request within {HEAD:g} seconds."
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, why) from None
        length = found.end() if found else len(head)
        self._ahead = bytes(head[length:])
        return bytes(head[:length])

    def _read_body(self, limit: int) -> memoryview:
        """The body of at most `limit` bytes, whose client must send at the least pace or faster.

        Memory is counted as bytes arrive, so a client that announces a large body and sends none of it costs nothing.
        """
        size = self.head.length
        if size is None:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Expected a Content-Length, got none.")
        if size > limit:
            why = f"Expected a body of at most {limit:,} bytes, got {size:,}."
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        if size and not self._ahead and self.head.get("expect").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, got, start = np.empty(size, np.uint8).data, 0, time.monotonic()
        with self.server.waiting_for(self.connection):
            while got < size:
                try:
                    chunk = self._received(min(size - got, 2**16), start + FIRST + got / RATE)
                except TimeoutError:
                    why = f"Expected {size:,} bytes in the body at {RATE:,} a second or more, got {got:,}."
                    raise Refused(HTTPStatus.REQUEST_TIMEOUT, why) from None
                if not chunk:
                    raise Refused(HTTPStatus.BAD_REQUEST, f"Expected {size:,} bytes in the body, got {got:,}.")
                body[got : got + len(chunk)] = chunk
                got += len(chunk)
                self._hold(got)
        self._unread = False
        return body

    def _received(self, most: int, end: float) -> bytes:
        """The next bytes; TimeoutError where none arrive before a time."""
        if self._ahead:
            taken, self._ahead = self._ahead[:most], self._ahead[most:]
            return taken
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv(most)

    def _write(self, content: bytes) -> None:
        """Send content to a client that must read at the least pace or faster."""
        start = time.monotonic()
        for done in range(0, len(content), RATE // 4):
            self.connection.settimeout(max(start + FIRST + done / RATE - time.monotonic(), 0.001))
            self.wfile.write(content[done : done + RATE // 4])

    def _drain(self) -> None:
        """Read and drop what the client still sends: closing earlier could lose the answer on its way."""
        end = time.monotonic() + DRAINED
        _wake(self.connection, socket.SHUT_WR)
        with contextlib.suppress(OSError), self.server.waiting_for(self.connection):
            while self._received(2**16, end):
                pass

    def _is_there(self) -> bool:
        """Whether the client still waits: a page drops the requests that it no longer needs."""
        if self.server.stopping:  # has ended our side of the connection itself
            return True
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return False


def _is_ours(host: str, names: Container[str]) -> bool:
    """Whether a Host header is an address, or one of some names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _pages(server: Server) -> dict[str, Callable[[], Answer]]:
    """Answers to GET by address, other than those of single operators."""
    service, folder = server.service, files("oformer.playground") / "static"

    def health() -> Answer:
        waiting, solving = len(server.answers), len(server.solvers)
        return Answer.of({"status": "ok", "models": len(service.models), "waiting": waiting, "solving": solving})

    fixed = {f"/{file}": Answer((folder / file).read_bytes(), f"{kind}; charset=utf-8") for file, kind in PAGE.items()}
    fixed["/"], fixed["/openapi.json"] = fixed.pop("/index.html"), Answer.of(description(service, __version__))
    return {
        **{path: partial(Answer, *answer) for path, answer in fixed.items()},
        "/health": health,
        "/v1/models": lambda: Answer.of({"models": [served.summary() for served in service.models.values()]}),
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
    """Serve trained operators until Ctrl-C.

    Args:
        sources: run folders, checkpoints, or names of trained operators.
        host: the address to listen at.
        port: 0 takes a free one.
        name: a host name besides localhost under which people reach it.
        device: of the operators; by default a GPU if there is one.
        browse: open the page in a browser.
        say: called with the address, and with a sentence at the end.

    Returns:
        Whether all work has ended; False where a solver, which cannot be interrupted, is still at work in its thread.
    """
    service = Service(named([Predictor(source, device, warn=False) for source in sources]))
    server = Server(service, host, port, name)
    say(f"{len(service.models)} operator{'s' * (len(service.models) != 1)}: {', '.join(service.models)}")
    loop = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    # Signals interrupt this thread, which only waits, and never the one that accepts connections. Whoever has read the
    # address may press Ctrl-C, so the block begins before it is printed; without `loop`, shutdown would wait for ever.
    loop.start()
    with contextlib.suppress(KeyboardInterrupt):
        say(f"Listening at {server.address} (Ctrl-C stops)")
        threading.Thread(target=server.warm, daemon=True).start()
        if browse:
            webbrowser.open(server.address)
        while loop.is_alive():
            loop.join(0.2)
    say(f"Stopping; what is being answered has {service.limits.grace:g} seconds to finish.")
    server.shutdown()
    return server.stop()


def read_question(body: Buffer, kind: str, served: Served, service: Service) -> Question:
    """The prediction that a body asks for; `kind` is its media type."""
    spec, schema = served.predictor.spec, predict_schema(service.limits)
    most = service.limits.points * max(1, spec.in_times) * max(3, spec.in_channels)
    if kind == NPZ:
        arrays = read_npz(body, ARRAYS, most)
        scalars = {name: arrays.pop(name).item() for name in ("resolution", "times") if name in arrays}
        whole: dict[str, Any] = {name: int(n) if n.is_integer() else n for name, n in scalars.items()}
        for name, value in whole.items():
            check_json(value, schema["properties"][name], name)
        if not arrays.keys() >= {"coords", "values"}:
            raise InputError("`coords` and `values` in the archive", ", ".join(arrays))
        return Question(**arrays, **whole)
    content, lists = parse_arrays(body)
    check_json(content, schema)
    arrays = {
        f"{prefix}{name}": numbers(value, lists, f"{part}.{name}", most)
        for prefix, part in (("", "input"), ("query_", "query"))
        for name, value in content.get(part, {}).items()
    }
    return Question(**arrays, resolution=content.get("resolution"), times=content.get("times"))
