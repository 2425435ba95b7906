"""A foreign file to a dataset: recognized by its first bytes and its names, read part by part, written whole."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np

from oformer import files
from oformer.data.dataset import PointDataset
from oformer.data.generate import Progress, check_space, first_and_last
from oformer.data.importers import meshfiles, named_arrays
from oformer.data.importers.common import Choices, Layout, Opened, Stored, reading
from oformer.data.importers.containers import matlab_version, open_matlab, open_numpy, open_torch
from oformer.data.importers.hdf5 import names_in, open_hdf5
from oformer.data.importers.meshfiles import how_to_choose, mesh_files, open_meshes
from oformer.data.importers.named_arrays import are_meant, array_files, open_arrays
from oformer.data.importers.pdebench import is_pdebench, open_pdebench
from oformer.data.importers.pickles import open_pickle
from oformer.data.importers.tfrecord import open_tfrecord
from oformer.data.importers.trajectories import are_trajectories, open_trajectories
from oformer.data.importers.well import is_well, open_well
from oformer.data.layout import Storage
from oformer.data.store import Store
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Spec
from oformer.files import check_regular

KINDS = (
    "burgers", "darcy", "navier-stokes", "pdebench", "the-well", "electrostatics", "magnetostatics", "airfoil", "mesh",
    "arrays",
)  # fmt: skip
PICKLES = (".pkl", ".pickle")
SUFFIXES = (".mat", ".npy", ".pt", ".pth", ".h5", ".hdf5", *PICKLES, ".tfrecord", *meshfiles.SUFFIXES)
PART_BYTES = 2**27  # of values in float32: what an import holds in memory, a few times over
PART_SAMPLES = 1024

_HDF5 = b"\x89HDF\r\n\x1a\n"


def is_importable_folder(folder: Path) -> bool:
    """Whether the files in a folder are samples that can be imported together."""
    return bool(array_files(folder) or mesh_files(folder))


def recognize(
    path: Path | str,
    *,
    kind: str | None = None,
    in_times: int | None = None,
    stride: int | None = None,
    stored: Stored | None = None,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    coords: Sequence[str] = (),
) -> Layout:
    """What a foreign file is, without importing it.

    Args:
        path: a MATLAB, numpy, torch, PDEBench, The Well, pickle, TFRecord or mesh file, a file of named arrays, or a
            folder of .npz trajectories, of mesh files or of files of arrays.
        kind: one of `KINDS`, instead of the guess.
        in_times: how many frames of a trajectory are input; by default ten, or one where there are not more; four for
            the airfoil.
        stride: keep one in so many frames of an airfoil's trajectory or of an XDMF series.
        stored: keep the airfoil's velocity, which is the default, or its momentum.
        inputs: names of the fields of a mesh file, or of the arrays of a file of your own, that are input.
        targets: names of those that are target.
        coords: names of the arrays that are the points; in a mesh file they are known.
    """
    choices = Choices(kind, in_times, stride, stored, tuple(inputs), tuple(targets), tuple(coords))
    with _opened(Path(path), choices) as opened:
        return opened.layout


def load_file(path: Path | str) -> PointDataset:
    """A foreign file whose names say what is what, in memory and without a dataset on disk.

    Args:
        path: what `recognize` takes.
    """
    with _opened(Path(path), Choices()) as opened:
        spec = _spec(opened)
        return PointDataset(opened.samples(0, opened.layout.samples), spec=spec, card=_card(_spans(opened)))


def import_file(
    path: Path | str,
    folder: Path | str,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
    in_times: int | None = None,
    storage: Storage = "float32",
    kind: str | None = None,
    stride: int | None = None,
    stored: Stored | None = None,
    inputs: Sequence[str] = (),
    targets: Sequence[str] = (),
    coords: Sequence[str] = (),
    test_file: Path | str | None = None,
    progress: Progress | None = None,
) -> Store:
    """Write a foreign file as a dataset of ours; it appears complete or not at all.

    Args:
        path: what `recognize` takes.
        folder: where to; nothing may be there yet.
        n_train: the first so many samples are the training split.
        n_test: the last so many are the test split; by default what is left, and a tenth if neither is given.
            Where both are given, what lies between is left out.
        in_times: how many frames of a trajectory are input; by default ten, or one where there are not more; four for
            the airfoil.
        storage: how values are kept.
        kind: one of `KINDS`, instead of the guess.
        stride: keep one in so many frames of an airfoil's trajectory or of an XDMF series.
        stored: keep the airfoil's velocity, which is the default, or its momentum.
        inputs: names of the fields of a mesh file, or of the arrays of a file of your own, that are input.
        targets: names of those that are target.
        coords: names of the arrays that are the points; in a mesh file they are known.
        test_file: take the test split, by default all of it, from another file or folder of the same layout.
        progress: called with the samples done and wanted.
    """
    path, folder = Path(path), Path(folder)
    choices = Choices(kind, in_times, stride, stored, tuple(inputs), tuple(targets), tuple(coords))
    if folder.exists():
        raise InputError(f"no file or folder yet at {folder}", "one", "Choose another name")
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(path, choices))
        _spec(opened)  # says how to choose, where that is not done
        if test_file is None:
            spans = _spans(opened, n_train, n_test)
        else:
            other = stack.enter_context(_opened(Path(test_file), choices))
            spans = _two_files(opened, other, n_train, n_test)
        return _write(spans, folder, storage, progress)


Span = tuple[str, Opened, int, int]  # a split, and the samples of a file that it takes


def _spans(opened: Opened, n_train: int | None = None, n_test: int | None = None) -> list[Span]:
    splits = first_and_last(opened.layout.samples, n_train, n_test)
    if not splits:
        raise InputError("at least one sample to import", "none")
    return [(name, opened, first, end) for name, (first, end) in splits.items()]


def _two_files(opened: Opened, other: Opened, n_train: int | None, n_test: int | None) -> list[Span]:
    same = all(np.array_equal(a, b) for a, b in zip(opened.axes, other.axes, strict=False))
    if other.layout.spec != opened.layout.spec or not same:
        raise InputError(
            f"the frames, channels and points of {opened.path} in {other.path} too",
            "others",
            "Compare them with `oformer inspect`",
        )
    train, test = opened.layout.samples, other.layout.samples
    n_train, n_test = train if n_train is None else n_train, test if n_test is None else n_test
    if not (0 < n_train <= train and 0 < n_test <= test):
        raise InputError(f"up to {train} training and {test} test samples", f"{n_train} and {n_test}")
    return [("train", opened, 0, n_train), ("test", other, test - n_test, test)]


def _spec(opened: Opened) -> Spec:
    if opened.layout.spec is None:
        raise how_to_choose(opened.layout, opened.path)
    return opened.layout.spec


def _write(spans: list[Span], folder: Path, storage: Storage, progress: Progress | None) -> Store:
    layout = spans[0][1].layout
    spec = _spec(spans[0][1])
    one = layout.sample_bytes
    splits, count = {}, 0
    for name, _, first, end in spans:
        splits[name] = (count, count + end - first)
        count += end - first
    with files.new_folder(folder) as work:
        check_space(work, count * one // (2 if storage == "float16" else 1))
        writer = Store.create(
            work,
            spec=spec,
            card=_card(spans),
            count=count,
            splits=splits,
            part_size=max(1, min(PART_SAMPLES, PART_BYTES // one)),
            storage=storage,
        )
        for part in range(writer.parts):
            indices = writer.indices(part)
            samples = []
            for name, opened, first, _ in spans:
                begin, end = max(indices.start, splits[name][0]), min(indices.stop, splits[name][1])
                if begin < end:
                    shift = first - splits[name][0]
                    samples += opened.samples(begin + shift, end + shift)
            writer.write(part, samples)
            if progress is not None:
                progress(indices.stop, count)
        writer.finalize()
    return Store.open(folder)


def _card(spans: list[Span]) -> Card:
    """The card of the file, with where the samples come from and what was assumed."""
    card, layout = spans[0][1].card, spans[0][1].layout
    lines = [
        f"Imported from {layout.format}.",
        *(
            f"The {name} split is samples {first} to {end - 1} of the {opened.layout.samples} in {opened.path.name}."
            for name, opened, first, end in spans
        ),
        *(_fingerprint(opened) for opened in {opened.path: opened for _, opened, _, _ in spans}.values()),
        *layout.assumptions,
        *layout.warnings,
    ]
    return Card(card.title, " ".join(lines), inputs=card.inputs, queries=card.queries, targets=card.targets)


def _fingerprint(opened: Opened) -> str:
    """The checksum of each file, or of the lines `checksum  name` where there are many."""
    sources = opened.sources or (opened.path,)
    if len(sources) < 4:
        return " ".join(f"SHA-256 of {source.name}: {files.sha256(source)}." for source in sources)
    lines = "".join(f"{files.sha256(source)}  {source.name}\n" for source in sources)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return f"SHA-256 of what sha256sum prints of the {len(sources)} files of {opened.path.name}: {digest}."


@contextmanager
def _opened(path: Path, choices: Choices) -> Iterator[Opened]:
    """The file, understood; told apart by its first bytes, and where these say nothing by its name."""
    check_regular(path)
    kind, in_times = choices.kind, choices.in_times
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of file", kind, KINDS)
    opening = _scattered(path, choices)
    if opening is None:
        if not path.is_file():
            raise InputError(f"a file at {path}", _absence(path), "Check the path")
        choices.refuse(path, "stride", "stored", "inputs", "targets", "coords")
        try:
            with path.open("rb") as file:
                head = file.read(520)
        except OSError as error:
            raise InputError(f"a readable file at {path}", str(error.strerror), "Check the path") from error
        matlab = matlab_version(head)
        if matlab in (1, 2) or (head.startswith(_HDF5) and path.suffix == ".mat"):
            opening = open_matlab(path, kind, in_times)
        elif head.startswith(b"\x93NUMPY"):
            opening = open_numpy(path, kind, in_times)
        elif head.startswith(_HDF5):
            opening = _open_hdf5(path, kind, in_times)
        elif path.suffix in (".pt", ".pth"):
            opening = open_torch(path, kind, in_times)
        else:
            raise InputError(
                f"a MATLAB (5 to 7.3), .npy, .pt or HDF5 file at {path}", _beginning(head), "Check the file"
            )
    with ExitStack() as stack:
        with reading(path, "samples"):
            opened = stack.enter_context(opening)
        yield opened


def _scattered(path: Path, choices: Choices) -> AbstractContextManager[Opened] | None:
    """What opens files of scattered points, which are told by their names; None for others."""
    if path.is_dir():
        if mesh_files(path):
            return open_meshes(path, choices)
        if any(path.glob("*.npz")) and (are_trajectories(path) or not are_meant(path, choices)):
            return open_trajectories(path, choices)
        return open_arrays(path, choices) if array_files(path) else None
    suffix = path.suffix.lower()
    if not path.is_file():
        return None
    if suffix == ".npz" or (suffix in named_arrays.SUFFIXES and are_meant(path, choices)):
        return open_arrays(path, choices)
    if suffix in PICKLES:
        return open_pickle(path, choices)
    if suffix == ".tfrecord":
        return open_tfrecord(path, choices)
    return open_meshes(path, choices) if suffix in meshfiles.SUFFIXES else None


def _absence(path: Path) -> str:
    if not path.is_dir():
        return "nothing there"
    records = sorted(p.name for p in path.glob("*.tfrecord"))
    return f"a folder; name one of its files: {', '.join(records[:4])}" if records else "a folder"


def _beginning(head: bytes) -> str:
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, which only names the real file"
    return f"one that begins with {head[:12]!r}"


@contextmanager
def _open_hdf5(path: Path, kind: str | None, in_times: int | None) -> Iterator[Opened]:
    with open_hdf5(path) as file:
        found = "the-well" if is_well(file) else "pdebench" if is_pdebench(file) else None
        if found is None or kind not in (None, found):
            raise InputError(
                f"the names of {'PDEBench or The Well' if kind is None else kind} in {path}",
                names_in(file),
                "They are `tensor` and `x-coordinate`, `0000/data` and so on, or `t0_fields` and `dimensions`",
            )
        yield (open_well if found == "the-well" else open_pdebench)(path, file, in_times)
