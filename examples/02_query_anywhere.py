"""One set of weights, any points: a finer grid, a handful of places, an input on another grid than in training.

    python examples/01_burgers_in_five_minutes.py    # makes the run that is used here
    python examples/02_query_anywhere.py

The input is encoded once; each query is answered on its own.
"""

from pathlib import Path

import torch

from oformer import Burgers, Field, Predictor
from oformer.meshes.grids import periodic_grid
from oformer.plots import lines, save_figure
from oformer.solvers.fourier import resample

RUN = Path("outputs/01-burgers")


def main(run: Path = RUN, seed: int = 7) -> dict[str, float]:
    predict = Predictor(run)

    # A state that no dataset holds, solved on 1024 points to compare with.
    (sample,) = Burgers(points=1024, solver_points=512).samples([0], seed)
    truth = sample.target[0, :, 0]

    def error(answer: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((answer - wanted).norm() / wanted.norm())

    found = {}
    for points in (64, 256, 1024):  # the input on grids of its own; it was trained on 256 points
        step = 1024 // points
        known = Field.of(sample.input.coords[::step], sample.input.values[:, ::step])
        answer = predict(known, sample.query.coords).values[0, :, 0]
        found[f"from {points} points, at 1024"] = error(answer, truth.float())

    # At 100 places between all grids: the true solution there is its trigonometric interpolant.
    shifted = periodic_grid((100,), (1.0,)) + 0.0037
    fine = resample(truth[None], 10_000)[0]
    at = (shifted[:, 0] * 10_000).round().long()
    known = Field.of(sample.input.coords[::4], sample.input.values[:, ::4])
    answer = predict(known, shifted)
    found["from 256 points, between the grid's"] = error(answer.values[0, :, 0], fine[at].float())

    for words, value in found.items():
        print(f"{words}: {value:.2%}")
    save_figure(run.parent / "02-query.png", lines.prediction(known, answer, input="u at time 0", target="u at time 1"))
    return found


if __name__ == "__main__":
    main()
