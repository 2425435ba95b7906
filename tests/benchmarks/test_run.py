"""The benchmark reports what it ran, and notices what became worse. Nothing here says how fast anything must be."""

import csv
import dataclasses
import math
import os
import subprocess
import sys

import pytest
import run
import torch

from oformer.errors import InputError


def row(**changes):
    made = run.Row(
        "a chip", "2.9", "train", "burgers-2048", "float32", "plain", 2, "32 x 32", 1, 5, per_second=10.0,
        milliseconds=100.0, allocated_mib=300.0, reserved_mib=320.0, tflops=2.0, of_peak=0.5, startup_seconds=3.0,
        ratio=1.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def planned(text: str) -> list:
    return run.planned(run._parser().parse_args(text.split()))


def test_a_tiny_case_from_end_to_end(tmp_path):
    options = "--what train --names burgers-2048 --device cpu --batch 1 --points 32 --steps 2 --modes eager"
    files = ["--out", str(tmp_path / "results.csv"), "--profile", str(tmp_path / "profiles")]
    command = [sys.executable, str(run.HERE / "run.py"), *options.split(), *files]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(run.HERE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # A grid and a batch that are not the recipe's are said, and so is where it ran.
    assert "batch 1 of 32 points instead of 16 of 2048" in done.stdout
    assert f"torch {torch.__version__}" in done.stdout

    with (tmp_path / "results.csv").open() as file:
        (result,) = csv.DictReader(file)
    names = ("what", "recipe", "precision", "mode", "batch", "points", "times", "steps", "failure")
    expected = ["train", "burgers-2048", "float32", "eager", "1", "32", "1", "2", ""]
    assert [result[name] for name in names] == expected
    numbers = {name: float(result[name]) for name in ("per_second", "milliseconds", "tflops", "of_peak")}
    assert all(math.isfinite(number) and number > 0 for number in numbers.values())
    assert numbers["per_second"] * numbers["milliseconds"] == pytest.approx(1000)
    assert float(result["startup_seconds"]) > 0.5  # importing torch is part of it
    assert run.read_rows(tmp_path / "results.csv")[0].per_second == numbers["per_second"]
    profile = run.read_rows(tmp_path / "profiles" / "burgers-2048-float32-eager.csv", run.Kernel)
    assert [k.microseconds for k in profile] == sorted((k.microseconds for k in profile), reverse=True)
    calls = {k.kernel: k.calls for k in profile}
    # A whole training step: products on the way there and back.
    assert calls["aten::mm"] + calls["aten::addmm"] >= 3 * 4


def test_sections_on_a_cpu_are_cut_down_and_say_so(capsys):
    cases = planned("--what all --device cpu")
    assert [(c.what, c.recipe, c.mode) for c in cases] == [
        ("train", "ns2-full", "plain"),
        ("train", "ns2-full", "recipe"),
        ("train", "ns2-full", "sparing"),
        *(("train", name.split("@")[0], mode) for name in run.NAMES[1:] for mode in ("plain", "recipe")),
        ("infer", "ns2-full", "plain"),
        ("infer", "ns2-full", "recipe"),
        ("growth", "ns2-full", "eager"),
        ("horizon", "ns2-full", "eager"),
    ]
    assert all(math.prod(case.grid) <= run.CPU_POINTS and case.batch <= run.CPU_BATCH for case in cases)
    assert "electro: batch 2 of" in capsys.readouterr().out


def test_options_reach_the_cases():
    (case,) = planned("--what growth --device cpu --sizes 500 20 --modes compiled --precision bfloat16 --steps 3")
    assert (case.sizes, case.mode, case.precision, case.steps, case.batch) == ((20, 500), "compiled", "bfloat16", 3, 1)
    (case,) = planned("--what train --names electro@8 --device cpu --batch 5 --modes eager")
    assert (case.recipe, case.batch) == ("electro", 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--names burgers-2047", "Did you mean `burgers-2048`?"),
        ("--names electro@many", "whole number of samples after @"),
        ("--points 0", "at least 1 in --points"),
        ("--what growth --sizes 10 0", "at least 1 in --sizes"),
        ("--device tpu", "cpu or cuda as --device, got `tpu`"),
        ("--reference nowhere.csv", "a readable file at nowhere.csv"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys):
    assert run.main(["--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_case_that_breaks_is_a_row_that_says_why(monkeypatch, capfd):
    """What it printed before it broke is kept."""
    script = 'import sys; print(\'{"what": "infer", "per_second": 4.0}\'); sys.exit(\'no such card\')'
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kind: real([sys.executable, "-c", script], **kind))
    first, last = run._measured(planned("--what infer --device cpu --modes eager"))
    assert (first.what, first.per_second, first.failure) == ("infer", 4.0, "")
    assert last.failure == "no such card"
    words = run.table([first, last])
    assert "float32, eager: no such card" in words
    assert "nan" not in words


def test_only_the_plain_mode_switches_fused_kernels_off(monkeypatch, capfd):
    seen = []

    def note(command, env, **kind):
        seen.append(env.get("OFORMER_FUSED"))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("OFORMER_FUSED", raising=False)
    monkeypatch.setattr(subprocess, "run", note)
    list(run._measured(planned("--what train --names electro --device cpu --modes plain eager recipe")))
    assert seen == ["0", None, None]


def test_ratios_are_relative_to_the_first_row_of_the_same_work():
    rows = [row(), row(mode="compiled", per_second=25.0), row(times=20, per_second=4.0)]
    assert [r.ratio for r in run.with_ratios(rows)] == [1.0, 2.5, 1.0]
    failed = row(failure="no memory", per_second=math.nan)
    assert [r.ratio for r in run.with_ratios([failed, *rows])][1:] == [1.0, 2.5, 1.0]


def test_exponents_are_those_of_the_laws_and_only_where_points_are_many():
    def grown(points):
        large = points >= 1e5  # below, time is that of launching kernels
        return row(
            what="growth-predict",
            points=str(points),
            milliseconds=3e-4 * points**1.1 if large else 50.0,
            allocated_mib=2.0 * points**0.5 if large else 1e6,
        )

    rows = [grown(n) for n in (1_000, 10_000, 100_000, 1_000_000, 10_000_000)]
    low, high, time_power, memory_power = run.exponent(rows, "growth-predict")
    assert (low, high) == (100_000, 10_000_000)
    assert (time_power, memory_power) == pytest.approx((1.1, 0.5))
    ended = dataclasses.replace(rows[-1], points="20000000", failure="out of memory")
    assert run.exponents([*rows, ended]) == run.exponents(rows)
    assert run.exponents(rows[:3]) == []  # one point makes no line


def test_running_out_of_memory_ends_growth_and_fails_nothing_else():
    assert row(what="growth-train", failure="out of memory").expected_end
    assert not row(what="train", failure="out of memory").expected_end
    assert not row(what="growth-train", failure="KeyError: 3").expected_end


def test_rows_survive_the_csv_file(tmp_path):
    rows = [row(machine="AMD EPYC, 2 threads"), row(mode="compiled", ratio=1.5)]
    (tmp_path / "a.csv").write_text(run.to_csv(rows))
    assert run.read_rows(tmp_path / "a.csv") == rows


def test_a_foreign_csv_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("name,speed\nburgers,3\n")
    with pytest.raises(InputError, match="a CSV file that --out wrote"):
        run.read_rows(tmp_path / "a.csv")


def test_what_is_five_percent_slower_or_larger_is_flagged():
    before = [row(), row(mode="compiled"), row(mode="eager")]
    now = [row(per_second=9.6), row(mode="compiled", per_second=9.4), row(mode="eager", reserved_mib=340.0)]
    words, worse = run.compare(now, before)
    assert worse
    flagged = [line.split()[-1] for line in words.splitlines() if line.endswith(("SLOWER", "LARGER"))]
    assert flagged == ["SLOWER", "LARGER"]
    assert "0.96x  1.00x  train burgers-2048" in words
    assert run.compare([row(per_second=9.6, allocated_mib=900.0)], before)[1] is False


def test_memory_of_a_process_on_a_cpu_is_shown_and_not_judged():
    cpu = "a chip, 2 thread(s)"
    words, worse = run.compare([row(machine=cpu, reserved_mib=640.0)], [row(machine=cpu)])
    assert "2.00x" in words
    assert not worse


@pytest.mark.parametrize(
    "other",
    [
        {"machine": "another chip"},
        {"what": "infer"},
        {"batch": 4},
        {"points": "64 x 64"},
        {"times": 3},
        {"mode": "eager"},
    ],
)
def test_only_the_same_case_on_the_same_machine_is_compared(other):
    words, worse = run.compare([row(per_second=1.0)], [row(**other)])
    assert not worse
    assert "nothing was compared" in words
