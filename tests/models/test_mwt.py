"""MWT: published sizes, filters and wavelets against their definitions, a layer against loops, what it refuses."""

import dataclasses
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from numpy.polynomial import Legendre
from torch import Tensor

from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.models import MWTConfig, Normalization, Operator
from oformer.models.mwt import MWT, LocalConvolution, MultiwaveletLayer, convolved, decomposed, filters, reconstructed
from tests.models.test_fno import COMPILED

LINE = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(32,), periods=(1.0,))
PLANE = Spec(dim=2, in_times=2, in_channels=1, out_times=3, out_channels=1, grid=(8, 4), periods=(2.0, 1.0))
SMALL = MWTConfig(polynomials=2, channels=2, modes=2, time_modes=2, depth=2, head=5)


def count(spec: Spec, config: MWTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.build(spec).parameters())


def test_published_layouts_have_the_published_sizes():
    flow = Spec(dim=2, in_times=10, in_channels=1, out_times=20, out_channels=1, grid=(64, 64), periods=(1.0, 1.0))
    flows = MWTConfig(polynomials=3, channels=4, modes=12, time_modes=10, depth=4, batch_norm=True)
    darcy = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(512, 512))
    assert count(LINE, MWTConfig(polynomials=4, channels=16, modes=10, depth=2, coords=False)) == 500_137
    assert count(darcy, MWTConfig(polynomials=4, channels=4, modes=12, depth=4)) == 9_807_873
    assert count(flow, flows) == 179_186_009
    longer = dataclasses.replace(flow, out_times=40)
    assert count(longer, dataclasses.replace(flows, time_modes=12)) == 215_017_817


def test_there_are_no_more_modes_of_time_than_frequencies_of_the_frames():
    shorter = dataclasses.replace(PLANE, out_times=6)
    assert count(shorter, dataclasses.replace(SMALL, time_modes=9)) == count(
        shorter, dataclasses.replace(SMALL, time_modes=4)
    )


def all_filters(k: int, dim: int) -> Tensor:
    return torch.from_numpy(filters(k, dim))


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("dim", [1, 2])
def test_filters_are_orthonormal(k, dim):
    rows = filters(k, dim).reshape(-1, 2**dim * k**dim)
    np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-14)


@pytest.mark.parametrize("k", range(1, 6))
def test_filters_are_the_two_scale_relations_of_legendre_polynomials(k):
    """φ_i(x) is the sum of H_ij √2 φ_j(2x) on the left half and of the other H_ij √2 φ_j(2x - 1) on the right."""
    phi = [Legendre.basis(i, domain=[0, 1]) * math.sqrt(2 * i + 1) for i in range(k)]
    smooth = filters(k)[0]
    for half, i in itertools.product((0, 1), range(k)):
        x = (half + np.linspace(0, 1, 7)) / 2
        parts = sum(smooth[i, half * k + j] * math.sqrt(2) * phi[j](2 * x - half) for j in range(k))
        np.testing.assert_allclose(parts, phi[i](x), atol=1e-12)


def test_filters_of_one_polynomial_are_those_of_haar():
    np.testing.assert_allclose(filters(1)[:, 0], np.array([[1, 1], [1, -1]]) / math.sqrt(2), atol=1e-15)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grid", [(8,), (4, 8), (8, 4)], ids=str)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("time", [(), (3,)], ids=["steady", "in time"])
