"""Checking the trained operators of the zoo: their files against checksums, their errors against their cards."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from oformer.checkpoint import changed_files, find_checkpoint, load_checkpoint
from oformer.config import from_json
from oformer.engine.runners import runner_of
from oformer.errors import InputError
from oformer.export import example
from oformer.fields import Field
from oformer.predict import Predictor
from oformer.training.evaluate import Scores, evaluate, watched
from oformer.training.find_data import open_fresh_samples, open_test_samples
from oformer.training.recipe import Recipe
from oformer.zoo.card import read_card

TOLERANCE = 0.01  # relative, between a card and the same error measured elsewhere


@dataclass(frozen=True)
class Comparison:
    """An error measured now, beside the card's."""

    name: str
    samples: int
    card: float
    now: float

    @property
    def difference(self) -> float:
        """Relative."""
        return self.now / self.card - 1


def compare(
    name: str,
    *,
    samples: int | None = None,
    fresh: bool = False,
    datasets: Path = Path("datasets"),
    device: torch.device | str = "cpu",
    batch: int = 16,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Make the test samples of a model again, measure it, and compare with its card.

    Args:
        name: of the model.
        samples: only the first so many, where all would take too long.
        fresh: the fresh samples of the card instead of the test samples.
        datasets: where the samples are kept.
        device: where to make and to predict them.
        batch: samples at once.
        say: told how far it is.
    """
    folder = find_checkpoint(f"zoo:{name}")
    card, checkpoint = read_card(folder), load_checkpoint(folder, device)
    expected, recipe = card.expected(samples, fresh=fresh), from_json(Recipe, checkpoint.recipe, "recipe")
    if fresh and card.fresh is not None:
        count = len(card.fresh.by_sample) if samples is None else samples
        test = open_fresh_samples(recipe, datasets, count, device=device, say=say)
    else:
        test = open_test_samples(recipe, datasets, samples=samples, device=device, say=say)
    with watched(checkpoint.operator, len(test), say):
        found: Scores = evaluate(runner_of(checkpoint), test, batch)
    return Comparison(name, len(test), expected, found.error)


def damage(name: str) -> list[str]:
    """What is wrong with the files of a model, in words; nothing where they are as written and it predicts."""
    folder = find_checkpoint(f"zoo:{name}")
    card = read_card(folder)
    if wrong := changed_files(folder, card.files):
        return wrong
    try:
        predictor = Predictor(folder, "cpu", warn=False)
    except InputError as error:
        return [str(error)]
    tensors = example(predictor.operator, (1, 64, 64), torch.Generator().manual_seed(0))
    known = Field.of(tensors["coords"], tensors["values"])
    query = Field.of(tensors["query_coords"], tensors.get("query_values"))
    finite = torch.isfinite(predictor(known, query).values).all()
    return [] if finite else ["it predicts numbers that are not finite"]
