"""Samples per second of the generators, and Navier-Stokes against the original first-order scheme in the same run.

python benchmarks/solvers.py [--device cuda] [--batch 200] [--seconds 5]

Sizes are those of the published datasets unless told otherwise; on a CPU they take a while. Nothing is asserted here:
the numbers are for reading, and for comparing in one run.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch

from oformer.problems import Burgers, Darcy
from oformer.problems.navier_stokes import INSTANCES
from oformer.solvers.vorticity_spectral import Scheme, solve


def seconds_each(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """The mean time of a call, after one that does not count, for about so many seconds."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < budget:
        work()
        wait()
        calls += 1
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of the data generators.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=None, help="samples at once (default: 200 on a GPU, 2 elsewhere)")
    parser.add_argument("--points", type=int, default=256, help="of the Navier-Stokes solver, per axis")
    parser.add_argument("--darcy-points", type=int, default=421, help="of Darcy, per axis")
    parser.add_argument("--seconds", type=float, default=5.0, help="to spend on each measurement")
    options = parser.parse_args()
    device = torch.device(options.device)
    batch = options.batch or (200 if device.type == "cuda" else 2)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{name}, torch {torch.__version__}, batches of {batch}\n")

    print("problem          points  what                                   result")
    for problem, points in ((Burgers(), "8192"), (Darcy(points=options.darcy_points), f"{options.darcy_points}^2")):
        state = {key: tensor.to(device) for key, tensor in problem.draw(range(batch), 0).items()}
        each = seconds_each(lambda p=problem, s=state: p.solve(s), device, options.seconds) / batch
        print(f"{problem.name:15}  {points:>6}  1,124 samples, without drawing         {1124 * each:.1f} s")

    n = options.points
    ns2 = dataclasses.replace(INSTANCES["ns2"], solver_points=n)
    state = {key: tensor.to(device) for key, tensor in ns2.draw(range(batch), 0).items()}
    initial = state["initial"].float()
    steps = 20
    # Steps of the original scheme are 1e-4, as its authors needed; ours are those of the instance.
    schemes: tuple[tuple[Scheme, float], ...] = (("rk4", ns2.time_step), ("euler-cn", 1e-4))
    for scheme, step in schemes:
        each = seconds_each(
            lambda scheme=scheme, step=step: solve(
                initial, viscosity=1e-4, times=[steps * step], time_step=step, scheme=scheme, stride=4
            ),
            device,
            options.seconds,
        )
        one = each / steps / batch
        whole = one * ns2.duration / step
        label = f"{scheme}, steps of {step:g}"
        print(f"{'navier-stokes':15}  {n:>4}^2  {label:24} {1e6 * one:8.1f} us a step and sample, ns2 to T = 30: "
              f"{whole:.3f} s a sample, 10,000 in {whole * 1e4 / 60:.1f} min")  # fmt: skip
    print("\nnavier-stokes: the ratio of the last two rows is that of trajectories per second")


if __name__ == "__main__":
    main()
