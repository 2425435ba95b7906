"""Compiled code beside the same code as it is, in processes of their own: the shape checks cannot compile.

A test gives `printed` of tests/forked.py a script, which says `device = kernels_everywhere()` and compares with
`Compiled`.
"""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def kernels_everywhere() -> str:
    """Use fused kernels on whatever device is there, as on a Hopper GPU; returns the device."""
    from oformer import gpu

    gpu.fused_kernels = lambda device, row: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.manual_seed(0)
    return "cuda" if torch.cuda.is_available() else "cpu"


def kernels_for_hopper() -> dict[str, dict[str, Any]]:
    """Use fused kernels on a CPU, and instead of running any of them compile it for a Hopper GPU.

    None may be started but on the device of its tensors: Triton takes the current one.

    Returns:
        What was compiled of each kernel, by name and hash, which grows as they are met. What they would write is not
        written.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from oformer.engine import attention

    class Hopper:
        """What a compiler asks of a GPU."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    at = []

    @contextlib.contextmanager
    def device_of(tensor: Tensor):
        at.append(tensor.device)
        yield
        at.pop()

    torch.cuda.device_of = device_of
    driver.set_active(Hopper())  # pyright: ignore[reportArgumentType]
    kernels_everywhere()
    attention.fused_sums = lambda device: True
    made: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        assert at, f"{self.fn.__name__} is started wherever the process is"
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        made.setdefault(self.fn.__name__, {})[kernel.hash] = kernel

    JITFunction.run = compile_only
    return made


def machine_code(kernel: Any) -> str:
    """The instructions of a compiled kernel, by the disassembler that comes with Triton.

    Its own `kernel.asm["sass"]` ends after 4,096 of them in Triton 3.6, and the rollout has more.
    """
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def never_written(code: str) -> dict[str, str]:
    """Uniform registers that some instruction reads and none writes, with the first that reads.

    These hold what a warp has in common, such as where matrices for the tensor cores lie.
    """
    written, read = set(), {}
    for line in code.splitlines():
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(\S+)\s+(.*?);", line)
        if found is None:
            continue
        operation, operands = found[1], [operand.strip() for operand in found[2].split(",")]
        # What comes first is written; numbers of 64 bits take two registers.
        first = re.fullmatch(r"UR(\d+)", operands[0])
        if first:
            both = ".64" in operation or ".WIDE" in operation
            written.update(f"UR{int(first[1]) + i}" for i in range(2 if both else 1))
        for operand in operands[1 if first else 0 :]:
            if not operand.startswith("gdesc"):  # places of two matrices, of which one may be in other registers
                for name in re.findall(r"\bUR\d+\b", operand):
                    read.setdefault(name, line.strip())
    return {name: line for name, line in read.items() if name not in written}


class Compiled:
    """A function, the same compiled without a break, and the graphs that this meets."""

    def __init__(self, function: Callable[..., Tensor], of_gradients: bool = False):
        """Compile it.

        Args:
            function: to be compared.
            of_gradients: look at the graphs of operators, there and back, instead of those of modules.
        """
        import torch._dynamo
        from torch._dynamo.backends.common import aot_autograd

        self.plain, self.graphs = function, []
        whole: Any = torch._dynamo.lookup_backend("aot_eager")

        def look(graph: Any, inputs: Any) -> Any:
            self.graphs.append(graph)
            return graph.forward if of_gradients else whole(graph, inputs)

        backend = aot_autograd(fw_compiler=look, bw_compiler=look) if of_gradients else look
        self.compiled = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    def check(self, given: Iterable[Any], wanted: Iterable[Tensor], **tolerance: float) -> None:
        """Hold values and gradients equal, with the same random numbers, and print the nodes of each new graph."""
        given, wanted, results = list(given), list(wanted), []
        for function in (self.plain, self.compiled):
            torch.manual_seed(0)
            out = function(*given)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), wanted)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
        for graph in self.graphs:
            print(*(node.target for node in graph.graph.nodes))
        self.graphs.clear()
