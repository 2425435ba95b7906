"""`oformer predict`: the prediction of a trained operator for an input file."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from oformer.cli.options import Count, Device, Positive, import_recipe_file, torch_device
from oformer.errors import DamagedCheckpoint, InputError, OutsideTraining
from oformer.terminal import say

if TYPE_CHECKING:
    from torch import Tensor

    from oformer.fields import Field
    from oformer.predict import Predictor

OUR_WARNINGS = (OutsideTraining, DamagedCheckpoint)


@dataclass
class Predict:
    """Predict from a file of your own.

    The input is a mesh file (.vtu, .vtk...) or a .csv that has the operator's input channels by name, or a .npz with
    `coords` (points, dim) and `values` (points, channels), (points,) or (times, points, channels); optional `weights`
    (points,) and `cells` (cells, corners). Values are in physical units.
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, a checkpoint, or a trained operator by NAME or zoo:NAME (oformer zoo list)."""
    input: tyro.conf.Positional[Path]
    """The file of the input."""
    inputs: str = ""
    """Of a mesh file or .csv: the fields that are the operator's input channels, in its order, with commas between;
    by default those with the names of its training."""
    queries: Path | None = None
    """Where to answer, if not at the points of the input: a mesh file, a .csv, a .npy of points (queries, dim), or a
    .npz with `coords` and, where the model wants it, `values`."""
    resolution: Count | None = None
    """Or so many points per axis over the box of the input (the period of a periodic problem)."""
    times: Count | None = None
    out: Path = Path("prediction.npz")
    """The file to write: .npz, .csv, .nc, or .vtu, .pvd or .vtk for ParaView, with the cells of the mesh. Of several
    frames, .vtu gives a .pvd, which is the file to open."""
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
        from oformer.field_files import check_ending, save_field
        from oformer.plots.style import picture_format
        from oformer.predict import Predictor

        # What cannot be written is refused before the prediction is computed.
        check_ending(self.out)
        if self.out.resolve() in (self.input.resolve(), self.queries and self.queries.resolve()):
            raise InputError("another file for --out than those that are read", f"`{self.out}`", "Choose another name")
        if self.plot is not None:
            picture_format(self.plot)
        device = None if self.device == "auto" else torch_device(self.device)
        import_recipe_file(self.recipe)
        predictor = Predictor(self.run_folder, device, precision=self.precision, memory_gb=self.memory_gb)
        if self.plot is not None and predictor.spec.dim == 3:
            advice = "Leave --plot, write --out answer.vtu and open it in ParaView"
            raise InputError("an operator on a line or in the plane for --plot", "one in space", advice)
        field, query, cells = self._question(predictor)
        with _plain_warnings():
            answer = predictor(field, query, times=self.times)
        names = predictor.checkpoint.data.targets if predictor.checkpoint.data else ()
        known = len(set(names)) == answer.values.shape[-1]
        first, *others = save_field(self.out, answer, cells, names if known else None)
        more = f" and {len(others)} files beside it" if others else ""
        say(f"Wrote {answer.values.shape[0]} frame(s) at {answer.points} points to {first}{more}.")
        if self.plot is not None:
            from oformer.report import draw_prediction

            draw_prediction(predictor, field, answer, self.plot)
            say(f"Drew {self.plot}")
        return 0

    def _question(self, predictor: "Predictor") -> "tuple[Field, Field | Tensor | None, Any]":
        """The input, where to answer (None: at the points of the input), and the cells there, if known."""
        from oformer.data.importers.meshfiles import SUFFIXES, read_channels
        from oformer.fields import Card
        from oformer.files import load_npz
        from oformer.predict import read_field
        from oformer.vtk.mesh import box

        card, dim = predictor.checkpoint.data or Card(""), predictor.spec.dim
        names = tuple(filter(None, self.inputs.split(","))) or card.inputs
        asked = self.queries is not None or self.resolution is not None
        if self.input.suffix.lower() in SUFFIXES:
            field, query, cells = read_channels(self.input, names, () if asked else card.queries, dim)
        elif self.inputs:
            raise InputError("--inputs only for a mesh file or a .csv", f"`{self.inputs}` for {self.input}", "Leave it")
        else:
            field, query = read_field(self.input), None
            cells = load_npz(self.input).get("cells")
        if self.queries is not None and self.queries.suffix.lower() in SUFFIXES:
            _, query, cells = read_channels(self.queries, (), card.queries, dim)
        elif self.queries is not None:
            query, cells = read_field(self.queries, values_needed=False), None
        elif self.resolution is not None:
            query, cells = predictor.grid(field, self.resolution), box((self.resolution,) * dim)
        return field, query, cells


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
