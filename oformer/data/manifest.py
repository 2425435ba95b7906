"""The content of `dataset.json`, and the README of a dataset."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oformer import __version__, config, files
from oformer.data.part_file import Storage
from oformer.errors import InputError
from oformer.fields import Card, Spec
from oformer.statistics import Statistics

FORMAT = "oformer dataset"
VERSION = 1
SIDECAR = "dataset.json"

Splits = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Part:
    """A file of consecutive samples."""

    file: str
    first: int
    count: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shared:
    """The file of what samples have in common."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of `dataset.json`, besides the format and the problem's own settings."""

    complete: bool
    card: Card
    seed: int | None
    count: int
    part_size: int
    storage: Storage
    spec: Spec
    splits: Splits
    statistics: Statistics | None = None  # of the training split
    rounding: dict[str, float] | None = None  # largest relative L2 error of a sample by storing it in float16
    redrawn: tuple[tuple[int, int], ...] = ()  # (sample, attempt) where the first draws did not solve
    shared: Shared | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 1 or self.part_size < 1:
            raise InputError("at least one sample, and one per part", f"{self.count} and {self.part_size}")
        _check_splits(self.splits, self.count)
        _check_statistics(self.statistics, self.spec)

    def indices(self, part: int) -> range:
        """The samples of a part."""
        return range(part * self.part_size, min((part + 1) * self.part_size, self.count))

    def place(self, part: int) -> tuple[str, int, int]:
        """The file of a part, its first sample, and how many it has."""
        indices = self.indices(part)
        return part_path(Path(), part).as_posix(), indices.start, len(indices)

    @property
    def files(self) -> list["Part | Shared"]:
        """All files with arrays, in the order of the checksum."""
        return [*([self.shared] if self.shared else []), *self.parts]

    @property
    def part_count(self) -> int:
        """The number of parts of the whole dataset."""
        return -(-self.count // self.part_size)

    @property
    def least_bytes(self) -> int:
        """The fewest bytes of a sample in its part: its offset, its targets on the grid, and one input point."""
        spec, size = self.spec, np.dtype(self.storage).itemsize
        targets = math.prod(spec.grid or ()) * spec.out_times * spec.out_channels
        return 8 + size * (targets + spec.in_times * spec.in_channels)


def part_path(folder: Path, number: int) -> Path:
    """The file of a part of the dataset in a folder."""
    return folder / f"parts/part-{number:05d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest, problem: dict[str, Any] | None) -> None:
    """Write `dataset.json`; without a time or a place, so that equal datasets have equal files."""
    content = {k: v for k, v in config.to_json(manifest).items() if k != "type"}
    head = {"format": FORMAT, "version": VERSION, "written_by": f"oformer {__version__}"}
    files.write_json(folder / SIDECAR, {**head, "problem": problem, **content})


def read_manifest(folder: Path) -> tuple[Manifest, dict[str, Any] | None]:
    """Read `dataset.json`: the manifest, and the settings of the problem."""
    path = folder / SIDECAR
    content = files.read_versioned(path, FORMAT, VERSION)
    head = ("format", "version", "written_by", "problem")
    rest = {key: value for key, value in content.items() if key not in head}
    problem = content.get("problem")
    if problem is not None and not isinstance(problem, dict):
        raise InputError(f"settings of a problem or null in {path}", repr(problem)[:80], "The file is damaged")
    return config.from_json(Manifest, rest, str(path)), problem


def readme(manifest: Manifest, problem: dict[str, Any] | None) -> str:
    """The dataset's card for people."""
    card, spec, stats = manifest.card, manifest.spec, manifest.statistics
    points = "a grid of " + "×".join(map(str, spec.grid)) if spec.grid else "scattered points"
    roles = [
        ("input", spec.in_times, spec.in_channels, card.inputs, stats and stats.input),
        ("query", 1, spec.query_channels, card.queries, stats and stats.query),
        ("target", spec.out_times, spec.out_channels, card.targets, stats and stats.target),
    ]
    rows = [
        f"| {role} | {times} | {names[c] if c < len(names) else c} |"
        + (f" {s.mean[c]:.4g} | {s.std[c]:.4g} | {s.min[c]:.4g} | {s.max[c]:.4g} |" if s else " | | | |")
        for role, times, channels, names, s in roles
        for c in range(channels)
    ]
    # What is said only where there is something to say.
    remarks = []
    if manifest.rounding:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in manifest.rounding.items())
        remarks += ["", f"Stored in float16; largest relative error of a sample by that: {errors}."]
    if manifest.redrawn:
        remarks += ["", f"{len(manifest.redrawn)} samples were drawn anew, as the solver diverged at first."]
    splits = ", ".join(f"{name}: {end - first} (from {first})" for name, (first, end) in manifest.splits.items())
    lines = [
        f"# {card.title}",
        *(["", card.text] if card.text else []),
        "",
        f"{manifest.count} samples in {spec.dim}-D on {points}. Splits: {splits}.",
        "",
        "| | frames | channel | mean | std | min | max |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Statistics are those of the training split, in physical units.",
        "",
        "## How it was made",
        "",
        f"Seed {manifest.seed}, with the settings" if problem else "From samples that were given.",
        *(["", "```json", json.dumps(problem, indent=2), "```"] if problem else []),
        *remarks,
        "",
        "## How to read it",
        "",
        "With `oformer`: `PointDataset.open(folder)`. Without: each file in `parts/` is safetensors. Rows",
        "`input.offsets[i]` to `input.offsets[i + 1]` of an `input.` array belong to sample i of a part.",
        "Likewise with `query.offsets` for `query.` arrays and `target`; without it, the input's hold.",
        "Values are (points, times, channels). An array that a part lacks is in `shared.safetensors`; a",
        "`query.` array that is in neither is the `input.` array of the same name.",
        "",
        "`dataset.json` holds the SHA-256 of every file; `Store.open(folder).verify()` recomputes them.",
    ]
    return "\n".join(lines) + "\n"


