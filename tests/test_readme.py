"""What the README shows, works as shown."""

import re
import shlex
from pathlib import Path

import pytest

from oformer.cli import _override, parse
from oformer.recipes import recipe_named

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [line.split("#")[0].strip() for line in re.findall(r"^oformer .*", README, re.M)]


def test_the_ten_lines_of_python_run(tmp_path, monkeypatch):
    """With fewer steps, and everything else as it stands there."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert "steps=500" in code
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace("steps=500", "steps=3").replace("evaluate_every=100", "evaluate_every=3"), names)
    assert names["answer"].values.shape == (1, 1000, 1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_understood(command):
    verb, rest = parse(shlex.split(command)[1:])
    if verb.__class__.__name__ == "Train":
        assert _override(recipe_named(verb.name), rest)
    else:
        assert rest == []


def test_every_file_of_the_tree_and_every_link_exists():
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.S)
    assert tree is not None
    block = tree.group(1)
    for name in re.findall(r"(?:├──|└──) ([\w/.]+)(?:, ([\w/.]+))?", block):
        for part in filter(None, name):
            found = [ROOT / "oformer" / part, ROOT / "oformer" / "data" / part]
            assert any(path.exists() for path in found), part
    mentioned = set(re.findall(r"([\w]+)\.py", block)) | set(re.findall(r"([\w]+)/", block))
    for module in (ROOT / "oformer").iterdir():
        if module.name.startswith("__") or module.name == "py.typed":
            continue
        assert module.stem in mentioned, f"{module.name} is missing from the README's tree"
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
