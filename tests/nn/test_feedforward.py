"""Point-wise networks, against their formulas written out with erf."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from oformer.nn.feedforward import MLP, GatedGELU

pytestmark = pytest.mark.usefixtures("float64")


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def by_hand(network: MLP, x: Tensor, activation) -> Tensor:
    """Layer by layer, the activation between them and not after the last."""
    for n, layer in enumerate(network.layers):
        x = (x if n == 0 else activation(x)) @ layer.weight.T
        if layer.bias is not None:
            x = x + layer.bias
    return x


@pytest.mark.parametrize("widths", [(3, 5), (3, 7, 5), (3, 7, 6, 4, 5)])
@pytest.mark.parametrize(("activation", "function"), [("gelu", gelu), ("relu", relu)])
@pytest.mark.parametrize(("bias", "last_bias"), [(False, False), (True, False), (False, True), (True, True)])
def test_mlp_equals_its_formula(widths, activation, function, bias, last_bias):
    network = MLP(widths, activation, bias=bias, last_bias=last_bias)
    assert [(layer.in_features, layer.out_features) for layer in network.layers] == list(itertools.pairwise(widths))
    wanted = [bias] * (len(widths) - 2) + [last_bias]
    assert [layer.bias is not None for layer in network.layers] == wanted
    x = torch.randn(2, 4, 3)
    close(network(x), by_hand(network, x, function))


def test_mlp_has_no_biases_unless_asked():
    assert all(layer.bias is None for layer in MLP((3, 4, 5)).layers)


@pytest.mark.parametrize("widths", [(3, 5), (3, 7, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_context_is_as_good_as_concatenated(widths, bias):
    network = MLP(widths, context=2, bias=bias, last_bias=bias)
    x, context = torch.randn(2, 4, 3), torch.randn(2, 4, 2)
    together = by_hand(network, torch.cat([x, context], -1), gelu)
    close(network(x, context), together)
    assert (network(x, 0 * context) - together).abs().max() > 1e-3
    parameters = list(network.parameters())
    for one, other in zip(
        torch.autograd.grad(network(x, context).square().sum(), parameters),
        torch.autograd.grad(together.square().sum(), parameters),
        strict=True,
    ):
        close(one, other)


def test_a_context_that_samples_share_is_multiplied_once():
    network, seen = MLP((3, 7, 5), context=2), []
    from_context = network.from_context
    network.from_context = lambda context: seen.append(context.shape) or from_context(context)
    x, context = torch.randn(6, 4, 3), torch.randn(1, 4, 2).expand(6, -1, -1)
    close(network(x, context), by_hand(network, torch.cat([x, context], -1), gelu))
    assert seen == [(1, 4, 2)]


def test_mlp_dropout_comes_after_each_activation_and_after_the_last_layer():
    network = MLP((3, 400, 300), "relu", dropout=0.5, bias=True, last_bias=True)
    nn.init.zeros_(network.layers[0].weight)
    nn.init.ones_(network.layers[0].bias)
    nn.init.constant_(network.layers[1].weight, 1 / 400)
    nn.init.ones_(network.layers[1].bias)
    x = torch.randn(50, 3)
    noisy = network(x)
    kept = noisy != 0
    assert 0.45 < kept.double().mean() < 0.55  # the last dropout
    # All channels of a row share the hidden layer: 2 (1 + 2 kept/400), a different number of kept ones in each row.
    rows = noisy.amax(1)
    close(noisy, torch.where(kept, rows[:, None], torch.zeros_like(noisy)))
    hidden = (rows / 2 - 1) * 200
    close(hidden, hidden.round())
    assert 4 < hidden.std() < 16  # binomial: 10
    close(network.eval()(x), torch.full((50, 300), 2.0))


def test_gated_gelu_equals_its_formula():
    layer = GatedGELU(4)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate.weight": (8, 4),
        "gate.bias": (8,),
        "out.weight": (4, 4),
        "out.bias": (4,),
    }
    x = torch.randn(2, 3, 4)
    inner = x @ layer.gate.weight.T + layer.gate.bias
    expected = (gelu(inner[..., :4]) * inner[..., 4:]) @ layer.out.weight.T + layer.out.bias
    close(layer(x), expected)


def test_gated_gelu_drops_inside_and_at_the_end():
    layer = GatedGELU(400, dropout=0.5)
    nn.init.zeros_(layer.gate.weight)
    nn.init.ones_(layer.gate.bias)
    nn.init.constant_(layer.out.weight, 1 / 400)
    nn.init.ones_(layer.out.bias)
    x = torch.randn(30, 400)
    noisy, one = layer(x), float(gelu(torch.ones(())))
    kept = noisy != 0
    assert 0.45 < kept.double().mean() < 0.55
    inside = (noisy.amax(1) / 2 - 1) * 200 / one
    close(inside, inside.round())
    assert inside.std() > 3
    close(layer.eval()(x), torch.full((30, 400), 1 + one))
