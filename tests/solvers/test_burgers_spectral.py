"""The Burgers solver against exact solutions, conservation laws, symmetries, and a published pair."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from oformer.errors import InputError, SolverDiverged
from oformer.solvers.burgers_spectral import solve
from oformer.solvers.fourier import resample

LENGTH = 2 * math.pi
SETTINGS: dict[str, Any] = {"viscosity": 0.1, "length": LENGTH, "duration": 1.0}


def grid(points: int) -> torch.Tensor:
    return torch.arange(points, dtype=torch.float64) * (LENGTH / points)


def coefficients(batch: int, modes: int) -> np.ndarray:
    """Of cosines and sines, falling with the wave number; about the size of the published states."""
    return np.random.default_rng(3).standard_normal((batch, 2, modes)) / (1 + np.arange(1, modes + 1) ** 2)


def states(points: int, batch: int = 4, modes: int = 8) -> torch.Tensor:
    x = grid(points).numpy()
    c = coefficients(batch, modes)
    terms = (c[:, :1, k - 1] * np.cos(k * x) + c[:, 1:, k - 1] * np.sin(k * x) for k in range(1, modes + 1))
    return torch.from_numpy(np.asarray(sum(terms)))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any sample."""
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def cole_hopf(x: np.ndarray, c: np.ndarray, nu: float, time: float) -> np.ndarray:
    """The exact solution as a quotient of two heat integrals over the real line; no Fourier transform in it.

    u = int (x-y)/t e^g dy / int e^g dy with g = -(U(y) + (x-y)^2/(2t)) / (2 nu), U' = u0. The trapezoidal
    rule is exact to round-off for these smooth, fast decaying integrands.
    """
    y = np.linspace(-9.0, LENGTH + 9.0, 8001)
    k = np.arange(1, c.shape[1] + 1)[:, None]
    potential = (c[0] / k[:, 0]) @ np.sin(k * y) - (c[1] / k[:, 0]) @ np.cos(k * y)
    gap = x[:, None] - y
    exponent = -(potential + gap**2 / (2 * time)) / (2 * nu)
    density = np.exp(exponent - exponent.max(1, keepdims=True))
    return (gap / time * density).sum(1) / density.sum(1)


@pytest.mark.parametrize(
    ("viscosity", "time", "points", "steps"),
    [(0.1, 1.0, 512, 800), (0.1, 0.25, 512, 400), (0.05, 1.0, 1024, 1600)],
)
def test_cole_hopf(viscosity, time, points, steps):
    c = coefficients(4, 8)
    u = solve(states(points), viscosity=viscosity, length=LENGTH, duration=time, steps=steps)[:, 0, ::8]
    expected = torch.from_numpy(np.stack([cole_hopf(grid(points).numpy()[::8], row, viscosity, time) for row in c]))
    assert relative(u, expected) < 1e-8


def test_fourth_order_in_time():
    initial = states(192)
    exact = solve(initial, **SETTINGS, steps=2000)[:, 0]
    steps = np.array([113, 160, 226, 320, 452])
    errors = [relative(solve(initial, **SETTINGS, steps=int(s))[:, 0], exact) for s in steps]
    rate = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert rate == pytest.approx(4, abs=0.1)
    assert errors[-1] < 1e-9


def test_spectral_in_space():
    """The error falls faster than any power of the spacing, down to round-off."""
    exact = solve(states(768), **SETTINGS, steps=100)[:, 0]
    counts = (32, 64, 128, 256, 384)
    errors = [relative(resample(solve(states(n), **SETTINGS, steps=100)[:, 0], 768), exact) for n in counts]
    rates = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert errors[-1] < 1e-13
    assert rates[0] > 4
    assert (np.diff(rates[:3]) > 3).all()


def test_odd_numbers_of_points_solve_the_same_equation():
    even, odd = (solve(states(n), **SETTINGS, steps=200)[:, 0] for n in (384, 383))
    assert relative(resample(odd, 384), even) < 1e-13


def test_mean_is_conserved():
    initial = states(256) + torch.tensor([[0.0], [1.0], [-2.0], [0.3]], dtype=torch.float64)
    final = solve(initial, **SETTINGS, steps=200)[:, 0]
    assert (final.mean(-1) - initial.mean(-1)).abs().max() < 1e-12
    assert relative(final, initial) > 0.1


