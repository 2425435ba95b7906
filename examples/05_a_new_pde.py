"""An equation that is not in the package: a string that vibrates, u_tt = c² u_xx, held at both ends.

    python examples/05_a_new_pde.py

A problem is its physical settings, what to draw, and how to solve. `oformer new my-problem` writes such a file with its
recipe and its test, to be trained by `oformer train my_problem.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from oformer import Card, Data, Field, OFormerConfig, Problem, Recipe, Sample, Spec, Training, evaluate, train
from oformer.models.oformer import Encoder, Query
from oformer.seeds import numpy_generator
from oformer.training.find_data import open_data, train_and_test


@dataclass(frozen=True)
class String(Problem):
    """From the shape at rest to the shape at several later times."""

    name: ClassVar[str] = "string"

    points: int = 64
    speed: float = 1.0
    frames: int = 4
    modes: int = 5

    @property
    def spec(self) -> Spec:
        return Spec(dim=1, in_times=1, in_channels=1, out_times=self.frames, out_channels=1, grid=(self.points,))

    @property
    def card(self) -> Card:
        return Card("A vibrating string", inputs=("u at rest",), targets=("u",))

    def draw(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        noise = np.stack([numpy_generator(seed, index).standard_normal(self.modes) for index in indices])
        return {"amplitudes": torch.from_numpy(noise) / torch.arange(1, self.modes + 1)}

    def solve(self, state: dict[str, Tensor]) -> list[Sample]:
        """Exactly, wave by wave: each swings with its own frequency."""
        x = torch.linspace(0, 1, self.points, dtype=torch.float64)
        k = torch.pi * torch.arange(1, self.modes + 1, dtype=torch.float64)
        times = torch.arange(self.frames + 1) * 0.1
        swing = torch.cos(self.speed * k * times[:, None])  # (times, modes)
        u = torch.einsum("bm,tm,mx->btx", state["amplitudes"], swing, torch.sin(k[:, None] * x))
        query = Field.of(x[:, None])
        return [Sample(query.with_values(s[:1, :, None]), query, s[1:, :, None]) for s in u]


def main(run: Path = Path("outputs/05-string"), steps: int = 1000, train_samples: int = 256) -> float:
    model = OFormerConfig(encoder=Encoder(width=48, depth=2), query=Query(width=48, fourier_features=48, hidden=(48,)))
    training = Training(steps=steps, batch=8, evaluate_every=max(1, steps // 4))
    recipe = Recipe("string", Data(train_samples, 32), model, training, problem=String())
    learned, test = train_and_test(open_data(recipe, run.parent / "datasets"), recipe)
    outcome = train(recipe, run, (learned, test))
    error = evaluate(outcome.operator, test).error
    print(f"test error {error:.2%} over {test.spec.out_times} frames")
    return error


if __name__ == "__main__":
    main()
