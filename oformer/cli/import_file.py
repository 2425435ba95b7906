"""`oformer import`: files of other programs as a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from oformer.cli.options import Count, CountOrNone
from oformer.terminal import say, show


@dataclass
class Import:
    """Bring files of others into a dataset that `train --data` takes.

    MATLAB, .npy, .pt, PDEBench and The Well; pickles of electro- and magnetostatics; MeshGraphNets' tfrecord and
    folders of .npz; VTK, VTU, XDMF, gmsh and SU2 files and tables of points, one or a folder of them, with --inputs and
    --targets; arrays of your own in .npz, .mat, .pt, NetCDF and HDF5, with --coords as well (docs/data-formats.md).

    What is understood of the file is printed first; `oformer inspect FILE` prints that alone.
    """

    file: tyro.conf.Positional[Path]
    out: Path | None = None
    """The dataset's folder; by default one under datasets/."""
    kind: str | None = None
    """What the file is, instead of our guess: a kind of docs/data-formats.md, such as darcy. Another word is answered
    with all kinds."""
    in_times: Count | None = None
    """How many frames of a trajectory are input; by default 10 (4 of an airfoil), or 1 where there are not
    more."""
    stride: Count | None = None
    """Keep one in so many frames of an airfoil's trajectory or of an XDMF series."""
    stored: Literal["velocity", "momentum"] | None = None
    """What to keep of the airfoil's "velocity", which in published files is momentum; by default the velocity."""
    inputs: str = ""
    """Fields of a mesh file, or arrays of a file, that are input; with commas between them."""
    targets: str = ""
    """And those that are to be predicted."""
    coords: str = ""
    """Arrays that are the points: one for all axes, or one for each."""
    train: CountOrNone | None = None
    """The first so many samples are for training; by default all but the test samples."""
    test: CountOrNone | None = None
    """The last so many samples are for testing; by default a tenth."""
    test_file: Path | None = None
    """Take the test samples from another file of the same layout; by default all of them."""
    storage: Literal["float32", "float16"] = "float32"
    """How values are kept; the cost of float16 is measured and written in the card."""

    def run(self, rest: list[str]) -> int:
        """Print how the file is understood, then write the dataset."""
        from oformer.data.importers import import_file, recognize

        choices: dict[str, Any] = {
            "kind": self.kind, "in_times": self.in_times, "stride": self.stride, "stored": self.stored,
            **{role: tuple(filter(None, getattr(self, role).split(","))) for role in ("inputs", "targets", "coords")},
        }  # fmt: skip
        show(str(recognize(self.file, **choices)))
        folder = self.out or Path("datasets") / self.file.stem
        import_file(
            self.file, folder, n_train=self.train, n_test=self.test, storage=self.storage, test_file=self.test_file,
            **choices,
            progress=lambda done, total: say(f"Imported {done:,} of {total:,} samples"),
        )  # fmt: skip
        say(f"{folder} is complete. Look at it: oformer inspect {folder}")
        return 0
