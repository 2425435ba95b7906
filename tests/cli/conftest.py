"""A run that the tests of the commands share, and commands in this process: another one takes seconds to start."""

from types import SimpleNamespace

import pytest

from oformer.cli import main
from tests.cli.command import SMALL, cli


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A folder in which `oformer train` was run once."""
    folder = tmp_path_factory.mktemp("work")
    done = cli("train", "burgers-demo", "--device", "cpu", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def here(monkeypatch, capsys):
    """As `cli` of tests/cli/command.py, without another process."""

    def run(*arguments, cwd):
        monkeypatch.chdir(cwd)
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run
