import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oformer import config, files
from oformer.data import Store, estimate, generate
from oformer.data.generate import AHEAD, STRIDE, _ahead, _in_processes, _Work, first_and_last
from oformer.errors import InputError, SolverDiverged
from oformer.problems.burgers import Burgers
from oformer.problems.darcy import Darcy

HERE = Path(__file__).parent
QUIET = {"progress": lambda done, total: None}

SCRIPT = """
import runpy, sys
from oformer.data import generate
problem = runpy.run_path({conftest!r})["Waves"]()
i, n = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
store = generate(problem, 40, seed=7, folder=sys.argv[1], part_size=3, batch=2, shard=(i, n))
print("complete" if store else "partial", flush=True)
"""


def start(folder, shard=(0, 1), delay=0.0):
    script = SCRIPT.format(conftest=str(HERE / "conftest.py"))
    command = [sys.executable, "-c", script, str(folder), *map(str, shard)]
    environment = {**os.environ, "WAVES_DELAY": str(delay), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=HERE.parent.parent,
    )


@pytest.fixture
def reference(tmp_path, waves, fingerprint):
    """The bytes that 40 waves should have."""
    generate(waves, 40, seed=7, folder=tmp_path / "reference", part_size=3, **QUIET)
    return fingerprint(tmp_path / "reference")


def test_samples_are_the_problem_s(tmp_path, scattered, same_sample):
    store = generate(scattered, 10, seed=3, folder=tmp_path / "d", part_size=4, **QUIET)
    assert store is not None
    for i, sample in enumerate(scattered.samples(range(10), 3)):
        same_sample(store[i], sample)
    assert store.splits == {"train": (0, 9), "test": (9, 10)}
    assert store.problem_settings == {"type": "Scattered", "most": 30}
    assert (store.manifest.seed, store.card) == (3, scattered.card)


@pytest.mark.parametrize("kind", ["waves", "scattered"])
def test_same_bytes_for_any_batch_and_sharding(tmp_path, request, fingerprint, kind):
    problem = request.getfixturevalue(kind)
    bytes_of = {}
    for batch, shards in [
        (None, [(0, 1)]),
        (1, [(0, 1)]),
        (3, [(2, 3), (1, 3), (0, 3)]),
        (64, [(1, 2), (0, 2)]),
    ]:
        folder = tmp_path / f"{batch}"
        stores = [
            generate(problem, 23, seed=1, folder=folder, part_size=5, batch=batch, shard=s, **QUIET) for s in shards
        ]
        assert [store is not None for store in stores] == [False] * (len(shards) - 1) + [True]
        bytes_of[batch] = fingerprint(folder)
    assert len(bytes_of[None]) == 3 + 5
    assert all(found == bytes_of[None] for found in bytes_of.values())


def test_burgers(tmp_path, fingerprint):
    problem = Burgers(points=64, solver_points=64, steps=10)
    for batch in (2, 5):
        generate(problem, 10, seed=0, folder=tmp_path / str(batch), part_size=5, batch=batch, **QUIET)
    two, five = Store.open(tmp_path / "2"), Store.open(tmp_path / "5")
    # An FFT library may add in another order for another batch: then the last bit of a float32 may differ.
    for i in range(10):
        assert torch.allclose(two[i].target, five[i].target, rtol=1e-6, atol=1e-7)
    assert two[3].input.coords is two[7].query.coords
    assert two.splits == {"train": (0, 9), "test": (9, 10)}


def test_interrupted_and_continued(tmp_path, waves, fingerprint, reference, monkeypatch):
    original, asked, stop = type(waves).samples, [], [0]

    def interrupted(self, indices, seed, device="cpu"):
        asked.extend(indices)
        if stop[0] in indices:
            raise KeyboardInterrupt
        return original(self, indices, seed, device)

    monkeypatch.setattr(type(waves), "samples", interrupted)
    folder = tmp_path / "d"
    for stop[0] in (0, 17, 38):
        with pytest.raises(KeyboardInterrupt):
            generate(waves, 40, seed=7, folder=folder, part_size=3, batch=2, **QUIET)
        with pytest.raises(InputError, match="parts missing"):
            Store.open(folder)
    stop[0] = -1
    asked.clear()
    seen = []
    generate(waves, 40, seed=7, folder=folder, part_size=3, progress=lambda *done: seen.append(done))
    assert asked == [36, 37, 38, 39]  # only what was missing
    assert seen[0] == (36, 40)
    assert seen[-1] == (40, 40)
    assert fingerprint(folder) == reference
    asked.clear()
    assert generate(waves, 40, seed=7, folder=folder, part_size=3) is not None
    assert asked == []  # complete: returns at once


