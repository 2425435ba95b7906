"""Point-wise networks: a chain of linear layers, which may see a context, and the gated GELU of the paper."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.nn.shared_grids import once_per_grid

Activation = Literal["gelu", "relu"]
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class MLP(nn.Module):
    """Linear layers with an activation between them, whose first layer may also see a context: W_1 (x, context)."""

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

    def forward(
        self, x: Float[Tensor, "*batch width"], context: Float[Tensor, "*batch context"] | None = None
    ) -> Float[Tensor, "*batch out"]:
        """Apply the chain to each point; the context is needed where the chain was built with one."""
        first = self.layers[0]
        if context is None:
            x = first(x)
        else:  # what samples share of the context is multiplied once for all of them
            added = once_per_grid(self.from_context, context)
            x = F.linear(x, first.weight[:, : self.width], first.bias) + added
        for layer in self.layers[1:-1]:
            x = layer(self.dropout(self.activation(x)))
        if len(self.layers) > 1:
            x = self._last(self.dropout(self.activation(x)))
        return self.dropout(x)

    def from_context(self, context: Float[Tensor, "*batch context"]) -> Float[Tensor, "*batch hidden"]:
        """The context's share of the first layer."""
        return F.linear(context, self.layers[0].weight[:, self.width :])

    def _last(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        if not self.exact_last or not torch.is_autocast_enabled(x.device.type):
            return self.layers[-1](x)
        with torch.autocast(x.device.type, enabled=False):
            return self.layers[-1](in_full(x))


def in_full(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The tensor in float32, or as it is if it is more precise: residuals add up in float32 under any autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class GatedGELU(nn.Module):
    """W2 (GELU(a) * b) where (a, b) = W1 x."""

    def __init__(self, width: int, dropout: float = 0.0):
        """Build the network with as many hidden channels as `width`, as in every experiment of the paper."""
        super().__init__()
        self.gate = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Apply the network to each point."""
        a, b = self.gate(x).chunk(2, -1)
        return self.dropout(self.out(self.dropout(F.gelu(a) * b)))
