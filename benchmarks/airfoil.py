"""Seconds per trajectory of the airfoil generator, and the errors of its time steps.

python benchmarks/airfoil.py [--device cuda] [--batch 64] [--steps 60] [--precision float32] [--errors] [--eager]
python benchmarks/airfoil.py --operator    # one flow on a CPU: the trained operator, and the solver alone

The speed is that of a few steps on the default mesh, the costlier ones of the start among them, and is extrapolated to
the 601 steps of 1,100 trajectories. With --errors, the momentum near the airfoil in the first 10 ms is compared with
that of steps that are iterated until they are solved, and of steps a quarter as long. Nothing is asserted here.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from oformer.meshes.cache import mesh_of
from oformer.meshes.subsets import inside
from oformer.playground.scenes import scene_of
from oformer.predict import Predictor
from oformer.problems.airfoil import REGION, Airfoil
from oformer.solvers.euler_fv import PUBLISHED, TOGETHER, EulerSolver, Numerics, Precision, free_stream
from oformer.solvers.median_dual import MedianDual, median_dual

TRAJECTORIES = 1100
CASES = ((0.3279, 1.2328), (0.5, 12.0), (0.7, 25.0))  # Mach number and angle: attached, separated, the hardest
MOMENTS = (5, 10, 20, 50)  # steps of 2e-4 s after which errors are shown
SOLVED = Numerics(newton=60, start_newton=120)


def iterations(steps: int, numerics: Numerics) -> int:
    """Newton iterations of so many steps."""
    start = min(steps, numerics.start_steps)
    return start * numerics.start_newton + (steps - start) * numerics.newton


def measure_speed(
    dual: MedianDual, device: torch.device, batch: int, steps: int, precision: Precision, compiled: bool | None
) -> None:
    problem = Airfoil()
    state = problem.draw(range(batch), 0)
    free = free_stream(state["mach"].to(device), state["angle"].to(device))
    solver = EulerSolver(dual, precision=precision, device=device, compiled=compiled, together=batch)

    def run() -> tuple[float, float]:
        wall, work = time.perf_counter(), time.process_time()
        solver.march(None, free, frames=[steps - 1], time_step=problem.time_step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - wall, time.process_time() - work

    first, _ = run()
    seconds, work = run()
    share = iterations(problem.steps, PUBLISHED) / iterations(steps, PUBLISHED) / batch
    print(f"first run, with compiling if it is not cached: {first:.1f} s")
    print(f"{steps} steps of {batch} trajectories: {seconds:.2f} s, {work:.2f} s of processor time")
    print(f"a trajectory of {problem.steps} steps: {seconds * share:.3f} s ({work * share:.3f} s of processor time)")
    print(f"{TRAJECTORIES} trajectories: {seconds * share * TRAJECTORIES / 60:.2f} min")
    if device.type == "cuda":
        print(f"memory: {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB at most")


def measure_operator() -> None:
    """One flow on a CPU: the trained operator from its first four frames, and the solver from the start."""
    predictor = Predictor("airfoil", device="cpu")
    scene = scene_of(predictor.checkpoint.recipe, predictor.spec)
    if scene is None:
        raise RuntimeError("the trained operator `airfoil` has no scene")
    state = scene.example(0)
    known, query = scene.known(state).input, scene.places(state, 1).query
    print(f"{state}, {torch.get_num_threads()} thread(s), torch {torch.__version__}", flush=True)
    for name, run in (
        ("operator, first call", lambda: predictor(known, query)),
        ("operator", lambda: predictor(known, query)),
        ("solver, with compiling", lambda: scene.solve(state, 1)),
        ("solver", lambda: scene.solve(state, 1)),
    ):
        wall, work = time.perf_counter(), time.process_time()
        run()
        wall, work = time.perf_counter() - wall, time.process_time() - work
        print(f"{name:24} {wall:7.2f} s, {work:7.2f} s of processor time", flush=True)


def momentum(dual: MedianDual, device: torch.device, numerics: Numerics, refined: int, compiled: bool | None) -> Tensor:
    """Of all cases at the moments shown, with steps of 2e-4 s over `refined`, near the airfoil."""
    mach, angle = torch.tensor(CASES, dtype=torch.float64, device=device).T
    solver = EulerSolver(dual, device=device, numerics=numerics, compiled=compiled, together=TOGETHER["cpu"])
    frames = [step * refined - 1 for step in MOMENTS]
    flow = solver.march(None, free_stream(mach, angle), frames=frames, time_step=2e-4 / refined)
    near = inside(mesh_of(Airfoil().mesh).points, REGION).to(device)
    return flow.momentum.double()[:, :, near]


def show_errors(title: str, value: Tensor, reference: Tensor) -> None:
    error = (value - reference).flatten(2).norm(dim=2) / reference.flatten(2).norm(dim=2)
    for (mach, angle), row in zip(CASES, error.tolist(), strict=True):
        numbers = "  ".join(f"{number:9.1e}" for number in row)
        print(f"{title:44} Mach {mach:<6g} {angle:7g} deg  {numbers}", flush=True)


def measure_errors(dual: MedianDual, device: torch.device, compiled: bool | None) -> None:
    moments = "  ".join(f"{step * 0.2:6.0f} ms" for step in MOMENTS)
    print(f"\nrelative L2 error of momentum near the airfoil{'':30}{moments}")
    solved = momentum(dual, device, SOLVED, 1, compiled)
    for sweeps in (8, PUBLISHED.sweeps):
        numerics = dataclasses.replace(PUBLISHED, sweeps=sweeps)
        title = f"{numerics.newton} x {sweeps} iterations, against solved steps"
        show_errors(title, momentum(dual, device, numerics, 1, compiled), solved)
    half = dataclasses.replace(SOLVED, newton=SOLVED.newton // 2, start_newton=SOLVED.start_newton // 2)
    show_errors("half the iterations of solved steps", momentum(dual, device, half, 1, compiled), solved)
    fine = momentum(dual, device, dataclasses.replace(half, start_steps=20), 4, compiled)
    show_errors("solved steps of 2e-4 s, against 5e-5 s", solved, fine)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Rates and errors of the airfoil generator.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=None, help="trajectories at once (default: what the solver takes)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", choices=("float32", "float64"), default="float32")
    parser.add_argument("--errors", action="store_true", help="of iterations and step size; minutes on a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument(
        "--operator", action="store_true", help="one flow: the trained operator beside the solver alone"
    )
    options = parser.parse_args(arguments)
    if options.operator:
        return measure_operator()
    device = torch.device(options.device)
    batch = options.batch or TOGETHER["cuda" if device.type == "cuda" else "cpu"]
    compiled = not options.eager
    mesh = mesh_of(Airfoil().mesh)
    dual = median_dual(mesh.points, mesh.triangles, mesh.marks)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{name}, torch {torch.__version__}, {len(mesh.points)} nodes with up to {len(dual.neighbors)} neighbors, "
          f"{options.precision}, {'compiled' if compiled else 'eager'}", flush=True)  # fmt: skip
    measure_speed(dual, device, batch, options.steps, options.precision, compiled)
    if options.errors:
        measure_errors(dual, device, compiled)


if __name__ == "__main__":
    main()
