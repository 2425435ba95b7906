"""The zoo by name: its operators are found, asked, listed, drawn, and carried by a wheel."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.checkpoint import find_checkpoint, zoo_folder, zoo_names
from oformer.cli import main
from oformer.config import from_json
from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field
from oformer.meshes.grids import thinning
from oformer.metrics import relative, squared
from oformer.models import Operator
from oformer.plots import style
from oformer.predict import Predictor
from oformer.training.recipe import Recipe
from oformer.zoo.card import CARD, read_card
from tools.record_inputs import INPUT, seen_by

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_shipped_operator_is_found_by_its_name_and_answers_as_its_run(here, work, tiny_data):
    field = tiny_data[0].input
    expected = Predictor(work / "seed1", "cpu")(field).values
    for name in ("tiny", "zoo:tiny"):
        torch.testing.assert_close(Predictor(name, "cpu")(field).values, expected)
    Path("tiny").mkdir()  # a folder of that name comes first, unless the zoo is meant
    with pytest.raises(InputError, match="none yet"):
        find_checkpoint("tiny")
    assert find_checkpoint("zoo:tiny") == here / "tiny"


def test_an_unknown_name_is_answered_with_those_that_exist(here, monkeypatch):
    with pytest.raises(InputError, match=r"which is none.*choose: tiny"):
        find_checkpoint("burgers-2048")
    with pytest.raises(InputError, match="Did you mean `tiny`"):
        find_checkpoint("zoo:tyni")
    monkeypatch.setenv("OFORMER_ZOO", str(here / "nothing"))
    with pytest.raises(InputError, match="none is here yet"):
        find_checkpoint("zoo:tiny")


def test_the_command_line_takes_the_name(here, capsys, tmp_path):
    assert main(["evaluate", "zoo:tiny", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "as its card says" in shown.out
    assert "Making 4 test samples" in shown.err
    assert main(["evaluate", "tiny", "--samples", "2", "--json", "--device", "cpu"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["count"] == 2
    assert content["card"]["error"] == pytest.approx(sum(read_card(here / "tiny").by_sample[:2]) / 2)
    assert abs(content["card"]["difference"]) < 1e-5
    x = np.arange(40) / 40
    np.savez("in.npz", coords=x[:, None], values=np.sin(2 * np.pi * x)[:, None])
    assert main(["predict", "tiny", "in.npz", "--device", "cpu"]) == 0
    assert np.load("prediction.npz")["values"].shape == (1, 40, 1)
    assert main(["plot", "zoo:tiny", "--device", "cpu"]) == 0
    drawn = {path.stem for path in Path("outputs/zoo/tiny").iterdir()}
    assert drawn == {"training", "predictions", "by-resolution", "by-share"}
    assert not (here / "tiny" / "plots").exists()
    capsys.readouterr()
    assert main(["zoo", "list"]) == 0
    assert f"{read_card(here / 'tiny').scores.error:.4%}" in capsys.readouterr().out
    assert main(["zoo", "show", "tiny"]) == 0
    assert capsys.readouterr().out.strip() == (here / "tiny" / "README.md").read_text().strip()
    for wrong in (["evaluate", "zoo:tyni"], ["zoo", "show", "tyni"], ["predict", "zoo:tyni", "in.npz"]):
        assert main(wrong) == 2
        assert "Did you mean `tiny`" in capsys.readouterr().err


def test_few_samples_make_the_pictures_and_the_card_the_curves(here, work, capsys, monkeypatch):
    figures = {}
    monkeypatch.setattr(style, "save_figure", lambda path, figure: figures.update({path.stem: figure}))
    arguments = ["--samples", "2", "--only", "predictions", "by-resolution", "--device", "cpu"]
    assert main(["plot", "zoo:tiny", *arguments]) == 0
    assert "Making 2 test samples" in capsys.readouterr().err
    titles = {axis.get_title() or axis.get_title("left") for axis in figures["predictions"].axes}
    assert {"best of 2", "worst of 2"} <= titles
    drawn = {float(y) for line in figures["by-resolution"].axes[0].get_lines() for y in np.ravel(line.get_ydata())}
    of_all = [row.error for row in read_card(here / "tiny").views if row.kind != "sparse"]
    assert len(of_all) == 3
    assert set(of_all) <= drawn
    run = ["plot", str(work / "seed1"), "--datasets", str(work / "datasets"), "--out", "drawn"]
    assert main([*run, *arguments]) == 0
    assert "best of 2" in {axis.get_title("left") for axis in figures["predictions"].axes}
    for wrong, words in (("0", "a number of at least 1 for `--samples`"), ("5", "1 to 4 test samples")):
        assert main(["plot", "zoo:tiny", "--samples", wrong, "--device", "cpu"]) == 2
        assert words in capsys.readouterr().err


def test_the_list_fits_into_a_hundred_columns(monkeypatch, capsys):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    assert main(["zoo", "list"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "squared 0.029e-3" in shown
    assert "102.07" not in shown


@pytest.mark.parametrize(
    "name",
    [
        "burgers-demo",
        "burgers-512",
        "burgers-2048",
        "burgers-512-plus",
        "burgers-2048-plus",
        "darcy-141",
        "darcy-141-plus",
    ],
)
def test_operators_whose_scale_says_nothing_know_inputs_unlike_those_of_training(name, monkeypatch):
    """And raise no alarm over test samples, neither whole nor at a quarter of their points."""
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    predictor = Predictor(zoo_folder() / name, "cpu")
    recipe = from_json(Recipe, predictor.checkpoint.recipe, "recipe")
    problem, data, points = recipe.problem, recipe.data, predictor.spec.grid
    every = tuple(slice(None, None, n) for n in thinning(problem.spec.grid, points, problem.spec.periods is not None))
    drawn = problem.draw(range(data.train, data.train + 8), data.seed)[INPUT[problem.name]]
    values = drawn[(slice(None), *every)].reshape(8, 1, -1, 1).float()
    low, high = predictor.operator.box
    axes = [torch.linspace(float(a), float(b), n) for a, b, n in zip(low, high, points, strict=True)]
    coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(1, -1, len(points)).expand(8, -1, -1)

    def outside(values, kept=slice(None)):
        field = Field.of(coords[:, kept], values[:, :, kept])
        return predictor.operator.outside(field, field)

    quarter = torch.randperm(values.shape[2], generator=torch.Generator().manual_seed(0))[: values.shape[2] // 4]
    assert outside(values) == outside(values, quarter) == []
    assert "input channel 0 from" in outside(1e6 * values)[0]
    moved = values + 0.5 if problem.name == "burgers" else 0.5 * values
    assert outside(moved)[0].startswith("the mean of input channel 0 from ")
    even = torch.full_like(values, 7.0)
    assert "input channel 0 from" in outside(even)[0]


def test_inputs_that_are_drawn_again_are_those_that_a_new_run_records():
    demo = RECIPES["burgers-demo"]
    recipe = dataclasses.replace(demo, data=dataclasses.replace(demo.data, train=6))
    samples = PointDataset(recipe.problem.samples(range(6), 0), recipe.data.view, spec=recipe.problem.spec)
    fitted = Operator(recipe.model.build(samples.spec), recipe.normalization).fit(samples).seen
    drawn = seen_by(recipe)
    assert (drawn.samples, drawn.values, drawn.spreads) == (6, fitted.values, fitted.spreads)
    np.testing.assert_allclose(drawn.means, fitted.means, atol=1e-7)


def test_the_shipped_burgers_operator_on_a_published_pair(shared_data):
    if "burgers-2048" not in zoo_names():
        pytest.skip("it is not shipped yet")
    pair = np.load(shared_data / "burgers_r10_real_pair.npz")
    a, u = (torch.from_numpy(pair[name][0]).float()[None, :, None] for name in ("a", "u"))
    field = Field.of(torch.arange(512).float()[:, None] / 512, a)
    answer = Predictor("zoo:burgers-2048", "cpu")(field).values
    weights = field.weights[None]
    error = relative(squared((answer - u)[None], weights).sum(), squared(u[None], weights).sum()).item()
    assert error < max(read_card(zoo_folder() / "burgers-2048").by_sample)


@pytest.mark.slow
def test_a_wheel_carries_the_zoo(work, tmp_path):
    """Built from a copy with the tiny operator in it, unpacked elsewhere, and asked by name, offline."""
    source, target = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "oformer", source / "oformer", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(work / "zoo", source / "zoo")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    environment = {name: value for name, value in os.environ.items() if name not in ("OFORMER_ZOO", "PYTHONPATH")}
    ask = f"import sys; sys.path.insert(0, {str(target)!r}); from oformer.cli import main; sys.exit(main(sys.argv[1:]))"
    for arguments in (["zoo", "list"], ["zoo", "verify", "--quick"]):
        done = subprocess.run(
            [sys.executable, "-c", ask, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "tiny" in done.stdout
    assert (target / "oformer" / "weights" / "tiny" / CARD).is_file()
