"""Figures and pages. They take fields, arrays and records, and know nothing of models."""

from oformer.plots.lines import Panel, Resolution, error_by_resolution
from oformer.plots.style import save_figure

__all__ = ["Panel", "Resolution", "error_by_resolution", "save_figure"]
