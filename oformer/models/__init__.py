"""Models: every one answers the same call. `MODELS` drives the contract tests and the reading of checkpoints."""

from oformer.models.base import Normalization, Operator, OperatorModel
from oformer.models.oformer import OFormer, OFormerConfig

MODELS = {"OFormerConfig": OFormerConfig}

__all__ = ["MODELS", "Normalization", "OFormer", "OFormerConfig", "Operator", "OperatorModel"]
