"""What a person can change in each problem, and what an operator then sees: one scene per kind of problem.

A scene turns a small state of JSON (a curve, a painted medium, vortices, charges on a shape, a free stream) into the
input field of its problem at every point where it can be known. Sensors are some of these points. The state is also
what the problem's own solver starts from, so that the operator's answer can be held against it.

Differs from the problems' own settings: Navier-Stokes is solved on at most twice the stored points with steps of 0.01,
which takes seconds on a CPU in place of minutes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.config import from_json
from oformer.errors import InputError, SolverDiverged
from oformer.fields import Field, Sample, Spec
from oformer.meshes.grids import cell_grid, line_weights, periodic_grid, thinning
from oformer.meshes.library import mesh_of
from oformer.meshes.shapes import CENTER
from oformer.meshes.subsets import usual_weights
from oformer.meshes.triangles import Mesh, edge_middles
from oformer.meshes.voronoi import given_to_nearest
from oformer.playground.starts import STARTS_FILE, free_flow, read_starts
from oformer.playground.wire import encoded, list_of, object_of
from oformer.problems import PROBLEMS, Airfoil, Burgers, Darcy, NavierStokes, Problem
from oformer.problems.poisson import SHAPES, PoissonProblem, ShapeName, default_numbers, geometry_of
from oformer.seeds import numpy_generator, torch_generator
from oformer.solvers.euler_fv import EulerSolver
from oformer.solvers.fourier import resample
from oformer.solvers.median_dual import median_dual

SEED = 20_230  # of what is drawn here: no dataset of ours has it
CONTROLS = 64  # points of a curve that a person bends
DRAFT_STEP = 0.04  # of time, for an input that need not be exact
VORTEX = 0.05  # radius of one that a pointer leaves behind
MOST = 20  # sources
STRIDES = (1, 2, 3, 4, 6, 8)  # of a regular grid of sensors, as far as they leave a grid
FEWEST = 8  # sensors per axis that a stride leaves
NODES = 400  # of the finest shape that sources lie on

State = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """The input of a state wherever it can be known, and where training had its sensors."""

    input: Field
    usual: Int[Tensor, "sensors"]  # rows of the input


@dataclass(frozen=True)
class Places:
    """Where to answer, and how to draw what is answered there."""

    query: Field
    layout: dict[str, Any]


@dataclass(frozen=True)
class Sensors:
    """Which of the points are seen: a share of the usual ones, less what is erased, and some added."""

    share: float = 1.0
    seed: int = 0
    erased: tuple[tuple[float, ...], ...] = ()  # coordinates and a radius
    added: tuple[tuple[float, ...], ...] = ()  # each takes the nearest point where the input is known
    stride: int = 1  # of the usual ones on a regular grid, before the share is taken

    def of(self, known: Known, spec: Spec) -> Field:
        """The field that they see."""
        coords, usual = known.input.coords, known.usual
        if self.stride > 1:
            grid = _grid(spec)
            usual = usual.view(grid)[(slice(None, None, self.stride),) * len(grid)].flatten()
        rows = usual
        if self.share < 1:
            count = max(1, round(self.share * len(rows)))
            rows = rows[torch.randperm(len(rows), generator=torch_generator(self.seed, 0))[:count].sort().values]
        for *center, radius in self.erased:
            rows = rows[(coords[rows] - coords.new_tensor(center)).norm(dim=1) >= radius]
        nearest = [int((coords - coords.new_tensor(point)).norm(dim=1).argmin()) for point in self.added]
        rows = torch.unique(torch.cat([rows, torch.tensor(nearest, dtype=rows.dtype)]))
        if not len(rows):
            raise InputError("at least one sensor", "none", "Add one, or erase fewer")
        weights, kind = known.input.weights[rows], usual_weights(spec)
        if kind == "gaps":
            weights = line_weights(coords[rows], spec.periods[0] if spec.periods else None)
        elif kind == "cells":
            blind = usual[~torch.isin(usual, rows)]
            places, given = coords[blind][None], known.input.weights[blind][None]
            everywhere = torch.ones_like(weights[None], dtype=torch.bool)
            weights = weights + given_to_nearest(places, given, coords[rows][None], everywhere, spec.periods)[0]
        return Field(coords[rows], known.input.values[:, rows], weights / weights.sum())


class Scene:
    """The base of all: subclasses say what a state is."""

    kind: ClassVar[str]  # by which the page chooses its tools
    slow: ClassVar[bool] = False  # whether the solver takes minutes: it is then asked only on demand
    drafts: ClassVar[bool] = False  # whether a coarse input comes sooner than the exact one

    def __init__(self, spec: Spec):
        self.spec = spec

    @property
    def schema(self) -> dict[str, Any]:
        """Of a state, as JSON Schema."""
        raise NotImplementedError

    @property
    def resolutions(self) -> tuple[int, ...]:
        """What may be asked for: points per axis, or on a mesh how often its edges are halved, plus one."""
        raise NotImplementedError

    @property
    def resolution(self) -> int:
        """The usual one of these."""
        raise NotImplementedError

    @property
    def sensors(self) -> int:
        """The most that training had."""
        return math.prod(_grid(self.spec))

    @property
    def strides(self) -> tuple[int, ...]:
        """By which a regular grid of sensors may be thinned."""
        grid, periodic = self.spec.grid, self.spec.periods is not None
        if grid is None:
            return (1,)
        fitting = [stride for stride in STRIDES[1:] if min(grid) >= FEWEST * stride]
        return (1, *(stride for stride in fitting if not periodic or all(n % stride == 0 for n in grid)))

    def queries(self, resolution: int) -> int:
        """How many points an answer has."""
        return resolution**self.spec.dim

    @property
    def tested(self) -> str:
        """What is particular about the test samples, in words."""
        return ""

    @property
    def solver(self) -> str:
        """The solver that the operator is held against, in words."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Numbers that the page needs for its tools."""
        return {}

    def example(self, index: int) -> dict[str, Any]:
        """A state drawn as the problem draws its samples."""
        raise NotImplementedError

    def known(self, state: State) -> Known:
        """The input of a state."""
        raise NotImplementedError

    def draft(self, state: State) -> Known:
        """The same, or nearly so, sooner."""
        return self.known(state)

    def places(self, state: State, resolution: int) -> Places:
        """Points to answer at."""
        raise NotImplementedError

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """What the solver says at these points."""
        raise NotImplementedError

    def unseen(self, state: State) -> str:
        """What of a state was never in training, in words; empty if all was."""
        return ""

    def check_resolution(self, resolution: int) -> None:
        """Refuse one that is not offered."""
        if resolution not in self.resolutions:
            choices = ", ".join(map(str, self.resolutions))
            raise InputError("a resolution that this scene offers", str(resolution), f"Choices: {choices}")


