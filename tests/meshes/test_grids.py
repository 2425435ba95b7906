"""Grids sit where they should, strides are exact, and quadrature weights on a line integrate."""

import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.meshes.grids import cell_grid, grid_sizes, line_weights, periodic_grid, thinning


def random_points(points: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((batch, points, 1)))


def function(x: torch.Tensor) -> torch.Tensor:
    """Smooth and of period one; its mean is the modified Bessel number I0(1)."""
    return torch.exp(torch.sin(2 * math.pi * x[..., 0] + 0.4))


MEAN = 1.2660658777520084


def test_periodic_grid_does_not_repeat_the_end():
    assert periodic_grid((4,), (2.0,)).tolist() == [[0.0], [0.5], [1.0], [1.5]]


def test_periodic_grid_is_row_major():
    grid = periodic_grid((2, 3), (1.0, 3.0))
    assert grid.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.5, 0.0], [0.5, 1.0], [0.5, 2.0]]
    assert grid.dtype == torch.float64


def test_periodic_grid_wants_a_period_per_axis():
    with pytest.raises(ValueError, match="zip"):
        periodic_grid((2, 3), (1.0,))


@pytest.mark.parametrize(
    ("full", "wanted", "periodic", "strides"),
    [
        ((8192,), (512,), True, (16,)),
        ((8192,), (8192,), True, (1,)),
        ((421, 421), (141, 141), False, (3, 3)),  # Darcy, as published
        ((421, 421), (43, 61), False, (10, 7)),
        ((64, 64), (32, 16), True, (2, 4)),
        ((7,), (1,), True, (7,)),
    ],
)
def test_thinning_finds_the_stride(full, wanted, periodic, strides):
    assert thinning(full, wanted, periodic) == strides
    for n, m, stride in zip(full, wanted, strides, strict=True):
        assert len(range(0, n, stride)) == m


def test_thinning_takes_the_smallest_stride_where_several_fit():
    """Of 5 points, strides 3 and 4 both leave 2; the smaller spreads them as it says."""
    (stride,) = thinning((5,), (2,), periodic=False)
    assert len(range(0, 5, stride)) == 2
    assert stride == 3


def test_thinning_refuses_uneven_gaps_and_names_near_counts():
    with pytest.raises(InputError, match=r"a stride through 8192 gives, got 500\. Near ones: .*512"):
        thinning((8192,), (500,), periodic=True)
    with pytest.raises(InputError):
        thinning((10,), (4,), periodic=True)
    assert thinning((10,), (4,), periodic=False) == (3,)


@pytest.mark.parametrize("points", [2, 3, 8, 101])
def test_equal_gaps_weigh_the_same(points):
    weights = line_weights(periodic_grid((points,), (1.0,)), period=1.0)
    torch.testing.assert_close(weights, torch.full((points,), 1 / points, dtype=torch.float64), rtol=0, atol=1e-15)


def test_without_a_period_the_rule_is_the_trapezoidal_one():
    x = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    torch.testing.assert_close(line_weights(x), torch.tensor([1, 2, 2, 2, 1], dtype=torch.float64) / 8)
    scattered = torch.tensor([[0.0], [0.1], [0.5], [2.0]], dtype=torch.float64)
    line = 3 * scattered[:, 0] + 1  # integrated exactly: mean over [0, 2] is 4
    assert float((line_weights(scattered) * line).sum()) == pytest.approx(4, abs=1e-14)


@pytest.mark.parametrize("period", [None, 1.0])
def test_weights_sum_to_one_and_are_not_negative(period):
    weights = line_weights(random_points(50, batch=6), period)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (weights > 0).all()


