"""Transformer blocks, faster: each half of a block is one call of the engine where a kernel fits it.

The first half, norm, attention and residual, is `FusedAttention.with_residual`. The second half, norm, gated network,
dropouts and residual, is one kernel each way on Hopper GPUs up to 128 channels (`kernels/feedforward_kernels.py`).
"""

import functools
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.engine.attention import FusedAttention, is_bare, is_layer_norm, is_linear, needs_plain_derivatives
from oformer.gpu import constant_when_compiling, exporting, kernels_on, rounded_products, type_of_products
from oformer.nn.blocks import CrossAttentionBlock, SelfAttentionBlock
from oformer.nn.feedforward import GatedGELU


class FusedSelfAttentionBlock(SelfAttentionBlock):
    """`SelfAttentionBlock` in two calls."""

    def forward(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch points width"]:
        """Let the points talk to each other once."""
        attention, norm = self.attention, self.norms[0]
        if type(attention) is FusedAttention and is_bare(attention):
            x = attention.with_residual(x, coords, weights, norm)
        else:
            x = norm(x)
            x = x + attention(x, coords, weights)
        return feed_forward(x, self.norms[1], self.feedforward)


class FusedCrossAttentionBlock(CrossAttentionBlock):
    """`CrossAttentionBlock` whose second half is one call."""

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
        return z if self.feedforward is None else feed_forward(z, None, self.feedforward)


def feed_forward(
    x: Float[Tensor, "*batch width"], norm: nn.Module | None, network: nn.Module
) -> Float[Tensor, "*batch width"]:
    """The second half of a block: r + FFN(r), where r = LN(x), or x itself without a norm."""
    if norm is not None and not is_layer_norm(norm):
        x, norm = norm(x), None
    if type(network) is GatedGELU and _is_known(network, x.shape[-1]) and _fits_on_chip(network, x):
        return _on_chip(network, x, norm)
    r = x if norm is None else norm(x)
    return r + network(r)


def _is_known(network: GatedGELU, width: int) -> bool:
    """Whether a network consists of the parts that the kernel computes, in their sizes."""
    layers = is_linear(network.gate, bias=True) and is_linear(network.out, bias=True) and is_bare(network)
    sizes = network.gate.weight.shape == (2 * width, width) and network.out.weight.shape == (width, width)
    return layers and sizes and type(network.dropout) is nn.Dropout


def _on_chip(
    network: GatedGELU, x: Float[Tensor, "*batch width"], norm: nn.Module | None
) -> Float[Tensor, "*batch width"]:
    """`feed_forward` in one kernel."""
    from oformer.engine.kernels.feedforward_kernels import gated_residual

    gain, shift, epsilon = (norm.weight, norm.bias, norm.eps) if isinstance(norm, nn.LayerNorm) else (None, None, 0.0)
    dropout = network.dropout.p if network.dropout.training else 0.0
    seed = torch.randint(2**62, (1,), device=x.device) if dropout else None
    gate, out = network.gate, network.out
    return gated_residual(
        x, gain, shift, gate.weight, gate.bias, out.weight, out.bias, seed, dropout, epsilon, type_of_products(x)
    )[0]


def _fits_on_chip(network: GatedGELU, x: Float[Tensor, "*batch width"]) -> bool:
    """Whether there is a kernel for these points: residuals are added up in their type, and not in float64."""
    if x.dtype == torch.float64 or network.dropout.p == 1 or needs_plain_derivatives(network, (x,)):
        return False
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False  # a norm would return to float32
    return not exporting() and fused_feedforward(x.device, x.shape[-1], type_of_products(x))


@constant_when_compiling
def fused_feedforward(device: torch.device, width: int, dtype: torch.dtype) -> bool:
    """Whether a device has the kernel for points of a width and products of a type: float32 as TF32 only."""
    kernels = _kernels(device)
    exact = dtype == torch.float32 and not rounded_products()
    return kernels is not None and not exact and kernels.supported(device, width)


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    return kernels_on(device, "feedforward")
