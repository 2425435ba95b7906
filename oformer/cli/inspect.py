"""`oformer inspect`: a description of a file or folder."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from oformer.cli.options import import_recipe_file
from oformer.terminal import show

TEXTS = (".txt", ".md", ".json", ".jsonl", ".yaml", ".toml", ".log", ".py")
FIRST = 20  # lines of a text that are shown


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
        if self.file.suffix in TEXTS and self.file.is_file():
            text = self.file.read_text(encoding="utf-8", errors="replace")
            shown = text.splitlines()
            rest_of_it = f"\n... and {len(shown) - FIRST:,} more lines" if len(shown) > FIRST else ""
            show(f"Text: {self.file}, {len(shown):,} lines\n" + "\n".join(shown[:FIRST]) + rest_of_it)
            return 0
        from oformer.checkpoint import find_checkpoint
        from oformer.cli.describe import describe

        import_recipe_file(self.recipe)
        named = str(self.file).startswith("zoo:")
        show(describe(find_checkpoint(self.file) if named else self.file, verify=self.verify))
        return 0
