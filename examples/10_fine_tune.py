"""Fine-tuning: an operator that comes with the package learns Burgers' equation at half the viscosity from few samples.

    python examples/10_fine_tune.py

Error against the number of samples: as it is shipped, trained from scratch, and fine-tuned. A few minutes on a CPU.
"""

import dataclasses
from pathlib import Path

from oformer import RECIPES, PointDataset
from oformer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from oformer.training.evaluate import errors
from oformer.training.loop import train
from oformer.training.recipe import Data, Recipe

COUNTS, STEPS, LONGER, TEST = (16, 64, 256), 150, 4, 48
OUT = Path("outputs/10-fine-tune")


def shifted(recipe: Recipe, count: int) -> PointDataset:
    """Samples of the recipe's equation at half its viscosity."""
    problem = dataclasses.replace(recipe.problem, viscosity=recipe.problem.viscosity / 2)
    return PointDataset(problem.samples(range(count), seed=1), recipe.data.view, spec=problem.spec, card=problem.card)


def error(operator, test: PointDataset) -> float:
    return float(errors(operator, test, 16).relative.mean())


def trained(recipe: Recipe, run: Path, data, steps: int, start: Checkpoint | None = None) -> float:
    """The error after so many steps on the samples of `data`, scored on its second part."""
    settings = dataclasses.replace(
        recipe.training, steps=steps, batch=min(recipe.training.batch, len(data[0])),
        evaluate_every=steps, checkpoint_every=steps,
    )  # fmt: skip
    recipe = dataclasses.replace(recipe, data=Data(len(data[0]), len(data[1])), training=settings)
    outcome = train(recipe, run, data, quiet=True, start=start)
    if not outcome.finished:  # the same command goes on
        raise KeyboardInterrupt
    return error(outcome.operator, data[1])


def main(name: str = "burgers-demo", counts=COUNTS, steps: int = STEPS, tested: int = TEST, out: Path = OUT):
    recipe, shipped = RECIPES[name], load_checkpoint(find_checkpoint(f"zoo:{name}"))
    samples = shifted(recipe, max(counts) + tested)
    test = samples.subset(range(max(counts), max(counts) + tested))
    found: dict[str, list[float]] = {"as shipped": [error(shipped.operator, test)] * len(counts)}
    longer = LONGER * steps
    for label, length, start in (
        (f"from scratch, {steps} steps", steps, None),
        (f"fine-tuned, {steps} steps", steps, shipped),
        (f"from scratch, {longer} steps", longer, None),
    ):
        data = [(samples.subset(range(count)), test) for count in counts]
        run = out / label.replace(", ", "-").replace(" ", "-")
        found[label] = [trained(recipe, run / str(len(d[0])), d, length, start) for d in data]
    print(f"| samples | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for i, count in enumerate(counts):
        print(f"| {count} | {' | '.join(f'{row[i]:.2%}' for row in found.values())} |")
    draw(found, counts, out / "errors.png")
    return found


def draw(found: dict[str, list[float]], counts, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
    for label, row in found.items():
        axis.plot(counts, row, "--" if label == "as shipped" else "o-", label=label)
    axis.set(xscale="log", yscale="log", xlabel="training samples", ylabel="relative L2 error")
    axis.set_xticks(counts, counts)
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
