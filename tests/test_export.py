"""Exported files: the operator's own answers at any size, in physical units, from a file that knows what it is."""

import dataclasses
import importlib
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import oformer
from oformer.checkpoint import Checkpoint, save_checkpoint
from oformer.config import from_json
from oformer.errors import InputError
from oformer.export import EXAMPLE, SIZES, SUFFIXES, Verified, export, read_metadata, verify
from oformer.fields import Card, Field, Spec
from oformer.models import Normalization, Operator
from oformer.predict import Predictor
from tests.models.test_contract import CASES, SCATTERED

SCALES = {
    "burgers": Normalization(input="none", target="none", coords="unit-box"),
    "darcy": Normalization(input="pointwise", target="pointwise", coords="unit-box", boundary="zero"),
    "navier-stokes": Normalization(input="scalar", target="scalar", coords="unit-box"),
    "electro": Normalization(input="max-abs", target="max-abs", coords="as-is"),
    "airfoil": Normalization(input="channel", target="channel", coords="from-zero"),
}
# Tracing takes seconds: the fast tests share two files, and the slow ones make all the others.
FAST = [("electro", ".pt2"), ("navier-stokes", ".onnx")]
LOCAL = ("local", "superposition")  # whose neighbors have a number that a tracer fixes
WITHOUT_LOCAL = [case for case in SCATTERED if not any(word in case for word in LOCAL)]
SLOW = [(case, end) for case in WITHOUT_LOCAL if case != "magneto" for end in SUFFIXES if (case, end) not in FAST]


def checkpoint_of(case: str, seed: int = 0) -> Checkpoint:
    """A case of the model tests with weights at which each layer is felt, and statistics that are not the identity."""
    spec, config = CASES[case]
    config = dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, depth=1))
    torch.manual_seed(seed)  # the random waves
    scales = SCALES[case.split(",")[0]]
    if config.rotary == "integer" or config.query.local:  # the period would not survive another scale
        scales = dataclasses.replace(scales, coords="as-is")
    operator = Operator(config.build(spec), scales).eval()
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for weights in operator.model.parameters():
            if weights.ndim == 2:
                weights.copy_(0.7 * normal(weights) / math.sqrt(weights.shape[1]))
        for scale in (operator.input_scale, operator.target_scale):
            scale.shift.copy_(normal(scale.shift))
            scale.scale.copy_(2 + normal(scale.scale).abs())
        operator.origin.fill_(-0.5)
        operator.extent.fill_(2.0)
        operator.box.copy_(torch.tensor([[-0.5], [1.5]]).expand(2, spec.dim))
    card = Card("Test", inputs=tuple(f"in {i}" for i in range(spec.in_channels)), targets=("pressure",))
    return Checkpoint(operator, case, step=7, data=card)


