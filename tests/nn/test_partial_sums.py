"""Sums over programs against plain sums. Without a GPU, Triton's interpreter runs the kernel."""

import pytest
import torch

sums = pytest.importorskip("oformer.nn.partial_sums", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(1, 3), (700, 5, 7), (256, 2, 16), (3, 2, 0)], ids=str)
def test_rows_are_added_up_the_same_each_time(shape):
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = sums.added_up(rows)
    torch.testing.assert_close(found, rows.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found, sums.added_up(rows))
