"""Everything about the package is in pyproject.toml but one step: the trained operators of zoo/ go into the wheel.

They lie at the root of the repository, where people look for them, and inside the installed package, where
`oformer.checkpoint` finds them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ZOO = Path(__file__).resolve().parent / "zoo"


class BuildWithZoo(build_py):
    """Builds the package, and copies zoo/ into it as oformer/weights/."""

    def run(self) -> None:
        """Build and copy; an editable install reads zoo/ where it is."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "oformer" / "weights"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ZOO, target)


setup(cmdclass={"build_py": BuildWithZoo})
