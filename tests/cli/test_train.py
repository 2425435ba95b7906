"""`oformer train`: a complete run, its time budgets, its help, and how it is interrupted."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oformer.cli import main
from tests.cli.command import ENVIRONMENT, SMALL, cli


def test_train_leaves_a_complete_run_and_a_second_call_has_nothing_to_do(trained, here):
    run = trained / "outputs" / "burgers-demo"
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["training"]["steps"] == 6
    assert recipe["model"]["encoder"]["width"] == 16
    page = (run / "report.html").read_text()
    assert "data:image" in page
    assert "http" not in page.replace("http-equiv", "")
    before = (run / "journal.jsonl").read_text()
    again = here("train", "burgers-demo", "--device", "cpu", *SMALL, cwd=trained)
    assert again.returncode == 0
    assert (run / "journal.jsonl").read_text() == before


def test_a_run_with_held_out_samples_is_scored_by_them_and_reported_and_evaluated_on_the_test_samples(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run = "outputs/burgers-demo"
    assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, "--data.validation", "3"]) == 0
    said = capsys.readouterr().err
    assert "step 6: validation error" in said
    assert re.search(r"Writing the report: predicting 4 test samples .*\n.*Finished 6 steps, validation error", said)
    assert "test error" not in said
    assert "Relative L2 error of 4 test samples" in (tmp_path / run / "report.html").read_text()
    for split, count in (("test", 4), ("validation", 3), ("train", 5)):
        assert main(["evaluate", run, "--device", "cpu", "--split", split]) == 0
        assert f"{split} split, {count} samples" in capsys.readouterr().out


def test_a_run_with_held_out_samples_that_stops_early_leaves_the_test_samples_alone(tmp_path, monkeypatch, capsys):
    from oformer import report
    from oformer.training import loop

    monkeypatch.chdir(tmp_path)
    stopped = SimpleNamespace(finished=False, reason="time", step=3)
    monkeypatch.setattr(loop, "train", lambda *arguments, **options: stopped)
    monkeypatch.setattr(report, "write_report", lambda *a, **options: pytest.fail("test samples predicted"))
    assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, "--data.validation", "3"]) == 0
    said = capsys.readouterr().err
    assert "report" not in said
    assert "Stopped (time) at step 3; everything is saved." in said


def test_the_minutes_of_a_training_count_from_the_command(tmp_path, monkeypatch, capsys):
    """What a machine is lent for is spent on data too; and a command that comes late still gets further, but makes no
    operator of a moment's training."""
    from oformer import report
    from oformer.cli import train as module
    from oformer.training import find_data, loop

    monkeypatch.chdir(tmp_path)
    clock, given, reported = [1000.0], [], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    open_data = find_data.open_data

    def slowly(*arguments, **options):
        clock[0] += 90
        return open_data(*arguments, **options)

    def stopped(*arguments, max_minutes, stop_after, **options):
        given.append((max_minutes, stop_after))
        return SimpleNamespace(finished=False, reason="time", step=3)

    monkeypatch.setattr(find_data, "open_data", slowly)
    monkeypatch.setattr(loop, "train", stopped)
    monkeypatch.setattr(report, "write_report", lambda *a, device: reported.append(device))
    for minutes in (["--stop-after", "10"], ["--stop-after", "1"], ["--max-minutes", "10"], []):
        assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, *minutes]) == 0
    late = pytest.approx(8.5)
    assert given == [(None, late), (None, module.MIN_TRAINING_MINUTES), (late, None), (None, None)]
    assert reported == ["cpu"] * 4
    assert "Writing the report: predicting 4 test samples" in capsys.readouterr().err
    assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, "--max-minutes", "1"]) == 0
    assert len(given) == len(reported) == 4
    assert "--max-minutes 1 were over before training" in capsys.readouterr().err


