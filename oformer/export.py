"""A trained operator as one file for programs without this package: `torch.export` (.pt2) or ONNX (.onnx).

Physical units in and out, since the normalization is part of the graph. Batch, input points and queries are free; the
number of time steps is chosen here, because the march is written out step by step. Weights, and not a mask, say which
points are padding, as everywhere in this package.

A tracer sees one example and may take what it sees for a rule. So every file is run at sizes other than the example's,
next to the operator, before it gets its name: a file that differs is never left behind.
"""

import contextlib
import copy
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer import __version__
from oformer.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from oformer.checks import check_finite
from oformer.config import to_json
from oformer.engine.swap import accelerate
from oformer.errors import InputError, optional_module
from oformer.fields import Field
from oformer.files import write_bytes
from oformer.models import Operator

FORMAT = "oformer-export"
VERSION = 1
SUFFIXES = (".onnx", ".pt2")
ONNX = "ONNX files", "pip install onnx onnxscript onnxruntime"
METADATA = "oformer.json"  # the file inside a .pt2; in ONNX the property FORMAT
ANSWER = "answer"  # the name of the output
TOLERANCE = 1e-4
# Batch, points, queries. One of each is asked for, since a tracer likes to take one for a constant.
EXAMPLE = (2, 12, 10)
SIZES = ((1, 64, 50), (2, 17, 40), (3, 40, 9), (1, 7, 1), (3, 1, 5))
SEED = 0

Answer = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Verified:
    """What was compared, and how far apart file and operator were."""

    sizes: tuple[tuple[int, int, int], ...]  # batch, points, queries
    error: float  # the worst over sizes and channels: rms difference over rms answer
    rounding: float  # the same between the operator's own answers in float32 and in float64


class _Flat(nn.Module):
    """An operator that takes plain tensors, named; a `Field` is not known outside."""

    def __init__(self, operator: Operator, times: int):
        super().__init__()
        self.operator, self.times = operator, times

    def forward(
        self,
        coords: Tensor,
        values: Tensor,
        weights: Tensor,
        query_coords: Tensor,
        query_values: Tensor | None = None,
        query_weights: Tensor | None = None,
    ) -> Tensor:
        query = Field.of(query_coords, query_values, query_weights)
        return self.operator(Field(coords, values, weights), query, self.times)


def export(
    source: str | Path | Checkpoint, path: str | Path, times: int | None = None, tolerance: float = TOLERANCE
) -> Verified:
    """Write a trained operator as one file, and check it against the operator; a wrong file is not written.

    Args:
        source: a run folder, a checkpoint folder, or a loaded checkpoint.
        path: where; its ending, .onnx or .pt2, chooses the format.
        times: how many steps the file answers; by default as many as the operator was trained for.
        tolerance: the largest relative difference from the operator.
    """
    path = Path(path)
    suffix = _suffix(path)
    checkpoint = _checkpoint(source)
    operator = _plain(checkpoint.operator)
    times = operator.horizon(times)
    if not operator.model.answers_anywhere:
        where = "a regular grid" if operator.model.needs_grid else "a mesh, and answers at its points alone"
        raise InputError(
            "a model that reads scattered points, for a file whose numbers of points and queries are free",
            f"{operator.model.name}, which reads {where}",
            "Use the checkpoint itself",
        )
    if suffix == ".onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):  # before minutes of tracing
            optional_module(name, *ONNX)
    metadata = _metadata(checkpoint, times)
    program = _traced(operator, times)
    save = _save_onnx if suffix == ".onnx" else _save_pt2
    with tempfile.TemporaryDirectory() as folder:
        candidate = Path(folder) / path.name
        save(program, metadata, candidate)
        verified = verify(candidate, checkpoint, tolerance)
        write_bytes(path, candidate.read_bytes())
    return verified


