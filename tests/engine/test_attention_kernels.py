"""The kernel that leads to the products against the plain code. Without a GPU, Triton's interpreter runs it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oformer import gpu
from oformer.engine import attention
from oformer.engine.attention import FusedAttention
from oformer.engine.blocks import FusedSelfAttentionBlock
from oformer.nn.rotary import Rotary
from oformer.nn.shared_grids import expanded
from oformer.nn.sums import points_split
from tests.forked import printed

kernels = pytest.importorskip("oformer.engine.kernels.attention_kernels", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

KINDS = ("galerkin", "fourier")
NORMS = ("channels", "layernorm", "none")
BATCH, POINTS = 2, 21 if DEVICE.type == "cpu" else 85  # more than one program takes, see below
# Coordinates (0: no rotary encoding), width and heads. 96 fills one tile by three quarters, or two of 32 and 16 pairs.
SHAPES = ((0, 16, 2), (1, 16, 1), (2, 96, 4), (3, 24, 1))

each_kind = pytest.mark.parametrize("kind", KINDS)
multiplied_or_given = pytest.mark.parametrize("multiplied", [True, False], ids=["multiplied", "given"])
itself_or_source = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Programs of 16 points at a width of 16, so that there is a second one, which is not full."""
    monkeypatch.setattr(kernels, "_TILE", 16 * 8)
    monkeypatch.setattr(kernels, "_ROWS", 16 if DEVICE.type == "cpu" else kernels._ROWS)


class Calls(list[int]):
    """The number of parts of each call of the kernel, and whether it multiplied."""

    def __init__(self):
        super().__init__()
        self.multiplied: list[bool] = []


@pytest.fixture
def calls(monkeypatch) -> Calls:
    """Have the kernel used on any device."""
    found = Calls()
    original = FusedAttention._arranged_on_chip

    def counted(self, x, matrix, parts, *others):
        found.append(len(parts))
        found.multiplied.append(matrix is not None)
        return original(self, x, matrix, parts, *others)

    monkeypatch.setattr(attention, "fused_arrangement", lambda device: True)
    monkeypatch.setattr(attention, "fused_sums", lambda device: False)  # another kernel, which has tests of its own
    monkeypatch.setattr(FusedAttention, "_arranged_on_chip", counted)
    return found


def attention_layer(kind: str, norm: str, dim: int, width: int, heads: int) -> FusedAttention:
    layer = FusedAttention(width, heads, kind, norm, Rotary(dim, width, 3.0) if dim else None)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))  # also the gains of an affine norm, which start as ones
    return layer.to(DEVICE)


def quadrature(count: int, batch: int = BATCH) -> Tensor:
    weights = torch.rand(batch, count, device=DEVICE) + 0.2
    return weights / weights.sum(1, keepdim=True)


