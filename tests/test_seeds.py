"""Randomness from keys."""

import torch
from torch import Tensor

from oformer.seeds import numpy_generator, torch_generator


def test_randomness_is_a_function_of_the_key_alone():
    def draw(*arguments: int) -> Tensor:
        return torch.rand(8, generator=torch_generator(*arguments))

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    others = [
        draw(1, 2, 3),
        draw(2, 2, 3),
        draw(1, 3, 3),
        draw(1, 2, 4),
        draw(2, 1, 3),
        draw(3, 2, 1),
        draw(1, 2),
        draw(1, 2, 0),
    ]
    assert len({tuple(numbers.tolist()) for numbers in others}) == len(others)


def test_numpy_generators_too():
    def draw(*key: int) -> list[float]:
        return numpy_generator(*key).random(4).tolist()

    assert draw(0, 5) == draw(0, 5)
    assert len({tuple(draw(*key)) for key in ((0, 5), (5, 0), (0, 6), (1, 5))}) == 4
