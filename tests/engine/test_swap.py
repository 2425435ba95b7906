"""The table of twins: each computes what its plain module says, and stands in for nothing else."""

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from oformer.engine import rollout, swap
from oformer.engine.attention import FusedAttention, is_known, is_layer_norm
from oformer.engine.blocks import FusedCrossAttentionBlock, FusedSelfAttentionBlock
from oformer.engine.rollout import FusedOFormer
from oformer.engine.rotary import FusedRotary
from oformer.engine.swap import FINGERPRINTS, TABLE, accelerate, as_written, fingerprint
from oformer.errors import InputError
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field, Spec
from oformer.gpu import ROWS
from oformer.models import OFormer
from oformer.models.oformer import Context
from oformer.nn import attention
from oformer.nn.attention import KINDS, NORMS, Attention, galerkin
from oformer.nn.blocks import CrossAttentionBlock, SelfAttentionBlock
from oformer.nn.feedforward import ACTIVATIONS
from oformer.nn.rotary import Rotary

FAMILIES = ("burgers-2048", "burgers-2048-plus", "darcy-141-plus", "ns2-part", "ns3-plus", "electro", "airfoil")


@pytest.fixture(autouse=True)
def exact(float64, monkeypatch):
    monkeypatch.delenv("OFORMER_FUSED", raising=False)


def model_of(name: str, kind: type[OFormer] = OFormer, **changes) -> OFormer:
    recipe = RECIPES[name]
    torch.manual_seed(0)
    spec = dataclasses.replace(recipe.data_spec(), grid=None)
    model = kind(dataclasses.replace(recipe.model, **changes), spec).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # so that no layer begins as zero
    return model


def fields_of(spec: Spec, shared: bool) -> tuple[Field, Field]:
    """Input and query of three samples, on one grid or on grids of their own, with a padded point."""

    def field(points: int, times: int, channels: int, codes: int) -> Field:
        coords = torch.rand(1 if shared else 3, points, spec.dim).expand(3, -1, -1)
        weights = (torch.rand(1 if shared else 3, points) + 0.1).expand(3, -1).clone()
        weights[:, -1] = 0
        values = torch.randn(3, times, points, channels)
        if codes:
            values[..., -1] = torch.randint(codes, (3, 1, points)).double()
        weights = weights / weights.sum(-1, keepdim=True)
        return Field(coords, values, weights[:1].expand(3, -1) if shared else weights)

    return (
        field(11, spec.in_times, spec.in_channels, spec.in_categories),
        field(7, 1, spec.query_channels, spec.query_categories),
    )


def results(model: OFormer, input: Field, query: Field) -> list[Tensor]:
    """The answer for two frames at most, and the gradients of all parameters."""
    values = model(input, query, min(model.spec.out_times, 2))
    parameters = list(model.parameters())
    found = torch.autograd.grad(values.square().sum() + values.sin().sum(), parameters, allow_unused=True)
    return [values.detach(), *(torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 * max(1.0, float(other.abs().max())))


def fused(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()} & {row.fused for row in TABLE}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_same_values_and_gradients(name, shared):
    model = model_of(name)
    fields = fields_of(model.spec, shared)
    expected = results(model, *fields)
    accelerate(model, "cuda")
    assert fused(model) == {
        FusedAttention,
        FusedRotary,
        FusedSelfAttentionBlock,
        FusedCrossAttentionBlock,
        FusedOFormer,
    }
    close(results(model, *fields), expected)


@pytest.mark.parametrize("row", sorted({row.name for row in TABLE}))
def test_each_row_alone_gives_the_same_values_and_gradients(row, monkeypatch):
    model = model_of("ns2-part")
    fields = fields_of(model.spec, True)
    expected = results(model, *fields)
    monkeypatch.setenv("OFORMER_FUSED", row)
    accelerate(model, "cuda")
    assert fused(model) == {entry.fused for entry in TABLE if entry.name == row}
    close(results(model, *fields), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_every_attention_gives_the_same_values_and_gradients(kind, norm, heads, shared, cross):
    layer = Attention(8, heads, kind, norm, Rotary(2, 8, 3.0))
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    input, query = fields_of(Spec(dim=2, in_times=1, in_channels=8, out_times=1, out_channels=1), shared)
    source = (torch.randn(3, 11, 8), input.coords, input.weights)
    z = torch.randn(1 if shared else 3, 7, 8).expand(3, -1, -1), query.coords, query.weights
    given = (*z, *source) if cross else source

    def found() -> list[Tensor]:
        values = layer(*given)
        return [values.detach(), *torch.autograd.grad(values.square().sum(), list(layer.parameters()))]

    expected = found()
    assert type(accelerate(layer)) is FusedAttention
    close(found(), expected)


def test_parameters_stay_the_same_objects_under_the_same_names():
    model = model_of("airfoil")
    before = {name: id(p) for name, p in model.named_parameters()}, list(model.state_dict())
    accelerate(model, "cuda")
    assert ({name: id(p) for name, p in model.named_parameters()}, list(model.state_dict())) == before
    as_written(model)
    assert not fused(model)
    assert type(model) is OFormer
    assert ({name: id(p) for name, p in model.named_parameters()}, list(model.state_dict())) == before


def test_the_rollout_is_for_gpus_and_accelerating_again_is_the_same():
    model = model_of("ns2-part")
    assert type(accelerate(model, "cpu")) is OFormer
    assert type(accelerate(model, "cuda")) is FusedOFormer
    assert type(accelerate(model, "cpu")) is OFormer
    assert type(model.cross.attention) is FusedAttention


# What is somebody's own runs as written.


class OwnAttention(Attention):
    def forward(self, x, *others):
        return torch.zeros_like(x)


class Still(OFormer):
    """A change of the time stepping: nothing ever moves."""

    def propagate(self, z: Tensor, context: Context) -> Tensor:
        return z


def test_a_subclass_runs_as_written():
    model = model_of("ns3", Still)
    model.blocks[0].attention.__class__ = OwnAttention
    accelerate(model, "cuda")
    assert type(model) is Still
    assert type(model.blocks[0].attention) is OwnAttention
    assert type(model.blocks[1].attention) is FusedAttention
    frames = model(*fields_of(model.spec, True))
    torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))