def test_killed_and_continued(tmp_path, waves, fingerprint, reference):
    folder = tmp_path / "d"
    process = start(folder, delay=0.01)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # Time is no part of what is tested: whenever it dies, the rest must come out the same.
    time.sleep(0.3 * (time.time() % 1))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = set(fingerprint(folder)) if folder.exists() else set()
    assert "README.md" not in before
    generate(waves, 40, seed=7, folder=folder, part_size=3, batch=3, **QUIET)
    assert fingerprint(folder) == reference


def test_two_processes(tmp_path, waves, fingerprint, reference):
    folder = tmp_path / "d"
    process = start(folder, (1, 2), delay=0.002)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    here = generate(waves, 40, seed=7, folder=folder, part_size=3, shard=(0, 2), **QUIET)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert here is not None or out == "complete\n"
    assert fingerprint(folder) == reference


def test_workers_make_the_same_bytes(tmp_path, fingerprint):
    """In processes of their own, for a solver that sums over many points."""
    for workers in (1, 2):
        seen: list[int] = []
        store = generate(
            Darcy(points=22), 11, seed=7, folder=tmp_path / str(workers), part_size=2, workers=workers,
            progress=lambda done, total, seen=seen: seen.append(done),
        )  # fmt: skip
        assert store is not None
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0, 11)
    assert fingerprint(tmp_path / "1") == fingerprint(tmp_path / "2")


def test_an_error_of_a_worker_is_said_by_the_parent(tmp_path):
    problem = Burgers(points=64, solver_points=64, steps=50)
    generate(problem, 6, seed=7, folder=tmp_path / "d", part_size=1, shard=(0, 6), **QUIET)
    (tmp_path / "d" / "shared.safetensors").unlink()
    writer = Store.create(tmp_path / "d", **_request(problem))
    with pytest.raises(
        InputError, match=r"^Expected part 0, or `share` with its first sample, before other parts, got"
    ):
        _in_processes(2, writer, range(1, 6), _Work(problem, 7, "cpu", 1), lambda more: None)


@dataclass(frozen=True)
class Deadly(Burgers):
    """Sample 1 kills its process, as a system does that is out of memory; the others take an hour."""

    def samples(self, indices, seed, device="cpu"):
        if 1 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
        return super().samples(indices, seed, device)


