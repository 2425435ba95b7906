"""Fluxes of the Euler equations: Roe's between two states, and that to the far field."""

import itertools

import pytest
import torch

from oformer.solvers import euler_flux
from oformer.solvers.euler_flux import GAMMA
from tests.flow_meshes import doubles


def test_roe_flux_is_the_exact_one_where_nothing_jumps_and_upwind_where_all_waves_go_one_way():
    one, zero = doubles(1.0), doubles(0.0)
    for speed in (0.3, 2.0, -2.0):
        left, right = (
            (doubles(1.2), doubles(speed), doubles(0.4), doubles(0.9)),
            (doubles(0.9), doubles(speed), doubles(0.1), doubles(0.7)),
        )
        flux = euler_flux._roe(left, left, one, zero, one)
        rho, u, v, p = (float(part) for part in left)
        h = GAMMA / (GAMMA - 1) * p / rho + (u * u + v * v) / 2
        for value, exact in zip(flux, (rho * u, rho * u * u + p, rho * u * v, rho * u * h), strict=True):
            assert float(value) == pytest.approx(exact, rel=1e-13)
        if abs(speed) > 1.5:
            both = euler_flux._roe(left, right, one, zero, one)
            upwind = euler_flux._roe(*itertools.repeat(left if speed > 0 else right, 2), one, zero, one)
            torch.testing.assert_close(torch.stack(both), torch.stack(upwind), rtol=1e-12, atol=1e-13)


def test_a_wave_that_leaves_is_not_reflected():
    """It changes neither the invariant that enters, nor entropy, nor the velocity along the border: it passes."""
    one, zero = doubles(1.0), doubles(0.0)
    rho, v, p = 1.0, 0.2, 1 / GAMMA
    for speed, louder in ((0.4, 1.1), (0.4, 0.9), (-0.3, 1.1)):
        free = doubles(rho), doubles(speed), doubles(v), doubles(p), zero, one
        # Along a wave that leaves, u - 5 c is constant, density goes with c^5 and pressure with c^7.
        inside = doubles(louder**5), doubles(speed + 5 * (louder - 1)), doubles(v), doubles(louder**7 * p)
        flux = euler_flux._far_flux((*inside, zero, doubles(louder)), free, one, zero, one)
        exact = euler_flux._roe(inside, inside, one, zero, one)
        torch.testing.assert_close(torch.stack(flux), torch.stack(exact), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("speed", [1.7, -1.7])
def test_above_the_speed_of_sound_all_comes_from_one_side(speed):
    one, zero = doubles(1.0), doubles(0.0)
    free = doubles(1.0), doubles(speed), doubles(0.2), doubles(1 / GAMMA), zero, one
    inside = doubles(1.2), doubles(speed * 1.1), doubles(-0.1), doubles(0.9), zero, (GAMMA * doubles(0.9) / 1.2).sqrt()
    flux = euler_flux._far_flux(inside, free, one, zero, one)
    upwind = inside[:4] if speed > 0 else free[:4]
    torch.testing.assert_close(torch.stack(flux), torch.stack(euler_flux._roe(upwind, upwind, one, zero, one)))
