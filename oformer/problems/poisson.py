"""What electro- and magnetostatics share: Poisson's equation with discs as sources, on meshes of several shapes.

The data of gnn-bvp-solver (Lötzsch, Ohler and Otterbach, Learning the Solution Operator of Boundary Value Problems
using Graph Neural Networks, 2022), on which the paper trains (table 4): square, disc, annulus and L for training,
the U for testing.

Differs: meshes are ours where theirs are gmsh's, with about as many points, and round borders are round. Their
randomized meshes are redrawn with probability 1/16 before each sample (the square always); ours serve 16 samples of
their shape, so that a sample depends on its index alone. Their source and Dirichlet flag went through a projection that
leaves them within rounding of 0 and 1; ours are 0 and 1. Values are kept in physical units, theirs are divided by the
largest of each channel.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from oformer.errors import InputError, unknown_name
from oformer.fields import Batch, Card, Field, Picture, Sample, Spec
from oformer.meshes.cache import mesh_of
from oformer.meshes.shapes import CENTER, Annulus, Disc, LShape, Shape, Square, UShape
from oformer.meshes.triangles import Mesh
from oformer.problems.base import Problem, Undo
from oformer.seeds import numpy_generator
from oformer.solvers.poisson_fem import Poisson, Predicate

ShapeName = Literal["square", "disc", "annulus", "l", "u"]
SHAPES: tuple[ShapeName, ...] = ("square", "disc", "annulus", "l", "u")  # by their codes

SQUARED_RADIUS = 0.005  # of the discs of source
SERVED = 16  # samples by one randomized mesh
SOLVERS = 64  # kept in memory; a large one takes 4 MB

CHANNELS = (
    "x",
    "y",
    "{source}",
    "Dirichlet flag",
    "{material}",
    "x to the nearest border point",
    "y to the nearest border point",
    "x to the nearest Dirichlet point",
    "y to the nearest Dirichlet point",
    "distance to the nearest Dirichlet point",
    "distance to the nearest border point",
)
TURNS = 8  # rotations over which predictions are averaged
VECTORS = (5, 7)  # channels with the x of vectors; their y follow


@dataclass(frozen=True)
class PoissonProblem(Problem):
    """The base of both: subclasses give names, and the field that belongs to a gradient."""

    title: ClassVar[str]
    equation: ClassVar[str]
    source: ClassVar[str]  # names of channels
    material: ClassVar[str]
    targets: ClassVar[tuple[str, str, str]]
    mirror: ClassVar[int]  # 1 where the field is a vector, -1 where a reflection turns it round besides (pseudovector)

    train: int = 8000  # samples on `shapes`, one after the other; all later ones are on the default U
    shapes: tuple[ShapeName, ...] = ("square", "disc", "annulus", "l")
    randomized: bool = False  # the meshes of these samples
    discs: tuple[int, int] = (1, 3)  # of source, at least and at most; the published superposition tests have (4, 5)

    def __post_init__(self) -> None:
        if self.train < 0:
            raise InputError("a `train` of zero samples or more", str(self.train))
        if not self.shapes:
            raise InputError("at least one of `shapes`", "none", f"Choices: {', '.join(SHAPES)}")
        for shape in self.shapes:
            if shape not in SHAPES:
                raise unknown_name("shape", shape, SHAPES)
        if not 1 <= self.discs[0] <= self.discs[1] <= 20:
            raise InputError("`discs` (least, most) between 1 and 20", str(self.discs))

    @property
    def spec(self) -> Spec:
        """Scattered points; a flag with each query."""
        return Spec(dim=2, in_times=1, in_channels=len(CHANNELS), out_times=1, out_channels=3, query_channels=1)

    @property
    def card(self) -> Card:
        """Names and story."""
        least, most = self.discs
        return Card(
            title=self.title,
            text=(
                f"{self.equation}, at the points of triangle meshes. The {self.source} is 1 on {least} to {most} discs "
                f"of radius 0.07 and 0 elsewhere. The first {self.train} samples lie on the shapes "
                f"{', '.join(self.shapes)} in turn{', with randomized meshes' * self.randomized}, all others on a U. "
                "Solved with quadratic finite elements in float64; the field is projected on linear ones."
            ),
            inputs=tuple(name.format(source=self.source, material=self.material) for name in CHANNELS),
            queries=("Dirichlet flag",),
            targets=self.targets,
            picture=Picture(input=2, vector=(1, 2)),
        )

    def split_after(self, train: int) -> "PoissonProblem":
        """Shapes for training first, then the U."""
        return dataclasses.replace(self, train=train)

    def field(self, gradient: Float[Tensor, "batch points 2"]) -> Float[Tensor, "batch points 2"]:
        """The field that belongs to the gradient of a potential."""
        raise NotImplementedError

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Numbers from which shapes and sources follow.

        Returns:
            `shape`, a code of `SHAPES`; `numbers`, of its geometry; `discs`, how many; `centers`, a number in [0, 1)
            for each that says which of the points still left it is.
        """
        rows = [self._draw(index, seed) for index in indices]
        names = ("shape", "numbers", "discs", "centers")
        return {
            name: torch.from_numpy(np.array(column, np.float64))
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """Solve on the CPU; samples on the same mesh share its tensors.

        Args:
            state: what `draw` gives. With `pose`, an orthogonal matrix for each sample, its domain is turned or
                mirrored about (1/2, 1/2).
        """
        state = {name: tensor.to("cpu", torch.float64) for name, tensor in state.items()}
        _check_state(state)
        places: dict[tuple, list[int]] = {}
        for i, (code, numbers) in enumerate(zip(state["shape"].tolist(), state["numbers"].tolist(), strict=True)):
            pose = tuple(state["pose"][i].flatten().tolist()) if "pose" in state else None
            places.setdefault((int(code), tuple(numbers), pose), []).append(i)
        samples: dict[int, Sample] = {}
        for (code, numbers, pose), rows in places.items():
            domain = _domain(geometry_of(SHAPES[code], numbers), pose)
            sources = torch.stack([domain.source(state["centers"][i, : int(state["discs"][i])].tolist()) for i in rows])
            potential, gradient = domain.solver.solve(sources)
            field = self.field(gradient)
            for k, i in enumerate(rows):
                parameters = {"discs": state["discs"][i].clone(), "shape": state["shape"][i].clone()}
                target = torch.cat([potential[k, :, None], field[k]], 1)[None]
                samples[i] = domain.sample(sources[k], target, parameters)
        return [samples[i] for i in range(len(samples))]

    def symmetries(self, batch: Batch) -> int:
        """Some of all: rotations about (1/2, 1/2) by eighths, and each after the reflection (x, y) to (x, 1 - y)."""
        return 2 * TURNS

    def transformed(self, batch: Batch, which: Int[Tensor, "batch"]) -> tuple[Batch, Undo]:
        """So many eighths of a turn, from `TURNS` on reflected first; exact on any points, of a mesh or not."""
        return self._turned(batch, (which % TURNS).double() * (2 * torch.pi / TURNS), which >= TURNS)

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        """A rotation by any angle for each sample and, with probability one half, a reflection.

        Args:
            batch: on any device, padded or not.
            generator: on the CPU; the only source of randomness.
        """
        angle = 2 * torch.pi * torch.rand(batch.size, generator=generator, dtype=torch.float64)
        mirrored = torch.randint(2, (batch.size,), generator=generator) == 1
        device = batch.target.device
        return self._turned(batch, angle.to(device), mirrored.to(device))[0]

    def _turned(
        self, batch: Batch, angle: Float[Tensor, "batch"], mirrored: Bool[Tensor, "batch"]
    ) -> tuple[Batch, Undo]:
        """Points move, and vectors turn along.

        With u'(Qx) = u(x) the gradient is Q∇u; a field that is this gradient, turned by a right angle (a magnetic one),
        changes its sign besides where Q is a reflection.
        """
        sign = 1.0 - 2 * mirrored.double()
        cos, sin = angle.cos(), angle.sin()
        q = torch.stack([torch.stack([cos, -sin * sign], -1), torch.stack([sin, cos * sign], -1)], -2)
        of_field = (q * sign[:, None, None] if self.mirror < 0 else q).to(batch.target)
        q = q.to(batch.target)
        center, change = q.new_tensor(CENTER), q - torch.eye(2).to(q)

        def move(points: Tensor, exist: Tensor) -> Tensor:
            """Written as a change, which is none where the matrix is one; padding stays zero."""
            return torch.where(exist[..., None], points + (points - center) @ change.mT, points)

        def moved(known: Field) -> Field:
            return dataclasses.replace(known, coords=move(known.coords, known.weights > 0))

        def turn_field(target: Tensor, matrices: Tensor) -> Tensor:
            return torch.cat([target[..., :1], target[..., 1:] @ matrices[:, None]], -1)

        values = batch.input.values[:, 0].clone()
        values[..., :2] = move(values[..., :2], batch.input.weights > 0)
        for first in VECTORS:
            values[..., first : first + 2] = values[..., first : first + 2] @ q.mT
        input = moved(batch.input).with_values(values[:, None])
        same = batch.query.coords is batch.input.coords
        query = dataclasses.replace(batch.query, coords=input.coords) if same else moved(batch.query)
        changed = dataclasses.replace(
            batch,
            input=input,
            query=query,
            target=turn_field(batch.target, of_field.mT),
        )
        return changed, lambda target: turn_field(target, of_field.to(target.dtype))

    def _draw(self, index: int, seed: int) -> tuple[int, list[float], int, list[float]]:
        generator = numpy_generator(seed, index)
        discs = int(generator.integers(self.discs[0], self.discs[1] + 1))
        centers = generator.random(self.discs[1]).tolist()
        if index >= self.train:
            return SHAPES.index("u"), default_numbers("u"), discs, centers
        shape = self.shapes[index % len(self.shapes)]
        numbers = default_numbers(shape)
        if self.randomized:
            turn = index // len(self.shapes)
            if shape != "square":
                # Of the mesh, not of the sample; longer than the key of a sample, and not ending in zero.
                generator = numpy_generator(seed, turn // SERVED, SHAPES.index(shape), 1)
            numbers = random_numbers(shape, generator)
        return SHAPES.index(shape), numbers, discs, centers


def default_numbers(shape: ShapeName) -> list[float]:
    """Of the geometry of a shape as published without mesh augmentation; filled with zeros."""
    known: dict[ShapeName, list[float]] = {
        "square": [15.0, 0.0, 0.0],
        "disc": [15.0, 0.0, 0.0],
        "annulus": [0.12, *CENTER],
        "l": [0.5, 0.5, 0.0],
        "u": [0.5, 0.75, 0.0],
    }
    return known[shape]


def random_numbers(shape: ShapeName, generator: np.random.Generator) -> list[float]:
    """Of the geometry of a shape, randomized as published; filled with zeros."""
    if shape in ("square", "disc"):
        # From 8 to 19; int cuts towards zero, so 15 is twice as likely.
        return [15.0 + int(generator.uniform(-8, 5)), 0.0, 0.0]
    if shape == "annulus":
        return [generator.uniform(0.05, 0.25), *generator.uniform(0.35, 0.65, 2).tolist()]
    if shape == "l":
        return [*generator.uniform(0.2, 0.8, 2).tolist(), float(generator.integers(4))]
    return [generator.uniform(0.2, 0.6), generator.uniform(0.2, 0.8), 0.0]


def geometry_of(shape: ShapeName, numbers: Sequence[float]) -> Shape:
    """The geometry that the numbers of a drawn state mean."""
    a, b, c = numbers
    if shape == "square":
        return Square(int(a))
    if shape == "disc":
        return Disc(int(a))
    if shape == "annulus":
        return Annulus(a, (b, c))
    return LShape(a, b, int(c)) if shape == "l" else UShape(a, b)


def _check_state(state: dict[str, Tensor]) -> None:
    batch = len(state["shape"])
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    most = state["centers"].shape[1] if state["centers"].ndim == 2 else 0
    expected = {"shape": (batch,), "numbers": (batch, 3), "discs": (batch,), "centers": (batch, most)}
    if "pose" in state:
        expected["pose"] = (batch, 2, 2)
    if shapes != expected:
        raise InputError("a state as `draw` makes it", str(shapes), f"Shapes should be {expected}")
    if not bool(((state["shape"] >= 0) & (state["shape"] < len(SHAPES))).all()):
        raise InputError(f"codes of shapes between 0 and {len(SHAPES) - 1}", str(state["shape"].tolist()))
    if not bool(((state["discs"] >= 0) & (state["discs"] <= most)).all()):
        raise InputError(f"at most as many `discs` as `centers` ({most})", str(state["discs"].tolist()))
    if not bool(((state["centers"] >= 0) & (state["centers"] < 1)).all()):
        raise InputError("`centers` between 0 and 1", f"{float(state['centers'].max()):g} at most")


class _Domain:
    """A mesh with its solver, and the channels that do not depend on the source."""

    def __init__(self, mesh: Mesh, held: Predicate):
        self.mesh, self.solver = mesh, Poisson(mesh, held)
        points = mesh.points
        flag = self.solver.held[: len(points)]
        to_border, to_held = _to_nearest(points, held(points)), _to_nearest(points, flag)
        columns = [
            points,
            torch.zeros(len(points), 1, dtype=torch.float64),  # the source
            flag[:, None].double(),
            torch.ones(len(points), 1, dtype=torch.float64),  # the material
            to_border,
            to_held,
            to_held.norm(dim=1, keepdim=True),
            to_border.norm(dim=1, keepdim=True),
        ]
        self.known = torch.cat(columns, 1)
        self.query = Field.of(points, flag[None, :, None].double())

    def source(self, centers: Sequence[float]) -> Float[Tensor, "points"]:
        """One near the chosen points, zero elsewhere; overlaps do not add.

        Args:
            centers: in [0, 1): each chooses among the points that are left.
        """
        points = self.mesh.points
        left = list(range(len(points)))
        chosen = points[[left.pop(int(share * len(left))) for share in centers]]
        near = (points[:, None] - chosen).square().sum(2) < SQUARED_RADIUS
        return near.any(1).double()

    def sample(
        self, source: Float[Tensor, "points"], target: Float[Tensor, "1 points 3"], parameters: dict[str, Tensor]
    ) -> Sample:
        """Of the mesh and this source."""
        values = self.known.clone()
        values[:, 2] = source
        known = self.query.with_values(values[None])
        return Sample(known, self.query, target, parameters, cells=(self.mesh.triangles,))


@lru_cache(SOLVERS)
def _domain(geometry: Shape, pose: tuple[float, float, float, float] | None) -> _Domain:
    mesh = mesh_of(geometry)
    if pose is None:
        return _Domain(mesh, geometry.held)
    matrix = torch.tensor(pose, dtype=torch.float64).view(2, 2)
    center = torch.tensor(CENTER, dtype=torch.float64)
    return _Domain(mesh.moved(matrix, center), lambda points: geometry.held((points - center) @ matrix + center))


def _to_nearest(points: Float[Tensor, "points 2"], chosen: Bool[Tensor, "points"]) -> Float[Tensor, "points 2"]:
    """The vector from each point to the nearest of the chosen ones."""
    goals = points[chosen]
    vectors = goals - points[:, None]
    nearest = vectors.square().sum(2).argmin(1)
    return vectors[torch.arange(len(points)), nearest]
