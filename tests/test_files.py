import errno
import fcntl
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oformer import files
from oformer.checkpoint import checkpoints
from oformer.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_write_and_replace(tmp_path):
    path = tmp_path / "a" / "b.txt"
    files.write_text(path, "früher")
    files.write_text(path, "später")
    assert path.read_text(encoding="utf-8") == "später"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_what_we_write_has_the_permissions_of_other_files(tmp_path):
    (tmp_path / "theirs").write_text("")
    files.write_text(tmp_path / "ours", "")
    with files.new_folder(tmp_path / "folder"):
        pass
    (tmp_path / "their folder").mkdir()

    def mode(name):
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    assert mode("ours") == mode("theirs")
    assert mode("folder") == mode("their folder")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "weights"
    files.write_bytes(path, b"old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(
        InputError, match=r"space on the disk to write .*weights, got none left. Nothing there was changed"
    ):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


def test_an_interruption_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    files.write_bytes(path, b"old")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a", tmp_path / "file" / "a" / "b", tmp_path / "folder"):
        with pytest.raises(InputError, match="a place that can be written at"):
            files.write_text(path, "y")

    def denied(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(InputError, match=r"Permission denied. Choose another folder"):
        files.write_text(tmp_path / "b", "y")


def test_a_folder_that_vanishes_while_it_is_written(tmp_path, monkeypatch):
    def vanished(path, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(os, "replace", vanished)
    with pytest.raises(InputError, match=r"to stay while .*weights is written, got nothing there. It was deleted"):
        files.write_text(tmp_path / "weights", "y")


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("")
    assert files.listed(tmp_path) == [tmp_path / "a"]
    assert files.listed(tmp_path / "absent") == []
    with pytest.raises(InputError, match=r"can be listed at .*a, got Not a directory"):
        files.listed(tmp_path / "a")

    def denied(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    for look in (files.listed, files.remove_leftovers, checkpoints):
        with pytest.raises(InputError, match=r"can be listed at .*, got Permission denied. Check its permissions"):
            look(tmp_path)


def test_other_errors_are_not_dressed_up(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        files.write_text(tmp_path / "a", "y")


def test_threads_write_one_file_and_keep_the_umask(tmp_path):
    before = os.umask(0o022)
    os.umask(before)

    def write(k):
        for _ in range(20):
            files.write_bytes(tmp_path / "a", bytes([k]) * 1000)

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = (tmp_path / "a").read_bytes()
    assert len(content) == 1000
    assert len(set(content)) == 1
    after = os.umask(before)
    assert after == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_json(tmp_path):
    path = tmp_path / "a.json"
    content = {"b": [1, 2.5, None, "ü"], "a": {"x": True}}
    files.write_json(path, content)
    assert files.read_json(path) == content
    assert list(json.loads(path.read_text())) == ["b", "a"]  # in the order written
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            files.write_json(path, value)
    assert files.read_json(path) == content


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": NaN}', b"\xff\xfe", b"{'a': 1}", b"[" * 100_000])
def test_broken_json(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=r"JSON in .*a.json, got something unreadable"):
        files.read_json(tmp_path / "a.json")


def test_json_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match="a readable file at"):
        files.read_json(tmp_path)


def test_new_folder_appears_complete(tmp_path):
    with files.new_folder(tmp_path / "runs" / "a") as place:
        (place / "x").write_text("1")
        assert not (tmp_path / "runs" / "a").exists()
    with files.new_folder(tmp_path / "runs" / "a") as place:
        (place / "y").write_text("2")
        assert (tmp_path / "runs" / "a" / "x").exists()
    assert [p.name for p in (tmp_path / "runs" / "a").iterdir()] == ["y"]
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["a"]


def test_new_folder_keeps_the_old_one(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    with files.new_folder(folder) as place:
        (place / "x").write_text("1")

    def replace():
        with files.new_folder(folder) as place:
            (place / "y").write_text("2")

    def stopped():
        with files.new_folder(folder) as place:
            (place / "y").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with pytest.raises(InputError, match="space on the disk"), files.new_folder(folder):
        no_space()
    # The second of the two renames fails: the first is taken back.
    calls, original = [], os.replace

    def second_fails(*paths):
        calls.append(paths)
        if len(calls) == 2:
            no_space()
        original(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", second_fails)
        with pytest.raises(InputError, match="space on the disk"):
            replace()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in folder.iterdir()] == ["x"]
    # Interrupted while the old one is deleted: the new one is there, whole.
    with monkeypatch.context() as patch:

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace()
    assert [p.name for p in folder.iterdir()] == ["y"]


KILLED_BETWEEN_RENAMES = """
import os, sys
from pathlib import Path
from oformer import files

replace, calls = os.replace, []

def killed_at_the_second(*paths):
    calls.append(paths)
    os._exit(9) if len(calls) == 2 else replace(*paths)

os.replace = killed_at_the_second
with files.new_folder(Path(sys.argv[1])) as place:
    (place / "new").write_text("")
"""


@pytest.fixture
def exchange_cut_short(tmp_path):
    """A folder that a process was killed while it replaced: neither the old nor the new one has the name."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").write_text("")
    assert subprocess.run([sys.executable, "-c", KILLED_BETWEEN_RENAMES, tmp_path / "a"], cwd=ROOT).returncode == 9
    assert all(p.name.startswith(".") for p in tmp_path.iterdir())
    return tmp_path / "a"


def test_a_folder_whose_exchange_was_cut_short_is_put_back(exchange_cut_short):
    files.remove_leftovers(exchange_cut_short.parent)
    assert [p.name for p in exchange_cut_short.parent.iterdir()] == ["a"]
    assert [p.name for p in exchange_cut_short.iterdir()] == ["old"]


def test_a_folder_whose_exchange_was_cut_short_can_be_exchanged_again(exchange_cut_short):
    with pytest.raises(KeyboardInterrupt), files.new_folder(exchange_cut_short):
        raise KeyboardInterrupt
    assert [p.name for p in exchange_cut_short.iterdir()] == ["old"]
    with files.new_folder(exchange_cut_short) as place:
        (place / "new").write_text("")
    assert [p.name for p in exchange_cut_short.iterdir()] == ["new"]


def test_an_old_folder_that_was_replaced_but_not_deleted_goes(tmp_path):
    for name in ("a", ".a.0123456789ab.old", ".of-somebody.old"):
        (tmp_path / name).mkdir()
    files.remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"a", ".of-somebody.old"}


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with files.held(folder):
        with (
            pytest.raises(InputError, match=rf"run to be written by no other process, got .* process {os.getpid()} on"),
            files.held(folder),
        ):
            pass
        with files.held(tmp_path / "another"):
            pass
    with files.held(folder):
        pass


def test_a_killed_process_holds_nothing(tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom oformer.files import held\n"
        "with held(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(3600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InputError, match=f"process {process.pid} on"), files.held(tmp_path):
        pass
    process.kill()
    process.communicate()
    with files.held(tmp_path):
        pass


def test_a_file_system_without_locks_is_said_and_used(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="cannot be locked.*no second process"), files.held(tmp_path):
        pass


def test_new_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "a").write_text("x")
    with (
        pytest.raises(InputError, match=r"a folder or nothing at .*a, got a file"),
        files.new_folder(tmp_path / "a"),
    ):
        pass
    assert (tmp_path / "a").read_text() == "x"


def test_leftovers(tmp_path):
    (tmp_path / ".a.123.tmp").write_text("")
    (tmp_path / ".b.123.tmp").mkdir()
    (tmp_path / ".b.123.tmp" / "x").write_text("")
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "a.tmp").write_text("")
    files.remove_leftovers(tmp_path, older_than=60)
    assert len(list(tmp_path.iterdir())) == 4
    os.utime(tmp_path / ".a.123.tmp", (time.time() - 100,) * 2)
    files.remove_leftovers(tmp_path, older_than=60)
    assert len(list(tmp_path.iterdir())) == 3
    files.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "a.tmp"]
    files.remove_leftovers(tmp_path / "absent")


DTYPES = [np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(arrays=st.dictionaries(st.text("abcd.é", min_size=1, max_size=5), ARRAYS, max_size=6))
def test_arrays_come_back(tmp_path_factory, arrays):
    folder = tmp_path_factory.mktemp("arrays")
    files.save_arrays(folder / "a", arrays)
    files.save_arrays(folder / "b", dict(reversed(arrays.items())))
    assert files.sha256(folder / "a") == files.sha256(folder / "b")
    mapped = files.map_arrays(folder / "a")
    assert mapped.keys() == arrays.keys()
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype
        assert mapped[name].shape == array.shape
        assert mapped[name].tobytes() == array.tobytes()
        assert mapped[name].flags.aligned


def test_arrays_are_safetensors_both_ways(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(3.0), "b": np.ones((2, 2), np.float16)[:, ::-1], "c": np.zeros((0, 4), np.int32)}
    files.save_arrays(tmp_path / "ours", arrays)
    theirs = safetensors.load_file(tmp_path / "ours")
    assert all(np.array_equal(theirs[name], arrays[name]) for name in arrays)
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    safetensors.save_file(plain, tmp_path / "theirs", metadata={"made": "elsewhere"})
    ours = files.map_arrays(tmp_path / "theirs")
    assert all(np.array_equal(ours[name], arrays[name]) for name in arrays)


def test_maps_are_read_only_and_outlive_a_replacement(tmp_path):
    files.save_arrays(tmp_path / "a", {"x": np.arange(5)})
    x = files.map_arrays(tmp_path / "a")["x"]
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    files.save_arrays(tmp_path / "a", {"x": np.arange(9)})
    assert x.tolist() == [0, 1, 2, 3, 4]


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes that are none"),
        (b"abc", "3 bytes that are none"),
        (b"not a safetensors file at all", r"bytes that are none \(.*\). The file is truncated or foreign"),
        (struct.pack("<Q", 50) + b"{}", "bytes that are none"),
        (with_header(b"{"), "bytes that are none"),
        (with_header([1, 2]), "bytes that are none"),
        (with_header({"a": 1}), "bytes that are none"),
        (with_header({"a": {"dtype": "F32", "shape": [1]}}), "bytes that are none"),
        (with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "bytes that are none"),
        (
            with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["x", "y"]}}),
            "bytes that are none",
        ),
        *(
            (
                with_header({"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": [1], **odd}}, b"1234"),
                "that are none",
            )
            for odd in (
                {"shape": [-1, -1]},
                {"shape": [1.0]},
                {"shape": "1"},
                {"shape": 1},
                {"shape": [True]},
                {"dtype": ["F32"]},
                {"shape": [1] * 99},
                {"shape": [0, 10**30], "data_offsets": [0, 0]},
                {"data_offsets": [-4, 0]},
                {"data_offsets": [0, 2, 4]},
                {"data_offsets": [4.0, 8.0]},
            )
        ),
        (with_header([1]), "that are none"),
        (with_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "not fully covered"),
        (with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345678"), "not fully covered"),
        (
            with_header({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}, b"1234"),
            "invalid shape",
        ),
        (
            with_header({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
            "^Expected array types.*BF16",
        ),
    ],
)
def test_foreign_and_truncated_files(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=message):
        files.map_arrays(tmp_path / "a")


@given(cut=st.integers(1, 120))
def test_every_truncation_is_noticed(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "a"
    files.save_arrays(path, {"x": np.arange(4.0), "y": np.arange(3, dtype=np.int8)})
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    with pytest.raises(InputError):
        files.map_arrays(path)


def test_no_file_to_map(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        files.map_arrays(tmp_path / "a")
    with pytest.raises(InputError, match="a readable file"):
        files.map_arrays(tmp_path)
