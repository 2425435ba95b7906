"""The dataset of a recipe: found, made, or one's own."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.data.dataset import PointDataset, View
from oformer.errors import InputError
from oformer.problems import Burgers, Darcy, Electrostatics, NavierStokes
from oformer.training import find_data
from oformer.training.find_data import (
    dataset_folder,
    open_data,
    open_split,
    open_test_samples,
    remember_own,
    remembered_own,
    train_and_scored,
    train_and_test,
    whole_dataset,
)
from oformer.training.recipe import Data
from tests.tiny import TINY_FLOW, tiny_recipe


def own(count=10):
    x = np.linspace(0, 1, 12)
    values = np.random.default_rng(0).normal(size=(count, 12))
    return PointDataset.from_arrays(x, values, values)


def test_recipes_that_differ_in_their_view_share_a_dataset(tmp_path):
    recipe = tiny_recipe()
    first = open_data(recipe, tmp_path)
    other = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, view=View(points=(16,))))
    second = open_data(other, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert (first.spec.grid, second.spec.grid) == ((32,), (16,))
    np.testing.assert_array_equal(first[3].target[:, ::2], second[3].target)


def test_what_is_made_is_announced_with_its_size_and_only_once(tmp_path):
    said = []
    for _ in range(2):
        open_data(tiny_recipe(), tmp_path, say=said.append)
    assert len(said) == 1
    assert "16 samples" in said[0]
    assert "MB" in said[0]


def test_the_folder_names_what_the_samples_depend_on(tmp_path):
    folders = {
        dataset_folder(Burgers(), 10, 0, tmp_path),
        dataset_folder(Burgers(), 10, 1, tmp_path),
        dataset_folder(Burgers(), 11, 0, tmp_path),
        dataset_folder(Burgers(viscosity=0.2), 10, 0, tmp_path),
    }
    assert len(folders) == 4
    assert dataset_folder(Burgers(viscosity=0.1), 10, 0, tmp_path) in folders


def test_splits_are_the_first_and_the_last_of_the_problem(tmp_path):
    recipe = tiny_recipe()
    train, test = train_and_test(open_data(recipe, tmp_path), recipe)
    assert (len(train), len(test)) == (12, 4)
    last = recipe.problem.samples([15], recipe.data.seed)[0]
    np.testing.assert_allclose(test[3].target, last.target[:, ::2], rtol=1e-6, atol=1e-7)


def test_ones_own_data_without_splits_is_cut_as_the_recipe_counts(tmp_path):
    own().save(tmp_path / "mine")
    recipe = dataclasses.replace(tiny_recipe(), data=Data(train=6, test=3))
    data = open_data(recipe, tmp_path, own=tmp_path / "mine")
    train, test = train_and_test(data, recipe)
    np.testing.assert_array_equal(train[5].target, data[5].target)
    np.testing.assert_array_equal(test[0].target, data[7].target)
    greedy = dataclasses.replace(recipe, data=Data(train=9, test=3))
    with pytest.raises(InputError, match=r"9 \+ 3 samples.*10 samples without splits.*--data\.train"):
        train_and_test(data, greedy)


def test_ones_own_splits_come_first(tmp_path):
    own().save(tmp_path / "mine", splits={"train": (0, 4), "test": (4, 10)})
    recipe = dataclasses.replace(tiny_recipe(), data=Data(train=9, test=1))
    data = open_data(recipe, tmp_path, own=tmp_path / "mine")
    assert [len(part) for part in train_and_test(data, recipe)] == [4, 6]


def test_without_a_generator_one_is_asked_for_data(tmp_path):
    recipe = tiny_recipe(augment=False)
    recipe = dataclasses.replace(recipe, problem=None, spec=recipe.problem.spec)
    with pytest.raises(InputError, match="--data FOLDER"):
        open_data(recipe, tmp_path)


def project(folder):
    """A run and its data, as people keep them."""
    (folder / "outputs" / "run").mkdir(parents=True)
    (folder / "mine.npz").touch()
    return folder / "outputs" / "run"


def test_a_run_finds_its_data_from_any_folder_and_after_both_were_moved(tmp_path, monkeypatch):
    run = project(tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    remember_own(run, Path("mine.npz"))
    monkeypatch.chdir(tmp_path)
    assert remembered_own(Path("old/outputs/run")) == tmp_path / "old" / "mine.npz"
    shutil.copytree("old", "new")
    assert remembered_own(Path("new/outputs/run")) == tmp_path / "new" / "mine.npz"  # its own, though both are there
    shutil.move("old", "elsewhere")
    assert remembered_own(Path("elsewhere/outputs/run")) == tmp_path / "elsewhere" / "mine.npz"


def test_a_run_that_was_moved_alone_finds_its_data(tmp_path):
    run = project(tmp_path / "a")
    remember_own(run, tmp_path / "a" / "mine.npz")
    shutil.move(run, tmp_path / "run")
    assert remembered_own(tmp_path / "run") == tmp_path / "a" / "mine.npz"


def test_a_run_behind_a_link_finds_its_data(tmp_path):
    """People keep outputs on a larger disk."""
    (tmp_path / "disk" / "deep" / "outputs").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "outputs").symlink_to(tmp_path / "disk" / "deep" / "outputs")
    (tmp_path / "a" / "outputs" / "run").mkdir()
    (tmp_path / "a" / "mine.npz").touch()
    remember_own(tmp_path / "a" / "outputs" / "run", tmp_path / "a" / "mine.npz")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert remembered_own(tmp_path / "b" / "outputs" / "run") == tmp_path / "b" / "mine.npz"


def test_data_that_are_gone_are_asked_for_and_without_memory_nothing_is(tmp_path):
    run = project(tmp_path)
    assert remembered_own(run) is None
    remember_own(run, tmp_path / "mine.npz")
    (tmp_path / "mine.npz").unlink()
    with pytest.raises(InputError, match=r"trained on, at .*mine\.npz, got nothing there\. Say where .*--data"):
        remembered_own(run)


PROBLEMS = {
    "burgers": tiny_recipe().problem,
    "darcy": Darcy(points=9),
    "navier-stokes": TINY_FLOW,
    "electrostatics": Electrostatics(),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_test_samples_made_alone_are_those_of_the_whole_dataset(name, tmp_path):
    """Poisson's test samples lie on another shape, and must do so too when no training sample is made."""
    recipe = dataclasses.replace(tiny_recipe(), problem=PROBLEMS[name], data=Data(train=5, test=3, seed=4))
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, augment=False))
    alone = open_test_samples(recipe, tmp_path / "alone")
    whole = train_and_test(open_data(recipe, tmp_path / "whole"), recipe)[1]
    assert len(alone) == len(whole) == 3
    for ours, theirs in zip(alone, whole, strict=True):
        assert torch.equal(ours.input.coords, theirs.input.coords)
        torch.testing.assert_close(ours.input.values, theirs.input.values)
        torch.testing.assert_close(ours.target, theirs.target, rtol=1e-5, atol=1e-6)
    assert whole_dataset(recipe, tmp_path / "alone") is None
    assert whole_dataset(recipe, tmp_path / "whole") is not None


