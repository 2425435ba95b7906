"""Shared by the tests of kernels."""

import pytest
import torch

from oformer.engine import attention
from oformer.engine.attention import FusedAttention


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """Triton's interpreter multiplies the bits of bfloat16 numbers; have it multiply the numbers."""
    if torch.cuda.is_available():
        return
    try:
        from triton import language
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:  # those tests are skipped
        return
    original = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        a, b = (self.create_fp_ext(x, language.float32) if x.dtype == language.bfloat16 else x for x in (a, b))
        return original(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def on_chip(monkeypatch):
    """Have self-attention sum in its kernels on any device, and for float32, too."""

    def summed(self, x, weights) -> bool:
        return self.kind == "galerkin" and self._fits_on_chip(x, weights) and self._projects_on_chip(x)

    monkeypatch.setattr(attention, "fused_arrangement", lambda device: True)
    monkeypatch.setattr(attention, "rounded_products", lambda: True)
    monkeypatch.setattr(FusedAttention, "_sums_on_chip", summed)