def test_help_for_data_of_ones_own_shows_what_is_chosen_from_them_under_a_name_that_works(tmp_path):
    """The usage, and what a refusal tells to type, are themselves commands that run."""
    data = "with a space.npz"
    x = np.linspace(0, 1, 8)
    np.savez(tmp_path / data, coords=x, inputs=np.ones((9, 8)), targets=np.ones((9, 8)))
    asked = cli("train", "--data", data, "--help", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    usage = asked.stdout.splitlines()[0]
    assert usage == f"usage: oformer train --data {shlex.quote(data)} [-h] [OPTIONS]"
    assert "--training.steps INT" in asked.stdout
    assert "width 48" in asked.stderr
    refused = cli("train", "--data", data, "--training.stepz", "3", cwd=tmp_path)
    assert refused.returncode == 2
    (told,) = re.findall(r"All of them: oformer (train .*--help)", refused.stderr)
    again = cli(*shlex.split(told), cwd=tmp_path)
    assert again.stdout == asked.stdout


def test_help_is_that_of_the_recipe_where_one_is_named_and_of_the_command_elsewhere(tmp_path):
    named = cli("train", "burgers-demo", "--data.train", "5", "-h", cwd=tmp_path).stdout
    assert named.startswith("usage: oformer train burgers-demo [-h] [OPTIONS]\n")
    assert "--model.encoder.width INT" in named
    plain = cli("train", "--device", "cpu", "--help", cwd=tmp_path).stdout
    assert plain.startswith("usage: oformer train [-h] [TRAIN OPTIONS] [NAME]\n")
    assert "--max-minutes" in plain
    assert "--stop-after" in plain
    nothing = cli("train", "--data", "nothing.h5", "--help", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "nothing there" in nothing.stderr


def test_a_dataset_of_a_newer_version_and_a_full_disk(trained, tmp_path, monkeypatch, capsys):
    import errno
    import shutil

    monkeypatch.chdir(tmp_path)
    (dataset,) = (trained / "datasets").iterdir()
    shutil.copytree(dataset, tmp_path / "newer")
    sidecar = tmp_path / "newer" / "dataset.json"
    content = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**content, "version": content["version"] + 1}))
    assert main(["train", "burgers-demo", "--data", "newer", "--device", "cpu"]) == 2
    assert "newer" in capsys.readouterr().err

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "4", "--count", "4"]
    assert main(["generate", "burgers", *small, "--out", "full", "--device", "cpu"]) == 2
    assert "space" in capsys.readouterr().err


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, request):
    import signal

    long = [*SMALL, "--training.steps", "100000", "--training.checkpoint-every", "100000"]
    command = [sys.executable, "-m", "oformer", "train", "burgers-demo", "--device", "cpu", *long]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    request.addfinalizer(process.kill)  # also where the test is out of time
    journal = tmp_path / "outputs/burgers-demo/journal.jsonl"
    while not (journal.exists() and '"train"' in journal.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Go on with: python -m oformer train burgers-demo" in said
    (saved,) = (tmp_path / "outputs/burgers-demo/checkpoints").iterdir()
    assert int(saved.name) > 0


def test_a_trained_operator_is_fine_tuned(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    few = ["--device", "cpu", "--quiet", *SMALL, "--training.optimizer.rates", "encoder", "0"]
    start = ["--from", "outputs/burgers-demo"]
    assert main(["train", "burgers-demo", *start, *few, "--out", "outputs/tuned"]) == 0
    assert "Model, weights and normalization of burgers-demo, trained for 6 steps" in capsys.readouterr().err
    assert json.loads(Path("outputs/tuned/recipe.json").read_text())["start"]["name"] == "burgers-demo"
    x = np.linspace(0, 1, 16)[:, None]
    np.savez("open.npz", coords=x, inputs=np.ones((4, 1, 16, 1)), targets=np.ones((4, 1, 16, 1)))
    assert main(["train", "--data", "open.npz", *start, "--device", "cpu", "--training.steps", "2"]) == 2
    said = capsys.readouterr().err
    assert "layout of burgers-demo to start from: periods (1.0,), got periods None" in said
    assert "--model.encoder.width" not in said
