"""Fine-tuning: at first the answers are those of the start; parts are frozen; what cannot fit is refused."""

import dataclasses

import pytest
import torch

from oformer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, save_checkpoint
from oformer.data.dataset import PointDataset
from oformer.errors import InputError, OutsideTraining
from oformer.fields import Field, Sample, Spec, collate
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.training.loop import train
from oformer.training.optimizers import Descent, Optimizer
from oformer.training.recipe import Data, Recipe, Training
from oformer.training.start import begin_from, starting_from
from tests.models.test_contract import CASES, filled

SPEC = Spec(dim=2, in_times=2, in_channels=2, out_times=3, out_channels=1, grid=(4, 4))
MODEL: OFormerConfig = dataclasses.replace(CASES["navier-stokes"].config, rotary="ladder")


def dataset(spec: Spec, count: int = 4, scale: float = 1.0) -> PointDataset:
    generator = torch.Generator().manual_seed(0)
    n = 16 if spec.grid is None else spec.grid[0] ** 2
    side = torch.linspace(0, 1, round(n**0.5))
    coords = torch.cartesian_prod(*[side] * spec.dim) if spec.dim > 1 else torch.linspace(0, 1, n)[:, None]

    def values(times: int, channels: int) -> torch.Tensor:
        return scale * (1 + torch.randn(times, len(coords), channels, generator=generator))

    known = [Field.of(coords, values(spec.in_times, spec.in_channels)) for _ in range(count)]
    return PointDataset(
        [Sample(f, Field.of(coords), values(spec.out_times, spec.out_channels)) for f in known], spec=spec
    )


def trained(spec: Spec = SPEC, kind: str = "channel", model: OFormerConfig = MODEL) -> Checkpoint:
    scales = Normalization(kind, kind, "from-zero")
    operator = Operator(filled(model.build(spec)), scales).fit(dataset(spec)).eval()
    return Checkpoint(operator, "teacher", 7)


def recipe(steps: int = 2, **training) -> Recipe:
    optimizer = Optimizer(kind="muon", **training.pop("optimizer", {}))
    settings = Training(steps=steps, batch=2, optimizer=optimizer, evaluate_every=steps, checkpoint_every=1)
    return Recipe("pupil", Data(4, 4), MODEL, dataclasses.replace(settings, **training))


def pupil(start: Checkpoint, data: PointDataset) -> Operator:
    found, _ = starting_from(recipe(), start)
    operator = Operator(found.model.build(data.spec), found.normalization).eval()
    begin_from(operator, start, data)
    return operator


def answer(operator: Operator, field: Field, query: Field) -> torch.Tensor:
    with torch.no_grad():
        return operator(field, query)


def test_new_channels_change_nothing_before_the_first_step():
    """Two inputs, and one output, more: the answers of the start stay, and the new one is its mean."""
    start, wide = trained(), dataclasses.replace(SPEC, in_channels=4, out_channels=2)
    data = dataset(wide, scale=3.0)
    operator, batch = pupil(start, data), collate([data[0], data[1]])
    fewer = batch.input.with_values(batch.input.values[..., :2])
    found = answer(operator, batch.input, batch.query)
    torch.testing.assert_close(found[..., :1], answer(start.operator, fewer, batch.query), rtol=1e-5, atol=1e-5)
    mean = torch.cat([sample.target[..., 1] for sample in data]).mean()
    torch.testing.assert_close(found[..., 1], mean.expand_as(found[..., 1]))
    # Of the new channels the statistics are those of the data; and they have a gradient, so that they are learned.
    third = torch.cat([sample.input.values[..., 2] for sample in data])
    torch.testing.assert_close(operator.input_scale.shift[2], third.mean())
    assert torch.equal(operator.input_scale.shift[:2], start.operator.input_scale.shift)
    operator(batch.input, batch.query).square().sum().backward()
    weight = operator.get_parameter("model.lift.layers.0.weight")
    assert weight.grad is not None
    new_columns = [2, 3, 6, 7]  # of two frames with four channels each
    assert (weight[:, new_columns] == 0).all()
    assert (weight.grad[:, new_columns].abs().amax(0) > 0).all()


