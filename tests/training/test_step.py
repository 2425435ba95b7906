"""A step that is recorded, compiled or rounded is the plain step."""

import dataclasses
import functools
import math
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oformer.checkpoint import checkpoints, load_tensors
from oformer.config import from_json, to_json
from oformer.data.dataset import PointDataset
from oformer.data.loader import padded
from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.experiments.recipes import RECIPES
from oformer.fields import Batch, Field, Sample, Spec, collate
from oformer.gpu import CudaGraphs, Work
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.base import Precision
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.nn.features import RandomFourier
from oformer.nn.rotary import Rotary
from oformer.training import step
from oformer.training.distributed import Ranks
from oformer.training.evaluate import errors
from oformer.training.find_data import open_data
from oformer.training.journal import read_journal
from oformer.training.loop import Outcome, train
from oformer.training.losses import Loss
from oformer.training.optimizers import Descent, Optimizer
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.resume import STATE
from oformer.training.schedules import Horizon
from oformer.training.step import Stepper, used_precision
from tests.forked import printed
from tests.tiny import TINY_FLOW, tiny_recipe

SIDE = 8
SPEC = Spec(dim=2, in_times=3, in_channels=1, out_times=6, out_channels=1, grid=(SIDE, SIDE), periods=(1.0, 1.0))


class FakeGraphs:
    """Work that is warmed up and done again by Python, with its results in memory that stays, as a graph's does."""

    def __init__(self):
        self.records = 0

    def __call__(self, work: Work, warm_up: int) -> Work:
        self.records += 1
        random = torch.get_rng_state()
        for _ in range(warm_up):
            work()
        torch.set_rng_state(random)
        kept: list[Tensor] = []

        def replay() -> None:
            work()
            if hasattr(work, "numbers"):
                kept.extend([work.numbers] * (not kept))
                work.numbers = kept[0].copy_(work.numbers)

        return replay


def navier_stokes(**changes) -> Operator:
    """Small, in the manner of the Navier-Stokes recipes, with statistics that are not the identity."""
    torch.manual_seed(1)
    config = OFormerConfig(
        encoder=Encoder(width=32, depth=2, multipliers=(256.0, 64.0)),
        query=Query(width=48, fourier_features=48, sigma=8.0, hidden=(48,), heads=2, multiplier=128.0),
        propagator=Propagator(depth=1, width=64, expand_bias=True, layernorm=True, context=("coords",)),
        decoder=Decoder(hidden=(48, 48), layernorm=True),
    )
    operator = Operator(dataclasses.replace(config, **changes).build(SPEC), Normalization("scalar", "scalar"))
    return operator.fit(collated_samples(4)).train()


def collated_samples(count: int, seed: int = 0) -> list[Sample]:
    """Smooth fields on one grid that all samples share."""
    draw = torch.Generator().manual_seed(seed)
    line = torch.arange(SIDE) / SIDE
    coords = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).reshape(-1, 2)
    grid = Field.of(coords)
    samples = []
    for _ in range(count):
        phase, size = torch.rand(2, generator=draw), 1 + torch.rand(1, generator=draw)
        times = torch.arange(9.0)[:, None, None] / 9
        angle = 2 * torch.pi * (coords + phase) + times
        values = 3 * (size * angle.sin().prod(-1) + 0.3 * (2 * angle).cos().sum(-1)).unsqueeze(-1)
        samples.append(Sample(Field(coords, values[:3], grid.weights), grid, values[3:]))
    return samples


def batches(*sizes: int) -> list[Batch]:
    return [collate(collated_samples(size, seed)) for seed, size in enumerate(sizes)]


def gradients(operator: Operator) -> list[Tensor]:
    return [p.grad.clone() for p in operator.parameters() if p.grad is not None]


def training(**changes) -> Training:
    loss = Loss("relative-step", derivative=0.05, derivative_rows=True)
    return dataclasses.replace(Training(steps=10, loss=loss), **changes)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_step_is_the_plain_one(accumulate):
    """Sizes and horizons in turn, so that each recording is met with other samples than its own, and again later."""
    settings = training(accumulate=accumulate)
    one, other = navier_stokes(), navier_stokes()
    graphs = FakeGraphs()
    plain, recorded = Stepper(one, settings, "cpu"), Stepper(other, settings, "cpu", record=graphs)
    for batch, times in zip(batches(4, 2, 4, 4, 2, 4, 2, 4), (6, 6, 6, 3, 6, 6, 6, 3), strict=True):
        expected, found = plain(batch, times), recorded(batch, times)
        assert found.keys() == expected.keys() == {"loss", "error", "derivative"}
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert all(torch.equal(a, b) for a, b in zip(gradients(other), gradients(one), strict=True))
    assert graphs.records == 3


