"""A foreign file to a dataset: recognized by its first bytes and its names, read part by part, written whole."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from oformer import files
from oformer.data.generate import Progress, check_space, first_and_last
from oformer.data.importers.common import Layout, Opened, reading
from oformer.data.importers.containers import open_matlab_5, open_matlab_73, open_numpy, open_torch
from oformer.data.importers.hdf5 import names_in, open_hdf5
from oformer.data.importers.pdebench import is_pdebench, open_pdebench
from oformer.data.importers.well import is_well, open_well
from oformer.data.layout import Storage
from oformer.data.store import Store
from oformer.errors import InputError, unknown_name
from oformer.fields import Card

KINDS = ("burgers", "darcy", "navier-stokes", "pdebench", "the-well")
SUFFIXES = (".mat", ".npy", ".pt", ".pth", ".h5", ".hdf5")
PART_BYTES = 2**27  # of values in float32: what an import holds in memory, a few times over
PART_SAMPLES = 1024

_HDF5 = b"\x89HDF\r\n\x1a\n"


def recognize(path: Path | str, *, kind: str | None = None, in_times: int | None = None) -> Layout:
    """What a foreign file is, without importing it.

    Args:
        path: a MATLAB, numpy, torch, PDEBench or The Well file.
        kind: one of `KINDS`, instead of the guess.
        in_times: how many frames of a trajectory are input; by default ten, or one where there are not more.
    """
    with _opened(Path(path), kind, in_times) as opened:
        return opened.layout


def import_file(
    path: Path | str,
    folder: Path | str,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
    in_times: int | None = None,
    storage: Storage = "float32",
    kind: str | None = None,
    test_file: Path | str | None = None,
    progress: Progress | None = None,
) -> Store:
    """Write a foreign file as a dataset of ours; it appears complete or not at all.

    Args:
        path: a MATLAB, numpy, torch, PDEBench or The Well file.
        folder: where to; nothing may be there yet.
        n_train: the first so many samples are the training split.
        n_test: the last so many are the test split; by default what is left, and a tenth if neither is given.
            Where both are given, what lies between is left out.
        in_times: how many frames of a trajectory are input; by default ten, or one where there are not more.
        storage: how values are kept.
        kind: one of `KINDS`, instead of the guess.
        test_file: take the test split, by default all of it, from another file of the same layout.
        progress: called with the samples done and wanted.
    """
    path, folder = Path(path), Path(folder)
    if folder.exists():
        raise InputError(f"no file or folder yet at {folder}", "one", "Choose another name")
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(path, kind, in_times))
        if test_file is None:
            spans = _spans(opened, n_train, n_test)
        else:
            other = stack.enter_context(_opened(Path(test_file), kind, in_times))
            spans = _two_files(opened, other, n_train, n_test)
        return _write(spans, folder, storage, progress)


Span = tuple[str, Opened, int, int]  # a split, and the samples of a file that it takes


def _spans(opened: Opened, n_train: int | None, n_test: int | None) -> list[Span]:
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


def _write(spans: list[Span], folder: Path, storage: Storage, progress: Progress | None) -> Store:
    layout = spans[0][1].layout
    spec, place = layout.spec, spans[0][1].place()
    one = 4 * layout.points * (spec.in_times * spec.in_channels + spec.out_times * spec.out_channels)
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
                    samples += opened.samples(begin + shift, end + shift, place)
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
        *(f"SHA-256 of {p.name}: {files.sha256(p)}." for p in dict.fromkeys(opened.path for _, opened, _, _ in spans)),
        *layout.assumptions,
        *layout.warnings,
    ]
    return Card(card.title, " ".join(lines), inputs=card.inputs, targets=card.targets)


@contextmanager
def _opened(path: Path, kind: str | None, in_times: int | None) -> Iterator[Opened]:
    """The file, understood; told apart by its first bytes, not by its name."""
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of file", kind, KINDS)
    if not path.is_file():
        raise InputError(f"a file at {path}", "a folder" if path.is_dir() else "nothing there", "Check the path")
    try:
        with path.open("rb") as file:
            head = file.read(520)
    except OSError as error:
        raise InputError(f"a readable file at {path}", str(error.strerror), "Check the path") from error
    matlab = _matlab_version(head)
    if matlab == 2 or (head.startswith(_HDF5) and path.suffix == ".mat"):
        opening = open_matlab_73(path, kind, in_times)
    elif matlab == 1:
        opening = open_matlab_5(path, kind, in_times)
    elif head.startswith(b"\x93NUMPY"):
        opening = open_numpy(path, kind, in_times)
    elif head.startswith(_HDF5):
        opening = _open_hdf5(path, kind, in_times)
    elif path.suffix in (".pt", ".pth"):
        opening = open_torch(path, kind, in_times)
    else:
        raise InputError(f"a MATLAB (5 to 7.3), .npy, .pt or HDF5 file at {path}", _beginning(head), "Check the file")
    with ExitStack() as stack:
        with reading(path, "a MATLAB, .npy, .pt or HDF5 file"):
            opened = stack.enter_context(opening)
        yield opened


def _matlab_version(head: bytes) -> int | None:
    """The major version that a MATLAB file says it has: 1 for 5 to 7.2, 2 for 7.3; None if it is none."""
    if len(head) < 128 or head[126:128] not in (b"IM", b"MI"):
        return None
    return head[125] if head[126:128] == b"IM" else head[124]


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
