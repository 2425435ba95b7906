"""The graph network: published size, messages against loops over edges, edges of meshes from their points."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import periodic_grid
from oformer.models import GraphNetworkConfig, graph_network
from oformer.models.graph_network import ChebyshevConvolution, graph_of, mesh_edges
from oformer.problems.poisson import SHAPES, default_numbers, geometry_of, mesh_of, random_numbers

SPEC = Spec(dim=2, in_times=1, in_channels=11, out_times=1, out_channels=3, query_channels=1)
SMALL = GraphNetworkConfig(width=5, depth=2, order=4, skipped=2)


def crooked(rows: int = 4, columns: int = 3) -> Tensor:
    """Points of a small irregular mesh."""
    return periodic_grid((rows, columns), (1.0, 1.0)) + 0.05 * torch.rand(rows * columns, 2)


def test_the_published_layout_has_the_published_size():
    model = GraphNetworkConfig(skipped=2).build(SPEC)
    assert sum(p.numel() for p in model.parameters()) == 280_835
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.convolutions, model.decoder)]
    assert sizes == [17_792, 246_144, 16_899]


@pytest.mark.usefixtures("float64")
def test_messages_are_a_loop_over_edges():
    points, x = crooked(), torch.randn(12, 5)
    edges = mesh_edges(points.numpy())
    length = {}
    for i, j in edges.tolist():
        length[i, j] = length[j, i] = math.dist(points[i].tolist(), points[j].tolist())
    degree = [sum(d for (i, _), d in length.items() if i == node) for node in range(12)]
    expected = torch.zeros(12, 5)
    for (i, j), d in length.items():
        expected[i] -= d / math.sqrt(degree[i] * degree[j]) * x[j]
    graph = graph_of(points[None], torch.ones(1, 12))
    torch.testing.assert_close(graph.received(x[None])[0], expected)


@pytest.mark.usefixtures("float64")
def test_a_convolution_is_the_sum_of_chebyshev_polynomials_of_a_matrix():
    points, x, order = crooked(), torch.randn(12, 5), 5
    graph = graph_of(points[None], torch.ones(1, 12))
    matrix = graph.received(torch.eye(12)[None])[0]
    torch.testing.assert_close(matrix, matrix.T)
    values, vectors = torch.linalg.eigh(matrix)
    assert float(values.abs().max()) < 1 + 1e-12  # where the polynomials are cosines
    layer = ChebyshevConvolution(5, order)
    expected = layer.mix.bias + torch.zeros(12, 5)
    for k, weight in enumerate(layer.mix.weight.chunk(order, 1)):
        polynomial = vectors @ torch.diag(torch.cos(k * torch.arccos(values.clamp(-1, 1)))) @ vectors.T
        expected = expected + polynomial @ x @ weight.T
    torch.testing.assert_close(layer(x[None], graph)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("float64")
def test_the_samples_of_a_batch_have_graphs_of_their_own_and_padding_has_no_edges():
    few, many = crooked(3), crooked(4)
    coords = torch.stack([torch.cat([few, torch.rand(3, 2)]), many])
    weights = torch.tensor([[1.0] * 9 + [0.0] * 3, [1.0] * 12])
    graph = graph_of(coords, weights)
    assert len(graph.senders) == 2 * (len(mesh_edges(few.numpy())) + len(mesh_edges(many.numpy())))
    assert torch.equal(graph.senders < 12, graph.receivers < 12)
    assert not torch.isin(torch.tensor([9, 10, 11]), graph.senders).any()


@pytest.mark.usefixtures("float64")
def test_a_change_travels_as_far_as_there_are_messages():
    points = periodic_grid((12, 3), (4.0, 1.0))
    model = GraphNetworkConfig(width=5, depth=2, order=3).build(dataclasses.replace(SPEC, in_channels=1))
    values = torch.randn(1, 36, 1)
    changed = values.clone()
    changed[0, :3] += 1.0
    answers = [model(field, field)[0, 0] for field in (Field.of(points, v).batched() for v in (values, changed))]
    moved = (answers[0] - answers[1]).abs().amax(1).view(12, 3).amax(1) > 0
    assert moved.tolist() == [True] * 5 + [False] * 7  # two convolutions, of two messages each


@pytest.mark.usefixtures("float64")
def test_coordinates_among_the_channels_are_skipped():
    model, points = SMALL.build(SPEC), crooked()
    values = torch.randn(1, 12, 11)
    other = torch.cat([torch.randn(1, 12, 2), values[..., 2:]], -1)
    fields = [Field.of(points, v).batched() for v in (values, other)]
    assert torch.equal(*(model(field, field) for field in fields))


@pytest.mark.usefixtures("float64")
def test_derivatives_by_values_and_coordinates_are_right():
    model, weights = SMALL.build(SPEC), torch.full((1, 12), 1 / 12)

    def of(coords: Tensor, values: Tensor) -> Tensor:
        field = Field(coords, values, weights)
        return model(field, field).square().sum((0, 1, 2))

    inputs = [crooked()[None].requires_grad_(), torch.randn(1, 1, 12, 11, requires_grad=True)]
    assert torch.autograd.gradcheck(of, inputs, eps=1e-7, atol=1e-4, rtol=1e-4, fast_mode=True)


def shares(shape: str, numbers: list[float]) -> tuple[float, float, int]:
    """Of the edges of a mesh, those found; of the edges found, those of the mesh; and how many are false."""
    mesh = mesh_of(geometry_of(shape, numbers))
    found = {tuple(edge) for edge in mesh_edges(mesh.points.float().double().numpy()).tolist()}
    true = {tuple(edge) for edge in mesh.edges.tolist()}
    return len(found & true) / len(true), len(found & true) / len(found), len(found - true)


@pytest.mark.parametrize("shape", SHAPES)
def test_edges_of_the_default_meshes_are_found_from_their_points(shape):
    found, right, false = shares(shape, default_numbers(shape))
    assert found == 1
    assert false == {"l": 1, "u": 2}.get(shape, 0)  # across each inner corner
    assert right > 0.98


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "disc"])
def test_edges_of_randomized_meshes_are_found_from_their_points(shape):
    generator = np.random.default_rng(0)
    for _ in range(3):
        found, right, _ = shares(shape, random_numbers(shape, generator))
        assert found > 0.99
        assert right > 0.96


def test_edges_do_not_depend_on_the_order_or_the_place_of_the_points():
    """The squares of a grid could be cut both ways."""
    points = periodic_grid((6, 5), (1.0, 1.0)).numpy()
    edges = {frozenset(edge) for edge in mesh_edges(points).tolist()}
    assert len(edges) == 5 * 5 + 6 * 4 + 5 * 4
    order = np.random.default_rng(0).permutation(30)
    moved = {frozenset(order[list(edge)].tolist()) for edge in mesh_edges(points[order] + 0.3).tolist()}
    assert moved == edges


def test_edges_of_a_mesh_are_computed_once(monkeypatch):
    asked = []
    monkeypatch.setattr(graph_network, "mesh_edges", lambda points: asked.append(1) or mesh_edges(points))
    coords = (periodic_grid((5, 5), (1.0, 1.0)) + 0.123).float()[None].expand(3, -1, -1)
    for _ in range(2):
        graph_of(coords, torch.ones(3, 25))
    assert len(asked) == 1


@pytest.mark.parametrize("count", [2, 6])
def test_points_that_span_no_plane_are_refused(count):
    points = torch.linspace(0, 1, count)[:, None].expand(-1, 2)
    field = Field.of(points, torch.rand(1, len(points), 11)).batched()
    with pytest.raises(InputError, match=rf"span a plane for GraphNetwork.*got {len(points)} points that do not"):
        SMALL.build(SPEC).check(field, field)


def test_a_recording_is_refused_by_the_name_of_its_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InputError, match=r"recorded as CUDA graphs for GraphNetwork.*got training\.capture"):
        graph_of(crooked()[None], torch.ones(1, 12))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dataclasses.replace(SPEC, dim=1), "in the plane, without a period, for GraphNetwork, got 1 axes"),
        (dataclasses.replace(SPEC, periods=(1.0, 1.0)), "without a period.*got 2 axes with a period"),
        (dataclasses.replace(SPEC, out_times=2), "a steady problem for GraphNetwork, got 2 frames"),
        (dataclasses.replace(SPEC, in_categories=3), "values alone.*got 3 categories"),
        (dataclasses.replace(SPEC, in_channels=2), "`skipped` below the 2 of the input, got 2"),
    ],
    ids=["line", "period", "time", "categories", "channels"],
)
def test_problems_without_a_place_for_it_are_refused(spec, message):
    with pytest.raises(InputError, match=message):
        SMALL.build(spec)


@pytest.mark.parametrize("setting", [{"width": 0}, {"depth": 0}, {"order": 0}, {"skipped": -1}], ids=str)
def test_settings_that_build_nothing_are_refused(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        GraphNetworkConfig(**setting)


def test_one_frame_is_answered():
    field = Field.of(crooked().float(), torch.rand(1, 12, 11)).batched()
    with pytest.raises(InputError, match="one frame of a steady problem, got times=2"):
        SMALL.build(SPEC)(field, field, 2)
