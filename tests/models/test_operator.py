"""The operator: physical units outside, unit scale inside, statistics from the training samples."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.fields import Field, Sample, Spec, collate
from oformer.models import Normalization, OFormerConfig, Operator, OperatorModel
from oformer.models.oformer import Encoder, Query
from oformer.models.outside import _extremes
from oformer.nn.shared_grids import expanded

exact = pytest.mark.usefixtures("float64")


class Echo(OperatorModel):
    """Answers the first channels of the first frame of its input, at the same points; keeps what it was given."""

    config = None  # pyright: ignore

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        self.gain = nn.Parameter(torch.ones(()))

    @property
    def queries_independent(self) -> bool:
        return True

    def parts(self) -> dict[str, list[nn.Parameter]]:
        return {"all": [self.gain]}

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        self.given = input, query
        first = input.values[:, :1, :, : self.spec.out_channels]
        return self.gain * first.expand(-1, times or self.spec.out_times, -1, -1)


SPEC = Spec(dim=2, in_times=2, in_channels=3, out_times=2, out_channels=2)


def sample(
    spec: Spec = SPEC, points: int = 6, offset: float = 0.0, spread: float = 1.0, coords: Tensor | None = None
) -> Sample:
    values = offset + spread * torch.randn(spec.in_times, points, spec.in_channels) * (
        1 + torch.arange(spec.in_channels)
    )
    target = offset + 3 + spread * torch.randn(spec.out_times, points, spec.out_channels)
    if spec.in_categories:
        values[..., -1] = torch.arange(points) % spec.in_categories
    coords = torch.rand(points, spec.dim) if coords is None else coords
    return Sample(Field.of(coords, values), Field.of(coords), target)


def fitted(samples: list[Sample], spec: Spec = SPEC, **normalization) -> Operator:
    return Operator(Echo(spec), Normalization(**normalization)).fit(samples)


def stacked(arrays: list[Tensor]) -> np.ndarray:
    """All frames and points of all samples, one row each."""
    return np.concatenate([a.numpy().reshape(-1, a.shape[-1]) for a in arrays])


def same(actual: Tensor, expected: np.ndarray | float) -> None:
    np.testing.assert_allclose(actual.numpy(), np.broadcast_to(expected, actual.shape), rtol=1e-12, atol=1e-13)


RAGGED = (6, 9, 4)


@exact
def test_channel_statistics_are_those_of_all_points_together():
    samples = [sample(points=n, offset=2.0) for n in RAGGED]
    operator = fitted(samples, input="channel", target="channel")
    inputs, targets = stacked([s.input.values for s in samples]), stacked([s.target for s in samples])
    same(operator.input_scale.shift, inputs.mean(0))
    same(operator.input_scale.scale, inputs.std(0))
    same(operator.target_scale.shift, targets.mean(0))
    same(operator.target_scale.scale, targets.std(0))
    assert np.ptp(inputs.std(0)) > 0.5  # the channels do differ


@exact
def test_a_scalar_is_shared_by_all_channels():
    samples = [sample(points=n, offset=2.0) for n in RAGGED]
    for s in samples:
        s.input.values[..., 0] += 10.0
    operator = fitted(samples, input="scalar", target="scalar")
    inputs, targets = stacked([s.input.values for s in samples]), stacked([s.target for s in samples])
    same(operator.input_scale.shift, inputs.mean())
    same(operator.input_scale.scale, inputs.std())
    same(operator.target_scale.shift, targets.mean())
    same(operator.target_scale.scale, targets.std())


@exact
def test_largest_magnitude_scales_without_a_shift():
    samples = [sample(points=n, offset=-2.0) for n in RAGGED]
    operator = fitted(samples, input="max-abs", target="max-abs")
    same(operator.input_scale.shift, 0.0)
    same(operator.input_scale.scale, np.abs(stacked([s.input.values for s in samples])).max(0))
    same(operator.target_scale.scale, np.abs(stacked([s.target for s in samples])).max(0))
    largest = max(float(operator.input_scale(s.input.values[None], s.input.coords[None]).abs().max()) for s in samples)
    assert largest == pytest.approx(1.0)


GRID = torch.stack(torch.meshgrid(torch.linspace(-1, 3, 3), torch.linspace(2, 3, 2), indexing="ij"), -1).reshape(-1, 2)
ON_GRID = dataclasses.replace(SPEC, grid=(3, 2))


@exact
def test_pointwise_statistics_are_those_of_each_grid_point():
    grid = GRID.double()
    samples = [sample(ON_GRID, coords=grid) for _ in range(4)]
    operator = fitted(samples, ON_GRID, input="pointwise", target="pointwise")
    inputs = np.concatenate([s.input.values.numpy() for s in samples])  # (samples x frames, points, channels)
    targets = np.concatenate([s.target.numpy() for s in samples])
    same(operator.input_scale.shift, inputs.mean(0))
    same(operator.input_scale.scale, inputs.std(0) + 1e-5)
    same(operator.target_scale.shift, targets.mean(0))
    same(operator.target_scale.scale, targets.std(0) + 1e-5)
    for normalizer in (operator.input_scale, operator.target_scale):
        same(normalizer.origin, np.array([-1.0, 2.0]))
        same(normalizer.extent, np.array([4.0, 1.0]))
    batch = collate(samples)
    given, _ = operator.normalized(batch.input, batch.query)
    same(given.values, (batch.input.values.numpy() - inputs.mean(0)) / (inputs.std(0) + 1e-5))


def test_pointwise_needs_one_grid():
    with pytest.raises(InputError, match="a regular grid for pointwise"):
        Operator(Echo(SPEC), Normalization(input="pointwise"))
    with pytest.raises(InputError, match="points of the first sample in every sample for pointwise statistics, got 5"):
        fitted([sample(ON_GRID, coords=GRID), sample(ON_GRID, points=5)], ON_GRID, input="pointwise")


def test_without_normalization_nothing_is_scaled():
    operator = fitted([sample(offset=5.0)], input="none", target="none")
    for normalizer in (operator.input_scale, operator.target_scale):
        assert normalizer.shift.abs().max() == 0
        assert (normalizer.scale == 1).all()


def test_refuses_to_fit_to_nothing():
    with pytest.raises(InputError, match="at least one training sample"):
        fitted([])


@exact
@pytest.mark.parametrize("kind", ["channel", "scalar", "max-abs"])
def test_codes_are_left_alone(kind):
    spec = dataclasses.replace(SPEC, in_categories=3)
    samples = [sample(spec, points=n) for n in RAGGED]
    operator = fitted(samples, spec, input=kind)
    assert operator.input_scale.shift[-1] == 0
    assert operator.input_scale.scale[-1] == 1
    batch = collate(samples)
    given, _ = operator.normalized(batch.input, batch.query)
    assert torch.equal(given.values[..., -1], batch.input.values[..., -1])
    assert not torch.allclose(given.values[..., 0], batch.input.values[..., 0])


@exact
def test_codes_do_not_enter_the_statistics_of_the_numbers():
    spec = dataclasses.replace(SPEC, in_categories=3)
    samples = [sample(spec, points=n, offset=50.0) for n in RAGGED]
    operator = fitted(samples, spec, input="scalar")
    numbers = stacked([s.input.values[..., :-1] for s in samples])
    same(operator.input_scale.shift[:-1], numbers.mean())
    same(operator.input_scale.scale[:-1], numbers.std())


@exact
def test_a_large_offset_costs_no_digits():
    """The square of the mean is 1e18 times the variance: the difference of two such numbers would be noise."""
    samples = [sample(points=n, offset=1e6, spread=1e-3) for n in RAGGED]
    operator = fitted(samples)
    targets = stacked([s.target for s in samples])
    np.testing.assert_allclose(operator.target_scale.scale.numpy(), targets.std(0), rtol=1e-6)
    np.testing.assert_allclose(operator.target_scale.shift.numpy(), targets.mean(0), rtol=1e-15)


def test_pressures_in_float32_come_out_centred_with_spread_one():
    spec = dataclasses.replace(SPEC, in_channels=1, out_channels=1)
    samples = [sample(spec, points=2000, offset=99_318.73, spread=111.0) for _ in range(3)]
    operator = fitted(samples, spec)
    batch = collate(samples)
    given, _ = operator.normalized(batch.input, batch.query)
    assert abs(given.values.mean()) < 1e-3
    assert abs(given.values.std() - 1) < 1e-3
    there_and_back = operator.input_scale.inverse(given.values, batch.input.coords)
    torch.testing.assert_close(there_and_back, batch.input.values, rtol=2e-7, atol=0)


@exact
@pytest.mark.parametrize("kind", ["channel", "scalar", "max-abs", "pointwise"])
@pytest.mark.parametrize("value", [0.0, 0.1, -12345.678])
def test_a_constant_channel_is_not_divided_by_zero(kind, value):
    samples = [sample(ON_GRID, coords=GRID.double()) for _ in range(3)]
    for s in samples:
        s.input.values.fill_(value)
    operator = fitted(samples, ON_GRID, input=kind)
    batch = collate(samples)
    given, _ = operator.normalized(batch.input, batch.query)
    expected = np.sign(value) if kind == "max-abs" else 0.0
    np.testing.assert_allclose(given.values.numpy(), expected, atol=1e-9)
    back = operator.input_scale.inverse(given.values, batch.input.coords)
    np.testing.assert_allclose(back.numpy(), value, rtol=1e-12, atol=1e-12)


@exact
@pytest.mark.parametrize(
    ("kind", "origin", "extent"),
    [
        ("as-is", (0.0, 0.0), (1.0, 1.0)),
        ("from-zero", (-1.0, 2.0), (1.0, 1.0)),
        ("unit-box", (-1.0, 2.0), (4.0, 1.0)),
    ],
)
def test_coordinates_are_moved_and_stretched_as_asked(kind, origin, extent):
    grid = GRID.double()
    operator = fitted([sample(coords=grid)], coords=kind)
    same(operator.origin, np.array(origin))
    same(operator.extent, np.array(extent))
    batch = collate([sample(coords=grid)])
    for field in operator.normalized(batch.input, batch.query):
        same(field.coords[0], (grid.numpy() - origin) / extent)
    if kind == "unit-box":
        assert field.coords.min() == 0
        assert field.coords.max() == 1


@exact
def test_the_box_holds_inputs_and_queries_but_the_inputs_set_the_coordinates():
    one = sample(coords=GRID.double())
    wide = dataclasses.replace(one, query=Field.of(torch.tensor([[-5.0, 2.5]] * 6)))
    operator = fitted([one, wide], coords="unit-box")
    assert operator.box.tolist() == [[-5.0, 2.0], [3.0, 3.0]]
    assert operator.origin.tolist() == [-1.0, 2.0]


@exact
def test_a_flat_axis_is_not_stretched():
    coords = torch.stack([torch.rand(6), torch.full((6,), 7.0)], -1)
    operator = fitted([sample(coords=coords)], coords="unit-box")
    assert operator.extent[1] == 1
    assert operator.normalized(Field.of(coords[None], torch.zeros(1, 2, 6, 3)), Field.of(coords[None]))[0].coords[
        ..., 1
    ].tolist() == [[0.0] * 6]


@exact
def test_physical_in_physical_out():
    """The model sees (x - shift) / scale and answers on the target's unit scale."""
    samples = [sample(points=n, offset=4.0) for n in RAGGED]
    operator, batch = fitted(samples), collate(samples)
    answer = operator(batch.input, batch.query)
    inputs, targets = stacked([s.input.values for s in samples]), stacked([s.target for s in samples])
    unit = (batch.input.values.numpy() - inputs.mean(0)) / inputs.std(0)
    given, _ = operator.model.given
    same(given.values, unit)
    expected = unit[:, :1, :, :2] * targets.std(0) + targets.mean(0)
    same(answer.detach(), np.repeat(expected, 2, 1))
    assert operator(batch.input, batch.query, 5).shape[1] == 5


