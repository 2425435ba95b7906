"""The fused iterations against the plain ones. Without a GPU, Triton's interpreter runs the kernels."""

import pytest
import torch

from oformer.meshes.airfoil import Naca
from oformer.meshes.cache import mesh_of
from oformer.solvers import euler_flux, euler_fv
from oformer.solvers.median_dual import median_dual

kernels = pytest.importorskip("oformer.solvers.euler_kernels", exc_type=ImportError)
# The interpreter also computes, and throws away, what lies beyond the last node and trajectory.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes as long for a program of few nodes as for one of many."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "_NODES", 128)


@pytest.fixture(scope="module")
def case():
    """A rough flow around an airfoil at three free streams, in the middle of a step."""
    mesh = mesh_of(Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3))
    dual = median_dual(mesh.points, mesh.triangles, mesh.marks)
    free = euler_fv.free_stream(torch.tensor([0.2, 0.5, 0.7]).double(), torch.tensor([-25.0, 3.0, 25.0]).double())
    stream = euler_fv._conserved(free).reshape(4, 1, 3).float().to(DEVICE)
    generator = torch.Generator().manual_seed(0)

    def rough(size: float) -> torch.Tensor:
        return size * torch.randn(4, len(mesh.points), 3, generator=generator).to(DEVICE)

    weight = (1.5 / 2e-4 * dual.volumes)[:, None].float().to(DEVICE)
    push = weight / 3 * stream * rough(0.01)
    tables = euler_flux.tables_of(dual, torch.float32, DEVICE)
    return stream * (1 + rough(0.05)), stream * (1 + rough(0.05)), push, weight, stream, tables


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Each field to a few units of float32."""
    error, size = (values.flatten(1).norm(dim=1) for values in (got - expected, expected))
    return bool((error <= 3e-6 * size).all())


def test_balance_and_what_sweeps_need(case):
    plain = euler_flux.residual(*case, "jst")
    fused = kernels.fused_residual(*case, euler_flux.border)
    for name, got, expected in zip(("balance", "basis", "inverse", "blocks", "d"), fused, plain, strict=True):
        assert got.shape == expected.shape, name
        assert close(got, expected), name


def test_a_sweep(case):
    balance, basis, inverse, blocks, d = euler_flux.residual(*case, "jst")
    plain = euler_flux.sweep(d, balance, basis, inverse, blocks, case[-1])
    fused = kernels.fused_sweep(d.contiguous(), balance, basis, inverse, blocks, case[-1])
    assert close(fused, plain)
    assert not close(d, plain)


def test_trajectories_do_not_see_each_other(case):
    state, now, push, weight, free, tables = case
    together = kernels.fused_residual(*case, euler_flux.border)
    alone = kernels.fused_residual(
        *(part[..., 1:2].contiguous() for part in (state, now, push)), weight, free[..., 1:2], tables, euler_flux.border
    )
    for whole, one in zip(together, alone, strict=True):
        # A compiler may order the operations of one trajectory otherwise than those of three.
        assert torch.equal(whole[..., 1:2], one) if DEVICE.type == "cpu" else close(whole[..., 1:2], one)
