"""Sums over programs against plain sums. Without a GPU, Triton's interpreter runs the kernel."""

import pytest
import torch

sums = pytest.importorskip("oformer.engine.kernels.partial_sums_kernels", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "shape", [(1, 3), (0, 3), (512, 20), (513, 5, 7), (2485, 2, 16), (700, 2, 0), (40_000, 1)], ids=str
)
def test_rows_are_added_up_the_same_each_time(shape):
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = sums.added_up(rows)
    torch.testing.assert_close(found, rows.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert found.shape == shape[1:]
    assert torch.equal(found, sums.added_up(rows))


def test_every_row_counts_once():
    for count in (511, 512, 513, 1243, 2488):
        rows = torch.arange(1.0, count + 1, device=DEVICE)[:, None].expand(-1, 17).contiguous()
        assert (sums.added_up(rows) == count * (count + 1) / 2).all()  # exact: whole numbers below 2²⁴
