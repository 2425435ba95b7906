"""Learning from your own data: `OperatorRegressor` beside the baselines, on problems unlike those of the paper.

python benchmarks/own_data.py [--problems a b c] [--minutes 5] [--seeds 0] [--samples 500] [--test 100]

For each problem and seed: samples are generated, `OperatorRegressor(minutes=...)` and each of `oformer.baselines` are
fitted to the training samples, and all are tested on samples that no `fit` has seen. Errors are means of the relative
L2 error. The operator holds a tenth of the training samples out; the baselines learn from all of them. --minutes 0
measures the baselines alone.

Sample i depends on the seed and on i alone, so a larger set begins with the samples of a smaller one.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oformer.baselines import BASELINES
from oformer.estimator import OperatorRegressor
from oformer.seeds import numpy_generator

Sample = dict[str, np.ndarray]

HEAT_CELLS = 256
HEAT_TIME = 0.03
HELMHOLTZ_CELLS = 64  # along the long side of the L, of length 2
WAVE_NUMBER = 6.0
DAMPING = 0.1
FRAMES = 8
ADVECTION_TIME = 1.0
CUBE_CELLS = 24
FRONT_TIME, FRONT_POINTS, FRONT_STEPS = 0.3, 512, 400
NOISE = 0.05


def heat(random: np.random.Generator) -> Sample:
    """(a) Heat on a rod of varying conductivity, whose ends are insulated: u_t = (k u_x)_x on [0, 1].

    The inputs are ln k and u(0), at 40 to 80 random points; the target is u(HEAT_TIME) there.
    """
    modes = np.arange(1, 9)
    log_k, start = random.normal(size=8) / modes, random.normal(size=8) / modes**0.5
    x = np.sort(random.random(random.integers(40, 81)))

    def waves(weights: np.ndarray, at: np.ndarray) -> np.ndarray:
        return np.cos(np.pi * np.outer(at, modes)) @ weights

    centers = (np.arange(HEAT_CELLS) + 0.5) / HEAT_CELLS
    faces = np.arange(1, HEAT_CELLS) / HEAT_CELLS
    end = heat_at(np.exp(waves(log_k, faces)), waves(start, centers), HEAT_TIME)
    inputs = np.stack([waves(log_k, x), waves(start, x)], -1)
    return {"coords": x[:, None], "inputs": inputs, "targets": on_cells(end, x)[:, None]}


def heat_at(conductivity: np.ndarray, start: np.ndarray, at: float) -> np.ndarray:
    """Finite volumes of second order in space; exact in time, from the eigenvectors of the tridiagonal matrix.

    Args:
        conductivity: at the inner faces of equal cells.
        start: at the centers of the cells.
        at: the time.
    """
    from scipy.linalg import eigh_tridiagonal

    flux = conductivity * len(start) ** 2
    diagonal = np.append(flux, 0) + np.insert(flux, 0, 0)
    values, vectors = eigh_tridiagonal(diagonal, -flux)
    return vectors @ (np.exp(-at * values) * (vectors.T @ start))


def on_cells(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Cubic splines through the values at the centers of equal cells, with zero slope at the ends of the rod."""
    from scipy.ndimage import map_coordinates

    return map_coordinates(values, [x * len(values) - 0.5], order=3, mode="reflect")


