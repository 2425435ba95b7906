"""The scene of Navier-Stokes: stirring, and drafts of the input."""

import numpy as np
import torch

from oformer.errors import SolverDiverged
from oformer.problems import NavierStokes


def test_stirring_adds_vorticity_of_no_mean_and_is_called_new(service):
    scene = service.models["navier-stokes"].scene
    state = scene.example(2)
    stirred = {**state, "vortices": [[0.25, 0.5, 1.0], [0.98, 0.02, -0.5]]}
    plain, changed = (scene._drawn(s, scene.problem)["initial"][0] for s in (state, stirred))
    difference = changed - plain
    assert abs(float(changed.mean())) < 1e-12
    n = len(difference)
    peak = np.unravel_index(int(difference.argmax()), difference.shape)
    assert peak == (n // 4, n // 2)
    assert scene.unseen(stirred)
    assert not scene.unseen(state)
    assert not torch.equal(scene.known(stirred).input.values, scene.known(state).input.values)


def test_a_draft_is_nearly_the_input(service):
    """At half the points, with the same steps: the tiny problem's are long already."""
    scene = service.models["navier-stokes"].scene
    state = scene.example(1)
    exact, draft = scene.known(state), scene.draft(state)
    assert draft.input.points < exact.input.points
    torch.testing.assert_close(draft.input.coords[draft.usual], exact.input.coords[exact.usual])
    near, far = draft.input.values[:, draft.usual], exact.input.values[:, exact.usual]
    error = float((near - far).norm() / far.norm())
    assert 0 < error < 0.05


def test_a_draft_that_diverges_is_the_input_itself(service, monkeypatch):
    scene = service.models["navier-stokes"].scene
    state, solve = scene.example(1), NavierStokes.solve

    def fails(self, drawn):
        if self.points < scene.problem.points:
            raise SolverDiverged("too coarse a one", 1, 0.5, 1e9)
        return solve(self, drawn)

    monkeypatch.setattr(NavierStokes, "solve", fails)
    torch.testing.assert_close(scene.draft(state).input.values, scene.known(state).input.values)
