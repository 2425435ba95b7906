"""Datasets that others published, brought into our store: MATLAB, numpy, torch, PDEBench, The Well."""

from oformer.data.importers.common import Layout
from oformer.data.importers.run import KINDS, SUFFIXES, import_file, recognize

__all__ = ["KINDS", "SUFFIXES", "Layout", "import_file", "recognize"]
