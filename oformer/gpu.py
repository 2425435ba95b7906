"""The choice of a device, and what a GPU can do here: run fused kernels, and replay recorded work.

Fused code is used wherever it can run; `OFORMER_FUSED=0` in the environment selects the plain code everywhere in a
process, and `OFORMER_FUSED=attention,rollout` everywhere but in these rows of `ROWS`. The type of products, whether a
model is being exported, and the ptxas that assembles kernels are found here too.

Recorded work is started at one stroke, instead of kernel by kernel from Python. What is recorded reads and writes the
same memory each time, with the plain numbers of its first time: what changes must lie in tensors that stay where they
are. Random numbers are drawn anew at each replay, as without a record.
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

from oformer.errors import InputError, unknown_name

Work = Callable[[], None]
# Turns work into a replay of it: the same kernels on the same tensors. The number says how often to do the work first
# where it is recorded; it is 0 for work that must not be done twice, which was then done elsewhere before.
Record = Callable[[Work, int], Work]


# Everything that may be switched by OFORMER_FUSED, with the module of its kernels if it has some of its own.
ROWS: dict[str, str | None] = {
    "attention": "oformer.engine.kernels.attention_kernels",  # FusedAttention
    "sums": "oformer.engine.kernels.attention_sums_kernels",  # in it: KᵀV inside the projection kernel
    "lookup": "oformer.engine.kernels.attention_lookup_kernels",  # in it: queries meet the sums in one kernel
    "norm": "oformer.engine.kernels.norm_kernels",  # before the lookup
    "blocks": None,  # FusedSelfAttentionBlock and FusedCrossAttentionBlock
    "feedforward": "oformer.engine.kernels.feedforward_kernels",  # in them: the second half of a block
    "rotary": "oformer.engine.kernels.rotary_kernels",  # FusedRotary
    "rollout": "oformer.engine.kernels.rollout_kernels",  # FusedOFormer
    "adam": "oformer.engine.kernels.adam_kernels",
    "euler": "oformer.solvers.euler_kernels",
    "vorticity": "oformer.solvers.vorticity_kernels",
}


def compute_device(asked: torch.device | str | None = None) -> torch.device:
    """The device that is asked for, refused where torch has none of it; by default a GPU if there is one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if not asked:
        return here or torch.device("cpu")
    try:
        device = torch.device(asked)
    except RuntimeError:  # torch would list all names that it knows
        do = "Say cpu, cuda, cuda:1, mps, xpu..., or leave it out"
        raise InputError("the name of a torch device", f"`{asked}`", do) from None
    if device.type in ("cpu", "meta"):
        return device
    count = torch.accelerator.device_count() if here is not None and here.type == device.type else 0
    if (device.index or 0) >= count:
        do = f"Choose {device.type}:0 to {device.type}:{count - 1}" if count else "Use cpu, or install torch for it"
        kind = "a GPU" if device.type == "cuda" else "a device"
        raise InputError(f"{kind} that torch can use for `{asked}`", f"{count} of this kind", do)
    return device


def switched_on(row: str) -> bool:
    """Whether the environment leaves a row of `ROWS` switched on."""
    chosen = os.environ.get("OFORMER_FUSED", "1")
    if chosen in ("0", "1"):
        return chosen == "1"
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    for name in names:
        if name not in ROWS:
            raise unknown_name("row of OFORMER_FUSED", name, list(ROWS))
    return row in names


def fused_kernels(device: torch.device, row: str) -> bool:
    """Whether a device runs the kernels of a row: a CUDA GPU with tensor cores for bfloat16, and Triton installed."""
    if not switched_on(row) or device.type != "cuda" or torch.version.cuda is None:
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


def kernels_on(device: torch.device, row: str) -> ModuleType | None:
    """The module with the kernels of a row, or None where the device does not run them.

    Some are written in a part of Triton that may change; where it has changed, a warning says that the plain code is
    used.
    """
    module = ROWS[row]
    if module is None or not fused_kernels(device, row):
        return None
    try:
        return importlib.import_module(module)
    except ImportError as error:
        warnings.warn(f"{module} needs Triton 3.5 to 3.9 or a like one; using plain code ({error})", stacklevel=3)
        return None


def constant_when_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the result of a function as constant under torch.compile.

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


class CudaGraphs:
    """Records CUDA graphs. They share one pool of memory: what one leaves in its tensors lasts until the next replay.

    That is safe since replays follow each other on one stream, and what outlives them lies elsewhere or is copied out.
    """

    def __init__(self, device: torch.device):
        """Prepare a stream and a pool of memory."""
        self._device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def apart(self) -> "CudaGraphs":
        """For recordings that live longer or shorter than these: a pool of its own.

        The stream is the same, since libraries of matrix products keep memory for each stream that they have seen.
        """
        other = CudaGraphs(self._device)
        other._stream = self._stream
        return other

    def __call__(self, work: Work, warm_up: int) -> Work:
        """Record work; see `Record`."""
        random = torch.cuda.get_rng_state(self._device)
        with torch.cuda.device(self._device):
            # Freed memory stays with its stream: what plain steps left would be of no use here, and taken twice. What
            # the warm-up leaves goes in the same way, by torch itself, at the start of a recording.
            torch.cuda.empty_cache()
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(warm_up):
                    work()
            here.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Only this thread is held to what a recording allows: the loader's may go on allocating and copying.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        torch.cuda.set_rng_state(random, self._device)  # as if it had not been warmed up
        return graph.replay
