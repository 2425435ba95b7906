"""Attention as an integral over points (paper, section 3.1): three kinds behind one signature.

Every kind takes quadrature weights on both sides. A padded or dropped point has weight zero; a point split in two of
half the weight changes nothing. To add a kind, write a function here and name it in `KINDS`; the tests pick it up.

Differs: the paper normalizes the columns of K and V (Galerkin) or Q and K (Fourier) over the points of the domain. The
released code normalizes each point over its channels, because its InstanceNorm reads the axes the other way round; its
authors say that the paper's runs normalized over points with detached statistics. All are values of one option, `Norm`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.nn.rotary import Rotary, expanded, once_per_grid
from oformer.nn.sums import over_points, points_are_split

Norm = Literal["points", "points-detached", "channels", "layernorm", "none"]
NORMS: tuple[Norm, ...] = get_args(Norm)
EPSILON = (
    1e-5  # of the released code; comparable with the variance of k and v in a fresh cross-attention, so it matters
)


def linear_product(
    layer: "Attention",
    q: Float[Tensor, "batch queries heads width"],
    k: Float[Tensor, "batch points heads width"],
    v: Float[Tensor, "batch points heads width"] | None,
    source: Float[Tensor, "batch points width"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch queries width"]:
    """Q (Kᵀ W V) and the projection of the heads: linear in the number of points, small matrices first.

    Where V is a plain projection of the source, its matrix follows the sum over points; the projection of the heads
    precedes the product with Q. So no point ever holds the values or the results of all heads.
    """
    heads = layer.heads
    # Both factors get the root of the weight: of many points, the weight itself would be lost in half precision.
    root = weights.sqrt()[:, :, None]
    k = k * root[..., None].to(k.dtype)
    if v is not None:
        v = v * root[..., None].to(v.dtype)
        seen = over_points(k.permute(0, 2, 3, 1) @ v.transpose(1, 2))
    else:
        seen = over_points(k.flatten(2).mT @ (source * root.to(source.dtype))).unflatten(1, (heads, -1))
        seen = seen @ layer.v.weight.unflatten(0, (heads, -1)).mT
    if isinstance(layer.out, nn.Identity):
        return q[:, :, 0] @ seen[:, 0]
    projection, dropout = layer.out
    assert isinstance(projection, nn.Linear)
    seen = (seen @ projection.weight.unflatten(1, (heads, -1)).permute(1, 2, 0)).flatten(1, 2)
    if expanded(q):  # one product with the matrices of all samples side by side
        mixed = (q[0].flatten(1) @ seen.transpose(0, 1).flatten(1)).unflatten(1, (seen.shape[0], -1)).transpose(0, 1)
    else:
        mixed = q.flatten(2) @ seen
    return dropout(mixed + projection.bias)


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
    bias = weights.log()[:, None, None, :].to(q.dtype)
    bias = bias.expand(q.shape[0], 1, q.shape[1], -1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return layer.out(mixed.transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Kind:
    """A kind of attention: what it normalizes, and how it combines."""

    normalized: tuple[str, ...]  # of "q", "k", "v"
    product: "Callable[[Attention, Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]"
    forms_values: bool = True  # or does the product use that V is a plain projection of the source


AttentionKind = Literal["galerkin", "fourier", "softmax"]
KINDS: dict[AttentionKind, Kind] = {
    "galerkin": Kind(normalized=("k", "v"), product=linear_product),
    "fourier": Kind(normalized=("q", "k"), product=linear_product, forms_values=False),
    "softmax": Kind(normalized=("q", "k"), product=softmax_product),
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
    ) -> Float[Tensor, "batch queries width"]:
        """Attend from `x` to `source`, or to `x` itself where no source is given."""
        itself = source is None
        if source is None or source_coords is None or source_weights is None:
            source, source_coords, source_weights = x, coords, weights
        kind = KINDS[self.kind]
        of_source = ("k", "v") if kind.forms_values else ("k",)
        if itself:
            q, *others = self._project(("q", *of_source), x, weights)
        else:
            (q,) = self._project(("q",), x, weights)
            others = self._project(of_source, source, source_weights)
        k, v = others[0], others[1] if kind.forms_values else None
        if self.rotary is not None:
            tables = self.rotary.tables(coords)
            q = self.rotary(q, tables)
            k = self.rotary(k, tables if itself else self.rotary.tables(source_coords))
        return kind.product(self, q, k, v, source, source_weights)

    def _project(
        self, names: tuple[str, ...], x: Float[Tensor, "batch points width"], weights: Float[Tensor, "batch points"]
    ) -> list[Float[Tensor, "batch points heads width"]]:
        """Queries, keys or values of the points, in one product; each normalized where the kind asks for it."""
        matrix = torch.cat([getattr(self, name).weight for name in names])
        shared = expanded(x) and expanded(weights)  # one grid for all samples: everything is done once
        points, weights = (x[:1], weights[:1]) if shared else (x, weights)

        def heads(points: Tensor) -> Tensor:
            return F.linear(points, matrix).unflatten(-1, (len(names), self.heads, -1))

        found = []
        for name, part in zip(names, once_per_grid(heads, points).unbind(2), strict=True):
            part = self.normalize[name](part, weights) if name in self.normalize else part
            found.append(part.expand(x.shape[0], *part.shape[1:]) if shared else part)
        return found

    @torch.no_grad()
    def initialize(self, names: tuple[str, ...]) -> None:
        """Make the named projections small and diagonal-dominant: (orthogonal + identity) / width for each head."""
        for name in names:
            projection: nn.Linear = getattr(self, name)
            for block in projection.weight.chunk(self.heads):
                diagonal_dominant_(block)


@torch.no_grad()
def diagonal_dominant_(matrix: Float[Tensor, "width width"]) -> None:
    """Fill with (a random orthogonal matrix + the identity) / width, the paper's start for deep linear attention."""
    width = matrix.shape[0]
    nn.init.orthogonal_(matrix, gain=1 / width)
    matrix += torch.eye(width, dtype=matrix.dtype, device=matrix.device) / width
