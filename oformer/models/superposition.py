"""A transformer that is exactly linear in some of the input channels.

Many maps of physics are linear in a source, a load or an initial state f, and nonlinear in what is given beside it, a
material or a velocity a. Then the answer is a superposition,

    u(x) = Σ_j w_j G(x, y_j; a) f(y_j),

and a model of this form learns it from fewer samples than one that has to find the linearity by itself. Two streams run
side by side. The latents h see a and the coordinates, and pass through the encoder of OFormer; the carrier s starts
from f. Every operation on s is linear in s, with coefficients that h gives:

    s = s + W₂ (g(h) ⊙ W₁ s)                             at each point
    s_i = s_i + W Σ_j w_j (q(h_i) · k(h_j)) v(s_j)       between points: Galerkin attention whose values alone hold s

Differs: not in the paper. Its Galerkin attention is linear in the values; here nothing else touches f.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.models.base import MarchingModel, ModelConfig
from oformer.nn.attention import EPSILON, Attention, galerkin
from oformer.nn.blocks import SelfAttentionBlock
from oformer.nn.features import RandomFourier
from oformer.nn.feedforward import MLP, in_full
from oformer.nn.interpolation import interpolate
from oformer.nn.rotary import Rotary


@dataclass(frozen=True)
class SuperpositionConfig(ModelConfig):
    """The model, complete: with a `Spec` it is enough to build one."""

    linear: tuple[int, ...] = (0,)  # input channels in which the answer is linear, all of them together
    width: int = 48
    depth: int = 2  # blocks of the latents, and attentions of the carrier
    heads: int = 4  # of the attention from queries to input points
    modes: int = 16  # frequencies of the rotary encoding along each axis
    sigma: float = 2.0  # scale of the random waves that encode the queries
    steps: int = 2  # point-wise maps that advance the carrier by one frame, for a problem in time

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "modes", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` of at least 1", str(getattr(self, name)))
        if not self.linear or len(set(self.linear)) < len(self.linear):
            raise InputError("`linear`: different input channels, at least one", str(self.linear))

    def build(self, spec: Spec) -> "Superposition":
        """The model for a problem."""
        return Superposition(self, spec)


class Gated(nn.Module):
    """s + W₂ (g(h) ⊙ W₁ s), linear in the carrier s, with coefficients from the latents h."""

    def __init__(self, width: int):
        """Build it for latents and carriers of one width."""
        super().__init__()
        self.coefficients = nn.Linear(width, 2 * width)
        self.into, self.out = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(
        self, s: Float[Tensor, "batch points width"], h: Float[Tensor, "batch points width"]
    ) -> Float[Tensor, "batch points width"]:
        """The carrier behind the map."""
        return in_full(s) + self.out(self.coefficients(F.gelu(h)) * self.into(s))


class Carry(nn.Module):
    """Galerkin attention whose queries and keys come from the latents and whose values come from the carrier."""

    def __init__(self, width: int, heads: int, rotary: Rotary):
        """Build it; every head is as wide as the model."""
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q, self.k, self.v = (nn.Linear(width, heads * width, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * width, width, bias=False)

    def forward(
        self,
        h: Float[Tensor, "batch queries width"],
        coords: Float[Tensor, "batch queries dim"],
        weights: Float[Tensor, "batch queries"],
        source: Float[Tensor, "batch points width"],
        source_coords: Float[Tensor, "batch points dim"],
        source_weights: Float[Tensor, "batch points"],
        carrier: Float[Tensor, "batch points width"],
    ) -> Float[Tensor, "batch queries width"]:
        """Take the carrier from the source points to those of `h`."""
        q, k = self._rotated(self.q(h), coords), self._rotated(self.k(source), source_coords)
        v = self.v(carrier).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        moved = galerkin(q / math.sqrt(q.shape[-1]), k, v, weights, source_weights)
        return self.out(moved.transpose(1, 2).flatten(2))

    def _rotated(
        self, x: Float[Tensor, "batch points both"], coords: Float[Tensor, "batch points dim"]
    ) -> Float[Tensor, "batch heads points width"]:
        """Queries or keys, normalized in each head and rotated."""
        heads = x.unflatten(-1, (self.heads, -1))
        heads = F.layer_norm(heads, heads.shape[-1:], eps=EPSILON)
        return self.rotary(heads, self.rotary.tables(coords)).transpose(1, 2)


class Superposition(MarchingModel):
    """The model, on normalized fields: u = T(a) f, where f are the channels `linear` and a all others."""

    config: SuperpositionConfig

    def __init__(self, config: SuperpositionConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__()
        self.config, self.spec = config, spec
        c, width = config, config.width
        if not all(0 <= channel < spec.in_channels for channel in c.linear):
            raise InputError(f"`linear`: input channels from 0 to {spec.in_channels - 1}", str(c.linear))
        if spec.in_categories or spec.query_categories:
            raise InputError(f"a problem without codes of categories for {self.name}", "one with", "Train an OFormer")
        rotary = Rotary(spec.dim, width, 1.0, "uniform", modes=c.modes)
        others = spec.in_times * (spec.in_channels - len(c.linear))

        # Input points
        self.lift = MLP((others + spec.dim, width, width), "gelu", bias=True, last_bias=True)
        self.carry_in = nn.Linear(spec.in_times * len(c.linear), width, bias=False)
        self.first = Gated(width)
        self.blocks = nn.ModuleList(
            SelfAttentionBlock(width, Attention(width, 1, "galerkin", "channels", rotary), "gated", layernorm=True)
            for _ in range(c.depth)
        )
        self.carries = nn.ModuleList(Carry(width, 1, rotary) for _ in range(c.depth))
        self.gates = nn.ModuleList(Gated(width) for _ in range(c.depth))

        # Queries
        self.waves = RandomFourier(spec.dim, width, c.sigma)
        self.embed = MLP((2 * width + spec.query_channels, width, width), "gelu", bias=True, last_bias=True)
        self.cross = Carry(width, c.heads, rotary)
        self.after = Gated(width)

        # Time, and values
        self.steps = nn.ModuleList(Gated(width) for _ in range(c.steps if spec.out_times > 1 else 0))
        self.last = Gated(width)
        self.values = nn.Linear(width, spec.out_channels, bias=False)

    @property
    def queries_independent(self) -> bool:
        """Yes: queries read from input points alone."""
        return True

    @property
    def linear_channels(self) -> tuple[int, ...]:
        """The input channels in which the answer is linear."""
        return self.config.linear

    @property
    def needs_all_points(self) -> str | None:
        """What needs all points of a sample at once."""
        return f"{self.name}, whose queries read the nearest points"

    @property
    def needs_period(self) -> bool:
        """Whether it counts on coordinates that have the period of its spec: the nearest points may lie across it."""
        return self.spec.periods is not None

    @property
    def steady(self) -> bool:
        """Whether it has no steps in time."""
        return not len(self.steps)

    def pieces(self) -> Sequence[nn.Module]:
        """The blocks of the latents."""
        return list(self.blocks)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters at the input points, and those at the queries."""
        names = ("lift", "carry_in", "first", "blocks", "carries", "gates")
        encoder = [p for n, p in self.named_parameters() if n.split(".")[0] in names]
        decoder = [p for n, p in self.named_parameters() if n.split(".")[0] not in names]
        return {"encoder": encoder, "decoder": decoder}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """All matrices but those that see raw values or make final ones."""
        outer = {id(m.weight) for m in (self.lift.layers[0], self.carry_in, self.embed.layers[0], self.values)}
        return [p for p in self.parameters() if p.ndim == 2 and id(p) not in outer]

    def encode(self, input: Field) -> Float[Tensor, "batch points both"]:
        """Latents and carrier at the input points, side by side."""
        linear = list(self.config.linear)
        others = [channel for channel in range(self.spec.in_channels) if channel not in linear]
        values = input.values.movedim(1, 2)
        a, f = values[..., others].flatten(2), values[..., linear].flatten(2)
        h = in_full(self.lift(torch.cat([a, input.coords.to(a.dtype)], -1)))
        for block in self.blocks:
            h = block(h, input.coords, input.weights)
        s = self.first(self.carry_in(f), h)
        here = h, input.coords, input.weights
        for carry, gate in zip(self.carries, self.gates, strict=True):
            s = gate(s + carry(*here, *here, s), h)
        return torch.cat([h, s], -1)

    def start(
        self, latents: Float[Tensor, "batch points both"], input: Field, query: Field
    ) -> tuple[Float[Tensor, "batch queries width"], Float[Tensor, "batch queries width"]]:
        """The carrier at the queries at the time of the input, and their latents, which are the same at all times."""
        features = torch.cat([self.waves(query.coords), query.values[:, 0].to(query.coords.dtype)], -1)
        found = latents
        if query.coords is not input.coords:
            found = interpolate(latents, input.coords, input.weights, query.coords, self.spec.periods)
        h, s = latents.chunk(2, -1)
        nearest, s_here = found.chunk(2, -1)
        z = in_full(self.embed(features)) + nearest
        moved = self.cross(z, query.coords, query.weights, h, input.coords, input.weights, s)
        return self.after(s_here + moved, z), z

    def step(
        self, z: Float[Tensor, "batch queries width"], context: Float[Tensor, "batch queries width"]
    ) -> tuple[Float[Tensor, "batch queries width"], Float[Tensor, "batch queries channels"]]:
        """The carrier one time step later (a steady problem keeps it), and the values there."""
        for gate in self.steps:
            z = gate(z, context)
        return z, in_full(self.values(self.last(z, context)))
