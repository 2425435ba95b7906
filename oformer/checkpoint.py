"""A checkpoint is a folder anybody can read: config.json, model.safetensors, README.md, checksums.json. Never pickle.

It is rebuilt from its model configuration and its spec alone, so using one runs no training code.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oformer.config import by_name, from_json, to_json
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Spec
from oformer.files import (
    CARD,
    CONFIG,
    MODEL_CARD,
    listed,
    map_arrays,
    new_folder,
    read_json,
    read_versioned,
    sha256,
    write_bytes,
    write_json,
    write_text,
    zoo_folder,
    zoo_names,
)
from oformer.models import ModelConfig, Normalization, Operator
from oformer.statistics import Seen
from oformer.terminal import markdown_table

FORMAT = "oformer-checkpoint"
VERSION = 1
WEIGHTS = "model.safetensors"
# Both hold the SHA-256 of files beside them under the key `files`: the first one in any checkpoint, the second one in
# the zoo (`zoo/card.py`), where it lists the journals too.
CHECKSUMS = "checksums.json"
EDITED = "The file is damaged, was edited by hand, or was written by another version"


@dataclass(frozen=True)
class Checkpoint:
    """An operator and its story."""

    operator: Operator
    name: str  # of the recipe, or of the user's choosing
    step: int = 0
    # Of the last evaluation: on the test split, or on that which `split` names.
    scores: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None  # as JSON
    data: Card | None = None  # of the dataset it was trained on
    provenance: dict[str, Any] = field(default_factory=dict)  # hardware, versions, minutes, data seed

    @property
    def chunk(self) -> int | None:
        """Points at once in training, where samples are larger than memory: they are evaluated so as well."""
        return _chunk(self.recipe, None)


@dataclass(frozen=True)
class StoredConfig:
    """The content of config.json; `model` and `recipe` stay JSON until their classes are known."""

    format: str
    version: int
    name: str
    step: int
    model: dict[str, Any]
    spec: Spec
    normalization: Normalization
    scores: dict[str, Any]
    data: Card | None
    recipe: dict[str, Any] | None
    provenance: dict[str, Any]
    seen: Seen | None = None  # absent from what was written before inputs were compared with those of training


def save_checkpoint(folder: Path, checkpoint: Checkpoint, extra: dict[str, bytes] | None = None) -> None:
    """Write the folder; it appears complete or not at all.

    Args:
        folder: where; an older checkpoint there is replaced.
        checkpoint: what.
        extra: other files to put beside it (the state of a training run).
    """
    with new_folder(folder) as temporary:
        write_json(temporary / CONFIG, _config(checkpoint))
        tensors = {n: t.detach().cpu().contiguous() for n, t in checkpoint.operator.state_dict().items()}
        _refuse_not_finite(tensors, folder / WEIGHTS)
        write_bytes(temporary / WEIGHTS, save(tensors))
        for name, content in (extra or {}).items():
            write_bytes(temporary / name, content)
        checksums = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
        write_json(temporary / CHECKSUMS, {"files": checksums})
        # Written last, without a checksum: people may add to it.
        write_text(temporary / CARD, model_card(checkpoint))


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    operator = checkpoint.operator
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": checkpoint.name,
        "step": checkpoint.step,
        "model": to_json(operator.model.config),
        "spec": to_json(operator.spec),
        "normalization": to_json(operator.normalization),
        "seen": to_json(operator.seen),
        "scores": checkpoint.scores,
        "data": to_json(checkpoint.data),
        "recipe": checkpoint.recipe,
        "provenance": checkpoint.provenance,
    }


def load_checkpoint(folder: Path, device: torch.device | str = "cpu", verify: bool = True) -> Checkpoint:
    """Read a checkpoint folder.

    Args:
        folder: what `save_checkpoint` wrote, or a folder of the zoo.
        device: where the weights are put.
        verify: compare the files with their checksums first; a folder that has none is read as it is.
    """
    config_of = _existing(folder)
    if verify:
        check_files(folder, (CONFIG, WEIGHTS))
    config = read_config(folder)
    stored = map_arrays(folder / WEIGHTS)
    operator = _built(config, config_of, stored)
    tensors = _copied(stored)
    _refuse_not_finite(tensors, folder / WEIGHTS)
    operator.load_state_dict(tensors)
    operator.seen = config.seen
    _chunk(config.recipe, config_of)
    return Checkpoint(
        operator=operator.to(device).eval(),
        name=config.name,
        step=config.step,
        scores=config.scores,
        recipe=config.recipe,
        data=config.data,
        provenance=config.provenance,
    )


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Refuse files of a checkpoint that differ from their checksums; older checkpoints have none, and pass.

    Args:
        folder: the checkpoint.
        names: the files in it that are about to be read.
    """
    record = next((folder / name for name in (CHECKSUMS, MODEL_CARD) if (folder / name).is_file()), None)
    if record is None:
        return
    content = read_json(record)
    known = content.get("files") if isinstance(content, dict) else None
    if not isinstance(known, dict):
        raise InputError(f"an object `files` with the checksums of {folder} in {record}", repr(known)[:80], EDITED)
    for name in names:
        if changed_files(folder, {name: known.get(name)}):
            before = [path for path in checkpoints(run_of(folder)) if path < folder]
            raise InputError(
                f"{folder / name} as it was written, with the SHA-256 in {record.name}",
                "one that was changed" if (folder / name).is_file() else "nothing there",
                "It is damaged or was edited: copy it again"
                + (f", or take the checkpoint before, {before[-1]}" if before else "")
                + ". To use it as it is: load_checkpoint(folder, verify=False)"
                + f", or delete {CHECKSUMS}" * (record.name == CHECKSUMS),
            )


