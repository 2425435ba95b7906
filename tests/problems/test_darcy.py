"""Darcy flow as a problem: the published law, its numbers, and the eight symmetries of the square."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.fft
import torch

from oformer.errors import InputError
from oformer.fields import Batch, Field, collate
from oformer.meshes.grids import cell_grid, thinning
from oformer.problems.darcy import Darcy
from oformer.seeds import numpy_generator
from oformer.solvers.random_fields import Matern, neumann_square

SMALL = Darcy(points=25)


def thinned(batch: Batch, points: int, stride: int) -> Batch:
    """Every stride-th row and column, as views take them."""
    kept = torch.arange(points**2).view(points, points)[::stride, ::stride].flatten()
    coords = batch.input.coords[:, kept]
    return dataclasses.replace(
        batch,
        input=Field.of(coords, batch.input.values[:, :, kept]),
        query=Field.of(coords),
        target=batch.target[:, :, kept],
    )


def batch_of(problem: Darcy, count: int, stride: int = 1) -> Batch:
    return thinned(collate(problem.samples(range(count), seed=0)), problem.points, stride)


def square(values: torch.Tensor) -> torch.Tensor:
    """(batch, 1, points, 1) as (batch, n, n)."""
    n = math.isqrt(values.shape[2])
    return values.view(-1, n, n)


def images(v: torch.Tensor) -> list[torch.Tensor]:
    """Of an n x n array under the symmetries of the square."""
    turned = [torch.rot90(v, k, (0, 1)) for k in range(4)]
    return turned + [t.mT for t in turned]


def test_media_have_two_phases_in_equal_shares():
    a = Darcy(points=43).draw(range(400), seed=0)["coefficient"]
    assert a.dtype == torch.float64
    assert a.unique().tolist() == [3.0, 12.0]
    share = (a == 12).double().mean((1, 2))
    assert float(share.mean()) == pytest.approx(0.5, abs=0.01)
    assert 0.02 < float(share.std()) < 0.15


def test_media_are_the_sign_of_the_published_field():
    """tau^(alpha - 1) (pi^2 (k^2 + l^2) + tau^2)^(-alpha/2) xi_kl, without the first, under a cosine transform."""
    xi = numpy_generator(3, 7).standard_normal((25, 25))
    k = np.arange(25)
    spectrum = 3 * xi / (math.pi**2 * (k[:, None] ** 2 + k**2) + 9)
    spectrum[0, 0] = 0
    field = scipy.fft.idctn(spectrum, type=2, norm="ortho")
    expected = torch.from_numpy(np.where(field >= 0, 12.0, 3.0))
    assert torch.equal(SMALL.draw([7], seed=3)["coefficient"][0], expected)
    ours = neumann_square(torch.from_numpy(xi)[None], (25, 25), Matern(1.0, 3.0, 2.0))[0]
    torch.testing.assert_close(ours * 3 / 25, torch.from_numpy(field), rtol=0, atol=1e-13)


def test_phases_have_double_precision():
    assert Darcy(points=8, high=0.3, low=0.1).draw([0], 0)["coefficient"].unique().tolist() == [0.1, 0.3]


def test_where_the_field_is_zero_the_phase_is_high():
    a = Darcy(points=4, exponent=2000.0).draw([0], 0)["coefficient"]  # so smooth that nothing is left of it
    assert a.unique().tolist() == [12.0]


def test_solutions_are_of_the_published_size():
    u = collate(Darcy(points=61).samples(range(24), seed=0)).target
    assert float(u.amax((1, 2, 3)).mean()) == pytest.approx(0.0125, abs=0.0015)
    assert u.min() > 0
    edge = square(u)[:, 0]
    assert 0 < float(edge.max()) < 0.1 * float(u.max())  # half a cell from the border, the values are not zero


def test_samples_lie_on_the_cell_centers():
    one, two = SMALL.samples([0, 1], seed=0)
    assert one.input.coords is one.query.coords is two.input.coords is two.query.coords
    assert one.input.weights is one.query.weights is two.query.weights
    centers = (torch.arange(25, dtype=torch.float64) + 0.5) / 25
    coords = one.input.coords.view(25, 25, 2)
    torch.testing.assert_close(coords[:, 3, 0], centers, rtol=0, atol=1e-15)
    torch.testing.assert_close(coords[3, :, 1], centers, rtol=0, atol=1e-15)
    assert one.query.values.shape == (1, 625, 0)


def test_cell_grid_is_row_major():
    assert cell_grid((1, 2), (2.0, 1.0)).tolist() == [[1.0, 0.25], [1.0, 0.75]]
    assert cell_grid((2,), (1.0,)).dtype == torch.float64


def test_first_axis_is_the_first_coordinate():
    """A medium that changes along the first axis alone gives a solution even about the middle of the second."""
    a = torch.full((1, 25, 25), 3.0, dtype=torch.float64)
    a[:, :8] = 12
    (sample,) = SMALL.solve({"coefficient": a})
    assert (sample.input.values[0, :, 0] == 12).equal(sample.input.coords[:, 0] < 8 / 25)
    u = sample.target.view(25, 25)
    torch.testing.assert_close(u, u.flip(1), rtol=0, atol=1e-12)
    assert not torch.allclose(u, u.flip(0), rtol=0.01)


def test_settings_reach_the_solver():
    (base,) = SMALL.samples([0], seed=0)
    (scaled,) = Darcy(points=25, high=24.0, low=6.0, source=4.0).samples([0], seed=0)
    torch.testing.assert_close(scaled.target, 2 * base.target, rtol=1e-9, atol=0)
    smooth, rough = (Darcy(points=25, exponent=e).draw(range(20), 0)["coefficient"] for e in (4.0, 1.0))
    assert (rough.diff(dim=1) != 0).sum() > 3 * (smooth.diff(dim=1) != 0).sum()


def test_states_of_another_size_are_refused():
    with pytest.raises(InputError, match=r"\(batch, 25, 25\).*\(2, 25, 24\)"):
        SMALL.solve({"coefficient": torch.ones(2, 25, 24, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"points": 1}, "2 `points` per axis, got 1"),
        ({"high": 0.0}, "positive `high`"),
        ({"low": -1.0}, "positive `low`"),
        ({"low": math.nan}, "positive `low`"),
        ({"source": math.inf}, "finite `source`"),
        ({"inverse_length": -1.0}, "`inverse_length`"),
        ({"exponent": math.nan}, "`exponent`"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Darcy(**change)


def test_card_tells_the_settings():
    text = Darcy(points=85, high=9.0, low=2.0, source=0.5).card.text
    assert "= 0.5 on" in text
    assert "9 where" in text
    assert "2 elsewhere" in text
    assert "85 x 85" in text


@pytest.mark.parametrize("stride", [1, 2, 3, 4])  # 25, 13, 9 and 7 points per axis
def test_augmentation_is_a_symmetry_of_the_square(stride):
    """Each sample is one image of the original; input and target share it, and all eight occur."""
    one = batch_of(SMALL, 1, stride)
    count = 200
    many = dataclasses.replace(
        one,
        input=Field.of(one.input.coords.expand(count, -1, 2), one.input.values.expand(count, -1, -1, 1)),
        query=Field.of(one.query.coords.expand(count, -1, 2)),
        target=one.target.expand(count, -1, -1, 1),
    )
    changed = SMALL.augment(many, torch.Generator().manual_seed(0))
    media, flows = images(square(one.input.values)[0]), images(square(one.target)[0])
    seen = [0] * 8
    for a, u in zip(square(changed.input.values), square(changed.target), strict=True):
        found = [k for k in range(8) if torch.equal(u, flows[k])]
        assert len(found) == 1
        assert torch.equal(a, media[found[0]])
        seen[found[0]] += 1
    assert min(seen) > 10


def test_augmented_pairs_solve_the_equation():
    batch = batch_of(SMALL, 16)
    changed = SMALL.augment(batch, torch.Generator().manual_seed(1))
    solved = collate(SMALL.solve({"coefficient": square(changed.input.values)}))
    torch.testing.assert_close(solved.target, changed.target, rtol=0, atol=1e-11 * float(batch.target.max()))


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


def test_augmentation_draws_from_its_generator_alone():
    batch = batch_of(SMALL, 8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = (SMALL.augment(batch, torch.Generator().manual_seed(s)).target for s in (3, 3))
    other = SMALL.augment(batch, torch.Generator().manual_seed(4)).target
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("wanted", [421, 211, 141, 85, 61, 43, 29])
def test_published_strides_give_symmetric_grids_in_single_precision(wanted):
    (stride, _) = thinning((421, 421), (wanted, wanted), periodic=False)
    axis = ((torch.arange(421, dtype=torch.float64) + 0.5) / 421)[::stride]
    coords = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(1, -1, 2).float()
    values = torch.randn(1, 1, wanted**2, 1)
    batch = Batch(input=Field.of(coords, values), query=Field.of(coords), target=values)
    changed = SMALL.augment(batch, torch.Generator().manual_seed(2))
    assert torch.equal(changed.target, changed.input.values)
    assert torch.equal(changed.target.sort(2).values, values.sort(2).values)


def refused(batch: Batch, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        SMALL.augment(batch, torch.Generator())


def test_augmentation_off_the_square_grid_is_refused():
    batch = batch_of(SMALL, 2)
    coords, values = batch.input.coords, batch.input.values
    dropped = Field.of(coords[:, ::2], values[:, :, ::2])
    refused(dataclasses.replace(batch, input=dropped), r"313 input points and 625 queries\. Augment a batch before")
    some = torch.randperm(625, generator=torch.Generator().manual_seed(0))[:576]  # 24 x 24 of them, on no grid
    there = Field.of(coords[:, some])
    scattered = dataclasses.replace(
        batch, input=Field.of(coords[:, some], values[:, :, some]), query=there, target=batch.target[:, :, some]
    )
    refused(scattered, "queries that are none")
    order = torch.randperm(625, generator=torch.Generator().manual_seed(0))
    refused(dataclasses.replace(batch, input=Field.of(coords[:, order], values[:, :, order])), "that are none")
    corner = (coords[0] < 0.5).all(-1)  # a window of 12 x 12
    window = dataclasses.replace(
        batch,
        input=Field.of(coords[:, corner], values[:, :, corner]),
        query=Field.of(coords[:, corner]),
        target=batch.target[:, :, corner],
    )
    refused(window, "that are none")
    even = batch_of(Darcy(points=24), 1, 2)  # cells 0, 2, ..., 22: the last one is farther from the border
    refused(even, "divisor of the points less one")
