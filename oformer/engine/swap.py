"""The table of twins: plain modules, and the fused modules that compute the same.

`accelerate` turns a module into its twin only if nothing of it is somebody's own:

- its type is exactly the plain one: a subclass runs as written;
- no hook watches it, and no method is set on the instance;
- the functions that the twin computes instead are word for word those that stand in `nn` and `models` (`Row.pages`,
  whose source is compared with `FINGERPRINTS`): edit one of them, or put another in its place, and it runs as written;
- the kind of attention is a known function under its known name.

A twin is a subclass with the same parameters, submodules and names: acceleration sets the class of the module and
leaves everything else, so that weights, optimizers and checkpoints do not notice. `as_written` undoes it.
"""

import ast
import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oformer.engine.attention import KNOWN, FusedAttention, is_bare, is_known
from oformer.engine.blocks import FusedCrossAttentionBlock, FusedSelfAttentionBlock
from oformer.engine.rollout import FusedOFormer
from oformer.engine.rotary import FusedRotary
from oformer.gpu import switched_on
from oformer.models.base import MarchingModel
from oformer.models.oformer import OFormer
from oformer.nn.attention import Attention, Normalize, galerkin
from oformer.nn.blocks import CrossAttentionBlock, SelfAttentionBlock
from oformer.nn.feedforward import MLP, GatedGELU
from oformer.nn.rotary import Rotary


@dataclass(frozen=True)
class Row:
    """A plain module and its fused twin."""

    name: str  # for OFORMER_FUSED; see `oformer.gpu.ROWS`
    plain: type[nn.Module]
    fused: type[nn.Module]
    pages: tuple[Callable[..., Any], ...]  # the functions that the twin computes instead
    gpu: bool = False  # whether the twin gains something on a GPU alone
    fits: Callable[[Any], bool] = lambda module: True  # whether the twin knows the parts of this module


def _attend(layer: Attention) -> bool:
    """Whether the kind of a layer is known, down to the source of its function."""
    return is_known(layer) and _is_unchanged(KNOWN[layer.kind].attend)


TABLE: tuple[Row, ...] = (
    Row("rotary", Rotary, FusedRotary, (Rotary.tables, Rotary._angles, Rotary.forward)),
    Row(
        "attention", Attention, FusedAttention, fits=_attend,
        pages=(Attention.forward, Attention._project, Normalize.forward, Rotary.forward, galerkin),
    ),
    Row("blocks", SelfAttentionBlock, FusedSelfAttentionBlock, (SelfAttentionBlock.forward, GatedGELU.forward)),
    Row("blocks", CrossAttentionBlock, FusedCrossAttentionBlock, (CrossAttentionBlock.forward, GatedGELU.forward)),
    Row(
        "rollout", OFormer, FusedOFormer, gpu=True,
        pages=(
            OFormer.propagate, OFormer.decode, OFormer.step, MarchingModel.march,
            MLP.forward, MLP.from_context, MLP._last,
        ),
    ),
)  # fmt: skip

# Of the source of each page without comments and docstrings. Where a page and its twins are changed together, take the
# new ones from `python -m oformer.engine.swap`.
FINGERPRINTS: dict[str, str] = {
    "oformer.models.base.MarchingModel.march": "767f36c708493713",
    "oformer.models.oformer.OFormer.decode": "30879f855612fb42",
    "oformer.models.oformer.OFormer.propagate": "848600108c2923b9",
    "oformer.models.oformer.OFormer.step": "ffa6270d69783e5c",
    "oformer.nn.attention.Attention._project": "3efed09b53e69108",
    "oformer.nn.attention.Attention.forward": "2c438aa646afe6ad",
    "oformer.nn.attention.Normalize.forward": "b30020625386dbd1",
    "oformer.nn.attention.fourier": "fae5a151bbc9e0bb",
    "oformer.nn.attention.galerkin": "3f7bf72af8edd9a9",
    "oformer.nn.attention.softmax": "c0f8cf8a875caa2b",
    "oformer.nn.blocks.CrossAttentionBlock.forward": "bc3279de03e3ab2b",
    "oformer.nn.blocks.SelfAttentionBlock.forward": "6543b811fa37f39d",
    "oformer.nn.feedforward.GatedGELU.forward": "a8f6d1ea642c353c",
    "oformer.nn.feedforward.MLP._last": "f4177987ae466439",
    "oformer.nn.feedforward.MLP.forward": "9c5ce8df7f9a818e",
    "oformer.nn.feedforward.MLP.from_context": "dc963c954b1348b7",
    "oformer.nn.rotary.Rotary._angles": "098468c8b6fd7f0c",
    "oformer.nn.rotary.Rotary.forward": "11c987e88b6f334f",
    "oformer.nn.rotary.Rotary.tables": "91d1527536c8f8e9",
}


def accelerate(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Give the plain modules of a model their fused twins, where they are as we know them; returns the model.

    Args:
        model: changed in place.
        device: where it will run.
    """
    as_written(model)
    gpu = torch.device(device).type == "cuda"
    changed: set[str] = set()
    for module in model.modules():
        row = next((row for row in TABLE if type(module) is row.plain), None)
        if row is None or not switched_on(row.name) or (row.gpu and not gpu):
            continue
        edited = {page.__qualname__ for page in row.pages if not _is_unchanged(page)}
        changed |= edited
        own = not is_bare(module) or any(page.__name__ in module.__dict__ for page in row.pages)
        if not edited and not own and row.fits(module):
            module.__class__ = row.fused
    if changed:
        names = ", ".join(f"`{name}`" for name in sorted(changed))
        known = "what the fused modules of oformer/engine compute: the model runs as written, and slower"
        warnings.warn(f"{names} differ from {known}", stacklevel=2)
    return model


def as_written(model: nn.Module) -> nn.Module:
    """Give the fused modules of a model their plain classes back; returns the model."""
    plain = {row.fused: row.plain for row in TABLE}
    for module in model.modules():
        if type(module) in plain:
            module.__class__ = plain[type(module)]
    return model


def _is_unchanged(page: Callable[..., Any]) -> bool:
    """Whether what now stands in the place of a page is the page as the twins know it."""
    now, known = _standing(page), FINGERPRINTS.get(f"{page.__module__}.{page.__qualname__}")
    if now is None or known is None:
        return False
    found = fingerprint(now)
    return now is page if found is None else found == known  # without a source nobody has edited it


def _standing(page: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that stands under the name of a page today: somebody may have set another one at run time."""
    place: Any = inspect.getmodule(page)
    for name in page.__qualname__.split("."):
        place = getattr(place, name, None)
    return place


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str | None:
    """A checksum of the source of a function without comments, docstring and blank lines; None without a source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None
    tree = ast.parse(source)
    body: Any = tree.body[0]
    docstring = range(0)
    first = body.body[0] if isinstance(body, ast.FunctionDef) else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        docstring = range(first.lineno, (first.end_lineno or first.lineno) + 1)
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line.rstrip() for n, line in enumerate(lines, 1) if line.strip() and n not in docstring]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _print_fingerprints() -> None:
    """Print the content that FINGERPRINTS should have."""
    pages = {page for row in TABLE for page in row.pages} | {kind.attend for kind in KNOWN.values()}
    for name, page in sorted((f"{page.__module__}.{page.__qualname__}", page) for page in pages):
        print(f'    "{name}": "{fingerprint(page)}",')


if __name__ == "__main__":
    _print_fingerprints()
