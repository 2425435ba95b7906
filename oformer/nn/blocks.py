"""Transformer blocks: self-attention over the input points, cross-attention from queries to them."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from oformer.nn.attention import KINDS, Attention
from oformer.nn.feedforward import MLP, GatedGELU

FeedForward = Literal["gated", "relu"]


class SelfAttentionBlock(nn.Module):
    """x = LN(x); x = x + Attn(x); x = LN(x); x = x + FFN(x), the norms only where asked for.

    Differs: this is the paper's post-norm block shifted by half a layer, as in the released code: the trunk itself is
    normalized, and nothing follows the last feed-forward.
    """

    def __init__(
        self,
        width: int,
        attention: Attention,
        feedforward: FeedForward,
        layernorm: bool,
        dropout: float = 0.0,
    ):
        """Build the block and start the projection that is not normalized diagonal-dominant."""
        super().__init__()
        self.attention = attention
        raw = tuple(name for name in "qkv" if name not in KINDS[attention.kind].normalized)
        attention.initialize(raw)
        self.feedforward = (
            GatedGELU(width, dropout)
            if feedforward == "gated"
            else MLP((width, width, width), "relu", bias=True, last_bias=True, dropout=dropout)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) if layernorm else nn.Identity() for _ in range(2))

    def forward(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch points width"]:
        """Let the points talk to each other once."""
        x = self.norms[0](x)
        x = x + self.attention(x, coords, weights)
        x = self.norms[1](x)
        return x + self.feedforward(x)


class CrossAttentionBlock(nn.Module):
    """z = z + Attn(z, source); z = z + FFN(z), the latter only where asked for."""

    def __init__(self, width: int, attention: Attention, feedforward: bool = True):
        """Build the block and start all three projections diagonal-dominant."""
        super().__init__()
        self.attention = attention
        attention.initialize(("q", "k", "v"))
        self.feedforward = GatedGELU(width) if feedforward else None

    def forward(
        self,
        z: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"],
        source_coords: Float[Tensor, "batch points dim"],
        source_weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch queries width"]:
        """Let each query read from the source points."""
        z = z + self.attention(z, coords, weights, source, source_coords, source_weights)
        return z if self.feedforward is None else z + self.feedforward(z)