def test_test_samples_are_made_once_and_kept(tmp_path, monkeypatch):
    recipe, said = tiny_recipe(), []
    two = open_test_samples(recipe, tmp_path, samples=2, say=said.append)
    assert len(two) == 2
    assert "Making 2 test samples" in said[0]
    everything = open_test_samples(recipe, tmp_path)
    monkeypatch.setattr(find_data, "generate", lambda *a, **k: pytest.fail("made again"))
    for samples in (1, 3, None):  # of the four that are there
        seen = open_test_samples(recipe, tmp_path, samples=samples)
        assert torch.equal(seen[len(seen) - 1].target, everything[len(seen) - 1].target)
    for wrong in (0, 5):
        with pytest.raises(InputError, match="1 to 4 test samples"):
            open_test_samples(recipe, tmp_path, samples=wrong)


def holding_out(recipe, validation):
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation=validation))


def test_held_out_samples_are_the_last_of_training_and_in_no_other_split(tiny_data):
    recipe = tiny_recipe()
    train, test = train_and_test(tiny_data, recipe)
    learned, scored = train_and_scored(tiny_data, holding_out(recipe, 5))
    assert (len(learned), len(scored)) == (7, 5)
    for part, first in ((learned, 0), (scored, 7)):
        for i, sample in enumerate(part):
            assert torch.equal(sample.target, train[first + i].target)
    for sample in test:
        assert not any(torch.equal(sample.target, other.target) for part in (learned, scored) for other in part)
    assert len(train_and_test(tiny_data, holding_out(recipe, 5))[1]) == len(test)