class Curve(Scene):
    """Burgers: a periodic curve, given at 64 points and smooth between them."""

    kind = "curve"

    def __init__(self, problem: Burgers, spec: Spec):
        super().__init__(spec)
        self.problem = problem

    @property
    def schema(self) -> dict[str, Any]:
        """The values of the curve."""
        value = {"type": "number", "minimum": -4, "maximum": 4}
        return object_of({"values": list_of(value, CONTROLS, CONTROLS)})

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Powers of two around the usual one."""
        return tuple(sorted({64, 128, 256, 512, 1024, 2048, self.resolution}))

    @property
    def resolution(self) -> int:
        """As trained, but no more than a screen shows."""
        return min(_grid(self.spec)[0], 512)

    @property
    def solver(self) -> str:
        """In words."""
        p = self.problem
        return f"Fourier method, {p.solver_points} points, {p.steps} steps, float64"

    def example(self, index: int) -> dict[str, Any]:
        """An initial state."""
        drawn = self.problem.draw([index], SEED)["initial"]
        return {"values": _rounded(resample(drawn, CONTROLS)[0].clamp(-4, 4))}

    def known(self, state: State) -> Known:
        """On all points of the problem; those of training among them."""
        points = self.problem.points
        coords = periodic_grid((points,), (1.0,))
        usual = thinning((points,), _grid(self.spec), periodic=True)[0]
        return Known(Field.of(coords, self._curve(state, points)[..., None]), torch.arange(0, points, usual))

    def places(self, state: State, resolution: int) -> Places:
        """So many points of the period."""
        return Places(Field.of(periodic_grid((resolution,), (1.0,))), {"kind": "line", "points": resolution})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """Interpolated in Fourier space, exactly."""
        (sample,) = self.problem.solve({"initial": self._curve(state, self.problem.points)})
        return resample(sample.target[:, :, 0], resolution)[..., None]

    def unseen(self, state: State) -> str:
        """Training had curves of mean zero, and the mean is what carries all others along."""
        mean = sum(state["values"]) / CONTROLS
        return "" if abs(mean) < 0.005 else f"a mean of {mean:.3g}, where all curves of training have mean zero"

    def _curve(self, state: State, points: int) -> Float[Tensor, "1 points"]:
        return resample(torch.tensor([state["values"]], dtype=torch.float64), points)


class Medium(Scene):
    """Darcy: a painted medium, a digit for each cell of the grid that training saw."""

    kind = "medium"

    def __init__(self, problem: Darcy, spec: Spec):
        super().__init__(spec)
        self.problem = problem
        self.side = _grid(spec)[0]
        self.stride = thinning((problem.points,), (self.side,), periodic=False)[0]

    @property
    def schema(self) -> dict[str, Any]:
        """The digits, row by row, y fastest."""
        length = self.side**2
        return object_of({"cells": {"type": "string", "minLength": length, "maxLength": length, "pattern": "^[01]*$"}})

    @property
    def resolutions(self) -> tuple[int, ...]:
        """From a quarter to twice the usual one."""
        return tuple(sorted({max(4, self.side // 4), max(4, self.side // 2), self.side, min(256, 2 * self.side)}))

    @property
    def resolution(self) -> int:
        """As trained."""
        return self.side

    @property
    def solver(self) -> str:
        """In words."""
        return f"finite volumes, {self.problem.points} x {self.problem.points} cells, float64"

    def facts(self) -> dict[str, Any]:
        """The side of the painting, and the two values."""
        return {"side": self.side, "low": self.problem.low, "high": self.problem.high}

    def example(self, index: int) -> dict[str, Any]:
        """A medium."""
        drawn = self.problem.draw([index], SEED)["coefficient"][0, :: self.stride, :: self.stride]
        return {"cells": "".join("1" if high else "0" for high in (drawn == self.problem.high).flatten().tolist())}

    def known(self, state: State) -> Known:
        """In all cells of the problem; those of training among them."""
        n = self.problem.points
        rows = torch.arange(n * n).view(n, n)[:: self.stride, :: self.stride].flatten()
        return Known(Field.of(_cells(n), self._medium(state).view(1, -1, 1)), rows)

    def places(self, state: State, resolution: int) -> Places:
        """A grid from the first to the last point of training."""
        first, last = _cells(self.problem.points)[0, 0].item(), ((self.side - 1) * self.stride + 0.5)
        axis = torch.linspace(first, last / self.problem.points, resolution, dtype=torch.float64)
        coords = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
        return Places(Field.of(coords), {"kind": "grid", "points": [resolution, resolution]})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """Interpolated between the cells of the solver."""
        (sample,) = self.problem.solve({"coefficient": self._medium(state)[None]})
        n = self.problem.points
        coords = self.places(state, resolution).query.coords
        return _bilinear(sample.target.view(n, n), coords * n - 0.5)[None, :, None]

    def _medium(self, state: State) -> Float[Tensor, "points points"]:
        """Each cell of the problem has the phase of the nearest painted one."""
        cells = np.frombuffer(state["cells"].encode(), np.uint8)
        if not np.isin(cells, (ord("0"), ord("1"))).all():
            raise InputError("only the digits 0 and 1 in `cells`", "others")
        high = torch.from_numpy(cells == ord("1")).view(self.side, self.side)
        nearest = ((torch.arange(self.problem.points) + self.stride // 2) // self.stride).clamp(max=self.side - 1)
        field = high[nearest][:, nearest]
        low = torch.full(field.shape, self.problem.low, dtype=torch.float64)
        return low.masked_fill(field, self.problem.high)


class Vorticity(Scene):
    """Navier-Stokes: a random state at time 0 and the vortices that a pointer stirs into it."""

    kind = "vorticity"
    drafts = True

    def __init__(self, problem: NavierStokes, spec: Spec):
        super().__init__(spec)
        points = min(problem.solver_points, 2 * problem.points)
        self.problem = dataclasses.replace(
            problem, points=points, solver_points=points, time_step=max(problem.time_step, 0.01)
        )

    @property
    def schema(self) -> dict[str, Any]:
        """Which random state, and x, y and strength of vortices."""
        vortex = {
            "type": "array",
            "items": {"type": "number", "minimum": -3, "maximum": 3},
            "minItems": 3,
            "maxItems": 3,
        }
        return object_of(
            {
                "index": {"type": "integer", "minimum": 0, "maximum": 10**6},
                "vortices": list_of(vortex, 0, 400),
            }
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """From a quarter to twice the usual one."""
        usual = self.resolution
        return tuple(sorted({max(8, usual // 4), max(8, usual // 2), usual, 2 * usual}))

    @property
    def resolution(self) -> int:
        """As trained."""
        return _grid(self.spec)[0]

    @property
    def solver(self) -> str:
        """In words."""
        p = self.problem
        return f"Fourier method, {p.solver_points} x {p.solver_points} points, steps of {p.time_step:g}, {p.precision}"

    def facts(self) -> dict[str, Any]:
        """How a vortex looks."""
        return {"radius": VORTEX}

    def example(self, index: int) -> dict[str, Any]:
        """A random state alone."""
        return {"index": index, "vortices": []}

    def known(self, state: State) -> Known:
        """The frames that the operator is shown, on all points of the solver."""
        return self._frames(state, self.problem)

    def draft(self, state: State) -> Known:
        """Solved on half the points with longer steps: within 1e-3 at a viscosity of 1e-4, in a quarter of the time."""
        p = self.problem
        points = max(_grid(self.spec)[0], p.points // 2)
        coarse = dataclasses.replace(p, points=points, solver_points=points, time_step=max(p.time_step, DRAFT_STEP))
        try:
            return self._frames(state, coarse)
        except SolverDiverged:  # a state that was stirred hard
            return self.known(state)

    def _frames(self, state: State, problem: NavierStokes) -> Known:
        short = dataclasses.replace(problem, duration=problem.in_times + 1)
        (sample,) = short.solve(self._drawn(state, problem))
        n = problem.points
        stride = thinning((n, n), _grid(self.spec), periodic=True)[0]
        frames = sample.input.values[-self.spec.in_times :]  # a view may have cut the first ones off
        return Known(
            Field.of(sample.input.coords, frames), torch.arange(n * n).view(n, n)[::stride, ::stride].flatten()
        )

    def places(self, state: State, resolution: int) -> Places:
        """So many points per axis."""
        grid = (resolution, resolution)
        return Places(Field.of(periodic_grid(grid, (1.0, 1.0))), {"kind": "grid", "points": list(grid)})

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """Interpolated in Fourier space, exactly."""
        (sample,) = self.problem.solve(self._drawn(state, self.problem))
        n = self.problem.points
        frames = sample.target[: self.spec.out_times].view(-1, n, n)
        along_y = resample(frames.reshape(-1, n), resolution).view(-1, n, resolution)
        both = resample(along_y.mT.reshape(-1, n), resolution).view(-1, resolution, resolution).mT
        return both.reshape(len(frames), -1, 1)

    def unseen(self, state: State) -> str:
        """Stirring is no random field."""
        return "a stirred state; training saw random fields" if state["vortices"] else ""

    def _drawn(self, state: State, problem: NavierStokes) -> dict[str, Tensor]:
        drawn = problem.draw([state["index"]], SEED)
        axis = torch.arange(problem.solver_points, dtype=torch.float64) / problem.solver_points
        initial = drawn["initial"][0].clone()
        for x, y, strength in state["vortices"]:
            bumps = [torch.exp(-(((axis - c + 0.5) % 1.0 - 0.5) ** 2) / (2 * VORTEX**2)) for c in (x, y)]
            initial += strength * torch.outer(*bumps)
        return {"initial": (initial - initial.mean())[None], "viscosity": drawn["viscosity"]}


class Sources(Scene):
    """Electro- and magnetostatics: discs of charge or current on a shape, of any size, turned by any angle."""

    kind = "sources"

    def __init__(self, problem: PoissonProblem, spec: Spec):
        super().__init__(spec)
        self.problem = problem

    @property
    def schema(self) -> dict[str, Any]:
        """Shape, its numbers (see `oformer.problems.poisson`), its turn in degrees, centers of sources."""
        place = {
            "type": "array",
            "items": {"type": "number", "minimum": -1, "maximum": 2},
            "minItems": 2,
            "maxItems": 2,
        }
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
        """The mesh of the solver, and finer ones."""
        return (1, 2, 3)

    @property
    def resolution(self) -> int:
        """The nodes: training had no queries between them, and errors are larger there."""
        return 1

    @property
    def sensors(self) -> int:
        """Of the finest shape."""
        return NODES

    def queries(self, resolution: int) -> int:
        """On the finest shape, about."""
        return NODES * 4 ** (resolution - 1)

    @property
    def tested(self) -> str:
        """The shape of all test samples."""
        return "" if "u" in self.problem.shapes else "all on a U, which training had not"

    @property
    def solver(self) -> str:
        """In words."""
        return "quadratic finite elements, mesh and matrix kept, float64; straight between its nodes"

    def facts(self) -> dict[str, Any]:
        """The numbers of the shapes as they were in training, and which were there."""
        return {"shapes": {name: default_numbers(name) for name in SHAPES}, "trained": list(self.problem.shapes)}

    def example(self, index: int) -> dict[str, Any]:
        """On the shape kept for testing first, then on all."""
        shape: ShapeName = SHAPES[(index - 1) % len(SHAPES)]
        numbers = default_numbers(shape)
        generator = numpy_generator(SEED, index)
        inside = mesh_of(geometry_of(shape, numbers)).points
        chosen = generator.choice(len(inside), int(generator.integers(1, 4)), replace=False)
        return {"shape": shape, "numbers": numbers, "turn": 0, "sources": [_rounded(inside[i]) for i in chosen]}

    def known(self, state: State) -> Known:
        """At the nodes of the mesh."""
        sample = self._sample(state)
        return Known(sample.input, torch.arange(sample.input.points))

    def places(self, state: State, resolution: int) -> Places:
        """The nodes, and middles of edges."""
        sample = self._sample(state)
        mesh = self._mesh(state)
        flags = sample.query.values[0]
        for _ in range(resolution - 1):
            mesh, flags = _refined(mesh, flags)
        return Places(Field.of(mesh.points, flags[None]), _mesh_layout(mesh, None))

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """Straight between the nodes."""
        mesh, values = self._mesh(state), self._sample(state).target[0]
        for _ in range(resolution - 1):
            values = torch.cat([values, values[mesh.edges].mean(1)])
            mesh = _refined(mesh, values[:, :1])[0]
        return values[None]

    def unseen(self, state: State) -> str:
        """Shapes that training had not."""
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


class Stream(Scene):
    """Airfoil: the Mach number and the angle of the free stream."""

    kind = "stream"
    slow = True

    def __init__(self, problem: Airfoil, spec: Spec):
        super().__init__(spec)
        self.problem = problem

    @property
    def schema(self) -> dict[str, Any]:
        """The free stream."""
        bounds = {"mach": self.problem.mach, "angle": self.problem.angle}
        return object_of(
            {name: {"type": "number", "minimum": low, "maximum": high} for name, (low, high) in bounds.items()}
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The mesh of the solver, and a finer one."""
        return (1, 2)

    @property
    def resolution(self) -> int:
        """The mesh is fine enough."""
        return 1

    @property
    def sensors(self) -> int:
        """The nodes."""
        return len(self._mesh.points)

    def queries(self, resolution: int) -> int:
        """About: each time four triangles for one."""
        return self.sensors * 4 ** (resolution - 1)

    @property
    def solver(self) -> str:
        """In words."""
        p = self.problem
        return f"finite volumes, {len(self._mesh.points):,} nodes, {p.steps} steps of {p.time_step:g} s, {p.precision}"

    def facts(self) -> dict[str, Any]:
        """Bounds, and the streams whose first frames need no solver."""
        return {
            "mach": list(self.problem.mach),
            "angle": list(self.problem.angle),
            "ready": [list(stream) for stream in self._starts],
        }

    def example(self, index: int) -> dict[str, Any]:
        """One of those that are ready, or the middle of the bounds."""
        if self._starts:
            mach, angle = list(self._starts)[(5 * index + 9) % len(self._starts)]
            return {"mach": mach, "angle": angle}
        return {name: sum(getattr(self.problem, name)) / 2 for name in ("mach", "angle")}

    def known(self, state: State) -> Known:
        """The frames that the operator is shown."""
        frames = self.problem.frames[: self.problem.in_times]
        values = self._starts.get((round(state["mach"], 6), round(state["angle"], 6)))
        if values is None:
            values = self._march(state, frames)
        points, kind = self._mesh.points, self._kinds
        low, high = points.amin(0), points.amax(0)
        constant = torch.cat([(points - low) / (high - low), kind], 1).expand(len(frames), -1, -1)
        seen = torch.cat([values, constant], -1)[-self.spec.in_times :]  # a view may have cut the first ones off
        return Known(Field.of(points, seen), torch.arange(len(points)))

    def places(self, state: State, resolution: int) -> Places:
        """The nodes, and middles of edges."""
        mesh, kind = self._mesh, self._kinds
        for _ in range(resolution - 1):
            mesh, kind = _refined(mesh, kind)
        return Places(Field.of(mesh.points, kind[None]), _mesh_layout(mesh, self.problem.card.picture.window))

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """Straight between the nodes."""
        values = self._march(state, self.problem.frames)[self.problem.in_times :][: self.spec.out_times]
        mesh = self._mesh
        for _ in range(resolution - 1):
            values = torch.cat([values, values[:, mesh.edges].mean(2)], 1)
            mesh = _refined(mesh, self._kinds)[0]
        return values

    @property
    def _mesh(self) -> Mesh:
        return mesh_of(self.problem.mesh)

    @property
    def _kinds(self) -> Float[Tensor, "points 1"]:
        return self._mesh.marks.double()[:, None]

    @cached_property
    def _starts(self) -> dict[tuple[float, float], Float[Tensor, "times points 4"]]:
        """First frames that come with the package, for the problem as it is by default."""
        usual = Airfoil()
        same = ("mesh", "time_step", "stride", "in_times", "numerics", "precision", "stored")
        if not STARTS_FILE.is_file() or any(getattr(usual, name) != getattr(self.problem, name) for name in same):
            return {}
        return read_starts()

    def _march(self, state: State, frames: Sequence[int]) -> Float[Tensor, "times points 4"]:
        """One trajectory alone, where the problem fills a group of sixteen."""
        mesh, p = self._mesh, self.problem
        solver = EulerSolver(
            median_dual(mesh.points, mesh.triangles, mesh.marks),
            precision=p.precision, numerics=p.numerics, together=1,
        )  # fmt: skip
        free = free_flow(state["mach"], state["angle"])
        flow = solver.march(None, free, frames=frames, time_step=p.time_step)
        moving = flow.velocity if p.stored == "velocity" else flow.momentum
        return torch.cat([moving[0], flow.density[0, ..., None], flow.pressure[0, ..., None]], -1).double()


