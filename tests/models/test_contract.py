"""The nine promises of every model, asked of one tiny version of each problem family and of each variant.

The configurations name every setting that matters, so that the stored answers do not change with the defaults.
"""

import dataclasses
import io
import json
import math
import zlib
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from oformer.config import from_json, to_json
from oformer.errors import InputError
from oformer.fields import Batch, Field, Sample, Spec, collate
from oformer.meshes.grids import periodic_grid
from oformer.models import (
    MODELS,
    FNOConfig,
    GalerkinTransformerConfig,
    GraphNetworkConfig,
    ModelConfig,
    MWTConfig,
    Normalization,
    OFormerConfig,
    Operator,
    OperatorModel,
    SuperpositionConfig,
)
from oformer.models.oformer import Decoder, Encoder, Propagator, Query

pytestmark = pytest.mark.usefixtures("float64")


class Case(NamedTuple):
    spec: Spec
    config: ModelConfig


BURGERS = Case(
    Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(16,), periods=(1.0,)),
    OFormerConfig(
        attention="fourier",
        encoder=Encoder(width=8, depth=2, layernorm=False, multipliers=(16.0, 4.0), append_coords=True),
        query=Query(width=8, fourier_features=6, sigma=1.0, activation_first=True, hidden=(), heads=2, multiplier=4.0),
        propagator=Propagator(depth=2, layers=2, diagonal_start=True),
        decoder=Decoder(hidden=(6,)),
    ),
)
DARCY = Case(
    Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(4, 4)),
    OFormerConfig(
        encoder=Encoder(
            width=8, depth=2, heads=2, layernorm=True, multipliers=(16.0, 4.0), lift_dropout=0.1, dropout=0.1
        ),
        query=Query(width=12, fourier_features=5, sigma=0.5, hidden=(10,), heads=2, multiplier=9.0),
        propagator=Propagator(depth=0),
        decoder=Decoder(hidden=(10, 6), context=("coords",)),
    ),
)
NAVIER_STOKES = Case(
    Spec(dim=2, in_times=3, in_channels=1, out_times=4, out_channels=1, grid=(4, 4), periods=(1.0, 1.0)),
    OFormerConfig(
        encoder=Encoder(width=8, depth=2, layernorm=True, multipliers=(32.0, 8.0)),
        query=Query(width=12, fourier_features=5, sigma=1.0, hidden=(10,), heads=2, multiplier=16.0),
        propagator=Propagator(depth=1, width=16, expand_bias=True, layernorm=True, context=("coords",)),
        decoder=Decoder(hidden=(8, 6), layernorm=True),
    ),
)
ELECTRO = Case(
    Spec(dim=2, in_times=1, in_channels=5, out_times=1, out_channels=3, query_channels=1),
    OFormerConfig(
        norm="layernorm",
        encoder=Encoder(
            width=8,
            depth=2,
            layernorm=False,
            feedforward="relu",
            multipliers=(20.0, 6.0),
            coords_as_features=False,
            lift_layers=2,
            lift_activation="relu",
            bottom_layers=2,
            lift_dropout=0.1,
        ),
        query=Query(
            width=8,
            fourier_features=0,
            hidden=(8, 8),
            heads=2,
            multiplier=5.0,
            mixing=True,
            mixing_multiplier=10.0,
        ),
        propagator=Propagator(depth=0),
        decoder=Decoder(
            trunk=(8, 8), trunk_gain=0.1, hidden=(6,), activation="relu", context=("features",), heads=(1, 2)
        ),
    ),
)
MAGNETO = ELECTRO._replace(
    config=dataclasses.replace(
        ELECTRO.config,
        query=dataclasses.replace(ELECTRO.config.query, width=12, hidden=(12, 12)),
        decoder=dataclasses.replace(ELECTRO.config.decoder, trunk=(12, 12), hidden=(12,)),
    )
)
AIRFOIL = Case(
    Spec(
        dim=2,
        in_times=2,
        in_channels=4,
        out_times=3,
        out_channels=4,
        query_channels=1,
        in_categories=3,
        query_categories=3,
    ),
    OFormerConfig(
        encoder=Encoder(
            width=8,
            depth=2,
            layernorm=True,
            multipliers=(20.0, 6.0),
            coords_as_features=False,
            lift_layers=2,
            bottom_layers=2,
            long_skip=True,
        ),
        query=Query(
            width=8,
            fourier_features=4,
            sigma=1.0,
            hidden=(8,),
            heads=2,
            multiplier=12.0,
            source_dropout=0.1,
            mixing=True,
            mixing_multiplier=12.0,
        ),
        propagator=Propagator(depth=1, width=12, layers=4, layernorm=True, context=("features", "coords")),
        decoder=Decoder(hidden=(10, 6), activation="relu", layernorm=True, context=("features",)),
    ),
)


