"""The shape checks themselves: the first wrong shape is found, whatever was right before."""

import dataclasses

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int
from torch import Tensor

from tests.typecheck import checked


@checked
def product(
    a: Float[Tensor, "rows inner"], b: Float[Tensor, "inner columns"], cut: int = 0
) -> Float[Tensor, "rows columns"]:
    return (a[..., :1] * b[:1].float())[cut:]


@checked
@dataclasses.dataclass
class Pair:
    values: Float[Tensor, "points channels"]
    codes: Int[Tensor, "points"]


def test_a_wrong_argument_or_result_is_found_after_right_ones():
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    for _ in range(2):
        assert product(a, b).shape == product(a, b=b).shape == (2, 4)
    for wrong in ((a, torch.ones(5, 4)), (a, b.long()), (a[0], b), (a, b, 1)):
        for _ in range(2):
            with pytest.raises(BeartypeCallHintViolation):
                product(*wrong)
    with pytest.raises(BeartypeCallHintViolation):
        product(cut=0, a=a, b=torch.ones(5, 4))


def test_a_wrong_field_is_found():
    values, codes = torch.ones(4, 2), torch.arange(4)
    Pair(values, codes)
    for wrong in (codes[:3], codes.float()):
        with pytest.raises(BeartypeCallHintViolation):
            Pair(values, wrong)


def test_the_library_is_checked():
    from oformer.fields import Field

    with pytest.raises(BeartypeCallHintViolation):
        Field(torch.ones(4, 2), torch.ones(1, 3, 1), torch.ones(4))
