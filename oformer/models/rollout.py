"""Whether the rollout of a model is done in fused kernels, and by whom."""

import functools

import torch

from oformer.switches import kernels_on


@functools.cache
def fused_rollout(index: int, step: tuple[tuple[int, int], ...], read: tuple[tuple[int, int], ...]) -> bool:
    """Whether a CUDA device has a fused rollout for networks with matrices of these shapes (out, in).

    Its kernels are written for the tensor cores and the asynchronous copies of Hopper GPUs.
    """
    device = torch.device("cuda", index)
    kernels = kernels_on(device, "oformer.nn.rollout_kernels")
    return kernels is not None and kernels.supported(device, step, read)
