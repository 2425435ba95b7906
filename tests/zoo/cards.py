"""Cards and recipes for the tests of the zoo."""

import json
from pathlib import Path

from oformer.checkpoint import WEIGHTS
from oformer.training.evaluate import Scores
from oformer.zoo.card import CARD, DataRecord, ModelCard, SeedRun
from tests.tiny import tiny_recipe


def seeded(seed: int):
    return tiny_recipe(steps=8, seed=seed, evaluate_every=4, checkpoint_every=8)


def rewrite(folder: Path, **changes):
    content = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**content, **changes}))


def card_of(name: str = "tiny", channels: int = 1, **scores) -> ModelCard:
    """A card that nobody measured."""
    known = {
        "count": 4, "error": 0.1, "median": 0.1, "worst": 0.2, "worst_sample": 0, "batch_mean": 0.1, "by_step": [0.1],
        "mean_squared": [1.0] * channels,
    }  # fmt: skip
    run = SeedRun(1, 10, 1.5, "a CPU", "journal.jsonl", Scores(**{**known, **scores}))
    return ModelCard(
        name=name, command=f"oformer train {name}", paper="", parameters=1234, storage="float32", precision="float32",
        torch="2", data=DataRecord("title", 0, 8, 4, None, "0"), scores=run.scores, by_sample=(0.2, 0.1, 0.05, 0.05),
        views=(), not_measured={}, averaged=None, fresh=None, seeds=(run,), files={WEIGHTS: "0"},
    )  # fmt: skip
