"""Weights by cells: exact where areas are known, a quadrature where they are not, the same on every device."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field
from oformer.meshes import voronoi
from oformer.meshes.grids import cell_grid, line_weights, periodic_grid
from oformer.meshes.voronoi import _by_pairs, _by_trees, cell_weights, given_to_nearest

SEARCHES = (_by_trees, _by_pairs)  # on a CPU, and on a GPU


def random_points(points: int, dim: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((batch, points, dim)))


def all_valid(receivers: Tensor) -> Tensor:
    return torch.ones(receivers.shape[:2], dtype=torch.bool)


def some_giving(dim: int = 2, batch: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Givers with their weights, and receivers of which the last of some samples do not exist."""
    valid = torch.arange(20) < torch.tensor([[20], [13], [1]])[:batch]
    return (
        random_points(50, dim, batch, 1),
        random_points(50, 1, batch, 2)[..., 0],
        random_points(20, dim, batch),
        valid,
    )


# --- giving to the nearest ---


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("period", [None, 1.0])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_each_gives_all_it_has_to_the_nearest(search, period, dim):
    givers, weights, receivers, valid = some_giving(dim)
    received = search(givers, weights, receivers, valid, None if period is None else (period,) * dim)
    expected = torch.zeros(3, 20, dtype=torch.float64)
    for sample, giver in itertools.product(range(3), range(50)):
        apart = (givers[sample, giver] - receivers[sample]).abs()
        if period is not None:
            apart = torch.minimum(apart, period - apart)
        nearest = apart.norm(dim=-1).masked_fill(~valid[sample], torch.inf).argmin()
        expected[sample, nearest] += weights[sample, giver]
    torch.testing.assert_close(received, expected, rtol=0, atol=1e-14)
    assert (received[~valid] == 0).all()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("shift", [0.0, 0.3, 1e-9])
def test_equally_near_ones_share(search, shift):
    """The middle of a square gives to its corners, whatever rounding says of their distance."""
    corners = torch.tensor([[[0.1, 0.1], [0.1, 0.7], [0.7, 0.1], [0.7, 0.7], [3.0, 3.0]]]) + shift
    middle = torch.tensor([[[0.4, 0.4]]]) + shift
    received = search(middle, torch.ones(1, 1), corners, all_valid(corners), None)
    torch.testing.assert_close(received, torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]]))


@pytest.mark.parametrize("search", SEARCHES)
def test_any_number_of_equally_near_ones_share(search):
    angle = torch.arange(40, dtype=torch.float64) * (2 * math.pi / 40)
    circle = torch.stack([angle.cos(), angle.sin()], -1)[None]
    received = search(torch.zeros(1, 1, 2).double(), torch.ones(1, 1).double(), circle, all_valid(circle), None)
    torch.testing.assert_close(received, torch.full((1, 40), 1 / 40, dtype=torch.float64))


@pytest.mark.parametrize("periods", [None, (1.0, 1.0)])
def test_both_searches_agree_on_a_grid_full_of_ties(periods, monkeypatch):
    """In chunks of a few rows; in float32, as on a GPU."""
    grid = periodic_grid((24, 24), (1.0, 1.0)).float()
    order = torch.stack([torch.randperm(len(grid)) for _ in range(4)])
    receivers, givers = grid[order[:, :200]], grid[order[:, 200:]]
    valid = torch.arange(200) < torch.tensor([[200], [150], [100], [7]])
    weights = torch.rand(givers.shape[:2])
    monkeypatch.setattr(voronoi, "PAIRS", 9 * valid.numel())
    pairs, trees = (search(givers, weights, receivers, valid, periods) for search in (_by_pairs, _by_trees))
    torch.testing.assert_close(pairs, trees, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trees.sum(1), weights.sum(1))


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    grid = periodic_grid((64, 64), (1.0, 1.0)).float()
    order = torch.stack([torch.randperm(len(grid)) for _ in range(16)])
    receivers, givers = grid[order[:, :2048]], grid[order[:, 2048:]]
    given = givers, torch.rand(givers.shape[:2]), receivers, all_valid(receivers)
    there = given_to_nearest(*(tensor.cuda() for tensor in given), (1.0, 1.0))
    torch.testing.assert_close(there.cpu(), given_to_nearest(*given, (1.0, 1.0)), rtol=1e-5, atol=1e-6)
    again = given_to_nearest(*(tensor.cuda() for tensor in given), (1.0, 1.0))
    assert torch.equal(there, again)


