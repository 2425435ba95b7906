"""What a scene is: the state that a person changes, the input that an operator sees, and the solution beside it.

A scene turns a small state of JSON (a curve, a painted medium, vortices, charges on a shape, a free stream) into the
input field of its problem at every point where it can be known. Sensors are some of these points. The state is also
what the problem's own solver starts from, so that the operator's answer can be held against it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import line_weights
from oformer.meshes.subsets import usual_weights
from oformer.meshes.voronoi import given_to_nearest
from oformer.seeds import torch_generator

SEED = 20_230  # of what is drawn here: no dataset of ours has it
STRIDES = (1, 2, 3, 4, 6, 8)  # of a regular grid of sensors, as far as they leave a grid
FEWEST = 8  # sensors per axis that a stride leaves

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
        """The input field at the sensors."""
        coords, usual = known.input.coords, known.usual
        if self.stride > 1:
            grid = grid_of(spec)
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
    """Base class: subclasses define the state."""

    kind: ClassVar[str]  # by which the page chooses its tools
    slow: ClassVar[bool] = False  # whether the solver takes minutes: it is then asked only on demand
    drafts: ClassVar[bool] = False  # whether a coarse input comes sooner than the exact one

    def __init__(self, spec: Spec):
        self.spec = spec

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of a state."""
        raise NotImplementedError

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Resolutions on offer: points per axis, or on a mesh how often its edges are halved, plus one."""
        raise NotImplementedError

    @property
    def resolution(self) -> int:
        """The default resolution."""
        raise NotImplementedError

    @property
    def sensors(self) -> int:
        """The largest number of sensors in training."""
        return math.prod(grid_of(self.spec))

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides by which a regular grid of sensors may be thinned."""
        grid, periodic = self.spec.grid, self.spec.periods is not None
        if grid is None:
            return (1,)
        fitting = [stride for stride in STRIDES[1:] if min(grid) >= FEWEST * stride]
        return (1, *(stride for stride in fitting if not periodic or all(n % stride == 0 for n in grid)))

    def queries(self, resolution: int) -> int:
        """Number of query points at a resolution."""
        return resolution**self.spec.dim

    @property
    def tested(self) -> str:
        """What is particular about the test samples, for the page."""
        return ""

    @property
    def solver(self) -> str:
        """Description of the solver that the operator is held against, for the page."""
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
        """The input of a state, nearly exact where that is faster."""
        return self.known(state)

    def places(self, state: State, resolution: int) -> Places:
        """Query points of a state at a resolution."""
        raise NotImplementedError

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution at the query points of a resolution."""
        raise NotImplementedError

    def unseen(self, state: State) -> str:
        """What of a state was never in training, for the page; empty if all of it was."""
        return ""

    def check_resolution(self, resolution: int) -> None:
        """Refuse a resolution that is not on offer."""
        if resolution not in self.resolutions:
            choices = ", ".join(map(str, self.resolutions))
            raise InputError("a resolution that this scene offers", str(resolution), f"Choices: {choices}")


def grid_of(spec: Spec) -> tuple[int, ...]:
    """Points per axis of the regular grid of sensors in training."""
    if spec.grid is None:
        raise InputError("an operator trained on a regular grid for this problem", "scattered points")
    return spec.grid


def rounded(values: Float[Tensor, "numbers"]) -> list[float]:
    """Numbers rounded to five digits: short in JSON, and finer than a screen."""
    return [round(value, 5) for value in values.tolist()]
