"""A grid that a batch shares is recognized by its stride, and what depends on it is computed once."""

import pytest
import torch
from torch import Tensor

from oformer.nn.shared_grids import expanded, once_per_grid


def test_expanded_is_told_by_the_memory_and_not_by_the_values():
    one = torch.randn(1, 4, 2)
    assert expanded(one.expand(3, -1, -1))
    assert not expanded(one.repeat(3, 1, 1))
    assert not expanded(one)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("batch", [1, 3])
def test_once_per_grid_gives_the_same_values_and_gradients(batch):
    matrix = torch.randn(2, 5, requires_grad=True)
    grid = torch.randn(1, 4, 2, requires_grad=True)
    direction = torch.randn(batch, 4, 5)
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return (x @ matrix).sin()

    once = once_per_grid(function, grid.expand(batch, -1, -1))
    assert seen == [1]
    plain = function(grid.repeat(batch, 1, 1))
    torch.testing.assert_close(once, plain)
    for a, b in zip(
        torch.autograd.grad((once * direction).sum(), (matrix, grid)),
        torch.autograd.grad((plain * direction).sum(), (matrix, grid)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert expanded(once) == (batch > 1)


def test_once_per_grid_works_on_every_sample_where_they_differ():
    x = torch.randn(3, 4, 2)
    seen = []
    result = once_per_grid(lambda y: seen.append(y.shape[0]) or y * 2, x)
    assert seen == [3]
    assert torch.equal(result, 2 * x)
    assert not expanded(result)
