"""Whether our Navier-Stokes data are as hard as the published ones: what a published model makes of them.

    python benchmarks/known_model.py ns3                          # as our recipes draw first states
    python benchmarks/known_model.py ns3 --law 2022               # as the other version of the published script does
    python benchmarks/known_model.py ns1 --law 2022 --journal ns1-fno.jsonl

The published files cannot be had, but errors of well-known models on them are printed in papers. The model here is the
FNO-2D of the first Navier-Stokes experiments (Li et al., "Fourier neural operator for parametric partial differential
equations", ICLR 2021): it marches one frame at a time from the ten before. It is trained as published: 500 epochs in
batches of 20, Adam with weight decay 1e-4 in the gradient, a rate of 1e-3 that is halved every 100 epochs, the sum of
the relative L2 errors of the predicted frames; no normalization. If it ends at the published error, our data are
as hard as theirs; that it does not may be due to settings which papers and scripts give differently (`docs/log.md`). On
a GPU whole steps are recorded and replayed.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from run import chosen_device, machine
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.experiments.published import ROWS
from oformer.experiments.recipes import recipe_named
from oformer.gpu import CudaGraphs
from oformer.meshes.grids import periodic_grid
from oformer.problems.navier_stokes import LAWS, NavierStokes
from oformer.terminal import say
from oformer.training.datasets import open_data, train_and_test

KNOWN = 10  # frames that a prediction is made from
WIDTH, MODES, DEPTH, HEAD = 20, 8, 4, 128  # 414,517 parameters, as the papers have it
BATCH, EPOCHS, RATE, DECAY = 20, 500, 1e-3, 1e-4
HALVINGS = 5  # one at the end of each fifth of the epochs


class SpectralLayer(nn.Module):
    """Lowest Fourier modes through matrices of their own, beside a matrix for all points.

    So few modes are found by products with tables of waves, in fewer kernels than fast Fourier transforms take.
    """

    across: Tensor
    down: Tensor
    up: Tensor
    back: Tensor

    def __init__(self, points: int, last: bool):
        """Draw the matrices for a grid of so many points per axis; the last layer ends without an activation."""
        super().__init__()
        self.matrices = nn.Parameter(torch.rand(2 * MODES, MODES, WIDTH, WIDTH, 2) / WIDTH**2)  # row, column, in, out
        self.beside, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), last
        angles = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
        columns, rows = torch.arange(MODES), torch.cat([torch.arange(MODES), torch.arange(-MODES, 0)])
        wave = torch.exp(-1j * columns[:, None] * angles)
        across = torch.stack([wave.real, wave.imag])  # (part, column, y)
        there = _in_parts(torch.exp(-1j * rows[:, None] * angles))  # (part, row, part, x)
        again = _in_parts(torch.exp(1j * angles[:, None] * rows) / points)  # (part, x, part, row)
        share = torch.where(columns == 0, 1, 2)[:, None] / points  # other columns stand for their conjugates as well
        tables = {
            "across": across.flatten(0, 1),
            "down": there.transpose(2, 3).flatten(2).flatten(0, 1),
            "up": again.transpose(0, 1).flatten(2).flatten(0, 1),
            "back": (across * share).flatten(0, 1).T,
        }
        for name, table in tables.items():
            self.register_buffer(name, table.float(), persistent=False)

    def forward(self, v: Tensor) -> Tensor:
        """From (batch, n, n, channels) to the same shape."""
        batch, n = v.shape[:2]
        amounts = _times(self.across, v.flatten(0, 1)).view(batch, 2 * n, MODES * WIDTH)
        amounts = _times(self.down, amounts).view(batch, 2, 2 * MODES, MODES, WIDTH)
        real, imaginary = self.matrices.flatten(0, 1).unbind(-1)
        mixing = torch.cat([torch.cat([real, imaginary], -1), torch.cat([-imaginary, real], -1)], -2)
        mixed = torch.bmm(amounts.permute(2, 3, 0, 1, 4).reshape(len(mixing), batch, 2 * WIDTH), mixing)
        mixed = mixed.view(2 * MODES, MODES, batch, 2, WIDTH).permute(2, 3, 0, 1, 4)
        mixed = _times(self.up, mixed.reshape(batch, 4 * MODES, MODES * WIDTH))
        mixed = _times(self.back, mixed.view(batch * n, 2 * MODES, WIDTH)).view_as(v)
        v = self.norm((mixed + self.beside(v)).flatten(0, 2)).view_as(v)
        return v if self.last else F.relu(v)


def _in_parts(matrix: Tensor) -> Tensor:
    """A complex matrix as one of real numbers, from parts to parts: (part, rows, part, columns)."""
    real, imaginary = matrix.real, matrix.imag
    return torch.stack([torch.stack([real, -imaginary], 1), torch.stack([imaginary, real], 1)])


def _times(table: Tensor, values: Tensor) -> Tensor:
    """A table times each matrix of a batch."""
    return torch.bmm(table.expand(len(values), -1, -1), values)


class FNO(nn.Module):
    """From ten frames and the coordinates of a square grid to the next frame."""

    coords: Tensor

    def __init__(self, points: int):
        """Draw the weights for a grid of so many points per axis, whose ends are 0 and 1 as published."""
        super().__init__()
        grid = periodic_grid((points, points), (1.0, 1.0)) * (points / (points - 1))
        self.register_buffer("coords", grid.view(1, points, points, 2).float(), persistent=False)
        self.lift = nn.Linear(KNOWN + 2, WIDTH)
        self.layers = nn.Sequential(*(SpectralLayer(points, last=i == DEPTH - 1) for i in range(DEPTH)))
        self.head = nn.Sequential(nn.Linear(WIDTH, HEAD), nn.ReLU(), nn.Linear(HEAD, 1))

    def forward(self, frames: Tensor) -> Tensor:
        """From (batch, n, n, 10) to (batch, n, n, 1)."""
        both = torch.cat([frames, self.coords.expand(len(frames), -1, -1, -1)], -1)
        return self.head(self.layers(self.lift(both)))

    def march(self, frames: Tensor, times: int) -> Tensor:
        """So many frames on, (batch, times, n, n) from (batch, 10, n, n); each prediction is known to the next."""
        known, found = frames.movedim(1, -1).contiguous(), []  # one layout for all steps, compiled once
        for _ in range(times):
            found.append(self(known))
            known = torch.cat([known[..., 1:], found[-1]], -1)
        return torch.cat(found, -1).movedim(-1, 1)


def frames_of(data: PointDataset, points: int, device: str) -> tuple[Tensor, Tensor]:
    """The known frames of all samples and those that follow, each of shape (samples, times, n, n)."""
    known, target = zip(*((sample.input.values, sample.target) for sample in data), strict=True)
    both = (torch.stack(frames).squeeze(-1).unflatten(-1, (points, points)) for frames in (known, target))
    first, later = (frames.to(device) for frames in both)
    return first, later


def relative(prediction: Tensor, target: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The relative L2 error over some axes."""
    return ((prediction - target).square().sum(axes) / target.square().sum(axes)).sqrt()