def mean(q, k, v, query_weights, weights):
    return (v * weights[:, None, :, None]).sum(2, keepdim=True).expand_as(q)


def test_another_function_under_a_known_name_runs_as_written(monkeypatch):
    monkeypatch.setitem(KINDS, "galerkin", dataclasses.replace(KINDS["galerkin"], attend=mean))
    model = model_of("ns2-part")
    fields = fields_of(model.spec, True)
    expected = results(model, *fields)
    accelerate(model, "cuda")
    assert FusedAttention not in fused(model)
    close(results(model, *fields), expected)


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [
        (OFormer, "propagate", lambda self, z, context: z),
        (OFormer, "decode", lambda self, z, context: z[..., :1]),
        (Attention, "forward", lambda self, x, *others: x),
        (attention, "galerkin", mean),
        (SelfAttentionBlock, "forward", lambda self, x, *others: x),
        (CrossAttentionBlock, "forward", lambda self, z, *others: z),
        (Rotary, "forward", lambda self, x, tables: x),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_page_that_is_changed_at_run_time_is_told_of_and_runs(place, name, instead, monkeypatch):
    """As in a notebook: another function in the place of one that a twin computes."""
    monkeypatch.setattr(place, name, instead)
    if name == "galerkin":
        monkeypatch.setitem(KINDS, "galerkin", dataclasses.replace(KINDS["galerkin"], attend=mean))
    model = model_of("ns3")
    fields = fields_of(model.spec, True)
    expected = results(model, *fields)
    with pytest.warns(
        UserWarning, match=rf"`{(place.__name__ + '.') * isinstance(place, type)}{name}` .* runs as written"
    ):
        accelerate(model, "cuda")
    assert not any(row.plain is place for row in TABLE if row.fused in fused(model))
    close(results(model, *fields), expected)


def test_methods_and_hooks_of_an_instance_are_heard():
    model, calls = model_of("ns3"), []
    own = model.blocks[0].attention
    own.forward = lambda x, *others: torch.zeros_like(x)
    handle = model.blocks[1].attention.register_forward_hook(lambda *_: calls.append(1))
    fields = fields_of(model.spec, True)
    expected = results(model, *fields)
    accelerate(model, "cuda")
    assert type(own) is Attention
    close(results(model, *fields), expected)
    assert len(calls) == 2
    handle.remove()
    accelerate(model, "cuda")
    assert type(model.blocks[1].attention) is FusedAttention
    model.propagate = lambda z, context: z  # after it was accelerated
    frames = model(*fields)
    torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))
    assert not model._is_known()


def test_parts_that_are_replaced_later_are_heard():
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = model_of("ns3")
    accelerate(model, "cuda")
    assert model._is_known()
    for place, name in ((model.cross.attention, "k"), (model.blocks[0].attention, "v"), (model.steps[0].layers, "1")):
        linear = place.get_submodule(name)
        linear.__class__ = Doubled
    fields = fields_of(model.spec, True)
    found = results(model, *fields)
    assert not model._is_known()
    close(found, results(as_written(model), *fields))


