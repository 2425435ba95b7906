"""`oformer new`: a folder with a problem, a recipe and a test to begin with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from oformer.cli.options import program_name
from oformer.terminal import say


@dataclass
class New:
    """Begin a problem of your own: a folder with an equation, a recipe and a test that run as they stand."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """A new folder; its last part, such as heat-flow, is the name of the problem."""

    def run(self, rest: list[str]) -> int:
        """Write the files of the project, and print the command that trains it."""
        from oformer.scaffold import new_project

        file = new_project(self.folder)
        say(f"Wrote {self.folder}. It trains as it stands, in about a minute on a CPU:")
        say(f"  {program_name()} train {file}")
        return 0
