"""Two checkouts are measured in turns, each by its own code, and only what exceeds the noise is called worse."""

import dataclasses
import subprocess

import pytest
import run

MEASURE = """
import json, sys
import oformer
case = json.loads(sys.argv[1])
assert case["recipe"] == "electro"
print(json.dumps({"what": case["what"], "milliseconds": oformer.SPEED, "per_second": 1000 / oformer.SPEED,
                  "reserved_mib": 100.0, "startup_seconds": 2.0}))
"""
OPTIONS = "--what train --names electro --device cpu --modes recipe"


def checkout(folder, speed):
    """A folder whose package and script are its own."""
    (folder / "oformer").mkdir(parents=True)
    (folder / "benchmarks").mkdir()
    (folder / "oformer" / "__init__.py").write_text(f"SPEED = {speed}\n")
    (folder / "benchmarks" / "measure.py").write_text(MEASURE)
    return folder


def row(**changes):
    made = run.Row(
        "a chip", "2.9", "train", "electro", "tf32", "recipe", 16, "256", 1, 20, per_second=10.0, milliseconds=100.0,
        allocated_mib=300.0, reserved_mib=320.0, startup_seconds=3.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_each_process_imports_the_package_of_its_own_folder(tmp_path, monkeypatch, capfd):
    old, new = checkout(tmp_path / "old", 10.0), checkout(tmp_path / "new", 8.0)
    monkeypatch.setattr(run, "HERE", new / "benchmarks")
    out = tmp_path / "against.csv"
    assert run.main([*OPTIONS.split(), "--against", str(old), "--repeats", "2", "--out", str(out)]) == 0
    said = capfd.readouterr()
    turns = [line.split("] ")[1].split(":")[0] for line in said.err.splitlines() if line.startswith("[")]
    assert turns == ["old", "new", "old", "new"]
    (found,) = run.read_rows(out, run.Comparison)
    assert (found.old_milliseconds, found.new_milliseconds, found.time_ratio) == (10.0, 8.0, 0.8)
    assert f"old: {old}" in said.out
    assert "0.800" in said.out

    # The other way round it is slower, which the status says.
    monkeypatch.setattr(run, "HERE", old / "benchmarks")
    assert run.main([*OPTIONS.split(), "--against", str(new), "--repeats", "1"]) == 1
    assert "SLOWER" in capfd.readouterr().out


def test_medians_of_repeats_are_compared_and_noise_is_not_called_slower():
    old = [row(milliseconds=ms) for ms in (100.0, 98.0, 102.0)]
    (found,) = run.comparisons(old, [row(milliseconds=ms) for ms in (110.0, 90.0, 112.0)])
    assert (found.old_milliseconds, found.new_milliseconds) == (100.0, 110.0)
    assert found.time_spread == pytest.approx(22 / 110)
    assert run.flags(found) == []
    (found,) = run.comparisons(old, [row(milliseconds=ms, reserved_mib=400.0) for ms in (110.0, 111.0, 109.0)])
    assert run.flags(found) == ["SLOWER", "LARGER"]
    assert run.flags(dataclasses.replace(found, machine="a chip, 2 thread(s)")) == ["SLOWER"]
    assert run.comparisons(old, [row(mode="plain")]) == []


def test_code_that_fails_in_one_folder_is_said(tmp_path, monkeypatch, capfd):
    old, new = checkout(tmp_path / "old", 10.0), checkout(tmp_path / "new", 8.0)
    (old / "benchmarks" / "measure.py").write_text("raise SystemExit('no such recipe')")
    monkeypatch.setattr(run, "HERE", new / "benchmarks")
    assert run.main([*OPTIONS.split(), "--against", str(old), "--repeats", "1"]) == 1
    assert "no such recipe" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--against nowhere", "a checkout with oformer and benchmarks/measure.py"),
        ("--against . --repeats 0", "at least 1 in --repeats"),
        ("--what ledger --against .", "no --against with --what ledger"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", None)  # nothing is measured
    assert run.main(["--device", "cpu", *arguments.split()]) == 2
    assert words in capsys.readouterr().err
