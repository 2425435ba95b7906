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

ALIASED = "Use more points or fewer modes; this grid takes the highest for lower ones"


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
            ALIASED,
        )
    k = torch.arange(1, modes + 1, dtype=torch.float64, device=noise.device)
    s = math.sqrt(2) * law.deviation((2 * math.pi * k) ** 2)
    xi, eta = (noise.to(torch.float64) * s).unbind(1)
    spectrum = torch.complex(xi, -eta) * 0.5
    return irfft(torch.nn.functional.pad(spectrum, (1, 0)), points)


def periodic_plane(
    noise: Float[Tensor, "batch 2 modes modes"], points: int, law: Matern
) -> Float[Tensor, "batch points points"]:
    """Fields of period one in x and y with the modes -m..m of each axis but (0, 0), hence of zero mean.

    u(x) = sum over k of s_k (xi_k cos 2 pi k.x - eta_k sin 2 pi k.x), s_k the law's deviation: the real part of an
    inverse transform of complex noise. A mode and its opposite are one function, whose two draws add up. So the middle
    of the noise gives the same function with fewer modes, and none of it depends on the number of points.

    Args:
        noise: standard normal numbers, xi and eta, for k = -m..m along the last two axes; 2m + 1 is `modes`.
        points: values are given at (i/points, j/points); at least `modes`.
        law: on the unit square, where -Laplacian has the eigenvalues 4 pi^2 |k|^2.
    """
    modes = noise.shape[-1]
    if modes % 2 == 0:
        raise InputError("noise for the modes -m..m, an odd number", str(modes))
    if points < modes:
        raise InputError(
            f"at least {modes} points for a random field of {modes} modes per axis",
            str(points),
            ALIASED,
        )
    m = modes // 2
    k = torch.arange(-m, m + 1, dtype=torch.float64, device=noise.device)
    s = law.deviation((2 * math.pi) ** 2 * (k[:, None] ** 2 + k**2))
    s[m, m] = 0
    xi, eta = (noise.to(torch.float64) * (s * 0.5)).unbind(1)
    packed = torch.complex(xi + xi.flip(1, 2), eta - eta.flip(1, 2))[:, :, m:]
    spectrum = packed.new_zeros((max(len(noise), 2), points, points // 2 + 1))  # two at least, as in `fourier`
    spectrum[: len(noise), k.long() % points, : m + 1] = packed
    return torch.fft.irfft2(spectrum, (points, points), norm="forward")[: len(noise)]


def neumann_square(
    noise: Float[Tensor, "batch first second"], points: tuple[int, int], law: Matern
) -> Float[Tensor, "batch rows columns"]:
    """Fields of zero mean on the unit square whose normal derivative vanishes on the border, at cell centers.

    u(x, y) = sum over k, l of s_kl xi_kl c_k cos(pi k x) c_l cos(pi l y), c_0 = 1 and c_k = sqrt(2) beyond, s_kl the
    law's deviation and s_00 = 0. With as many modes as points this is an orthonormal inverse DCT-II, up to the factor
    sqrt(rows columns).

    Args:
        noise: standard normal numbers xi_kl, k and l from 0 on; the first of them has no effect.
        points: values are given at ((i + 1/2)/rows, (j + 1/2)/columns); per axis as many as modes, or more.
        law: on the unit square, where -Laplacian has the eigenvalues pi^2 (k^2 + l^2).
    """
    if points[0] < noise.shape[1] or points[1] < noise.shape[2]:
        raise InputError(
            f"at least {noise.shape[1]} x {noise.shape[2]} points for a random field of as many modes",
            f"{points[0]} x {points[1]}",
            ALIASED,
        )
    k, m = (torch.arange(n, dtype=torch.float64, device=noise.device) for n in noise.shape[1:])
    s = law.deviation(math.pi**2 * (k[:, None] ** 2 + m**2)) * math.sqrt(2) ** ((k[:, None] > 0).double() + (m > 0))
    s[0, 0] = 0  # where a law without inverse length is infinite
    along_rows = _cosine_sums(noise.to(torch.float64) * s, points[1])
    return _cosine_sums(along_rows.mT, points[0]).mT.contiguous()


def _cosine_sums(coefficients: Float[Tensor, "batch rows modes"], points: int) -> Float[Tensor, "batch rows points"]:
    """Sums over k of c_k cos(pi k x) at x = (i + 1/2)/points: half a period of a transform of twice the length."""
    rows, modes = coefficients.shape[1:]
    k = torch.arange(modes, dtype=torch.float64, device=coefficients.device)
    share = 1 - 0.5 * (k > 0).double()
    # Products of real numbers, rounded once: their bits do not depend on the place in the tensor.
    turned = torch.complex(
        coefficients * (share * torch.cos(k * (math.pi / (2 * points)))),
        coefficients * (share * torch.sin(k * (math.pi / (2 * points)))),
    )
    return irfft(turned.reshape(-1, modes), 2 * points)[:, :points].reshape(-1, rows, points)
