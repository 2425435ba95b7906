"""Attention, faster: small matrices first on any device, and fused kernels on a GPU.

`FusedAttention` computes what `oformer.nn.attention.Attention` says, for the kinds that are known here:

- the projection of the heads is multiplied into the sums over points before queries meet them, and where V is a plain
  projection its matrix follows the sum; so no point ever holds the values or the results of all heads;
- queries, keys and values are projected in one product, and once where the samples of a batch share them;
- on a GPU projection, norm, rotation and weight are one kernel (`kernels/attention_kernels.py`);
- on a Hopper GPU KᵀV is accumulated inside that kernel, without writing K and V to memory
  (`kernels/attention_sums_kernels.py`); queries are projected, rotated and multiplied with these sums in one kernel
  that adds bias, dropout and residual (`kernels/attention_lookup_kernels.py`), and the norm before is a kernel as well
  (`kernels/norm_kernels.py`);
- the weights of softmax attention ride on extra channels of queries and keys, since torch's fast kernels take no bias.
"""

import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.engine.rotary import FusedRotary
from oformer.gpu import constant_when_compiling, exporting, kernels_on, rounded_products, switched_on, type_of_products
from oformer.nn.attention import (
    EPSILON,
    KINDS,
    Attention,
    Kind,
    Normalize,
    all_derivatives,
    fourier,
    galerkin,
    softmax,
)
from oformer.nn.rotary import Rotary, Tables
from oformer.nn.shared_grids import expanded, once_per_grid
from oformer.nn.sums import over_points, points_are_split

# The kinds that are computed here; another function under one of these names, or another kind, runs as written.
KNOWN: dict[str, Kind] = {
    "galerkin": Kind(galerkin, normalized=("k", "v"), linear=True),
    "fourier": Kind(fourier, normalized=("q", "k"), linear=True),
    "softmax": Kind(softmax, normalized=("q", "k")),
}
CHANNELS_FOR_BIAS = 8  # beside those of a head in softmax attention; fast kernels want multiples of eight


class _SumOfProducts(torch.autograd.Function):
    """aᵀ b, whose gradients are laid out in memory as a and b are.

    Autograd's own gradient of the transposed factor would be transposed in memory: its rows, as long as the number of
    points, slow down the product that makes it, and then it has to be copied.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a.mT @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        a, b = (factor.to(output.dtype) for factor in inputs)  # in the type that autocast has rounded them to
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return b @ gradients[0].mT, a @ gradients[0]


class _SumOfProductsBothWays(_SumOfProducts):
    """aᵀ b with a derivative in forward mode as well, which torch.compile refuses in a function of one's own."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (a, b), (da, db) = ctx.saved_tensors, tangents
        return da.to(a.dtype).mT @ b + a.mT @ db.to(b.dtype)


def sum_of_products(
    a: Float[Tensor, "*any points rows"], b: Float[Tensor, "*any points columns"]
) -> Float[Tensor, "*any rows columns"]:
    """The sum over all points of a bᵀ, also over those that are not here."""
    function = _SumOfProducts if torch.compiler.is_compiling() else _SumOfProductsBothWays
    return over_points(function.apply(a, b))


class Part(NamedTuple):
    """How queries, keys or values are arranged between their projection and the product."""

    name: str  # q, k or v
    normalized: bool  # in one of the ways that have an effect
    turned: bool  # by the rotary encoding
    weighted: bool  # with the root of the quadrature weights
    heads_first: bool  # (batch, heads, points, width), contiguous; or (batch, points, heads, width)


@constant_when_compiling
def fused_arrangement(device: torch.device) -> bool:
    """Whether a device has the kernel that arranges queries, keys and values."""
    return _has_arrangement(device)


