"""Attention as an integral over points (paper, section 3.1): three kinds, each a short function, and one table.

With queries q_i, keys k_j and values v_j at points of quadrature weight w_j, and heads of width d:

    galerkin    u_i = Σ_j w_j (q_i · k_j) v_j = q_i · (Σ_j w_j k_j ⊗ v_j)                      K and V normalized
    fourier     the sum of galerkin                                                           Q and K normalized
    softmax     u_i = Σ_j w_j exp(q_i · k_j / √d) v_j / Σ_j w_j exp(q_i · k_j / √d)           Q and K normalized

A padded or dropped point has weight zero; a point split in two of half the weight changes nothing. To add a kind, write
a function here and name it in `KINDS`; configurations, the command line and the tests pick it up.

Differs: the paper normalizes the columns of K and V (Galerkin) or Q and K (Fourier) over the points of the domain. The
released code normalizes each point over its channels, because its InstanceNorm reads the axes the other way round; its
authors say that the paper's runs normalized over points with detached statistics. All are values of one option, `Norm`.

What stands here is what runs. `oformer/engine` computes the same faster, for exactly these functions and no others.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from oformer.errors import InputError
from oformer.nn.rotary import Appended, Rotary
from oformer.nn.sums import over_points, points_are_split

Norm = Literal["points", "points-detached", "channels", "layernorm", "none"]
NORMS: tuple[Norm, ...] = get_args(Norm)
# How a projection starts: a random matrix alone, or "scaled", (the matrix + the identity) / width.
Start = Literal["orthogonal-scaled", "xavier-scaled", "orthogonal", "xavier"]
# Of the released code. It is comparable with the variance of k and v in a fresh cross-attention, so it matters.
EPSILON = 1e-5


def galerkin(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch heads points width"],
    v: Float[Tensor, "batch heads points values"],
    query_weights: Float[Tensor, "batch queries"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch heads queries values"]:
    """Q (Kᵀ W V), in time linear in the number of points."""
    # Both factors carry the root of the weight: half precision would lose the weight itself where points are many.
    root = weights.sqrt()[:, None, :, None].to(k.dtype)
    return q @ over_points((k * root).mT @ (v * root))


def fourier(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch heads points width"],
    v: Float[Tensor, "batch heads points values"],
    query_weights: Float[Tensor, "batch queries"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch heads queries values"]:
    """(Q Kᵀ) W V; the product is associative, so the sum over points comes first here too."""
    return galerkin(q, k, v, query_weights, weights)


def softmax(
    q: Float[Tensor, "batch heads queries width"],
    k: Float[Tensor, "batch heads points width"],
    v: Float[Tensor, "batch heads points values"],
    query_weights: Float[Tensor, "batch queries"],
    weights: Float[Tensor, "batch points"],
) -> Float[Tensor, "batch heads queries values"]:
    """softmax(Q Kᵀ / √width + log W) V; the logarithm makes the sum a quadrature."""
    if points_are_split():
        raise InputError(
            "a linear attention, galerkin or fourier, where points are split over processes",
            "softmax, which needs every pair of points",
            "Set model.attention, or split the samples",
        )
    # Relative to the largest weight, so that equal weights add exactly zero; a weight of zero adds minus infinity.
    share = weights / weights.amax(-1, keepdim=True)
    bias = torch.where(share > 0, share, 1.0).log().masked_fill(share <= 0, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None].to(q.dtype))


@dataclass(frozen=True)
class Kind:
    """A kind of attention: how it combines queries, keys and values, and which of them it normalizes before."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (q, k, v, query_weights, weights) -> values
    normalized: tuple[str, ...]  # of "q", "k", "v"
    linear: bool = False  # whether points feel each other through sums alone, which may be completed in parts


AttentionKind = Literal["galerkin", "fourier", "softmax"]
KINDS: dict[AttentionKind, Kind] = {
    "galerkin": Kind(galerkin, normalized=("k", "v"), linear=True),
    "fourier": Kind(fourier, normalized=("q", "k"), linear=True),
    "softmax": Kind(softmax, normalized=("q", "k")),
}


def all_derivatives(layer: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Within it, torch's softmax attention has second derivatives and forward mode, outside of training.

    torch's fast kernels have first derivatives in reverse mode alone; its plain products hold all pairs of points.
    """
    if layer.training or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


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
        if self.norm == "points-detached" and self.training:  # in use, derivatives are those of the answer
            mean, variance = mean.detach(), variance.detach()
        return ((exact - mean) * torch.rsqrt(variance + EPSILON)).to(x.dtype)


class Attention(nn.Module):
    """Project, normalize, rotate, attend, and project back; every head is as wide as the model."""

    def __init__(
        self,
        width: int,
        heads: int,
        kind: AttentionKind,
        norm: Norm,
        rotary: Rotary | Appended | None = None,
        dropout: float = 0.0,
        start: Start = "orthogonal-scaled",
    ):
        """Build the layer; with one head there is no output projection, as in the released code."""
        super().__init__()
        self.heads, self.norm = heads, norm
        self.start: Start = start
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
        if source is None or source_coords is None or source_weights is None:
            source, source_coords, source_weights = x, coords, weights
        q = self._project("q", x, coords, weights)
        k, v = (self._project(name, source, source_coords, source_weights) for name in ("k", "v"))
        with all_derivatives(self):
            values = KINDS[self.kind].attend(q, k, v, weights, source_weights)
        return self.out(values.transpose(1, 2).flatten(2))

    def _project(
        self,
        name: str,
        x: Float[Tensor, "batch points width"],
        coords: Float[Tensor, "batch points dim"],
        weights: Float[Tensor, "batch points"],
    ) -> Float[Tensor, "batch heads points _"]:
        """Queries, keys or values: projected, normalized where the kind asks for it, and rotated unless values."""
        heads = self.get_submodule(name)(x).unflatten(-1, (self.heads, -1))
        if name in self.normalize:
            heads = self.normalize[name](heads, weights)
        if self.rotary is not None and name != "v":
            heads = self.rotary(heads, self.rotary.tables(coords))
        return heads.transpose(1, 2)

    @torch.no_grad()
    def initialize(self, names: tuple[str, ...]) -> None:
        """Start the named projections, head by head; by default small and diagonal-dominant."""
        for name in names:
            projection: nn.Linear = getattr(self, name)
            for block in projection.weight.chunk(self.heads):
                diagonal_dominant_(block, self.start)


@torch.no_grad()
def diagonal_dominant_(matrix: Float[Tensor, "width width"], start: Start = "orthogonal-scaled") -> None:
    """Fill with (a random orthogonal matrix + the identity) / width, the paper's start for deep linear attention.

    The other starts, which the paper compares with it, draw Xavier's uniform matrix, or add and divide nothing.
    """
    width, scaled = matrix.shape[0], start.endswith("scaled")
    draw = nn.init.orthogonal_ if start.startswith("orthogonal") else nn.init.xavier_uniform_
    draw(matrix, gain=1 / width if scaled else 1.0)
    if scaled:
        matrix += torch.eye(width, dtype=matrix.dtype, device=matrix.device) / width
