"""The kernel between projection and products against the plain code. Without a GPU, Triton's interpreter runs it."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from oformer import switches
from oformer.nn import attention
from oformer.nn.attention import Attention
from oformer.nn.rotary import Rotary, expanded
from oformer.nn.sums import points_split

kernels = pytest.importorskip("oformer.nn.attention_kernels", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

KINDS = ("galerkin", "fourier")
NORMS = ("channels", "layernorm", "none")
BATCH, POINTS = 2, 21
# Coordinates (0: no rotary encoding), width and heads. 96 fills its tiles by three quarters.
SHAPES = ((0, 16, 2), (1, 16, 1), (2, 96, 4), (3, 24, 1))

each_kind = pytest.mark.parametrize("kind", KINDS)
each_norm = pytest.mark.parametrize("norm", NORMS)
itself_or_source = pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])


@pytest.fixture(autouse=True)
def several_programs(monkeypatch):
    """Programs of 16 points at a width of 16, so that there is a second one, which is not full."""
    monkeypatch.setattr(kernels, "_TILE", 16 * 8)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Have the kernel used on any device; the number of parts of each call."""
    found = []
    original = Attention._arranged_on_chip

    def counted(self, projected, *others):
        found.append(projected.shape[2])
        return original(self, projected, *others)

    monkeypatch.setattr(attention, "fused_arrangement", lambda device: True)
    monkeypatch.setattr(Attention, "_arranged_on_chip", counted)
    return found


def attention_layer(kind: str, norm: str, dim: int, width: int, heads: int) -> Attention:
    layer = Attention(width, heads, kind, norm, Rotary(dim, width, 3.0) if dim else None)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))  # also the gains of an affine norm, which start as ones
    return layer.to(DEVICE)


def quadrature(count: int, batch: int = BATCH) -> Tensor:
    weights = torch.rand(batch, count, device=DEVICE) + 0.2
    return weights / weights.sum(1, keepdim=True)