@exact
def test_the_answer_vanishes_on_the_boundary_where_asked():
    grid = torch.stack(torch.meshgrid(torch.linspace(0, 2, 4), torch.linspace(1, 4, 5), indexing="ij"), -1).reshape(
        -1, 2
    )
    samples = [sample(coords=grid, points=20, offset=10.0)]
    operator, batch = fitted(samples, boundary="zero"), collate(samples)
    answer = operator(batch.input, batch.query).detach().reshape(1, 2, 4, 5, 2)
    free = fitted(samples)(batch.input, batch.query).detach().reshape(1, 2, 4, 5, 2)
    assert torch.equal(answer[:, :, 1:-1, 1:-1], free[:, :, 1:-1, 1:-1])
    edge = torch.ones(4, 5, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    assert (answer[:, :, edge] == 0).all()
    assert (free[:, :, edge].abs() > 1).all()
    # The boundary is that of the training box, not of the points that happen to be asked.
    inner = Field.of(grid.reshape(4, 5, 2)[1:-1, 1:-1].reshape(1, -1, 2), torch.randn(1, 2, 6, 3) + 10)
    assert (operator(inner, Field.of(inner.coords)).abs() > 1).all()


def test_the_boundary_of_a_float32_grid_is_met_and_its_inner_ring_kept():
    line = torch.linspace(0, 1, 421)
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    operator = Operator(Echo(SPEC), Normalization(boundary="zero"))
    values = operator.to_physical(torch.ones(1, 1, 421**2, 2), grid[None])[..., 0].reshape(421, 421)
    assert values.sum() == 419**2
    assert values[1:-1, 1:-1].all()


@exact
def test_both_sides_are_on_the_scale_that_is_asked_for():
    samples = [sample(points=n, offset=4.0) for n in RAGGED]
    operator, batch = fitted(samples, boundary="zero"), collate(samples)
    targets = stacked([s.target for s in samples])
    values = operator.predict_normalized(batch.input, batch.query, 1)
    prediction, target = operator.on_scale(values, batch, "physical")
    assert prediction.shape == target.shape == (3, 1, 9, 2)
    assert torch.equal(target, batch.target[:, :1])
    assert torch.equal(prediction, operator(batch.input, batch.query, 1))
    prediction, target = operator.on_scale(values, batch, "normalized")
    same(target, (batch.target[:, :1].numpy() - targets.mean(0)) / targets.std(0))
    assert torch.equal(prediction, operator.predict_normalized(batch.input, batch.query, 1))


def test_autocast_reaches_the_model_alone_and_answers_in_float32():
    class Product(Echo):
        def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
            values = super().forward(input, query, times)
            product = values @ torch.eye(2)
            self.kind = product.dtype
            return product

    samples = [sample(offset=1000.0)]
    operator, batch = Operator(Product(SPEC), Normalization()).fit(samples), collate(samples)
    plain = operator(batch.input, batch.query)
    assert operator.model.kind == torch.float32
    runner = Plain(operator, "bfloat16")
    cast = runner(batch.input, batch.query)
    assert operator.model.kind == torch.bfloat16
    assert cast.dtype == runner.run(batch.input, batch.query).dtype == torch.float32
    # Only the unit-scale answer is rounded: an error of 2^-9 of the spread, not of the offset.
    error = ((cast - plain) / operator.target_scale.scale).abs().max()
    assert 0 < error < 2**-7
    assert operator.model.given[0].values.dtype == torch.float32


def test_a_shared_grid_stays_shared():
    first = sample(coords=GRID)
    batch = collate([first, dataclasses.replace(sample(coords=GRID), query=first.query)])
    operator = fitted([first], coords="unit-box")
    given, asked = operator.normalized(batch.input, batch.query)
    assert expanded(given.coords)
    assert expanded(asked.coords)


def test_statistics_are_saved_with_the_weights():
    samples = [sample(ON_GRID, coords=GRID) for _ in range(3)]
    normalization = {"input": "pointwise", "target": "channel", "coords": "unit-box"}
    operator = fitted(samples, ON_GRID, **normalization)
    again = Operator(Echo(ON_GRID), Normalization(**normalization))
    batch = collate(samples)
    assert not torch.equal(again(batch.input, batch.query), operator(batch.input, batch.query))
    again.load_state_dict(operator.state_dict())
    assert torch.equal(again(batch.input, batch.query), operator(batch.input, batch.query))
    assert [name for name, _ in operator.named_parameters()] == ["model.gain"]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("input", (1, 2, 6, 2), r"3 channels in `input\.values`, got 2"),
        ("input", (1, 1, 6, 3), r"2 frames in `input\.values`, got 1"),
        ("query", (1, 1, 6, 1), r"0 channels in `query\.values`, got 1"),
    ],
)
def test_check_refuses_fields_of_another_shape(field, values, message):
    coords = torch.rand(1, 6, 2)
    fields = {"input": Field.of(coords, torch.zeros(1, 2, 6, 3)), "query": Field.of(coords)}
    operator = Operator(Echo(SPEC), Normalization())
    operator.check(**fields)
    fields[field] = Field.of(coords, torch.zeros(values))
    with pytest.raises(InputError, match=message):
        operator.check(**fields)


