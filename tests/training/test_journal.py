"""The journal: readable by others, whole after a crash, and nothing written twice."""

import json
import shutil
from pathlib import Path

import pytest

from oformer.errors import InputError
from oformer.training.journal import JOURNAL, Console, Journal, read_journal


def write(folder, step, *records):
    journal = Journal(folder, step, tensorboard=False)
    for kind, at, content in records:
        journal.write(kind, at, **content)
    journal.close()


def test_what_is_written_is_read_back_in_order(tmp_path):
    write(
        tmp_path, 0, ("start", 0, {"hardware": "abacus"}), ("train", 1, {"loss": 0.5}), ("stop", 1, {"reason": "time"})
    )
    records = read_journal(tmp_path)
    assert [(r["kind"], r["step"]) for r in records] == [("start", 0), ("train", 1), ("stop", 1)]
    assert records[0]["hardware"] == "abacus"


def test_going_on_forgets_what_lies_beyond_the_checkpoint_and_the_old_stop(tmp_path):
    write(tmp_path, 0, *[("train", step, {"loss": 1 / step}) for step in (1, 2, 3, 4)], ("stop", 4, {"reason": "time"}))
    write(tmp_path, 2, ("train", 3, {"loss": 9.0}))
    assert [(r["step"], r["loss"]) for r in read_journal(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    write(tmp_path, 0, ("train", 1, {"loss": 0.5}), ("train", 2, {"loss": 0.25}))
    path = tmp_path / JOURNAL
    path.write_text(path.read_text()[:-9])
    assert [r["step"] for r in read_journal(tmp_path)] == [1]


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    write(
        tmp_path, 0, ("evaluate", 1, {"error": float("nan"), "by_step": [1.0, float("inf")], "by": {"x": float("nan")}})
    )
    text = (tmp_path / JOURNAL).read_text()
    record = json.loads(text, parse_constant=lambda name: f"not JSON: {name}")
    assert (record["error"], record["by_step"], record["by"]) == (None, [1.0, None], {"x": None})


def test_a_full_disk_is_a_sentence_also_when_the_journal_is_closed(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    journal = Journal(tmp_path, 0, tensorboard=False)
    journal.file.close()
    journal.path.unlink()
    journal.path.symlink_to(full)
    journal.file = journal.path.open("w")
    for call in (lambda: journal.write("train", 1, loss=0.5), journal.close):
        with pytest.raises(InputError, match=r"space on the disk to write .*journal.jsonl, got none left"):
            call()


def test_a_run_that_vanishes_is_not_written_to_nowhere(tmp_path):
    journal = Journal(tmp_path / "run", 0, tensorboard=False)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(InputError, match=r"journal.jsonl to stay .*, got nothing there. It was deleted, moved"):
        journal.write("train", 1, loss=0.5)
    other = Journal(tmp_path / "run", 0, tensorboard=False)
    with pytest.raises(InputError, match=r"the file that this run began, got another file of that name"):
        journal.write("train", 1, loss=0.5)
    journal.close()
    other.close()


def test_an_empty_folder_has_an_empty_journal(tmp_path):
    assert read_journal(tmp_path) == []


def test_tensorboard_gets_the_curves_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    journal = Journal(tmp_path, 0)
    journal.write("train", 5, loss=0.25)
    journal.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (scalar,) = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (5, 0.25)


def test_without_a_terminal_progress_is_plain_lines_with_the_time_left(capsys):
    console = Console("run", steps=100, done=0)
    console.show(40, loss=0.5, rate=1e-3, steps_per_second=0.5)
    console.close()
    line = capsys.readouterr().err
    assert "step 40/100" in line
    assert "loss 0.5" in line
    assert "2:00 left" in line


def test_quiet_is_quiet(capsys):
    console = Console("run", steps=100, done=0, quiet=True)
    console.show(40, loss=0.5)
    console.say("hello")
    assert capsys.readouterr().err == ""