def test_weights_by_hand():
    x = torch.tensor([[0.5], [0.1], [0.2]], dtype=torch.float64)
    # Gaps 0.1 (0.1 to 0.2), 0.3 (0.2 to 0.5), 0.6 (0.5 over the end to 0.1).
    torch.testing.assert_close(line_weights(x, 1.0), torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64))
    torch.testing.assert_close(line_weights(x), torch.tensor([0.375, 0.125, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("period", [None, 1.0])
def test_order_of_points_permutes_the_weights(period):
    x = random_points(40, batch=3)
    order = torch.from_numpy(np.random.default_rng(1).permutation(40))
    assert torch.equal(line_weights(x[:, order], period), line_weights(x, period)[:, order])


@pytest.mark.parametrize("period", [None, 1.0])
def test_missing_points_weigh_nothing_and_change_nothing(period):
    x = random_points(30, batch=2)
    valid = torch.from_numpy(np.random.default_rng(2).random((2, 30)) < 0.6)
    weights = line_weights(x, period, valid)
    assert (weights[~valid] == 0).all()
    for row in range(2):
        kept = line_weights(x[row, valid[row]], period)
        torch.testing.assert_close(weights[row, valid[row]], kept, rtol=0, atol=1e-15)
    garbage = torch.where(valid[..., None], x, torch.full_like(x, 1e6))
    torch.testing.assert_close(line_weights(garbage, period, valid), weights, rtol=0, atol=1e-15)


def test_rows_of_a_batch_do_not_mix():
    x = random_points(25, batch=4)
    together = line_weights(x, 1.0)
    for row in range(4):
        assert torch.equal(line_weights(x[row], 1.0), together[row])


def test_moving_around_the_circle_changes_nothing():
    x = random_points(30)
    torch.testing.assert_close(line_weights((x + 0.37) % 1, 1.0), line_weights(x, 1.0), rtol=0, atol=1e-14)


def test_second_order_on_random_points_where_equal_weights_have_half():
    """Fitted over the root mean square of many draws, since one draw is luck."""
    counts = np.array([32, 64, 128, 256, 512])
    errors, equal_errors = [], []
    for n in counts:
        x = random_points(int(n), batch=400, seed=int(n))
        errors.append(float(((line_weights(x, 1.0) * function(x)).sum(-1) - MEAN).square().mean().sqrt()))
        equal_errors.append(float((function(x).mean(-1) - MEAN).square().mean().sqrt()))
    rate, equal_rate = (-np.polyfit(np.log(counts), np.log(e), 1)[0] for e in (errors, equal_errors))
    assert rate > 1.8
    assert equal_rate == pytest.approx(0.5, abs=0.1)
    assert errors[-1] < equal_errors[-1] / 200


def test_no_period_still_integrates_over_what_the_points_span():
    x = random_points(400, batch=20)
    low, high = x.amin(-2), x.amax(-2)
    exact = (high**3 - low**3) / (3 * (high - low))
    got = (line_weights(x) * x[..., 0] ** 2).sum(-1, keepdim=True)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("period", [None, 1.0])
def test_a_single_point_weighs_one(period):
    assert line_weights(torch.tensor([[0.3]]), period).tolist() == [1.0]
    valid = torch.tensor([False, True, False])
    assert line_weights(torch.tensor([[0.3], [0.6], [0.9]]), period, valid).tolist() == [0.0, 1.0, 0.0]


def test_duplicates_share_one_weight():
    """A point given twice weighs in sum what it weighs once."""
    x = torch.tensor([[0.1], [0.4], [0.4], [0.8]], dtype=torch.float64)
    weights = line_weights(x, 1.0)
    once = line_weights(x[[0, 1, 3]], 1.0)
    torch.testing.assert_close(torch.stack([weights[0], weights[1] + weights[2], weights[3]]), once)


def test_points_all_in_one_place_weigh_the_same():
    x = torch.full((4, 1), 0.25, dtype=torch.float64)
    assert line_weights(x).tolist() == [0.25] * 4
    assert float(line_weights(x, 1.0).sum()) == 1


def test_single_precision_is_kept():
    assert line_weights(random_points(10).float(), 1.0).dtype == torch.float32


@pytest.mark.parametrize("sizes", [(1,), (8192,), (4, 6), (141, 141), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("periodic", [True, False])
def test_a_regular_grid_is_known_by_its_points_in_float32(sizes, periodic):
    lengths = (1.0, 2.0, 0.3)[: len(sizes)]
    grid = periodic_grid(sizes, lengths) if periodic else cell_grid(sizes, lengths) * 7 - 40
    assert grid_sizes(grid.float()) == sizes
    assert grid_sizes(grid.float(), lengths if periodic else None) == sizes


def test_other_points_are_no_regular_grid():
    grid = periodic_grid((6, 8), (1.0, 1.0))
    order = torch.randperm(48)
    moved = grid.clone()
    moved[20, 1] += 0.03
    turned = grid.view(6, 8, 2).transpose(0, 1).reshape(-1, 2)  # the first axis fastest
    stretched = torch.stack([grid[:, 0] ** 2, grid[:, 1]], -1)
    for points in (grid[order], grid[1:], moved, turned, stretched, torch.rand(48, 2), grid.flip(0)):
        assert grid_sizes(points) is None
    assert grid_sizes(grid, (1.0, 1.0)) == (6, 8)
    half = grid[:24]  # a regular grid, and not of the whole period
    assert (grid_sizes(half), grid_sizes(half, (1.0, 1.0))) == ((3, 8), None)
