"""From samples to batches: the store on disk, its generation, datasets with views, and the loader."""

from oformer.data.dataset import PointDataset, View
from oformer.data.generate import estimate, generate
from oformer.data.loader import Loader
from oformer.data.store import Store
from oformer.statistics import ChannelStatistics, Statistics, measure

__all__ = [
    "ChannelStatistics",
    "Loader",
    "PointDataset",
    "Statistics",
    "Store",
    "View",
    "estimate",
    "generate",
    "measure",
]
