"""Models: every one answers the same call. `MODELS` drives the contract tests and the reading of checkpoints."""

from oformer.models.base import MarchingModel, ModelConfig, OperatorModel
from oformer.models.fno import FNO, FNOConfig
from oformer.models.galerkin_transformer import GalerkinTransformer, GalerkinTransformerConfig
from oformer.models.graph_network import GraphNetwork, GraphNetworkConfig
from oformer.models.grids import GridModel
from oformer.models.mwt import MWT, MWTConfig
from oformer.models.oformer import OFormer, OFormerConfig
from oformer.models.operator import Normalization, Operator
from oformer.models.superposition import Superposition, SuperpositionConfig

MODELS: dict[str, type[ModelConfig]] = {
    kind.__name__: kind
    for kind in (
        OFormerConfig, FNOConfig, MWTConfig, GalerkinTransformerConfig, GraphNetworkConfig, SuperpositionConfig,
    )
}  # fmt: skip

__all__ = [
    "FNO",
    "MODELS",
    "MWT",
    "FNOConfig",
    "GalerkinTransformer",
    "GalerkinTransformerConfig",
    "GraphNetwork",
    "GraphNetworkConfig",
    "GridModel",
    "MWTConfig",
    "MarchingModel",
    "ModelConfig",
    "Normalization",
    "OFormer",
    "OFormerConfig",
    "Operator",
    "OperatorModel",
    "Superposition",
    "SuperpositionConfig",
]
