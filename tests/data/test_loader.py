import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oformer.data import Loader, PointDataset, View
from oformer.data.loader import few_sizes
from oformer.errors import InputError
from oformer.fields import Field, Sample

COUNT = 23


def numbered(sizes):
    """Samples whose target is their number, with so many points each."""
    samples = []
    for i, n in enumerate(sizes):
        place = Field.of(torch.rand(int(n), 1), torch.rand(1, int(n), 1))
        samples.append(Sample(place, Field.of(torch.rand(3, 1)), torch.full((1, 3, 1), float(i))))
    return PointDataset(samples)


def numbers(*batches):
    return [int(number) for batch in batches for number in batch.target[:, 0, 0, 0]]


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("oformer-loader")]


@pytest.fixture
def ragged():
    return numbered(np.random.default_rng(0).integers(1, 60, COUNT))


@pytest.fixture
def even():
    return numbered([5] * COUNT)


def same_batch(a, b):
    for one, other in ((a.input, b.input), (a.query, b.query)):
        for name in ("coords", "values", "weights"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(a.target, b.target)
    assert a.parameters.keys() == b.parameters.keys()
    assert all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters)
    assert (a.cells is None) == (b.cells is None)
    assert all(torch.equal(x, y) for x, y in zip(a.cells or (), b.cells or (), strict=True))


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 50),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    even=st.booleans(),
)
def test_every_sample_once_an_epoch(count, batch, seed, shuffle, even):
    sizes = [4] * count if even else np.random.default_rng(seed).integers(1, 9, count)
    loader = Loader(numbered(sizes), batch, seed=seed, shuffle=shuffle, resident=False)
    epochs = 4
    stream = np.concatenate([loader.indices_at(step) for step in range(-(-epochs * count // batch))])
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))
    if not shuffle:
        assert stream[: 2 * count].tolist() == list(range(count)) * 2


def test_epochs_differ_and_seeds_too(even):
    loader = Loader(even, COUNT, seed=0)
    orders = [numbers(loader.batch_at(step)) for step in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert numbers(Loader(even, COUNT, seed=1).batch_at(0)) != orders[0]


@pytest.mark.parametrize("kind", ["even", "ragged"])
@pytest.mark.parametrize("resident", ["auto", False])
def test_a_batch_is_a_function_of_its_step(request, kind, resident):
    dataset = request.getfixturevalue(kind)
    first, second = (Loader(dataset, 4, seed=5, resident=resident) for _ in range(2))
    expected = [first.batch_at(step) for step in range(40)]
    for step in (39, 3, 3, 17, 0):  # in any order, as often as one likes, in another process
        same_batch(second.batch_at(step), expected[step])
    stream = second.stream(11)  # a resumed run
    for step in range(11, 30):
        same_batch(next(stream), expected[step])
    stream.close()
    assert not threads()


@pytest.mark.parametrize("kind", ["even", "ragged"])
def test_ranks_share_a_batch(request, kind):
    dataset = request.getfixturevalue(kind)
    alone = Loader(dataset, 6, seed=2)
    ranks = [Loader(dataset, 6, seed=2, rank=rank, world=3) for rank in range(3)]
    for step in range(12):
        parts = [loader.batch_at(step) for loader in ranks]
        assert [part.size for part in parts] == [2, 2, 2]
        assert numbers(*parts) == numbers(alone.batch_at(step))
    seen = [batch for loader in ranks for batch in loader.epoch()]
    assert sorted(numbers(*seen)) == list(range(COUNT))


@pytest.mark.parametrize("kind", ["even", "ragged"])
@pytest.mark.parametrize("resident", ["auto", False])
def test_a_pass_for_evaluation(request, kind, resident):
    loader = Loader(request.getfixturevalue(kind), 5, seed=0, resident=resident)
    batches = list(loader.epoch())
    assert [batch.size for batch in batches] == [5, 5, 5, 5, 3]
    assert numbers(*batches) == list(range(COUNT))
    assert len(loader) == 5
    assert not threads()


@pytest.mark.parametrize("shared", [True, False])
def test_resident_or_streamed_is_the_same(waves, shared):
    samples = waves.samples(range(9), 0)
    if not shared:
        samples = [
            Sample(
                Field(s.input.coords + i, s.input.values, s.input.weights),
                s.query,
                s.target,
                {"i": torch.tensor(float(i))},
                (torch.arange(6).reshape(2, 3) + i,),
            )
            for i, s in enumerate(samples)
        ]
    dataset = PointDataset(samples, View(keep=0.5) if not shared else View(points=8), spec=waves.spec)
    stacked, streamed = Loader(dataset, 4, seed=1), Loader(dataset, 4, seed=1, resident=False)
    assert stacked.resident
    assert not streamed.resident
    with streamed:
        for step, batch in zip(range(8), streamed.stream(), strict=False):
            same_batch(batch, stacked.batch_at(step))
    for batch in (stacked.batch_at(0), streamed.batch_at(0)):
        assert batch.query.coords.stride(0) == 0  # one grid, expanded
        assert (batch.input.coords.stride(0) == 0) == shared
    assert not threads()


def test_what_only_most_samples_share(waves):
    """Samples 0, middle and last agree, another does not: found while stacking."""
    samples = waves.samples(range(9), 0)
    odd = samples[2]
    samples[2] = Sample(Field(odd.input.coords + 1, odd.input.values, odd.input.weights), odd.query, odd.target)
    dataset = PointDataset(samples)
    stacked, streamed = Loader(dataset, 9, seed=1), Loader(dataset, 9, seed=1, resident=False)
    assert stacked.resident
    same_batch(stacked.batch_at(0), streamed.batch_at(0))


def test_one_sample(waves):
    dataset = PointDataset(waves.samples([0], 0))
    same_batch(Loader(dataset, 2, seed=0).batch_at(0), Loader(dataset, 2, seed=0, resident=False).batch_at(0))


def test_budget(waves, ragged):
    dataset = PointDataset(waves.samples(range(9), 0))
    own = 9 * 16 * 2 * 4  # input and target; points, weights and queries are shared
    assert Loader(dataset, 4, seed=0, budget=own).resident
    assert not Loader(dataset, 4, seed=0, budget=own - 1).resident
    assert Loader(dataset, 4, seed=0, budget=1, resident=True).resident
    largest = max(sample.input.points for sample in ragged)
    own = COUNT * (3 * largest + 2 * 3) * 4  # input, places of queries, target; the weights of queries are shared
    assert Loader(ragged, 4, seed=0, budget=own).resident
    assert not Loader(ragged, 4, seed=0, budget=own - 1).resident


@pytest.mark.parametrize("round_to", [1, 16])
def test_ragged_samples_resident_or_streamed_are_the_same(ragged, round_to):
    stacked = Loader(ragged, 4, seed=1, round_to=round_to, resident=True)
    streamed = Loader(ragged, 4, seed=1, round_to=round_to, resident=False)
    plain = Loader(ragged, 4, seed=1, resident=False)
    sizes = set()
    for step in range(20):
        batch = stacked.batch_at(step)
        same_batch(batch, streamed.batch_at(step))
        assert numbers(batch) == numbers(plain.batch_at(step))  # the order does not depend on the rounding
        largest = max(ragged[number].input.points for number in numbers(batch))
        assert batch.input.points == -(-largest // round_to) * round_to
        assert batch.query.points == 3  # as many in all samples: a whole grid stays one
        assert all(tensor.is_contiguous() for tensor in (batch.input.values, batch.input.coords, batch.target))
        sizes.add(batch.input.points)
    assert len(sizes) <= (4 if round_to == 16 else 20)


def test_what_ragged_samples_share_stays_shared():
    """Sources that differ in number, one set of queries for all."""
    query = Field.of(torch.rand(3, 1))
    samples = [
        Sample(Field.of(torch.rand(n, 1), torch.rand(1, n, 1)), query, torch.full((1, 3, 1), float(n)))
        for n in (4, 2, 7, 5)
    ]
    dataset = PointDataset(samples)
    stacked, streamed = (Loader(dataset, 2, seed=0, round_to=4, resident=resident) for resident in (True, False))
    for step in range(4):
        same_batch(stacked.batch_at(step), streamed.batch_at(step))
        assert stacked.batch_at(step).query.coords.stride(0) == 0


def test_few_sizes():
    sizes = [77, 256, 100, 180, 200, 90, 255]
    round_to = few_sizes(numbered(sizes))
    assert round_to % 32 == 0
    assert len({-(-n // round_to) for n in range(77, 257)}) <= 5
    assert few_sizes(numbered([5, 6, 7])) == 32


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("resident", [True, False])
def test_a_short_batch_is_filled_with_samples_that_come_again(even, world, resident):
    for rank in range(world):
        loader = Loader(even, 10, seed=0, rank=rank, world=world, resident=resident)
        share = 10 // world
        filled, plain = list(loader.epoch(filled=True)), list(loader.epoch())
        assert all(batch.size == share for batch in filled)
        assert numbers(*filled)[: len(loader.epoch_indices())] == numbers(*plain) == loader.epoch_indices().tolist()


def test_padding_weighs_nothing(ragged):
    batch = Loader(ragged, 6, seed=0).batch_at(0)
    for i, number in enumerate(numbers(batch)):
        sample = ragged[number]
        n = sample.input.points
        assert torch.equal(batch.input.values[i, :, :n], sample.input.values)
        assert torch.equal(batch.input.weights[i, :n], sample.input.weights)
        assert float(batch.input.weights[i, n:].sum()) == 0
        assert float(batch.input.weights[i].sum()) == pytest.approx(1)


def test_like_sizes_waste_less():
    sizes = np.random.default_rng(1).integers(10, 1000, 999)
    loader = Loader(numbered(sizes), 8, seed=0)

    def waste(indices):
        groups = sizes[indices].reshape(-1, 8)
        return groups.max(1).sum() * 8 / groups.sum() - 1

    for epoch in range(3):
        steps = range(epoch * 124 + 1, epoch * 124 + 124)  # without the batches that straddle
        grouped = waste(np.concatenate([loader.indices_at(step) for step in steps]))
        random = waste(np.random.default_rng(epoch).permutation(999)[:992])
        assert grouped < 0.05
        assert random > 0.5
    means = [sizes[loader.indices_at(step)].mean() for step in range(124)]
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.3  # and the batches come in no order of size


class Failing:
    """A dataset's source that cannot read one sample."""

    def __init__(self, samples, bad):
        self.samples, self.bad, self.spec = samples, bad, PointDataset(samples).spec

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index, /):
        if index == self.bad:
            raise OSError("the disk is gone")
        return self.samples[index]


def test_an_error_in_the_thread_reaches_the_caller(ragged, monkeypatch):
    source = Failing(list(ragged), bad=None)
    loader = Loader(PointDataset(source), 4, seed=0, resident=False)
    source.bad = int(loader.indices_at(3)[0])
    stream = loader.stream()
    for _ in range(3):
        next(stream)
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert not threads()
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader.epoch())
    assert not threads()


def test_no_thread_is_left(ragged):
    with Loader(ragged, 4, seed=0, resident=False) as loader:
        stream = loader.stream()
        next(stream)
        assert len(threads()) == 1
    assert not threads()
    taken = list(zip(range(10), stream, strict=False))  # what was ready, then the end
    assert len(taken) <= 3
    stream = loader.stream()
    next(stream)
    del stream  # forgotten
    assert not threads()
    loader.close()
    loader.close()


def test_only_a_few_batches_are_read_ahead(ragged):
    source = Failing(list(ragged), bad=None)
    reads = []
    original = Failing.__getitem__
    source.__class__ = type("Counting", (Failing,), {"__getitem__": lambda s, i: (reads.append(i), original(s, i))[1]})
    loader = Loader(PointDataset(source), 1, seed=0, prefetch=2, resident=False)
    reads.clear()
    with loader:
        stream = loader.stream()
        next(stream)
        time.sleep(0.1)
        assert len(reads) <= 4


def test_mistakes(even):
    for wrong, message in [
        ({"batch": 0}, "a batch that"),
        (
            {"batch": 5, "world": 2},
            "a batch that the number of ranks divides, got 5 over 2. Take a multiple of 2",
        ),
        ({"rank": 2, "world": 2}, "a rank from 0 to 1"),
        ({"seed": -1}, "`seed`"),
        ({"round_to": 0}, "`round_to` of at least 1"),
    ]:
        with pytest.raises(InputError, match=message):
            Loader(even, **({"batch": 4, "seed": 0} | wrong))
    with pytest.raises(InputError, match="a step of zero or more"):
        Loader(even, 4, seed=0).batch_at(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", ["auto", False])
def test_on_a_gpu(waves, ragged, resident):
    for dataset in (PointDataset(waves.samples(range(9), 0)), ragged):
        there = Loader(dataset, 4, seed=0, device="cuda", resident=resident)
        here = Loader(dataset, 4, seed=0)
        with there:
            for step, batch in zip(range(6), there.stream(), strict=False):
                assert batch.target.device.type == "cuda"
                assert (batch.query.coords.stride(0) == 0) == (dataset is not ragged)
                same_batch(batch.to("cpu"), here.batch_at(step))
    assert not threads()
