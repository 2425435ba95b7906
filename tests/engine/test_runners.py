"""Runners give the same numbers, and what they do to a model is undone when they are done."""

import pytest
import torch

from oformer.checkpoint import Checkpoint
from oformer.engine.recompute import pieces_recomputed
from oformer.engine.runners import Chunked, Plain, runner_of
from oformer.fields import Field, Spec
from oformer.models import FNOConfig, Normalization, OFormer, OFormerConfig, Operator
from oformer.models.oformer import Encoder, Query
from tests.forked import printed

SPEC = Spec(dim=2, in_times=2, in_channels=1, out_times=3, out_channels=1)
CONFIG = OFormerConfig(
    encoder=Encoder(width=8, depth=2), query=Query(width=8, fourier_features=4, hidden=(8,), heads=2)
)  # fmt: skip


def operator_of(model: OFormer | None = None) -> Operator:
    torch.manual_seed(0)
    operator = Operator(model or CONFIG.build(SPEC), Normalization()).eval()
    operator.origin.fill_(0.3)
    operator.target_scale.scale.fill_(5.0)
    return operator


def fields(points: int = 12) -> tuple[Field, Field]:
    coords = torch.rand(2, points, 2)
    return Field.of(coords, torch.randn(2, SPEC.in_times, points, 1)), Field.of(torch.rand(2, 7, 2))


@pytest.mark.parametrize("size", [None, 10])
def test_a_runner_says_what_the_operator_says(size):
    operator, given = operator_of(), fields()
    with torch.no_grad():
        values, physical = operator.predict_normalized(*given, 2), operator(*given, 2)
        runner = Plain(operator) if size is None else Chunked(operator, size)
        torch.testing.assert_close(runner.run(*given, 2), values, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(runner(*given, 2), physical, rtol=1e-5, atol=1e-6)
        parts = list(runner.in_turn(*given, 2, 3))
    assert [part.shape[2] for part in parts] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(parts, 2), physical, rtol=1e-5, atol=1e-6)


COMPILED = """
import dataclasses
import functools

import torch

from oformer.engine.runners import Compiled, Plain
from oformer.experiments.recipes import RECIPES
from oformer.fields import Field
from oformer.models import Normalization, Operator

torch.compile = functools.partial(torch.compile, backend="eager")
counters = torch._dynamo.utils.counters
for name, ways in (("ns2-part", (False, True)), ("darcy-141-plus", (False,)), ("electro", (False,))):
    spec = dataclasses.replace(RECIPES[name].data_spec(), grid=None)
    torch.manual_seed(0)
    operator = Operator(RECIPES[name].model.build(spec), Normalization("none", "none", "as-is")).eval()
    grid = torch.rand(1, 40, spec.dim).expand(2, -1, -1)
    values = torch.randn(2, spec.in_times, 40, spec.in_channels)
    if spec.in_categories:
        values[..., -1] = 1
    features = torch.ones(2, 1, 40, spec.query_channels) if spec.query_channels else None
    given = Field.of(grid, values), Field.of(grid, features), min(3, spec.out_times)

    def gradients(runner):
        operator.zero_grad()
        values = runner.run(*given)
        values.square().sum().backward()
        found = [values.detach(), *(p.grad for p in operator.parameters() if p.grad is not None)]
        return torch.cat([tensor.flatten() for tensor in found])

    expected = gradients(Plain(operator))
    for recompute in ways:
        torch._dynamo.reset()
        counters.clear()
        found = gradients(Compiled(operator, recompute=recompute))
        assert float((found - expected).norm()) < 1e-5 * float(expected.norm()), name
        print(name, recompute, counters["stats"]["unique_graphs"], len(counters["graph_break"]))
"""


def test_compiled_code_says_the_same_in_one_graph_or_in_two_where_time_marches():
    """A part that the compiler cannot see costs a graph each, their compilation, and launches between them."""
    lines = [line.split() for line in printed(COMPILED)]
    assert len(lines) == 4
    for name, recompute, graphs, breaks in lines:
        assert breaks == "0", name
        if recompute == "False":
            assert graphs == ("2" if name == "ns2-part" else "1"), name


class Doubled(OFormer):
    def answer(self, latents, input, query, times=None):
        return 2 * super().answer(latents, input, query, times)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_model_that_puts_its_parts_together_otherwise_is_run_so(recompute):
    operator, given = operator_of(Doubled(CONFIG, SPEC)), fields()
    plain = operator_of().predict_normalized(*given)
    found = Plain(operator, recompute=recompute).run(*given)
    torch.testing.assert_close(found, 2 * plain, rtol=1e-5, atol=1e-6)
    operator = operator_of()
    operator.model.answer = lambda *given: 3 * OFormer.answer(operator.model, *given)
    torch.testing.assert_close(Plain(operator, recompute=recompute).run(*given), 3 * plain, rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_leaves_nothing_behind():
    operator = operator_of()
    model, own = operator.model, lambda *given: given[0]
    model.blocks[0].forward = own

    def interrupted() -> None:
        with pieces_recomputed(model):
            assert "forward" in model.blocks[1].__dict__
            assert model.blocks[0].forward is own
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        interrupted()
    assert "forward" not in model.blocks[1].__dict__
    assert model.blocks[0].forward is own


def test_precision_is_a_matter_of_the_runner():
    operator, given = operator_of(), fields()
    with torch.no_grad():
        exact = operator(*given)
        rounded = Plain(operator, "bfloat16")(*given)
        assert torch.equal(Plain(operator)(*given), Plain(operator)(*given))
        torch.testing.assert_close(operator(*given), exact, rtol=1e-5, atol=1e-6)
    assert rounded.dtype == torch.float32
    assert 1e-4 < float((rounded - exact).norm() / exact.norm()) < 0.03


def test_the_runner_of_a_checkpoint_is_that_of_its_training():
    operator = operator_of()
    assert type(runner_of(Checkpoint(operator, "x"))) is Plain
    found = runner_of(Checkpoint(operator, "x", recipe={"training": {"chunk": 40}}), "bfloat16")
    assert isinstance(found, Chunked)
    assert (found.size, found.autocast) == (40, torch.bfloat16)


def test_an_fno_is_run_by_each():
    spec = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, grid=(32,), periods=(1.0,))
    operator = Operator(FNOConfig(width=4, modes=3, depth=2, head=4).build(spec), Normalization()).eval()
    grid = (torch.arange(32.0) / 32)[None, :, None].expand(2, -1, -1)
    field = Field.of(grid, torch.randn(2, 1, 32, 1))
    expected = operator(field, field)
    torch.testing.assert_close(Plain(operator)(field, field), expected)
    torch.testing.assert_close(Plain(operator, recompute=True)(field, field), expected)
