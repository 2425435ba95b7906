"""Random fields obey their law: spectrum, variance, smoothness; and are the same function on any grid."""

import math

import pytest
import torch

from oformer.errors import InputError
from oformer.solvers.random_fields import Matern, periodic_line

LAW = Matern(amplitude=25.0, inverse_length=5.0, exponent=2.0)
MODES = 20


def noise(batch: int, modes: int = MODES) -> torch.Tensor:
    return torch.randn(batch, 2, modes, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def published_power() -> torch.Tensor:
    """P_k as the published Burgers data obey it, written out."""
    k = torch.arange(1, MODES + 1, dtype=torch.float64)
    return 2 * 625 / ((2 * math.pi * k) ** 2 + 25) ** 2


@pytest.mark.parametrize("points", [41, 64, 97, 8192])
def test_values_are_the_sum_of_the_series(points):
    draws = noise(3)
    x = torch.arange(points, dtype=torch.float64) / points
    expected = torch.zeros(3, points, dtype=torch.float64)
    for k, power in enumerate(published_power(), start=1):
        wave = draws[:, :1, k - 1] * torch.cos(2 * math.pi * k * x) + draws[:, 1:, k - 1] * torch.sin(
            2 * math.pi * k * x
        )
        expected += power.sqrt() * wave
    torch.testing.assert_close(periodic_line(draws, points, LAW), expected, rtol=0, atol=1e-13)


def test_spectrum_and_deviation_of_the_population():
    fields = periodic_line(noise(20_000), 64, LAW)
    spectrum = torch.fft.rfft(fields, norm="forward")
    power = 2 * spectrum.abs().square().mean(0)  # of cosine and sine together, halved by the mean over x
    torch.testing.assert_close(power[1 : MODES + 1], published_power(), rtol=0.05, atol=0)
    assert power[0] < 1e-30
    assert power[MODES + 1 :].max() < 1e-30
    assert float(fields.square().mean().sqrt()) == pytest.approx(0.594, abs=0.006)
    assert float(published_power().sum().sqrt()) == pytest.approx(0.594, abs=5e-4)


def test_field_is_stationary_and_symmetric():
    fields = periodic_line(noise(20_000), 48, LAW)
    deviation = fields.std(0)
    torch.testing.assert_close(deviation, deviation.mean().expand(48), rtol=0.03, atol=0)
    assert fields.mean(0).abs().max() < 4 * 0.594 / math.sqrt(20_000)


def test_the_law_has_three_dials():
    eigenvalues = torch.tensor([0.0, 1.0, 100.0], dtype=torch.float64)
    base = Matern(1.0, 3.0, 2.0).deviation(eigenvalues)
    torch.testing.assert_close(base, torch.tensor([1 / 9, 1 / 10, 1 / 109], dtype=torch.float64))
    torch.testing.assert_close(Matern(7.0, 3.0, 2.0).deviation(eigenvalues), 7 * base)
    torch.testing.assert_close(Matern(1.0, 3.0, 4.0).deviation(eigenvalues), base**2)
    torch.testing.assert_close(
        Matern(1.0, 4.0, 2.0).deviation(eigenvalues),
        torch.tensor([1 / 16, 1 / 17, 1 / 116], dtype=torch.float64),
    )


def test_exponent_sets_the_slope():
    fields = periodic_line(noise(4000, 100), 256, Matern(1.0, 1.0, 3.0))
    power = torch.fft.rfft(fields).abs().square().mean(0)
    slope = torch.log(power[80] / power[20]) / math.log(4)
    assert float(slope) == pytest.approx(-6, abs=0.1)


def test_a_field_has_the_same_bits_in_any_batch():
    draws = noise(64)
    fields = periodic_line(draws, 8192, LAW)
    for batch in (1, 3, 7):
        assert torch.equal(periodic_line(draws[9 : 9 + batch], 8192, LAW), fields[9 : 9 + batch])


def test_half_precision_noise_gives_double_precision_fields():
    assert periodic_line(noise(2).float(), 64, LAW).dtype == torch.float64


@pytest.mark.parametrize("points", [1, 39, 40])
def test_grids_that_cannot_hold_the_modes_are_refused(points):
    with pytest.raises(InputError, match=f"more than 40 points for a random field of 20 modes, got {points}"):
        periodic_line(noise(1), points, LAW)


@pytest.mark.parametrize("wrong", [(-1.0, 5.0, 2.0), (25.0, math.nan, 2.0), (25.0, 5.0, math.inf)])
def test_laws_that_are_none_are_refused(wrong):
    with pytest.raises(InputError, match="finite and not negative"):
        Matern(*wrong)
