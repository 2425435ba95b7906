"""Fine-tuning: training that starts from the weights of a trained operator, on other data of the same layout.

The normalization of the start is kept, since its weights know no other unit scale: before the first step the operator
answers as it did. Channels that the start did not have stand behind its own; their statistics are those of the new
data, and their weights are zero.
"""

import dataclasses
import hashlib
import warnings
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from oformer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from oformer.data.dataset import PointDataset
from oformer.errors import InputError, OutsideTraining
from oformer.fields import Spec
from oformer.models import OFormer, Operator
from oformer.nn.normalizer import GridNormalizer, Normalizer
from oformer.training.recipe import Recipe, Start


def starting_from(recipe: Recipe, start: Checkpoint | str | Path) -> tuple[Recipe, Checkpoint]:
    """A recipe with the model and normalization of a trained operator, and the operator's checkpoint.

    Args:
        recipe: of the training; one that names this start already keeps its model, which may differ in its dropout.
        start: a loaded checkpoint, a run or checkpoint folder, or the name of a trained operator.
    """
    found = start if isinstance(start, Checkpoint) else load_checkpoint(find_checkpoint(start))
    weights = {name: t.detach().cpu().contiguous() for name, t in found.operator.state_dict().items()}
    named = Start(found.name, found.step, hashlib.sha256(save(weights)).hexdigest())
    if recipe.start not in (None, named):
        raise InputError(
            f"the start that the recipe names, {recipe.start}", str(named), "Leave `start` of the recipe out"
        )
    if recipe.start is None:
        model, normalization = found.operator.model.config, found.operator.normalization
        recipe = dataclasses.replace(recipe, start=named, model=model, normalization=normalization)
    return recipe, found


def begin_from(operator: Operator, start: Checkpoint, data: PointDataset) -> None:
    """Put the weights and the normalization of a trained operator into a new one.

    Args:
        operator: of the same model, for the layout of the new data; changed in place.
        start: the trained operator.
        data: the new training samples, which set the statistics of new channels.
    """
    old = start.operator
    operator.fit(data)
    with torch.no_grad():
        for name, new in operator.model.state_dict().items():
            known = old.model.state_dict().get(name)
            if known is None or not _grown(operator, name, new, known.to(new), old.spec):
                raise InputError(
                    f"a model with the weights of {start.name}: `{name}` of shape "
                    f"{None if known is None else tuple(known.shape)}",
                    f"shape {tuple(new.shape)}",
                    "Leave the sizes of the model to the start; data may have more channels, for an OFormer",
                )
        for scale, known, codes in (
            (operator.input_scale, old.input_scale, bool(old.spec.in_categories)),
            (operator.target_scale, old.target_scale, False),
        ):
            _keep_scale(scale, known, codes)
        operator.origin.copy_(old.origin)
        operator.extent.copy_(old.extent)
        low, high = old.box.to(operator.box)
        operator.box.copy_(torch.stack([torch.minimum(operator.box[0], low), torch.maximum(operator.box[1], high)]))
    _warn_of_other_data(start, data)


def refuse_layout(start: Checkpoint, given: Spec) -> None:
    """Refuse data whose layout the weights of the start cannot read."""
    old = start.operator.spec
    names = ["dim", "in_times", "query_channels", "in_categories", "query_categories"]
    if start.operator.model.needs_period:
        names.append("periods")
    wrong = [name for name in names if getattr(old, name) != getattr(given, name)]
    wrong += [name for name in ("in_channels", "out_channels") if getattr(old, name) > getattr(given, name)]
    wrong += ["out_times"] * ((old.out_times > 1) != (given.out_times > 1))
    if wrong:
        sides = (", ".join(f"{name} {getattr(spec, name)}" for name in wrong) for spec in (old, given))
        raise InputError(
            f"data of the layout of {start.name} to start from: {next(sides)}",
            next(sides),
            "There may be more channels, behind those of the start; all else must be equal. Or train without a start",
        )


def _grown(operator: Operator, name: str, new: Tensor, known: Tensor, old: Spec) -> bool:
    """Copy a tensor; where it has more channels than the start, these are zero. False where it does not fit."""
    if new.shape == known.shape:
        new.copy_(known)
        return True
    model = operator.model
    if not isinstance(model, OFormer):
        return False
    if name == "lift.layers.0.weight" and len(new) == len(known):
        codes = bool(old.in_categories)
        channels, fewer = model.spec.in_channels - codes, old.in_channels - codes
        columns = [time * channels + c for time in range(old.in_times) for c in range(fewer)]
        columns += range(old.in_times * channels, new.shape[1])  # coordinates
        new.zero_()[:, columns] = known
        return True
    last = len(model.heads) - 1
    if (
        name.startswith(f"heads.{last}.layers.{len(model.heads[last].layers) - 1}.")
        and new.shape[1:] == known.shape[1:]
    ):
        new.zero_()[: len(known)] = known
        return True
    return False


def _keep_scale(new: Normalizer, old: Normalizer, code: bool) -> None:
    """Copy shift and scale of the channels of the start; those of a grid to the points of the new grid."""
    shift, scale = old.shift, old.scale
    if isinstance(new, GridNormalizer) and isinstance(old, GridNormalizer):
        new.origin.copy_(old.origin)
        new.extent.copy_(old.extent)
        unit = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, n) for n in new.grid], indexing="ij"), -1)
        nodes = old.origin + old.extent * unit.reshape(1, -1, len(new.grid)).to(old.origin)
        shift, scale = (found[0, 0] for found in old.statistics(nodes))
    numbers = shift.shape[-1] - code
    for own, known in ((new.shift, shift), (new.scale, scale)):
        own[..., :numbers] = known[..., :numbers]


def _warn_of_other_data(start: Checkpoint, data: PointDataset) -> None:
    """Warn where the first sample lies far outside of what the start was trained on: its unit scale is kept."""
    old, device = start.operator, start.operator.box.device
    known, asked = (field.batched().to(device) for field in (data[0].input, data[0].query))
    if known.values.shape[-1] != old.spec.in_channels:
        return
    if words := "; ".join(old.outside(known, asked)):
        told = f"The normalization of {start.name} is kept, and the data lie far outside of it: {words}"
        warnings.warn(told, OutsideTraining, 2)
