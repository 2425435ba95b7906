"""Foreign files are read in a child process: what ends it, hangs it or asks for all memory is one sentence here."""

import contextlib
import os
import signal
import struct
import sys
import threading
import time
import zipfile

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from oformer import files
from oformer.cli.describe import describe
from oformer.data.importers import SUFFIXES, apart, import_file, load_file, recognize
from oformer.data.importers.hdf5 import open_hdf5
from oformer.errors import InputError
from oformer.predict import read_field


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


@pytest.fixture
def small_memory(monkeypatch):
    """16 MiB to spare, whatever the machine has."""
    for place in ("files", "data.importers.apart", "data.importers.common"):
        monkeypatch.setattr(f"oformer.{place}.spare_memory", lambda: 2.0**24)


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
        array = root.array("a")
        np.testing.assert_array_equal(array[1:], [1, 2])
        # It is stopped, and crashes when the request is on its way.
        pid = apart.reader().process.pid
        os.kill(pid, signal.SIGSTOP)

        def crash():
            os.kill(pid, signal.SIGSEGV)
            with contextlib.suppress(ProcessLookupError):  # some systems end a stopped process at once
                os.kill(pid, signal.SIGCONT)

        threading.Timer(0.5, crash).start()
        with pytest.raises(InputError, match=r"the reader crashed with SIGSEGV\). It is damaged.*or it uses something"):
            array[1:]
        assert recognize(write_burgers(tmp_path / "b.mat")).samples == 6
        with pytest.raises(InputError, match="a file that is still open"):
            array[1:]
    with open_hdf5(tmp_path / "open.h5") as root:
        np.testing.assert_array_equal(root.array("a")[:2], [0, 1])


def test_a_reader_that_ended_while_idle_is_started_again(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3.0)
    for _ in range(2):
        with open_hdf5(tmp_path / "a.h5") as root:
            assert list(root) == ["a"]
        process = apart.reader().process
        process.kill()
        process.wait()


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


# --- tiny files that ask for all memory ---


def _members(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (header, size) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(size // 2**20):
                    file.write(bytes(2**20))
    return path


def header(*shape):
    return {"descr": "<f4", "fortran_order": False, "shape": shape}


def npz_bomb(folder):
    """64 MiB of zeros in 64 KiB."""
    return _members(folder / "a.npz", coords=(header(2**24), 2**26), inputs=(header(1), 0), targets=(header(1), 0))


def npz_claim(folder):
    return _members(folder / "a.npz", coords=(header(2**41, 4), 2**20))


def npy_claim(folder):
    with (folder / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header(2**40, 10))
        file.write(bytes(100))
    return folder / "a.npy"


def npy_sparse(folder):
    """A file of 40 GiB that takes no room on the disk."""
    with (folder / "a.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header(2**30, 10, 1))
        file.truncate(40 * 2**30 + 128)
    return folder / "a.npy"


def matlab_bomb(folder):
    scipy.io.savemat(folder / "a.mat", {"a": np.zeros((8, 2**19)), "u": np.zeros((8, 2**19))}, do_compression=True)
    return folder / "a.mat"


def matlab_claim(folder):
    """An array of 2 x (2^31 - 1) numbers of which a hundred are there."""
    path = write_burgers(folder / "a.mat")
    path.write_bytes(path.read_bytes().replace(struct.pack("<II", 6, 16), struct.pack("<II", 2, 2**31 - 1)))
    return path


def hdf5(name, **shapes):
    def make(folder):
        with h5py.File(folder / name, "w") as file:
            for key, shape in shapes.items():
                file.create_dataset(key.replace("_", "-"), shape, "f8", chunks=True)
        return folder / name

    return make


def seven_three(folder):
    path = hdf5("a.mat", a=(2**40, 3), u=(2**40, 3))(folder)
    content = path.read_bytes()
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(116) + b" " * 8 + b"\x00\x02IM" + bytes(384) + content)
    return path


def vtu_bomb(folder):
    meshio = pytest.importorskip("meshio")
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux limits the memory of a process")
    mesh = meshio.Mesh(np.zeros((3, 3)), [("triangle", np.array([[0, 1, 2]]))], {"u": np.zeros((3, 2**21))})
    meshio.vtu.write(folder / "a.vtu", mesh, compression="zlib")
    return folder / "a.vtu"


def pickle_bomb(folder):
    """A text of a mebibyte that becomes bytes a thousand times."""
    text = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20
    again = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    (folder / "es_a.pkl").write_bytes(b"\x80\x02" + text + b"q\x000](" + again * 1000 + b"e.")
    return folder / "es_a.pkl"


BOMBS = {
    "npz_bomb": (npz_bomb, "at most half of the memory"),
    "npz_claim": (npz_claim, "at most half of the memory"),
    "npy_claim": (npy_claim, "cannot be read|at most half"),
    "npy_sparse": (npy_sparse, "at most half of the memory|square grid"),
    "matlab_bomb": (matlab_bomb, "half of the memory"),
    "matlab_claim": (matlab_claim, "half of the memory"),
    "seven_three": (seven_three, "half of the memory"),
    "axis": (hdf5("a.h5", tensor=(2, 4, 16), x_coordinate=(2**29,)), "16 coordinates on one axis .*536870912"),
    "grid": (hdf5("a.h5", tensor=(2, 4, 2**29), x_coordinate=(2**29,)), "half of the memory"),
    "points": (hdf5("a.h5", coords=(2**40, 2), inputs=(2, 2**40), targets=(2, 2**40)), "half of the memory"),
    "many": (hdf5("a.h5", coords=(4, 2), inputs=(2**40, 4), targets=(2**40, 4)), "half of the memory"),
    "vtu_bomb": (vtu_bomb, "half of the memory"),
    "pickle_bomb": (pickle_bomb, "half of the memory"),
}


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_asks_for_much_memory_is_a_sentence(tmp_path, name):
    make, words = BOMBS[name]
    path = make(tmp_path)
    begin = time.monotonic()
    with pytest.raises(InputError, match=words):
        load_file(path)
    if path.suffix in (".npz", ".npy"):
        with pytest.raises(InputError, match="at most half of the memory"):
            read_field(path)
        with pytest.raises(InputError, match="at most half of the memory"):
            describe(path)
    assert time.monotonic() - begin < 20


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".safetensors"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, suffix):
    path = tmp_path / f"es_a{suffix}"
    os.mkfifo(path)
    for read in (describe, recognize, load_file, read_field, files.map_arrays, files.read_json):
        with pytest.raises(InputError, match="a device or a pipe"):
            read(path)
    if suffix in (".vtu", ".npz", ".h5", ".mat"):  # in a folder of samples
        with pytest.raises(InputError, match="a device or a pipe"):
            recognize(tmp_path, inputs=["a"], targets=["b"])
