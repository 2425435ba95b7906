"""Sensors: which points they are, and what each of them weighs."""

import pytest
import torch

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.playground.scenes.base import Known, Sensors


def sensors_on_a_line(**marks) -> Field:
    known = Known(Field.of(torch.arange(8.0)[:, None] / 8, torch.arange(8.0)[None, :, None]), torch.arange(0, 8, 2))
    return Sensors(**marks).of(known, Spec(1, 1, 1, 1, 1, grid=(4,), periods=(1.0,)))


def test_sensors_are_chosen_erased_and_added():
    assert sensors_on_a_line().values.flatten().tolist() == [0, 2, 4, 6]
    assert sensors_on_a_line(erased=((0.5, 0.2),)).values.flatten().tolist() == [0, 2, 6]
    added = sensors_on_a_line(added=((0.4,), (0.41,)))
    assert added.values.flatten().tolist() == [0, 2, 3, 4, 6]
    # Weights are half-gaps around the period: unequal once the points are.
    torch.testing.assert_close(added.weights, torch.tensor([2.0, 1.5, 1.0, 1.5, 2.0]) / 8)
    assert sensors_on_a_line(stride=2).values.flatten().tolist() == [0, 4]
    assert sensors_on_a_line(stride=2, added=((0.3,),)).values.flatten().tolist() == [0, 2, 4]
    half = sensors_on_a_line(share=0.5, seed=3)
    assert half.points == 2
    torch.testing.assert_close(half.coords, sensors_on_a_line(share=0.5, seed=3).coords)
    with pytest.raises(InputError, match="at least one sensor"):
        sensors_on_a_line(erased=((0.5, 5.0),))


def test_sensors_of_the_plane_answer_for_those_that_are_missing():
    """Each weighs its cell; where all are there, or a stride leaves every other one, all weigh the same."""
    known = Known(
        Field.of(periodic_grid((4, 4), (1.0, 1.0)).float(), torch.arange(16.0)[None, :, None]), torch.arange(16)
    )
    spec = Spec(2, 1, 1, 1, 1, grid=(4, 4), periods=(1.0, 1.0))
    for sensors, count in ((Sensors(), 16), (Sensors(stride=2), 4)):
        torch.testing.assert_close(sensors.of(known, spec).weights, torch.full((count,), 1 / count))
    erased = Sensors(erased=((0.0, 0.0, 0.1),)).of(known, spec)
    nearest = torch.isin(erased.values.flatten(), torch.tensor([1.0, 3.0, 4.0, 12.0]))  # two of them across the period
    torch.testing.assert_close(erased.weights * 16, torch.where(nearest, 1.25, 1.0))
    few = Sensors(share=0.4, seed=1).of(known, spec)
    assert few.points == 6
    assert len(set(few.weights.tolist())) > 1
    assert float(few.weights.sum()) == pytest.approx(1)
