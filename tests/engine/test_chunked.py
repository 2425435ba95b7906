"""Points that pass chunk by chunk get the answers of points that are there at once."""

import dataclasses
import threading

import pytest
import torch

from oformer.engine.chunked import Chunks
from oformer.engine.runners import Chunked, Plain
from oformer.errors import InputError
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field, Spec
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.base import Precision
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.nn.sums import over_points, points_are_split, points_split

POINTS, QUERIES = 23, 17  # neither is a multiple of a chunk, and they need differing numbers of chunks


def operator_of(dtype=torch.float64, mixing=False, codes=0, depth=3, **model) -> Operator:
    spec = Spec(
        dim=2, in_times=2, in_channels=2, out_times=3, out_channels=2, query_channels=2 * bool(codes),
        in_categories=codes, query_categories=codes,
    )  # fmt: skip
    config = OFormerConfig(
        encoder=Encoder(width=8, depth=depth, heads=2, multipliers=(9.0, 4.0), long_skip=True, dropout=0.1),
        query=Query(width=12, fourier_features=5, sigma=1.0, hidden=(10,), heads=2, multiplier=4.0, mixing=mixing),
        propagator=Propagator(depth=1, width=16, layernorm=True, context=("coords",)),
        decoder=Decoder(hidden=(8,)),
        **model,
    )
    operator = Operator(config.build(spec), Normalization()).to(dtype).eval()
    operator.origin.fill_(0.3)
    operator.extent.fill_(1.7)
    operator.target_scale.shift.fill_(2.0)
    operator.target_scale.scale.fill_(5.0)
    return operator


