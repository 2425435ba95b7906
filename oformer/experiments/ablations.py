"""The paper's ablations: named changes of a recipe, which may be joined.

`ns2-full+attention=softmax` is the recipe `ns2-full` with one change, `burgers-2048+norm=points,start=xavier` is
`burgers-2048` with two. A recipe that a change does not fit, or that has it already, is refused.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oformer.errors import InputError, unknown_name
from oformer.models.oformer import OFormerConfig
from oformer.training.recipe import Recipe
from oformer.training.schedules import Drop

STEP = 16  # widths are multiples of it after scaling, as they are in the recipes


@dataclass(frozen=True)
class Ablation:
    """A named change of a recipe."""

    place: str  # in the paper
    about: str  # what it changes
    change: Callable[[Recipe], Recipe]


def _model(**changes: Any) -> Callable[[Recipe], Recipe]:
    """A change of fields of the model."""
    return lambda recipe: _with_model(recipe, dataclasses.replace(_oformer(recipe), **changes))


def _query(**changes: Any) -> Callable[[Recipe], Recipe]:
    """A change of fields of the query encoder."""

    def change(recipe: Recipe) -> Recipe:
        model = _oformer(recipe)
        return _with_model(recipe, dataclasses.replace(model, query=dataclasses.replace(model.query, **changes)))

    return change


def _oformer(recipe: Recipe) -> OFormerConfig:
    """The model of a recipe, refused where it is another one."""
    if not isinstance(recipe.model, OFormerConfig):
        found = type(recipe.model).__name__.removesuffix("Config")
        raise InputError("a recipe of OFormer for this ablation", f"`{recipe.name}`, of {found}", "See oformer list")
    return recipe.model


def _with_model(recipe: Recipe, model: OFormerConfig) -> Recipe:
    return dataclasses.replace(recipe, model=model)


def _without_waves(recipe: Recipe) -> Recipe:
    """A plain network reads the coordinates of queries; one that was a single layer gets a hidden one."""
    query = _oformer(recipe).query
    return _query(fourier_features=0, activation_first=False, hidden=query.hidden or (query.width,))(recipe)


def scaled(model: OFormerConfig, factor: float, step: int = STEP) -> OFormerConfig:
    """The model with all widths multiplied by a factor, and rounded to multiples of `step`."""

    def wide(width: int) -> int:
        return max(step, round(width * factor / step) * step)

    def all_of(widths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(wide, widths))

    e, q, p, d = model.encoder, model.query, model.propagator, model.decoder
    waves = wide(q.fourier_features) if q.fourier_features else 0
    return dataclasses.replace(
        model,
        encoder=dataclasses.replace(e, width=wide(e.width)),
        query=dataclasses.replace(q, width=wide(q.width), fourier_features=waves, hidden=all_of(q.hidden)),
        propagator=dataclasses.replace(p, width=None if p.width is None else wide(p.width)),
        decoder=dataclasses.replace(d, hidden=all_of(d.hidden), trunk=all_of(d.trunk)),
    )


def _sized(factor: float) -> Callable[[Recipe], Recipe]:
    return lambda recipe: _with_model(recipe, scaled(_oformer(recipe), factor))


def _with_drop(recipe: Recipe) -> Recipe:
    """The paper's law: in a fifth of the steps up to half of the input points are missing; the others weigh equally."""
    drop = Drop(probability=0.2, keep=(0.5, 1.0), weights="scaled")
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, drop=drop))


def _limited(count: int) -> Callable[[Recipe], Recipe]:
    return lambda recipe: dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, limit=count))


_FIGURE_7 = "Figure 7"
_STARTS = "Appendix C, figure on initialization"
_DATA = "Appendix C, figure on the amount of data"

ABLATIONS: dict[str, Ablation] = {
    **{f"attention={kind}": Ablation(_FIGURE_7, f"{kind} attention in all layers", _model(attention=kind))
       for kind in ("galerkin", "fourier", "softmax")},
    "size=small": Ablation(_FIGURE_7, "two thirds of all widths", _sized(2 / 3)),
    "size=large": Ablation(_FIGURE_7, "four thirds of all widths", _sized(4 / 3)),
    "position=appended": Ablation(
        "Figures 7 and 8", "coordinates beside the channels of q and k, no rotation", _model(position="appended")
    ),
    "norm=points": Ablation(_FIGURE_7, "instance norm, over the points", _model(norm="points")),
    "norm=points-detached": Ablation(
        _FIGURE_7, "instance norm without gradients through its statistics", _model(norm="points-detached")
    ),
    "norm=channels": Ablation(_FIGURE_7, "over the channels of each point, as released", _model(norm="channels")),
    "norm=layernorm": Ablation(_FIGURE_7, "layer norm with learned gain and shift", _model(norm="layernorm")),
    "norm=none": Ablation(_FIGURE_7, "no norm in attention", _model(norm="none")),
    **{f"start={start}": Ablation(_STARTS, about, _model(start=start)) for start, about in (
        ("xavier-scaled", "(Xavier's uniform matrix + identity) / width"),
        ("orthogonal", "an orthogonal matrix, not scaled"),
        ("xavier", "Xavier's uniform matrix, not scaled"),
    )},
    "features=off": Ablation(
        "Appendix C, figures on random Fourier features", "a plain network on query coordinates", _without_waves
    ),
    "feedforward=off": Ablation(
        "Section 3.2, in the text", "no feed-forward network after cross-attention", _query(feedforward=False)
    ),
    "drop=on": Ablation(
        "Appendix C, tables on dropped points", "the paper's random dropping of input points in training", _with_drop
    ),
    **{f"samples={count}": Ablation(_DATA, f"the first {count:,} training samples alone", _limited(count))
       for count in (500, 1000, 2000, 5000)},
}  # fmt: skip


def varied(recipe: Recipe, names: str) -> Recipe:
    """The recipe with named changes.

    Args:
        recipe: to change; its name gets theirs behind a plus.
        names: of `ABLATIONS`, with commas between them.
    """
    for name in names.split(","):
        if name not in ABLATIONS:
            raise unknown_name("change of a recipe", name, ABLATIONS)
        changed = ABLATIONS[name].change(recipe)
        if changed == recipe:
            raise InputError(
                f"an ablation that changes `{recipe.name}`", f"{name}, which it already has", "Leave it out"
            )
        mark = "," if "+" in recipe.name else "+"
        paper = f"{ABLATIONS[name].place}: {recipe.name} with {ABLATIONS[name].about}"
        recipe = dataclasses.replace(changed, name=f"{recipe.name}{mark}{name}", paper=paper)
    return recipe
