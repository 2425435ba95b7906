"""Spectral interpolation is exact, treats the Nyquist mode rightly, and knows nothing of the batch."""

import math

import numpy as np
import pytest
import scipy.signal
import torch

from oformer.errors import InputError
from oformer.solvers.fourier import irfft, resample, rfft


def polynomial(points: int, degree: int, batch: int = 3) -> torch.Tensor:
    """A trigonometric polynomial with fixed random coefficients, summed term by term."""
    noise = np.random.default_rng(degree).standard_normal((batch, 2, degree + 1))
    x = 2 * math.pi * np.arange(points) / points
    values = sum(noise[:, :1, k] * np.cos(k * x) + noise[:, 1:, k] * np.sin(k * x) for k in range(degree + 1))
    return torch.from_numpy(np.asarray(values))


@pytest.mark.parametrize("points", [21, 22, 40, 41, 63, 84, 8192])
@pytest.mark.parametrize("given", [21, 22, 32])
def test_finer_grids_get_the_function_itself(given, points):
    torch.testing.assert_close(resample(polynomial(given, 10), points), polynomial(points, 10), rtol=0, atol=1e-12)


@pytest.mark.parametrize("points", [1, 2, 5, 7, 8, 16, 20])
def test_coarser_grids_get_point_values_and_not_a_smoothed_function(points):
    torch.testing.assert_close(resample(polynomial(32, 10), points), polynomial(points, 10), rtol=0, atol=1e-12)


def test_thinning_is_taken_literally():
    values = torch.randn(2, 64, dtype=torch.float64)
    assert torch.equal(resample(values, 64), values)
    assert torch.equal(resample(values, 16), values[:, ::4])


def test_nyquist_mode_is_a_cosine():
    values = torch.tensor([[1.0, -1.0] * 4], dtype=torch.float64)
    x = torch.arange(24, dtype=torch.float64) / 24
    torch.testing.assert_close(resample(values, 24)[0], torch.cos(2 * math.pi * 4 * x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("given", [8, 9])
def test_finer_grids_agree_with_scipy_on_values_no_function_is_smooth_for(given):
    values = torch.randn(4, given, dtype=torch.float64)
    expected = torch.from_numpy(scipy.signal.resample(values.numpy(), 30, axis=1))
    torch.testing.assert_close(resample(values, 30), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("given", [12, 13])
def test_there_and_back_changes_nothing(given):
    values = torch.randn(4, given, dtype=torch.float64)
    torch.testing.assert_close(resample(resample(values, 31), given), values, rtol=0, atol=1e-13)


@pytest.mark.parametrize("points", [64, 1000, 8192])  # 64 and 8192: lengths for which MKL treats a lone row its own way
def test_a_row_has_the_same_bits_in_any_batch(points):
    values = torch.randn(64, points, dtype=torch.float64)
    spectrum = rfft(values)
    back = irfft(spectrum, points)
    for batch in (1, 3, 7):
        assert torch.equal(rfft(values[5 : 5 + batch]), spectrum[5 : 5 + batch])
        assert torch.equal(irfft(spectrum[5 : 5 + batch], points), back[5 : 5 + batch])


def test_no_points_are_refused():
    with pytest.raises(InputError, match="at least one point"):
        resample(torch.ones(1, 8, dtype=torch.float64), 0)