def variant(case: Case, **changes) -> Case:
    return case._replace(config=dataclasses.replace(case.config, **changes))


def local(case: Case) -> Case:
    """The variant whose queries begin with the latents of the nearest input points."""
    return variant(case, query=dataclasses.replace(case.config.query, local=True))


FAMILIES = {
    "burgers": BURGERS,
    "darcy": DARCY,
    "navier-stokes": NAVIER_STOKES,
    "electro": ELECTRO,
    "magneto": MAGNETO,
    "airfoil": AIRFOIL,
}
CASES = {
    **FAMILIES,
    "burgers, points": variant(BURGERS, norm="points"),
    "burgers, points-detached": variant(BURGERS, norm="points-detached"),
    "burgers, integer": variant(BURGERS, rotary="integer", rotary_modes=3),
    "darcy, points": variant(DARCY, norm="points"),
    "darcy, softmax": variant(DARCY, attention="softmax"),
    "darcy, softmax, points": variant(DARCY, attention="softmax", norm="points"),
    "airfoil, fourier": variant(AIRFOIL, attention="fourier", norm="none"),
    "burgers, local": local(BURGERS),
    "darcy, local": local(DARCY),
    "navier-stokes, local": local(NAVIER_STOKES),
    "airfoil, local": local(AIRFOIL),
    "superposition, steady": Case(
        dataclasses.replace(ELECTRO.spec, in_channels=3), SuperpositionConfig(linear=(2, 0), width=8, heads=2, modes=3)
    ),
    "superposition, march": Case(NAVIER_STOKES.spec, SuperpositionConfig(linear=(0,), width=8, heads=2, modes=3)),
}
SCATTERED = list(CASES)  # whose points lie anywhere
ON_GRIDS = {
    "fno, burgers": Case(BURGERS.spec, FNOConfig(width=4, modes=3, depth=2, head=5)),
    "fno, darcy": Case(DARCY.spec, FNOConfig(width=4, modes=3, depth=2, head=5, padding=3)),
    "fno, march": Case(
        NAVIER_STOKES.spec, FNOConfig(width=4, modes=2, depth=2, head=5, activation="relu", batch_norm=True)
    ),
    "fno, block": Case(NAVIER_STOKES.spec, FNOConfig(width=4, modes=2, depth=2, head=5, padding=1, time="block")),
    "mwt, burgers": Case(BURGERS.spec, MWTConfig(polynomials=3, channels=2, modes=3, depth=2, head=5, coords=False)),
    "mwt, darcy": Case(
        dataclasses.replace(DARCY.spec, grid=(3, 4)), MWTConfig(polynomials=2, channels=2, modes=2, depth=2, head=5)
    ),
    "mwt, march": Case(
        NAVIER_STOKES.spec, MWTConfig(polynomials=2, channels=1, modes=1, depth=2, head=5, time="march")
    ),
    "mwt, block": Case(
        NAVIER_STOKES.spec,
        MWTConfig(polynomials=2, channels=1, modes=1, time_modes=2, depth=2, head=5, batch_norm=True),
    ),
    "galerkin transformer, burgers": Case(
        BURGERS.spec,
        GalerkinTransformerConfig(
            kind="fourier", width=6, heads=2, depth=2, feedforward=5, channels=4, modes=3, head=3, gain=0.5
        ),
    ),
    "galerkin transformer, darcy": Case(
        DARCY.spec,
        GalerkinTransformerConfig(
            kind="galerkin", width=6, heads=2, depth=2, feedforward=5, coarse=3, channels=4, modes=2,
            decoder_coords=True, head=3, dropout=0.1, feedforward_dropout=0.1, coarse_dropout=0.1,
        ),
    ),
    "galerkin transformer, march": Case(
        NAVIER_STOKES.spec,
        GalerkinTransformerConfig(
            kind="galerkin", width=6, heads=1, depth=2, feedforward=5, norm="latents", coords=True, channels=4,
            modes=2, head=3,
        ),
    ),
}  # fmt: skip
ON_MESHES = {  # that answer at the points of the input alone
    "graph network": Case(ELECTRO.spec, GraphNetworkConfig(width=6, depth=2, order=4, skipped=1)),
}
CASES |= ON_GRIDS | ON_MESHES
# Written down and not asked of the models: where the answer at a query depends on the other queries.
COUPLED = {
    "electro",
    "magneto",
    "airfoil",
    "airfoil, fourier",
    "airfoil, local",
    "burgers, points",
    "burgers, points-detached",
    "darcy, softmax, points",
}

