"""The Darcy solver against exact solutions, a direct solver, conservation, symmetries, and the published scheme."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.fft
import scipy.interpolate
import scipy.sparse
import scipy.sparse.linalg
import torch

import oformer.solvers.darcy_fd as darcy_fd
from oformer.errors import InputError, SolverDiverged
from oformer.solvers.darcy_fd import conductances, minus_divergence, solve


def media(rows: int, columns: int, batch: int = 4, low: float = 3.0, high: float = 12.0) -> torch.Tensor:
    """Blobs of two phases: the sign of a random sum of a few waves."""
    c = np.random.default_rng(5).standard_normal((batch, 5, 5))
    x, y = ((np.arange(n) + 0.5) / n for n in (rows, columns))
    k = np.arange(1, 6)[:, None]
    field = np.einsum("bkl,ki,lj->bij", c, np.cos(math.pi * k * x), np.sin(math.pi * k * y + 1))
    return torch.from_numpy(np.where(field >= 0, high, low))


def centers(n: int) -> torch.Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any sample."""
    return float(((got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max())


def assembled(a: np.ndarray) -> scipy.sparse.csc_matrix:
    """The matrix of the scheme, face by face: half cells in series."""
    rows, columns = a.shape
    entries: dict[tuple[int, int], float] = {}

    def add(i: int, j: int, value: float) -> None:
        entries[i, j] = entries.get((i, j), 0.0) + value

    for i in range(rows):
        for j in range(columns):
            here = i * columns + j
            for di, dj, n in ((1, 0, rows), (-1, 0, rows), (0, 1, columns), (0, -1, columns)):
                h = 1 / n
                if 0 <= i + di < rows and 0 <= j + dj < columns:
                    c = 1 / (h / 2 / a[i, j] + h / 2 / a[i + di, j + dj]) / h
                    add(here, here, c)
                    add(here, (i + di) * columns + j + dj, -c)
                else:
                    add(here, here, a[i, j] / (h / 2) / h)
    index = np.array(list(entries))
    size = rows * columns
    return scipy.sparse.csc_matrix((list(entries.values()), (index[:, 0], index[:, 1])), shape=(size, size))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each iteration."""
    calls: list[int] = []
    original = darcy_fd._Poisson.invert

    def invert(self: darcy_fd._Poisson, f: torch.Tensor) -> torch.Tensor:
        calls.append(len(f))
        return original(self, f)

    monkeypatch.setattr(darcy_fd._Poisson, "invert", invert)
    return calls


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (17, 30), (31, 2), (2, 2)])
def test_a_direct_solver_gives_the_same(rows, columns):
    a = media(rows, columns, batch=3)
    f = torch.randn(3, rows, columns, dtype=torch.float64)
    for source in (torch.ones_like(f), f):
        expected = [
            scipy.sparse.linalg.spsolve(assembled(m.numpy()), s.numpy().ravel()).reshape(rows, columns)
            for m, s in zip(a, source, strict=True)
        ]
        assert relative(solve(a, source), torch.from_numpy(np.stack(expected))) < 1e-9


def test_operator_is_symmetric_and_positive_definite():
    a = media(7, 9, batch=1)
    faces = conductances(a.expand(63, 7, 9))
    matrix = minus_divergence(torch.eye(63, dtype=torch.float64).view(63, 7, 9), faces).view(63, 63)
    torch.testing.assert_close(matrix, torch.from_numpy(assembled(a[0].numpy()).toarray()).mT, rtol=1e-13, atol=1e-10)
    torch.testing.assert_close(matrix, matrix.mT, rtol=1e-14, atol=0)
    assert torch.linalg.eigvalsh(matrix).min() > 3 * 2 * math.pi**2 * 0.95  # the lowest mode of the low phase
    off = matrix - torch.diag(torch.diag(matrix))
    assert (off <= 0).all()  # an M-matrix: its inverse is positive
    assert torch.linalg.inv(matrix).min() > 0


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (13, 22), (2, 5)])
def test_preconditioner_inverts_the_scheme_with_coefficient_one(rows, columns):
    f = torch.randn(3, rows, columns, dtype=torch.float64)
    u = darcy_fd._Poisson(f).invert(f)
    assert relative(minus_divergence(u, conductances(torch.ones_like(f))), f) < 1e-12
    spectrum = scipy.fft.dstn(f.numpy(), type=2, axes=(1, 2), norm="ortho")
    first, second = ((2 * n * np.sin(math.pi * np.arange(1, n + 1) / (2 * n))) ** 2 for n in (rows, columns))
    spectrum /= first[:, None] + second
    expected = scipy.fft.idstn(spectrum, type=2, axes=(1, 2), norm="ortho")
    torch.testing.assert_close(u, torch.from_numpy(expected), rtol=0, atol=1e-13)


def test_second_order_on_a_smooth_coefficient():
    """u = sin(pi x) sin(2 pi y) e^x with a = 2 + sin(3x + y); f by differentiation."""
    sizes, errors = (16, 24, 32, 48, 64), []
    for n in sizes:
        x, y = (v.requires_grad_() for v in torch.meshgrid(centers(n), centers(n), indexing="ij"))
        a = 2 + torch.sin(3 * x + y)
        u = torch.sin(math.pi * x) * torch.sin(2 * math.pi * y) * torch.exp(x)
        ux, uy = torch.autograd.grad(u.sum(), (x, y), create_graph=True)
        (fx,) = torch.autograd.grad((a * ux).sum(), x, retain_graph=True)
        (fy,) = torch.autograd.grad((a * uy).sum(), y)
        got = solve(a.detach()[None], -(fx + fy)[None].detach())
        errors.append(relative(got, u.detach()[None]))
    rate = -np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert rate == pytest.approx(2, abs=0.05)
    assert errors[-1] < 2e-3


def layers(x: torch.Tensor, widths: list[float], values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """a and the solution of -(a u')' = 1, u(0) = u(1) = 0, in layers: a u' = q - x, integrated piece by piece."""
    ends = np.cumsum([0.0, *widths])
    resistance = sum(w / v for w, v in zip(widths, values, strict=True))
    moment = sum((ends[i + 1] ** 2 - ends[i] ** 2) / 2 / values[i] for i in range(len(values)))
    q = moment / resistance
    a, u = torch.zeros_like(x), torch.zeros_like(x)
    start = 0.0
    for left, right, value in zip(ends[:-1], ends[1:], values, strict=True):
        inside = (x >= left) & (x < right)
        a = torch.where(inside, value, a)
        u = torch.where(inside, start + (q * (x - left) - (x**2 - left**2) / 2) / value, u)
        start += (q * (right - left) - (right**2 - left**2) / 2) / value
    assert abs(start) < 1e-14
    return a, u


def test_layers_have_a_closed_form():
    """Layers along x; a source of the form (1 + a pi^2 u) sin(pi y) makes u(x) sin(pi y) the solution in the square.

    Second order though the coefficient jumps: the jumps lie on faces, where the harmonic mean is exact.
    """
    errors = []
    for n in (16, 32, 64):
        a, u = layers(centers(n), [0.25, 0.5, 0.25], [3.0, 12.0, 5.0])
        wave = torch.sin(math.pi * centers(n))
        f = (1 + a * math.pi**2 * u)[:, None] * wave
        got = solve(a[:, None].expand(n, n)[None].contiguous(), f[None])
        errors.append(relative(got, (u[:, None] * wave)[None]))
    assert errors[2] < 5e-4
    for coarse, fine in pairwise(errors):
        assert 3.7 < coarse / fine < 4.3


def test_constant_coefficient_is_poisson():
    a = torch.full((1, 65, 65), 7.0, dtype=torch.float64)
    assert float(solve(a).max()) == pytest.approx(0.07367135 / 7, rel=5e-4)
    k = np.arange(1, 200, 2)
    x = centers(65).numpy()
    s = np.sin(math.pi * np.outer(k, x))
    series = np.einsum("kl,ki,lj->ij", 16 / (math.pi**4 * np.outer(k, k) * (k[:, None] ** 2 + k**2)), s, s)
    assert relative(solve(a), torch.from_numpy(series)[None] / 7) < 1e-3


def test_scaling():
    a = media(32, 32)
    u = solve(a)
    assert relative(solve(2.5 * a), u / 2.5) < 1e-10
    assert relative(solve(a, 3.0), 3 * u) < 1e-10


def test_solution_is_positive_and_bounded_by_the_phases():
    a = media(48, 48)
    u = solve(a)
    assert u.min() > 0
    one = solve(torch.ones_like(a))
    assert (u.amax((1, 2)) < one.amax((1, 2)) / 3).all()
    assert (u.sum((1, 2)) > one.sum((1, 2)) / 12).all()  # the energy falls as the coefficient grows


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (20, 33)])
def test_what_flows_out_is_what_the_source_gives(rows, columns):
    a = media(rows, columns)
    u = solve(a)
    v = 2 * a * u
    across_rows = (v[:, 0] + v[:, -1]).sum(1) * rows / columns
    across_columns = (v[..., 0] + v[..., -1]).sum(1) * columns / rows
    torch.testing.assert_close(across_rows + across_columns, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-9)


def test_residual_is_as_small_as_asked():
    a = media(64, 64)
    for tolerance in (1e-4, 1e-10):
        r = 1 - minus_divergence(solve(a, tolerance=tolerance), conductances(a))
        norms = r.flatten(1).norm(dim=1) / 64
        assert norms.max() <= 1.01 * tolerance
        assert norms.max() > 1e-3 * tolerance


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("swap", [False, True])
def test_symmetries_of_the_square(turns, swap):
    def change(v: torch.Tensor) -> torch.Tensor:
        v = torch.rot90(v, turns, (1, 2))
        return v.mT if swap else v

    a = media(33, 33, batch=2)
    assert relative(solve(change(a)), change(solve(a))) < 1e-11


def test_iterations_do_not_grow_with_the_grid(monkeypatch):
    calls = counted(monkeypatch)
    counts = []
    for n in (16, 32, 64, 128):
        calls.clear()
        solve(media(n, n))
        counts.append(len(calls))
    assert max(counts) <= 28
    calls.clear()
    solve(torch.full((2, 32, 32), 5.0, dtype=torch.float64))
    assert len(calls) == 1  # the preconditioner is the inverse
    calls.clear()
    solve(media(64, 64, high=300.0))
    assert 30 < len(calls) < 150  # a contrast of 100


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (64, 64), (29, 29), (43, 24), (2, 2)])
def test_a_sample_has_the_same_bits_in_any_batch(rows, columns):
    """Though some converge sooner: they are left as they are while others go on."""
    a = media(rows, columns, batch=12)
    a[3] = 5.0  # converges at once
    a[6] *= torch.linspace(1, 5, columns, dtype=torch.float64)  # and this one late
    u = solve(a)
    for batch in (1, 2, 3, 7):
        assert torch.equal(solve(a[2 : 2 + batch]), u[2 : 2 + batch])
    assert torch.equal(solve(a.flip(0)), u.flip(0))
    assert torch.equal(solve(a.mT.contiguous().mT), u)  # laid out otherwise


