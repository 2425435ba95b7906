"""What reaches a terminal is text: names from files cannot color, move or hide it."""

import io

import pytest
from rich.console import Console

from oformer.cli import main
from oformer.terminal import printable, say, show, table
from oformer.training import journal
from oformer.training.journal import Console as Progress


def test_characters_that_are_not_seen_are_written_out():
    assert printable("a\x1b[31mb\r\x00") == r"a\x1b[31mb\r\x00"
    assert printable("left\u202eright") == r"left\u202eright"
    assert printable("\udcff of a file name") == r"\udcff of a file name"
    assert printable("lines\nand\tcolumns, ± 1\u00a0µm, 速度") == "lines\nand\tcolumns, ± 1\u00a0µm, 速度"
    assert printable("one\nline", "") == r"one\nline"


def test_tables_and_sentences_show_names_as_they_are(capsys):
    """`velocity [m/s]` was printed as `velocity`, and `[/red]` ended a table with an error."""
    names = ("velocity [m/s]", "[/red]", ":smile:", "[bold]x[/bold]")
    table(names, [names, ("\x1b[2J", *names[1:])])
    say("\x1b[2Jsaid [m/s]")
    show("\x1b[2Jshown [m/s]")
    shown = capsys.readouterr()
    assert all(shown.out.count(name) >= 2 for name in names)
    assert r"\x1b[2J" in shown.out
    assert shown.err == "\\x1b[2Jsaid [m/s]\n"
    assert "\x1b" not in shown.out + shown.err


def test_a_mistake_repeats_what_was_typed_without_obeying_it(capsys):
    assert main(["inspect", "no\x1b[2Jwhere"]) == 2
    assert r"no\x1b[2Jwhere" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["[/red]", "x [m/s]", "\x1b[2J"])
def test_a_progress_bar_shows_the_name_of_a_run_as_it_is(name, monkeypatch):
    monkeypatch.setattr(journal.sys, "stderr", written := io.StringIO())
    written.isatty = lambda: True
    monkeypatch.setattr("rich.console.Console", lambda stderr: Console(file=written, width=120))
    bar = Progress(name, 10, 0)
    bar.say(f"evaluated {name}")
    bar.close()
    assert f"evaluated {printable(name)}" in written.getvalue()
    assert printable(name) in written.getvalue().replace(f"evaluated {printable(name)}", "")
    assert "\x1b[2J" not in written.getvalue()
