"""Whether the rollout of a model is done in fused kernels, and by whom."""

import functools
import warnings

import torch

from oformer.gpu import kernels_on

Shapes = tuple[tuple[int, int], ...]  # of matrices (out, in)


@functools.cache
def fused_rollout(index: int, step: Shapes, read: Shapes, activation: str, dtype: torch.dtype, keep: bool) -> bool:
    """Whether a CUDA device has a fused rollout for such networks, and it says what plain code says.

    Its kernels are written for the tensor cores and the asynchronous copies of Hopper GPUs.

    Args:
        index: of the device.
        step: shapes of the matrices of a step.
        read: shapes of those that read values.
        activation: between the latter.
        dtype: of products.
        keep: whether gradients will be asked for, which is another kernel.
    """
    device = torch.device("cuda", index)
    kernels = kernels_on(device, "oformer.nn.rollout_kernels")
    if kernels is None or not kernels.supported(device, step, read):
        return False
    try:
        with torch.set_grad_enabled(keep):
            wrong = None if kernels.agrees(device, step, read, activation, dtype) else "its values are wrong"
    except Exception as error:  # whatever the compiler of kernels raises: plain code does the same, slower
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        warnings.warn(f"The fused rollout does not work here; using plain code ({wrong})", stacklevel=3)
    return wrong is None
