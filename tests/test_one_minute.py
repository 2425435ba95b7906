"""The table "I want to" of the README: an edit of the package is what trains and what predicts, in every way to run it.

A test edits a copy of the package as a person would, and asks `tests/one_minute.py` for a loss, a gradient and a
prediction: as it is, compiled, and with every fused module switched on.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.forked import printed

pytest.importorskip("triton", exc_type=ImportError)

ROOT = Path(__file__).resolve().parent.parent
Edit = tuple[str, str, str]  # a file, what stands there, what is written instead

MEAN = '''
def mean(q, k, v, query_weights, weights):
    """The weighted mean of the values, everywhere."""
    return over_points((weights[:, None, :, None].to(v.dtype) * v).sum(2, keepdim=True)).expand_as(q)


@dataclass(frozen=True)
class Kind:'''

ANOTHER_ATTENTION: list[Edit] = [
    ("nn/attention.py", "\n@dataclass(frozen=True)\nclass Kind:", MEAN),
    (
        "nn/attention.py",
        '"softmax": Kind(',
        '"mean": Kind(mean, normalized=("v",), linear=True),\n    "softmax": Kind(',
    ),
    ("nn/attention.py", '["galerkin", "fourier", "softmax"]', '["galerkin", "fourier", "softmax", "mean"]'),
]

# What somebody wants: the edits.
WISHES: dict[str, list[Edit]] = {
    "use another attention": [],
    "write another attention": ANOTHER_ATTENTION,
    "change an attention": [("nn/attention.py", "return q @ over_points(", "return 3 * q @ over_points(")],
    "change the time stepping": [("models/oformer.py", "z = z + network(norm(z),", "z = z - network(norm(z),")],
    "change the loss": [("training/losses.py", "squared(prediction - target,", "4 * squared(prediction - target,")],
    "change the normalization": [("nn/attention.py", "return F.layer_norm(x,", "return 2 * F.layer_norm(x,")],
    "change the rotary encoding": [("nn/rotary.py", "second * cos + first * sin", "second * cos - first * sin")],
    "change a block": [("nn/blocks.py", "x = x + self.attention(x,", "x = self.attention(x,")],
    "change the feed-forward network": [("nn/feedforward.py", "F.gelu(a) * b", "F.gelu(a) + b")],
    "change the decoder": [("models/oformer.py", "= self.decode_norm(z),", "= 2 * self.decode_norm(z),")],
}  # fmt: skip
ATTENTION = {"use another attention": "softmax", "write another attention": "mean"}
# The rows of the README's table, and a change of an attention; the others take their turn with the slow tests.
FIRST = list(WISHES)[:5]


def package(folder: Path, edits: list[Edit]) -> Path:
    """A copy of the package with some edits; files that are not edited are links."""
    shutil.copytree(ROOT / "oformer", folder / "oformer", copy_function=os.symlink)
    for name, there, instead in edits:
        path = folder / "oformer" / name
        text = path.read_text()
        assert text.count(there) == 1, f"{name} holds `{there}` {text.count(there)} times"
        path.unlink()
        path.write_text(text.replace(there, instead))
    return folder


def said(folder: Path, script: str) -> str:
    """What a process of its own prints, with the package of a folder before all others."""
    first = (
        f"import os, sys; sys.dont_write_bytecode = True; sys.path.insert(0, {str(folder)!r}); os.chdir(sys.path[0])"
    )
    return "\n".join(printed(f"{first}\n{script}"))


def answers(folder: Path, attention: str) -> dict:
    return json.loads(said(folder, f"from tests.one_minute import main\nmain({attention!r})"))


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> dict:
    found = answers(package(tmp_path_factory.mktemp("unchanged"), []), "galerkin")
    assert found["used"] == [
        "FusedAttention", "FusedCrossAttentionBlock", "FusedOFormer", "FusedRotary", "FusedSelfAttentionBlock",
    ]  # fmt: skip
    return found["numbers"]


def differ(one: float, other: float) -> float:
    return abs(one - other) / abs(other)


@pytest.mark.parametrize("wish", [w if w in FIRST else pytest.param(w, marks=pytest.mark.slow) for w in WISHES])
def test_an_edit_is_what_trains_and_what_predicts(wish, unchanged, tmp_path):
    found = answers(package(tmp_path, WISHES[wish]), ATTENTION.get(wish, "galerkin"))["numbers"]
    assert found.keys() == unchanged.keys() == {"plain", "compiled", "fused"}
    for way, (loss, gradient, prediction) in found.items():
        before = unchanged[way]
        assert differ(loss, before[0]) > 1e-3, f"training {way} does not notice"
        assert differ(gradient, before[1]) > 1e-3, f"gradients {way} do not notice"
        if wish != "change the loss":
            assert differ(prediction, before[2]) > 1e-3, f"prediction {way} does not notice"
        for number, plain in zip((loss, gradient, prediction), found["plain"], strict=True):
            assert differ(number, plain) < (1e-2 if way == "fused" else 1e-4), f"{way} computes something else"


NEW_PARTS = """
import dataclasses, tempfile
from pathlib import Path
from oformer import Predictor
from oformer.checkpoint import checkpoints
from oformer.models import MODELS
from oformer.problems import PROBLEMS
from oformer.training.find_data import open_data, train_and_test
from oformer.training.loop import train
from tests.tiny import tiny_fno

recipe = tiny_fno(steps=2, compile=False)
problem = PROBLEMS["squared"](points=64, solver_points=64, modes=6, steps=40)
own = {f.name: getattr(recipe.model, f.name) for f in dataclasses.fields(recipe.model)}
recipe = dataclasses.replace(recipe, problem=problem, model=MODELS["OwnConfig"](**own))
data = train_and_test(open_data(recipe, Path("datasets")), recipe)
assert float(data[0][0].target.min()) >= 0
train(recipe, "run", data, quiet=True)
predict = Predictor("run")
assert type(predict.operator.model).__name__ == "Own"
print(float(predict(data[1][0].input).values.abs().max()))
"""


def test_a_pde_and_a_model_are_a_file_and_a_line_each(tmp_path):
    """Copied as the README says, under another name: generated, trained, saved, loaded and asked."""
    folder = package(tmp_path, [
        ("problems/__init__.py", "import Darcy\n", "import Darcy\nfrom oformer.problems.squared import Squared\n"),
        ("problems/__init__.py", "(Burgers, Darcy,", "(Burgers, Squared, Darcy,"),
        ("models/__init__.py", "import GridModel\n", "import GridModel\nfrom oformer.models.own import OwnConfig\n"),
        ("models/__init__.py", "OFormerConfig, FNOConfig, MWTConfig", "OFormerConfig, OwnConfig, FNOConfig, MWTConfig"),
    ])  # fmt: skip
    problem = (ROOT / "oformer" / "problems" / "burgers.py").read_text()
    problem = problem.replace("class Burgers(", "class Squared(").replace('= "burgers"', '= "squared"')
    assert "target = resample(final[:, 0], self.points)\n" in problem
    problem = problem.replace("resample(final[:, 0], self.points)\n", "resample(final[:, 0], self.points) ** 2\n")
    (folder / "oformer" / "problems" / "squared.py").write_text(problem)
    model = (ROOT / "oformer" / "models" / "fno.py").read_text()
    (folder / "oformer" / "models" / "own.py").write_text(re.sub(r"\bFNO(Config)?\b", r"Own\1", model))
    assert float(said(folder, NEW_PARTS)) < 1e3
