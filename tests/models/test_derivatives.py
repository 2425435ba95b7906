"""Derivatives of every model, by all that goes in and by its weights, are those of differences: first and second ones.

Batches are ragged, so that padding has no part in them, as they come from `test_contract`.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module as with_weights  # of `torch.func.functional_call`

from oformer.engine.swap import accelerate
from oformer.errors import InputError
from oformer.fields import Batch, Field, collate
from oformer.models import Normalization, Operator
from tests.models.test_contract import CASES, ON_GRIDS, ON_MESHES, build, filled, samples_for

pytestmark = pytest.mark.usefixtures("float64")

plain_and_fused = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
ANYWHERE = [name for name in CASES if name not in ON_GRIDS and name not in ON_MESHES]


def operator_of(name: str, normalization: str = "none") -> Operator:
    return Operator(filled(build(name)), Normalization(normalization, normalization, "as-is")).eval()


def of_numbers(operator: Operator, batch: Batch, places: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The answers at queries that exist as a function of values without codes, and of places; and these."""
    code = [batch.input.values[..., -1:]] if operator.spec.in_categories else []
    numbers = batch.input.values[..., : -1 if code else None]

    def answer(numbers: Tensor, *coords: Tensor) -> Tensor:
        at, asked = coords or (batch.input.coords, batch.query.coords)
        input = Field(at, torch.cat([numbers, *code], -1), batch.input.weights)
        found = operator(input, Field(asked, batch.query.values, batch.query.weights))
        return found.movedim(2, 1)[batch.query.weights > 0]

    given = [numbers, *((batch.input.coords, batch.query.coords) if places else ())]
    return answer, [tensor.clone().requires_grad_() for tensor in given]


@pytest.mark.parametrize(("name", "fused"), [(name, fused) for name in CASES for fused in {False, name in ANYWHERE}])
def test_first_and_second_derivatives(name, fused):
    """In random directions through all values, places and weights at once: a part that is lost changes the number."""
    operator = operator_of(name)
    if fused:
        accelerate(operator.model)
    answer, given = of_numbers(operator, collate(samples_for(name)), places=name in ANYWHERE)
    names, parameters = zip(*operator.named_parameters(), strict=True)
    leaves = [*given, *(p.detach().requires_grad_() for p in parameters)]
    one, other = ([torch.randn_like(leaf) for leaf in leaves] for _ in range(2))
    probe, step = torch.randn_like(answer(*given)), 1e-7  # of larger steps some cross a kink of ReLU

    def moved(direction: list[Tensor], t: float) -> list[Tensor]:
        return [(leaf + t * d).detach().requires_grad_() for leaf, d in zip(leaves, direction, strict=True)]

    def value(leaves: list[Tensor]) -> Tensor:
        with with_weights(operator, dict(zip(names, leaves[len(given) :], strict=True))):
            return (answer(*leaves[: len(given)]) * probe).sum()

    def slope(leaves: list[Tensor]) -> Tensor:
        return along(value(leaves), leaves, one)

    def along(number: Tensor, leaves: list[Tensor], direction: list[Tensor]) -> Tensor:
        found = torch.autograd.grad(number, leaves, create_graph=True, allow_unused=True)
        return sum((g * d).sum() for g, d in zip(found, direction, strict=True) if g is not None)

    first = (value(moved(one, step)) - value(moved(one, -step))) / (2 * step)
    torch.testing.assert_close(slope(leaves), first, rtol=1e-5, atol=1e-5)
    second = (slope(moved(other, step)) - slope(moved(other, -step))) / (2 * step)
    torch.testing.assert_close(along(slope(leaves), leaves, other), second, rtol=1e-5, atol=1e-5)


# Forward mode makes torch load decompositions that it scripts itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["burgers, local", "darcy, softmax", "navier-stokes", "airfoil"])
@plain_and_fused
def test_torch_func(name, fused):
    """Jacobians backward and forward, a Hessian forward over backward, directions and many inputs at once."""
    operator = operator_of(name)
    if fused:
        accelerate(operator.model)
    answer, given = of_numbers(operator, collate(samples_for(name)[:1]), places=True)
    given = [tensor.detach() for tensor in given]
    backward = torch.func.jacrev(answer, (0, 1, 2))(*given)
    for a, b in zip(backward, torch.func.jacfwd(answer, (0, 1, 2))(*given), strict=True):
        torch.testing.assert_close(a, b)
    directions = tuple(torch.randn_like(tensor) for tensor in given)
    _, along = torch.func.jvp(answer, tuple(given), directions)
    expected = sum(torch.tensordot(a, d, dims=d.ndim) for a, d in zip(backward, directions, strict=True))
    torch.testing.assert_close(along, expected)
    values, pull = torch.func.vjp(answer, *given)
    weights = torch.randn_like(values)
    for pulled, jacobian in zip(pull(weights), backward, strict=True):
        torch.testing.assert_close(pulled, torch.tensordot(weights, jacobian, dims=weights.ndim))
    hessian = torch.func.hessian(lambda at: answer(*given[:2], at)[0].sum())(given[2]).flatten(3).flatten(0, 2)
    torch.testing.assert_close(hessian, hessian.mT)
    assert hessian.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["burgers", "darcy, softmax", "airfoil, local"])
def test_many_places_at_once_by_vmap(name):
    operator = operator_of(name)
    answer, (numbers, at, asked) = of_numbers(operator, collate(samples_for(name)[:1]), places=True)
    many = torch.stack([asked.detach(), asked.detach().flip(-2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the speed of vmap
        found = torch.func.vmap(lambda places: answer(numbers.detach(), at.detach(), places))(many)
    for some, places in zip(found, many, strict=True):
        torch.testing.assert_close(some, answer(numbers, at, places))


@pytest.mark.parametrize("at_nodes", [False, True])
def test_statistics_that_vary_over_a_grid_have_slopes(at_nodes):
    """At grid points themselves the slope of the pointwise scale was lost: there a step to the right tells it."""
    operator = operator_of("darcy", "pointwise")
    for scale in (operator.input_scale, operator.target_scale):
        scale.shift.copy_(torch.randn_like(scale.shift))
        scale.scale.copy_(1 + torch.rand_like(scale.scale))
    (sample, *_) = samples_for("darcy")
    lattice = torch.cartesian_prod(*[torch.arange(3) / 3] * 2)[: sample.query.points]
    asked = (lattice if at_nodes else 0.9 * sample.query.coords)[None].clone().requires_grad_()

    def answer(asked: Tensor) -> Tensor:
        return operator(sample.input.batched(), Field(asked, sample.query.values[None], sample.query.weights[None]))

    (slope,) = torch.autograd.grad(answer(asked).sum(), asked)
    for axis in range(2):
        step = 2e-3 * torch.eye(2)[axis]  # beyond what counts as a grid point
        near, far = (answer(asked + n * step).sum((0, 1, 3)) for n in (1, 2))
        here = answer(asked).sum((0, 1, 3))
        difference = (4 * near - 3 * here - far) / (2 * step.sum())
        torch.testing.assert_close(slope[0, :, axis], difference, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["fno, darcy", "mwt, burgers", "galerkin transformer, darcy"])
def test_models_on_grids_refuse_gradients_by_coordinates(name):
    """They read values by their place in the grid: autograd would see the coordinates as features, if at all."""
    operator, batch = operator_of(name), collate(samples_for(name))
    places = batch.input.coords.clone().requires_grad_()
    field = Field(places, batch.input.values, batch.input.weights)
    with pytest.raises(InputError, match=r"coordinates without gradients for .*Give coords.detach\(\)"):
        operator.check(field, Field.of(places))
