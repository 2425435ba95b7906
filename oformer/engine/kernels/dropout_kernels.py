"""Dropout inside of kernels, by random numbers that the way back finds again.

They follow from a seed on the device, so that a recorded step draws afresh whenever it runs, and from the numbers of
point and channel, so that the way back drops the same. Each point has a sequence of its own (SplitMix; Steele, Lea and
Flood, 2014) with the hash of MurmurHash3: Philox for each channel would take several times longer than the memory.
"""

import triton
import triton.language as tl


@triton.jit
def _mixed(z):
    """A hash whose high bits depend on all bits; with `z ^ (z >> 16)` afterwards so do the others."""
    z = (z ^ (z >> 16)) * 0x85EBCA6B
    return (z ^ (z >> 13)) * 0xC2B2AE35


@triton.jit
def sequences(seed, point, DROPOUT: tl.constexpr):
    """Where the sequence of each point begins, as a column."""
    start = point.to(tl.uint32)
    if DROPOUT > 0:
        key = tl.load(seed)
        start = _mixed(start * 0x9E3779B9 + key.to(tl.uint32))
        start = _mixed((start ^ (start >> 16)) + (key >> 32).to(tl.uint32))
    return start[:, None]


@triton.jit
def dropped(values, start, number, DROPOUT: tl.constexpr):
    """Zero where the sequence is low, and scaled up elsewhere; each column has its number in the sequence."""
    if DROPOUT > 0:
        z = _mixed(start + (number.to(tl.uint32) * 0x9E3779B9)[None, :])
        values = tl.where(z < int(DROPOUT * 4294967296), 0.0, values * (1.0 / (1.0 - DROPOUT)))
    return values
