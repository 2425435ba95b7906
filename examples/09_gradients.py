"""Derivatives of an answer by the place that is asked: slope and curvature of Burgers' solution, beside the solver's.

    python examples/09_gradients.py

`Predictor(..., differentiable=True)` keeps the graph. The operators come with the package.
"""

from pathlib import Path

import torch

from oformer import RECIPES, Field, Predictor
from oformer.fields import Sample

NAMES = ("burgers-demo", "burgers-2048", "burgers-2048-plus")
OUT = Path("outputs/09-gradients")


def asked(predict: Predictor, sample: Sample, points: int) -> list[torch.Tensor]:
    """u, du/dx and d²u/dx² at equally spaced points, from the operator."""
    step = sample.input.points // points
    known = Field.of(sample.input.coords[::step], sample.input.values[:, ::step])
    x = known.coords.clone().requires_grad_()
    u = predict(known, x).values[0, :, 0]
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)  # each answer depends on its own query alone
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    return [found.detach().flatten().double() for found in (u, slope, curvature)]


def solved(sample: Sample, points: int) -> list[torch.Tensor]:
    """The same from the solver's answer, differentiated as the trigonometric polynomial that it is."""
    u = sample.target[0, :, 0].double()
    k = 2j * torch.pi * torch.arange(len(u) // 2 + 1)
    spectrum = torch.fft.rfft(u)
    return [torch.fft.irfft(k**n * spectrum, n=len(u))[:: len(u) // points] for n in range(3)]


def main(
    names: tuple[str, ...] = NAMES, count: int = 20, points: int = 2048, out: Path = OUT
) -> dict[str, list[float]]:
    import matplotlib.pyplot as plt

    mean, panels = {}, []
    for name in names:
        predict, problem = Predictor(name, "cpu", differentiable=True), RECIPES[name].problem
        assert problem is not None
        at = min(points, problem.points)
        samples = problem.samples(range(20_000, 20_000 + count), seed=0)  # which no training has seen
        pairs = [(asked(predict, sample, at), solved(sample, at)) for sample in samples]
        errors = torch.tensor([[(a - b).norm() / b.norm() for a, b in zip(*pair, strict=True)] for pair in pairs])
        mean[name], panels = errors.mean(0).tolist(), pairs[0]
        print(f"{name}: relative L2 error of u {mean[name][0]:.2%}, u' {mean[name][1]:.2%}, u'' {mean[name][2]:.1%}")
    figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
    for axis, title, ours, true in zip(axes, ("u", "du/dx", "d²u/dx²"), *panels, strict=True):
        x = torch.arange(len(true)) / len(true)
        axis.plot(x, true, color="0.75", linewidth=4, label="solver")
        axis.plot(x, ours, color="C0", linewidth=1, label=f"{names[-1]}, autograd")
        axis.set(title=title, xlabel="x")
    axes[0].legend(frameon=False, loc="upper right", fontsize="small")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "derivatives.png", dpi=120)
    plt.close(figure)
    return mean


if __name__ == "__main__":
    main()
