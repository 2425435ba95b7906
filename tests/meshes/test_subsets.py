"""Choosing some of the points: shares, weights, and chances."""

import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.fields import Field, Sample, collate
from oformer.meshes.grids import periodic_grid
from oformer.meshes.subsets import keep_points


def line_field(counts: tuple[int, ...] = (20, 12, 16), times: int = 2) -> Field:
    """Points on a line whose values tell their place; garbage in the padding, which must never be chosen."""
    most = max(counts)
    coords = torch.rand(len(counts), most, 1, dtype=torch.float64)
    weights = torch.rand(len(counts), most, dtype=torch.float64) + 0.5
    for row, count in enumerate(counts):
        coords[row, count:] = 99.0
        weights[row, count:] = 0.0
    values = torch.stack([coords + t for t in range(times)], 1)
    return Field(coords, values, weights / weights.sum(1, keepdim=True))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kept_places(field: Field) -> list[list[float]]:
    return [coords[weights > 0, 0].tolist() for coords, weights in zip(field.coords, field.weights, strict=True)]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.95, 1.0])
def test_each_sample_keeps_the_share_of_its_own_points(share):
    field = line_field()
    kept = keep_points(field, share, seeded())
    for before, after, count in zip(kept_places(field), kept_places(kept), (20, 12, 16), strict=True):
        assert len(after) == round(count * share)
        assert set(after) <= set(before)
        assert len(set(after)) == len(after)
    assert kept.points == round(20 * share)


def test_values_stay_with_their_points():
    kept = keep_points(line_field(), 0.4, seeded())
    assert torch.equal(kept.values, torch.stack([kept.coords, kept.coords + 1], 1))


def test_kept_weights_keep_their_ratios_and_sum_to_one():
    field = line_field()
    kept = keep_points(field, 0.5, seeded())
    torch.testing.assert_close(kept.weights.sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-14)
    for row in range(3):
        old = dict(zip(field.coords[row, :, 0].tolist(), field.weights[row].tolist(), strict=True))
        valid = kept.weights[row] > 0
        ratios = [
            w / old[x]
            for x, w in zip(kept.coords[row, valid, 0].tolist(), kept.weights[row, valid].tolist(), strict=True)
        ]
        assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-12)


def test_at_least_one_point_stays():
    kept = keep_points(line_field(), 1e-6, seeded())
    assert [len(places) for places in kept_places(kept)] == [1, 1, 1]
    assert (kept.coords < 1).all()


def test_samples_and_seeds_differ_and_the_same_seed_repeats():
    row = torch.rand(1, 30, 1)
    field = Field.of(row.expand(2, -1, -1), torch.zeros(2, 1, 30, 1))
    once, again, other = (keep_points(field, 0.5, seeded(s)) for s in (3, 3, 4))
    assert torch.equal(once.coords, again.coords)
    assert torch.equal(once.weights, again.weights)
    places = [set(p) for p in kept_places(once)]
    assert places[0] != places[1]
    assert places[0] != set(kept_places(other)[0])


def test_every_point_is_as_likely_as_another():
    coords = torch.arange(10.0)[None, :, None].expand(4000, -1, -1)
    kept = keep_points(Field.of(coords, torch.zeros(4000, 1, 10, 1)), 0.3, seeded())
    share = torch.bincount(kept.coords.long().flatten(), minlength=10) / 4000
    # Five standard errors of 4000 draws with probability 0.3.
    assert (share - 0.3).abs().max() < 5 * math.sqrt(0.21 / 4000)


@pytest.mark.parametrize("period", [None, 1.0])
def test_gap_weights_are_the_half_gaps_of_what_is_left(period):
    kept = keep_points(line_field(), 0.5, seeded(), "gaps", None if period is None else (period,))
    for coords, weights, count in zip(kept.coords[..., 0], kept.weights, (10, 6, 8), strict=True):
        valid = weights > 0
        assert valid.sum() == count
        x = np.sort(coords[valid].numpy())
        if period is None:
            gaps = np.concatenate([[0.0], np.diff(x), [0.0]])
        else:
            wrap = x[0] + period - x[-1]
            gaps = np.concatenate([[wrap], np.diff(x), [wrap]])
        expected = (gaps[:-1] + gaps[1:]) / 2
        expected = expected / expected.sum()
        order = coords[valid].argsort()
        np.testing.assert_allclose(weights[valid][order].numpy(), expected, rtol=1e-10)


def test_gaps_are_of_a_line():
    with pytest.raises(InputError, match="points on a line to weigh by `gaps`, got 2 dimensions"):
        keep_points(grid_field(4), 0.5, seeded(), "gaps")


# --- weights by cells ---


def grid_field(side: int, dim: int = 2, batch: int = 1, shift: float = 0.0) -> Field:
    """A regular grid of period one; each sample its own copy, with values that tell the place."""
    coords = (periodic_grid((side,) * dim, (1.0,) * dim) + shift).expand(batch, -1, -1)
    return Field.of(coords, coords[:, None])


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_cells_weigh_nothing_less_than_the_points_did_and_one_in_all(dim, share):
    field = grid_field({1: 200, 2: 16, 3: 6}[dim], dim, batch=3)
    kept = keep_points(field, share, seeded(), "cells", (1.0,) * dim)
    assert torch.equal(kept.coords, keep_points(field, share, seeded()).coords)  # weights choose no points
    assert (kept.weights >= field.weights[0, 0]).all()
    torch.testing.assert_close(kept.weights.sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-13)


