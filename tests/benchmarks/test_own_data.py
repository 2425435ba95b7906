"""The problems of `own_data.py`: their solvers meet exact solutions or converge, their samples depend on keys alone."""

import re

import numpy as np
import own_data
import pytest


def test_heat_in_a_uniform_rod_is_exact_in_time_and_of_second_order_in_space():
    errors = []
    for cells in (32, 64):
        x = (np.arange(cells) + 0.5) / cells
        found = own_data.heat_at(np.full(cells - 1, 0.7), np.cos(2 * np.pi * x), 0.03)
        errors.append(np.abs(found - np.exp(-0.7 * 4 * np.pi**2 * 0.03) * np.cos(2 * np.pi * x)).max())
    assert errors[0] < 5e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_heat_in_a_varying_rod_converges_and_is_conserved():
    def end(cells: int) -> np.ndarray:
        x = (np.arange(cells) + 0.5) / cells
        k = np.exp(np.sin(5 * np.arange(1, cells) / cells))
        found = own_data.heat_at(k, np.cos(np.pi * x) + x, 0.03)
        assert found.mean() == pytest.approx((np.cos(np.pi * x) + x).mean(), rel=1e-10)
        return own_data.on_cells(found, np.linspace(0.1, 0.9, 50))

    finest = end(1024)
    coarse, fine = (np.abs(end(cells) - finest).max() for cells in (32, 128))
    assert coarse / fine > 10
    assert np.abs(end(own_data.HEAT_CELLS) - finest).max() < 1e-4


def test_damped_waves_on_the_l_converge_to_an_exact_solution():
    """u = sin(πx) sin(πy) is zero on all sides of the L; n varies."""

    def index(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return 1 + 0.3 * np.cos(2 * x - y)

    def exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.sin(np.pi * x) * np.sin(np.pi * y)

    errors = []
    for cells in (16, 32):
        x, y = np.meshgrid(*2 * [np.linspace(-1, 1, cells + 1)], indexing="ij")
        # The source is complex here: u is the sum of two solutions.
        parts = [
            own_data.helmholtz_on_grid(
                index, lambda a, b, part=part: part((2 * np.pi**2 - 36 * (1 + 0.1j) * index(a, b)) * exact(a, b)),
                cells, 6.0, 0.1,
            )
            for part in (np.real, np.imag)
        ]  # fmt: skip
        inside = ~((x > -1e-9) & (y > -1e-9))
        errors.append(np.abs(parts[0] + 1j * parts[1] - exact(x, y))[inside].max())
    assert errors[1] < 0.02
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)


def test_the_flow_carries_its_own_stream_function_nowhere():
    """ψ is constant along the paths, and no path crosses the border."""
    weights = 0.15 * np.array([[1.0, 0.5, -0.2], [0.3, -0.4, 0.0], [0.1, 0.2, 0.3]])
    waves = np.pi * np.arange(1, 4)
    points = np.random.default_rng(0).random((100, 2))

    def stream(x: np.ndarray) -> np.ndarray:
        return np.einsum("pi,pj,ij->p", np.sin(x[:, :1] * waves), np.sin(x[:, 1:] * waves), weights)

    frames = own_data.carried(stream, lambda x: own_data.flow(weights, x), points, 1.0, 4)
    np.testing.assert_allclose(frames, np.tile(stream(points), (4, 1)), atol=1e-4)


def test_a_constant_flow_moves_what_it_carries():
    points, velocity = np.random.default_rng(0).random((20, 2)), np.array([0.3, -0.2])
    frames = own_data.carried(lambda x: x[:, 0] * x[:, 1], lambda x: np.tile(velocity, (len(x), 1)), points, 2.0, 2)
    for frame, at in zip(frames, (1.0, 2.0), strict=True):
        np.testing.assert_allclose(frame, np.prod(points - at * velocity, 1), atol=1e-12)


def test_the_field_in_the_cube_converges_to_an_exact_solution():
    def exact(x: np.ndarray) -> np.ndarray:
        return np.prod(np.sin(np.pi * x), -1)

    def reaction(x: np.ndarray) -> np.ndarray:
        return 200 * (1 + np.tanh(np.cos(3 * x[:, 0]) - x[:, 1] * x[:, 2]))

    errors = []
    for cells in (8, 16):
        found = own_data.cube_on_grid(reaction, lambda x: (3 * np.pi**2 + reaction(x)) * exact(x), cells)
        axis = np.linspace(0, 1, cells + 1)
        errors.append(np.abs(found - exact(np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1))).max())
    assert errors[1] < 0.01
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("name", own_data.PROBLEMS)
def test_samples_depend_on_seed_and_number_alone(name):
    problem = own_data.PROBLEMS[name]
    (one, two), (held,) = problem.generate(2, 1, seed=3)
    (again,), _ = problem.generate(1, 0, seed=3)
    for key, array in one.items():
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(again[key], array)
        assert array.shape != two[key].shape or not np.array_equal(array, two[key])
        assert array.shape != held[key].shape or not np.array_equal(array, held[key])
    assert one["targets"].shape[-2] == len(one["coords"])


def test_noise_is_on_inputs_and_on_what_is_learned_but_not_on_what_is_tested():
    noisy, clean = own_data.PROBLEMS["noisy"], own_data.PROBLEMS["a"]
    (one,), (held,) = noisy.generate(1, 1, seed=0)
    (true,), (exact,) = clean.generate(1, 1, seed=0)
    for a, b in ((one["inputs"], true["inputs"]), (one["targets"], true["targets"]), (held["inputs"], exact["inputs"])):
        assert ((a - b).std(0) / b.std(0)).mean() == pytest.approx(own_data.NOISE, rel=0.3)
    np.testing.assert_array_equal(held["targets"], exact["targets"])


def test_the_table_has_a_line_for_each_problem_and_seed(capsys):
    sizes = ["--samples", "8", "--test", "3", "--device", "cpu"]
    own_data.main(["--problems", "a", "few", "--seeds", "0", "1", "--minutes", "0", *sizes])
    head, *lines = capsys.readouterr().out.splitlines()[2:]
    assert re.split(r"\s{2,}", head)[3:] == [
        "operator",
        "nearest sample",
        "ridge",
        "kernel ridge",
        "superposition ridge",
        "seconds of each fit",
    ]
    assert [line.partition(":")[0] for line in lines] == ["a", "a", "few", "few"]
    assert all(line.count("%") == 4 and " - " in line for line in lines)
