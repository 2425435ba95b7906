"""Charges in domains of several shapes, on triangle meshes that differ: train on four shapes, ask about a fifth.

    python examples/07_irregular_domains.py

The recipe `electro` of the paper with fewer samples and steps. The U-shaped domain is in the test samples alone. Needs
`pip install '.[mesh]'`.
"""

import dataclasses
from pathlib import Path

from oformer import RECIPES, Data, Predictor, evaluate, train
from oformer.plots import Panel, maps, save_figure
from oformer.training.find_data import open_data, train_and_test


def main(run: Path = Path("outputs/07-charges"), samples: int = 400, steps: int = 1500) -> float:
    electro = RECIPES["electro"]
    training = dataclasses.replace(electro.training, steps=steps, batch=16, evaluate_every=max(1, steps // 3))
    recipe = dataclasses.replace(electro, data=Data(samples, max(2, samples // 10)), training=training)
    learned, test = train_and_test(open_data(recipe, run.parent / "datasets"), recipe)
    sizes = learned.sizes()[:, 0]
    print(f"{len(learned)} samples of {sizes.min()} to {sizes.max()} points; the test is on another shape")

    train(recipe, run, (learned, test))
    predict = Predictor(run)
    scores = evaluate(predict.operator, test)
    print(f"test error {scores.error:.1%}; channels {', '.join(test.card.targets)}")

    # The mesh of a sample is kept for pictures; the model never sees it.
    sample = test[0]
    panel = Panel("never seen", sample, predict(sample.input, sample.query).values)
    figure = maps.solutions([panel], target="potential", input="charge", picture=test.card.picture)
    save_figure(run.with_suffix(".png"), figure)
    return scores.error


if __name__ == "__main__":
    main()