SCENES: dict[type[Problem], Callable[[Any, Spec], Scene]] = {
    Burgers: Curve, Darcy: Medium, NavierStokes: Vorticity, PoissonProblem: Sources, Airfoil: Stream,
}  # fmt: skip


def scene_of(recipe: Mapping[str, Any] | None, spec: Spec) -> Scene | None:
    """The scene of the problem that an operator was trained on; None where there is no problem, or one of no scene.

    Args:
        recipe: as JSON, from a checkpoint.
        spec: of the operator.
    """
    content = (recipe or {}).get("problem")
    kinds = {kind.__name__: kind for kind in PROBLEMS.values() if issubclass(kind, tuple(SCENES))}
    if not isinstance(content, dict) or content.get("type") not in kinds:
        return None
    problem = from_json(kinds[content["type"]], content, "recipe.problem")
    return next(scene(problem, spec) for kind, scene in SCENES.items() if isinstance(problem, kind))


def _grid(spec: Spec) -> tuple[int, ...]:
    if spec.grid is None:
        raise InputError("an operator trained on a regular grid for this problem", "scattered points")
    return spec.grid


@cache
def _cells(points: int) -> Float[Tensor, "cells 2"]:
    return cell_grid((points, points), (1.0, 1.0))


def _rounded(values: Float[Tensor, "numbers"]) -> list[float]:
    """Short in JSON, and more than a screen shows."""
    return [round(value, 5) for value in values.tolist()]


