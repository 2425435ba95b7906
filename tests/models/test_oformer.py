"""OFormer against the paper's layer tables, written out once more as plain functions of the weights."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from oformer.engine.runners import Plain
from oformer.errors import InputError
from oformer.experiments.recipes import BASELINES, RECIPES
from oformer.fields import Field, Sample, Spec, collate
from oformer.models import Normalization, OFormer, OFormerConfig, Operator
from oformer.models.oformer import Context, Decoder, Encoder, Propagator, Query

exact = pytest.mark.usefixtures("float64")
AS_IS = Normalization("none", "none", "as-is")
Weights = dict[str, Tensor]


# The layers, for one sample without padding: (points, channels).


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def relu(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def linear(w: Weights, name: str, x: Tensor, bias: bool = False) -> Tensor:
    """A layer whose bias must be there or not be there, as the table says."""
    assert (f"{name}.bias" in w) == bias
    x = x @ w[f"{name}.weight"].T
    return x + w[f"{name}.bias"] if bias else x


def unit(x: Tensor, axis: int) -> Tensor:
    centred = x - x.mean(axis, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(axis, keepdim=True) + 1e-5)


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return unit(x, -1) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rope(x: Tensor, coords: Tensor, multiplier: float) -> Tensor:
    blocks = []
    for axis, block in enumerate(x.chunk(coords.shape[1], -1)):
        size = block.shape[-1]
        theta = 10000.0 ** (-2 * torch.arange(size // 2) / size)
        phase = coords[:, axis : axis + 1] * multiplier * theta
        p, q = block[:, : size // 2], block[:, size // 2 :]
        blocks += [p * phase.cos() - q * phase.sin(), q * phase.cos() + p * phase.sin()]
    return torch.cat(blocks, -1)


def attend(
    w: Weights, name: str, kind: str, norm: str, heads: int, multiplier: float,
    x: Tensor, coords: Tensor, source: Tensor, source_coords: Tensor,
) -> Tensor:  # fmt: skip
    """q (k^T v) / n for each head, then the output projection where there are several heads."""
    d, results = x.shape[1], []
    for h in range(heads):
        rows = slice(h * d, (h + 1) * d)
        parts = {
            "q": x @ w[f"{name}.q.weight"][rows].T,
            "k": source @ w[f"{name}.k.weight"][rows].T,
            "v": source @ w[f"{name}.v.weight"][rows].T,
        }
        for part in {"galerkin": "kv", "fourier": "qk"}[kind]:
            if norm == "layernorm":
                parts[part] = layer_norm(w, f"{name}.normalize.{part}.affine", parts[part])
            else:
                parts[part] = unit(parts[part], {"channels": 1, "points": 0}[norm])
        q, k = rope(parts["q"], coords, multiplier), rope(parts["k"], source_coords, multiplier)
        results.append(q @ (k.T @ parts["v"]) / len(source))
    mixed = torch.cat(results, -1)
    if heads == 1:
        assert f"{name}.out.0.weight" not in w
        return mixed
    return linear(w, f"{name}.out.0", mixed, bias=True)


def gated(w: Weights, name: str, x: Tensor) -> Tensor:
    a, b = linear(w, f"{name}.gate", x, bias=True).chunk(2, -1)
    return linear(w, f"{name}.out", gelu(a) * b, bias=True)


def chain(w: Weights, name: str, x: Tensor, layers: int, activation, last_bias: bool = False) -> Tensor:
    """Layers without biases but for the last, activations between them."""
    assert f"{name}.layers.{layers}.weight" not in w
    for n in range(layers):
        x = linear(w, f"{name}.layers.{n}", activation(x) if n else x, bias=last_bias and n == layers - 1)
    return x


def waves(w: Weights, coords: Tensor) -> Tensor:
    phase = 2 * math.pi * coords @ w["waves.directions"]
    return torch.cat([phase.sin(), phase.cos()], -1)


# The forward passes: section 2 to 6 of the facts, table by table.


def burgers(w: Weights, norm: str, input: Field, query: Field, res: int) -> Tensor:
    u, x, y = input.values[0], input.coords, query.coords
    h = torch.cat([linear(w, "lift.layers.0", torch.cat([u, x], -1)), x], -1)
    for n, multiplier in enumerate((8 * res, 4 * res, 4 * res, res)):
        h = h + attend(w, f"blocks.{n}.attention", "fourier", norm, 1, multiplier, h, x, h, x)
        h = h + gated(w, f"blocks.{n}.feedforward", h)
    f = linear(w, "bottom.layers.0", h)
    z = linear(w, "embed_query.layers.0", gelu(waves(w, y)))
    z = z + attend(w, "cross.attention", "fourier", norm, 8, res, z, y, f, x)
    z = z + gated(w, "cross.feedforward", z)
    for n in range(3):
        z = z + chain(w, f"steps.{n}", z, 3, gelu)
    return chain(w, "heads.0", z, 2, gelu, last_bias=True)[None]


def darcy(w: Weights, norm: str, input: Field, query: Field, res: int) -> Tensor:
    x, y = input.coords, query.coords
    h = linear(w, "lift.layers.0", torch.cat([input.values[0], x], -1))
    for n, multiplier in enumerate((res * res, (res // 4) * res, res, res, res, res)):
        h = layer_norm(w, f"blocks.{n}.norms.0", h)
        h = h + attend(w, f"blocks.{n}.attention", "galerkin", norm, 4, multiplier, h, x, h, x)
        h = layer_norm(w, f"blocks.{n}.norms.1", h)
        h = h + gated(w, f"blocks.{n}.feedforward", h)
    f = linear(w, "bottom.layers.0", h)
    z = chain(w, "embed_query", waves(w, y), 2, gelu)
    z = z + attend(w, "cross.attention", "galerkin", norm, 4, 16 * res, z, y, f, x)
    z = z + gated(w, "cross.feedforward", z)
    return chain(w, "heads.0", torch.cat([z, y], -1), 3, gelu, last_bias=True)[None]


def navier_stokes(w: Weights, norm: str, input: Field, query: Field, times: int) -> Tensor:
    x, y = input.coords, query.coords
    frames = [input.values[t, :, 0] for t in range(10)]
    h = linear(w, "lift.layers.0", torch.stack([*frames, x[:, 0], x[:, 1]], -1))
    for n, multiplier in enumerate((2048, 1024, 512, 512, 64)):
        h = layer_norm(w, f"blocks.{n}.norms.0", h)
        h = h + attend(w, f"blocks.{n}.attention", "galerkin", norm, 1, multiplier, h, x, h, x)
        h = layer_norm(w, f"blocks.{n}.norms.1", h)
        h = h + gated(w, f"blocks.{n}.feedforward", h)
    f = linear(w, "bottom.layers.0", h)
    z = chain(w, "embed_query", waves(w, y), 2, gelu)
    z = z + attend(w, "cross.attention", "galerkin", norm, 4, 1024, z, y, f, x)
    z = z + gated(w, "cross.feedforward", z)
    z = linear(w, "expand", z, bias=True)
    answers = []
    for _ in range(times):
        z = z + chain(w, "steps.0", torch.cat([layer_norm(w, "step_norms.0", z), y], -1), 3, gelu)
        answers.append(chain(w, "heads.0", layer_norm(w, "decode_norm", z), 3, gelu, last_bias=True))
    return torch.stack(answers)


def poisson(w: Weights, norm: str, input: Field, query: Field) -> Tensor:
    assert norm == "layernorm"
    x, y, flag = input.coords, query.coords, query.values[0]
    h = chain(w, "lift", input.values[0], 2, relu)
    for n, multiplier in enumerate((2500, 600)):
        h = h + attend(w, f"blocks.{n}.attention", "galerkin", norm, 1, multiplier, h, x, h, x)
        inner = relu(linear(w, f"blocks.{n}.feedforward.layers.0", h, bias=True))
        h = h + linear(w, f"blocks.{n}.feedforward.layers.1", inner, bias=True)
    f = chain(w, "bottom", h, 2, relu)
    z = chain(w, "embed_query", torch.cat([y, flag], -1), 3, gelu)
    z = z + attend(w, "cross.attention", "galerkin", norm, 4, 50, z, y, f, x)
    z = z + gated(w, "cross.feedforward", z)
    z = z + attend(w, "mix", "galerkin", norm, 1, 200, z, y, z, y)
    trunk = chain(w, "trunk", torch.cat([z, flag], -1), 2, relu)
    potential = chain(w, "heads.0", trunk, 2, relu, last_bias=True)
    field = chain(w, "heads.1", trunk, 2, relu, last_bias=True)
    assert potential.shape[-1] == 1
    assert field.shape[-1] == 2
    return torch.cat([potential, field], -1)[None]


def airfoil(w: Weights, norm: str, input: Field, query: Field, times: int) -> Tensor:
    x, y = input.coords, query.coords
    numbers = torch.cat([input.values[t, :, :6] for t in range(4)], -1)
    code = w["input_code.weight"][input.values[0, :, 6].long()]
    h = chain(w, "lift", numbers, 2, gelu)
    h = skip = linear(w, "join_input_code", torch.cat([h, code], -1))
    for n, multiplier in enumerate((6400, 3200, 3200, 200)):
        h = layer_norm(w, f"blocks.{n}.norms.0", h)
        h = h + attend(w, f"blocks.{n}.attention", "galerkin", norm, 1, multiplier, h, x, h, x)
        h = layer_norm(w, f"blocks.{n}.norms.1", h)
        h = h + gated(w, f"blocks.{n}.feedforward", h)
    f = chain(w, "bottom", layer_norm(w, "skip_norm", h + skip), 2, relu)
    e = w["query_code.weight"][query.values[0, :, 0].long()]
    z = linear(w, "join_query_code", torch.cat([chain(w, "embed_query", waves(w, y), 2, gelu), e], -1))
    z = z + attend(w, "cross.attention", "galerkin", norm, 4, 6400, z, y, f, x)
    z = z + gated(w, "cross.feedforward", z)
    z = z + attend(w, "mix", "galerkin", norm, 1, 6400, z, y, z, y)
    z = linear(w, "expand", z)
    answers = []
    for _ in range(times):
        z = z + chain(w, "steps.0", torch.cat([layer_norm(w, "step_norms.0", z), e, y], -1), 4, gelu)
        state = torch.cat([layer_norm(w, "decode_norm", z), e], -1)
        answers.append(chain(w, "heads.0", state, 3, relu, last_bias=True))
    return torch.stack(answers)


def recipe_model(name: str, norm: str | None = None) -> OFormer:
    recipe = RECIPES[name]
    config = recipe.model if norm is None else dataclasses.replace(recipe.model, norm=norm)
    model = config.build(recipe.data_spec()).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn_like(p))  # so that no gain is one, no shift zero and no projection tiny
    return model


def random_sample(spec: Spec, points: int, queries: int, extent: float) -> Sample:
    values = torch.randn(spec.in_times, points, spec.in_channels)
    flags = torch.randint(0, max(spec.query_categories, 2), (1, queries, spec.query_channels)).double()
    if spec.in_categories:
        values[..., -1] = torch.randint(0, spec.in_categories, (points,)).double()
    return Sample(
        input=Field.of(extent * torch.rand(points, spec.dim), values),
        query=Field.of(extent * torch.rand(queries, spec.dim), flags),
        target=torch.zeros(spec.out_times, queries, spec.out_channels),
    )


@exact
@pytest.mark.parametrize(
    ("name", "norm", "table", "extra", "extent"),
    [
        ("burgers-512", "channels", burgers, (512,), 1.0),
        ("burgers-512", "points", burgers, (512,), 1.0),
        ("burgers-8192", "channels", burgers, (8192,), 1.0),
        ("darcy-141", "channels", darcy, (141,), 1.0),
        ("darcy-211", "points", darcy, (211,), 1.0),
        ("ns2-full", "channels", navier_stokes, (20,), 1.0),
        ("ns3", "points", navier_stokes, (10,), 1.0),
        ("electro", "layernorm", poisson, (), 1.0),
        ("magneto", "layernorm", poisson, (), 1.0),
        ("airfoil", "channels", airfoil, (22,), 4.0),
        ("airfoil", "points", airfoil, (22,), 4.0),
    ],
)
def test_forward_pass_is_that_of_the_table(name, norm, table, extra, extent):
    """A ragged batch through the model, and each sample of it through the table."""
    model = recipe_model(name, norm)
    samples = [random_sample(model.spec, points, queries, extent) for points, queries in ((6, 4), (4, 5))]
    batch = collate(samples)
    with torch.no_grad():
        answers = model(batch.input, batch.query)
        w = {key: tensor.detach() for key, tensor in model.state_dict().items()}
        for answer, sample in zip(answers, samples, strict=True):
            expected = table(w, norm, sample.input, sample.query, *extra)
            answer = answer[:, : sample.query.points]
            assert answer.shape == expected.shape
            assert expected.std() > 1e-3
            assert (answer - expected).abs().max() < 1e-10 * expected.abs().max()


def test_the_paper_recipes_normalize_over_channels_but_for_the_poisson_ones():
    for name, recipe in RECIPES.items():
        if name in BASELINES:
            continue
        assert recipe.model.norm == ("layernorm" if name.startswith(("electro", "magneto")) else "channels")


@pytest.mark.parametrize(
    ("names", "encoder", "decoder"),
    [
        (("burgers-512", "burgers-2048", "burgers-8192"), 231_742, 428_977),
        (("darcy-141", "darcy-211"), 1_080_096, 1_476_225),
        (("ns1", "ns2-part", "ns2-full", "ns3", "ns-mix"), 299_424, 1_551_937),
        (("electro", "electro-aug"), 54_720, 115_907),
        (("magneto", "magneto-aug"), 56_768, 259_875),
        (("airfoil",), 482_432, 887_684),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_parameters_are_as_many_as_in_the_released_code(names, encoder, decoder):
    for name in names:
        recipe = RECIPES[name]
        parts = recipe.model.build(recipe.data_spec()).parts()
        counts = {part: sum(p.numel() for p in ps if p.requires_grad) for part, ps in parts.items()}
        assert counts == {"encoder": encoder, "decoder": decoder}, name


@pytest.mark.parametrize(("name", "frozen"), [("burgers-512", 96), ("darcy-141", 256), ("ns1", 384), ("airfoil", 128)])
def test_random_waves_are_frozen_and_not_counted(name, frozen):
    recipe = RECIPES[name]
    model = recipe.model.build(recipe.data_spec())
    trained = {key for key, _ in model.named_parameters()}
    assert sum(t.numel() for key, t in model.state_dict().items() if key not in trained) == frozen


@exact
@pytest.mark.parametrize("name", ["burgers-512", "ns3", "electro", "airfoil"])
def test_forward_is_its_four_stages(name):
    model = recipe_model(name)
    batch = collate([random_sample(model.spec, 6, 4, 1.0) for _ in range(2)])
    with torch.no_grad():
        latents = model.encode(batch.input)
        z = model.query(latents, batch.input, batch.query)
        context, staged = model.context(batch.query), []
        for _ in range(model.spec.out_times):
            z = model.propagate(z, context)
            staged.append(model.decode(z, context))
        assert latents.shape == (2, 6, model.config.query.width)
        assert z.shape[:2] == (2, 4)
        torch.testing.assert_close(torch.stack(staged, 1), model(batch.input, batch.query), rtol=1e-12, atol=1e-12)


@exact
def test_one_encoding_serves_many_queries():
    model = recipe_model("ns3")
    batch = collate([random_sample(model.spec, 6, 5, 1.0)])
    with torch.no_grad():
        latents, whole = model.encode(batch.input), model(batch.input, batch.query)
        for n in range(5):
            one = Field.of(batch.query.coords[:, n : n + 1])
            answer = model.answer(latents, batch.input, one)
            torch.testing.assert_close(answer[:, :, 0], whole[:, :, n], rtol=1e-10, atol=1e-10)


@exact
def test_marches_further_than_it_was_trained_and_agrees_on_the_way():
    model = recipe_model("ns3")
    batch = collate([random_sample(model.spec, 6, 5, 1.0)])
    with torch.no_grad():
        usual, longer, first = (model(batch.input, batch.query, times) for times in (None, 14, 1))
    assert usual.shape[1] == 10
    assert longer.shape[1] == 14
    torch.testing.assert_close(longer[:, :10], usual, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first, usual[:, :1], rtol=1e-12, atol=1e-12)
    assert (longer[:, 10:] - usual[:, -1:]).abs().max() > 1e-3


@exact
@pytest.mark.parametrize("name", ["ns2-part", "airfoil"])
def test_recomputing_changes_no_gradient_and_keeps_one_state_a_step(name):
    model = recipe_model(name).eval()
    batch = collate([random_sample(model.spec, 12, 9, 1.0) for _ in range(2)])
    kept: dict[bool, int] = {}
    gradients: dict[bool, list[Tensor]] = {}
    for recompute in (False, True):
        runner = Plain(Operator(model, AS_IS).double(), recompute=recompute)
        sizes: dict[int, int] = {}  # by storage: a view costs nothing

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = (runner.run(batch.input, batch.query, 5) - batch.target[:, :5]).square().sum()
            kept[recompute] = sum(sizes.values())
        loss.backward()
        gradients[recompute] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for a, b in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    states = 5 * 2 * 9 * RECIPES[name].model.propagator.width * 8
    assert kept[True] < kept[False] - 2 * states


@exact
def test_recomputing_draws_the_same_random_numbers_again():
    model = recipe_model("darcy-85").train()
    assert model.config.encoder.dropout > 0
    batch = collate([random_sample(model.spec, 12, 9, 1.0) for _ in range(2)])
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        runner = Plain(Operator(model, AS_IS).double(), recompute=recompute)
        runner.run(batch.input, batch.query).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)
    torch.manual_seed(1)
    model.zero_grad()
    model(batch.input, batch.query).square().sum().backward()
    other = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (other - gradients[0]).norm() > 1e-3 * other.norm()


@pytest.mark.parametrize("name", ["burgers-512", "ns3"])
def test_residuals_and_answers_are_float32_under_autocast(name):
    """Products are rounded; what they are added to, and what is said in the end, is not."""
    model = recipe_model(name).float()
    batch = collate([random_sample(model.spec, 9, 9, 1.0) for _ in range(2)])
    seen = {}
    for part in ("blocks.1", "cross", "steps.0", "step_norms.0"):
        module = model.get_submodule(part)
        module.register_forward_pre_hook(lambda _, inputs, part=part: seen.update({part: inputs[0].dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        values = model(Field(*(t.float() for t in vars(batch.input).values())), batch.query.to("cpu", torch.float32))
    assert len(seen) == 4
    assert set(seen.values()) == {torch.float32}
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


@exact
def test_the_state_at_the_time_of_the_input_is_never_decoded():
    model = recipe_model("ns3")
    batch = collate([random_sample(model.spec, 6, 5, 1.0)])
    seen = []
    model.decode_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        z = model.query(model.encode(batch.input), batch.input, batch.query)
        model(batch.input, batch.query)
        after_one_step = model.propagate(z, model.context(batch.query)).unsqueeze(1)
    decoded = torch.stack(seen, 1)
    assert decoded.shape[1] == 10
    torch.testing.assert_close(decoded[:, :1], after_one_step, rtol=1e-12, atol=1e-12)
    assert ((decoded - z.unsqueeze(1)).abs().amax((0, 2, 3)) > 1e-3).all()


@exact
@pytest.mark.parametrize("times", [None, 1])
def test_steady_problems_take_no_step(times):
    model = recipe_model("electro")
    batch = collate([random_sample(model.spec, 6, 4, 1.0)])
    with torch.no_grad():
        z = model.query(model.encode(batch.input), batch.input, batch.query)
        assert torch.equal(model.propagate(z, model.context(batch.query)), z)
        assert model(batch.input, batch.query, times).shape == (1, 1, 4, 3)
        for frames in (0, 3):
            with pytest.raises(InputError, match=f"steady problem, got times={frames}"):
                model(batch.input, batch.query, frames)


SPEC = Spec(dim=2, in_times=1, in_channels=1, out_times=1, out_channels=2)
SMALL = OFormerConfig(
    encoder=Encoder(width=8, depth=3, heads=2, multipliers=(4.0, 2.0), layernorm=True),
    query=Query(width=12, fourier_features=3, hidden=(), heads=2),
    propagator=Propagator(depth=2, layers=2),
    decoder=Decoder(hidden=(6,), heads=(1, 1)),
)


def test_the_last_multiplier_repeats():
    model = SMALL.build(SPEC)
    assert [block.attention.rotary.frequencies[0, 0].item() for block in model.blocks] == [4.0, 2.0, 2.0]


@pytest.mark.parametrize("place", ["lift", "block", "source"])
def test_dropout_acts_in_training_alone_and_where_it_is_asked(place):
    encoder = dataclasses.replace(SMALL.encoder, lift_dropout=0.5 * (place == "lift"), dropout=0.5 * (place == "block"))
    query = dataclasses.replace(SMALL.query, source_dropout=0.5 * (place == "source"))
    model = dataclasses.replace(SMALL, encoder=encoder, query=query).build(SPEC)
    batch = collate([random_sample(SPEC, 6, 5, 1.0)]).to(torch.float32)

    def noisy(function) -> bool:
        return not torch.equal(function(), function())

    assert noisy(lambda: model(batch.input, batch.query))
    assert noisy(lambda: model.encode(batch.input)) == (place != "source")
    model.eval()
    assert not noisy(lambda: model(batch.input, batch.query))


def diagonal_dominant(matrix: Tensor) -> bool:
    eye = torch.eye(matrix.shape[0])
    orthogonal = matrix * matrix.shape[0] - eye
    return torch.allclose(orthogonal @ orthogonal.T, eye, rtol=0, atol=1e-10)


@exact
@pytest.mark.parametrize("diagonal", [False, True])
def test_the_propagator_starts_diagonal_where_asked(diagonal):
    config = dataclasses.replace(SMALL, propagator=dataclasses.replace(SMALL.propagator, diagonal_start=diagonal))
    matrices = [layer.weight for step in config.build(SPEC).steps for layer in step.layers]
    assert len(matrices) == 4
    assert [diagonal_dominant(m) for m in matrices] == [diagonal] * 4


@exact
@pytest.mark.parametrize(("attention", "raw"), [("galerkin", "q"), ("fourier", "v")])
def test_mixing_starts_as_a_self_attention_does(attention, raw):
    query = dataclasses.replace(SMALL.query, mixing=True)
    model = dataclasses.replace(SMALL, attention=attention, query=query).build(SPEC)
    assert {n for n in "qkv" if diagonal_dominant(getattr(model.mix, n).weight)} == {raw}


@exact
def test_the_trunk_starts_small_where_asked():
    decoder = dataclasses.replace(SMALL.decoder, trunk=(40, 40), context=("coords",))
    small = dataclasses.replace(SMALL, decoder=dataclasses.replace(decoder, trunk_gain=0.1)).build(SPEC)
    usual = dataclasses.replace(SMALL, decoder=decoder).build(SPEC)
    for layer in small.trunk.layers:
        bound = 0.1 * math.sqrt(6 / (layer.in_features + layer.out_features))  # Xavier, uniform
        assert 0.95 * bound < layer.weight.abs().max() <= bound
    for layer in usual.trunk.layers:
        assert layer.weight.abs().max() > 0.95 / math.sqrt(layer.in_features)


def test_codes_are_looked_up_and_not_computed_with():
    """A code is a name: relabelled together with its rows of the tables it means the same."""
    spec = dataclasses.replace(SPEC, in_channels=2, in_categories=3, query_channels=1, query_categories=3)
    model = SMALL.build(spec).eval()
    batch = collate([random_sample(spec, 6, 5, 1.0)]).to(torch.float32)

    def relabelled(field: Field) -> Field:
        values = field.values.clone()
        values[..., -1] = 2 - values[..., -1]
        return dataclasses.replace(field, values=values)

    with torch.no_grad():
        before = model(batch.input, batch.query)
        for table in (model.input_code, model.query_code):
            table.weight.copy_(table.weight.flip(0))
        assert not torch.allclose(model(batch.input, batch.query), before)
        torch.testing.assert_close(model(relabelled(batch.input), relabelled(batch.query)), before)


def changed(**parts) -> OFormerConfig:
    return dataclasses.replace(SMALL, **{k: dataclasses.replace(getattr(SMALL, k), **v) for k, v in parts.items()})


@pytest.mark.parametrize("part", ["encoder", "query"])
@pytest.mark.parametrize("width", [7, 0])
def test_refuses_odd_widths(part, width):
    with pytest.raises(InputError, match=rf"an even `{part}\.width`, got {width}\. Rotary"):
        changed(**{part: {"width": width}})


def test_refuses_a_width_that_the_axes_cannot_share():
    with pytest.raises(InputError, match="multiple of 4 for 2-D"):
        changed(encoder={"width": 10}).build(SPEC)


@pytest.mark.parametrize("change", [{"depth": 0}, {"multipliers": ()}])
def test_refuses_an_encoder_without_blocks(change):
    with pytest.raises(InputError, match="at least one block"):
        changed(encoder=change)


def test_refuses_a_problem_in_time_without_a_propagator():
    config = changed(propagator={"depth": 0})
    config.build(SPEC)
    with pytest.raises(InputError, match="a propagator for a problem in time"):
        config.build(dataclasses.replace(SPEC, out_times=2))


def test_refuses_heads_that_do_not_make_up_the_channels():
    with pytest.raises(InputError, match=r"sum to 2 channels, got \(1, 2\)"):
        changed(decoder={"heads": (1, 2)}).build(SPEC)


def test_refuses_integer_frequencies_off_periodic_domains():
    config = dataclasses.replace(SMALL, rotary="integer")
    with pytest.raises(InputError, match="periodic domain"):
        config.build(SPEC)
    assert isinstance(config.build(dataclasses.replace(SPEC, periods=(1.0, 1.0))), nn.Module)


@exact
def test_integer_frequencies_make_the_encoder_periodic():
    spec = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(8,), periods=(2.0,))
    config = OFormerConfig(
        attention="fourier",
        rotary="integer",
        rotary_modes=3,
        encoder=Encoder(width=8, depth=2, multipliers=(1.0,), coords_as_features=False),
        query=Query(width=8, fourier_features=4, heads=2, multiplier=1.0),
    )
    batch = collate([random_sample(spec, 6, 5, 2.0)])
    wrapped = dataclasses.replace(batch.input, coords=batch.input.coords + 2.0 * (torch.arange(6) % 2)[None, :, None])
    model, ladder = config.build(spec), dataclasses.replace(config, rotary="ladder").build(spec)
    torch.testing.assert_close(model.encode(wrapped), model.encode(batch.input), rtol=1e-10, atol=1e-10)
    assert (ladder.encode(wrapped) - ladder.encode(batch.input)).abs().max() > 1e-3


class Still(OFormer):
    """A change of the time stepping: nothing ever moves."""

    def propagate(self, z: Tensor, context: Context) -> Tensor:
        return z


@exact
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_changed_propagator_is_what_trains_and_what_predicts(gradients, recompute):
    config, spec = RECIPES["ns3"].model, RECIPES["ns3"].data_spec()
    batch = collate([random_sample(spec, 6, 5, 1.0)])
    runner = Plain(Operator(Still(config, spec), AS_IS).double(), recompute=recompute)
    with torch.set_grad_enabled(gradients):
        frames = runner.run(batch.input, batch.query)
    assert frames.shape[1] == 10
    torch.testing.assert_close(frames, frames[:, :1].expand_as(frames))


def reencoding(frames: int, local: bool = False) -> Operator:
    """An operator in time that encodes its own answers, in physical units unlike its own."""
    config, spec = RECIPES["ns3"].model, RECIPES["ns3"].data_spec()
    config = dataclasses.replace(
        config,
        propagator=dataclasses.replace(config.propagator, reencode=frames),
        query=dataclasses.replace(config.query, local=local),
    )
    operator = Operator(config.build(spec), Normalization(input="scalar", target="scalar", coords="as-is"))
    operator.input_scale.shift.fill_(0.3)
    operator.input_scale.scale.fill_(2.0)
    operator.target_scale.shift.fill_(-0.2)
    operator.target_scale.scale.fill_(1.5)
    return operator.eval()


@exact
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("frames", [1, 3])
def test_a_rollout_encodes_its_own_answers_in_physical_units(frames, local):
    operator = reencoding(frames, local)
    batch = collate([random_sample(operator.spec, 6, 5, 1.0) for _ in range(2)])
    at_input = Field.of(batch.input.coords, None, batch.input.weights)
    with torch.no_grad():
        for query in (at_input, batch.query):
            known, expected = batch.input, []
            while len(expected) < 8:
                count = min(frames, 8 - len(expected))
                expected += operator(known, query, count).unbind(1)
                values = torch.cat([known.values, operator(known, at_input, count)], 1)[:, -10:]
                known = dataclasses.replace(known, values=values)
            torch.testing.assert_close(operator(batch.input, query, 8), torch.stack(expected, 1))
    first, second = (operator(batch.input, at_input, n)[:, -1] for n in (frames, frames + 1))
    assert (second - first).abs().max() > 1e-3


@exact
def test_gradients_flow_through_answers_that_are_encoded_again():
    operator = reencoding(2)
    batch = collate([random_sample(operator.spec, 6, 5, 1.0)])
    values = batch.input.values.clone().requires_grad_()

    def last(values: Tensor) -> Tensor:
        input = dataclasses.replace(batch.input, values=values)
        return operator(input, Field.of(input.coords), 5)[:, -1].square().sum()

    assert torch.autograd.gradcheck(last, (values,), fast_mode=True, atol=1e-5)


@pytest.mark.parametrize(("recipe", "frames"), [("electro", 1), ("airfoil", 2), ("burgers-512", 1), ("ns3", 0)])
def test_answers_that_are_no_inputs_cannot_be_encoded_again(recipe, frames):
    model = RECIPES[recipe].model
    config = dataclasses.replace(model, propagator=dataclasses.replace(model.propagator, reencode=frames, depth=1))
    with pytest.raises(InputError, match="reencode"):
        config.build(RECIPES[recipe].data_spec())
