"""Scenes: the state that a person changes, the input that an operator sees, and the solution beside it.

A scene turns a small state of JSON (a curve, a painted medium, vortices, charges on a shape, a free stream) into the
input field of its problem at every point where it can be known. Sensors are some of these points. The problem's own
solver starts from the state, too, so that its solution can be compared with the operator's answer.
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

SEED = 20_230  # of the examples; no dataset of ours has it
STRIDES = (1, 2, 3, 4, 6, 8)  # of a regular grid of sensors, as far as they leave a grid
FEWEST = 8  # sensors per axis that a stride leaves

State = Mapping[str, Any]


@dataclass(frozen=True)
class Known:
    """The input of a state wherever it can be known, and the points at which training had its sensors."""

    input: Field
    usual: Int[Tensor, "sensors"]  # rows of the input


@dataclass(frozen=True)
class Places:
    """Query points, and the layout by which the page draws the answer there."""

    query: Field
    layout: dict[str, Any]


@dataclass(frozen=True)
class Sensors:
    """Choice of sensors: a share of those of training, without the erased ones, and some more."""

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
    """Base class: the state of one kind of problem. Subclasses set the attributes without a value in `__init__`."""

    kind: ClassVar[str]  # name by which the page chooses its tools
    slow: ClassVar[bool] = False  # whether the solver takes minutes: the page then asks it only on demand
    drafts: ClassVar[bool] = False  # whether `draft` is faster than `known`
    schema: dict[str, Any]  # JSON Schema of a state
    resolutions: tuple[int, ...]  # on offer: points per axis, or on a mesh how often its edges are halved, plus one
    resolution: int  # the default resolution
    sensors: int  # the largest number in training
    solver: str  # description of the solver, for the page
    tested: str = ""  # particularity of the test samples, for the page

    def __init__(self, spec: Spec):
        self.spec = spec
        self.sensors = math.prod(spec.grid or ())

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
        """The part of a state that was never in training, for the page; empty if all of it was."""
        return ""


def grid_of(spec: Spec) -> tuple[int, ...]:
    """Points per axis of the regular grid of sensors in training."""
    if spec.grid is None:
        raise InputError("an operator trained on a regular grid for this problem", "scattered points")
    return spec.grid


def rounded(values: Float[Tensor, "numbers"]) -> list[float]:
    """Numbers rounded to five digits: short in JSON, and finer than a screen."""
    return [round(value, 5) for value in values.tolist()]
