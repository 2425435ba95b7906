"""A step in one kernel against the plain one; without a GPU in Triton's interpreter."""

import pytest
import torch
from torch import nn

from oformer.training import optimizers
from oformer.training.optimizers import Adam

kernels = pytest.importorskip("oformer.engine.kernels.adam_kernels", exc_type=ImportError)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((3,), (20, 7), (), (1, 33), (16, 4), (5, 0))  # with programs of 16 numbers: less, more, and full ones


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 16)
    monkeypatch.setattr(optimizers, "kernels_on", lambda device, module: kernels)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many programs each call of the kernel had."""
    found, original = [], kernels.move
    monkeypatch.setattr(kernels, "move", lambda table, *others: found.append(len(table)) or original(table, *others))
    return found


def pair(**settings) -> tuple[list[nn.Parameter], list[nn.Parameter], Adam, Adam]:
    """The same parameters twice, one for the kernel and one for the plain code."""
    tensors = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    one, other = ([nn.Parameter(t.clone()) for t in tensors] for _ in range(2))
    return one, other, Adam(one, 0.01, steady=True, **settings), Adam(other, 0.01, **settings)


def same(one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize(("decay", "decoupled"), [(0.0, True), (0.1, True), (0.1, False)])
def test_parameters_and_moments_are_the_plain_ones(calls, decay, decoupled, amsgrad):
    one, other, fused, plain = pair(weight_decay=decay, decoupled=decoupled, amsgrad=amsgrad)
    gradients = [torch.empty_like(p) for p in one]
    for step in range(5):
        for p, q, gradient in zip(one, other, gradients, strict=True):
            gradient.copy_((4 - step) * torch.randn_like(p))  # the largest squares come first
            p.grad, q.grad = gradient, gradient.clone()
        for adam in (fused, plain):
            adam.param_groups[0].update(beta1=0.9 - 0.02 * step, lr=0.01 + 0.01 * step)
            adam.step()
    same(one, other)
    assert calls == [sum(-(-p.numel() // 16) for p in one)] * 5
    for p, q in zip(one, other, strict=True):
        for name, value in plain.state[q].items():
            torch.testing.assert_close(fused.state[p][name], value, rtol=1e-6, atol=1e-6)


def test_what_lies_elsewhere_or_has_no_gradient_is_noticed(calls):
    one, other, fused, plain = pair(weight_decay=0.1)
    for present in ((1, 1, 1, 1, 1, 1), (1, 0, 1, 1, 0, 1), (1, 1, 1, 1, 1, 1)):
        for p, q, there in zip(one, other, present, strict=True):
            p.grad = torch.randn_like(p) if there else None  # new memory each time
            q.grad = p.grad.clone() if there else None
        fused.step()
        plain.step()
    same(one, other)
    assert len(calls) == 3


def test_a_run_goes_on_with_what_was_saved(calls):
    one, other, fused, plain = pair(amsgrad=True)
    again = Adam(one, 0.01, amsgrad=True, steady=True)
    for adam in (fused, again):
        for p, q in zip(one, other, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        adam.step()
        plain.step()
        again.load_state_dict(fused.state_dict())
    same(one, other)
    assert len(calls) == 2


def test_others_than_float32_and_gradients_that_move_are_left_to_the_plain_code(calls):
    doubles = [nn.Parameter(torch.randn(3, dtype=torch.float64, device=DEVICE))]
    transposed = [nn.Parameter(torch.randn(3, 5, device=DEVICE))]
    for parameters, steady in ((doubles, True), (transposed, True), ([nn.Parameter(torch.randn(3))], False)):
        adam = Adam(parameters, 0.01, steady=steady)
        (p,) = parameters
        before = p.detach().clone()
        p.grad = torch.randn(p.shape[::-1], dtype=p.dtype, device=p.device).mT if p.ndim == 2 else torch.ones_like(p)
        adam.step()
        assert not torch.equal(p, before)
    assert not calls
