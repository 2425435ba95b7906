"""Incompressible flow on the unit torus in vorticity form: w_t + u . grad w = nu Lap w + f, pseudo-spectral.

-Lap psi = w, u = (psi_y, -psi_x), x along the first axis of an array and y along the second. Fourier-Galerkin in space:
the 2/3 rule keeps the modes |k| < n/3 of each axis, on which products are free of aliasing. The advection is
written with products of velocities alone, of which there are two, so that a right-hand side takes four transforms
and not five:

    u . grad w = (d_xx - d_yy)(u1 u2) + d_xy (u2^2 - u1^2)

In time, the diffusion is integrated exactly and the rest by the classical Runge-Kutta scheme of fourth order
(integrating-factor RK4).

Differs: the published data were made by the scheme `euler-cn` with steps of 1e-4, which is of first order and unstable
for steps that RK4 takes with ease. The published scripts cut modes off in the advection alone, here they are cut off.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError, unknown_name
from oformer.gpu import CudaGraphs, fused_kernels
from oformer.meshes.grids import periodic_grid
from oformer.solvers.fourier import never_one
from oformer.solvers.time_steps import check_norms, rms, steps_at

Scheme = Literal["rk4", "euler-cn"]
RightHandSide = Callable[[Tensor, Tensor], Tensor]  # (state, where to write) to what was written
March = Callable[[int], Tensor]  # so many steps on, the packed modes
FUSED_SIZES = (64, 128, 256)  # points per axis that `vorticity_kernels` is written for


@torch.no_grad()
def solve(
    initial: Float[Tensor, "batch points points"],
    *,
    viscosity: float | Float[Tensor, "batch"],
    times: Sequence[float],
    time_step: float = 0.01,
    forcing: Float[Tensor, "points points"] | None = None,
    scheme: Scheme = "rk4",
    stride: int = 1,
    fused: bool | None = None,
) -> Float[Tensor, "batch times kept kept"]:
    """The vorticity at the times asked for, in the floating type of the initial one and on its device.

    A state gives the same bits whatever the batch it is solved in, on the CPU and by the fused kernels: no operation
    mixes samples. On the CPU, factors have a zero real or imaginary part, and where a product is added to something
    else it is a power of two times it.

    Good values with the default forcing: steps of 0.01 for n = 128 and 0.005 for n = 256, up to time 30. RK4 is stable
    up to about 2.8 / (2 pi n/3 max(|u1| + |u2|)) where viscosity does not help, and the forcing drives the sum of
    speeds to 0.3 at time 10 and 0.6 to 1 at time 30. 64 points are too few for a viscosity of 1e-4, 128 are enough.

    Args:
        initial: vorticity of zero mean on the points (i/n, j/n); modes from n/3 on are cut off.
        viscosity: nu, not negative; one for all or one per sample.
        times: when to record, in order, each after a whole number of steps; the initial state is at 0.
        time_step: of all steps.
        forcing: f, steady, of zero mean; that of the published data if left out.
        scheme: `rk4`, or `euler-cn`: Crank-Nicolson for the viscosity, explicit Euler for the rest.
        stride: record every so many points of each axis.
        fused: whether RK4 in float32 on a GPU uses the kernels of `vorticity_kernels`, for numbers of points that
            they know; by default where they can run.

    Raises:
        SolverDiverged: at a record, values had left the finite numbers or grown more than the forcing can make them.
    """
    if scheme not in _SCHEMES:
        raise unknown_name("scheme", scheme, _SCHEMES)
    nu = torch.as_tensor(viscosity, dtype=torch.float64, device=initial.device).reshape(-1, 1, 1)
    if forcing is None:
        forcing = published_forcing(initial.shape[-1]).to(initial)
    _check_settings(initial, nu, forcing, stride)
    if not (math.isfinite(time_step) and time_step > 0):
        raise InputError("a positive `time_step`", str(time_step))
    record = steps_at(times, time_step)

    # The march: fused kernels where they can run, or plain code.
    n = initial.shape[-1]
    modes = Modes(n, initial.device)
    start, push = rms(initial), rms(forcing[None])
    fits = scheme == "rk4" and initial.dtype == torch.float32 and n in FUSED_SIZES
    if fused is None:
        fused = fits and fused_kernels(initial.device, "vorticity")
    if fused and not fits:
        raise InputError(
            f"scheme `rk4`, float32 and {', '.join(map(str, FUSED_SIZES))} points per axis for the fused kernels",
            f"`{scheme}`, {initial.dtype} and {n}",
            "Leave `fused` out",
        )
    if fused:
        march = _fused_march(modes, initial, nu, forcing, start + push * times[-1], time_step)
    else:
        march = _plain_march(modes, initial, nu, forcing, time_step, scheme)
    # From record to record; values that grow more than the forcing can make them are refused.
    frames = initial.new_empty((len(initial), len(record), -(-n // stride), -(-n // stride)))
    done = 0
    for frame, until in enumerate(record):
        w = _irfft2(modes.fill(march(until - done)), n)
        done = until
        # The norm grows by at most the norm of the forcing.
        check_norms("vorticity_spectral", w, start + push * (until * time_step), until, until * time_step)
        frames[:, frame] = w[:, ::stride, ::stride]
    return frames


def published_forcing(points: int) -> Float[Tensor, "points points"]:
    """0.1 (sin 2 pi (x + y) + cos 2 pi (x + y)), in float64 on the CPU."""
    phase = 2 * math.pi * periodic_grid((points, points), (1.0, 1.0)).sum(-1).reshape(points, points)
    return 0.1 * (torch.sin(phase) + torch.cos(phase))


def velocity(vorticity: Float[Tensor, "batch points points"]) -> Float[Tensor, "batch 2 points points"]:
    """The velocity (psi_y, -psi_x) of the modes that the solver keeps."""
    n = vorticity.shape[-1]
    modes = Modes(n, vorticity.device)
    w = modes.cut(_rfft2(vorticity))
    spectrum = modes.fill((w[:, None] * modes.velocity.to(w.dtype)).flatten(0, 1))
    return _irfft2(spectrum, n).unflatten(0, (-1, 2))


class Modes:
    """The modes |k| < n/3 of a real field of n by n points, packed: rows 0..m, -m..-1 and columns 0..m."""

    def __init__(self, points: int, device: torch.device):
        self.points, self.highest = points, (points - 1) // 3
        m = self.highest
        k = torch.arange(-m, m + 1, dtype=torch.float64, device=device).roll(-m)
        k1, k2 = 2 * math.pi * k[:, None], 2 * math.pi * k[None, : m + 1]
        self.eigenvalues = k1**2 + k2**2  # of minus the Laplacian
        inverse = 1 / self.eigenvalues.clamp_min(1)
        from_stream = torch.stack([k2 * inverse, -k1 * inverse])
        self.velocity = torch.complex(torch.zeros_like(from_stream), from_stream)
        self.advection = torch.stack([k1**2 - k2**2, k1 * k2])  # -u . grad w from the spectra of u1 u2, u2^2 - u1^2
        self.blocks = ((slice(0, m + 1), slice(0, m + 1)), (slice(m + 1, None), slice(points - m, None)))

    def cut(self, spectrum: Complex[Tensor, "batch rows columns"]) -> Complex[Tensor, "batch modes1 modes2"]:
        """Pack the kept modes of a spectrum of `rfft2`."""
        return torch.cat([spectrum[:, large, : self.highest + 1] for _, large in self.blocks], 1)

    def fill(self, packed: Complex[Tensor, "batch modes1 modes2"]) -> Complex[Tensor, "batch rows columns"]:
        """The spectrum for `irfft2`, zero at the modes that are not kept."""
        spectrum = packed.new_zeros((len(packed), self.points, self.points // 2 + 1))
        for small, large in self.blocks:
            spectrum[:, large, : self.highest + 1] = packed[:, small]
        return spectrum


def _plain_march(modes: Modes, initial: Tensor, nu: Tensor, forcing: Tensor, time_step: float, scheme: Scheme) -> March:
    share, advance = _SCHEMES[scheme]
    rhs = _right_hand_side(modes, forcing.to(initial.dtype), share * time_step, len(initial))
    step = advance(rhs, nu * modes.eigenvalues * time_step, initial)
    v = modes.cut(_rfft2(initial))

    def march(steps: int) -> Tensor:
        for _ in range(steps):
            step(v)
        return v

    return march


def _fused_march(
    modes: Modes, initial: Tensor, nu: Tensor, forcing: Tensor, largest: Tensor, time_step: float
) -> March:
    from oformer.solvers.vorticity_kernels import FusedRungeKutta  # needs Triton

    force = _push(modes, forcing.to(initial.dtype))
    record = CudaGraphs(initial.device) if initial.is_cuda else None
    fused = FusedRungeKutta(modes.cut(_rfft2(initial)), nu, force, largest, modes.points, time_step, record)

    def march(steps: int) -> Tensor:
        fused.march(steps)
        return fused.packed()

    return march


def _push(modes: Modes, forcing: Float[Tensor, "points points"]) -> Complex[Tensor, "modes1 modes2"]:
    """The modes of the forcing; its mean is zero up to rounding, and then exactly."""
    force = modes.cut(_rfft2(forcing[None]))[0]
    force[0, 0] = 0
    return force


def _right_hand_side(modes: Modes, forcing: Float[Tensor, "points points"], amount: float, batch: int) -> RightHandSide:
    """A function that writes `amount` times -u . grad w + f; its buffers are made once."""
    n, kept = modes.points, modes.highest + 1
    force = _push(modes, forcing) * amount
    to_velocity = modes.velocity.to(force.dtype)
    advection = (modes.advection * amount).to(force.dtype)
    spectrum = force.new_zeros((batch, 2, n, n // 2 + 1))
    products = forcing.new_empty((batch, 2, n, n))

    def rhs(v: Tensor, out: Tensor) -> Tensor:
        for small, large in modes.blocks:
            torch.mul(v[:, None, small], to_velocity[:, small], out=spectrum[:, :, large, :kept])
        u1, u2 = torch.fft.irfft2(spectrum, (n, n), norm="forward").unbind(1)  # two fields at least, see _rfft2
        torch.mul(u1, u2, out=products[:, 0])
        torch.sub(u2, u1, out=products[:, 1])
        products[:, 1].mul_(u1.add_(u2))
        flux = torch.fft.rfft2(products, norm="forward")
        for small, large in modes.blocks:
            torch.mul(flux[:, 0, large, :kept], advection[0, small], out=out[:, small])
            flux[:, 1, large, :kept].mul_(advection[1, small])
            out[:, small].add_(flux[:, 1, large, :kept])
        return out.add_(force)

    return rhs


def _runge_kutta(rhs: RightHandSide, decay: Tensor, like: Tensor) -> Callable[[Tensor], None]:
    """A step of integrating-factor RK4, in place; `rhs` is that of half a step."""
    half = _as_complex(torch.exp(-decay / 2), like)
    total, slope, stage = (_buffer(decay, like) for _ in range(3))

    def step(v: Tensor) -> None:
        rhs(v, total).mul_(half)
        v.mul_(half)
        rhs(torch.add(v, total, out=stage), slope)
        total.add_(slope, alpha=2)
        rhs(torch.add(v, slope, out=stage), slope)
        total.add_(slope, alpha=2)
        rhs(torch.add(v, slope, alpha=2, out=stage).mul_(half), slope)
        v.mul_(half).add_(total.mul_(half).add_(slope).mul_(1 / 3))

    return step


def _euler_crank_nicolson(rhs: RightHandSide, decay: Tensor, like: Tensor) -> Callable[[Tensor], None]:
    """A step of the published scheme, in place; `rhs` is that of a whole step."""
    keep = _as_complex((1 - decay / 2) / (1 + decay / 2), like)
    damp = _as_complex(1 / (1 + decay / 2), like)
    slope = _buffer(decay, like)

    def step(v: Tensor) -> None:
        rhs(v, slope).mul_(damp)
        v.mul_(keep).add_(slope)

    return step


# The part of a step that the right-hand side is scaled to, and what makes the step.
_SCHEMES = {"rk4": (0.5, _runge_kutta), "euler-cn": (1.0, _euler_crank_nicolson)}


def _as_complex(factor: Tensor, like: Tensor) -> Tensor:
    """Rounded to the type of `like`; a complex number, since mixed products convert it in each step."""
    return factor.to(like.dtype).to(like.dtype.to_complex())


def _buffer(decay: Tensor, like: Tensor) -> Tensor:
    return torch.empty((len(like), *decay.shape[1:]), dtype=like.dtype.to_complex(), device=like.device)


def _rfft2(values: Float[Tensor, "batch points points"]) -> Complex[Tensor, "batch rows columns"]:
    return torch.fft.rfft2(never_one(values), norm="forward")[: len(values)]


def _irfft2(spectrum: Complex[Tensor, "batch rows columns"], points: int) -> Float[Tensor, "batch {points} {points}"]:
    return torch.fft.irfft2(never_one(spectrum), (points, points), norm="forward")[: len(spectrum)]


def _check_settings(initial: Tensor, nu: Tensor, forcing: Tensor, stride: int) -> None:
    n = initial.shape[-1]
    if initial.shape[-2] != n or forcing.shape != (n, n) or len(nu) not in (1, len(initial)):
        raise InputError(
            "`initial` (batch, n, n), `forcing` (n, n), and one `viscosity` or one per sample",
            f"{tuple(initial.shape)}, {tuple(forcing.shape)} and {len(nu)}",
        )
    if n < 4:
        raise InputError("at least 4 points per axis", str(n), "Fewer hold no mode that can move")
    if not bool((nu.isfinite() & (nu >= 0)).all()):
        raise InputError("a `viscosity` that is finite and not negative", str(nu.flatten().tolist()))
    if stride < 1 or n % stride:
        raise InputError(f"a `stride` that divides the {n} points", str(stride))
    for name, field in (("initial", initial), ("forcing", forcing[None])):
        check_finite(name, field)
        mean = field.mean((1, 2)).abs()
        if bool((mean > 1e-5 * rms(field)).any()):
            raise InputError(
                f"`{name}` of zero mean", f"{float(mean.max()):g}", "A periodic flow has no other; subtract it"
            )
