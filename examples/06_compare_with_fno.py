"""The same data and the same number of steps for a Fourier neural operator, and what each can do afterwards.

    python examples/06_compare_with_fno.py

The FNO (Li et al., 2021; `oformer/models/fno.py`) multiplies Fourier coefficients, so it needs all points of a regular
grid; OFormer takes any points. One seed, untuned: an example of how to compare, not a result.
"""

import dataclasses
from pathlib import Path

from oformer import RECIPES, InputError, Predictor, Recipe, evaluate, train
from oformer.models import FNOConfig
from oformer.training.find_data import open_data, train_and_test


def with_fno(recipe: Recipe) -> Recipe:
    """The recipe with another model, which cannot be trained on dropped points."""
    optimizer = dataclasses.replace(recipe.training.optimizer, kind="adam", rate=1e-3, clip=())
    training = dataclasses.replace(recipe.training, optimizer=optimizer, drop=None)
    return dataclasses.replace(recipe, name=f"{recipe.name}-fno", model=FNOConfig(), training=training)


def main(recipe: Recipe = RECIPES["burgers-demo"], folder: Path = Path("outputs"), minutes: float = 4.0) -> dict:
    splits = train_and_test(open_data(recipe, folder / "datasets"), recipe)
    found = {}
    for name, run, asked in (("OFormer", "01-burgers", recipe), ("FNO", "06-fno", with_fno(recipe))):
        outcome = train(asked, folder / run, splits, max_minutes=minutes)
        found[name] = evaluate(outcome.operator, splits[1]).error
        print(f"{name}: {found[name]:.3%} after {outcome.step:,} steps of {recipe.training.batch}")

    # Half of the sensors, wherever they are: one of the two says that it cannot.
    sample = splits[1].with_view(dataclasses.replace(splits[1].view, keep=0.5))[0]
    for name, run in (("OFormer", "01-burgers"), ("FNO", "06-fno")):
        try:
            answer = Predictor(folder / run)(sample.input, sample.query)
            print(f"{name} from {sample.input.points} points answers at {answer.points}")
        except InputError as error:
            print(f"{name}: {error}")
    return found


if __name__ == "__main__":
    main()