def changed_files(folder: Path, checksums: Mapping[str, str | None]) -> list[str]:
    """The files that differ from their checksums, each in a few words."""
    wrong = []
    for name, checksum in checksums.items():
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif sha256(folder / name) != checksum:
            wrong.append(f"{name} was changed")
    return wrong


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p for p in listed(run / "checkpoints") if p.name[0].isdigit() and (p / CONFIG).is_file())


def run_of(checkpoint: Path) -> Path:
    """The run that a checkpoint lies in; the folder itself where it lies in none."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def _existing(folder: Path) -> Path:
    """The path of config.json."""
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"a checkpoint folder with {CONFIG} and {WEIGHTS}",
            str(folder),
            "Give a run folder, a checkpoint or a name",
        )
    return folder / CONFIG


def read_config(folder: Path) -> StoredConfig:
    """The content of config.json, refused where it is foreign, of a newer version or incomplete."""
    path = _existing(folder)
    return from_json(StoredConfig, read_versioned(path, FORMAT, VERSION), str(path))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, copied into memory."""
    return _copied(map_arrays(path))


def _copied(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _built(config: StoredConfig, path: Path, stored: Mapping[str, np.ndarray]) -> Operator:
    """The operator that config.json describes, refused where its sizes are not those of the stored weights."""
    kind, known = config.model.get("type"), by_name(ModelConfig)
    del known[ModelConfig.__name__]  # which builds nothing
    if not isinstance(kind, str) or kind not in known:
        raise InputError(
            f"one of {', '.join(known)} at `model.type` of {path}",
            repr(kind),
            "For a model of your own, import the Python file that defines it first, or name it: --recipe FILE.py",
        )
    room = sum(array.size for array in stored.values())
    if (largest := max(_sizes(config))) > room:
        raise InputError(
            f"sizes at `model` and `spec` of {path} that fit the {room:,} numbers of {WEIGHTS}", f"{largest:,}", EDITED
        )
    model = from_json(known[kind], config.model, f"{path}.model")
    try:
        with _AtMost(room, path):
            operator = Operator(model.build(config.spec), config.normalization)
    except InputError:
        raise
    except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"a model that can be built from {path}", f"one that cannot: {error}", EDITED) from error
    described = operator.state_dict()
    for name in sorted({*described, *stored}):
        there, asked = (_size(tensors[name]) if name in tensors else "absent" for tensors in (stored, described))
        if there != asked:
            raise InputError(
                f"`{name}` in {WEIGHTS} as {path} describes it, {asked}",
                there,
                "The two files do not belong together, or one of them is damaged",
            )
    return operator


