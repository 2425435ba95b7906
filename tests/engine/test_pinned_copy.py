"""Fields and answers that pass through buffers arrive whole, in order, whatever their layout."""

import numpy as np
import pytest
import torch

from oformer.engine.pinned_copy import PinnedCopy, _pieces
from oformer.fields import Field
from oformer.nn.shared_grids import expanded

CPU = torch.device("cpu")
FRAMES, POINTS = 3, 40


def small_buffers(device: torch.device = CPU, **settings) -> PinnedCopy:
    """Few and small buffers, on a CPU too: each is used many times."""
    copies = PinnedCopy(device, **{"piece": 17, "buffers": 3, "worthwhile": 2, **settings})
    copies.enabled = True
    return copies


def field(batch: int = 2, shared: bool = False) -> Field:
    coords = torch.rand(1, POINTS, 2).expand(batch, POINTS, 2) if shared else torch.rand(batch, POINTS, 2)
    return Field(coords, torch.randn(batch, FRAMES, POINTS, 2), torch.rand(batch, POINTS))


def same(a: Field, b: Field) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a.tensors, b.tensors, strict=True))


def devices():
    return [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece", [1, 7, 80, 1000])
@pytest.mark.parametrize("some", [slice(0, POINTS), slice(3, 21), slice(39, 40)])
def test_a_field_arrives_whole(piece, some, device):
    known = field().take(some)
    taken = small_buffers(device, piece=piece).to_device(known)
    assert same(taken, known)
    assert taken.values.device.type == device.type


@pytest.mark.parametrize("device", devices())
def test_layouts_that_have_no_rows_arrive_too(device):
    known = Field(
        torch.rand(2, 2, POINTS).transpose(1, 2), torch.randn(2, POINTS, FRAMES, 2).transpose(1, 2),
        torch.rand(POINTS, 2).T,
    )  # fmt: skip
    assert same(small_buffers(device).to_device(known), known)


def test_a_grid_that_a_batch_shares_travels_once():
    known = field(shared=True)
    taken = small_buffers().to_device(known)
    assert same(taken, known)
    assert expanded(taken.coords)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("piece", [1, 7, 80, 1000])
@pytest.mark.parametrize("chunk", [1, 13, POINTS])
def test_answers_arrive_in_their_places(chunk, piece, device):
    copies, answers = small_buffers(device, piece=piece), torch.randn(5, FRAMES, POINTS, 2)
    values = torch.full_like(answers, torch.nan)
    for samples in (slice(0, 2), slice(2, 4), slice(4, 5)):
        for first in range(0, POINTS, chunk):
            part = answers[samples, :, first : first + chunk].to(device, copy=True)
            copies.to_host(part, values[samples, :, first : first + chunk])
            part.zero_()  # as if its memory went to somebody else: what left before is not touched
    copies.flush()
    assert torch.equal(values, answers)


def test_no_more_buffers_are_made_than_allowed(monkeypatch):
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: made.append(size) or empty(*size, **how))
    copies, values = small_buffers(), empty(2, FRAMES, POINTS, 2)
    for _ in range(3):
        copies.to_host(torch.randn(2, FRAMES, POINTS, 2), values)
    copies.flush()
    assert made == [(17,)] * 3


def test_both_ways_at_once():
    copies, first, second = small_buffers(), field(), field()
    place = torch.full_like(first.values, torch.nan)
    copies.to_host(first.values.clone(), place)
    taken = copies.to_device(second)  # in the same buffers, which hold answers
    copies.flush()
    assert torch.equal(place, first.values)
    assert same(taken, second)


def test_other_numbers_keep_their_precision():
    known = field().to(torch.float64)
    known.values.add_(1e-12)
    assert same(small_buffers().to_device(known), known)


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
