"""Attention as an integral over points (paper, section 3.1): three kinds behind one signature.

Every kind takes quadrature weights on both sides. A padded or dropped point has weight zero; a point split in two of
half the weight changes nothing. To add a kind, write a function here and name it in `KINDS`; the tests pick it up.

Differs: the paper normalizes the columns of K and V (Galerkin) or Q and K (Fourier) over the points of the domain. The
released code normalizes each point over its channels, because its InstanceNorm reads the axes the other way round; its
authors say that the paper's runs normalized over points with detached statistics. All are values of one option, `Norm`.

What happens to each point before the products is done on a GPU in one kernel (`attention_kernels.py`), where there is
one for the options chosen: norm, turn and weight, and the projection too where heads are not too wide. Where values are
formed, the sum over points is then taken on the chip as well (`attention_sums_kernels.py`). There self-attention is the
first half of a block in three kernels: its norm (`norm_kernels.py`), that sum, and what points read from it, with the
residual (`attention_lookup_kernels.py`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.gpu import constant_when_compiling, exporting, kernels_on, rounded_products, type_of_products
from oformer.nn.rotary import Rotary, Tables, expanded, once_per_grid
from oformer.nn.sums import over_points, points_are_split

Norm = Literal["points", "points-detached", "channels", "layernorm", "none"]
NORMS: tuple[Norm, ...] = get_args(Norm)
CHANNELS_FOR_BIAS = 8  # beside those of a head in softmax attention; fast kernels want multiples of eight
EPSILON = (
    1e-5  # of the released code; comparable with the variance of k and v in a fresh cross-attention, so it matters
)


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
        a, b = (factor.to(output.dtype) for factor in inputs)  # what autocast has rounded them to
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


def linear_product(
    layer: "Attention",
    q: Float[Tensor, "batch queries heads width"],
    k: Float[Tensor, "batch _ _ width"],
    v: Float[Tensor, "batch heads points width"] | None,
    source: Float[Tensor, "batch points width"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch queries width"]:
    """Q (Kᵀ W V) and the projection of the heads: linear in the number of points, small matrices first.

    Where V is a plain projection of the source, its matrix follows the sum over points; the projection of the heads
    precedes the product with Q. So no point ever holds the values or the results of all heads.

    Both factors of the sum carry the root of the weight: of many points, the weight itself would be lost in half
    precision. K and V come with it, and with the heads first; a K without V has the points first.
    """
    if v is not None:
        return looked_up(layer, q, sum_of_products(k, v))
    values = source * weights.sqrt()[:, :, None].to(source.dtype)
    seen = sum_of_products(k.flatten(2), values).unflatten(1, (layer.heads, -1))
    return looked_up(layer, q, seen @ layer.v.weight.unflatten(0, (layer.heads, -1)).mT)


def looked_up(
    layer: "Attention", q: Float[Tensor, "batch queries heads width"], seen: Float[Tensor, "batch heads width width"]
) -> Float[Tensor, "batch queries width"]:
    """The product of Q with the sums over points, and the projection of the heads, which comes first."""
    seen = joined(layer, seen)
    if expanded(q):  # one product with the matrices of all samples side by side
        mixed = (q[0].flatten(1) @ seen.transpose(0, 1).flatten(1)).unflatten(1, (seen.shape[0], -1)).transpose(0, 1)
    else:
        mixed = q.flatten(2) @ seen
    return answered(layer, mixed)


def joined(
    layer: "Attention", seen: Float[Tensor, "batch heads width width"]
) -> Float[Tensor, "batch heads_width width"]:
    """What each channel of each head reads, with the projection of the heads."""
    if isinstance(layer.out, nn.Identity):
        return seen[:, 0]
    weight = layer.out.get_parameter("0.weight")
    return (seen @ weight.unflatten(1, (layer.heads, -1)).permute(1, 2, 0)).flatten(1, 2)


def answered(layer: "Attention", mixed: Float[Tensor, "batch queries width"]) -> Float[Tensor, "batch queries width"]:
    """What is left of the projection of the heads: its bias and the dropout."""
    if isinstance(layer.out, nn.Identity):
        return mixed
    return layer.out[1](mixed + layer.out.get_parameter("0.bias"))


def softmax_product(
    layer: "Attention",
    q: Float[Tensor, "batch queries heads width"],
    k: Float[Tensor, "batch points heads width"],
    v: Float[Tensor, "batch points heads width"] | None,
    source: Float[Tensor, "batch points width"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch queries width"]:
    """softmax(Q Kᵀ/√width + log W) V and the projection of the heads; the logarithm makes the sum a quadrature."""
    if points_are_split():
        raise InputError(
            "a linear attention, galerkin or fourier, where points are split over processes",
            "softmax, which needs every pair of points",
            "Set model.attention, or split the samples",
        )
    assert v is not None  # this kind forms its values
    width, q_and_one, k_and_bias = q.shape[-1], *_with_bias(q, k, weights)
    v = F.pad(v, (0, CHANNELS_FOR_BIAS))  # torch's fast kernels need q, k and v of one width
    q, k, v = (x.transpose(1, 2) for x in (q_and_one, k_and_bias, v))
    mixed = F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)
    return layer.out(mixed.transpose(1, 2)[..., :width].flatten(2))


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


@dataclass(frozen=True)
class Kind:
    """A kind of attention: what it normalizes, and how it combines."""

    normalized: tuple[str, ...]  # of "q", "k", "v"
    product: "Callable[[Attention, Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]"
    forms_values: bool = True  # or does the product use that V is a plain projection of the source
    linear: bool = True  # whether the product is a sum over points, whose factors carry the root of the weight


AttentionKind = Literal["galerkin", "fourier", "softmax"]
KINDS: dict[AttentionKind, Kind] = {
    "galerkin": Kind(normalized=("k", "v"), product=linear_product),
    "fourier": Kind(normalized=("q", "k"), product=linear_product, forms_values=False),
    "softmax": Kind(normalized=("q", "k"), product=softmax_product, linear=False),
}


class Normalize(nn.Module):
    """One of the readings of the paper's normalization; see the head of this file."""

    def __init__(self, width: int, norm: Norm):
        """Build it for heads of the given width; only `layernorm` has parameters, shared by the heads."""
        super().__init__()
        self.width, self.norm = width, norm
        self.affine = nn.LayerNorm(width, eps=EPSILON) if norm == "layernorm" else None

    def forward(
        self, x: Float[Tensor, "batch points heads width"], weights: Float[Tensor, "batch points"]
    ) -> Float[Tensor, "batch points heads width"]:
        """Normalize over points (weighted, biased variance) or over channels; statistics in float32 or better."""
        if self.norm == "none":
            return x
        if self.affine is not None:
            return self.affine(x)
        if self.norm == "channels":
            return F.layer_norm(x, (self.width,), eps=EPSILON)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        w = weights[:, :, None, None].to(exact.dtype)
        mean = over_points((w * exact).sum(1, keepdim=True))
        variance = over_points((w * (exact - mean).square()).sum(1, keepdim=True))
        if self.norm == "points-detached":
            mean, variance = mean.detach(), variance.detach()
        return ((exact - mean) * torch.rsqrt(variance + EPSILON)).to(x.dtype)


