"""Predictor: anywhere, in chunks, in physical units, and honest about what it cannot do."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from oformer.checkpoint import Checkpoint, find_checkpoint, save_checkpoint
from oformer.errors import InputError, OutOfMemory, OutsideTraining
from oformer.fields import Field, collate
from oformer.models import Operator
from oformer.predict import HELD, Predictor, read_field
from tests.tiny import tiny_recipe


def predictor_of(tiny_data, settings=None, frames=1, **model):
    recipe = tiny_recipe()
    torch.manual_seed(0)
    config = dataclasses.replace(recipe.model, **model)
    spec = dataclasses.replace(tiny_data.spec, out_times=frames)
    operator = Operator(config.build(spec), recipe.normalization).fit(tiny_data)
    return Predictor(Checkpoint(operator, "tiny"), device="cpu", **(settings or {}))


@pytest.fixture
def predict(tiny_data):
    return predictor_of(tiny_data)


def test_equals_the_operator_on_its_own_points(predict, tiny_data):
    batch = collate([tiny_data[0], tiny_data[1]])
    with torch.no_grad():
        expected = predict.operator(batch.input, batch.query)
    single = predict(tiny_data[1].input)
    torch.testing.assert_close(predict(batch.input).values, expected)
    torch.testing.assert_close(single.values, expected[1])
    assert torch.equal(single.coords, tiny_data[1].input.coords)


def test_chunks_change_nothing_and_neither_do_other_queries(predict, tiny_data):
    points = torch.rand(50, 1)
    field = tiny_data[0].input
    whole = predict(field, points).values
    torch.testing.assert_close(predict(field, points, chunk=7).values, whole)
    torch.testing.assert_close(predict(field, points[3:9]).values, whole[:, 3:9])
    torch.testing.assert_close(predict(field, points.numpy()[:, 0]).values, whole)


def test_the_encoder_runs_once_however_many_chunks(predict, tiny_data, monkeypatch):
    calls = []
    encode = predict.operator.model.encode
    monkeypatch.setattr(predict.operator.model, "encode", lambda field: calls.append(1) or encode(field))
    predict(tiny_data[0].input, torch.rand(40, 1), chunk=5)
    assert len(calls) == 1


@pytest.mark.parametrize("norm", ["points", "points-detached"])
def test_coupled_queries_are_answered_together_also_in_chunks(tiny_data, norm):
    """Fourier attention that normalizes over the queries: the same point gets another answer in other company."""
    predict = predictor_of(tiny_data, norm=norm)
    field, points = tiny_data[0].input, torch.rand(12, 1)
    assert not predict.operator.model.queries_independent
    together, apart = predict(field, points).values, predict(field, points[:3]).values
    assert (together[:, :3] - apart).norm() > 1e-3 * apart.norm()
    torch.testing.assert_close(predict(field, points, chunk=5).values, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "model", [{}, {"attention": "galerkin"}, {"norm": "layernorm"}, {"attention": "softmax"}], ids=str
)
def test_queries_in_turn_read_the_sums_of_the_first(tiny_data, model, monkeypatch):
    """All input points are looked at once; softmax has no sums, and looks at them each time."""
    predict = predictor_of(tiny_data, frames=2, **model)
    batch, points = collate([tiny_data[0], tiny_data[1]]), torch.rand(25, 1)
    expected, seen = predict(batch.input, points, times=2).values, []
    answer = predict.operator.model.answer
    monkeypatch.setattr(
        predict.operator.model,
        "answer",
        lambda latents, *others: seen.append(latents.shape[1]) or answer(latents, *others),
    )
    torch.testing.assert_close(predict(batch.input, points, times=2, chunk=10).values, expected, rtol=1e-5, atol=1e-5)
    assert seen == ([32] * 3 if model.get("attention") == "softmax" else [32, 1, 1])


MEMORY = 10 * 4 * HELD * 32 / 2**30  # GiB for ten points of the tiny model, whose widest layer has 32 channels


@pytest.mark.parametrize("model", [{}, {"norm": "points"}, {"attention": "galerkin"}])
def test_little_memory_changes_no_answer_and_bounds_what_the_model_sees(tiny_data, model, monkeypatch):
    batch = collate([tiny_data[0], tiny_data[1], tiny_data[2]])
    points = torch.rand(25, 1)
    plenty = predictor_of(tiny_data, frames=2, **model)
    scarce = predictor_of(tiny_data, {"memory_gb": MEMORY}, frames=2, **model)
    seen, forward = [], scarce.operator.model.forward
    monkeypatch.setattr(
        scarce.operator.model,
        "forward",
        lambda a, b, times: seen.append((*a.weights.shape, *b.weights.shape)) or forward(a, b, times),
    )
    expected, answer = plenty(batch.input, points, times=2), scarce(batch.input, points, times=2)
    torch.testing.assert_close(answer.values, expected.values, rtol=1e-5, atol=1e-5)
    assert max(batch * points for sides in seen for batch, points in (sides[:2], sides[2:])) == 10


def test_a_batch_is_cut_into_equal_slices_of_whole_samples(tiny_data, monkeypatch):
    """Seven samples of 32 points where memory holds 100: three, and so 3 + 3 + 1, in as few shapes as can be."""
    predict = predictor_of(tiny_data, {"memory_gb": 10 * MEMORY})
    batch = collate([tiny_data[i] for i in range(7)])
    with torch.no_grad():
        expected = predict.operator(batch.input, batch.query)
    encode, seen = predict.operator.model.encode, []
    monkeypatch.setattr(predict.operator.model, "encode", lambda field: seen.append(field) or encode(field))
    torch.testing.assert_close(predict(batch.input).values, expected)
    assert [len(field.weights) for field in seen] == [3, 3, 1]
    assert seen[0].coords.stride(0) == 0  # a shared grid stays one tensor


def test_softmax_beyond_memory_says_what_to_do(tiny_data):
    predict = predictor_of(tiny_data, {"memory_gb": MEMORY}, attention="softmax")
    with pytest.raises(InputError, match=r"at most 10 points.*softmax.*32.*more memory"):
        predict(tiny_data[0].input)


def test_bfloat16_is_near_and_torch_is_left_as_it_was(tiny_data):
    before = torch.get_float32_matmul_precision()
    exact, fast = predictor_of(tiny_data), predictor_of(tiny_data, {"precision": "bfloat16"})
    field = tiny_data[0].input
    expected, answer = exact(field).values, fast(field).values
    assert answer.dtype == torch.float32
    difference = (answer - expected).norm() / expected.norm()
    assert 1e-5 < difference < 0.03  # it is another arithmetic, and not a wrong one
    assert torch.get_float32_matmul_precision() == before


MISSPELLED = """
from oformer import Predictor
from oformer.errors import InputError
from oformer.training.recipe import Training

