"""The airfoil: its profile, and the mesh around it against what is known of the published one."""

import math

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.meshes.airfoil import FAR_FIELD, INSIDE, WALL, Naca, profile
from oformer.meshes.cache import mesh_of
from oformer.meshes.triangles import Mesh
from tests.flow_meshes import quality

COARSE = Naca(wall=60, far_field=30, radius=10.0, trailing=3e-3, leading=8e-3, growth=0.3)


def lengths(mesh: Mesh) -> torch.Tensor:
    return (mesh.points[mesh.edges[:, 0]] - mesh.points[mesh.edges[:, 1]]).norm(dim=1)


def test_profile_is_closed_and_as_thick_as_it_says():
    x = np.linspace(0, 1, 100_001)
    for digits, thickness in (("0012", 0.12), ("0024", 0.24)):
        upper, lower = profile(digits, x, True), profile(digits, x, False)
        assert np.array_equal(upper * [1, -1], lower)
        assert upper[0].tolist() == [0, 0]
        assert upper[-1].tolist() == [1, 0]
        assert 2 * upper[:, 1].max() == pytest.approx(thickness, rel=2e-3)
        assert x[upper[:, 1].argmax()] == pytest.approx(0.3, abs=0.005)
    # The published ordinate of the 0012 at half the chord is 5.294 % (NACA Report 460); closing the end takes some off.
    closing = 0.6 * (0.1036 - 0.1015) * 0.5**4
    assert profile("0012", np.array([0.5]), True)[0, 1] == pytest.approx(0.05294 - closing, abs=5e-6)


def test_camber_is_where_the_digits_put_it():
    x = np.linspace(0, 1, 10_001)
    upper, lower = profile("4412", x, True), profile("4412", x, False)
    middle = (upper + lower) / 2  # the camber line, since both are moved by the same along and across it
    assert middle[:, 1].max() == pytest.approx(0.04, abs=1e-6)
    assert middle[middle[:, 1].argmax(), 0] == pytest.approx(0.4, abs=1e-3)
    np.testing.assert_allclose(np.linalg.norm(upper - lower, axis=1), 2 * profile("0012", x, True)[:, 1], atol=1e-12)
    assert np.abs(upper[[0, -1]] - lower[[0, -1]]).max() < 1e-15


def test_the_default_mesh_is_of_the_published_kind():
    mesh = mesh_of(Naca()).check()
    assert len(mesh.points) == pytest.approx(5233, rel=0.02)
    assert len(mesh.triangles) == pytest.approx(10216, rel=0.02)
    counts = [int((mesh.marks == mark).sum()) for mark in (INSIDE, WALL, FAR_FIELD)]
    assert counts == [len(mesh.points) - 250, 200, 50]
    assert mesh.points.amin(0).tolist() == pytest.approx([-20, -19.96053], abs=1e-5)
    assert mesh.points.amax(0).tolist() == pytest.approx([20, 19.96053], abs=1e-5)
    assert float(lengths(mesh).min()) == pytest.approx(2.5e-4, rel=0.1)
    assert float(lengths(mesh).max()) == pytest.approx(3.53, rel=0.1)
    x, y = mesh.points.unbind(1)
    assert int((((x - 0.5).abs() < 1) & (y.abs() < 0.5)).sum()) == pytest.approx(3431, rel=0.03)
    degree = torch.bincount(mesh.edges.flatten())
    assert degree.max() <= 8


