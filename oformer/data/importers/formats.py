"""The table of file formats that can be imported; everything else about formats is derived from it.

A new format is a module with a function that opens a file, and a row in `FORMATS`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from oformer.data.importers.common import Choices, Opened, files_in
from oformer.data.importers.containers import is_matlab, is_numpy, open_matlab, open_numpy, open_torch
from oformer.data.importers.hdf5 import is_hdf5
from oformer.data.importers.meshfiles import SUFFIXES as MESH_SUFFIXES
from oformer.data.importers.meshfiles import open_meshes
from oformer.data.importers.named_arrays import SUFFIXES as ARRAY_SUFFIXES
from oformer.data.importers.named_arrays import are_named, open_arrays
from oformer.data.importers.pdebench import open_pdebench
from oformer.data.importers.pickles import open_pickle
from oformer.data.importers.tfrecord import open_tfrecord
from oformer.data.importers.trajectories import are_trajectories, open_trajectories
from oformer.data.importers.well import is_well, open_well


@dataclass(frozen=True)
class Format:
    """A file format: how its files are recognized and opened."""

    name: str  # of a file, for people
    kinds: tuple[str, ...]  # of data that its files may hold: the values of --kind
    suffixes: tuple[str, ...]  # that its files end in
    open: Callable[[Path, Choices], AbstractContextManager[Opened]]
    choices: tuple[str, ...] = ()  # options of the caller that apply to it; all formats check `kind` and `in_times`
    folders: bool = False  # whether a folder of such files is a dataset, too
    # From path, first bytes (none of a folder) and options; where it is absent, the suffixes tell.
    recognizes: Callable[[Path, bytes, Choices], bool] | None = None

    def claims(self, path: Path, head: bytes, choices: Choices) -> bool:
        """Whether a file or folder is of this format."""
        if self.recognizes is not None:
            return self.recognizes(path, head, choices)
        return self.is_folder(path) if path.is_dir() else path.suffix.lower() in self.suffixes

    def is_folder(self, path: Path) -> bool:
        """Whether a folder holds files of this format that are imported together."""
        return self.folders and bool(files_in(path, self.suffixes))


# The first row that claims a file opens it: formats of one suffix or container stand from the special to the general.
FORMATS = (
    Format("mesh file", ("mesh",), MESH_SUFFIXES, open_meshes,
           ("stride", "inputs", "targets", "coords"), folders=True),
    Format("folder of .npz trajectories", ("airfoil",), (), open_trajectories,
           ("stride", "stored"), recognizes=are_trajectories),
    Format("file of named arrays", ("arrays",), ARRAY_SUFFIXES, open_arrays,
           ("inputs", "targets", "coords"), folders=True, recognizes=are_named),
    Format("pickle", ("electrostatics", "magnetostatics"), (".pkl", ".pickle"), open_pickle),
    Format("TFRecord file", ("airfoil",), (".tfrecord",), open_tfrecord, ("stride", "stored")),
    Format("MATLAB file", ("burgers", "darcy", "navier-stokes"), (".mat",), open_matlab, recognizes=is_matlab),
    Format("numpy file", ("navier-stokes",), (".npy",), open_numpy, recognizes=is_numpy),
    Format("HDF5 file of The Well", ("the-well",), (".h5", ".hdf5"), open_well, recognizes=is_well),
    Format("HDF5 file", ("pdebench",), (".h5", ".hdf5"), open_pdebench, recognizes=is_hdf5),
    Format("torch file", ("burgers", "darcy", "navier-stokes"), (".pt", ".pth"), open_torch),
)  # fmt: skip
KINDS = tuple(dict.fromkeys(kind for format in FORMATS for kind in format.kinds))
SUFFIXES = tuple(dict.fromkeys(suffix for format in FORMATS for suffix in format.suffixes))
