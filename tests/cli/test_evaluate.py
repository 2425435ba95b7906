"""`oformer evaluate`: errors as the checkpoint holds them, on the data of the run."""

import json
from pathlib import Path

import pytest

from oformer.cli import main
from oformer.data.dataset import PointDataset
from tests.cli.command import SMALL


def test_evaluate_agrees_with_the_checkpoint_and_sweeps_resolutions(trained, here):
    done = here("evaluate", "outputs/burgers-demo", "--json", "--device", "cpu", cwd=trained)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    newest = sorted((trained / "outputs/burgers-demo/checkpoints").iterdir())[-1]
    saved = json.loads((newest / "config.json").read_text())["scores"]
    assert scores["error"] == pytest.approx(saved["error"], rel=1e-5)
    kinds = {row["points"]: row["kind"] for row in scores["sweep"]}
    assert kinds == {16: "resolution", 32: "trained", 64: "resolution", 10: "sparse"}
    errors = [row["error"] for row in scores["sweep"] if row["kind"] == "trained"]
    assert errors == [pytest.approx(scores["error"], rel=1e-5)]


def test_a_run_that_comes_without_its_data_is_measured_on_test_samples_alone(trained, tmp_path, monkeypatch, capsys):
    """Made again by their seed; nobody waits for those to train on."""
    monkeypatch.chdir(tmp_path)
    run = trained / "outputs/burgers-demo"
    newest = sorted((run / "checkpoints").iterdir())[-1]
    saved = json.loads((newest / "config.json").read_text())["scores"]["error"]
    for source, place in ((run, "a"), (newest, "b")):
        assert main(["evaluate", str(source), "--json", "--device", "cpu", "--datasets", place]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["error"] == pytest.approx(saved, rel=1e-5)
        assert "Making 4 test samples" in shown.err
        (made,) = Path(place).iterdir()
        assert len(PointDataset.open(made)) == 4
    assert main(["plot", str(run), "--samples", "2", "--out", "p", "--device", "cpu", "--datasets", "c"]) == 0
    assert "Making 2 test samples" in capsys.readouterr().err
    assert Path("p/predictions.png").is_file()


def test_a_run_on_ones_own_data_is_evaluated_and_drawn_on_them(tmp_path, monkeypatch, capsys):
    """Not on those of its recipe, which could be made as well; and where they are gone, it is said what to give."""

    def said(*arguments, code=0):
        assert main([*map(str, arguments), "--device", "cpu"]) == code
        return capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    problem = [argument.replace("problem.", "") for argument in SMALL[:8]]
    said("generate", "burgers", "--count", "12", "--train", "8", "--seed", "5", "--out", "mine", *problem)
    said("train", "burgers-demo", "--data", "mine", *SMALL)
    run = Path("outputs/burgers-demo")
    newest = sorted((run / "checkpoints").iterdir())[-1]
    saved = json.loads((newest / "config.json").read_text())["scores"]["error"]
    for source in (run, newest):
        shown = said("evaluate", source, "--json")
        assert json.loads(shown.out)["error"] == pytest.approx(saved, rel=1e-5)
        assert f"On the data that {run} was trained on: {tmp_path / 'mine'}" in shown.err
    assert str(tmp_path / "mine") in said("plot", run, "--only", "training").err
    assert str(tmp_path / "mine") in said("train", "burgers-demo", *SMALL).err
    assert not Path("datasets").exists()
    Path("mine").rename("moved")
    for command in ("evaluate", "plot"):
        gone = said(command, run, code=2).err
        assert f"at {tmp_path / 'mine'}, got nothing there. Say where they are now: --data" in gone
    told = said("evaluate", run, "--data", "moved", "--json")
    assert json.loads(told.out)["error"] == pytest.approx(saved, rel=1e-5)


def test_evaluate_averages_over_symmetries(trained, here):
    done = here("evaluate", "outputs/burgers-demo", "--json", "--device", "cpu", "--average", "4", cwd=trained)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["averaged"]["symmetries"] == 4
    assert 0 < scores["averaged"]["error"] != scores["error"]
    refused = here("evaluate", "outputs/burgers-demo", "--device", "cpu", "--average", "100000", cwd=trained)
    assert refused.returncode == 2
    assert "symmetries, which burgers has on these points" in refused.stderr


def test_evaluate_shows_the_error_before_it_goes_on_to_what_takes_longer(trained, monkeypatch, capsys):
    """Who stops it then with Ctrl-C has what was asked for."""

    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.chdir(trained)
    monkeypatch.setattr("oformer.training.evaluate.resolution_sweep", stopped)
    assert main(["evaluate", "outputs/burgers-demo", "--device", "cpu"]) == 130
    shown = capsys.readouterr()
    assert "relative L2 error" in shown.out
    assert "looked at with" not in shown.out
    monkeypatch.undo()
    monkeypatch.chdir(trained)
    assert main(["evaluate", "outputs/burgers-demo", "--device", "cpu", "--average", "4"]) == 0
    assert "4 symmetries, averaged" in capsys.readouterr().out.partition("looked at with")[2]