@constant_when_compiling
def fused_sums(device: torch.device) -> bool:
    """Whether such a device also sums over points in a kernel, which fills registers and memory of a Hopper GPU."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and switched_on("sums")


@constant_when_compiling
def fused_lookup() -> bool:
    """Whether points read the sums over themselves in a kernel, where they are summed in one."""
    return switched_on("lookup")


@constant_when_compiling
def fused_norm() -> bool:
    """Whether the norm before such a kernel is one as well."""
    return switched_on("norm")


@functools.cache  # apart from `fused_arrangement`, since torch.compile would look through it and warn
def _has_arrangement(device: torch.device) -> bool:
    return kernels_on(device, "attention") is not None


def needs_plain_derivatives(
    layer: nn.Module, values: tuple[Tensor | None, ...], constants: tuple[Tensor | None, ...] = ()
) -> bool:
    """Whether derivatives may be wanted that kernels do not have: by their constants, second ones, by `torch.func`.

    Second derivatives cannot be foreseen, so that outside of training plain layers compute whatever has gradients.

    Args:
        layer: training or not.
        values: by which kernels have gradients.
        constants: coordinates and weights, which kernels take as constants.
    """
    tracked = any(tensor.requires_grad for tensor in constants if tensor is not None)
    if torch.is_grad_enabled() and (tracked or not layer.training):
        return True
    if torch.compiler.is_compiling():
        return False
    # torch has no public name for the question.
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return any(wrapped(tensor) for tensor in (*values, *constants) if tensor is not None)


def is_bare(module: nn.Module) -> bool:
    """Whether nobody watches or replaces the calls of a module, by a hook or a `forward` of this instance."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_linear(module: nn.Module, bias: bool) -> bool:
    """Whether a module is torch's linear layer as it is, with or without a bias."""
    return type(module) is nn.Linear and (module.bias is not None) == bias and is_bare(module)


def is_layer_norm(module: nn.Module | None) -> bool:
    """Whether a module is torch's layer norm as it is, with a gain and a shift."""
    if not isinstance(module, nn.LayerNorm) or type(module) is not nn.LayerNorm:
        return False
    return is_bare(module) and module.weight is not None and module.bias is not None


def is_known(layer: Attention) -> bool:
    """Whether a layer is of a known kind and consists of known parts, none of which somebody has replaced."""
    kind, known = KINDS.get(layer.kind), KNOWN.get(layer.kind)
    if kind is None or known is None or kind.attend is not known.attend or kind.normalized != known.normalized:
        return False
    if not all(is_linear(part, bias=False) for part in (layer.q, layer.k, layer.v)):
        return False
    if not all(_is_known_norm(part) for part in layer.normalize.values()):
        return False
    if layer.rotary is not None and (type(layer.rotary) not in (Rotary, FusedRotary) or not is_bare(layer.rotary)):
        return False
    out = layer.out
    if type(out) is nn.Sequential and is_bare(out):
        return len(out) == 2 and is_linear(out[0], bias=True) and type(out[1]) is nn.Dropout
    return type(out) is nn.Identity and is_bare(out)


def _is_known_norm(module: nn.Module) -> bool:
    """Whether a module normalizes as the kernels do."""
    if type(module) is not Normalize or not is_bare(module):
        return False
    affine = module.affine
    return affine is None or (is_layer_norm(affine) and affine.eps == EPSILON)


