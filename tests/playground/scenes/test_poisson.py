"""The scene of electro- and magnetostatics: sources, turned shapes, finer meshes."""

import numpy as np
import pytest
import torch

from oformer.errors import InputError


@pytest.mark.parametrize("name", ["electrostatics", "magnetostatics"])
def test_sources_are_placed_where_they_are_asked_for(name, service):
    scene = service.models[name].scene
    state = {**scene.example(0), "sources": [[0.1, 0.1], [0.9, 0.2]], "turn": 0}
    known = scene.known(state).input
    charged = known.coords[known.values[0, :, 2] == 1]
    distances = torch.cdist(charged, torch.tensor(state["sources"], dtype=torch.float64)).amin(1)
    assert len(charged) >= 2
    assert float(distances.max()) < 0.0708 + 0.07  # the disc, and half an edge to the node that is its center
    assert float(scene.known({**state, "sources": []}).input.values[0, :, 2].abs().max()) == 0
    assert float(scene.solve({**state, "sources": []}, 1).abs().max()) < 1e-12


def test_a_turned_shape_has_the_turned_solution(service):
    """The potential moves with the domain, the field turns with it."""
    scene = service.models["electrostatics"].scene
    state = scene.example(0)
    straight = scene.solve(state, 1)
    c, s = np.cos(np.pi / 6), np.sin(np.pi / 6)
    turn = torch.tensor([[c, -s], [s, c]])
    centers = (torch.tensor(state["sources"], dtype=torch.float64) - 0.5) @ turn.mT + 0.5
    turned = scene.solve({**state, "turn": 30, "sources": centers.tolist()}, 1)
    torch.testing.assert_close(turned[..., 0], straight[..., 0], atol=1e-8, rtol=0)
    torch.testing.assert_close(turned[..., 1:], straight[..., 1:] @ turn.mT, atol=1e-7, rtol=0)
    assert "turned" in scene.unseen({**scene.example(1), "shape": "square", "numbers": [15.0, 0, 0], "turn": 30})
    assert scene.unseen(state) == "training had no U"


def test_a_finer_mesh_has_the_old_nodes_and_middles_that_touch_the_border(service):
    scene = service.models["electrostatics"].scene
    state = {"shape": "disc", "numbers": [15.0, 0.0, 0.0], "turn": 0, "sources": [[0.4, 0.6]]}
    coarse, fine = (scene.places(state, level).query for level in (1, 2))
    torch.testing.assert_close(fine.coords[: coarse.points], coarse.coords)
    assert fine.points > 3 * coarse.points
    rim = (fine.coords - 0.5).norm(dim=1) > 0.5 - 1e-9
    assert bool((fine.values[0, rim, 0] == 1).all())
    values = scene.solve(state, 2)
    assert float(values[0, rim, 0].abs().max()) < 1e-12  # held at zero, between nodes too
    torch.testing.assert_close(values[:, : coarse.points], scene.solve(state, 1))


def test_shapes_that_cannot_be_meshed_are_refused(service):
    scene = service.models["electrostatics"].scene
    for shape, numbers in (
        ("square", [0.0, 0, 0]),
        ("disc", [1.0, 0, 0]),
        ("annulus", [0.3, 0.0, 0.0]),
        ("l", [0.0, 0.5, 0]),
    ):
        with pytest.raises(InputError):
            scene.known({"shape": shape, "numbers": numbers, "turn": 0, "sources": []})
