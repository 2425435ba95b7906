"""The scene of electro- and magnetostatics: sources that a person places on a shape."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec
from oformer.meshes.cache import mesh_of
from oformer.meshes.shapes import CENTER
from oformer.meshes.triangles import Mesh
from oformer.playground.requests import list_of, object_of
from oformer.playground.scenes.base import SEED, Known, Places, Scene, State, rounded
from oformer.playground.scenes.meshed import mesh_layout, refined
from oformer.problems.poisson import SHAPES, PoissonProblem, ShapeName, default_numbers, geometry_of
from oformer.seeds import numpy_generator

MOST = 20  # sources
NODES = 400  # of the finest shape that sources lie on


class Sources(Scene):
    """Electro- and magnetostatics: discs of charge or current on a shape, of any size, turned by any angle."""

    kind = "sources"

    def __init__(self, problem: PoissonProblem, spec: Spec):
        super().__init__(spec)
        self.problem = problem

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema: shape, its numbers (see `problems/poisson.py`), its turn in degrees, centers of sources."""
        place = list_of({"type": "number", "minimum": -1, "maximum": 2}, 2, 2)
        number = {"type": "number", "minimum": 0, "maximum": 32}
        return object_of(
            {
                "shape": {"type": "string", "enum": list(SHAPES)},
                "numbers": list_of(number, 3, 3),
                "turn": {"type": "number", "minimum": -360, "maximum": 360},
                "sources": list_of(place, 0, MOST),
            }
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The mesh of the solver, and two refinements."""
        return (1, 2, 3)

    @property
    def resolution(self) -> int:
        """The nodes alone: training had no queries between them, and errors are larger there."""
        return 1

    @property
    def sensors(self) -> int:
        """Nodes of the finest shape."""
        return NODES

    def queries(self, resolution: int) -> int:
        """Query points on the finest shape, approximately."""
        return NODES * 4 ** (resolution - 1)

    @property
    def tested(self) -> str:
        """The shape of all test samples, where training had others."""
        return "" if "u" in self.problem.shapes else "all on a U, which training had not"

    @property
    def solver(self) -> str:
        """Description of the solver, for the page."""
        return "quadratic finite elements, mesh and matrix kept, float64; straight between its nodes"

    def facts(self) -> dict[str, Any]:
        """The default numbers of every shape, and the shapes in training."""
        return {"shapes": {name: default_numbers(name) for name in SHAPES}, "trained": list(self.problem.shapes)}

    def example(self, index: int) -> dict[str, Any]:
        """Random sources: on the shape kept for testing first, then on each shape in turn."""
        shape: ShapeName = SHAPES[(index - 1) % len(SHAPES)]
        numbers = default_numbers(shape)
        generator = numpy_generator(SEED, index)
        inside = mesh_of(geometry_of(shape, numbers)).points
        chosen = generator.choice(len(inside), int(generator.integers(1, 4)), replace=False)
        return {"shape": shape, "numbers": numbers, "turn": 0, "sources": [rounded(inside[i]) for i in chosen]}

    def known(self, state: State) -> Known:
        """The sources at the nodes of the mesh."""
        sample = self._sample(state)
        return Known(sample.input, torch.arange(sample.input.points))

    def places(self, state: State, resolution: int) -> Places:
        """The nodes, and for finer resolutions the middles of edges."""
        sample = self._sample(state)
        mesh = self._mesh(state)
        flags = sample.query.values[0]
        for _ in range(resolution - 1):
            mesh, flags = refined(mesh, flags)
        return Places(Field.of(mesh.points, flags[None]), mesh_layout(mesh, None))

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated linearly between the nodes."""
        mesh, values = self._mesh(state), self._sample(state).target[0]
        for _ in range(resolution - 1):
            values = torch.cat([values, values[mesh.edges].mean(1)])
            mesh = refined(mesh, values[:, :1])[0]
        return values[None]

    def unseen(self, state: State) -> str:
        """Shapes, turns and numbers of sources that training did not have."""
        shape = state["shape"]
        if shape not in self.problem.shapes:
            return f"training had no {shape.upper() if len(shape) == 1 else shape}"
        if state["turn"] % 360:
            return "training had no turned shapes"
        if list(state["numbers"]) != default_numbers(shape) and not self.problem.randomized:
            return f"training had one {shape.upper() if len(shape) == 1 else shape}, and not this one"
        return "" if len(state["sources"]) <= self.problem.discs[1] else "training had fewer sources"

    def _sample(self, state: State) -> Sample:
        shape, points = state["shape"], self._mesh(state).points
        left, shares = list(range(len(points))), []
        for place in state["sources"]:
            distances = (points[left] - points.new_tensor(place)).norm(dim=1)
            chosen = int(distances.argmin())
            shares.append((chosen + 0.5) / len(left))
            left.pop(chosen)
        drawn = {
            "shape": torch.tensor([float(SHAPES.index(shape))]),
            "numbers": torch.tensor([state["numbers"]], dtype=torch.float64),
            "discs": torch.tensor([float(len(shares))]),
            "centers": torch.tensor(shares, dtype=torch.float64).view(1, -1),
            "pose": _rotation(state["turn"])[None],
        }
        return self.problem.solve(drawn)[0]

    def _mesh(self, state: State) -> Mesh:
        shape, numbers = state["shape"], state["numbers"]
        if shape in ("square", "disc") and numbers[0] < 4:
            raise InputError("at least 4 cells across a square or disc", f"{numbers[0]:g}")
        mesh = mesh_of(geometry_of(shape, [float(number) for number in numbers]))
        return mesh.moved(_rotation(state["turn"]), torch.tensor(CENTER, dtype=torch.float64))


def _rotation(degrees: float) -> Float[Tensor, "2 2"]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
