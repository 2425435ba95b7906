"""Descriptions of files and folders: a dataset, a run, a checkpoint, arrays, or a published file to import."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from oformer.checkpoint import CONFIG, checkpoints, load_checkpoint, parameter_count, percent
from oformer.data.importers import SUFFIXES, is_importable_folder, recognize
from oformer.data.store import Store
from oformer.errors import InputError
from oformer.files import check_regular, load_npz, map_arrays
from oformer.training.journal import JOURNAL, read_journal


def describe(path: Path, verify: bool = False) -> str:
    """Describe a file or folder in a few lines.

    Args:
        path: a file or folder.
        verify: recompute the checksums of a dataset.
    """
    if not path.exists():
        raise InputError(f"a file or folder at {path}", "nothing there", "Check the path")
    check_regular(path)
    if path.is_dir():
        if (path / "dataset.json").exists():
            return _dataset(Store.open(path), verify)
        if (path / CONFIG).exists():
            return _checkpoint(path)
        if (path / "recipe.json").exists():
            return _run(path)
        if is_importable_folder(path):
            return str(recognize(path))
        raise InputError("a dataset, a run or a checkpoint", f"{path}, a folder of none of them", "Check the path")
    if path.suffix == ".safetensors":
        return _arrays(path, map_arrays(path))
    if path.suffix in (".npz", ".npy") and not _is_understood(path):
        return _arrays(path, load_npz(path))
    if path.suffix in SUFFIXES:
        return str(recognize(path))
    raise InputError(
        f"a folder of ours, or a file that ends in .safetensors, {', '.join(SUFFIXES)}",
        str(path),
        "Other formats are not read yet",
    )


def _is_understood(path: Path) -> bool:
    """Whether arrays can be imported: a .npy with the axes of a published file, or a .npz with known names."""
    try:
        return recognize(path).spec is not None
    except InputError:
        return False


def _dataset(store: Store, verify: bool) -> str:
    spec, card = store.spec, store.card
    sizes = store.sizes()
    points = f"{sizes[:, 0].min()}" + (f" to {sizes[:, 0].max()}" if np.ptp(sizes[:, 0]) else "")
    queries = f"{sizes[:, 1].min()}" + (f" to {sizes[:, 1].max()}" if np.ptp(sizes[:, 1]) else "")
    splits = ", ".join(f"{name} {first}..{end - 1}" for name, (first, end) in store.splits.items())
    lines = [
        f"Dataset: {card.title}",
        card.text,
        f"samples   {len(store)} ({splits})",
        f"input     {points} points in {spec.dim}-D, {spec.in_times} frame(s) of {spec.in_channels} channel(s)"
        + (f": {', '.join(card.inputs)}" if card.inputs else ""),
        f"target    {queries} points, {spec.out_times} frame(s) of {spec.out_channels} channel(s)"
        + (f": {', '.join(card.targets)}" if card.targets else ""),
        f"grid      {' x '.join(map(str, spec.grid)) if spec.grid else 'none, scattered points'}"
        + (", periodic" if spec.periods else ""),
    ]
    if store.statistics is not None:
        for name in ("input", "target"):
            s = getattr(store.statistics, name)
            rows = zip(s.mean, s.std, s.min, s.max, strict=True)
            lines += [f"{name:9} mean {m:.4g}, std {d:.4g}, from {a:.4g} to {b:.4g}" for m, d, a, b in rows]
    if verify:
        store.verify()
        lines.append("checksums all as written")
    return "\n".join(line for line in lines if line)


def _checkpoint(path: Path) -> str:
    checkpoint = load_checkpoint(path)
    spec, scores = checkpoint.operator.spec, checkpoint.scores
    lines = [
        f"Checkpoint: {checkpoint.name}, step {checkpoint.step:,}",
        f"model     {type(checkpoint.operator.model).__name__}, {parameter_count(checkpoint.operator):,} parameters",
        f"input     {spec.in_times} frame(s) of {spec.in_channels} channel(s) in {spec.dim}-D",
        f"output    {spec.out_times} frame(s) of {spec.out_channels} channel(s)",
        f"queries   {'independent' if checkpoint.operator.model.queries_independent else 'influence each other'}",
    ]
    if "error" in scores:
        samples = f"{scores.get('count')} {scores.get('split', 'test')} samples"
        lines.append(f"error     {percent(scores['error'])} (relative L2, mean over {samples})")
    return "\n".join(lines)


def _run(path: Path) -> str:
    records, found = read_journal(path), checkpoints(path)
    last: dict[str, Any] = records[-1] if records else {}
    state = (
        f"stopped at step {last['step']:,} ({last['reason']})" if last.get("kind") == "stop" else "running or cut off"
    )
    lines = [f"Run: {path.name}, {state}", f"journal   {len(records)} records in {path / JOURNAL}"]
    if found:
        lines.append(_checkpoint(found[-1]))
    return "\n".join(lines)


def _arrays(path: Path, arrays: dict[str, np.ndarray]) -> str:
    lines = [f"Arrays: {path}"]
    for name, array in sorted(arrays.items()):
        about = ""
        if array.dtype.kind == "f" and array.size:
            bad = int(array.size - np.isfinite(array).sum())
            low, high = float(np.nanmin(array)), float(np.nanmax(array))
            about = f", from {low:.4g} to {high:.4g}" if math.isfinite(low) else ""
            about += f", {bad} not finite" if bad else ""
        lines.append(f"{name}  {array.dtype} {array.shape}{about}")
    return "\n".join(lines)