class FusedAttention(Attention):
    """`Attention` with the small matrices first, and in kernels where the device has them."""

    rotary: Rotary | None  # the only position code that `is_known` lets pass

    def forward(
        self,
        x: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"] | None = None,
        source_coords: Float[Tensor, "batch points dim"] | None = None,
        source_weights: Float[Tensor, "batch points"] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Attend from `x` to `source`, or to `x` itself where no source is given."""
        if not is_known(self) or (self.kind == "softmax" and points_are_split()):
            return super().forward(x, coords, weights, source, source_coords, source_weights)
        constants = (coords, weights, source_coords, source_weights)
        if self._has_kernels(x) and needs_plain_derivatives(self, (x, source), constants):
            return super().forward(x, coords, weights, source, source_coords, source_weights)
        if source is None and self._reads_on_chip(x, weights):
            return self._attended_on_chip(x, coords, weights, residual=False, norm=None)
        return self._attended(x, coords, weights, source, source_coords, source_weights)

    def with_residual(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
        norm: nn.Module | None = None,
    ) -> Float[Tensor, "batch points width"]:
        """The first half of a block: x' + Attn(x'), where x' = norm(x), or x itself without a norm."""
        if norm is not None and not is_layer_norm(norm):
            x, norm = norm(x), None
        known = is_known(self) and not needs_plain_derivatives(self, (x,), (coords, weights))
        if known and self._reads_on_chip(x, weights):
            return self._attended_on_chip(x, coords, weights, residual=True, norm=norm)
        x = x if norm is None else norm(x)
        return x + self(x, coords, weights)

    def _attended(
        self,
        x: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"] | None,
        source_coords: Float[Tensor, "batch points dim"] | None,
        source_weights: Float[Tensor, "batch points"] | None,
    ) -> Float[Tensor, "batch queries width"]:
        """The answer where points do not read their sums in one kernel."""
        itself = source is None
        if source is None or source_coords is None or source_weights is None:
            source, source_coords, source_weights = x, coords, weights
        # Without normalized values, V is a plain projection of the source, and its matrix follows the sum over points.
        of_source = ("k",) if self.kind == "fourier" else ("k", "v")
        if itself and not self._sums_on_chip(x, weights):
            q, *others = self._projected(("q", *of_source), x, coords, weights)
        else:
            (q,) = self._projected(("q",), x, coords, weights)
            others = self._projected(of_source, source, source_coords, source_weights)
        if self.kind == "softmax":
            return self._softmax(q, others[0], others[1], source_weights)
        if len(others) == 2:
            return self._looked_up(q, sum_of_products(*others))
        if self.kind == "galerkin":  # the sum over the points that are here, and neither keys nor values
            return self._looked_up(q, over_points(others[0]).to(q.dtype))
        values = source * source_weights.sqrt()[:, :, None].to(source.dtype)
        seen = sum_of_products(others[0].flatten(2), values).unflatten(1, (self.heads, -1))
        return self._looked_up(q, seen @ self.v.weight.unflatten(0, (self.heads, -1)).mT)

    def _looked_up(
        self, q: Float[Tensor, "batch queries heads width"], seen: Float[Tensor, "batch heads width width"]
    ) -> Float[Tensor, "batch queries width"]:
        """The product of Q with the sums over points, after the projection of the heads."""
        seen = self._joined(seen)
        if expanded(q):  # one product with the matrices of all samples side by side
            mixed = (q[0].flatten(1) @ seen.transpose(0, 1).flatten(1)).unflatten(1, (seen.shape[0], -1))
            return self._finished(mixed.transpose(0, 1))
        return self._finished(q.flatten(2) @ seen)

    def _joined(self, seen: Float[Tensor, "batch heads width width"]) -> Float[Tensor, "batch heads_width width"]:
        """The sums over points times the projection of the heads."""
        if isinstance(self.out, nn.Identity):
            return seen[:, 0]
        return (seen @ self._last.weight.unflatten(1, (self.heads, -1)).permute(1, 2, 0)).flatten(1, 2)

    def _finished(self, mixed: Float[Tensor, "batch queries width"]) -> Float[Tensor, "batch queries width"]:
        """The rest of the projection of the heads: its bias and the dropout."""
        if isinstance(self.out, nn.Identity):
            return mixed
        return self.out[1](mixed + self._last.bias)

    def _softmax(
        self,
        q: Float[Tensor, "batch queries heads width"],
        k: Float[Tensor, "batch points heads width"],
        v: Float[Tensor, "batch points heads width"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch queries width"]:
        """softmax(Q Kᵀ/√width + log W) V and the projection of the heads."""
        width, q_and_one, k_and_bias = q.shape[-1], *_with_bias(q, k, weights)
        v = F.pad(v, (0, CHANNELS_FOR_BIAS))  # torch's fast kernels need q, k and v of one width
        q, k, v = (x.transpose(1, 2) for x in (q_and_one, k_and_bias, v))
        with all_derivatives(self):
            mixed = F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)
        return self.out(mixed.transpose(1, 2)[..., :width].flatten(2))

    def _projected(
        self,
        names: tuple[str, ...],
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> list[Float[Tensor, "batch _ _ width"]]:
        """Queries, keys or values of the points as the product reads them, projected in one product.

        Instead of keys and values it may be their sum over these points.
        """
        matrix = torch.cat([getattr(self, name).weight for name in names])
        batch, shared = x.shape[0], expanded(x) and expanded(coords) and expanded(weights)
        if shared:  # one grid for all samples: everything is done once
            x, coords, weights = x[:1], coords[:1], weights[:1]

        def heads(points: Tensor) -> Tensor:
            return F.linear(points, matrix).unflatten(-1, (len(names), self.heads, -1))

        parts = tuple(self._part(name) for name in names)
        tables = None if self.rotary is None else self.rotary.tables(coords)
        if not self._fits_on_chip(x, weights):
            found = self._arranged(once_per_grid(heads, x), parts, tables, weights)
        elif self._projects_on_chip(x):
            kind = type_of_products(x)
            sums = names == ("k", "v") and self._sums_on_chip(x, weights)
            make = self._summed_on_chip if sums else self._arranged_on_chip
            found = make(x.to(kind), matrix.to(kind), parts, tables, weights)
        else:
            found = self._arranged_on_chip(once_per_grid(heads, x), None, parts, tables, weights)
        return [part.expand(batch, *part.shape[1:]) for part in found] if shared else found

    def _part(self, name: str) -> Part:
        """How the kind of attention wants queries, keys or values."""
        weighted = self.kind != "softmax" and name != "q"
        return Part(
            name,
            normalized=name in KNOWN[self.kind].normalized and self.norm != "none",
            turned=self.rotary is not None and name != "v",
            weighted=weighted,
            heads_first=weighted and self.kind != "fourier",
        )

    def _arranged(
        self,
        projected: Float[Tensor, "batch points parts heads width"],
        parts: tuple[Part, ...],
        tables: Tables | None,
        weights: Float[Tensor, "batch points"],
    ) -> list[Float[Tensor, "batch _ _ width"]]:
        """Normalize, turn and weight each part of the projection, and lay it out as the product reads it."""
        root, found = weights.sqrt()[:, :, None, None], []
        for part, x in zip(parts, projected.unbind(2), strict=True):
            if part.normalized:
                x = self.normalize[part.name](x, weights)
            if part.turned:
                assert self.rotary is not None
                x = self.rotary(x, tables)
            if part.weighted:
                x = x * root.to(x.dtype)
            found.append(x.transpose(1, 2).contiguous() if part.heads_first else x)
        return found

    def _arranged_on_chip(
        self,
        x: Float[Tensor, "batch points width"] | Float[Tensor, "batch points parts heads width"],
        matrix: Float[Tensor, "all width"] | None,
        parts: tuple[Part, ...],
        tables: Tables | None,
        weights: Float[Tensor, "batch points"],
    ) -> list[Float[Tensor, "batch _ _ width"]]:
        """`_arranged` in one kernel, of x that is to be multiplied by a matrix or is projected already."""
        from oformer.engine.kernels.attention_kernels import arranged

        return arranged(
            x, matrix, *self._of_points(parts, tables, weights),
            [part.normalized for part in parts],
            [part.turned for part in parts],
            [part.weighted for part in parts],
            [part.heads_first for part in parts],
            self._axes, EPSILON,
        )  # fmt: skip

    def _summed_on_chip(
        self,
        x: Float[Tensor, "batch points width"],
        matrix: Float[Tensor, "all width"],
        parts: tuple[Part, ...],
        tables: Tables | None,
        weights: Float[Tensor, "batch points"],
    ) -> list[Float[Tensor, "batch _ _ width"]]:
        """KᵀV over these points."""
        from oformer.engine.kernels.attention_sums_kernels import summed

        return [summed(x, matrix, *self._of_points(parts, tables, weights), parts[-1].normalized, self._axes, EPSILON)]

    def _attended_on_chip(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
        residual: bool,
        norm: nn.Module | None,
    ) -> Float[Tensor, "batch points width"]:
        """Attention of points to themselves: their sums, and the kernel that reads them and adds a residual."""
        from oformer.engine.kernels.attention_lookup_kernels import looked_up
        from oformer.engine.kernels.norm_kernels import normalized

        kind, tables = type_of_products(x), None if self.rotary is None else self.rotary.tables(coords)
        if isinstance(norm, nn.LayerNorm) and x.dtype == torch.float32 and fused_norm():
            x, summing, asking = normalized(x, norm.weight, norm.bias, norm.eps, kind)
        else:
            x = x if norm is None else norm(x)
            summing = asking = x.to(kind)
        matrix = torch.cat([self.k.weight, self.v.weight]).to(kind)
        (sums,) = self._summed_on_chip(summing, matrix, (self._part("k"), self._part("v")), tables, weights)
        seen = self._joined(over_points(sums).to(x.dtype)).to(kind)
        read = functools.partial(looked_up, asking, self.q.weight.to(kind), *_once(tables), seen, self._axes)
        if not residual:
            return self._finished(read())
        if isinstance(self.out, nn.Identity):
            return read(x.to(torch.promote_types(x.dtype, kind)))
        bias, dropout = self._last.bias, self.out[1]
        share = dropout.p if dropout.training else 0.0
        if share == 1:  # nothing to scale up by
            return x + self._finished(read())
        seed = torch.randint(2**62, (1,), device=x.device) if share else None
        return read(x.to(torch.promote_types(x.dtype, bias.dtype)), bias, seed, share)

    @property
    def _last(self) -> nn.Linear:
        """The projection of several heads."""
        return cast(nn.Linear, self.out.get_submodule("0"))

    @property
    def _axes(self) -> int:
        """The number of coordinates that the channels are shared out among."""
        return 1 if self.rotary is None else len(self.rotary.frequencies)

    def _of_points(
        self, parts: tuple[Part, ...], tables: Tables | None, weights: Float[Tensor, "batch points"]
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """Operands of the kernels beside points and matrices: cosines, sines, roots of the weights, gains of norms."""
        affine: list[Tensor] = [p for part in parts if part.normalized for p in self.normalize[part.name].parameters()]
        gains = torch.stack(affine).unflatten(0, (-1, 2)) if affine else None
        cos, sin = _once(tables)
        return cos, sin, weights.sqrt(), gains

    def _fits_on_chip(self, x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]) -> bool:
        """Whether there is a kernel for this layer and these tensors."""
        fits = self.kind != "softmax" and self.norm not in ("points", "points-detached")
        if not fits or x.shape[-1] % 2 or x.dtype == torch.float64:
            return False
        return not exporting() and fused_arrangement(x.device)

    def _has_kernels(self, x: Float[Tensor, "batch points width"]) -> bool:
        """Whether a kernel may compute some of this layer on the device of the points."""
        return self.kind != "softmax" and fused_arrangement(x.device)

    def _projects_on_chip(self, x: Float[Tensor, "batch points width"]) -> bool:
        """Whether the kernel multiplies by the matrices as well, and again for the gradient.

        It needs tensor cores, which round. Up to 128 channels that is less work than writing the projection and reading
        it twice; wider heads do not fit into the registers. What all samples share is projected once for all.
        """
        rounded = type_of_products(x) != torch.float32 or rounded_products()
        return rounded and x.shape[-1] <= 128 and not expanded(x)

    def _sums_on_chip(self, x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]) -> bool:
        """Whether KᵀV is accumulated inside the projection kernel, without writing K and V to memory.

        The sum stays in registers, beside keys and values of 64 points. That is possible for factors of 16 bits and 96
        channels; or for 64, where norms have gains, whose gradients are sums as well.
        """
        if not (self.kind == "galerkin" and self._fits_on_chip(x, weights) and self._projects_on_chip(x)):
            return False
        narrow = x.shape[-1] <= (64 if self.norm == "layernorm" else 96)
        return narrow and type_of_products(x).itemsize == 2 and fused_sums(x.device)

    def _reads_on_chip(self, x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]) -> bool:
        """Whether points that are summed in a kernel also read the sums in one."""
        return fused_lookup() and self._sums_on_chip(x, weights)


