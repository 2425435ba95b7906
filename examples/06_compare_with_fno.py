"""The same data and the same number of steps for a Fourier neural operator, and what each can do afterwards.

    python examples/06_compare_with_fno.py

The FNO (Li et al., 2021) is written out below, in thirty lines. It multiplies Fourier coefficients, so it needs a
regular grid; OFormer takes any points. One seed, untuned: an example of how to compare, not a result.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from oformer import RECIPES, Recipe, evaluate, train
from oformer.training.datasets import open_data, train_and_test


class SpectralLayer(nn.Module):
    """v → gelu(W v + inverse FFT of (R · lowest modes of FFT v))."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes, self.linear = modes, nn.Conv1d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    def forward(self, v):
        low = torch.fft.rfft(v)[..., : self.modes]
        mixed = torch.einsum("bik,iok->bok", low, torch.view_as_complex(self.weight))
        return F.gelu(self.linear(v) + torch.fft.irfft(mixed, n=v.shape[-1]))


class FNO(nn.Module):
    """Channels in, last axis is the grid."""

    def __init__(self, width: int = 64, modes: int = 16, depth: int = 4):
        super().__init__()
        layers = [SpectralLayer(width, modes) for _ in range(depth)]
        self.layers = nn.Sequential(nn.Conv1d(2, width, 1), *layers, nn.Conv1d(width, 128, 1), nn.GELU())
        self.last = nn.Conv1d(128, 1, 1)

    def forward(self, u, x):
        return self.last(self.layers(torch.stack([u, x.expand_as(u)], 1)))[:, 0]


def main(recipe: Recipe = RECIPES["burgers-demo"], folder: Path = Path("outputs"), minutes: float = 4.0) -> dict:
    learned, test = train_and_test(open_data(recipe, folder / "datasets"), recipe)
    outcome = train(recipe, folder / "01-burgers", (learned, test), max_minutes=minutes)

    torch.manual_seed(recipe.training.seed)
    x = learned[0].input.coords[:, 0]
    (u0, u1), (v0, v1) = (
        (torch.stack([s.input.values[0, :, 0] for s in data]), torch.stack([s.target[0, :, 0] for s in data]))
        for data in (learned, test)
    )
    model, steps = FNO(modes=min(16, len(x) // 2)), recipe.training.steps
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(u0), (recipe.training.batch,))
        loss = ((model(u0[rows], x) - u1[rows]).norm(dim=1) / u1[rows].norm(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        fno = ((model(v0, x) - v1).norm(dim=1) / v1.norm(dim=1)).mean()
    found = {"OFormer": evaluate(outcome.operator, test).error, "FNO": float(fno)}
    for name, error in found.items():
        print(f"{name}: {error:.3%} after {steps:,} steps of {recipe.training.batch}")
    return found


if __name__ == "__main__":
    main()
