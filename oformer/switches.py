"""Whether fused GPU kernels are used: automatic where they can run, and off for a whole process by one setting.

`OFORMER_FUSED=0` in the environment selects the plain code everywhere. What kernels have to know beside the device, the
type of products and whether a model is exported, is asked here too; and who assembles them is chosen here.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def fused_kernels(device: torch.device) -> bool:
    """Whether this device runs the fused kernels: a CUDA GPU with tensor cores for bfloat16, and Triton installed."""
    if os.environ.get("OFORMER_FUSED", "1") == "0" or device.type != "cuda" or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0) or importlib.util.find_spec("triton") is None:
        return False
    _choose_assembler()
    return True


@functools.cache
def _choose_assembler() -> None:
    """Have Triton assemble kernels with the ptxas that comes with torch, where there is one and nobody chose another.

    torch.compile does so too, but only once it compiles something: where it finds all in the cache of an earlier run,
    kernels would go to Triton's own ptxas, and be others than in that run (docs/log.md has one that then crashed).
    """
    ptxas = Path(torch.__file__).parent / "bin" / "ptxas"
    if os.access(ptxas, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


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
        warnings.warn(f"{module} needs Triton 3.5 to 3.9 or a like one; using plain code ({error})", stacklevel=3)
        return None


def constant_when_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile take what a function answers for given.

    `torch.compiler.assume_constant_result` does the same, and loads the compiler here and now, which takes seconds.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@constant_when_compiling  # it is none, but torch.compile watches the precision, and compiles again where it changes
def rounded_products() -> bool:
    """Whether products of float32 numbers may round their factors, and so use tensor cores."""
    return torch.get_float32_matmul_precision() != "highest"


def type_of_products(x: Tensor) -> torch.dtype:
    """What the factors of a product with x are rounded to, as autocast says."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def exporting() -> bool:
    """Whether a model is being exported, which knows no kernels. Before torch 2.12 any compiler says so."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
