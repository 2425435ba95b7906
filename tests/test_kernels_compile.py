"""Every kernel compiles for a Hopper GPU with the installed Triton. No GPU is needed for that, and none is used.

Elsewhere an interpreter runs them without a GPU, and does not notice what a compiler refuses; and a part of Triton in
which the rollout is written changes its names from version to version. Nor does an interpreter see what an assembler
makes of a kernel: that of CUDA 12.8 once left an instruction out, and a register was read that nothing had written.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import oformer
from tests.engine.compiled import never_written

ROOT = Path(oformer.__file__).resolve().parent.parent
pytest.importorskip("oformer.engine.kernels.rollout_kernels", exc_type=ImportError)

MODEL = """
from oformer.fields import Field
from oformer.engine.kernels import adam_kernels
from oformer.engine.kernels.rollout_kernels import Chain, march
from oformer.engine.kernels.rotary_kernels import turns
from oformer.engine.swap import accelerate
from oformer.experiments.recipes import recipe_named

recipe = recipe_named("ns2-part")
spec = recipe.data_spec()
grid = torch.rand(1, 64, spec.dim).expand(2, -1, -1)
input = Field.of(grid, torch.rand(2, spec.in_times, 64, spec.in_channels))
model = accelerate(recipe.model.build(spec), "cuda").train()
with torch.autocast("cpu", torch.float16):
    model.query(model.encode(input), input, Field.of(grid)).float().sum().backward()
turns(torch.rand(64, 2), torch.rand(2, 8))
weights = [torch.rand(7, 3), torch.rand(5)]
adam_kernels.move(adam_kernels.blocks(weights, weights), [torch.rand(26)] * 2, torch.rand(5), 0.1, True, 0.999, 1e-8)

def leaf(*shape):
    return torch.rand(*shape).requires_grad_()

def chain(shapes, activation):
    return Chain(tuple(leaf(*shape) for shape in shapes), leaf(1, shapes[0][0]), activation)

steps, reads = ((384, 384),) * 3, ((192, 384), (192, 192), (1, 192))
march(leaf(128, 384), chain(steps, "gelu"), chain(reads, "gelu"), leaf(1), 2, 1e-5, torch.float16).sum().backward()
steps, reads = ((256, 256),) * 4, ((256, 256), (128, 256), (4, 128))
march(leaf(128, 256), chain(steps, "gelu"), chain(reads, "relu"), leaf(4), 2, 1e-5, torch.bfloat16).sum().backward()
"""

SOLVERS = """
from oformer.meshes.airfoil import Naca
from oformer.meshes.cache import mesh_of
from oformer.solvers import euler_flux, euler_kernels
from oformer.solvers.median_dual import median_dual
from oformer.solvers.vorticity_spectral import solve

nu = torch.full((1,), 1e-3, dtype=torch.float64)
solve(torch.zeros(1, 64, 64), viscosity=nu, times=[0.0, 0.01], time_step=0.01, fused=True)
mesh = mesh_of(Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3))
tables = euler_flux.tables_of(median_dual(mesh.points, mesh.triangles, mesh.marks), torch.float32, torch.device("cpu"))
flow, weight = torch.ones(4, len(mesh.points), 3), torch.ones(len(mesh.points), 1)
stream = torch.ones(4, 1, 3)
balance, *others, d = euler_kernels.fused_residual(flow, flow, flow, weight, stream, tables, euler_flux.border)
euler_kernels.fused_sweep(d, balance, *others, tables)
"""

TARGETS = """
for name, kernels in made.items():
    for kernel in kernels.values():
        print(name, ".target sm_90a" in kernel.asm["ptx"], sep="\t")
"""

REGISTERS = """
for name, kernels in made.items():
    for kernel in kernels.values():
        print(name, never_written(machine_code(kernel)), sep="\t")
"""

each_package = pytest.mark.parametrize(("package", "script"), [("engine/kernels", MODEL), ("solvers", SOLVERS)])


def started(package: str) -> set[str]:
    """The kernels that some function of a package starts: names with a grid in brackets, and called."""
    names = set()
    for path in (Path(oformer.__file__).parent / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                    names.add(name)
    return names


def printed(script: str) -> list[str]:
    """The lines that a script prints in a process that has not loaded Triton's interpreter."""
    command = [sys.executable, "-c", f"from tests.engine.compiled import *\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def reported(script: str, report: str) -> list[tuple[str, str]]:
    """What a report says of each kernel that a script needs."""
    lines = printed(f"made = kernels_for_hopper()\n{script}\n{report}")
    return [(name, said) for name, said in (line.split("\t") for line in lines)]


@each_package
def test_every_kernel_compiles_for_hopper(package, script):
    found = reported(script, TARGETS)
    assert {name for name, _ in found} == started(package)
    assert {target for _, target in found} == {"True"}


@pytest.mark.slow  # the disassembler takes longer than the compiler
@each_package
def test_no_kernel_reads_a_register_that_nothing_wrote(package, script):
    assert {(name, registers) for name, registers in reported(script, REGISTERS) if registers != "{}"} == set()


def test_registers_that_are_never_written_are_found():
    code = """
        /*0010*/                   ULDC.64 UR8, c[0x0][0x248] ;
        /*0020*/                   UIMAD.WIDE UR10, UR8, UR9, URZ ;
        /*0030*/              @!P0 LDG.E R2, desc[UR12][R2.64] ;
        /*0040*/                   UIADD3 UR4, UP0, UR6, 0x40, URZ ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R56, R80, gdesc[UR20].tnspB, R56 ;
        /*0060*/                   UMOV UR5, UR11 ;
        /*0070*/                   ULDC.64 UR12, c[0x0][0x208] ;
    """
    assert never_written(code) == {"UR6": "/*0040*/                   UIADD3 UR4, UP0, UR6, 0x40, URZ ;"}
