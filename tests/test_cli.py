"""The command line as a person meets it: light help, from recipe to prediction, one sentence for mistakes."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oformer.cli import COMMANDS, main, parse
from oformer.data.dataset import PointDataset

ROOT = Path(__file__).resolve().parent.parent
# Absolute, because the commands run in other folders than this one.
PATHS = os.pathsep.join(str(Path(p).resolve()) for p in (ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": PATHS}
# The smallest thing that `train` can do, spelled as a person would.
SMALL = [
    "--problem.points", "64", "--problem.solver-points", "64", "--problem.modes", "6", "--problem.steps", "40",
    "--data.train", "8", "--data.test", "4", "--data.view.points", "32", "--model.encoder.width", "16",
    "--model.encoder.depth", "1", "--model.query.width", "16", "--model.query.fourier-features", "8",
    "--training.steps", "6", "--training.batch", "4", "--training.evaluate-every", "3",
    "--training.checkpoint-every", "3", "--training.log-every", "1",
]  # fmt: skip


def cli(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "oformer", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which `oformer train` was run once."""
    folder = tmp_path_factory.mktemp("work")
    done = cli("train", "burgers-demo", "--device", "cpu", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("error", "hints"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), True),
        (type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})("no such name"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_a_kernel_that_fails_says_how_to_do_without(error, hints, monkeypatch):
    def fail(self, rest):
        raise error

    monkeypatch.setattr(COMMANDS["list"], "run", fail)
    with pytest.raises(type(error)) as raised:
        main(["list"])
    assert [("OFORMER_FUSED=0" in note) for note in getattr(raised.value, "__notes__", [])] == [True] * hints


def test_an_error_of_a_disk_is_one_sentence(monkeypatch, capsys):
    """Also where a package of others met it, which does not say it in ours."""
    error = PermissionError(13, "Permission denied", "/data/secret")

    def fail(self, rest):
        raise error

    monkeypatch.setattr(COMMANDS["list"], "run", fail)
    assert main(["list"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("oformer: /data/secret: Permission denied.")
    assert said.count("\n") == 1
    with pytest.raises(PermissionError):
        main(["list", "--traceback"])
    error = OSError("of a package that gives no number")
    with pytest.raises(OSError, match="gives no number"):
        main(["list"])


def test_a_program_ends_where_its_command_does_with_all_of_its_words():
    """What happens while an interpreter tidies up is not the command's business; here it would abort."""
    code = "import atexit, os, sys\nfrom oformer.cli import program\natexit.register(os.abort)\nprogram()\n"

    def program(*arguments):
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT)

    done, mistaken = program("--version"), program("inspect", "nowhere")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"oformer \S+\n", done.stdout)
    assert (mistaken.returncode, mistaken.stdout) == (2, "")
    assert re.fullmatch(r"oformer: Expected .* nowhere, got nothing there.*\n", mistaken.stderr)


@pytest.mark.parametrize("arguments", [["--help"], *[[verb, "--help"] for verb in COMMANDS]])
def test_help_names_its_verb_and_never_imports_torch(arguments):
    code = (
        "import sys\n"
        "from oformer.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert " ".join(["oformer", *arguments[:-1]]) in done.stdout


def test_a_prediction_does_not_load_the_compiler():
    """Which takes longer than all else together."""
    code = (
        "import sys\n"
        "import oformer.training.loop, oformer.playground.server\n"
        "from oformer import Predictor\n"
        "from oformer.fields import Field\n"
        "import torch\n"
        "x = torch.linspace(0, 1, 65)[:-1, None]\n"
        "Predictor('burgers-demo')(Field.of(x, torch.sin(6.283 * x)[None]), Field.of(x))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_list_shows_every_recipe_with_its_size(capsys):
    from oformer.experiments.recipes import RECIPES

    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
    assert "660,719" in shown
    assert "1,851,361" in shown


def test_train_leaves_a_complete_run_and_a_second_call_has_nothing_to_do(trained):
    run = trained / "outputs" / "burgers-demo"
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["training"]["steps"] == 6
    assert recipe["model"]["encoder"]["width"] == 16
    page = (run / "report.html").read_text()
    assert "data:image" in page
    assert "http" not in page.replace("http-equiv", "")
    before = (run / "journal.jsonl").read_text()
    again = cli("train", "burgers-demo", "--device", "cpu", *SMALL, cwd=trained)
    assert again.returncode == 0
    assert (run / "journal.jsonl").read_text() == before


def test_the_minutes_of_a_training_count_from_the_command(tmp_path, monkeypatch, capsys):
    """What a machine is lent for is spent on data too; and a command that comes late still gets further, but makes no
    operator of a moment's training."""
    from oformer import cli as module
    from oformer import report
    from oformer.training import datasets, loop

    monkeypatch.chdir(tmp_path)
    clock, given, reported = [1000.0], [], []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    open_data = datasets.open_data

    def slowly(*arguments, **options):
        clock[0] += 90
        return open_data(*arguments, **options)

    def stopped(*arguments, max_minutes, stop_after, **options):
        given.append((max_minutes, stop_after))
        return SimpleNamespace(finished=False, reason="time", step=3)

    monkeypatch.setattr(datasets, "open_data", slowly)
    monkeypatch.setattr(loop, "train", stopped)
    monkeypatch.setattr(report, "write_report", lambda *a, device: reported.append(device))
    for minutes in (["--stop-after", "10"], ["--stop-after", "1"], ["--max-minutes", "10"], []):
        assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, *minutes]) == 0
    late = pytest.approx(8.5)
    assert given == [(None, late), (None, module.LEAST_MINUTES), (late, None), (None, None)]
    assert reported == ["cpu"] * 4
    assert "Writing the report: predicting 4 test samples" in capsys.readouterr().err
    assert main(["train", "burgers-demo", "--device", "cpu", *SMALL, "--max-minutes", "1"]) == 0
    assert len(given) == len(reported) == 4
    assert "--max-minutes 1 were over before training" in capsys.readouterr().err


def test_the_demo_takes_one_thread_whatever_torch_would_take(monkeypatch):
    from oformer import demo as module

    threads = []
    monkeypatch.setattr(module, "demo", lambda *a, **options: threads.append(torch.get_num_threads()) or 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["demo"]) == 0
    finally:
        torch.set_num_threads(before)
    assert threads == [1]


def test_evaluate_agrees_with_the_checkpoint_and_sweeps_resolutions(trained):
    done = cli("evaluate", "outputs/burgers-demo", "--json", "--device", "cpu", cwd=trained)
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


def test_evaluate_averages_over_symmetries(trained):
    done = cli("evaluate", "outputs/burgers-demo", "--json", "--device", "cpu", "--average", "4", cwd=trained)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert scores["averaged"]["symmetries"] == 4
    assert 0 < scores["averaged"]["error"] != scores["error"]
    refused = cli("evaluate", "outputs/burgers-demo", "--device", "cpu", "--average", "100000", cwd=trained)
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


def test_predict_writes_physical_values_where_asked(trained, tmp_path):
    x = np.arange(40) / 40
    np.savez(tmp_path / "in.npz", coords=x[:, None], values=np.sin(2 * np.pi * x)[:, None])
    np.save(tmp_path / "where.npy", np.array([[0.1], [0.5], [0.77]]))
    out, picture = tmp_path / "out.npz", tmp_path / "out.png"
    done = cli(
        "predict", "outputs/burgers-demo", tmp_path / "in.npz", "--queries", tmp_path / "where.npy", "--out", out,
        "--plot", picture, "--memory-gb", "1e-5", cwd=trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = np.load(out)
    assert answer["values"].shape == (1, 3, 1)

    import torch

    from oformer.fields import Field
    from oformer.predict import Predictor

    field = Field.of(torch.tensor(x[:, None]).float(), torch.sin(2 * torch.pi * torch.tensor(x)).float()[None, :, None])
    expected = Predictor(trained / "outputs/burgers-demo", "cpu")(field, torch.tensor([[0.1], [0.5], [0.77]]))
    np.testing.assert_allclose(answer["values"], expected.values.numpy(), rtol=1e-5, atol=1e-7)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_predict_warns_in_one_sentence_of_what_training_has_not_shown(tmp_path, capsys):
    x = np.arange(64) / 64
    for change, words in (
        (lambda u: 30 * u, "input channel 0 from -30 to 30, in training from -2.27 to 2.23"),
        (lambda u: u + 0.5, "the mean of input channel 0 from 0.5 to 0.5, in training from -4.89e-09 to 3.83e-09"),
        (lambda u: u, None),
    ):
        np.savez(tmp_path / "in.npz", coords=x, values=change(np.sin(2 * np.pi * x)))
        assert main(["predict", "burgers-demo", str(tmp_path / "in.npz"), "--out", str(tmp_path / "out.npz")]) == 0
        *said, wrote = capsys.readouterr().err.splitlines()
        before = "oformer: Outside of what it was trained on, and so perhaps wrong: "
        assert said == ([] if words is None else [before + words])
        assert wrote.startswith("Wrote 1 frame(s)")


def test_plot_draws_each_figure(trained, tmp_path):
    done = cli("plot", "outputs/burgers-demo", "--out", tmp_path, "--device", "cpu", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert {p.stem for p in tmp_path.glob("*.png")} == {"training", "predictions", "by-resolution"}
    one = cli("plot", "outputs/burgers-demo", "--only", "training", "--out", tmp_path / "one", cwd=trained)
    assert one.returncode == 0, one.stderr
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["training.png"]
    none = cli("plot", "outputs/burgers-demo", "--only", "prediction", "--out", tmp_path / "none", cwd=trained)
    assert none.returncode == 2
    assert "Did you mean `predictions`" in none.stderr


def test_inspect_says_what_things_are(trained, capsys, tmp_path):
    run = trained / "outputs/burgers-demo"
    (dataset,) = (trained / "datasets").iterdir()
    np.savez(tmp_path / "a.npz", thing=np.array([1.0, np.nan]))
    for path, words in (
        (dataset, ["Burgers", "12 (train 0..7, test 8..11)", "64", "checksums all as written"]),
        (run, ["Run: burgers-demo", "step 6", "finished"]),
        (sorted((run / "checkpoints").iterdir())[-1], ["Checkpoint", "parameters", "independent"]),
        (tmp_path / "a.npz", ["thing", "float64 (2,)", "1 not finite"]),
    ):
        assert main(["inspect", str(path), "--verify"]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words), shown


def test_generate_in_two_shares_equals_one(tmp_path, capsys):
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "20"]
    for shard in ("0/2", "1/2"):
        arguments = [
            "generate",
            "burgers",
            "--count",
            "130",
            "--shard",
            shard,
            "--out",
            str(tmp_path / "two"),
        ]
        assert main([*arguments, "--device", "cpu", *small]) == 0
    assert (
        main(
            [
                "generate",
                "burgers",
                "--count",
                "130",
                "--out",
                str(tmp_path / "one"),
                "--device",
                "cpu",
                *small,
            ]
        )
        == 0
    )
    one, two = (json.loads((tmp_path / n / "dataset.json").read_text()) for n in ("one", "two"))
    assert [p["sha256"] for p in one["parts"]] == [p["sha256"] for p in two["parts"]]
    assert one["complete"]


@pytest.mark.parametrize("data", ["my.npz", "with a space.npz"])
def test_help_for_data_of_ones_own_shows_what_is_chosen_from_them_under_a_name_that_works(data, tmp_path):
    """The usage, and what a refusal tells to type, are themselves commands that run."""
    x = np.linspace(0, 1, 8)
    np.savez(tmp_path / data, coords=x, inputs=np.ones((9, 8)), targets=np.ones((9, 8)))
    asked = cli("train", "--data", data, "--help", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    usage = asked.stdout.splitlines()[0]
    assert usage == f"usage: python -m oformer train --data {shlex.quote(data)} [-h] [OPTIONS]"
    assert "--training.steps INT" in asked.stdout
    assert "width 48" in asked.stderr
    refused = cli("train", "--data", data, "--training.stepz", "3", cwd=tmp_path)
    assert refused.returncode == 2
    (told,) = re.findall(r"run python -m oformer (train .*--help)", refused.stderr)
    again = cli(*shlex.split(told), cwd=tmp_path)
    assert again.stdout == asked.stdout


def test_help_is_that_of_the_recipe_where_one_is_named_and_of_the_command_elsewhere(tmp_path):
    named = cli("train", "burgers-demo", "--data.train", "5", "-h", cwd=tmp_path).stdout
    assert named.startswith("usage: python -m oformer train burgers-demo [-h] [OPTIONS]\n")
    assert "--model.encoder.width INT" in named
    plain = cli("train", "--device", "cpu", "--help", cwd=tmp_path).stdout
    assert plain.startswith("usage: python -m oformer train [-h] [TRAIN OPTIONS] [NAME]\n")
    assert "--max-minutes" in plain
    assert "--stop-after" in plain
    nothing = cli("train", "--data", "nothing.h5", "--help", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "nothing there" in nothing.stderr


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (["--training.recompute"], True),
        (["--training.recompute", "True"], True),
        (["--training.recompute=true"], True),
        (["--training.recompute", "false"], False),
        (["--training.recompute=False"], False),
        (["--training.no-recompute"], False),
    ],
)
def test_a_switch_of_a_recipe_takes_a_truth_or_none(written, value):
    """As other programs write it too, with the argument behind it left alone."""
    from oformer.cli import _override
    from oformer.experiments.recipes import recipe_named

    recipe = recipe_named("burgers-demo")
    recipe = replace(recipe, training=replace(recipe.training, recompute=not value))
    changed = _override(recipe, [*written, "--training.steps", "7"])
    assert (changed.training.recompute, changed.training.steps) == (value, 7)


def test_a_switch_of_a_command_takes_a_truth_and_leaves_names_alone():
    for written in (["--quiet", "true"], ["--quiet=TRUE"], ["--quiet"]):
        command, rest = parse(["train", *written, "burgers-demo", "--training.steps", "7"])
        assert (command.quiet, command.name, rest) == (True, "burgers-demo", ["--training.steps", "7"])
    command, _ = parse(["train", "burgers-demo", "--quiet=false", "--out", "true"])
    assert (command.quiet, command.out) == (False, Path("true"))
    command, _ = parse(["inspect", "--verify", "x"])
    assert (command.verify, command.file) == (True, Path("x"))
    command, _ = parse(["zoo", "add", "outputs/a", "--card_only=true", "--half", "false"])
    assert (command.action.card_only, command.action.half) == (True, False)


MISTAKES = {
    "unknown recipe": (["train", "burger-2048"], "Did you mean `burgers-2048`?"),
    "unknown problem": (["generate", "burgerz"], "burgers"),
    "no such run": (["predict", "nowhere", "x.npz"], "nowhere"),
    "no such file": (["inspect", "nothing.npz"], "nothing there"),
    "odd width": (["train", "burgers-512", "--model.encoder.width", "33"], "even"),
    "bad shard": (["generate", "burgers", "--shard", "half"], "i/n"),
    "unknown option": (["inspect", "x", "--colour"], "colour"),
    "half a truth": (["train", "burgers-512", "--quiet=maybe"], "Write --quiet or --no-quiet."),
    "half a setting": (
        ["train", "burgers-512", "--training.loss.by-points=1"],
        "Write --training.loss.by-points or --training.loss.no-by-points.",
    ),
    "no gpu": (["train", "burgers-512", "--device", "cuda"], "GPU"),
    "too few points": (["generate", "burgers", "--points", "20"], "modes"),
    "unknown verb": (["trian"], "Did you mean `train`?"),
    "help for an unknown verb": (["trian", "--help"], "Did you mean `train`?"),
    "unknown verb of the zoo": (["zoo", "shwo", "--help"], "Did you mean `show`?"),
    "no samples": (["generate", "burgers", "--count", "0"], "at least 1 for `--count`, got 0."),
    "another format": (["predict", "burgers-demo", "x.npz", "--out", "a.vtu"], "ends in .npz for --out, got `a.vtu`"),
    "another picture": (["predict", "burgers-demo", "x.npz", "--plot", "a.bmp"], "ends in .png, .svg or .pdf"),
    "another precision": (["predict", "burgers-demo", "x.npz", "--precision", "fp16"], "'float16', 'bfloat16'"),
    "infinite memory": (["predict", "burgers-demo", "x.npz", "--memory-gb", "inf"], "finite number above zero"),
    "no memory": (["predict", "burgers-demo", "x.npz", "--memory-gb", "nan"], "`--memory-gb`, got nan"),
    "beyond 64 bits": (["generate", "burgers", "--solver-points", "9" * 20], "64 bits for `--solver-points`, got 999"),
    "an infinite rate": (["train", "burgers-demo", "--training.optimizer.rate", "inf"], "`--training.optimizer.rate`"),
    "beyond all ports": (["serve", "--port", "99999"], "a number from 0 to 65535 for `--port`"),
    "nothing of the zoo": (["zoo", "verify", "--samples", "0"], "at least 1 for `--samples`"),
    "an empty path": (["generate", "burgers", "--out", ""], "something after `--out`, got an empty argument"),
    "an empty path behind =": (["generate", "burgers", "--out="], "something after `--out`, got an empty argument"),
    "an empty name": (["inspect", ""], "something after `inspect`, got an empty argument"),
    "a name too long for a disk": (["inspect", "x" * 300], "File name too long"),
    "a file as a folder": (
        ["predict", "burgers-demo", "in.npz", "--out", "in.npz/x.npz"],
        "written at in.npz/x",
    ),
    "beyond memory": (["predict", "burgers-demo", "in.npz", "--resolution", "4" * 14], "sizes that memory holds"),
    "NUL": (["inspect", "a\0b"], "without the character NUL, got 'a\\x00b'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_two(name, capsys, tmp_path, monkeypatch):
    arguments, words = MISTAKES[name]
    if name == "no gpu":
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", coords=np.arange(64) / 64, values=np.sin(np.arange(64) * np.pi / 32))
    try:
        code = main(arguments)
    except SystemExit as stop:  # tyro's own refusals
        code = stop.code
    shown = capsys.readouterr()
    assert code == 2
    assert words in shown.out + shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("name", ["unknown recipe", "odd width", "unknown option", "no such verb"])
def test_of_many_ranks_the_first_speaks(name, capsys, tmp_path, monkeypatch):
    """The others wait until it has spoken, and exit alike."""
    arguments = ["trian"] if name == "no such verb" else MISTAKES[name][0]
    monkeypatch.chdir(tmp_path)
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    codes, said = [], []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        try:
            codes.append(main(arguments))
        except SystemExit as stop:  # tyro's own refusals
            codes.append(stop.code)
        shown = capsys.readouterr()
        said.append(shown.out + shown.err)
    assert codes == [2, 2]
    assert said[0]
    assert said[1] == ""
    assert len(waited) == 1


def test_what_only_one_rank_may_meet_is_said_by_it(capsys, tmp_path, monkeypatch):
    """Ranks have the same arguments, but may have other disks."""
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "file").write_text("no folder")
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "4", "--count", "4"]
    assert main(["generate", "burgers", *small, "--shard", "0/1", "--out", str(tmp_path / "file" / "data")]) == 2
    assert "a place that can be written" in capsys.readouterr().err


def test_ranks_that_generate_say_what_is_their_own(capsys, tmp_path, monkeypatch):
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "4", "--count", "4"]
    said = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["generate", "burgers", *small, "--out", str(tmp_path / "data")]) == 0
        said.append(capsys.readouterr().err)
    assert "4 samples" not in said[0]
    assert "This share" in said[0] + said[1]
    assert "4 samples" in said[1]
    assert "is complete" in said[1]