def test_keeping_all_points_keeps_their_weights_to_the_last_bit():
    field = line_field()
    kept = keep_points(field, 1.0, seeded(), "cells")
    for row in range(3):
        old = dict(zip(field.coords[row, :, 0].tolist(), field.weights[row].tolist(), strict=True))
        valid = kept.weights[row] > 0
        found = zip(kept.coords[row, valid, 0].tolist(), kept.weights[row, valid].tolist(), strict=True)
        assert all(old[x] == w for x, w in found)


def test_a_lone_point_weighs_all():
    kept = keep_points(line_field(), 1e-6, seeded(), "cells")
    torch.testing.assert_close(kept.weights, torch.ones(3, 1, dtype=torch.float64))


def test_what_is_left_out_is_shared_by_the_nearest_across_the_period():
    """Of a ring of four, a point left out gives half to either neighbor."""
    field = grid_field(4, dim=1)
    wrapped = keep_points(field, 0.75, seeded(), "cells", (1.0,))
    (left_out,) = set(field.coords.flatten().tolist()) - set(wrapped.coords.flatten().tolist())
    for x, w in zip(wrapped.coords.flatten().tolist(), wrapped.weights.flatten().tolist(), strict=True):
        assert w == pytest.approx(0.25 if abs(x - left_out) == 0.5 else 0.375)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_half_a_period_farther_points_weigh_the_same(dim):
    """On a grid, where most are equally near to several."""
    side = {1: 100, 2: 14, 3: 6}[dim]
    there, here = (
        keep_points(grid_field(side, dim, shift=shift), 0.4, seeded(), "cells", (1.0,) * dim) for shift in (0.5, 0.0)
    )
    torch.testing.assert_close(there.weights, here.weights, rtol=0, atol=1e-14)
    turned = Field((here.coords + 0.5) % 1, here.values, here.weights)
    whole = Field((grid_field(side, dim).coords + 0.5) % 1, grid_field(side, dim).values, grid_field(side, dim).weights)
    again = keep_points(whole, 0.4, seeded(), "cells", (1.0,) * dim)
    assert torch.equal(again.coords, turned.coords)
    torch.testing.assert_close(again.weights, here.weights, rtol=0, atol=1e-14)


def test_batches_and_padding_are_not_felt():
    """Fields of other sizes in one batch weigh what each weighs alone, whatever stands in the padding."""
    field = line_field((20, 12, 16))
    together = keep_points(field, 0.5, seeded(), "cells", (1.0,))
    for row, count in enumerate((20, 12, 16)):
        rows = together.weights[row] > 0
        kept = together.coords[row, rows, 0].tolist()
        alone, weights = field.coords[row, :count, 0], field.weights[row, :count]
        expected = dict.fromkeys(kept, 0.0)
        for x, w in zip(alone.tolist(), weights.tolist(), strict=True):
            apart = [min(abs(x - y), 1 - abs(x - y)) for y in kept]
            expected[kept[int(np.argmin(apart))]] += w
        np.testing.assert_allclose(together.weights[row, rows].tolist(), list(expected.values()), rtol=1e-12)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_more_padding_changes_no_weight(share):
    small, large = grid_field(5), grid_field(9)
    samples = [Sample(f.single(0), f.single(0), f.values[0]) for f in (small, large)]
    alone = keep_points(small, share, seeded(), "cells", (1.0, 1.0))
    padded = keep_points(collate(samples).input, share, seeded(), "cells", (1.0, 1.0))
    count = alone.points
    assert torch.equal(padded.coords[:1, :count], alone.coords)  # the first chances that are drawn are the same
    torch.testing.assert_close(padded.weights[:1, :count], alone.weights, rtol=0, atol=1e-15)
    assert (padded.weights[0, count:] == 0).all()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("kind", ["wave", "linear"])
def test_random_points_of_a_grid_weighed_by_cells_integrate(share, kind):
    """Root mean square errors of 12 choices; equal weights are at least three times as wrong."""
    field = grid_field(24, batch=12)
    periods = (1.0, 1.0) if kind == "wave" else None
    errors = {}
    for weights in ("scaled", "cells"):
        kept = keep_points(field, share, seeded(), weights, periods)
        x, y = kept.coords.unbind(-1)
        values = torch.exp(torch.sin(2 * math.pi * x) + torch.cos(4 * math.pi * y)) if kind == "wave" else x + 2 * y
        a, b = field.coords[:1].unbind(-1)
        whole = torch.exp(torch.sin(2 * math.pi * a) + torch.cos(4 * math.pi * b)) if kind == "wave" else a + 2 * b
        errors[weights] = float(((kept.weights * values).sum(1) - whole.mean()).square().mean().sqrt())
    assert errors["cells"] < errors["scaled"] / 3