for mistaken in (lambda: Predictor("burgers-demo", "cpu", precision="fp16"), lambda: Training(1, precision="fp16")):
    try:
        mistaken()
    except InputError as error:
        print(error)
"""


def test_a_precision_that_does_not_exist_is_refused_with_the_choices():
    """It was computed in float32 without a word. In a process of its own: the type checks of the tests refuse it."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", MISSPELLED], cwd=root, capture_output=True, text=True)
    words = "`fp16`. Did you mean `float16`? Choices: bfloat16, float16, float32, tf32."
    assert done.stdout.count(words) == 2, done.stderr


def test_memory_must_be_some(tiny_data):
    with pytest.raises(InputError, match="above zero"):
        predictor_of(tiny_data, {"memory_gb": 0.0})


COMPILED = """
import torch
from oformer.checkpoint import Checkpoint
from oformer.fields import Field, Spec
from oformer.models import Normalization, Operator
from oformer.predict import Predictor
from tests.tiny import tiny_recipe

spec = Spec(dim=1, in_times=1, in_channels=1, out_times=1, out_channels=1, periods=(1.0,))
torch.manual_seed(0)
checkpoint = Checkpoint(Operator(tiny_recipe().model.build(spec), Normalization()), "tiny")
plain, compiled = (Predictor(checkpoint, "cpu", compile=c) for c in (False, True))
field, points = Field.of(torch.rand(3, 32, 1), torch.randn(3, 1, 32, 1)), torch.rand(3, 40, 1)
for chunk in (None, 16):  # the last chunk is of another size
    expected = plain(field, points, chunk=chunk).values
    torch.testing.assert_close(compiled(field, points, chunk=chunk).values, expected, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_compiled_answers_are_the_same():
    """In a process of its own: the shape checks of the tests cannot be compiled."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", COMPILED], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_more_steps_than_trained_and_a_batch_of_inputs_on_shared_queries(tiny_data):
    predict = predictor_of(tiny_data, frames=2)
    batch = collate([tiny_data[0], tiny_data[1]])
    answer = predict(batch.input, torch.rand(9, 1), times=3)
    assert answer.values.shape == (2, 3, 9, 1)
    one = predict(tiny_data[1].input, answer.coords[1], times=3)
    torch.testing.assert_close(one.values, answer.values[1])


