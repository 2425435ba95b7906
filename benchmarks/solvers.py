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

from oformer.gpu import fused_kernels
from oformer.problems import Burgers, Darcy
from oformer.problems.navier_stokes import INSTANCES
from oformer.solvers.vorticity_spectral import FUSED_SIZES, Scheme, solve


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
    parser.add_argument("--steps", type=int, default=200, help="of Navier-Stokes in a call")
    parser.add_argument(
        "--accuracy-time", type=float, default=0.0, help="also compare 4 samples with float64 and half steps at a time"
    )
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
    fused = fused_kernels(device, "vorticity") and n in FUSED_SIZES
    # Steps of the original scheme are 1e-4, as its authors needed; ours are those of the instance.
    ours: list[tuple[str, Scheme, float, bool]] = [("rk4, fused", "rk4", ns2.time_step, True)] if fused else []
    rows = [*ours, ("rk4, plain", "rk4", ns2.time_step, False), ("original scheme", "euler-cn", 1e-4, False)]
    steps = options.steps
    trajectory = []
    for label, scheme, step, kernels in rows:
        each = seconds_each(
            lambda scheme=scheme, step=step, kernels=kernels: solve(
                initial, viscosity=1e-4, times=[steps * step], time_step=step, scheme=scheme, stride=4, fused=kernels
            ),
            device,
            options.seconds,
        )
        one = each / steps / batch
        trajectory.append(one * ns2.duration / step)
        print(f"{'navier-stokes':15}  {n:>4}^2  {label:16} steps of {step:<6g} {1e6 * one:7.2f} us a step and sample; "
              f"to T = 30 {trajectory[-1]:.3f} s a sample, 10,000 in {trajectory[-1] * 1e4 / 60:.1f} min")  # fmt: skip
    print(
        f"{'navier-stokes':15}  trajectories per second, ours over the original: {trajectory[-1] / trajectory[0]:.1f}"
    )

    if options.accuracy_time > 0:
        few, times = state["initial"][:4], [options.accuracy_time]
        exact = solve(few, viscosity=1e-4, times=times, time_step=ns2.time_step / 2)
        for label, scheme, step, kernels in rows:
            got = solve(few.float(), viscosity=1e-4, times=times, time_step=step, scheme=scheme, fused=kernels)
            error = float(((got - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).max())
            print(
                f"{'navier-stokes':15}  {label:16} steps of {step:<6g} relative error at t = {times[0]:g}: {error:.1e}"
            )


if __name__ == "__main__":
    main()
