"""Cosines and sines of coordinates times frequencies in one kernel; the plain twin is `_turns` in `rotary.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # angles of a program


def turns(coords: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of all angles (..., dim x pairs), in float32.

    Args:
        coords: (..., dim).
        frequencies: (dim, pairs).
    """
    coords = coords.contiguous()
    cos = coords.new_empty(*coords.shape[:-1], frequencies.numel())
    sin = torch.empty_like(cos)
    with torch.cuda.device_of(coords):  # Triton starts kernels on the current device
        _turn[(triton.cdiv(cos.numel(), _BLOCK),)](
            coords, frequencies.contiguous(), cos, sin, cos.numel(), *frequencies.shape, BLOCK=_BLOCK
        )
    return cos, sin


@triton.jit
def _turn(coords, frequencies, cos, sin, angles, dim, pairs, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there, angle = at < angles, at % (dim * pairs)
    coord = tl.load(coords + at // (dim * pairs) * dim + angle // pairs, mask=there, other=0.0)
    phase = coord * tl.load(frequencies + angle, mask=there, other=0.0)
    tl.store(cos + at, tl.cos(phase), mask=there)
    tl.store(sin + at, tl.sin(phase), mask=there)