class Shifted(nn.LayerNorm):
    """A layer norm of somebody's own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize(
    ("place", "part", "linear"),
    [("blocks.0.attention", "q", True), ("blocks.0.attention", "v", True), ("steps.0.layers", "0", False)],
)
def test_a_bias_where_none_is_known_is_heard(place, part, linear):
    """As after an edit of a layer's `__init__`: the twins add none."""
    model = accelerate(model_of("ns3"), "cuda")
    parent = model.get_submodule(place)
    old = parent.get_submodule(part)
    new = nn.Linear(old.in_features, old.out_features)
    nn.init.normal_(new.bias)
    parent.add_module(part, new)
    assert is_known(model.blocks[0].attention) != linear
    assert model._is_known() == linear
    fields = fields_of(model.spec, True)
    found = results(model, *fields)
    close(found, results(as_written(model), *fields))


def test_norms_of_ones_own_are_heard():
    model = accelerate(model_of("ns3"), "cuda")
    assert is_layer_norm(model.blocks[0].norms[0])
    model.blocks[0].norms[0].__class__ = model.blocks[0].norms[1].__class__ = Shifted
    assert not is_layer_norm(model.blocks[0].norms[0])
    assert not is_layer_norm(nn.LayerNorm(8, elementwise_affine=False))
    fields = fields_of(model.spec, True)
    found = results(model, *fields)
    model.decode_norm.eps *= 10  # of two norms the kernel of the rollout knows one epsilon
    assert not model._is_known()
    model.decode_norm.eps /= 10
    close(found, results(as_written(model), *fields))


def test_an_activation_of_ones_own_under_a_known_name_is_heard(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "gelu", nn.functional.silu)
    assert not accelerate(model_of("ns3"), "cuda")._is_known()


def test_a_changed_method_of_the_class_is_heard_by_a_model_that_is_fused_already(monkeypatch):
    model = accelerate(model_of("ns3"), "cuda")
    monkeypatch.setattr(OFormer, "propagate", lambda self, z, context: z)
    assert not model._is_known()


class OnGpu(Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def test_the_kernel_of_the_rollout_is_asked_for_known_models_alone(monkeypatch):
    monkeypatch.setattr(rollout, "fused_rollout", lambda *networks: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    model, z = accelerate(model_of("ns3"), "cuda"), torch.zeros(1).as_subclass(OnGpu)
    assert not model._marches_on_chip(z)  # outside of training, whatever has gradients is to have all of them
    assert model.train()._marches_on_chip(z)
    model.step_norms[0] = nn.Identity()
    assert not model._marches_on_chip(z)


# Switches and fingerprints.


def test_rows_are_switched_by_name(monkeypatch):
    assert {row.name for row in TABLE} <= set(ROWS)
    model = model_of("ns2-part")
    monkeypatch.setenv("OFORMER_FUSED", "0")
    assert not fused(accelerate(model, "cuda"))
    monkeypatch.setenv("OFORMER_FUSED", "attention, rollout")
    assert fused(accelerate(model, "cuda")) == {FusedAttention, FusedOFormer}
    monkeypatch.setenv("OFORMER_FUSED", "atention")
    with pytest.raises(InputError, match=r"row of OFORMER_FUSED, got `atention`\. Did you mean `attention`"):
        accelerate(model, "cuda")


def test_the_fingerprints_are_those_of_the_pages():
    """Where this fails, a page was edited: edit its twins alike, then put `python -m oformer.engine.swap` in place."""
    pages = {page for row in TABLE for page in row.pages} | {kind.attend for kind in KINDS.values()}
    assert {f"{page.__module__}.{page.__qualname__}": fingerprint(page) for page in pages} == FINGERPRINTS


def test_a_fingerprint_is_that_of_the_code_alone(tmp_path):
    source = 'def f(x):\n    """Doc.\n\n    # no comment\n    """\n    y = x + 1  # one more\n    return f"{y} # {x}"\n'

    def of(text: str, name: str) -> str | None:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        space: dict = {}
        exec(compile(text, str(path), "exec"), space)
        return fingerprint(space["f"])

    one = of(source, "one")
    assert of(source.replace("Doc.", "Other words.").replace("  # one more", ""), "words") == one
    assert of(source.replace("    y = x", "\n    # A comment.\n    y = x"), "lines") == one
    assert of(source.replace("x + 1", "x + 2"), "code") != one
    assert of(source.replace("# {x}", "#{x}"), "text") != one
    assert fingerprint(len) is None


def test_a_copy_of_a_model_is_as_fast_as_the_model():
    model = accelerate(model_of("ns2-part"), "cuda")
    other = copy.deepcopy(model)
    assert fused(other) == fused(model)
    assert fused(as_written(other)) == set()
    assert fused(model) != set()
    assert galerkin in [page for row in swap.TABLE for page in row.pages]
