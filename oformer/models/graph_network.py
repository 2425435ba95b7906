"""A graph network with Chebyshev convolutions (Defferrard et al., NeurIPS 2016) at the points of a triangle mesh: the
baseline of the electro- and magnetostatics problems (Lötzsch et al., "Learning the solution operator of boundary value
problems using graph neural networks", 2022).

Points are nodes. Along each edge of the mesh, node j sends its latent to node i, and node i adds what it receives:

    (M x)_i = - Σ_j d_ij x_j / √(D_i D_j),    D_i = Σ_j d_ij,

with the length d_ij of the edge; M is the scaled Laplacian of the graph, L - 1. A convolution of order K mixes the
results of 0 to K - 1 such steps in the Chebyshev polynomials T_k of M:

    T_0 = x,  T_1 = M x,  T_k = 2 M T_(k-1) - T_(k-2);    x' = ReLU( b + Σ_k W_k T_k ).

Before the convolutions two linear layers, each with ReLU, act on each node; after them two with ReLU between. Values
are answered at the nodes alone: a graph network has no answer between points.

The published layout, 9 channels in, width 128, 3 convolutions of order 5, has 280,835 trainable numbers. It does not
read the coordinates, which are the first two of the problem's 11 channels (`skipped`).

Differs: the published network is given the edges of the mesh. A model here sees points, values and weights, so that
edges are rebuilt from the points (`mesh_edges`): all edges of this package's meshes are found, and a false one across
each inner corner is added (docs/decisions.md). In evaluation the released code counts inner edges twice; here each edge
counts once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.models.base import ModelConfig, OperatorModel
from oformer.nn.feedforward import MLP, in_full

SHEAR = 1e-3  # of the points before triangulation, which cuts all squares of a grid along the same diagonal
# Triangles whose circumscribed circle has a radius above this multiple of the local distance of points are no part of
# a mesh: they fill holes and notches. On this package's meshes 1.0 to 1.2 leaves out no triangle of the mesh, and
# keeps of the others one or two at each inner corner.
TOO_LARGE = 1.2
MESHES = 1024  # whose edges are cached


@dataclass(frozen=True)
class GraphNetworkConfig(ModelConfig):
    """A graph network, complete: with a `Spec` it is enough to build one."""

    width: int = 128
    depth: int = 3  # convolutions
    order: int = 5  # Chebyshev polynomials in each: messages travel order - 1 edges
    skipped: int = 0  # leading input channels that are not read: where they are the coordinates

    def __post_init__(self) -> None:
        for name in ("width", "depth", "order"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` of at least 1", str(getattr(self, name)))
        if self.skipped < 0:
            raise InputError("`skipped` of zero or more channels", str(self.skipped))

    def build(self, spec: Spec) -> "GraphNetwork":
        """The model for a problem."""
        return GraphNetwork(self, spec)


class Graph(NamedTuple):
    """The edges of all samples of a batch, each in both directions, between nodes counted through the batch."""

    senders: Int[Tensor, "edges"]
    receivers: Int[Tensor, "edges"]
    factors: Float[Tensor, "edges"]  # of the messages

    def received(self, x: Float[Tensor, "batch points width"]) -> Float[Tensor, "batch points width"]:
        """M x: the sum of the messages that each node receives."""
        nodes = x.flatten(0, 1)
        messages = self.factors[:, None].to(x.dtype) * nodes[self.senders]
        return torch.zeros_like(nodes).index_add(0, self.receivers, messages).view_as(x)


class ChebyshevConvolution(nn.Module):
    """b + Σ_k W_k T_k(M) x; the matrices W_k stand side by side in one linear layer."""

    def __init__(self, width: int, order: int):
        """Draw each matrix as Xavier has it; the bias starts at zero."""
        super().__init__()
        self.order = order
        self.mix = nn.Linear(order * width, width)
        nn.init.zeros_(self.mix.bias)
        for matrix in self.mix.weight.chunk(order, 1):
            nn.init.xavier_uniform_(matrix)

    def forward(self, x: Float[Tensor, "batch points width"], graph: Graph) -> Float[Tensor, "batch points width"]:
        """Latents at the same nodes."""
        terms = [x]
        for k in range(1, self.order):
            passed = graph.received(terms[-1])
            terms.append(passed if k == 1 else 2 * passed - terms[-2])
        return self.mix(torch.cat(terms, -1))


class GraphNetwork(OperatorModel):
    """The model. Works on normalized fields; `Operator` in `models/operator.py` wraps it for physical units.

    Edges come from a library on the CPU, and their number differs between batches, so that steps can neither be
    compiled as one graph nor recorded: on a GPU, train it with `compile=False` and `capture=False`.
    """

    config: GraphNetworkConfig

    def __init__(self, config: GraphNetworkConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__()
        self.config, self.spec = config, spec
        _check_problem(config, spec)
        numbers, width = spec.in_times * (spec.in_channels - config.skipped), config.width
        self.encoder = MLP((numbers, width, width), "relu", bias=True, last_bias=True)
        self.convolutions = nn.ModuleList(ChebyshevConvolution(width, config.order) for _ in range(config.depth))
        self.decoder = MLP((width, width, spec.out_channels), "relu", bias=True, last_bias=True, exact_last=True)

    @property
    def answers_anywhere(self) -> bool:
        """No."""
        return False

    def pieces(self) -> Sequence[nn.Module]:
        """The convolutions."""
        return list(self.convolutions)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters before and after the latents."""
        encoder = [*self.encoder.parameters(), *self.convolutions.parameters()]
        return {"encoder": encoder, "decoder": list(self.decoder.parameters())}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """All matrices but the first and the last."""
        outer = {id(self.encoder.layers[0].weight), id(self.decoder.layers[-1].weight)}
        return [p for p in self.parameters() if p.ndim == 2 and id(p) not in outer]

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that do not span the plane, and queries elsewhere."""
        self.check_queries(input, query)
        for coords, weights in zip(input.coords, input.weights, strict=True):
            _edges(coords[weights > 0].detach().double().cpu())

    def encode(self, input: Field) -> Float[Tensor, "batch points width"]:
        """Latents at the nodes."""
        features = input.values[..., self.config.skipped :].permute(0, 2, 1, 3).flatten(2)
        # torch's compiler does not follow the library that makes triangles.
        make = torch.compiler.disable(graph_of) if torch.compiler.is_compiling() else graph_of
        graph = make(input.coords, input.weights)  # pyright: ignore[reportCallIssue]
        x = F.relu(self.encoder(features))
        for convolution in self.convolutions:
            x = F.relu(convolution(x, graph))
        return in_full(x)

    def answer(
        self, latents: Float[Tensor, "batch points width"], input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch one queries channels"]:
        """Values at the nodes."""
        self.check_queries(input, query)
        if times not in (None, 1):
            raise InputError("one frame of a steady problem", f"times={times}")
        return self.decoder(latents).unsqueeze(1)


def graph_of(coords: Float[Tensor, "batch points dim"], weights: Float[Tensor, "batch points"]) -> Graph:
    """The graph of a batch; points of weight zero have no edges.

    Args:
        coords: of the points; factors are differentiable by them.
        weights: of quadrature.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "steps that are not recorded as CUDA graphs for GraphNetwork, whose edges come from the CPU",
            "training.capture",
            "Set training.capture to false",
        )
    places, exist = coords.detach().double().cpu(), weights.detach().cpu() > 0
    found = []
    for sample, (points, here) in enumerate(zip(places, exist, strict=True)):
        rows = here.nonzero()[:, 0]
        found.append(sample * len(points) + rows[_edges(points[here])])
    edges = torch.cat(found).to(coords.device)
    senders, receivers = torch.cat([edges, edges.flip(1)]).unbind(1)
    flat = coords.flatten(0, 1)
    length = (flat[senders] - flat[receivers]).square().sum(-1).sqrt()
    total = torch.zeros_like(flat[:, 0]).index_add(0, receivers, length)
    return Graph(senders, receivers, -length * (total[senders] * total[receivers]).rsqrt())