@pytest.mark.parametrize("kind", ["channel", "pointwise"])
def test_another_resolution_keeps_the_answers(kind):
    """Statistics of each grid point are taken between the points: at those of both grids they are equal."""
    start, data = trained(kind=kind), dataset(dataclasses.replace(SPEC, grid=(7, 7)))
    operator, sample = pupil(start, data), dataset(SPEC)[0]
    fields = sample.input.batched(), sample.query.batched()
    torch.testing.assert_close(answer(operator, *fields), answer(start.operator, *fields), rtol=1e-4, atol=1e-5)
    assert operator.spec.grid == (7, 7)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec(1, 2, 2, 3, 1), "teacher to start from: dim 2, got dim 1"),
        (dataclasses.replace(SPEC, in_times=1), "in_times 2, got in_times 1"),
        (dataclasses.replace(SPEC, in_channels=1), "in_channels 2, got in_channels 1"),
        (dataclasses.replace(SPEC, out_times=1), "out_times 3, got out_times 1"),
    ],
)
def test_what_cannot_fit_is_refused_with_both_sides(spec, words, tmp_path):
    data = dataset(dataclasses.replace(spec, grid=None))
    with pytest.raises(InputError, match=words):
        train(recipe(), tmp_path, (data, data), start=trained(), quiet=True)


def test_a_model_of_another_size_is_refused_with_both_sides():
    start, data = trained(), dataset(SPEC)
    wider = dataclasses.replace(MODEL, decoder=dataclasses.replace(MODEL.decoder, hidden=(9, 6)))
    with pytest.raises(InputError, match=r"teacher: `heads.0.layers.0.weight` of shape \(8, 16\), got shape \(9, 16\)"):
        begin_from(Operator(wider.build(SPEC), start.operator.normalization), start, data)


def test_data_far_from_those_of_the_start_are_warned_of():
    with pytest.warns(OutsideTraining, match=r"normalization of teacher is kept.*input channel 0"):
        pupil(trained(), dataset(SPEC, scale=1e3))


def test_a_run_records_its_start_freezes_parts_and_resumes(tmp_path):
    start, data = trained(), dataset(SPEC)
    save_checkpoint(tmp_path / "teacher", start)
    frozen = recipe(optimizer={"rates": (("encoder", 0.0), ("decoder", 0.1))})
    outcome = train(frozen, tmp_path / "run", (data, data), start=tmp_path / "teacher", quiet=True)
    before, after = start.operator.model.state_dict(), outcome.operator.model.state_dict()
    parts = {id(p): part for part, ps in outcome.operator.model.parts().items() for p in ps}
    for name, p in outcome.operator.model.named_parameters():
        assert torch.equal(before[name], after[name]) == (parts[id(p)] == "encoder"), name
        assert p.requires_grad
    kept = load_checkpoint(find_checkpoint(tmp_path / "run"))
    assert kept.provenance["started from"] == "teacher, step 7"
    assert kept.recipe is not None
    assert kept.recipe["start"]["name"] == "teacher"
    assert len(kept.recipe["start"]["checksum"]) == 64
    assert str(tmp_path) not in (find_checkpoint(tmp_path / "run") / "config.json").read_text()
    # The same call goes on, here from its end; another start, or none in a new folder, is refused.
    again = train(frozen, tmp_path / "run", (data, data), start=tmp_path / "teacher", quiet=True)
    assert again.step == outcome.step
    with pytest.raises(InputError, match=r"other settings \(start.checksum"):
        train(frozen, tmp_path / "run", (data, data), start=kept, quiet=True)
    named, _ = starting_from(frozen, start)
    with pytest.raises(InputError, match="the operator teacher to start from"):
        train(named, tmp_path / "new", (data, data), quiet=True)


def test_rates_by_part_scale_the_first_step():
    """Of AdamW without decay the first step of each number is its rate, whatever the gradient."""
    operator = trained().operator
    before = {name: p.detach().clone() for name, p in operator.model.named_parameters()}
    descent = Descent(operator, Optimizer(rate=1e-3, weight_decay=0.0, rates=(("decoder", 0.25),)))
    for p in operator.model.parameters():
        p.grad = torch.ones_like(p)
    descent.step(1.0, 0.9)
    parts = {id(p): part for part, ps in operator.model.parts().items() for p in ps}
    for name, p in operator.model.named_parameters():
        expected = 1e-3 * (0.25 if parts[id(p)] == "decoder" else 1.0)
        torch.testing.assert_close(before[name] - p, torch.full_like(p, expected), rtol=1e-2, atol=1e-7)
    with pytest.raises(InputError, match="all of them frozen"):
        Descent(operator, Optimizer(rates=(("all", 0.0),)))
