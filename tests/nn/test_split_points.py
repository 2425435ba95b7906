"""Layers on points that two processes hold together: the same numbers and gradients as on all points at once."""

import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.nn.attention import Attention
from oformer.nn.rotary import Rotary
from oformer.nn.sums import over_points, points_split
from tests.ranks import pair

WIDTH, POINTS, QUERIES = 8, 10, 6  # of the points of the second sample three are padding


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with pair(tmp_path_factory.mktemp("meeting")) as both:
        yield both


def attended(kind: str, norm: str, cross: bool, rank: int | None) -> dict[str, Tensor]:
    """Output, loss and gradients of one attention layer on all points, or on the half of a rank."""
    torch.manual_seed(0)
    layer = Attention(WIDTH, 2, kind, norm, Rotary(2, WIDTH, 4.0)).double()
    draw = torch.Generator().manual_seed(1)
    x, coords = (torch.randn(2, POINTS, n, generator=draw, dtype=torch.float64) for n in (WIDTH, 2))
    z, where = (torch.randn(2, QUERIES, n, generator=draw, dtype=torch.float64) for n in (WIDTH, 2))
    weights = torch.rand(2, POINTS, generator=draw, dtype=torch.float64)
    weights[1, 7:] = 0
    weights = weights / weights.sum(1, keepdim=True)
    areas = torch.full((2, QUERIES), 1 / QUERIES, dtype=torch.float64)
    if rank is not None:
        x, coords, weights, z, where, areas = (t.chunk(2, 1)[rank] for t in (x, coords, weights, z, where, areas))
    x = x.clone().requires_grad_()
    out = layer(z, where, areas, x, coords, weights) if cross else layer(x, coords, weights)
    measure = areas if cross else weights
    size = over_points((measure[:, :, None] * out.square()).sum((1, 2)))
    loss = size.sqrt().mean() + over_points((measure[:, :, None] * out).sum((1, 2))).sin().sum()
    loss.backward()
    gradients = {f"of {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "loss": loss.detach(), "x": x.grad, **gradients}


def attended_in_part(rank: int, *choice) -> dict[str, Tensor]:
    with points_split():
        return attended(*choice, rank)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("norm", ["points", "points-detached", "channels", "layernorm", "none"])
@pytest.mark.parametrize("kind", ["galerkin", "fourier"])
def test_attention_on_split_points_equals_attention_on_all(two, kind, norm, cross):
    whole = attended(kind, norm, cross, None)
    parts = two(attended_in_part, kind, norm, cross)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([part["out"] for part in parts], 1), whole["out"], **close)
    # Two ranks have two losses, so that each point feels both.
    torch.testing.assert_close(torch.cat([part["x"] for part in parts], 1), 2 * whole["x"], **close)
    for name in whole.keys() - {"out", "x"}:
        mean = (parts[0][name] + parts[1][name]) / 2
        torch.testing.assert_close(mean, whole[name], **close)
    assert whole["x"].abs().max() > 1e-6
    assert parts[0]["loss"] == parts[1]["loss"]


def bfloat16_sum(rank: int) -> float:
    with points_split():
        return over_points(torch.tensor(1.0 + rank / 128, dtype=torch.bfloat16)).item()


def test_sums_of_low_precision_keep_their_type_and_are_added_in_a_better_one(two):
    assert two(bfloat16_sum) == [2.0, 2.0]  # 2 + 1/128 is between two numbers of bfloat16, and ties go to the even one


def test_nothing_is_split_outside(float64):
    x = torch.randn(3)
    assert over_points(x) is x
    with points_split():
        pass
    assert over_points(x) is x


def test_softmax_attention_on_split_points_is_refused():
    layer = Attention(WIDTH, 1, "softmax", "none")
    x = torch.randn(1, 4, WIDTH)
    with points_split(), pytest.raises(InputError, match="linear attention, galerkin or fourier"):
        layer(x, torch.rand(1, 4, 2), torch.full((1, 4), 0.25))
