"""The first frames of some flows around the airfoil, which come with the package.

An operator of the airfoil is shown four frames, and a CPU takes most of a minute to solve them. These are ready: what
they differ from the free stream, in half precision, at the nodes of the default mesh.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from oformer.files import map_arrays, save_arrays
from oformer.problems import Airfoil
from oformer.solvers.euler_fv import Flow, free_stream

MACHS, ANGLES = (0.2, 0.35, 0.5, 0.65), (-24.0, -16.0, -8.0, 0.0, 8.0, 16.0, 24.0)
STREAMS = tuple(itertools.product(MACHS, ANGLES))
STARTS_FILE = Path(__file__).with_name("airfoil_starts.safetensors")


def save_starts(
    path: Path = STARTS_FILE, problem: Airfoil | None = None, streams: Sequence[tuple[float, float]] = STREAMS
) -> None:
    """Solve the first frames of some streams and write the file that comes with the package.

    `python -c "from oformer.playground.airfoil_starts import save_starts; save_starts()"` takes minutes.

    Args:
        path: of the file.
        problem: whose frames; the default one if left out. It must store velocities.
        streams: Mach number and angle of each.
    """
    problem = problem or Airfoil()
    shortest = problem.frames[problem.in_times] + 1
    mach, angle = torch.tensor(streams, dtype=torch.float64).unbind(1)
    samples = dataclasses.replace(problem, steps=shortest).solve({"mach": mach, "angle": angle})
    arrays = {}
    for stream, sample in zip(streams, samples, strict=True):
        shift, scale = _free_channels(*stream)
        arrays[json.dumps(stream)] = ((sample.input.values[..., :4] - shift) / scale).numpy().astype(np.float16)
    save_arrays(path, arrays)


@cache
def read_starts(path: Path = STARTS_FILE) -> dict[tuple[float, float], Float[Tensor, "times points 4"]]:
    """What `save_starts` wrote, by Mach number and angle: velocity, density and pressure."""
    starts = {}
    for key, array in map_arrays(path).items():
        mach, angle = json.loads(key)
        shift, scale = _free_channels(mach, angle)
        starts[mach, angle] = torch.from_numpy(array.astype(np.float64)) * scale + shift
    return dict(sorted(starts.items()))


def _free_channels(mach: float, angle: float) -> tuple[Float[Tensor, "4"], Float[Tensor, "4"]]:
    """Velocity, density and pressure of a free stream, and what changes of each are measured by."""
    free = free_flow(mach, angle)
    state = torch.cat([free.density[0], free.pressure[0]])
    return torch.cat([free.velocity[0, 0], state]), torch.cat([torch.ones(2, dtype=torch.float64), state])


def free_flow(mach: float, angle: float) -> Flow:
    """The free stream of one Mach number and angle in degrees."""
    return free_stream(*(torch.tensor([number], dtype=torch.float64) for number in (mach, angle)))