def test_a_worker_that_is_killed_ends_the_others_at_once(tmp_path):
    writer = Store.create(tmp_path / "d", **_request(Burgers(points=64, solver_points=64, steps=50)))
    with pytest.raises(InputError, match=r"got one that was killed. It may have run out of memory"):
        _in_processes(
            2, writer, range(1, 6), _Work(Deadly(points=64, solver_points=64), 7, "cpu", 1), lambda more: None
        )


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed, it can tell them nothing."""
    script = (
        "from oformer.data import generate\n"
        "from oformer.problems.burgers import Burgers\n"
        "if __name__ == '__main__':\n"
        "    problem = Burgers(points=64, solver_points=2048, steps=200)\n"
        f"    generate(problem, 1000, seed=7, folder={str(tmp_path / 'd')!r}, part_size=1, workers=2)\n"
    )
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stderr=subprocess.PIPE, cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )  # fmt: skip
    while process.poll() is None and not (tmp_path / "d" / "parts" / "part-00003.safetensors").exists():
        time.sleep(0.05)
    assert process.poll() is None
    process.kill()
    process.communicate()  # all of them hold stderr open: this returns when they have ended


def _request(problem, count=6, part_size=1) -> dict:
    return {
        "spec": problem.spec, "card": problem.card, "count": count, "splits": first_and_last(count, None, None),
        "part_size": part_size, "problem": config.to_json(problem), "seed": 7,
    }  # fmt: skip


def begun(problem, folder, count=40, part_size=3):
    """A dataset of which only the first part is made, and the others."""
    generate(problem, count, seed=7, folder=folder, part_size=part_size, shard=(0, count), **QUIET)
    writer = Store.create(folder, **_request(problem, count, part_size))
    return writer, writer.missing()


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kind", ["waves", "scattered"])
def test_parts_that_are_made_ahead_have_the_same_bytes(tmp_path, request, fingerprint, kind, batch):
    problem = request.getfixturevalue(kind)
    generate(problem, 40, seed=7, folder=tmp_path / "plain", part_size=3, **QUIET)
    writer, parts = begun(problem, tmp_path / "d")
    seen: list[int] = []
    _ahead(writer, parts, _Work(problem, 7, "cpu", batch), seen.append)
    assert sum(seen) == 37
    writer.finalize()
    assert fingerprint(tmp_path / "d") == fingerprint(tmp_path / "plain")


def test_a_gpu_waits_neither_for_drawing_nor_for_writing(tmp_path, waves, monkeypatch):
    """Each solve here ends after later batches were drawn, and each write after the next solve began."""
    writer, parts = begun(waves, tmp_path / "d", count=30)
    draw, solve, write = type(waves).draw, type(waves).solve, writer.write
    drawn, solving = [threading.Event() for _ in range(30)], [threading.Event() for _ in range(30)]
    solved = iter(range(3, 30, 3))

    def drawing(self, indices, seed):
        drawn[indices[0]].set()
        return draw(self, indices, seed)

    def slowly(self, state):
        index = next(solved)
        solving[index].set()
        assert drawn[min(index + 3 * (AHEAD - 1), 27)].wait(100)
        return solve(self, state)

    def late(part, samples, redrawn):
        assert solving[min(3 * part + 3, 27)].wait(100)
        write(part, samples, redrawn)

    monkeypatch.setattr(type(waves), "draw", drawing)
    monkeypatch.setattr(type(waves), "solve", slowly)
    monkeypatch.setattr(writer, "write", late)
    _ahead(writer, parts, _Work(waves, 7, "cpu", 3), lambda more: None)
    assert not writer.missing()


@pytest.mark.parametrize("where", ["draw", "solve", "write"])
def test_what_stops_parts_that_are_made_ahead_leaves_whole_ones(
    tmp_path, waves, fingerprint, reference, monkeypatch, where
):
    writer, parts = begun(waves, tmp_path / "d")
    owner = writer if where == "write" else type(waves)
    original, calls = getattr(owner, where), [0]

    def stopped(*arguments):
        calls[0] += 1
        if calls[0] > 9:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, stopped)
        with pytest.raises(KeyboardInterrupt):
            _ahead(writer, parts, _Work(waves, 7, "cpu", 2), lambda more: None)
    kept = {name: value for name, value in fingerprint(tmp_path / "d").items() if name.startswith("parts")}
    assert 1 < len(kept) < 14
    assert all(reference[name] == value for name, value in kept.items())
    generate(waves, 40, seed=7, folder=tmp_path / "d", part_size=3, **QUIET)
    assert fingerprint(tmp_path / "d") == reference


def test_diverged_samples_among_parts_that_are_made_ahead(tmp_path, waves, monkeypatch, fingerprint):
    """They are found in what was drawn ahead, and drawn anew as without."""
    original, bad = type(waves).solve, {float(waves.draw([index], 7)["drawn"][0, 0]) for index in (5, 5 + STRIDE, 11)}

    def solve(self, state):
        if bad & set(state["drawn"][:, 0].tolist()):
            raise SolverDiverged("Waves", 3, 0.1, float("inf"))
        return original(self, state)

    monkeypatch.setattr(type(waves), "solve", solve)
    generate(waves, 12, seed=7, folder=tmp_path / "plain", part_size=4, **QUIET)
    writer, parts = begun(waves, tmp_path / "d", count=12, part_size=4)
    _ahead(writer, parts, _Work(waves, 7, "cpu", 3), lambda more: None)
    assert writer.finalize().manifest.redrawn == ((5, 2), (11, 1))
    assert fingerprint(tmp_path / "d") == fingerprint(tmp_path / "plain")


def test_under_torchrun_each_rank_makes_its_shard(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "oformer",
        "generate", "burgers", "--count", "130", "--out", str(tmp_path / "d"), "--device", "cpu",
        "--points", "64", "--solver-points", "64", "--steps", "50",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert len(Store.open(tmp_path / "d")) == 130
    assert done.stderr.count("This share of") + done.stderr.count("is complete") == 2
    assert "is complete" in done.stderr


def test_damaged_parts_are_made_again(tmp_path, waves, fingerprint, reference):
    folder = tmp_path / "reference"
    part = folder / "parts" / "part-00004.safetensors"
    part.write_bytes(part.read_bytes()[:-9])
    (folder / "parts" / "part-00009.safetensors").unlink()
    (folder / "shared.safetensors").unlink()
    generate(waves, 40, seed=7, folder=folder, part_size=3, **QUIET)
    assert fingerprint(folder) == reference
    (folder / "shared.safetensors").unlink()
    generate(waves, 40, seed=7, folder=folder, part_size=3, **QUIET)
    assert fingerprint(folder) == reference


def test_a_full_disk_loses_nothing(tmp_path, waves, fingerprint, reference, monkeypatch):
    folder, calls, fsync = tmp_path / "d", [0], os.fsync

    def full(descriptor):
        calls[0] += 1
        if calls[0] > 14:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="Nothing there was changed"):
            generate(waves, 40, seed=7, folder=folder, part_size=3, **QUIET)
    kept = {name: value for name, value in fingerprint(folder).items() if name.startswith("parts")}
    assert 0 < len(kept) < 14
    assert all(reference[name] == value for name, value in kept.items())
    assert not list(folder.rglob("*.tmp"))
    generate(waves, 40, seed=7, folder=folder, part_size=3, **QUIET)
    assert fingerprint(folder) == reference


def test_too_little_space_is_said_before(tmp_path, waves, scattered, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5000))
    with pytest.raises(InputError, match=r"GB of disk space .* got 0\.00 GB free"):
        generate(waves, 1000, seed=0, folder=tmp_path / "d", **QUIET)
    assert not (tmp_path / "d" / "parts").exists()
    with pytest.raises(InputError, match="GB of disk space"):  # known once the first part is there
        generate(scattered, 1000, seed=0, folder=tmp_path / "e", part_size=5, **QUIET)
    assert len(list((tmp_path / "e" / "parts").iterdir())) == 1


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_estimate(tmp_path, waves, scattered, storage):
    for problem, tolerance in ((type(waves)(points=512), 0.05), (scattered, 0.5)):
        folder = tmp_path / type(problem).__name__
        generate(problem, 128, seed=0, folder=folder, storage=storage, **QUIET)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert estimate(problem, 128, storage) == pytest.approx(size, rel=tolerance)


def diverging(problem, bad):
    """Make the problem's solver fail on some draws."""
    original = type(problem).samples

    def samples(self, indices, seed, device="cpu"):
        for index in indices:
            if index in bad:
                raise SolverDiverged("Waves", 3, 0.1, float("inf"))
        return original(self, indices, seed, device)

    return samples


