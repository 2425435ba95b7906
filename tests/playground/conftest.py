"""A small operator of each problem, and a server in front of them."""

import base64
import dataclasses
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from oformer.playground.server import Server
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
def server(service: Service) -> Iterator[Server]:
    server = Server(service)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.stop()
    thread.join()


class Client:
    """One connection to a server, as a program would use it."""

    def __init__(self, server: Server, seconds: float = 60):
        self.port = server.server_address[1]
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)

    def raw(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        """Status, headers and body."""
        self.connection.request(method, path, body, headers or {})
        response = self.connection.getresponse()
        return response.status, response.headers, response.read()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.raw("GET", path)
        return status, json.loads(body)

    def post(self, path: str, content: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        status, _, body = self.raw("POST", path, json.dumps(content).encode(), headers)
        return status, json.loads(body)


def decoded(array: dict[str, Any]) -> np.ndarray:
    """An array as the page reads it."""
    return np.frombuffer(base64.b64decode(array["base64"]), array["type"]).reshape(array["shape"])


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server) as client:
        yield client