class Case:
    """The inside of one layer, to be arranged plainly and by the kernel."""

    def __init__(self, kind: str, norm: str, dim: int, width: int, heads: int, names: str | None = None):
        self.layer = attention_layer(kind, norm, dim, width, heads)
        names = names or ("qkv" if kind == "galerkin" else "qk")
        self.parts = tuple(self.layer._part(name) for name in names)
        self.projected = 0.5 + torch.randn(BATCH, POINTS, len(names), heads, width, device=DEVICE)
        self.coords = torch.rand(BATCH, POINTS, max(dim, 1), device=DEVICE)
        self.weights = quadrature(POINTS)

    @property
    def leaves(self) -> list[Tensor]:
        return [p for part in self.parts if part.normalized for p in self.layer.normalize[part.name].parameters()]

    def run(self, fused: bool, p: Tensor) -> list[Tensor]:
        tables = None if self.layer.rotary is None else self.layer.rotary.tables(self.coords)
        arrange = self.layer._arranged_on_chip if fused else self.layer._arranged
        return arrange(p, self.parts, tables, self.weights)

    def results(self, fused: bool, directions: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """What is made of the parts; and the gradients of the projection and of the gains of norms."""
        one = self.projected[:1] if expanded(self.projected) else self.projected
        p = one.detach().requires_grad_()
        made = self.run(fused, p.expand_as(self.projected))
        pairs = [(x, g) for x, g in zip(made, directions, strict=True) if g is not None]
        found = torch.autograd.grad([x for x, _ in pairs], [p, *self.leaves], [g for _, g in pairs], allow_unused=True)
        return made, [torch.zeros_like(x) if g is None else g for g, x in zip(found, [p, *self.leaves], strict=True)]

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
        batch, points, _, heads, width = self.projected.shape
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


@each_kind
@each_norm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_the_plain_ones(monkeypatch, kind, norm, shape):
    monkeypatch.setattr(kernels, "_TILE", 16 * {16: 8, 24: 16, 96: 64}[shape[1]])  # 16 points again
    case = Case(kind, norm, *shape)
    for part, x in zip(case.parts, case.check(), strict=True):
        first = part.name != "q" and kind == "galerkin"
        heads, width = case.projected.shape[3:]
        assert x.shape == ((BATCH, heads, POINTS, width) if first else (BATCH, POINTS, heads, width))


@pytest.mark.parametrize("names", ["q", "kv"])
def test_the_parts_of_one_side_of_cross_attention(names):
    Case("galerkin", "layernorm", 2, 16, 2, names).check()


def test_what_samples_share_is_read_where_it_lies():
    case = Case("galerkin", "channels", 2, 16, 2)
    case.coords, case.weights = case.coords[:1].expand(BATCH, -1, -1), case.weights[:1].expand(BATCH, -1)
    case.check()
    case.projected = case.projected[:1].expand(BATCH, -1, -1, -1, -1)
    case.check()


def test_tables_and_weights_may_come_for_one_sample_or_repeat_it():
    case = Case("galerkin", "channels", 2, 16, 2)
    given = [*case.layer.rotary.tables(case.coords[:1]), case.weights[:1].sqrt()]
    flags = [list(choices) for choices in zip(*case.parts, strict=True)][1:]
    repeated = [x.expand(BATCH, *x.shape[1:]) for x in given]
    copied, *others = (
        kernels.arranged(case.projected, *tensors, None, *flags, 2, 1e-5)
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
        case.projected = view
        case.check()


def test_gradients_may_be_absent_or_lie_otherwise():
    case = Case("galerkin", "layernorm", 2, 16, 2)
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
    case.projected = case.projected.to(dtype).float()
    directions = [g.to(dtype).float() for g in case.directions()]
    exact, (expected, *of_gains) = case.results(False, directions)
    case.projected = case.projected.to(dtype)
    made, (got, *gains) = case.results(True, [g.to(dtype) for g in directions])
    # Half a step to the nearest; but Triton's interpreter cuts bfloat16 off.
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and DEVICE.type == "cpu" else 2)
    for one, other in zip([*made, got], [*exact, expected], strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, rtol=1.01 * step, atol=1e-6)
    for one, other in zip(gains, of_gains, strict=True):  # sums of many, in float32
        assert one.dtype == torch.float32
        close(one, other)


def test_statistics_far_from_zero_and_channels_that_are_all_the_same():
    case = Case("galerkin", "channels", 2, 16, 2)
    case.projected = 1000 + 1e-2 * torch.randn_like(case.projected)
    exact = case.run(False, case.projected.double())
    for got, expected in zip(case.run(True, case.projected), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    case.projected = torch.full_like(case.projected, 7.0)
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


def call(layer: Attention, operands: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    return layer(*[tensor for side in operands for tensor in side])


def with_gradients(layer: Attention, operands: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """The output, and the gradients of all parameters and of all values."""
    values = [x.detach().requires_grad_() for x, _, _ in operands]
    out = call(layer, [(x, *others) for x, (_, *others) in zip(values, operands, strict=True)])
    leaves = [*values, *layer.parameters()]
    return [out, *torch.autograd.grad(out.square().sum() + out.sin().sum(), leaves)]


@each_kind
@each_norm
@pytest.mark.parametrize(
    ("cross", "shared", "heads"),
    [(False, False, 2), (True, False, 1), (True, True, 2)],
    ids=["self", "cross, one head", "cross, shared grid"],
)
def test_a_whole_layer_is_the_plain_one(monkeypatch, calls, kind, norm, cross, shared, heads):
    layer, operands = attention_layer(kind, norm, 2, 16, heads), sides(cross, shared=shared)
    fused = with_gradients(layer, operands)
    values = 1 if kind == "galerkin" else 0
    assert calls == ([1, 1 + values] if cross else [2 + values])
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
    assert len(calls) == 2
    for one, got, expected in zip(fused, plain, exact, strict=True):
        assert one.dtype == got.dtype
        size = expected.norm()
        assert (one - expected).norm() < 1.2 * (got - expected).norm() + 1e-3 * size
        assert (got - expected).norm() < 0.01 * size


@each_kind
@itself_or_source
def test_padding_and_order_change_nothing(calls, kind, cross):
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
def test_sums_over_points_that_come_in_chunks(calls, kind):
    layer, ((x, coords, weights),) = attention_layer(kind, "channels", 2, 16, 2), sides(cross=False)
    found = []

    def keep(part: Tensor) -> Tensor:
        found.append(part)
        return part

    with points_split(keep):
        call(layer, [(x, coords, weights)])
        for part in (slice(0, 9), slice(9, None)):
            call(layer, [(x[:, part], coords[:, part], weights[:, part])])
    whole, first, second = found
    close(first + second, whole)
    assert len(calls) == 3


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


def test_it_is_not_used_on_a_cpu_nor_against_the_switch(monkeypatch):
    assert not attention.fused_arrangement(torch.device("cpu"))
    asked = []
    monkeypatch.setattr(switches, "fused_kernels", lambda device: asked.append(device) or True)
    attention._fused_arrangement.cache_clear()
    assert attention.fused_arrangement(torch.device("cuda", 0))
    assert attention.fused_arrangement(torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]
    attention._fused_arrangement.cache_clear()
    monkeypatch.setitem(sys.modules, "oformer.nn.attention_kernels", None)
    with pytest.warns(UserWarning, match="needs Triton"):
        assert not attention.fused_arrangement(torch.device("cuda", 0))
    attention._fused_arrangement.cache_clear()


def test_the_operator_keeps_what_torch_asks_of_operators():
    gains = nn.Parameter(torch.randn(1, 2, 8, device=DEVICE))
    p = torch.randn(2, 5, 2, 1, 8, device=DEVICE, requires_grad=True)
    cos, sin = Rotary(1, 8).to(DEVICE).tables(torch.rand(2, 5, 1, device=DEVICE))
    choices = [False, True], [True, True], [False, True], [False, True]
    torch.library.opcheck(kernels.arranged, (p, cos, sin, quadrature(5), gains, *choices, 1, 1e-5))
    torch.library.opcheck(
        kernels.arranged, (p, None, None, quadrature(5), None, *choices[:1], [False] * 2, *choices[2:], 1, 1e-5)
    )


COMPILED = """
import torch
from oformer import switches
from oformer.nn import attention
from oformer.nn.rotary import Rotary

switches.fused_kernels = lambda device: True
device = "cuda" if torch.cuda.is_available() else "cpu"
layer, graphs = attention.Attention(16, 2, "galerkin", "layernorm", Rotary(2, 16, 3.0)).to(device), []

def look(graph, inputs):
    graphs.append(graph)
    return aot_eager(graph, inputs)

aot_eager = torch._dynamo.lookup_backend("aot_eager")
x, coords, weights = (torch.rand(3, 7, n, device=device) for n in (16, 2, 1))
x.requires_grad_()
results = []
for function in (layer, torch.compile(layer, backend=look, dynamic=False, fullgraph=True)):
    out = function(x, coords, weights[..., 0])
    results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
for one, other in zip(*results, strict=True):
    torch.testing.assert_close(one, other)
print(*(node.target for graph in graphs for node in graph.graph.nodes))
"""


def test_a_compiled_layer_keeps_it_whole():
    """Without the shape checks, which cannot compile."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("oformer.arranged.default") == 1
    assert "layer_norm" not in done.stdout
