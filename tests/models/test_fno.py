"""FNO: published sizes, the convolution against its sum, what holds on every grid, and a small one that learns."""

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.models import FNOConfig, Normalization, Operator
from oformer.models.fno import FNO, SpectralConvolution

LINE = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(32,), periods=(1.0,))
PLANE = Spec(dim=2, in_times=2, in_channels=1, out_times=3, out_channels=1, grid=(8, 10), periods=(1.0, 2.0))


def count(spec: Spec, config: FNOConfig) -> int:
    return sum(p.numel() for p in config.build(spec).parameters())


def test_published_layouts_have_the_published_sizes():
    flow = Spec(dim=2, in_times=10, in_channels=1, out_times=20, out_channels=1, grid=(64, 64), periods=(1.0, 1.0))
    darcy = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(141, 141))
    assert count(LINE, FNOConfig(width=64, modes=16)) == 549_569
    assert count(darcy, FNOConfig(width=32, modes=12, padding=9)) == 2_368_001
    assert count(flow, FNOConfig(width=20, modes=8, batch_norm=True)) == 414_517
    assert count(flow, FNOConfig(width=32, modes=12, batch_norm=True)) == 2_368_545
    assert count(flow, FNOConfig(width=20, modes=8, batch_norm=True, padding=6, time="block")) == 6_558_537


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grid", [(9,), (6, 7), (5, 4, 6)], ids=str)
def test_the_convolution_is_the_sum_over_its_modes(grid):
    """Of noise, which has every mode, written with exponentials alone."""
    modes, width = 2, 3
    layer = SpectralConvolution(width, modes, len(grid))
    v = torch.randn(2, *grid, width)
    points = torch.stack(torch.meshgrid(*(torch.arange(n) / n for n in grid), indexing="ij"), -1).reshape(-1, len(grid))
    matrices, expected = torch.view_as_complex(layer.weight.detach()), torch.zeros(2, len(points), width)
    both = [*range(modes), *range(-modes, 0)]
    for mode in itertools.product(*[both] * (len(grid) - 1), range(modes)):
        wave = torch.exp(2j * math.pi * (points @ torch.tensor(mode, dtype=points.dtype)))
        amount = torch.einsum("p,bpi->bi", wave.conj(), v.flatten(1, -2) + 0j) / len(points)
        part = torch.einsum("p,bo->bpo", wave, amount @ matrices[mode])
        # A mode and its conjugate are one real wave; along the last axis only half of the modes are written down.
        expected += part.real * (1 if mode[-1] == 0 else 2)
    torch.testing.assert_close(layer(v).flatten(1, -2), expected, rtol=1e-12, atol=1e-12)


