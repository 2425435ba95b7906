"""Whether fused GPU kernels are used: automatic where they can run, and off for a whole process by one setting.

`OFORMER_FUSED=0` in the environment selects the plain code everywhere.
"""

import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import torch


def fused_kernels(device: torch.device) -> bool:
    """Whether this device runs the fused kernels: a CUDA GPU with tensor cores for bfloat16, and Triton installed."""
    if os.environ.get("OFORMER_FUSED", "1") == "0" or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and importlib.util.find_spec("triton") is not None


def kernels_on(device: torch.device, module: str) -> ModuleType | None:
    """A module of fused kernels, or None where the device does not run them.

    Some are written in a part of Triton that may change; where it has changed, a warning says that the plain code is
    used.
    """
    if not fused_kernels(device):
        return None
    try:
        return importlib.import_module(module)
    except ImportError as error:
        warnings.warn(f"{module} needs Triton 3.6 or a like one; using plain code ({error})", stacklevel=3)
        return None
