"""Galerkin Transformer: published sizes, attention against its sum, the decoder against FNO's layer, coarse grids."""

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import cell_grid, periodic_grid
from oformer.models import FNOConfig, GalerkinTransformerConfig, Normalization, Operator
from oformer.models.fno import FourierLayer
from oformer.models.galerkin_transformer import HeadNorm, PositionalAttention, SpectralLayer, interpolated

LINE = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(32,), periods=(1.0,))
PLANE = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(9, 12))
FLOW = Spec(dim=2, in_times=10, in_channels=1, out_times=20, out_channels=1, grid=(64, 64), periods=(1.0, 1.0))
SMALL = GalerkinTransformerConfig(width=6, heads=2, depth=2, feedforward=5, channels=4, modes=3, head=3)


def count(spec: Spec, config: GalerkinTransformerConfig) -> int:
    return sum(p.numel() for p in config.build(spec).parameters())


def test_published_layouts_have_the_published_sizes():
    flow = GalerkinTransformerConfig(
        width=48, feedforward=96, norm="latents", coords=True, channels=20, modes=12, head=20
    )
    darcy = GalerkinTransformerConfig(
        width=128, heads=4, depth=6, feedforward=256, coarse=43, channels=32, modes=12, decoder_coords=True, head=128
    )
    assert count(LINE, GalerkinTransformerConfig(kind="fourier")) == 530_305
    assert count(dataclasses.replace(PLANE, grid=(141, 141)), darcy) == 2_220_829
    assert count(FLOW, flow) == 862_049
    assert count(FLOW, dataclasses.replace(flow, width=96)) == 1_566_161
    assert count(FLOW, dataclasses.replace(flow, width=96, feedforward=192)) == 1_640_273


def normalized(x: Tensor, norm: HeadNorm | None, head: int) -> Tensor:
    """A LayerNorm of one vector, written out."""
    if norm is None:
        return x
    x = x - x.mean()
    return x / torch.sqrt(x.square().mean() + norm.epsilon) * norm.weight[head] + norm.bias[head]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["galerkin", "fourier"])
@pytest.mark.parametrize("norm", ["heads", "latents"])
def test_attention_is_the_sum_over_points(kind, norm):
    config = dataclasses.replace(SMALL, kind=kind, norm=norm, gain=0.7)
    layer, points, width = PositionalAttention(config, 2), 5, 3
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    x, coords, weights = torch.randn(points, 6), torch.rand(points, 2), torch.rand(points)
    norms = {"galerkin": "kv", "fourier": "qk"}[kind] if norm == "heads" else ""
    assert sorted(layer.norms) == sorted(norms)
    joined = torch.zeros(points, 2 * (width + 2))
    for head in range(2):
        rows = slice(width * head, width * (head + 1))

        def vector(name: str, i: int, head: int = head, rows: slice = rows) -> Tensor:
            projection = layer.get_submodule(name)
            own = projection.weight[rows] @ x[i] + projection.bias[rows]
            return torch.cat([coords[i], normalized(own, layer.norms[name] if name in norms else None, head)])

        for i in range(points):
            for j in range(points):
                product = vector("q", i) @ vector("k", j)
                if kind == "fourier":
                    product = product / math.sqrt(width + 2)
                joined[i, 5 * head : 5 * head + 5] += weights[j] * product * vector("v", j)
    expected = joined @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x[None], coords[None], weights[None])[0], expected, rtol=1e-10, atol=1e-10)


def test_matrices_start_diagonal_with_a_small_gain():
    layer = PositionalAttention(dataclasses.replace(SMALL, gain=1e-3, diagonal=0.5), 1)
    for projection in (layer.q, layer.k, layer.v):
        torch.testing.assert_close(projection.weight, 0.5 * torch.eye(6), atol=2e-3, rtol=0)
        assert (projection.weight != 0.5 * torch.eye(6)).all()
        assert not projection.bias.any()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grid", [(9,), (6, 7)], ids=str)
def test_a_layer_of_the_decoder_is_that_of_fno_but_for_its_activation(grid):
    ours = SpectralLayer(4, 4, 2, len(grid))
    theirs = FourierLayer(FNOConfig(width=4, modes=2), len(grid), last=True)
    theirs.load_state_dict(ours.state_dict())
    v = torch.randn(2, *grid, 4)
    torch.testing.assert_close(ours(v), torch.nn.functional.silu(theirs(v)))


@pytest.mark.usefixtures("float64")
def test_a_layer_that_changes_the_number_of_channels_is_one_of_more_channels_with_zeros():
    narrow, wide = SpectralLayer(3, 5, 2, 1), SpectralLayer(5, 5, 2, 1)
    with torch.no_grad():
        wide.spectral.weight.zero_()[:, :3] = narrow.spectral.weight
        wide.beside.weight.zero_()[:, :3] = narrow.beside.weight
        wide.beside.bias.copy_(narrow.beside.bias)
    v = torch.randn(2, 9, 5)
    torch.testing.assert_close(narrow(v[..., :3]), wide(v))


def test_interpolation_keeps_the_corners_and_planes():
    x, y = cell_grid((5, 7), (1.0, 1.0)).float().T.unflatten(1, (5, 7))
    plane = (1 + 2 * x - 3 * y)[None, None]
    fine = interpolated(plane, (9, 4))
    assert torch.equal(fine[..., [0, 0, -1, -1], [0, -1, 0, -1]], plane[..., [0, 0, -1, -1], [0, -1, 0, -1]])
    torch.testing.assert_close(interpolated(fine, (5, 7)), plane)


