"""A model besides OFormer goes the whole way: recipe, training, files, prediction, command line; one's own as well."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.checkpoint import load_checkpoint
from oformer.cli import main
from oformer.config import from_json, to_json
from oformer.errors import InputError, OutOfMemory
from oformer.export import export
from oformer.fields import Field
from oformer.meshes.grids import periodic_grid
from oformer.models import FNOConfig, GalerkinTransformerConfig, MWTConfig
from oformer.playground.api import Question, Service
from oformer.predict import Predictor, find_checkpoint
from oformer.training.distributed import Ranks
from oformer.training.evaluate import resolution_sweep
from oformer.training.find_data import open_data
from oformer.training.journal import read_journal
from oformer.training.loop import train
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Recipe
from tests.tiny import TINY_FLOW, tiny_fno, tiny_graph_network, tiny_recipe

ROOT = Path(__file__).resolve().parent.parent
NORMED = FNOConfig(width=6, modes=4, depth=2, head=8, batch_norm=True)
MWT = MWTConfig(polynomials=3, channels=4, modes=4, time_modes=2, depth=2, head=16)


GALERKIN = GalerkinTransformerConfig(
    kind="galerkin", width=12, heads=2, depth=2, feedforward=16, channels=8, modes=6, head=8, dropout=0.1
)
LONGER = {"steps": 100, "evaluate_every": 100, "optimizer": Optimizer(kind="adam", rate=1e-2)}


@pytest.fixture(scope="module")
def splits(tiny_data):
    return tiny_data.split("train"), tiny_data.split("test")


def run(recipe, folder, splits, **options):
    return train(recipe, folder, splits, quiet=True, tensorboard=False, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, splits):
    folder = tmp_path_factory.mktemp("fno")
    run(tiny_fno(steps=150, evaluate_every=150, checkpoint_every=50), folder, splits)
    return folder


@pytest.fixture(scope="module")
def trained_mwt(tmp_path_factory, splits):
    folder = tmp_path_factory.mktemp("mwt")
    run(tiny_fno(MWT, steps=150, evaluate_every=150, checkpoint_every=50), folder, splits)
    return folder


each_trained = pytest.mark.parametrize(("name", "fixture"), [("FNO", "trained"), ("MWT", "trained_mwt")])


@each_trained
def test_it_learns(request, name, fixture):
    folder = request.getfixturevalue(fixture)
    losses = [record["loss"] for record in read_journal(folder) if record["kind"] == "train"]
    assert np.mean(losses[-10:]) < 0.15 * np.mean(losses[:3])


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (tiny_fno(GALERKIN, **LONGER), "GalerkinTransformer"),
        (tiny_fno(dataclasses.replace(GALERKIN, kind="fourier"), **LONGER), "GalerkinTransformer"),
        (tiny_graph_network(), "GraphNetwork"),
    ],
    ids=["galerkin", "fourier", "graph network"],
)
def test_other_baselines_learn_are_loaded_and_answer_at_the_points_of_their_input_alone(tmp_path, recipe, name):
    samples = open_data(recipe, tmp_path / "data")
    splits = samples.split("train"), samples.split("test")
    assert run(recipe, tmp_path / "run", splits).finished
    losses = [record["loss"] for record in read_journal(tmp_path / "run") if record["kind"] == "train"]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    predict, sample = Predictor(tmp_path / "run", "cpu"), splits[1][0]
    found = load_checkpoint(find_checkpoint(tmp_path / "run")).operator
    with torch.no_grad():
        again = found(sample.input.batched(), sample.query.batched())[0]
    torch.testing.assert_close(predict(sample.input, sample.query).values, again)
    assert predict.operator.model.name == name
    with pytest.raises(InputError, match=f"queries at the points of the input for {name}"):
        predict(sample.input, dataclasses.replace(sample.query, coords=sample.query.coords + 0.01))
    with pytest.raises(InputError, match=rf"scattered points.*got {name}, which reads a"):
        export(tmp_path / "run", tmp_path / "model.pt2")
    training = dataclasses.replace(recipe.training, drop=tiny_recipe().training.drop)
    with pytest.raises(InputError, match=rf"all points of a .* for {name}, got training\.drop"):
        run(dataclasses.replace(recipe, training=training), tmp_path / "dropped", splits)
    service = Service({"other": Predictor(tmp_path / "run", "cpu", warn=False)})
    with pytest.raises(InputError, match=f"to play with, got {name}, which"):
        service.draw("other", 0)


@pytest.mark.parametrize("model", [NORMED, dataclasses.replace(MWT, batch_norm=True)], ids=["fno", "mwt"])
def test_interrupted_and_resumed_equals_uninterrupted_with_the_statistics_of_its_norms(tmp_path, splits, model):
    recipe = tiny_fno(model, steps=12, checkpoint_every=4, evaluate_every=6)
    run(recipe, tmp_path / "whole", splits)
    first = run(recipe, tmp_path / "parts", splits, on=lambda event, step, numbers: event == "evaluate")
    assert (first.finished, first.step) == (False, 6)
    torch.manual_seed(12345)
    assert run(recipe, tmp_path / "parts", splits).finished
    whole, parts = (load_checkpoint(find_checkpoint(tmp_path / name)).operator for name in ("whole", "parts"))
    assert any("running_mean" in name for name in whole.state_dict())
    for (name, a), b in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_its_recipe_goes_through_json_and_that_of_an_unknown_model_is_refused_with_the_known_ones():
    recipe = tiny_fno()
    assert from_json(Recipe, json.loads(json.dumps(to_json(recipe)))) == recipe
    with pytest.raises(InputError, match=r"FNOConfig.*OFormerConfig.* at `recipe\.model\.type`, got 'GNOConfig'"):
        from_json(Recipe, {**to_json(recipe), "model": {"type": "GNOConfig"}}, "recipe")


@pytest.mark.parametrize(
    ("recipe", "ranks", "message"),
    [
        (tiny_fno(chunk=8), Ranks(0, 1), "not all together, got FNO. Leave training.chunk out"),
        (tiny_fno(), Ranks(0, 2, "points"), "not all together, got FNO. Use --split samples"),
        (tiny_fno(NORMED, accumulate=2), Ranks(0, 1), "batch normalization of FNO, got 1 process.*2 slice"),
        (tiny_fno(NORMED, recompute=True), Ranks(0, 1), "training.recompute, got FNO with batch normalization"),
        (tiny_fno(NORMED), Ranks(0, 2), "batch normalization of FNO, got 2 process.*1 slice"),
    ],
    ids=["chunk", "split points", "accumulate", "recompute", "ranks"],
)
def test_settings_that_it_cannot_follow_are_refused_by_its_name(tmp_path, splits, recipe, ranks, message):
    with pytest.raises(InputError, match=message):
        run(recipe, tmp_path / "run", splits, ranks=ranks)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_said_with_ways_out_that_it_has(tmp_path, splits, monkeypatch):
    def full(self, batch, times):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("oformer.training.step.Stepper.__call__", full)
    for model, ways in (
        (None, r"--training\.accumulate 2 [^,]*, or --training\.recompute \([^()]*\)\.$"),
        (NORMED, r"goes on with more memory\.$"),
    ):
        with pytest.raises(OutOfMemory, match=ways):
            run(tiny_fno(model), tmp_path / str(model is None), splits)


@pytest.mark.parametrize("model", [None, MWT], ids=["fno", "mwt"])
def test_recomputed_it_learns_the_same(tmp_path, splits, model):
    for name, recompute in (("kept", False), ("again", True)):
        run(tiny_fno(model, steps=4, recompute=recompute), tmp_path / name, splits)
    kept, again = (load_checkpoint(find_checkpoint(tmp_path / name)).operator for name in ("kept", "again"))
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_training_with_dropped_points_is_refused_by_its_name(tmp_path, splits):
    recipe = dataclasses.replace(tiny_recipe(), model=tiny_fno().model)
    with pytest.raises(InputError, match=r"all points of a regular grid for FNO, got training\.drop"):
        run(recipe, tmp_path, splits)


def test_data_with_fewer_input_points_are_refused_by_its_name(tmp_path, splits):
    sparse = tuple(split.with_view(dataclasses.replace(split.view, keep=0.5)) for split in splits)
    with pytest.raises(InputError, match=r"points of a regular grid.*for FNO.*got 16 points that are none"):
        run(tiny_fno(), tmp_path, sparse)


def wave(points: int) -> Field:
    x = periodic_grid((points,), (1.0,)).float()
    return Field.of(x, torch.sin(2 * np.pi * x))


def test_it_answers_on_the_grid_of_its_input_at_any_resolution(trained):
    predict = Predictor(trained, "cpu", warn=False)
    few, many = predict(wave(32)), predict(wave(64))
    assert torch.equal(many.coords, wave(64).coords)
    error = (many.values[:, ::2] - few.values).norm() / few.values.norm()
    assert error < 0.05


def test_questions_that_it_cannot_answer_are_refused_by_its_name(trained):
    predict, field = Predictor(trained, "cpu", warn=False), wave(32)
    with pytest.raises(InputError, match=r"queries at the points of the input for FNO.*got 7 other points"):
        predict(field, torch.rand(7, 1))
    with pytest.raises(InputError, match=r"points of a regular grid.*for FNO.*train an OFormer"):
        predict(Field.of(torch.rand(32, 1), field.values))
    half = Field.of(field.coords[:16], field.values[:, :16])
    with pytest.raises(InputError, match="for FNO over the whole period"):
        predict(half)
    with pytest.raises(InputError, match=r"at most 8 points at once.*for FNO"):
        predict(field, chunk=8)


def test_export_is_refused_by_its_name(trained, tmp_path):
    for name in ("model.onnx", "model.pt2"):
        with pytest.raises(InputError, match=r"reads scattered points.*got FNO, which reads a regular grid"):
            export(trained, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_sweep_has_the_resolutions_that_it_reads_and_no_sparse_input(trained, splits):
    operator = load_checkpoint(find_checkpoint(trained)).operator
    sweep = resolution_sweep(operator, splits[1])
    assert [(row.kind, row.points) for row in sweep] == [("resolution", 16), ("trained", 32), ("resolution", 64)]


@each_trained
def test_the_card_of_a_checkpoint_says_what_it_is(request, name, fixture):
    page = (find_checkpoint(request.getfixturevalue(fixture)) / "README.md").read_text()
    assert f"{name} of " in page
    assert "on a regular grid" in page
    assert "OFormer" not in page


def test_it_is_served_on_grids_and_not_played_with(trained):
    service, field = Service({"fno": Predictor(trained, "cpu", warn=False)}), wave(64)
    assert "play" not in service.describe("fno")
    question = Question(coords=field.coords.numpy(), values=field.values.numpy())
    checked = service.checked("fno", question, 64)
    alone, *both = service.answer([checked]) + service.answer([checked, checked])
    assert all(torch.allclose(answer.values, alone.values, rtol=1e-4) for answer in both)
    with pytest.raises(InputError, match="queries at the points of the input for FNO"):
        service.checked("fno", dataclasses.replace(question, resolution=32), 64)
    with pytest.raises(InputError, match="to play with, got FNO, which reads regular grids alone"):
        service.draw("fno", 0)


@pytest.mark.parametrize("time", ["march", "block"])
@pytest.mark.parametrize("model", [FNOConfig(width=6, modes=2, depth=2, head=8, padding=2), MWT], ids=["fno", "mwt"])
def test_a_flow_is_trained_frame_by_frame_and_as_a_block(tmp_path, model, time):
    recipe = tiny_fno(dataclasses.replace(model, time=time), steps=6, augment=False)
    data = dataclasses.replace(recipe.data, train=4, test=2, view=type(recipe.data.view)())
    loss = dataclasses.replace(recipe.training.loss, derivative=0.0)
    training = dataclasses.replace(recipe.training, loss=loss)
    recipe = dataclasses.replace(recipe, problem=TINY_FLOW, data=data, training=training)
    samples = open_data(recipe, tmp_path / "data")
    splits = samples.split("train"), samples.split("test")
    outcome = run(recipe, tmp_path / "run", splits)
    assert outcome.finished
    sample = splits[1][0]
    answer = Predictor(tmp_path / "run", "cpu")(sample.input)
    assert answer.values.shape == sample.target.shape
    assert len(outcome.scores.by_step) == sample.target.shape[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("filter", None)


SMALL = (
    "from oformer.data.dataset import View\nfrom oformer.problems import Burgers\n"
    "recipe = dataclasses.replace(recipe, problem=Burgers(points=64, solver_points=64, modes=6, steps=40),\n"
    "    data=dataclasses.replace(recipe.data, train=8, test=4, view=View(points=(32,))),\n"
    "    training=dataclasses.replace(recipe.training, steps=20))\n"
)


def ask(path: Path) -> None:
    field = wave(64)
    np.savez(path, coords=field.coords.numpy(), values=field.values[0].numpy())


def test_the_command_line_trains_evaluates_and_predicts_with_it(here, capsys):
    Path("a_small_grid_model.py").write_text(
        "import dataclasses\nfrom oformer import RECIPES\nrecipe = RECIPES['burgers-2048-fno']\n"
        + SMALL
        + "recipe = dataclasses.replace(recipe, name='small',\n"
        "    training=dataclasses.replace(recipe.training, batch=4))\n"
    )
    sizes = ["--model.width", "6", "--model.modes", "4", "--model.activation", "relu"]
    assert main(["train", "a_small_grid_model.py", "--device", "cpu", *sizes]) == 0
    sys.modules.pop("a_small_grid_model")
    recipe = json.loads(Path("outputs/small/recipe.json").read_text())
    assert (recipe["model"]["type"], recipe["model"]["width"]) == ("FNOConfig", 6)
    assert Path("outputs/small/report.html").is_file()
    assert main(["evaluate", "outputs/small", "--device", "cpu"]) == 0
    ask(Path("in.npz"))
    assert main(["predict", "outputs/small", "in.npz", "--device", "cpu", "--plot", "answer.png"]) == 0
    assert np.load("prediction.npz")["values"].shape == (1, 64, 1)
    capsys.readouterr()
    assert main(["predict", "outputs/small", "in.npz", "--device", "cpu", "--resolution", "48"]) == 2
    assert "queries at the points of the input for FNO" in capsys.readouterr().err


def test_the_list_shows_baselines_apart(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    ours, baselines = said.split("baseline: another model")
    assert "burgers-2048-plus" in ours
    assert not re.search("-(fno|mwt)", ours)
    assert "ns2-part-fno" in baselines
    assert "ns2-part-mwt" in baselines


def test_the_model_of_the_contributing_page_works_from_its_file(here, capsys):
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add a model")[2]
    block = re.search(r"^```python\n(.*?)^```", section, re.S | re.M)
    assert block is not None
    Path("filter.py").write_text(block.group(1) + SMALL)
    assert main(["train", "filter.py", "--device", "cpu", "--model.taps", "5"]) == 0
    stored = json.loads(Path("outputs/filter/recipe.json").read_text())["model"]
    assert stored == {"type": "FilterConfig", "taps": 5}
    # Another process, which has not imported the file, knows no such model.
    ask(Path("in.npz"))
    file = ["--recipe", "filter.py"]
    for command in (
        ["evaluate", "outputs/filter", "--device", "cpu"],
        ["predict", "outputs/filter", "in.npz", "--device", "cpu"],
        ["plot", "outputs/filter", "--device", "cpu", "--only", "predictions"],
        ["inspect", "outputs/filter"],
    ):
        assert main([*command, *file]) == 0
    assert np.load("prediction.npz")["values"].shape == (1, 64, 1)
    assert main(["export", "outputs/filter", *file]) == 2
    assert "got Filter, which reads a regular grid" in capsys.readouterr().err
    sys.modules.pop("filter")


def test_the_model_of_a_file_that_is_not_named_is_asked_for(trained, tmp_path, capsys):
    config = find_checkpoint(trained) / "config.json"
    folder = tmp_path / "run"
    folder.mkdir()
    for path in config.parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "checksums.json").unlink(missing_ok=True)
    content = json.loads(config.read_text())
    content["model"]["type"] = content["recipe"]["model"]["type"] = "TheirConfig"
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"one of .*FNOConfig.* at `model\.type`.*TheirConfig.*import the Python file"):
        load_checkpoint(folder)
    for command in (["evaluate", str(folder)], ["predict", str(folder), "in.npz"]):
        ask(tmp_path / "in.npz")
        assert main([*command[:2], *(str(tmp_path / name) for name in command[2:])]) == 2
        assert "--recipe FILE.py" in capsys.readouterr().err
