"""Scores of a split against numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.data.dataset import PointDataset
from oformer.fields import Field
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.oformer import Propagator
from oformer.training.evaluate import errors, evaluate

COUNTS = (9, 5, 7, 6)


class Said(Operator):
    """Answers with its input, which holds what it is to say."""

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        return input.values


def case(unit: float) -> tuple[Operator, PointDataset, list[np.ndarray], list[np.ndarray]]:
    """Predictions and targets of three steps and two channels at points that differ; one channel in another unit."""
    random = np.random.default_rng(0)
    scale = np.array([unit, 1.0])
    said, true = ([scale * random.standard_normal((3, n, 2)) for n in COUNTS] for _ in range(2))
    data = PointDataset.from_arrays([random.random((n, 2)) for n in COUNTS], said, true)
    model = OFormerConfig(propagator=Propagator(depth=1)).build(data.spec)
    return Said(model, Normalization(input="none", target="none", coords="as-is")), data, said, true


@pytest.mark.parametrize("batch", [1, 3])
def test_errors_are_those_of_numpy(batch):
    operator, data, said, true = case(1.0)
    found = errors(operator, data, batch)
    size = np.mean([(t**2).mean((0, 1)) for t in true], 0)
    both = list(zip(said, true, strict=True))
    relative = [np.sqrt((((p - t) ** 2) / size).sum() / ((t**2) / size).sum()) for p, t in both]
    by_step = [np.sqrt((((p - t) ** 2) / size).sum((1, 2)) / ((t**2) / size).sum((1, 2))) for p, t in both]
    np.testing.assert_allclose(found.relative, relative, rtol=1e-5)
    np.testing.assert_allclose(found.by_step, np.array(by_step), rtol=1e-5)
    np.testing.assert_allclose(found.squared, [((p - t) ** 2).mean((0, 1)) for p, t in both], rtol=1e-5)
    scores = evaluate(operator, data, batch)
    assert scores.error == pytest.approx(np.mean(relative), rel=1e-5)
    assert (scores.worst, scores.worst_sample) == (pytest.approx(max(relative), rel=1e-5), int(np.argmax(relative)))


def test_the_unit_of_a_channel_does_not_matter():
    """Pressure in pascals beside density in kilograms: neither may hide the other."""
    plain, scaled = (errors(*case(unit)[:2]) for unit in (1.0, 1e5))
    torch.testing.assert_close(plain.relative, scaled.relative, rtol=1e-5, atol=0)
    torch.testing.assert_close(plain.by_step, scaled.by_step, rtol=1e-5, atol=0)
    assert float(scaled.squared[0, 0]) == pytest.approx(1e10 * float(plain.squared[0, 0]), rel=1e-5)