def test_reconstruction_undoes_decomposition_and_keeps_the_length(grid, k, time):
    """With the coefficients of all kinds, down to one block along the shortest axis."""
    dim = len(grid)
    all_kinds, v = all_filters(k, dim), torch.randn(2, *grid, *time, 3 * k**dim)
    coarse, levels = v, []
    while min(coarse.shape[1 : 1 + dim]) > 1:
        coarse, *details = decomposed(coarse, all_kinds, dim)
        levels.append(details)
    length = coarse.square().sum() + sum(d.square().sum() for details in levels for d in details)
    torch.testing.assert_close(length, v.square().sum())
    for details in reversed(levels):
        coarse = reconstructed(torch.stack([coarse, *details]), all_kinds, dim)
    torch.testing.assert_close(coarse, v, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_in_the_plane_the_layer_keeps_two_kinds_of_four():
    """As published: what is left after a decomposition and a reconstruction is a projection, and not all."""
    kept, v = all_filters(2, 2)[[0, -1]], torch.randn(1, 4, 4, 8)
    once = reconstructed(decomposed(v, kept, 2), kept, 2)
    torch.testing.assert_close(reconstructed(decomposed(once, kept, 2), kept, 2), once, rtol=1e-12, atol=1e-12)
    assert once.norm() < 0.9 * v.norm()
    torch.testing.assert_close(MultiwaveletLayer(SMALL, 2, (2, 2)).filters, kept)


def coefficients(f, k: int, blocks: tuple[int, ...]) -> Tensor:
    """Of a function on the unit box, by quadrature: the integrals with the scaled polynomials of each block."""
    nodes, weights = np.polynomial.legendre.leggauss(9)
    result = np.zeros((*blocks, *[k] * len(blocks)))
    for place in itertools.product(*(range(n) for n in blocks)):
        for node in itertools.product(range(9), repeat=len(blocks)):
            x = [(block + (nodes[q] + 1) / 2) / n for block, q, n in zip(place, node, blocks, strict=True)]
            for degrees in itertools.product(range(k), repeat=len(blocks)):
                term = f(*x)
                for q, i, n in zip(node, degrees, blocks, strict=True):
                    term *= weights[q] / 2 * math.sqrt((2 * i + 1) / n) * Legendre.basis(i)(nodes[q])
                result[(*place, *degrees)] += term
    return torch.from_numpy(result).flatten(len(blocks))[None]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_polynomial_of_degree_below_k_has_no_wavelets(k):
    on_all_levels = [coefficients(lambda x: (x - 0.3) ** (k - 1) + 2, k, (n,)) for n in (8, 4, 2, 1)]
    for fine, coarse in itertools.pairwise(on_all_levels):
        s, d = decomposed(fine, all_filters(k, 1), 1)
        torch.testing.assert_close(s, coarse, rtol=1e-12, atol=1e-12)
        assert d.abs().max() < 1e-13
    _, d = decomposed(coefficients(lambda x: x**k, k, (8,)), all_filters(k, 1), 1)
    assert d.abs().min() > 1e-6 if k == 1 else d.abs().max() > 1e-6


@pytest.mark.usefixtures("float64")
def test_a_polynomial_of_both_coordinates_has_no_wavelets():
    """Along neither axis; of higher degree along one axis, it has those of that axis, which the layer does not see."""
    s, *details = decomposed(coefficients(lambda x, y: (x - 0.2) * (1 + y), 2, (2, 2)), all_filters(2, 2), 2)
    torch.testing.assert_close(s, coefficients(lambda x, y: (x - 0.2) * (1 + y), 2, (1, 1)))
    assert max(float(d.abs().max()) for d in details) < 1e-13
    _, y, x, both = decomposed(coefficients(lambda x, y: x**2 * y, 2, (2, 2)), all_filters(2, 2), 2)
    assert max(y.abs().max(), both.abs().max()) < 1e-13 < 1e-3 < x.abs().max()


def modes_of(points: int, most: int, last: bool) -> list[int]:
    """The frequencies of an axis that have a matrix."""
    if last:
        return [f for f in range(points // 2 + 1) if f < most]
    return [f for f in range(-(points // 2), (points + 1) // 2) if -most <= f < most]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("grid", "modes"),
    [((16,), (3,)), ((4,), (9,)), ((1,), (3,)), ((8, 8), (2, 3)), ((4, 2), (3, 3)), ((1, 2, 5), (2, 2, 2))],
    ids=str,
)
def test_the_convolution_is_the_sum_over_the_modes_that_the_grid_has(grid, modes):
    width = 2
    weight = torch.randn(*(2 * m for m in modes[:-1]), modes[-1], width, width, 2)
    v = torch.randn(2, *grid, width)
    points = torch.stack(torch.meshgrid(*(torch.arange(n) / n for n in grid), indexing="ij"), -1).reshape(-1, len(grid))
    matrices, expected = torch.view_as_complex(weight), torch.zeros(2, len(points), width)
    every = [modes_of(n, m, last=axis + 1 == len(grid)) for axis, (n, m) in enumerate(zip(grid, modes, strict=True))]
    for mode in itertools.product(*every):
        wave = torch.exp(2j * math.pi * (points @ torch.tensor(mode, dtype=points.dtype)))
        amount = torch.einsum("p,bpi->bi", wave.conj(), v.flatten(1, -2) + 0j) / len(points)
        part = torch.einsum("p,bo->bpo", wave, amount @ matrices[mode])
        # A mode and its conjugate are one real wave; along the last axis only half of the modes are written down.
        expected += part.real * (1 if mode[-1] in (0, grid[-1] / 2) else 2)
    torch.testing.assert_close(convolved(v, weight).flatten(1, -2), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_a_convolution_with_near_blocks_has_zeros_outside_of_the_grid():
    layer, v = LocalConvolution(2), torch.randn(1, 3, 4, 2)
    said, weight = layer(v), layer.conv.weight
    for i, j in itertools.product(range(3), range(4)):
        expected = layer.conv.bias.clone()
        for a, b in itertools.product((-1, 0, 1), repeat=2):
            if 0 <= i + a < 3 and 0 <= j + b < 4:
                expected = expected + weight[:, :, a + 1, b + 1] @ v[0, i + a, j + b]
        torch.testing.assert_close(said[0, i, j], expected)


def by_loops(layer: MultiwaveletLayer, s: Tensor, k: int, dim: int) -> Tensor:
    """One layer, as the equations of the module have it: block after block and channel after channel.

    Values have the axes batch, grid, channels, coefficients; A, B, C and T are those of the layer.
    """
    first, last = filters(k)  # of a line: (k, 2k) each
    # By half of a block along each axis: that of polynomials and that of wavelets, with the axes of a block.
    low, high = ([torch.from_numpy(f[:, half * k : (half + 1) * k]) for half in (0, 1)] for f in (first, last))
    halves = list(itertools.product((0, 1), repeat=dim))

    def along_axes(matrices: list[Tensor]) -> Tensor:
        return matrices[0] if dim == 1 else torch.kron(*matrices)

    def learned(part: torch.nn.Module, x: Tensor) -> Tensor:
        return part(x.flatten(-2)).unflatten(-1, x.shape[-2:])

    if s.shape[1] == 1:
        each_channel = layer.lowest.in_features == k  # on a line; else T acts on all channels together
        return layer.lowest(s) if each_channel else learned(layer.lowest, s)
    coarse = tuple(n // 2 for n in s.shape[1 : 1 + dim])
    smooth = torch.zeros(s.shape[0], *coarse, *s.shape[1 + dim :])
    detail = torch.zeros_like(smooth)
    blocks = list(itertools.product(*(range(n) for n in coarse)))
    for block, half in itertools.product(blocks, halves):
        fine = s[(slice(None), *(2 * at + h for at, h in zip(block, half, strict=True)))]
        smooth[(slice(None), *block)] += fine @ along_axes([low[h] for h in half]).T
        detail[(slice(None), *block)] += fine @ along_axes([high[h] for h in half]).T
    below = by_loops(layer, smooth, k, dim) + learned(layer.c, detail)
    details = learned(layer.a, detail) + learned(layer.b, smooth)
    result = torch.zeros_like(s)
    for block, half in itertools.product(blocks, halves):
        here = (slice(None), *block)
        value = below[here] @ along_axes([low[h] for h in half])
        value = value + details[here] @ along_axes([high[h] for h in half])
        result[(slice(None), *(2 * at + h for at, h in zip(block, half, strict=True)))] = value
    return result


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("grid", "time", "k"), [((16,), (), 3), ((8, 8), (), 2), ((4, 4), (5,), 2), ((8,), (4,), 3)], ids=str
)
def test_a_layer_is_its_equations_in_loops(grid, time, k):
    dim, channels = len(grid), 2
    config = MWTConfig(polynomials=k, channels=channels, modes=2)
    layer = MultiwaveletLayer(config, dim, (2,) * dim + (2,) * len(time))
    s = torch.randn(2, *grid, *time, channels, k**dim)
    expected = by_loops(layer, s, k, dim)
    torch.testing.assert_close(layer(s.flatten(-2)).view_as(s), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("dim", "modes", "k"), [(1, (2,), 2), (2, (1, 1), 1), (2, (1, 1, 2), 1)], ids=["line", "plane", "in time"]
)
def test_derivatives_of_a_layer_by_values_and_parameters_are_right(dim, modes, k):
    layer = MultiwaveletLayer(MWTConfig(polynomials=k, channels=2, modes=2), dim, modes)
    names, start = zip(*layer.named_parameters(), strict=True)
    s = torch.randn(1, *[4] * dim, *[3] * (len(modes) - dim), 2 * k**dim, requires_grad=True)

    def of(s: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (s,))

    assert torch.autograd.gradcheck(of, (s, *(p.detach().requires_grad_() for p in start)), fast_mode=True)


def test_a_grid_of_another_size_is_padded_behind_its_points():
    """To the next power of two; on that grid, with zeros there, the layers say the same."""
    spec = dataclasses.replace(LINE, grid=(11,), periods=None)
    model = dataclasses.replace(SMALL, depth=1, coords=False).build(spec)
    assert isinstance(model, MWT)
    assert [model.padded(grid) for grid in ((11,), (16,), (17,), (1,), (2,))] == [(16,), (16,), (32,), (2,), (2,)]
    field = Field.of(torch.linspace(0, 1, 11)[:, None], torch.randn(11)).batched()
    with torch.no_grad():
        lifted = model.lift(field.values[:, 0])
        padded = torch.cat([lifted, torch.zeros(1, 5, lifted.shape[-1])], 1)
        torch.testing.assert_close(model.encode(field), model.layers[0](padded)[:, :11])


def test_it_reads_a_plane_of_141_points_a_side_as_one_of_256():
    spec = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(141, 141))
    model = dataclasses.replace(SMALL, polynomials=1, channels=1, depth=1).build(spec)
    assert isinstance(model, MWT)
    assert model.padded((141, 141)) == (256, 256)
    x = torch.linspace(0, 1, 141)
    field = Field.of(torch.cartesian_prod(x, x), torch.randn(141**2)).batched()
    with torch.no_grad():
        assert model(field, field).shape == (1, 1, 141**2, 1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("time", ["march", "block"])
def test_it_predicts_frames_one_by_one_or_at_once(time):
    model = dataclasses.replace(SMALL, time=time).build(PLANE)
    operator = Operator(model, Normalization("none", "none", "as-is")).eval()
    assert model.frames_per_encoding == (1 if time == "march" else None)
    points = periodic_grid((8, 4), (2.0, 1.0))[None]
    known = Field.of(points, torch.randn(1, 2, 32, 1))
    with torch.no_grad():
        frames = operator(known, known)
        assert frames.shape == (1, 3, 32, 1)
        torch.testing.assert_close(operator(known, known, 2), frames[:, :2])
        if time == "march":
            seen = torch.cat([known.values, frames], 1)
            for n in range(3):
                field = dataclasses.replace(known, values=seen[:, n : n + 2])
                torch.testing.assert_close(operator(field, field, 1)[:, 0], frames[:, n])
        else:
            with pytest.raises(InputError, match=r"at most 3 frame\(s\) from one encoding by MWT, got times=4"):
                operator(known, known, 4)


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (dataclasses.replace(LINE, grid=None), SMALL, "a problem on a regular grid for MWT.*got scattered points"),
        (dataclasses.replace(LINE, query_channels=1), SMALL, "values alone.*for MWT, got .* 1 query features"),
        (
            dataclasses.replace(PLANE, grid=(8, 10)),
            SMALL,
            "2, 4, 8, ... points along each axis for MWT over a period.*got 8 x 10. Give the input on .* 8 x 16 for",
        ),
        (
            dataclasses.replace(PLANE, in_channels=2),
            dataclasses.replace(SMALL, time="march"),
            "channels of the input for MWT that marches.*got 2",
        ),
        (
            Spec(dim=3, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(4, 4, 4)),
            SMALL,
            "one or two dimensions for MWT, got 3. Train an FNO",
        ),
    ],
    ids=["scattered", "features", "no power of two", "other channels", "space"],
)
def test_problems_without_a_place_for_it_are_refused(spec, config, message):
    with pytest.raises(InputError, match=message):
        config.build(spec)


def test_a_periodic_grid_that_cannot_be_halved_to_one_block_is_refused():
    model = SMALL.build(LINE)
    field = Field.of(periodic_grid((24,), (1.0,)), torch.randn(24)).batched()
    with pytest.raises(InputError, match=r"points along each axis for MWT over a period.*got 24\. Give .* 32 for"):
        model.check(field, field)


@pytest.mark.parametrize("name", ["polynomials", "channels", "modes", "time_modes", "depth", "head"])
def test_settings_that_build_nothing_are_refused(name):
    with pytest.raises(InputError, match=f"`{name}` of at least 1, got 0"):
        MWTConfig(**{name: 0})


def test_batch_normalization_is_over_samples_points_and_times():
    model = dataclasses.replace(SMALL, depth=1, batch_norm=True).build(PLANE).train()
    assert isinstance(model, MWT)
    assert model.mixes_samples
    assert not SMALL.build(PLANE).mixes_samples
    points = periodic_grid((8, 4), (2.0, 1.0)).float().expand(6, -1, -1)
    latents = model.encode(Field.of(points, 30 * torch.randn(6, 2, 32, 1)))
    assert latents.shape == (6, 32, 3, 8)
    torch.testing.assert_close(latents.mean((0, 1, 2)), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.var((0, 1, 2), correction=0), torch.ones(8), atol=1e-2, rtol=0)


def test_files_hold_no_filters():
    assert not [name for name in SMALL.build(LINE).state_dict() if "filters" in name]


@pytest.mark.parametrize("time", ["march", "block"])
def test_autocast_leaves_the_transforms_in_float32(time):
    """Fourier transforms have no bfloat16 on any device."""
    operator = Operator(dataclasses.replace(SMALL, time=time).build(PLANE), Normalization())
    points = periodic_grid((8, 4), (2.0, 1.0)).float()[None]
    field = Field.of(points, torch.randn(1, 2, 32, 1))
    with torch.no_grad():
        full = operator(field, field)
        rounded = Plain(operator, "bfloat16")(field, field)
    assert rounded.dtype == torch.float32
    assert 0 < float((rounded - full).abs().max()) < 0.05


@pytest.mark.slow
def test_compiled_it_says_the_same_and_the_compiler_says_nothing_of_complex_numbers():
    """In a process of its own, without shape checks, which are not for compilers."""
    script = COMPILED.replace("FNOConfig(width=4, modes=2, depth=2, head=5)", repr(SMALL)).replace("FNO", "MWT")
    script = script.replace("(8, 10)", "(8, 16)").replace("torch.randn(2, 2, 80, 1)", "torch.randn(2, 2, 128, 1)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
