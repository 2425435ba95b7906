"""The parts of fused attention that need no kernel."""

import torch

from oformer.engine.attention import sum_of_products


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_sum_of_products_and_its_derivatives(float64):
    a, b = torch.randn(2, 3, 5, 4, requires_grad=True), torch.randn(2, 3, 5, 6, requires_grad=True)
    close(sum_of_products(a, b), torch.einsum("bhni,bhnj->bhij", a, b))
    assert torch.autograd.gradcheck(sum_of_products, (a, b))
    assert torch.autograd.gradgradcheck(sum_of_products, (a, b))


def test_gradients_of_a_sum_of_products_lie_in_memory_as_its_factors(float64):
    a, b = torch.randn(2, 3, 5, 4, requires_grad=True), torch.randn(2, 3, 5, 6, requires_grad=True)
    result = sum_of_products(a, b)
    for gradient in torch.autograd.grad(result, (a, b), torch.randn_like(result)):
        assert gradient.is_contiguous()


def test_sum_of_products_under_autocast_rounds_only_the_factors(float64):
    a, b = (torch.randn(2, 50, 4, dtype=torch.float32, requires_grad=True) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        result = sum_of_products(a, b.bfloat16())
    assert result.dtype == torch.bfloat16
    exact = sum_of_products(a.double(), b.double())
    torch.testing.assert_close(result.double(), exact, rtol=2**-7, atol=0.1)
    direction = torch.randn_like(result)
    gradients = torch.autograd.grad(result, (a, b), direction)
    for got, expected in zip(gradients, torch.autograd.grad(exact, (a, b), direction.double()), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=0.05)