class Case:
    """The inside of one layer, to be arranged plainly and by the kernel, which multiplies or is given a projection."""

    def __init__(
        self, kind: str, norm: str, dim: int, width: int, heads: int, names: str | None = None, multiplied: bool = False
    ):
        self.layer = attention_layer(kind, norm, dim, width, heads)
        names = names or ("qkv" if kind == "galerkin" else "qk")
        self.parts = tuple(self.layer._part(name) for name in names)
        shape = (width,) if multiplied else (len(names), heads, width)
        self.x = 0.5 + torch.randn(BATCH, POINTS, *shape, device=DEVICE)
        self.matrix = torch.randn(len(names) * heads * width, width, device=DEVICE) / width**0.5 if multiplied else None
        self.coords = torch.rand(BATCH, POINTS, max(dim, 1), device=DEVICE)
        self.weights = quadrature(POINTS)

    @property
    def leaves(self) -> list[Tensor]:
        return [p for part in self.parts if part.normalized for p in self.layer.normalize[part.name].parameters()]

    def run(self, fused: bool, x: Tensor, matrix: Tensor | None) -> list[Tensor]:
        tables = None if self.layer.rotary is None else self.layer.rotary.tables(self.coords)
        if fused:
            return self.layer._arranged_on_chip(x, matrix, self.parts, tables, self.weights)
        if matrix is not None:
            x = F.linear(x, matrix).unflatten(-1, (len(self.parts), self.layer.heads, -1))
        return self.layer._arranged(x, self.parts, tables, self.weights)

    def results(self, fused: bool, directions: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """What is made of the parts; and the gradients of what comes in, of the matrix and of the gains of norms."""
        one = self.x[:1] if expanded(self.x) else self.x
        x = one.detach().requires_grad_()
        matrix = None if self.matrix is None else self.matrix.detach().requires_grad_()
        made = self.run(fused, x.expand_as(self.x), matrix)
        pairs = [(y, g) for y, g in zip(made, directions, strict=True) if g is not None]
        leaves = [x, *([] if matrix is None else [matrix]), *self.leaves]
        found = torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        return made, [torch.zeros_like(y) if g is None else g for g, y in zip(found, leaves, strict=True)]

    def check(self) -> list[Tensor]:
        """Same values, same gradients."""
        directions = self.directions()
        (fused, gradients), (plain, of_plain) = (self.results(chosen, directions) for chosen in (True, False))
        for part, got, expected in zip(self.parts, fused, plain, strict=True):
            assert got.is_contiguous()
            close(got, expected, part.name)
        for got, expected in zip(gradients, of_plain, strict=True):
            close(got, expected, "gradient")
        return fused

    def directions(self) -> list[Tensor | None]:
        """Gradients of what is made of the parts."""
        (batch, points, *_, width), heads = self.x.shape, self.layer.heads
        return [
            torch.randn(batch, heads, points, width, device=DEVICE)
            if part.heads_first
            else torch.randn(batch, points, heads, width, device=DEVICE)
            for part in self.parts
        ]


def close(got: Tensor, expected: Tensor, name: str = "") -> None:
    torch.testing.assert_close(
        got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item(), msg=lambda m: f"{name}: {m}"
    )


# Each kind with each norm and with each shape.
PAIRWISE = [
    (kind, norm, *((True, SHAPES[1]), (True, SHAPES[2]), (True, SHAPES[3]), (False, SHAPES[2]), (True, SHAPES[0]))[at])
    for n, norm in enumerate(NORMS)
    for k, kind in enumerate(KINDS)
    for at in ((n + 2 * k) % 5, (n + 2 * k + 3) % 5)
]


@pytest.mark.parametrize(("kind", "norm", "multiplied", "shape"), PAIRWISE, ids=str)
def test_values_and_gradients_are_the_plain_ones(monkeypatch, kind, norm, shape, multiplied):
    monkeypatch.setattr(kernels, "_TILE", 16 * {16: 8, 24: 16, 96: 64}[shape[1]])  # 16 points again
    case = Case(kind, norm, *shape, multiplied=multiplied)
    for part, x in zip(case.parts, case.check(), strict=True):
        first = part.name != "q" and kind == "galerkin"
        _, width, heads = shape
        assert x.shape == ((BATCH, heads, POINTS, width) if first else (BATCH, POINTS, heads, width))


def test_pieces_are_powers_of_two_that_waste_little():
    from oformer.engine.kernels.tiles_kernels import edges_of  # needs Triton

    edges = {16: (0, 16), 32: (0, 16), 64: (0, 32), 96: (0, 32, 48), 128: (0, 64), 24: (0, 16), 40: (0, 16, 32)}
    assert {width: edges_of(width // 2) for width in edges} == edges


@multiplied_or_given
@pytest.mark.parametrize("names", ["q", "kv"])
def test_the_parts_of_one_side_of_cross_attention(names, multiplied):
    Case("galerkin", "layernorm", 2, 16, 2, names, multiplied).check()


@multiplied_or_given
def test_what_samples_share_is_read_where_it_lies(multiplied):
    case = Case("galerkin", "channels", 2, 16, 2, multiplied=multiplied)
    case.coords, case.weights = case.coords[:1].expand(BATCH, -1, -1), case.weights[:1].expand(BATCH, -1)
    case.check()
    case.x = case.x[:1].expand_as(case.x)
    case.check()


def test_tables_and_weights_may_come_for_one_sample_or_repeat_it():
    case = Case("galerkin", "channels", 2, 16, 2)
    given = [*case.layer.rotary.tables(case.coords[:1]), case.weights[:1].sqrt()]
    flags = [list(choices) for choices in zip(*case.parts, strict=True)][1:]
    repeated = [x.expand(BATCH, *x.shape[1:]) for x in given]
    copied, *others = (
        kernels.arranged(case.x, None, *tensors, None, *flags, 2, 1e-5)
        for tensors in ([x.contiguous() for x in repeated], repeated, given)
    )
    for made in others:
        assert all(torch.equal(got, expected) for got, expected in zip(made, copied, strict=True))


def test_projections_that_are_views():
    case = Case("fourier", "layernorm", 1, 16, 2)
    wide = torch.randn(BATCH, POINTS + 3, 4, 2, 32, device=DEVICE)
    views = [wide[:, 2:-1, 1:3, :, 5:21], wide[:, 2:-1, 1:3, :, ::2], wide.transpose(2, 3)[:, 3:, :, :2, :16].mT.mT]
    for view in views:
        assert not view.is_contiguous()
        case.x = view
        case.check()


def test_factors_that_are_views():
    case = Case("fourier", "layernorm", 1, 16, 2, multiplied=True)
    assert case.matrix is not None
    wide = torch.randn(BATCH, POINTS + 3, 32, device=DEVICE)
    for view in (wide[:, 2:-1, 5:21], wide[:, 2:-1, ::2], wide[:, 3:, 16:].mT.contiguous().mT):
        assert not view.is_contiguous()
        case.x, case.matrix = view, case.matrix.mT.contiguous().mT
        case.check()


@multiplied_or_given
def test_gradients_may_be_absent_or_lie_otherwise(multiplied):
    case = Case("galerkin", "layernorm", 2, 16, 2, multiplied=multiplied)
    q, k, v = case.directions()
    assert k is not None
    for directions in ([None, k.mT.contiguous().mT, None], [q, None, None], [None, None, v]):
        (_, fused), (_, plain) = (case.results(chosen, directions) for chosen in (True, False))
        for got, expected in zip(fused, plain, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_costs_one_rounding(kind, dtype):
    case = Case(kind, "layernorm", 2, 16, 2)
    case.x = case.x.to(dtype).float()
    directions = [g.to(dtype).float() for g in case.directions()]
    exact, (expected, *of_gains) = case.results(False, directions)
    case.x = case.x.to(dtype)
    made, (got, *gains) = case.results(True, [g.to(dtype) for g in directions])
    # Half a step to the nearest; but Triton's interpreter cuts bfloat16 off.
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    for one, other in zip([*made, got], [*exact, expected], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, rtol=1.01 * step, atol=1e-6)
    for one, other in zip(gains, of_gains, strict=True):  # sums of many, in float32
        assert one.dtype == torch.float32
        close(one, other)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_in_half_precision_is_not_rounded_before_its_norm(kind, dtype):
    case = Case(kind, "layernorm", 2, 96, 2, multiplied=True)
    assert case.matrix is not None
    case.x, case.matrix = case.x.to(dtype), case.matrix.to(dtype)
    directions = [g.to(dtype) for g in case.directions()]
    made, gradients = case.results(True, directions)
    case.x, case.matrix = case.x.float(), case.matrix.float()
    exact, expected = case.results(False, [g.float() for g in directions])
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    for one, other in zip(made, exact, strict=True):
        assert one.dtype == dtype
        # Sums may be taken in another order.
        torch.testing.assert_close(one.float(), other, rtol=1.01 * step, atol=1e-5)
    for place, (one, other) in enumerate(zip(gradients, expected, strict=True)):
        half = place < 2  # of x and of the matrix; the gains are float32
        assert one.dtype == (dtype if half else torch.float32)
        assert (one.float() - other).norm() < (2 * step if half else 1e-5) * other.norm()


def test_statistics_far_from_zero_and_channels_that_are_all_the_same():
    case = Case("galerkin", "channels", 2, 16, 2)
    case.x = 1000 + 1e-2 * torch.randn_like(case.x)
    exact = case.run(False, case.x.double(), None)
    for got, expected in zip(case.run(True, case.x, None), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    case.x = torch.full_like(case.x, 7.0)
    (_, k, v), (gradient,) = case.results(True, case.directions())
    assert not k.any()
    assert not v.any()
    assert gradient.isfinite().all()


def sides(cross: bool, width: int = 16, shared: bool = False) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Values, places and weights of the queries and, for cross-attention, of the source."""

    def points(count: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = batch, count
        return torch.randn(*shape, width).to(DEVICE), torch.rand(*shape, 2).to(DEVICE), quadrature(count, batch)

    if not cross:
        return [points(21, BATCH)]
    z, coords, weights = points(19, 1 if shared else BATCH)
    if shared:
        z, coords, weights = z.expand(BATCH, -1, -1), coords.expand(BATCH, -1, -1), weights.expand(BATCH, -1)
    return [(z, coords, weights), points(21, BATCH)]


def call(layer: FusedAttention, operands: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    return layer(*[tensor for side in operands for tensor in side])


def with_gradients(layer: FusedAttention, operands: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """The output, and the gradients of all parameters and of all values."""
    values = [x.detach().requires_grad_() for x, _, _ in operands]
    out = call(layer, [(x, *others) for x, (_, *others) in zip(values, operands, strict=True)])
    leaves = [*values, *layer.parameters()]
    return [out, *torch.autograd.grad(out.square().sum() + out.sin().sum(), leaves)]


@pytest.mark.parametrize(
    ("kind", "norm", "multiplied", "cross", "shared", "heads"),
    [
        ("galerkin", "layernorm", True, False, False, 2),
        ("fourier", "none", True, False, False, 2),
        ("galerkin", "channels", False, False, False, 2),
        ("fourier", "layernorm", True, True, False, 1),
        ("galerkin", "none", True, True, False, 1),
        ("fourier", "channels", False, True, True, 2),
        ("galerkin", "layernorm", True, True, True, 2),
    ],
)
def test_a_whole_layer_is_the_plain_one(monkeypatch, calls, kind, norm, cross, shared, heads, multiplied):
    monkeypatch.setattr(attention, "rounded_products", lambda: multiplied)
    layer, operands = attention_layer(kind, norm, 2, 16, heads), sides(cross, shared=shared)
    fused = with_gradients(layer, operands)
    values = 1 if kind == "galerkin" else 0
    assert calls == ([1, 1 + values] if cross else [2 + values])
    assert all(used == multiplied for used in calls.multiplied)
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    plain = with_gradients(layer, operands)
    assert len(calls) == (2 if cross else 1)
    for got, expected in zip(fused, plain, strict=True):
        assert expected.abs().max() > 1e-4
        close(got, expected)


def test_a_whole_layer_under_autocast(monkeypatch, calls):
    layer, operands = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross=False)
    exact = with_gradients(layer, operands)
    with torch.autocast(DEVICE.type, torch.float16):
        fused = with_gradients(layer, operands)
        monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
        plain = with_gradients(layer, operands)
    assert calls.multiplied == [False, True]  # float32 is exact, unless it may be rounded
    for one, got, expected in zip(fused, plain, exact, strict=True):
        assert one.dtype == got.dtype
        size = expected.norm()
        assert (one - expected).norm() < 1.2 * (got - expected).norm() + 1e-3 * size
        assert (got - expected).norm() < 0.01 * size


@each_kind
@itself_or_source
def test_padding_and_order_change_nothing(monkeypatch, calls, kind, cross):
    monkeypatch.setattr(attention, "rounded_products", lambda: True)
    layer, operands = attention_layer(kind, "channels", 2, 16, 2), sides(cross)
    out = call(layer, operands)
    padded = [
        tuple(
            torch.cat([t, far * torch.randn_like(t[:, :5])], 1) for t, far in zip(side, (1e3, 50.0, 0.0), strict=True)
        )
        for side in operands
    ]
    close(call(layer, padded)[:, : out.shape[1]], out)
    orders = [torch.randperm(side[0].shape[1], device=DEVICE) for side in operands]
    shuffled = [tuple(t[:, order] for t in side) for side, order in zip(operands, orders, strict=True)]
    close(call(layer, shuffled), out[:, orders[0]])
    assert len(calls) == (6 if cross else 3)


@each_kind
def test_sums_over_points_that_come_in_chunks(monkeypatch, calls, kind):
    monkeypatch.setattr(attention, "rounded_products", lambda: True)
    sum_in_chunks(attention_layer(kind, "channels", 2, 16, 2))
    assert len(calls) == 3


def sum_in_chunks(layer: FusedAttention) -> Tensor:
    """The sum over all points, which is that of the sums over chunks."""
    ((x, coords, weights),), found = sides(cross=False), []

    def keep(part: Tensor) -> Tensor:
        found.append(part)
        return part

    with points_split(keep):
        call(layer, [(x, coords, weights)])
        for part in (slice(0, 9), slice(9, None)):
            call(layer, [(x[:, part], coords[:, part], weights[:, part])])
    whole, first, second = found
    close(first + second, whole)
    return whole


def test_it_is_used_only_where_it_fits(monkeypatch, calls):
    operands = sides(cross=False)
    x, coords, weights = operands[0]
    for kind, norm in [("galerkin", "points"), ("fourier", "points-detached"), ("softmax", "channels")]:
        call(attention_layer(kind, norm, 2, 16, 2), operands)
    layer = attention_layer("galerkin", "channels", 2, 16, 2)
    layer(x, coords, weights.clone().requires_grad_())
    layer.double()(x.double(), coords.double(), weights.double())
    odd = attention_layer("galerkin", "channels", 0, 7, 2)
    odd(x[..., :7], coords, weights)
    torch.export.export(layer.float(), (x, coords, weights))
    assert not calls
    call(layer, operands)
    assert calls == [3]


def test_it_multiplies_where_tensor_cores_do_and_heads_are_narrow(monkeypatch, calls):
    def multiplies(width: int, **setting) -> bool:
        calls.multiplied.clear()
        with torch.no_grad(), torch.autocast(DEVICE.type, **setting):
            call(attention_layer("galerkin", "channels", 2, width, 1), sides(cross=False, width=width))
        return calls.multiplied == [True]

    assert not multiplies(16, enabled=False)
    for dtype in (torch.float16, torch.bfloat16):
        assert multiplies(128, dtype=dtype)
        assert not multiplies(144, dtype=dtype)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert multiplies(16, enabled=False)


def test_values_that_samples_share_on_grids_that_differ_are_projected_once(monkeypatch, calls):
    monkeypatch.setattr(attention, "rounded_products", lambda: True)
    layer, ((z, coords, weights),) = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross=False)
    operands = [(z[:1].expand_as(z), coords, weights)]
    fused = with_gradients(layer, operands)
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    for got, expected in zip(fused, with_gradients(layer, operands), strict=True):
        close(got, expected)
    assert calls.multiplied == [False]


def test_it_is_not_used_on_a_cpu_nor_against_the_switch(monkeypatch):
    assert not attention.fused_arrangement(torch.device("cpu"))
    asked = []
    monkeypatch.setattr(gpu, "fused_kernels", lambda device, row: asked.append(device) or True)
    attention._has_arrangement.cache_clear()
    assert attention.fused_arrangement(torch.device("cuda", 0))
    assert attention.fused_arrangement(torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]
    attention._has_arrangement.cache_clear()
    monkeypatch.setitem(sys.modules, "oformer.engine.kernels.attention_kernels", None)
    with pytest.warns(UserWarning, match="needs Triton"):
        assert not attention.fused_arrangement(torch.device("cuda", 0))
    attention._has_arrangement.cache_clear()


def test_the_operator_keeps_what_torch_asks_of_operators():
    gains = nn.Parameter(torch.randn(1, 2, 8, device=DEVICE))
    p = torch.randn(2, 5, 2, 1, 8, device=DEVICE, requires_grad=True)
    x, matrix = (torch.randn(*shape, 8, device=DEVICE, requires_grad=True) for shape in ((2, 5), (16,)))
    cos, sin = Rotary(1, 8).to(DEVICE).tables(torch.rand(2, 5, 1, device=DEVICE))
    choices = [False, True], [True, True], [False, True], [False, True]
    without = *choices[:1], [False] * 2, *choices[2:]
    for given in ((p, None), (x, matrix)):
        torch.library.opcheck(kernels.arranged, (*given, cos, sin, quadrature(5), gains, *choices, 1, 1e-5))
        torch.library.opcheck(kernels.arranged, (*given, None, None, quadrature(5), None, *without, 1, 1e-5))


COMPILED = """
import torch
from oformer.engine import attention
from oformer.nn.rotary import Rotary

device = kernels_everywhere()
attention.fused_sums = lambda device: False
layer = attention.FusedAttention(16, 2, "galerkin", "layernorm", Rotary(2, 16, 3.0)).to(device)
x, coords, weights = (torch.rand(3, 7, n, device=device) for n in (16, 2, 1))
compiled, given, wanted = Compiled(layer), (x.requires_grad_(), coords, weights[..., 0]), [x, *layer.parameters()]
compiled.check(given, wanted, rtol=1e-4, atol=1e-4)  # the tables of angles are another kernel's when compiled
torch.set_float32_matmul_precision("high")
compiled.check(given, wanted, rtol=1e-4, atol=1e-4)
with torch.autocast(device, torch.float16):
    compiled.check(given, wanted, rtol=1e-3, atol=1e-3)
"""


def test_a_compiled_layer_keeps_it_whole():
    given, *multiplied = printed(COMPILED)
    for nodes in (given, *multiplied):  # each setting compiles anew
        assert nodes.count("oformer.arranged.default") == 1
        assert "layer_norm" not in nodes
    assert "linear" in given
    assert len(multiplied) == 2
    assert not any("linear" in nodes for nodes in multiplied)


@pytest.mark.parametrize("cross", [False, True])
def test_gradients_by_coordinates_and_weights_come_from_the_plain_layer(monkeypatch, calls, cross):
    """Kernels take both as constants: they would leave their part of the derivative out without a word."""
    layer, operands = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross)

    def found() -> list[Tensor]:
        given = [[t.detach().requires_grad_() for t in side] for side in operands]
        value = call(layer, [tuple(side) for side in given]).square().sum()
        return list(torch.autograd.grad(value, [t for side in given for t in side], allow_unused=True))

    fused = found()
    assert not calls
    monkeypatch.setattr(attention, "fused_arrangement", lambda device: False)
    for got, expected in zip(fused, found(), strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            close(got, expected)
    with torch.no_grad():  # without gradients it is the kernel's
        monkeypatch.setattr(attention, "fused_arrangement", lambda device: True)
        call(layer, [tuple(t.detach().requires_grad_() for t in side) for side in operands])
    assert calls


def test_second_derivatives_come_from_the_plain_layer_outside_of_training(calls):
    layer, ((x, coords, weights),) = attention_layer("galerkin", "channels", 2, 16, 2).eval(), sides(cross=False)
    block = FusedSelfAttentionBlock(16, layer, "gated", layernorm=True).to(DEVICE).eval()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(block(x, coords, weights).square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x)
    assert bend.abs().max() > 0
    assert not calls
    with torch.no_grad():
        block(x, coords, weights)
    assert calls


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_of_torch_func_come_from_the_plain_layer(calls):
    layer, ((x, coords, weights),) = attention_layer("galerkin", "channels", 2, 16, 2), sides(cross=False)
    direction = torch.randn_like(x)
    _, slope = torch.func.jvp(lambda x: layer(x, coords, weights), (x,), (direction,))
    step = 1e-3
    difference = (layer(x + step * direction, coords, weights) - layer(x - step * direction, coords, weights)) / (
        2 * step
    )
    torch.testing.assert_close(slope, difference, rtol=1e-2, atol=1e-2 * float(slope.detach().abs().max()))
    each = torch.func.vmap(lambda x, c, w: layer(x[None], c[None], w[None])[0])(x, coords, weights)
    close(each, layer(x, coords, weights))
