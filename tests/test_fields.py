import dataclasses
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oformer.errors import InputError, unknown_name
from oformer.fields import Batch, Field, Sample, Spec, collate, uniform_weights
from oformer.nn.shared_grids import expanded


def sample(points=4, queries=3, dim=2, parameters=None, cells=None):
    return Sample(
        input=Field.of(torch.rand(points, dim), torch.rand(2, points, 3)),
        query=Field.of(torch.rand(queries, dim), torch.rand(1, queries, 1)),
        target=torch.rand(5, queries, 2),
        parameters=parameters or {},
        cells=cells,
    )


def test_defaults():
    field = Field.of(torch.rand(6, 2))
    assert field.values.shape == (1, 6, 0)
    assert torch.allclose(field.weights, torch.full((6,), 1 / 6))
    assert field.points == 6
    batch = Field.of(torch.rand(3, 6, 2, dtype=torch.float64))
    assert batch.values.shape == (3, 1, 6, 0)
    assert batch.weights.shape == (3, 6)
    assert batch.weights.dtype == torch.float64
    with pytest.raises(InputError, match="an empty point set"):
        uniform_weights(torch.zeros(0, 2))


def test_to():
    cells = (torch.tensor([[0, 1, 2]]),)
    moved = sample(parameters={"mach": torch.tensor(0.8)}, cells=cells).to(torch.float64)
    assert moved.input.coords.dtype == moved.target.dtype == moved.parameters["mach"].dtype == torch.float64
    assert moved.cells is cells
    assert isinstance(collate([sample()]).to(torch.float64), Batch)


def shared_batch(size: int = 3, points: int = 4) -> Batch:
    """Samples on one grid, which are asked at the same points."""
    first = Field.of(torch.rand(points, 2), torch.rand(2, points, 3))
    samples = [
        Sample(first.with_values(torch.rand(2, points, 3)), Field.of(first.coords), torch.rand(5, points, 2))
        for _ in range(size)
    ]
    batch = collate(samples)
    return dataclasses.replace(batch, query=batch.query.sharing(batch.input))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_map_applies_to_all_tensors_and_computes_a_shared_grid_once():
    batch, sizes = shared_batch(), []
    doubled = batch.input.map(lambda t: sizes.append(len(t)) or 2 * t)
    assert sizes == [1, 3, 1]  # coordinates and weights of one sample, values of all
    assert same(doubled.tensors, [2 * t for t in batch.input.tensors])
    assert [expanded(t) for t in doubled.tensors] == [True, False, True]


def test_map_of_a_field_without_a_batch_axis_takes_equal_points_for_what_they_are():
    field = Field.of(torch.rand(4, 2), None, torch.tensor(0.25).expand(4))  # of stride 0, along the points
    assert field.map(lambda t: t.cumsum(0)).weights.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert field.take(slice(1, 3)).weights.tolist() == [0.25, 0.25]


def test_a_map_of_a_batch_keeps_the_query_at_the_points_of_the_input():
    batch = dataclasses.replace(shared_batch(), parameters={"nu": torch.rand(3)}, cells=(torch.arange(3)[None],) * 3)
    calls = []
    changed = batch.map(lambda t: calls.append(t) or t + 1)
    assert same(changed.tensors, [t + 1 for t in batch.tensors])
    assert len(calls) == len(batch.tensors) == 8
    assert changed.query.coords is changed.input.coords
    assert changed.cells is batch.cells
    assert isinstance(changed, Batch)
    apart = dataclasses.replace(batch, query=Field.of(batch.input.coords.clone())).map(torch.clone)
    assert apart.query.coords is not apart.input.coords


def test_a_batch_in_another_type_stays_shared():
    moved = shared_batch().to(torch.float64)
    assert moved.query.coords is moved.input.coords
    assert expanded(moved.input.coords)
    assert moved.input.coords.dtype == moved.target.dtype == torch.float64


def test_one_sample_keeps_the_query_at_the_points_of_the_input_too():
    field = Field.of(torch.rand(4, 2))
    moved = Sample(field, field, torch.rand(1, 4, 1), {"nu": torch.tensor(1.0)}).to(torch.float64)
    assert moved.query.coords is moved.input.coords
    assert moved.parameters["nu"].dtype == torch.float64


