"""The service behind uvicorn, as `oformer serve` runs it: clients have deadlines, and it stops gracefully.

No client can keep the others waiting: a head must arrive and an answer be read within their times, and where all
connections are in use, the one that has been waiting longest for its client is closed in favor of a new one.
"""

import math
import re
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from oformer.errors import InputError
from oformer.playground.api import Limits
from oformer.playground.asgi import FIRST, RATE, create_app
from oformer.terminal import say

SILENCE = 20  # seconds that a connection may be idle, and until the whole head of the next request is there
WATCHED = 0.25  # seconds between two looks at a connection
LONGEST = 2**16  # bytes of a head
BACKLOG = 2048  # connections that the system keeps waiting for us
# A proxy may take the end of such a request to be elsewhere: lines without CR, folded lines, several lengths.
_LENGTH = rb"\n(?:content-length|transfer-encoding):"
AMBIGUOUS = re.compile(rb"(?is)(?<!\r)\n|\n[ \t]|%b.*%b|\ncontent-length:[^\r]*," % (_LENGTH, _LENGTH))
MALFORMED = b"""HTTP/1.1 400 Bad Request\r\nServer: oformer\r\nContent-Type: application/json\r\nConnection: close\r\n\r
{"error":"Expected a request in HTTP/1.1, got one that is malformed or ambiguous."}"""


class Parser(h11.Connection):
    """h11's parser of requests, which refuses the ambiguous ones too."""

    def next_event(self) -> Any:
        """The next head or part of a body."""
        if self.their_state is h11.IDLE and AMBIGUOUS.search(self.trailing_data[0].partition(b"\r\n\r\n")[0]):
            raise h11.RemoteProtocolError("an ambiguous head")
        return super().next_event()


class Connection(H11Protocol):
    """A connection of uvicorn's that does not wait for its client for ever, and is one of at most so many."""

    most = Limits.connections

    def connection_made(self, transport: Any) -> None:
        """Take a place; where all are taken, that of the slowest client."""
        super().connection_made(transport)
        self.conn, self.since, self.owed = Parser(h11.SERVER, LONGEST), time.monotonic(), 0
        self.watch()
        if len(self.connections) > self.most:
            everybody: set[Any] = self.connections
            min((each for each in everybody if each.allowed), key=lambda each: each.since).transport.abort()

    @property
    def allowed(self) -> float:
        """Seconds that the client has for what it does since `since`; 0 where it waits for us."""
        if self.flow.write_paused:
            return FIRST + self.owed / RATE
        if self.cycle is None or self.cycle.response_complete:
            return SILENCE
        return math.inf if self.cycle.more_body else 0.0  # the application has deadlines for bodies

    def watch(self) -> None:
        """Close the connection when its client has taken too long."""
        if self in self.connections:
            if 0 < self.allowed < time.monotonic() - self.since:
                self.transport.abort()
            self.loop.call_later(WATCHED, self.watch)

    def handle_events(self) -> None:
        """Pass on what the client has sent; a request begins with the end of its head."""
        cycle = self.cycle
        super().handle_events()
        self.since = self.since if self.cycle is cycle else time.monotonic()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        self.since, self.owed = time.monotonic(), self.transport.get_write_buffer_size()
        super().pause_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refuses."""
        self.transport.write(MALFORMED)
        self.transport.close()


class Server(uvicorn.Server):
    """A worker of uvicorn's for an application."""

    def __init__(self, app: Any, **options: Any):
        settings: dict[str, Any] = {
            "http": Connection, "ws": "none", "timeout_keep_alive": SILENCE, "timeout_graceful_shutdown": Limits.grace,
            "log_config": None, "log_level": "error", "server_header": False, "headers": [("Server", "oformer")],
        }  # fmt: skip
        super().__init__(uvicorn.Config(app, **settings, **options))

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop, however often that is asked for; the time of grace is short."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, and finish the requests that have arrived."""
        say(f"Stopping; what is being answered has {Limits.grace:g} seconds to finish.")
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A socket to which clients can connect from now on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        got = f"{host} port {port} ({error})"
        raise InputError("an address that is free", got, "Choose another with --host and --port") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a body waits until its head is confirmed
    return listener


def serve(
    sources: Sequence[str | Path] = (),
    *,
    host: str = "127.0.0.1",
    port: int = 8760,
    names: Sequence[str] = (),
    device: str | None = None,
    browse: bool = False,
) -> bool:
    """Serve trained operators until Ctrl-C or SIGTERM.

    Args:
        sources: run folders, checkpoints, or names of trained operators; by default as `create_app`.
        host: the address to listen at.
        port: 0 takes a free one.
        names: host names besides localhost under which people reach it.
        device: of the operators; by default a GPU if there is one.
        browse: open the page in a browser.

    Returns:
        Whether all work has ended; False where a solver, which cannot be interrupted, is still at work in its thread.
    """
    app, listener = create_app(sources, names, device), listen(host, port)
    server, (name, port) = Server(app), listener.getsockname()[:2]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # before the address is printed, and until the process ends
    models, name = app.service.models, "127.0.0.1" if name == "0.0.0.0" else f"[{name}]" if ":" in name else name
    say(f"{len(models)} operator{'s' * (len(models) != 1)}: {', '.join(models)}")
    say(f"Listening at http://{name}:{port}/ (Ctrl-C stops)")
    if browse:
        threading.Thread(target=webbrowser.open, args=(f"http://{name}:{port}/",), daemon=True).start()
    server.run([listener])
    return not app.working
