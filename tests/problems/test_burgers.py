"""Burgers as a problem: the published law, accuracy of the defaults, and the exact symmetries."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.fields import Batch, Field, collate
from oformer.meshes.grids import line_weights
from oformer.problems.burgers import Burgers

SMALL = Burgers(points=96, solver_points=128, steps=100)


def batch_of(problem: Burgers, count: int, stride: int = 1) -> Batch:
    batch = collate(problem.samples(range(count), seed=0))
    coords = batch.input.coords[:, ::stride]
    return dataclasses.replace(
        batch,
        input=Field.of(coords, batch.input.values[:, :, ::stride]),
        query=Field.of(coords),
        target=batch.target[:, :, ::stride],
    )


def in_single(batch: Batch) -> Batch:
    single = batch.to(torch.float32)
    assert isinstance(single, Batch)
    return single


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got - expected).norm(dim=-2) / expected.norm(dim=-2)).max())


def test_initial_states_follow_the_published_law():
    initial = Burgers(points=64).draw(range(4000), seed=0)["initial"]
    power = 2 * torch.fft.rfft(initial, norm="forward").abs().square().mean(0)
    k = torch.arange(1, 21, dtype=torch.float64)
    torch.testing.assert_close(power[1:21], 2 * 625 / ((2 * math.pi * k) ** 2 + 25) ** 2, rtol=0.1, atol=0)
    assert power[21:].max() < 1e-30
    assert initial.mean(-1).abs().max() < 1e-14
    assert float(initial.square().mean().sqrt()) == pytest.approx(0.594, abs=0.012)


def test_published_state_has_the_same_modes(shared_data):
    """In float32 read back from a graphic: the modes beyond 20 are four decades down."""
    a = torch.from_numpy(np.load(shared_data / "burgers_r10_real_pair.npz")["a"]).double()
    spectrum = torch.fft.rfft(a[0], norm="forward").abs()
    ours = torch.fft.rfft(SMALL.draw([0], 0)["initial"][0], norm="forward").abs()
    assert spectrum[1:21].min() > 10 * spectrum[21:].max()
    assert spectrum[21:].norm() < 1e-3 * spectrum.norm()
    assert ours[1:21].min() > 1e9 * ours[21:].max()


def test_published_pair(shared_data):
    pair = np.load(shared_data / "burgers_r10_real_pair.npz")
    a, u = (torch.from_numpy(pair[name]).double() for name in ("a", "u"))
    (sample,) = Burgers(points=512).solve({"initial": a})
    assert relative(sample.target[0], u[0, :, None]) < 5e-4


def test_defaults_are_accurate():
    """As the docstring says: 1e-8 at worst, a thousand times better as a rule."""
    state = Burgers().draw(range(8), seed=0)
    fine = Burgers(solver_points=1536, steps=1200)
    got, exact = (torch.stack([s.target[0, ::16] for s in p.solve(state)]) for p in (Burgers(), fine))
    errors = (got - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() < 2e-8
    assert errors.median() < 5e-11


def test_the_function_does_not_depend_on_the_stored_points():
    """Fewer points are a thinned view of more: values of one function, not a smoothed one."""
    fine, coarse = (Burgers(points=n, solver_points=256, steps=100).samples([0, 1], seed=4) for n in (768, 48))
    for many, few in zip(fine, coarse, strict=True):
        torch.testing.assert_close(few.input.values, many.input.values[:, ::16], rtol=0, atol=1e-12)
        torch.testing.assert_close(few.target, many.target[:, ::16], rtol=0, atol=1e-12)


def test_samples_share_one_set_of_points():
    one, two = SMALL.samples([0, 1], seed=0)
    assert one.input.coords is one.query.coords is two.input.coords is two.query.coords
    assert one.input.weights is one.query.weights is two.query.weights
    unit = torch.arange(96, dtype=torch.float64) / 96
    torch.testing.assert_close(one.input.coords[:, 0], unit, rtol=0, atol=1e-15)
    assert one.query.values.shape == (1, 96, 0)


def test_states_of_another_size_are_refused():
    with pytest.raises(InputError, match=r"\(batch, 96\).*\(2, 95\)"):
        SMALL.solve({"initial": torch.zeros(2, 95, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"points": 40}, "more than 40 `points` for 20 `modes`, got 40"),
        ({"solver_points": 60}, "more than 60 `solver_points`"),
        ({"modes": 0}, "`modes`"),
        ({"viscosity": 0.0}, "positive `viscosity`"),
        ({"viscosity": math.nan}, "positive `viscosity`"),
        ({"duration": -1.0}, "positive `duration`"),
        ({"steps": 0}, "`steps`"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Burgers(**change)


def test_card_tells_the_settings():
    card = Burgers(viscosity=0.05, duration=2.0, points=128).card
    assert "0.05 u_xx" in card.text
    assert "128 points" in card.text
    assert card.targets == ("u at time 2",)


@pytest.mark.parametrize("stride", [1, 2, 3])  # 96, 48 and 32 points
def test_augmentation_is_a_shift_and_a_sign(stride):
    """Each sample is one shift of the original or of its mirror image; input and target share it."""
    batch = batch_of(SMALL, 32, stride)
    changed = SMALL.augment(batch, torch.Generator().manual_seed(0))
    points = batch.input.points
    seen = set()
    for i in range(batch.size):
        a, b = (f[i, 0, :, 0] for f in (batch.input.values, changed.input.values))
        u, w = batch.target[i, 0, :, 0], changed.target[i, 0, :, 0]
        found = []
        for s in range(points):
            if torch.equal(b, a.roll(s)):
                found.append((s, 1))
                assert torch.equal(w, u.roll(s))
            if torch.equal(b, -a.flip(0).roll(1 + s)):
                found.append((s, -1))
                assert torch.equal(w, -u.flip(0).roll(1 + s))
        assert len(found) == 1
        seen.add(found[0])
    assert len({s for s, _ in seen}) > 10
    assert {sign for _, sign in seen} == {1, -1}


def test_augmentation_leaves_points_and_the_original_alone():
    batch = batch_of(SMALL, 4)
    values, target = batch.input.values.clone(), batch.target.clone()
    changed = SMALL.augment(batch, torch.Generator().manual_seed(0))
    assert changed.input.coords is batch.input.coords
    assert changed.input.weights is batch.input.weights
    assert changed.query is batch.query
    assert torch.equal(batch.input.values, values)
    assert torch.equal(batch.target, target)
    assert not torch.equal(changed.target, target)


def test_augmented_pairs_solve_the_equation():
    batch = batch_of(SMALL, 8)
    changed = SMALL.augment(batch, torch.Generator().manual_seed(1))
    solved = collate(SMALL.solve({"initial": changed.input.values[:, 0, :, 0]}))
    assert relative(solved.target[:, 0], changed.target[:, 0]) < 1e-11


def test_augmentation_draws_from_its_generator_alone():
    batch = batch_of(SMALL, 8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (SMALL.augment(batch, torch.Generator().manual_seed(s)).target for s in (3, 3))
    other = SMALL.augment(batch, torch.Generator().manual_seed(4)).target
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    generator = torch.Generator().manual_seed(3)
    one, two = (SMALL.augment(batch, generator).target for _ in range(2))
    assert not torch.equal(one, two)


def test_augmentation_works_in_single_precision():
    batch = batch_of(SMALL, 8)
    double = SMALL.augment(batch, torch.Generator().manual_seed(3))
    single = SMALL.augment(in_single(batch), torch.Generator().manual_seed(3))
    assert single.target.dtype == torch.float32
    assert torch.equal(single.target, double.target.float())
    big = in_single(batch_of(Burgers(steps=2), 2))  # coordinates of 8192 points are rounded, and accepted
    assert SMALL.augment(big, torch.Generator()).target.shape == (2, 1, 8192, 1)


def test_augmentation_after_dropping_points_is_refused():
    batch = batch_of(SMALL, 4)
    kept = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:48].sort().values
    coords = batch.input.coords[:, kept]
    dropped = Field.of(coords, batch.input.values[:, :, kept], line_weights(coords, 1.0))
    with pytest.raises(InputError, match=r"48 input points and 96 queries\. Augment a batch before points are dropped"):
        SMALL.augment(dataclasses.replace(batch, input=dropped), torch.Generator())
    both = dataclasses.replace(batch, input=dropped, query=Field.of(coords), target=batch.target[:, :, kept])
    with pytest.raises(InputError, match="queries that are none"):
        SMALL.augment(both, torch.Generator())
    half = batch.input.coords[:, :48]
    window = dataclasses.replace(batch, input=Field.of(half, batch.input.values[:, :, :48]), query=Field.of(half))
    with pytest.raises(InputError, match="queries that are none"):
        SMALL.augment(window, torch.Generator())
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    shuffled = Field.of(batch.input.coords[:, order], batch.input.values[:, :, order])
    with pytest.raises(InputError, match="queries that are none"):
        SMALL.augment(dataclasses.replace(batch, input=shuffled), torch.Generator())
