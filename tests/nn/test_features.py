"""Random Fourier features: frozen Gaussian waves, sines first."""

import math

import pytest
import torch

from oformer.nn.features import RandomFourier


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_sines_first_then_cosines_of_the_same_phases(dim):
    layer = RandomFourier(dim, 5, sigma=2.0)
    coords = torch.randn(2, 4, dim)
    result = layer(coords)
    assert result.shape == (2, 4, 10)
    for wave in range(5):
        phase = 2 * math.pi * sum(coords[..., axis] * layer.directions[axis, wave] for axis in range(dim))
        torch.testing.assert_close(result[..., wave], phase.sin(), rtol=0, atol=1e-12)
        torch.testing.assert_close(result[..., 5 + wave], phase.cos(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 8.0])
def test_waves_are_gaussian_with_the_given_spread(sigma):
    waves = RandomFourier(2, 50_000, sigma).directions.double() / sigma
    # Five standard errors of each moment of 100,000 normal numbers.
    error = 5 / math.sqrt(waves.numel())
    assert abs(waves.mean()) < error
    assert abs(waves.square().mean() - 1) < error * math.sqrt(2)
    assert abs(waves.pow(4).mean() - 3) < error * math.sqrt(96)


def test_waves_are_saved_and_not_trained():
    layer = RandomFourier(2, 5, 1.0)
    assert not list(layer.parameters())
    assert list(layer.state_dict()) == ["directions"]
    other = RandomFourier(2, 5, 1.0)
    coords = torch.rand(1, 3, 2)
    assert not torch.equal(layer(coords), other(coords))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(coords), other(coords))


def test_phases_stay_exact_under_autocast_and_for_bfloat16_coordinates():
    layer = RandomFourier(2, 16, 8.0)
    coords = torch.rand(2, 10, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(coords)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, layer(coords))
    assert torch.equal(layer(coords.bfloat16()), layer(coords.bfloat16().float()))
