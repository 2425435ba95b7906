"""Where the trained operators lie that are found by name."""

import os
from pathlib import Path

from oformer.checkpoint import CONFIG


def zoo_folder() -> Path:
    """The folder of trained operators: inside an installed package, `zoo/` beside it in a checkout.

    The environment variable OFORMER_ZOO names another one.
    """
    chosen, inside = os.environ.get("OFORMER_ZOO"), Path(__file__).parent / "weights"
    if chosen:
        return Path(chosen)
    return inside if inside.is_dir() else Path(__file__).parent.parent / "zoo"


def zoo_names() -> list[str]:
    """The names of those that are there."""
    return sorted(path.parent.name for path in zoo_folder().glob(f"*/{CONFIG}"))
