"""Foreign files are read in a child process: what ends it, hangs it or asks for all memory is one sentence here."""

import os
import signal
import struct
import time
import zipfile

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from oformer import files
from oformer.data.importers import apart, import_file, load_file, recognize
from oformer.data.importers.hdf5 import dataset_in, open_hdf5
from oformer.errors import InputError
from oformer.inspection import describe
from oformer.predict import read_field


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.fixture
def small_memory(monkeypatch):
    """64 MiB to spare, whatever the machine has."""
    for place in ("files", "data.importers.apart", "data.importers.common"):
        monkeypatch.setattr(f"oformer.{place}.spare_memory", lambda: 2.0**26)


def write_burgers(path):
    scipy.io.savemat(path, {"a": numbers(6, 16), "u": numbers(6, 16)})
    return path


def wrong_type(path, code):
    """A MATLAB 5 file whose array `a` has elements of a type that scipy has no place for."""
    write_burgers(path)
    content = path.read_bytes()
    place = content.index(struct.pack("<II", 9, 8 * 6 * 16))
    path.write_bytes(content[:place] + struct.pack("<I", code) + content[place + 4 :])
    return path


def nested_key(path):
    """A torch file with a tuple in a tuple in a tuple... as the key of its dictionary."""
    whole = path.with_name("whole.pt")
    torch.save({"x": torch.zeros(2, 8)}, whole)
    content = b"\x80\x02}()" + b"\x85" * 200_000 + b"K\x01u."
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return path


def test_a_crash_of_a_reader_is_a_sentence(tmp_path):
    # scipy reads out of bounds: most often that ends the process.
    for code in (15, 99):
        with pytest.raises(InputError, match=r"`a` in .*a.mat, got something that cannot be read \("):
            import_file(wrong_type(tmp_path / "a.mat", code), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_deeply_nested_torch_file_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"the reader crashed|nothing but tensors"):
        recognize(nested_key(tmp_path / "deep.pt"))


def test_after_a_crash_other_files_are_read(tmp_path):
    with h5py.File(tmp_path / "open.h5", "w") as file:
        file["a"] = np.arange(3.0)
    with open_hdf5(tmp_path / "open.h5") as root:
        array = dataset_in(tmp_path / "open.h5", root, "a")
        np.testing.assert_array_equal(array[1:], [1, 2])
        os.kill(apart.reader().process.pid, signal.SIGSEGV)
        with pytest.raises(InputError, match=r"the reader crashed with SIGSEGV\). It is damaged.*or it uses something"):
            array[1:]
        assert recognize(write_burgers(tmp_path / "b.mat")).samples == 6
        with pytest.raises(InputError, match="a file that is still open"):
            array[1:]
    with open_hdf5(tmp_path / "open.h5") as root:
        np.testing.assert_array_equal(dataset_in(tmp_path / "open.h5", root, "a")[:2], [0, 1])


def test_a_reader_that_ended_while_idle_is_started_again(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3.0)
    for _ in range(2):
        with open_hdf5(tmp_path / "a.h5") as root:
            assert list(root) == ["a"]
        apart.reader().process.kill()
        apart.reader().process.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_reads_through_a_child_of_its_own(tmp_path):
    """A worker of a data loader must not take the answer to a request of the process that it was forked from."""
    recognize(write_burgers(tmp_path / "a.mat"))
    before = apart.reader().process.pid
    child = os.fork()
    if child == 0:
        good = recognize(tmp_path / "a.mat").samples == 6 and apart.reader().process.pid != before
        apart.end_reader()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert apart.reader().process.pid == before
    assert recognize(tmp_path / "a.mat").samples == 6


def test_what_does_not_end_is_ended(tmp_path, monkeypatch):
    """56 bytes that announce 2^31 tags."""
    pytest.importorskip("meshio")
    path = tmp_path / "a.msh"
    path.write_text("$MeshFormat\n2.2 0 8\n$EndMeshFormat\n$NodeData\n2147483648\n")
    monkeypatch.setattr(apart, "SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(InputError, match="nothing within"):
        recognize(path)
    assert time.monotonic() - begin < 10


def test_ctrl_c_ends_the_reader_whose_answer_nobody_waits_for(tmp_path, monkeypatch):
    recognize(write_burgers(tmp_path / "a.mat"))
    one = apart.reader()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(one, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recognize(tmp_path / "a.mat")
    assert not one.is_there
    assert recognize(tmp_path / "a.mat").samples == 6