def band_limited(grid: tuple[int, ...], periods: tuple[float, ...]) -> Tensor:
    """Two channels of waves of frequency at most two, at the points of a grid."""
    x = periodic_grid(grid, periods) / torch.tensor(periods)
    generator = torch.Generator().manual_seed(0)
    values = torch.zeros(len(x), 2)
    for mode in itertools.product(*[range(-2, 3)] * len(grid)):
        phase = 2 * math.pi * (x @ torch.tensor(mode, dtype=x.dtype))
        a, b = torch.randn(2, 2, generator=generator)
        values += a * torch.cos(phase[:, None]) + b * torch.sin(phase[:, None])
    return values


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("coarse", [(8,), (6, 8), (6, 6, 8)], ids=str)
def test_waves_that_both_grids_resolve_have_the_same_answer_on_both(coarse):
    """With one layer, after which all is point by point; activations between layers make higher waves."""
    dim, fine = len(coarse), tuple(2 * n for n in coarse)
    periods = (1.0, 2.0, 0.5)[:dim]
    spec = Spec(dim=dim, in_times=1, in_channels=2, out_times=1, out_channels=1, grid=coarse, periods=periods)
    model = FNOConfig(width=5, modes=3, depth=1, head=7, coords=False).build(spec)
    few, many = (Field.of(periodic_grid(g, periods), band_limited(g, periods)).batched() for g in (coarse, fine))
    answers = [model(field, field).detach().reshape(*grid) for field, grid in ((few, coarse), (many, fine))]
    torch.testing.assert_close(answers[1][(slice(None, None, 2),) * dim], answers[0], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_it_commutes_with_shifts_of_a_periodic_grid_where_it_does_not_see_coordinates():
    known = torch.randn(2, 2, 8, 10, 1)
    for time, coords in itertools.product(("march", "block"), (False, True)):
        model = FNOConfig(width=4, modes=2, depth=3, head=5, coords=coords, padding=1, time=time).build(PLANE)
        operator = Operator(model.eval(), Normalization("none", "none", "as-is"))

        def answer(values: Tensor, operator: Operator = operator) -> Tensor:
            points = periodic_grid((8, 10), (1.0, 2.0)).expand(2, -1, -1)
            field = Field.of(points, values.flatten(2, 3))
            with torch.no_grad():
                return operator(field, field).unflatten(2, (8, 10))

        shifted = answer(known.roll((3, 4), (2, 3)))
        same = torch.allclose(shifted, answer(known).roll((3, 4), (2, 3)), rtol=1e-10, atol=1e-10)
        assert same != coords


@pytest.mark.usefixtures("float64")
def test_it_marches_on_its_own_physical_answers():
    """With other scales for input and answer, each frame is scaled as what it is used for."""
    operator = Operator(FNOConfig(width=4, modes=2, depth=2, head=5).build(PLANE), Normalization()).eval()
    operator.input_scale.scale.fill_(2.0)
    operator.target_scale.scale.fill_(3.0)
    points = periodic_grid((8, 10), (1.0, 2.0))[None]
    known = Field.of(points, torch.randn(1, 2, 80, 1))
    with torch.no_grad():
        frames = operator(known, Field(points, known.values[:, :1, :, :0], known.weights))
        for n in range(3):
            seen = torch.cat([known.values, frames[:, :n]], 1)[:, -2:]
            field = dataclasses.replace(known, values=seen)
            torch.testing.assert_close(operator(field, field, 1)[:, 0], frames[:, n])
    assert frames.shape == (1, 3, 80, 1)


def test_a_block_gives_its_first_frames_and_none_after_its_last():
    operator = Operator(FNOConfig(width=4, modes=2, depth=2, padding=1, time="block").build(PLANE), Normalization())
    field = Field.of(periodic_grid((8, 10), (1.0, 2.0)).float(), torch.randn(2, 80, 1)).batched()
    with torch.no_grad():
        assert torch.equal(operator(field, field, 2), operator(field, field)[:, :2])
    with pytest.raises(InputError, match=r"at most 3 frame\(s\) from one encoding by FNO, got times=4"):
        operator(field, field, 4)


def test_padding_keeps_the_ends_of_a_line_without_period_apart():
    """A change at one end reaches the other through the modes alone; with padding they are not neighbors."""
    spec = dataclasses.replace(LINE, periods=None)
    torch.manual_seed(0)
    for padding in (0, 5):
        layer = FNOConfig(width=3, modes=4, depth=1, coords=False, padding=padding).build(spec)
        assert layer.padded((32,)) == (32 + padding,)
        field = Field.of(torch.linspace(0, 1, 32)[:, None], torch.randn(32)).batched()
        rolled = dataclasses.replace(field, values=field.values.roll(1, 2))
        with torch.no_grad():
            same = torch.allclose(layer(rolled, field), layer(field, field).roll(1, 2), atol=1e-6)
        assert same == (padding == 0)


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (
            dataclasses.replace(LINE, grid=None),
            FNOConfig(),
            "a problem on a regular grid for FNO.*got scattered points",
        ),
        (dataclasses.replace(LINE, query_channels=1), FNOConfig(), "values alone.*for FNO, got .* 1 query features"),
        (PLANE, FNOConfig(modes=5), "at least 10 points along each axis for FNO of 5 modes, got 8 x 10"),
        (dataclasses.replace(PLANE, in_channels=2), FNOConfig(), "channels of the input for FNO that marches.*got 2"),
    ],
    ids=["scattered", "features", "few points", "other channels"],
)
def test_problems_without_a_place_for_it_are_refused(spec, config, message):
    with pytest.raises(InputError, match=message):
        config.build(spec)