def helmholtz(random: np.random.Generator) -> Sample:
    """(b) Damped waves on an L: -Δu - k² (1 + i DAMPING) n u = f, u = 0 on the border.

    The inputs are the index n, between 0.8 and 1.2, and the source f at 250 to 450 random points; the targets are the
    real and the imaginary part of u. The L is (-1, 1)² without [0, 1)².
    """
    modes = np.arange(6)
    order = 1 + modes[:, None] ** 2 + modes**2
    slow, fast = random.normal(size=(6, 6)) / order, random.normal(size=(6, 6)) / order**0.5
    points = _in_the_l(random, int(random.integers(250, 451)))

    def waves(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        a, b = (np.cos(np.pi / 2 * (z[..., None] + 1) * modes) for z in (x, y))
        return np.einsum("...i,...j,ij->...", a, b, weights)

    def index(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return 1 + 0.2 * np.tanh(1.5 * waves(slow, x, y))

    def source(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return waves(fast, x, y)

    u = helmholtz_on_grid(index, source, HELMHOLTZ_CELLS, WAVE_NUMBER, DAMPING)
    targets = [on_nodes(part, (points + 1) / 2) for part in (np.real(u), np.imag(u))]
    inputs = np.stack([index(*points.T), source(*points.T)], -1)
    return {"coords": points, "inputs": inputs, "targets": np.stack(targets, -1)}


def _in_the_l(random: np.random.Generator, count: int) -> np.ndarray:
    points = random.uniform(-1, 1, (4 * count + 20, 2))
    return points[~(points >= 0).all(1)][:count]


Function = Callable[[np.ndarray, np.ndarray], np.ndarray]


def helmholtz_on_grid(index: Function, source: Function, cells: int, wave_number: float, damping: float) -> np.ndarray:
    """Five-point differences of second order; u on all (cells + 1)² nodes of the square, zero outside the L.

    Args:
        index: n(x, y).
        source: f(x, y).
        cells: along each side, an even number.
        wave_number: k.
        damping: the imaginary part of k², over k².
    """
    from scipy.sparse import diags_array, eye_array, kron
    from scipy.sparse.linalg import splu

    axis = np.linspace(-1, 1, cells + 1)
    x, y = np.meshgrid(axis[1:-1], axis[1:-1], indexing="ij")
    inside = ~((x > -1e-12) & (y > -1e-12)).ravel()
    side = np.ones(cells - 2)
    diagonals: Any = (-1, 0, 1)  # scipy's own annotation of `offsets` has the type of its default
    second = diags_array([-side, 2 * np.ones(cells - 1), -side], offsets=diagonals) * (cells / 2) ** 2
    laplacian = (kron(second, eye_array(cells - 1)) + kron(eye_array(cells - 1), second)).tocsr()[inside][:, inside]
    shift = wave_number**2 * (1 + 1j * damping) * index(x, y).ravel()[inside]
    right = source(x, y).ravel()[inside].astype(complex)
    u = np.zeros((cells + 1, cells + 1), complex)
    inner = np.zeros((cells - 1) ** 2, complex)
    inner[inside] = splu((laplacian - diags_array(shift)).tocsc()).solve(right)
    u[1:-1, 1:-1] = inner.reshape(cells - 1, cells - 1)
    return u


def on_nodes(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """A function known at the nodes of a regular grid of the unit square or cube, at other points; linear on each axis.

    Args:
        values: (nodes, nodes) or (nodes, nodes, nodes).
        at: (points, dim), in the unit square or cube.
    """
    from scipy.interpolate import RegularGridInterpolator

    axes = tuple(np.linspace(0, 1, n) for n in values.shape)
    return np.asarray(RegularGridInterpolator(axes, values)(at))


def advection(random: np.random.Generator) -> Sample:
    """(c) Two bumps that a steady flow without divergence carries along: u_t + v·∇u = 0 on the unit square.

    The inputs are u(0) and the two components of v, at 300 random points; the targets are u at FRAMES equal times up to
    ADVECTION_TIME. The flow does not cross the border. u is constant along its paths, which are followed back.
    """
    modes = np.arange(1, 4)
    weights = random.normal(size=(3, 3)) / (modes[:, None] ** 2 + modes**2)
    weights *= 0.15 / np.linalg.norm(weights)
    centers, widths, heights = (
        random.uniform(0.2, 0.8, (2, 2)),
        random.uniform(0.08, 0.15, 2),
        random.uniform(0.5, 1, 2),
    )
    points = random.random((300, 2))

    def start(x: np.ndarray) -> np.ndarray:
        squares = ((x[:, None] - centers) ** 2).sum(-1)
        return np.exp(-squares / (2 * widths**2)) @ heights

    def velocity(x: np.ndarray) -> np.ndarray:
        return flow(weights, x)

    frames = carried(start, velocity, points, ADVECTION_TIME, FRAMES)
    inputs = np.concatenate([start(points)[:, None], velocity(points)], -1)
    return {"coords": points, "inputs": inputs[None], "targets": frames[..., None]}


def flow(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The velocity (ψ_y, -ψ_x) of the stream function ψ = Σ w_ij sin(iπx) sin(jπy)."""
    waves = np.pi * np.arange(1, len(weights) + 1)
    (sin_x, cos_x), (sin_y, cos_y) = ((np.sin(z), np.cos(z) * waves) for z in (x[:, :1] * waves, x[:, 1:] * waves))
    along = np.einsum("pi,pj,ij->p", sin_x, cos_y, weights)
    return np.stack([along, -np.einsum("pi,pj,ij->p", cos_x, sin_y, weights)], -1)


def carried(
    start: Callable[[np.ndarray], np.ndarray],
    velocity: Callable[[np.ndarray], np.ndarray],
    points: np.ndarray,
    at: float,
    frames: int,
    steps: int = 5,
) -> np.ndarray:
    """Values that a steady flow carries to points, at equal times; the paths by Runge and Kutta's method of order 4.

    Args:
        start: the values at time 0.
        velocity: of the flow.
        points: (points, dim).
        at: the last time.
        frames: number of times.
        steps: of the method, from one time to the next.
    """
    h, x, found = -at / frames / steps, points, []
    for _ in range(frames):
        for _ in range(steps):
            k1 = velocity(x)
            k2 = velocity(x + h / 2 * k1)
            k3 = velocity(x + h / 2 * k2)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + velocity(x + h * k3))
        found.append(start(x))
    return np.stack(found)


def cube(random: np.random.Generator) -> Sample:
    """A steady field in space: -Δu + c u = f in the unit cube, u = 0 on its border.

    The inputs are c, between 0 and 400, and f, a Gaussian bump, at 500 random points; the target is u there.
    """
    modes = np.arange(3)
    order = 1 + modes[:, None, None] ** 2 + modes[:, None] ** 2 + modes**2
    weights = random.normal(size=(3, 3, 3)) / order
    center, width = random.uniform(0.25, 0.75, 3), random.uniform(0.12, 0.2)
    points = random.random((500, 3))

    def reaction(x: np.ndarray) -> np.ndarray:
        waves = [np.cos(np.pi * x[:, axis, None] * modes) for axis in range(3)]
        return 200 * (1 + np.tanh(2 * np.einsum("pi,pj,pk,ijk->p", *waves, weights)))

    def source(x: np.ndarray) -> np.ndarray:
        return 100 * np.exp(-((x - center) ** 2).sum(-1) / (2 * width**2))

    u = on_nodes(cube_on_grid(reaction, source, CUBE_CELLS), points)
    return {"coords": points, "inputs": np.stack([reaction(points), source(points)], -1), "targets": u[:, None]}


def cube_on_grid(
    reaction: Callable[[np.ndarray], np.ndarray], source: Callable[[np.ndarray], np.ndarray], cells: int
) -> np.ndarray:
    """Seven-point differences of second order; u on all (cells + 1)³ nodes.

    Conjugate gradients, preconditioned with the inverse for the mean of c, which sine transforms give.

    Args:
        reaction: c at points of shape (points, 3).
        source: f at points.
        cells: along each side.
    """
    from scipy.fft import dstn, idstn
    from scipy.sparse.linalg import LinearOperator, cg

    axis, shape = np.linspace(0, 1, cells + 1)[1:-1], (cells - 1,) * 3
    nodes = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    c, f = reaction(nodes), source(nodes)
    line = (2 * cells * np.sin(np.pi * np.arange(1, cells) / (2 * cells))) ** 2
    inverse = 1 / (line[:, None, None] + line[:, None] + line + c.mean())

    def apply(u: np.ndarray) -> np.ndarray:
        padded = np.pad(u.reshape(shape), 1)
        around = sum(np.roll(padded, step, axis) for axis in range(3) for step in (1, -1))
        return ((6 * padded - around)[1:-1, 1:-1, 1:-1] * cells**2).ravel() + c * u

    def precondition(u: np.ndarray) -> np.ndarray:
        return np.asarray(idstn(np.asarray(dstn(u.reshape(shape), type=1)) * inverse, type=1)).ravel()

    size = (len(nodes), len(nodes))
    left: Any = LinearOperator(size, matvec=apply, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    before: Any = LinearOperator(size, matvec=precondition, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    u, failed = cg(left, f, rtol=1e-8, M=before)
    if failed:
        raise RuntimeError(f"conjugate gradients did not converge in {failed} steps")
    return np.pad(u.reshape(shape), 1)


def fronts(random: np.random.Generator) -> Sample:
    """A map that is linear in nothing: Burgers' equation u_t + u u_x = ν u_xx on a periodic line of length 1.

    The inputs are u(0) and log10 ν, between -2.5 and -1.5 and the same at all points, at 60 to 100 random points; the
    target is u(FRONT_TIME) there.
    """
    from oformer.solvers.burgers_spectral import solve

    modes = np.arange(1, 6)
    cosines, sines = random.normal(size=(2, 5)) / modes
    exponent = random.uniform(-2.5, -1.5)
    x = np.sort(random.random(random.integers(60, 101)))

    def start(at: np.ndarray) -> np.ndarray:
        phases = 2 * np.pi * np.outer(at, modes)
        return 0.5 * (np.cos(phases) @ cosines + np.sin(phases) @ sines)

    grid = torch.from_numpy(start(np.arange(FRONT_POINTS) / FRONT_POINTS))[None]
    setting = {"length": 1.0, "duration": FRONT_TIME, "steps": FRONT_STEPS}
    end = solve(grid, viscosity=10**exponent, **setting)[0, 0].numpy()
    inputs = np.stack([start(x), np.full(len(x), exponent)], -1)
    return {"coords": x[:, None], "inputs": inputs, "targets": on_period(end, x)[:, None]}


def on_period(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Cubic splines through values at equal distances on a periodic line of length 1."""
    from scipy.ndimage import map_coordinates

    return map_coordinates(values, [x * len(values)], order=3, mode="grid-wrap")


@dataclass(frozen=True)
class Problem:
    """Samples of one kind, drawn one by one."""

    title: str
    draw: Callable[[np.random.Generator], Sample]
    noise: float = 0.0  # of the training samples and all inputs, relative to the spread of each channel in a sample
    samples: int | None = None  # fewer training samples than are asked for

    def generate(self, train: int, test: int, seed: int) -> tuple[list[Sample], list[Sample]]:
        """Training samples, and test samples whose targets are without noise."""
        train = min(train, self.samples or train)
        learned = [self._noisy(self.draw(numpy_generator(seed, 0, i)), seed, i) for i in range(train)]
        held = [self.draw(numpy_generator(seed, 1, i)) for i in range(test)]
        return learned, [
            {**sample, "inputs": self._noisy(sample, seed, train + i)["inputs"]} for i, sample in enumerate(held)
        ]

    def _noisy(self, sample: Sample, seed: int, i: int) -> Sample:
        if not self.noise:
            return sample
        random = numpy_generator(seed, 2, i)

        def seen(values: np.ndarray) -> np.ndarray:
            return values + self.noise * values.std(-2, keepdims=True) * random.normal(size=values.shape)

        return {**sample, **{key: seen(sample[key]) for key in ("inputs", "targets")}}


PROBLEMS = {
    "a": Problem("1-D heat, varying conductivity", heat),
    "b": Problem("2-D damped waves on an L", helmholtz),
    "c": Problem("2-D advection, 8 frames", advection),
    "fronts": Problem("1-D Burgers, varying viscosity", fronts),
    "noisy": Problem("(a) with 5 % noise", heat, noise=NOISE),
    "cube": Problem("3-D steady field", cube),
    "few": Problem("(a) with 60 samples", heat, samples=60),
}


@dataclass(frozen=True)
class Row:
    """Test errors of one problem and seed, as shares, and seconds of each `fit`."""

    problem: str
    seed: int
    samples: int
    errors: dict[str, float]
    seconds: dict[str, float]


def measure(name: str, seed: int, *, minutes: float, samples: int, test: int, device: str | None = None) -> Row:
    """Fit everything to one problem and test it.

    Args:
        name: of the problem.
        seed: of the samples and of the operator.
        minutes: of `OperatorRegressor.fit`; without any it is left out.
        samples: to fit to.
        test: number of samples to test with.
        device: of the operator.
    """
    learned, held = PROBLEMS[name].generate(samples, test, seed)
    kinds: dict[str, Any] = {kind.name: kind() for kind in BASELINES}
    if minutes > 0:
        kinds = {"operator": OperatorRegressor(minutes=minutes, random_state=seed, device=device), **kinds}
    errors, seconds = {}, {}
    for kind, model in kinds.items():
        start = time.monotonic()
        model.fit(learned)
        seconds[kind] = time.monotonic() - start
        errors[kind] = 1 - model.score(held)
    return Row(name, seed, len(learned), errors, seconds)


COLUMNS = ("operator", *(kind.name for kind in BASELINES))
WIDTH = 2 + max(map(len, COLUMNS))


def head() -> str:
    names = "".join(f"{name:>{WIDTH}}" for name in COLUMNS)
    return f"{'problem':40}{'seed':>5}{'samples':>9}{names}   seconds of each fit"


def line(row: Row) -> str:
    shown = (f"{row.errors[name]:.2%}" if name in row.errors else "-" for name in COLUMNS)
    numbers = "".join(f"{number:>{WIDTH}}" for number in shown)
    times = " ".join(f"{row.seconds[name]:.1f}" if name in row.seconds else "-" for name in COLUMNS)
    title = f"{row.problem}: {PROBLEMS[row.problem].title}"
    return f"{title:40}{row.seed:>5}{row.samples:>9}{numbers}   {times}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="OperatorRegressor beside the baselines, on held-back samples.")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--minutes", type=float, default=5.0, help="of OperatorRegressor.fit; 0: only the baselines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--samples", type=int, default=500, help="to fit to; 60 at most for `few`")
    parser.add_argument("--test", type=int, default=100, help="samples to test with")
    parser.add_argument("--device", help="of the operator; by default a GPU if there is one")
    options = parser.parse_args(arguments)
    print(f"Relative L2 error on {options.test} samples that no fit has seen; minutes={options.minutes:g}\n")
    print(head(), flush=True)
    kept = {"samples": options.samples, "test": options.test, "device": options.device}
    for name, seed in itertools.product(options.problems, options.seeds):
        print(line(measure(name, seed, minutes=options.minutes, **kept)), flush=True)


if __name__ == "__main__":
    main()
