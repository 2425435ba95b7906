"""`oformer new`: the project trains as it stands, passes its own tests, and its problem is used by every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oformer.cli import main
from oformer.config import from_json, to_json
from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.scaffold import TEMPLATE, new_project
from oformer.training.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TINY = ["--data.train", "8", "--data.test", "4", "--problem.points", "16", "--training.steps", "3"]


def run(*command, cwd):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder in which the printed command was run, with a few settings made smaller."""
    folder = tmp_path_factory.mktemp("work")
    done = run("-m", "oformer", "new", "heat-flow", cwd=folder)
    assert done.returncode == 0, done.stderr
    command = done.stderr.strip().splitlines()[-1].split()
    assert command[-2:] == ["train", "heat-flow/heat_flow.py"]
    done = run("-m", "oformer", *command[-2:], "--device", "cpu", *TINY, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_printed_command_trains_and_reports(trained):
    assert (trained / "outputs" / "heat-flow" / "report.html").exists()
    (dataset,) = (trained / "datasets").iterdir()
    assert dataset.name.startswith("heat-flow-12-seed0")


def test_nothing_of_the_template_is_left(trained):
    project = trained / "heat-flow"
    texts = {path.name: path.read_text() for path in project.iterdir() if path.is_file()}
    assert texts.keys() == {"README.md", "heat_flow.py", "test_heat_flow.py"}
    assert "class HeatFlow(Problem)" in texts["heat_flow.py"]
    assert not any(word in text for text in texts.values() for word in ("my_problem", "my-problem", "MyProblem"))


def test_evaluate_and_plot_ask_for_the_file_and_take_it(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command in (["evaluate", "outputs/heat-flow", "--device", "cpu"], ["plot", "outputs/heat-flow"]):
        assert main(command) == 2
        assert "got `HeatFlow`. Name the Python file that defines it: --recipe FILE.py" in capsys.readouterr().err
        assert main([*command, "--recipe", "heat-flow/heat_flow.py"]) == 0
    assert (trained / "outputs" / "heat-flow" / "plots" / "predictions.png").exists()


def test_a_dataset_of_other_settings_is_refused(trained, monkeypatch, capsys):
    """The reason for `edition` in the template: a new default has the old folder's name, but not its settings."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (dataset,) = (trained / "datasets").iterdir()
    generate = ["generate", "heat-flow/heat_flow.py", "--count", "12", "--train", "8", "--out", str(dataset)]
    assert main([*generate, "--points", "16", "--edition", "2", "--device", "cpu"]) == 2
    assert "edition" in capsys.readouterr().err


def test_its_own_tests_pass(trained):
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "heat-flow", cwd=trained)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_its_own_tests_fail_when_the_equation_is_wrong(trained):
    file = trained / "heat-flow" / "heat_flow.py"
    right = file.read_text()
    file.write_text(right.replace("self.diffusivity * u_xx", "0.5 * self.diffusivity * u_xx"))
    wrong = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "heat-flow", cwd=trained)
    file.write_text(right)
    assert wrong.returncode == 1
    assert "1 failed, 2 passed" in wrong.stdout


@pytest.mark.parametrize("name", ["Heat", "2d", "a b", "heat--flow", "class", "burgers", "numpy", "-x", "über"])
def test_names_that_cannot_be_used_are_refused(tmp_path, name):
    with pytest.raises(InputError, match="a name"):
        new_project(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path):
    new_project(tmp_path / "slow-waves")
    with pytest.raises(InputError, match="no file or folder yet"):
        new_project(tmp_path / "slow-waves")


def test_a_recipe_is_found_in_a_file_by_its_variable(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = new_project(tmp_path / "warm-bar")
    file.write_text(file.read_text() + "\nlonger = __import__('dataclasses').replace(recipe, name='longer')\n")
    assert recipe_named(str(file)).name == "warm-bar"
    assert recipe_named(f"{file}:longer").name == "longer"
    written = json.loads(json.dumps(to_json(recipe_named(str(file)))))
    assert from_json(Recipe, written, "recipe") == recipe_named(str(file))
    with pytest.raises(InputError, match=r"a Recipe called `shorter` in .*, got recipe, longer"):
        recipe_named(f"{file}:shorter")
    with pytest.raises(InputError, match=r"a Python file at .*nothing"):
        recipe_named(str(tmp_path / "absent.py"))
    other = tmp_path / "json.py"
    other.write_text("recipe = None\n")
    with pytest.raises(InputError, match="a file name that Python can import"):
        recipe_named(str(other))


def test_the_template_is_a_project_itself():
    """The files that are copied are real ones, which lint and the type checker see."""
    assert {path.name for path in TEMPLATE.iterdir() if path.is_file()} == {
        "README.md",
        "my_problem.py",
        "test_my_problem.py",
    }


def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "Big Name"]) == 2
    assert "a name of small letters" in capsys.readouterr().err
