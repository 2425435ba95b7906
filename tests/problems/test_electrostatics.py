"""Electrostatics: the field is minus the gradient, points away from charge, and is that of Gauss."""

import math

import pytest
import torch

from oformer.meshes.cache import mesh_of
from oformer.meshes.shapes import Disc
from oformer.problems.electrostatics import Electrostatics
from tests.flow_meshes import areas_around

CENTERED = {
    "shape": torch.tensor([1.0], dtype=torch.float64),
    "numbers": torch.tensor([[15.0, 0.0, 0.0]], dtype=torch.float64),
    "discs": torch.tensor([1.0], dtype=torch.float64),
}


def one_disc(place: int):
    points = len(mesh_of(Disc()).points)
    share = torch.tensor([[(place + 0.5) / points]], dtype=torch.float64)
    return Electrostatics().solve({**CENTERED, "centers": share})[0]


def middle() -> int:
    return int((mesh_of(Disc()).points - 0.5).norm(dim=1).argmin())


def test_the_field_of_a_disc_of_charge_in_a_grounded_disc():
    """Outside of the charge q: E = q/(2 pi r) away from it, u = q log(R/r)/(2 pi); mind where the vertex lies."""
    sample = one_disc(middle())
    mesh = mesh_of(Disc())
    charge = sample.input.values[0, :, 2]
    # Linear in between, so that the charge is the sum of the hat functions.
    q = float(charge @ areas_around(mesh))
    center = (areas_around(mesh) * charge) @ mesh.points / q
    assert (center - 0.5).norm() < 0.05
    # The image charge makes the circle a line of equal potential, wherever the charge sits.
    a = center - 0.5
    if a.norm() > 1e-6:
        image = 0.5 + a * (0.25 / a.square().sum())
        ratio = float(a.norm() / 0.5)
    else:
        image, ratio = torch.full((2,), 1e9, dtype=torch.float64), 1e-9
    far = (mesh.points - center).norm(dim=1) > 0.2
    x = mesh.points[far]
    r, s = x - center, x - image
    u = q / (2 * math.pi) * torch.log(s.norm(dim=1) * ratio / r.norm(dim=1))
    e = q / (2 * math.pi) * (r / r.square().sum(1, keepdim=True) - s / s.square().sum(1, keepdim=True))
    torch.testing.assert_close(sample.target[0, far, 0], u, rtol=0, atol=0.01 * float(u.max()))
    inner = mesh.marks[far] == 0
    torch.testing.assert_close(
        sample.target[0, far, 1:][inner], e[inner], rtol=0, atol=0.03 * float(e.norm(dim=1).max())
    )


def test_field_lines_leave_the_charge():
    """Through every circle around all of the charge goes the charge: on average the field points away from it."""
    sample = one_disc(middle())
    mesh = mesh_of(Disc())
    offset = mesh.points - mesh.points[middle()]
    away = (offset * sample.target[0, :, 1:]).sum(1)
    assert (away[offset.norm(dim=1) > 0.1] > 0).all()


def test_names_and_units():
    card = Electrostatics().card
    assert card.targets == ("potential", "E_x", "E_y")
    assert "charge density" in card.inputs
    assert "permittivity" in card.inputs
    samples = Electrostatics().samples(range(64), 0)
    largest = torch.stack([sample.target.abs().amax((0, 1)) for sample in samples]).amax(0)
    # Physical units: no channel is scaled to one.
    assert 0.005 < largest[0] < 0.02
    assert (largest[1:] > 0.05).all()
    assert (largest[1:] < 0.2).all()


@pytest.mark.slow
def test_no_sample_is_an_outlier():
    """The published rule drops samples above ten times the largest of the training sets: none comes near."""
    plain, random = Electrostatics(train=2000), Electrostatics(train=2000, randomized=True)
    largest = torch.zeros(3, dtype=torch.float64)
    for problem in (plain, random):
        for first in range(0, 2000, 100):
            for sample in problem.samples(range(first, first + 100), 0):
                largest = torch.maximum(largest, sample.target.abs().amax((0, 1)))
    tests = plain.samples(range(2000, 2500), 0)
    ratio = torch.stack([sample.target.abs().amax((0, 1)) for sample in tests]).amax(0) / largest
    assert ratio.max() < 2