def mesh_edges(points: Float[np.ndarray, "points 2"]) -> Int[np.ndarray, "edges 2"]:
    """The edges of the triangle mesh that the points seem to be of, each once, the smaller index first.

    Delaunay triangles fill the convex hull of the points. Those that lie in holes and notches, and flat ones along a
    straight border, have circumscribed circles that are large beside the distances between points, and are left out.
    Four points on a circle, as in the squares of a grid, could be cut both ways: the points are sheared by a thousandth
    before, so that all squares are cut from lower left to upper right, in whatever order the points come.
    """
    from scipy.spatial import Delaunay, KDTree, QhullError

    sheared = np.stack([points[:, 0] - SHEAR * points[:, 1], points[:, 1]], 1)
    try:
        triangles = Delaunay(sheared).simplices
    except (QhullError, ValueError):
        raise InputError(
            "points that span a plane for GraphNetwork, which joins them to triangles",
            f"{len(points):,} points that do not",
            "Give all points of the mesh",
        ) from None
    a, b, c = points[triangles].swapaxes(0, 1)
    sides = [np.hypot(*side.T) for side in (b - c, c - a, a - b)]
    twice_area = np.abs((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0])
    nearest = KDTree(points).query(points, 2)[0][:, 1]
    # Of the radius, the product of the sides over four areas, without a division by zero for flat triangles.
    kept = np.prod(sides, 0) < 2 * twice_area * TOO_LARGE * nearest[triangles].max(1)
    pairs = np.concatenate([triangles[kept][:, pair] for pair in ([0, 1], [1, 2], [2, 0])]).astype(np.int64)
    return np.unique(np.sort(pairs, 1), axis=0)


def _edges(points: Float[Tensor, "points 2"]) -> Int[Tensor, "edges 2"]:
    """`mesh_edges` of points on the CPU in float64, computed once for each mesh."""
    return torch.from_numpy(_edges_of_bytes(points.numpy().tobytes()))


@functools.lru_cache(MESHES)
def _edges_of_bytes(points: bytes) -> Int[np.ndarray, "edges 2"]:
    return mesh_edges(np.frombuffer(points).reshape(-1, 2))


def _check_problem(config: GraphNetworkConfig, spec: Spec) -> None:
    """Refuse problems that the published model has no place for."""
    name = "GraphNetwork"
    if spec.dim != 2 or spec.periods is not None:
        found = f"{spec.dim} axes" + " with a period" * (spec.periods is not None)
        raise InputError(f"a problem in the plane, without a period, for {name}", found, "Train an OFormer")
    if spec.out_times > 1:
        raise InputError(f"a steady problem for {name}", f"{spec.out_times} frames", "Train an OFormer")
    if spec.in_categories:
        found = f"{spec.in_categories} categories in the input"
        raise InputError(f"values alone at the points of a problem for {name}", found, "Train an OFormer")
    if config.skipped >= spec.in_channels:
        raise InputError(
            f"a channel that {name} reads: `skipped` below the {spec.in_channels} of the input", str(config.skipped)
        )
