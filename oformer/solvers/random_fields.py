"""Gaussian random fields with the Whittle-Matérn covariance sigma^2 (-Laplacian + tau^2)^(-alpha).

All are sums over the eigenfunctions of the Laplacian (Karhunen-Loève): a standard normal number times the
deviation of the law at that eigenvalue times the eigenfunction. Noise comes in, fields go out: whoever
draws the noise decides on seeds, and the same noise gives the same function on any grid.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.errors import InputError
from oformer.solvers.fourier import irfft


@dataclass(frozen=True)
class Matern:
    """The law sigma^2 (-Laplacian + tau^2)^(-alpha) of a zero-mean Gaussian random field."""

    amplitude: float  # sigma
    inverse_length: float  # tau: features are about 2 pi / tau wide or smaller
    exponent: float  # alpha: the larger, the smoother

    def __post_init__(self) -> None:
        for name in ("amplitude", "inverse_length", "exponent"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(
                    f"`{name}` of a random field that is finite and not negative", f"{getattr(self, name)}"
                )

    def deviation(self, eigenvalues: Float[Tensor, "*modes"]) -> Float[Tensor, "*modes"]:
        """The standard deviation of the coefficient of each eigenfunction of mean square one.

        Args:
            eigenvalues: of minus the Laplacian.
        """
        sigma, tau, alpha = self.amplitude, self.inverse_length, self.exponent
        return sigma * (eigenvalues + tau**2) ** (-alpha / 2)


def periodic_line(noise: Float[Tensor, "batch 2 modes"], points: int, law: Matern) -> Float[Tensor, "batch points"]:
    """Fields of period one with the modes 1, 2, ... only, hence of zero mean.

    u(x) = sum over k of s_k sqrt(2) (xi_k cos 2 pi k x + eta_k sin 2 pi k x), s_k the law's deviation.

    Args:
        noise: standard normal numbers, xi and eta.
        points: values are given at x = j/points; more than twice the modes.
        law: on the unit period, where -Laplacian has the eigenvalues (2 pi k)^2.
    """
    modes = noise.shape[-1]
    if points <= 2 * modes:
        raise InputError(
            f"more than {2 * modes} points for a random field of {modes} modes",
            str(points),
            "Use more points or fewer modes; this grid takes the highest for lower ones",
        )
    k = torch.arange(1, modes + 1, dtype=torch.float64, device=noise.device)
    s = math.sqrt(2) * law.deviation((2 * math.pi * k) ** 2)
    xi, eta = (noise.to(torch.float64) * s).unbind(1)
    spectrum = torch.complex(xi, -eta) * 0.5
    return irfft(torch.nn.functional.pad(spectrum, (1, 0)), points)
