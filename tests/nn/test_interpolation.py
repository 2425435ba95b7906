"""Interpolation between scattered points: linear functions exactly, values met, absent and doubled points ignored."""

import math

import pytest
import torch
from torch import Tensor

from oformer.nn.interpolation import interpolate

pytestmark = pytest.mark.usefixtures("float64")

dimensions = pytest.mark.parametrize("dim", [1, 2, 3])


def cloud(dim: int, points: int = 60, batch: int = 2) -> tuple[Tensor, Tensor]:
    weights = 0.5 + torch.rand(batch, points)
    return torch.rand(batch, points, dim), weights / weights.sum(-1, keepdim=True)


@dimensions
def test_linear_functions_are_reproduced(dim):
    coords, weights = cloud(dim)
    at = torch.rand(2, 9, dim)
    slope = torch.randn(dim, 4)
    found = interpolate(coords @ slope + 3.0, coords, weights, at)
    torch.testing.assert_close(found, at @ slope + 3.0, rtol=1e-4, atol=1e-5)


@dimensions
def test_values_are_met_at_the_points(dim):
    coords, weights = cloud(dim)
    values = torch.randn(2, 60, 3)
    torch.testing.assert_close(interpolate(values, coords, weights, coords[:, :7]), values[:, :7], rtol=1e-3, atol=1e-3)


def test_the_error_on_a_smooth_function_falls_with_the_square_of_the_spacing():
    def error(points: int) -> float:
        x = (torch.arange(points) / points)[None, :, None]
        at = (x + 0.37 / points).clone()
        found = interpolate((2 * math.pi * x).sin(), x, torch.full((1, points), 1 / points), at, (1.0,))
        return float((found - (2 * math.pi * at).sin()).abs().max())

    assert math.log2(error(32) / error(64)) > 1.8


def test_a_periodic_domain_has_no_edge():
    coords, weights = cloud(2)
    values, at = torch.randn(2, 60, 3), torch.rand(2, 9, 2)
    here = interpolate(values, coords, weights, at, (1.0, 1.0))
    moved = torch.tensor([0.4, 0.7])
    there = interpolate(values, (coords + moved) % 1, weights, (at + moved) % 1, (1.0, 1.0))
    torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-8)


def test_a_point_of_weight_zero_is_not_read():
    coords, weights = cloud(2)
    weights[:, ::3] = 0
    values, at = torch.randn(2, 60, 3), torch.rand(2, 9, 2)
    present = weights[0] > 0
    expected = interpolate(values[:, present], coords[:, present], weights[:, present], at)
    values[:, ~present] = 1e9
    torch.testing.assert_close(interpolate(values, coords, weights, at), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("points", [1, 2, 3])
def test_few_points_are_enough(points):
    coords, weights = cloud(2, points)
    constant = torch.full((2, points, 1), 2.5)
    found = interpolate(constant, coords, weights, torch.rand(2, 4, 2))
    torch.testing.assert_close(found, torch.full((2, 4, 1), 2.5))


def test_the_answer_is_continuous_where_the_nearest_points_change():
    coords, weights = cloud(2, 200, 1)
    values = torch.randn(1, 200, 1)
    share = torch.linspace(0, 1, 4001)[:, None]
    line = (share * torch.tensor([0.8, 0.6]) + (1 - share) * torch.tensor([0.1, 0.2]))[None]
    steps = interpolate(values, coords, weights, line).diff(dim=1).abs().flatten()
    finer = interpolate(values, coords, weights, (line[:, 1:] + line[:, :-1]) / 2)
    middle = interpolate(values, coords, weights, line)[:, :-1]
    worst = steps.argmax()  # half the way makes about half of the largest step; a jump would stay in one of the halves
    half = (finer - middle).abs().flatten()[worst]
    assert 0.25 * steps[worst] < half < 0.75 * steps[worst]


def test_a_grid_shared_by_the_batch_is_read_once_and_alike():
    coords, weights = cloud(2, batch=1)
    values, at = torch.randn(3, 60, 2), torch.rand(1, 9, 2)
    shared = interpolate(values, *(t.expand(3, *t.shape[1:]) for t in (coords, weights, at)))
    copied = interpolate(values, *(t.repeat(3, *[1] * (t.ndim - 1)) for t in (coords, weights, at)))
    torch.testing.assert_close(shared, copied)


@dimensions
def test_derivatives_by_values_and_places_are_right(dim):
    coords, weights = cloud(dim, 40, 1)
    values, at = torch.randn(1, 40, 2), torch.rand(1, 3, dim)
    inputs = (values.requires_grad_(), coords.requires_grad_(), at.requires_grad_())
    assert torch.autograd.gradcheck(lambda v, x, y: interpolate(v, x, weights, y), inputs, atol=1e-4)


def test_the_derivative_at_a_point_itself_is_finite():
    coords, weights = cloud(2, 20, 1)
    at = coords[:, :4].clone().requires_grad_()
    interpolate(torch.randn(1, 20, 1), coords, weights, at).sum().backward()
    assert at.grad is not None
    assert at.grad.isfinite().all()


@dimensions
@pytest.mark.parametrize("periods", [None, 1.0])
def test_the_tree_finds_the_points_that_all_distances_find(dim, periods, monkeypatch):
    """On a CPU a k-d tree looks for the nearest points, elsewhere all distances are compared."""
    coords, weights = cloud(dim, points=70)
    weights[0, ::3], weights[1, 5:] = 0, 0  # fewer points than are asked for
    coords[0, 10:20] = coords[0, 30:40]  # doubled points
    values, at = torch.randn(2, 70, 3), torch.cat([torch.rand(2, 9, dim), coords[:, :5]], 1)
    around = None if periods is None else (periods,) * dim
    by_tree = interpolate(values, coords, weights, at, around)
    monkeypatch.setattr("oformer.nn.interpolation._has_numbers", lambda tensor: False)
    torch.testing.assert_close(by_tree, interpolate(values, coords, weights, at, around), rtol=1e-9, atol=1e-9)


def test_a_point_an_ulp_below_zero_is_inside_the_period():
    coords, weights = cloud(1)
    coords[0, 0] = -1e-20
    assert interpolate(torch.randn(2, 60, 1), coords, weights, coords, (1.0,)).isfinite().all()
