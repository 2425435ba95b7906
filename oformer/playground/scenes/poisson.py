"""The scene of electro- and magnetostatics: sources that a person places on a shape."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Sample, Spec
from oformer.meshes.cache import mesh_of
from oformer.meshes.shapes import CENTER
from oformer.meshes.triangles import Mesh
from oformer.playground.requests import list_of, number, object_of
from oformer.playground.scenes.base import SEED, Known, State, rounded
from oformer.playground.scenes.meshed import MeshScene
from oformer.problems.poisson import SHAPES, PoissonProblem, ShapeName, default_numbers, geometry_of
from oformer.seeds import numpy_generator

MOST = 20  # sources


class Sources(MeshScene):
    """Electro- and magnetostatics: discs of charge or current on a shape, of any size, turned by any angle.

    The default resolution is the nodes alone: training had no queries between them, and errors are larger there.
    """

    kind = "sources"
    resolutions = (1, 2, 3)
    solver = "quadratic finite elements, mesh and matrix kept, float64; straight between its nodes"
    schema = object_of(
        {
            "shape": {"type": "string", "enum": list(SHAPES)},
            "numbers": list_of(number(0, 32), 3, 3),  # see `problems/poisson.py`
            "turn": number(-360, 360),  # degrees
            "sources": list_of(list_of(number(-1, 2), 2, 2), 0, MOST),
        }
    )

    def __init__(self, problem: PoissonProblem, spec: Spec):
        super().__init__(spec)
        self.problem = problem
        self.sensors = 400  # nodes of the finest shape
        self.tested = "" if "u" in problem.shapes else "all on a U, which training had not"

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

    def kinds(self, state: State) -> Float[Tensor, "points 1"]:
        """Flags of the nodes on the border."""
        return self._sample(state).query.values[0]

    def at_nodes(self, state: State) -> Float[Tensor, "times points channels"]:
        """The solution at the nodes."""
        return self._sample(state).target

    def unseen(self, state: State) -> str:
        """Shapes, turns and numbers of sources that training did not have."""
        shape = state["shape"]
        name = shape.upper() if len(shape) == 1 else shape
        if shape not in self.problem.shapes:
            return f"training had no {name}"
        if state["turn"] % 360:
            return "training had no turned shapes"
        if list(state["numbers"]) != default_numbers(shape) and not self.problem.randomized:
            return f"training had one {name}, and not this one"
        return "" if len(state["sources"]) <= self.problem.discs[1] else "training had fewer sources"

    def _sample(self, state: State) -> Sample:
        shape, points = state["shape"], self.mesh(state).points
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

    def mesh(self, state: State) -> Mesh:
        """The mesh of the turned shape."""
        shape, numbers = state["shape"], state["numbers"]
        if shape in ("square", "disc") and numbers[0] < 4:
            raise InputError("at least 4 cells across a square or disc", f"{numbers[0]:g}")
        mesh = mesh_of(geometry_of(shape, [float(n) for n in numbers]))
        return mesh.moved(_rotation(state["turn"]), torch.tensor(CENTER, dtype=torch.float64))


def _rotation(degrees: float) -> Float[Tensor, "2 2"]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