def test_losses_can_be_read_after_the_next_step():
    operator = navier_stokes()
    stepper = Stepper(operator, training(), "cpu", record=FakeGraphs())
    found = [stepper(batch, 6) for batch in batches(2, 2, 2, 2)]
    plain = Stepper(operator, training(), "cpu")
    for numbers, batch in zip(found, batches(2, 2, 2, 2), strict=True):
        assert torch.equal(numbers["loss"], plain(batch, 6)["loss"])


def test_gradients_lie_where_they_lay_so_that_the_descent_can_be_recorded():
    operator = navier_stokes()
    stepper = Stepper(operator, training(), "cpu", record=FakeGraphs())
    places = []
    for batch in batches(2, 3, 2, 2):
        stepper(batch, 6)
        places.append([p.grad.data_ptr() for p in operator.parameters()])
    assert places[0] == places[1] == places[2] == places[3]


def test_recordings_that_are_forgotten_are_gone_and_made_anew():
    one, other, graphs = navier_stokes(), navier_stokes(), FakeGraphs()
    plain, recorded = Stepper(one, training(), "cpu"), Stepper(other, training(), "cpu", record=graphs)
    (batch,) = batches(2)

    def compare(*horizons: int) -> None:
        for times in horizons:
            assert torch.equal(recorded(batch, times)["loss"], plain(batch, times)["loss"])
            assert all(torch.equal(a, b) for a, b in zip(gradients(other), gradients(one), strict=True))

    compare(3, 3, 3)
    gone = [weakref.ref(found) for found, _ in recorded._recorded.values()]
    recorded.forget()
    assert [reference() for reference in gone] == [None]
    compare(6, 6, 3, 6, 3)
    assert graphs.records == 3


def test_only_so_many_shapes_are_recorded_and_the_others_are_right(monkeypatch):
    monkeypatch.setattr(step, "RECORDS", 2)
    one, other, graphs = navier_stokes(), navier_stokes(), FakeGraphs()
    plain, recorded = Stepper(one, training(), "cpu"), Stepper(other, training(), "cpu", record=graphs)
    (batch,) = batches(2)
    for times in (1, 2, 3, 4) * 3:
        assert torch.equal(recorded(batch, times)["loss"], plain(batch, times)["loss"])
        assert all(torch.equal(a, b) for a, b in zip(gradients(other), gradients(one), strict=True))
    assert graphs.records == 2


class Watched(Operator):
    """Notes whether the grids that it is given are one for all samples, and how targets lie in memory."""

    def predict_normalized(self, input, query, times=None, encoded_once=None):
        self.seen = [t.stride(0) == 0 for t in (input.coords, query.coords, input.values)]
        return super().predict_normalized(input, query, times, encoded_once)

    def on_scale(self, values, batch, scale):
        self.contiguous = batch.target.is_contiguous()
        return super().on_scale(values, batch, scale)


def test_a_grid_that_samples_share_stays_shared_in_a_recording():
    plain = navier_stokes()
    operator = Watched(plain.model, plain.normalization).train()
    stepper = Stepper(operator, training(), "cpu", record=FakeGraphs())
    for batch in batches(3, 3, 3):
        stepper(batch, 6)
        assert operator.seen == [True, True, False]
    apart = batches(3)[0]
    apart = dataclasses.replace(apart, input=Field(apart.input.coords.clone(), apart.input.values, apart.input.weights))
    stepper(apart, 6)  # another shape, as far as a recording is concerned
    assert operator.seen == [False, True, False]