def _bad_input(folder: Path, name: str) -> list[str]:
    """Arguments that hand over a damaged or wrong file."""
    run, x = "outputs/burgers-demo", np.arange(8.0)[:, None]
    values = np.ones((8, 1))
    if name == "nan":
        values[3] = np.nan
    if name == "infinite":
        values[3] = np.inf
    coords = np.ones((8, 2)) if name == "wrong dimension" else x[:0] if name == "empty" else x
    values = values[:5] if name == "mismatched" else values[:0] if name == "empty" else values
    np.savez(folder / "in.npz", coords=coords, values=values)
    if name == "truncated":
        (folder / "in.npz").write_bytes((folder / "in.npz").read_bytes()[:60])
    if name == "foreign":
        (folder / "in.npz").write_text("this is no array")
    return ["predict", run, str(folder / "in.npz"), "--out", str(folder / "out.npz"), "--device", "cpu"]


BAD_INPUTS = {
    "nan": "1 NaN or infinite values",
    "infinite": "1 NaN or infinite values",
    "wrong dimension": "lives in 1 dimension",
    "empty": "at least one point",
    "mismatched": "as many `values` as points",
    "truncated": "plain arrays",
    "foreign": "plain arrays",
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_file_is_one_sentence_and_leaves_what_was_there(name, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (tmp_path / "out.npz").write_bytes(b"precious")
    assert main(_bad_input(tmp_path, name)) == 2
    said = capsys.readouterr().err
    assert BAD_INPUTS[name] in said
    assert said.count("\n") == 1
    assert (tmp_path / "out.npz").read_bytes() == b"precious"


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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(5, "Input/output error", "a/b"), "a/b: Input/output error. What was complete is not lost."),
        (MemoryError("Unable to allocate 7 TiB"), "sizes that memory holds, got Unable to allocate 7 TiB."),
        (
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates"),
            "names that can be written as UTF-8, got '\\udcff'.",
        ),
        (OSError("of ours"), None),
    ],
)
def test_what_the_machine_refuses_is_one_sentence_whoever_meets_it(error, words, monkeypatch, capsys):
    def fail(self, rest):
        raise error

    monkeypatch.setattr(COMMANDS["list"], "run", fail)
    for arguments in (["list"], ["list", "--traceback"]):
        if words is None or len(arguments) > 1:
            with pytest.raises(type(error)):
                main(arguments)
        else:
            assert main(arguments) == 2
            assert words in capsys.readouterr().err


