"""Predictor: anywhere, in chunks, in physical units, and honest about what it cannot do."""

import dataclasses

import numpy as np
import pytest
import torch

from oformer.checkpoint import Checkpoint, save_checkpoint
from oformer.errors import InputError
from oformer.fields import Field, collate
from oformer.models import Operator
from oformer.predict import Predictor, find_checkpoint, read_field
from tests.tiny import tiny_recipe


def predictor_of(tiny_data, **model):
    recipe = tiny_recipe()
    torch.manual_seed(0)
    config = dataclasses.replace(recipe.model, **model)
    operator = Operator(config.build(tiny_data.spec), recipe.normalization).fit(tiny_data)
    return Predictor(Checkpoint(operator, "tiny"), device="cpu")


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
def test_coupled_queries_are_never_chunked_silently(tiny_data, norm):
    """Fourier attention that normalizes over the queries: the same point gets another answer in other company."""
    predict = predictor_of(tiny_data, norm=norm)
    field, points = tiny_data[0].input, torch.rand(12, 1)
    assert not predict.operator.model.queries_independent
    with pytest.raises(InputError, match="influence each other"):
        predict(field, points, chunk=5)
    together, apart = predict(field, points).values[:, :3], predict(field, points[:3]).values
    assert (together - apart).norm() > 1e-3 * together.norm()


def test_more_steps_than_trained_and_a_batch_of_inputs_on_shared_queries(predict, tiny_data):
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