def test_check_refuses_another_dimension_and_numbers_that_are_none():
    operator = Operator(Echo(SPEC), Normalization())
    line = Field.of(torch.rand(1, 6, 1), torch.zeros(1, 2, 6, 3))
    plane = Field.of(torch.rand(1, 6, 2), torch.zeros(1, 2, 6, 3))
    with pytest.raises(InputError, match=r"`input\.coords` of shape \(\.\.\., points, 2\)"):
        operator.check(line, Field.of(plane.coords))
    plane.values[0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="1 NaN or infinite"):
        operator.check(plane, Field.of(plane.coords))


def test_integer_frequencies_refuse_coordinates_that_lost_their_period():
    spec = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(8,), periods=(1.0,))
    model = OFormerConfig(rotary="integer", encoder=Encoder(multipliers=(1.0,)), query=Query(multiplier=1.0)).build(
        spec
    )
    with pytest.raises(InputError, match="keep their period"):
        Operator(model, Normalization(coords="unit-box"))
    assert Operator(model, Normalization(coords="as-is")).spec == spec


@pytest.mark.parametrize("points", [1, 31, 32, 33, 100])
def test_extremes_are_those_of_each_channel_wherever_they_lie(points):
    x = torch.randn(2, points, 3, generator=torch.Generator().manual_seed(points))
    for place in range(2 * points):  # many points are looked at side by side, and the rest alone
        marked = x.clone()
        marked.view(-1, 3)[place] = torch.tensor([9.0, -9.0, 0.0])
        low, high = _extremes(marked)
        assert torch.equal(low, marked.amin((0, 1)))
        assert torch.equal(high, marked.amax((0, 1)))
        assert high[0] == 9
        assert low[1] == -9


