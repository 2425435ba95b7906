"""The scripts in runs/ train the rows of the paper's tables, in words that the command line understands."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from oformer.cli import parse
from oformer.cli.options import override
from oformer.experiments.published import ROWS
from oformer.experiments.recipes import recipe_named

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "runs").glob("*.sh")))
def test_the_scripts_say_what_the_command_line_understands(script, tmp_path):
    """With a program in place of `oformer` that writes down how it was called."""
    calls = tmp_path / "calls"
    (tmp_path / "oformer").write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {calls}\necho >> {calls}\n')
    (tmp_path / "oformer").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", str(ROOT / "runs" / script), "--training.precision", "tf32"], env=environment, check=True)
    trained, added = set(), set()
    for line in calls.read_text().splitlines():
        command, rest = parse(shlex.split(line))
        if command.__class__.__name__ == "Train":
            recipe = override(recipe_named(command.name), rest)
            assert recipe.training.precision == "tf32"
            trained.add(command.out)
            continue
        assert rest == []
        if command.action.__class__.__name__ == "ZooAdd":
            added |= {command.action.run_folder, *command.action.seed_run}
    assert trained == added
    assert line.startswith("zoo table")


def test_each_row_of_oformer_in_the_paper_s_tables_has_a_script():
    text = " ".join(path.read_text() for path in (ROOT / "runs").glob("*.sh"))
    assert all(re.search(rf"[ /]{row.recipe}\b", text) for row in ROWS)
