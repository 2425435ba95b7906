"""Sums over points against the plain code; without a GPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn

from oformer.engine import attention
from oformer.engine.attention import FusedAttention
from oformer.nn.rotary import Rotary
from tests.engine import test_attention_kernels as arranging
from tests.engine.test_attention_kernels import BATCH, DEVICE, attention_layer, call, close, quadrature, sides
from tests.forked import printed

lookup_kernels = pytest.importorskip("oformer.engine.kernels.attention_lookup_kernels", exc_type=ImportError)
kernels = pytest.importorskip("oformer.engine.kernels.attention_sums_kernels", exc_type=ImportError)

POINTS = 37 if DEVICE.type == "cpu" else 150  # see below
# Coordinates (0: no rotary encoding), width and heads. 96 has pieces of 32 and 16 pairs; 24 and 40 leave some empty.
# On a GPU, where exact products of so many channels take a minute to compile, it has its turn in half precision.
SHAPES = ((0, 16, 2), (1, 40, 1), (2, 96 if DEVICE.type == "cpu" else 32, 2), (3, 24, 3))


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Three blocks, of which the last is not full, in two programs for each sample and head, or more."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_ROWS", 16)
        monkeypatch.setattr(lookup_kernels, "_ROWS", 16)
    monkeypatch.setattr(kernels, "_PROGRAMS", 2 * BATCH * 3)


@pytest.fixture
def calls(monkeypatch, on_chip) -> list[int]:
    """The width of each call of the kernel, which is used on any device and for float32, too."""
    found = []
    original = FusedAttention._summed_on_chip

    def counted(self, x, *others):
        found.append(x.shape[-1])
        return original(self, x, *others)

    monkeypatch.setattr(FusedAttention, "_summed_on_chip", counted)
    return found


class Case:
    """The inside of one layer: keys and values, plainly multiplied or summed by the kernel."""

    def __init__(self, norm: str, dim: int, width: int, heads: int):
        self.layer = attention_layer("galerkin", norm, dim, width, heads)
        self.parts = tuple(self.layer._part(name) for name in "kv")
        self.x = 0.5 + torch.randn(BATCH, POINTS, width, device=DEVICE)
        self.matrix = torch.randn(2 * heads * width, width, device=DEVICE) / width**0.5
        self.coords = torch.rand(BATCH, POINTS, max(dim, 1), device=DEVICE)
        self.weights = quadrature(POINTS)

    def run(self, fused: bool, x: Tensor, matrix: Tensor) -> Tensor:
        """The sum."""
        tables = None if self.layer.rotary is None else self.layer.rotary.tables(self.coords)
        if fused:
            return self.layer._summed_on_chip(x, matrix, self.parts, tables, self.weights)[0]
        projected = (x @ matrix.mT).unflatten(-1, (2, self.layer.heads, -1))
        k, v = self.layer._arranged(projected, self.parts, tables, self.weights)
        return k.mT @ v

    def results(self, fused: bool, direction: Tensor) -> list[Tensor]:
        """The sum; and the gradients of points, matrix and gains of norms."""
        x, matrix = (tensor.detach().requires_grad_() for tensor in (self.x, self.matrix))
        made = self.run(fused, x, matrix)
        affine = [p for part in self.parts if part.normalized for p in self.layer.normalize[part.name].parameters()]
        return [made, *torch.autograd.grad(made, [x, matrix, *affine], direction.to(made.dtype))]

    def direction(self) -> Tensor:
        """A gradient of the sum."""
        width, heads = self.x.shape[-1], self.layer.heads
        return torch.randn(BATCH, heads, width, width, device=DEVICE)

    def check(self, direction: Tensor | None = None) -> None:
        """Same values, same gradients."""
        direction = self.direction() if direction is None else direction
        for got, expected in zip(*(self.results(chosen, direction) for chosen in (True, False)), strict=True):
            close(got, expected)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [*(("layernorm", shape) for shape in SHAPES), ("channels", SHAPES[2]), ("none", SHAPES[1])],
    ids=str,
)
def test_values_and_gradients_are_the_plain_ones(norm, shape):
    Case(norm, *shape).check()


def test_programs_share_the_points_however_many_there_are(monkeypatch):
    for programs in (1, 10**6):
        monkeypatch.setattr(kernels, "_PROGRAMS", programs)
        Case("channels", 2, 16, 2).check()


def test_no_points_at_all():
    """As one of several processes may have it."""
    case = Case("channels", 2, 16, 2)
    case.x, case.coords, case.weights = (t[:, :0] for t in (case.x, case.coords, case.weights))
    seen = case.run(True, case.x, case.matrix)
    assert seen.shape == (BATCH, 2, 16, 16)
    assert not seen.any()


def test_padding_is_not_felt_and_has_no_gradient():
    case = Case("channels", 2, 16, 2)
    expected, of_x, *others = case.results(True, direction := case.direction())
    case.x, case.coords, case.weights = (
        torch.cat([t, far * torch.randn_like(t[:, :15])], 1)
        for t, far in ((case.x, 1e3), (case.coords, 50.0), (case.weights, 0.0))
    )
    found, with_padding, *of_others = case.results(True, direction)
    close(found, expected)
    close(with_padding[:, :POINTS], of_x)
    assert not with_padding[:, POINTS:].any()
    for got, wanted in zip(of_others, others, strict=True):
        close(got, wanted)


def test_what_samples_share_is_read_where_it_lies():
    case = Case("channels", 2, 16, 2)
    case.coords, case.weights = case.coords[:1].expand(BATCH, -1, -1), case.weights[:1].expand(BATCH, -1)
    case.check()
    case.x = case.x[:1].expand_as(case.x)
    case.check()


def test_views_are_read_as_what_they_show():
    case = Case("channels", 2, 16, 2)
    wide = torch.randn(BATCH, POINTS + 3, 32, device=DEVICE)
    for view in (wide[:, 2:-1, 5:21], wide[:, 2:-1, ::2], wide[:, 3:, 16:].mT.contiguous().mT):
        assert not view[0].is_contiguous()
        case.x, case.matrix = view, case.matrix.mT.contiguous().mT
        case.check()


def test_a_gradient_may_lie_otherwise():
    case = Case("layernorm", 2, 16, 2)
    case.check(case.direction().mT.contiguous().mT)


@pytest.mark.parametrize(("norm", "dtype"), [("channels", torch.bfloat16), ("layernorm", torch.float16)], ids=str)
def test_half_precision_rounds_the_factors_of_products_alone(norm, dtype):
    case = Case(norm, 2, 96, 2)
    case.x, case.matrix = case.x.to(dtype), case.matrix.to(dtype)
    made = case.results(True, direction := case.direction())
    case.x, case.matrix = case.x.float(), case.matrix.float()
    exact = case.results(False, direction)
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    assert made[0].dtype == torch.float32
    for got, wanted in zip(made, exact, strict=True):
        assert (got.float() - wanted).norm() < 2 * step * wanted.norm()


@pytest.mark.parametrize(
    ("cross", "shared", "heads"),
    [(False, False, 2), (True, False, 1), (True, True, 2)],
    ids=["self", "cross, one head", "cross, shared grid"],
)
@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_a_whole_layer_is_the_plain_one(monkeypatch, calls, norm, cross, shared, heads):
    layer, operands = attention_layer("galerkin", norm, 2, 16, heads), sides(cross, shared=shared)
    fused = arranging.with_gradients(layer, operands)
    assert len(calls) == 1
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    for got, expected in zip(fused, arranging.with_gradients(layer, operands), strict=True):
        assert expected.abs().max() > 1e-4
        close(got, expected)
    assert len(calls) == 1


def test_a_source_that_all_samples_share_is_summed_once(monkeypatch, calls):
    layer, (queries, source) = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross=True)
    batches = []
    original = kernels.summed

    def seen(x, *others):
        batches.append(x.shape[0])
        return original(x, *others)

    monkeypatch.setattr(kernels, "summed", seen)
    operands = [queries, tuple(t[:1].expand_as(t) for t in source)]
    fused = arranging.with_gradients(layer, operands)
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    for got, expected in zip(fused, arranging.with_gradients(layer, operands), strict=True):
        close(got, expected)
    assert batches == [1]


def test_a_whole_layer_under_autocast(monkeypatch, calls):
    layer, operands = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross=False)
    exact = arranging.with_gradients(layer, operands)
    with torch.autocast(DEVICE.type, torch.float16):
        fused = arranging.with_gradients(layer, operands)
        monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
        plain = arranging.with_gradients(layer, operands)
    assert len(calls) == 2
    for one, got, expected in zip(fused, plain, exact, strict=True):
        assert one.dtype == got.dtype
        size = expected.norm()
        assert (one - expected).norm() < 1.2 * (got - expected).norm() + 1e-3 * size
        assert (got - expected).norm() < 0.01 * size


def test_sums_over_points_that_come_in_chunks(calls):
    whole = arranging.sum_in_chunks(attention_layer("galerkin", "channels", 2, 16, 2))
    assert whole.dtype == torch.float32
    assert len(calls) == 3


def test_it_is_used_for_16_bits_and_narrow_heads_on_hopper(monkeypatch):
    used = []
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: True)
    monkeypatch.setattr(attention, "fused_sums", lambda device: True)
    original = FusedAttention._summed_on_chip
    monkeypatch.setattr(
        FusedAttention, "_summed_on_chip", lambda self, *inputs: used.append(1) or original(self, *inputs)
    )

    def sums(kind: str, norm: str, width: int, dtype: torch.dtype | None) -> bool:
        used.clear()
        with torch.no_grad(), torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            call(attention_layer(kind, norm, 2, width, 1), sides(cross=False, width=width))
        return bool(used)

    half = torch.float16
    assert sums("galerkin", "channels", 96, half)
    assert sums("galerkin", "none", 96, torch.bfloat16)
    assert sums("galerkin", "layernorm", 64, half)
    assert not sums("galerkin", "layernorm", 80, half)
    assert not sums("galerkin", "channels", 112, half)
    assert not sums("fourier", "channels", 16, half)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert not sums("galerkin", "channels", 16, None)
    monkeypatch.undo()
    assert not attention.fused_sums(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention.fused_sums(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not attention.fused_sums(torch.device("cuda", 0))


def test_the_operator_keeps_what_torch_asks_of_operators():
    x, matrix = (torch.randn(*shape, 8, device=DEVICE, requires_grad=True) for shape in ((2, 5), (32,)))
    gains = nn.Parameter(torch.randn(2, 2, 8, device=DEVICE))
    tables = Rotary(1, 8).to(DEVICE).tables(torch.rand(2, 5, 1, device=DEVICE))
    torch.library.opcheck(kernels.summed, (x, matrix, *tables, quadrature(5), gains, True, 1, 1e-5))
    torch.library.opcheck(kernels.summed, (x, matrix, None, None, quadrature(5), None, False, 1, 1e-5))


COMPILED = """
import torch
from oformer.engine import attention
from oformer.nn.rotary import Rotary