@pytest.mark.parametrize("search", SEARCHES)
def test_those_of_no_weight_and_those_that_are_not_there_are_not_felt(search):
    givers, weights, receivers, valid = some_giving()
    expected = search(givers, weights, receivers, valid, None)
    receivers = torch.where(valid[..., None], receivers, torch.full((), 99.0, dtype=torch.float64))
    more = torch.cat([givers, torch.full((3, 4, 2), 7.0, dtype=torch.float64)], 1)
    padded = torch.cat([weights, torch.zeros(3, 4, dtype=torch.float64)], 1)
    torch.testing.assert_close(search(more, padded, receivers, valid, None), expected, rtol=0, atol=1e-15)
    nobody = search(givers[:, :0], weights[:, :0], receivers, valid, None)
    assert torch.equal(nobody, torch.zeros_like(expected))


@pytest.mark.parametrize("search", SEARCHES)
def test_no_order_matters(search):
    givers, weights, receivers, valid = some_giving()
    expected = search(givers, weights, receivers, valid, (1.0, 1.0))
    one, two = torch.randperm(50), torch.randperm(20)
    mixed = search(givers[:, one], weights[:, one], receivers[:, two], valid[:, two], (1.0, 1.0))
    torch.testing.assert_close(mixed, expected[:, two], rtol=0, atol=1e-14)
    for row in range(3):
        single = (tensor[row : row + 1] for tensor in (givers, weights, receivers, valid))
        torch.testing.assert_close(search(*single, (1.0, 1.0))[0], expected[row], rtol=0, atol=1e-14)


@pytest.mark.parametrize("search", SEARCHES)
def test_places_outside_the_first_period_are_inside(search):
    givers, weights, receivers, valid = some_giving()
    givers[:, 0], receivers[:, 0] = 0.0, 0.0  # from where a tiny step back leads to the end of the period
    expected = search(givers, weights, receivers, valid, (1.0, 1.0))
    for shift in (0.5, -3.0, -1e-18):
        moved = search(givers + shift, weights, receivers + shift, valid, (1.0, 1.0))
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-14)


# --- cells of scattered points ---


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_uneven_grids_have_the_cells_of_their_axes(dim):
    """The cells of a product of lines are products of half-gaps, up to the walls."""
    axes = [torch.tensor([0.0, 0.1, 0.4, 0.45, 1.0]), torch.tensor([2.0, 2.5, 3.5]), torch.tensor([-1.0, 0.0, 0.2])]
    axes = [axis.double() for axis in axes[:dim]]
    points = torch.cartesian_prod(*axes).reshape(-1, dim)
    expected = torch.ones(1, dtype=torch.float64)
    for axis in axes:
        expected = (expected[:, None] * line_weights(axis[:, None])).flatten()
    order = torch.randperm(len(points))
    weights = cell_weights(points[order])
    torch.testing.assert_close(weights, expected[order], rtol=1e-4, atol=0)  # walls are a millionth of the box farther


