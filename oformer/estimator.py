"""An estimator in the manner of scikit-learn: from a person's own arrays to an operator, sizes chosen from the data.

    model = OperatorRegressor().fit(coords=x, inputs=u, targets=v)
    model.predict({"coords": x[0], "inputs": u[0]}, queries)

It is a thin face on `PointDataset`, `train` and `Predictor`, for people who do not want a framework; it adds no
training of its own. scikit-learn is not needed: the manners are `get_params`, `set_params`, `fit` that returns the
estimator, and fitted attributes that end in `_`.

Parameters of a sample (a viscosity, a Mach number) are numbers that the model **sees**: each becomes one more input
channel, constant over the points and frames of the sample, behind the channels of `inputs` and in alphabetical order.
Elsewhere in this package `Sample.parameters` are a record that models never see.
"""

import dataclasses
import inspect
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from oformer.checkpoint import CONFIG, Checkpoint, check_files, load_checkpoint, parameter_count, save_checkpoint
from oformer.config import from_json, to_json
from oformer.data.arrays import Arrays, samples_of
from oformer.data.dataset import PointDataset
from oformer.errors import InputError, unknown_name
from oformer.fields import Card, Field, Sample, Spec
from oformer.files import read_json
from oformer.meshes.grids import line_weights
from oformer.models import OFormerConfig
from oformer.models.oformer import Decoder, Encoder, Query
from oformer.nn.attention import KINDS, AttentionKind
from oformer.plots import lines, maps
from oformer.plots.panel import Panel
from oformer.predict import Predictor
from oformer.seeds import numpy_generator
from oformer.terminal import say
from oformer.training.evaluate import errors
from oformer.training.journal import read_journal
from oformer.training.loop import Outcome, train
from oformer.training.optimizers import Optimizer
from oformer.training.recipe import Data, Recipe, Training

if TYPE_CHECKING:
    import matplotlib.figure

ESTIMATOR = "estimator.json"  # beside a checkpoint: what the estimator knows and an operator does not
NEEDED = ("coords", "inputs", "targets")
KEYS = (*NEEDED, "query_coords", "query_features", "weights", "query_weights", "parameters")

TIMED_STEPS = 6  # enough to see past the slow first ones
MOST_STEPS = 100_000  # that a time budget is filled with
FEW_STEPS = 1000  # with fewer, a small model comes further
SMALL = (48, 2)  # width and depth of one
POINTS_AT_ONCE = 32_768  # in a batch, input points and queries times frames together: bounds memory

# Not `typing.Self`: the shape checks of the tests wrap methods one by one, where Self means nothing.
Estimator = TypeVar("Estimator", bound="OperatorRegressor")


