"""Poisson's equation on triangles: -Δu = f inside, u = 0 on held edges, by quadratic finite elements, in float64.

The potential is continuous and quadratic on each triangle; where the border follows a circle its edges are bent to
quadratic ones through a point on the circle (isoparametric elements), so that a round domain costs no order. The
gradient is the L2 projection of ∇u on continuous, piecewise linear functions. Both are reported at the mesh points.

Where u is zero: an edge is held if both of its ends and its middle satisfy a predicate, and then so are its ends and
its middle; edges inside the domain may be held too. This is what the legacy FEniCS of the published data does with
`DirichletBC(space, value, predicate)`. It differs from holding points: a point that satisfies the predicate while all
of its neighbors do not stays free, and so does the middle of an edge that cuts a corner between two held points.

A source given at the mesh points is taken as linear in between, and then everything is linear in these numbers: a
solver works out the answer to a unit source at each point, once, and sums these up for each sample.

Differs: FEniCS keeps the edges of round borders straight, and its disc is a polygon: u is wrong by 2e-4 where this is
wrong by 8e-7 (constant source, largest u 1/16, at the mesh size of the published data).
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oformer.checks import check_finite
from oformer.errors import InputError, SolverDiverged, optional_module
from oformer.meshes.triangles import Mesh, edge_middles

Predicate = Callable[[Float[Tensor, "points 2"]], Bool[Tensor, "points"]]

SCIKIT_FEM = "finite elements (scikit-fem)", "pip install oformer[mesh]"
QUADRATURE = 5  # degree to which integrals are exact on straight triangles: that of u f with f cubic


class Poisson:
    """The solver for one mesh and one set of held edges; what does not depend on the source is kept.

    Good values: one solver for all sources on a mesh. On 250 points the first answer takes 70 ms and each further one
    0.1 ms, on one core.
    """

    def __init__(self, mesh: Mesh, held: Predicate | None = None):
        """Assemble and factorize.

        Args:
            mesh: any.
            held: where u is zero; by default on the whole border.

        Raises:
            InputError: no edge is held, or scikit-fem is not installed.
        """
        skfem = optional_module("skfem", *SCIKIT_FEM)
        self.mesh = mesh
        n = len(mesh.points)
        flat = skfem.MeshTri(mesh.points.mT.contiguous().numpy(), mesh.triangles.mT.contiguous().numpy())
        # It numbers edges as we do: by their smaller end, then the larger one.
        assert flat.facets is not None
        assert np.array_equal(flat.facets.T, mesh.edges.numpy())
        self.nodes: Float[Tensor, "nodes 2"] = torch.cat([mesh.points, edge_middles(mesh)])
        curved = skfem.MeshTri2(self.nodes.mT.contiguous().numpy(), flat.t)
        self._basis = skfem.Basis(curved, skfem.ElementTriP2(), intorder=QUADRATURE)
        linear = self._basis.with_element(skfem.ElementTriP1())

        product = skfem.BilinearForm(lambda u, v, w: u * v)
        self.stiffness = skfem.BilinearForm(lambda u, v, w: u.grad[0] * v.grad[0] + u.grad[1] * v.grad[1]).assemble(
            self._basis
        )
        self._linear_load = product.assemble(linear, self._basis)  # of sources that are linear between mesh points
        self._mass = product.assemble(linear)
        self._slopes = [
            skfem.BilinearForm(lambda u, v, w, axis=axis: u.grad[axis] * v).assemble(self._basis, linear)
            for axis in (0, 1)
        ]

        edges = mesh.edges
        if held is None:
            chosen = mesh.outer
        else:
            satisfied = held(self.nodes)
            chosen = satisfied[edges].all(1) & satisfied[n:]
        if not bool(chosen.any()):
            raise InputError(
                "at least one edge on which u is zero", "none", "Without it u is unique to a constant only"
            )
        self.held: Bool[Tensor, "nodes"] = torch.zeros(len(self.nodes), dtype=torch.bool)
        self.held[edges[chosen].flatten()] = True
        self.held[n:] = chosen
        self._free = np.flatnonzero(~self.held.numpy())

    def potential(self, load: Float[Tensor, "nodes *batch"]) -> Float[Tensor, "nodes *batch"]:
        """u at the mesh points and the middles of the edges, from integrals against the quadratic basis functions."""
        check_finite("load", load)
        u = np.zeros(tuple(load.shape))
        right = load.numpy()[self._free]
        if len(self._free):
            u[self._free] = self._factorized.solve(np.ascontiguousarray(right))
        if not np.isfinite(u).all():
            raise SolverDiverged("poisson_fem", 0, 0.0, float(np.abs(right).max()))
        return torch.from_numpy(u)

    def gradient(self, potential: Float[Tensor, "nodes *batch"]) -> Float[Tensor, "2 points *batch"]:
        """The L2 projection of ∇u on continuous, piecewise linear functions, at the mesh points."""
        slopes = [self._factorized_mass.solve(np.asarray(slope @ potential.numpy())) for slope in self._slopes]
        return torch.from_numpy(np.stack(slopes))

    def solve(
        self, source: Float[Tensor, "batch points"]
    ) -> tuple[Float[Tensor, "batch points"], Float[Tensor, "batch points 2"]]:
        """u and ∇u at the mesh points, with u = 0 on the held edges.

        A source gives the same bits whatever the batch it is solved in.

        Args:
            source: f at the mesh points, linear in between.
        """
        points = len(self.mesh.points)
        if source.shape[1] != points:
            raise InputError(f"a source at each of {points} points", str(source.shape[1]))
        check_finite("source", source)
        if len(source) == 0:
            raise InputError("at least one source", "none")
        answers = torch.stack([self._answer(row) for row in source.to(torch.float64)])
        u, x, y = answers.unflatten(1, (3, points)).unbind(1)
        return u, torch.stack([x, y], -1)

    def _answer(self, source: Float[Tensor, "points"]) -> Float[Tensor, "answers"]:
        """Point by point, and most sources are zero at most points.

        The order of sums in products with matrices depends on the batch, and even on where in memory a row begins.
        """
        answer = torch.zeros(self._response.shape[1], dtype=torch.float64)
        for place in source.nonzero()[:, 0].tolist():
            answer += self._response[place] * source[place]
        return answer

    @cached_property
    def _response(self) -> Float[Tensor, "points answers"]:
        """u, then u_x, then u_y at all points (columns) for a unit source at each point (rows)."""
        potential = self.potential(torch.from_numpy(self._linear_load.toarray()))
        points = len(self.mesh.points)
        return torch.cat([potential[:points], *self.gradient(potential)]).mT.contiguous()

    @cached_property
    def _factorized(self):
        return _splu(self.stiffness[self._free][:, self._free])

    @cached_property
    def _factorized_mass(self):
        return _splu(self._mass)


def _splu(matrix):
    from scipy.sparse.linalg import splu

    return splu(matrix.tocsc())
