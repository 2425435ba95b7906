"""What electro- and magnetostatics share: shapes by index, channels, sources, meshes that serve several samples."""

import dataclasses
import math

import pytest
import torch

from oformer.errors import InputError
from oformer.experiments.published import LARGEST
from oformer.fields import Batch, Field, collate
from oformer.meshes.cache import mesh_of
from oformer.problems.electrostatics import Electrostatics
from oformer.problems.magnetostatics import Magnetostatics
from oformer.problems.poisson import SHAPES, PoissonProblem, _domain, geometry_of
from oformer.solvers.poisson_fem import Poisson

SEED = 3
KINDS = [Electrostatics, Magnetostatics]


def geometries(problem: PoissonProblem, indices, seed: int = SEED) -> list:
    state = problem.draw(list(indices), seed)
    pairs = zip(state["shape"].tolist(), state["numbers"].tolist(), strict=True)
    return [geometry_of(SHAPES[int(code)], numbers) for code, numbers in pairs]


def poses_between(before: Batch, after: Batch) -> torch.Tensor:
    """The orthogonal maps about (1/2, 1/2) that took the points of one batch to those of another."""
    exist = (before.input.weights > 0)[..., None]
    x, y = ((batch.input.coords - 0.5) * exist for batch in (before, after))
    return torch.linalg.lstsq(x, y).solution.mT


def test_training_shapes_take_turns_and_tests_are_on_the_u():
    names = [type(g).__name__ for g in geometries(Electrostatics(train=6), range(9))]
    assert names == ["Square", "Disc", "Annulus", "LShape", "Square", "Disc", "UShape", "UShape", "UShape"]
    assert set(geometries(Electrostatics(train=6, randomized=True), range(6, 20))) == {geometry_of("u", [0.5, 0.75, 0])}
    only = geometries(Electrostatics(train=4, shapes=("l",)), range(4))
    assert {type(g).__name__ for g in only} == {"LShape"}
    sample = Electrostatics(train=1).samples([1], SEED)[0]
    assert float(sample.parameters["shape"]) == SHAPES.index("u")


def test_without_augmentation_a_shape_has_one_mesh():
    assert len(set(geometries(Electrostatics(), range(64)))) == 4


def test_a_randomized_mesh_serves_sixteen_samples_and_a_square_one():
    problem = Electrostatics(randomized=True)
    drawn = geometries(problem, range(4 * 48))
    for first in (2, 3):  # annulus and L: continuous numbers, so that others are others
        ours = drawn[first::4]
        assert [len(set(ours[i : i + 16])) for i in (0, 16, 32)] == [1, 1, 1]
        assert len(set(ours)) == 3
    assert len(set(drawn[::4][:16])) > 4
    assert geometries(problem, [2], SEED + 1) != geometries(problem, [2])


def test_random_ranges_are_the_published_ones():
    problem = Electrostatics(train=10**6, randomized=True, shapes=SHAPES)
    blocks = [geometries(problem, range(80 * k, 80 * k + 5)) for k in range(400)]
    squares, discs, annuli, ls, us = zip(*blocks, strict=True)
    for values in ([s.cells for s in squares], [d.resolution for d in discs]):
        assert set(values) == set(range(8, 20))
        assert values.count(15) > 1.2 * len(values) / 13  # int cuts -1..1 to 0
    for values, low, high in (
        ([a.radius for a in annuli], 0.05, 0.25),
        ([a.center[0] for a in annuli], 0.35, 0.65),
        ([a.center[1] for a in annuli], 0.35, 0.65),
        ([x.width for x in ls], 0.2, 0.8),
        ([x.height for x in ls], 0.2, 0.8),
        ([u.width for u in us], 0.2, 0.6),
        ([u.depth for u in us], 0.2, 0.8),
    ):
        assert low <= min(values) < low + 0.03 * (high - low)
        assert high >= max(values) > high - 0.03 * (high - low)
    assert {x.corner for x in ls} == {0, 1, 2, 3}


