"""A small operator of each problem, and a server in front of them."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
import torch

from oformer.checkpoint import Checkpoint, save_checkpoint
from oformer.config import to_json
from oformer.data.dataset import PointDataset, View
from oformer.experiments.recipes import RECIPES
from oformer.meshes.airfoil import Naca
from oformer.models import OFormerConfig, Operator
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.playground.api import Limits, Service
from oformer.playground.asgi import Playground
from oformer.playground.server import Server, listen
from oformer.predict import Predictor
from oformer.problems import Airfoil, Burgers, Darcy, Electrostatics, Magnetostatics, NavierStokes
from oformer.solvers.euler_fv import Numerics
from oformer.training.recipe import Recipe

COARSE = Naca(wall=48, far_field=24, trailing=0.02, leading=0.02, growth=0.3)
HASTY = Numerics(newton=1, sweeps=4, start_newton=2)
FAMILIES = {
    "burgers": ("burgers-2048", Burgers(points=128, solver_points=128, modes=6, steps=60), View(points=(64,))),
    "darcy": ("darcy-85", Darcy(points=29), View(points=(15, 15))),
    "navier-stokes": (
        "ns1",
        NavierStokes(viscosity=(1e-3, 1e-3), duration=6, points=16, solver_points=32, time_step=0.05, in_times=3),
        View(),
    ),
    "electrostatics": ("electro", Electrostatics(), View()),
    "magnetostatics": ("magneto", Magnetostatics(), View()),
    "airfoil": ("airfoil", Airfoil(mesh=COARSE, steps=13, stride=3, in_times=2, numerics=HASTY), View()),
}


def tiny_family(name: str) -> Recipe:
    """The paper's recipe of a family on a problem that a test can solve, with few channels."""
    paper, problem, view = FAMILIES[name]
    recipe = RECIPES[paper]
    model = OFormerConfig(
        attention=recipe.model.attention,
        encoder=Encoder(width=16, depth=1),
        query=Query(width=16, fourier_features=8, hidden=(16,), heads=2),
        propagator=Propagator(depth=min(recipe.model.propagator.depth, 1)),
        decoder=Decoder(hidden=(8,)),
    )
    data = dataclasses.replace(recipe.data, train=3, test=1, view=view)
    return dataclasses.replace(recipe, name=f"tiny-{name}", problem=problem, data=data, model=model)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An operator of each family with random weights and true statistics: what is served need not be any good."""
    root, folders = tmp_path_factory.mktemp("operators"), {}
    for name in FAMILIES:
        recipe = tiny_family(name)
        problem = recipe.problem
        assert problem is not None
        data = PointDataset(problem.samples([0, 1], 3), recipe.data.view, spec=problem.spec)
        torch.manual_seed(5)
        operator = Operator(recipe.model.build(data.spec), recipe.normalization).fit(data[i] for i in range(2))
        folders[name] = root / name
        content = Checkpoint(
            operator, name, 7, {"error": 0.5, "count": 1, "median": 0.5, "worst": 0.5}, to_json(recipe), problem.card
        )
        save_checkpoint(folders[name], content)
    return folders


@pytest.fixture(scope="session")
def predictors(checkpoints: dict[str, Path]) -> dict[str, Predictor]:
    return {name: Predictor(folder, "cpu", warn=False) for name, folder in checkpoints.items()}


@pytest.fixture(scope="session")
def service(predictors: dict[str, Predictor]) -> Service:
    return Service(predictors, Limits(body=2**20, points=4096, seconds=30.0))


@pytest.fixture(scope="session")
def app(service: Service) -> Playground:
    return Playground(service)


@contextlib.contextmanager
def serving(app: Playground, **options: Any) -> Iterator[int]:
    """The port at which an application is served, by uvicorn in a thread."""
    listener = listen("127.0.0.1", 0)
    server = Server(app, **{"lifespan": "off", **options})
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def port(service: Service) -> Iterator[int]:
    with serving(Playground(service)) as port:
        yield port


async def ask(app: Any, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None):
    """Status, headers and body that an application answers.

    Args:
        body: whole, or in parts with seconds between them; a client whose last part is not empty leaves.
    """
    parts, part = iter([body] if isinstance(body, bytes) else body), b""
    named = {"Host": "127.0.0.1", "Content-Length": str(len(body)) if isinstance(body, bytes) else None}
    named = {name.lower(): value for name, value in {**named, **(headers or {})}.items() if value is not None}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(path), "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None,
        "server": None, "headers": [(name.encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    answered, said = asyncio.Event(), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        nonlocal part
        for part in parts:
            if isinstance(part, bytes):
                return {"type": "http.request", "body": part, "more_body": part != b"" and not isinstance(body, bytes)}
            await asyncio.sleep(part)
        if isinstance(body, bytes) or part == b"":  # the client waits; others have left in a pause
            await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    with contextlib.suppress(ZeroDivisionError):  # is answered first, and then passed on to the server
        await app(scope, receive, send)
    answered.set()
    said_headers = {name.decode(): value.decode() for name, value in said[0]["headers"]}
    return said[0]["status"], said_headers, b"".join(message["body"] for message in said[1:])


class Client:
    """Asks an application within this process, without a socket."""

    def __init__(self, app: Any, runner: asyncio.Runner):
        self.app, self.runner = app, runner

    def raw(self, method: str, path: str, body: Any = b"", headers: dict[str, str] | None = None):
        """Status, headers and body."""
        return self.runner.run(ask(self.app, method, path, body, headers))

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.raw("GET", path)
        return status, json.loads(body)

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        status, _, body = self.raw("POST", path, json.dumps(content).encode(), {"Content-Type": "application/json"})
        return status, json.loads(body)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def client(app: Playground, runner: asyncio.Runner) -> Client:
    return Client(app, runner)


def decoded(array: dict[str, Any]) -> np.ndarray:
    """An array as the page reads it."""
    return np.frombuffer(base64.b64decode(array["base64"]), array["type"]).reshape(array["shape"])
