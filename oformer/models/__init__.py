"""Models: every one answers the same call. `MODELS` drives the contract tests and the reading of checkpoints."""

from oformer.models.base import ModelConfig, Normalization, Operator, OperatorModel
from oformer.models.fno import FNO, FNOConfig
from oformer.models.grids import GridModel
from oformer.models.oformer import OFormer, OFormerConfig

MODELS: dict[str, type[ModelConfig]] = {kind.__name__: kind for kind in (OFormerConfig, FNOConfig)}

__all__ = [
    "FNO",
    "MODELS",
    "FNOConfig",
    "GridModel",
    "ModelConfig",
    "Normalization",
    "OFormer",
    "OFormerConfig",
    "Operator",
    "OperatorModel",
]