def test_solving_a_few_at_a_time_changes_nothing(monkeypatch):
    a = media(24, 24, batch=5)
    u = solve(a)
    calls = counted(monkeypatch)
    for cells, sizes in ((1, {1}), (2 * 24**2, {1, 2}), (2**19, {5})):
        monkeypatch.setattr(darcy_fd, "CELLS", cells)
        calls.clear()
        assert torch.equal(solve(a), u)
        assert set(calls) == sizes


def test_looking_seldom_changes_nothing():
    """As on a GPU: converged samples wait for the next look."""
    a = media(24, 24)
    f = torch.ones_like(a)
    u = darcy_fd._conjugate_gradients(a, f, 1e-10, 400, every=1)
    for every in (5, 8, 100):
        assert torch.equal(darcy_fd._conjugate_gradients(a, f, 1e-10, 400, every), u)
    with pytest.raises(SolverDiverged, match="step 9 "):
        darcy_fd._conjugate_gradients(a, f, 1e-10, 9, every=8)


def test_the_published_scheme_is_near():
    """On nodes, with linear interpolation there and back: near, and nearer on finer grids; ours is more accurate.

    The reference is our scheme on cells cut into 3 x 3.
    """
    apart = []
    for n in (32, 64):
        a = media(n, n, batch=2)
        u = solve(a)
        nodal = torch.stack([torch.from_numpy(on_nodes(m.numpy())) for m in a])
        reference = solve(a.repeat_interleave(3, 1).repeat_interleave(3, 2))[:, 1::3, 1::3]
        apart.append(relative(nodal, u))
        assert relative(u, reference) < 0.5 * relative(nodal, reference)
    assert apart[1] < 0.7 * apart[0] < 0.7 * 0.1


