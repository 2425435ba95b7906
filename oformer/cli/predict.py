"""`oformer predict`: the prediction of a trained operator for an input file."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from oformer.cli.options import Count, Device, Positive, import_recipe_file, torch_device
from oformer.errors import DamagedCheckpoint, InputError, OutsideTraining
from oformer.terminal import say

OUR_WARNINGS = (OutsideTraining, DamagedCheckpoint)


@dataclass
class Predict:
    """Predict from a file of your own.

    The input is a .npz with `coords` (points, dim) and `values` (points, channels), (points,) or (times, points,
    channels), in physical units; optional `weights` (points,).
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    input: tyro.conf.Positional[Path]
    """The .npz file."""
    queries: Path | None = None
    """A .npy of query points (queries, dim), or a .npz with `coords` and, where the model wants it, `values`."""
    resolution: Count | None = None
    """Or so many points per axis over the box of the input (the period of a periodic problem)."""
    times: Count | None = None
    out: Path = Path("prediction.npz")
    """The .npz to write: `coords` and `values` of the answer."""
    plot: Path | None = None
    """Also draw it, on a line or in the plane."""
    device: Device = "auto"
    precision: Literal["float32", "tf32", "float16", "bfloat16"] = "float32"
    """As trained, or faster on a GPU: products in TF32, or the model in float16 or bfloat16."""
    memory_gb: Positive | None = None
    """GiB to compute in; by default most of what is free. More points than fit pass in chunks."""
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Predict, and write the prediction and, with --plot, its picture."""
        import numpy as np

        from oformer.files import save_npz
        from oformer.plots.style import picture_format
        from oformer.predict import Predictor, read_field

        if self.out.suffix.lower() != ".npz":
            raise InputError("a name that ends in .npz for --out", f"`{self.out}`", "Write --out prediction.npz")
        if self.plot is not None:
            picture_format(self.plot)  # an unknown format is refused before the prediction is computed
        device = None if self.device == "auto" else torch_device(self.device)
        import_recipe_file(self.recipe)
        predictor = Predictor(self.run_folder, device, precision=self.precision, memory_gb=self.memory_gb)
        field = read_field(self.input)
        query = None
        if self.queries is not None:
            query = read_field(self.queries, values_needed=False)
        elif self.resolution is not None:
            query = predictor.grid(field, self.resolution)
        with _plain_warnings():
            answer = predictor(field, query, times=self.times)
        save_npz(self.out, coords=np.asarray(answer.coords), values=np.asarray(answer.values))
        say(f"Wrote {answer.values.shape[0]} frame(s) at {answer.points} points to {self.out}.")
        if self.plot is not None:
            from oformer.report import draw_prediction

            draw_prediction(predictor, field, answer, self.plot)
            say(f"Drew {self.plot}")
        return 0


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print the warnings of this package as one sentence, without the line of Python that raised them."""
    with warnings.catch_warnings():
        for category in OUR_WARNINGS:
            warnings.simplefilter("always", category)
        show = warnings.showwarning

        def plainly(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, OUR_WARNINGS):
                say(f"oformer: {message}")
            else:
                show(message, category, *rest)

        warnings.showwarning = plainly
        yield
