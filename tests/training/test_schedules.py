"""What changes while training goes on: the same curve as torch's, the switch points of the paper, honest dropping."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Batch, Field
from oformer.meshes.grids import periodic_grid
from oformer.training.schedules import Drop, Halving, Horizon, OneCycle, begin_later


@pytest.mark.parametrize(
    ("steps", "warmup", "start", "end"),
    [
        (2000, 0.2, 1e4, 1e4),  # Burgers
        (3200, 0.2, 1e2, 1e5),  # Darcy
        (1281, 0.3, 1e4, 1e4),  # Navier-Stokes, a number that is no multiple
        (320, 0.1, 1e2, 1e4),  # the Poisson problems
        (57, 0.37, 25.0, 10.0),
        (4, 0.5, 10.0, 10.0),
    ],
)
def test_one_cycle_is_the_curve_of_torch(steps, warmup, start, end):
    peak = 8e-4
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=steps, pct_start=warmup, div_factor=start, final_div_factor=end
    )
    ours = OneCycle(warmup, start, end)
    for step in range(steps):
        factor, beta1 = ours.at(step, steps)
        group = optimizer.param_groups[0]
        assert peak * factor == pytest.approx(group["lr"], rel=1e-9, abs=1e-18), step
        assert beta1 == pytest.approx(group["betas"][0], rel=1e-12), step
        optimizer.step()
        if step < steps - 1:
            theirs.step()


def test_one_cycle_goes_from_start_over_the_peak_to_the_end():
    cycle = OneCycle(warmup=0.25, start=100.0, end=50.0, beta1=(0.9, 0.7))
    assert cycle.at(0, 400) == pytest.approx((1 / 100, 0.9))
    assert cycle.at(99, 400) == pytest.approx((1.0, 0.7))
    assert cycle.at(399, 400) == pytest.approx((1 / 5000, 0.9))
    factors = [cycle.at(step, 400)[0] for step in range(400)]
    assert factors[:100] == sorted(factors[:100])
    assert factors[99:] == sorted(factors[99:], reverse=True)


def test_one_cycle_works_for_a_single_step_and_stays_down_after_the_end():
    factor, beta1 = OneCycle().at(0, 1)
    assert 0 < factor <= 1
    assert 0.85 <= beta1 <= 0.95
    assert OneCycle().at(1000, 100) == OneCycle().at(99, 100)


def test_halving_is_the_curve_of_torch_s_step_rate_and_stays_down():
    halving, optimizer = Halving(parts=5), torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    for step in range(100):
        assert halving.at(step, 100) == (optimizer.param_groups[0]["lr"], 0.9)
        optimizer.step()
        theirs.step()
    assert halving.at(250, 100) == halving.at(99.5, 100) == (1 / 16, 0.9)
    with pytest.raises(InputError, match="at least one part"):
        Halving(parts=0)


def test_between_two_steps_rate_and_horizon_lie_between_theirs():
    """Where a time budget chooses positions (pace.py)."""
    cycle, horizon = OneCycle(warmup=0.25, start=100.0, end=50.0), Horizon(first=4, ramp=0.5)
    for step in range(98):
        (low, _), (rate, _), (high, _) = (cycle.at(step + share, 100) for share in (0.0, 0.4, 1.0))
        assert min(low, high) < rate < max(low, high) or step in (23, 24)  # around the peak
        assert horizon.at(step, 100, 20) <= horizon.at(step + 0.4, 100, 20) <= horizon.at(step + 1, 100, 20)


def switches(horizon: Horizon, steps: int, times: int) -> list[tuple[int, int]]:
    """(first step, frames) of each stage, steps counted from zero."""
    frames = [horizon.at(step, steps, times) for step in range(int(horizon.ramp * steps) + 3)]
    return [(step, now) for step, now in enumerate(frames) if step == 0 or now != frames[step - 1]]


def test_horizon_switches_where_navier_stokes_did():
    """NS2-full, 128,000 steps. The published numbers are those of the formula for a step counted from zero."""
    assert switches(Horizon(first=10, ramp=0.16), 128_000, 20) == [
        (0, 10),
        (12_289, 12),
        (14_337, 14),
        (16_384, 16),
        (18_432, 18),
        (20_480, 20),
    ]


def test_horizon_switches_where_the_airfoil_did():
    assert switches(Horizon(first=8, ramp=0.2), 48_000, 22) == [
        (0, 8),
        (5_486, 10),
        (6_172, 12),
        (6_858, 14),
        (7_543, 16),
        (8_229, 18),
        (8_915, 20),
        (9_600, 22),
    ]


def test_horizon_ends_with_all_frames_also_where_twos_do_not_add_up():
    stages = switches(Horizon(first=5, ramp=0.16), 32_000, 10)
    assert [frames for _, frames in stages] == [5, 7, 9, 10]
    assert stages[-1][0] == 5_120
    assert [frames for _, frames in switches(Horizon(first=20, ramp=0.16), 32_000, 40)] == list(range(20, 41, 2))
    assert Horizon(first=5).at(31_999, 32_000, 10) == 10


def test_a_horizon_without_a_ramp_asks_for_all_frames_also_at_the_position_before_the_first_step():
    """The loop compares the horizon of a step with that of the step before, which is at -1 when a run begins."""
    assert [Horizon(first=4, ramp=0.0).at(step, 100, 20) for step in (-1, 0, 99)] == [20, 20, 20]
    assert [Horizon(first=4, ramp=0.5).at(step, 100, 20) for step in (-1, 0)] == [4, 4]


def test_horizon_never_asks_for_more_than_there_is():
    assert Horizon(first=30).at(0, 100, 20) == 20


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch() -> Batch:
    field = Field.of(torch.rand(2, 16, 1, dtype=torch.float64), torch.randn(2, 2, 16, 1, dtype=torch.float64))
    return Batch(field, Field.of(field.coords), torch.randn(2, 1, 16, 1, dtype=torch.float64))


def test_dropping_leaves_queries_and_targets():
    whole = batch()
    dropped = Drop(probability=1.0, keep=(0.5, 0.5))(whole, seeded(), None)
    assert dropped.input.points == 8
    assert dropped.query is whole.query
    assert dropped.target is whole.target


def test_dropping_happens_as_often_and_takes_as_much_as_it_says():
    whole, drop, generator = batch(), Drop(probability=0.25, keep=(0.25, 0.75)), seeded()
    results = [drop(whole, generator, None) for _ in range(1000)]
    dropped = [result.input.points for result in results if result is not whole]
    assert abs(len(dropped) / 1000 - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 1000)
    assert set(dropped) == set(range(4, 13))  # a uniform share of 16 points, between a quarter and three quarters
    assert np.mean(dropped) == pytest.approx(8, abs=0.8)


def test_dropping_never_or_always():
    whole = batch()
    assert all(Drop(probability=0.0)(whole, seeded(s), None) is whole for s in range(20))
    assert all(Drop(probability=1.0)(whole, seeded(s), None) is not whole for s in range(20))


def test_dropping_knows_the_period():
    whole = batch()
    drop = Drop(probability=1.0, keep=(0.5, 0.5), weights="gaps")
    wrapped, open_ended = drop(whole, seeded(), (1.0,)), drop(whole, seeded(), None)
    assert torch.equal(wrapped.input.coords, open_ended.input.coords)
    expected = keep_weights(wrapped.input.coords[0, :, 0])
    torch.testing.assert_close(wrapped.input.weights[0], expected)
    assert not torch.allclose(open_ended.input.weights[0], expected)


def test_dropped_points_of_the_plane_leave_their_weight_to_the_nearest_across_the_period():
    grid = periodic_grid((8, 8), (1.0, 1.0)).expand(3, -1, -1)
    known = Field.of(grid, torch.randn(3, 2, 64, 1, dtype=torch.float64))
    whole = Batch(known, Field.of(grid), torch.randn(3, 1, 64, 1, dtype=torch.float64))
    drop = Drop(probability=1.0, keep=(0.5, 0.5), weights="cells")
    kept = drop(whole, seeded(), (1.0, 1.0)).input
    expected = torch.zeros(3, 32, dtype=torch.float64)
    for row in range(3):
        apart = (grid[row, :, None] - kept.coords[row]).abs()
        distance = torch.minimum(apart, 1 - apart).norm(dim=-1)
        nearest = distance < distance.amin(1, keepdim=True) + 1e-9
        expected[row] = (nearest / nearest.sum(1, keepdim=True)).sum(0) / 64
    torch.testing.assert_close(kept.weights, expected)


def keep_weights(x: Tensor) -> Tensor:
    """Half-gaps on a line of period one."""
    ordered, order = x.sort()
    ahead = torch.cat([ordered[1:], ordered[:1] + 1]) - ordered
    return torch.zeros_like(x).scatter(0, order, (ahead + ahead.roll(1)) / 2)


@pytest.mark.parametrize("keep", [(0.0, 0.5), (0.6, 0.5), (0.5, 1.1), (-0.1, 1.0)])
def test_refuses_shares_that_are_none(keep):
    with pytest.raises(InputError, match="shares to keep between 0 and 1"):
        Drop(keep=keep)


def numbered(samples: int, known: int, later: int) -> Batch:
    """Frames that hold their own number, with that of the sample before the point."""
    frames = torch.arange(samples)[:, None] * 100.0 + torch.arange(known + later)
    frames = frames[:, :, None, None].expand(-1, -1, 5, 1)
    coords = torch.rand(samples, 5, 2)
    return Batch(Field.of(coords, frames[:, :known]), Field.of(coords), frames[:, known:].clone())


def test_samples_begun_later_are_runs_of_frames_of_their_own():
    batch, starts = numbered(8, 3, 7), set()
    for seed in range(20):
        later = begin_later(batch, 4, torch.Generator().manual_seed(seed))
        frames = torch.cat([later.input.values, later.target], 1)
        assert frames.shape == (8, 7, 5, 1)
        first = frames[:, :1]
        assert torch.equal(frames, first + torch.arange(7.0)[:, None, None])  # one after the other
        assert torch.equal(first[:, 0, 0, 0] // 100, torch.arange(8.0))  # of the same sample
        starts |= set((first[:, 0, 0, 0] % 100).tolist())
    assert starts == {0.0, 1.0, 2.0, 3.0}  # each that leaves room, and no other
    again = begin_later(batch, 4, torch.Generator().manual_seed(19))
    assert torch.equal(again.target, later.target)


def test_samples_are_not_begun_later_where_all_frames_are_predicted():
    batch = numbered(4, 3, 7)
    same = begin_later(batch, 7, torch.Generator().manual_seed(0))
    assert torch.equal(same.input.values, batch.input.values)
    assert torch.equal(same.target, batch.target)
