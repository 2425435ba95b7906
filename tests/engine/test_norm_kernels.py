"""The norm before self-attention against the plain one. Without a GPU, Triton's interpreter runs the kernels."""

import pytest
import torch
from torch import Tensor, nn

from oformer.engine import attention
from oformer.engine.attention import FusedAttention
from oformer.engine.blocks import FusedSelfAttentionBlock
from oformer.nn.rotary import Rotary
from tests.engine.test_attention_kernels import BATCH, DEVICE, close, quadrature
from tests.engine.test_feedforward_kernels import POINTS, norm_of, points
from tests.forked import printed

kernels = pytest.importorskip("oformer.engine.kernels.norm_kernels", exc_type=ImportError)
lookup_kernels = pytest.importorskip("oformer.engine.kernels.attention_lookup_kernels", exc_type=ImportError)
sums_kernels = pytest.importorskip("oformer.engine.kernels.attention_sums_kernels", exc_type=ImportError)

WIDTHS = (16, 24, 96)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Blocks of a few points, of which the last is not full, and programs with several of them."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_TILE", 256)
        monkeypatch.setattr(lookup_kernels, "_ROWS", 16)
        monkeypatch.setattr(sums_kernels, "_ROWS", 16)
    monkeypatch.setattr(kernels, "_PROGRAMS", 5)