def test_energy_decreases_as_viscosity_demands():
    times = np.linspace(0, 1, 101).tolist()
    u = solve(states(512), **SETTINGS, steps=400, times=times)
    energy = u.square().mean(-1) / 2
    assert (energy.diff(dim=1) < 0).all()
    k = torch.arange(257, dtype=torch.float64)
    slope = torch.fft.irfft(1j * k * torch.fft.rfft(u), 512)
    loss = -0.1 * slope.square().mean(-1)
    # Central differences of fourth order in time.
    rate = (energy[:, :-4] - 8 * energy[:, 1:-3] + 8 * energy[:, 3:-1] - energy[:, 4:]) / (12 * 0.01)
    torch.testing.assert_close(rate, loss[:, 2:-2], rtol=1e-4, atol=0)


def test_without_viscosity_energy_stays():
    initial = states(256) / 4
    final = solve(initial, viscosity=0.0, length=LENGTH, duration=0.5, steps=400)[:, 0]
    assert relative(final, initial) > 0.05
    torch.testing.assert_close(final.square().mean(-1), initial.square().mean(-1), rtol=1e-11, atol=0)


def test_products_are_free_of_aliasing():
    """Past the shock, where 48 points resolve nothing, the Galerkin equation still conserves energy."""
    initial = states(48)
    final = solve(initial, viscosity=0.0, length=LENGTH, duration=4.0, steps=1600)[:, 0]
    assert torch.fft.rfft(final, norm="forward")[:, 15].abs().max() > 1e-2
    torch.testing.assert_close(final.square().mean(-1), initial.square().mean(-1), rtol=1e-6, atol=0)


def test_maximum_principle():
    u = solve(states(512), **SETTINGS, steps=200, times=np.linspace(0, 1, 21).tolist())
    highest, lowest = resample(u.flatten(0, 1), 4096).unflatten(0, u.shape[:2]).aminmax(dim=-1)[::-1]
    assert (highest.diff(dim=1) < 0).all()
    assert (lowest.diff(dim=1) > 0).all()


@pytest.mark.parametrize("length", [LENGTH, 1.0])
def test_small_waves_decay_like_heat(length):
    k = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)[:, None]
    wave = 1e-9 * torch.cos(k * grid(64))
    nu = 0.1 * (length / LENGTH) ** 2
    final = solve(wave, viscosity=nu, length=length, duration=1.0, steps=50)[:, 0]
    assert relative(final, wave * torch.exp(-0.1 * k**2)) < 1e-6


def test_a_uniform_wind_carries_the_solution_along():
    """Galilean invariance: u0 + c is solved by u(x - c t) + c."""
    points, wind = 256, LENGTH * 25 / 256
    still, blown = (solve(states(points) + c, **SETTINGS, steps=400)[:, 0] for c in (0.0, wind))
    assert relative(blown - wind, still.roll(25, -1)) < 5e-9


def test_length_and_time_scale_together():
    """Lengths and times twice as long at twice the viscosity: the same values."""
    one = solve(states(128), **SETTINGS, steps=100)
    two = solve(states(128), viscosity=0.2, length=2 * LENGTH, duration=2.0, steps=100)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cells", [1, 37, 128])
def test_translation(cells):
    initial = states(256)
    before = solve(initial.roll(cells, -1), **SETTINGS, steps=200)[:, 0]
    assert relative(before, solve(initial, **SETTINGS, steps=200)[:, 0].roll(cells, -1)) < 1e-12


def test_reflection():
    initial = states(256)
    mirrored = -initial.flip(-1).roll(1, -1)
    before = solve(mirrored, **SETTINGS, steps=200)[:, 0]
    assert relative(before, -solve(initial, **SETTINGS, steps=200)[:, 0].flip(-1).roll(1, -1)) < 1e-12


