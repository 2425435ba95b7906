"""Time marching, faster: all steps of an OFormer in one kernel on a Hopper GPU, in half precision.

The kernel keeps the latents of a point on the chip through all steps, and only its normalized latents for the backward
pass, which computes the rest again (`kernels/rollout_kernels.py`, `kernels/rollout_back_kernels.py`).
"""

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.engine.attention import is_bare, is_layer_norm, is_linear, needs_plain_derivatives
from oformer.engine.recompute import Recomputed
from oformer.gpu import kernels_on
from oformer.models.oformer import Context, OFormer
from oformer.nn.feedforward import MLP
from oformer.nn.shared_grids import expanded, once_per_grid

Shapes = tuple[tuple[int, int], ...]  # of matrices (out, in)
KNOWN_ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}  # those of the kernel
# The methods that the kernel computes. If somebody puts another one in the place of one of them, the model marches by
# that.
_STEPS = {name: getattr(OFormer, name) for name in ("propagate", "decode", "step")}


class FusedOFormer(OFormer):
    """`OFormer` that marches in one kernel where there is one for its networks."""

    def march(
        self,
        z: Float[Tensor, "batch queries width"],
        context: Context,
        times: int,
        step: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> Iterator[Float[Tensor, "batch queries channels"]]:
        """Values at one time after another; the first is one step after the input."""
        if times < 1 or not self._marches_on_chip(z):
            yield from super().march(z, context, times, step)
            return
        # A compiled graph knows no kernels that march. Not said at the definition, which would load the compiler.
        march = torch.compiler.disable(self._march_on_chip)
        yield from march(z, context, times, isinstance(step, Recomputed)).unbind(1)  # pyright: ignore

    def _marches_on_chip(self, z: Tensor) -> bool:
        """Whether a kernel does the rollout: in half precision on a GPU that has one for these widths."""
        p, d = self.config.propagator, self.config.decoder
        fits = p.depth == 1 and p.layernorm and d.layernorm and not d.trunk and len(self.heads) == 1
        if not fits or not z.is_cuda or not torch.is_autocast_enabled("cuda") or not self._is_known():
            return False
        if needs_plain_derivatives(self, (z,)):
            return False
        return fused_rollout(
            z.device.index, shapes(self.steps[0]), shapes(self.heads[0]), d.activation,
            torch.get_autocast_dtype("cuda"), torch.is_grad_enabled(),
        )  # fmt: skip

    def _is_known(self) -> bool:
        """Whether nobody has replaced a method or a network that the kernel computes."""
        if any(getattr(type(self), name) is not method or name in self.__dict__ for name, method in _STEPS.items()):
            return False
        step_norm, read_norm = self.step_norms[0], self.decode_norm
        if not (is_layer_norm(step_norm) and is_layer_norm(read_norm) and step_norm.eps == read_norm.eps):
            return False
        networks = ((self.steps[0], "gelu", False), (self.heads[0], self.config.decoder.activation, True))
        return all(_is_known_network(*network) for network in networks)

    def _march_on_chip(
        self, z: Float[Tensor, "batch queries width"], context: Context, times: int, sparing: bool
    ) -> Float[Tensor, "batch times queries channels"]:
        """`propagate` and `decode` in fused kernels, which keep little and compute the rest again for the gradient.

        Args:
            z: latents before the first step.
            context: coordinates and features of the query points.
            times: number of steps.
            sparing: whether memory matters more than time.
        """
        from oformer.engine.kernels.rollout_back_kernels import PART, Chain
        from oformer.engine.kernels.rollout_kernels import march

        batch, queries, _ = z.shape
        step_norm, read_norm = self.step_norms[0], self.decode_norm
        assert isinstance(step_norm, nn.LayerNorm)  # or it would not fit
        assert isinstance(read_norm, nn.LayerNorm)
        dtype = torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", enabled=False):

            def chain(network: MLP, norm: nn.LayerNorm, beside: Tensor | None, activation: str) -> Chain:
                # The affine part of a norm is one of the layer after it.
                first, *others = [layer.weight for layer in network.layers]
                first = first[:, : network.width]
                drive = (first @ norm.bias)[None]
                if beside is not None:
                    added = once_per_grid(network.from_context, beside)
                    drive = drive + (added[0] if expanded(added) else added.flatten(0, 1))
                return Chain((first * norm.weight, *others), drive, activation)

            step = chain(self.steps[0], step_norm, context.propagator, "gelu")
            read = chain(self.heads[0], read_norm, context.decoder, self.config.decoder.activation)
            bias, epsilon = self.heads[0].layers[-1].bias, step_norm.eps
            part = PART // 2 if sparing else PART  # smaller products take longer, and less memory
            values = march(z.flatten(0, 1), step, read, bias, times, epsilon, dtype, part)
        return values.unflatten(1, (batch, queries)).transpose(0, 1)


def _is_known_network(network: nn.Module, activation: str, last_bias: bool) -> bool:
    """Whether a network is a chain that the kernel computes: biases in the last layer at most, and no dropout."""
    if type(network) is not MLP or not is_bare(network) or network.dropout.p != 0:
        return False
    *inner, last = network.layers
    known = all(is_linear(layer, bias=False) for layer in inner) and is_linear(last, bias=last_bias)
    return known and network.activation is KNOWN_ACTIVATIONS[activation]


def shapes(network: MLP) -> Shapes:
    """Shapes (out, in) of the matrices of a network, without the context's share of the first."""
    first, *others = network.layers
    return (first.out_features, network.width), *((layer.out_features, layer.in_features) for layer in others)


@functools.cache
def fused_rollout(index: int, step: Shapes, read: Shapes, activation: str, dtype: torch.dtype, keep: bool) -> bool:
    """Whether a CUDA device has a fused rollout for such networks whose values agree with those of plain code.

    Its kernels are written for the tensor cores and the asynchronous copies of Hopper GPUs.

    Args:
        index: of the device.
        step: shapes of the matrices of a step.
        read: shapes of those that read values.
        activation: between the latter.
        dtype: of products.
        keep: whether gradients will be asked for, which is another kernel.
    """
    device = torch.device("cuda", index)
    kernels = kernels_on(device, "rollout")
    if kernels is None or not kernels.supported(device, step, read):
        return False
    try:
        with torch.set_grad_enabled(keep):
            wrong = None if kernels.agrees(device, step, read, activation, dtype) else "its values are wrong"
    except Exception as error:  # whatever the compiler of kernels raises: plain code does the same, slower
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(f"The fused rollout does not work here; using plain code ({wrong})", stacklevel=3)
    return wrong is None
