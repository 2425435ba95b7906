"""What solvers of fixed time steps share: the steps at which they record, and a check of the state."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError, SolverDiverged


def steps_at(times: Sequence[float], dt: float, last: int | None = None) -> list[int]:
    """The step at which each time falls; each must be a whole number of steps from the start.

    Args:
        times: in order.
        dt: the length of a step.
        last: the last step there is, if there is one.
    """
    record = [round(time / dt) for time in times]
    late = bool(record) and last is not None and record[-1] > last
    if not record or record[0] < 0 or late or any(i >= j for i, j in pairwise(record)):
        end = "on" if last is None else f"to at most {last * dt:g}"
        raise InputError(f"`times` that grow from 0 {end}", str(list(times)))
    for time, step in zip(times, record, strict=True):
        if abs(time - step * dt) > 1e-6 * dt:
            raise InputError(
                f"`times` that are whole numbers of steps of {dt:g}",
                f"{time:g}",
                f"The nearest is {step * dt:g}; or change the steps",
            )
    return record


def rms(state: Float[Tensor, "batch *grid"]) -> Float[Tensor, "batch"]:
    """The root mean square of each sample."""
    return state.square().mean(tuple(range(1, state.ndim))).sqrt()


def check_norms(
    solver: str, state: Float[Tensor, "batch *grid"], bound: Float[Tensor, "batch"], step: int, time: float
) -> None:
    """Refuse a state of more than twice the norm that a solution can have: long before it is infinite, it is none."""
    norms = rms(state)
    if not bool((norms <= 2 * bound).all()):
        raise SolverDiverged(solver, step, time, float(norms.nan_to_num(nan=torch.inf).max()))
