import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oformer.errors import InputError, unknown_name
from oformer.fields import (
    Batch,
    Field,
    Sample,
    Spec,
    check_field,
    check_finite,
    check_sample,
    collate,
    uniform_weights,
)


def sample(points=4, queries=3, dim=2, parameters=None, cells=None):
    return Sample(
        input=Field.of(torch.rand(points, dim), torch.rand(2, points, 3)),
        query=Field.of(torch.rand(queries, dim), torch.rand(1, queries, 1)),
        target=torch.rand(5, queries, 2),
        parameters=parameters or {},
        cells=cells,
    )


SPEC = Spec(dim=2, in_times=2, in_channels=3, out_times=5, out_channels=2, query_channels=1)


def unchecked(kind, **parts):
    """What a person may build by mistake; the shape checks of the tests would not let it through."""
    made = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


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


def test_check_field_accepts():
    check_field("input", sample().input, 2, 2, 3)
    check_field("input", collate([sample(2), sample(5)]).input, 2, 2, 3)


COORDS, VALUES, WEIGHTS = torch.rand(4, 2), torch.rand(2, 4, 3), torch.full((4,), 0.25)


@pytest.mark.parametrize(
    ("parts", "wanted", "message"),
    [
        (
            {"coords": COORDS[:0], "values": VALUES[:, :0], "weights": WEIGHTS[:0]},
            {},
            "at least one point in `u`",
        ),
        ({}, {"dim": 3}, r"`u.coords` of shape \(..., points, 3\), got \(4, 2\). This .* in 3 dimensions"),
        ({}, {"dim": 1}, "lives in 1 dimension;"),
        ({"coords": COORDS.T}, {"dim": 2}, r"looks transposed: give `coords.swapaxes\(-1, -2\)`, of shape \(4, 2\)"),
        (
            {"values": VALUES[:, :3]},
            {},
            r"as many values and weights as points in `u` \(4\), got 3 values and 4",
        ),
        ({"weights": WEIGHTS[:2]}, {}, "got 4 values and 2 weights"),
        ({}, {"times": 5}, r"5 frames in `u.values`, got 2 \(shape \(2, 4, 3\)\)"),
        ({}, {"channels": 1}, r"1 channels in `u.values`, got 3"),
        ({"coords": COORDS[:, 0]}, {}, r"`u` with coords \(..., points, dim\)"),
        ({"values": VALUES[0]}, {}, r"got \(4, 2\), \(4, 3\), \(4,\). Add the missing axis"),
        (
            {"coords": COORDS * torch.nan},
            {},
            r"finite numbers in `u.coords`, got 8 NaN or infinite values of 8",
        ),
        ({"values": VALUES / 0}, {}, r"finite numbers in `u.values`"),
        ({"weights": -WEIGHTS}, {}, "weights of `u` that are not negative"),
        ({"weights": WEIGHTS * 0}, {}, "not all zero"),
    ],
)
def test_check_field_refuses(parts, wanted, message):
    field = unchecked(Field, **({"coords": COORDS, "values": VALUES, "weights": WEIGHTS} | parts))
    with pytest.raises(InputError, match=message):
        check_field("u", field, **wanted)


def test_check_sample():
    good = sample()
    check_sample(good)
    check_sample(good, SPEC)
    check_sample(collate([good, sample(7, 9)]), SPEC)
    for change, message in [
        ({"target": good.target[:, :2]}, r"one target value per query point in `s` \(3\), got 2"),
        ({"target": good.target[:3]}, r"`s.target` of shape \(5, queries, 2\), got \(3, 3, 2\)"),
        ({"target": good.target[..., :1]}, r"`s.target` of shape \(5, queries, 2\)"),
        ({"target": good.target[0]}, r"`s.target` of shape \(..., times, queries, channels\), got \(3, 2\)"),
        ({"target": good.target * torch.inf}, r"finite numbers in `s.target`"),
        ({"query": sample(dim=1).query}, r"`s.query.coords` of shape \(..., points, 2\)"),
        ({"query": Field.of(good.query.coords)}, r"1 channels in `s.query.values`, got 0"),
        ({"input": sample(dim=3).input}, r"`s.input.coords`"),
    ]:
        parts = {"input": good.input, "query": good.query, "target": good.target} | change
        with pytest.raises(InputError, match=message):
            check_sample(unchecked(Sample, **parts, parameters={}, cells=None), SPEC, "s")


def test_check_finite():
    check_finite("x", torch.zeros(3))
    check_finite("x", torch.zeros(0))
    with pytest.raises(InputError, match="got 2 NaN or infinite values of 3"):
        check_finite("x", torch.tensor([1.0, torch.nan, torch.inf]))


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