def test_a_batch_in_another_layout_is_the_same_batch():
    """Neither recorded nor compiled once more."""
    plain, graphs = navier_stokes(), FakeGraphs()
    operator = Watched(plain.model, plain.normalization).train()
    stepper = Stepper(operator, training(), "cpu", record=graphs)
    batch = batches(2)[0]
    turned = dataclasses.replace(batch, target=batch.target.transpose(1, 2).contiguous().transpose(1, 2))
    losses = []
    for one in (turned, batch, turned):
        losses.append(stepper(one, 6)["loss"])
        assert operator.contiguous
    assert graphs.records == 1
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("points", [SIDE**2, SIDE**2 + 13])
def test_padding_changes_neither_loss_nor_gradients(points, float64):
    operator = navier_stokes().double()
    batch = batches(3)[0].to(torch.float64)
    wider = padded(batch, (points, points))
    assert (wider.input.points, wider.query.points) == (points, points)
    assert wider.query.coords.stride(0) == 0
    stepper = Stepper(operator, Training(steps=1), "cpu")  # a loss without derivatives, which need the grid
    numbers, expected = stepper(batch, 6), gradients(operator)
    torch.testing.assert_close(stepper(wider, 6), numbers, rtol=1e-12, atol=0)
    for found, gradient in zip(gradients(operator), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_captured_is_refused_in_words():
    operator, asked = navier_stokes(), training(capture=True)
    with pytest.raises(InputError, match=r"a GPU .* for training\.capture, got cpu"):
        Stepper(operator, asked, "cpu")
    with pytest.raises(InputError, match="points split over ranks"):
        Stepper(operator, asked, "cpu", Ranks(0, 2, "points"), FakeGraphs())
    # Not asked for, it is left out.
    assert Stepper(operator, training(), "cpu", Ranks(0, 2, "points"), FakeGraphs()).record is None
    assert Stepper(operator, training(capture=False), "cpu", record=FakeGraphs()).record is None
    assert Stepper(operator, training(), "cpu").record is None
    assert not Stepper(operator, training(), "cpu").runner.compiles


# The optimizers.


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_a_recorded_descent_is_the_plain_one(kind):
    settings = training(optimizer=Optimizer(kind, 0.01, 0.01, 0.1, kind == "adamw", (("encoder", 0.1), ("all", 0.5))))
    one, other, graphs = navier_stokes(), navier_stokes(), FakeGraphs()
    steppers = Stepper(one, settings, "cpu"), Stepper(other, settings, "cpu", record=graphs)
    descents = Descent(one, settings.optimizer), Descent(other, settings.optimizer, graphs)
    for n, batch in enumerate(batches(2, 3, 2, 3, 2)):
        for stepper, descent in zip(steppers, descents, strict=True):
            stepper(batch, 6)
            descent.step(0.2 * (n + 1), 0.95 - 0.02 * n)
    assert graphs.records == 3  # two sizes of batch, and one descent for both
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_a_move_reads_its_changing_numbers_from_tensors(kind):
    """A graph repeats the numbers that Python gave it when it was recorded: there must be none that change."""
    operators = navier_stokes(), navier_stokes()
    descents = [Descent(operator, Optimizer(kind, 0.01, 0.02, 0.1)) for operator in operators]
    (batch,) = batches(2)
    for n in range(3):
        for operator, descent in zip(operators, descents, strict=True):
            Stepper(operator, training(), "cpu")(batch, 6)
            for optimizer in descent.optimizers:
                optimizer.param_groups[0]["lr"] = 0.01 / (n + 1)
                optimizer.fill()
                if operator is operators[1]:
                    optimizer.param_groups[0].update(lr=float("nan"), beta1=float("nan"))
                optimizer.move()
            for optimizer in descent.optimizers:
                optimizer.param_groups[0]["beta1"] = 0.9 - 0.1 * n
    assert all(torch.equal(a, b) for a, b in zip(*(o.parameters() for o in operators), strict=True))


def test_gradients_elsewhere_are_not_taken_from_a_recording():
    """A loop of one's own, or a step that is not recorded, brings its own gradients."""
    settings = Optimizer("adamw", 0.01)
    one, other, graphs = navier_stokes(), navier_stokes(), FakeGraphs()
    descents = Descent(one, settings), Descent(other, settings, graphs)
    for seed in range(4):
        for operator, descent in zip((one, other), descents, strict=True):
            draw = torch.Generator().manual_seed(seed)
            for p in operator.parameters():
                p.grad = torch.randn(p.shape, generator=draw)
            descent.step(1.0, 0.9)
    assert graphs.records == 0
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Waits(TorchDispatchMode):
    """Notes what would make a GPU wait for Python or Python for a GPU: forbidden in a recording."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A tensor from Python's numbers, a number from a tensor, a shape that depends on values.
        if any(name in str(func) for name in ("lift_fresh", "_local_scalar", "nonzero", "masked_select", "aten.equal")):
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["burgers-512", "darcy-85", "ns2-part", "electro", "airfoil"])
def test_nothing_waits_in_what_is_recorded(name):
    recipe = RECIPES[name]
    spec = recipe.data_spec()
    spec = dataclasses.replace(spec, grid=spec.grid and (SIDE,) * spec.dim)
    points = SIDE**spec.dim
    operator = Operator(recipe.model.build(spec), recipe.normalization).train()
    coords, weights = torch.rand(2, points, spec.dim), torch.full((2, points), 1 / points)
    input = Field(coords, torch.rand(2, spec.in_times, points, spec.in_channels), weights)
    query = Field(coords, torch.rand(2, 1, points, spec.query_channels), weights)
    batch = Batch(input, query, torch.rand(2, spec.out_times, points, spec.out_channels))
    recorded: list[Work] = []
    stepper = Stepper(operator, recipe.training, "cpu", record=lambda work, _: (recorded.append(work), work)[1])
    descent = Descent(operator, recipe.training.optimizer, stepper.record)
    for _ in range(2):
        stepper(batch, spec.out_times)
        descent.step(1.0, 0.9)
    gradients, move = recorded
    with Waits() as waits:
        gradients()
        for p, gradient in zip(operator.parameters(), stepper._gradients, strict=True):
            p.grad = gradient
        move()
    assert not waits.seen


# The loop.


def with_fake_graphs(monkeypatch) -> FakeGraphs:
    graphs = FakeGraphs()
    monkeypatch.setattr("oformer.training.run.Stepper", functools.partial(Stepper, record=graphs))
    return graphs


def run(recipe: Recipe, folder, data: PointDataset, **options) -> Outcome:
    splits = data.split("train"), data.split("test")
    return train(recipe, folder, splits, quiet=True, tensorboard=False, **options)


def state_of(folder) -> dict[str, Tensor]:
    newest = checkpoints(folder)[-1]
    return {**load_tensors(newest / "model.safetensors"), **load_tensors(newest / STATE)}


def test_a_recorded_run_is_the_plain_run_and_goes_on_as_one(tmp_path, tiny_data, monkeypatch):
    """With dropout, symmetries, Muon and an average; bit for bit, also across an interruption."""
    recipe = tiny_recipe(steps=8, drop=None, evaluate_every=4)
    run(recipe, tmp_path / "plain", tiny_data)
    graphs = with_fake_graphs(monkeypatch)
    run(recipe, tmp_path / "recorded", tiny_data)
    assert graphs.records == 2
    while not run(recipe, tmp_path / "parts", tiny_data, stop_after=0.0).finished:
        pass
    plain = state_of(tmp_path / "plain")
    for name in ("recorded", "parts"):
        found = state_of(tmp_path / name)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_a_longer_horizon_lets_the_recordings_of_shorter_ones_go(tmp_path, monkeypatch):
    """At the steps where it grows and at no other, also where a run goes on; and the run is the plain one."""
    recipe = dataclasses.replace(
        tiny_recipe(steps=12, drop=None, horizon=Horizon(first=1, ramp=0.75)),
        problem=dataclasses.replace(TINY_FLOW, duration=6),
        data=Data(train=5, test=3),
    )
    data = open_data(recipe, tmp_path / "datasets")
    run(recipe, tmp_path / "plain", data)
    graphs, asked, forgotten = with_fake_graphs(monkeypatch), [], []
    call, forget = Stepper.__call__, Stepper.forget

    def watched(self, batch, times):
        asked.append(times)
        found = call(self, batch, times)
        assert {shape[0] for shape in self._recorded} <= {times}
        return found

    monkeypatch.setattr(Stepper, "__call__", watched)
    monkeypatch.setattr(Stepper, "forget", lambda self: (forgotten.append(len(asked)), forget(self)))
    while not run(recipe, tmp_path / "parts", data, stop_after=0.0).finished:
        pass
    assert asked == sorted(asked)
    grown = [step for step in range(1, 12) if asked[step] > asked[step - 1]]
    assert len(grown) == 2
    assert forgotten == grown
    asked.clear()
    forgotten.clear()
    run(recipe, tmp_path / "recorded", data)
    assert forgotten == grown
    assert graphs.records == 4  # three horizons, and the descent
    plain, found = state_of(tmp_path / "plain"), state_of(tmp_path / "recorded")
    assert all(torch.equal(found[key], plain[key]) for key in plain)


def test_dropped_points_come_in_few_sizes(tmp_path, tiny_data, monkeypatch):
    sizes = set()
    with_fake_graphs(monkeypatch)
    call = Stepper.__call__

    def watched(self, batch, times):
        sizes.add(batch.input.points)
        return call(self, batch, times)

    monkeypatch.setattr(Stepper, "__call__", watched)
    assert run(tiny_recipe(steps=30), tmp_path, tiny_data).finished
    assert sizes <= {16, 20, 24, 28, 32}  # of 32 points between half and nine tenths are kept
    assert len(sizes) > 2


def test_the_first_row_says_how_long_the_start_took(tmp_path, tiny_data):
    recipe = tiny_recipe(steps=3)
    run(recipe, tmp_path, tiny_data, stop_after=0.0)
    run(recipe, tmp_path, tiny_data)
    rows = [r for r in read_journal(tmp_path) if r["kind"] == "train"]
    assert ["startup_seconds" in row for row in rows] == [True, True, False]
    assert 0 < rows[0]["startup_seconds"] < 60 * rows[0]["minutes"] + 1


def test_a_run_may_go_on_compiled_or_captured_otherwise(tmp_path, tiny_data):
    run(tiny_recipe(steps=2, capture=False), tmp_path, tiny_data, stop_after=0.0)
    assert run(tiny_recipe(steps=2, compile=False), tmp_path, tiny_data).finished


def test_settings_of_older_files_are_read():
    """`compile` was a plain yes or no."""
    content = to_json(Training(steps=3))
    for value in (False, True, None):
        assert from_json(Training, {**content, "compile": value}).compile is value


def without_shape_checks(call: str) -> None:
    """Call a function of this file in a process of its own: the shape checks of the tests cannot be compiled."""
    printed(f"from tests.training import test_step; test_step.{call}")


@pytest.mark.slow
def test_a_compiled_step_is_the_plain_one():
    without_shape_checks("compare_compiled()")


def compare_compiled() -> None:
    plain, compiled = navier_stokes(), navier_stokes()
    (batch,) = batches(2)
    steppers = Stepper(plain, training(), "cpu"), Stepper(compiled, training(compile=True), "cpu")
    assert steppers[1].runner.compiles
    assert torch._dynamo.config.recompile_limit >= 20  # horizons of a curriculum; beyond the limit nothing is compiled
    one, other = (stepper(batch, 1) for stepper in steppers)
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert relative(gradients(compiled), gradients(plain)) < 1e-4


def test_a_longer_horizon_compiles_nothing_again():
    without_shape_checks("compare_horizons()")


def compare_horizons() -> None:
    torch.compile = functools.partial(torch.compile, backend="eager")  # what is compiled, not to what
    plain, compiled = navier_stokes(), navier_stokes()
    (batch,) = batches(2)
    steppers = Stepper(plain, training(), "cpu"), Stepper(compiled, training(compile=True), "cpu")
    graphs = torch._dynamo.utils.counters["stats"]
    seen = []
    for times in (2, 3, 4):
        one, other = (stepper(batch, times) for stepper in steppers)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        assert relative(gradients(compiled), gradients(plain)) < 1e-4
        seen.append(graphs["unique_graphs"])
    assert seen[0] >= 2
    assert seen == seen[:1] * 3


@pytest.mark.slow
def test_the_loss_of_whole_sequences_is_compiled_as_well():
    without_shape_checks("compare_losses()")


def compare_losses() -> None:
    torch.compile = functools.partial(torch.compile, backend="eager")
    graphs, (batch,) = torch._dynamo.utils.counters["stats"], batches(2)
    for loss in (Loss(derivative=0.1), Loss("relative-step", derivative=0.1, derivative_boundary="zero")):
        plain, compiled = navier_stokes(), navier_stokes()
        steppers = [Stepper(o, training(loss=loss, compile=o is compiled), "cpu") for o in (plain, compiled)]
        counts = []
        for times in (SPEC.out_times - 1, SPEC.out_times, SPEC.out_times):
            one, other = (stepper(batch, times) for stepper in steppers)
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
            assert relative(gradients(compiled), gradients(plain)) < 1e-4
            counts.append(graphs["unique_graphs"])
        assert counts[0] < counts[1] == counts[2]


# Precision.


def test_float16_keeps_small_gradients_by_its_scale():
    """As near to float32 as 10 bits come; without the scale, much is lost below its range."""
    (batch,) = batches(2)
    found = {}
    for name, precision, scale in (
        ("exact", "float32", None),
        ("lost", "float16", None),
        ("kept", "float16", step.Scale(torch.device("cpu"))),
    ):
        operator = navier_stokes()
        stepper = Stepper(operator, training(), "cpu")
        stepper.runner, stepper.scale = Plain(operator, precision), scale
        stepper(batch, 3)
        found[name] = gradients(operator)
    assert relative(found["kept"], found["exact"]) < 2e-3
    assert relative(found["lost"], found["exact"]) > 3 * relative(found["kept"], found["exact"])


def test_the_scale_grows_until_a_gradient_leaves_the_range():
    scale = step.Scale(torch.device("cpu"))
    start = float(scale.value)
    gradient, other = torch.full((3,), 2 * start), torch.ones(2)
    scale.settle([gradient, other])
    assert gradient.tolist() == [2.0] * 3
    grown = float(scale.value)
    assert grown == pytest.approx(start * 2 ** (1 / scale.PATIENCE), rel=1e-6)
    gradient[0] = math.inf
    scale.settle([gradient, other])
    assert gradient.tolist() == [0.0] * 3
    assert other.tolist() == [0.0] * 2
    assert float(scale.value) == pytest.approx(grown / 2, rel=1e-6)


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_a_recording_is_no_step_to_the_scale(size):
    """Neither one that makes it grow, nor one that halves it because gradients left the range."""
    one, other, graphs = navier_stokes(), navier_stokes(), FakeGraphs()
    steppers = Stepper(one, training(), "cpu"), Stepper(other, training(), "cpu", record=graphs)
    for stepper in steppers:
        stepper.scale = step.Scale(torch.device("cpu"))
        stepper.scale.value *= size
        stepper.runner = Plain(stepper.operator, "float16")
    for batch in batches(2, 3, 2, 3, 2):
        for stepper in steppers:
            stepper(batch, 3)
        assert steppers[1].scale.value == steppers[0].scale.value
    assert graphs.records == 2


def test_the_scale_goes_on_where_it_was(tmp_path, tiny_data, monkeypatch):
    monkeypatch.setattr(step, "used_precision", lambda settings, device: settings.precision)
    recipe = tiny_recipe(steps=6, precision="float16", checkpoint_every=3)
    whole = run(recipe, tmp_path / "whole", tiny_data)
    tensors = load_tensors(checkpoints(tmp_path / "whole")[-1] / STATE)
    assert float(tensors["scale/value"]) == pytest.approx(2.0 ** (16 + 6 / 1000), rel=1e-5)
    first = checkpoints(tmp_path / "whole")[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / checkpoints(tmp_path / "whole")[-1].name)
    assert first.name in {path.name for path in checkpoints(tmp_path / "cut")}
    resumed = run(recipe, tmp_path / "cut", tiny_data)
    for a, b in zip(whole.operator.parameters(), resumed.operator.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_cpu_computes_in_float32():
    for recipe in RECIPES.values():
        assert used_precision(recipe.training, torch.device("cpu")) == "float32"
        assert used_precision(recipe.training, torch.device("cuda")) == recipe.training.precision


def test_what_was_computed_in_is_written_down(tmp_path, tiny_data, monkeypatch):
    seen = set()
    call = Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", lambda s, *a: (seen.add(s.runner.autocast), call(s, *a))[1])
    run(tiny_recipe(steps=2, precision="bfloat16"), tmp_path, tiny_data)
    assert seen == {None}
    assert read_journal(tmp_path)[0]["precision"] == "float32"


def relative(a: list[Tensor], b: list[Tensor]) -> float:
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (a, b))
    return float((one - other).norm() / other.norm())


def rounded_step(
    operator: Operator, batch: Batch, stepper: Stepper, precision: Precision
) -> tuple[float, float, float]:
    """How far values, gradients and loss of a step in 16 bits are from those in float32, relative to them."""
    values, losses, slopes = [], [], []
    for used in ("float32", precision):
        stepper.runner = Plain(operator, used)
        stepper.scale = step.Scale(torch.device("cpu")) if used == "float16" else None
        losses.append(float(stepper(batch, operator.spec.out_times)["loss"]))
        slopes.append(gradients(operator))
        with torch.no_grad():
            values.append(stepper.runner(batch.input, batch.query))
    assert all(tensor.dtype == torch.float32 for tensor in (*values, *slopes[1]))
    return relative(values[1:], values[:1]), relative(slopes[1], slopes[0]), abs(losses[1] / losses[0] - 1)


def test_bfloat16_stays_within_its_bounds():
    """As docs/decisions.md says for Navier-Stokes: 1 % of the values, 2 % of the gradient; 0.1 % of the loss."""
    operator = navier_stokes()
    values, slopes, loss = rounded_step(operator, batches(4)[0], Stepper(operator, training(), "cpu"), "bfloat16")
    assert 1e-4 < values < 0.01
    assert 1e-4 < slopes < 0.02
    assert loss < 0.001


def test_float16_stays_within_its_bounds():
    """As docs/decisions.md says for Burgers: 0.1 % of the values, 0.2 % of the gradient; 0.01 % of the loss."""
    recipe, points = RECIPES["burgers-2048"], 128
    assert recipe.training.precision == "float16"
    x, draw = torch.arange(points)[:, None] / points, torch.Generator().manual_seed(0)
    wave = torch.arange(1, 6)
    waves = torch.cat([torch.sin(2 * math.pi * wave * x), torch.cos(2 * math.pi * wave * x)], 1)
    samples = []
    for _ in range(4):
        u = waves @ (torch.randn(10, generator=draw) / wave.repeat(2))
        samples.append(Sample(Field.of(x, u[None, :, None]), Field.of(x), u.roll(3)[None, :, None]))
    torch.manual_seed(0)
    spec = dataclasses.replace(recipe.data_spec(), grid=(points,))
    operator = Operator(recipe.model.build(spec), recipe.normalization).fit(PointDataset(samples))
    stepper = Stepper(operator, recipe.training, "cpu")
    values, slopes, loss = rounded_step(operator, collate(samples), stepper, "float16")
    assert 1e-5 < values < 0.001
    assert 1e-5 < slopes < 0.002
    assert loss < 1e-4


def test_phases_are_float32_under_autocast(monkeypatch):
    """Angles reach thousands of radians: in bfloat16 nothing of them would be left."""
    found: list[Tensor] = []

    def noted(method: Callable) -> Callable:
        def call(self, *arguments):
            result = method(self, *arguments)
            found.extend(result if isinstance(result, tuple) else [result])
            return result

        return call

    operator = navier_stokes()
    (batch,) = batches(2)
    runners = Plain(operator), Plain(operator, "bfloat16")
    monkeypatch.setattr(Rotary, "tables", noted(Rotary.tables))
    monkeypatch.setattr(RandomFourier, "forward", noted(RandomFourier.forward))
    seen = []
    for runner in runners:
        runner(batch.input, batch.query)
        seen.append(list(found))
        found.clear()
    assert len(seen[0]) > 5
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(*seen, strict=True))


# Evaluation.


@pytest.mark.parametrize("batch", [4, 3, 32])
def test_a_batch_filled_up_gives_the_same_scores(tiny_data, batch):
    recipe = tiny_recipe()
    operator = Operator(recipe.model.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    expected = errors(operator, tiny_data, batch)
    sizes = []

    class Watched(Plain):
        compiles = True

        def _values(self, input: Field, query: Field, times: int) -> Tensor:
            sizes.append(input.coords.shape[0])
            return super()._values(input, query, times)

    found = errors(Watched(operator), tiny_data, batch)
    assert set(sizes) == {batch}
    for name in ("relative", "by_step", "squared"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=0)
    assert len(found.relative) == len(tiny_data)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_captured_step_is_the_plain_one(precision):
    compare_captured(False, precision)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_captured_and_compiled_step_is_the_plain_one(precision):
    without_shape_checks(f"compare_captured(True, {precision!r})")


def compare_captured(compile: bool, precision: str) -> None:
    one, other = navier_stokes().cuda(), navier_stokes().cuda()
    plain = Stepper(one, training(compile=False, capture=False, precision=precision), "cuda")
    captured = Stepper(other, training(compile=compile, precision=precision), "cuda")
    assert isinstance(captured.record, CudaGraphs)
    tolerance = 1e-3 if precision == "float32" else 4e-2
    for batch, times in zip(batches(4, 2, 4, 4, 2, 4, 2, 4), (6, 6, 6, 3, 6, 6, 6, 3), strict=True):
        batch = batch.to("cuda")
        expected, found = plain(batch, times), captured(batch, times)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        assert relative(gradients(other), gradients(one)) < tolerance
    assert len(captured._recorded) == 3


@pytest.mark.gpu
def test_a_captured_step_takes_little_more_memory_than_a_plain_one():
    """At no time: neither beside what plain steps left, nor for a second shape, whose graph shares the pool."""
    operator = navier_stokes().cuda()
    small, large = (batch.to("cuda") for batch in batches(384, 512))

    def most(capture: bool) -> tuple[int, int]:
        stepper = Stepper(operator, training(compile=False, capture=capture), "cuda")
        found = []
        for batch in (large, small):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_reserved()
            for _ in range(3):
                stepper(batch, 6)
            found.append(torch.cuda.max_memory_reserved() - before)
        assert len(stepper._recorded) == 2 * capture
        return found[0], found[1]

    plain, captured = most(False), most(True)
    assert plain[1] > 300 * 2**20  # next to which the workspaces of a stream do not count
    assert captured[0] < 1.5 * plain[0]
    assert captured[1] < 1.5 * plain[1]


@pytest.mark.gpu
def test_recordings_that_are_forgotten_give_their_memory_back():
    """To those of longer horizons, although the descent's own recording stays."""
    operator, settings = navier_stokes().cuda(), training(compile=False)
    batch = batches(512)[0].to("cuda")

    def taken(*horizons: int) -> int:
        stepper = Stepper(operator, settings, "cuda")
        descent = Descent(operator, settings.optimizer, stepper.recorder())
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for times in horizons:
            stepper.forget()
            for _ in range(3):
                stepper(batch, times)
                descent.step(1.0, 0.9)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    at_once = taken(6)
    assert at_once > 300 * 2**20
    assert taken(2, 3, 4, 5, 6) < 1.1 * at_once


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_a_captured_descent_is_the_plain_one(kind):
    optimizer = Optimizer(kind, 1e-3, 1e-3, 0.1, kind == "adamw", (("encoder", 0.1), ("all", 0.5)))
    settings = training(optimizer=optimizer, compile=False)
    one, other = navier_stokes().cuda(), navier_stokes().cuda()
    start = [p.detach().clone() for p in one.parameters()]
    plain = Stepper(one, dataclasses.replace(settings, capture=False), "cuda")
    captured = Stepper(other, settings, "cuda")
    # The same kernels on both sides: what rounds otherwise, Muon makes large where a gradient has hardly any direction.
    descents = Descent(one, optimizer, lambda work, warm_up: work), Descent(other, optimizer, captured.record)
    for n, batch in enumerate(batches(2, 3, 2, 3, 2, 2)):
        batch = batch.to("cuda")
        for stepper, descent in zip((plain, captured), descents, strict=True):
            stepper(batch, 6)
            descent.step(0.2 * (n + 1), 0.95 - 0.02 * n)
    assert descents[1]._replay is not None
    moved = [p.detach() - s for p, s in zip(one.parameters(), start, strict=True)]
    apart = [(a - b).detach() for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    sizes = [float(torch.cat([t.flatten() for t in tensors]).norm()) for tensors in (apart, moved)]
    assert sizes[0] < 0.02 * sizes[1]


@pytest.mark.gpu
def test_dropout_in_a_captured_step_is_drawn_anew_and_from_the_saved_state():
    config = OFormerConfig(encoder=Encoder(width=32, depth=2, dropout=0.5, lift_dropout=0.5))
    torch.manual_seed(0)
    spec = dataclasses.replace(SPEC, out_times=1)
    operator = Operator(config.build(spec), Normalization()).train().cuda()
    sample = batches(2)[0]
    batch = dataclasses.replace(sample, target=sample.target[:, :1]).to("cuda")
    stepper = Stepper(operator, Training(steps=1, compile=False), "cuda")
    torch.cuda.manual_seed(5)
    drawn = [float(stepper(batch, 1)["loss"]) for _ in range(3)]
    kept = torch.cuda.get_rng_state()
    drawn += [float(stepper(batch, 1)["loss"]) for _ in range(3)]
    assert len(set(drawn)) == 6
    fresh = Stepper(operator, Training(steps=1, compile=False), "cuda")  # a resumed run records anew
    torch.cuda.set_rng_state(kept)
    assert [float(fresh(batch, 1)["loss"]) for _ in range(3)] == pytest.approx(drawn[3:], rel=1e-5)
    torch.cuda.manual_seed(5)
    plain = Stepper(operator, Training(steps=1, compile=False, capture=False), "cuda")
    assert [float(plain(batch, 1)["loss"]) for _ in range(6)] == pytest.approx(drawn, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("drop", [False, True])
def test_a_captured_run_ends_where_a_plain_one_does_and_goes_on(tmp_path, tiny_data, drop):
    recipe = tiny_recipe(steps=24, evaluate_every=12, compile=False)
    if not drop:
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, drop=None))
    whole = run(recipe, tmp_path / "whole", tiny_data, device="cuda")
    run(recipe, tmp_path / "parts", tiny_data, device="cuda", stop_after=0.0)
    parts = run(recipe, tmp_path / "parts", tiny_data, device="cuda")
    assert parts.scores is not None
    assert parts.scores.error == pytest.approx(whole.scores.error, rel=2e-2)
    if not drop:  # dropped points are padded, and dropout is drawn for the padding too
        off = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, capture=False))
        plain = run(off, tmp_path / "plain", tiny_data, device="cuda")
        assert plain.scores.error == pytest.approx(whole.scores.error, rel=2e-2)


@pytest.mark.gpu
def test_a_compiled_and_captured_run_learns_as_a_plain_one(tmp_path):
    without_shape_checks(f"compare_runs({str(tmp_path)!r})")


def compare_runs(folder: str) -> None:
    """In bfloat16, without what is drawn at random while a model computes: compiled, it is drawn otherwise."""
    recipe = tiny_recipe(steps=60, evaluate_every=20, drop=None, precision="bfloat16")
    encoder = dataclasses.replace(recipe.model.encoder, dropout=0.0, lift_dropout=0.0)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, encoder=encoder))
    off = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, capture=False, compile=False, precision="float32")
    )
    data = open_data(recipe, Path(folder) / "data")
    fast, plain = (run(r, Path(folder) / n, data, device="cuda") for r, n in ((recipe, "fast"), (off, "plain")))
    assert fast.scores.error == pytest.approx(plain.scores.error, rel=0.1)
    starts = [r["startup_seconds"] for r in read_journal(Path(folder) / "fast") if "startup_seconds" in r]
    assert len(starts) == 1