@pytest.mark.parametrize("randomized", [False, True])
def test_channels_are_what_they_are_called(randomized):
    for sample in Electrostatics(train=4, randomized=randomized).samples(range(5), SEED):
        x = sample.input.coords
        values = sample.input.values[0]
        names = Electrostatics().card.inputs
        assert len(names) == 11
        column = dict(zip(names, values.unbind(1), strict=True))
        assert torch.equal(torch.stack([column["x"], column["y"]], 1), x)
        assert set(column["charge density"].unique().tolist()) == {0.0, 1.0}
        assert (column["permittivity"] == 1).all()
        flag = column["Dirichlet flag"]
        assert set(flag.unique().tolist()) == {0.0, 1.0}
        assert torch.equal(sample.query.values[0, :, 0], flag)
        for kind in ("border", "Dirichlet"):
            vector = torch.stack(
                [column[f"x to the nearest {kind} point"], column[f"y to the nearest {kind} point"]], 1
            )
            distance = column[f"distance to the nearest {kind} point"]
            torch.testing.assert_close(vector.norm(dim=1), distance)
            held = x[flag == 1]
            assert (x + vector - held[:, None]).norm(dim=2).amin(0).max() < 1e-12  # the vector leads to such a point
            torch.testing.assert_close(distance, (x - held[:, None]).norm(dim=2).amin(0), rtol=0, atol=1e-12)
        assert (sample.target[0, flag == 1, 0] == 0).all()  # the potential vanishes where it is held
        assert (sample.target[0, flag == 0, 0] > 0).all()
        assert sample.cells is not None
        assert int(sample.cells[0].max()) == len(x) - 1


@pytest.mark.parametrize("discs", [(1, 3), (4, 5), (1, 1)])
def test_sources_are_discs_around_mesh_points(discs):
    problem = Electrostatics(discs=discs, train=10**6)
    samples = problem.samples(range(200), SEED)
    counts = [int(sample.parameters["discs"]) for sample in samples]
    assert set(counts) == set(range(discs[0], discs[1] + 1))
    state = problem.draw(range(200), SEED)
    for i, sample in enumerate(samples[:40]):
        domain = _domain(geometries(problem, [i])[0], None)
        left = list(range(sample.input.points))
        expected = torch.zeros(sample.input.points, dtype=torch.bool)
        centers = []
        for share in state["centers"][i, : counts[i]].tolist():
            centers.append(left.pop(int(share * len(left))))
            distance = (domain.mesh.points - domain.mesh.points[centers[-1]]).square().sum(1)
            expected |= distance < 0.005
        assert len(set(centers)) == counts[i]  # without replacement
        assert torch.equal(sample.input.values[0, :, 2] == 1, expected)


def test_centers_are_uniform_over_the_points():
    problem = Electrostatics(discs=(3, 3), shapes=("l",), train=10**6)
    state = problem.draw(range(2000), SEED)
    points = len(mesh_of(geometries(problem, [0])[0]).points)
    counts = torch.zeros(points)
    for centers in state["centers"].tolist():
        left = list(range(points))
        for share in centers:
            counts[left.pop(int(share * len(left)))] += 1
    mean = 6000 / points
    assert float(((counts - mean) ** 2 / mean).sum()) < points + 5 * math.sqrt(2 * points)  # chi squared


def test_samples_on_one_mesh_share_its_tensors():
    samples = Electrostatics().samples([0, 4, 1, 8], SEED)
    assert samples[0].input.coords is samples[1].input.coords is samples[3].query.coords
    assert samples[0].cells[0] is samples[1].cells[0]
    assert samples[0].input.values is not samples[1].input.values
    batch = collate([samples[0], samples[1]])
    assert batch.input.coords.stride(0) == 0


