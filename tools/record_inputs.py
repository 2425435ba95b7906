"""Record in trained operators what the inputs of their training were like, where they are older than such records.

    python tools/record_inputs.py burgers-demo burgers-512 burgers-2048 burgers-2048-plus darcy-141

Inputs are drawn again by their seed, without solving; config.json gets their ranges, and card.json its checksum. What
is recorded already is written again, the same.
"""

import sys
from pathlib import Path

from oformer.checkpoint import CONFIG, find_checkpoint
from oformer.config import from_json, to_json
from oformer.errors import InputError
from oformer.fields import Field
from oformer.files import read_json, sha256, write_json
from oformer.meshes.grids import thinning
from oformer.statistics import Seen, SeenSoFar
from oformer.training.recipe import Recipe
from oformer.zoo.card import CARD

INPUT = {"burgers": "initial", "darcy": "coefficient"}  # what is drawn, of problems where that is the input
BATCH = 32


def seen_by(recipe: Recipe) -> Seen:
    """The ranges of the training inputs of a recipe on a regular grid."""
    problem, data = recipe.problem, recipe.data
    if problem is None or problem.name not in INPUT:
        raise InputError(f"a problem among {', '.join(INPUT)}, whose inputs are drawn", f"`{recipe.name}`")
    stored, kept = problem.spec.grid, recipe.data_spec().grid
    assert stored is not None
    assert kept is not None
    every = tuple(slice(None, None, n) for n in thinning(stored, kept, problem.spec.periods is not None))
    found = SeenSoFar()
    for first in range(0, data.train, BATCH):
        drawn = problem.draw(range(first, min(first + BATCH, data.train)), data.seed)[INPUT[problem.name]]
        for sample in drawn.float():
            values = sample[every].reshape(-1, 1)
            found.add(Field.of(values.new_zeros(len(values), problem.spec.dim), values))
    return found.ranges()


def record(folder: Path) -> None:
    """Write the ranges of a model's training inputs beside its normalization."""
    config = read_json(folder / CONFIG)
    seen = to_json(seen_by(from_json(Recipe, config["recipe"], "recipe")))
    config.pop("seen", None)
    items = list(config.items())
    place = [name for name, _ in items].index("normalization") + 1
    write_json(folder / CONFIG, dict([*items[:place], ("seen", seen), *items[place:]]))
    card = read_json(folder / CARD)
    card["files"][CONFIG] = sha256(folder / CONFIG)
    write_json(folder / CARD, card)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(find_checkpoint(f"zoo:{name}"))
        print(f"Recorded what {name} was trained on.")
