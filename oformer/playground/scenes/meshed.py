"""Scenes on triangle meshes: answers at the nodes of the solver's mesh, and at those of its refinements."""

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field
from oformer.meshes.triangles import Mesh, edge_middles
from oformer.playground.requests import encoded
from oformer.playground.scenes.base import Places, Scene, State


class MeshScene(Scene):
    """Base class: subclasses give the mesh of a state, the kinds of its nodes, and the solution at its nodes."""

    resolution = 1  # the nodes alone
    window: tuple[float, float, float, float] | None = None  # the part of the plane that the page shows; None: all

    def mesh(self, state: State) -> Mesh:
        """The mesh of the solver."""
        raise NotImplementedError

    def kinds(self, state: State) -> Float[Tensor, "points 1"]:
        """Query feature of each node; not zero on the border."""
        raise NotImplementedError

    def at_nodes(self, state: State) -> Float[Tensor, "times points channels"]:
        """The solution at the nodes."""
        raise NotImplementedError

    def queries(self, resolution: int) -> int:
        """Number of query points, approximately: each refinement cuts a triangle in four."""
        return self.sensors * 4 ** (resolution - 1)

    def places(self, state: State, resolution: int) -> Places:
        """The nodes, and for finer resolutions the middles of edges."""
        mesh, kinds = self.mesh(state), self.kinds(state)
        for _ in range(resolution - 1):
            kinds = torch.cat([kinds, _kinds_between(mesh, kinds)])
            mesh = refined(mesh)
        layout = {
            "kind": "mesh",
            "coords": encoded(mesh.points.numpy()),
            "triangles": encoded(mesh.triangles.numpy()),
            "window": self.window,
        }
        return Places(Field.of(mesh.points, kinds[None]), layout)

    def solve(self, state: State, resolution: int) -> Float[Tensor, "times queries channels"]:
        """The solution, interpolated linearly between the nodes."""
        mesh, values = self.mesh(state), self.at_nodes(state)
        for _ in range(resolution - 1):
            values = torch.cat([values, values[:, mesh.edges].mean(2)], 1)
            mesh = refined(mesh)
        return values


def refined(mesh: Mesh) -> Mesh:
    """Each triangle cut in four at the middles of its edges; round borders stay round."""
    number = {(a, b): len(mesh.points) + k for k, (a, b) in enumerate(mesh.edges.tolist())}
    cut = []
    for a, b, c in mesh.triangles.tolist():
        ab, bc, ca = (number[min(i, j), max(i, j)] for i, j in ((a, b), (b, c), (c, a)))
        cut += [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    marks = torch.cat([mesh.marks, torch.where(mesh.outer, mesh.marks[mesh.edges].amin(1), 0)])
    return Mesh(torch.cat([mesh.points, edge_middles(mesh)]), torch.tensor(cut), marks, mesh.circles)


def _kinds_between(mesh: Mesh, kinds: Float[Tensor, "points 1"]) -> Float[Tensor, "edges 1"]:
    """Kind of the middle of each edge: that of its ends on the border where they agree, and otherwise inside (0)."""
    first, second = kinds[mesh.edges].unbind(1)
    return torch.where(mesh.outer[:, None] & (first == second), first, 0.0)
