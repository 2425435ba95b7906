"""The airfoil: frames and channels, free streams, the mirror image, and who is near."""

import dataclasses

import pytest
import torch

from oformer.checks import check_sample
from oformer.errors import InputError
from oformer.fields import collate
from oformer.meshes.airfoil import Naca
from oformer.meshes.cache import mesh_of
from oformer.meshes.subsets import inside
from oformer.problems.airfoil import REGION, Airfoil
from oformer.solvers.euler_fv import Numerics, free_stream
from tests.flow_meshes import solve_mirrored

COARSE = Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3)
QUICK = Numerics(newton=2, sweeps=3, start_newton=2)
SMALL = Airfoil(mesh=COARSE, steps=8, stride=2, in_times=2, precision="float64", numerics=QUICK)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(scope="module")
def samples():
    return SMALL.samples([0, 1, 2], 5)


def test_the_default_has_the_shape_of_the_published_experiment():
    problem = Airfoil()
    assert list(problem.frames) == list(range(0, 601, 24))
    spec = problem.spec
    assert (spec.in_times, spec.out_times, spec.in_channels, spec.out_channels) == (4, 22, 7, 4)
    assert (spec.query_channels, spec.in_categories, spec.query_categories, spec.grid) == (1, 3, 3, None)
    assert problem.card.targets == ("velocity x", "velocity y", "density", "pressure")
    named = dataclasses.replace(problem, stored="momentum").card
    assert named.targets[:2] == named.inputs[:2] == ("momentum x", "momentum y")


def test_free_streams_are_uniform_between_their_bounds():
    state = Airfoil().draw(range(2000), 3)
    for name, low, high in (("mach", 0.2, 0.7), ("angle", -25.0, 25.0)):
        values = state[name]
        assert values.dtype == torch.float64
        assert low <= float(values.min()) < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < float(values.max()) <= high
        assert float(values.mean()) == pytest.approx((low + high) / 2, abs=0.03 * (high - low))
        assert float(values.var(correction=0)) == pytest.approx((high - low) ** 2 / 12, rel=0.06)
    assert abs(float(torch.corrcoef(torch.stack([state["mach"], state["angle"]]))[0, 1])) < 0.06


def test_samples_hold_what_their_channels_say(samples):
    mesh = mesh_of(COARSE)
    for sample in samples:
        check_sample(sample, SMALL.spec)
        values = sample.input.values
        assert torch.equal(sample.input.coords, mesh.points)
        assert torch.equal(values[..., 6], mesh.marks.double().expand(2, -1))
        assert torch.equal(sample.query.values[0, :, 0], mesh.marks.double())
        scaled = values[0, :, 4:6]
        assert float(scaled.min()) == 0
        assert torch.equal(scaled.amax(0), doubles(1.0, 1.0))
        torch.testing.assert_close(scaled @ doubles(40.0, 0.0) - 20, mesh.points[:, 0], rtol=0, atol=1e-12)
        # The far field upstream is the free stream: this is how a model may know it.
        free = free_stream(sample.parameters["mach"][None], sample.parameters["angle"][None])
        upstream = mesh.points[:, 0].argmin()
        torch.testing.assert_close(sample.target[-1, upstream, :2], free.velocity[0, 0], rtol=1e-6, atol=1e-6)
        assert sample.target[..., 2].mean() == pytest.approx(1.225, rel=0.02)
        assert sample.target[..., 3].mean() == pytest.approx(101325, rel=0.02)
        assert sample.cells is not None
        assert torch.equal(sample.cells[0], mesh.triangles)


def test_samples_share_their_points(samples):
    one, *others = samples
    for other in others:
        assert other.query.coords is one.query.coords
        assert other.query.values is one.query.values
        assert other.cells[0] is one.cells[0]


def test_frames_follow_each_other(samples):
    """Another cut between input and target cuts the same trajectory."""
    (other,) = dataclasses.replace(SMALL, in_times=1).samples([1], 5)
    assert torch.equal(other.target[0], samples[1].input.values[1, :, :4])
    assert torch.equal(other.target[1:], samples[1].target)


