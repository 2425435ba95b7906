"""Short runs in several ways: what is the same gives the same, what is done is not done again, and t is Welch's."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import accuracy
import pytest

from oformer.errors import InputError

BASE = accuracy.Result("a card", "2.11", "ns2-part", "plain", "float32", 1, 600, 8, 3, 0.3, 80.0, 60.0)
TINY = "from tests.tiny import tiny_recipe\n\nrecipe = tiny_recipe()\n"


def result(**changes) -> accuracy.Result:
    return dataclasses.replace(BASE, **changes)


def planned(text: str) -> list[accuracy.Run]:
    return accuracy.planned(accuracy._parser().parse_args(["--device", "cpu", *text.split()]))


def never(*arguments, **options):
    raise AssertionError("a process was started")


def test_two_ways_that_are_one_on_a_cpu_end_alike_and_are_not_repeated(tmp_path, monkeypatch, capfd):
    """Nothing is compiled, recorded or rounded there, so that plain is what the recipe says. Seeds are told apart."""
    recipe, out, data = tmp_path / "small.py", tmp_path / "out.csv", str(tmp_path / "data")
    recipe.write_text(TINY)
    monkeypatch.setenv("PYTHONPATH", str(accuracy.HERE.parent))
    options = f"--names {recipe} --ways plain --seeds 1 --steps 6 --batch 4 --device cpu --datasets {data} --out {out}"
    assert accuracy.main(options.split()) == 0
    (first,) = accuracy.read_rows(out, accuracy.Result)
    assert (first.recipe, first.way, first.seed, first.steps, first.batch) == ("tiny", "plain", 1, 6, 4)
    assert 0.01 < first.error < 10
    assert first.milliseconds > 0
    assert first.seconds > 0.5  # importing torch is part of it
    assert f"plain, seed 1: test error {first.error:.4g}" in capfd.readouterr().out

    run = accuracy.Run(str(recipe), "recipe", 1, 6, 4, "cpu", data)
    assert accuracy.trained(run)["error"] == first.error
    assert accuracy.trained(dataclasses.replace(run, seed=2))["error"] != first.error

    before = out.read_bytes()
    monkeypatch.setattr(subprocess, "run", never)
    assert accuracy.main(options.split()) == 0
    assert out.read_bytes() == before
    assert "1 of 1 runs are in" in capfd.readouterr().err


def test_ways_say_how_to_train_and_keep_the_rest():
    by_way = {run.way: run.recipe() for run in planned("--names ns2-part --seeds 4 --ways plain recipe float16 tf32")}
    own = accuracy.recipe_named("ns2-part")
    for recipe in by_way.values():
        training = recipe.training
        assert (training.seed, training.steps, training.batch) == (4, 600, 8)
        assert training.evaluate_every == training.checkpoint_every == 600
        assert (training.schedule, training.horizon, training.loss) == (
            own.training.schedule, own.training.horizon, own.training.loss,
        )  # fmt: skip
        assert (recipe.model, recipe.data, recipe.problem) == (own.model, own.data, own.problem)
    plain = by_way["plain"].training
    assert (plain.precision, plain.compile, plain.capture, plain.recompute) == ("float32", False, False, False)
    assert by_way["recipe"].training.precision == own.training.precision
    assert [by_way[way].training.precision for way in ("float16", "tf32")] == ["float16", "tf32"]
    assert by_way["float16"].training.compile is by_way["recipe"].training.compile is None


def test_all_ways_of_a_seed_come_before_the_next_seed():
    runs = planned("--names burgers-2048 --seeds 1 2 2 --ways plain recipe")
    assert [(run.seed, run.way) for run in runs] == [(1, "plain"), (1, "recipe"), (2, "plain"), (2, "recipe")]


def test_only_the_plain_way_switches_fused_kernels_off(monkeypatch):
    seen = []

    def note(command, env, **kind):
        seen.append((json.loads(command[-1])["way"], env.get("OFORMER_FUSED")))
        return subprocess.CompletedProcess(command, 0, 'noise\n{"error": 0.5, "milliseconds": 2.0}\n', "")

    monkeypatch.delenv("OFORMER_FUSED", raising=False)
    monkeypatch.setattr(subprocess, "run", note)
    found = list(accuracy._in_processes(planned("--names burgers-2048 --seeds 1 --ways plain recipe tf32"), 1))
    assert seen == [("plain", "0"), ("recipe", None), ("tf32", None)]
    assert all(numbers["error"] == 0.5 for _, numbers in found)


def test_a_run_that_fails_says_why_and_the_others_are_kept(tmp_path, monkeypatch, capfd):
    real, out = subprocess.run, tmp_path / "out.csv"

    def one_breaks(command, **kind):
        broken = json.loads(command[-1])["way"] == "recipe"
        script = "import sys; sys.exit('no such card')" if broken else 'print(\'{"error": 0.5, "milliseconds": 2.0}\')'
        return real([sys.executable, "-c", script], **kind)

    monkeypatch.setattr(subprocess, "run", one_breaks)
    monkeypatch.setattr(accuracy, "open_data", lambda *given, **named: None)
    options = ["--names", "burgers-2048", "--seeds", "1", "--device", "cpu", "--out", str(out)]
    assert accuracy.main(options) == 1
    assert "recipe, seed 1: failed\nno such card" in capfd.readouterr().out
    (kept,) = accuracy.read_rows(out, accuracy.Result)
    assert (kept.way, kept.error, kept.precision) == ("plain", 0.5, "float32")


@pytest.mark.parametrize(
    "other",
    [{"machine": "another"}, {"torch": "2.12"}, {"seed": 2}, {"steps": 9}, {"batch": 4}, {"way": "recipe"}],
)
def test_another_run_is_no_repetition(other):
    assert result(**other).key != BASE.key
    assert result(error=0.1, jobs=1, seconds=3.0).key == BASE.key


def test_t_is_welchs():
    """Against scipy, which tests it against other programs."""
    from scipy.stats import ttest_ind

    one, other = [0.31, 0.29, 0.33], [0.36, 0.35, 0.30, 0.41]
    expected = ttest_ind(one, other, equal_var=False)
    assert accuracy.welch(one, other) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-12)
    assert accuracy.welch(one, one) == (0.0, 1.0)
    assert all(map(math.isnan, (*accuracy.welch([0.3], other), *accuracy.welch([0.3, 0.3], [0.2, 0.2]))))


def test_the_table_compares_with_plain_and_with_nothing_else():
    errors = {"recipe": (0.30, 0.34, 0.32), "plain": (0.30, 0.31, 0.32)}
    rows = [result(way=way, seed=i, error=e) for way, found in errors.items() for i, e in enumerate(found)]
    rows += [result(way="recipe", steps=100, error=0.5), result(recipe="burgers-2048", error=0.001)]
    plain, fast, short, burgers = accuracy.lines(rows)
    assert plain == ["ns2-part", "600 of 8", "plain", "float32", "3", "0.31", "0.01", "-", "-", "-", "80"]
    assert fast[2:8] == ["recipe", "float32", "3", "0.32", "0.02", "+3.23%"]
    assert float(fast[8]) == pytest.approx(0.01 / math.sqrt((0.02**2 + 0.01**2) / 3), abs=0.005)
    assert short[1:8] == ["100 of 8", "recipe", "float32", "1", "0.5", "-", "-"]
    assert burgers[0] == "burgers-2048"
    assert all(len(line) == len(accuracy.HEADS) for line in (plain, fast, short, burgers))


def test_results_survive_the_csv_file_and_foreign_ones_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    results = [BASE, result(machine="AMD EPYC, 2 thread(s)", error=1 / 3)]
    path.write_text(accuracy.to_csv(results, accuracy.Result))
    assert accuracy.read_rows(path, accuracy.Result) == results
    path.write_text("name,speed\nburgers,3\n")
    with pytest.raises(InputError, match="a CSV file that --out wrote"):
        accuracy.read_rows(path, accuracy.Result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--names burgers-2047", "Did you mean `burgers-2048`?"),
        ("--steps 0", "at least 1 in --steps"),
        ("--jobs 0", "at least 1 in --jobs"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out.csv")]
    assert accuracy.main(["--device", "cpu", *arguments.split(), *out]) == 2
    assert words in capsys.readouterr().err
    assert not Path(out[1]).exists()