def refuse_other(folder: Path, old: tuple[Manifest, Any], new: tuple[Manifest, Any]) -> None:
    """Refuse to mix two datasets in one folder, and say in what they differ."""
    settings = ("seed", "count", "part_size", "storage", "spec", "splits")
    there, asked = (
        {"problem": problem, **{name: config.to_json(getattr(m, name)) for name in settings}}
        for m, problem in (old, new)
    )
    # Through JSON, so that what was read back compares equal to what is asked (tuples are lists there).
    different = list(config.differences(there, json.loads(json.dumps(asked))))
    if different:
        raise InputError(
            f"the settings that the dataset in {folder} was begun with",
            "; ".join(f"{where} {b!r} instead of {a!r}" for where, a, b in different),
            "Use them, or another folder",
        )


def _check_statistics(statistics: Statistics | None, spec: Spec) -> None:
    """Refuse statistics of other channels than the spec has."""
    channels = {"input": spec.in_channels, "query": spec.query_channels, "target": spec.out_channels}
    for role, count in channels.items() if statistics is not None else ():
        for name, values in dataclasses.asdict(getattr(statistics, role)).items():
            if len(values) != count:
                raise InputError(f"{count} numbers in `statistics.{role}.{name}` of a dataset", f"{len(values)}")


def _check_splits(splits: Splits, count: int) -> None:
    """Refuse splits that are empty, reach past the samples, or have samples in common."""
    end = 0
    for name, (first, last) in sorted(splits.items(), key=lambda item: item[1]):
        if not 0 <= first < last <= count:
            raise InputError(f"split `{name}` within the {count} samples", f"[{first}, {last})")
        if first < end:
            raise InputError("splits without common samples", f"`{name}` from {first}, before {end}")
        end = last
