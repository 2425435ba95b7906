"""Files of every kind with bytes changed at random: whatever is in them, the answer is an answer or one sentence.

Good files, made by the writers of the other tests, are changed with a fixed seed and read in a process with limits on
its memory and time: no stack trace, no crash, no hang, no more memory than there is to spare, and nothing from outside
the folder.
"""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from oformer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from oformer.cli.describe import describe
from oformer.data import PointDataset, generate
from oformer.data.importers import apart, load_file, recognize
from oformer.errors import InputError
from oformer.models.operator import Operator
from oformer.predict import read_field
from tests.data.importers.airfoils import trajectory, write_npz, write_tfrecord
from tests.data.importers.test_pickles import entries
from tests.data.test_importers import numbers, write_h5, write_mat, write_well
from tests.tiny import tiny_recipe

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork and limits of memory")

SPARE = 2**28  # bytes that reading may take
GROWTH = 3 * SPARE  # bytes by which the process that reads may grow: what it was given, its copy, and samples of it
SECRET = 7654  # lies in files outside the folder; `describe` shows four digits
HANG = 30.0  # seconds for a file


def good_files(folder):
    """A small good file, or folder, of every kind by name: its path, the file that is changed, and how it is read.

    Each kind has a folder of its own.
    """
    found = {}

    def new(name):
        (folder / name).mkdir()
        return folder / name

    def add(name, path, *reads, change=None):
        found[name] = path, change or path, reads or (describe, load_file)

    pair = {"a": numbers(6, 16), "u": numbers(6, 16), "visc": 0.1}
    one = {"coords": numbers(9, 2), "inputs": numbers(9), "targets": numbers(9, 2)}
    named = {"coords": numbers(9, 2), "inputs": numbers(5, 9), "targets": numbers(5, 9, 2)}
    groups = {f"s{i}/{name}": array for i in range(3) for name, array in one.items()}
    for version in ("5", "7", "7.3"):
        add(f"matlab {version}", write_mat(new(f"matlab {version}") / "b.mat", version, **pair))
    add("named matlab", write_mat(new("named matlab") / "a.mat", "5", **named))
    add("named hdf5", write_h5(new("named hdf5") / "a.h5", **named))
    add("groups", write_h5(new("groups") / "a.hdf5", **groups))
    add("pdebench", write_h5(new("pdebench") / "p.h5", tensor=numbers(3, 12, 8), x_coordinate=np.arange(8.0)))
    add("the well", write_well(new("the well") / "well.h5")[0])
    with h5py.File(new("packed pdebench") / "p.h5", "w") as file:
        file.create_dataset("tensor", data=np.zeros((3, 12, 64)), chunks=True, compression="gzip")
        file["x-coordinate"] = np.arange(64.0)
    add("packed pdebench", folder / "packed pdebench" / "p.h5")
    np.savez(new("npz") / "a.npz", **named)
    np.savez_compressed(new("packed npz") / "a.npz", **named)
    np.savez(new("field") / "a.npz", coords=numbers(9, 2), values=numbers(9, 1))
    np.save(new("npy") / "a.npy", numbers(12, 4, 4, 3))
    np.save(new("points") / "a.npy", numbers(9, 2))
    add("npz", folder / "npz" / "a.npz")
    add("packed npz", folder / "packed npz" / "a.npz")
    add("field", folder / "field" / "a.npz", describe, read_field)
    add("npy", folder / "npy" / "a.npy")
    add("points", folder / "points" / "a.npy", describe, lambda path: read_field(path, values_needed=False))
    content = {"x": torch.randn(4, 8), "y": torch.randn(4, 8), "visc": 0.1}
    torch.save(content, new("torch") / "a.pt")
    torch.save(content, new("old torch") / "a.pt", _use_new_zipfile_serialization=False)
    add("torch", folder / "torch" / "a.pt")
    add("old torch", folder / "old torch" / "a.pt")
    for protocol in (2, 5):
        path = new(f"pickle {protocol}") / "es_a.pkl"
        path.write_bytes(pickle.dumps(entries(3), protocol=protocol))
        add(f"pickle {protocol}", path)
    records = write_tfrecord(folder / "records", [trajectory(times=601)])
    add("records", records)
    add("meta.json", records, change=folder / "records" / "meta.json")
    flows = write_npz(folder / "flows", [trajectory(), trajectory(seed=1)])
    add("flows", flows, change=flows / "001.npz")
    _meshes(new, add)
    _own(folder, add)
    return found


