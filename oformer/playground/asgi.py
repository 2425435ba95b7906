"""The service as an ASGI application on Starlette: addresses, the page, and what holds for every request.

Requests never name files: the page is read once at the start, and models are looked up in a dictionary. Names in the
Host header are refused, except localhost and those given at the start: a foreign page that points its own name at this
machine (DNS rebinding) must use that name. No answer carries a header that would let another page read it.
"""

import asyncio
import contextlib
import ipaddress
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Container, Coroutine, Hashable, Iterable, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from oformer import __version__
from oformer.checkpoint import find_checkpoint, read_config, zoo_folder, zoo_names
from oformer.errors import InputError, SolverDiverged
from oformer.fields import Field
from oformer.playground.api import Served, Service, named
from oformer.playground.openapi import ACTIONS, JSON, NPZ, description, read_question
from oformer.playground.queue import Room, WorkQueue, busy
from oformer.playground.requests import Buffer, check_json, parse_json, write_npz
from oformer.predict import Predictor
from oformer.terminal import say

PAGE = {"": "html", "app.js": "javascript", "style.css": "css"}  # addresses, and kinds of text
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FIRST, RATE = 10.0, 2**18  # a body or answer may take FIRST seconds, and one more for each RATE bytes
PLAIN = 2**20  # bytes of a body in JSON, other than that of a prediction
SMALL = 2**16  # bytes of a body or answer whose memory is not counted; such bodies may be answered together
SAID = HTTPException, InputError, SolverDiverged, ClientDisconnect, Exception  # errors that become a sentence

Result = TypeVar("Result")