@pytest.mark.parametrize("batch", [1, 4, 7])
def test_diverged_samples_are_drawn_anew(tmp_path, waves, monkeypatch, same_sample, fingerprint, batch):
    original = type(waves).samples
    generate(waves, 12, seed=0, folder=tmp_path / "plain", part_size=7, **QUIET)
    bad = {0, 5, 5 + STRIDE, 11}
    monkeypatch.setattr(type(waves), "samples", diverging(waves, bad))
    # The second shard first: it must find the same sample 0 on its own.
    generate(waves, 12, seed=0, folder=tmp_path / "d", part_size=7, batch=batch, shard=(1, 2), **QUIET)
    store = generate(waves, 12, seed=0, folder=tmp_path / "d", part_size=7, batch=batch, **QUIET)
    assert store is not None
    assert store.manifest.redrawn == ((0, 1), (5, 2), (11, 1))
    same_sample(store[5], original(waves, [5 + 2 * STRIDE], 0)[0])
    same_sample(store[4], Store.open(tmp_path / "plain")[4])
    assert json.loads((tmp_path / "d" / "dataset.json").read_text())["redrawn"] == [[0, 1], [5, 2], [11, 1]]
    assert files.map_arrays(tmp_path / "d" / "parts" / "part-00001.safetensors")["redrawn"].tolist() == [[11, 1]]
    assert "3 samples were drawn anew" in (tmp_path / "d" / "README.md").read_text()


