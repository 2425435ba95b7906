"""Normalizers are affine and can be undone; on a grid they interpolate their statistics."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from oformer.nn.normalizer import GridNormalizer, Normalizer

GRIDS = [(5,), (4, 3), (3, 4, 2)]
grids = pytest.mark.parametrize("grid", GRIDS, ids=str)
exact = pytest.mark.usefixtures("float64")


def grid_points(grid: tuple[int, ...], origin: Tensor, extent: Tensor) -> Tensor:
    """Row-major, both ends of each axis included."""
    axes = [torch.linspace(0, 1, n) for n in grid]
    unit = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(grid))
    return origin + extent * unit


def placed(grid: tuple[int, ...], channels: int = 2) -> tuple[GridNormalizer, Tensor]:
    """A normalizer on a box that is not the unit box, with random statistics, and the points of its grid."""
    layer = GridNormalizer(channels, grid)
    layer.shift.normal_()
    layer.scale.uniform_(0.5, 2)
    layer.origin.uniform_(-3, 3)
    layer.extent.uniform_(0.5, 4)
    return layer, grid_points(grid, layer.origin, layer.extent)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_starts_as_the_identity():
    values, coords = torch.randn(2, 3, 12, 2), torch.rand(2, 12, 2)
    for layer in (Normalizer(2), GridNormalizer(2, (4, 3))):
        torch.testing.assert_close(layer(values, coords), values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(layer.inverse(values, coords), values, rtol=1e-6, atol=1e-6)


@exact
def test_subtracts_the_shift_and_divides_by_the_scale():
    layer = Normalizer(2)
    layer.shift.copy_(torch.tensor([10.0, -4.0]))
    layer.scale.copy_(torch.tensor([5.0, 0.25]))
    values, coords = torch.tensor([[[[20.0, -3.0]]], [[[5.0, -4.0]]]]), torch.zeros(2, 1, 3)
    assert layer(values, coords).tolist() == [[[[2.0, 4.0]]], [[[-1.0, 0.0]]]]
    assert torch.equal(layer.inverse(layer(values, coords), coords), values)


@exact
@grids
def test_inverse_undoes_forward_anywhere(grid):
    layer, _ = placed(grid)
    coords = layer.origin + layer.extent * (3 * torch.rand(2, 20, len(grid)) - 1)
    values = torch.randn(2, 3, 20, 2)
    normalized = layer(values, coords)
    assert (normalized - values).abs().max() > 0.1
    close(layer.inverse(normalized, coords), values)


@exact
@grids
def test_grid_points_get_their_own_statistics(grid):
    layer, coords = placed(grid)
    values = torch.randn(2, 3, math.prod(grid), 2)
    result = layer(values, coords.expand(2, -1, -1))
    close(result, (values - layer.shift) / layer.scale)


@grids
def test_grid_points_computed_in_float32_get_exactly_their_own_statistics(grid):
    layer, coords = placed(grid)
    shift, scale = layer.statistics(coords.expand(1, -1, -1))
    assert torch.equal(shift[0, 0], layer.shift)
    assert torch.equal(scale[0, 0], layer.scale)


@pytest.mark.parametrize("points", [141, 512, 8192])
def test_a_fine_float32_grid_is_met_exactly(points):
    """j/n and linspace differ by ulps; neither may slip into the neighboring cell."""
    layer = GridNormalizer(1, (points,))
    layer.shift.copy_(torch.arange(points)[:, None])
    layer.extent.fill_((points - 1) / points)
    coords = (torch.arange(points) / points)[None, :, None]
    assert torch.equal(layer.statistics(coords)[0][0, 0, :, 0], torch.arange(points).float())


@exact
@grids
def test_between_the_points_linear_functions_are_met(grid):
    layer, nodes = placed(grid, channels=1)
    slope = torch.randn(len(grid))
    layer.shift.copy_(1.5 + nodes @ slope[:, None])
    layer.scale.copy_(7.0 - nodes @ slope[:, None] / 4)
    coords = layer.origin + layer.extent * torch.rand(2, 50, len(grid))
    shift, scale = layer.statistics(coords)
    # A point within a ten-thousandth of a cell of a grid point counts as that point.
    torch.testing.assert_close(shift[:, 0], 1.5 + coords @ slope[:, None], rtol=0, atol=1e-3)
    inside = (coords - layer.origin) / layer.extent * (torch.tensor(grid) - 1)
    apart = ((inside - inside.round()).abs() > 1e-3).all(-1)
    assert apart.sum() > 80
    close(shift[:, 0][apart], (1.5 + coords @ slope[:, None])[apart])
    close(scale[:, 0][apart], (7.0 - coords @ slope[:, None] / 4)[apart])


@exact
@grids
def test_between_the_points_the_statistics_are_multilinear(grid):
    """The corners of a cell, each by the product of its distances, written out for the middle of the first cell."""
    layer, nodes = placed(grid)
    spacing = layer.extent / (torch.tensor(grid) - 1)
    fraction = torch.tensor([0.25, 0.6, 0.3])[: len(grid)]
    place = layer.origin + fraction * spacing
    expected = torch.zeros(2)
    for corner in itertools.product((0, 1), repeat=len(grid)):
        node = layer.origin + torch.tensor(corner) * spacing
        index = int((nodes - node).norm(dim=-1).argmin())
        weight = math.prod(float(f) if c else 1 - float(f) for f, c in zip(fraction, corner, strict=True))
        expected += weight * layer.shift[index]
    close(layer.statistics(place[None, None])[0][0, 0, 0], expected)


@exact
@grids
def test_outside_the_grid_the_nearest_edge_counts(grid):
    layer, nodes = placed(grid)
    far = 10 * layer.extent
    for corner in itertools.product((0, 1), repeat=len(grid)):
        sign = 2 * torch.tensor(corner) - 1
        node = layer.origin + torch.tensor(corner) * layer.extent
        index = int((nodes - node).norm(dim=-1).argmin())
        close(layer.statistics((node + sign * far)[None, None])[0][0, 0, 0], layer.shift[index])
    # Beyond one face only, the other coordinates still interpolate.
    inside = layer.origin + layer.extent * torch.rand(1, 10, len(grid))
    beyond, edge = inside.clone(), inside.clone()
    beyond[..., 0] = layer.origin[0] - 2.0
    edge[..., 0] = layer.origin[0]
    close(layer.statistics(beyond)[0], layer.statistics(edge)[0])


def test_an_axis_of_one_point_has_one_statistic():
    layer = GridNormalizer(1, (1, 3))
    layer.shift.copy_(torch.tensor([[1.0], [2.0], [4.0]]))
    coords = torch.tensor([[[0.0, 0.0], [0.7, 0.5], [0.2, 0.75]]])
    assert layer.statistics(coords)[0].flatten().tolist() == [1.0, 2.0, 3.0]


def test_inverse_answers_in_float32_or_better():
    layer, values, coords = Normalizer(1), torch.randn(1, 1, 4, 1), torch.rand(1, 4, 1)
    layer.shift.fill_(10.0)
    layer.scale.fill_(3.3)
    assert layer.inverse(values.bfloat16(), coords).dtype == torch.float32
    torch.testing.assert_close(
        layer.inverse(values.bfloat16(), coords), 10 + 3.3 * values.bfloat16().float(), rtol=1e-6, atol=0
    )
    assert layer.inverse(values.double(), coords).dtype == torch.float64


def test_statistics_are_saved_with_the_weights():
    layer, nodes = placed((4, 3))
    other = GridNormalizer(2, (4, 3))
    other.load_state_dict(layer.state_dict())
    values, coords = torch.randn(1, 1, 12, 2), nodes[None]
    assert torch.equal(other(values, coords), layer(values, coords))
    assert set(Normalizer(2).state_dict()) == {"shift", "scale"}
    assert not list(layer.parameters())