def test_a_grid_of_fewer_points_than_modes_is_refused():
    model = FNOConfig(modes=16).build(LINE)
    field = Field.of(periodic_grid((31,), (1.0,)), torch.randn(31)).batched()
    with pytest.raises(InputError, match="at least 32 points along each axis for FNO of 16 modes, got 31"):
        model.check(field, field)


@pytest.mark.parametrize("setting", [{"width": 0}, {"modes": 0}, {"depth": 0}, {"head": 0}, {"padding": -1}], ids=str)
def test_settings_that_build_nothing_are_refused(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        FNOConfig(**setting)


def test_batch_normalization_is_over_samples_and_points():
    model = FNOConfig(width=4, modes=3, depth=1, batch_norm=True).build(LINE).train()
    assert isinstance(model, FNO)
    assert model.mixes_samples
    assert not FNOConfig().build(LINE).mixes_samples
    points = periodic_grid((32,), (1.0,)).float().expand(6, -1, -1)
    latents = model.encode(Field.of(points, torch.randn(6, 1, 32, 1)))
    torch.testing.assert_close(latents.mean((0, 1)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.var((0, 1), correction=0), torch.ones(4), atol=1e-2, rtol=0)


def test_autocast_leaves_the_transform_in_float32():
    """Which has no bfloat16 on any device."""
    operator = Operator(FNOConfig(width=4, modes=3).build(LINE), Normalization())
    points = periodic_grid((32,), (1.0,)).float()[None]
    field = Field.of(points, torch.randn(1, 1, 32, 1))
    with torch.no_grad():
        full = operator(field, field)
        rounded = Plain(operator, "bfloat16")(field, field)
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - full).abs().max()) < 0.05


def test_a_batch_has_no_influence_on_its_samples():
    model = FNOConfig(width=4, modes=3).build(LINE).eval()
    points = periodic_grid((32,), (1.0,)).float()
    values = torch.randn(3, 1, 32, 1)
    together = Field.of(points.expand(3, -1, -1), values)
    with torch.no_grad():
        for one, row in zip(values, model(together, together), strict=True):
            alone = Field.of(points, one).batched()
            torch.testing.assert_close(model(alone, alone)[0], row)


COMPILED = """
import copy
import warnings

import torch

from oformer.engine.runners import Compiled
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.models import FNOConfig, Normalization, Operator

warnings.filterwarnings("error", "Torchinductor does not support code generation for complex")
spec = Spec(dim=2, in_times=2, in_channels=1, out_times=3, out_channels=1, grid=(8, 10), periods=(1.0, 2.0))
operator = Operator(FNOConfig(width=4, modes=2, depth=2, head=5).build(spec), Normalization())
field = Field.of(periodic_grid((8, 10), (1.0, 2.0)).float().expand(2, -1, -1), torch.randn(2, 2, 80, 1))
plain = operator.predict_normalized(field, field)
plain.square().sum().backward()
wanted = [p.grad.clone() for p in operator.parameters()]
operator.zero_grad()
compiled = Compiled(operator).run(field, field)
compiled.square().sum().backward()
torch.testing.assert_close(compiled, plain)
for p, gradient in zip(operator.parameters(), wanted, strict=True):
    torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))
copy.deepcopy(operator.model)(field, field)
"""


@pytest.mark.slow
def test_compiled_it_says_the_same_and_the_compiler_says_nothing_of_complex_numbers():
    """In a process of its own, without shape checks, which are not for compilers."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
