"""What the scenes on triangle meshes share: refinement, and the mesh in JSON."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.meshes.triangles import Mesh, edge_middles
from oformer.playground.requests import encoded


def refined(mesh: Mesh, kinds: Float[Tensor, "points 1"]) -> tuple[Mesh, Float[Tensor, "_ 1"]]:
    """Each triangle cut in four at the middles of its edges.

    Args:
        mesh: whose triangles are cut; round borders stay round.
        kinds: of the points, not zero on the border. The middle of an edge on the border is what both its ends are,
            and otherwise it is inside.
    """
    n, edges = len(mesh.points), mesh.edges
    number = {(int(a), int(b)): n + k for k, (a, b) in enumerate(edges.tolist())}
    cut = []
    for a, b, c in mesh.triangles.tolist():
        ab, bc, ca = (number[min(i, j), max(i, j)] for i, j in ((a, b), (b, c), (c, a)))
        cut += [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    ends = kinds[edges, 0]
    middle = torch.where(mesh.outer & (ends[:, 0] == ends[:, 1]), ends[:, 0], torch.zeros_like(ends[:, 0]))
    fine = Mesh(
        torch.cat([mesh.points, edge_middles(mesh)]),
        torch.tensor(cut),
        torch.cat([mesh.marks, torch.where(mesh.outer, mesh.marks[edges].amin(1), 0)]),
        mesh.circles,
    )
    return fine, torch.cat([kinds, middle[:, None]])


def mesh_layout(mesh: Mesh, window: tuple[float, float, float, float] | None) -> dict[str, Any]:
    """A mesh as the page draws it; `window` is the part that it shows, all if None."""
    return {
        "kind": "mesh",
        "coords": encoded(mesh.points.numpy()),
        "triangles": encoded(mesh.triangles.numpy()),
        "window": window,
    }