def fused(x: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return kernels.normalized(x, norm.weight, norm.bias, norm.eps, dtype)


def plain(x: Tensor, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, ...]:
    r = norm(x)
    return r, r.to(dtype), r.to(dtype)


def with_gradients(
    function, x: Tensor, norm: nn.LayerNorm, directions: list[Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """All results, and the gradients of the points and of the norm."""
    x = x.detach().requires_grad_()
    made = function(x, norm, dtype)
    given = [g.to(y.dtype) for y, g in zip(made, directions, strict=True)]
    return [*made, *torch.autograd.grad(made, [x, *norm.parameters()], given)]


def check(x: Tensor, norm: nn.LayerNorm, directions: list[Tensor] | None = None) -> None:
    directions = [torch.randn_like(x) for _ in range(3)] if directions is None else directions
    for got, expected in zip(*(with_gradients(f, x, norm, directions) for f in (fused, plain)), strict=True):
        assert got.dtype == expected.dtype
        close(got, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_gradients_are_the_plain_ones(width):
    check(points(width), norm_of(width, True))


@pytest.mark.parametrize("count", [1, 16, 700])
def test_any_number_of_points(count):
    check(points(16, count), norm_of(16, True))


def test_no_points_at_all():
    """As one of several processes may have it."""
    x = points(16, BATCH, 0)
    _, _, _, of_x, *others = with_gradients(fused, x, norm_of(16, True), [x, x, x])
    assert of_x.shape == x.shape
    assert not any(g.any() for g in others)


def test_points_and_gradients_may_lie_otherwise():
    wide = points(32)
    for x in (wide[..., 5:21], wide[..., ::2], wide[:1, :, :16].expand(BATCH, -1, -1)):
        assert not x.is_contiguous()
        check(x, norm_of(16, True), [torch.randn(BATCH, 16, POINTS, device=DEVICE).mT for _ in range(3)])


def test_each_result_has_a_gradient_of_its_own():
    norm, x = norm_of(16, True), points(16).requires_grad_()
    for place in range(3):
        found = []
        for function in (fused, plain):
            torch.manual_seed(0)
            y = function(x, norm, torch.float32)[place]
            found.append(torch.autograd.grad(y, [x, *norm.parameters()], torch.randn_like(y)))
        for got, expected in zip(*found, strict=True):
            close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_only_what_is_asked_for_is_rounded(dtype):
    norm, x = norm_of(96, True), points(96)
    directions = [torch.randn_like(x), *(torch.randn_like(x).to(dtype).float() for _ in range(2))]
    r, one, other, *gradients = with_gradients(fused, x, norm, directions, dtype)
    exact, _, _, *expected = with_gradients(plain, x, norm, directions)
    close(r, exact)
    assert one.dtype == other.dtype == dtype
    assert torch.equal(one, other)
    # Half a step to the nearest; but Triton's interpreter cuts bfloat16 off.
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    torch.testing.assert_close(one.float(), exact, rtol=1.01 * step, atol=1e-6)
    for got, wanted in zip(gradients, expected, strict=True):
        assert got.dtype == torch.float32
        close(got, wanted)


def test_statistics_far_from_zero_and_channels_that_are_all_the_same():
    norm, x = norm_of(32, True), 1000 + 1e-1 * torch.randn(20, 32, device=DEVICE)
    exact = norm.double()(x.double()).float()
    torch.testing.assert_close(fused(x, norm.float(), torch.float32)[0], exact, rtol=3e-3, atol=3e-3)
    x = torch.full_like(x, 7.0)
    found = with_gradients(fused, x, norm, [torch.ones_like(x)] * 3)
    close(found[0], norm(x))
    assert all(t.isfinite().all() for t in found)


def test_the_same_gradients_each_time():
    norm, x = norm_of(32, True), points(32)
    one, other = (with_gradients(fused, x, norm, [x, x, x]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def block_of(width: int, heads: int, layernorm: bool = True) -> FusedSelfAttentionBlock:
    layer = FusedAttention(width, heads, "galerkin", "channels", Rotary(2, width, 3.0))
    block = FusedSelfAttentionBlock(width, layer, "relu", layernorm)
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return block.to(DEVICE)


@pytest.fixture
def calls(monkeypatch, on_chip) -> list[torch.dtype]:
    """Have attention on the chip on any device; what the norms round to."""
    found = []
    original = kernels.normalized

    def counted(*operands):
        found.append(operands[-1])
        return original(*operands)

    monkeypatch.setattr(kernels, "normalized", counted)
    return found


def results(block: FusedSelfAttentionBlock, x: Tensor) -> list[Tensor]:
    """What a block makes of the points, and the gradients of these and of all parameters."""
    torch.manual_seed(0)
    x, coords, weights = x.detach().requires_grad_(), torch.rand(BATCH, POINTS, 2).to(DEVICE), quadrature(POINTS)
    y = block(x, coords, weights)
    return [y, *torch.autograd.grad(y.square().sum() + y.sin().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("heads", [1, 2])
def test_a_block_with_all_its_kernels_is_the_plain_one(monkeypatch, calls, heads):
    block, x = block_of(16, heads), points(16)
    fused = results(block, x)
    with torch.autocast(DEVICE.type, torch.float16):
        rounded = results(block, x)
    assert calls == [torch.float32, torch.float16]
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    exact = results(block, x)
    with torch.autocast(DEVICE.type, torch.float16):
        plain = results(block, x)
    for got, expected, half, other in zip(fused, exact, rounded, plain, strict=True):
        close(got, expected)
        assert half.dtype == other.dtype == torch.float32
        assert (half - expected).norm() < 1.2 * (other - expected).norm() + 2e-3 * expected.norm()


def test_it_is_used_for_a_layer_norm_of_float32_alone(monkeypatch, calls):
    results(block_of(16, 2, layernorm=False), points(16))
    results(block_of(16, 2).half(), points(16).half())
    assert not calls
    results(block_of(16, 2), points(16))
    assert len(calls) == 1
    monkeypatch.setattr(FusedAttention, "_sums_on_chip", lambda self, x, weights: False)
    results(block_of(16, 2), points(16))
    assert len(calls) == 1


def test_the_operators_keep_what_torch_asks_of_operators():
    norm, x = norm_of(16, True), points(16, 5)
    given = x, norm.weight.detach(), norm.bias.detach(), 1e-5
    torch.library.opcheck(kernels.normalized_there, (*given, torch.float16))
    torch.library.opcheck(kernels.normalized_back, (x, x.half(), x.half(), x, norm.weight.detach(), 1e-5))


COMPILED = """
import torch
from oformer.engine import attention
from oformer.engine.blocks import FusedSelfAttentionBlock
from oformer.nn.rotary import Rotary

device = kernels_everywhere()
attention.fused_arrangement = attention.fused_sums = lambda device: True
layer = attention.FusedAttention(16, 2, "galerkin", "channels", Rotary(2, 16, 3.0), dropout=0.2)
block = FusedSelfAttentionBlock(16, layer, "relu", layernorm=True).to(device)
x, coords, weights = (torch.rand(3, 7, n, device=device) for n in (16, 2, 1))
with torch.autocast(device, torch.float16):
    given = x.requires_grad_(), coords, weights[..., 0]
    Compiled(block, of_gradients=True).check(given, [x, *block.parameters()], rtol=1e-2, atol=1e-2)
"""


def test_a_compiled_block_keeps_it_whole_and_adds_no_gradients_of_points_itself():
    there, back = printed(COMPILED)
    assert there.count("oformer.normalized.default") == there.count("oformer.answers.default") == 1
    assert back.count("oformer.normalized_back.default") == back.count("oformer.answers_back.default") == 1
    last = back[: back.index("oformer.normalized_back.default")].rpartition("oformer.summed_back.default")[2]
    assert "add" not in last