def fields_of(operator: Operator, batch: int = 2, shared: bool = False) -> tuple[Field, Field]:
    spec, dtype = operator.spec, operator.origin.dtype

    def field(points: int, times: int, channels: int, codes: int) -> Field:
        coords = torch.rand(1 if shared else batch, points, 2, dtype=dtype).expand(batch, points, 2)
        values = torch.randn(batch, times, points, channels, dtype=dtype)
        if codes:
            values[..., -1] = torch.randint(codes, (batch, 1, points)).to(dtype)
        weights = torch.rand(batch, points, dtype=dtype)
        weights[0, points // 2 :] = 0  # padding, more than a chunk of it
        return Field(coords, values, weights / weights.sum(1, keepdim=True))

    return (
        field(POINTS, spec.in_times, spec.in_channels, spec.in_categories),
        field(QUERIES, 1, spec.query_channels, spec.query_categories),
    )


def every_model(test):
    """Whatever is summed over input points or over queries."""
    norms = ["points", "points-detached", "channels", "layernorm", "none"]
    kinds = ["galerkin", "fourier"]
    every = [(kind, norm, (n + k) % 2 == 0) for n, norm in enumerate(norms) for k, kind in enumerate(kinds)]
    return pytest.mark.parametrize(("kind", "norm", "mixing"), every)(test)


def watched(monkeypatch: pytest.MonkeyPatch, operator: Operator) -> list[tuple[int, int]]:
    """The input points and queries of each run of the model from now on."""
    seen, forward = [], operator.model.forward

    def look(known: Field, asked: Field, times: int) -> torch.Tensor:
        seen.append((known.points, asked.points))
        return forward(known, asked, times)

    monkeypatch.setattr(operator.model, "forward", look)
    return seen


def chunked(operator: Operator, input: Field, query: Field, size: int, times: int = 3) -> torch.Tensor:
    return torch.cat(list(Chunked(operator, size).in_turn(input, query, times, size)), 2)


@every_model
def test_chunks_change_no_answer(kind, norm, mixing):
    operator = operator_of(attention=kind, norm=norm, mixing=mixing, codes=3 * mixing, depth=2)
    input, query = fields_of(operator)
    with torch.no_grad():
        whole = operator(input, query)
    for size in (6, 20):
        torch.testing.assert_close(chunked(operator, input, query, size), whole, rtol=1e-10, atol=1e-10)


def test_in_float32_and_on_a_shared_grid():
    operator = operator_of(torch.float32)
    input, query = fields_of(operator, shared=True)
    with torch.no_grad():
        whole = operator(input, query, 7)
    torch.testing.assert_close(chunked(operator, input, query, 5, times=7), whole, rtol=1e-5, atol=1e-5)


def test_weights_that_do_not_sum_to_one_mean_the_same():
    operator = operator_of(norm="points")
    input, query = fields_of(operator)
    input = Field(input.coords, input.values, 3 * input.weights)
    with torch.no_grad():
        whole = operator(input, query)
    torch.testing.assert_close(chunked(operator, input, query, 5), whole, rtol=1e-10, atol=1e-10)


def test_sums_of_many_chunks_lose_no_digits_in_bfloat16():
    """In which 256 and one more is 256."""

    def count(known: Field, asked: Field, times: int) -> torch.Tensor:
        return over_points(torch.ones(1, 1, 1, 2, dtype=torch.bfloat16))

    operator = operator_of(torch.float32)
    points = Field.of(torch.rand(1, 1000, 2), None)
    chunks = Chunks(operator.model, count, points, points, 1)
    chunks.add_up()
    whole = chunks.answer(0, 1, chunks.sums)
    assert whole.dtype == torch.bfloat16
    assert whole.flatten().tolist() == [1000.0, 1000.0]


def test_bfloat16_in_chunks_is_bfloat16():
    operator = operator_of(torch.float32)
    input, query = fields_of(operator)
    with torch.no_grad():
        exact = operator(input, query)
        whole = Plain(operator, "bfloat16")(input, query)
    noise = (whole - exact).norm()
    assert noise > 0
    in_chunks = torch.cat(list(Chunked(operator, 4, "bfloat16").in_turn(input, query, 3, 4)), 2)
    assert 0 < (in_chunks - exact).norm() < 3 * noise


def test_the_model_never_sees_more_points_than_a_chunk(monkeypatch):
    operator = operator_of(mixing=True)
    input, query = fields_of(operator)
    seen = watched(monkeypatch, operator)
    chunked(operator, input, query, 6)
    assert max(max(pair) for pair in seen) == 6
    # Three blocks, the cross-attention and the mixing: five sums over four chunks each, one look whether that is all,
    # and three chunks of answers.
    assert len(seen) == 5 * 4 + 1 + 3


def test_independent_queries_are_computed_once(monkeypatch):
    operator = operator_of()
    input, query = fields_of(operator)
    seen = watched(monkeypatch, operator)
    chunked(operator, input, query, 6)
    assert [asked for _, asked in seen] == [1] * (4 * 4 + 1) + [6, 6, 5]


def test_softmax_is_refused_with_a_way_out():
    operator = operator_of(attention="softmax")
    with pytest.raises(InputError, match=r"at most 5 points at once where.*softmax.*23.*more memory"):
        chunked(operator, *fields_of(operator), 5)


def test_points_are_split_for_nobody_else():
    """Neither for another thread nor between two chunks of answers."""
    operator = operator_of()
    input, query = fields_of(operator)
    answers = Chunked(operator, 5).in_turn(input, query, 1, 5)
    next(answers)
    assert not points_are_split()
    part, seen = torch.ones(2), []
    with points_split(lambda x: 2 * x):
        other = threading.Thread(target=lambda: seen.append((points_are_split(), over_points(part))))
        other.start()
        other.join()
        assert torch.equal(over_points(part), 2 * part)
    assert seen[0][0] is False
    assert seen[0][1] is part


def gradients(operator: Operator, input: Field, query: Field, times: int, chunk: int | None) -> list[torch.Tensor]:
    """Of a loss that is no sum over queries, like a relative error: all parameters, one after the other."""
    runner = Plain(operator) if chunk is None else Chunked(operator, chunk)
    operator.zero_grad()
    values = runner.run(input, query, times)
    aim = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view_as(values)
    ((values - aim).square().mean() / aim.square().mean()).sqrt().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in operator.parameters()]


@every_model
def test_chunks_change_no_gradient(kind, norm, mixing):
    operator = operator_of(attention=kind, norm=norm, mixing=mixing, codes=3 * mixing, depth=2)
    input, query = fields_of(operator)
    whole = gradients(operator, input, query, 3, None)
    assert sum(float(g.abs().sum()) > 0 for g in whole) > 20
    for chunk in (12, 40):  # of two samples
        found = gradients(operator, input, query, 3, chunk)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)