def _meshes(new, add):
    meshio = pytest.importorskip("meshio")

    def read(path):
        return f"{describe(path)} {recognize(path, inputs=['u'], targets=['c'])}"

    points = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.0]])
    cells = [("triangle", np.array([[0, 1, 2], [0, 2, 3]]))]
    mesh = meshio.Mesh(points, cells, {"u": np.arange(4.0), "v": points}, {"c": [np.array([1.0, 2.0])]})

    def series(path):
        with contextlib.chdir(path.parent), meshio.xdmf.TimeSeriesWriter(path.name, data_format="HDF") as writer:
            writer.write_points_cells(points, mesh.cells)
            for k in range(3):
                writer.write_data(0.1 * k, point_data={"u": np.arange(4.0) + k}, cell_data=mesh.cell_data)

    def gmsh_text(path):
        meshio.gmsh.write(path, mesh, fmt_version="2.2", binary=False)
        # meshio 5.3.5 writes numbers as numpy 2 prints them; gmsh does not.
        path.write_text(re.sub(r"np\.float64\((.*?)\)", r"\1", path.read_text()))

    writers = {
        "text.vtu": lambda path: meshio.vtu.write(path, mesh, binary=False),
        "packed.vtu": lambda path: meshio.vtu.write(path, mesh, compression="zlib"),
        "4.vtk": lambda path: meshio.vtk.write(path, mesh, fmt_version="4.2"),
        "5.vtk": lambda path: meshio.vtk.write(path, mesh, fmt_version="5.1", binary=False),
        "hdf5.xdmf": lambda path: meshio.xdmf.write(path, mesh, data_format="HDF"),
        "text.xdmf": lambda path: meshio.xdmf.write(path, mesh, data_format="XML"),
        "series.xdmf": series,
        "4.msh": lambda path: meshio.gmsh.write(path, mesh, fmt_version="4.1", binary=True),
        "2.msh": gmsh_text,
    }
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], warnings.catch_warnings(action="ignore"):
        for name, write in writers.items():
            path = new(name) / name
            write(path)
            add(name, path, read)
            if path.with_suffix(".h5").exists():
                add(f"data of {name}", path, read, change=path.with_suffix(".h5"))


def _own(folder, add):
    """Our own formats: a dataset and a checkpoint."""
    recipe = tiny_recipe()
    dataset, checkpoint = folder / "dataset", folder / "checkpoint"
    generate(recipe.problem, 4, seed=0, folder=dataset, n_train=3)
    data = PointDataset.open(dataset, recipe.data.view)
    operator = Operator(recipe.model.build(data.spec), recipe.normalization).fit(data)
    save_checkpoint(checkpoint, Checkpoint(operator, "tiny", 1))

    def read(path):
        describe(path)
        found = PointDataset.open(path)
        return [found[i] for i in range(len(found))]

    def load(path):
        describe(path)
        load_checkpoint(path, verify=False)  # checksums would refuse every change

    for path in (dataset / "dataset.json", *sorted(dataset.rglob("*.safetensors"))):
        add(f"dataset: {path.name}", dataset, read, change=path)
    for name in ("config.json", "model.safetensors"):
        add(f"checkpoint: {name}", checkpoint, load, change=checkpoint / name)


def hostile(secret):
    """What an XDMF file must not lead to."""
    places = [f"{folder}{secret.name}.h5:/{name}" for folder in (f"{secret.parent}/", "../../") for name in ("u", "v")]
    return [*places, f"{secret}.bin", "/dev/zero:/x", "pipe.h5:/x"]


