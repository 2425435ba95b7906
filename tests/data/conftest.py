"""Two small problems: one on a grid that all samples share, one where nothing is shared or equal."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.fields import Card, Field, Sample, Spec
from oformer.files import sha256
from oformer.meshes.grids import periodic_grid
from oformer.problems.base import Problem
from oformer.seeds import numpy_generator


@dataclass(frozen=True)
class Waves(Problem):
    """A sine that moves by a quarter; WAVES_DELAY makes each sample take so many seconds."""

    name: ClassVar[str] = "waves"

    points: int = 16
    speed: float = 0.25

    @property
    def spec(self) -> Spec:
        return Spec(1, 1, 1, 1, 1, grid=(self.points,), periods=(1.0,))

    @property
    def card(self) -> Card:
        return Card("Waves", "A sine moves.", inputs=("before",), targets=("after",))

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        drawn = np.stack([numpy_generator(seed, index).standard_normal(2) for index in indices])
        return {"drawn": torch.from_numpy(drawn)}

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        query = Field.of(periodic_grid((self.points,), (1.0,)))
        samples = []
        for size, phase in state["drawn"].tolist():
            time.sleep(float(os.environ.get("WAVES_DELAY", "0")))
            x = query.coords[None]
            wave = size * torch.sin(2 * math.pi * (x - phase))
            moved = size * torch.sin(2 * math.pi * (x - phase - self.speed))
            samples.append(Sample(Field(query.coords, wave, query.weights), query, moved))
        return samples


@dataclass(frozen=True)
class Scattered(Problem):
    """Random numbers of points and of other queries in the plane, several frames, cells and parameters."""

    name: ClassVar[str] = "scattered"

    most: int = 30

    @property
    def spec(self) -> Spec:
        return Spec(2, 2, 3, 4, 2, query_channels=1)

    @property
    def card(self) -> Card:
        return Card("Scattered", inputs=("a", "b", "c"), queries=("type",), targets=("u", "v"))

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        return {"where": torch.tensor([[seed, index] for index in indices])}

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        return [self._sample(numpy_generator(seed, index)) for seed, index in state["where"].tolist()]

    def _sample(self, random: np.random.Generator) -> Sample:
        def numbers(*shape: int) -> Tensor:
            return torch.from_numpy(random.standard_normal(shape))

        points, queries, cells = (int(n) for n in random.integers(3, self.most, 3))
        weights = torch.from_numpy(random.dirichlet(np.ones(points)))
        return Sample(
            input=Field(numbers(points, 2), numbers(2, points, 3), weights),
            query=Field.of(numbers(queries, 2), numbers(1, queries, 1)),
            target=numbers(4, queries, 2),
            parameters={"mach": numbers(1)[0], "angle": numbers(1)[0]},
            cells=(torch.from_numpy(random.integers(0, points, (cells, 3))),),
        )


@pytest.fixture
def waves() -> Waves:
    return Waves()


@pytest.fixture
def scattered() -> Scattered:
    return Scattered()


@pytest.fixture
def fingerprint():
    """The checksum of each file of a dataset; hidden files are none of its own."""

    def of(folder: Path) -> dict[str, str]:
        found = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {p.relative_to(folder).as_posix(): sha256(p) for p in sorted(found)}

    return of


@pytest.fixture
def same_sample():
    """Whether two samples are equal, bit by bit in float32."""

    def check(a: Sample, b: Sample) -> None:
        a, b = a.to(torch.float32), b.to(torch.float32)
        for one, other in ((a.input, b.input), (a.query, b.query)):
            for name in ("coords", "values", "weights"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(a.target, b.target)
        assert a.parameters.keys() == b.parameters.keys()
        assert all(torch.equal(value, b.parameters[name]) for name, value in a.parameters.items())
        assert (a.cells is None) == (b.cells is None)
        for one, other in zip(a.cells or (), b.cells or (), strict=True):
            assert torch.equal(one, other)

    return check
