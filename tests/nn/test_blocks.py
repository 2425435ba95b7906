"""Blocks: where the norms and residuals sit, and which projections start diagonal-dominant."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oformer.nn.attention import KINDS, Attention
from oformer.nn.blocks import CrossAttentionBlock, SelfAttentionBlock
from oformer.nn.feedforward import MLP, GatedGELU
from oformer.nn.rotary import Rotary

pytestmark = pytest.mark.usefixtures("float64")

WIDTH = 8


def attention(kind: str = "galerkin", heads: int = 2, dropout: float = 0.0) -> Attention:
    return Attention(WIDTH, heads, kind, "channels", Rotary(2, WIDTH, 5.0), dropout)


def side(points: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, points, WIDTH), torch.rand(2, points, 2), torch.full((2, points), 1 / points)


def shaken(block: nn.Module) -> nn.Module:
    """Gains and shifts away from one and zero, so that a norm left out is seen."""
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return block


def gated(layer: GatedGELU, x: Tensor) -> Tensor:
    a, b = F.linear(x, layer.gate.weight, layer.gate.bias).chunk(2, -1)
    return F.linear(F.gelu(a) * b, layer.out.weight, layer.out.bias)


def plain(layer: MLP, x: Tensor) -> Tensor:
    first, second = layer.layers
    return F.linear(F.linear(x, first.weight, first.bias).relu(), second.weight, second.bias)


@pytest.mark.parametrize(("feedforward", "formula"), [("gated", gated), ("relu", plain)])
@pytest.mark.parametrize("layernorm", [False, True])
def test_self_attention_block_equals_its_formula(feedforward, formula, layernorm):
    block = shaken(SelfAttentionBlock(WIDTH, attention(), feedforward, layernorm))
    x, coords, weights = side(6)

    def norm(n: int, x: Tensor) -> Tensor:
        """The trunk itself is normalized: what is added to is the normalized x."""
        return F.layer_norm(x, (WIDTH,), block.norms[n].weight, block.norms[n].bias, 1e-5) if layernorm else x

    y = norm(0, x)
    y = y + block.attention(y, coords, weights)
    y = norm(1, y)
    y = y + formula(block.feedforward, y)
    torch.testing.assert_close(block(x, coords, weights), y, rtol=1e-12, atol=1e-12)


def test_relu_feedforward_has_biases_and_keeps_the_width():
    block = SelfAttentionBlock(WIDTH, attention(), "relu", layernorm=False)
    shapes = {name: tuple(p.shape) for name, p in block.feedforward.named_parameters()}
    assert shapes == {
        "layers.0.weight": (WIDTH, WIDTH),
        "layers.0.bias": (WIDTH,),
        "layers.1.weight": (WIDTH, WIDTH),
        "layers.1.bias": (WIDTH,),
    }


def test_cross_attention_block_equals_its_formula():
    block = shaken(CrossAttentionBlock(WIDTH, attention()))
    query, source = side(5), side(7)
    bare = CrossAttentionBlock(WIDTH, block.attention, feedforward=False)
    assert torch.equal(bare(*query, *source), query[0] + bare.attention(*query, *source))
    z = query[0] + block.attention(*query, *source)
    z = z + gated(block.feedforward, z)
    torch.testing.assert_close(block(*query, *source), z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feedforward", ["gated", "relu"])
def test_dropout_reaches_attention_and_feedforward_in_training_only(feedforward):
    inputs = side(6)
    for attention_dropout, block_dropout in ((0.5, 0.0), (0.0, 0.5)):
        block = SelfAttentionBlock(WIDTH, attention(dropout=attention_dropout), feedforward, False, block_dropout)
        assert not torch.allclose(block(*inputs), block(*inputs))
        block.eval()
        assert torch.equal(block(*inputs), block(*inputs))


def diagonal_dominant(projection: nn.Linear) -> list[bool]:
    """Head by head: is the matrix (orthogonal + identity) / width?"""
    eye = torch.eye(WIDTH)
    orthogonal = [matrix * WIDTH - eye for matrix in projection.weight.chunk(2)]
    return [torch.allclose(m @ m.T, eye, rtol=0, atol=1e-10) for m in orthogonal]


def has_default_start(weight: Tensor, fan_in: int) -> bool:
    """Uniform up to 1/sqrt(fan_in): bounded by it, and close to it somewhere."""
    bound = fan_in**-0.5
    return bool(0.8 * bound < weight.abs().max() <= bound)


@pytest.mark.parametrize(("kind", "raw"), [("galerkin", "q"), ("fourier", "v"), ("softmax", "v")])
def test_self_attention_starts_the_projection_diagonal_that_is_not_normalized(kind, raw):
    assert kind in KINDS
    block = SelfAttentionBlock(WIDTH, attention(kind), "gated", layernorm=True)
    for name in "qkv":
        projection = getattr(block.attention, name)
        assert diagonal_dominant(projection) == [name == raw] * 2
        assert has_default_start(projection.weight, WIDTH) == (name != raw)
    assert has_default_start(block.attention.out[0].weight, 2 * WIDTH)
    assert has_default_start(block.feedforward.gate.weight, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention_starts_all_projections_diagonal(kind):
    block = CrossAttentionBlock(WIDTH, attention(kind))
    for name in "qkv":
        assert diagonal_dominant(getattr(block.attention, name)) == [True, True]
    assert has_default_start(block.attention.out[0].weight, 2 * WIDTH)
