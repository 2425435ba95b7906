"""Rotary encoding turns pairs of channels by angles that grow with the coordinates, and only differences remain."""

import math

import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.nn.rotary import Rotary
from oformer.nn.shared_grids import expanded

PERIODS = (1.0, 2.5, 0.5)
dimensions = pytest.mark.parametrize("dim", [1, 2, 3])
ladders = pytest.mark.parametrize("frequencies", ["ladder", "integer"])
exact = pytest.mark.usefixtures("float64")


def rotary(dim: int, frequencies: str, multiplier: float = 3.0, modes: int = 3, width: int | None = None) -> Rotary:
    return Rotary(dim, width or 8 * dim, multiplier, frequencies, PERIODS[:dim], modes)


def vectors(dim: int, points: int, batch: int = 2, heads: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, points, 8 * dim), torch.randn(batch, points, dim)


def turn(layer: Rotary, x: Tensor, coords: Tensor) -> Tensor:
    """Of vectors (batch, heads, points, width)."""
    return layer(x.transpose(1, 2), layer.tables(coords)).transpose(1, 2)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def theta(dim: int, axis: int, pair: int, frequencies: str, multiplier: float, width: int, modes: int) -> float:
    """Radians per unit of coordinate, written out."""
    size = width // dim
    if frequencies == "ladder":
        return multiplier * 10000.0 ** (-2 * pair / size)
    return multiplier * (pair % modes) * 2 * math.pi / PERIODS[axis]


@exact
@dimensions
@ladders
def test_equals_the_complex_formula(dim, frequencies):
    """Axis a owns the a-th block of channels; in it, channel l is paired with channel l + half."""
    layer = rotary(dim, frequencies)
    x, coords = vectors(dim, 5)
    result = turn(layer, x, coords)
    for axis in range(dim):
        for pair in range(4):
            first, second = axis * 8 + pair, axis * 8 + 4 + pair
            angle = coords[:, None, :, axis] * theta(dim, axis, pair, frequencies, 3.0, 8 * dim, 3)
            number = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angle)
            close(result[..., first], number.real)
            close(result[..., second], number.imag)


@exact
@dimensions
@ladders
def test_products_depend_on_differences_of_coordinates_alone(dim, frequencies):
    layer = rotary(dim, frequencies)
    (q, here), (k, there) = vectors(dim, 4), vectors(dim, 6)
    shift = torch.tensor([0.37, -2.1, 14.0][:dim])

    def products(move: Tensor) -> Tensor:
        return turn(layer, q, here + move) @ turn(layer, k, there + move).mT

    close(products(shift), products(torch.zeros(dim)))
    only_one = turn(layer, q, here + shift) @ turn(layer, k, there).mT
    assert (only_one - products(torch.zeros(dim))).abs().max() > 0.1


@exact
@dimensions
@ladders
def test_keeps_lengths(dim, frequencies):
    x, coords = vectors(dim, 5)
    close(turn(rotary(dim, frequencies), x, coords).norm(dim=-1), x.norm(dim=-1))


@exact
def test_at_the_origin_nothing_turns():
    x, coords = vectors(2, 5)
    close(turn(rotary(2, "ladder"), x, torch.zeros_like(coords)), x)


@exact
def test_the_ladder_goes_down_from_one_to_almost_a_ten_thousandth():
    layer = Rotary(2, 24, multiplier=7.0)
    expected = [7.0 * 10000 ** (-2 * l / 12) for l in range(6)]  # noqa: E741
    torch.testing.assert_close(layer.frequencies, torch.tensor([expected, expected]), check_dtype=False)


@exact
def test_integer_frequencies_count_whole_cycles_and_repeat():
    layer = Rotary(2, 20, multiplier=2.0, frequencies="integer", periods=(1.0, 4.0), modes=3)
    cycles = torch.tensor([0.0, 2.0, 4.0, 0.0, 2.0])
    expected = torch.stack([cycles * 2 * math.pi, cycles * math.pi / 2])
    torch.testing.assert_close(layer.frequencies, expected, check_dtype=False, rtol=1e-6, atol=1e-6)


@exact
@dimensions
def test_integer_frequencies_are_periodic_and_the_ladder_is_not(dim):
    x, coords = vectors(dim, 5)
    for axis in range(dim):
        moved = coords.clone()
        moved[..., axis] += PERIODS[axis]
        close(turn(rotary(dim, "integer"), x, moved), turn(rotary(dim, "integer"), x, coords))
        ladder = rotary(dim, "ladder")
        assert (turn(ladder, x, moved) - turn(ladder, x, coords)).abs().max() > 0.1


def test_phases_stay_exact_under_autocast():
    layer = Rotary(2, 16, multiplier=2048.0)
    coords = torch.rand(2, 50, 2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer.tables(coords)
    for table, expected in zip(inside, layer.tables(coords), strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table, expected)


def test_phases_of_float32_are_as_good_as_float32_allows():
    layer = Rotary(1, 16, multiplier=6400.0)
    coords = 40 * torch.rand(1, 1000, 1)
    cos, sin = layer.tables(coords)
    angles = coords.double() * layer.frequencies.double()
    # Rounding the frequency and the product, 2^-24 each of the phase, then the value itself.
    allowed = angles.abs() * 2**-23 + 2**-23
    assert ((cos - angles.cos()).abs() <= allowed).all()
    assert ((sin - angles.sin()).abs() <= allowed).all()


def test_bfloat16_coordinates_lose_their_own_rounding_and_no_more():
    layer = Rotary(2, 16, multiplier=2048.0)
    coords = torch.rand(2, 50, 2).bfloat16()
    for table, expected in zip(layer.tables(coords), layer.tables(coords.float()), strict=True):
        assert table.dtype == torch.float32
        assert torch.equal(table, expected)


def test_bfloat16_channels_are_turned_as_well_as_they_can_be():
    layer = Rotary(2, 16, multiplier=2048.0)
    x, coords = torch.randn(2, 3, 50, 16).bfloat16(), torch.rand(2, 50, 2)
    result = turn(layer, x, coords)
    assert result.dtype == torch.bfloat16
    expected = turn(layer, x.float(), coords)
    torch.testing.assert_close(result.float(), expected, rtol=2**-8, atol=1e-6)


def test_frequencies_are_not_saved_with_the_weights():
    assert not Rotary(2, 16).state_dict()


@pytest.mark.parametrize(("dim", "width"), [(1, 7), (2, 6), (2, 10), (3, 16), (3, 9)])
def test_refuses_widths_that_do_not_split_into_pairs_for_each_axis(dim, width):
    with pytest.raises(InputError, match=rf"multiple of {2 * dim} for {dim}-D rotary encoding, got {width}\."):
        Rotary(dim, width)


def test_refuses_integer_frequencies_without_a_period():
    with pytest.raises(InputError, match="periodic domain"):
        Rotary(1, 8, frequencies="integer")


def test_refuses_a_multiplier_that_would_break_the_period():
    with pytest.raises(InputError, match=r"whole multiplier .* got 1\.5"):
        Rotary(1, 8, multiplier=1.5, frequencies="integer", periods=(1.0,))
    assert Rotary(1, 8, multiplier=1.5).frequencies[0, 0] == 1.5


@exact
def test_tables_of_a_shared_grid_are_computed_once():
    layer, coords = rotary(2, "ladder"), torch.randn(1, 5, 2)
    shared, copied = layer.tables(coords.expand(3, -1, -1)), layer.tables(coords.repeat(3, 1, 1))
    for one, other in zip(shared, copied, strict=True):
        assert expanded(one)
        close(one, other)