def test_the_default_mesh_is_smooth_and_of_good_angles():
    mesh = mesh_of(Naca())
    assert quality(mesh).min() > 0.55
    assert quality(mesh).quantile(0.01) > 0.75
    assert quality(mesh).mean() > 0.92
    # Edges that share a triangle differ by little: nowhere does the size jump.
    sides = torch.stack([(mesh.points[mesh.triangles[:, i]] - mesh.points[mesh.triangles[:, i - 1]]).norm(dim=1)
                         for i in range(3)])  # fmt: skip
    assert (sides.amax(0) / sides.amin(0)).max() < 2.2
    wall = mesh.border[mesh.marks[mesh.border[:, 0]] == WALL]
    step = (mesh.points[wall[:, 1]] - mesh.points[wall[:, 0]]).norm(dim=1)
    following = {int(a): float(s) for a, s in zip(wall[:, 0], step, strict=True)}
    ratios = [following[int(b)] / float(s) for b, s in zip(wall[:, 1], step, strict=True)]
    assert max(ratios) < 1.25
    assert min(ratios) > 1 / 1.25


def test_the_wall_lies_on_the_profile_and_is_symmetric():
    mesh = mesh_of(Naca())
    wall = mesh.points[mesh.marks == WALL].numpy()
    exact = profile("0012", wall[:, 0], True)[:, 1]
    np.testing.assert_allclose(np.abs(wall[:, 1]), exact, atol=1e-8)
    mirrored = {(x, -y) for x, y in wall.tolist()}
    assert mirrored == {(x, y) for x, y in wall.tolist()}
    far = mesh.points[mesh.marks == FAR_FIELD]
    assert ((far.norm(dim=1) - 20).abs() < 1e-12).all()


def test_a_mirrored_mesh_is_its_own_image_bit_by_bit():
    mesh = Naca(**{**vars(COARSE), "mirrored": True}).build()
    place = {(x, y): i for i, (x, y) in enumerate(mesh.points.tolist())}
    image = torch.tensor([place[x, -y] for x, y in mesh.points.tolist()])
    assert torch.equal(mesh.marks[image], mesh.marks)
    triangles = {frozenset(t) for t in mesh.triangles.tolist()}
    assert {frozenset(t) for t in image[mesh.triangles].tolist()} == triangles
    assert quality(mesh).min() > 0.5
    assert [int((mesh.marks == mark).sum()) for mark in (WALL, FAR_FIELD)] == [60, 30]
    border = mesh.marks[mesh.border]
    assert (border != INSIDE).all()  # points on the axis are inside
    assert (border[:, 0] == border[:, 1]).all()


@pytest.mark.parametrize("digits", ["0006", "2412", "4424"])
def test_other_profiles(digits):
    mesh = Naca(**{**vars(COARSE), "profile": digits}).build()
    assert quality(mesh).min() > 0.45
    assert [int((mesh.marks == mark).sum()) for mark in (WALL, FAR_FIELD)] == [60, 30]
    inner = mesh.border[mesh.marks[mesh.border[:, 0]] == WALL]
    a, b = mesh.points[inner].unbind(1)
    section = -float((a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum()) / 2
    assert section == pytest.approx(0.685 * int(digits[2:]) / 100, rel=0.01)  # the area of every 4-digit profile
    circle = 30 / 2 * 100 * math.sin(2 * math.pi / 30)
    assert float(mesh.areas.sum()) == pytest.approx(circle - section, rel=1e-12)


@pytest.mark.slow
def test_the_mirrored_default_is_of_the_same_size():
    mesh = Naca(mirrored=True).build()
    assert len(mesh.points) == pytest.approx(5233, rel=0.02)
    assert quality(mesh).min() > 0.5


def test_impossible_airfoils_are_refused():
    for change, sentence in (
        ({"profile": "23012"}, "4 digits"),
        ({"profile": "00x2"}, "4 digits"),
        ({"profile": "0099"}, "4 digits"),
        ({"profile": "2012"}, "first two digits"),
        ({"profile": "2412", "mirrored": True}, "symmetric"),
        ({"wall": 201}, "even number"),
        ({"far_field": 4}, "even number"),
        ({"radius": 1.0}, "radius"),
        ({"growth": 0.0}, "growth"),
        ({"trailing": math.nan}, "trailing"),
    ):
        with pytest.raises(InputError, match=sentence):
            Naca(**change)
