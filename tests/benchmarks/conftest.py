"""The benchmarks are scripts and no part of the package: they find each other because they lie in one folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