def changed(content, rng, references):
    """The bytes of a file after one to four changes, each of a random kind."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        size = len(data)
        if size < 16:
            break
        # Heads and tails, where a format says what is where, as often as all the rest.
        place = int(
            rng.choice([rng.integers(size), rng.integers(min(size, 600)), size - 1 - rng.integers(min(size, 600))])
        )
        kind = 7 if b".h5:" in data and rng.random() < 0.3 else rng.integers(8)
        if kind == 0:
            data[place] ^= 1 << rng.integers(8)
        elif kind == 1:
            data[place] = rng.integers(256)
        elif kind == 2:
            length = int(rng.choice([1, 2, 4, 8]))
            data[place : place + length] = rng.choice([b"\xff", b"\x00", b"\x7f", b"\x80"]) * length
        elif kind == 3:
            value = int(rng.choice([2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1]))
            data[place : place + 8] = value.to_bytes(8, "little")
        elif kind == 4:
            del data[place:]
        elif kind == 5:
            other, length = int(rng.integers(size)), int(rng.integers(1, 64))
            data[place : place + length] = data[other : other + length]
        elif kind == 6:
            digits = [match.span() for match in re.finditer(rb"\d+", data)]
            if digits:
                begin, end = digits[rng.integers(len(digits))]
                data[begin:end] = str(rng.choice([0, -1, 7, 2**31, 10**12, 10**300])).encode()
        else:
            texts = [match.span(1) for match in re.finditer(rb">([^<>]+\.h5:[^<>]+|[\d .e+-]+)<", data)]
            if texts:
                begin, end = texts[rng.integers(len(texts))]
                data[begin:end] = references[rng.integers(len(references))].encode()
                data[:] = data.replace(b'Format="XML"', rng.choice([b'Format="HDF"', b'Format="Binary"']), 1)
    return bytes(data)


def try_one(number, files, good, secret):
    """Change a file, read it, and give what is wrong with the answer; nothing if it is as it should be."""
    names = sorted(files)
    name = names[number % len(names)]
    path, change, reads = files[name]
    work, kind = good.parent / "work", change.relative_to(good).parts[0]
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good / kind, work / kind)
    os.mkfifo(work / kind / "pipe.h5")
    content = changed(change.read_bytes(), np.random.default_rng(number), hostile(secret))
    (work / change.relative_to(good)).write_bytes(content)
    read_at = work / path.relative_to(good)
    for read in reads:
        begin = time.monotonic()
        try:
            said = str(read(read_at))
        except InputError as error:
            said = str(error)
            if "\n" in said:
                return f"{name}: more than a line: {said}"
        except Exception:
            return f"{name}: {traceback.format_exc()}"
        if time.monotonic() - begin > HANG:
            return f"{name}: took {time.monotonic() - begin:.0f} s"
        if str(SECRET) in said:
            return f"{name}: what lies outside of the folder: {said}"
    return None


def grown():
    """Bytes that this process and those it started have had at most."""
    return 1024 * sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def worker(numbers, files, good, secret, report):
    """Read the files of these numbers, and write a line of JSON before and after each."""
    from oformer import files as reading
    from oformer.data.importers import common

    warnings.simplefilter("ignore")
    for module in (reading, apart, common):
        module.spare_memory = lambda: float(SPARE)
    apart.SECONDS, apart.BYTES_A_SECOND = 5.0, 1e9
    apart._readers.clear()  # that of the parent stays the parent's
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    before = grown()
    for number in numbers:
        signal.alarm(int(4 * HANG))
        report.write(json.dumps([number, "begin"]) + "\n")
        report.flush()
        wrong = try_one(number, files, good, secret)
        if wrong is None and grown() - before > GROWTH:
            wrong = f"{(grown() - before) / 2**20:.0f} MiB"
            before = grown()
        report.write(json.dumps([number, wrong]) + "\n")
        report.flush()
    apart.end_reader()


def fuzz(tmp_path, numbers, leave=()):
    """What went wrong, by number; some kinds may be left out."""
    good = tmp_path / "good"
    good.mkdir()
    files = {name: entry for name, entry in good_files(good).items() if name not in leave}
    secret = tmp_path / "secret"
    with h5py.File(f"{secret}.h5", "w") as file:
        file["u"], file["v"] = np.full(4, SECRET), np.full((4, 3), SECRET)
    Path(f"{secret}.bin").write_bytes(np.full(4, SECRET).tobytes())
    for path, _, reads in files.values():  # unchanged, each is read
        for read in reads:
            read(path)
    wrong, left, log = {}, list(numbers), tmp_path / "log"
    while left:
        with log.open("w") as report, warnings.catch_warnings(action="ignore"):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    worker(left, files, good, secret, report)
                    code = 0
                finally:
                    os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        wrong.update({number: said for number, said in lines if said not in (None, "begin")})
        if code == 0:
            return wrong
        last = lines[-1][0]
        wrong[last] = f"{sorted(files)[last % len(files)]}: the process ended with {code}"
        left = [number for number in left if number > last]
    return wrong


def test_a_changed_file_is_read_or_refused_in_a_sentence(tmp_path):
    # Those of torch are left to the slow test: the process that reads them has to import torch.
    wrong = fuzz(tmp_path, range(80), leave=("torch", "old torch"))
    assert not wrong, "\n".join(f"{number}: {said}" for number, said in wrong.items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_20_000_changed_files_are_read_or_refused(tmp_path):
    wrong = fuzz(tmp_path, range(20_000))
    assert not wrong, "\n".join(f"{number}: {said}" for number, said in wrong.items())