def verify(path: str | Path, source: str | Path | Checkpoint, tolerance: float = TOLERANCE) -> Verified:
    """Run a file beside the operator it was made of, at several sizes and with padded points; refuse it if they differ.

    Args:
        path: what `export` wrote.
        source: a run folder, a checkpoint folder, or a loaded checkpoint.
        tolerance: the largest relative difference.
    """
    path = Path(path)
    operator = _plain(_checkpoint(source).operator)
    answer, metadata = _opened(path)
    if metadata["spec"] != to_json(operator.spec):
        raise InputError(
            f"a file made of this operator at {path}",
            f"one of `{metadata['name']}`, a problem of another shape",
            "Give the checkpoint it was exported from",
        )
    # The file and the operator at every size, and the operator in float64: how much rounding alone does.
    eager = _Flat(operator, metadata["times"])
    exact = _Flat(copy.deepcopy(operator).double(), metadata["times"])
    generator = torch.Generator().manual_seed(SEED)
    expected, got, ideal = [], [], []
    for size in SIZES:
        tensors = example(operator, size, generator)
        with torch.no_grad():
            expected.append(eager(**tensors).double())
            ideal.append(exact(**{name: tensor.double() for name, tensor in tensors.items()}))
        check_finite("the operator's answer", expected[-1])
        try:
            got.append(answer(tensors).double())
        except Exception as error:  # each runtime has its own ways to say that a size does not fit
            raise InputError(
                f"a file that answers {_words(size)}", f"a failure ({_first_line(error)})", _REPORT
            ) from error
        if got[-1].shape != expected[-1].shape:
            raise InputError(
                f"an answer of shape {tuple(expected[-1].shape)} from {path.name}", str(tuple(got[-1].shape)), _REPORT
            )
    errors = _relative(got, expected)
    worst = max(range(len(SIZES)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    rounding = max(_relative(expected, ideal))
    if not errors[worst] <= tolerance:  # also where it is not a number
        raise InputError(
            f"answers within {tolerance:g} of the operator's from {path.name}",
            f"a relative difference of {errors[worst]:.3g} for {_words(SIZES[worst])}",
            f"The operator itself rounds by {rounding:.3g} in float32; if that is more, raise the tolerance. {_REPORT}",
        )
    return Verified(SIZES, errors[worst], rounding)


def _relative(got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """For each size the worst channel's rms difference, over the rms of that channel in all expected answers.

    Of all, since the answer at a single query may be zero by chance.
    """

    def rms(tensor: Tensor) -> Float[Tensor, " channels"]:
        return tensor.square().mean((0, 1, 2)).sqrt()

    magnitude = torch.stack([rms(answer) for answer in expected]).square().mean(0).sqrt()
    magnitude = magnitude.clamp(min=torch.finfo(torch.float32).tiny)
    return [float((rms(a - b) / magnitude).amax()) for a, b in zip(got, expected, strict=True)]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What an exported file says of itself: names and shapes of tensors, channels, steps, spec, model, versions."""
    return _opened(Path(path))[1]


_REPORT = "Use the checkpoint itself or the other format, and report the configuration with torch's version"


def _suffix(path: Path) -> str:
    if path.suffix not in SUFFIXES:
        raise InputError(f"a file name that ends in {' or '.join(SUFFIXES)}", f"`{path.name}`")
    return path.suffix


def _checkpoint(source: str | Path | Checkpoint) -> Checkpoint:
    return source if isinstance(source, Checkpoint) else load_checkpoint(find_checkpoint(source))


def _plain(operator: Operator) -> Operator:
    """A copy on the CPU in float32, for inference: the caller's own is left as it is."""
    plain = copy.deepcopy(operator).to("cpu", torch.float32).eval()
    accelerate(plain.model, "cpu")
    return plain


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _words(size: tuple[int, int, int]) -> str:
    return "a batch of {} with {} input points and {} queries".format(*size)


def _shapes(operator: Operator) -> dict[str, tuple[str | int, ...]]:
    """Names and shapes of the tensors that this operator reads; names are free sizes."""
    s = operator.spec
    shapes: dict[str, tuple[str | int, ...]] = {
        "coords": ("batch", "points", s.dim),
        "values": ("batch", s.in_times, "points", s.in_channels),
        "weights": ("batch", "points"),
        "query_coords": ("batch", "queries", s.dim),
    }
    if s.query_channels:
        shapes["query_values"] = ("batch", 1, "queries", s.query_channels)
    if not operator.model.queries_independent:  # otherwise nothing reads them
        shapes["query_weights"] = ("batch", "queries")
    return shapes


def example(operator: Operator, size: tuple[int, int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs on the scale of the training data, by name: some points beyond their box, the last sample padded.

    `size` counts samples, points and queries.
    """
    s, (batch, points, queries) = operator.spec, size
    low, high = operator.box

    def places(count: int) -> Float[Tensor, "batch count dim"]:
        return low + (high - low) * (1.1 * torch.rand(batch, count, s.dim, generator=generator) - 0.05)

    def weights(count: int) -> Float[Tensor, "batch count"]:
        w = 0.5 + torch.rand(batch, count, generator=generator)
        w[-1, count - count // 3 :] = 0.0
        return w / w.sum(-1, keepdim=True)

    def codes(count: int, categories: int) -> Float[Tensor, "batch 1 count"]:
        return torch.randint(categories, (batch, 1, count), generator=generator).float()

    coords = places(points)
    unit = torch.randn(batch, s.in_times, points, s.in_channels, generator=generator)
    values = operator.input_scale.inverse(unit, coords)
    features = torch.randint(2, (batch, 1, queries, s.query_channels), generator=generator).float()  # flags
    if s.in_categories:
        values[..., -1] = codes(points, s.in_categories)
    if s.query_categories:
        features[..., -1] = codes(queries, s.query_categories)
    tensors = {
        "coords": coords,
        "values": values,
        "weights": weights(points),
        "query_coords": places(queries),
        "query_values": features,
        "query_weights": weights(queries),
    }
    return {name: tensors[name] for name in _shapes(operator)}


def _traced(operator: Operator, times: int) -> torch.export.ExportedProgram:
    """The graph of the operator with free sizes."""
    tensors = example(operator, EXAMPLE, torch.Generator().manual_seed(SEED))
    free = {name: torch.export.Dim(name, min=1) for name in ("batch", "points", "queries")}
    shapes = {
        name: {axis: free[size] for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in _shapes(operator).items()
    }
    module = _Flat(operator, times).eval()
    # Without gradients from outside, the graph holds no switch of the gradient mode.
    with torch.no_grad(), _quiet():
        module(**tensors)  # what the operator itself refuses, it refuses here, in its own words
        try:
            return torch.export.export(module, (), tensors, dynamic_shapes=shapes)
        except Exception as error:  # the tracer has many; its first line names the constraint
            raise InputError(
                "a model that torch.export can trace with free batch, points and queries",
                f"a refusal ({_first_line(error)})",
                "Use the checkpoint itself, or bring the model into a form that does not fix its sizes",
            ) from error


def _metadata(checkpoint: Checkpoint, times: int) -> dict[str, Any]:
    operator, card = checkpoint.operator, checkpoint.data
    return {
        "format": FORMAT,
        "version": VERSION,
        "package": __version__,
        "torch": torch.__version__,
        "name": checkpoint.name,
        "step": checkpoint.step,
        "times": times,
        "inputs": {name: list(shape) for name, shape in _shapes(operator).items()},
        "outputs": {ANSWER: ["batch", times, "queries", operator.spec.out_channels]},
        "channels": {
            "values": list(card.inputs if card else ()),
            "query_values": list(card.queries if card else ()),
            ANSWER: list(card.targets if card else ()),
        },
        "units": None,  # those of the training data; no unit is recorded anywhere
        "spec": to_json(operator.spec),
        "model": to_json(operator.model.config),
    }


def _save_pt2(program: torch.export.ExportedProgram, metadata: dict[str, Any], path: Path) -> None:
    with _quiet():
        torch.export.save(program, path, extra_files={METADATA: json.dumps(metadata)})


def _save_onnx(program: torch.export.ExportedProgram, metadata: dict[str, Any], path: Path) -> None:
    with _quiet():
        try:
            translated = torch.onnx.export(program, dynamo=True, verbose=False, output_names=[ANSWER])
        except Exception as error:  # an operation without a translation, named in the first line
            raise InputError(
                "a model whose every operation ONNX has",
                f"a refusal of torch.onnx ({_first_line(error)})",
                "Export a .pt2 instead",
            ) from error
        assert translated is not None  # it is when the tracer of torch is used
        translated.model.metadata_props[FORMAT] = json.dumps(metadata)
        translated.save(path, external_data=False)


def _opened(path: Path) -> tuple[Answer, dict[str, Any]]:
    """How to ask a file, and what it says of itself."""
    suffix = _suffix(path)
    if not path.is_file():
        raise InputError(f"a file at {path}", "nothing there", "Check the path")
    runtime = optional_module("onnxruntime", *ONNX) if suffix == ".onnx" else None
    try:
        with _quiet():
            answer, text = _open_onnx(path, runtime) if runtime else _open_pt2(path)
    except Exception as error:  # of zip files, of protobuf, of runtimes
        raise InputError(
            f"a readable {suffix} file at {path}", f"something else ({_first_line(error)})", "Export it again"
        ) from error
    metadata = json.loads(text) if text else {}
    if metadata.get("format") != FORMAT or metadata["version"] > VERSION:
        raise InputError(
            f"a file exported by this package, version {VERSION} or older, at {path}",
            f"version {metadata['version']}" if "version" in metadata else "a foreign file",
        )
    return answer, metadata


def _open_onnx(path: Path, runtime: ModuleType) -> tuple[Answer, str]:
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def answer(tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run([ANSWER], {name: tensor.numpy() for name, tensor in tensors.items()})[0])

    return answer, session.get_modelmeta().custom_metadata_map.get(FORMAT, "")


def _open_pt2(path: Path) -> tuple[Answer, str]:
    extra = {METADATA: ""}
    module = torch.export.load(path, extra_files=extra).module()

    def answer(tensors: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return module(**tensors)

    return answer, extra[METADATA]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what torch's exporters say of their own deprecations and of packages nobody needs here."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