def test_a_box_that_is_larger_than_its_points():
    points = torch.tensor([[0.25, 0.5], [0.75, 0.5]], dtype=torch.float64)
    weights = cell_weights(points, box=((0.0, 2.0), (0.0, 1.0)))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.75]).double(), rtol=1e-5, atol=0)
    # A triangle of area 1/8 at each corner of the square, and what is left for its middle.
    points = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    torch.testing.assert_close(cell_weights(points), torch.tensor([1.0, 1.0, 1.0, 1.0, 4.0]) / 8, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("periodic", [False, True])
def test_cells_are_what_is_nearest(dim, periodic):
    """Of a fine grid each point is nearest to one of the points; how many they are is the size of its cell."""
    points, periods = random_points(30, dim)[0], (1.0,) * dim if periodic else None
    weights = cell_weights(points, periods, None if periodic else ((0.0, 1.0),) * dim)
    fine = cell_grid(({1: 20_000, 2: 200, 3: 40}[dim],) * dim, (1.0,) * dim)
    counted = given_to_nearest(
        fine[None], torch.full((1, len(fine)), 1 / len(fine), dtype=torch.float64), points[None],
        all_valid(points[None]), periods,
    )[0]  # fmt: skip
    assert float((weights - counted).norm() / weights.norm()) < 0.01
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    assert (weights > 0).all()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_periodic_cells_move_with_their_points_and_keep_to_no_order(dim):
    points, periods = random_points(20, dim)[0], (1.0, 2.0, 0.5)[:dim]
    points = points * torch.tensor(periods)
    weights = cell_weights(points, periods)
    torch.testing.assert_close(cell_weights(points + 0.37, periods), weights, rtol=1e-9, atol=0)
    order = torch.randperm(20)
    torch.testing.assert_close(cell_weights(points[order], periods), weights[order], rtol=1e-9, atol=0)


@pytest.mark.parametrize("periods", [None, (1.0, 1.0)])
def test_points_of_a_regular_grid_inside_weigh_the_same(periods):
    grid = cell_grid((6, 6), (1.0, 1.0))
    weights = cell_weights(grid, periods, None if periods else ((0, 1), (0, 1)))
    torch.testing.assert_close(weights, torch.full((36,), 1 / 36, dtype=torch.float64), rtol=1e-4, atol=0)


def test_points_in_one_place_share_its_cell():
    points = random_points(12, 2)[0]
    weights = cell_weights(points, (1.0, 1.0))
    twice = cell_weights(torch.cat([points, points[:1], points[:1] + 1.0]), (1.0, 1.0))
    torch.testing.assert_close(twice[[0, 12, 13]], (weights[0] / 3).expand(3))
    torch.testing.assert_close(twice[1:12], weights[1:])


def test_lone_points_and_kinds_of_numbers():
    assert cell_weights(np.array([[0.3, 0.4]])).tolist() == [1.0]
    assert cell_weights(np.array([[0.3, 0.4]] * 4), (1.0, 1.0)).tolist() == [0.25] * 4
    points = random_points(9, 2)[0]
    assert torch.equal(cell_weights(points.numpy()), cell_weights(points))
    single = cell_weights(points.float())
    assert single.dtype == torch.float32
    assert Field.of(points.float(), weights=single).weights is single


@pytest.mark.parametrize("seed", range(5))
def test_smooth_functions_are_integrated_better_than_with_equal_weights(seed):
    """By five times at the least, on 400 random points of a square that are denser on one side."""
    x, y = random_points(400, 2, seed=seed)[0].unbind(-1)
    points = torch.stack([x**1.5, y], -1)
    weights = cell_weights(points, box=((0, 1), (0, 1)))
    for values, exact in ((points[:, 0] + 2 * points[:, 1], 1.5), (torch.exp(points[:, 0] - points[:, 1]), 1.086161)):
        assert abs(float(weights @ values) - exact) < 0.2 * abs(float(values.mean()) - exact)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"coords": np.zeros((0, 2))}, "at least one point, got an empty"),
        ({"coords": np.zeros(5)}, r"`coords` of shape \(points, dim\)"),
        ({"coords": np.zeros((5, 4))}, "in 1 to 3 dimensions"),
        ({"coords": np.zeros((5, 2), np.int64)}, "of floating-point numbers"),
        ({"coords": np.array([[0.1, np.nan], [0.2, 0.3]])}, "finite numbers in `coords`"),
        ({"periods": (1.0,)}, r"`periods` with one entry per dimension \(2\)"),
        ({"periods": (1.0, 0.0)}, "periods above zero"),
        ({"periods": (1.0, 1.0), "box": ((0, 1), (0, 1))}, "`periods` or `box`, got both"),
        ({"box": ((0, 1),)}, r"`box` with one entry per dimension \(2\)"),
        ({"box": ((0, 0.5), (0, 1))}, "points inside the box"),
        ({"coords": np.array([[0.1, 0.5], [0.2, 0.5]])}, "an extent along each axis.*Give the `box`"),
    ],
)
def test_refuses_what_has_no_cells(wrong, message):
    given = {"coords": np.array([[0.1, 0.2], [0.6, 0.8], [0.9, 0.3]]), **wrong}
    unchecked = getattr(cell_weights, "__wrapped__", cell_weights)  # the shape checks of the tests come before ours
    with pytest.raises(InputError, match=message):
        unchecked(**given)
