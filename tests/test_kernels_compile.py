"""Every kernel compiles for a Hopper GPU with the installed Triton. No GPU is needed for that, and none is used.

Elsewhere an interpreter runs them without a GPU, and does not notice what a compiler refuses; and a part of Triton in
which the rollout is written changes its names from version to version.
"""

import ast
from pathlib import Path

import pytest

import oformer
from tests.nn.compiled import printed

pytest.importorskip("oformer.nn.rollout_kernels", exc_type=ImportError)

MODEL = """
from oformer.fields import Field
from oformer.nn.rollout_kernels import Chain, march
from oformer.nn.rotary_kernels import turns
from oformer.recipes import recipe_named

recipe = recipe_named("ns2-part")
spec = recipe.data_spec()
grid = torch.rand(1, 64, spec.dim).expand(2, -1, -1)
input = Field.of(grid, torch.rand(2, spec.in_times, 64, spec.in_channels))
model = recipe.model.build(spec).train()
with torch.autocast("cpu", torch.float16):
    model.query(model.encode(input), input, Field.of(grid)).float().sum().backward()
turns(torch.rand(64, 2), torch.rand(2, 8))

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
from oformer.meshes.library import mesh_of
from oformer.solvers import euler_fv, euler_kernels
from oformer.solvers.median_dual import median_dual
from oformer.solvers.vorticity_spectral import solve

nu = torch.full((1,), 1e-3, dtype=torch.float64)
solve(torch.zeros(1, 64, 64), viscosity=nu, times=[0.0, 0.01], time_step=0.01, fused=True)
mesh = mesh_of(Naca(wall=24, far_field=16, trailing=0.05, leading=0.05, growth=0.3))
tables = euler_fv._tables(median_dual(mesh.points, mesh.triangles, mesh.marks), torch.float32, torch.device("cpu"))
flow, weight = torch.ones(4, len(mesh.points), 3), torch.ones(len(mesh.points), 1)
stream = torch.ones(4, 1, 3)
balance, *others, d = euler_kernels.fused_residual(flow, flow, flow, weight, stream, tables, euler_fv.border)
euler_kernels.fused_sweep(d, balance, *others, tables)
"""

REPORT = """
for name, codes in made.items():
    print(name, all(".target sm_90a" in code for code in codes))
"""


def started(package: str) -> set[str]:
    """The kernels that some function of a package starts: names with a grid in brackets, and called."""
    names = set()
    for path in (Path(oformer.__file__).parent / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                    names.add(name)
    return names


@pytest.mark.parametrize(("package", "script"), [("nn", MODEL), ("solvers", SOLVERS)])
def test_every_kernel_compiles_for_hopper(package, script):
    found = dict(map(str.split, printed(f"made = kernels_for_hopper()\n{script}\n{REPORT}")))
    assert set(found.values()) == {"True"}
    assert set(found) == started(package)
