"""What the encoder keeps of the input: principal directions of its latents, and what a linear map reads off them.

    python examples/01_burgers_in_five_minutes.py    # makes the run that is used here
    python examples/08_what_the_latents_know.py

The latents at the input points are all that queries ever see of the input. A linear readout that finds a quantity in
them, on samples it was not fitted to, shows that the encoder computed it. Here the quantities are fields, read point by
point; `oformer analyze RUN --latents` reads a parameter of the equation off the mean over points.
"""

from pathlib import Path

import torch

from oformer import Predictor
from oformer.config import from_json
from oformer.experiments.latents import encoded, linear_map, principal_components, r_squared
from oformer.training.find_data import open_data, train_and_test
from oformer.training.recipe import Recipe

RUN = Path("outputs/01-burgers")


def readable(z: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of the variance (R²) that a linear map finds, fitted to half of the samples, on the other half."""
    (fit, test), (a, b) = z.double().split(len(z) // 2), wanted.double().split(len(z) // 2)
    return r_squared(linear_map(fit.flatten(0, 1), a.flatten())(test.flatten(0, 1)), b.flatten())


def main(run: Path = RUN) -> dict[str, float]:
    predict = Predictor(run, "cpu")
    recipe = from_json(Recipe, predict.checkpoint.recipe)
    _, test = train_and_test(open_data(recipe, run.parent / "datasets"), recipe)
    test = test.subset(range(len(test) // 2 * 2))
    z = torch.cat([latents for _, latents in encoded(predict.operator, test)])  # (samples, points, width)
    z = (z - z.mean((0, 1))) / z.std((0, 1)).clamp(min=1e-6)

    _, shares = principal_components(z.flatten(0, 1))
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
