"""MyProblem: edit this file until it is your equation. As it stands: heat that spreads and grows along a rod.

    u_t = κ u_xx + r u (1 - u)  on (0, 1),  u_x = 0 at both ends

Learned map: u(·, 0) → u(·, duration).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from oformer import Card, Data, Field, InputError, OFormerConfig, Problem, Recipe, Sample, Spec, Training
from oformer.models.oformer import Decoder, Encoder, Query
from oformer.seeds import numpy_generator


@dataclass(frozen=True)
class MyProblem(Problem):
    """The settings of the equation; each needs a default, and each can be changed by `--problem.NAME VALUE`."""

    name: ClassVar[str] = "my-problem"

    points: int = 64
    diffusivity: float = 0.01
    growth: float = 2.0
    duration: float = 1.0
    steps: int = 200
    edition: int = 1  # count up when you change the code below: a dataset of older code is then refused, not used

    def __post_init__(self) -> None:
        limit = 0.5 / (self.points**2 * self.diffusivity)
        if self.duration / self.steps > limit:
            raise InputError(f"a time step of at most {limit:.3g}", f"{self.duration / self.steps:.3g}", "More `steps`")

    @property
    def spec(self) -> Spec:
        """The shapes of a sample. Leave `grid` away where points are scattered or differ from sample to sample."""
        return Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(self.points,))

    @property
    def card(self) -> Card:
        """The story of the dataset, and the names of its channels."""
        return Card("MyProblem", "Heat that spreads and grows.", inputs=("u at first",), targets=("u later",))

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        """What differs between samples, in float64; sample i depends on (seed, i) alone, whatever the batch."""
        x, modes = self._points(), torch.arange(1, 5, dtype=torch.float64)
        waves = torch.cos(torch.pi * modes[:, None] * x)
        noise = np.stack([numpy_generator(seed, index).standard_normal(4) for index in indices])
        return {"initial": torch.sigmoid((torch.from_numpy(noise) / modes) @ waves)}

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """One sample for each drawn state. All samples share one tensor of points, which saves memory and time."""
        u = initial = state["initial"]
        dt = self.duration / self.steps
        for _ in range(self.steps):
            ends = torch.cat([u[:, :1], u, u[:, -1:]], dim=1)  # mirrored: nothing flows through the ends
            u_xx = ends.diff(n=2, dim=1) * self.points**2
            u = u + dt * (self.diffusivity * u_xx + self.growth * u * (1 - u))
        query = Field.of(self._points()[:, None].to(u.device))
        return [
            Sample(query.with_values(before[None, :, None]), query, after[None, :, None])
            for before, after in zip(initial, u, strict=True)
        ]

    def _points(self) -> Tensor:
        """The middles of equal cells, so that equal weights are the right quadrature."""
        return (torch.arange(self.points, dtype=torch.float64) + 0.5) / self.points


recipe = Recipe(
    name="my-problem",
    problem=MyProblem(),
    data=Data(train=256, test=32),
    model=OFormerConfig(
        encoder=Encoder(width=48, depth=2),
        query=Query(width=48, fourier_features=48, hidden=(48,)),
        decoder=Decoder(hidden=(24,)),
    ),
    training=Training(steps=600, batch=8, evaluate_every=150, checkpoint_every=150),
)
