"""What points read from the sums, and its residual, against the plain code; without a GPU in Triton's interpreter."""

import sys

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oformer.engine import attention
from oformer.engine.attention import FusedAttention
from oformer.engine.blocks import FusedSelfAttentionBlock
from oformer.nn.rotary import Rotary
from oformer.nn.sums import points_split
from tests.engine.test_attention_kernels import BATCH, DEVICE, attention_layer, close, quadrature
from tests.forked import printed

kernels = pytest.importorskip("oformer.engine.kernels.attention_lookup_kernels", exc_type=ImportError)
sums_kernels = pytest.importorskip("oformer.engine.kernels.attention_sums_kernels", exc_type=ImportError)

POINTS = 37 if DEVICE.type == "cpu" else 150  # three programs for each sample, of which the last is not full
# Coordinates (0: no rotary encoding), width and heads. 96 has pieces of 32 and 16 pairs; 24 and 40 leave some empty.
# On a GPU, where exact products of so many channels take a minute to compile, it has its turn in half precision.
SHAPES = ((0, 16, 2), (1, 40, 1), (2, 96 if DEVICE.type == "cpu" else 32, 2), (3, 24, 3))
SEED = 2**40 + 5


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_ROWS", 16)
        monkeypatch.setattr(sums_kernels, "_ROWS", 16)