class Part(NamedTuple):
    """What becomes of queries, keys or values between their projection and the product."""

    name: str  # q, k or v
    normalized: bool  # in one of the ways that have an effect
    turned: bool  # by the rotary encoding
    weighted: bool  # with the root of the quadrature weights
    heads_first: bool  # (batch, heads, points, width), contiguous; or (batch, points, heads, width)


@constant_when_compiling
def fused_arrangement(device: torch.device) -> bool:
    """Whether a device has the kernel that leads to the products."""
    return _fused_arrangement(device)


@constant_when_compiling
def fused_sums(device: torch.device) -> bool:
    """Whether such a device also sums over points in a kernel, which fills registers and memory of a Hopper GPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache  # apart from the above, since torch.compile would look through it and warn
def _fused_arrangement(device: torch.device) -> bool:
    return kernels_on(device, "oformer.nn.attention_kernels") is not None


class Attention(nn.Module):
    """Project, normalize, rotate, combine, and project back; every head is as wide as the model."""

    def __init__(
        self,
        width: int,
        heads: int,
        kind: AttentionKind,
        norm: Norm,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
    ):
        """Build the layer; with one head there is no output projection, as in the released code."""
        super().__init__()
        self.heads, self.norm = heads, norm
        self.kind: AttentionKind = kind
        self.q, self.k, self.v = (nn.Linear(width, heads * width, bias=False) for _ in range(3))
        self.normalize = nn.ModuleDict({name: Normalize(width, norm) for name in KINDS[kind].normalized})
        self.rotary = rotary
        self.out = nn.Sequential(nn.Linear(heads * width, width), nn.Dropout(dropout)) if heads > 1 else nn.Identity()

    @property
    def couples_queries(self) -> bool:
        """Whether the answer at one query depends on which other queries were asked."""
        return "q" in KINDS[self.kind].normalized and self.norm in ("points", "points-detached")

    def forward(
        self,
        x: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"] | None = None,
        source_coords: Float[Tensor, "batch points dim"] | None = None,
        source_weights: Float[Tensor, "batch points"] | None = None,
        residual: bool = False,
        norm: nn.Module | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Attend from `x` to `source`, or to `x` itself where no source is given.

        Where a norm is given, x goes through it first; with a residual, that is added in the end.
        """
        if source is None and self._sums_on_chip(x, weights):
            return self._attended_on_chip(x, coords, weights, residual, norm)
        x = x if norm is None else norm(x)
        answer = self._attended(x, coords, weights, source, source_coords, source_weights)
        return x + answer if residual else answer

    def _attended(
        self,
        x: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"] | None,
        source_coords: Float[Tensor, "batch points dim"] | None,
        source_weights: Float[Tensor, "batch points"] | None,
    ) -> Float[Tensor, "batch queries width"]:
        """The answer alone, where the points do not meet their sums in one kernel."""
        itself = source is None
        if source is None or source_coords is None or source_weights is None:
            source, source_coords, source_weights = x, coords, weights
        kind = KINDS[self.kind]
        of_source = ("k", "v") if kind.forms_values else ("k",)
        if itself:
            q, *others = self._project(("q", *of_source), x, coords, weights)
        else:
            (q,) = self._project(("q",), x, coords, weights)
            others = self._project(of_source, source, source_coords, source_weights)
        if len(others) < len(of_source):  # the sum over the points that are here, and neither keys nor values
            return looked_up(self, q, over_points(others[0]).to(q.dtype))
        k, v = others[0], others[1] if kind.forms_values else None
        return kind.product(self, q, k, v, source, source_weights)

    def _project(
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
        """What the kind of attention asks of queries, keys or values."""
        kind = KINDS[self.kind]
        weighted = kind.linear and name != "q"
        return Part(
            name,
            normalized=name in kind.normalized and self.norm != "none",
            turned=self.rotary is not None and name != "v",
            weighted=weighted,
            heads_first=weighted and kind.forms_values,
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
        """The same in one kernel, of x that is to be multiplied by a matrix or is projected already."""
        from oformer.nn.attention_kernels import arranged

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
        """The sum over points that keys and values are for."""
        from oformer.nn.attention_sums_kernels import summed

        return [summed(x, matrix, *self._of_points(parts, tables, weights), parts[-1].normalized, self._axes, EPSILON)]

    def _attended_on_chip(
        self,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
        residual: bool,
        norm: nn.Module | None,
    ) -> Float[Tensor, "batch points width"]:
        """What points read from the sums over themselves; a residual is added in the kernel that reads."""
        from oformer.nn.attention_lookup_kernels import looked_up
        from oformer.nn.norm_kernels import normalized

        kind, tables = type_of_products(x), None if self.rotary is None else self.rotary.tables(coords)
        if isinstance(norm, nn.LayerNorm) and x.dtype == torch.float32:
            x, summing, asking = normalized(x, norm.weight, norm.bias, norm.eps, kind)
        else:
            x = x if norm is None else norm(x)
            summing = asking = x.to(kind)
        matrix = torch.cat([self.k.weight, self.v.weight]).to(kind)
        (sums,) = self._summed_on_chip(summing, matrix, (self._part("k"), self._part("v")), tables, weights)
        seen = joined(self, over_points(sums).to(x.dtype)).to(kind)
        read = functools.partial(looked_up, asking, self.q.weight.to(kind), *_once(tables), seen, self._axes)
        if not residual:
            return answered(self, read())
        if isinstance(self.out, nn.Identity):
            return read(x.to(torch.promote_types(x.dtype, kind)))
        bias, dropout = self.out.get_parameter("0.bias"), self.out[1]
        share = dropout.p if dropout.training else 0.0
        if share == 1:  # nothing to scale up by
            return x + answered(self, read())
        seed = torch.randint(2**62, (1,), device=x.device) if share else None
        return read(x.to(torch.promote_types(x.dtype, bias.dtype)), bias, seed, share)

    @property
    def _axes(self) -> int:
        """How many coordinates the channels are shared out among."""
        return 1 if self.rotary is None else len(self.rotary.frequencies)

    def _of_points(
        self, parts: tuple[Part, ...], tables: Tables | None, weights: Float[Tensor, "batch points"]
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
        """What kernels take beside points and matrices: cosines, sines, roots of the weights, and gains of norms."""
        affine: list[Tensor] = [p for part in parts if part.normalized for p in self.normalize[part.name].parameters()]
        gains = torch.stack(affine).unflatten(0, (-1, 2)) if affine else None
        cos, sin = _once(tables)
        return cos, sin, weights.sqrt(), gains

    def _fits_on_chip(self, x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]) -> bool:
        """Whether there is a kernel for this layer and these tensors; it passes no gradient to the weights."""
        fits = KINDS[self.kind].linear and self.norm not in ("points", "points-detached")
        if not fits or x.shape[-1] % 2 or x.dtype == torch.float64 or weights.requires_grad:
            return False
        return not exporting() and fused_arrangement(x.device)

    def _projects_on_chip(self, x: Float[Tensor, "batch points width"]) -> bool:
        """Whether the kernel multiplies by the matrices as well, and again for the gradient.

        It needs tensor cores, which round. Up to 128 channels that is less work than writing the projection and reading
        it twice; wider heads do not fit into the registers. What all samples share is projected once for all.
        """
        rounded = type_of_products(x) != torch.float32 or rounded_products()
        return rounded and x.shape[-1] <= 128 and not expanded(x)

    @property
    def _is_galerkin(self) -> bool:
        """Whether the kind is the one that the kernel of sums computes: this very function, of normalized K and V.

        A kind of one's own is never replaced by the kernel, whatever its flags say.
        """
        kind = KINDS[self.kind]
        return kind.product is linear_product and kind.forms_values and kind.linear and kind.normalized == ("k", "v")

    def _sums_on_chip(self, x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]) -> bool:
        """Whether the kernel that multiplies also sums over points, and leaves neither keys nor values.

        The sum stays in registers, beside keys and values of 64 points. That is possible for factors of 16 bits and 96
        channels; or for 64, where norms have gains, whose gradients are sums as well.
        """
        if not (self._is_galerkin and self._fits_on_chip(x, weights) and self._projects_on_chip(x)):
            return False
        narrow = x.shape[-1] <= (64 if self.norm == "layernorm" else 96)
        return narrow and type_of_products(x).itemsize == 2 and fused_sums(x.device)

    @torch.no_grad()
    def initialize(self, names: tuple[str, ...]) -> None:
        """Make the named projections small and diagonal-dominant: (orthogonal + identity) / width for each head."""
        for name in names:
            projection: nn.Linear = getattr(self, name)
            for block in projection.weight.chunk(self.heads):
                diagonal_dominant_(block)


def _once(tables: Tables | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Cosines and sines of one sample, where all share them; or nothing where there are none."""
    if tables is None:
        return None, None
    cos, sin = (table[:1] if expanded(table) else table for table in tables)
    return cos, sin


@torch.no_grad()
def diagonal_dominant_(matrix: Float[Tensor, "width width"]) -> None:
    """Fill with (a random orthogonal matrix + the identity) / width, the paper's start for deep linear attention."""
    width = matrix.shape[0]
    nn.init.orthogonal_(matrix, gain=1 / width)
    matrix += torch.eye(width, dtype=matrix.dtype, device=matrix.device) / width