def _once(tables: Tables | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Cosines and sines of one sample, where all share them; or nothing where there are none."""
    if tables is None:
        return None, None
    cos, sin = (table[:1] if expanded(table) else table for table in tables)
    return cos, sin


def _with_bias(
    q: Float[Tensor, "batch queries heads width"],
    k: Float[Tensor, "batch points heads width"],
    weights: Float[Tensor, "batch points"],
) -> tuple[Float[Tensor, "batch queries heads padded"], Float[Tensor, "batch points heads padded"]]:
    """Queries and keys with channels more, whose product is √width log w: torch's fast kernels take no bias.

    Logarithms count from that of the largest weight, so that equal weights add exactly zero; in half precision their
    rounding errors have a channel of their own. A weight of zero has a quarter of the lowest number as its logarithm.
    """
    exact = weights.to(torch.promote_types(weights.dtype, torch.float32))
    share = torch.where(exact > 0, exact / exact.amax(-1, keepdim=True), 1.0)
    kind = type_of_products(k)
    logs = torch.where(exact > 0, share.log() * q.shape[-1] ** 0.5, torch.finfo(kind).min / 4)
    rounded = logs.to(kind)
    bias = torch.stack([rounded, (logs - rounded).to(kind)], -1).to(k.dtype)
    bias = F.pad(bias, (0, CHANNELS_FOR_BIAS - 2))[:, :, None]
    ones = F.pad(q.new_ones(2), (0, CHANNELS_FOR_BIAS - 2))
    return (
        torch.cat([q, ones.expand(*q.shape[:-1], -1)], -1),
        torch.cat([k, bias.expand(*k.shape[:-1], -1)], -1),
    )
