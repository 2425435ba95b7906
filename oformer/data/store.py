"""One folder per dataset: memory-mapped arrays in safetensors files, with a JSON file that explains them.

Parts are written whole or not at all, by any process in any order, and the same samples give the same bytes.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from oformer import files
from oformer.checks import check_sample
from oformer.data.manifest import (
    SIDECAR,
    Manifest,
    Part,
    Shared,
    Splits,
    part_path,
    read_manifest,
    readme,
    refuse_other,
    write_manifest,
)
from oformer.data.part_file import (
    AGAIN,
    Storage,
    check_part,
    check_shared,
    largest_rounding,
    pack,
    shared_arrays,
    tensor_of,
    unpack,
)
from oformer.errors import InputError
from oformer.fields import Card, Sample, Spec, described
from oformer.statistics import Statistics, measure
from oformer.terminal import Described

SHARED = "shared.safetensors"
ABANDONED = 600.0  # a file untouched for so many seconds is not being written by another process


class Store(Described):
    """A finished dataset on disk: a sequence of samples, mapped lazily.

    Safe to share between threads and to pickle into other processes. Arrays that all samples share are one
    tensor in all of them; treat samples as read-only.
    """

    def __init__(self, folder: Path, manifest: Manifest, problem_settings: dict[str, Any] | None):
        """Use `Store.open`."""
        # Absolute, since parts are opened later, and maybe from another working directory.
        self.folder, self.manifest, self.problem_settings = folder.absolute(), manifest, problem_settings
        self._parts: dict[int, dict[str, np.ndarray]] = {}
        self._shared: tuple[dict[str, np.ndarray], dict[str, Tensor]] | None = None  # as stored, as samples have them
        self._checked: set[int] = set()  # samples that were read before

    @property
    def checksum(self) -> str:
        """SHA-256 over those of its files, in their order."""
        return hashlib.sha256("".join(record.sha256 for record in self.manifest.files).encode()).hexdigest()

    @staticmethod
    def create(
        folder: Path | str,
        *,
        spec: Spec,
        card: Card,
        count: int,
        splits: Splits | None = None,
        part_size: int = 64,
        storage: Storage = "float32",
        problem: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> "Writer":
        """Begin a dataset, or continue one that was begun with the same settings.

        Args:
            folder: new, empty, or begun before.
            spec: the shapes of all samples.
            card: its story for people.
            count: samples in all.
            splits: [first, end) of each split; disjoint. By default all samples are for training.
            part_size: samples per file.
            storage: how values are kept.
            problem: its settings as `config.to_json` writes them.
            seed: where the randomness came from.
        """
        if storage not in ("float32", "float16"):
            raise InputError("`storage` float32 or float16", f"`{storage}`")
        splits = {"train": (0, count)} if splits is None else {k: (v[0], v[1]) for k, v in splits.items()}
        manifest = Manifest(False, card, seed, count, part_size, storage, spec, splits)
        folder = Path(folder)
        # In this order: another process may begin the dataset now, and its first file is the sidecar.
        occupied = folder.exists() and (not folder.is_dir() or any(p.name[0] != "." for p in files.listed(folder)))
        if (folder / SIDECAR).exists():
            old, old_problem = read_manifest(folder)
            refuse_other(folder, (old, old_problem), (manifest, problem))
            return Writer(folder, old, problem)
        if occupied:
            raise InputError(
                f"a new or empty folder at {folder}", "something that is no dataset", "Choose another folder"
            )
        write_manifest(folder, manifest, problem)
        return Writer(folder, manifest, problem)

    @classmethod
    def open(cls, folder: Path | str) -> "Store":
        """Open a complete dataset; costs one look at each file's size."""
        folder = Path(folder)
        if not folder.is_dir():
            got = "a file" if folder.exists() else "nothing there"
            raise InputError(f"a dataset folder at {folder}", got, "Check the path")
        if not (folder / SIDECAR).exists():
            raise InputError(f"a dataset in {folder}", f"a folder without {SIDECAR}", "Check the path")
        manifest, problem = read_manifest(folder)
        if not manifest.complete:
            missing = manifest.part_count - len(Writer(folder, manifest, problem).written())
            raise InputError(
                f"a complete dataset in {folder}",
                f"one with {missing} of {manifest.part_count} parts missing"
                if missing
                else "one whose parts are all there but not yet checked",
                "Run its generation again with the same settings: it continues where it stopped",
            )
        _check_sizes(folder, manifest)
        return cls(folder, manifest, problem)

    @property
    def spec(self) -> Spec:
        """The shapes of all samples."""
        return self.manifest.spec

    @property
    def card(self) -> Card:
        """Names and story."""
        return self.manifest.card

    @property
    def splits(self) -> Splits:
        """The samples [first, end) of each split."""
        return dict(self.manifest.splits)

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of the training split; None where there is no such split."""
        return self.manifest.statistics

    def verify(self) -> None:
        """Recompute all checksums; a file that is not as it was written is an error."""
        for record in self.manifest.files:
            path = self.folder / record.file
            if files.sha256(path) != record.sha256:
                raise InputError(f"checksum {record.sha256[:12]}… of {path}", "another: it was changed", AGAIN)

    def sizes(self) -> Int[np.ndarray, "samples 2"]:
        """The numbers of input points and of queries of each sample, from the offsets alone."""
        counts = []
        for number in range(self.manifest.part_count):
            part = self._part(number)
            offsets = part["input.offsets"], part.get("query.offsets", part["input.offsets"])
            counts.append(np.stack([np.diff(o) for o in offsets], -1))
        return np.concatenate(counts)

    def __len__(self) -> int:
        return self.manifest.count

    def __getitem__(self, index: int) -> Sample:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        number, row = divmod(index, self.manifest.part_size)
        sample = unpack(self._part(number), row, self._common()[1])
        if index not in self._checked:
            check_sample(sample, self.spec, f"sample {index} of {part_path(self.folder, number)}")
            self._checked.add(index)
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        # Maps belong to a process; another one makes its own.
        return {**self.__dict__, "_parts": {}, "_shared": None, "_checked": set()}

    def _facts(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "samples": len(self),
            **described(self.card, self.spec),
            "splits": self.splits,
        }

    def _part(self, number: int) -> dict[str, np.ndarray]:
        part = self._parts.get(number)
        if part is None:
            manifest, path = self.manifest, part_path(self.folder, number)
            part = files.map_arrays(path)
            first, shared = part if number == 0 else self._part(0), self._common()[0]
            check_part(path, part, shared, first, len(manifest.indices(number)), manifest.spec, manifest.storage)
            self._parts[number] = part
        return part

    def _common(self) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
        if self._shared is None:
            path = self.folder / SHARED
            arrays = files.map_arrays(path)
            check_shared(path, arrays, self.manifest.spec, self.manifest.storage)
            self._shared = arrays, {name: tensor_of(name, array) for name, array in arrays.items()}
        return self._shared


class Writer:
    """Writes the parts of a dataset, in any order, from any number of processes."""

    def __init__(self, folder: Path, manifest: Manifest, problem: dict[str, Any] | None):
        """Use `Store.create`."""
        self.folder, self.manifest, self._problem = folder, manifest, problem

    @property
    def parts(self) -> int:
        """The number of parts of the whole dataset."""
        return self.manifest.part_count

    @property
    def ready(self) -> bool:
        """Whether what samples have in common is written, so that any part may be."""
        return _readable(self.folder / SHARED)

    def indices(self, part: int) -> range:
        """The samples of a part."""
        return self.manifest.indices(part)

    def missing(self) -> list[int]:
        """The parts that are not there or cut short."""
        written = self.written()
        return [number for number in range(self.parts) if number not in written]

    def written(self) -> set[int]:
        """The parts that are there and not cut short; costs a look at each file, whatever the number of parts."""
        found = (path.stem.removeprefix("part-") for path in part_path(self.folder, 0).parent.glob("part-*"))
        numbers = {int(number) for number in found if number.isdecimal() and int(number) < self.parts}
        return {number for number in numbers if _readable(part_path(self.folder, number))}

    def share(self, first: Sample) -> None:
        """Write what parts may leave out, being that of sample 0."""
        if not self.ready:
            check_sample(first, self.manifest.spec, "sample 0")
            files.save_arrays(self.folder / SHARED, shared_arrays(first, self.manifest.storage))

    def write(self, part: int, samples: Sequence[Sample], redrawn: Sequence[tuple[int, int]] = ()) -> None:
        """Write a part whole or not at all.

        Args:
            part: its number.
            samples: in the order of `indices(part)`.
            redrawn: (sample, attempt) of those that are not their first draw.
        """
        indices = self.indices(part)
        if len(samples) != len(indices):
            raise InputError(f"{len(indices)} samples in part {part}", str(len(samples)))
        for index, sample in zip(indices, samples, strict=True):
            check_sample(sample, self.manifest.spec, f"sample {index}")
        if part == 0:
            self.share(samples[0])
        if not self.ready:
            raise InputError("part 0, or `share` with its first sample, before other parts", f"part {part}")
        packed = pack(samples, files.map_arrays(self.folder / SHARED), self.manifest.storage, indices.start)
        packed["redrawn"] = np.array(redrawn, np.int64).reshape(-1, 2)
        files.save_arrays(part_path(self.folder, part), packed)

    def finalize(self) -> Store:
        """Check all parts, measure the training split, record checksums, and declare the dataset complete.

        Several processes may do this at once: they write the same bytes.
        """
        missing = self.missing()
        if missing:
            raise InputError(f"all {self.parts} parts in {self.folder}", f"{len(missing)} missing", AGAIN)
        store = Store(self.folder, self.manifest, self._problem)
        contents = [store._part(number) for number in range(self.parts)]
        train = range(*self.manifest.splits.get("train", (0, 0)))
        path = self.folder / SHARED
        manifest = dataclasses.replace(
            self.manifest,
            complete=True,
            statistics=measure(store[index] for index in train) if train else None,
            rounding=largest_rounding(contents),
            redrawn=tuple((int(i), int(a)) for part in contents for i, a in part["redrawn"]),
            shared=Shared(SHARED, path.stat().st_size, files.sha256(path)),
            parts=tuple(
                Part(*self.manifest.place(number), file.stat().st_size, files.sha256(file))
                for number in range(self.parts)
                for file in [part_path(self.folder, number)]
            ),
        )
        files.write_text(self.folder / "README.md", readme(manifest, self._problem))
        write_manifest(self.folder, manifest, self._problem)
        return Store.open(self.folder)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse files that are not as long as they were, and numbers of samples or values that would not fit into them."""
    sidecar = folder / SIDECAR
    if len(manifest.parts) != manifest.part_count or manifest.shared is None:
        raise InputError(f"{manifest.part_count} parts listed in {sidecar}", f"{len(manifest.parts)}", AGAIN)
    if manifest.shared.file != SHARED:
        raise InputError(f"`shared.file` {SHARED} in {sidecar}", repr(manifest.shared.file), AGAIN)
    for number, record in enumerate(manifest.parts):
        there, asked = (record.file, record.first, record.count), manifest.place(number)
        if there != asked:
            raise InputError(f"part {number} in {sidecar} with file, first sample and count {asked}", f"{there}", AGAIN)
        if record.bytes < record.count * manifest.least_bytes:
            raise InputError(
                f"at least {manifest.least_bytes} bytes a sample in the parts of {sidecar}, by its spec",
                f"{record.bytes} for {record.count} in {record.file}",
                AGAIN,
            )
    for record in manifest.files:
        path = folder / record.file
        size = path.stat().st_size if path.exists() else None
        if size != record.bytes:
            raise InputError(f"{record.bytes} bytes in {path}", "no file" if size is None else str(size), AGAIN)


def _readable(path: Path) -> bool:
    try:
        files.map_arrays(path)
    except InputError:
        return False
    return True
