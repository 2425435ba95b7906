"""`oformer export`: a trained operator as one file for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oformer.cli.options import Count, Positive, import_recipe_file
from oformer.terminal import say


@dataclass
class Export:
    """Write a trained operator as one file for programs without this package: .onnx or .pt2."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    out: Path = Path("model.onnx")
    """The file; its ending chooses the format."""
    times: Count | None = None
    """Steps that the file answers; by default as many as it was trained for."""
    tolerance: Positive = 1e-4
    """The largest relative difference from the operator."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Export, and print the largest difference between the file and the operator."""
        from oformer.export import export

        import_recipe_file(self.recipe)
        seen = export(self.run_folder, self.out, self.times, self.tolerance)
        say(f"Wrote {self.out}: within {seen.error:.1e} of the operator at {len(seen.sizes)} sizes.")
        return 0