@dataclass(frozen=True)
class Sizes:
    """What `fit` chose or was told."""

    width: int
    depth: int
    batch: int
    steps: int
    attention: AttentionKind
    rate: float

    def model(self, dim: int) -> OFormerConfig:
        """The library's defaults for one's own data, at this size."""
        # Rotary encoding turns pairs of channels along each axis, within each head.
        heads = next((n for n in (4, 2) if self.width % (2 * dim * n) == 0), 1)
        return OFormerConfig(
            attention=self.attention,
            encoder=Encoder(width=self.width, depth=self.depth),
            query=Query(width=self.width, fourier_features=self.width, hidden=(self.width,), heads=heads),
            decoder=Decoder(hidden=(max(2, self.width // 2),)),
        )

    def training(self, seed: int) -> Training:
        """A whole schedule of so many steps, looked at five times."""
        return Training(
            steps=self.steps,
            batch=self.batch,
            optimizer=Optimizer(kind="muon", rate=self.rate, matrix_rate=2 * self.rate, clip=(("all", 1.0),)),
            evaluate_every=max(1, self.steps // 5),
            checkpoint_every=self.steps,
            log_every=max(1, self.steps // 10),
            seed=seed,
        )


class OperatorRegressor:
    """Learns a map from functions to functions, each known at points, and answers at any points.

    What is `None` is chosen from the data in `fit`, which says what it chose. Fitted attributes: `sizes_` (what was
    chosen), `spec_` (the shape of the problem), `parameter_names_`, `test_indices_` (the samples held out), `errors_`
    (the relative L2 error of each of them), `step_` (how many steps were done) and `predictor_`.
    """

    def __init__(
        self,
        *,
        width: int | None = None,
        depth: int | None = None,
        batch: int | None = None,
        steps: int | None = None,
        minutes: float | None = None,
        attention: AttentionKind = "galerkin",
        rate: float = 1e-3,
        test_fraction: float = 0.1,
        seed: int = 0,
        device: str | None = None,
        quiet: bool = False,
    ):
        """Keep the settings; `fit` checks them.

        Args:
            width: channels of the model.
            depth: attention blocks of its encoder.
            batch: samples per step.
            steps: training steps.
            minutes: a time budget for `fit`. It is filled with steps (or ended early, if `steps` says so), and the
                schedule of the learning rate ends with it, however fast the machine is and whether or not its speed
                changes; since a clock decides, results then differ a little from run to run.
            attention: galerkin, fourier or softmax.
            rate: the peak learning rate.
            test_fraction: the share of the samples that is held out, at least one; drawn at random.
            seed: of the weights, of the order of the samples and of those held out.
            device: where to compute; by default a GPU if there is one.
            quiet: say nothing.
        """
        self.width, self.depth, self.batch, self.steps, self.minutes = width, depth, batch, steps, minutes
        self.attention: AttentionKind = attention
        self.rate, self.test_fraction, self.seed, self.device, self.quiet = rate, test_fraction, seed, device, quiet

    @classmethod
    def _setting_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name.

        Args:
            deep: for scikit-learn, which asks for it; there is nothing deeper here.
        """
        return {name: getattr(self, name) for name in self._setting_names()}

    def set_params(self: Estimator, **settings: Any) -> Estimator:
        """Change settings by name; they count from the next `fit`."""
        names = self._setting_names()
        for name in settings:
            if name not in names:
                raise unknown_name("setting", name, names)
        for name, value in settings.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self).__init__).parameters
        changed = {n: v for n, v in self.get_params().items() if v != defaults[n].default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def fit(
        self: Estimator,
        samples: Sequence[Mapping[str, Any]] | None = None,
        *,
        coords: Arrays | None = None,
        inputs: Arrays | None = None,
        targets: Arrays | None = None,
        query_coords: Arrays | None = None,
        query_features: Arrays | None = None,
        weights: Arrays | None = None,
        query_weights: Arrays | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Estimator:
        """Learn from samples, anew at each call.

        Args:
            samples: a list with a dict for each sample, whose keys are the names below. An array in it has no axis of
                samples; `parameters` are numbers by name. Samples may differ in their points and their number.
            coords: (points, dim) for all samples, (samples, points, dim), or a list with one array for each; `dim` is
                1, 2 or 3. Instead of `samples`, as all that follows.
            inputs: (samples, points), (samples, points, channels) or (samples, times, points, channels), or a list.
            targets: the same at the query points.
            query_coords: where the targets are; by default at the input points.
            query_features: what is known there (a node type...); forms as for `inputs`.
            weights: quadrature weights of the input points; by default the half-gaps between neighbors on a line, and
                equal ones elsewhere (give the areas of cells there if points are denser in places).
            query_weights: the same at the query points.
            parameters: (samples,) numbers by name; the model sees each as a constant input channel.
        """
        started = time.monotonic()
        arrays = {
            "coords": coords,
            "inputs": inputs,
            "targets": targets,
            "query_coords": query_coords,
            "query_features": query_features,
            "weights": weights,
            "query_weights": query_weights,
            "parameters": parameters,
        }
        columns = _columns_of(samples, {key: array for key, array in arrays.items() if array is not None})
        found, names = _seen_samples(columns)
        axes = _axes("targets", columns["targets"])
        if len(found) < 2:
            raise InputError("at least two samples, one to learn from and one to test", str(len(found)))
        _check_settings(self.get_params())
        data = PointDataset(found, card=_card(found[0], names))
        held = self._held_out(len(data))
        rest = np.setdiff1d(np.arange(len(data)), held)
        learned, test = data.subset(rest), data.subset(held)
        device = self._device()
        sizes = self._sizes(learned)
        self._tell(_words_on_data(learned, len(test), names))
        with _random_state_kept(device), tempfile.TemporaryDirectory(prefix="oformer-") as folder:
            if not self.quiet or self.minutes is not None:
                sizes, speed = self._plan(sizes, (learned, test.subset([0])), device, Path(folder), started)
                self._tell(_words_on_plan(sizes, speed, device))
            recipe, left = self._recipe(sizes, (learned, test)), None
            if self.minutes is not None:  # a faster machine later on is to do more steps than are planned
                recipe = self._recipe(dataclasses.replace(sizes, steps=self.steps or MOST_STEPS), (learned, test))
                left = self.minutes - (time.monotonic() - started) / 60
            outcome = train(
                recipe,
                Path(folder) / "run",
                (learned, test),
                device=device,
                max_minutes=left,
                quiet=self.quiet,
                tensorboard=False,
            )
        self.sizes_, self.spec_, self.step_ = sizes, data.spec, outcome.step
        self.parameter_names_, self.test_indices_, self._target_axes = names, held, axes
        self.predictor_ = Predictor(_checkpoint(outcome, recipe, data.card), device)
        self.errors_ = self._errors(test)
        self._tell(_words_on_result(outcome, self.errors_, parameter_count(outcome.operator)))
        return self

    def predict(
        self,
        inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        queries: Arrays | None = None,
        times: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """The answer to one sample, or a list with one for each; shaped as the targets were in `fit`.

        Args:
            inputs: a dict or a list of dicts with the keys of `fit`; targets are ignored.
            queries: where to answer, instead of the sample's `query_coords` or `coords`: (queries, dim). For several
                samples also a list with one array for each.
            times: how many frames, where targets have a time axis; by default as many as were learned.
        """
        self._check_fitted()
        if times is not None and self._target_axes < 3:
            raise InputError(
                "`times` only after targets of shape (times, points, channels)",
                f"times={times} after targets without a time axis",
                "Leave it out, or fit with frames",
            )
        single = isinstance(inputs, Mapping)
        samples = [inputs] if isinstance(inputs, Mapping) else list(inputs)
        places = [queries] if single else _per_sample(queries, len(samples))
        asked = [_question(sample, i, place) for i, (sample, place) in enumerate(zip(samples, places, strict=True))]
        answers = []
        for sample in self._samples(asked):
            values = self.predictor_(sample.input, sample.query, times).values.numpy()
            answers.append({1: lambda v: v[0, :, 0], 2: lambda v: v[0], 3: lambda v: v}[self._target_axes](values))
        return answers[0] if single else answers

    def score(self, samples: Sequence[Mapping[str, Any]] | None = None, **arrays: Any) -> float:
        """One minus the mean relative L2 error: 1 is perfect, 0 is as good as answering zero.

        It is not R², which would depend on how far the samples lie from their mean.

        Args:
            samples: with targets, as in `fit`.
            **arrays: or keyword arrays, as in `fit`.
        """
        self._check_fitted()
        found = self._samples(samples, **arrays)
        return 1.0 - float(self._errors(PointDataset(found, spec=self.spec_)).mean())

    def plot(self, sample: Mapping[str, Any], *, channel: int = 0, time: int = -1) -> "matplotlib.figure.Figure":
        """Input, truth, prediction and error of one sample: curves on a line, maps in the plane.

        Args:
            sample: as in `fit`; where `targets` are missing, only the input and the prediction are drawn.
            channel: of the targets.
            time: the frame, where there are several; on a line without `targets` all are drawn.
        """
        self._check_fitted()
        if self.spec_.dim == 3:
            raise InputError("a sample on a line or in the plane to draw", "three dimensions", "Use `predict`")
        for name, count, index in (("channel", self.spec_.out_channels, channel), ("time", self.spec_.out_times, time)):
            if not -count <= index < count:
                raise InputError(f"a `{name}` below {count}", str(index))
        if sample.get("targets") is None:
            known = self._samples([_question(sample, 0, None)])[0]
            answer = self.predictor_(known.input, known.query)
            if self.spec_.dim == 1:
                return lines.prediction(known.input, answer, channel=channel)
            return maps.prediction(known.input, answer, channel=channel, time=time)
        known = self._samples([sample])[0]
        answer = self.predictor_(known.input, known.query, known.target.shape[0]).values
        panel = Panel("sample", known, answer)
        if self.spec_.dim == 1:
            return lines.solutions([panel], target="target", channel=channel, time=time)
        return maps.solutions([panel], target="target", channel=channel, time=time)

    def save(self, folder: Path | str) -> None:
        """Write a folder that `OperatorRegressor.load` reads, and `Predictor` as well."""
        self._check_fitted()
        folder = Path(folder)
        if folder.exists() and not (folder / ESTIMATOR).exists():
            raise InputError(f"nothing yet at {folder}, or an older estimator", "something else", "Choose a new name")
        content = {
            "settings": to_json(self.get_params()),
            "sizes": to_json(self.sizes_),
            "parameter_names": list(self.parameter_names_),
            "test_indices": self.test_indices_.tolist(),
            "errors": self.errors_.tolist(),
            "target_axes": self._target_axes,
        }
        extra = {ESTIMATOR: (json.dumps(content, indent=2) + "\n").encode()}
        save_checkpoint(folder, self.predictor_.checkpoint, extra)

    @classmethod
    def load(cls: type[Estimator], folder: Path | str, device: str | None = None) -> Estimator:
        """An estimator that was saved, ready to predict.

        Args:
            folder: where it was saved.
            device: where to compute; by default a GPU if there is one.
        """
        folder = Path(folder)
        for name in (CONFIG, ESTIMATOR):
            if not (folder / name).is_file():
                raise InputError(
                    f"a folder that OperatorRegressor.save wrote, with {name}",
                    str(folder),
                    "Other checkpoints are opened with `Predictor`",
                )
        check_files(folder, (ESTIMATOR,))
        content = read_json(folder / ESTIMATOR)
        model = cls(**{**content["settings"], "device": device})
        model.predictor_ = Predictor(load_checkpoint(folder), model._device())
        model.spec_, model.step_ = model.predictor_.spec, model.predictor_.checkpoint.step
        model.sizes_ = from_json(Sizes, content["sizes"], "sizes")
        model.parameter_names_ = tuple(content["parameter_names"])
        model.test_indices_ = np.array(content["test_indices"], dtype=np.int64)
        model.errors_ = np.array(content["errors"], dtype=np.float64)
        model._target_axes = content["target_axes"]
        return model

    def _tell(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def _check_fitted(self) -> None:
        if not hasattr(self, "predictor_"):
            raise InputError("a fitted estimator", "one without data", "Call `fit` or `OperatorRegressor.load` first")

    def _device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _samples(self, samples: Sequence[Mapping[str, Any]] | None, **arrays: Any) -> list[Sample]:
        """Samples as the model sees them, of the shapes and with the parameters that it was fitted with."""
        found, names = _seen_samples(_columns_of(samples, arrays))
        if names != self.parameter_names_:
            raise InputError(
                f"the parameters of `fit` ({', '.join(self.parameter_names_) or 'none'})", ", ".join(names) or "none"
            )
        for i, sample in enumerate(found):
            _check_against(self.spec_, sample, i, len(names))
        return found

    def _held_out(self, count: int) -> np.ndarray:
        """The samples for testing, drawn at random: people's data are often sorted."""
        test = min(count - 1, max(1, round(self.test_fraction * count)))
        return np.sort(numpy_generator(self.seed, count).permutation(count)[:test])

    def _sizes(self, data: PointDataset) -> Sizes:
        """What the settings leave open, from the number of samples, points and frames.

        Few samples teach a small model as much as a large one. Widths that are multiples of 48 suit all dimensions.
        """
        count, (points, queries) = len(data), data.sizes().max(0)
        work = int(points) + int(queries) * data.spec.out_times
        wanted = 8 if count < 256 else 16
        batch = self.batch or max(1, min(wanted, count, POINTS_AT_ONCE // work))
        return Sizes(
            width=self.width or (SMALL[0] if count < 50 else 96 if count < 4000 else 144),
            depth=self.depth or (SMALL[1] if count < 50 else 4),
            batch=min(batch, count),
            # Sixty looks at each sample, within what a person waits for.
            steps=self.steps or min(20_000, max(1000, 60 * count // batch)),
            attention=self.attention,
            rate=self.rate,
        )

    def recipe(self, data: PointDataset, name: str = "estimator") -> Recipe:
        """What `fit` would train on a dataset, as a recipe for `train`: its sizes and steps, chosen from the data.

        Args:
            data: with splits named train and test; of others the last share is for testing.
            name: of the recipe.
        """
        _check_settings(self.get_params())
        if {"train", "test"} <= data.splits.keys():
            learned, held = data.split("train"), len(data.split("test"))
        else:
            held = max(1, round(self.test_fraction * len(data)))
            if held >= len(data):
                raise InputError("at least two samples, one to learn from and one to test", str(len(data)))
            learned = data.subset(range(len(data) - held))
        sizes = self._sizes(learned)
        return Recipe(name, Data(len(learned), held), sizes.model(data.spec.dim), sizes.training(self.seed))

    def _recipe(self, sizes: Sizes, data: tuple[PointDataset, PointDataset]) -> Recipe:
        split = Data(train=len(data[0]), test=len(data[1]))
        return Recipe("estimator", split, sizes.model(data[0].spec.dim), sizes.training(self.seed))

    def _plan(
        self,
        sizes: Sizes,
        data: tuple[PointDataset, PointDataset],
        device: torch.device,
        folder: Path,
        started: float,
    ) -> tuple[Sizes, float]:
        """Sizes with as many steps as the time budget has room for at the speed of now, and the steps per second.

        Where there is room for few steps only, a small model gets further in the same time.
        """
        speed = self._speed(sizes, data, device, folder / f"timed-{sizes.width}-{sizes.depth}")
        if self.minutes is None:
            return sizes, speed
        room = max(1, int((60 * self.minutes - time.monotonic() + started) * speed))
        small = dataclasses.replace(sizes, width=self.width or SMALL[0], depth=self.depth or SMALL[1])
        if room < min(FEW_STEPS, self.steps or FEW_STEPS) and small != sizes:
            return self._plan(small, data, device, folder, started)
        return dataclasses.replace(sizes, steps=min(room, self.steps or MOST_STEPS)), speed

    def _speed(
        self, sizes: Sizes, data: tuple[PointDataset, PointDataset], device: torch.device, folder: Path
    ) -> float:
        """Steps per second, of a few steps whose weights are thrown away."""
        recipe = self._recipe(sizes, data)
        timed = dataclasses.replace(recipe.training, steps=TIMED_STEPS, log_every=2, evaluate_every=TIMED_STEPS)
        recipe = dataclasses.replace(recipe, training=timed)
        outcome = train(recipe, folder, data, device=device, quiet=True, tensorboard=False)
        if not outcome.finished:
            raise KeyboardInterrupt
        speeds = [record["steps_per_second"] for record in read_journal(folder) if record["kind"] == "train"]
        return float(np.mean(speeds[1:]))

    def _errors(self, data: PointDataset) -> np.ndarray:
        return errors(self.predictor_.operator, data, self.sizes_.batch).relative.numpy()


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in ("width", "depth", "batch", "steps"):
        value = settings[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"a whole `{name}` of at least 1, or None to have it chosen", repr(value))
    if not settings["rate"] > 0:
        raise InputError("a `rate` above zero", repr(settings["rate"]))
    if settings["minutes"] is not None and not settings["minutes"] > 0:
        raise InputError("`minutes` above zero, or None", repr(settings["minutes"]))
    if not 0 < settings["test_fraction"] < 1:
        raise InputError("a `test_fraction` between 0 and 1", repr(settings["test_fraction"]))
    if settings["attention"] not in KINDS:
        raise unknown_name("attention", str(settings["attention"]), KINDS)
    if settings["seed"] < 0:
        raise InputError("a `seed` of zero or more", repr(settings["seed"]))


def _columns_of(samples: Sequence[Mapping[str, Any]] | None, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by key, from dicts or from keywords."""
    if (samples is None) == (not arrays):
        got = "neither" if samples is None else "both"
        raise InputError("a list of samples, or keyword arrays", got, f"Keys: {', '.join(KEYS)}")
    if samples is None:
        _check_keys(arrays, "the keyword arrays")
        return dict(arrays)
    if isinstance(samples, Mapping) or not all(isinstance(sample, Mapping) for sample in samples):
        raise InputError(
            "a list of samples, each a dict",
            f"a {type(samples).__name__}" + " of others" * (not isinstance(samples, Mapping)),
            "Arrays of all samples are given by keyword: coords=, inputs=, targets=",
        )
    if not samples:
        raise InputError("at least one sample", "none")
    for i, sample in enumerate(samples):
        _check_keys(sample, f"sample {i}")
    used = [key for key in KEYS if any(sample.get(key) is not None for sample in samples)]
    columns: dict[str, Any] = {}
    for key in used:
        column = [sample.get(key) for sample in samples]
        without = [i for i, item in enumerate(column) if item is None]
        if without:
            raise InputError(
                f"`{key}` in all samples or in none", f"none in sample {without[0]}", "Give it to each sample"
            )
        columns[key] = _parameter_columns(column) if key == "parameters" else _shared(key, column)
    return columns


def _check_keys(given: Mapping[str, Any], where: str, needed: Sequence[str] = NEEDED) -> None:
    for key in given:
        if key not in KEYS:
            raise unknown_name(f"part of a sample in {where}", str(key), KEYS)
    missing = [key for key in needed if given.get(key) is None]
    if missing:
        raise InputError(f"`{missing[0]}` in {where}", ", ".join(given) or "nothing")


def _shared(key: str, column: list[Any]) -> Any:
    """One array where all samples hold the very same points or weights: they are then computed on once."""
    one_for_all = key in ("coords", "query_coords", "weights", "query_weights")
    return column[0] if one_for_all and all(item is column[0] for item in column) else column


def _parameter_columns(column: list[Any]) -> dict[str, list[Any]]:
    for i, item in enumerate(column):
        if not isinstance(item, Mapping):
            raise InputError(f"`parameters` of sample {i} as numbers by name", f"a {type(item).__name__}")
        if item.keys() != column[0].keys():
            raise InputError(
                f"the parameters of sample 0 ({', '.join(column[0])}) in sample {i}", ", ".join(item) or "none"
            )
    return {name: [item[name] for item in column] for name in column[0]}


def _seen_samples(columns: dict[str, Any]) -> tuple[list[Sample], tuple[str, ...]]:
    """Samples with their parameters as constant input channels, and the names of those."""
    columns = {"query_values" if key == "query_features" else key: value for key, value in columns.items()}
    found = _weighed_by_gaps(samples_of(**columns), "weights" not in columns, "query_weights" not in columns)
    names = tuple(sorted(found[0].parameters))
    return [_with_channels(sample, names) for sample in found], names


def _weighed_by_gaps(samples: list[Sample], inputs: bool, queries: bool) -> list[Sample]:
    """Samples whose points, if on a line, weigh their half-gaps where no weights were given.

    Sums over random points of equal weight are Monte Carlo; these are quadrature. What samples share stays shared.
    """
    known: dict[int, Tensor] = {}

    def weighed(field: Field) -> Field:
        if field.coords.shape[-1] != 1:
            return field
        key = id(field.coords)
        if key not in known:
            known[key] = line_weights(field.coords)
        return Field(field.coords, field.values, known[key])

    def both(sample: Sample) -> Sample:
        given = weighed(sample.input) if inputs else sample.input
        # Targets at the input points are compared with the weights that were given for those.
        same = sample.query.coords is sample.input.coords and not inputs
        query = weighed(sample.query) if queries and not same else sample.query
        return dataclasses.replace(sample, input=given, query=query)

    return [both(sample) for sample in samples]


def _with_channels(sample: Sample, names: tuple[str, ...]) -> Sample:
    if not names:
        return sample
    values = sample.input.values
    constant = torch.stack([sample.parameters[name] for name in names]).expand(*values.shape[:2], len(names))
    known = Field(sample.input.coords, torch.cat([values, constant], -1), sample.input.weights)
    return dataclasses.replace(sample, input=known, parameters={})


def _axes(name: str, arrays: Arrays) -> int:
    """How many axes the values of one sample were given with."""
    if not isinstance(arrays, (list, tuple)):
        return np.ndim(arrays) - 1
    found = [np.ndim(item) for item in arrays]
    for i, count in enumerate(found):
        if count != found[0]:
            raise InputError(
                f"as many axes in sample {i} of `{name}` as in sample 0 ({found[0]})",
                str(count),
                "Shapes are (points,), (points, channels) or (times, points, channels) in all samples alike",
            )
    return found[0]


def _per_sample(queries: Arrays | None, count: int) -> list[Any]:
    """The queries of each sample: a list or an array of three axes has one entry for each."""
    listed = isinstance(queries, (list, tuple)) and len(queries) > 0 and np.ndim(queries[0]) > 0
    if queries is None or not (listed or np.ndim(queries) == 3):
        return [queries] * count
    if len(queries) != count:
        raise InputError(f"queries for each of the {count} samples", f"{len(queries)} point sets")
    return list(queries)


def _question(sample: Mapping[str, Any], i: int, queries: Any) -> dict[str, Any]:
    """A sample with zeros for targets, which nobody reads, and with other queries where they are given."""
    if not isinstance(sample, Mapping):
        raise InputError(f"sample {i} as a dict with `coords` and `inputs`", f"a {type(sample).__name__}")
    _check_keys(sample, f"sample {i}", ("coords", "inputs"))
    asked = dict(sample)
    if queries is not None:
        asked.pop("query_weights", None)
        asked["query_coords"] = queries
    points = asked["coords"] if asked.get("query_coords") is None else asked["query_coords"]
    if np.ndim(points) == 0:
        raise InputError(f"query points of shape (queries, dim) for sample {i}", repr(points)[:40])
    return {**asked, "targets": np.zeros(len(points))}


def _check_against(spec: Spec, sample: Sample, i: int, parameters: int) -> None:
    """Refuse a sample of another shape than those of `fit`, counting as the person does: without parameters."""
    values, features = sample.input.values, sample.query.values.shape[-1]
    for what, wanted, got in (
        ("space dimension(s)", spec.dim, sample.input.coords.shape[-1]),
        ("space dimension(s) of the queries", spec.dim, sample.query.coords.shape[-1]),
        ("frame(s) in `inputs`", spec.in_times, values.shape[0]),
        ("channel(s) in `inputs`", spec.in_channels - parameters, values.shape[-1] - parameters),
        ("channel(s) in `query_features`", spec.query_channels, features),
    ):
        if got != wanted:
            raise InputError(f"{wanted} {what} of sample {i}, as in `fit`", str(got))


def _card(sample: Sample, names: tuple[str, ...]) -> Card:
    def numbered(name: str, count: int) -> tuple[str, ...]:
        return (name,) if count == 1 else tuple(f"{name} {i}" for i in range(count))

    known = numbered("input", sample.input.values.shape[-1] - len(names))
    features, targets = sample.query.values.shape[-1], sample.target.shape[-1]
    return Card(
        "Arrays given to OperatorRegressor",
        inputs=(*known, *names),
        queries=numbered("feature", features),
        targets=numbered("target", targets),
    )


def _checkpoint(outcome: Outcome, recipe: Recipe, card: Card) -> Checkpoint:
    scores = outcome.scores.to_json() if outcome.scores else {}
    return Checkpoint(outcome.operator, recipe.name, outcome.step, scores, to_json(recipe), card)


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave torch's own random numbers as the caller had them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _words_on_data(learned: PointDataset, held: int, names: tuple[str, ...]) -> str:
    spec, sizes = learned.spec, learned.sizes()
    low, high = sizes[:, 0].min(), sizes[:, 0].max()
    frames = "steady" if spec.in_times == spec.out_times == 1 else f"{spec.in_times} to {spec.out_times} frames"
    shown = f" and {', '.join(names)}" if names else ""
    return (
        f"Data: {len(learned):,} samples to learn from, {held:,} held out; {spec.dim}-D, "
        f"{low:,}{f' to {high:,}' if high > low else ''} input points, {frames}, "
        f"channels {spec.in_channels - len(names)}{shown} to {spec.out_channels}."
    )


def _words_on_plan(sizes: Sizes, speed: float, device: torch.device) -> str:
    seconds = sizes.steps / speed
    duration = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    return (
        f"Plan: width={sizes.width}, depth={sizes.depth}, attention={sizes.attention!r}, steps={sizes.steps}, "
        f"batch={sizes.batch}; about {duration} on {device} at {speed:.3g} steps/s. Give any of these, or minutes=, "
        "to change it."
    )


def _words_on_result(outcome: Outcome, found: np.ndarray, parameters: int) -> str:
    ended = "" if outcome.finished else f" Stopped early ({outcome.reason})."
    return (
        f"Done: {outcome.step:,} steps, {parameters:,} weights.{ended} Error on the {len(found)} samples held out "
        f"(relative L2): mean {found.mean():.2%}, worst {found.max():.2%}."
    )
