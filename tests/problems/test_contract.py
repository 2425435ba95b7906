"""The promises of every problem, asked of each entry of `PROBLEMS`."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oformer.checks import check_sample
from oformer.config import from_json, to_json
from oformer.errors import InputError
from oformer.fields import Batch, Sample, collate
from oformer.meshes.airfoil import Naca
from oformer.problems import PROBLEMS, Airfoil
from oformer.problems.base import Problem
from oformer.solvers.euler_fv import Numerics
from tests.flow_meshes import solve_mirrored

# Settings that make a problem small enough to be solved several times here; the defaults if it has none.
SMALL: dict[str, dict[str, Any]] = {
    "burgers": {"points": 192, "solver_points": 128, "steps": 100},
    "darcy": {"points": 24},
    "navier-stokes": {
        "viscosity": (1e-4, 1e-3),
        "duration": 4,
        "points": 32,
        "solver_points": 32,
        "time_step": 0.02,
        "in_times": 2,
        "precision": "float64",
    },
    "airfoil": {
        "mesh": Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3),
        "steps": 8,
        "stride": 2,
        "in_times": 2,
        "precision": "float64",
        "numerics": Numerics(newton=2, sweeps=3, start_newton=2),
    },
    "electrostatics": {"train": 3},
    "magnetostatics": {"train": 4, "randomized": True},
}

# How to read the state that `solve` takes off the input of a batch, for problems with symmetries.
STATE: dict[str, Callable[[Batch], dict[str, Tensor]]] = {
    "burgers": lambda batch: {"initial": batch.input.values[:, 0, :, 0]},
    "darcy": lambda batch: {"coefficient": batch.input.values[:, 0, :, 0].unflatten(1, (24, 24))},
    "navier-stokes": lambda batch: {
        "initial": batch.input.values[:, 0, :, 0].unflatten(1, (32, 32)),
        "viscosity": batch.parameters["viscosity"],
        "time": torch.tensor(1.0),
    },
    # Node 1 lies on the upper half of the far-field circle.
    "airfoil": lambda batch: {**batch.parameters, "mirrored": batch.query.coords[:, 1, 1] < 0},
}

SEED = 11


def turned(name: str) -> Callable[[Batch], dict[str, Tensor]]:
    """The draws of the first four samples, on domains turned as the points of a batch are."""

    def state(batch: Batch) -> dict[str, Tensor]:
        problem = PROBLEMS[name](**SMALL[name])
        before = collate(problem.samples(range(4), SEED))
        exist = (before.input.weights > 0)[..., None]
        x, y = ((b.input.coords - 0.5) * exist for b in (before, batch))
        return {**problem.draw(range(4), SEED), "pose": torch.linalg.lstsq(x, y).solution.mT}

    return state


STATE |= {name: turned(name) for name in ("electrostatics", "magnetostatics")}


@pytest.fixture(params=sorted(PROBLEMS))
def problem(request) -> Problem:
    return PROBLEMS[request.param](**SMALL.get(request.param, {}))


def same(one: Sample, other: Sample) -> bool:
    """Equal bit by bit, everywhere."""
    pairs = [(one.target, other.target)]
    for a, b in ((one.input, other.input), (one.query, other.query)):
        pairs += [(a.coords, b.coords), (a.values, b.values), (a.weights, b.weights)]
    pairs += [(one.parameters[name], other.parameters[name]) for name in one.parameters]
    return one.parameters.keys() == other.parameters.keys() and all(torch.equal(a, b) for a, b in pairs)


def test_register_holds_each_problem_under_its_own_name():
    assert PROBLEMS
    for name, kind in PROBLEMS.items():
        assert kind.name == name
        assert issubclass(kind, Problem)
        assert dataclasses.is_dataclass(kind)
        for part in ("Learned map", "What is hard", "Values that work"):
            assert part in (kind.__doc__ or "")


def test_settings_cannot_be_changed(problem):
    field = dataclasses.fields(problem)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(problem, field, getattr(problem, field))


def test_samples_obey_the_spec(problem):
    samples = problem.samples([0, 1, 2], SEED)
    assert len(samples) == 3
    for sample in samples:
        check_sample(sample, problem.spec)
        for field in (sample.input, sample.query):
            assert float(field.weights.sum()) == pytest.approx(1, abs=1e-12)
            assert field.values.dtype == field.coords.dtype == field.weights.dtype == torch.float64
        assert sample.target.dtype == torch.float64
        if problem.spec.grid is not None:
            assert sample.input.points == torch.tensor(problem.spec.grid).prod()
        if problem.spec.periods is not None:
            assert (sample.input.coords >= 0).all()
            assert (sample.input.coords < torch.tensor(problem.spec.periods)).all()


def test_samples_differ_by_index_and_by_seed(problem):
    one, two = problem.samples([0, 1], SEED)
    (other,) = problem.samples([0], SEED + 1)
    assert not torch.equal(one.target, two.target)
    assert not torch.equal(one.target, other.target)


def test_a_sample_depends_on_seed_and_index_alone(problem):
    """Not on the batch, the order, what came before, or the global generators."""
    together = problem.samples([0, 1, 2, 3, 4], SEED)
    torch.manual_seed(1)
    (alone,) = problem.samples([3], SEED)
    reverse = problem.samples([4, 3, 2], SEED)
    assert same(alone, together[3])
    for sample, expected in zip(reverse, together[:1:-1], strict=True):
        assert same(sample, expected)


def test_drawing_is_part_of_the_sample(problem):
    state = problem.draw([5, 2], SEED)
    assert state
    for tensor in state.values():
        assert tensor.device.type == "cpu"
        assert tensor.shape[0] == 2
    for sample, expected in zip(problem.solve(state), problem.samples([5, 2], SEED), strict=True):
        assert same(sample, expected)


def test_card_is_complete(problem):
    card, spec = problem.card, problem.spec
    assert card.title
    assert len(card.text) > 80
    assert len(card.inputs) == spec.in_channels
    assert len(card.targets) == spec.out_channels
    assert len(card.queries) == spec.query_channels
    assert all([*card.inputs, *card.targets, *card.queries])


def test_settings_survive_json(problem):
    content = json.loads(json.dumps(to_json(problem)))
    assert from_json(type(problem), content) == problem
    with pytest.raises(InputError, match="unknown"):
        from_json(type(problem), {**content, "colour": 1})


def test_augmentation_is_reproducible_and_keeps_the_shape(problem):
    batch = collate(problem.samples([0, 1, 2], SEED))
    once, again = (problem.augment(batch, torch.Generator().manual_seed(5)) for _ in range(2))
    assert same(once, again)
    assert once.target.shape == batch.target.shape
    assert once.input.values.shape == batch.input.values.shape
    check_sample(once, problem.spec)


def test_augmentation_is_a_symmetry(problem):
    """Solving the changed input gives the changed target."""
    batch = collate(problem.samples([0, 1, 2, 3], SEED))
    if problem.symmetries(batch) == 1 and type(problem).augment is Problem.augment:
        assert problem.augment(batch, torch.Generator()) is batch
        return
    assert problem.name in STATE, f"Say in STATE how the state of `{problem.name}` is read off its input."
    changed = problem.augment(batch, torch.Generator().manual_seed(7))
    assert not torch.equal(changed.target, batch.target)
    state = STATE[problem.name](changed)
    solved = collate(solve_mirrored(problem, **state) if isinstance(problem, Airfoil) else problem.solve(state))
    scale = float(batch.target.abs().max())
    torch.testing.assert_close(solved.target, changed.target, rtol=0, atol=1e-10 * scale)


def test_every_symmetry_is_undone_and_the_first_is_none(problem):
    batch = collate(problem.samples([0, 1, 2], SEED))
    count = problem.symmetries(batch)
    same_batch, _ = problem.transformed(batch, torch.zeros(3, dtype=torch.int64))
    assert torch.equal(same_batch.target, batch.target)
    assert torch.equal(same_batch.input.values, batch.input.values)
    for which in {0, 1 % count, count // 3, count // 2, count - 1}:
        changed, undo = problem.transformed(batch, torch.tensor([which, 0, count - 1]))
        torch.testing.assert_close(undo(changed.target), batch.target, rtol=1e-12, atol=1e-12)


def test_the_average_over_symmetries_is_itself_symmetric(problem):
    """A predictor that knows nothing of the symmetries: its average commutes with one of them."""
    batch = collate(problem.samples([0, 1], SEED))
    count = problem.symmetries(batch)

    def predict(part: Batch) -> torch.Tensor:
        return part.target * (0.5 + part.query.coords[:, None, :, -1:])

    torch.testing.assert_close(problem.averaged(predict, batch, 1), predict(batch))
    with pytest.raises(InputError, match=f"1 to {count} symmetries"):
        problem.averaged(predict, batch, count + 1)
    if count == 1:
        return
    changed, undo = problem.transformed(batch, torch.full((2,), count - 1))
    first, second = problem.averaged(predict, batch, count), undo(problem.averaged(predict, changed, count))
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9 * float(first.abs().max()))
    assert not torch.allclose(first, predict(batch), rtol=1e-3)
