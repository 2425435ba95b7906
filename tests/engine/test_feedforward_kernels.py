"""The fused second half of a block against the plain code. Without a GPU, Triton's interpreter runs the kernels."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oformer import gpu
from oformer.engine import blocks
from oformer.engine.blocks import FusedCrossAttentionBlock, FusedSelfAttentionBlock, feed_forward
from oformer.nn.attention import Attention
from oformer.nn.feedforward import MLP, GatedGELU
from tests.forked import printed

kernels = pytest.importorskip("oformer.engine.kernels.feedforward_kernels", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BATCH, POINTS = 2, 37  # the last program is not full
ROUNDING = 1e-5 if DEVICE.type == "cpu" else 3e-3  # TF32 rounds factors to 11 bits, and the interpreter does not
SEED = 2**40 + 5

with_and_without_norm = pytest.mark.parametrize("layernorm", [True, False], ids=["norm", "no norm"])


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Programs of 16 points; on a GPU of 64, as always, since there are tiles that it does not multiply."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_ROWS", 16)


@pytest.fixture
def calls(monkeypatch) -> list[torch.dtype]:
    """Have the kernels used on any device; the type of the products of each call."""
    found = []
    original = blocks._on_chip

    def counted(network, x, norm):
        found.append(blocks.type_of_products(x))
        return original(network, x, norm)

    monkeypatch.setattr(blocks, "fused_feedforward", lambda device, width, dtype: True)
    monkeypatch.setattr(blocks, "_on_chip", counted)
    return found


def network(width: int, dropout: float = 0.0) -> GatedGELU:
    layer = GatedGELU(width, dropout)
    with torch.no_grad():
        layer.gate.weight *= 2  # so that the GELU is bent
    return layer.to(DEVICE)


def norm_of(width: int, layernorm: bool) -> nn.Module:
    if not layernorm:
        return nn.Identity()
    norm = nn.LayerNorm(width, device=DEVICE)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return norm


def points(width: int, *shape: int) -> Tensor:
    return 0.5 + torch.randn(*(shape or (BATCH, POINTS)), width, device=DEVICE)


def plain(x: Tensor, norm: nn.Module, layer: nn.Module) -> Tensor:
    r = norm(x)
    return r + layer(r)


def on_chip(x: Tensor, norm: nn.Module, layer: GatedGELU) -> Tensor:
    return blocks._on_chip(layer, x, norm if isinstance(norm, nn.LayerNorm) else None)


def with_gradients(function, x: Tensor, norm: nn.Module, layer: nn.Module, direction: Tensor) -> list[Tensor]:
    """The result, and the gradients of the points, the norm and the network."""
    x = x.detach().requires_grad_()
    y = function(x, norm, layer)
    return [y, *torch.autograd.grad(y, [x, *norm.parameters(), *layer.parameters()], direction)]


def close(got: Tensor, expected: Tensor, rounding: float = ROUNDING) -> None:
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding * expected.abs().max().item())


def all_close(got: list[Tensor], expected: list[Tensor], rounding: float = ROUNDING) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert other.abs().max() > 0
        close(one, other, rounding)


@with_and_without_norm
@pytest.mark.parametrize("width", [16, 48, 64, 96])
def test_values_and_gradients_are_the_plain_ones(width, layernorm):
    layer, norm, x = network(width), norm_of(width, layernorm), points(width)
    before, direction = x.clone(), torch.randn_like(x)
    all_close(*(with_gradients(f, x, norm, layer, direction) for f in (on_chip, plain)))
    assert torch.equal(x, before)


@pytest.mark.parametrize("count", [1, 16, 17])
def test_any_number_of_points(count):
    layer, norm, x = network(32), norm_of(32, True), points(32, count)
    direction = torch.randn_like(x)
    all_close(*(with_gradients(f, x, norm, layer, direction) for f in (on_chip, plain)))


def test_points_and_gradients_may_lie_otherwise():
    layer, norm = network(16), norm_of(16, True)
    wide = points(32)
    for x in (wide[..., 5:21], wide[..., ::2], wide[:1, :, :16].expand(BATCH, -1, -1)):
        assert not x.is_contiguous()
        direction = torch.randn(BATCH, 16, POINTS, device=DEVICE).mT
        all_close(*(with_gradients(f, x, norm, layer, direction) for f in (on_chip, plain)))


@with_and_without_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_no_more_than_the_plain_code(dtype, layernorm):
    layer, norm, x = network(96), norm_of(96, layernorm), points(96)
    before, direction = x.clone(), torch.randn_like(x)
    exact = with_gradients(plain, x, norm, layer, direction)
    with torch.autocast(DEVICE.type, dtype):
        fused, rounded = (with_gradients(f, x, norm, layer, direction) for f in (on_chip, plain))
    # Triton's interpreter cuts bfloat16 off instead of rounding it.
    factor = 3 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 1.2
    for one, other, expected in zip(fused, rounded, exact, strict=True):
        assert one.dtype == other.dtype == torch.float32
        size = expected.norm()
        assert (one - expected).norm() < factor * (other - expected).norm() + 1e-4 * size
        assert (other - expected).norm() < 0.02 * size
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_network_that_is_all_in_half_precision(dtype):
    layer, norm, x = network(32), norm_of(32, True), points(32).to(dtype)
    direction = torch.randn_like(x)
    fused = with_gradients(on_chip, x, norm.to(dtype), layer.to(dtype), direction)
    exact = with_gradients(plain, x.float(), norm.float(), layer.float(), direction.float())
    for one, other in zip(fused, exact, strict=True):
        assert one.dtype == dtype
        assert (one - other).norm() < 4 * torch.finfo(dtype).eps * other.norm()


def test_statistics_far_from_zero_and_channels_that_are_all_the_same():
    layer, norm = network(32), norm_of(32, True)
    x = 1000 + 1e-1 * torch.randn(20, 32, device=DEVICE)
    exact = plain(x.double(), norm.double(), layer.double()).float()
    close(on_chip(x, norm.float(), layer.float()), exact, max(ROUNDING, 3e-3))
    x = torch.full_like(x, 7.0)
    y, *gradients = with_gradients(on_chip, x, norm, layer, torch.ones_like(x))
    close(y, plain(x, norm, layer))
    assert all(g.isfinite().all() for g in gradients)


def test_the_same_gradients_each_time():
    layer, norm, x = network(32), norm_of(32, True), points(32)
    one, other = (with_gradients(on_chip, x, norm, layer, torch.ones_like(x)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def dropped(count: int, width: int, dropout: float, seed: int, share: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """D2(out D1(share) + bias) for the same share of all points: the gate is closed to x."""
    ones = torch.full((width,), 1.0 / F.gelu(torch.ones(())).item(), device=DEVICE)
    x, gate = torch.zeros(count, width, device=DEVICE), torch.zeros(2 * width, width, device=DEVICE)
    gate_bias = torch.cat([torch.ones_like(ones), share * ones])
    return kernels.gated_residual(
        x, None, None, gate, gate_bias, out, bias, torch.tensor([seed], device=DEVICE), dropout, 0.0, torch.float32
    )[0]


def masks(count: int, width: int, dropout: float, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """What both dropouts leave, found by looking at one hidden channel in several ways at once."""
    zero, eye = torch.zeros(width, device=DEVICE), torch.eye(width, device=DEVICE)
    after = dropped(count, width, dropout, seed, zero, 0 * eye, zero + 1) > 0
    inner = torch.zeros(count, width, dtype=torch.bool, device=DEVICE)
    for shift in range(16):  # a hidden channel is seen by all that are not dropped themselves
        seen = dropped(count, width, dropout, seed, zero + 1, eye.roll(shift, 0), zero) > 0.5
        inner |= seen.roll(-shift, 1)
    return inner, after


def test_dropout_takes_the_same_channels_out_on_the_way_back():
    width, dropout = 32, 0.4
    layer, norm, x = network(width), norm_of(width, True), points(width)
    inner, after = (m.view(BATCH, POINTS, width) / (1 - dropout) for m in masks(BATCH * POINTS, width, dropout))

    def with_masks(x: Tensor, norm: nn.Module, layer: GatedGELU) -> Tensor:
        r = norm(x)
        u, g = layer.gate(r).chunk(2, -1)
        return r + after * layer.out(inner * F.gelu(u) * g)

    def with_seed(x: Tensor, norm: nn.LayerNorm, layer: GatedGELU) -> Tensor:
        return kernels.gated_residual(
            x, norm.weight, norm.bias, layer.gate.weight, layer.gate.bias, layer.out.weight, layer.out.bias,
            torch.tensor([SEED], device=DEVICE), dropout, norm.eps, torch.float32,
        )[0]  # fmt: skip

    direction = torch.randn_like(x)
    all_close(*(with_gradients(f, x, norm, layer, direction) for f in (with_seed, with_masks)))


def test_dropout_looks_random(monkeypatch):
    monkeypatch.setattr(kernels, "_ROWS", 1024 if DEVICE.type == "cpu" else 64)
    count, width, dropout = 2048, 32, 0.2
    kept = [m.double() for m in (*masks(count, width, dropout), *masks(count, width, dropout, SEED + 1))]
    spread = (dropout * (1 - dropout)) ** 0.5
    for mask in kept:
        assert abs(mask.mean() - (1 - dropout)) < 5 * spread / (count * width) ** 0.5
        assert (mask.mean(0) - (1 - dropout)).abs().max() < 5 * spread / count**0.5
        assert (mask.mean(1) - (1 - dropout)).abs().max() < 6 * spread / width**0.5
        assert abs(mask.mean(1).std() - spread / width**0.5) < 0.1 * spread / width**0.5
    # Neither with the next point or channel, nor between the two dropouts, nor between seeds is there a correlation.
    normal = [(mask - (1 - dropout)) / spread for mask in kept]
    pairs = [(mask, mask.roll(shift, axis)) for mask in normal for axis in (0, 1) for shift in (1, 2, 16)]
    pairs += [(one, other) for n, one in enumerate(normal) for other in normal[n + 1 :]]
    for one, other in pairs:
        assert abs((one * other).mean()) < 5 / (count * width) ** 0.5


def test_dropout_in_training_only():
    layer, norm, x = network(32, 0.3), norm_of(32, True), points(32)
    state = torch.get_rng_state()
    close(on_chip(x, norm, layer.eval()), plain(x, norm, layer))
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (on_chip(x, norm, layer.train()) for _ in range(2))
    assert (first != second).double().mean() > 0.9
    torch.set_rng_state(state)
    assert DEVICE.type != "cpu" or torch.equal(on_chip(x, norm, layer), first)


def test_recomputation_draws_the_same():
    layer, norm, x = network(32, 0.3), norm_of(32, True), points(32)

    def spared(x: Tensor, norm: nn.Module, layer: GatedGELU) -> Tensor:
        y = checkpoint(on_chip, x, norm, layer, use_reentrant=False, preserve_rng_state=True)
        torch.rand(3, device=DEVICE)  # what happens in between does not matter
        return y

    found = []
    for function in (spared, on_chip):
        torch.manual_seed(1)
        found.append(with_gradients(function, x, norm, layer, torch.ones_like(x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def attention(width: int) -> Attention:
    return Attention(width, 2, "galerkin", "channels")


def side(width: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.full((BATCH, count), 1 / count, device=DEVICE)
    return points(width, BATCH, count), torch.rand(BATCH, count, 2, device=DEVICE), weights


@with_and_without_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_blocks_use_it(monkeypatch, calls, layernorm, dtype):
    one = FusedSelfAttentionBlock(32, attention(32), "gated", layernorm).to(DEVICE)
    other = FusedCrossAttentionBlock(32, attention(32)).to(DEVICE)
    here, there = side(32, 21), side(32, 9)

    def results() -> list[Tensor]:
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            y = other(*here, one(*there), *there[1:])
        return [y, *torch.autograd.grad(y.square().sum(), [*one.parameters(), *other.parameters()])]

    fused = results()
    assert calls == [dtype] * 2
    monkeypatch.setattr(blocks, "fused_feedforward", lambda device, width, dtype: False)
    for got, expected in zip(fused, results(), strict=True):
        assert got.dtype == expected.dtype
        assert (got - expected).norm() < (ROUNDING if dtype == torch.float32 else 1e-2) * expected.norm()
    assert len(calls) == 2


def test_it_is_used_only_where_it_fits(calls):
    layer, norm, x = network(32), norm_of(32, True), points(32)
    feed_forward(x, norm, MLP((32, 32, 32), "relu", bias=True, last_bias=True).to(DEVICE))
    feed_forward(x, norm, network(32, dropout=1.0))
    feed_forward(x.double(), nn.LayerNorm(32).double().to(DEVICE), network(32).double())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        feed_forward(x.bfloat16(), norm, layer)
    half = FusedSelfAttentionBlock(32, attention(32), "gated", True).to(DEVICE)
    torch.export.export(half, side(32, 9))
    assert not calls
    feed_forward(x, norm, layer)
    assert calls == [torch.float32]


def test_it_is_used_on_hopper_gpus_for_tensor_cores_and_widths_of_tiles(monkeypatch):
    assert not blocks.fused_feedforward(torch.device("cpu"), 96, torch.bfloat16)
    device, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(gpu, "fused_kernels", lambda device, row: asked.append(device) or True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    blocks._kernels.cache_clear()
    assert all(blocks.fused_feedforward(device, width, torch.bfloat16) for width in (16, 64, 96, 112, 128))
    assert not any(blocks.fused_feedforward(device, width, torch.bfloat16) for width in (8, 40, 100, 192))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert blocks.fused_feedforward(device, 128, torch.float32)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert not blocks.fused_feedforward(device, 96, torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not blocks.fused_feedforward(device, 96, torch.bfloat16)
    assert asked == [device]
    blocks._kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "oformer.engine.kernels.feedforward_kernels", None)
    with pytest.warns(UserWarning, match="needs Triton"):
        assert not blocks.fused_feedforward(device, 96, torch.bfloat16)
    blocks._kernels.cache_clear()


def test_the_operator_keeps_what_torch_asks_of_operators():
    layer, norm, x = network(16), norm_of(16, True), points(16, 5).requires_grad_()
    weights = [layer.gate.weight, layer.gate.bias, layer.out.weight, layer.out.bias]
    seed = torch.tensor([3], device=DEVICE)
    operator = kernels.gated_residual
    torch.library.opcheck(operator, (x, *norm.parameters(), *weights, seed, 0.2, 1e-5, torch.float32))
    torch.library.opcheck(operator, (x, None, None, *weights, None, 0.0, 0.0, torch.float16))


def test_matrices_are_rounded_once_for_both_ways(monkeypatch):
    layer, x = network(16), points(16)
    weights = [layer.gate.weight, layer.gate.bias, layer.out.weight, layer.out.bias]
    both = torch.cat([layer.gate.weight, layer.out.weight])
    back, given = kernels.gated_residual_back, []
    monkeypatch.setattr(kernels, "gated_residual_back", lambda *inputs: given.append(inputs) or back(*inputs))
    for dtype in (torch.float16, torch.float32):
        y, rounded = kernels.gated_residual(x, None, None, *weights, None, 0.0, 0.0, dtype)
        assert torch.equal(rounded, both.half() if dtype == torch.float16 else both[:0])
        assert not rounded.requires_grad
        y.sum().backward()
        gate, out = given[-1][4], given[-1][6]
        assert torch.equal(torch.cat([gate, out]), both.to(dtype))
        assert dtype == torch.float32 or gate.data_ptr() == rounded.data_ptr()


COMPILED = """
import torch
from oformer.engine.blocks import feed_forward
from oformer.nn.feedforward import GatedGELU

device = kernels_everywhere()
layer, norm = GatedGELU(16, 0.2).to(device), torch.nn.LayerNorm(16, device=device)
x = torch.rand(3, 7, 16, device=device, requires_grad=True)
compiled, wanted = Compiled(feed_forward), [x, *norm.parameters(), *layer.parameters()]
compiled.check([x, norm, layer], wanted)
torch.set_float32_matmul_precision("high")
compiled.check([x, norm, layer], wanted)
with torch.autocast(device, torch.float16):
    compiled.check([x, norm, layer], wanted)
layer.dropout.p = 0.0
compiled.check([x, norm, layer], wanted)
"""


def test_compiled_code_keeps_it_whole():
    exact, *others = printed(COMPILED)
    assert "gated_residual" not in exact
    assert "linear" in exact
    assert len(others) == 3
    for nodes in others:
        assert nodes.count("oformer.gated_residual.default") == 1
        assert "linear" not in nodes
        assert "layer_norm" not in nodes
    assert ["randint" in nodes for nodes in others] == [True, True, False]
