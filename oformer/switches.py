"""Whether fused GPU kernels are used: automatic where they can run, and off for a whole process by one setting.

`OFORMER_FUSED=0` in the environment selects the plain code everywhere.
"""

import importlib.util
import os

import torch


def fused_kernels(device: torch.device) -> bool:
    """Whether this device runs the fused kernels: a CUDA GPU with tensor cores for bfloat16, and Triton installed."""
    if os.environ.get("OFORMER_FUSED", "1") == "0" or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and importlib.util.find_spec("triton") is not None
