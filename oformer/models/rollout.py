"""Whether the rollout of a model is done in fused kernels, and by whom."""

import functools
import warnings

import torch

from oformer.switches import fused_kernels


@functools.cache
def fused_rollout(index: int, step: tuple[tuple[int, int], ...], read: tuple[tuple[int, int], ...]) -> bool:
    """Whether a CUDA device has a fused rollout for networks with matrices of these shapes (out, in).

    Its kernels are written for the tensor cores and the asynchronous copies of Hopper GPUs, in a part of Triton that
    may change; where it has changed, the plain code is used, and one warning says so.
    """
    device = torch.device("cuda", index)
    if not fused_kernels(device):
        return False
    try:
        from oformer.nn.rollout_kernels import supported
    except ImportError as error:
        warnings.warn(f"The fused rollout needs Triton 3.6 or a like one; using plain code ({error})", stacklevel=2)
        return False
    return supported(device, step, read)
