"""The front door: what it promises is there, and the GPU path needs nothing that a bare GPU machine lacks."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import oformer

ABSENT = (
    "tyro", "docstring_parser", "typeguard", "beartype", "skfem", "meshio", "netgen", "gmsh", "imageio_ffmpeg",
    "pyvista", "zarr", "neuralop", "starlette", "uvicorn", "playwright",
)  # fmt: skip


def test_every_promised_name_is_there_and_documented():
    for name in oformer.__all__:
        thing = getattr(oformer, name)
        assert thing is not None
        if callable(thing):
            assert thing.__doc__, name
    assert set(oformer.__all__) <= set(dir(oformer))


def test_type_checkers_see_the_names_that_are_imported_when_first_used():
    block = next(node for node in ast.parse(Path(oformer.__file__).read_text()).body if isinstance(node, ast.If))
    seen = [(line.module, name.name, name.asname) for line in block.body for name in line.names]
    assert sorted(seen) == sorted((home, name, name) for home, names in oformer._HOMES.items() for name in names)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(oformer, "no_such_name")


def test_training_runs_where_the_optional_packages_are_absent(tmp_path):
    """One training step and one prediction in a process for which those packages do not exist."""
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
from pathlib import Path
from tests.tiny import tiny_recipe
from oformer import Predictor, train
from oformer.training.find_data import open_data
recipe = tiny_recipe(steps=1)
data = open_data(recipe, Path({str(tmp_path)!r}) / "data")
train(recipe, Path({str(tmp_path)!r}) / "run", (data.split("train"), data.split("test")), quiet=True, tensorboard=False)
print(tuple(Predictor(Path({str(tmp_path)!r}) / "run", "cpu")(data[0].input).values.shape))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 32, 1)"
