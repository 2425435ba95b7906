"""What goes by buffers arrives whole, in order, whatever its layout."""

import numpy as np
import pytest
import torch

from oformer.fields import Field
from oformer.models.chunked import points_of
from oformer.models.ferry import Ferry, _pieces
from oformer.nn.rotary import expanded

CPU = torch.device("cpu")
FRAMES, POINTS = 3, 40


def small_ferry(device: torch.device = CPU, **settings) -> Ferry:
    """Few and small buffers, on a CPU too: each is used many times."""
    ferry = Ferry(device, **{"piece": 17, "buffers": 3, "worthwhile": 2, **settings})
    ferry.used = True
    return ferry


def field(batch: int = 2, shared: bool = False) -> Field:
    coords = torch.rand(1, POINTS, 2).expand(batch, POINTS, 2) if shared else torch.rand(batch, POINTS, 2)
    return Field(coords, torch.randn(batch, FRAMES, POINTS, 2), torch.rand(batch, POINTS))


def same(a: Field, b: Field) -> bool:
    pairs = ((a.coords, b.coords), (a.values, b.values), (a.weights, b.weights))
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


def devices():
    return [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece", [1, 7, 80, 1000])
@pytest.mark.parametrize("some", [slice(0, POINTS), slice(3, 21), slice(39, 40)])
def test_a_field_arrives_whole(piece, some, device):
    known = points_of(field(), some.start, some.stop)
    taken = small_ferry(device, piece=piece).over(known)
    assert same(taken, known)
    assert taken.values.device.type == device.type


@pytest.mark.parametrize("device", devices())
def test_layouts_that_have_no_rows_arrive_too(device):
    known = Field(
        torch.rand(2, 2, POINTS).transpose(1, 2), torch.randn(2, POINTS, FRAMES, 2).transpose(1, 2),
        torch.rand(POINTS, 2).T,
    )  # fmt: skip
    assert same(small_ferry(device).over(known), known)


def test_a_grid_that_a_batch_shares_travels_once():
    known = field(shared=True)
    taken = small_ferry().over(known)
    assert same(taken, known)
    assert expanded(taken.coords)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece", [1, 7, 80, 1000])
@pytest.mark.parametrize("chunk", [1, 13, POINTS])
def test_answers_arrive_in_their_places(chunk, piece, device):
    ferry, answers = small_ferry(device, piece=piece), torch.randn(5, FRAMES, POINTS, 2)
    values = torch.full_like(answers, torch.nan)
    for samples in (slice(0, 2), slice(2, 4), slice(4, 5)):
        for first in range(0, POINTS, chunk):
            part = answers[samples, :, first : first + chunk].to(device, copy=True)
            ferry.back(part, values[samples, :, first : first + chunk])
            part.zero_()  # as if its memory went to somebody else: what left before is not touched
    ferry.land()
    assert torch.equal(values, answers)


def test_no_more_buffers_are_made_than_allowed(monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: made.append(size) or empty(*size, **how))
    ferry, values = small_ferry(), empty(2, FRAMES, POINTS, 2)
    for _ in range(3):
        ferry.back(torch.randn(2, FRAMES, POINTS, 2), values)
    ferry.land()
    assert made == [(17,)] * 3


def test_both_ways_at_once():
    ferry, first, second = small_ferry(), field(), field()
    place = torch.full_like(first.values, torch.nan)
    ferry.back(first.values.clone(), place)
    taken = ferry.over(second)  # in the same buffers, which hold answers
    ferry.land()
    assert torch.equal(place, first.values)
    assert same(taken, second)


def test_other_numbers_keep_their_precision():
    known = Field(*(t.double() for t in (field().coords, field().values, field().weights)))
    known.values.add_(1e-12)
    assert same(small_ferry().over(known), known)


@pytest.mark.parametrize(("rows", "columns", "most"), [(1, 10, 4), (5, 3, 7), (4, 9, 9), (3, 4, 100)])
def test_pieces_are_contiguous_and_cover_all_once(rows, columns, most):
    table = torch.arange(float(rows * columns)).view(rows, columns)
    seen = torch.zeros_like(table)
    numbers = []
    for source, target in _pieces(table, seen, most):
        assert source.is_contiguous()
        assert source.numel() <= most
        target += 1
        numbers += source.flatten().tolist()
    assert bool((seen == 1).all())
    assert np.array_equal(numbers, np.arange(rows * columns))
