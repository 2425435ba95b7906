"""The latent study: R² near one where latents hold a parameter linearly, none where it is random."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from oformer.data.dataset import PointDataset
from oformer.errors import InputError
from oformer.experiments.latents import linear_map, pooled, principal_components, r_squared, study_latents
from oformer.models import Normalization, Operator
from oformer.models.base import OperatorModel
from tests.tiny import tiny_recipe

SAMPLES, POINTS = 120, 30


class Known(OperatorModel):
    """An encoder whose latents are known: the values beside their product with fixed random numbers."""

    def __init__(self, spec):
        super().__init__()
        self.spec, self.mix = spec, nn.Linear(1, 5)

    def encode(self, input):
        return torch.cat([input.values[:, 0], self.mix(input.values[:, 0])], -1)


def dataset(seed: int, chance: bool = False) -> PointDataset:
    """Samples whose mean over the points is log10 of their viscosity, or has nothing to do with it."""
    random = np.random.default_rng(seed)
    nu = 10 ** random.uniform(-5.3, -3, SAMPLES)
    x, weights = random.uniform(0, 1, (SAMPLES, POINTS, 1)), random.uniform(0.1, 1, (SAMPLES, POINTS))
    weights /= weights.sum(1, keepdims=True)
    values = random.standard_normal((SAMPLES, POINTS))
    wanted = random.standard_normal(SAMPLES) if chance else np.log10(nu)
    values += (wanted - (weights * values).sum(1))[:, None]  # the weighted mean, and no other
    return PointDataset.from_arrays(x, values, values, weights=weights, parameters={"viscosity": nu})


def operator(data: PointDataset) -> Operator:
    return Operator(Known(data.spec), Normalization(input="none", target="none", coords="as-is")).fit(data).eval()


def test_a_parameter_that_latents_hold_linearly_is_found_and_a_random_one_is_not(tmp_path):
    train, test = dataset(0), dataset(1)
    study = study_latents(operator(train), train, test)
    assert (study.name, study.channels) == ("log10 viscosity", 6)
    assert study.r2 > 0.999999
    assert study.variance[0] == pytest.approx(1, abs=1e-6)  # all six channels are functions of one number
    order = np.argsort(study.trained)
    along = np.array(study.components)[order, 0]
    assert (np.diff(along) > 0).all() or (np.diff(along) < 0).all()
    plain = study_latents(operator(train), train, test, logarithm=False)
    assert 0.3 < plain.r2 < 0.95  # the parameter itself is no linear function of its logarithm
    train, test = dataset(0, chance=True), dataset(1, chance=True)
    assert study_latents(operator(train), train, test).r2 < 0.1
    numbers, picture = study.write(tmp_path)
    assert json.loads(numbers.read_text())["r2"] == study.r2
    assert picture.stat().st_size > 5000


def test_latents_are_averaged_by_quadrature_and_batches_change_nothing():
    data = dataset(2)
    model = operator(data)
    z, parameters = pooled(model, data, batch=7)
    assert z[:, 0].tolist() == pytest.approx(parameters["viscosity"].log10().tolist(), abs=1e-5)
    assert torch.allclose(z, pooled(model, data, batch=64)[0])


def test_what_cannot_be_studied_is_refused():
    train, test = dataset(0), dataset(1)
    model = operator(train)
    with pytest.raises(InputError, match=r"recorded parameter that varies, got `mach`.*viscosity"):
        study_latents(model, train, test, "mach")
    with pytest.raises(InputError, match="more training samples than the 6 channels"):
        study_latents(model, train.subset(range(7)), test)
    bare = PointDataset.from_arrays(np.zeros((9, 4, 1)), np.ones((9, 4)), np.ones((9, 4)))
    with pytest.raises(InputError, match="one recorded parameter that varies from sample to sample, got none"):
        study_latents(operator(bare), bare, bare)


def test_the_linear_map_is_exact_where_there_is_one_and_ignores_what_is_constant():
    torch.manual_seed(0)
    z = torch.randn(50, 4, dtype=torch.float64)
    z = torch.cat([z, z[:, :1], torch.full((50, 1), 3.0)], 1)  # a repeated and a constant channel
    values = z[:, :4] @ torch.arange(1.0, 5, dtype=torch.float64) + 2
    found = linear_map(z[:30], values[:30])(z[30:])
    assert r_squared(found, values[30:]) == pytest.approx(1, abs=1e-12)
    assert r_squared(values.mean().expand(50), values) == pytest.approx(0, abs=1e-12)
    projected, shares = principal_components(z)
    assert shares.sum().item() == pytest.approx(1)
    assert projected.T @ projected == pytest.approx(torch.diag(torch.diag(projected.T @ projected)), abs=1e-9)


def test_an_operator_of_a_recipe_is_encoded():
    recipe = tiny_recipe()
    data = PointDataset(recipe.problem.samples(range(6), 0), spec=recipe.problem.spec, view=recipe.data.view)
    model = Operator(recipe.model.build(data.spec), recipe.normalization).fit(data).eval()
    z, parameters = pooled(model, data, batch=4)
    assert z.shape == (6, recipe.model.query.width)
    assert parameters == {}
