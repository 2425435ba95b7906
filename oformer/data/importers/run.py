"""A foreign file to a dataset: recognized by its first bytes and its names, read part by part, written whole."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from oformer import files
from oformer.data.dataset import PointDataset
from oformer.data.generate import Progress, check_space, first_and_last
from oformer.data.importers.common import Choices, Layout, Opened, files_in, reading
from oformer.data.importers.formats import FORMATS, SUFFIXES, Format
from oformer.data.importers.meshfiles import how_to_choose
from oformer.data.part_file import Storage
from oformer.data.store import Store
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Spec

PART_BYTES = 2**27  # of values in float32: what an import holds in memory, a few times over
PART_SAMPLES = 1024


def is_importable_folder(folder: Path) -> bool:
    """Whether the files in a folder are samples that can be imported together."""
    return any(format.is_folder(folder) for format in FORMATS)


def recognize(path: Path | str, **choices: Any) -> Layout:
    """The layout of a foreign file, without importing it.

    Args:
        path: a MATLAB, numpy, torch, PDEBench, The Well, pickle, TFRecord or mesh file, a file of named arrays, or a
            folder of .npz trajectories, of mesh files or of files of arrays.
        choices: the fields of `Choices`, by name.
    """
    with _opened(Path(path), Choices(**choices)) as opened:
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
    storage: Storage = "float32",
    test_file: Path | str | None = None,
    progress: Progress | None = None,
    **choices: Any,
) -> Store:
    """Write a foreign file as a dataset of ours; it appears complete or not at all.

    Args:
        path: what `recognize` takes.
        folder: where to; nothing may be there yet.
        n_train: the number of training samples, from the first.
        n_test: the number of test samples, up to the last; by default the rest, and a tenth if neither is given.
            Where both are given, the samples between them are left out.
        storage: the type in which values are stored.
        test_file: take the test split, by default all of it, from another file or folder of the same layout.
        progress: called with the samples done and wanted.
        choices: the fields of `Choices`, by name.
    """
    path, folder = Path(path), Path(folder)
    options = Choices(**choices)
    if folder.exists():
        raise InputError(f"no file or folder yet at {folder}", "one", "Choose another name")
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(path, options))
        _spec(opened)  # says how to choose, where that is not done
        if test_file is None:
            spans = _spans(opened, n_train, n_test)
        else:
            other = stack.enter_context(_opened(Path(test_file), options))
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
            "points elsewhere" if other.layout.spec == opened.layout.spec else f"{other.layout.spec} there",
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
    layout = spans[0][1].layout
    card = layout.card
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
    """The file, opened by the format that claims it."""
    format = _format(path, choices)
    with ExitStack() as stack:
        with reading(path, "samples"):
            opened = stack.enter_context(format.open(path, choices))
        yield opened


def _format(path: Path, choices: Choices) -> Format:
    """The format of a file or folder; options that do not apply to it are refused."""
    kind, kinds = choices.kind, {kind for format in FORMATS for kind in format.kinds}
    if kind is not None and kind not in kinds:
        raise unknown_name("kind of file", kind, kinds)
    head = b""
    if not path.is_dir():
        with files.readable(path) as file:
            head = file.read(520)
    for format in FORMATS:
        if format.claims(path, head, choices):
            if kind is not None and kind not in format.kinds:
                wanted = f"{' or '.join(format.kinds)} in the {format.name} {path}"
                raise InputError(wanted, f"`{kind}`, which is never written so", "Leave `kind`")
            unused = ("stride", "stored", "inputs", "targets", "coords")
            choices.refuse(path, *(name for name in unused if name not in format.choices))
            return format
    if path.is_dir():
        raise InputError(f"a file at {path}", _folder(path), "Check the path")
    known = ", ".join(SUFFIXES)
    raise InputError(f"a file of a known format ({known}) at {path}", _beginning(head), "Check the file")


def _folder(path: Path) -> str:
    """What a folder that is no dataset holds: files that are imported alone, as far as there are some."""
    alone = [suffix for format in FORMATS if not format.folders for suffix in format.suffixes]
    found = ", ".join(file.name for file in files_in(path, alone)[:4])
    return f"a folder; name one of its files: {found}" if found else "a folder"


def _beginning(head: bytes) -> str:
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, which only names the real file"
    return f"one that begins with {head[:12]!r}"
