"""The vorticity solver against exact solutions, budgets, symmetries, and its own limits."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.errors import InputError, SolverDiverged
from oformer.solvers.random_fields import Matern, periodic_plane
from oformer.solvers.vorticity_spectral import Modes, published_forcing, solve, velocity

LAW = Matern(amplitude=2**0.5 * 7**1.5, inverse_length=7.0, exponent=2.5)


def states(points: int, batch: int = 2, highest: int = 10, scale: float = 1.0) -> Tensor:
    """Random vorticity with the modes up to `highest`: the same function for any number of points."""
    noise = torch.randn(
        batch, 2, 2 * highest + 1, 2 * highest + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    return scale * periodic_plane(noise, points, LAW)


def relative(got: Tensor, expected: Tensor) -> float:
    """The largest relative error of any sample."""
    return float(((got - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))).max())


def derivative(w: Tensor, axis: int) -> Tensor:
    """By a full complex transform, unlike the solver's; axis -2 is x."""
    n = w.shape[-1]
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) * (torch.arange(n) != n / 2)
    k = k[:, None] if axis == -2 else k
    return torch.fft.ifft2(2j * math.pi * k * torch.fft.fft2(w)).real


def grid(points: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(points, dtype=torch.float64) / points
    return x[:, None], x[None, :]


def none(points: int) -> Tensor:
    return torch.zeros(points, points, dtype=torch.float64)


@pytest.mark.parametrize(("scheme", "order"), [("rk4", 4), ("euler-cn", 1)])
def test_order_in_time(scheme, order):
    initial = states(32, scale=6.0)
    settings: dict[str, Any] = {"viscosity": 1e-3, "times": [1.0]}
    exact = solve(initial, **settings, time_step=1 / 800)[:, 0]
    steps = np.array([25, 36, 50, 72, 100]) * (1 if scheme == "rk4" else 4)
    errors = [relative(solve(initial, **settings, time_step=1 / s, scheme=scheme)[:, 0], exact) for s in steps]
    rate = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert rate == pytest.approx(order, abs=0.15)
    assert errors[-1] < (1e-6 if scheme == "rk4" else 2e-2)


@pytest.mark.parametrize("scheme", ["rk4", "euler-cn"])
def test_taylor_green_vortices_decay(scheme):
    """A field of one |k| is carried along its own stream lines: only viscosity acts."""
    x, y = grid(24)
    initial = (torch.cos(2 * math.pi * x) * torch.cos(2 * math.pi * y))[None]
    w = solve(initial, viscosity=0.02, times=[0.5, 1.0], forcing=none(24), scheme=scheme, time_step=0.005)
    for frame, time in enumerate((0.5, 1.0)):
        expected = initial[:, None] * math.exp(-8 * math.pi**2 * 0.02 * time)
        assert relative(w[:, frame : frame + 1], expected) < (1e-13 if scheme == "rk4" else 1e-4)


def test_forced_flow_from_rest_is_known():
    w = solve(torch.zeros(1, 16, 16, dtype=torch.float64), viscosity=1e-2, times=[1.0, 3.0])
    rate = 8 * math.pi**2 * 1e-2
    for frame, time in enumerate((1.0, 3.0)):
        expected = published_forcing(16) * (1 - math.exp(-rate * time)) / rate
        assert relative(w[:, frame], expected[None]) < 1e-9


def test_forcing_is_the_published_one():
    x, y = grid(20)
    expected = 0.1 * (torch.sin(2 * math.pi * (x + y)) + torch.cos(2 * math.pi * (x + y)))
    torch.testing.assert_close(published_forcing(20), expected, rtol=0, atol=1e-15)
    initial = states(32)
    told = solve(initial, viscosity=1e-3, times=[0.2], forcing=published_forcing(32))
    assert torch.equal(told, solve(initial, viscosity=1e-3, times=[0.2]))
    assert relative(told, solve(initial, viscosity=1e-3, times=[0.2], forcing=none(32))) > 0.02


def test_velocity_is_free_of_divergence_and_has_the_vorticity_as_its_curl():
    w = states(48)
    u1, u2 = velocity(w).unbind(1)
    assert float((derivative(u1, -2) + derivative(u2, -1)).abs().max()) < 1e-12
    torch.testing.assert_close(derivative(u2, -2) - derivative(u1, -1), w, rtol=0, atol=1e-12)
    x, y = grid(48)
    psi = torch.sin(2 * math.pi * x) * torch.cos(4 * math.pi * y)  # -Lap psi = 20 pi^2 psi
    expected = -4 * math.pi * torch.sin(2 * math.pi * x) * torch.sin(4 * math.pi * y)
    torch.testing.assert_close(velocity(20 * math.pi**2 * psi[None])[0, 0], expected, rtol=0, atol=1e-12)


def test_advection_is_u_grad_w():
    """The first small step against derivatives written out; sixteen modes, so that no product is cut off."""
    w = states(64, highest=10)
    u1, u2 = velocity(w).unbind(1)
    slope = -(u1 * derivative(w, -2) + u2 * derivative(w, -1))
    dt = 1e-4
    ahead = solve(w, viscosity=0.0, times=[dt], time_step=dt, forcing=none(64))[:, 0]
    back = -solve(-w, viscosity=0.0, times=[dt], time_step=dt, forcing=none(64))[:, 0]  # w(-t) is -(-w)(t)
    assert relative((ahead - back) / (2 * dt), slope) < 1e-8


def test_mean_stays_zero():
    w = solve(states(32), viscosity=1e-4, times=[0.0, 1.0])
    assert w.mean((2, 3)).abs().max() < 1e-15


def test_budgets_of_energy_and_enstrophy():
    """dE/dt = -nu <w^2> + <psi f> and dZ/dt = -nu <|grad w|^2> + <w f>, by differences of fourth order."""
    nu, dt = 1e-3, 0.01
    times = [0.5 + dt * i for i in range(-2, 3)]
    w = solve(states(64, scale=3.0), viscosity=nu, times=times)
    n = w.shape[-1]
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    eigenvalues = 4 * math.pi**2 * (k[:, None] ** 2 + k**2)
    eigenvalues[0, 0] = torch.inf
    psi = torch.fft.ifft2(torch.fft.fft2(w) / eigenvalues).real
    f = published_forcing(n)
    energy, enstrophy = (psi * w).mean((2, 3)) / 2, w.square().mean((2, 3)) / 2
    now, flow = w[:, 2], psi[:, 2]
    gradient = derivative(now, -2).square() + derivative(now, -1).square()
    expected = {
        "energy": -nu * now.square().mean((1, 2)) + (flow * f).mean((1, 2)),
        "enstrophy": -nu * gradient.mean((1, 2)) + (now * f).mean((1, 2)),
    }
    for name, quantity in (("energy", energy), ("enstrophy", enstrophy)):
        q = quantity.unbind(1)
        rate = (q[0] - 8 * q[1] + 8 * q[3] - q[4]) / (12 * dt)
        torch.testing.assert_close(rate, expected[name], rtol=1e-5, atol=0)


def test_without_viscosity_and_forcing_energy_and_enstrophy_stay():
    """Also where 24 points resolve nothing any more: the products are free of aliasing."""
    initial = states(24, highest=7, scale=4.0)
    w = solve(initial, viscosity=0.0, times=[0.0, 4.0], forcing=none(24), time_step=0.005)
    assert relative(w[:, 1], w[:, 0]) > 0.5
    speed = torch.stack([velocity(w[:, i]).square().mean((1, 2, 3)) for i in range(2)])
    torch.testing.assert_close(speed[1], speed[0], rtol=1e-8, atol=0)
    torch.testing.assert_close(w[:, 1].square().mean((1, 2)), w[:, 0].square().mean((1, 2)), rtol=1e-8, atol=0)


def test_spectral_in_space():
    """The same function on finer grids; at this viscosity 64 points are enough for a short time, 128 change nothing."""
    runs = {
        n: solve(states(n), viscosity=1e-3, times=[1.0], time_step=0.05, stride=n // 32)[:, 0] for n in (32, 64, 128)
    }
    assert relative(runs[64], runs[128]) < 1e-6
    assert relative(runs[32], runs[128]) > 100 * relative(runs[64], runs[128])


def test_odd_numbers_of_points_solve_the_same_equation():
    even = solve(states(96), viscosity=1e-3, times=[0.4], time_step=0.05, stride=3)[:, 0, ::32, ::32]
    odd = solve(states(99), viscosity=1e-3, times=[0.4], time_step=0.05, stride=99)[:, 0]
    torch.testing.assert_close(odd, even, rtol=0, atol=1e-10)


def test_viscosity_per_sample_is_that_of_separate_runs():
    initial, nu = states(32, batch=3), torch.tensor([1e-2, 1e-3, 1e-5], dtype=torch.float64)
    for scheme in ("rk4", "euler-cn"):
        together = solve(initial, viscosity=nu, times=[0.1, 0.3], scheme=scheme)
        for i in range(3):
            alone = solve(initial[i : i + 1], viscosity=float(nu[i]), times=[0.1, 0.3], scheme=scheme)
            assert torch.equal(alone[0], together[i])
    assert relative(together[:1], together[1:2]) > 0.01


@pytest.mark.parametrize("points", [32, 45, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_gives_the_same_bits_in_any_batch(points, dtype):
    initial = states(points, batch=12).to(dtype)
    whole = solve(initial, viscosity=1e-3, times=[0.05])
    assert whole.dtype == dtype
    for batch in (1, 3, 7):
        assert torch.equal(solve(initial[4 : 4 + batch], viscosity=1e-3, times=[0.05]), whole[4 : 4 + batch])


def test_single_precision_follows_double():
    initial = states(48)
    single, double = (solve(initial.to(d), viscosity=1e-3, times=[1.0])[:, 0] for d in (torch.float32, torch.float64))
    assert 1e-8 < relative(single.double(), double) < 1e-5


def test_frames_are_those_of_their_times():
    initial = states(32)
    w = solve(initial, viscosity=1e-3, times=[0.0, 0.1, 0.3])
    assert relative(w[:, 0], initial) < 1e-14
    later = solve(w[:, 1], viscosity=1e-3, times=[0.2])
    assert relative(later[:, 0], w[:, 2]) < 1e-13
    assert torch.equal(solve(initial, viscosity=1e-3, times=[0.3])[:, 0], w[:, 2])
    assert torch.equal(solve(initial, viscosity=1e-3, times=[0.3], stride=4)[:, 0], w[:, 2, ::4, ::4])


def test_nothing_given_is_changed():
    initial, forcing, nu = states(32), published_forcing(32), torch.tensor([1e-3, 1e-4], dtype=torch.float64)
    copies = initial.clone(), forcing.clone(), nu.clone()
    solve(initial, viscosity=nu, times=[0.05], forcing=forcing)
    for tensor, copy in zip((initial, forcing, nu), copies, strict=True):
        assert torch.equal(tensor, copy)


def test_packing_keeps_the_modes_below_a_third():
    for n, m in ((64, 21), (48, 15), (45, 14)):
        modes = Modes(n, torch.device("cpu"))
        assert modes.highest == m
        w = torch.randn(2, n, n, dtype=torch.float64)
        once = torch.fft.irfft2(modes.fill(modes.cut(torch.fft.rfft2(w))), (n, n))
        spectrum, k = torch.fft.fft2(once), torch.fft.fftfreq(n, 1 / n).abs()
        inside = (k[:, None] <= m) & (k <= m)
        torch.testing.assert_close(spectrum[:, inside], torch.fft.fft2(w)[:, inside], rtol=0, atol=1e-10)
        assert spectrum[:, ~inside].abs().max() < 1e-10


# The symmetries of the forcing, on n x n points; x is the first axis.
SYMMETRIES = {
    "half turn": lambda w: w.flip(-2, -1).roll((1, 1), (-2, -1)).roll(w.shape[-1] // 4, -2),
    "swap": lambda w: -w.mT.roll(w.shape[-1] // 2, -2),
    "both": lambda w: -w.mT.flip(-2, -1).roll((1, 1), (-2, -1)).roll(3 * w.shape[-1] // 4, -2),
    **{f"shift {k}": lambda w, k=k: w.roll((k, -k), (-2, -1)) for k in (1, 5, 31)},
}
CONTROLS = {
    "shift in x alone": lambda w: w.roll(5, -2),
    "quarter turn": lambda w: w.rot90(1, (-2, -1)),
    "swap without sign": lambda w: w.mT.roll(w.shape[-1] // 2, -2),
    "mirror": lambda w: -w.flip(-2).roll(1, -2),
}


@pytest.mark.parametrize("name", [*SYMMETRIES, *CONTROLS])
def test_symmetries_of_the_forced_flow(name):
    initial = states(32)
    settings: dict[str, Any] = {"viscosity": 1e-4, "times": [2.0], "time_step": 0.02}
    transform = SYMMETRIES.get(name) or CONTROLS[name]
    then, before = solve(transform(initial), **settings)[:, 0], transform(solve(initial, **settings)[:, 0])
    assert relative(then, before) < 1e-12 if name in SYMMETRIES else relative(then, before) > 0.1


def test_published_scheme_blows_up_where_runge_kutta_does_not():
    initial = states(32, highest=10, scale=6.0)
    settings: dict[str, Any] = {"viscosity": 1e-5, "times": [2.0, 10.0, 20.0], "time_step": 0.02}
    assert solve(initial, **settings).isfinite().all()
    with pytest.raises(SolverDiverged, match=r"vorticity_spectral diverged at step \d+") as caught:
        solve(initial, **settings, scheme="euler-cn")
    assert caught.value.step in (100, 500, 1000)
    assert caught.value.time == pytest.approx(caught.value.step * 0.02)
    assert caught.value.norm > 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"viscosity": -1e-3}, "`viscosity` that is finite and not negative"),
        ({"viscosity": torch.tensor([1e-3, math.nan], dtype=torch.float64)}, "`viscosity`"),
        ({"times": []}, "`times` that grow"),
        ({"times": [0.2, 0.1]}, "`times` that grow"),
        ({"times": [0.015]}, "whole numbers of steps of 0.01, got 0.015"),
        ({"time_step": 0.0}, "positive `time_step`"),
        ({"stride": 3}, "`stride` that divides the 32 points, got 3"),
        ({"forcing": torch.ones(32, 32, dtype=torch.float64)}, "`forcing` of zero mean"),
        ({"initial": states(32) + 1}, "`initial` of zero mean"),
        ({"initial": states(32) * math.nan}, "finite numbers in `initial`"),
        ({"initial": torch.zeros(2, 3, 3)}, "at least 4 points"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    settings = {"initial": states(32), "viscosity": 1e-3, "times": [0.1], **change}
    with pytest.raises(InputError, match=sentence):
        solve(**settings)