@pytest.mark.parametrize("points", [64, 250, 1024])
def test_a_state_has_the_same_bits_in_any_batch(points):
    initial = states(points, batch=64)
    together = solve(initial, **SETTINGS, steps=20)
    for batch in (1, 3, 7, 64):
        alone = torch.cat([solve(part, **SETTINGS, steps=20) for part in initial.split(batch)])
        assert torch.equal(alone, together)


def test_published_pair(shared_data):
    pair = np.load(shared_data / "burgers_r10_real_pair.npz")
    a, u = (torch.from_numpy(pair[name]).double() for name in ("a", "u"))
    assert relative(solve(a, **SETTINGS, steps=400)[:, 0], u) < 5e-4
    # The formula as the papers print it, on a length of one, is another equation.
    assert relative(solve(a, viscosity=0.1, length=1.0, duration=1.0, steps=400)[:, 0], u) > 0.9


def test_times_are_snapshots_of_one_run():
    initial = states(128)
    u = solve(initial, **SETTINGS, steps=100, times=[0.0, 0.3, 1.0])
    assert u.shape == (4, 3, 128)
    torch.testing.assert_close(u[:, 0], initial, rtol=0, atol=1e-13)
    torch.testing.assert_close(u[:, 1], solve(initial, viscosity=0.1, length=LENGTH, duration=0.3, steps=30)[:, 0])
    assert torch.equal(u[:, 2:], solve(initial, **SETTINGS, steps=100))


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        ([0.005], "nearest is 0"),
        ([0.5, 0.3], "grow"),
        ([0.5, 1.5], "at most 1"),
        ([-0.5], "grow"),
        ([], "grow"),
    ],
)
def test_times_between_steps_or_out_of_order_are_refused(times, sentence):
    with pytest.raises(InputError, match=sentence):
        solve(states(64), **SETTINGS, steps=100, times=times)


def test_single_precision_states_are_solved_in_double():
    initial = states(128).float()
    assert torch.equal(solve(initial, **SETTINGS, steps=50), solve(initial.double(), **SETTINGS, steps=50))


def test_gradients_pass_through_the_solver():
    wave = 1e-6 * states(64, batch=1)
    wave.requires_grad_()
    probe = torch.cos(grid(64))
    (gradient,) = torch.autograd.grad((solve(wave, **SETTINGS, steps=20)[:, 0] * probe).sum(), wave)
    # The adjoint of the heat equation is itself.
    torch.testing.assert_close(gradient[0], math.exp(-0.1) * probe, rtol=0, atol=1e-5)


def test_too_coarse_steps_raise_what_they_are():
    with pytest.raises(SolverDiverged, match="burgers_spectral diverged") as caught:
        solve(100 * states(256), **SETTINGS, steps=40)
    assert 1 <= caught.value.step <= 40
    assert caught.value.time == pytest.approx(caught.value.step / 40)
    assert caught.value.norm > 100


def test_growth_is_seen_before_it_is_infinite():
    """A run that ends soon after it left the solution holds finite numbers, and is refused all the same."""
    with pytest.raises(SolverDiverged) as caught:
        solve(30 * states(256), **SETTINGS, steps=40, times=[1 / 40])
    assert math.isfinite(caught.value.norm)


def test_one_bad_state_is_enough():
    initial = states(256)
    initial[2] *= 100
    with pytest.raises(SolverDiverged):
        solve(initial, **SETTINGS, steps=40)


def test_a_state_of_zeros_stays():
    zeros = torch.zeros(2, 64, dtype=torch.float64)
    assert torch.equal(solve(zeros, **SETTINGS, steps=20)[:, 0], zeros)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"viscosity": -0.1}, "viscosity"),
        ({"viscosity": math.nan}, "viscosity"),
        ({"length": 0.0}, "length"),
        ({"duration": -1.0}, "duration"),
        ({"duration": math.inf}, "duration"),
        ({"steps": 0}, "steps"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        solve(states(64), **{**SETTINGS, "steps": 10, **change})


def test_impossible_states_are_refused():
    with pytest.raises(InputError, match="4 points"):
        solve(torch.ones(1, 3, dtype=torch.float64), **SETTINGS, steps=10)
    broken = states(64)
    broken[1, 5] = math.nan
    with pytest.raises(InputError, match="1 NaN"):
        solve(broken, **SETTINGS, steps=10)