def test_grid_covers_the_period_without_its_end(predict, tiny_data):
    grid = predict.grid(tiny_data[0].input, 8)
    torch.testing.assert_close(grid[:, 0], torch.arange(8) / 8)


def test_bad_inputs_get_one_clear_sentence(predict, tiny_data):
    field = tiny_data[0].input
    flat = Field.of(torch.rand(5, 2), torch.rand(1, 5, 1))
    with pytest.raises(InputError, match=r"input.coords.*1\).*use data or a recipe of that dimension"):
        predict(flat, torch.rand(4, 1))
    with pytest.raises(InputError, match=r"query points of shape \(queries, 1\)"):
        predict(field, torch.rand(4, 2))
    with pytest.raises(InputError, match="1 NaN or infinite"):
        predict(
            Field(
                field.coords,
                field.values.clone().index_fill_(1, torch.tensor([3]), float("nan")),
                field.weights,
            )
        )
    with pytest.raises(InputError, match="finite"):
        predict(field, torch.tensor([[float("inf")]]))
    with pytest.raises(InputError, match="1 channels"):
        predict(Field.of(torch.rand(5, 1), torch.rand(1, 5, 3)))
    with pytest.raises(InputError, match="at least one"):
        predict(field, torch.rand(4, 1), chunk=0)


def test_find_checkpoint_takes_the_newest_of_a_run(tmp_path, predict):
    for step in (10, 9):
        save_checkpoint(tmp_path / "checkpoints" / f"{step:08}", Checkpoint(predict.operator, "tiny", step))
    assert find_checkpoint(tmp_path).name == "00000010"
    assert find_checkpoint(tmp_path / "checkpoints" / "00000009").name == "00000009"
    with pytest.raises(InputError, match="which is none"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="none yet"):
        find_checkpoint(tmp_path / "empty")


