"""Random fields obey their law: spectrum, variance, smoothness; and are the same function on any grid."""

import math

import pytest
import scipy.fft
import torch

from oformer.errors import InputError
from oformer.solvers.random_fields import Matern, neumann_square, periodic_line, periodic_plane

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


SQUARE = Matern(amplitude=1.0, inverse_length=3.0, exponent=2.0)  # of the published Darcy media


def square_noise(batch: int, first: int, second: int) -> torch.Tensor:
    return torch.randn(batch, first, second, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def cosines(modes: int, points: int) -> torch.Tensor:
    """c_k cos(pi k x) at the cell centers, of mean square one."""
    k = torch.arange(modes, dtype=torch.float64)[:, None]
    x = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    return torch.cos(math.pi * k * x) * torch.where(k > 0, torch.full_like(k, math.sqrt(2)), 1.0)


@pytest.mark.parametrize("points", [(7, 9), (8, 9), (16, 16), (21, 40), (61, 43)])
def test_neumann_values_are_the_sum_of_the_series(points):
    """On any grid, and so are the same function on all."""
    draws = square_noise(3, 7, 9)
    k, m = torch.arange(7, dtype=torch.float64)[:, None], torch.arange(9, dtype=torch.float64)
    spectrum = draws / (math.pi**2 * (k**2 + m**2) + 9)
    spectrum[:, 0, 0] = 0
    expected = torch.einsum("bkl,ki,lj->bij", spectrum, cosines(7, points[0]), cosines(9, points[1]))
    got = neumann_square(draws, points, SQUARE)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    assert got.is_contiguous()


@pytest.mark.parametrize("points", [12, 13])
def test_neumann_field_is_an_orthonormal_inverse_cosine_transform(points):
    draws = square_noise(2, points, points)
    field = neumann_square(draws, (points, points), Matern(1.0, 0.0, 0.0))  # white but for the mean
    draws[:, 0, 0] = 0
    expected = torch.from_numpy(scipy.fft.idctn(draws.numpy(), type=2, axes=(1, 2), norm="ortho"))
    torch.testing.assert_close(field / points, expected, rtol=0, atol=1e-14)


def test_neumann_spectrum_and_variance_of_the_population():
    fields = neumann_square(square_noise(4000, 12, 12), (16, 16), SQUARE)
    c = cosines(16, 16) / 16
    power = torch.einsum("bij,ki,lj->bkl", fields, c, c).square().mean(0)
    k = torch.arange(12, dtype=torch.float64)
    law = (math.pi**2 * (k[:, None] ** 2 + k**2) + 9) ** -2
    law[0, 0] = 0
    torch.testing.assert_close(power[:12, :12], law, rtol=0.12, atol=1e-30)
    assert power[12:].max() < 1e-30
    assert power[:, 12:].max() < 1e-30
    assert fields.mean((1, 2)).abs().max() < 1e-15
    variance = torch.einsum("kl,ki,lj->ij", law, cosines(12, 16).square(), cosines(12, 16).square())
    torch.testing.assert_close(fields.var(0), variance, rtol=0.12, atol=0)
    assert float(variance[0, 0] / variance[8, 8]) > 2  # not stationary: a border without flux doubles what it meets


def test_neumann_field_has_the_same_bits_in_any_batch():
    for points in (16, 43, 64):
        draws = square_noise(16, points, points)
        fields = neumann_square(draws, (points, points), SQUARE)
        for batch in (1, 3, 7):
            assert torch.equal(neumann_square(draws[5 : 5 + batch], (points, points), SQUARE), fields[5 : 5 + batch])


def test_neumann_grids_that_cannot_hold_the_modes_are_refused():
    with pytest.raises(InputError, match="at least 8 x 9 points for a random field of as many modes, got 8 x 8"):
        neumann_square(square_noise(1, 8, 9), (8, 8), SQUARE)


PLANE = Matern(amplitude=2**0.5 * 7**1.5, inverse_length=7.0, exponent=2.5)  # of the published flows


def plane_noise(batch: int, highest: int) -> torch.Tensor:
    modes = 2 * highest + 1
    return torch.randn(batch, 2, modes, modes, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("points", [7, 8, 15, 32])
def test_plane_values_are_the_sum_of_the_series(points):
    """On any grid, and so are the same function on all."""
    draws = plane_noise(2, 3)
    x = torch.arange(points, dtype=torch.float64) / points
    expected = torch.zeros(2, points, points, dtype=torch.float64)
    for i, k in enumerate(range(-3, 4)):
        for j, m in enumerate(range(-3, 4)):
            if (k, m) == (0, 0):
                continue
            deviation = math.sqrt(2) * 7**1.5 * (4 * math.pi**2 * (k**2 + m**2) + 49) ** -1.25
            phase = 2 * math.pi * (k * x[:, None] + m * x)
            wave = draws[:, :1, i, j, None] * torch.cos(phase) - draws[:, 1:, i, j, None] * torch.sin(phase)
            expected += deviation * wave
    torch.testing.assert_close(periodic_plane(draws, points, PLANE), expected, rtol=0, atol=1e-14)


def test_plane_is_the_published_recipe():
    """Re ifft2(n^2 sqrt(2) sigma (4 pi^2 |k|^2 + 49)^(-1.25) (xi + i eta)), the noise laid out as its script does."""
    n, draws = 15, plane_noise(3, 7)
    k = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64)
    s = n**2 * math.sqrt(2) * 7**1.5 * (4 * math.pi**2 * (k[:, None] ** 2 + k**2) + 49) ** -1.25
    s[0, 0] = 0
    xi, eta = torch.fft.ifftshift(draws, dim=(2, 3)).unbind(1)
    expected = torch.fft.ifft2(s * torch.complex(xi, eta)).real
    torch.testing.assert_close(periodic_plane(draws, n, PLANE), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("amplitude", "deviation"), [(2**0.5 * 7**1.5, 0.262), (7**1.5, 0.185)])
def test_plane_has_the_published_deviation_and_slope(amplitude, deviation):
    fields = periodic_plane(plane_noise(600, 31), 64, Matern(amplitude, 7.0, 2.5))
    assert float(fields.square().mean().sqrt()) == pytest.approx(deviation, rel=0.02)
    assert fields.mean((1, 2)).abs().max() < 1e-15
    power = torch.fft.fft2(fields).abs().square().mean(0)
    slope = torch.log(power[30, :6].mean() / power[10, :2].mean()) / math.log(3)
    assert float(slope) == pytest.approx(-5, abs=0.25)
    torch.testing.assert_close(power, power.mT, rtol=0.5, atol=1e-3)


def test_the_middle_of_the_noise_is_the_same_function_with_fewer_modes():
    draws = plane_noise(2, 9)
    spectrum = torch.fft.fft2(periodic_plane(draws, 32, PLANE), norm="forward")
    k = torch.fft.fftfreq(32, 1 / 32).abs()
    cut = torch.fft.ifft2(spectrum * ((k[:, None] <= 5) & (k <= 5)), norm="forward").real
    torch.testing.assert_close(periodic_plane(draws[:, :, 4:-4, 4:-4], 32, PLANE), cut, rtol=0, atol=1e-14)


@pytest.mark.parametrize("points", [64, 90, 256])
def test_a_plane_has_the_same_bits_in_any_batch(points):
    draws = plane_noise(12, 21)
    fields = periodic_plane(draws, points, PLANE)
    for batch in (1, 3, 7):
        assert torch.equal(periodic_plane(draws[4 : 4 + batch], points, PLANE), fields[4 : 4 + batch])


def test_planes_that_cannot_hold_the_modes_are_refused():
    with pytest.raises(InputError, match="at least 7 points for a random field of 7 modes per axis, got 6"):
        periodic_plane(plane_noise(1, 3), 6, PLANE)
    with pytest.raises(InputError, match="an odd number, got 6"):
        periodic_plane(plane_noise(1, 3)[:, :, :6, :6], 8, PLANE)