device = kernels_everywhere()
attention.FusedAttention._sums_on_chip = lambda self, x, weights: True
layer = attention.FusedAttention(16, 2, "galerkin", "layernorm", Rotary(2, 16, 3.0)).to(device)
x, coords, weights = (torch.rand(3, 7, n, device=device) for n in (16, 2, 1))
with torch.autocast(device, torch.float16):
    given = x.requires_grad_(), coords, weights[..., 0]
    Compiled(layer).check(given, [x, *layer.parameters()], rtol=1e-3, atol=1e-3)
"""


def test_a_compiled_layer_keeps_it_whole():
    (nodes,) = printed(COMPILED)
    assert nodes.count("oformer.summed.default") == 1
    assert not any(name in nodes for name in ("layer_norm", "linear"))


def test_a_kind_of_ones_own_is_never_replaced_by_the_kernel(monkeypatch, calls):
    """Kinds are told apart by their function, whatever else they have in common with Galerkin's."""
    own = []

    def mean(q, k, v, query_weights, weights):
        own.append(1)
        return (v * weights[:, None, :, None]).sum(2, keepdim=True).expand_as(q)

    monkeypatch.setitem(attention.KINDS, "mean", attention.Kind(mean, normalized=("k", "v"), linear=True))
    x, coords, weights = torch.randn(2, 8, 16, device=DEVICE), torch.rand(2, 8, 2, device=DEVICE), quadrature(8)
    for kind in ("mean", "galerkin"):
        layer = FusedAttention(16, 1, "galerkin", "channels", Rotary(2, 16)).to(DEVICE)
        layer.kind = kind  # set afterwards, since shape checks hold the argument to the names in the package
        answer = layer.with_residual(x, coords, weights)
        v = layer.normalize["v"](layer.v(x)[:, :, None], weights)[:, :, 0]
        expected = x + (v * weights[..., None]).sum(1, keepdim=True)
        assert torch.allclose(answer, expected, atol=1e-5) == (kind == "mean")
    assert len(own) == 1
    assert calls == [16]  # of the Galerkin layer