@given(first=st.integers(0, 7), last=st.integers(0, 9), batched=st.booleans())
def test_taken_points_keep_their_weights(first, last, batched):
    field = sample(points=7).input
    parts = [slice(0, first), slice(first, last), slice(max(first, last), 7)]
    taken = [(field.batched() if batched else field).take(part) for part in parts]
    for part, some in zip(parts, taken, strict=True):
        some = some.single(0) if batched else some
        assert same(some.tensors, (field.coords[part], field.values[:, part], field.weights[part]))
        assert some.points == len(range(7)[part])
    # Parts that cover all points once integrate what the whole field integrates.
    means = torch.stack([torch.einsum("...p,...tpc->...tc", some.weights, some.values) for some in taken]).sum(0)
    torch.testing.assert_close(means.reshape(2, 3), torch.einsum("p,tpc->tc", field.weights, field.values))


def test_taken_points_of_a_shared_grid_stay_shared():
    taken = shared_batch().input.take(slice(1, 3))
    assert taken.points == 2
    assert [expanded(t) for t in taken.tensors] == [True, False, True]


def test_map_points_knows_the_axis_of_the_points():
    batch, sizes = shared_batch(points=4), []
    turned = batch.input.map_points(lambda t, axis: sizes.append((len(t), t.shape[axis])) or t.flip(axis))
    assert sizes == [(1, 4), (3, 4), (1, 4)]
    x = batch.input
    assert same(turned.tensors, (x.coords.flip(1), x.values.flip(2), x.weights.flip(1)))
    assert [expanded(t) for t in turned.tensors] == [True, False, True]


def test_samples_of_a_batch_stay_shared():
    batch = dataclasses.replace(shared_batch(), cells=tuple(torch.full((1, 3), i) for i in range(3)))
    some = batch.samples(slice(1, 3))
    assert some.size == 2
    assert same(some.tensors, [t[1:3] for t in batch.tensors])
    assert expanded(some.input.coords)
    assert some.query.coords is some.input.coords
    assert [int(cells[0, 0]) for cells in some.cells or ()] == [1, 2]
    assert shared_batch().samples(slice(0, 1)).cells is None


def test_with_values_keeps_points_and_weights_as_they_are():
    field = sample().input
    other = field.with_values(torch.zeros(1, 4, 1))
    assert other.coords is field.coords
    assert other.weights is field.weights
    assert not other.values.any()


@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_collate_pads_with_weight_zero(sizes):
    samples = [sample(points, queries, parameters={"i": torch.tensor(1.0)}) for points, queries in sizes]
    batch = collate(samples)
    assert batch.size == len(samples)
    assert batch.input.points == max(points for points, _ in sizes)
    assert batch.target.shape == (len(sizes), 5, max(queries for _, queries in sizes), 2)
    assert batch.parameters["i"].shape == (len(sizes),)
    for i, one in enumerate(samples):
        for whole, part in ((batch.input, one.input), (batch.query, one.query)):
            n = part.points
            assert torch.equal(whole.coords[i, :n], part.coords)
            assert torch.equal(whole.values[i, :, :n], part.values)
            assert torch.equal(whole.weights[i, :n], part.weights)
            assert not whole.weights[i, n:].any()
            assert not whole.coords[i, n:].any()
            assert not whole.values[i, :, n:].any()
        assert torch.equal(batch.target[i, :, : one.query.points], one.target)
        assert not batch.target[i, :, one.query.points :].any()


def test_collate_keeps_shared_points_shared():
    first = sample()
    batch = collate([first, Sample(first.input, first.query, first.target + 1)])
    for tensor in (batch.input.coords, batch.input.weights, batch.query.coords, batch.query.values):
        assert tensor.stride(0) == 0
    assert batch.input.values.stride(0) > 0
    assert batch.target.stride(0) > 0
    alone = collate([first])
    alone.input.coords.zero_()  # a batch of one is a copy like any other
    assert first.input.coords.any()