def test_gradients_on_a_shared_grid_and_of_one_step():
    operator = operator_of()
    input, query = fields_of(operator, shared=True)
    whole = gradients(operator, input, query, 1, None)
    torch.testing.assert_close(gradients(operator, input, query, 1, 10), whole, rtol=1e-9, atol=1e-11)


def test_few_points_are_computed_as_ever(monkeypatch):
    operator = operator_of()
    input, query = fields_of(operator)
    seen = watched(monkeypatch, operator)
    gradients(operator, input, query, 3, 2 * POINTS)
    assert seen == [(POINTS, QUERIES)]


def test_the_model_never_sees_more_points_in_training_either(monkeypatch):
    operator = operator_of(mixing=True)
    input, query = fields_of(operator)
    seen = watched(monkeypatch, operator)
    gradients(operator, input, query, 3, 12)
    assert max(max(pair) for pair in seen) == 6
    # As for answers, and back again: three chunks of answers, and five sums over four chunks.
    assert len(seen) == (5 * 4 + 1 + 3) + (3 + 5 * 4)


def test_dropout_is_the_same_whenever_a_chunk_is_run():
    """Otherwise gradients would belong to no loss: compare them with differences of it."""
    operator = operator_of().train()
    runner = Chunked(operator, 10)
    input, query = fields_of(operator)
    weight = operator.model.lift.layers[0].weight

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return runner.run(input, query, 2).square().mean()

    operator.zero_grad()
    loss().backward()
    direction = torch.randn_like(weight)
    slope = float((weight.grad * direction).sum())
    step, found = 1e-5, []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * step * direction
            found.append(float(loss()))
            weight -= sign * step * direction
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)
        torch.manual_seed(8)
        assert float(runner.run(input, query, 2).square().mean()) != found[0]


def test_chunks_leave_the_generator_where_one_draw_leaves_it():
    operator = operator_of().train()
    runner = Chunked(operator, 10)
    torch.manual_seed(3)
    runner.run(*fields_of(operator), 2)
    after = torch.rand(())
    torch.manual_seed(3)
    fields_of(operator)
    torch.randint(2**62, ())
    assert torch.equal(after, torch.rand(()))


def test_backward_twice_gives_the_gradients_twice():
    operator = operator_of()
    value = Chunked(operator, 10).run(*fields_of(operator), 2).square().mean()
    value.backward(retain_graph=True)
    once = [None if p.grad is None else p.grad.clone() for p in operator.parameters()]
    value.backward()
    for first, p in zip(once, operator.parameters(), strict=True):
        if first is not None:
            torch.testing.assert_close(p.grad, 2 * first, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ns2-part", "darcy-141"])
def test_on_a_gpu_fused_kernels_give_chunks_the_gradients_of_all_points(name):
    """As near to those in float32 as without chunks."""
    recipe = RECIPES[name]
    spec = dataclasses.replace(recipe.data_spec(), grid=None)
    torch.manual_seed(0)
    operator = Operator(recipe.model.build(spec), Normalization()).cuda().train()
    if name == "darcy-141":
        operator.eval()  # its dropout draws other numbers for chunks
    points = 1500
    coords = torch.rand(2, points, 2, device="cuda")
    weights = torch.rand(2, points, device="cuda")
    input = Field(coords, torch.randn(2, spec.in_times, points, spec.in_channels, device="cuda"), weights / points)
    query = Field.of(coords, None)

    def found(chunk: int | None, precision: Precision) -> torch.Tensor:
        runner = Plain(operator, precision) if chunk is None else Chunked(operator, chunk, precision)
        operator.zero_grad()
        runner.run(input, query).square().mean().sqrt().backward()
        return torch.cat([p.grad.flatten() for p in operator.parameters() if p.grad is not None])

    exact = found(None, "float32")
    torch.testing.assert_close(found(1000, "float32"), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    noise = (found(None, "bfloat16") - exact).norm()
    assert (found(1000, "bfloat16") - exact).norm() < 2 * noise