def _size(tensor: Tensor | np.ndarray) -> str:
    """The shape, and whether the numbers are whole; floats of any width are alike, since weights may be in float16."""
    floats = tensor.is_floating_point() if isinstance(tensor, Tensor) else tensor.dtype.kind == "f"
    return f"of {'floats' if floats else 'integers'} and shape {tuple(tensor.shape)}"


def _sizes(config: StoredConfig) -> Iterator[int]:
    """The integers of a configuration of which a layer or a statistic has as many numbers, at least."""
    spec, scales = config.spec, config.normalization
    yield from _whole_numbers(config.model)
    yield from (spec.in_times, spec.in_channels, spec.out_channels, spec.query_channels)
    yield from (spec.in_categories, spec.query_categories)
    if "pointwise" in (scales.input, scales.target):
        yield math.prod(spec.grid or ())


def _whole_numbers(content: Any) -> Iterator[int]:
    """All integers of a JSON content."""
    if type(content) is int:
        yield content
    elif isinstance(content, dict | list):
        for item in content.values() if isinstance(content, dict) else content:
            yield from _whole_numbers(item)


class _AtMost(TorchFunctionMode):
    """Stop building a model that needs more numbers than are stored, before it fills the memory."""

    def __init__(self, numbers: int, path: Path):
        super().__init__()
        self.left, self.path = numbers, path

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.empty:  # where layers begin: the system has not given the memory yet
            self.left -= result.numel()
            if self.left < 0:
                raise InputError(f"a model in {self.path} that has the size of {WEIGHTS}", "a larger one", EDITED)
        return result


def _chunk(recipe: dict[str, Any] | None, path: Path | None) -> int | None:
    """The setting `training.chunk` of a recipe, refused where it is none; `path` is the file it came from."""
    training = (recipe or {}).get("training")
    chunk = training.get("chunk") if isinstance(training, dict) else None
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise InputError(f"a number of points or null at `recipe.training.chunk` of {path}", repr(chunk)[:80], EDITED)
    return chunk


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; None where there is none. Waits once for each device."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            # The smallest and the largest number tell it; a NaN is both.
            finite = torch.stack(tensor.detach().aminmax()).isfinite().all()
            by_device.setdefault(tensor.device, {})[name] = finite
    answers = [(name, good) for found in by_device.values()
               for name, good in zip(found, torch.stack(list(found.values())).tolist(), strict=True)]  # fmt: skip
    return next((name for name, good in answers if not good), None)


def _refuse_not_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    if name := not_finite(tensors):
        raise InputError(
            f"finite weights for {path}",
            f"NaN or infinity in `{name}`",
            "Its training diverged: use an earlier checkpoint, or train again at a lower rate",
        )


def parameter_count(operator: Operator) -> int:
    """Trainable parameters."""
    return sum(p.numel() for p in operator.model.parameters())


def percent(score: Any, digits: int = 4) -> str:
    """A score of a checkpoint, in which null stands for a number that is not finite."""
    return f"{score:.{digits}%}" if isinstance(score, int | float) else "not a finite number"


def in_python(checkpoint: Checkpoint, place: str) -> str:
    """The call that answers, for somebody who has the arrays of `arrays_of_a_call`.

    Args:
        checkpoint: what is called.
        place: its folder, or its name in the zoo.
    """
    query = "Field.of(query_points, features)" if checkpoint.operator.spec.query_channels else "query_points"
    return (
        "from oformer import Field, Predictor\n\n"
        f'predict = Predictor("{place}")\n'
        f"answer = predict(Field.of(coords, values), {query})"
    )


