"""Figures and pages. They take fields, arrays and records, and know nothing of models."""

from oformer.plots.lines import (
    Resolution,
    error_by_resolution,
    error_by_share,
    error_by_step,
    error_over_time,
    loss_curves,
    solutions,
)
from oformer.plots.page import Code, Heading, Page, Picture, Table, Text, write_page
from oformer.plots.panel import Panel
from oformer.plots.style import save_figure

__all__ = [
    "Code",
    "Heading",
    "Page",
    "Panel",
    "Picture",
    "Resolution",
    "Table",
    "Text",
    "error_by_resolution",
    "error_by_share",
    "error_by_step",
    "error_over_time",
    "loss_curves",
    "save_figure",
    "solutions",
    "write_page",
]