def test_the_target_solves_the_equation():
    """Against the solver, asked otherwise: from loads, not from responses."""
    problem = Electrostatics(train=4)
    for i, sample in enumerate(problem.samples(range(5), SEED)):
        geometry = geometries(problem, [i])[0]
        mesh = mesh_of(geometry)
        solver = Poisson(mesh, geometry.held)
        load = torch.from_numpy(solver._linear_load @ sample.input.values[0, :, 2].numpy())
        u = solver.potential(load)
        torch.testing.assert_close(sample.target[0, :, 0], u[: len(mesh.points)], rtol=0, atol=1e-15)
        torch.testing.assert_close(sample.target[0, :, 1:], -solver.gradient(u).mT, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("randomized", [False, True])
def test_turned_domains_have_turned_solutions(kind, randomized):
    """Augmenting, then solving on the moved meshes, gives what augmenting the solution gives."""
    problem = kind(train=7, randomized=randomized)
    indices = list(range(8))
    batch = collate(problem.samples(indices, SEED))
    changed = problem.augment(batch, torch.Generator().manual_seed(1))
    poses = poses_between(batch, changed)
    determinants = torch.linalg.det(poses)
    assert (determinants.abs() - 1).abs().max() < 1e-12
    assert (determinants > 0).any()
    assert (determinants < 0).any()
    solved = collate(problem.solve({**problem.draw(indices, SEED), "pose": poses}))
    torch.testing.assert_close(solved.target, changed.target, rtol=0, atol=1e-10 * float(batch.target.abs().max()))
    torch.testing.assert_close(solved.input.coords, changed.input.coords, rtol=0, atol=1e-12)
    torch.testing.assert_close(solved.query.values, changed.query.values, rtol=0, atol=0)
    unturned = [c for c in range(11) if c not in (5, 6, 7, 8)]
    torch.testing.assert_close(
        solved.input.values[..., unturned], changed.input.values[..., unturned], rtol=0, atol=1e-12
    )
    # Where two border points are equally near, rounding chooses; both lead to the border, all others agree.
    for first in (5, 7):
        apart = (solved.input.values[..., first : first + 2] - changed.input.values[..., first : first + 2]).norm(
            dim=-1
        )
        assert (apart < 1e-10).double().mean() > 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_augmentation_leaves_padding_alone_and_keeps_lengths(kind):
    problem = kind(train=4)
    batch = collate(problem.samples(range(5), SEED))
    changed = problem.augment(batch, torch.Generator().manual_seed(2))
    padding = batch.input.weights == 0
    assert padding.any()
    for before, after in ((batch.input, changed.input), (batch.query, changed.query)):
        assert torch.equal(after.coords[padding], before.coords[padding])
        assert torch.equal(after.values[:, 0][padding], before.values[:, 0][padding])
        assert torch.equal(after.weights, before.weights)
    assert (changed.target[:, 0][padding] == 0).all()
    for first in (5, 7):
        pair = slice(first, first + 2)
        torch.testing.assert_close(
            changed.input.values[..., pair].norm(dim=-1), batch.input.values[..., pair].norm(dim=-1)
        )
    torch.testing.assert_close(changed.target[..., 1:].norm(dim=-1), batch.target[..., 1:].norm(dim=-1))
    assert torch.equal(changed.target[..., 0], batch.target[..., 0])
    assert torch.equal(changed.input.values[..., :2][~padding[:, None]], changed.input.coords[~padding])


def test_augmentation_of_single_precision_stays_single():
    problem = Electrostatics()
    batch = collate(problem.samples(range(4), SEED)).to(torch.float32)
    changed = problem.augment(batch, torch.Generator().manual_seed(2))
    assert changed.input.coords.dtype == changed.input.values.dtype == changed.target.dtype == torch.float32
    exact = problem.augment(collate(problem.samples(range(4), SEED)), torch.Generator().manual_seed(2))
    torch.testing.assert_close(changed.target.double(), exact.target, rtol=0, atol=1e-7)


def test_augmentation_of_some_points_is_that_of_all():
    """Points need not be those of a mesh: some may have been dropped from the input."""
    problem = Electrostatics()
    (sample,) = problem.samples([1], SEED)
    kept = slice(10, 40)
    known = Field.of(sample.input.coords[kept], sample.input.values[:, kept])
    whole, some = (
        problem.augment(collate([one]), torch.Generator().manual_seed(4))
        for one in (sample, dataclasses.replace(sample, input=known))
    )
    torch.testing.assert_close(some.input.coords, whole.input.coords[:, kept], rtol=0, atol=1e-15)
    torch.testing.assert_close(some.input.values, whole.input.values[:, :, kept], rtol=0, atol=1e-15)
    assert torch.equal(some.target, whole.target)


@pytest.mark.parametrize("kind", KINDS)
def test_symmetries_are_eighths_of_a_turn_then_the_same_reflected(kind):
    problem = kind()
    batch = collate(problem.samples([1, 2, 3, 5, 6], SEED))
    assert problem.symmetries(batch) == 16
    changed, undo = problem.transformed(batch, torch.tensor([0, 2, 7, 8, 9]))
    h = math.sqrt(0.5)
    expected = [[[1, 0], [0, 1]], [[0, -1], [1, 0]], [[h, h], [-h, h]], [[1, 0], [0, -1]], [[h, h], [h, -h]]]
    torch.testing.assert_close(
        poses_between(batch, changed), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert torch.equal(changed.input.coords[0], batch.input.coords[0])
    torch.testing.assert_close(undo(changed.target), batch.target, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_superposition_of_discs(kind):
    """Where discs do not overlap, the answer to two of them is the sum of the answers to each."""
    problem = kind(discs=(2, 2), shapes=("disc",), train=10**6)
    for index in range(40):
        state = problem.draw([index], SEED)
        (both,) = problem.solve(state)
        points = both.input.points
        first, second = state["centers"][0].tolist()
        alone = {**state, "discs": torch.ones(1, dtype=torch.float64)}
        # The second choice is among the points that the first one left.
        chosen = [i for i in range(points) if i != int(first * points)][int(second * (points - 1))]
        shares = torch.tensor([[(chosen + 0.5) / points, 0.0]], dtype=torch.float64)
        one, two = problem.solve(alone)[0], problem.solve({**alone, "centers": shares})[0]
        sources = [sample.input.values[..., 2] for sample in (both, one, two)]
        if not (sources[1] * sources[2]).any():
            assert torch.equal(sources[0], sources[1] + sources[2])
            torch.testing.assert_close(both.target, one.target + two.target, rtol=0, atol=1e-15)
            return
    raise AssertionError("all discs overlap")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"train": -1}, "train"),
        ({"shapes": ()}, "at least one of `shapes`"),
        ({"discs": (3, 2)}, "discs"),
        ({"discs": (0, 2)}, "discs"),
        ({"discs": (1, 99)}, "discs"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        Electrostatics(**change)


def test_impossible_states_are_refused():
    problem = Electrostatics()
    state = problem.draw([0, 1], SEED)
    for change, sentence in (
        ({"shape": torch.tensor([0.0, 7.0])}, "codes of shapes"),
        ({"shape": torch.tensor([0.0, math.nan])}, "codes of shapes"),
        ({"discs": torch.tensor([1.0, 9.0])}, "at most as many"),
        ({"centers": state["centers"] + 1}, "between 0 and 1"),
        ({"numbers": state["numbers"][:, :2]}, "as `draw` makes it"),
        ({"pose": torch.eye(2)}, "as `draw` makes it"),
        ({"pose": torch.ones(2, 2, 2)}, "orthogonal"),
    ):
        with pytest.raises(InputError, match=sentence):
            problem.solve({**state, **change})
    with pytest.raises(InputError, match="cells"):
        problem.solve({**state, "numbers": torch.ones(2, 3)})


@pytest.mark.slow
@pytest.mark.parametrize("problem", [Electrostatics, Magnetostatics])
def test_the_largest_values_of_both_training_sets_are_those_that_the_tables_divide_by(problem):
    largest = torch.zeros(3, dtype=torch.float64)
    for randomized in (False, True):
        chosen = problem(randomized=randomized)
        for begin in range(0, chosen.train, 500):
            for sample in chosen.solve(chosen.draw(range(begin, begin + 500), 0)):
                largest = torch.maximum(largest, sample.target.double().abs().amax((0, 1)))
    assert largest.tolist() == pytest.approx(LARGEST["electro" if problem is Electrostatics else "magneto"], rel=1e-5)