class Case:
    """Points that read from sums, which are other ones for each sample; of a type, but added up in float32."""

    def __init__(
        self,
        dim: int,
        width: int,
        heads: int,
        dropout: float = 0.0,
        tables: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        self.dim, self.heads, self.dropout = dim, heads, dropout
        self.rotary = None if dim == 0 else Rotary(dim, width, 5.0).to(DEVICE)
        self.tables = (None, None) if dim == 0 else self.rotary.tables(torch.rand(tables, POINTS, dim, device=DEVICE))
        self.x, self.matrix, self.seen = (
            torch.randn(*shape, width, device=DEVICE, dtype=dtype)
            for shape in ((BATCH, POINTS), (heads * width,), (BATCH, heads * width))
        )
        self.residual, self.bias = torch.randn(BATCH, POINTS, width, device=DEVICE), torch.randn(width, device=DEVICE)
        self.direction = torch.randn_like(self.residual)

    @property
    def seed(self) -> Tensor | None:
        return torch.tensor([SEED], device=DEVICE) if self.dropout else None

    def kept(self) -> Tensor | float:
        """What dropout leaves, scaled up, as it shows where nothing is read from the sums."""
        if not self.dropout:
            return 1.0
        nothing, ones = torch.zeros_like(self.seen), torch.ones_like(self.bias)
        found = self.fused(self.x, self.matrix, nothing, torch.zeros_like(self.residual, dtype=torch.float32), ones)
        assert set(found.unique().tolist()) == {0.0, found.max().item()}
        assert found.max().item() == pytest.approx(1 / (1 - self.dropout))
        return found

    def fused(self, x: Tensor, matrix: Tensor, seen: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
        operands = x, matrix, *self.tables, seen, max(self.dim, 1)
        return kernels.looked_up(*operands, residual, bias, self.seed, self.dropout)

    def plain(self, x: Tensor, matrix: Tensor, seen: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
        q = (x @ matrix.mT).unflatten(-1, (self.heads, -1))
        q = q if self.rotary is None else self.rotary(q, tuple(t.expand(BATCH, -1, -1) for t in self.tables))
        answer = q.flatten(2) @ seen
        answer = self.kept() * (answer if bias is None else answer + bias)
        return answer if residual is None else residual + answer

    def results(self, function, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The answer and all gradients."""
        given = [
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
            for t in (self.x, self.matrix, self.seen, self.residual, self.bias)
        ]
        answer = function(*given)
        wanted = [t for t in given if t is not None]
        return [answer, *torch.autograd.grad(answer, wanted, self.direction.to(answer.dtype))]

    def check(self) -> None:
        """Same values, same gradients."""
        for got, expected in zip(self.results(self.fused), self.results(self.plain), strict=True):
            assert got.dtype == expected.dtype
            close(got, expected)


@pytest.mark.parametrize(("dropout", "tables"), [(0.0, 1), (0.4, BATCH)], ids=["one grid", "dropout, grids"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_the_plain_ones(shape, dropout, tables):
    Case(*shape, dropout, tables).check()


@pytest.mark.parametrize(("residual", "biased"), [(False, False), (True, False), (False, True)])
def test_residual_and_bias_may_be_absent(residual, biased):
    case = Case(2, 16, 2)
    case.residual, case.bias = case.residual if residual else None, case.bias if biased else None
    case.check()


def test_operands_and_gradients_may_lie_otherwise():
    case = Case(2, 16, 2, dropout=0.2)
    wide = torch.randn(BATCH, POINTS + 3, 32, device=DEVICE)
    for view in (wide[:, 2:-1, 5:21], wide[:, 2:-1, ::2], wide[:1, 3:, 16:].expand(BATCH, -1, -1)):
        assert not view.is_contiguous()
        case.x = case.residual = case.direction = view
        case.matrix, case.seen = case.matrix.mT.contiguous().mT, case.seen.mT.contiguous().mT
        case.check()


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.bfloat16, 0.3), (torch.float16, 0.0)], ids=str)
def test_half_precision_rounds_the_factors_of_products_alone(dtype, dropout):
    case = Case(2, 96, 2, dropout, dtype=dtype)
    made = case.results(case.fused)
    case.x, case.matrix, case.seen = (t.float() for t in (case.x, case.matrix, case.seen))
    exact = case.results(case.plain)
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    kinds = [torch.float32, *[dtype] * 3, torch.float32, torch.float32]
    for got, wanted, kind in zip(made, exact, kinds, strict=True):
        assert got.dtype == kind
        assert (got.float() - wanted).norm() < 2 * step * wanted.norm()
    close(made[4], exact[4])  # residual and bias are not rounded at all
    close(made[5], exact[5])


def test_everything_in_half_precision():
    case = Case(2, 16, 2, dropout=0.3, dtype=torch.float16)
    case.residual, case.bias, case.direction = (t.half() for t in (case.residual, case.bias, case.direction))
    exact = case.results(case.plain, torch.float32)
    for got, wanted in zip(case.results(case.fused), exact, strict=True):
        assert got.dtype == torch.float16
        assert (got.float() - wanted).norm() < 4 * torch.finfo(torch.float16).eps * wanted.norm()


def test_dropout_takes_its_share_and_other_channels_for_another_seed(monkeypatch):
    case = Case(0, 16, 2, dropout=0.25)
    one = case.kept() > 0
    monkeypatch.setattr(sys.modules[__name__], "SEED", SEED + 1)
    other = case.kept() > 0
    spread = (0.25 * 0.75 / one.numel()) ** 0.5
    assert abs(one.double().mean() - 0.75) < 5 * spread
    assert abs((one & other).double().mean() - 0.75**2) < 5 * spread
    # Neither do two samples, nor neighbors, lose the same.
    for shifted in (one.roll(1, 0), one.roll(1, 1), one.roll(1, 2)):
        assert abs((one & shifted).double().mean() - 0.75**2) < 5 * spread


def test_no_points_at_all():
    """As one of several processes may have it."""
    case = Case(0, 16, 2, dropout=0.2)
    case.x, case.residual, case.direction = (t[:, :0] for t in (case.x, case.residual, case.direction))
    answer, *gradients = case.results(case.fused)
    assert answer.shape == (BATCH, 0, 16)
    assert not any(g.any() for g in gradients)


@pytest.fixture
def calls(monkeypatch, on_chip) -> list[bool]:
    """Have the kernel used on any device and for float32, too; for each call, whether it added a residual."""
    found = []
    original = kernels.looked_up

    def counted(*operands):
        found.append(len(operands) > 6)
        return original(*operands)

    monkeypatch.setattr(kernels, "looked_up", counted)
    return found


def cloud(width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, 21, width, device=DEVICE), torch.rand(BATCH, 21, 2, device=DEVICE), quadrature(21)


def with_gradients(function, layer: FusedAttention, x: Tensor, *others: Tensor) -> list[Tensor]:
    """The answer, and the gradients of the points and of all parameters."""
    x = x.detach().requires_grad_()
    y = function(layer, x, *others)
    return [y, *torch.autograd.grad(y.square().sum() + y.sin().sum(), [x, *layer.parameters()])]


def added(layer: FusedAttention, x: Tensor, *others: Tensor) -> Tensor:
    return x + layer(x, *others)


def in_one(layer: FusedAttention, x: Tensor, *others: Tensor) -> Tensor:
    return layer.with_residual(x, *others)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_whole_layer_with_its_residual_is_the_plain_one(monkeypatch, calls, heads):
    layer, given = attention_layer("galerkin", "channels", 2, 16, heads), cloud()
    fused = with_gradients(in_one, layer, *given)
    apart = with_gradients(added, layer, *given)
    assert calls == [True, False]
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    plain = with_gradients(added, layer, *given)
    for got, other, expected in zip(fused, apart, plain, strict=True):
        close(got, expected)
        close(other, expected)
    for got, expected in zip(with_gradients(in_one, layer, *given), plain, strict=True):
        assert torch.equal(got, expected)
    assert len(calls) == 2


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_a_whole_layer_under_autocast(monkeypatch, calls, heads, kind):
    """Also of points that are rounded already: their sum with an answer has the type that torch gives it."""
    layer, (x, *others) = attention_layer("galerkin", "channels", 2, 16, heads), cloud()
    exact = with_gradients(added, layer, x, *others)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        fused = with_gradients(in_one, layer, x.to(kind), *others)
        monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
        plain = with_gradients(added, layer, x.to(kind), *others)
    assert calls == [False, True]
    # Triton's interpreter cuts bfloat16 off instead of rounding it.
    factor = 3 if DEVICE.type == "cpu" else 1.2
    for one, got, expected in zip(fused, plain, exact, strict=True):
        assert one.dtype == got.dtype
        size = expected.norm()
        assert (one - expected).norm() < factor * (got - expected).norm() + 1e-2 * size
        assert (got - expected).norm() < 0.05 * size


def block(dropout: float) -> FusedSelfAttentionBlock:
    layer = FusedAttention(16, 2, "galerkin", "channels", Rotary(2, 16, 3.0), dropout)
    return FusedSelfAttentionBlock(16, layer, "relu", layernorm=True).to(DEVICE)


def test_a_block_adds_its_residual_in_the_kernel_and_draws_in_training_only(monkeypatch, calls):
    one, given = block(0.3), cloud()
    state = torch.get_rng_state()
    with torch.no_grad():  # with gradients, plain layers compute outside of training
        still = one.eval()(*given)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (one.train()(*given) for _ in range(2))
    assert (first != second).double().mean() > 0.9
    assert calls == [True] * 3
    torch.set_rng_state(state)
    assert DEVICE.type != "cpu" or torch.equal(one(*given), first)
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    close(still, one.eval()(*given))


def test_all_may_be_dropped(calls):
    layer, (x, *others) = FusedAttention(16, 2, "galerkin", "channels", dropout=1.0).to(DEVICE), cloud()
    assert torch.equal(in_one(layer, x, *others), x)
    assert calls == [False]
    with torch.no_grad():
        assert not torch.equal(in_one(layer.eval(), x, *others), x)
    assert calls == [False, True]


def test_recomputation_draws_the_same(calls):
    one, given = block(0.3), cloud()

    def spared(one: FusedSelfAttentionBlock, *given: Tensor) -> Tensor:
        y = checkpoint(one, *given, use_reentrant=False, preserve_rng_state=True)
        torch.rand(3, device=DEVICE)  # what happens in between does not matter
        return y

    found = []
    for function in (spared, lambda one, *given: one(*given)):
        torch.manual_seed(1)
        found.append(with_gradients(function, one, *given))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert calls == [True] * 3


def test_points_that_come_in_chunks_find_the_same(calls):
    layer, (x, coords, weights) = attention_layer("galerkin", "channels", 2, 16, 2), cloud()
    sums = []

    def keep(part: Tensor) -> Tensor:
        sums.append(part)
        return part

    with points_split(keep):
        whole = in_one(layer, x, coords, weights)
    with points_split(lambda part: sums[0]):
        chunks = [in_one(layer, *(t[:, some] for t in (x, coords, weights))) for some in (slice(9), slice(9, None))]
    close(torch.cat(chunks, 1), whole)
    assert calls == [True] * 3


def test_the_operators_keep_what_torch_asks_of_operators():
    x, residual = (torch.randn(2, 5, 8, device=DEVICE) for _ in range(2))
    matrix, seen, bias = (torch.randn(*shape, device=DEVICE) for shape in ((16, 8), (2, 16, 8), (8,)))
    tables = Rotary(1, 8).to(DEVICE).tables(torch.rand(2, 5, 1, device=DEVICE))
    seed = torch.tensor([3], device=DEVICE)
    half = x.half(), matrix.half(), seen.half()
    torch.library.opcheck(kernels.answers, (*half, *tables, residual, bias, seed, 0.2, 1, True))
    torch.library.opcheck(kernels.answers, (x, matrix, seen, None, None, None, None, None, 0.0, 1, False))
    torch.library.opcheck(kernels.answers_back, (residual, *half[1:], *tables, True, seed, 0.2, 1))
    torch.library.opcheck(kernels.answers_back, (residual, matrix, seen, None, None, False, None, 0.0, 1))


COMPILED = """
import torch
from oformer.engine import attention
from oformer.nn.rotary import Rotary

device = kernels_everywhere()
attention.FusedAttention._sums_on_chip = lambda self, x, weights: True
layer = attention.FusedAttention(16, 2, "galerkin", "channels", Rotary(2, 16, 3.0), dropout=0.2).to(device)
x, coords, weights = (torch.rand(3, 7, n, device=device) for n in (16, 2, 1))
compiled = Compiled(lambda x: layer.with_residual(x, coords, weights[..., 0]))
for dropout in (0.2, 0.0):
    layer.out[1].p = dropout
    with torch.autocast(device, torch.float16):
        compiled.check([x.requires_grad_()], [x, *layer.parameters()], rtol=1e-3, atol=1e-3)
"""


def test_a_compiled_layer_keeps_it_whole():
    dropped, whole = printed(COMPILED)
    for nodes in (dropped, whole):
        assert "dropout" not in nodes
        assert "linear" not in nodes
    assert "randint" in dropped
    assert "randint" not in whole
