"""Errors between fields against numpy, sample by sample without padding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.metrics import relative_l2, squared

pytestmark = pytest.mark.usefixtures("float64")

COUNTS = (5, 3, 7)  # valid points; the rest is padding


def fields(garbage: float = 1e6) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions and targets of four steps and two channels, with anything at all in the padding."""
    prediction, target, weights = torch.randn(3, 4, 7, 2), torch.randn(3, 4, 7, 2), torch.rand(3, 7) + 0.1
    for n, count in enumerate(COUNTS):
        weights[n, count:] = 0
        prediction[n, :, count:] = garbage
        target[n, :, count:] = -garbage
    return prediction, target, weights / weights.sum(1, keepdim=True)


def each(prediction: Tensor, target: Tensor, weights: Tensor):
    """The valid part of each sample, in numpy; weights with axes for times and channels."""
    for p, t, w, count in zip(prediction, target, weights, COUNTS, strict=True):
        yield p[:, :count].numpy(), t[:, :count].numpy(), w[:count].numpy()[None, :, None]


def same(actual: Tensor, expected: list) -> None:
    np.testing.assert_allclose(actual.numpy(), np.array(expected), rtol=1e-12)


def test_squared_is_the_weighted_mean_square():
    prediction, target, weights = fields()
    same(squared(prediction, weights), [(w * p**2).sum(1) for p, _, w in each(prediction, target, weights)])


def test_relative_l2_is_the_ratio_of_two_norms():
    data = fields()
    same(relative_l2(*data), [np.sqrt((w * (p - t) ** 2).sum() / (w * t**2).sum()) for p, t, w in each(*data)])


def test_with_equal_weights_it_is_the_plain_ratio_of_vectors():
    prediction, target = torch.randn(2, 4, 6, 2), torch.randn(2, 4, 6, 2)
    expected = [
        np.linalg.norm(p - t) / np.linalg.norm(t) for p, t in zip(prediction.numpy(), target.numpy(), strict=True)
    ]
    same(relative_l2(prediction, target, torch.full((2, 6), 1 / 6)), expected)


def test_a_perfect_prediction_has_no_error():
    _, target, weights = fields()
    assert relative_l2(target, target, weights).abs().max() == 0


def test_relative_errors_do_not_depend_on_units_and_zero_is_all_wrong():
    prediction, target, weights = fields(garbage=0.0)
    expected = relative_l2(prediction, target, weights)
    torch.testing.assert_close(relative_l2(1e-9 * prediction, 1e-9 * target, weights), expected, rtol=1e-12, atol=0)
    same(relative_l2(torch.zeros_like(target), target, weights), [1.0, 1.0, 1.0])


def test_a_target_of_zero_gives_no_nan():
    zero, weights = torch.zeros(1, 2, 3, 1), torch.full((1, 3), 1 / 3)
    assert relative_l2(zero, zero, weights).abs().max() == 0
    assert relative_l2(zero + 1, zero, weights).min() > 1e100