each_case = pytest.mark.parametrize("name", CASES)
each_scattered = pytest.mark.parametrize("name", SCATTERED)
each_on_a_grid = pytest.mark.parametrize("name", ON_GRIDS)
each_on_a_mesh = pytest.mark.parametrize("name", ON_MESHES)
each_padded = pytest.mark.parametrize("name", [*SCATTERED, *ON_MESHES])


def build(name: str) -> OperatorModel:
    spec, config = CASES[name]
    return config.build(spec).eval()


def filled(model: OperatorModel) -> OperatorModel:
    """Numbers from a formula in place of random ones, the same in every version of torch; gains stay near one."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():  # a count of steps
                continue
            n = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
            waves = torch.sin(1.7 * n + 0.3 * n.sqrt() + zlib.crc32(name.encode()) % 997)
            gain = "norm" in name and name.endswith(("weight", "running_var")) and tensor.ndim == 1
            tensor.copy_(1 + 0.2 * waves if gain else waves / math.sqrt(tensor.shape[-1]))
    return model


def random_field(spec: Spec, points: int, times: int, channels: int, categories: int, seed: int) -> Field:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(times, points, channels, generator=generator)
    if categories:
        values[..., -1] = torch.arange(points) % categories  # a code that does not change in time
    weights = 0.5 + torch.rand(points, generator=generator)
    return Field(torch.rand(points, spec.dim, generator=generator), values, weights / weights.sum())


def samples(spec: Spec, counts: tuple[tuple[int, int], ...] = ((7, 6), (5, 8), (9, 4))) -> list[Sample]:
    """Ragged samples, (points, queries) each; input and query points have nothing in common."""
    result = []
    for n, (points, queries) in enumerate(counts):
        query = random_field(spec, queries, 1, spec.query_channels, spec.query_categories, 100 + n)
        if spec.query_channels and not spec.query_categories:
            query = dataclasses.replace(query, values=(query.values > 0).double())  # a flag
        result.append(
            Sample(
                input=random_field(spec, points, spec.in_times, spec.in_channels, spec.in_categories, n),
                query=query,
                target=torch.zeros(spec.out_times, queries, spec.out_channels),
            )
        )
    return result


def on_grid(spec: Spec, count: int = 3) -> list[Sample]:
    """Samples on the grid of the spec, at whose points the queries are."""
    assert spec.grid is not None
    coords = periodic_grid(spec.grid, spec.periods or (1.0,) * spec.dim)
    result = []
    for n in range(count):
        values = random_field(spec, len(coords), spec.in_times, spec.in_channels, 0, n).values
        known, target = Field.of(coords, values), torch.zeros(spec.out_times, len(coords), spec.out_channels)
        result.append(Sample(input=known, query=Field.of(coords), target=target))
    return result


def on_mesh(spec: Spec, rows: tuple[int, ...] = (3, 4, 2)) -> list[Sample]:
    """Ragged samples at the points of irregular meshes, three times `rows` of them, where the queries are as well."""
    result = []
    for n, count in enumerate(rows):
        coords = periodic_grid((count, 3), (1.0, 1.0)) + 0.1 * wave(3 * count, 2).roll(n)
        known = Field.of(coords, wave(spec.in_times, len(coords), spec.in_channels).roll(n))
        query = Field.of(coords, wave(1, len(coords), spec.query_channels))
        result.append(Sample(known, query, torch.zeros(spec.out_times, len(coords), spec.out_channels)))
    return result


def samples_for(name: str) -> list[Sample]:
    """Three samples that the model of a case reads."""
    spec = CASES[name].spec
    if name in ON_MESHES:
        return on_mesh(spec)
    return on_grid(spec) if name in ON_GRIDS else samples(spec)


def said(model: OperatorModel, input: Field, query: Field) -> Tensor:
    """All frames; a model that encodes its own answers again does so in the operator, here without normalization."""
    return Operator(model, Normalization("none", "none", "as-is")).predict_normalized(input, query)


def answer(model: OperatorModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return said(model, batch.input, batch.query)


def reordered(field: Field, order: Tensor) -> Field:
    return Field(field.coords[..., order, :], field.values[..., order, :], field.weights[..., order])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_every_registered_model_is_asked():
    assert {type(case.config).__name__ for case in CASES.values()} == set(MODELS)
    assert all(MODELS[type(case.config).__name__] is type(case.config) for case in CASES.values())


@each_case
def test_1_answers_have_the_shape_of_a_ragged_batch(name):
    model, batch = build(name), collate(samples_for(name))
    spec = CASES[name].spec
    result = answer(model, batch)
    assert result.shape == (3, spec.out_times, batch.query.points, spec.out_channels)
    assert torch.isfinite(result).all()


@each_padded
def test_2_padding_changes_nothing(name):
    model = filled(build(name))
    each = samples_for(name)
    together = answer(model, collate(each))
    for row, sample in zip(together, each, strict=True):
        close(row[:, : sample.query.points], answer(model, collate([sample]))[0])


@each_padded
def test_2_padding_may_hold_anything(name):
    model, spec = filled(build(name)), CASES[name].spec
    batch = collate(samples_for(name))

    def spoiled(field: Field, categories: int) -> Field:
        padded = field.weights == 0
        assert padded.any()
        coords = torch.where(padded[..., None], 30 * torch.randn_like(field.coords), field.coords)
        garbage = 1e3 * torch.randn_like(field.values)
        if categories:
            garbage[..., -1] = categories - 1
        return Field(coords, torch.where(padded[:, None, :, None], garbage, field.values), field.weights)

    spoiled_batch = dataclasses.replace(
        batch,
        input=spoiled(batch.input, spec.in_categories),
        query=spoiled(batch.query, spec.query_categories),
    )
    exists = (batch.query.weights > 0)[:, None, :, None].expand_as(batch.target)
    close(answer(model, spoiled_batch)[exists], answer(model, batch)[exists])


@each_scattered
def test_3_order_of_the_input_points_changes_nothing(name):
    model = filled(build(name))
    batch = collate(samples(CASES[name].spec))
    order = torch.randperm(batch.input.points)
    close(
        answer(model, dataclasses.replace(batch, input=reordered(batch.input, order))),
        answer(model, batch),
    )


@each_scattered
def test_3_an_input_point_may_be_split_in_two(name):
    model = filled(build(name))
    batch = collate(samples(CASES[name].spec))
    halved = batch.input.weights.clone()
    halved[:, 0] /= 2
    split = reordered(dataclasses.replace(batch.input, weights=halved), torch.tensor([*range(batch.input.points), 0]))
    close(answer(model, dataclasses.replace(batch, input=split)), answer(model, batch))


@each_scattered
def test_4_order_of_the_queries_permutes_the_answer(name):
    model = filled(build(name))
    batch = collate(samples(CASES[name].spec))
    order = torch.randperm(batch.query.points)
    close(
        answer(model, dataclasses.replace(batch, query=reordered(batch.query, order))),
        answer(model, batch)[:, :, order],
    )


@each_on_a_mesh
def test_4_order_of_the_points_permutes_the_answer_and_other_queries_are_refused(name):
    model = filled(build(name))
    batch = collate(on_mesh(CASES[name].spec))
    assert not model.answers_anywhere
    assert not model.needs_grid
    order = torch.randperm(batch.input.points)
    moved = dataclasses.replace(batch, input=reordered(batch.input, order), query=reordered(batch.query, order))
    close(answer(model, moved), answer(model, batch)[:, :, order])
    elsewhere = dataclasses.replace(batch.query, coords=batch.query.coords + 0.01)
    for ask in (model.check, lambda input, query: said(model, input, query)):
        with pytest.raises(InputError, match=f"queries at the points of the input for {model.name}"):
            ask(batch.input, elsewhere)


@each_scattered
def test_5_other_queries_matter_only_where_the_model_says_so(name):
    model = filled(build(name))
    batch = collate(samples(CASES[name].spec, ((7, 8), (5, 8))))
    part = reordered(batch.query, torch.tensor([4, 1, 6]))
    part = dataclasses.replace(part, weights=part.weights / part.weights.sum(-1, keepdim=True))
    whole = answer(model, batch)[:, :, [4, 1, 6]]
    moved = (answer(model, dataclasses.replace(batch, query=part)) - whole).abs().max()
    assert model.queries_independent == (name not in COUPLED)
    if model.queries_independent:
        assert moved < 1e-12
    else:
        assert moved > 1e-6


@each_case
def test_6_every_parameter_receives_a_gradient(name):
    model = filled(build(name)).train()
    batch = collate(samples_for(name))
    said(model, batch.input, batch.query).pow(3).sum().backward()  # squares of what batch norm leaves have a fixed sum
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not still
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@each_case
def test_7_saved_and_loaded_it_answers_the_same(name):
    model, (spec, config) = build(name), CASES[name]
    batch = collate(samples_for(name))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    written = json.dumps(to_json(config))
    file.seek(0)

    torch.manual_seed(1)
    again = from_json(MODELS[type(config).__name__], json.loads(written)).build(spec).eval()
    assert not torch.equal(answer(again, batch), answer(model, batch))
    again.load_state_dict(torch.load(file))
    assert torch.equal(answer(again, batch), answer(model, batch))


@each_on_a_grid
def test_9_derivatives_by_values_are_right(name):
    model, batch = filled(build(name)), collate(on_grid(CASES[name].spec, 2))

    def of(values: Tensor) -> Tensor:
        return said(model, dataclasses.replace(batch.input, values=values), batch.query).square().sum((0, 1, 2))

    assert torch.autograd.gradcheck(of, [batch.input.values.clone().requires_grad_()], atol=1e-4, fast_mode=True)


@each_on_a_grid
def test_a_model_on_grids_refuses_padding_dropped_points_another_order_and_other_queries(name):
    """The promises 2 to 5 are about scattered points; what cannot keep them says so, by its name."""
    model, batch = build(name), collate(on_grid(CASES[name].spec))
    assert model.needs_grid
    assert not model.answers_anywhere
    assert not model.queries_independent
    known, order = batch.input, torch.arange(batch.input.points).flip(0)
    padded = torch.cat([known.weights[:, :-1], torch.zeros(3, 1)], 1)
    operator = Operator(model, Normalization("none", "none", "as-is"))
    for input in (
        reordered(known, order),
        reordered(known, order[1:]),
        dataclasses.replace(known, weights=padded),
        dataclasses.replace(known, coords=torch.rand(known.coords.shape)),
    ):
        query = Field.of(input.coords)
        for ask in (model.check, operator.predict_normalized):
            with pytest.raises(InputError, match=f"the points of a regular grid.* for {model.name}"):
                ask(input, query)
    elsewhere = Field.of(known.coords + 0.01)
    for ask in (model.check, operator.predict_normalized):
        with pytest.raises(InputError, match=f"queries at the points of the input for {model.name}"):
            ask(known, elsewhere)


@pytest.mark.parametrize("name", [name for name in SCATTERED if "detached" not in name])  # no derivative by intent
def test_9_derivatives_by_values_and_coordinates_are_right(name):
    model, spec = filled(build(name)), CASES[name].spec
    batch = collate(samples(spec, ((7, 3), (6, 3))))
    known, asked = batch.input, batch.query

    def of(coords: Tensor, values: Tensor, places: Tensor) -> Tensor:
        query = dataclasses.replace(asked, coords=places)
        return model(Field(coords, values, known.weights), query).square().sum((0, 1, 2))

    inputs = [t.clone().requires_grad_() for t in (known.coords, known.values, asked.coords)]
    assert torch.autograd.gradcheck(of, inputs, eps=1e-7, atol=1e-4, rtol=1e-4, fast_mode=True)


# Of `filled` weights: the mean square of the second sample's answer, then the first three numbers of its last frame.
REFERENCE = {
    "burgers": (0.01753501873, 0.1960898428, 0.04662833554, 0.1979339215),
    "darcy": (0.2682456169, 0.1264104753, 0.6507526229, 0.5718852123),
    "navier-stokes": (0.5020450549, 0.4508653385, 0.8632018945, 0.8083455739),
    "electro": (0.3155036768, 0.5753822397, -0.4309343896, 0.6590525962),
    "magneto": (0.2301362923, 0.4740761021, -0.4658391816, 0.4844917779),
    "airfoil": (0.1300731665, 0.2752631059, -0.4728616901, 0.03010413442),
    "burgers, points": (0.03243598941, 0.2142805501, 0.04785307161, 0.2450198326),
    "burgers, points-detached": (0.03243598941, 0.2142805501, 0.04785307161, 0.2450198326),
    "burgers, integer": (0.01628811395, 0.1699582092, 0.1082770536, -0.1024811269),
    "darcy, points": (0.3750650889, 0.6879318146, 0.6106425206, 0.6888409992),
    "darcy, softmax": (0.3193252243, 0.5863860715, 0.5644461446, 0.5481343836),
    "darcy, softmax, points": (0.3191183079, 0.5862175518, 0.5642641205, 0.5480258237),
    "airfoil, fourier": (0.1291301953, 0.2751131796, -0.4723314503, 0.02979716204),
    "burgers, local": (0.1187363233, -0.4306513188, -0.309767388, 0.07024176313),
    "darcy, local": (0.2649672878, 0.5421157922, 0.7258436501, 0.4999287706),
    "navier-stokes, local": (0.3377266365, 0.6374962591, 0.6558202121, 0.542321126),
    "airfoil, local": (0.1318977357, 0.2794185558, -0.4803048595, 0.03244848371),
    "fno, burgers": (0.1362327035, -0.3896436276, -0.3935524126, -0.3880260334),
    "fno, darcy": (0.1214504541, -0.3234200339, -0.2948632713, -0.3354587496),
    "fno, march": (0.03988032518, -0.1827299375, -0.1885511161, -0.1849481772),
    "fno, block": (0.1216781113, -0.3241057946, -0.3602101956, -0.3583041944),
    "mwt, burgers": (0.4928012469, -1.033646605, -0.7263639571, 0.3170097386),
    "mwt, darcy": (0.2300737654, -0.8353342093, -0.3624461799, -0.6468375611),
    "mwt, march": (0.1716603257, -0.6163914792, -0.2342049094, -0.3790910612),
    "mwt, block": (0.07386901856, -0.1123970992, -0.2072406116, -0.06772513796),
    "galerkin transformer, burgers": (0.09470135702, -0.3027842091, -0.2960772574, -0.3391654759),
    "galerkin transformer, darcy": (0.1316240809, -0.377426165, -0.3953026431, -0.3434246675),
    "galerkin transformer, march": (0.1694952244, -0.4392447474, -0.4372090121, -0.4368634659),
    "superposition, steady": (0.006893894724, 0.1363840863, 0.01198916833, -0.1148544287),
    "superposition, march": (0.005515891042, -0.01226680282, 0.1108531059, -0.08137760346),
    "graph network": (0.04328265027, 0.2272286179, 0.05096395076, -0.3444649772),
}


@each_case
def test_8_the_stored_answer_still_holds(name):
    model = filled(build(name))
    spec = CASES[name].spec
    known = on_mesh(spec, (2, 3)) if name in ON_MESHES else samples_by_formula(spec)
    if name in ON_GRIDS:
        points, shape = on_grid(spec, 1)[0], (spec.in_times, math.prod(spec.grid), spec.in_channels)
        known = [dataclasses.replace(points, input=dataclasses.replace(points.input, values=wave(*shape)))] * 2
    result = answer(model, collate(known))[1]
    numbers = [float(result.square().mean()), *result[-1].flatten()[:3].tolist()]
    assert numbers == pytest.approx(REFERENCE[name], rel=1e-6, abs=1e-6)


def wave(*shape: int) -> Tensor:
    n = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return 0.5 + 0.5 * torch.sin(2.3 * n + 0.1 * n.sqrt())


def samples_by_formula(spec: Spec) -> list[Sample]:
    """Two samples of smooth numbers, without any generator."""
    result = []
    for points, queries in ((6, 4), (5, 7)):
        values, flags = wave(spec.in_times, points, spec.in_channels), wave(1, queries, spec.query_channels)
        if spec.in_categories:
            values[..., -1] = torch.arange(points) % spec.in_categories
        if spec.query_channels:
            flags[..., -1] = torch.arange(queries) % max(spec.query_categories, 2)
        query = Field.of(wave(queries, spec.dim), flags)
        result.append(
            Sample(
                input=Field.of(wave(points, spec.dim).flip(0), values),
                query=query,
                target=torch.zeros(spec.out_times, queries, spec.out_channels),
            )
        )
    return result


@each_case
def test_a_grid_shared_by_the_batch_answers_as_copies_of_it_do(name):
    model, spec = filled(build(name)), CASES[name].spec
    if name in ON_MESHES:
        first, *others = on_mesh(spec, (3,) * 3)
    else:
        first, *others = on_grid(spec) if name in ON_GRIDS else samples(spec, ((7, 6),) * 3)
    same_points = [
        Sample(
            input=dataclasses.replace(s.input, coords=first.input.coords, weights=first.input.weights),
            query=first.query,
            target=s.target,
        )
        for s in (first, *others)
    ]
    shared = collate(same_points)
    assert shared.query.coords.stride(0) == 0  # expanded, so that models compute on it once
    copied = dataclasses.replace(
        shared,
        input=Field(*(t.clone() for t in (shared.input.coords, shared.input.values, shared.input.weights))),
        query=Field(*(t.clone() for t in (shared.query.coords, shared.query.values, shared.query.weights))),
    )
    assert copied.query.coords.stride(0) != 0
    close(answer(model, shared), answer(model, copied))
    gradients = []
    for batch in (shared, copied):
        model.zero_grad()
        said(model, batch.input, batch.query).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    size = max(float(gradient.abs().max()) for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < 1e-10 * size


@each_case
def test_parts_share_out_all_parameters(name):
    model = build(name)
    parts = model.parts()
    assert set(parts) == {"encoder", "decoder"}
    together = [p for part in parts.values() for p in part]
    assert len({id(p) for p in together}) == len(together)
    assert {id(p) for p in together} == {id(p) for p in model.parameters()}
    assert all(isinstance(p, nn.Parameter) for p in together)


@each_case
def test_the_encoder_is_the_part_before_the_latents(name):
    """What `encode` depends on, measured by its gradient, is what the part of that name holds."""
    model = filled(build(name))
    batch = collate(samples_for(name))
    model.encode(batch.input).square().sum().backward()
    reached = {id(p) for p in model.parameters() if p.grad is not None}
    assert reached == {id(p) for p in model.parts()["encoder"]}