class Playground:
    """The application.

    Args:
        service: answers the requests.
        names: host names besides localhost under which people reach it; `*` allows all.
    """

    def __init__(self, service: Service, names: Iterable[str] = ()):
        self.service, self.names, limits = service, {"localhost", *names}, service.limits
        self.answers = WorkQueue("answers", waiting=limits.waiting, seconds=limits.seconds)
        self.solvers = WorkQueue("solvers", waiting=max(1, limits.waiting // 8), seconds=limits.solver_seconds)
        self.room = Room(limits.memory, SMALL)
        self.active = 0  # requests
        self.counts = defaultdict[tuple[str, str, int], int](int)  # of answers by route, operator and status
        self.seconds = defaultdict[tuple[str, str], float](float)
        self.description = cache(partial(description, service, __version__))
        folder, model = files("oformer.playground") / "static", "/v1/models/{name}"
        gets = {"/health": self._health, "/metrics": self._metrics, "/openapi.json": self._openapi}
        gets |= {"/v1/models": self._models, model: self._describe}
        for name, kind in PAGE.items():
            gets[f"/{name}"] = partial(_page, (folder / (name or "index.html")).read_bytes(), f"text/{kind}")
        posts = {"predict": self._predict, **{action: partial(self._act, action) for action in ACTIONS}}
        self._app = Starlette(
            routes=[
                *(Route(path, answer, name=path) for path, answer in gets.items()),
                *(Route(f"{model}/{name}", answer, methods=["POST"], name=name) for name, answer in posts.items()),
            ],
            middleware=[Middleware(GZipMiddleware, 1024, 1, exclude_content_types=(NPZ,))],
            exception_handlers=dict.fromkeys(SAID, refused),
            lifespan=self._lifespan,
        )
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; errors become sentences, and what was said is counted."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = time.monotonic(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            elif len(message.get("body", b"")) > SMALL:  # its memory is counted until the client has read it
                await send({**message, "more_body": True})
                message = {**message, "body": b""}
            await send(message)

        self.active += 1
        with self.room.share() as scope["oformer.hold"]:
            try:
                app = self._refusal(Headers(scope=scope), scope["scheme"]) or self._app
                await app(scope, receive, answer)
            except asyncio.CancelledError:
                if not status:
                    response = await refused(Request(scope), busy("The server is stopping.", 5))
                    await response(scope, receive, answer)
            finally:
                self.active -= 1
                route, model = getattr(scope.get("route"), "name", "none"), scope.get("path_params", {}).get("name")
                model = model if model in self.service.models else ""
                self.counts[route, model, status] += 1
                self.seconds[route, model] += time.monotonic() - start

    def _refusal(self, headers: Headers, scheme: str) -> Response | None:
        """The answer to other pages, and to names that others have given to this machine.

        A browser says by Sec-Fetch-Site whether a page asks its own origin, and no page can change that: it holds
        behind proxies, whatever they make of Host and scheme. Without it, Origin must be the address asked for.
        """
        host, origins, site = headers.get("host", ""), headers.getlist("origin"), headers.get("sec-fetch-site")
        if "*" not in self.names and not _is_ours(host, self.names):
            why = f"Expected an address or {' or '.join(sorted(self.names))} in the Host header, got {host!r:.60}. "
            return _sentence(421, why + "Start the server with --name to be reached under another name.")
        if origins and (site != "same-origin" if site else any(o != f"{scheme}://{host}" for o in origins)):
            return _sentence(403, "Expected a request of the page that is served here, got another's.")
        return None

    @property
    def working(self) -> bool:
        """Whether a job is at work, which cannot be interrupted."""
        return bool(self.answers.running or self.solvers.running)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Load the operators in the background; at the end, let the answers that are being sent go out."""
        warming = asyncio.create_task(self._warm())
        yield
        warming.cancel()
        self.answers.close()
        self.solvers.close()
        for _ in range(100):
            await asyncio.sleep(0.01 if self.active else 0)

    async def _warm(self) -> None:
        """Load each operator and answer its first question in advance, one by one and behind those of people."""
        for name in self.service.models:
            try:
                if (await self._served(name)).scene is not None:
                    await self.answers.do(lambda names: [self.service.warm(names[0])], name)
            except (HTTPException, InputError, SolverDiverged) as error:
                say(f"{name}: {error}")

    async def _served(self, name: str) -> Served:
        """An operator, loaded."""
        try:
            served = self.service.model(name)
        except InputError as error:
            raise HTTPException(404, str(error)) from None
        if "scene" not in vars(served):
            await asyncio.to_thread(getattr, served, "scene")
        return served

    async def _health(self, request: Request) -> Response:
        counts = {"models": len(self.service.models), "waiting": len(self.answers), "solving": len(self.solvers)}
        return JSONResponse({"status": "ok", **counts})

    async def _metrics(self, request: Request) -> Response:
        """Counts for Prometheus, of this process."""
        values: dict[str, dict[str, Any]] = {"active": {"": self.active}, "memory_bytes": {"": self.room.held}}
        values["waiting"] = {f'{{queue="{name}"}}': len(getattr(self, name)) for name in ("answers", "solvers")}
        labels = '{{route="{}",model="{}",status="{}"}}', '{{route="{}",model="{}"}}'
        values["requests_total"] = {labels[0].format(*key): n for key, n in self.counts.items()}
        values["request_seconds_total"] = {labels[1].format(*key): f"{n:.6f}" for key, n in self.seconds.items()}
        lines = []
        for name, numbers in values.items():
            lines.append(f"# TYPE oformer_{name} {'counter' if name.endswith('total') else 'gauge'}")
            lines += (f"oformer_{name}{label} {number}" for label, number in numbers.items())
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        content = await asyncio.to_thread(self.description)
        return JSONResponse({**content, "servers": [{"url": request.scope.get("root_path") or "/"}]})

    async def _models(self, request: Request) -> Response:
        """The operators; one that cannot be loaded, of which `_warm` has told, does not keep the others away."""
        found = []
        for name in self.service.models:
            with contextlib.suppress(InputError):
                found.append((await self._served(name)).summary())
        return JSONResponse({"models": found})

    async def _describe(self, request: Request) -> Response:
        served = await self._served(request.path_params["name"])
        return JSONResponse(self.service.describe(served.name))

    async def _act(self, action: str, request: Request) -> Response:
        """Answer a request of the page, by the method of the service with the name of the action."""
        served = await self._served(request.path_params["name"])
        _media_type(request, JSON)
        content = parse_json(await self._body(request, min(self.service.limits.body, PLAIN)))
        check_json(content, ACTIONS[action][1](served, self.service.scene(served.name)))
        queue, method = self.solvers if action == "solve" else self.answers, getattr(self.service, action)
        return JSONResponse(await _while_there(request, queue.do(lambda _: [method(served.name, **content)], None)))

    async def _predict(self, request: Request) -> Response:
        """Answer a prediction; a binary request has a binary answer."""
        served, limits = await self._served(request.path_params["name"]), self.service.limits
        kind = _media_type(request, JSON, NPZ)
        body = await self._body(request, limits.body if kind == NPZ else min(limits.body, limits.json_body))
        key = (served.name, kind) if len(body) <= SMALL else None
        job = self.answers.do(partial(predictions, self.service, served, kind), body, key)
        del body
        content = await _while_there(request, job)
        request.scope["oformer.hold"](len(content))
        return Response(content, media_type=kind)

    async def _body(self, request: Request, limit: int) -> bytearray:
        """The body of at most `limit` bytes. Memory is counted as bytes arrive: announced ones cost nothing."""
        body, size = bytearray(), int(request.headers.get("content-length", 0))
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(FIRST) as pace:
                async for chunk in request.stream():
                    body += chunk
                    if (size := max(size, len(body))) > limit:
                        raise HTTPException(413, f"Expected a body of at most {limit:,} bytes, got {size:,} or more.")
                    request.scope["oformer.hold"](len(body))
                    pace.reschedule(start + FIRST + len(body) / RATE)
        except TimeoutError:
            why = f"Expected a body at {RATE:,} bytes a second or more, got {len(body):,} bytes so far."
            raise HTTPException(408, why) from None
        return body


async def refused(request: Request, error: Exception) -> Response:
    """One sentence in JSON about an error."""
    if isinstance(error, InputError | SolverDiverged):
        return _sentence(422, str(error))
    if isinstance(error, ClientDisconnect):  # which is counted, and heard by nobody
        return _sentence(499, "The client has left.")
    if not isinstance(error, HTTPException):
        return _sentence(500, "A mistake of ours; see the terminal.")
    headers, why = dict(error.headers or {}), error.detail
    if "Allow" in headers:
        why = f"Expected {headers['Allow']} here, got {request.method:.20}."
    elif why == "Not Found":
        why = "Expected one of the addresses in /openapi.json, got another."
    return _sentence(error.status_code, why, headers)


def _sentence(status: int, why: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": why}, status, headers)


async def _page(content: bytes, kind: str, request: Request) -> Response:
    return Response(content, media_type=kind)


def predictions(service: Service, served: Served, kind: str, bodies: Sequence[Buffer]) -> list[bytes | Exception]:
    """Bodies of the answers to those of requests for predictions, or what is wrong with some.

    One at a time is parsed and written, for which memory is not counted; small ones of equal shapes are predicted in
    one batch.
    """
    start, limits = time.perf_counter(), service.limits
    most = limits.answer if kind == NPZ else limits.json_answer
    outcome, alike = list[Any](), defaultdict[Hashable, list[int]](list)
    for i, body in enumerate(bodies):
        try:
            outcome.append(service.checked(served.name, read_question(body, kind, served, limits), most))
            alike[outcome[i].key].append(i)
        except InputError as error:
            outcome.append(error)
    for places in alike.values():
        for i, answer in zip(places, service.answer([outcome[i] for i in places]), strict=True):
            outcome[i] = answer if isinstance(answer, Exception) else _content(answer, kind, served, start)
    return outcome


def _content(answer: Field, kind: str, served: Served, start: float) -> bytes:
    arrays = {"coords": answer.coords.numpy(), "values": answer.values.numpy()}
    if kind == NPZ:
        return write_npz(arrays)
    lists = {name: array.astype(np.float64).tolist() for name, array in arrays.items()}
    facts = {"channels": list(served.card.targets), "seconds": time.perf_counter() - start}
    return bytes(JSONResponse({**lists, **facts}).body)


def _media_type(request: Request, *kinds: str) -> str:
    """The Content-Type of a request, refused where it is none of these."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in kinds:
        raise HTTPException(415, f"Expected a Content-Type of {' or '.join(kinds)}, got {kind!r:.60}.")
    return kind


async def _while_there(request: Request, job: Coroutine[Any, Any, Result]) -> Result:
    """The result of a job, which is cancelled when the client leaves: a page drops requests it no longer needs."""
    task, left = asyncio.create_task(job), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()


def _is_ours(host: str, names: Container[str]) -> bool:
    """Whether a Host header is an address, or one of some names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def create_app(sources: Sequence[str | Path] = (), names: Iterable[str] = (), device: str | None = None) -> Playground:
    """The service as an application for any ASGI server, or to be mounted in another; operators are loaded later.

    Args:
        sources: run folders, checkpoints, or names of trained operators; by default those in the environment variable
            OFORMER_SERVE_MODELS, separated by commas, or else all that come with the package.
        names: host names besides localhost under which people reach it, `*` for any; by default those in
            OFORMER_SERVE_NAMES.
        device: of the operators; by default that in OFORMER_SERVE_DEVICE, or else a GPU if there is one.
    """
    models, known, chosen = (os.environ.get(f"OFORMER_SERVE_{name}") for name in ("MODELS", "NAMES", "DEVICE"))
    sources = sources or (models.split(",") if models else [f"zoo:{name}" for name in zoo_names()])
    if not sources:
        advice = "Train one in minutes with `oformer demo`, then: `oformer serve outputs/demo/run`"
        raise InputError(f"a trained operator to serve, or some in {zoo_folder()}", "none", advice)
    folders = [find_checkpoint(source) for source in sources]
    loads = [partial(Predictor, folder, device or chosen, warn=False) for folder in folders]
    service = Service(dict(zip(named(read_config(folder).name for folder in folders), loads, strict=True)))
    return Playground(service, names or (known.split(",") if known else ()))


def __getattr__(name: str) -> Any:
    """`app`, configured by the environment: made when it is asked for, because it looks for operators."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault("app", create_app())