def test_attention_on_a_coarse_grid_reads_its_points_and_equal_weights():
    model, seen = dataclasses.replace(SMALL, coarse=4).build(PLANE).eval(), []
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    coords = torch.stack(torch.meshgrid(torch.linspace(0, 1, 9), torch.linspace(0, 1, 12), indexing="ij"), -1)
    field = Field.of(coords.reshape(1, -1, 2).expand(3, -1, -1), torch.randn(3, 1, 108, 1))
    with torch.no_grad():
        assert model(field, field).shape == (3, 1, 108, 1)
    x, places, weights = seen[0]
    line = torch.linspace(0, 1, 4)
    torch.testing.assert_close(places[1], torch.cartesian_prod(line, line))
    assert places.stride(0) == 0
    torch.testing.assert_close(weights, torch.full((3, 16), 1 / 16))
    assert x.shape == (3, 16, 6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("coarse", [None, 4])
def test_a_batch_has_no_influence_on_its_samples_and_evaluation_draws_nothing(coarse):
    """The released code drops attention at random in evaluation too."""
    config = dataclasses.replace(SMALL, coarse=coarse, dropout=0.5, feedforward_dropout=0.5, coarse_dropout=0.5)
    model, points, values = config.build(PLANE), cell_grid((9, 12), (1.0, 1.0)), torch.randn(3, 1, 108, 1)
    together = Field.of(points.expand(3, -1, -1), values)
    with torch.no_grad():
        assert not torch.equal(model(together, together), model(together, together))
        model.eval()
        for one, row in zip(values, model(together, together), strict=True):
            alone = Field.of(points, one).batched()
            torch.testing.assert_close(model(alone, alone)[0], row)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["galerkin", "fourier"])
def test_answers_on_finer_grids_converge(kind):
    """Sums over points become integrals, of first order in the spacing: coordinates jump at the end of the period."""
    model = dataclasses.replace(SMALL, kind=kind, gain=1.0).build(LINE).eval()
    answers = []
    for points in (512, 1024, 2048):
        x = periodic_grid((points,), (1.0,))
        field = Field.of(x, torch.sin(2 * math.pi * x)).batched()
        with torch.no_grad():
            answers.append(model(field, field)[0, 0, :: points // 512])
    first, second = (float((a - b).abs().max() / b.std()) for a, b in itertools.pairwise(answers))
    assert second < 0.01
    assert first / second == pytest.approx(2, rel=0.15)


def test_it_marches_on_its_own_answers():
    spec = dataclasses.replace(PLANE, in_times=2, out_times=3)
    operator = Operator(dataclasses.replace(SMALL, coords=True).build(spec), Normalization("none", "none", "as-is"))
    points = cell_grid((9, 12), (1.0, 1.0)).float()[None]
    known = Field.of(points, torch.randn(1, 2, 108, 1))
    with torch.no_grad():
        frames = operator.eval()(known, known)
        for n in range(3):
            field = known.with_values(torch.cat([known.values, frames[:, :n]], 1)[:, -2:])
            torch.testing.assert_close(operator(field, field, 1)[:, 0], frames[:, n])
        with pytest.raises(InputError, match="one frame from one encoding by GalerkinTransformer, got times=3"):
            operator.model(known, known, 3)


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (dataclasses.replace(LINE, grid=None), SMALL, "a problem on a regular grid for Galerkin.*scattered points"),
        (dataclasses.replace(LINE, query_channels=1), SMALL, "values alone.*got .* 1 query features"),
        (LINE, dataclasses.replace(SMALL, modes=17), "at least 34 points along each axis for Galerkin.*got 32"),
        (LINE, dataclasses.replace(SMALL, coarse=8), "in the plane for GalerkinTransformer with `coarse`, got 1 axes"),
        (dataclasses.replace(PLANE, out_times=2, out_channels=2), SMALL, "channels of the input for Galerkin.*2 out"),
    ],
    ids=["scattered", "features", "few points", "line", "other channels"],
)
def test_problems_without_a_place_for_it_are_refused(spec, config, message):
    with pytest.raises(InputError, match=message):
        config.build(spec)


def test_a_grid_of_fewer_points_than_modes_is_refused():
    model = dataclasses.replace(SMALL, modes=16).build(LINE)
    field = Field.of(periodic_grid((31,), (1.0,)).float(), torch.randn(31)).batched()
    for ask in (model.check, model):
        with pytest.raises(InputError, match="at least 32 points along each axis for GalerkinTransformer of 16 modes"):
            ask(field, field)


@pytest.mark.parametrize(
    "setting",
    [{"width": 0}, {"heads": 5}, {"depth": 0}, {"modes": 0}, {"coarse": 1}, {"coarse": 3, "coords": True}],
    ids=str,
)
def test_settings_that_build_nothing_are_refused(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        GalerkinTransformerConfig(**setting)


COMPILED = """
import torch

from oformer.engine.runners import Compiled
from oformer.fields import Field, Spec
from oformer.meshes.grids import cell_grid
from oformer.models import GalerkinTransformerConfig, Normalization, Operator

spec = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(9, 12))
config = GalerkinTransformerConfig(width=6, heads=2, depth=2, feedforward=5, channels=4, modes=3, head=3, coarse=4)
operator = Operator(config.build(spec), Normalization("none", "none"))
field = Field.of(cell_grid((9, 12), (1.0, 1.0)).float().expand(2, -1, -1), torch.randn(2, 1, 108, 1))
torch.testing.assert_close(Compiled(operator).run(field, field), operator.predict_normalized(field, field))
"""


@pytest.mark.slow
def test_compiled_it_says_the_same():
    """In a process of its own, without shape checks, which are not for compilers."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
