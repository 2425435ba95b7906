"""The saved state of a run: the files that its checkpoints hold beside configuration and weights.

training.safetensors holds the optimizer's moments, the random states and, where the checkpoint's own weights are a
running average, the weights that training moves. training.json holds the progress.
"""

import dataclasses
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from oformer.checkpoint import check_files, checkpoints, load_checkpoint, load_tensors, not_finite
from oformer.config import from_json
from oformer.errors import DamagedCheckpoint, InputError
from oformer.files import read_json
from oformer.models import Operator
from oformer.training.optimizers import Average, Descent

STATE, PROGRESS = "training.safetensors", "training.json"


@dataclass(frozen=True)
class Progress:
    """The content of training.json."""

    step: int
    minutes: float
    best: float | None
    evaluations_since_best: int
    average_updates: int
    scores: dict[str, Any] | None
    reached: float | None = None  # None: equal to `step`, in runs that were begun before there were time budgets
    minutes_of_budget: float = 0.0


@dataclass(frozen=True)
class Saved:
    """A checkpoint with the state that continues its run."""

    folder: Path
    operator: Operator
    tensors: dict[str, Tensor]  # by GROUP/NAME
    progress: Progress

    def groups(self) -> dict[str, dict[str, Tensor]]:
        """The tensors by group: optimizer, weights, scale, random."""
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = tensor
        return groups


def newest_intact(folder: Path) -> Saved | None:
    """The newest checkpoint of a run that can be read; damaged newer ones are renamed to damaged-STEP."""
    refused: dict[Path, InputError] = {}
    for path in reversed(checkpoints(folder)):
        try:
            saved = _read(path)
        except InputError as error:
            refused[path] = error
            continue
        for damaged, error in refused.items():
            aside = damaged.with_name(f"damaged-{damaged.name}")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            warnings.warn(f"{error} Training goes on from {path}; the other is kept as {aside}", DamagedCheckpoint, 2)
        return saved
    if refused:
        raise next(iter(refused.values()))
    return None


def newest_in_words(folder: Path) -> str:
    """The path of the newest checkpoint, which is finite since no other is written; or "the start"."""
    newest = checkpoints(folder)
    return str(newest[-1]) if newest else "the start"


def _read(path: Path) -> Saved:
    """A checkpoint and its state, refused where a file differs from its checksum or holds NaN."""
    check_files(path, (STATE, PROGRESS))
    operator, tensors = load_checkpoint(path).operator, load_tensors(path / STATE)
    if name := not_finite(tensors):
        raise InputError(f"finite numbers in {path / STATE}", f"NaN or infinity in `{name}`", "Its training diverged")
    progress = from_json(Progress, read_json(path / PROGRESS), str(path / PROGRESS))
    return Saved(path, operator, tensors, progress)


def refuse_foreign_state(saved: Saved, descent: Descent, average: Average | None) -> None:
    """Refuse tensors of a saved state that are missing, or whose shapes are not those of this model and optimizer."""
    groups, needed = saved.groups(), _needed_shapes(saved, descent, average)
    for name, shape in needed.items():
        group, _, rest = name.partition("/")
        found = groups.get(group, {}).get(rest)
        if found is None or found.shape != shape:
            path = saved.folder / STATE
            raise InputError(
                f"`{name}` in {path} {'of a parameter of this model' if shape is None else f'of shape {tuple(shape)}'}",
                "none" if found is None else f"shape {tuple(found.shape)}",
                "The file is damaged or of another run",
            )


def _needed_shapes(saved: Saved, descent: Descent, average: Average | None) -> dict[str, torch.Size | None]:
    """The shape that each tensor of a state must have; None for moments whose parameter this model lacks."""
    groups = saved.groups()
    needed: dict[str, torch.Size | None] = {"random/cpu": torch.get_rng_state().shape}
    if average is not None:
        needed |= {f"weights/{i}": parameter.shape for i, parameter in enumerate(average.parameters)}
    if "scale" in groups:
        needed["scale/value"] = torch.Size()
    owners = {
        f"{n}.{index}": parameter.shape
        for n, optimizer in enumerate(descent.optimizers)
        for index, parameter in enumerate(optimizer.param_groups[0]["params"])
    }
    for moment, tensor in groups.get("optimizer", {}).items():
        owner = owners.get(moment.rpartition(".")[0])
        needed[f"optimizer/{moment}"] = tensor.shape if owner is not None and not tensor.ndim else owner
    return needed


def state_files(tensors: dict[str, Tensor], progress: Progress) -> dict[str, bytes]:
    """The content of training.safetensors and training.json."""
    return {
        STATE: save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}),
        PROGRESS: (json.dumps(dataclasses.asdict(progress), indent=2, allow_nan=False) + "\n").encode(),
    }


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's random generators, as tensors of a saved state."""
    states = {"random/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random/cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, Tensor]) -> None:
    """Set torch's random generators, by device; those of a GPU where there is one."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