def trained(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    epochs: int = EPOCHS,
    rate: float = RATE,
    seed: int = 0,
    tell: Callable[[dict], None] = lambda numbers: None,
) -> float:
    """The mean error of the test sequences, each as a whole, at the end of training.

    Args:
        train: known frames (samples, 10, n, n) and those that follow, on the device to compute on.
        test: likewise.
        epochs: how often each sequence is seen.
        rate: the first one.
        seed: of weights and order.
        tell: told the errors ten times on the way.
    """
    known, target = train
    device, started = known.device, time.monotonic()
    torch.manual_seed(seed)
    model = FNO(known.shape[-1]).to(device)
    if device.type == "cuda":
        model.compile()
    speed = torch.tensor(rate, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=speed, weight_decay=DECAY, capturable=device.type == "cuda")
    batch = min(BATCH, len(known))
    frames, wanted = known[:batch].clone(), target[:batch].clone()
    total = torch.zeros((), device=device)  # of the errors of an epoch, frame by frame

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        errors = relative(model.march(frames, wanted.shape[1]), wanted, (2, 3))
        errors.sum().backward()
        optimizer.step()
        total.add_(errors.detach().mean())

    do, steps, error = step, len(known) // batch, math.nan
    for epoch in range(epochs):
        model.train()
        speed.fill_(rate * 0.5 ** (epoch * HALVINGS // epochs))
        total.zero_()
        for chosen in torch.randperm(len(known)).to(device).split(batch)[:steps]:
            torch.index_select(known, 0, chosen, out=frames)
            torch.index_select(target, 0, chosen, out=wanted)
            do()
        if device.type == "cuda" and do is step:  # an epoch has warmed everything up
            do = CudaGraphs(device)(step, 0)
        if (epoch + 1) % math.ceil(epochs / 10) == 0 or epoch + 1 == epochs:
            error = tested(model, *test)
            numbers = {"epoch": epoch + 1, "train": float(total) / steps, "test": error}
            tell({**numbers, "seconds": round(time.monotonic() - started, 1)})
    return error


@torch.no_grad()
def tested(model: FNO, known: Tensor, target: Tensor) -> float:
    """The mean over sequences of their errors as wholes."""
    model.eval()
    pieces = zip(known.split(BATCH), target.split(BATCH), strict=True)
    errors = [relative(model.march(some, wanted.shape[1]), wanted, (1, 2, 3)) for some, wanted in pieces]
    return float(torch.cat(errors).mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the model on the data of a recipe, and say what it reaches beside what is published."""
    options = _parser().parse_args(arguments)
    device = chosen_device(options)
    recipe = recipe_named(options.name)
    if not isinstance(recipe.problem, NavierStokes):
        raise InputError("a recipe of Navier-Stokes", f"`{options.name}`", "Such as ns1, ns2-part or ns3")
    problem = dataclasses.replace(recipe.problem, initial_law=options.law)
    recipe = dataclasses.replace(recipe, problem=problem)
    splits = train_and_test(open_data(recipe, options.datasets, device=device, say=say), recipe)
    train, test = (frames_of(split, problem.points, device) for split in splits)
    about = {"model": "FNO-2D", "data": recipe.name, "law": options.law, "data seed": recipe.data.seed}
    about |= {"seed": options.seed, "epochs": options.epochs, "rate": options.rate}
    lines = [json.dumps({**about, "precision": "float32", "hardware": machine(device), "torch": torch.__version__})]

    def tell(numbers: dict) -> None:
        lines.append(json.dumps(numbers))
        if options.journal is not None:
            options.journal.write_text("\n".join(lines) + "\n")
        say(", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    error = trained(train, test, epochs=options.epochs, rate=options.rate, seed=options.seed, tell=tell)
    printed = published(options.name)
    beside = "" if printed is None else f"; published: {printed:.4f}"
    print(f"FNO-2D on {options.name}, first states of {options.law}: {error:.4f}{beside}")
    return 0


def published(name: str) -> float | None:
    """What is printed for the model and the published data of a row."""
    return next((row.errors["FNO-2D"] for row in ROWS if row.recipe == name), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a recipe of Navier-Stokes, whose data are made if they are not there")
    parser.add_argument("--law", choices=LAWS, default="2020", help="version of the published script, for first states")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--datasets", type=Path, default=Path("datasets"))
    parser.add_argument("--journal", type=Path, help="a file for the errors on the way, as JSON lines")
    parser.add_argument("--device", help="cpu or cuda; a GPU if there is one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
