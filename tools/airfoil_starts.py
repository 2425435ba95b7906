"""Solve the first frames of some flows around the airfoil, for the playground: python -m tools.airfoil_starts

It takes minutes. An operator of the airfoil sees four frames, which a CPU takes most of a minute to solve. The file
`oformer/playground/airfoil_starts.safetensors` has their difference from the free stream, at the nodes of the default
mesh and in half precision.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from oformer.files import save_arrays
from oformer.playground.scenes.airfoil import STARTS_FILE, free_channels
from oformer.problems import Airfoil

MACHS, ANGLES = (0.2, 0.35, 0.5, 0.65), (-24.0, -16.0, -8.0, 0.0, 8.0, 16.0, 24.0)
STREAMS = tuple(itertools.product(MACHS, ANGLES))


def save_starts(
    path: Path = STARTS_FILE, problem: Airfoil | None = None, streams: Sequence[tuple[float, float]] = STREAMS
) -> None:
    """Solve the first frames of some streams, and write them to a file.

    Args:
        path: of the file.
        problem: the problem to solve; the default one if left out. It must store velocities.
        streams: Mach number and angle of each.
    """
    problem = problem or Airfoil()
    shortest = problem.frames[problem.in_times] + 1
    mach, angle = torch.tensor(streams, dtype=torch.float64).unbind(1)
    samples = dataclasses.replace(problem, steps=shortest).solve({"mach": mach, "angle": angle})
    arrays = {}
    for stream, sample in zip(streams, samples, strict=True):
        shift, scale = free_channels(*stream)
        arrays[json.dumps(stream)] = ((sample.input.values[..., :4] - shift) / scale).numpy().astype(np.float16)
    save_arrays(path, arrays)


if __name__ == "__main__":
    save_starts()
