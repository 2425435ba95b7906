"""What the README shows, works as shown."""

import re
import shlex
from pathlib import Path

import pytest

from oformer.cli import parse
from oformer.cli.options import override
from oformer.experiments.recipes import recipe_named
from oformer.nn.attention import KINDS
from oformer.problems import PROBLEMS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LISTED = (ROOT / "docs" / "commands.md").read_text()
# In blocks, and between backquotes in prose and tables.
COMMANDS = [
    line.split("#")[0].strip().replace("NAME", "ns2-part")
    for line in re.findall(r"^oformer .*", README + LISTED, re.M) + re.findall(r"`(oformer [^`]*)`", README)
]


def test_the_ten_lines_of_python_run(tmp_path, monkeypatch):
    """With two steps of a small model, and everything else as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert "minutes=2" in code
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("minutes=2", "steps=2, width=16, depth=1, quiet=True"), names)
    assert names["answer"].shape == (1000, 1)
    assert f"array of shape {names['answer'].shape}" in README
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 24


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command):
    verb, rest = parse(shlex.split(command)[1:])
    if verb.__class__.__name__ == "Train" and rest:
        assert override(recipe_named(verb.name), rest)
    else:
        assert rest == []


def test_what_the_table_of_places_names_is_there():
    """Each path of "I want to", and the names that it says are in them."""
    (table,) = re.findall(r"\| I want to .*?\n\n", README, re.S)
    for path in re.findall(r"`(oformer/[\w/]+\.py)`", table):
        assert (ROOT / path).is_file(), path
    assert "KINDS" in table
    assert "softmax" in KINDS
    assert "burgers" in PROBLEMS
    assert "    def propagate(" in (ROOT / "oformer" / "models" / "oformer.py").read_text()
