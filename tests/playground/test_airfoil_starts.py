"""First frames of some flows, in a file."""

import torch

from oformer.playground.scenes.airfoil import read_starts
from tools.airfoil_starts import save_starts


def test_first_frames_are_written_and_read_in_half_precision(tmp_path, service):
    problem, streams = service.models["airfoil"].scene.problem, ((0.3, -10.0), (0.6, 20.0))
    save_starts(tmp_path / "starts", problem, streams)
    mach, angle = torch.tensor(streams, dtype=torch.float64).unbind(1)
    samples = problem.solve({"mach": mach, "angle": angle})
    for (key, values), sample in zip(read_starts(tmp_path / "starts").items(), samples, strict=True):
        solved = sample.input.values[..., :4]
        assert key in streams
        assert values.shape == solved.shape
        assert float(((values - solved).norm(dim=(0, 1)) / solved.std((0, 1))).max()) < 1e-3 * solved.shape[1] ** 0.5
