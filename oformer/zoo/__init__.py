"""The trained operators that come with the package: found by name, measured when they are added, checked when asked.

A model is a folder in the format of `checkpoint.py`, with its card (card.json) and the journals of its runs beside it.
Its test samples are made again from their seed.
"""

from pathlib import Path

from oformer.checkpoint import zoo_folder, zoo_names
from oformer.zoo.card import CARD, ModelCard, read_card


def card_folders(runs: Path) -> list[Path]:
    """The folders of all cards: of runs whose weights are not shipped, and of the zoo."""
    return [path.parent for path in sorted(runs.glob(f"*/{CARD}"))] + [zoo_folder() / name for name in zoo_names()]


def all_cards(runs: Path) -> dict[str, ModelCard]:
    """The cards of all models by name: of the zoo, and those in a folder of runs whose weights are not shipped."""
    return {folder.name: read_card(folder) for folder in card_folders(runs)}
