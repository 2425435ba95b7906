"""Datasets that others published, brought into our store.

On grids: MATLAB, numpy, torch, PDEBench, The Well. On scattered points: pickles, TFRecord, .npz trajectories, meshes,
and a person's own arrays by name.
"""

from oformer.data.importers.common import Choices, Layout
from oformer.data.importers.formats import KINDS, SUFFIXES
from oformer.data.importers.run import import_file, is_importable_folder, load_file, recognize

__all__ = ["KINDS", "SUFFIXES", "Choices", "Layout", "import_file", "is_importable_folder", "load_file", "recognize"]
