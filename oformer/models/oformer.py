"""OFormer: encode the input points, query anywhere, march in latent time, decode each point (paper, section 3).

One class serves the six problem families of the paper; what differs between them is configuration. The layouts of the
released code, down to the number of parameters, are the recipes of `oformer/experiments/recipes.py`.

Differs from the paper, as the released code does: propagator and decoder see the coordinates again, the propagator has
a pre-norm and a residual, some encoders end in two layers, and irregular problems let the queries talk to each other
once ("mixing").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.models.base import MarchingModel, ModelConfig
from oformer.nn.attention import KINDS, Attention, AttentionKind, Norm, Start, diagonal_dominant_
from oformer.nn.blocks import CrossAttentionBlock, FeedForward, SelfAttentionBlock
from oformer.nn.features import RandomFourier
from oformer.nn.feedforward import ACTIVATIONS, MLP, Activation, in_full
from oformer.nn.interpolation import interpolate
from oformer.nn.rotary import Appended, Frequencies, Rotary
from oformer.nn.shared_grids import once_per_grid

ContextName = Literal["coords", "features"]


@dataclass(frozen=True)
class Encoder:
    """From input values to latents at the input points."""

    width: int = 96
    depth: int = 4
    heads: int = 1
    layernorm: bool = True  # on the trunk, before attention and before the feed-forward
    feedforward: FeedForward = "gated"
    multipliers: tuple[float, ...] = (32.0,)  # of the rotary angles, one per block (the last one repeats)
    coords_as_features: bool = True  # give the coordinates to the lift, beside the values
    append_coords: bool = False  # and once more, unlifted, in place of the last channels of the width
    lift_layers: int = 1
    lift_activation: Activation = "gelu"
    bottom_layers: int = 1  # linear layers (ReLU between) from the trunk to the latent width
    long_skip: bool = False  # LayerNorm(output + lifted input) before the bottom
    lift_dropout: float = 0.0
    dropout: float = 0.0  # after the attention's output projection and in the feed-forward


@dataclass(frozen=True)
class Query:
    """From query points to latents at the query points."""

    width: int = 96  # of the latents that cross-attention reads and writes
    fourier_features: int = 96  # random waves; 0: the coordinates themselves
    sigma: float = 2.0  # the scale of the waves
    activation_first: bool = False  # GELU on the features before the first layer
    hidden: tuple[int, ...] = (96,)
    heads: int = 4
    multiplier: float = 32.0
    source_dropout: float = 0.0
    feedforward: bool = True  # after cross-attention; without it, and without a propagator, this is a DeepONet
    local: bool = False  # before cross-attention, add the latents of the input, interpolated at the query point
    mixing: bool = False  # one self-attention among the queries afterwards
    mixing_multiplier: float = 32.0


@dataclass(frozen=True)
class Propagator:
    """Residual point-wise networks that advance the latents by one time step. Depth 0: a steady problem."""

    depth: int = 1
    width: int | None = None  # None: that of the query; otherwise a linear layer leads there
    expand_bias: bool = False
    layers: int = 3  # linear layers in each network
    layernorm: bool = False
    context: tuple[ContextName, ...] = ()
    diagonal_start: bool = False
    reencode: int | None = None  # after this many frames, encode the rollout's own answer as the next input


@dataclass(frozen=True)
class Decoder:
    """From latents to values, point by point."""

    hidden: tuple[int, ...] = (48,)
    activation: Activation = "gelu"
    layernorm: bool = False
    context: tuple[ContextName, ...] = ()
    trunk: tuple[int, ...] = ()  # layers shared by the heads
    trunk_gain: float | None = None  # Xavier gain of the trunk's start; None: torch's default start
    heads: tuple[int, ...] = ()  # output channels of each head; empty: one head for all


@dataclass(frozen=True)
class OFormerConfig(ModelConfig):
    """An OFormer, complete: with a `Spec` it is enough to build one."""

    attention: AttentionKind = "galerkin"
    norm: Norm = "channels"
    start: Start = "orthogonal-scaled"  # of projections that are not normalized, and of cross-attention
    position: Literal["rotary", "appended"] = "rotary"  # appended: coordinates beside the channels of q and k
    rotary: Frequencies = "ladder"
    rotary_modes: int = 32  # of integer frequencies
    encoder: Encoder = Encoder()
    query: Query = Query()
    propagator: Propagator = Propagator(layernorm=True)
    decoder: Decoder = Decoder()

    def __post_init__(self) -> None:
        for name, value in (("encoder.width", self.encoder.width), ("query.width", self.query.width)):
            if value < 2 or value % 2:
                raise InputError(f"an even `{name}`", str(value), "Rotary encoding turns channels in pairs")
        if self.encoder.depth < 1 or not self.encoder.multipliers:
            raise InputError("an encoder of at least one block with a multiplier", f"depth {self.encoder.depth}")

    def build(self, spec: Spec) -> "OFormer":
        """The model for a problem."""
        return OFormer(self, spec)


class Context(NamedTuple):
    """Coordinates and features of the query points that the networks see beside latents, the same at all times."""

    propagator: Float[Tensor, "batch queries _"] | None
    decoder: Float[Tensor, "batch queries _"] | None


class OFormer(MarchingModel):
    """The model, on normalized fields; `Operator` in `models/operator.py` wraps it for physical units.

    z = query(encode(input), input, query)      latents at the query points, at the time of the input
    z = propagate(z);  u = decode(z)            latents and values at each time after it
    """

    config: OFormerConfig
    steps: Sequence[MLP]
    heads: Sequence[MLP]

    def __init__(self, config: OFormerConfig, spec: Spec):
        """Build all layers for a problem of the given shape."""
        super().__init__()
        self.config, self.spec = config, spec
        # Layers that turn alike share what turns them: a compiler then sees that their tables are the same.
        self._rotaries: dict[tuple[int, float], Rotary] = {}
        e, q, p, d = config.encoder, config.query, config.propagator, config.decoder
        if spec.out_times > 1 and p.depth < 1:
            raise InputError("a propagator for a problem in time", "depth 0", "Set propagator.depth to 1 or more")
        if p.reencode is not None:
            _check_reencoding(p.reencode, spec)

        # Encoder
        numbers = spec.in_times * (spec.in_channels - bool(spec.in_categories)) + spec.dim * e.coords_as_features
        lifted = e.width - spec.dim * e.append_coords
        self.lift = MLP((numbers, *[e.width] * (e.lift_layers - 1), lifted), e.lift_activation)
        self.input_code = nn.Embedding(spec.in_categories, e.width) if spec.in_categories else None
        self.join_input_code = nn.Linear(2 * e.width, e.width, bias=False) if spec.in_categories else None
        self.lift_dropout = nn.Dropout(e.lift_dropout)
        multipliers = [*e.multipliers, *[e.multipliers[-1]] * e.depth][: e.depth]
        self.blocks = nn.ModuleList(
            SelfAttentionBlock(
                e.width,
                self._attention(e.width, e.heads, m, e.dropout),
                e.feedforward,
                e.layernorm,
                e.dropout,
            )
            for m in multipliers
        )
        self.skip_norm = nn.LayerNorm(e.width) if e.long_skip else None
        self.bottom = MLP((*[e.width] * e.bottom_layers, q.width), "relu")

        # Query encoder
        self.waves = RandomFourier(spec.dim, q.fourier_features, q.sigma) if q.fourier_features else None
        self.query_code = nn.Embedding(spec.query_categories, q.width) if spec.query_categories else None
        self.join_query_code = nn.Linear(2 * q.width, q.width, bias=False) if spec.query_categories else None
        flags = spec.query_channels - bool(spec.query_categories)
        features = 2 * q.fourier_features or spec.dim
        self.embed_query = MLP((features + flags, *q.hidden, q.width), "gelu")
        self.source_dropout = nn.Dropout(q.source_dropout)
        self.cross = CrossAttentionBlock(q.width, self._attention(q.width, q.heads, q.multiplier), q.feedforward)
        self.mix = self._attention(q.width, 1, q.mixing_multiplier) if q.mixing else None

        # Propagator
        width = p.width or q.width
        self.expand = nn.Linear(q.width, width, bias=p.expand_bias) if p.width is not None else nn.Identity()
        sizes = {"coords": spec.dim, "features": flags + (q.width if spec.query_categories else 0)}
        context = sum(sizes[name] for name in p.context)
        self.steps = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            MLP((width,) * (p.layers + 1), "gelu", context=context) for _ in range(p.depth)
        )
        self.step_norms = nn.ModuleList(nn.LayerNorm(width) if p.layernorm else nn.Identity() for _ in range(p.depth))

        # Decoder
        context = sum(sizes[name] for name in d.context)
        self.decode_norm = nn.LayerNorm(width) if d.layernorm else nn.Identity()
        heads = d.heads or (spec.out_channels,)
        if sum(heads) != spec.out_channels:
            raise InputError(f"decoder heads that sum to {spec.out_channels} channels", str(heads))
        self.trunk = MLP((width, *d.trunk), d.activation, context=context) if d.trunk else None
        top = d.trunk[-1] if d.trunk else width
        self.heads = nn.ModuleList(  # pyright: ignore[reportAttributeAccessIssue]
            MLP((top, *d.hidden, n), d.activation, context=0 if d.trunk else context, last_bias=True, exact_last=True)
            for n in heads
        )
        self._initialize()

    def _attention(self, width: int, heads: int, multiplier: float, dropout: float = 0.0) -> Attention:
        c = self.config
        if c.position == "appended":
            return Attention(width, heads, c.attention, c.norm, Appended(), dropout, c.start)
        if (width, multiplier) not in self._rotaries:
            rotary = Rotary(self.spec.dim, width, multiplier, c.rotary, self.spec.periods, c.rotary_modes)
            self._rotaries[width, multiplier] = rotary
        return Attention(width, heads, c.attention, c.norm, self._rotaries[width, multiplier], dropout, c.start)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Everything not set here or in `nn.blocks` keeps torch's default start."""
        if self.mix is not None:
            self.mix.initialize(tuple(n for n in "qkv" if n not in self.mix.normalize))
        if self.config.propagator.diagonal_start:
            for step in self.steps:
                for layer in step.layers:
                    diagonal_dominant_(layer.weight)
        if self.trunk is not None and self.config.decoder.trunk_gain is not None:
            for layer in self.trunk.layers:
                nn.init.xavier_uniform_(layer.weight, gain=self.config.decoder.trunk_gain)

    @property
    def queries_independent(self) -> bool:
        """Whether a query's answer is the same whichever other queries are asked with it."""
        return self.mix is None and not self.cross.attention.couples_queries

    @property
    def compares_pairs(self) -> bool:
        """Whether its time grows with the number of pairs of points."""
        return not KINDS[self.config.attention].linear

    @property
    def needs_all_points(self) -> str | None:
        """What needs all points of a sample at once, in words; None if they may pass in chunks."""
        if self.compares_pairs:
            return f"{self.config.attention} attention, which compares every pair of points"
        return "query.local, which reads the nearest points" if self.config.query.local else None

    @property
    def needs_period(self) -> bool:
        """Whether it counts on coordinates that have the period of its spec."""
        return self.config.rotary == "integer" or (self.config.query.local and self.spec.periods is not None)

    @property
    def frames_per_encoding(self) -> int | None:
        """After how many frames a rollout encodes its own answer as the next input."""
        return self.config.propagator.reencode

    def pieces(self) -> Sequence[nn.Module]:
        """The blocks."""
        return [*self.blocks, self.cross]

    @property
    def steady(self) -> bool:
        """Whether it has no propagator."""
        return not self.steps

    def hidden_matrices(self) -> list[nn.Parameter]:
        """All matrices but the first of the lift, the last of the heads, and tables of codes."""
        outer = [self.lift.layers[0].weight, *(head.layers[-1].weight for head in self.heads)]
        if self.waves is None:
            outer.append(self.embed_query.layers[0].weight)
        outer += [table.weight for table in (self.input_code, self.query_code) if table is not None]
        left_out = {id(p) for p in outer}
        return [p for p in self.parameters() if p.ndim == 2 and id(p) not in left_out]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters before and after the latents, which the released code clips separately."""
        names = ("lift", "input_code", "join_input_code", "blocks", "skip_norm", "bottom")
        encoder = [p for n, p in self.named_parameters() if n.split(".")[0] in names]
        decoder = [p for n, p in self.named_parameters() if n.split(".")[0] not in names]
        return {"encoder": encoder, "decoder": decoder}

    def encode(self, input: Field) -> Float[Tensor, "batch points width"]:
        """Latents at the input points."""
        values = input.values
        codes = None
        if self.input_code is not None:
            codes = self.input_code(values[:, 0, :, -1].round().long())
            values = values[..., :-1]
        features = values.permute(0, 2, 1, 3).flatten(2)
        if self.config.encoder.coords_as_features:
            features = torch.cat([features, input.coords.to(features.dtype)], -1)
        x = self.lift(features)
        if self.config.encoder.append_coords:
            x = torch.cat([x, input.coords.to(x.dtype)], -1)
        if codes is not None and self.join_input_code is not None:
            x = self.join_input_code(torch.cat([x, codes], -1))
        lifted = x = in_full(self.lift_dropout(x))
        for block in self.blocks:
            x = block(x, input.coords, input.weights)
        if self.skip_norm is not None:
            x = self.skip_norm(x + lifted)
        return self.bottom(x)

    def query(
        self, latents: Float[Tensor, "batch points width"], input: Field, query: Field
    ) -> Float[Tensor, "batch queries expanded"]:
        """Latents at the query points, at the time of the input."""
        z = once_per_grid(in_full, self._embed(query))
        source = self.source_dropout(latents)
        if self.config.query.local:
            z = z + self.latents_at(query, latents, input)
        z = self.cross(z, query.coords, query.weights, source, input.coords, input.weights)
        if self.mix is not None:
            z = z + self.mix(z, query.coords, query.weights)
        return in_full(self.expand(z))

    def latents_at(
        self, query: Field, latents: Float[Tensor, "batch points width"], input: Field
    ) -> Float[Tensor, "batch queries width"]:
        """Latents of the input at the query points: those of the points themselves where these are the queries."""
        if query.coords is input.coords:
            return latents
        return interpolate(latents, input.coords, input.weights, query.coords, self.spec.periods)

    def context(self, query: Field) -> Context:
        """The coordinates and features of the query points that propagator and decoder ask for."""
        propagator, decoder = (self._chosen(query, c.context) for c in (self.config.propagator, self.config.decoder))
        return Context(propagator, decoder)

    def propagate(
        self, z: Float[Tensor, "batch queries width"], context: Context
    ) -> Float[Tensor, "batch queries width"]:
        """Latents one time step later; a steady problem has no propagator and keeps its latents."""
        for norm, network in zip(self.step_norms, self.steps, strict=True):
            z = z + network(norm(z), context.propagator)
        return z

    def decode(
        self, z: Float[Tensor, "batch queries width"], context: Context
    ) -> Float[Tensor, "batch queries channels"]:
        """Values at the query points, from latents of any one time."""
        z, beside = self.decode_norm(z), context.decoder
        if self.trunk is not None:
            z, beside = self.trunk(z, beside), None
        return torch.cat([head(z, beside) for head in self.heads], -1)

    def start(
        self, latents: Float[Tensor, "batch points width"], input: Field, query: Field
    ) -> tuple[Float[Tensor, "batch queries expanded"], Context]:
        """Latents at the query points at the time of the input, and the context of all steps."""
        return self.query(latents, input, query), self.context(query)

    def step(
        self, z: Float[Tensor, "batch queries width"], context: Context
    ) -> tuple[Float[Tensor, "batch queries width"], Float[Tensor, "batch queries channels"]]:
        """Latents one step later, and the values there."""
        z = self.propagate(z, context)
        return z, self.decode(z, context)

    def _features(self, query: Field) -> Tensor | None:
        """The query's own features: flags as they are, a code through its embedding."""
        values = query.values[:, 0]
        if self.query_code is None:
            return values if values.shape[-1] else None
        code = self.query_code(values[..., -1].round().long())
        return torch.cat([values[..., :-1], code], -1)

    def _chosen(self, query: Field, names: tuple[ContextName, ...]) -> Float[Tensor, "batch queries _"] | None:
        """The named properties of the query points side by side."""
        parts = {"coords": query.coords, "features": self._features(query)}
        chosen = [parts[name] for name in names if parts[name] is not None]
        # One part alone stays as it is: a grid shared by all samples is not copied for each.
        return (chosen[0] if len(chosen) == 1 else torch.cat(chosen, -1)) if chosen else None

    def _embed(self, query: Field) -> Float[Tensor, "batch queries width"]:
        """Query points before they have seen any input; computed once where the batch shares its queries."""
        numbers = query.values[:, 0, :, : self.spec.query_channels - bool(self.spec.query_categories)]
        if not numbers.shape[-1]:
            z = once_per_grid(self._embed_numbers, query.coords)
        else:
            z = self._embed_numbers(query.coords, numbers)
        if self.query_code is not None and self.join_query_code is not None:
            code = self.query_code(query.values[:, 0, :, -1].round().long())
            z = self.join_query_code(torch.cat([z, code], -1))
        return z

    def _embed_numbers(self, coords: Tensor, numbers: Tensor | None = None) -> Tensor:
        features = coords if self.waves is None else self.waves(coords)
        if numbers is not None:
            features = torch.cat([features, numbers], -1)
        if self.config.query.activation_first:
            features = ACTIVATIONS["gelu"](features)
        return self.embed_query(features)


def _check_reencoding(frames: int, spec: Spec) -> None:
    """Refuse to encode answers of a problem whose answers are no inputs."""
    if frames < 1:
        raise InputError("`propagator.reencode` of at least 1 frame", str(frames), "Leave it out to encode once")
    same = spec.in_channels == spec.out_channels and not spec.in_categories and not spec.query_channels
    if spec.out_times < 2 or not same:
        raise InputError(
            "a problem in time whose answer has the channels of its input, for propagator.reencode",
            f"{spec.in_channels} channels in, {spec.out_channels} out, {spec.query_channels} query features, "
            f"{spec.out_times} frame(s) to predict",
            "Leave propagator.reencode out",
        )
