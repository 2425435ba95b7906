"""`oformer inspect`: a description of a file or folder."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from oformer.cli.options import import_recipe_file, refuse_unknown
from oformer.terminal import show


@dataclass
class Inspect:
    """Say what a file or folder is: a dataset, a run, a checkpoint, arrays, or a published file to import."""

    file: tyro.conf.Positional[Path]
    verify: bool = False
    """Also recompute the checksums of a dataset."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Print the description."""
        from oformer.checkpoint import find_checkpoint
        from oformer.cli.describe import describe

        refuse_unknown(rest)
        import_recipe_file(self.recipe)
        named = str(self.file).startswith("zoo:")
        show(describe(find_checkpoint(self.file) if named else self.file, verify=self.verify))
        return 0
