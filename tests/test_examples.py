"""Every example runs, at a small size, and one number of each is as it must be."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.data.dataset import View
from oformer.errors import InputError
from oformer.problems import Burgers
from tests.tiny import tiny_recipe

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))


def example(number: int):
    (file,) = EXAMPLES.glob(f"{number:02d}_*.py")
    spec = importlib.util.spec_from_file_location(f"example_{number:02d}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe():
    """The demo's kind of run, on 64 of the 1024 points that example 2 looks at."""
    recipe = tiny_recipe(steps=30, evaluate_every=30)
    problem, view = Burgers(points=128, solver_points=64, modes=6, steps=40), View(points=(64,))
    return dataclasses.replace(recipe, problem=problem, data=dataclasses.replace(recipe.data, view=view))


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory):
    """The run that example 1 leaves, and its error."""
    run = tmp_path_factory.mktemp("outputs") / "01-burgers"
    return run, example(1).main(recipe, run)


def test_there_are_ten_short_ones_and_the_docs_name_each():
    page = (EXAMPLES.parent / "docs" / "start.md").read_text()
    assert [int(file.name[:2]) for file in FILES] == list(range(1, 11))
    for file in FILES:
        text = file.read_text()
        assert len(text.splitlines()) < 80, file.name
        assert f"python examples/{file.name}" in text
        assert f"`{file.name}`" in page
    assert len(re.findall(r"^\| `\d\d_", page, re.M)) == 10


def test_01_trains_and_reports(trained):
    run, error = trained
    assert 0 < error < 1.5
    assert (run / "report.html").exists()


def test_02_answers_where_it_is_asked(trained):
    found = example(2).main(trained[0])
    assert len(found) == 4
    # A smooth state seen through 256 or 1024 points is the same function to an untrained operator too.
    assert found["from 256 points, at 1024"] == pytest.approx(found["from 1024 points, at 1024"], rel=0.05)
    assert (trained[0].parent / "02-query.png").exists()


def test_03_all_sensors_give_the_error_of_the_run(trained):
    run, error = trained
    found = example(3).main(run, shares=(1.0, 0.5, 0.1))
    assert found[0] == pytest.approx(error, rel=1e-5)
    assert all(np.isfinite(found))


def test_04_the_drop_solves_the_heat_equation_and_the_model_comes_back(tmp_path):
    module = example(4)
    h, t, x, drop = 1e-3, 0.5, np.array([[0.3, 0.6]]), np.array([0.5, 0.5])
    later = (module.dye(x, drop, t + h) - module.dye(x, drop, t - h)) / (2 * h)
    around = sum(module.dye(x + s * h * e, drop, t) for s in (1, -1) for e in np.eye(2)) - 4 * module.dye(x, drop, t)
    assert later == pytest.approx(module.MIXING * around / h**2, rel=1e-4)
    error = module.main(tmp_path / "pond", 12, minutes=None, steps=3, width=16, depth=1, quiet=True)
    assert 0 < error < 2
    assert (tmp_path / "pond.png").exists()


def test_05_the_string_obeys_its_equation_and_is_learned_from(tmp_path):
    module = example(5)
    (sample,) = module.String(points=33, frames=20, modes=1).solve(
        {"amplitudes": torch.ones(1, 1, dtype=torch.float64)}
    )
    # One wave is back where it began after a period of 2 / speed: 20 frames of 0.1.
    assert np.allclose(sample.target[-1], sample.input.values[0], atol=1e-12)
    assert np.allclose(sample.target[9], -sample.input.values[0], atol=1e-12)
    assert np.isfinite(module.main(tmp_path / "string", steps=2, train_samples=4))


def test_06_both_models_see_the_same_samples(trained, recipe):
    found = example(6).main(recipe, trained[0].parent)
    assert found["OFormer"] == pytest.approx(trained[1], rel=1e-5)
    assert 0 < found["FNO"] < 2


def test_07_shapes_never_seen(tmp_path):
    pytest.importorskip("skfem")
    assert np.isfinite(example(7).main(tmp_path / "charges", samples=8, steps=2))
    assert (tmp_path / "charges.png").exists()


def test_08_a_linear_map_finds_what_is_linear_and_nothing_in_noise(trained):
    module, z = example(8), torch.randn(8, 50, 6)
    assert module.readable(z, z @ torch.randn(6) + 2) > 0.999
    assert module.readable(z, torch.randn(8, 50)) < 0.1
    found = module.main(trained[0])
    assert 1 <= found.pop("directions") <= 16
    assert 0.3 < found["u at time 0"] <= 1


def test_09_slopes_are_the_solvers(tmp_path):
    found = example(9).main(("burgers-demo",), count=2, points=256, out=tmp_path)
    u, slope, curvature = found["burgers-demo"]
    assert u < 0.01
    assert u < slope < 0.03
    assert slope < curvature < 0.1
    assert (tmp_path / "derivatives.png").stat().st_size > 5000


def test_10_a_start_is_worth_more_than_steps(tmp_path):
    found = example(10).main(counts=(8,), steps=3, tested=4, out=tmp_path)
    shipped, scratch, tuned, longer = (row[0] for row in found.values())
    assert tuned < shipped < 0.5 * min(scratch, longer)
    assert (tmp_path / "errors.png").stat().st_size > 5000


def test_without_a_run_the_sentence_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="Train one"):
        example(2).main(tmp_path / "absent")
