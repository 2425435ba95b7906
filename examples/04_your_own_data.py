"""Your own samples: other points in each, a number that the model sees, and answers at points of your choice.

    python examples/04_your_own_data.py

Here they are sensors scattered over a pond in which a drop of dye spreads: from the readings at first and a time, the
readings at that time at other places.
"""

from pathlib import Path
from typing import Any

import numpy as np

from oformer import OperatorRegressor

FOLDER = Path("outputs/04-pond")
MIXING = 0.01  # the diffusivity of the dye


def dye(points: np.ndarray, drop: np.ndarray, time: float) -> np.ndarray:
    """A Gaussian drop that spreads in the plane: an exact solution of the heat equation."""
    spread = 0.02 + 4 * MIXING * time
    return 0.02 / spread * np.exp(-((points - drop) ** 2).sum(-1) / spread)


def sample(number: int) -> dict:
    random = np.random.default_rng(number)
    drop, time = random.uniform(0.3, 0.7, 2), random.uniform(0.2, 1.0)
    sensors, places = random.random((random.integers(80, 120), 2)), random.random((60, 2))
    return {
        "coords": sensors,
        "inputs": dye(sensors, drop, 0.0),
        "query_coords": places,
        "targets": dye(places, drop, time),
        "parameters": {"time": time},
    }


def main(folder: Path = FOLDER, count: int = 200, minutes: float | None = 3, **sizes: Any) -> float:
    model = OperatorRegressor(minutes=minutes, **sizes).fit([sample(i) for i in range(count)])
    model.save(folder)

    # Somebody else loads it, and asks on a grid of their own about sensors that nobody has seen.
    model = OperatorRegressor.load(folder)
    new = sample(10_000)
    axis = np.linspace(0, 1, 64)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    question = {key: new[key] for key in ("coords", "inputs", "parameters")}
    answer = model.predict(question, grid)
    print(f"{len(answer)} answers from {len(new['coords'])} sensors, largest {np.max(answer):.3f}")
    print(f"score on 20 new samples: {model.score([sample(20_000 + i) for i in range(20)]):.3f}")
    model.plot(new).savefig(folder.with_suffix(".png"))
    return float(model.errors_.mean())


if __name__ == "__main__":
    main()
