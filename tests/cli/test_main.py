"""The whole command line: light help, one sentence for mistakes, one voice of many ranks."""

import re
import subprocess
import sys
import time

import numpy as np
import pytest

from oformer.cli import COMMANDS, GROUPS, main, parse
from tests.cli.command import ENVIRONMENT, ROOT


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


@pytest.mark.parametrize("arguments", ["help", "list", "zoo list", "zoo show burgers-demo", "inspect README.md"])
def test_what_prints_a_text_imports_no_torch_and_takes_any_encoding(arguments):
    """On a pipe whose code page lacks some of the letters, as on Windows."""
    code = (
        "import atexit, os, sys, time\nfrom oformer import cli\n"
        "os._exit = lambda code: sys.exit(code or 10 * ('torch' in sys.modules) or 20 * (time.process_time() > 1.5))\n"
        "cli.program()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, cwd=ROOT,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "cp1252"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.decode("cp1252")) > 500


def test_the_commands_are_shown_in_groups_with_a_line_each(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line in GROUPS] == list(GROUPS)
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", shown, re.M)
    assert max(map(len, shown.splitlines())) < 120
    assert main([]) == 2


def test_short_names_set_the_settings_of_a_recipe():
    command, rest = parse(["train", "burgers-demo", "--epochs", "3", "--batch", "10", "--lr", "5e-4", "--seed", "7"])
    training = command.recipe(rest).training
    assert (training.steps, training.batch, training.seed) == (154, 10, 7)  # of 512 samples
    assert (training.optimizer.rate, training.optimizer.matrix_rate) == (5e-4, 1e-3)
    command, rest = parse(["train", "burgers-demo", "--steps", "30", "--training.batch", "4"])
    assert (command.recipe(rest).training.steps, command.recipe(rest).training.batch) == (30, 4)


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
    "an option almost right": (["predict", "a", "b", "--devise", "cpu"], "Did you mean `--device`?"),
    "an option of the verb": (["train", "burgers-demo", "--maxminutes", "3"], "Did you mean `--max-minutes`?"),
    "a setting almost right": (["train", "burgers-demo", "--training.stepz", "3"], "Did you mean `--training.steps`?"),
    "two lengths": (["train", "burgers-demo", "--steps", "3", "--epochs", "1"], "--steps or --epochs, got both"),
    "no device": (["predict", "burgers-demo", "in.npz", "--device", "gpu"], "the name of a torch device, got `gpu`"),
    "no gpu": (["train", "burgers-512", "--device", "cuda"], "GPU"),
    "too few points": (["generate", "burgers", "--points", "20"], "modes"),
    "unknown verb": (["trian"], "Did you mean `train`?"),
    "help for an unknown verb": (["trian", "--help"], "Did you mean `train`?"),
    "unknown verb of the zoo": (["zoo", "shwo", "--help"], "Did you mean `show`?"),
    "no samples": (["generate", "burgers", "--count", "0"], "at least 1 for `--count`, got 0."),
    "another format": (["predict", "burgers-demo", "x.npz", "--out", "a.doc"], ".vtu, .pvd, .vtk, got `a.doc`"),
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
