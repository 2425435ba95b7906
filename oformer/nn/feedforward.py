"""Point-wise networks: a plain chain of linear layers, the same with a context, and the gated GELU of the paper.

The gated GELU with its norm and its residual, the second half of a block, is one kernel on a GPU
(`feedforward_kernels.py`), where there is one for the types and the width.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.gpu import constant_when_compiling, exporting, kernels_on, rounded_products, type_of_products

Activation = Literal["gelu", "relu"]
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class MLP(nn.Module):
    """Linear layers with an activation between them, whose first layer may also see a context.

    The context's share of the first layer does not change while a rollout marches, so it can be computed once
    (`drive`) and given to each call.
    """

    layers: Sequence[nn.Linear]

    def __init__(
        self,
        widths: tuple[int, ...],
        activation: Activation = "gelu",
        context: int = 0,
        bias: bool = False,
        last_bias: bool = False,
        dropout: float = 0.0,
        exact_last: bool = False,
    ):
        """Build the chain.

        Args:
            widths: input, hidden and output widths.
            activation: between the layers, not after the last.
            context: channels appended to the input.
            bias: in all layers but the last.
            last_bias: in the last layer.
            dropout: after each activation and after the last layer.
            exact_last: compute the last layer in float32 under any autocast: where its result is an answer, rounding
                it to half precision may cost more than all that was rounded before.
        """
        super().__init__()
        self.width, self.activation, self.context = widths[0], ACTIVATIONS[activation], context
        self.exact_last = exact_last
        inputs = [widths[0] + context, *widths[1:-1]]
        last = len(inputs) - 1
        self.layers = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            nn.Linear(i, o, bias=last_bias if n == last else bias)
            for n, (i, o) in enumerate(zip(inputs, widths[1:], strict=True))
        )
        self.dropout = nn.Dropout(dropout)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Of the matrices (out, in), without the context's share of the first."""
        first, *others = self.layers
        return (first.out_features, self.width), *((layer.out_features, layer.in_features) for layer in others)

    def drive(self, context: Float[Tensor, "*batch context"] | None) -> Float[Tensor, "*batch hidden"] | None:
        """What the context adds to the first layer's output."""
        if context is None or not self.context:
            return None
        return F.linear(context, self.layers[0].weight[:, self.width :])

    def forward(self, x: Float[Tensor, "*batch width"], drive: Tensor | None = None) -> Float[Tensor, "*batch out"]:
        """Apply the chain; `drive` is what `drive(context)` gave, and is needed where there is a context."""
        first = self.layers[0]
        x = F.linear(x, first.weight[:, : self.width], first.bias) if self.context else first(x)
        if drive is not None:
            x = x + drive
        for layer in self.layers[1:-1]:
            x = layer(self.dropout(self.activation(x)))
        if len(self.layers) > 1:
            x = self._last(self.dropout(self.activation(x)))
        return self.dropout(x)

    def _last(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        if not self.exact_last or not torch.is_autocast_enabled(x.device.type):
            return self.layers[-1](x)
        with torch.autocast(x.device.type, enabled=False):
            return self.layers[-1](in_full(x))


def in_full(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """In float32, unless it is more already: what residuals add up in, whatever autocast rounds products to."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedGELU(nn.Module):
    """W2 (GELU(a) * b) where (a, b) = W1 x."""

    def __init__(self, width: int, dropout: float = 0.0):
        """Build it with as many hidden channels as `width`, as in every experiment of the paper."""
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Apply it to each point."""
        a, b = self.gate(x).chunk(2, -1)
        return self.dropout(self.out(self.dropout(F.gelu(a) * b)))

    def on_chip(self, x: Float[Tensor, "*batch width"], norm: nn.LayerNorm | None) -> Float[Tensor, "*batch width"]:
        """`feed_forward` with this network in one kernel."""
        from oformer.nn.feedforward_kernels import gated_residual

        gain, shift, epsilon = (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
        dropout = self.dropout.p if self.dropout.training else 0.0
        seed = torch.randint(2**62, (1,), device=x.device) if dropout else None
        gate, out = self.gate, self.out
        return gated_residual(
            x, gain, shift, gate.weight, gate.bias, out.weight, out.bias, seed, dropout, epsilon, type_of_products(x)
        )[0]

    def fits_on_chip(self, x: Float[Tensor, "*batch width"]) -> bool:
        """Whether there is a kernel for these points: residuals are added up in their type, and not in float64."""
        if x.dtype == torch.float64 or self.dropout.p == 1:
            return False
        if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
            return False  # a norm would return to float32
        return not exporting() and fused_feedforward(x.device, x.shape[-1], type_of_products(x))


def feed_forward(
    x: Float[Tensor, "*batch width"], norm: nn.Module, network: nn.Module
) -> Float[Tensor, "*batch width"]:
    """The second half of a block: r + FFN(r), where r = LN(x), or x itself where the norm is an Identity."""
    if isinstance(network, GatedGELU) and network.fits_on_chip(x):
        return network.on_chip(x, norm if isinstance(norm, nn.LayerNorm) else None)
    r = norm(x)
    return r + network(r)


@constant_when_compiling
def fused_feedforward(device: torch.device, width: int, dtype: torch.dtype) -> bool:
    """Whether a device has the kernel for points of a width and products of a type: float32 as TF32 only."""
    kernels = _kernels(device)
    exact = dtype == torch.float32 and not rounded_products()
    return kernels is not None and not exact and kernels.supported(device, width)


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    return kernels_on(device, "oformer.nn.feedforward_kernels")
