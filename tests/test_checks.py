"""Fields and samples that no model can use are refused, with what they should have been."""

import pytest
import torch

from oformer.checks import check_field, check_finite, check_sample
from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec, collate
from tests.test_fields import sample

SPEC = Spec(dim=2, in_times=2, in_channels=3, out_times=5, out_channels=2, query_channels=1)


def unchecked(kind, **parts):
    """What a person may build by mistake; the shape checks of the tests would not let it through."""
    made = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def test_check_field_accepts():
    check_field("input", sample().input, 2, 2, 3)
    check_field("input", collate([sample(2), sample(5)]).input, 2, 2, 3)


COORDS, VALUES, WEIGHTS = torch.rand(4, 2), torch.rand(2, 4, 3), torch.full((4,), 0.25)


@pytest.mark.parametrize(
    ("parts", "wanted", "message"),
    [
        (
            {"coords": COORDS[:0], "values": VALUES[:, :0], "weights": WEIGHTS[:0]},
            {},
            "at least one point in `u`",
        ),
        ({}, {"dim": 3}, r"`u.coords` of shape \(..., points, 3\), got \(4, 2\). This .* in 3 dimensions"),
        ({}, {"dim": 1}, "lives in 1 dimension;"),
        ({"coords": COORDS.T}, {"dim": 2}, r"looks transposed: give `coords.swapaxes\(-1, -2\)`, of shape \(4, 2\)"),
        (
            {"values": VALUES[:, :3]},
            {},
            r"as many values and weights as points in `u` \(4\), got 3 values and 4",
        ),
        ({"weights": WEIGHTS[:2]}, {}, "got 4 values and 2 weights"),
        ({}, {"times": 5}, r"5 frames in `u.values`, got 2 \(shape \(2, 4, 3\)\)"),
        ({}, {"channels": 1}, r"1 channels in `u.values`, got 3"),
        ({"coords": COORDS[:, 0]}, {}, r"`u` with coords \(..., points, dim\)"),
        ({"values": VALUES[0]}, {}, r"got \(4, 2\), \(4, 3\), \(4,\). Add the missing axis"),
        (
            {"coords": COORDS * torch.nan},
            {},
            r"finite numbers in `u.coords`, got 8 NaN or infinite values of 8",
        ),
        ({"values": VALUES / 0}, {}, r"finite numbers in `u.values`"),
        ({"weights": -WEIGHTS}, {}, "weights of `u` that are not negative"),
        ({"weights": WEIGHTS * 0}, {}, "not all zero"),
    ],
)
def test_check_field_refuses(parts, wanted, message):
    field = unchecked(Field, **({"coords": COORDS, "values": VALUES, "weights": WEIGHTS} | parts))
    with pytest.raises(InputError, match=message):
        check_field("u", field, **wanted)


def test_check_sample():
    good = sample()
    check_sample(good)
    check_sample(good, SPEC)
    check_sample(collate([good, sample(7, 9)]), SPEC)
    for change, message in [
        ({"target": good.target[:, :2]}, r"one target value per query point in `s` \(3\), got 2"),
        ({"target": good.target[:3]}, r"`s.target` of shape \(5, queries, 2\), got \(3, 3, 2\)"),
        ({"target": good.target[..., :1]}, r"`s.target` of shape \(5, queries, 2\)"),
        ({"target": good.target[0]}, r"`s.target` of shape \(..., times, queries, channels\), got \(3, 2\)"),
        ({"target": good.target * torch.inf}, r"finite numbers in `s.target`"),
        ({"query": sample(dim=1).query}, r"`s.query.coords` of shape \(..., points, 2\)"),
        ({"query": Field.of(good.query.coords)}, r"1 channels in `s.query.values`, got 0"),
        ({"input": sample(dim=3).input}, r"`s.input.coords`"),
    ]:
        parts = {"input": good.input, "query": good.query, "target": good.target} | change
        with pytest.raises(InputError, match=message):
            check_sample(unchecked(Sample, **parts, parameters={}, cells=None), SPEC, "s")


def test_check_finite():
    check_finite("x", torch.zeros(3))
    check_finite("x", torch.zeros(0))
    with pytest.raises(InputError, match="got 2 NaN or infinite values of 3"):
        check_finite("x", torch.tensor([1.0, torch.nan, torch.inf]))
