"""Where the values of a map are drawn: on the pixels of a grid, on the triangles of a mesh, or as dots.

Colors between the corners of a triangle are interpolated (Gouraud shading), so that the picture shows the values at the
points and adds nothing of its own. Scattered points without cells are triangulated by Delaunay; triangles that are long
for the place they are in bridge a hole or a notch of the domain, and are left out.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field
from oformer.plots import style

if TYPE_CHECKING:
    import matplotlib.axes

Window = tuple[float, float, float, float]  # left, right, bottom, top

_BRIDGE = 3.0  # an edge so many times longer than the short ones at its ends belongs to no cell
_ARROWS = 12  # along the longer side of a map


@dataclass(frozen=True)
class Raster:
    """The pixels of a regular grid."""

    grid: tuple[int, int]
    note: ClassVar[str] = ""
    shown: ClassVar[slice] = slice(None)  # the points in view, which choose the colors: all of them
    ratio: ClassVar[float] = 1.0  # height over width

    def draw(self, axis: "matplotlib.axes.Axes", values: Float[np.ndarray, " points"], **colors: Any) -> Any:
        """Color the pixels; the first coordinate goes right and the second up, as people draw axes."""
        if values.size != self.grid[0] * self.grid[1]:
            raise InputError(f"the {self.grid[0]} x {self.grid[1]} values of a grid to draw", str(values.size))
        return axis.imshow(values.reshape(self.grid).T, origin="lower", interpolation="nearest", **colors)


@dataclass(frozen=True)
class Scattered:
    """Points of the plane, with triangles between them where there are any."""

    points: np.ndarray  # (points, 2)
    triangles: np.ndarray | None  # (triangles, 3); None to draw dots
    kept: np.ndarray  # which of the values belong to the points
    window: Window | None = None  # the part in view
    outlined: bool = False  # whether the triangles' border is that of the domain
    note: str = ""  # what the picture added to the data, to be said beneath it

    @functools.cached_property
    def box(self) -> Window:
        """What is in view."""
        if self.window is not None:
            return self.window
        (left, bottom), (right, top) = self.points.min(0), self.points.max(0)
        return float(left), float(right), float(bottom), float(top)

    @functools.cached_property
    def shown(self) -> np.ndarray:
        """The points in view, which choose the colors."""
        left, right, bottom, top = self.box
        x, y = self.points.T
        inside = (left <= x) & (x <= right) & (bottom <= y) & (y <= top)
        if not inside.any():
            raise InputError(f"points in the window {self.box}", "none", "Choose another window")
        return self.kept[inside]

    @property
    def ratio(self) -> float:
        """Height over width, within reason."""
        left, right, bottom, top = self.box
        return min(max((top - bottom) / max(right - left, 1e-30), 0.4), 1.6)

    def draw(self, axis: "matplotlib.axes.Axes", values: Float[np.ndarray, " points"], **colors: Any) -> Any:
        """Color the triangles or the dots by the values at the points."""
        from matplotlib.tri import Triangulation

        x, y = self.points.T
        inner = values[self.kept]
        if self.triangles is None:
            drawn = axis.scatter(x, y, c=inner, s=4, linewidths=0, **colors)
        else:
            # Thousands of shaded triangles are a picture also in a file of vectors.
            mesh = Triangulation(x, y, self.triangles)
            drawn = axis.tripcolor(mesh, inner, shading="gouraud", rasterized=True, **colors)
            if self.outlined:
                self._outline(axis)
        left, right, bottom, top = self.box
        pad = 0.0 if self.window else 0.02 * max(right - left, top - bottom)
        axis.set_xlim(left - pad, right + pad)
        axis.set_ylim(bottom - pad, top + pad)
        axis.set_aspect("equal")
        return drawn

    def arrows(self, axis: "matplotlib.axes.Axes", vectors: Float[np.ndarray, "points 2"], longest: float) -> Any:
        """Arrows at some of the points, spread evenly over the view.

        Args:
            axis: of the map.
            vectors: at all points.
            longest: the length of a vector whose arrow reaches to the next one.
        """
        chosen, gap = self._spread
        x, y = self.points[chosen].T
        u, v = vectors[self.kept][chosen].T
        return axis.quiver(
            x, y, u, v, angles="xy", scale_units="xy", scale=max(longest, 1e-30) / (1.3 * gap), width=0.009,
            headwidth=3.6, headlength=4.2, headaxislength=3.8, color="white", edgecolor=style.INK, linewidth=0.35,
        )  # fmt: skip

    @functools.cached_property
    def _border(self) -> np.ndarray:
        """The edges that only one triangle has."""
        assert self.triangles is not None
        edges = np.sort(self.triangles[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2))
        unique, count = np.unique(edges, axis=0, return_counts=True)
        return unique[count == 1]

    @functools.cached_property
    def _spread(self) -> tuple[np.ndarray, float]:
        """Points for arrows: the nearest to the middle of each square of the view, none too near to another."""
        left, right, bottom, top = self.box
        gap = max(right - left, top - bottom) / _ARROWS
        squares = np.floor((self.points - [left, bottom]) / gap)
        middles = (squares + 0.5) * gap + [left, bottom]
        distance = np.hypot(*(self.points - middles).T)
        inside = np.isin(self.kept, self.shown)
        taken: dict[tuple[float, float], int] = {}
        for i in np.flatnonzero(inside)[np.argsort(distance[inside], kind="stable")].tolist():
            taken.setdefault((float(squares[i, 0]), float(squares[i, 1])), i)
        chosen: list[int] = []
        for i in taken.values():
            if all(np.hypot(*(self.points[i] - self.points[j])) > 0.6 * gap for j in chosen):
                chosen.append(i)
        return np.array(chosen), gap

    def _outline(self, axis: "matplotlib.axes.Axes") -> None:
        from matplotlib.collections import LineCollection

        axis.add_collection(LineCollection(list(self.points[self._border]), colors=style.INK, linewidths=0.6))


Surface = Raster | Scattered


def surface(
    field: Field,
    cells: Int[Tensor, "_cells _corners"] | None = None,
    grid: tuple[int, int] | None = None,
    window: Window | None = None,
) -> Surface:
    """Where to draw a field: on its grid, else on its triangles, else on Delaunay's, else as dots.

    Args:
        field: without a batch axis.
        cells: corners of the cells between its points; used where they are triangles.
        grid: points along each axis, row-major, if they are on one.
        window: the part in view; by default all. On a grid there is no other.
    """
    if grid is not None:
        if window is not None:
            raise InputError("a window only for scattered points", f"one for a grid of {grid}", "Leave it out")
        return Raster(grid)
    if window is not None and not (window[0] < window[1] and window[2] < window[3]):
        raise InputError("a window (left, right, bottom, top)", str(window), "Left is less than right, bottom than top")
    coords, weights = field.coords.double().numpy(), field.weights.numpy()
    every = np.arange(len(coords))
    if cells is not None and cells.shape[1] == 3 and len(cells) and 0 <= cells.min() <= cells.max() < len(coords):
        return Scattered(coords, cells.numpy(), every, window, outlined=True)
    kept = every[weights > 0]  # padding has no place of its own
    triangles = _delaunay(coords[kept])
    note = "points, no triangles given" if triangles is None else "triangles by Delaunay"
    return Scattered(coords[kept], triangles, kept, window, note=note)


def _delaunay(points: np.ndarray) -> np.ndarray | None:
    """Triangles between points; None where there are none."""
    from matplotlib.tri import Triangulation

    if len(np.unique(points, axis=0)) < 3:
        return None
    try:
        triangles = Triangulation(*points.T).triangles
    except (RuntimeError, ValueError):  # all on one line
        return None
    sides = np.stack([points[triangles[:, k]] - points[triangles[:, k - 1]] for k in range(3)], 1)
    lengths = np.hypot(sides[..., 0], sides[..., 1])
    # Each side is at home at both of its ends; by point, shortest first, the first quarter is what is usual there.
    ends = np.stack([triangles[:, [k, k - 1]] for k in range(3)], 1).reshape(-1)
    twice = np.repeat(lengths.reshape(-1), 2)
    order = np.lexsort((twice, ends))
    first = np.searchsorted(ends[order], np.arange(len(points) + 1))
    usual = twice[order][np.minimum(first[:-1] + np.diff(first) // 4, len(order) - 1)]
    fits = lengths.max(1) <= _BRIDGE * usual[triangles].max(1)
    return triangles[fits] if fits.any() else None
