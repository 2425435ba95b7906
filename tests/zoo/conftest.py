"""A zoo of one tiny operator, and the runs it was made of."""

import shutil

import pytest

from oformer.training.find_data import open_data, train_and_test
from oformer.training.loop import train
from oformer.zoo import add as adding
from tests.zoo.cards import seeded


@pytest.fixture(scope="package")
def work(tmp_path_factory):
    """Datasets, two finished runs of the tiny recipe, and a zoo with the first of them in float32."""
    folder = tmp_path_factory.mktemp("zoo")
    data = open_data(seeded(1), folder / "datasets")
    own = folder / "of-ours"
    own.symlink_to(next((folder / "datasets").iterdir()))
    for seed in (1, 2):
        splits = train_and_test(data, seeded(seed))
        train(seeded(seed), folder / f"seed{seed}", splits, quiet=True, tensorboard=False, own=own)
    adding.add(folder / "seed1", root=folder / "zoo", datasets=folder / "datasets", finer=True, average=2)
    return folder


@pytest.fixture
def here(work, tmp_path, monkeypatch):
    """A copy of that zoo, in which names are looked up; the working folder is an empty one."""
    shutil.copytree(work / "zoo", tmp_path / "zoo")
    monkeypatch.setenv("OFORMER_ZOO", str(tmp_path / "zoo"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return tmp_path / "zoo"