def test_momentum_is_density_times_velocity(samples):
    (stored,) = dataclasses.replace(SMALL, stored="momentum").samples([2], 5)
    expected = samples[2].target[..., 2:3] * samples[2].target[..., :2]
    torch.testing.assert_close(stored.target[..., :2], expected, rtol=1e-14, atol=0)
    assert torch.equal(stored.target[..., 2:], samples[2].target[..., 2:])


def test_augmentation_mirrors_the_flow_and_its_mesh():
    """A solver that is given the mirrored mesh and angle finds the mirrored flow, though no mesh is symmetric."""
    batch = collate(SMALL.samples([0, 1, 2, 3], 5))
    changed = SMALL.augment(batch, torch.Generator().manual_seed(7))
    mirrored = changed.parameters["angle"] != batch.parameters["angle"]
    assert mirrored.any()
    assert not mirrored.all()
    solved = collate(solve_mirrored(SMALL, changed.parameters["mach"], changed.parameters["angle"], mirrored))
    for name in ("input", "query"):
        one, other = getattr(changed, name), getattr(solved, name)
        torch.testing.assert_close(one.coords, other.coords, rtol=0, atol=0)
        torch.testing.assert_close(one.values, other.values, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(changed.target, solved.target, rtol=1e-9, atol=1e-9)
    assert torch.equal(changed.target[~mirrored], batch.target[~mirrored])
    assert float((changed.target - batch.target)[mirrored][..., 1].abs().max()) > 10


def test_augmentation_leaves_the_given_batch_alone():
    batch = collate(SMALL.samples([0, 1], 5))
    before = batch.input.values.clone(), batch.input.coords.clone(), batch.target.clone()
    for seed in range(4):
        SMALL.augment(batch, torch.Generator().manual_seed(seed))
    for now, then in zip((batch.input.values, batch.input.coords, batch.target), before, strict=True):
        assert torch.equal(now, then)


def test_most_nodes_lie_where_the_paper_measures():
    assert 3000 < int(inside(mesh_of(Naca()).points, REGION).sum()) < 4500


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch compiles with deprecated parts of itself
def test_a_published_trajectory_is_met_as_well_as_another_mesh_allows():
    """The data of MeshGraphNets at Mach 0.3279 and 1.2328 degrees; the value at the sharp edge depends on the mesh."""
    problem = Airfoil(stored="momentum")
    (sample,) = problem.solve({"mach": doubles(0.3279), "angle": doubles(1.2328)})
    first, last = sample.input.values[0], sample.target[-1]
    edge = (sample.query.coords - doubles(1.0, 0.0)).norm(dim=1).argmin()
    assert float(last[:, 2].max()) == pytest.approx(1.2916, rel=4e-3)
    assert float(last[:, 2].min()) == pytest.approx(1.1829, rel=2e-3)
    assert float(first[edge, 2]) == pytest.approx(1.2086, rel=0.02)
    assert float(last[edge, 2]) == pytest.approx(1.25085, rel=0.02)
    assert float(first[edge, 0]) == pytest.approx(74.23, rel=0.2)
    assert float(last[edge, 0]) == pytest.approx(68.62, rel=0.2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mach": (0.7, 0.2)}, "lowest <= highest"),
        ({"mach": (0.0, 0.2)}, "0 < lowest"),
        ({"angle": (-100.0, 2.0)}, "between -90 and 90"),
        ({"in_times": 26}, "fewer than the stored frames"),
        ({"stride": 0}, "with a stride of 0"),
        ({"time_step": -1.0}, "`time_step` between 0 and 1"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        Airfoil(**settings)


@pytest.mark.parametrize("name", ["stored", "precision"])
def test_unknown_choices_are_answered_with_the_known_ones(name):
    problem = Airfoil()
    object.__setattr__(problem, name, "speed")  # what the shape checks of the tests refuse, a config file may hold
    with pytest.raises(InputError, match="Choices: "):
        problem.__post_init__()


def test_bad_states_are_refused():
    with pytest.raises(InputError, match=r"of shape \(batch,\)"):
        SMALL.solve({"mach": doubles(0.3, 0.4), "angle": doubles(1.0)})
