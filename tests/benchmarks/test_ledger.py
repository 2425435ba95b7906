"""The ledger switches off what it says, and calls no difference a gain that the noise could make."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys

import ledger
import pytest
import run

from oformer.errors import InputError
from oformer.gpu import ROWS, switched_on


def entry(off: str = "", **changes) -> ledger.Entry:
    made = ledger.Entry(
        "a chip", "2.9", "darcy-141", "bfloat16", 8, "141 x 141", 1, 20, "train", off,
        milliseconds=10.0, reserved_mib=1000.0, startup_seconds=20.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def judged(entries: list, column: str) -> str:
    return ledger.verdict(ledger.table_lines(ledger.with_ratios(entries)), column)


def quiet(*others: ledger.Entry) -> list:
    """A run whose repeats differ by 2 %."""
    return [entry(milliseconds=ms) for ms in (9.9, 10.0, 10.1)] + list(others)


def stand_in(seen: list):
    """In place of a process: notes its case and environment, and answers with numbers that depend on what is off."""

    def answer(command, env, **kind):
        case = json.loads(command[-2])
        seen.append((case["what"], env.get("OFORMER_FUSED"), env.get("TORCHINDUCTOR_CACHE_DIR")))
        slow = 2 if "attention" not in env["OFORMER_FUSED"] and env["OFORMER_FUSED"] != "1" else 1
        numbers = {"what": case["what"], "milliseconds": 5.0 * slow, "per_second": 9.0, "reserved_mib": 100.0}
        if case["what"] == "ledger-train":
            numbers["startup_seconds"] = 3.0
        return subprocess.CompletedProcess(command, 0, json.dumps(numbers) + "\n", "")

    return answer


def test_each_column_switches_off_what_it_says(monkeypatch):
    for column in ("", *ledger.COLUMNS):
        monkeypatch.setenv("OFORMER_FUSED", ledger.fused(column))
        off = {row for row in ROWS if not switched_on(row)}
        assert off == set(ledger.switched_off(column))
    assert ledger.switched_off("") == ()
    assert ledger.switched_off("norm") == ("norm",)
    assert set(ledger.COLUMNS) | set(ledger.SOLVERS) == {*ROWS, "candidates", "all"}


def test_rows_that_depend_on_others_are_rows_and_their_own_parts_are_listed():
    for row, parts in ledger.PARTS.items():
        assert {row, *parts} <= set(ROWS)
        assert all(set(ledger.PARTS.get(part, ())) <= set(parts) for part in parts)


def test_repeats_with_all_rows_on_lie_between_the_columns():
    assert ledger.order(("attention", "sums", "all"), "train", 2) == ["", "attention", "sums", "all", ""]
    assert ledger.order(("attention", "sums", "lookup", "all"), "train", 3) == [
        "", "attention", "sums", "", "lookup", "all", "",
    ]  # fmt: skip
    assert ledger.order(("adam",), "infer", 3) == ["", "", ""]  # a prediction has no optimizer


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"milliseconds": 11.5}, "keep"),
        ({"milliseconds": 10.5}, "below"),
        ({"milliseconds": 11.1}, "unclear"),  # 11 % more time, and repeats that differ by 2 %
        ({"milliseconds": 8.0}, "below"),
        ({"reserved_mib": 1250.0}, "keep"),
        ({"reserved_mib": 1150.0}, "below"),
        ({"startup_seconds": 60.0}, "below"),  # shown and not judged
        ({"failure": "no such card", "milliseconds": math.nan}, "unclear"),
    ],
)
def test_a_row_earns_its_keep_by_a_tenth_of_time_or_a_fifth_of_memory(changes, expected):
    assert judged(quiet(entry("sums", **changes)), "sums") == expected


def test_one_recipe_is_enough_and_each_has_its_own_ratios():
    other = [entry(recipe="ns2-full", milliseconds=ms) for ms in (20.0, 20.2, 19.8)]
    entries = [*quiet(entry("sums", milliseconds=10.2)), *other, entry("sums", recipe="ns2-full", milliseconds=25.0)]
    ratios = [e.time_ratio for e in ledger.with_ratios(entries) if e.off]
    assert ratios == pytest.approx([1.02, 1.25])
    assert judged(entries, "sums") == "keep"
    lines = ledger.table_lines(ledger.with_ratios(entries))
    (sentence,) = ledger.reasons(lines)
    assert sentence == "sums: keep; most on ns2-full@8, train, time 1.25, spread 2.0%"


def test_noise_is_no_gain():
    """Repeats that differ by 60 %, and a row whose absence costs a half."""
    noisy = [entry(milliseconds=ms) for ms in (10.0, 7.0, 13.0)]
    assert judged([*noisy, entry("sums", milliseconds=15.0)], "sums") == "unclear"
    assert (
        judged([*noisy, entry("sums", milliseconds=25.0)], "sums") == "unclear"
    )  # one measurement proves nothing there
    lines = ledger.table_lines(ledger.with_ratios([*noisy, entry("sums", milliseconds=15.0)]))
    assert lines[0].spread == pytest.approx(0.6)
    assert lines[0].cell("sums") == "~1.50"
    assert judged([entry(), entry("sums", milliseconds=15.0)], "sums") == "-"  # once: nothing is known of the noise


def test_memory_of_a_process_on_a_cpu_is_shown_and_not_judged():
    entries = [dataclasses.replace(e, machine="a chip, 2 thread(s)") for e in quiet(entry("sums", reserved_mib=1900.0))]
    lines = ledger.table_lines(ledger.with_ratios(entries))
    assert [line.cell("sums") for line in lines if line.of == "memory"] == ["1.90"]
    assert ledger.verdict(lines, "sums") == "below"


def test_the_table_has_a_column_for_each_row_and_its_notes_say_what_depends_on_what():
    entries = ledger.with_ratios(quiet(entry("attention", milliseconds=20.0), entry("all", milliseconds=40.0)))
    lines = ledger.table_lines(entries)
    header, time, memory, startup, verdicts = ledger.table(lines)
    assert header == ("recipe", "work", "of", "all on", "spread", "attention", "all")
    assert time == ("darcy-141@8", "train", "time", "10 ms", "2.0%", "2.00*", "4.00*")
    assert memory == ("darcy-141@8", "train", "memory", "1,000 MiB", "0.0%", "~1.00", "~1.00")
    assert startup[2:4] == ("start-up", "20.0 s")
    assert verdicts[-2:] == ("keep", "-")
    words = "\n".join(ledger.notes(lines, entries))
    assert "Without `attention`, `sums`, `lookup` and `norm` cannot run either" in words
    assert "`euler` and `vorticity` belong to the data generators" in words
    assert ledger.markdown([header, time]).count("\n") == 2


def test_every_case_has_a_process_and_only_training_starts_with_empty_caches(monkeypatch, tmp_path, capfd):
    seen = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(subprocess, "run", stand_in(seen))
    out = tmp_path / "ledger.csv"
    options = ["--names", "burgers-2048", "--device", "cpu", "--rows", "attention", "adam", "--out", str(out)]
    assert run.main(["--what", "ledger", *options]) == 0
    without = [",".join(row for row in ROWS if row != name) for name in ("attention", "adam")]
    assert [fused for what, fused, _ in seen if what == "ledger-train"] == ["1", without[0], "1", without[1], "1"]
    assert sorted(fused for what, fused, _ in seen if what == "ledger-infer") == sorted(["1", without[0], "1", "1"])
    caches = [folder for what, _, folder in seen if what == "ledger-train"]
    assert len(set(caches)) == 5
    assert {folder for what, _, folder in seen if what == "ledger-infer"} == {None}
    words = capfd.readouterr().out
    assert "attention: keep; most on burgers-2048@2, train, time 2.00" in words
    assert "nan" not in words

    entries = run.read_rows(out, ledger.Entry)
    assert [e.time_ratio for e in entries if e.off == "attention"] == [2.0, 2.0]
    assert [e.startup_seconds for e in entries if e.work == "train"] == [3.0] * 5
    page = out.with_suffix(".md").read_text()
    assert "| burgers-2048@2 | train | time | 5 ms | 0.0% | 2.00* | ~1.00 |" in page

    assert run.main(["--what", "ledger", "--read", str(out)]) == 0  # the same table, and nothing is measured
    assert "attention: keep; most on burgers-2048@2, train, time 2.00" in capfd.readouterr().out
    assert len(seen) == 9


def test_warm_caches_leave_start_ups_out(monkeypatch, capfd):
    seen = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(subprocess, "run", stand_in(seen))
    options = "--what ledger --names burgers-2048 --device cpu --works train --rows all --warm --repeats 2"
    assert run.main(options.split()) == 0
    assert [folder for _, _, folder in seen] == [None] * 3
    assert "start-up" not in capfd.readouterr().out


def test_a_process_that_breaks_says_why_and_the_others_are_kept(monkeypatch, capfd):
    answer = stand_in([])

    def one_breaks(command, env, **kind):
        broken = env["OFORMER_FUSED"] == "0"
        return subprocess.CompletedProcess(command, 1, "", "no card") if broken else answer(command, env, **kind)

    monkeypatch.setattr(subprocess, "run", one_breaks)
    options = "--what ledger --names burgers-2048 --device cpu --works train --rows attention all"
    assert run.main(options.split()) == 1
    words = capfd.readouterr().out
    assert "Failed: burgers-2048, train, off: all: no card" in words
    (times,) = [line for line in words.splitlines() if line.startswith("burgers-2048@2  train  time")]
    assert times.split()[-2:] == ["2.00*", "failed"]
    assert "attention: keep" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--what ledger --rows atention", "Did you mean `attention`?"),
        ("--what ledger --rows euler", "the name of a column of the ledger for --rows"),
        ("--what ledger --repeats 1", "at least 2 in --repeats"),
        ("--what ledger --modes plain", "no --modes with --what ledger"),
        ("--what ledger train", "--what ledger alone"),
        ("--what train --rows norm", "--what ledger with --rows"),
        ("--what ledger --read nowhere.csv", "a readable file at nowhere.csv"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys):
    assert run.main(["--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err


def test_a_foreign_csv_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("name,speed\nburgers,3\n")
    with pytest.raises(InputError, match="a CSV file that --out wrote"):
        run.read_rows(tmp_path / "a.csv", ledger.Entry)


@pytest.mark.slow
def test_a_tiny_ledger_from_end_to_end(tmp_path):
    out = tmp_path / "ledger.csv"
    sizes = "--device cpu --batch 1 --points 32 --steps 2 --repeats 2"
    options = f"--what ledger --names burgers-2048 {sizes} --rows attention --out {out}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(run.HERE.parent)}
    command = [sys.executable, str(run.HERE / "run.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["work"], r["off"]) for r in rows] == [
        (work, off) for work in ("train", "infer") for off in ("", "attention", "")
    ]
    assert all(float(r["milliseconds"]) > 0 and float(r["time_ratio"]) > 0 and not r["failure"] for r in rows)
    assert all(float(r["startup_seconds"]) > 0.5 for r in rows if r["work"] == "train")
    assert "| verdict |" in out.with_suffix(".md").read_text()
