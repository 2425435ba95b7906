"""The superposition: exactly linear where it says so, in physical units, and nonlinear elsewhere."""

import dataclasses

import pytest
import torch

from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec
from oformer.models import Normalization, Operator, SuperpositionConfig

pytestmark = pytest.mark.usefixtures("float64")
SPEC = Spec(dim=2, in_times=1, in_channels=3, out_times=1, out_channels=2)
MARCH = dataclasses.replace(SPEC, in_times=2, out_times=4)
CONFIG = SuperpositionConfig(linear=(2, 0), width=8, depth=2, heads=2, modes=2)


def sample(spec: Spec, seed: int) -> Sample:
    """Values far from zero in the mean, so that a shift would show."""
    generator = torch.Generator().manual_seed(seed)
    coords, queries = torch.rand(9, 2, generator=generator), torch.rand(5, 2, generator=generator)
    values = 5 + torch.randn(spec.in_times, 9, spec.in_channels, generator=generator)
    target = 3 + torch.randn(spec.out_times, 5, spec.out_channels, generator=generator)
    return Sample(Field.of(coords, values), Field.of(queries), target)


@pytest.fixture(params=[SPEC, MARCH], ids=["steady", "in time"])
def operator(request) -> Operator:
    model = CONFIG.build(request.param)
    return Operator(model, Normalization()).fit([sample(request.param, n) for n in range(3)]).eval()


def answer(operator: Operator, values: torch.Tensor) -> torch.Tensor:
    one = sample(operator.spec, 7)
    with torch.no_grad():
        return operator(one.input.with_values(values).batched(), one.query.batched())


def test_answers_superpose_in_the_linear_channels_and_in_no_other(operator):
    spec = operator.spec
    f, g, a = (torch.randn(spec.in_times, 9, 3) for _ in range(3))

    def given(linear: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack([linear[..., 0], other[..., 1], linear[..., 2]], -1)

    parts = 2.5 * answer(operator, given(f, a)) - 0.7 * answer(operator, given(g, a))
    torch.testing.assert_close(answer(operator, given(2.5 * f - 0.7 * g, a)), parts, rtol=1e-10, atol=1e-10)
    assert answer(operator, given(0 * f, a)).abs().max() == 0
    one, two = answer(operator, given(f, a)), answer(operator, given(f, a + 0.5))
    assert (one - two).abs().max() > 1e-6 * one.abs().max()
    both = answer(operator, given(f, 2 * a))
    assert (both - 2 * one).abs().max() > 1e-3 * one.abs().max()


def test_linear_channels_and_targets_are_scaled_by_their_root_mean_square(operator):
    values = torch.cat([sample(operator.spec, n).input.values.flatten(0, 1) for n in range(3)])
    assert operator.input_scale.shift[[0, 2]].tolist() == [0, 0]
    assert operator.input_scale.shift[1] == pytest.approx(float(values[:, 1].mean()))
    expected = values.square().mean(0).sqrt()[[0, 2]]
    torch.testing.assert_close(operator.input_scale.scale[[0, 2]], expected, rtol=1e-6, atol=0)
    assert operator.target_scale.shift.tolist() == [0, 0]


def test_a_solution_operator_is_learned_where_an_affine_map_would_do():
    """u = a(x₀) f smoothed: the kernel is found, and holds for sources a thousand times as strong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, 12)[:, None]
    kernel = torch.exp(-((x - x.T) ** 2) / 0.1) / 12

    def drawn(count: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.rand(count, 1, 1, generator=generator).expand(count, 12, 1)
        f = scale * torch.randn(count, 12, 1, generator=generator)
        return torch.cat([a, f], -1), (1 + a) * (kernel @ f)

    spec = Spec(dim=1, in_times=1, in_channels=2, out_times=1, out_channels=1)
    model = SuperpositionConfig(linear=(1,), width=16, depth=1, heads=1, modes=4).build(spec)
    steps = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(300):
        values, target = drawn(16, 1.0)
        field = Field.of(x.expand(16, 12, 1), values[:, None])
        error = (model(field, Field.of(field.coords))[:, 0] - target).norm() / target.norm()
        steps.zero_grad()
        error.backward()
        steps.step()
    values, target = drawn(16, 1e3)
    with torch.no_grad():
        field = Field.of(x.expand(16, 12, 1), values[:, None])
        assert (model(field, Field.of(field.coords))[:, 0] - target).norm() < 0.1 * target.norm()


@pytest.mark.parametrize(
    ("spec", "config", "said"),
    [
        (SPEC, dataclasses.replace(CONFIG, linear=(3,)), r"channels from 0 to 2, got \(3,\)"),
        (dataclasses.replace(SPEC, in_categories=3), CONFIG, "without codes of categories"),
    ],
)
def test_what_it_cannot_do_it_refuses_with_a_sentence(spec, config, said):
    with pytest.raises(InputError, match=said):
        config.build(spec)


def test_linear_names_different_channels():
    with pytest.raises(InputError, match="different input channels"):
        SuperpositionConfig(linear=())
    with pytest.raises(InputError, match="different input channels"):
        SuperpositionConfig(linear=(1, 1))
