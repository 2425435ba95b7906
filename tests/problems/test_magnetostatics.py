"""Magnetostatics: the dual of electrostatics, and the pseudovector under reflections."""

import math

import torch

from oformer.fields import collate
from oformer.problems.electrostatics import Electrostatics
from oformer.problems.magnetostatics import Magnetostatics

SEED = 3


def test_duality():
    """The same source gives the same potential, and B = (A_y, -A_x) = (-E_y, E_x)."""
    for electric, magnetic in zip(
        Electrostatics(train=4).samples(range(6), SEED), Magnetostatics(train=4).samples(range(6), SEED), strict=True
    ):
        assert torch.equal(electric.input.values, magnetic.input.values)
        u, ex, ey = electric.target[0].unbind(1)
        a, bx, by = magnetic.target[0].unbind(1)
        assert torch.equal(a, u)
        assert torch.equal(bx, -ey)
        assert torch.equal(by, ex)


def test_field_lines_run_around_the_current():
    """Counterclockwise around a current towards the viewer, by the right hand: B is E, turned by a right angle."""
    problem = Magnetostatics(shapes=("disc",), discs=(1, 1), train=10**6)
    for sample in problem.samples(range(5), SEED):
        current = sample.input.values[0, :, 2]
        center = (sample.input.coords * current[:, None]).sum(0) / current.sum()
        offset = sample.input.coords - center
        around = offset[:, 0] * sample.target[0, :, 2] - offset[:, 1] * sample.target[0, :, 1]
        near = (offset.norm(dim=1) > 0.08) & (offset.norm(dim=1) < 0.2) & (sample.query.values[0, :, 0] == 0)
        assert (around[near] > 0).all()


def test_the_field_lies_along_the_border():
    """A is constant there: the normal component of B vanishes. On a square to the order of the projection."""
    (sample,) = Magnetostatics(shapes=("square",), train=10**6).samples([0], SEED)
    x, y = sample.input.coords.unbind(1)
    sides = ((y > 0.2) & (y < 0.8) & ((x == 0) | (x == 1)), (x > 0.2) & (x < 0.8) & ((y == 0) | (y == 1)))
    largest = float(sample.target[..., 1:].abs().max())
    for side, normal in zip(sides, (1, 2), strict=True):
        assert sample.target[0, side, normal].abs().max() < 0.02 * largest


def test_reflections_turn_the_field_round():
    """By hand: a reflection at the line y = 1/2 maps (Bx, By) to (-Bx, By), where E goes to (Ex, -Ey)."""
    mirroring = next(seed for seed in range(50) if _determinant(seed) < 0)
    electric, magnetic = (
        (problem, collate(problem.samples([1], SEED))) for problem in (Electrostatics(), Magnetostatics())
    )
    turned = []
    for problem, batch in (electric, magnetic):
        changed = problem.augment(batch, torch.Generator().manual_seed(mirroring))
        x, y = batch.input.coords[0] - 0.5, changed.input.coords[0] - 0.5
        q = torch.linalg.lstsq(x, y).solution.mT
        # Undo the rotation: what is left is the reflection (x, y) to (x, -y).
        rotation = q @ torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
        turned.append((batch.target[0, 0, :, 1:], changed.target[0, 0, :, 1:] @ rotation))
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(turned[0][1], turned[0][0] * signs, rtol=0, atol=1e-14)
    torch.testing.assert_close(turned[1][1], turned[1][0] * -signs, rtol=0, atol=1e-14)


def _determinant(seed: int) -> float:
    batch = collate(Electrostatics().samples([1], SEED))
    changed = Electrostatics().augment(batch, torch.Generator().manual_seed(seed))
    q = torch.linalg.lstsq(batch.input.coords[0] - 0.5, changed.input.coords[0] - 0.5).solution
    determinant = float(torch.linalg.det(q))
    assert math.isclose(abs(determinant), 1, abs_tol=1e-12)
    return determinant


def test_names():
    card = Magnetostatics().card
    assert card.targets == ("vector potential", "B_x", "B_y")
    assert "current density" in card.inputs
    assert "permeability" in card.inputs
