"""Choosing some of the points: shares, weights, and chances."""

import math

import numpy as np
import pytest
import torch

from oformer.fields import Field
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
