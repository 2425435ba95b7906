"""The benchmark reports what it ran. Nothing here says how fast anything must be."""

import csv
import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "run.py"


def load():
    """The script as a module; it is no part of the package."""
    spec = importlib.util.spec_from_file_location("benchmark_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run = load()


def row(**changes):
    made = run.Row(
        "a chip", "2.9", "burgers-2048", "float32", False, 2, "32 x 32", 5, steps_per_second=10.0, milliseconds=100.0,
        peak_mib=300.0, ratio=1.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_a_tiny_case_from_end_to_end(tmp_path):
    options = "--names burgers-2048 --device cpu --batch 1 --points 32 --steps 2 --no-compile --precision float32"
    command = [sys.executable, str(SCRIPT), *options.split(), "--out", str(tmp_path / "results.csv")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    # A grid and a batch that are not the recipe's are said, and so is where it ran.
    assert "batch 1 of 32 points instead of the recipe's 16 of 2048" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("burgers-2048 ")]
    assert [line[:5] for line in lines] == [["burgers-2048", "float32", "eager", "1", "32"]]
    shown = [float(number.replace(",", "")) for number in lines[0][5:]]

    with (tmp_path / "results.csv").open() as file:
        (result,) = csv.DictReader(file)
    names = ("recipe", "precision", "compiled", "batch", "points", "steps", "failure")
    assert [result[name] for name in names] == ["burgers-2048", "float32", "False", "1", "32", "2", ""]
    numbers = [float(result[name]) for name in ("steps_per_second", "milliseconds", "peak_mib", "ratio")]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert numbers[0] * numbers[1] == pytest.approx(1000)
    assert numbers[3] == 1
    assert shown == pytest.approx(numbers, rel=0.02)
    assert run.read_rows(tmp_path / "results.csv")[0].steps_per_second == numbers[0]


def test_the_random_batch_has_the_shape_of_the_recipe_and_shares_its_grid():
    from oformer.recipes import RECIPES

    spec = dataclasses.replace(RECIPES["ns2-full"].data_spec(), grid=(4, 4))
    batch = run.random_batch(spec, 3, torch.device("cpu"), 16)
    assert batch.input.values.shape == (3, 10, 16, 1)
    assert batch.target.shape == (3, 20, 16, 1)
    assert batch.query.coords.shape == (3, 16, 2)
    assert batch.query.coords.stride(0) == 0  # as in training, where a shared grid is stored once


def test_the_random_batch_of_a_mesh_has_points_of_its_own_and_codes():
    from oformer.recipes import RECIPES

    batch = run.random_batch(RECIPES["airfoil"].data_spec(), 2, torch.device("cpu"), 9)
    assert batch.input.values.shape == (2, 4, 9, 7)
    assert set(batch.input.values[..., -1].unique().tolist()) <= {0.0, 1.0, 2.0}
    assert not torch.equal(batch.query.coords[0], batch.query.coords[1])


def test_every_default_recipe_has_a_grid_and_is_cut_down_on_a_cpu(capsys):
    cases = run._cases(run._parser().parse_args(["--device", "cpu"]))
    assert [(c.recipe, c.compiled) for c in cases] == [(name, c) for name in run.NAMES for c in (False, True)]
    assert all(math.prod(case.grid) <= run.CPU_POINTS and case.batch == run.CPU_BATCH for case in cases)
    assert capsys.readouterr().out.count("instead of the recipe's") == len(run.NAMES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--names", "burgers-2047"], "Did you mean `burgers-2048`?"),
        (["--points", "0"], "at least 1 in --points"),
        (["--device", "tpu"], "cpu or cuda as --device, got `tpu`"),
        (["--reference", "nowhere.csv"], "a readable file at nowhere.csv"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys):
    assert run.main(["--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_ratios_are_relative_to_the_first_row_of_each_recipe():
    rows = [row(), row(compiled=True, steps_per_second=25.0), row(recipe="ns2-full", steps_per_second=4.0)]
    assert [r.ratio for r in run.with_ratios(rows)] == [1.0, 2.5, 1.0]
    failed = row(failure="no memory", steps_per_second=math.nan)
    assert [r.ratio for r in run.with_ratios([failed, *rows])][1:] == [1.0, 2.5, 1.0]


def test_rows_survive_the_csv_file(tmp_path):
    rows = [row(machine="AMD EPYC, 2 threads"), row(compiled=True, ratio=1.5)]
    (tmp_path / "a.csv").write_text(run.to_csv(rows))
    assert run.read_rows(tmp_path / "a.csv") == rows


def test_a_foreign_csv_file_is_refused(tmp_path):
    from oformer.errors import InputError

    (tmp_path / "a.csv").write_text("name,speed\nburgers,3\n")
    with pytest.raises(InputError, match="a CSV file that --out wrote"):
        run.read_rows(tmp_path / "a.csv")


def test_what_is_five_percent_slower_is_flagged():
    before = [row(), row(compiled=True)]
    now = [row(steps_per_second=9.6), row(compiled=True, steps_per_second=9.4)]
    words, slower = run.compare(now, before)
    assert slower
    assert [line for line in words.splitlines() if "SLOWER" in line] == [
        "  0.94x  burgers-2048, float32, compiled   SLOWER"
    ]
    assert "0.96x  burgers-2048, float32, eager" in words
    assert run.compare([row(steps_per_second=9.6)], before)[1] is False


@pytest.mark.parametrize(
    "other", [{"machine": "another chip"}, {"batch": 4}, {"points": "64 x 64"}, {"precision": "tf32"}]
)
def test_only_the_same_case_on_the_same_machine_is_compared(other):
    words, slower = run.compare([row(steps_per_second=1.0)], [row(**other)])
    assert not slower
    assert "nothing was compared" in words


def test_a_failed_case_is_a_row_that_says_why():
    rows = run.with_ratios([row(), row(compiled=True, failure="CUDA out of memory", steps_per_second=math.nan)])
    words = run.table(rows)
    assert "failed: burgers-2048, float32, compiled: CUDA out of memory" in words
    assert "nan" not in words