def _bilinear(values: Float[Tensor, "rows columns"], places: Float[Tensor, "queries 2"]) -> Float[Tensor, "queries"]:
    """Values between the points of a grid, at places counted in its points."""
    limit = torch.tensor(values.shape) - 2
    low = torch.minimum(places.floor().long().clamp_min(0), limit)
    (s, t), (i, j) = (places - low).unbind(1), low.unbind(1)
    return (1 - s) * ((1 - t) * values[i, j] + t * values[i, j + 1]) + s * (
        (1 - t) * values[i + 1, j] + t * values[i + 1, j + 1]
    )


def _rotation(degrees: float) -> Float[Tensor, "2 2"]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def _refined(mesh: Mesh, kinds: Float[Tensor, "points 1"]) -> tuple[Mesh, Float[Tensor, "_ 1"]]:
    """Each triangle cut in four at the middles of its edges.

    Args:
        mesh: whose triangles are cut; round borders stay round.
        kinds: of the points, not zero on the border. The middle of an edge on the border is what both its ends are,
            and otherwise it is inside.
    """
    n, edges = len(mesh.points), mesh.edges
    number = {(int(a), int(b)): n + k for k, (a, b) in enumerate(edges.tolist())}
    cut = []
    for a, b, c in mesh.triangles.tolist():
        ab, bc, ca = (number[min(i, j), max(i, j)] for i, j in ((a, b), (b, c), (c, a)))
        cut += [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    ends = kinds[edges, 0]
    middle = torch.where(mesh.outer & (ends[:, 0] == ends[:, 1]), ends[:, 0], torch.zeros_like(ends[:, 0]))
    fine = Mesh(
        torch.cat([mesh.points, edge_middles(mesh)]),
        torch.tensor(cut),
        torch.cat([mesh.marks, torch.where(mesh.outer, mesh.marks[edges].amin(1), 0)]),
        mesh.circles,
    )
    return fine, torch.cat([kinds, middle[:, None]])


def _mesh_layout(mesh: Mesh, window: tuple[float, float, float, float] | None) -> dict[str, Any]:
    return {
        "kind": "mesh",
        "coords": encoded(mesh.points.numpy()),
        "triangles": encoded(mesh.triangles.numpy()),
        "window": window,
    }
