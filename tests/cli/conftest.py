"""A run that the tests of the commands share."""

import pytest

from tests.cli.command import SMALL, cli


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """A folder in which `oformer train` was run once."""
    folder = tmp_path_factory.mktemp("work")
    done = cli("train", "burgers-demo", "--device", "cpu", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder
