"""The Fourier transform on a periodic line with the same bits in any batch, and spectral interpolation.

Coefficients are the c_k of u(x_j) = sum over k of c_k exp(2 pi i k j / n); of a real u, k = 0..n/2 say all.
"""

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oformer.errors import InputError


def rfft(values: Float[Tensor, "batch points"]) -> Complex[Tensor, "batch modes"]:
    """Values on the n points of a period to their coefficients."""
    return torch.fft.rfft(never_one(values), norm="forward")[: len(values)]


def irfft(spectrum: Complex[Tensor, "batch modes"], points: int) -> Float[Tensor, "batch points"]:
    """Coefficients to values on any number of points; coefficients that are not given are zero."""
    return torch.fft.irfft(never_one(spectrum), points, norm="forward")[: len(spectrum)]


def resample(values: Float[Tensor, "batch points"], points: int) -> Float[Tensor, "batch queries"]:
    """The trigonometric interpolant of the values, evaluated on another uniform grid of the same period.

    Exact for functions that the given grid resolves. A coarser grid gets the values of the function at its
    points, as thinning would give them, and not a smoothed function. The coefficient at the Nyquist
    frequency of an even grid is shared between +n/2 and -n/2: the interpolant that oscillates least, a pure
    cosine.

    Args:
        values: on the points j/n of the period.
        points: how many points the other grid has.
    """
    n = values.shape[-1]
    if n == 0 or points < 1:
        raise InputError("grids of at least one point", f"{n} and {points}")
    # A coarse grid is every stride-th point of one that is fine enough to hold all coefficients.
    stride = -(-n // points)
    fine = points * stride
    if fine != n:
        share = torch.ones(n // 2 + 1, dtype=values.dtype, device=values.device)
        if n % 2 == 0:
            share[-1] = 0.5
        values = irfft(rfft(values) * share, fine)
    return values[:, ::stride].contiguous()


def never_one(batch: Tensor) -> Tensor:
    """The batch, with a lone row or field twice.

    For some lengths (64, 5000, 8192...) MKL transforms a single row by another algorithm than two or more,
    and the last bits differ. From two rows on, a row's result depends neither on its neighbors nor on their
    number.
    """
    return torch.cat([batch, batch]) if len(batch) == 1 else batch
