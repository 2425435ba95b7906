"""A checkpoint is a folder anybody can read: config.json, model.safetensors, README.md. Never pickle.

It is rebuilt from its model configuration and its spec alone, so using one runs no training code.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from oformer.config import from_json, to_json
from oformer.errors import InputError
from oformer.fields import Card, Spec
from oformer.files import listed, map_arrays, new_folder, read_json, write_bytes, write_json, write_text
from oformer.models import MODELS, Normalization, Operator
from oformer.models.chunked import InChunks

FORMAT = "oformer-checkpoint"
VERSION = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


@dataclass(frozen=True)
class Checkpoint:
    """An operator and its story."""

    operator: Operator
    name: str  # of the recipe, or of the user's choosing
    step: int = 0
    scores: dict[str, Any] = field(default_factory=dict)  # of the last evaluation
    recipe: dict[str, Any] | None = None  # as JSON
    data: Card | None = None  # of the dataset it was trained on
    provenance: dict[str, Any] = field(default_factory=dict)  # hardware, versions, minutes, data seed


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
        write_bytes(temporary / WEIGHTS, save(tensors))
        write_text(temporary / CARD, model_card(checkpoint))
        for name, content in (extra or {}).items():
            write_bytes(temporary / name, content)


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
        "scores": checkpoint.scores,
        "data": to_json(checkpoint.data),
        "recipe": checkpoint.recipe,
        "provenance": checkpoint.provenance,
    }


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a checkpoint folder."""
    config = read_config(folder)
    kind = config["model"].get("type") if isinstance(config.get("model"), dict) else None
    if kind not in MODELS:
        raise InputError(
            f"a model among {', '.join(MODELS)} in {folder}", str(kind), "It was written by another version"
        )
    spec = from_json(Spec, config["spec"], "spec")
    normalization = from_json(Normalization, config["normalization"], "normalization")
    operator = Operator(from_json(MODELS[kind], config["model"], "model").build(spec), normalization)
    _fill(operator, load_tensors(folder / WEIGHTS), folder)
    # What is trained on samples that memory does not hold is evaluated on such.
    if chunk := ((config["recipe"] or {}).get("training") or {}).get("chunk"):
        operator.chunked = InChunks(operator, chunk)
    return Checkpoint(
        operator=operator.to(device).eval(),
        name=config["name"],
        step=config["step"],
        scores=config["scores"],
        recipe=config["recipe"],
        data=from_json(Card, config["data"], "data") if config["data"] else None,
        provenance=config["provenance"],
    )


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(p for p in listed(run / "checkpoints") if p.name[0].isdigit() and (p / CONFIG).is_file())


def run_of(checkpoint: Path) -> Path:
    """The run that a checkpoint lies in; the folder itself where it lies in none."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """The JSON of a checkpoint, refused where it is foreign or of a newer version."""
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"a checkpoint folder with {CONFIG} and {WEIGHTS}",
            str(folder),
            "Give a run folder, a checkpoint or a name",
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise InputError(f"a checkpoint of this package in {folder}", "a foreign config.json", "Check the path")
    if config["version"] > VERSION:
        raise InputError(
            f"a checkpoint of version {VERSION} or older in {folder}",
            f"version {config['version']}",
            "It was written by a newer oformer; upgrade this one",
        )
    return config


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, copied into memory."""
    return {name: torch.from_numpy(array.copy()) for name, array in map_arrays(path).items()}


def _fill(operator: Operator, tensors: dict[str, Tensor], folder: Path) -> None:
    expected = operator.state_dict()
    wrong = [n for n in expected if n not in tensors or tensors[n].shape != expected[n].shape]
    if wrong or set(tensors) - set(expected):
        raise InputError(
            f"the weights that {CONFIG} describes in {folder}",
            f"others ({(wrong or sorted(set(tensors) - set(expected)))[0]} and possibly more)",
            "The two files do not belong together",
        )
    operator.load_state_dict(tensors)


def parameter_count(operator: Operator) -> int:
    """Trainable parameters."""
    return sum(p.numel() for p in operator.model.parameters())


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
        "| array | shape | holds |",
        "|---|---|---|",
        *(f"| `{name}` | {shape} | {what} |" for name, shape, what in arrays_of_a_call(checkpoint)),
    ]


def model_card(checkpoint: Checkpoint) -> str:
    """The README of a checkpoint."""
    spec, scores = checkpoint.operator.spec, checkpoint.scores
    lines = [
        f"# {checkpoint.name}",
        "",
        f"An OFormer of {parameter_count(checkpoint.operator):,} parameters after {checkpoint.step:,} training steps.",
        "",
        "| | |",
        "|---|---|",
        f"| dimension | {spec.dim} |",
        f"| input | {spec.in_times} frame(s) of {spec.in_channels} channel(s), at any points |",
        f"| output | {spec.out_times} frame(s) of {spec.out_channels} channel(s), at any points |",
        f"| trained on | {'a grid of ' + ' x '.join(map(str, spec.grid)) if spec.grid else 'scattered points'} |",
    ]
    if checkpoint.data is not None:
        lines.append(f"| data | {checkpoint.data.title} |")
    if "error" in scores:
        lines.append(f"| test error (relative L2, mean over {scores['count']} samples) | {scores['error']:.4%} |")
        lines.append(f"| median, worst | {scores['median']:.4%}, {scores['worst']:.4%} |")
    lines += [f"| {name} | {value} |" for name, value in checkpoint.provenance.items() if value is not None]
    lines += [
        "",
        *how_to_use(checkpoint, "path/to/this/folder"),
        "",
        "Values are in physical units; the normalization is part of the weights. MIT licence.",
    ]
    return "\n".join(lines) + "\n"