def test_traceback_shows_the_rest_on_request(tmp_path):
    from oformer.errors import InputError

    with pytest.raises(InputError):
        main(["inspect", str(tmp_path / "nothing"), "--traceback"])


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


def test_import_says_what_a_file_is_and_writes_what_inspect_said(tmp_path, monkeypatch, capsys):
    import scipy.io

    monkeypatch.chdir(tmp_path)
    a = np.random.default_rng(0).standard_normal((10, 16))
    scipy.io.savemat("waves.mat", {"a": a, "u": 2 * a})
    assert main(["inspect", "waves.mat"]) == 0
    understood = capsys.readouterr().out
    assert all(w in understood for w in ("Layout: burgers", "(sample, x) = (10, 16)", "periodic", "assumed"))
    assert not (tmp_path / "datasets").exists()
    assert main(["import", "waves.mat", "--train", "6", "--test", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == understood
    assert "Imported 8 of 8 samples" in shown.err
    assert main(["inspect", "datasets/waves", "--verify"]) == 0
    assert "8 (train 0..5, test 6..7)" in capsys.readouterr().out
    assert main(["import", "waves.mat"]) == 2  # it is there already
    assert "no file or folder yet" in capsys.readouterr().err


def test_inspect_knows_a_published_npy_from_other_arrays(tmp_path, capsys):
    np.save(tmp_path / "flow.npy", np.zeros((12, 4, 4, 15), np.float32))
    np.save(tmp_path / "points.npy", np.zeros((5, 2)))
    for name, words in (("flow", "(time, x, y, sample) = (12, 4, 4, 15)"), ("points", "coords  float64 (5, 2)")):
        assert main(["inspect", str(tmp_path / f"{name}.npy")]) == 0
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["import", "inspect"])
def test_a_foreign_file_that_is_not_understood_is_one_sentence(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.mat").write_text("no matrix " * 30)
    Path("code.pt").write_bytes(b"cos\nsystem\n(S'echo bad'\ntR.")
    for name in ("text.mat", "code.pt"):
        assert main([verb, name]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("oformer: Expected")
        assert shown.err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"text.mat", "code.pt"}
