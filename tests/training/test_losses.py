"""Losses against numpy and plain loops."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Batch, Field, Spec
from oformer.models import Normalization, Operator, OperatorModel
from oformer.training.losses import Loss, Region, difference

pytestmark = pytest.mark.usefixtures("float64")

RELATIVE = ["relative-sequence", "relative-step"]


class Fixed(OperatorModel):
    """Says what it was told to say."""

    config = None  # pyright: ignore

    def __init__(self, spec: Spec, says: Tensor):
        super().__init__()
        self.spec, self.says = spec, nn.Parameter(says)

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        return self.says[:, :times]


def problem(
    shape: tuple[int, int, int, int], grid: tuple[int, ...] | None = None, **normalization
) -> tuple[Operator, Batch]:
    """An operator whose answer and target are random, of shape (batch, times, points, channels)."""
    batch, times, points, channels = shape
    dim = len(grid) if grid else 2
    spec = Spec(dim=dim, in_times=1, in_channels=1, out_times=times, out_channels=channels, grid=grid)
    chosen = Normalization(**{"input": "none", "target": "none", **normalization})
    coords = torch.rand(batch, points, dim)
    data = Batch(Field.of(coords, torch.randn(batch, 1, points, 1)), Field.of(coords), torch.randn(shape))
    return Operator(Fixed(spec, torch.randn(shape)), chosen), data


def sides(operator: Operator, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    return operator.model.says.detach().numpy(), batch.target.numpy()


def value(loss: Loss, operator: Operator, batch: Batch, times: int | None = None) -> float:
    return loss(operator, batch, times or operator.spec.out_times)[0].item()


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.3])
def test_per_sequence_it_is_the_mean_ratio_of_norms(epsilon):
    operator, batch = problem((3, 4, 6, 2))
    p, t = sides(operator, batch)
    error, size = ((p - t) ** 2).mean((1, 2, 3)), (t**2).mean((1, 2, 3))
    expected = np.sqrt(error / (size + epsilon)).mean()
    assert value(Loss("relative-sequence", epsilon=epsilon), operator, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.3])
def test_per_step_each_step_counts_the_same(epsilon):
    operator, batch = problem((3, 4, 6, 1))
    batch.target[:, 1] *= 1e-3
    operator.model.says.data[:, 1] *= 1e-3
    p, t = sides(operator, batch)
    expected = np.sqrt(((p - t) ** 2).mean(2) / ((t**2).mean(2) + epsilon)).mean()
    assert value(Loss("relative-step", epsilon=epsilon), operator, batch) == pytest.approx(expected, rel=1e-12)
    assert value(Loss("relative-sequence", epsilon=epsilon), operator, batch) != pytest.approx(expected, rel=1e-3)


def test_squares_are_summed_over_channels_and_averaged_over_the_rest():
    operator, batch = problem((3, 4, 6, 2))
    p, t = sides(operator, batch)
    expected = ((p - t) ** 2).sum(-1).mean()
    assert value(Loss("squared"), operator, batch) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [*RELATIVE, "squared"])
def test_weights_count_and_padding_is_ignored(kind):
    operator, batch = problem((2, 3, 6, 1))
    weights = torch.rand(2, 6)
    weights[1, 4:] = 0
    weights = weights / weights.sum(1, keepdim=True)
    batch = dataclasses.replace(batch, query=dataclasses.replace(batch.query, weights=weights))
    p, t = sides(operator, batch)
    w = weights.numpy()[:, None, :, None]
    error, size = (w * (p - t) ** 2).sum((2, 3)), (w * t**2).sum((2, 3))
    expected = {
        "relative-sequence": np.sqrt(error.sum(1) / size.sum(1)).mean(),
        "relative-step": np.sqrt(error / size).mean(),
        "squared": error.mean(),
    }[kind]
    assert value(Loss(kind, epsilon=0.0), operator, batch) == pytest.approx(expected, rel=1e-12)
    batch.target[1, :, 4:] = 1e9
    operator.model.says.data[1, :, 4:] = -1e9
    assert value(Loss(kind, epsilon=0.0), operator, batch) == pytest.approx(expected, rel=1e-12)


def test_only_the_first_steps_are_compared_where_the_horizon_is_short():
    operator, batch = problem((3, 4, 6, 1))
    p, t = (side[:, :2] for side in sides(operator, batch))
    expected = np.sqrt(((p - t) ** 2).sum((1, 2, 3)) / (t**2).sum((1, 2, 3))).mean()
    assert value(Loss(epsilon=0.0), operator, batch, times=2) == pytest.approx(expected, rel=1e-12)


def test_the_scale_is_the_one_that_is_asked_for():
    operator, batch = problem((3, 2, 6, 1), target="channel")
    operator.target_scale.shift.fill_(5.0)
    operator.target_scale.scale.fill_(0.5)
    p, t = sides(operator, batch)
    normalized, physical = (p - (t - 5) / 0.5), (p * 0.5 + 5 - t)
    assert value(Loss("squared", "normalized"), operator, batch) == pytest.approx((normalized**2).mean(), rel=1e-12)
    assert value(Loss("squared", "physical"), operator, batch) == pytest.approx((physical**2).mean(), rel=1e-12)


def by_loop(u: np.ndarray, axis: int, boundary: str) -> np.ndarray:
    """The central difference of an array (rows[, columns]) along one axis of unit length, point by point."""
    n, result = u.shape[axis], np.zeros_like(u)
    for place in np.ndindex(u.shape):

        def at(i: int, place=place) -> float:
            if not 0 <= i < n and boundary == "zero":
                return 0.0
            return u[(*place[:axis], i % n, *place[axis + 1 :])]

        result[place] = (at(place[axis] + 1) - at(place[axis] - 1)) / (2 / n)
    return result


@pytest.mark.parametrize("boundary", ["periodic", "zero"])
@pytest.mark.parametrize("shape", [(7,), (4, 5)], ids=str)
def test_differences_are_central_with_the_boundary_that_is_asked(boundary, shape):
    values = torch.randn(shape)
    for axis, n in enumerate(shape):
        np.testing.assert_allclose(
            difference(values, axis, n, boundary).numpy(), by_loop(values.numpy(), axis, boundary), rtol=1e-12
        )


def test_differences_are_those_of_a_sine():
    n = 2000
    x = torch.arange(n) / n
    slope = difference(torch.sin(2 * np.pi * x), 0, n, "periodic")
    torch.testing.assert_close(slope, 2 * np.pi * torch.cos(2 * np.pi * x), rtol=0, atol=1e-4)


def derivative_by_loop(p: np.ndarray, t: np.ndarray, grid: tuple[int, ...], loss: Loss) -> float:
    """The derivative term for one channel, written out with loops over samples, steps and rows."""
    batch, times = p.shape[:2]
    boundary, epsilon = loss.derivative_boundary, loss.epsilon
    total = 0.0
    for axis in range(len(grid)):
        e, y = np.zeros((batch, times, *grid)), np.zeros((batch, times, *grid))
        for b in range(batch):
            for s in range(times):
                target = by_loop(t[b, s, :, 0].reshape(grid), axis, boundary)
                e[b, s] = by_loop(p[b, s, :, 0].reshape(grid), axis, boundary) - target
                y[b, s] = target
        ratios = []
        for b in range(batch):
            if loss.kind == "relative-sequence" and not loss.derivative_rows:
                ratios.append(np.sqrt((e[b] ** 2).mean() / ((y[b] ** 2).mean() + epsilon)))
                continue
            for s in range(times):
                rows = range(grid[0]) if loss.derivative_rows and len(grid) == 2 else [slice(None)]
                for row in rows:
                    ratios.append(np.sqrt((e[b, s, row] ** 2).mean() / ((y[b, s, row] ** 2).mean() + epsilon)))
        total += np.mean(ratios)
    return total


@pytest.mark.parametrize("kind", RELATIVE)
@pytest.mark.parametrize("boundary", ["periodic", "zero"])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("grid", [(7,), (4, 5)], ids=str)
def test_derivative_terms_equal_loops(kind, boundary, rows, grid):
    loss = Loss(kind, epsilon=0.1, derivative=0.25, derivative_boundary=boundary, derivative_rows=rows)
    operator, batch = problem((2, 3, int(np.prod(grid)), 1), grid)
    p, t = sides(operator, batch)
    total, parts = loss(operator, batch, 3)
    expected = derivative_by_loop(p, t, grid, loss)
    assert parts["derivative"].item() == pytest.approx(expected, rel=1e-10)
    plain = value(dataclasses.replace(loss, derivative=0.0), operator, batch)
    assert parts["error"].item() == pytest.approx(plain, rel=1e-12)
    assert total.item() == pytest.approx(plain + 0.25 * expected, rel=1e-10)


def test_derivative_of_squares_is_their_mean():
    operator, batch = problem((2, 3, 20, 1), (4, 5))
    p, t = sides(operator, batch)
    _, parts = Loss("squared", derivative=1.0)(operator, batch, 3)
    expected = sum(
        np.mean([by_loop((p - t)[b, s, :, 0].reshape(4, 5), axis, "periodic") ** 2 for b in range(2) for s in range(3)])
        for axis in range(2)
    )
    assert parts["derivative"].item() == pytest.approx(expected, rel=1e-10)


def test_parts_carry_no_gradient_and_the_derivative_is_only_there_where_asked():
    operator, batch = problem((2, 3, 20, 1), (4, 5))
    total, parts = Loss()(operator, batch, 3)
    assert total.requires_grad
    assert set(parts) == {"error"}
    _, parts = Loss(derivative=0.1)(operator, batch, 3)
    assert set(parts) == {"error", "derivative"}
    assert not any(part.requires_grad for part in parts.values())


@pytest.mark.parametrize("kind", [*RELATIVE, "squared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_error_has_a_finite_gradient(kind, dtype):
    operator, batch = problem((2, 3, 20, 1), (4, 5))
    operator, batch = operator.to(dtype), batch.to(dtype)
    operator.model.says.data.copy_(batch.target)
    total, _ = Loss(kind, derivative=0.1, derivative_rows=True)(operator, batch, 3)
    total.backward()
    assert total.item() < 1e-15
    assert operator.model.says.grad.abs().max() == 0


def test_one_perfect_sample_does_not_disturb_the_gradient_of_another():
    operator, batch = problem((2, 3, 20, 1), (4, 5))
    operator.model.says.data[0] = batch.target[0]
    Loss(derivative=0.1)(operator, batch, 3)[0].backward()
    gradient = operator.model.says.grad
    assert gradient[0].abs().max() == 0
    assert torch.isfinite(gradient).all()
    assert gradient[1].abs().max() > 1e-3


def test_gradients_of_the_loss_are_right():
    operator, batch = problem((2, 2, 12, 1), (3, 4))
    says = operator.model.says.detach().clone().requires_grad_()
    del operator.model.says  # a parameter cannot be replaced by a tensor of the outside, a plain attribute can

    def at(says: Tensor) -> Tensor:
        operator.model.says = says
        return Loss("relative-step", epsilon=1e-2, derivative=0.1, derivative_rows=True)(operator, batch, 2)[0]

    assert torch.autograd.gradcheck(at, says)


@pytest.mark.parametrize(("grid", "points"), [(None, 20), ((4, 5), 19)])
def test_refuses_derivatives_off_the_grid(grid, points):
    operator, batch = problem((2, 3, points, 1), grid)
    with pytest.raises(
        InputError, match=rf"whole regular grid .* got {points} points\. Set training\.loss\.derivative"
    ):
        Loss(derivative=0.1)(operator, batch, 3)
    assert value(Loss(), operator, batch) > 0


@pytest.mark.parametrize("products", ["physical", "normalized"])
@pytest.mark.parametrize("density", [2, None])
def test_the_momentum_counts_again_in_its_region(products, density):
    """Against numpy, point by point; the scales are those of channels."""
    operator, batch = problem((3, 4, 30, 4))
    shift, scale = torch.tensor([1.0, -2.0, 5.0, 0.0]), torch.tensor([2.0, 3.0, 0.5, 7.0])
    operator.target_scale.shift.copy_(shift)
    operator.target_scale.scale.copy_(scale)
    region = Region(box=(0.2, 0.9, -0.5, 0.6), weight=0.7, density=density, products=products)
    p, t = operator.model.says.detach().numpy(), ((batch.target - shift) / scale).numpy()
    x, y = batch.query.coords.unbind(-1)
    near = ((x > 0.2) & (x < 0.9) & (y < 0.6)).numpy()
    assert 0 < near.sum() < near.size
    if products == "physical":
        p, t = p * scale.numpy() + shift.numpy(), t * scale.numpy() + shift.numpy()
    unit = scale[:2].numpy() * (1.0 if density is None else 5.0) if products == "physical" else np.ones(2)
    factor = [(1.0 if density is None else v[..., 2:3]) for v in (p, t)]
    error = ((p[..., :2] * factor[0] - t[..., :2] * factor[1]) / unit) ** 2
    expected = np.mean([error[b][:, near[b]].mean() for b in range(3)])
    without, with_region = (value(Loss("squared", region=r), operator, batch) for r in (None, region))
    assert with_region - without == pytest.approx(0.7 * expected, rel=1e-10)


def test_a_region_needs_the_unit_scale():
    with pytest.raises(InputError, match="`normalized` for a loss with a region"):
        Loss(scale="physical", region=Region(box=(0, 1, 0, 1)))


@pytest.mark.parametrize("kind", [*RELATIVE, "squared"])
def test_by_points_a_sample_of_more_points_weighs_more(kind):
    operator, batch = problem((3, 2, 6, 2))
    weights = torch.zeros(3, 6)
    for i, n in enumerate((6, 3, 1)):
        weights[i, :n] = 1 / n
    batch = dataclasses.replace(batch, query=dataclasses.replace(batch.query, weights=weights))
    found = value(Loss(kind, by_points=True), operator, batch)
    each = [value(Loss(kind), *sample(operator, batch, i)) for i in range(3)]
    assert found == pytest.approx((6 * each[0] + 3 * each[1] + each[2]) / 10, rel=1e-12)
    if kind == "squared":  # the mean over all points of the batch
        error = (operator.model.says.detach() - batch.target).square().sum(-1).mean(1)
        assert found == pytest.approx(float(error[weights > 0].mean()), rel=1e-12)


def sample(operator: Operator, batch: Batch, index: int) -> tuple[Operator, Batch]:
    """The one of a batch, and an operator that says the same of it."""
    one = slice(index, index + 1)
    model = Fixed(operator.spec, operator.model.says[one].detach())
    return Operator(model, operator.normalization), batch.samples(one)