def test_a_hopeless_sample(tmp_path, waves, monkeypatch):
    bad = {2 + k * STRIDE for k in range(6)}
    monkeypatch.setattr(type(waves), "samples", diverging(waves, bad))
    with pytest.raises(InputError, match=r"6 draws of sample 2 that diverged \(Waves diverged at step 3"):
        generate(waves, 4, seed=0, folder=tmp_path / "d", **QUIET)


def test_another_dataset_in_the_folder(tmp_path, waves):
    generate(waves, 8, seed=0, folder=tmp_path / "d", part_size=4, **QUIET)
    other = type(waves)(speed=0.5)
    for problem, count, seed, message in [
        (other, 8, 0, r"problem.speed 0.5 instead of 0.25"),
        (waves, 9, 0, "count 9 instead of 8"),
        (waves, 8, 1, "seed 1 instead of 0"),
    ]:
        with pytest.raises(InputError, match=message):
            generate(problem, count, seed=seed, folder=tmp_path / "d", part_size=4, **QUIET)
    assert len(Store.open(tmp_path / "d")) == 8


def test_splits(tmp_path, waves):
    def made(name, **wanted):
        store = generate(waves, 20, seed=0, folder=tmp_path / name, **wanted, **QUIET)
        assert store is not None
        return store.splits

    assert made("a") == {"train": (0, 18), "test": (18, 20)}
    assert made("b", n_train=15) == {"train": (0, 15), "test": (15, 20)}
    assert made("c", n_test=3) == {"train": (0, 17), "test": (17, 20)}
    assert made("d", n_train=5, n_test=6) == {"train": (0, 5), "test": (14, 20)}
    assert made("e", n_train=0, n_test=20) == {"test": (0, 20)}
    assert made("f", splits={"all": (0, 20)}) == {"all": (0, 20)}
    with pytest.raises(InputError, match="within the 20, got 15 and 6"):
        made("g", n_train=15, n_test=6)


def test_one_sample(tmp_path, waves):
    store = generate(waves, 1, seed=0, folder=tmp_path / "d", **QUIET)
    assert store is not None
    assert store.splits == {"train": (0, 1)}


def test_mistakes(tmp_path, waves):
    for wrong, message in [
        ({"count": 0}, "between 1 and"),
        ({"seed": -1}, "`seed`"),
        ({"batch": 0}, "`batch`"),
        ({"shard": (2, 2)}, "`shard`"),
        ({"part_size": 0}, "one per part"),
    ]:
        wanted = {"count": 4, "seed": 0, "folder": tmp_path / "d", **wrong}
        with pytest.raises(InputError, match=message):
            generate(waves, **wanted)
    assert not (tmp_path / "d").exists()


def test_progress(tmp_path, waves, monkeypatch, capsys):
    seen = []
    generate(
        waves,
        10,
        seed=0,
        folder=tmp_path / "a",
        part_size=4,
        batch=3,
        progress=lambda *done: seen.append(done),
    )
    assert seen == [(0, 10), (3, 10), (4, 10), (7, 10), (8, 10), (10, 10)]
    generate(waves, 10, seed=0, folder=tmp_path / "b")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Generated 10 of 10 samples")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    generate(waves, 10, seed=0, folder=tmp_path / "c")
    assert "10/10" in capsys.readouterr().err


def test_leftovers_of_a_dead_process_go(tmp_path, waves):
    with contextlib.suppress(InputError):
        generate(waves, 8, seed=0, folder=tmp_path / "d", part_size=4, shard=(0, 2), **QUIET)
    old, new = (tmp_path / "d" / "parts" / name for name in (".old.tmp", ".new.tmp"))
    old.write_text("")
    new.write_text("")
    os.utime(old, (time.time() - 3600,) * 2)
    generate(waves, 8, seed=0, folder=tmp_path / "d", part_size=4, **QUIET)
    assert not old.exists()
    assert new.exists()  # a living process may be writing it