def on_nodes(a: np.ndarray) -> np.ndarray:
    """Coefficients interpolated to nodes, arithmetic means on faces, the solution interpolated back."""
    n = len(a)
    c, x = (np.arange(n) + 0.5) / n, np.linspace(0, 1, n)
    inside = np.clip(x, c[0], c[-1])
    nodes = np.stack(np.meshgrid(inside, inside, indexing="ij"), -1)
    b = scipy.interpolate.RegularGridInterpolator((c, c), a)(nodes)
    m = n - 2
    down, along = (b[1:, 1:-1] + b[:-1, 1:-1]) / 2, (b[1:-1, 1:] + b[1:-1, :-1]) / 2
    diagonal = down[1:] + down[:-1] + along[:, 1:] + along[:, :-1]
    beside = -along[:, 1:]
    beside[:, -1] = 0  # the last of a row and the first of the next are no neighbors
    beside, below = beside.ravel()[:-1], -down[1:-1].ravel()
    matrix = scipy.sparse.diags([diagonal.ravel(), beside, beside, below, below], [0, 1, -1, m, -m], format="csc")
    u = np.zeros((n, n))
    u[1:-1, 1:-1] = scipy.sparse.linalg.spsolve(matrix * (n - 1) ** 2, np.ones(m * m)).reshape(m, m)
    return scipy.interpolate.RectBivariateSpline(x, x, u)(c, c)


