"""Whether fused kernels are used, and who assembles them."""

import os
import re
from pathlib import Path

import pytest
import torch

import oformer
from oformer import gpu

GPU = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A torch that has a Hopper GPU and lies in a folder; returns where it would bring its assembler."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that it is put back afterwards
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.delenv("OFORMER_FUSED", raising=False)
    gpu._choose_assembler.cache_clear()
    yield tmp_path / "bin" / "ptxas"
    gpu._choose_assembler.cache_clear()


def bring(assembler, mode: int = 0o755) -> None:
    assembler.parent.mkdir()
    assembler.touch(mode)


def test_kernels_are_assembled_by_what_comes_with_torch(hopper):
    bring(hopper)
    assert gpu.fused_kernels(GPU, "vorticity")
    assert os.environ["TRITON_PTXAS_PATH"] == str(hopper)


def test_the_choice_of_a_user_stays(hopper, monkeypatch):
    bring(hopper)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/their/ptxas")
    assert gpu.fused_kernels(GPU, "vorticity")
    assert os.environ["TRITON_PTXAS_PATH"] == "/their/ptxas"


def test_a_torch_without_an_assembler_leaves_it_to_triton(hopper):
    assert gpu.fused_kernels(GPU, "vorticity")
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_where_kernels_are_not_used_nothing_is_set(hopper, monkeypatch):
    bring(hopper)
    monkeypatch.setenv("OFORMER_FUSED", "0")
    assert not gpu.fused_kernels(GPU, "vorticity")
    assert not gpu.fused_kernels(torch.device("cpu"), "vorticity")
    monkeypatch.setenv("OFORMER_FUSED", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not gpu.fused_kernels(GPU, "vorticity")
    assert "TRITON_PTXAS_PATH" not in os.environ


def test_files_with_kernels_say_so_in_their_names():
    """Shape checks leave out `*_kernels.py`, and so does the type checker: rewritten, a kernel does not compile."""
    package = Path(oformer.__file__).parent
    found = [path for path in package.rglob("*.py") if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.M)]
    assert found
    assert [path.name for path in found if not path.stem.endswith("_kernels")] == []
