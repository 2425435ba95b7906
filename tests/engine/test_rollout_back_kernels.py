"""The way back of a rollout against automatic differentiation. Without a GPU, Triton's interpreter runs the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

kernels = pytest.importorskip("oformer.engine.kernels.rollout_back_kernels", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rollout(z: Tensor, step, read, bias: Tensor, times: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, normalized latents and their scale, plainly."""

    def normalized(z: Tensor) -> Tensor:
        return F.layer_norm(z, z.shape[1:])

    states = [z]
    for _ in range(times):
        states.append(states[-1] + step.plainly(normalized(states[-1])))
    values = [read.plainly(normalized(z)) + bias for z in states[1:]]
    scale = [(z.var(1, unbiased=False) + 1e-5).rsqrt() for z in states]
    return torch.stack(values), torch.stack([normalized(z) for z in states]), torch.stack(scale)


def case(rows: int, width: int, layers: int, read: tuple[int, int], periods: tuple[int, int], kind: str, channels: int):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()

    def scaled(out: int, into: int) -> Tensor:
        return (normal(out, into).detach() / into**0.5).requires_grad_()

    inner, outer = read
    step = kernels.Chain(tuple(scaled(width, width) for _ in range(layers)), normal(periods[0], width), "gelu")
    reads = (scaled(inner, width), scaled(outer, inner), scaled(channels, outer))
    return normal(rows, width), step, kernels.Chain(reads, normal(periods[1], inner), kind), normal(channels)


CASES = {
    "a shared grid": ((96, 24, 3, (20, 12), (32, 1), "gelu", 1), 1000),
    "many samples on a grid": ((96, 24, 3, (20, 12), (16, 1), "gelu", 2), 1000),
    "in parts of whole periods": ((96, 24, 3, (20, 12), (16, 16), "gelu", 1), 40),
    "in parts of a period": ((96, 16, 3, (20, 12), (48, 1), "gelu", 2), 20),
    "own rows, four layers, relu": ((70, 160, 4, (136, 12), (70, 70), "relu", 4), 33),
    "two layers": ((33, 8, 2, (6, 5), (1, 1), "gelu", 3), 20),
}


def errors(sizes: tuple, dtype: torch.dtype, part: int = 1000) -> list[float]:
    """Of all gradients, relative to the largest, against automatic differentiation in float32."""
    z, step, read, bias = case(*sizes)
    values, n, scale = rollout(z, step, read, bias, times=3)
    of_values = torch.randn_like(values)
    wanted = [z, *step.weights, step.drive, *read.weights, read.drive]
    expected = torch.autograd.grad((values * of_values).sum(), wanted)
    with torch.no_grad():
        found = kernels.way_back(n.detach().to(dtype), scale.detach(), step, read, of_values, part)
    got = [found.start, *found.step, found.drive, *found.read, found.read_drive]
    assert all(
        mine.shape == theirs.shape and mine.dtype == torch.float32 for mine, theirs in zip(got, expected, strict=True)
    )
    return [
        ((mine - theirs).abs().max() / theirs.abs().max()).item() for mine, theirs in zip(got, expected, strict=True)
    ]


@pytest.mark.parametrize(("sizes", "part"), CASES.values(), ids=list(CASES))
def test_gradients_are_those_of_automatic_differentiation(sizes, part):
    assert max(errors(sizes, torch.float32, part)) < 1e-5


def test_the_faster_gelu_is_near_enough_for_half_precision(monkeypatch):
    monkeypatch.setattr(kernels, "_EXACT", None)
    error = max(errors(CASES["a shared grid"][0], torch.float32))
    assert 1e-6 < error < 5e-4  # and not the exact one
    assert max(errors(CASES["a shared grid"][0], torch.bfloat16)) < 3e-2


def test_parts_hold_whole_periods_of_a_drive_or_divide_one():
    for rows, period in ((65_536, 4096), (65_536, 65_536), (60_000, 20_000), (40_000, 40_000), (900, 300), (5, 1)):
        part = kernels._part(rows, (period, 1), 16_384)
        assert 1 <= part <= min(rows, 16_384)
        assert period in (1, rows) or part % period == 0 or period % part == 0
