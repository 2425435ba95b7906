"""Attention is a sum over points with weights: it equals that sum written out, and only the sum matters."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oformer.engine.swap import accelerate
from oformer.nn.attention import (
    KINDS,
    NORMS,
    Attention,
    AttentionKind,
    Normalize,
    diagonal_dominant_,
)
from oformer.nn.rotary import Appended, Rotary

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, DIM, MULTIPLIER = 8, 2, 3.0
# Written out and not read from the library: what each kind normalizes.
NORMALIZED = {"galerkin": "kv", "fourier": "qk", "softmax": "qk"}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_norm = pytest.mark.parametrize("norm", NORMS)
itself_or_source = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])


def attention(kind: str, norm: str, heads: int = 2) -> Attention:
    layer = Attention(WIDTH, heads, kind, norm, Rotary(DIM, WIDTH, MULTIPLIER))
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))  # also the gains of an affine norm, which start as ones
    return layer


def points(count: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Random values, places and weights."""
    weights = torch.rand(batch, count) + 0.2
    return torch.randn(batch, count, WIDTH), torch.rand(batch, count, DIM), weights / weights.sum(-1, keepdim=True)


def operands(cross: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [points(5), points(7)] if cross else [points(6)]


def call(layer: Attention, sides: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    return layer(*[tensor for side in sides for tensor in side])


def explicit_norm(x: Tensor, weights: Tensor, norm: str, affine: nn.Module | None) -> Tensor:
    """The norms for a single sample and head, (points, width)."""
    if norm == "none":
        return x
    if norm in ("points", "points-detached"):
        mean = sum(w * row for w, row in zip(weights, x, strict=True))
        variance = sum(w * (row - mean) ** 2 for w, row in zip(weights, x, strict=True))
        return (x - mean) / torch.sqrt(variance + 1e-5)
    centred = x - x.mean(1, keepdim=True)
    x = centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5)
    return x * affine.weight + affine.bias if norm == "layernorm" else x


def with_heads_first(layer: Normalize, x: Tensor, weights: Tensor) -> Tensor:
    """Of vectors (batch, heads, points, width)."""
    return layer(x.transpose(1, 2), weights).transpose(1, 2)


def explicit_rotation(x: Tensor, coords: Tensor) -> Tensor:
    """Channels l and l + half of each axis are one complex number, turned by its own angle."""
    blocks = []
    for axis, block in enumerate(x.chunk(DIM, -1)):
        size = block.shape[-1]
        number = torch.complex(block[:, : size // 2], block[:, size // 2 :])
        theta = torch.tensor([10000.0 ** (-2 * l / size) for l in range(size // 2)])  # noqa: E741
        number = number * torch.exp(1j * MULTIPLIER * coords[:, axis : axis + 1] * theta)
        blocks += [number.real, number.imag]
    return torch.cat(blocks, -1)


def explicit(layer: Attention, kind: str, norm: str, sides: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Sample by sample, head by head, with the whole matrix of products."""
    (x, coords, weights), (source, source_coords, source_weights) = sides[0], sides[-1]
    samples = []
    for b in range(x.shape[0]):
        heads = []
        for h in range(layer.heads):
            rows = slice(h * WIDTH, (h + 1) * WIDTH)
            parts = {
                "q": x[b] @ layer.q.weight[rows].T,
                "k": source[b] @ layer.k.weight[rows].T,
                "v": source[b] @ layer.v.weight[rows].T,
            }
            for name in NORMALIZED[kind]:
                w = weights[b] if name == "q" else source_weights[b]
                parts[name] = explicit_norm(parts[name], w, norm, layer.normalize[name].affine)
            q = explicit_rotation(parts["q"], coords[b])
            k = explicit_rotation(parts["k"], source_coords[b])
            if kind == "softmax":
                scores = torch.exp(q @ k.T / math.sqrt(WIDTH)) * source_weights[b]
                scores = scores / scores.sum(1, keepdim=True)
            else:
                scores = (q @ k.T) * source_weights[b]
            heads.append(scores @ parts["v"])
        samples.append(torch.cat(heads, -1))
    mixed = torch.stack(samples)
    return mixed if layer.heads == 1 else mixed @ layer.out[0].weight.T + layer.out[0].bias


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_kinds_and_norms_are_the_ones_that_can_be_configured():
    assert tuple(KINDS) == get_args(AttentionKind)
    assert {name: "".join(kind.normalized) for name, kind in KINDS.items()} == NORMALIZED
    assert NORMS == ("points", "points-detached", "channels", "layernorm", "none")


@each_kind
@each_norm
@itself_or_source
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_the_sum_written_out(kind, norm, cross, heads):
    layer, sides = attention(kind, norm, heads), operands(cross)
    result = call(layer, sides)
    assert result.abs().max() > 1e-3
    close(result, explicit(layer, kind, norm, sides))


@each_kind
@each_norm
@itself_or_source
def test_padding_changes_nothing(kind, norm, cross):
    layer, sides = attention(kind, norm), operands(cross)
    padded = []
    for n, (x, coords, weights) in enumerate(sides):
        extra = 3 + n
        padded.append(
            (
                torch.cat([x, 1e3 * torch.randn(2, extra, WIDTH)], 1),
                torch.cat([coords, 50 * torch.randn(2, extra, DIM)], 1),
                torch.cat([weights, torch.zeros(2, extra)], 1),
            )
        )
    close(call(layer, padded)[:, : sides[0][0].shape[1]], call(layer, sides))


@each_kind
@each_norm
@itself_or_source
def test_order_of_the_points_changes_nothing(kind, norm, cross):
    layer, sides = attention(kind, norm), operands(cross)
    orders = [torch.randperm(side[0].shape[1]) for side in sides]
    shuffled = [tuple(t[:, order] for t in side) for side, order in zip(sides, orders, strict=True)]
    close(call(layer, shuffled), call(layer, sides)[:, orders[0]])


@each_kind
@each_norm
@itself_or_source
def test_splitting_a_point_changes_nothing(kind, norm, cross):
    layer, sides = attention(kind, norm), operands(cross)
    split = []
    for x, coords, weights in sides:
        halved = weights.clone()
        halved[:, 0] /= 2
        split.append(tuple(torch.cat([t, t[:, :1]], 1) for t in (x, coords, halved)))
    result = call(layer, split)
    close(result[:, :-1], call(layer, sides))
    close(result[:, -1], result[:, 0])


@each_kind
@itself_or_source
def test_unequal_weights_count(kind, cross):
    """The tests above would pass if weights were only a mask; here one point is heavier."""
    layer, sides = attention(kind, "channels"), operands(cross)
    x, coords, weights = sides[-1]
    other = weights.flip(1)
    assert (call(layer, [*sides[:-1], (x, coords, other)]) - call(layer, sides)).abs().max() > 1e-3


@each_kind
@each_norm
def test_only_differences_of_coordinates_matter(kind, norm):
    layer, sides = attention(kind, norm), operands(cross=True)
    shift = torch.tensor([0.7, -11.0])
    moved = [(x, coords + shift, weights) for x, coords, weights in sides]
    close(call(layer, moved), call(layer, sides))
    apart = [sides[0], moved[1]]
    assert (call(layer, apart) - call(layer, sides)).abs().max() > 1e-3


@each_kind
@each_norm
def test_couples_queries_where_other_queries_change_an_answer(kind, norm):
    layer, (few, source) = attention(kind, norm), operands(cross=True)
    # The weights of a smaller question are those of a smaller quadrature: they sum to one again.
    part = few[0][:, :2], few[1][:, :2], few[2][:, :2] / few[2][:, :2].sum(1, keepdim=True)
    moved = (call(layer, [part, source]) - call(layer, [few, source])[:, :2]).abs().max()
    assert layer.couples_queries == bool(moved > 1e-6)
    assert layer.couples_queries == (kind in ("fourier", "softmax") and norm in ("points", "points-detached"))
    if not layer.couples_queries:
        assert moved < 1e-12


@each_norm
def test_norms_equal_their_formulas(norm):
    layer = Normalize(WIDTH, norm)
    for p in layer.parameters():
        nn.init.normal_(p)
    x = 0.01 * torch.randn(2, 3, 6, WIDTH) + 0.5  # a spread small enough for epsilon to matter
    weights = points(6)[2]
    expected = torch.stack(
        [
            torch.stack([explicit_norm(head, w, norm, layer.affine) for head in sample])
            for sample, w in zip(x, weights, strict=True)
        ]
    )
    close(with_heads_first(layer, x, weights), expected)
    assert len(list(layer.parameters())) == (2 if norm == "layernorm" else 0)


def test_channel_norm_is_a_layer_norm_without_parameters():
    x, weights = torch.randn(2, 3, 6, WIDTH), points(6)[2]
    close(with_heads_first(Normalize(WIDTH, "channels"), x, weights), nn.LayerNorm(WIDTH, elementwise_affine=False)(x))


def test_point_norm_has_mean_zero_and_spread_one_under_its_weights():
    x, weights = 5 * torch.randn(2, 3, 6, WIDTH) + 3, points(6)[2]
    result = with_heads_first(Normalize(WIDTH, "points"), x, weights)
    close(torch.einsum("bhnc,bn->bhc", result, weights), torch.zeros(2, 3, WIDTH))
    spread = torch.einsum("bhnc,bn->bhc", result**2, weights)
    torch.testing.assert_close(spread, torch.ones(2, 3, WIDTH), rtol=0, atol=1e-4)


@each_kind
@each_norm
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_trained_layer_has_all_derivatives_that_differences_have(kind, norm, fused):
    """First and second ones by values, coordinates and weights. In training some statistics are taken as constants."""
    layer = attention(kind, norm).eval()
    if fused:
        accelerate(nn.Sequential(layer))
    given = [tensor.requires_grad_() for side in (points(2, 1), points(3, 1)) for tensor in side]
    assert torch.autograd.gradcheck(layer, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, given, fast_mode=True)


def test_detached_statistics_give_the_same_values_and_pass_no_gradient():
    x, weights = torch.randn(2, 3, 6, WIDTH, requires_grad=True), points(6)[2]
    direction = torch.randn(2, 3, 6, WIDTH)
    attached, detached = (
        with_heads_first(Normalize(WIDTH, "points"), x, weights),
        with_heads_first(Normalize(WIDTH, "points-detached"), x, weights),
    )
    close(detached, attached)
    (through,) = torch.autograd.grad((attached * direction).sum(), x)
    (around,) = torch.autograd.grad((detached * direction).sum(), x)

    w = weights[:, None, :, None]
    mean = (w * x).sum(2, keepdim=True)
    inverse = ((w * (x - mean) ** 2).sum(2, keepdim=True) + 1e-5) ** -0.5
    close(around, direction * inverse.detach())
    # The whole derivative of a weighted norm, by hand: a shift and a stretch of all points have none.
    normalized = ((x - mean) * inverse).detach()
    moved = (
        direction - w * direction.sum(2, keepdim=True) - w * normalized * (direction * normalized).sum(2, keepdim=True)
    )
    close(through, inverse.detach() * moved)
    assert (through - around).abs().max() > 0.1


@pytest.mark.parametrize("norm", ["points", "channels"])
def test_statistics_of_half_precision_are_taken_in_float32(norm):
    x = (100 + torch.randn(2, 1, 500, WIDTH)).bfloat16()
    weights = torch.full((2, 500), 1 / 500)
    result = with_heads_first(Normalize(WIDTH, norm), x, weights.float())
    assert result.dtype == torch.bfloat16
    exact = with_heads_first(Normalize(WIDTH, norm), x.double(), weights)
    # The answer's own rounding, 2^-9, and no more.
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=2e-3)


def test_one_head_has_no_output_projection():
    one, two = attention("galerkin", "channels", 1), attention("galerkin", "channels", 2)
    assert {name for name, _ in one.named_parameters()} == {"q.weight", "k.weight", "v.weight"}
    shapes = {name: tuple(p.shape) for name, p in two.named_parameters()}
    assert shapes == {
        "q.weight": (2 * WIDTH, WIDTH),
        "k.weight": (2 * WIDTH, WIDTH),
        "v.weight": (2 * WIDTH, WIDTH),
        "out.0.weight": (WIDTH, 2 * WIDTH),
        "out.0.bias": (WIDTH,),
    }


def test_dropout_follows_the_output_projection_and_only_there():
    layer = Attention(WIDTH, 2, "galerkin", "channels", dropout=0.5)
    side = points(200)
    noisy, clean = layer(*side), layer.eval()(*side)
    kept = noisy != 0
    assert 0.4 < kept.double().mean() < 0.6
    close(noisy[kept], 2 * clean[kept])
    single = Attention(WIDTH, 1, "galerkin", "channels", dropout=0.5)
    close(single(*side), single.eval()(*side))


@each_kind
def test_a_grid_shared_by_the_batch_gives_the_same_values_and_gradients(kind):
    layer = attention(kind, "points")
    z, coords, weights = points(5, batch=1)
    source = points(7, batch=3)
    shared = [(z.expand(3, -1, -1), coords.expand(3, -1, -1), weights.expand(3, -1)), source]
    copied = [(z.repeat(3, 1, 1), coords.repeat(3, 1, 1), weights.repeat(3, 1)), source]
    close(call(layer, shared), call(layer, copied))
    gradients = [
        torch.autograd.grad(call(layer, sides).square().sum(), list(layer.parameters())) for sides in (shared, copied)
    ]
    for one, other in zip(*gradients, strict=True):
        close(one, other)


def is_diagonal_dominant(matrix: Tensor) -> bool:
    """(orthogonal + identity) / width."""
    width = matrix.shape[0]
    orthogonal = matrix * width - torch.eye(width)
    return torch.allclose(orthogonal @ orthogonal.T, torch.eye(width), rtol=0, atol=1e-10)


@each_kind
def test_appended_coordinates_add_their_product_to_every_score(kind):
    layer = Attention(WIDTH, 1, kind, "none", Appended())
    (x, coords, weights), (source, places, measures) = points(5), points(7)
    q, k, v = layer.q(x), layer.k(source), layer.v(source)
    scores = q @ k.mT + coords @ places.mT
    if kind == "softmax":
        shares = measures[:, None] * torch.exp(scores / math.sqrt(WIDTH + DIM))
        expected = shares @ v / shares.sum(-1, keepdim=True)
    else:
        expected = (scores * measures[:, None]) @ v
    assert torch.allclose(layer(x, coords, weights, source, places, measures), expected)


def test_the_paper_s_other_starts():
    def started(start):
        matrix = torch.empty(64, 64)
        diagonal_dominant_(matrix, start)
        return matrix

    one = torch.eye(64)
    matrix = started("orthogonal")
    assert torch.allclose(matrix @ matrix.T, one)
    bound = math.sqrt(6 / (64 + 64))
    for matrix in (started("xavier"), 64 * started("xavier-scaled") - one):
        assert 0.95 * bound < matrix.abs().max() <= bound
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_diagonal_dominant_is_orthogonal_plus_identity_by_the_width():
    matrix = torch.empty(12, 12)
    diagonal_dominant_(matrix)
    assert is_diagonal_dominant(matrix)
    assert not torch.allclose(matrix * 12 - torch.eye(12), torch.eye(12))


def test_initialize_changes_the_named_projections_head_by_head():
    layer = Attention(WIDTH, 3, "galerkin", "channels")
    before = {name: getattr(layer, name).weight.clone() for name in "qkv"}
    layer.initialize(("q", "v"))
    for name in "qv":
        heads = getattr(layer, name).weight.chunk(3)
        assert all(is_diagonal_dominant(head) for head in heads)
        assert not torch.allclose(heads[0], heads[1])
    assert torch.equal(layer.k.weight, before["k"])


def test_without_rotary_coordinates_do_not_matter():
    layer = Attention(WIDTH, 2, "galerkin", "channels")
    x, coords, weights = points(6)
    close(layer(x, coords, weights), layer(x, torch.rand_like(coords), weights))


def test_softmax_of_equal_scores_is_the_weighted_mean():
    layer = Attention(WIDTH, 1, "softmax", "none")
    nn.init.zeros_(layer.q.weight)
    x, coords, weights = points(6)
    mean = (weights[..., None] * F.linear(x, layer.v.weight)).sum(1, keepdim=True)
    close(layer(x, coords, weights), mean.expand_as(x))