def arrays_of_a_call(checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    """The arrays that go into an operator and come out: what they are called, their shape, and what they hold."""
    spec, names = checkpoint.operator.spec, checkpoint.data or Card("")

    def held(names: tuple[str, ...], categories: int) -> str:
        return ", ".join(names) + f", as a code from 0 to {categories - 1}" * bool(categories)

    rows = [
        ("coords", f"(points, {spec.dim})", "where the input is known"),
        ("values", f"({spec.in_times}, points, {spec.in_channels})", held(names.inputs, spec.in_categories)),
        ("query_points", f"(queries, {spec.dim})", "where to answer"),
    ]
    if spec.query_channels:
        rows.append(("features", f"(queries, {spec.query_channels})", held(names.queries, spec.query_categories)))
    return [*rows, ("answer.values", f"({spec.out_times}, queries, {spec.out_channels})", held(names.targets, 0))]


def how_to_use(checkpoint: Checkpoint, place: str) -> list[str]:
    """The call and its arrays as lines of Markdown."""
    return [
        "```python",
        in_python(checkpoint, place),
        "```",
        "",
        markdown_table(
            ("array", "shape", "holds"),
            [(f"`{name}`", shape, what) for name, shape, what in arrays_of_a_call(checkpoint)],
        ),
    ]


def model_card(checkpoint: Checkpoint) -> str:
    """The README of a checkpoint."""
    spec, scores, model = checkpoint.operator.spec, checkpoint.scores, checkpoint.operator.model
    where = "on a regular grid" if model.needs_grid else "at any points"
    rows = [
        ("dimension", str(spec.dim)),
        ("input", f"{spec.in_times} frame(s) of {spec.in_channels} channel(s), {where}"),
        ("output", f"{spec.out_times} frame(s) of {spec.out_channels} channel(s), {where}"),
        ("trained on", "a grid of " + " x ".join(map(str, spec.grid)) if spec.grid else "scattered points"),
    ]
    if checkpoint.data is not None:
        rows.append(("data", checkpoint.data.title))
    if "error" in scores:
        mean, median, worst = (percent(scores.get(name)) for name in ("error", "median", "worst"))
        split = scores.get("split", "test")
        rows.append((f"{split} error (relative L2, mean over {scores.get('count')} samples)", mean))
        rows.append(("median, worst", f"{median}, {worst}"))
    rows += [(name, str(value)) for name, value in checkpoint.provenance.items() if value is not None]
    lines = [
        f"# {checkpoint.name}",
        "",
        f"{model.name} of {parameter_count(checkpoint.operator):,} parameters, {checkpoint.step:,} training steps.",
        "",
        markdown_table(("", ""), rows),
        "",
        *how_to_use(checkpoint, "path/to/this/folder"),
        "",
        "Values are in physical units; the normalization is part of the weights. MIT licence.",
    ]
    return "\n".join(lines) + "\n"


def find_checkpoint(source: str | Path) -> Path:
    """The checkpoint folder that is meant: itself, the newest of a run, or a trained operator by NAME or zoo:NAME."""
    folder, name = Path(source), str(source).removeprefix("zoo:")
    asked = name != str(source)  # for the zoo alone, whatever folders there are
    if (asked or not folder.is_dir()) and name in zoo_names():
        return zoo_folder() / name
    if asked and zoo_names():
        raise unknown_name("trained operator", name, zoo_names())
    if asked or not folder.is_dir():
        raise InputError(
            "a run folder, a checkpoint folder or the name of a trained operator",
            f"`{source}`, which is none",
            "Train one with `oformer train`, check the path, or choose: "
            + (", ".join(zoo_names()) or "none is here yet"),
        )
    if (folder / CONFIG).is_file():
        return folder
    found = checkpoints(folder)
    if not found:
        raise InputError(f"a checkpoint in {folder}", "none yet", "Train longer, or give another folder")
    return found[-1]
