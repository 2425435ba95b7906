"""The command line as another process, and the smallest training that it can be asked for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Absolute, because the commands run in other folders than this one.
PATHS = os.pathsep.join(str(Path(p).resolve()) for p in (ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": PATHS}
# The smallest thing that `train` can do, spelled as a person would.
SMALL = [
    "--problem.points", "64", "--problem.solver-points", "64", "--problem.modes", "6", "--problem.steps", "40",
    "--data.train", "8", "--data.test", "4", "--data.view.points", "32", "--model.encoder.width", "16",
    "--model.encoder.depth", "1", "--model.query.width", "16", "--model.query.fourier-features", "8",
    "--training.steps", "6", "--training.batch", "4", "--training.evaluate-every", "3",
    "--training.checkpoint-every", "3", "--training.log-every", "1",
]  # fmt: skip


def cli(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "oformer", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT,
    )  # fmt: skip
