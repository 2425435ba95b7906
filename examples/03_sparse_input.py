"""Take sensors away: how the error grows as fewer input points are known, at random places.

    python examples/01_burgers_in_five_minutes.py    # makes the run that is used here
    python examples/03_sparse_input.py

The operator was trained with points dropped at random. A point that is gone is not a zero: it has no weight in the sum,
and the others take over its share of the line.
"""

from pathlib import Path

from oformer import Predictor, View, evaluate
from oformer.config import from_json
from oformer.plots import Resolution, error_by_resolution, save_figure
from oformer.training.find_data import open_data, train_and_test
from oformer.training.recipe import Recipe

RUN = Path("outputs/01-burgers")


def main(run: Path = RUN, shares: tuple[float, ...] = (1.0, 0.5, 0.3, 0.2, 0.1)) -> list[float]:
    predict = Predictor(run)
    recipe = from_json(Recipe, predict.checkpoint.recipe)
    _, test = train_and_test(open_data(recipe, run.parent / "datasets"), recipe)

    rows = []
    for share in shares:
        sparse = test.with_view(View(points=recipe.data.view.points, keep=share))
        error = evaluate(predict.operator, sparse).error
        points = sparse[0].input.points
        kind = "trained" if share == 1 else "sparse"
        rows.append(Resolution(f"{share:.0%} of the points", points, error, kind))
        print(f"{points:4} sensors: {error:.2%}")
    save_figure(run.parent / "03-sparse.png", error_by_resolution(rows))
    return [row.error for row in rows]


if __name__ == "__main__":
    main()
