"""Tests of MyProblem: of its mathematics first, then that it can be learned from. Run them with `pytest`."""

import math

import torch
from my_problem import MyProblem, recipe


def test_without_growth_a_wave_decays_as_it_must():
    """An exact solution: cos(πx) keeps its shape and shrinks by exp(-κπ²t)."""
    problem = MyProblem(growth=0.0)
    x = (torch.arange(problem.points, dtype=torch.float64) + 0.5) / problem.points
    (sample,) = problem.solve({"initial": torch.cos(torch.pi * x)[None]})
    decay = math.exp(-problem.diffusivity * math.pi**2 * problem.duration)
    torch.testing.assert_close(sample.target[0, :, 0], decay * torch.cos(torch.pi * x), rtol=0, atol=1e-3)


def test_a_sample_does_not_depend_on_its_batch():
    problem = MyProblem()
    alone, among = problem.samples([3], seed=0)[0], problem.samples([1, 2, 3], seed=0)[2]
    assert torch.equal(alone.target, among.target)


def test_samples_have_the_shapes_that_the_spec_promises():
    problem = MyProblem(points=20)
    sample, spec = problem.samples([0], seed=0)[0], problem.spec
    assert sample.input.values.shape == (spec.in_times, 20, spec.in_channels)
    assert sample.target.shape == (spec.out_times, 20, spec.out_channels)
    assert recipe.model.build(recipe.data_spec())
