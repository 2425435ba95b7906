"""Properties of samples beside their errors: they tell the worst samples from the others."""

import pytest
import torch

from oformer.data.dataset import PointDataset, View
from oformer.fields import Card, Field, Sample
from oformer.problems import Burgers
from oformer.zoo.traits import _ranks, traits


def test_traits_begin_with_the_property_that_tells_the_worst_samples_from_the_others():
    """Waves of 1 to 40 cycles and equal size; the error grows with the number of cycles."""
    spec = Burgers(points=256).spec
    x = torch.arange(256)[:, None] / 256
    waves = [torch.sin(2 * torch.pi * (cycles * x + 0.1))[None] for cycles in range(1, 41)]
    samples = [Sample(Field.of(x, wave), Field.of(x), torch.linspace(0, 1, 256)[None, :, None]) for wave in waves]
    dataset = PointDataset(samples, View(), spec=spec, card=Card("waves", inputs=("u",), targets=("v",)))
    by_name = {trait.name: trait for trait in traits(dataset, torch.arange(40.0))}
    steepest = by_name["steepest slope of u"]
    assert next(iter(by_name)) in ("steepest slope of u", "shortest length of u (range / steepest slope)")
    assert steepest.correlation == pytest.approx(1.0)
    assert by_name["shortest length of u (range / steepest slope)"].correlation == pytest.approx(-1.0, abs=0.01)
    assert steepest.worst == pytest.approx(2 * torch.pi * 40, rel=0.05)
    assert steepest.typical == pytest.approx(2 * torch.pi * 20, rel=0.05)
    assert not any("of v" in name for name in by_name)  # the same in all samples


def test_equal_properties_share_a_rank():
    assert _ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