def test_without_held_out_samples_the_test_samples_are_scored(tiny_data):
    recipe = tiny_recipe()
    pairs = zip(train_and_scored(tiny_data, recipe), train_and_test(tiny_data, recipe), strict=True)
    for ours, split in pairs:
        assert len(ours) == len(split)
        assert all(torch.equal(a.target, b.target) for a, b in zip(ours, split, strict=True))


def test_splits_of_a_dataset_with_fewer_samples_than_are_held_out_are_refused(tiny_data):
    recipe = tiny_recipe()
    large = dataclasses.replace(recipe, data=Data(train=100, test=4, validation=12, view=recipe.data.view))
    with pytest.raises(InputError, match=r"more than the 12 .* `tiny` holds out, got 12\. Set --data.validation"):
        train_and_scored(tiny_data, large)


def test_each_split_is_opened_by_its_name(tmp_path):
    recipe = holding_out(tiny_recipe(), 5)
    data = open_data(recipe, tmp_path)
    for name, indices in (("train", range(7)), ("validation", range(7, 12)), ("test", range(12, 16))):
        split = open_split(recipe, tmp_path, name)
        assert len(split) == len(indices)
        for i, sample in zip(indices, split, strict=True):
            assert torch.equal(sample.target, data[i].target)
    assert len(open_split(recipe, tmp_path, "validation", samples=2)) == 2
    with pytest.raises(InputError, match=r"`tiny` holds out for validation, got data.validation 0.*--data.validation"):
        open_split(tiny_recipe(), tmp_path, "validation")


def test_an_interrupted_generation_of_test_samples_goes_on(tmp_path, monkeypatch):
    """One file for each batch of a CPU: what was solved before the interruption is not solved again."""
    recipe = dataclasses.replace(tiny_recipe(), problem=TINY_FLOW, data=Data(train=5, test=3))
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, augment=False))
    solve, solved = NavierStokes.solve, []

    def interrupted(self, state):
        if len(solved) == 2:
            raise KeyboardInterrupt
        solved.append(1)
        return solve(self, state)

    monkeypatch.setattr(NavierStokes, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_test_samples(recipe, tmp_path)
    monkeypatch.setattr(NavierStokes, "solve", lambda self, state: solved.append(1) or solve(self, state))
    assert len(open_test_samples(recipe, tmp_path)) == 3
    assert len(solved) == 3


def test_a_recipe_without_a_problem_cannot_be_made_again(tmp_path):
    recipe = tiny_recipe()
    recipe = dataclasses.replace(recipe, problem=None, training=dataclasses.replace(recipe.training, augment=False))
    with pytest.raises(InputError, match="made again"):
        open_test_samples(recipe, tmp_path)


def test_a_limit_leaves_dataset_and_test_samples_and_takes_the_first_training_samples(tiny_data):
    data, recipe = tiny_data, tiny_recipe()
    limited = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, limit=5))
    assert dataset_folder(limited.problem, 16, 0, Path()) == dataset_folder(recipe.problem, 16, 0, Path())
    (train, test), (every, same) = train_and_scored(data, limited), train_and_scored(data, recipe)
    assert (len(train), len(every), limited.data.trained_on) == (5, 12, 5)
    assert all(torch.equal(train[i].target, every[i].target) for i in range(5))
    assert [torch.equal(a.target, b.target) for a, b in zip(test, same, strict=True)] == [True] * 4
    both = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, limit=5, validation=3))
    train, held_out = train_and_scored(data, both)
    assert (len(train), len(held_out)) == (5, 3)
    assert torch.equal(held_out[0].target, every[9].target)
    assert "5 of 12 (3 held out) + 4 samples" in both.describe()
    with pytest.raises(InputError, match=r"`data.limit` from 1 to 9.*got 10.*Leave it out"):
        dataclasses.replace(both.data, limit=10)
    large = dataclasses.replace(recipe, data=Data(train=100, test=4, limit=50, view=recipe.data.view))
    with pytest.raises(InputError, match=r"at least the 50 training samples .* got 12\. Set --data.limit"):
        train_and_scored(data, large)