@pytest.mark.parametrize("input", ["none", "scalar", "channel", "max-abs", "pointwise"])
def test_inputs_unlike_those_of_training_are_known_under_each_normalization(input):
    torch.manual_seed(0)
    spec, coords = dataclasses.replace(SPEC, grid=(8, 8)), torch.rand(64, 2)
    samples = [sample(spec, 64, coords=coords) for _ in range(40)]
    operator = fitted(samples, spec, input=input)
    known = sample(spec, 64, coords=coords).input

    def told(change):
        values = known.values.clone()
        values[..., 1] = change(values[..., 1])
        batch = collate([samples[0], dataclasses.replace(samples[0], input=dataclasses.replace(known, values=values))])
        return operator.outside(batch.input, batch.query)

    assert told(lambda x: x) == []
    assert [words.split(" from")[0] for words in told(lambda x: 1e6 * x)] == ["input channel 1"]
    assert [words.split(" from")[0] for words in told(lambda x: x + 3)] == ["the mean of input channel 1"]
    assert [words.split(" from")[0] for words in told(lambda x: 0 * x)] == ["the standard deviation of input channel 1"]


def test_a_channel_that_never_changed_is_known_by_another_number_and_not_by_rounding():
    torch.manual_seed(0)
    samples = [sample(points=9) for _ in range(9)]
    for one in samples:
        one.input.values[..., 2] = 0.1
    operator, batch = fitted(samples, input="none"), collate(samples[:2])
    batch.input.values[0, ..., 2] += 1e-6
    assert operator.outside(batch.input, batch.query) == []
    batch.input.values[0, ..., 2] = 0.2
    assert operator.outside(batch.input, batch.query) == [
        "input channel 2 from 0.1 to 0.2, in training from 0.1 to 0.1"
    ]


def test_what_weighs_nothing_is_not_compared_with_training():
    torch.manual_seed(0)
    samples = [sample(points=9, offset=50.0) for _ in range(9)]
    operator, batch = fitted(samples, input="none"), collate([samples[0], sample(points=7, offset=50.0)])
    assert float(batch.input.values.min()) == 0  # of the padding
    assert operator.outside(batch.input, batch.query) == []
    batch.input.values[1, :, -1] = 1e30
    assert operator.outside(batch.input, batch.query) == []
