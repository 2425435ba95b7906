"""Steps of the vorticity solver on a GPU: three fused kernels per right-hand side, with transforms as small products.

A transform of 256 points, of which a third of the modes is kept, is small enough to be a product with a table of
cosines and sines, which tensor cores do while the numbers pass through the chip once. Symmetry makes the tables small.
On points theta = 2 pi (j + 1/2)/n, which serve as well as j/n for products without aliasing, the four images theta,
-theta, pi - theta and pi + theta are all points. A sum over modes is four sums, of cosines and sines with even and odd
wave numbers, and the images differ in the signs of these alone:

    image        cos even   cos odd   sin even   sin odd
    theta           +          +         +          +
    -theta          +          +         -          -
    pi - theta      +          -         -          +
    pi + theta      +          -         +          -

So tables have a quarter of the points and, for each sum, a quarter of the modes k and -k. Likewise the state is kept as

    even(k1, k2) = w(k1, k2) + w(-k1, k2),    odd(k1, k2) = w(k1, k2) - w(-k1, k2),    k1, k2 >= 0

(k1 = 0 counted once), with even wave numbers before odd ones along both axes. Per right-hand side, `_velocity` goes
from modes to points along x, `_products` along y and, without leaving the chip, back, and `_advance` back along x; it
also does the stage of the Runge-Kutta scheme. Sums are within a sample and in a fixed order: a sample gives the same
bits in any batch.

Tensor cores multiply half-precision numbers and add in float32. A float32 number is the sum of two of half precision
up to its last two bits, and three products of the four give the result that float32 would (Markidis et al., 2018), so
long as nothing leaves the range of half precision. Hence velocities are scaled by a power of two such that the fastest
that the forcing can make them is 128 in the mean; then 1e-10 of that is still seen.

The plain twin is `vorticity_spectral`; the tests hold the two equal.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from oformer.gpu import Record, Work

_RANGE = 128  # of scaled velocities in the mean; half precision ends at 65,504, which their squares / _RANGE stay below


class FusedRungeKutta:
    """Steps of integrating-factor RK4 on the modes |k| < n/3, in float32 on a GPU; the state is its own."""

    def __init__(
        self,
        w: Tensor,
        nu: Tensor,
        force: Tensor,
        largest: Tensor,
        points: int,
        time_step: float,
        record: Record | None = None,
    ):
        """Make the tables, and take in the state.

        Args:
            w: packed modes (batch, 2m + 1, m + 1), rows 0..m, -m..-1.
            nu: viscosity (batch or 1, 1, 1) in float64.
            force: packed modes (2m + 1, m + 1).
            largest: what the root mean square of the vorticity will not exceed, for each sample.
            points: per axis; 64, 128 or 256.
            time_step: of all steps.
            record: how to record a step, so that starting its kernels takes no longer than they do; None: not.
        """
        self.batch, self.modes = len(w), w.shape[-1]
        self.quarter = points // 4
        self.parity = -(-((self.modes + 1) // 2) // 16) * 16  # even wave numbers, with zeros up to whole tiles
        k = torch.arange(self.modes, dtype=torch.float64, device=w.device)
        place = torch.arange(self.quarter, dtype=torch.float64, device=w.device) + 0.5
        cos, sin = (wave(2 * math.pi / points * k[:, None] * place) for wave in (torch.cos, torch.sin))
        weight = torch.full_like(k, 2.0)[:, None]
        weight[0] = 1.0  # mode 0 is its own mirror image
        k1, k2 = 2 * math.pi * k[:, None], 2 * math.pi * k[None, :]
        square = k1**2 + k2**2
        inverse = 1 / square.clamp_min(1)
        half = time_step / 2
        stretch, shear = half / points * (k1**2 - k2**2), half / points * k1 * k2
        self.to_x = self._table(cos, sin, axes=(0,)).mT.contiguous()
        self.to_y = self._table(weight * cos, weight * sin, axes=(0,))
        self.from_y = self._table(cos, sin, axes=(0,)).mT.contiguous()
        self.from_x = self._table(cos, sin, axes=(0,))
        self.to_velocity = self._table(k2 * inverse, -k1 * inverse)
        once, twice, mixed = weight * stretch, 2 * stretch, 2 * shear
        self.advection = self._table(once, once, twice, -twice, mixed, -mixed, mixed, mixed)
        self.decay = self._table(*torch.exp(-nu * square * half))
        # The slowest wave turns vorticity into a velocity 2 pi times smaller.
        speed = (largest.double() / (2 * math.pi)).clamp(1e-12, 1e12)
        self.scale = torch.exp2(torch.floor(torch.log2(_RANGE / speed))).float()
        self.force = self._folded(force[None] * half)[0]
        self.state = self._folded(w)
        self.stage, self.total = torch.empty_like(self.state), torch.empty_like(self.state)
        # Four images of x, then real and imaginary part of two velocities, and later of two products.
        self.velocity = self.state.new_empty((self.batch, 4, 4, self.quarter, 2 * self.parity))
        self.flux = torch.empty_like(self.velocity)
        self._record = record
        self._replay: Work | None = None

    def _table(self, *planes: Tensor, axes: tuple[int, ...] = (-2, -1)) -> Tensor:
        """Planes in float32, with even wave numbers before odd ones along some axes and zeros up to whole tiles."""
        stacked = torch.stack(planes)
        for axis in axes:
            axis = axis + 1 if axis >= 0 else axis
            halves = []
            for parity in (0, 1):
                part = stacked.movedim(axis, 0)[parity::2]
                halves += [part, part.new_zeros((self.parity - len(part), *part.shape[1:]))]
            stacked = torch.cat(halves).movedim(0, axis)
        return stacked.float().contiguous()

    def _folded(self, packed: Tensor) -> Tensor:
        """Packed complex modes to real (batch, 4, k1, k2): even in k1, real and imaginary, and odd in k1 likewise."""
        plus, minus = packed[:, : self.modes], packed[:, self.modes :].flip(1)
        even = torch.cat([plus[:, :1], plus[:, 1:] + minus], 1)
        odd = torch.cat([torch.zeros_like(plus[:, :1]), plus[:, 1:] - minus], 1)
        planes = torch.stack([even.real, even.imag, odd.real, odd.imag], 1)
        return self._table(*planes)

    def packed(self) -> Tensor:
        """The state as packed complex modes."""
        k = torch.arange(self.modes, device=self.state.device)
        where = (k % 2) * self.parity + k // 2
        even_real, even_imag, odd_real, odd_imag = self.state[:, :, where][..., where].unbind(1)
        even, odd = torch.complex(even_real, even_imag), torch.complex(odd_real, odd_imag)
        return torch.cat([even[:, :1], (even + odd)[:, 1:] / 2, ((even - odd)[:, 1:] / 2).flip(1)], 1)

    def march(self, steps: int) -> None:
        """So many time steps; the first of all compiles the kernels, and is not recorded."""
        for _ in range(steps):
            (self._replay or self.step)()
            if self._replay is None and self._record is not None:
                self._replay = self._record(self.step, 0)

    def step(self) -> None:
        """One time step."""
        with torch.cuda.device_of(self.state):  # Triton starts kernels on the current device
            for stage in (1, 2, 3, 4):
                self._slope(self.state if stage == 1 else self.stage, stage)

    def _slope(self, where: Tensor, stage: int) -> None:
        shape = {"QUARTER": self.quarter, "PARITY": self.parity}
        columns = 2 * self.parity // 32
        _velocity[(columns, 2, self.batch)](
            where, self.to_x, self.to_velocity, self.scale, self.velocity, **shape, num_warps=4
        )
        rows = min(32, self.quarter)
        _products[(4 * self.quarter // rows, self.batch)](
            self.velocity, self.to_y, self.from_y, self.flux, ROWS=rows, RANGE=_RANGE, **shape, num_warps=4
        )
        own_decay = self.decay[0].numel() if len(self.decay) > 1 else 0
        tables = self.from_x, self.advection, self.scale, self.force, self.decay, own_decay
        _advance[(2 * columns, 4, self.batch)](
            self.flux, *tables, self.state, self.stage, self.total, STAGE=stage, RANGE=_RANGE, **shape, num_warps=2
        )


@triton.jit
def _dot(x, y, total):
    """x y + total, as accurate as in float32."""
    x_high, y_high = x.to(tl.float16), y.to(tl.float16)
    x_low, y_low = (x - x_high.to(tl.float32)).to(tl.float16), (y - y_high.to(tl.float32)).to(tl.float16)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high, total)))


@triton.jit
def _velocity(state, to_x, to_velocity, scale, velocity, QUARTER: tl.constexpr, PARITY: tl.constexpr):
    """Modes to points along x, for one of two velocities (psi_y, -psi_x) and 32 wave numbers k2."""
    k2 = tl.program_id(0) * 32 + tl.arange(0, 32)
    component, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    j = tl.arange(0, QUARTER)
    modes: tl.constexpr = 2 * PARITY
    plane: tl.constexpr = modes * modes
    # psi_x turns even into odd and odd into even.
    for_cos = state + (sample * 4 + 2 * component) * plane
    for_sin = state + (sample * 4 + 2 - 2 * component) * plane
    to_velocity += component * plane
    unit = tl.load(scale + sample)
    cos_even_real = tl.zeros((QUARTER, 32), tl.float32)
    cos_even_imag, sin_even_real, sin_even_imag = cos_even_real, cos_even_real, cos_even_real
    cos_odd_real, cos_odd_imag, sin_odd_real, sin_odd_imag = cos_even_real, cos_even_real, cos_even_real, cos_even_real
    for first in range(0, PARITY, 16):
        k1 = first + tl.arange(0, 16)
        wave = to_x + j[:, None] * modes + k1[None, :]
        at = k1[:, None] * modes + k2[None, :]
        cos, sin, factor = tl.load(wave), tl.load(wave + QUARTER * modes), unit * tl.load(to_velocity + at)
        cos_even_real = _dot(cos, factor * tl.load(for_cos + at), cos_even_real)
        cos_even_imag = _dot(cos, factor * tl.load(for_cos + plane + at), cos_even_imag)
        sin_even_real = _dot(sin, factor * tl.load(for_sin + at), sin_even_real)
        sin_even_imag = _dot(sin, factor * tl.load(for_sin + plane + at), sin_even_imag)
        wave += PARITY
        at += PARITY * modes
        cos, sin, factor = tl.load(wave), tl.load(wave + QUARTER * modes), unit * tl.load(to_velocity + at)
        cos_odd_real = _dot(cos, factor * tl.load(for_cos + at), cos_odd_real)
        cos_odd_imag = _dot(cos, factor * tl.load(for_cos + plane + at), cos_odd_imag)
        sin_odd_real = _dot(sin, factor * tl.load(for_sin + at), sin_odd_real)
        sin_odd_imag = _dot(sin, factor * tl.load(for_sin + plane + at), sin_odd_imag)
    # The velocity is i times (cosines plus i times sines).
    block: tl.constexpr = QUARTER * modes
    here = velocity + (sample * 16 + component * 2) * block + j[:, None] * modes + k2[None, :]
    plus_real, minus_real = cos_even_real + cos_odd_real, cos_even_real - cos_odd_real
    plus_imag, minus_imag = cos_even_imag + cos_odd_imag, cos_even_imag - cos_odd_imag
    sum_real, difference_real = sin_even_real + sin_odd_real, sin_even_real - sin_odd_real
    sum_imag, difference_imag = sin_even_imag + sin_odd_imag, sin_even_imag - sin_odd_imag
    tl.store(here, -plus_imag - sum_real)
    tl.store(here + block, plus_real - sum_imag)
    tl.store(here + 4 * block, sum_real - plus_imag)
    tl.store(here + 5 * block, plus_real + sum_imag)
    tl.store(here + 8 * block, difference_real - minus_imag)
    tl.store(here + 9 * block, minus_real + difference_imag)
    tl.store(here + 12 * block, -minus_imag - difference_real)
    tl.store(here + 13 * block, minus_real - difference_imag)


@triton.jit
def _products(
    velocity, to_y, from_y, flux,
    QUARTER: tl.constexpr, PARITY: tl.constexpr, ROWS: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Along y to points, the products u1 u2 and u2^2 - u1^2, and back to modes, for some rows x."""
    tile, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    modes: tl.constexpr = 2 * PARITY
    block: tl.constexpr = QUARTER * modes
    tiles: tl.constexpr = QUARTER // ROWS
    i = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, QUARTER)
    rows = (sample * 16 + (tile // tiles) * 4) * block + i[:, None] * modes
    c1 = tl.zeros((ROWS, QUARTER), tl.float32)  # of u1, cosines with even wave numbers
    d1, s1, t1, c2, d2, s2, t2 = c1, c1, c1, c1, c1, c1, c1  # with odd ones, sines with even and odd ones, and of u2
    for first in range(0, PARITY, 16):
        k = first + tl.arange(0, 16)
        wave = to_y + k[:, None] * QUARTER + j[None, :]
        at = velocity + rows + k[None, :]
        cos, sin = tl.load(wave), tl.load(wave + block)
        c1 = _dot(tl.load(at), cos, c1)
        s1 = _dot(tl.load(at + block), sin, s1)
        c2 = _dot(tl.load(at + 2 * block), cos, c2)
        s2 = _dot(tl.load(at + 3 * block), sin, s2)
        wave += PARITY * QUARTER
        at += PARITY
        cos, sin = tl.load(wave), tl.load(wave + block)
        d1 = _dot(tl.load(at), cos, d1)
        t1 = _dot(tl.load(at + block), sin, t1)
        d2 = _dot(tl.load(at + 2 * block), cos, d2)
        t2 = _dot(tl.load(at + 3 * block), sin, t2)
    # The products of the four sums follow from the table of signs; one at a time, to spare registers.
    cos, sin = from_y + j[:, None] * modes, from_y + block + j[:, None] * modes
    out = flux + rows
    _to_modes(c1 * c2 + d1 * d2 + s1 * s2 + t1 * t2, cos, out, QUARTER, PARITY, RANGE)
    _to_modes(c1 * d2 + d1 * c2 + s1 * t2 + t1 * s2, cos + PARITY, out + PARITY, QUARTER, PARITY, RANGE)
    _to_modes(c1 * s2 + s1 * c2 + d1 * t2 + t1 * d2, sin, out + block, QUARTER, PARITY, RANGE)
    _to_modes(c1 * t2 + t1 * c2 + d1 * s2 + s1 * d2, sin + PARITY, out + block + PARITY, QUARTER, PARITY, RANGE)
    out += 2 * block
    square = c2 * c2 + d2 * d2 + s2 * s2 + t2 * t2 - c1 * c1 - d1 * d1 - s1 * s1 - t1 * t1
    _to_modes(square, cos, out, QUARTER, PARITY, RANGE)
    _to_modes(2 * (c2 * d2 + s2 * t2 - c1 * d1 - s1 * t1), cos + PARITY, out + PARITY, QUARTER, PARITY, RANGE)
    _to_modes(2 * (c2 * s2 + d2 * t2 - c1 * s1 - d1 * t1), sin, out + block, QUARTER, PARITY, RANGE)
    _to_modes(2 * (c2 * t2 + d2 * s2 - c1 * t1 - d1 * s1), sin + PARITY, out + block + PARITY, QUARTER, PARITY, RANGE)


@triton.jit
def _to_modes(values, wave, out, QUARTER: tl.constexpr, PARITY: tl.constexpr, RANGE: tl.constexpr):
    """Values at points of some rows to modes of one parity, by a table of which `wave` points to the first column."""
    values *= 1.0 / RANGE
    for first in tl.static_range(0, PARITY - 16, 32):
        k = first + tl.arange(0, 32)
        tl.store(out + k[None, :], _dot(values, tl.load(wave + k[None, :]), None) * (1.0 / QUARTER))
    if PARITY % 32 != 0:
        k = PARITY - 16 + tl.arange(0, 16)
        tl.store(out + k[None, :], _dot(values, tl.load(wave + k[None, :]), None) * (1.0 / QUARTER))


@triton.jit
def _advance(
    flux, from_x, advection, scale, force, decay, decay_stride, state, stage, total,
    QUARTER: tl.constexpr, PARITY: tl.constexpr, STAGE: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """Points to modes along x, the slope, and what a stage of RK4 does with it.

    For k1 of a parity, 32 wave numbers k2, and one plane of the state: even in k1, real and imaginary, odd likewise.
    """
    columns: tl.constexpr = PARITY // 16
    k2 = (tl.program_id(0) % columns) * 32 + tl.arange(0, 32)
    parity = tl.program_id(0) // columns
    part, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    modes: tl.constexpr = 2 * PARITY
    block: tl.constexpr = QUARTER * modes
    plane: tl.constexpr = modes * modes
    j = tl.arange(0, QUARTER)
    # The even planes come from cosines of u1 u2 and sines of u2^2 - u1^2, the odd ones from the others.
    odd = part // 2
    real_or_imag = part + odd * (3 - 2 * part)
    here = flux + sample * 16 * block + j[:, None] * modes + k2[None, :]
    sign = (1 - 2 * odd).to(tl.float32)
    alternate = (1 - 2 * parity).to(tl.float32)
    unit = tl.load(scale + sample)
    unit = RANGE / (unit * unit)
    shear = _images(here + real_or_imag * block, block, sign, alternate)
    normal = _images(here + (3 - real_or_imag) * block, block, -sign, alternate)
    for first in tl.static_range(0, PARITY, 16):
        k1 = parity * PARITY + first + tl.arange(0, 16)
        wave = from_x + k1[:, None] * QUARTER + j[None, :]
        at = k1[:, None] * modes + k2[None, :]
        slope = tl.load(advection + part * plane + at) * _dot(tl.load(wave + odd * block), shear, None)
        slope += tl.load(advection + (4 + part) * plane + at) * _dot(tl.load(wave + (1 - odd) * block), normal, None)
        slope = slope * unit + tl.load(force + part * plane + at)
        half = tl.load(decay + sample * decay_stride + at)
        _stage(slope, half, state, stage, total, (sample * 4 + part) * plane + at, STAGE)


@triton.jit
def _images(here, block, sign, alternate):
    """The sum over four images with the signs of cosines (`sign` 1) or sines (-1); `alternate` -1: odd wave numbers."""
    first, second = tl.load(here), tl.load(here + 4 * block)
    third, fourth = tl.load(here + 8 * block), tl.load(here + 12 * block)
    return first + sign * second + alternate * (sign * third + fourth)


@triton.jit
def _stage(slope, half, state, stage, total, place, STAGE: tl.constexpr):
    """A stage of integrating-factor RK4; slopes are those of half a step, `half` is the decay over half a step."""
    if STAGE == 1:
        halfway = tl.load(state + place) * half
        tl.store(state + place, halfway)
        slope *= half
        tl.store(total + place, slope)
        tl.store(stage + place, halfway + slope)
    elif STAGE == 2:
        tl.store(total + place, tl.load(total + place) + 2 * slope)
        tl.store(stage + place, tl.load(state + place) + slope)
    elif STAGE == 3:
        tl.store(total + place, tl.load(total + place) + 2 * slope)
        tl.store(stage + place, (tl.load(state + place) + 2 * slope) * half)
    else:
        gained = (tl.load(total + place) * half + slope) * (1.0 / 3.0)
        tl.store(state + place, tl.load(state + place) * half + gained)
