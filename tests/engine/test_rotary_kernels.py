"""Rotary tables in one operator and one kernel against the plain ones."""

import pytest
import torch

from oformer.nn.rotary import Rotary
from tests.forked import printed

COMPILED = """
import torch
from oformer.engine.rotary import FusedRotary

layer, x = FusedRotary(2, 16, multiplier=3.0), torch.randn(3, 7, 2, 16, requires_grad=True)
turned = Compiled(lambda x, coords: layer(x, layer.tables(coords)))
turned.check([x, torch.rand(1, 7, 2).expand(3, -1, -1)], [x])
"""


def test_a_compiled_layer_computes_each_table_once():
    """Or each sample and head would compute the same cosines again. Without the shape checks, which cannot compile."""
    (nodes,) = printed(COMPILED)
    assert nodes.count("oformer.turns") == 1
    assert "cos" not in nodes
    assert "sin" not in nodes


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_tables_in_one_kernel_are_the_plain_ones(dim):
    """Also of many thousands of radians; without a GPU in Triton's interpreter."""
    kernels = pytest.importorskip("oformer.engine.kernels.rotary_kernels", exc_type=ImportError)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    coords = torch.rand(3, 71, dim + 2, device=device)[..., 1:-1] - 0.3
    layer = Rotary(dim, 12, multiplier=20_000.0).to(device)
    found, expected = kernels.turns(coords, layer.frequencies), layer.tables(coords)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