def test_read_field_understands_the_documented_forms(tmp_path):
    x, u = np.linspace(0, 1, 7), np.random.default_rng(0).normal(size=7)
    for name, values in (("line", u), ("channels", u[:, None]), ("frames", u[None, :, None])):
        np.savez(tmp_path / f"{name}.npz", coords=x, values=values)
        field = read_field(tmp_path / f"{name}.npz")
        assert field.coords.shape == (7, 1)
        np.testing.assert_allclose(field.values[0, :, 0], u, rtol=1e-6)
    np.save(tmp_path / "points.npy", x)
    assert read_field(tmp_path / "points.npy", values_needed=False).values.shape == (1, 7, 0)
    with pytest.raises(InputError, match="`values`"):
        read_field(tmp_path / "points.npy")
    np.savez(tmp_path / "few.npz", coords=x, values=u[:3])
    with pytest.raises(InputError, match="as many `values`"):
        read_field(tmp_path / "few.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match="plain arrays"):
        read_field(tmp_path / "text.npz")
    np.savez(tmp_path / "objects.npz", coords=np.array([{}], dtype=object), values=u)
    with pytest.raises(InputError, match="plain arrays"):
        read_field(tmp_path / "objects.npz")


def test_too_little_memory_is_said_with_a_way_out(predict, tiny_data, monkeypatch):
    def full(field):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(predict.operator.model, "encode", full)
    monkeypatch.setattr(predict, "memory_gb", 3.0)
    with pytest.raises(OutOfMemory, match=r"1 samples of 32 points at 32 queries.*on cpu.*`memory_gb=1.5`"):
        predict(tiny_data[0].input)


def test_one_frame_of_training_teaches_no_second(predict, tiny_data):
    with pytest.raises(InputError, match=r"one frame of an operator that was trained on one, got times=3.*next input"):
        predict(tiny_data[0].input, times=3)
    assert predict(tiny_data[0].input, times=1).values.shape[0] == 1
    with pytest.raises(InputError, match="at least one time step, got times=0"):
        predict(tiny_data[0].input, times=0)


def far(words: str):
    return pytest.warns(OutsideTraining, match=f"Outside of what it was trained on, and so perhaps wrong: {words}")


def test_what_training_has_not_shown_is_warned_of(predict, tiny_data):
    known = tiny_data[0].input
    with far(r"input points from 0 to 31, in training from 0 to 0\.969"), far("query points from 0 to 31"):
        predict(Field.of(32 * known.coords, known.values))
    with far(r"query points from 5 to 5, "):
        predict(known, torch.full((1, 1), 5.0))
    values = known.values.clone()
    values[0, 3] = 100.0
    with far(r"input channel 0 from -.* to 100, in training from -\d\.\d+ to \d\.\d+$"):
        predict(Field.of(known.coords, values))
    predict.operator.seen = None  # as of weights that are older
    with far(r"input channel 0 from -.* to 100, in training typically "):
        predict(Field.of(known.coords, values))
    near = Field.of(torch.tensor([[-0.1], [1.1]])).batched()
    assert predict.operator.outside(known.batched(), near) == []  # a little outside is not worth a word


def test_padding_may_lie_anywhere(predict, tiny_data):
    known = tiny_data[0].input
    weights = known.weights.clone()
    weights[-1], coords = 0.0, known.coords.clone()
    coords[-1] = 1000.0
    assert predict.operator.outside(Field(coords, known.values, weights).batched(), known.batched()) == []
    assert len(predict.operator.outside(Field(coords, known.values, known.weights).batched(), known.batched())) == 1


def test_query_points_with_their_axes_swapped_are_answered_with_what_to_write(predict, tiny_data):
    swapped = torch.linspace(0, 1, 7)[None]
    with pytest.raises(InputError, match=r"looks transposed: give `query_points\.swapaxes\(-1, -2\)`") as refused:
        predict(tiny_data[0].input, swapped)
    assert "(7, 1)" in str(refused.value)
    assert predict(tiny_data[0].input, swapped.swapaxes(-1, -2)).points == 7


def test_gradients_by_values_and_places_are_those_of_differences(tiny_data):
    predict = predictor_of(tiny_data, {"differentiable": True})
    predict.operator.double()
    field, points = tiny_data[0].input.to(torch.float64), torch.rand(5, 1, dtype=torch.float64)
    values, places = field.values.clone().requires_grad_(), points.clone().requires_grad_()

    def last(values, places):
        return predict.operator(Field(field.coords, values, field.weights).batched(), Field.of(places).batched())

    assert torch.autograd.gradcheck(last, (values, places), fast_mode=True, atol=1e-4)
    by_operator = torch.autograd.grad(last(values, places).sum(), (values, places))
    predict.operator.float()
    single = Field(field.coords.float(), values.detach().float().requires_grad_(), field.weights.float())
    asked = points.float().requires_grad_()
    by_predictor = torch.autograd.grad(predict(single, asked).values.sum(), (single.values, asked))
    for a, b in zip(by_predictor, by_operator, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


# Forward mode makes torch load decompositions that it scripts itself.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_all_of_torch_func_differentiates_the_operator(tiny_data):
    operator = predictor_of(tiny_data).operator.double()
    field, points = tiny_data[0].input.to(torch.float64).batched(), torch.rand(1, 4, 1, dtype=torch.float64)

    def answer(values, places):
        input = Field(field.coords, values, field.weights)
        return operator(input, Field(places, places.new_zeros(1, 1, 4, 0), torch.full((1, 4), 0.25).to(places)))

    backward = torch.func.jacrev(answer, (0, 1))(field.values, points)
    forward = torch.func.jacfwd(answer, (0, 1))(field.values, points)
    for a, b in zip(backward, forward, strict=True):
        torch.testing.assert_close(a, b)
    _, along = torch.func.jvp(answer, (field.values, points), (torch.zeros_like(field.values), torch.ones_like(points)))
    torch.testing.assert_close(along, backward[1].sum((-1, -2, -3)))
    many = torch.stack([field.values, 2 * field.values])
    each = torch.func.vmap(answer, (0, None))(many, points)
    torch.testing.assert_close(each[1], answer(many[1], points))


def test_gradients_are_never_dropped_without_a_word(predict, tiny_data):
    field = tiny_data[0].input
    tracked = Field(field.coords, field.values.clone().requires_grad_(), field.weights)
    with pytest.raises(InputError, match="differentiable=True"):
        predict(tracked)
    with torch.no_grad():
        torch.testing.assert_close(predict(tracked).values, predict(field).values)


def test_the_compiler_of_torch_loses_derivatives_and_is_refused():
    with pytest.raises(InputError, match="Expected `compile` or `differentiable`, got both"):
        Predictor("burgers-demo", "cpu", compile=True, differentiable=True)


def test_an_operator_that_encodes_its_answers_predicts_as_the_operator_does(tiny_data):
    propagator = dataclasses.replace(tiny_recipe().model.propagator, reencode=2)
    predict = predictor_of(tiny_data, frames=5, propagator=propagator)
    batch = collate([tiny_data[0], tiny_data[1]])
    points = Field.of(torch.rand(2, 9, 1))
    with torch.no_grad():
        for query in (Field.of(batch.input.coords), points):
            expected = predict.operator(batch.input, query, 7)
            for settings in ({}, {"chunk": 4}):
                torch.testing.assert_close(predict(batch.input, query, times=7, **settings).values, expected)


def test_answers_that_are_no_numbers_are_warned_of(tiny_data):
    """They came back as NaN without a word."""
    field = tiny_data[0].input
    for settings in ({}, {"differentiable": True}):
        predict = predictor_of(tiny_data, settings)
        with pytest.warns(OutsideTraining) as told:
            predict(Field(field.coords, 1e38 * field.values, field.weights))
        assert "The answer holds 32 NaN or infinite values of 32; check the units of the input" in str(told[-1].message)


def test_weights_that_do_not_sum_to_one_are_refused_and_those_that_mask_are_not(predict, tiny_data):
    """Weights that sum to two changed the answer by 76 %."""
    field = tiny_data[0].input
    with pytest.raises(InputError, match=r"`input.weights` that sum to 1 .* got a sum of 2\. Divide them by their sum"):
        predict(Field(field.coords, field.values, 2 * field.weights))
    half = torch.where(torch.arange(32) % 2 == 0, 2 * field.weights, 0.0)
    thinned = Field.of(field.coords[::2], field.values[:, ::2])
    torch.testing.assert_close(
        predict(Field(field.coords, field.values, half), field.coords).values, predict(thinned, field.coords).values
    )


def test_arrays_of_any_layout_give_the_same_answer(predict, tiny_data):
    """torch takes neither reversed nor byte-swapped arrays, and warns of read-only ones."""
    coords, values = (tensor.numpy() for tensor in (tiny_data[0].input.coords, tiny_data[0].input.values[0]))
    expected = predict(Field.of(coords, values), coords).values
    fixed = coords.copy()
    fixed.flags.writeable = False
    wide = np.repeat(values, 2, axis=1)[:, ::2]
    for changed in (coords[::-1].copy()[::-1], coords.astype(">f8"), coords.astype(np.float64), fixed):
        torch.testing.assert_close(predict(Field.of(changed, wide), changed).values, expected)
    with pytest.raises(InputError, match="real numbers in `values`, got the type complex64"):
        Field.of(coords, values.astype(np.complex64))
    with pytest.raises(InputError, match="real numbers in `query_points`, got the type <U1"):
        predict(tiny_data[0].input, np.full((3, 1), "a"))


def test_plain_arrays_are_the_field_that_they_make(tiny_data):
    """`predict(x, u, q)` is `predict(Field.of(x, u), q)`, also for lists, and on a line without an axis of space."""
    predict, known = predictor_of(tiny_data, frames=2), tiny_data[0].input
    x, u, q = (array.numpy() for array in (known.coords, known.values, torch.rand(9, 1)))
    expected = predict(Field.of(x, u), q, times=2).values
    assert torch.equal(predict(x, u, q, times=2).values, expected)
    assert torch.equal(predict(x[:, 0], u[0, :, 0], query_points=q[:, 0], times=2).values, expected)
    assert torch.equal(predict(x, u).values, predict(known).values)
    with pytest.raises(InputError, match="a Field, or coordinates and their values"):
        predict(x)
    with pytest.raises(InputError, match=r"a Field and query points, got a third argument.*`times=`"):
        predict(known, q, q)
