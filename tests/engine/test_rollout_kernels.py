"""The fused rollout equals the plain one, values and gradients. The kernels need a Hopper GPU; how weights are laid out
for them, and in which order they are asked for, is tested anywhere."""

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oformer.engine import rollout
from oformer.engine.rollout import FusedOFormer
from oformer.experiments.recipes import recipe_named
from oformer.fields import Field, Spec
from oformer.models.oformer import Decoder, Encoder, OFormerConfig, Propagator, Query

kernels = pytest.importorskip("oformer.engine.kernels.rollout_kernels", exc_type=ImportError)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

HALVES = [torch.bfloat16, torch.float16]
# Its tanh is good to 5e-4, which only the coarser of the two hides.
GELU = {torch.bfloat16: 0.0, torch.float16: 5e-4}

Case = tuple[Tensor, kernels.Chain, kernels.Chain, Tensor, int]


def case(
    rows: int, width: int, layers: int, read: tuple[int, int], shared: int, activation: str, channels: int
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    steps = tuple(normal(width, width) / width**0.5 for _ in range(layers))
    inner, outer = read
    reads = (
        normal(inner, width) / width**0.5,
        normal(outer, inner) / inner**0.5,
        normal(channels, outer) / outer**0.5,
    )
    beside = rows if shared == rows else 1
    step = kernels.Chain(steps, 0.3 * normal(shared, width), "gelu")
    return normal(rows, width), step, kernels.Chain(reads, 0.3 * normal(beside, inner), activation), normal(channels), 4


def leaves(c: Case) -> list[Tensor]:
    return [c[0], *c[1].weights, c[1].drive, *c[2].weights, c[2].drive, c[3]]


def fresh(c: Case) -> Case:
    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_()

    chains = [kernels.Chain(tuple(map(leaf, x.weights)), leaf(x.drive), x.activation) for x in c[1:3]]
    return leaf(c[0]), *chains, leaf(c[3]), c[4]  # pyright: ignore


def small_model(features: int = 0):
    """A model whose rollout the kernels are written for; the values it reads may depend on features of the query."""
    spec = Spec(dim=2, in_times=2, in_channels=1, query_channels=features, out_times=3, out_channels=1)
    config = OFormerConfig(
        encoder=Encoder(width=32, depth=1),
        query=Query(width=64, fourier_features=16, hidden=(64,), heads=2),
        propagator=Propagator(depth=1, width=256, layers=3, layernorm=True, context=("coords",)),
        decoder=Decoder(hidden=(192, 192), layernorm=True, context=("features",) if features else ()),
    )
    torch.manual_seed(0)
    model = FusedOFormer(config, spec)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model


def small_batch(shared: bool, device: str = "cpu", features: int = 0) -> tuple[Field, Field]:
    """Input and query of three samples, which share a grid or do not."""
    grid = torch.rand(1 if shared else 3, 100, 2).to(device).expand(3, -1, -1)  # a copy would not be shared any more
    query = Field.of(grid, torch.randn(3, 1, 100, features).to(device)) if features else Field.of(grid)
    return Field.of(grid, torch.randn(3, 2, 100, 1).to(device)), query


def error(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ((4096, 384, 3, (192, 192), 1024, "gelu", 1), 4096),
        ((4096, 384, 3, (192, 192), 1024, "gelu", 1), 1024),
        ((2 * 1000, 256, 4, (256, 128), 2000, "relu", 4), 4096),
    ],
    ids=["navier-stokes", "in parts", "airfoil, padded"],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_values_and_gradients(sizes, part, dtype):
    """As near to float32 as autocast of the plain code comes, or nearer, but for what the faster GELU misses."""
    exact, rounded, fused = (fresh(case(*sizes)) for _ in range(3))
    expected = kernels.march_plainly(*exact, 1e-5)
    with torch.autocast("cuda", dtype):
        usual = kernels.march_plainly(*rounded, 1e-5).float()
    got = kernels.march(*fused, 1e-5, dtype, part)
    direction = torch.randn_like(expected)
    for values in (expected, usual, got):
        (values * direction).sum().backward()
    assert error(got, expected) < 1.2 * error(usual, expected) + GELU[dtype]
    for mine, theirs, truth in zip(*map(leaves, (fused, rounded, exact)), strict=True):
        assert error(mine.grad, truth.grad) < max(1.2 * error(theirs.grad, truth.grad) + GELU[dtype], 1e-5)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("features", [0, 3])
def test_a_model_gives_the_same_values_and_gradients(features, shared, dtype, monkeypatch):
    """With everything around the kernels: norms that are folded away, contexts, and samples that share a grid."""
    model, (input, query) = small_model(features).cuda(), small_batch(shared, "cuda", features)
    found = {}
    for name, autocast in (("exact", False), ("plain", True), ("fused", True)):
        if name == "plain":
            monkeypatch.setattr(type(model), "_marches_on_chip", lambda self, z: False)
        else:
            monkeypatch.undo()
        model.zero_grad()
        with torch.autocast("cuda", dtype, enabled=autocast):
            values = model(input, query).float()
        # Scaled up, as in training: gradients of such a mean are less than what float16 tells from zero.
        (2**16 * values.square().mean()).backward()
        found[name] = values, [p.grad.clone() for p in model.parameters()]
    assert error(found["fused"][0], found["exact"][0]) < 2 * error(found["plain"][0], found["exact"][0]) + GELU[dtype]
    fused, plain, exact = (found[name][1] for name in ("fused", "plain", "exact"))
    # The gradient of a single number may come out right by chance: what autocast misses usually is allowed as well.
    rounding = statistics.median(error(*pair) for pair in zip(plain, exact, strict=True))
    for mine, theirs, truth in zip(fused, plain, exact, strict=True):
        assert error(mine, truth) < 2 * max(error(theirs, truth), rounding) + 1e-4 + GELU[dtype]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("features", [0, 3])
def test_a_model_hands_the_kernels_its_own_equations(features, shared, monkeypatch):
    """Norms folded into matrices, contexts as drives: the plain twin of the kernels marches as the model does."""
    model, (input, query) = small_model(features), small_batch(shared, features=features)
    expected = model(input, query)

    def march(*arguments):
        *equations, dtype, part = arguments
        assert dtype in HALVES
        assert part > 0
        return kernels.march_plainly(*equations)

    monkeypatch.setattr(kernels, "march", march)
    monkeypatch.setattr(type(model), "_marches_on_chip", lambda self, z: True)
    torch.testing.assert_close(model(input, query), expected, rtol=1e-4, atol=1e-5)


class OnGpu(Tensor):
    """A tensor that says so."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["ns1", "ns2-full", "ns3", "ns2-part-plus", "airfoil"])
def test_recipes_that_march_do_so_on_a_hopper_gpu(name, monkeypatch):
    """Kernels exist for the networks of the recipe, and can be compared with plain code."""
    recipe = recipe_named(name)
    model = FusedOFormer(recipe.model, recipe.data_spec())
    asked = []

    def fused(index: int, *networks) -> bool:
        asked.append(networks[:-1])  # without whether gradients are asked for
        return kernels.supported(torch.device("cuda", index), *networks[:2])

    monkeypatch.setattr("oformer.engine.rollout.fused_rollout", fused)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert model._marches_on_chip(torch.zeros(1).as_subclass(OnGpu))
    monkeypatch.setattr(kernels, "march", lambda *equations: kernels.march_plainly(*equations[:-1]))
    assert kernels.agrees(torch.device("cpu"), *asked[0])


SHAPES = ((384, 384),) * 3, ((192, 384), (192, 192), (1, 192))


def test_kernels_that_say_something_else_are_noticed(monkeypatch):
    def check() -> bool:
        return kernels.agrees(torch.device("cpu"), *SHAPES, "gelu", torch.bfloat16)

    monkeypatch.setattr(kernels, "march", lambda *equations: kernels.march_plainly(*equations[:-1]))
    assert check()
    monkeypatch.setattr(kernels, "march", lambda *equations: kernels.march_plainly(*equations[:-1]).flip(0))
    assert not check()


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_kernels_that_do_not_work_are_not_used(fault, monkeypatch):
    class Broken:
        @staticmethod
        def supported(*_):
            return True

        @staticmethod
        def agrees(*_):
            if fault == "raises":
                raise RuntimeError("no such instruction")
            return False

    monkeypatch.setattr(rollout, "kernels_on", lambda device, module: Broken)
    with pytest.warns(UserWarning, match=r"using plain code \((its values are wrong|.*no such instruction)"):
        assert not rollout.fused_rollout.__wrapped__(0, *SHAPES, "gelu", torch.bfloat16, True)  # not as remembered


def tile(tape: Tensor, shape, number: int) -> Tensor:
    """A tile of the arena by its number, as a copy finds it."""
    side, row, column = kernels.SIDE, number // shape.pieces, number % shape.pieces
    return tape[row * side : (row + 1) * side, column * side : (column + 1) * side]


@pytest.mark.parametrize("sizes", [(3, 3, 192, 192, 1), (2, 4, 256, 128, 4)])
def test_the_schedule_finds_the_matrices_in_the_order_in_which_the_kernel_multiplies(sizes):
    """Each product, done tile by tile in the order of the schedule, is the product with the whole matrix."""
    shape = kernels._Shape(*sizes)
    side, p, width = kernels.SIDE, shape.pieces, shape.pieces * kernels.SIDE
    weights = [torch.randn(width, width) for _ in range(shape.steps)]
    weights += [torch.randn(shape.inner, width), torch.randn(shape.outer, shape.inner), torch.randn(2, shape.outer)]
    tape = kernels._tape(shape, weights)
    device = torch.device("cpu")

    def product(x: Tensor, out: int, numbers: list[int], rows_first: bool) -> Tensor:
        into, columns = -(-x.shape[1] // side), -(-out // side)
        x = F.pad(x, (0, -x.shape[1] % side))
        result = torch.zeros(len(x), columns * side)
        places = [(j, k) for j in range(columns) for k in range(into)]
        places = places if rows_first else [(j, k) for k in range(into) for j in range(columns)]
        for (j, k), number in zip(places, numbers, strict=True):
            part = x[:, k * side : (k + 1) * side] @ tile(tape, shape, number).T
            result[:, j * side : (j + 1) * side] += part
        return result[:, :out]

    def follow(schedule: Tensor, steps: list) -> None:
        numbers = schedule[:, 0].tolist()
        for x, matrix, rows_first in steps:
            if matrix is None:  # tiles that are no weights
                del numbers[:x]
                continue
            count = -(-matrix.shape[0] // side) * -(-matrix.shape[1] // side)
            taken, numbers = numbers[:count], numbers[count:]
            torch.testing.assert_close(product(x, len(matrix), taken, rows_first), x @ matrix.T, rtol=1e-4, atol=1e-3)
        assert not numbers

    h, inner = torch.randn(5, width), torch.randn(5, shape.inner)
    step, first, second = weights[: shape.steps], weights[-3], weights[-2]
    reads = [(h, first, False), (inner, second, False)]
    drive, latents = len(tape) // side, len(tape) // side + 1
    follow(
        kernels._schedule(shape, drive, latents, device),
        [(p, None, None), *((h, w, True) for w in step[:-1]), (p, None, None), (h, step[-1], True), *reads],
    )


@pytest.mark.gpu
@hopper
def test_widths_without_kernels_are_told():
    device = torch.device("cuda")
    square, read = [(384, 384)] * 3, [(192, 384), (192, 192), (1, 192)]
    assert kernels.supported(device, square, read)
    assert not kernels.supported(device, [(96, 96)] * 3, read)
    assert not kernels.supported(device, square, read[:2])
    assert not kernels.supported(torch.device("cpu"), square, read)
