"""What the encoder keeps of the input: principal directions of its latents, and what a linear map reads off them.

    python examples/01_burgers_in_five_minutes.py    # makes the run that is used here
    python examples/08_what_the_latents_know.py

The latents at the input points are all that queries ever see of the input. A linear readout that finds a quantity in
them, on samples it was not fitted to, shows that the encoder computed it.
"""

from pathlib import Path

import torch

from oformer import PointDataset, Predictor
from oformer.config import from_json
from oformer.fields import collate
from oformer.training.find_data import open_data, train_and_test
from oformer.training.recipe import Recipe

RUN = Path("outputs/01-burgers")


@torch.no_grad()
def latents(predict: Predictor, data: PointDataset) -> torch.Tensor:
    """(samples, points, width)."""
    batch = collate([data[i] for i in range(len(data))])
    known, _ = predict.operator.normalized(batch.input, batch.query)
    return predict.operator.model.encode(known)


def readable(z: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of the variance (R²) that a linear map finds, fitted to half of the samples, on the other half."""
    half = len(z) // 2
    fit, test = (torch.cat([part, torch.ones_like(part[..., :1])], -1).flatten(0, 1) for part in z.split(half))
    a, b = (part.flatten() for part in wanted.split(half))
    ridge = 1e-4 * torch.eye(fit.shape[1]) * len(fit)
    weights = torch.linalg.solve(fit.T @ fit + ridge, fit.T @ a)
    return float(1 - ((test @ weights - b) ** 2).sum() / ((b - b.mean()) ** 2).sum())


def main(run: Path = RUN) -> dict[str, float]:
    predict = Predictor(run, "cpu")
    recipe = from_json(Recipe, predict.checkpoint.recipe)
    _, test = train_and_test(open_data(recipe, run.parent / "datasets"), recipe)
    test = test.subset(range(len(test) // 2 * 2))
    z = latents(predict, test)
    z = (z - z.mean((0, 1))) / z.std((0, 1)).clamp(min=1e-6)

    shares = torch.linalg.svdvals(z.flatten(0, 1)) ** 2
    shares = shares / shares.sum()
    needed = int((shares.cumsum(0) < 0.99).sum()) + 1
    print(f"{z.shape[-1]} channels; {needed} principal directions hold 99 % of the variance")

    u0 = torch.stack([sample.input.values[0, :, 0] for sample in test])
    u1 = torch.stack([sample.target[0, :, 0] for sample in test])
    slope = (u0.roll(-1, 1) - u0.roll(1, 1)) * u0.shape[1] / 2
    energy = (u0**2).mean(1, keepdim=True).expand_as(u0)
    found = {"directions": float(needed)}
    for name, wanted in (("u at time 0", u0), ("its slope", slope), ("its energy", energy), ("u at time 1", u1)):
        found[name] = readable(z, wanted)
        print(f"{name}: R² {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