class Made(NamedTuple):
    path: Path
    checkpoint: Checkpoint
    verified: Verified


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Exports once for each (case, suffix), from an operator that was in the middle of something else."""
    files: dict[tuple[str, str], Made] = {}

    def make(case: str, suffix: str) -> Made:
        if suffix == ".onnx":
            for name in ("onnx", "onnxscript", "onnxruntime"):
                pytest.importorskip(name)
        if (case, suffix) not in files:
            checkpoint, path = checkpoint_of(case), tmp_path_factory.mktemp("export") / f"model{suffix}"
            checkpoint.operator.train()
            files[case, suffix] = Made(path, checkpoint, export(checkpoint, path))
        return files[case, suffix]

    return make


@pytest.mark.parametrize(("case", "suffix"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_answers_at_other_sizes_than_the_example(made, case, suffix):
    """`export` compares at all sizes before it writes; a file for one size or one batch would be refused."""
    assert EXAMPLE not in SIZES
    assert {1, 2, 3} == {batch for batch, _, _ in SIZES}
    file = made(case, suffix)
    assert file.verified.error <= (1e-4 if suffix == ".onnx" else 1e-6)
    assert verify(file.path, checkpoint_of(case)).error == file.verified.error


def test_the_runtime_alone_gives_what_the_predictor_gives(made):
    """As a user of the .onnx would do it, with numpy arrays."""
    path = made("navier-stokes", ".onnx").path
    session = importlib.import_module("onnxruntime").InferenceSession(str(path))
    assert [i.name for i in session.get_inputs()] == ["coords", "values", "weights", "query_coords"]
    rng = np.random.default_rng(0)
    coords, values = rng.random((1, 30, 2), np.float32), rng.random((1, 3, 30, 1), np.float32)
    queries, weights = rng.random((1, 21, 2), np.float32), np.full((1, 30), 1 / 30, np.float32)
    feed = {"coords": coords, "values": values, "weights": weights, "query_coords": queries}
    (answer,) = session.run(None, feed)
    field = Field.of(torch.from_numpy(coords[0]), torch.from_numpy(values[0]))
    expected = Predictor(checkpoint_of("navier-stokes"), "cpu")(field, queries[0]).values
    np.testing.assert_allclose(answer[0], expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_longer_march_from_a_checkpoint_folder(tmp_path):
    checkpoint = checkpoint_of("navier-stokes")
    save_checkpoint(tmp_path / "checkpoint", checkpoint)
    export(tmp_path / "checkpoint", tmp_path / "model.pt2", times=6)
    assert read_metadata(tmp_path / "model.pt2")["outputs"]["answer"] == ["batch", 6, "queries", 1]
    assert verify(tmp_path / "model.pt2", checkpoint).error <= 1e-6


def test_a_shared_grid_may_be_expanded_copied_or_given_one_by_one(made):
    """This package computes once on a grid that a batch shares; a file must not have learned that from an example."""
    module = torch.export.load(made("electro", ".pt2").path).module()
    operator = checkpoint_of("electro").operator
    values, weights, flags = torch.randn(3, 1, 9, 5), torch.full((3, 9), 1 / 9), torch.randint(2, (3, 1, 5, 1)).float()
    grid, queries = torch.rand(1, 9, 2), torch.rand(1, 5, 2)

    def ask(coords, query_coords, batch=slice(None)):
        return module(
            coords=coords, values=values[batch], weights=weights[batch],
            query_coords=query_coords, query_values=flags[batch], query_weights=torch.full((3, 5), 0.2)[batch],
        )  # fmt: skip

    with torch.no_grad():
        shared = Field(grid.expand(3, 9, 2), values, weights), Field.of(queries.expand(3, 5, 2), flags)
        eager = operator(*shared)
        answers = [
            ask(shared[0].coords, shared[1].coords),
            ask(grid.repeat(3, 1, 1), queries.repeat(3, 1, 1)),
            torch.cat([ask(grid, queries, slice(i, i + 1)) for i in range(3)]),
        ]
    for answer in answers:
        torch.testing.assert_close(answer, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("case", "suffix"), [("electro", ".pt2"), ("navier-stokes", ".onnx")])
def test_a_file_says_what_it_is(made, case, suffix):
    said, spec = read_metadata(made(case, suffix).path), CASES[case].spec
    assert said["format"] == "oformer-export"
    assert (said["name"], said["step"], said["times"], said["units"]) == (case, 7, spec.out_times, None)
    assert said["channels"]["values"] == [f"in {i}" for i in range(spec.in_channels)]
    assert said["channels"]["answer"] == ["pressure"]
    assert from_json(Spec, said["spec"], "spec") == spec
    assert said["outputs"] == {"answer": ["batch", spec.out_times, "queries", spec.out_channels]}
    assert said["package"] == oformer.__version__
    # Electrostatics has features at its queries, and its queries talk to each other; Navier-Stokes has neither.
    assert ("query_values" in said["inputs"]) == ("query_weights" in said["inputs"]) == (case == "electro")


def test_the_operator_is_left_as_it_was(made):
    operator = made("electro", ".pt2").checkpoint.operator
    assert operator.training
    fresh = checkpoint_of("electro").operator.state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in operator.state_dict().items())


def test_a_wrong_file_is_found_and_never_left(made, tmp_path, monkeypatch):
    file, other = made("electro", ".pt2").path, checkpoint_of("electro", seed=1)
    with pytest.raises(InputError, match="relative difference"):
        verify(file, other)
    with pytest.raises(InputError, match="another shape"):
        verify(file, checkpoint_of("burgers"))
    program = torch.export.load(file)  # of other weights: as wrong as a tracer could be
    monkeypatch.setattr("oformer.export._traced", lambda operator, times: program)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"what was there before")
    with pytest.raises(InputError, match="relative difference"):
        export(other, path)
    assert path.read_bytes() == b"what was there before"
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_a_file_for_one_size_is_refused(tmp_path, monkeypatch):
    """A model that fixes the number of points by looking at it, as a tracer would let it."""
    checkpoint = checkpoint_of("burgers")
    encode = checkpoint.operator.model.encode
    monkeypatch.setattr("oformer.export.copy.deepcopy", lambda operator: operator)

    def fixed(input: Field) -> torch.Tensor:
        return encode(input) * float(int(input.coords.shape[1]))

    monkeypatch.setattr(checkpoint.operator.model, "encode", fixed)
    with pytest.raises(InputError, match="trace with free batch, points and queries"):
        export(checkpoint, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_neighbors_of_queries_are_refused(tmp_path):
    with pytest.raises(InputError, match="trace with free batch, points and queries"):
        export(checkpoint_of("darcy, local"), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_refusals_say_why(made, tmp_path, monkeypatch):
    checkpoint = checkpoint_of("electro")
    with pytest.raises(InputError, match=r"ends in \.onnx or \.pt2"):
        export(checkpoint, tmp_path / "model.pth")
    with pytest.raises(InputError, match="one frame of an operator that was trained on one"):
        export(checkpoint, tmp_path / "model.pt2", times=3)
    with pytest.raises(InputError, match="at least one time step"):
        export(checkpoint_of("navier-stokes"), tmp_path / "model.pt2", times=0)
    with pytest.raises(InputError, match="a run folder, a checkpoint folder"):
        export(tmp_path / "nowhere", tmp_path / "model.pt2")
    with pytest.raises(InputError, match="nothing there"):
        verify(tmp_path / "model.pt2", checkpoint)
    (tmp_path / "model.pt2").write_bytes(b"no zip file")
    with pytest.raises(InputError, match=r"readable \.pt2 file"):
        verify(tmp_path / "model.pt2", checkpoint)
    (tmp_path / "model.pt2").unlink()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match="pip install onnx onnxscript onnxruntime"):
        export(checkpoint, tmp_path / "model.onnx")
    with torch.no_grad():
        checkpoint.operator.model.bottom.layers[0].weight.fill_(math.nan)
    with pytest.raises(InputError, match="finite numbers in `the operator's answer`"):
        verify(made("electro", ".pt2").path, checkpoint)
    assert not list(tmp_path.iterdir())
