"""Generate data, train an operator, measure it, and write a page about it: the whole way, in Python.

    python examples/01_burgers_in_five_minutes.py

The command line does the same: `oformer train burgers-demo`. Run it again, and it goes on where it stopped.
"""

from pathlib import Path

from oformer import RECIPES, Recipe, evaluate, train
from oformer.report import write_report
from oformer.training.find_data import open_data, train_and_test

RUN = Path("outputs/01-burgers")


def main(recipe: Recipe = RECIPES["burgers-demo"], run: Path = RUN, minutes: float = 4.0) -> float:
    # Solves the equation where the dataset is not there yet: (seed, index) decide each sample.
    data = open_data(recipe, run.parent / "datasets")
    learned, test = train_and_test(data, recipe)
    known = learned[0].input
    print(f"{len(learned)} + {len(test)} samples, {known.points} input points of {known.values.shape[-1]} channel")

    outcome = train(recipe, run, (learned, test), max_minutes=minutes)

    # The relative L2 error of each test sample, in physical units.
    scores = evaluate(outcome.operator, test)
    print(f"test error: mean {scores.error:.3%}, median {scores.median:.3%}, worst {scores.worst:.3%}")
    print(f"report: {write_report(run, test)}")
    return scores.error


if __name__ == "__main__":
    main()