def test_no_source_no_pressure():
    assert torch.equal(solve(media(16, 16), 0.0), torch.zeros(4, 16, 16, dtype=torch.float64))
    f = torch.ones(4, 16, 16, dtype=torch.float64)
    f[1] = 0
    u = solve(media(16, 16), f)
    assert torch.equal(u[1], f[1])
    assert torch.equal(u[2], solve(media(16, 16))[2])


def test_single_precision_coefficients_are_solved_in_double():
    a = media(16, 16).float()
    assert solve(a).dtype == torch.float64
    assert torch.equal(solve(a), solve(a.double()))


def test_too_few_iterations_raise_what_they_are():
    with pytest.raises(SolverDiverged, match="darcy_fd diverged at step 5") as caught:
        solve(media(32, 32), iterations=5)
    assert 1e-10 < caught.value.norm < 0.1
    one = torch.full((2, 32, 32), 5.0, dtype=torch.float64)
    one[1] = media(32, 32)[0]
    with pytest.raises(SolverDiverged):  # one sample is enough
        solve(one, iterations=5)


def test_leaving_the_finite_numbers_is_seen_at_once():
    with pytest.raises(SolverDiverged, match="step 1 ") as caught:
        solve(media(16, 16, high=1e308))
    assert not math.isfinite(caught.value.norm)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_very_small_and_very_large_numbers(size):
    a = media(16, 16)
    u = solve(a)
    assert relative(solve(a, size) / size, u) < 1e-10
    assert relative(solve(a * size) * size, u) < 1e-10


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"iterations": 0}, "iterations"),
        ({"source": math.inf}, "`source`"),
    ],
)
def test_impossible_settings_are_refused(change, sentence):
    with pytest.raises(InputError, match=sentence):
        solve(media(8, 8), **change)


def test_impossible_coefficients_are_refused():
    a = media(8, 8)
    with pytest.raises(InputError, match="2 cells"):
        solve(a[:, :1])
    with pytest.raises(InputError, match="one sample"):
        solve(a[:0])
    a[2, 3, 4] = 0
    with pytest.raises(InputError, match=r"positive `coefficient` everywhere, got 0"):
        solve(a)
    a[2, 3, 4] = math.nan
    with pytest.raises(InputError, match="1 NaN"):
        solve(a)