def test_collate_cells():
    cells = [(torch.full((i + 1, 3), i),) for i in range(2)]
    batch = collate([sample(cells=c) for c in cells])
    assert batch.cells is not None
    assert [len(c) for c in batch.cells] == [1, 2]
    assert collate([sample(cells=cells[0]), sample()]).cells is None


def test_collate_refuses():
    with pytest.raises(InputError, match="at least one sample"):
        collate([])
    for names in (({"a": torch.tensor(1.0)}, {}), ({}, {"a": torch.tensor(1.0)})):
        with pytest.raises(InputError, match="same parameters in all samples"):
            collate([sample(parameters=n) for n in names])


def test_spec_refuses():
    for wrong, message in [
        ({"dim": 0}, "1, 2 or 3 space dimensions"),
        ({"dim": 4}, "1, 2 or 3 space dimensions"),
        ({"in_times": 0}, "at least one in `in_times`"),
        ({"out_channels": 0}, "at least one in `out_channels`"),
        ({"grid": (4,)}, r"`grid` with one entry per dimension \(2\)"),
        ({"periods": (1.0, 1.0, 1.0)}, "`periods` with one entry per dimension"),
        ({"periods": (1.0, 0.0)}, "entries above zero in `periods`"),
        ({"grid": (4, -1)}, "entries above zero in `grid`"),
        ({"query_channels": -1}, "zero or more in `query_channels`"),
        ({"in_categories": -2}, "zero or more in `in_categories`"),
    ]:
        wanted = {"dim": 2, "in_times": 1, "in_channels": 1, "out_times": 1, "out_channels": 1} | wrong
        with pytest.raises(InputError, match=message):
            Spec(**wanted)


def test_unknown_name():
    error = unknown_name("split", "tset", ["train", "test"])
    assert str(error) == ("Expected the name of a split, got `tset`. Did you mean `test`? Choices: test, train.")
    assert "Did you mean" not in str(unknown_name("split", "zzz", ["train"]))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_field_of_arrays_and_of_one_frame(batch):
    """Shapes that people have: numpy, no axis of time, no axis of channels."""
    coords, values = torch.rand(*batch, 5, 2).numpy(), torch.rand(*batch, 5, 3, dtype=torch.float64).numpy()
    field = Field.of(coords, values)
    assert field.values.shape == (*batch, 1, 5, 3)
    assert field.coords.dtype == field.values.dtype == field.weights.dtype == torch.float32
    np.testing.assert_allclose(field.values.squeeze(-3).numpy(), values, rtol=1e-6)
    scalar = Field.of(coords, values[..., 0], np.full((*batch, 5), 0.2))
    assert scalar.values.shape == (*batch, 1, 5, 1)
    np.testing.assert_allclose(scalar.values[..., 0, :, 0].numpy(), values[..., 0], rtol=1e-6)
    whole = Field.of(torch.from_numpy(coords).double(), torch.from_numpy(values).unsqueeze(-3))
    assert whole.coords.dtype == torch.float64
    assert whole.values.shape == (*batch, 1, 5, 3)
    assert Field.of(coords).values.shape == (*batch, 1, 5, 0)


@pytest.mark.parametrize("shape", [(2, 5), (1, 5), (3, 2, 5)])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_field_of_points_with_swapped_axes_says_what_to_write(shape, kind):
    """What the sentence says, written in Python, is taken."""
    coords = kind(np.random.default_rng(0).random(shape, dtype=np.float32))
    with pytest.raises(InputError, match="It looks transposed") as refused:
        Field.of(coords)
    (written,) = re.findall("give `(.*)`", str(refused.value))
    field = Field.of(eval(written, {"coords": coords}))
    assert f"of shape {tuple(field.coords.shape)}." in str(refused.value)
    np.testing.assert_array_equal(field.coords, np.swapaxes(np.asarray(coords), -1, -2))


def test_a_field_of_points_that_fit_nothing_is_refused():
    with pytest.raises(InputError, match=r"dim 1, 2 or 3, .*got \(5,\)\. On a line give `coords\[:, None\]`"):
        Field.of(np.zeros(5))
    with pytest.raises(InputError, match=r"dim 1, 2 or 3, .*got \(5, 4\)\.$"):
        Field.of(np.zeros((5, 4)))
