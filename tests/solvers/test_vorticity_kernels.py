"""The fused steps against the plain ones. Without a GPU, Triton's interpreter runs the kernels: the same arithmetic."""

import pytest
import torch

from oformer.errors import InputError
from oformer.gpu import fused_kernels
from oformer.solvers.vorticity_spectral import solve
from tests.solvers.test_vorticity_spectral import states

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compare(points, *, fused, batch=2, scale=1.0, steps=4, viscosity=(1e-4, 1e-3)):
    initial = states(points, batch, highest=min(20, points // 3 - 1), scale=scale).float().to(DEVICE)
    nu = torch.linspace(*viscosity, batch, dtype=torch.float64, device=DEVICE)
    return solve(initial, viscosity=nu, times=[0.0, 0.01 * steps], time_step=0.01, fused=fused)


@pytest.mark.parametrize("points", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_fused_steps_are_the_plain_ones(points):
    initial, later = compare(points, fused=True).unbind(1)
    _, plain = compare(points, fused=False).unbind(1)
    moved = float((plain - initial).norm())
    assert moved > 1e-2 * float(initial.norm())
    assert float((later - plain).norm()) < 1e-6 * float(plain.norm())


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e3])
def test_any_strength_of_flow(scale):
    """Half precision has a narrow range, and velocities are scaled into it. Time steps are short for a strong flow."""
    initial = states(64, 2, scale=scale).float().to(DEVICE)
    settings = {"viscosity": 1e-4, "times": [4e-3 / max(scale, 1)], "time_step": 1e-3 / max(scale, 1)}
    calm = torch.zeros(64, 64, device=DEVICE)
    fused, plain = (solve(initial, **settings, forcing=calm, fused=fused) for fused in (True, False))
    assert float((fused - plain).norm()) < 1e-6 * float(plain.norm())


@pytest.mark.slow
def test_same_bits_in_any_batch():
    together = compare(64, fused=True, batch=3, viscosity=(1e-4, 1e-4))
    alone = solve(
        states(64, 3, highest=20)[1:2].float().to(DEVICE),
        viscosity=1e-4, times=[0.0, 0.04], time_step=0.01, fused=True,
    )  # fmt: skip
    assert torch.equal(together[1], alone[0])


def test_a_recorded_step_is_one_of_the_steps_and_is_recorded_once():
    """However the steps are called for; recording does none of them."""
    from oformer.solvers.vorticity_kernels import FusedRungeKutta  # needs Triton

    def started(record=None):
        modes = torch.view_as_complex(torch.randn(2, 43, 22, 2, generator=torch.Generator().manual_seed(0))).to(DEVICE)
        modes[:, 0, 0] = 0
        nu, largest = torch.full((1, 1, 1), 1e-4, dtype=torch.float64, device=DEVICE), torch.ones(2, device=DEVICE)
        return FusedRungeKutta(modes, nu, torch.zeros_like(modes[0]), largest, 64, 1e-3, record)

    recorded: list[int] = []
    plain, replayed = started(), started(lambda work, warm_up: recorded.append(warm_up) or work)
    for steps in (1, 2):
        plain.march(steps)
        replayed.march(steps)
        assert torch.equal(plain.state, replayed.state)
    assert recorded == [0]
    assert float((plain.packed() - started().packed()).norm()) > 0


def test_what_they_cannot_do_is_refused():
    with pytest.raises(InputError, match=r"float32 and 64, 128, 256 points.* and 32"):
        solve(states(32).float(), viscosity=1e-4, times=[0.01], time_step=0.01, fused=True)
    with pytest.raises(InputError, match=r"`rk4`.*got `euler-cn`"):
        solve(states(64).float(), viscosity=1e-4, times=[0.01], time_step=0.01, fused=True, scheme="euler-cn")


def test_the_switch(monkeypatch):
    assert not fused_kernels(torch.device("cpu"), "vorticity")
    monkeypatch.setenv("OFORMER_FUSED", "0")
    assert not fused_kernels(torch.device("cuda"), "vorticity")
