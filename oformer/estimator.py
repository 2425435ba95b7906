"""An estimator in the manner of scikit-learn: from a person's own arrays to an operator, sizes chosen from the data.

    model = OperatorRegressor().fit(coords=x, inputs=u, targets=v)
    model.predict({"coords": x[0], "inputs": u[0]}, queries)

It is a thin face on `PointDataset`, `train` and `Predictor`, for people who do not want a framework; it adds no
training of its own. scikit-learn is not needed; where it is installed, its pipelines, searches and cross-validation
take the estimator as one of theirs.

Parameters of a sample (a viscosity, a Mach number) are numbers that the model **sees**: each becomes one more input
channel, constant over the points and frames of the sample, behind the channels of `inputs` and in alphabetical order.
Elsewhere in this package `Sample.parameters` are a record that models never see.
"""

import dataclasses
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import save

from oformer.baselines import compare, linear_channels
from oformer.checkpoint import CONFIG, Checkpoint, check_files, load_checkpoint, parameter_count, save_checkpoint
from oformer.config import from_json, to_json
from oformer.data.arrays import Arrays
from oformer.data.columns import (
    Samples,
    as_given,
    axes_of,
    card_of,
    columns_of,
    entries,
    flattened,
    holds_dicts,
    is_numbers,
    question,
    questions,
    samples_like,
    seen_samples,
    shared_points,
)
from oformer.data.dataset import PointDataset
from oformer.errors import InputError, unknown_name
from oformer.fields import Picture, Sample, Spec
from oformer.files import map_arrays, read_json
from oformer.gpu import compute_device
from oformer.nn.attention import KINDS, AttentionKind
from oformer.plots import lines, maps
from oformer.predict import Predictor
from oformer.seeds import numpy_generator
from oformer.terminal import say
from oformer.training import sizes as plans
from oformer.training.evaluate import errors
from oformer.training.loop import Outcome, train
from oformer.training.recipe import Recipe
from oformer.training.run import Callback
from oformer.training.sizes import MOST_STEPS, SMALL, Sizes, planned, recipe_for, sizes_for

if TYPE_CHECKING:
    import matplotlib.figure

# Beside a checkpoint: what the estimator knows and an operator does not.
ESTIMATOR, POINTS = "estimator.json", "points.safetensors"
RENAMED = {"batch": "batch_size", "rate": "learning_rate", "seed": "random_state"}  # settings in older folders

# Not `typing.Self`: the shape checks of the tests wrap methods one by one, where Self means nothing.
Estimator = TypeVar("Estimator", bound="OperatorRegressor")


class OperatorRegressor:
    """Learns a map from functions to functions, each known at points, and answers at any points.

    What is `None` is chosen from the data in `fit`, which says what it chose. Fitted attributes: `sizes_` (what was
    chosen), `spec_` (the shape of the problem), `parameter_names_`, `test_indices_` (the samples held out), `errors_`
    (the relative L2 error of each of them), `baselines_` (the mean error of each class of `oformer.baselines` on these
    samples, by name), `points_` (points and weights that all samples share, which samples without `coords` have too),
    `seed_`, `step_` (how many steps were done) and `predictor_`.
    """

    def __init__(
        self,
        *,
        width: int | None = None,
        depth: int | None = None,
        batch_size: int | None = None,
        steps: int | None = None,
        minutes: float | None = None,
        attention: AttentionKind = "galerkin",
        linear: Sequence[int] | None = None,
        learning_rate: float = 1e-3,
        test_fraction: float = 0.1,
        random_state: Any = 0,
        device: str | None = None,
        quiet: bool = False,
    ):
        """Keep the settings; `fit` checks them.

        Args:
            width: channels of the model.
            depth: attention blocks of its encoder.
            batch_size: samples per step.
            steps: training steps.
            minutes: a time budget for `fit`. It is filled with steps (or ended early, if `steps` says so), and the
                schedule of the learning rate ends with it, however fast the machine is and whether or not its speed
                changes; since a clock decides, results then differ a little from run to run.
            attention: galerkin, fourier or softmax, of an OFormer.
            linear: input channels (0 is the first) in which the answer is exactly linear, such as a source or an
                initial state; then the model is a `Superposition`. () for none, and an OFormer. By default `fit` finds
                out, by kernel ridge regressions with and without linear channels.
            learning_rate: its peak.
            test_fraction: the share of the samples that is held out, at least one; drawn at random.
            random_state: the seed of the weights, of the order of the samples and of those held out: an integer, a
                generator of numpy to draw one from, or None for another one at each `fit`.
            device: where to compute; by default a GPU if there is one.
            quiet: say nothing.
        """
        self.width, self.depth, self.batch_size, self.steps, self.minutes = width, depth, batch_size, steps, minutes
        self.attention: AttentionKind = attention
        self.linear = linear
        self.learning_rate, self.test_fraction, self.random_state = learning_rate, test_fraction, random_state
        self.device, self.quiet = device, quiet

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's meta-estimators ask of an estimator; asked for by them alone."""
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        target = TargetTags(required=False, two_d_labels=True, multi_output=True, single_output=True)
        kinds = InputTags(three_d_array=True, dict=True)
        # `score` is no R², so scikit-learn must not expect one of a certain size.
        return Tags("regressor", target, regressor_tags=RegressorTags(poor_score=True), input_tags=kinds)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name.

        Args:
            deep: for scikit-learn, which asks for it; there is nothing deeper here.
        """
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self: Estimator, **settings: Any) -> Estimator:
        """Change settings by name; they count from the next `fit`."""
        names = self.get_params()
        for name in settings:
            if name not in names:
                raise unknown_name("setting", name, names)
        for name, value in settings.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        changed = {n: v for n, v in self.get_params().items() if v != defaults[n].default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def fit(
        self: Estimator,
        X: Samples | None = None,
        y: Arrays | None = None,
        *,
        coords: Arrays | None = None,
        inputs: Arrays | None = None,
        targets: Arrays | None = None,
        query_coords: Arrays | None = None,
        query_features: Arrays | None = None,
        weights: Arrays | None = None,
        query_weights: Arrays | None = None,
        parameters: Mapping[str, Any] | None = None,
        on: Callback | None = None,
    ) -> Estimator:
        """Learn from samples, anew at each call.

        Args:
            X: a list with a dict for each sample, whose keys are the names below. An array in it has no axis of
                samples; `parameters` are numbers by name. Samples may differ in their points and their number. Or the
                inputs of all samples, with `y`; without `coords=`, points of (samples, points) lie evenly from 0 to 1.
            y: the targets of all samples, where X does not hold them; of shape (samples,), a number for each.
            coords: (points, dim) for all samples, (samples, points, dim), or a list with one array for each; `dim` is
                1, 2 or 3. Of a grid (nx, ny, dim); then `nx, ny` stands for `points` in all arrays.
            inputs: (samples, points), (samples, points, channels) or (samples, times, points, channels), or a list.
            targets: the same at the query points.
            query_coords: where the targets are; by default at the input points.
            query_features: what is known there (a node type...); forms as for `inputs`.
            weights: quadrature weights of the input points; by default the half-gaps between neighbors on a line, and
                equal ones elsewhere (give the areas of cells there if points are denser in places).
            query_weights: the same at the query points.
            parameters: (samples,) numbers by name; the model sees each as a constant input channel.
            on: called as in `train` while the operator learns; returns True to stop and keep what was learned.
        """
        started = time.monotonic()
        arrays = {
            "coords": coords, "inputs": inputs, "targets": targets, "query_coords": query_coords,
            "query_features": query_features, "weights": weights, "query_weights": query_weights,
            "parameters": parameters,
        }  # fmt: skip
        X, y = entries(X), entries(y)
        given = columns_of(X, {key: array for key, array in arrays.items() if array is not None}, y)
        columns = flattened(given)
        found, names = seen_samples(columns)
        axes = 0 if is_numbers(y) else axes_of("targets", columns["targets"])
        if len(found) < 2:
            raise InputError("at least two samples, one to learn from and one to test", "1 sample")
        _check_settings(self.get_params())
        self.seed_ = _seed(self.random_state)
        data = PointDataset(found, card=card_of(found[0], names))
        held = self._held_out(len(data))
        rest = np.setdiff1d(np.arange(len(data)), held)
        learned, test = data.subset(rest), data.subset(held)
        device = self._device()
        self._tell(plans.words_on_data(learned, len(test), names))
        compared = compare(learned, test, share=min(1.0, self.minutes or 1.0), seed=self.seed_)
        sizes = self._sizes(learned, compared.linear)
        # The caller's random numbers are left as they were.
        kept = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with kept, tempfile.TemporaryDirectory(prefix="oformer-") as folder:
            if not self.quiet or self.minutes is not None:
                sizes, speed = planned(
                    sizes,
                    dataclasses.replace(sizes, width=self.width or SMALL[0], depth=self.depth or SMALL[1]),
                    (learned, test.subset([0])),
                    deadline=None if self.minutes is None else started + 60 * self.minutes,
                    most=self.steps or MOST_STEPS,
                    seed=self.seed_,
                    device=device,
                    folder=Path(folder),
                )
                self._tell(plans.words_on_plan(sizes, speed, device))
            told, left = sizes, None
            if self.minutes is not None:  # a faster machine later on is to do more steps than are planned
                told = dataclasses.replace(sizes, steps=self.steps or MOST_STEPS)
                left = self.minutes - (time.monotonic() - started) / 60
            recipe = told.recipe("estimator", learned, len(test), self.seed_)
            outcome = train(
                recipe,
                Path(folder) / "run",
                (learned, test),
                device=device,
                max_minutes=left,
                quiet=self.quiet,
                tensorboard=False,
                on=on,
            )
        self.sizes_, self.spec_, self.step_ = sizes, data.spec, outcome.step
        self.parameter_names_, self.test_indices_, self._target_axes = names, held, axes
        self.points_ = shared_points(given)
        scores = outcome.scores.to_json() if outcome.scores else {}
        stored = Checkpoint(outcome.operator, recipe.name, outcome.step, scores, to_json(recipe), data.card)
        self.predictor_ = Predictor(stored, device)
        self.errors_, self.baselines_ = self._errors(test), compared.errors
        self._tell(_words_on_result(outcome, self.errors_, parameter_count(outcome.operator)))
        self._tell(compared.told(self.errors_))
        return self

    def predict(
        self,
        X: Mapping[str, Any] | Samples,
        queries: Arrays | None = None,
        times: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """The answer to one sample, or to several: a list for a list of dicts, an array for inputs as in `fit(X, y)`.

        Args:
            X: a dict or a list of dicts with the keys of `fit`, whose targets are ignored, or the inputs of samples.
                Samples without `coords` lie at the points that those of `fit` shared.
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
        asked = questions(X, self.points_["query_coords"] if self._target_axes == 0 else queries, self.points_)
        answers = [
            as_given(
                self.predictor_(sample.input, sample.query, times=times).values.numpy(), self._target_axes, question
            )
            for sample, question in zip(self._samples(asked), asked, strict=True)
        ]
        if isinstance(X, Mapping):
            return answers[0]
        return answers if isinstance(X, Sequence) and holds_dicts(list(X)) else np.stack(answers)

    def score(self, X: Samples | None = None, y: Arrays | None = None, **arrays: Any) -> float:
        """One minus the mean relative L2 error: 1 is perfect, 0 is as good as answering zero.

        It is not R², which would depend on how far the samples lie from their mean.

        Args:
            X: samples as in `fit`.
            y: their targets, where X does not hold them.
            **arrays: or keyword arrays, as in `fit`.
        """
        self._check_fitted()
        found = self._samples(X, y, **arrays)
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
            raise InputError(
                "a sample on a line or in the plane to draw", "three dimensions", "Write the answer with Field.to_vtu"
            )
        for name, count, index in (("channel", self.spec_.out_channels, channel), ("time", self.spec_.out_times, time)):
            if not -count <= index < count:
                raise InputError(f"a `{name}` below {count}", str(index))
        if sample.get("targets") is None:
            known = self._samples([question(sample, 0, None)])[0]
            answer = self.predictor_(known.input, known.query)
            if self.spec_.dim == 1:
                return lines.prediction(known.input, answer, channel=channel)
            return maps.prediction(known.input, answer, channel=channel, time=time)
        known = self._samples([sample])[0]
        answer = self.predictor_(known.input, known.query, times=known.target.shape[0]).values
        panel = lines.Panel("sample", known, answer)
        if self.spec_.dim == 1:
            return lines.solutions([panel], target="target", channel=channel, time=time)
        return maps.solutions([panel], target="target", picture=Picture(target=channel), time=time)

    def save(self, folder: Path | str) -> None:
        """Write a folder that `OperatorRegressor.load` reads, and `Predictor` as well."""
        self._check_fitted()
        folder = Path(folder)
        if folder.exists() and not (folder / ESTIMATOR).exists():
            raise InputError(f"nothing yet at {folder}, or an older estimator", "something else", "Choose a new name")
        content = {
            "settings": to_json({**self.get_params(), "random_state": self.seed_}),
            "sizes": to_json(self.sizes_),
            "parameter_names": list(self.parameter_names_),
            "test_indices": self.test_indices_.tolist(),
            "errors": self.errors_.tolist(),
            "baselines": self.baselines_,
            "target_axes": self._target_axes,
        }
        extra = {ESTIMATOR: (json.dumps(content, indent=2) + "\n").encode(), POINTS: save(self.points_)}
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
        points = [POINTS] if (folder / POINTS).is_file() else []  # older folders have none
        check_files(folder, (ESTIMATOR, *points))
        content = read_json(folder / ESTIMATOR)
        settings = {RENAMED.get(name, name): value for name, value in content["settings"].items()}
        model = cls(**{**settings, "device": device})
        model.points_ = {name: np.array(array) for name in points for name, array in map_arrays(folder / name).items()}
        model.seed_ = model.random_state
        model.predictor_ = Predictor(load_checkpoint(folder), model._device())
        model.spec_, model.step_ = model.predictor_.spec, model.predictor_.checkpoint.step
        model.sizes_ = from_json(Sizes, content["sizes"], "sizes")
        model.parameter_names_ = tuple(content["parameter_names"])
        model.test_indices_ = np.array(content["test_indices"], dtype=np.int64)
        model.errors_ = np.array(content["errors"], dtype=np.float64)
        model.baselines_ = content.get("baselines", {})  # older folders have none
        model._target_axes = content["target_axes"]
        return model

    def _tell(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def _check_fitted(self) -> None:
        if not hasattr(self, "predictor_"):
            raise _not_fitted()(
                "a fitted estimator", "one without data", "Call `fit` or `OperatorRegressor.load` first"
            )

    def _device(self) -> torch.device:
        return compute_device(self.device)

    def _samples(self, X: Samples | None, y: Arrays | None = None, **arrays: Any) -> list[Sample]:
        """Samples as the model sees them, of the shapes and with the parameters that it was fitted with."""
        found = samples_like(X, arrays, self.parameter_names_, y, self.points_)
        for i, sample in enumerate(found):
            _check_against(self.spec_, sample, i, len(self.parameter_names_))
        return found

    def _held_out(self, count: int) -> np.ndarray:
        """The samples for testing, drawn at random: people's data are often sorted."""
        test = min(count - 1, max(1, round(self.test_fraction * count)))
        return np.sort(numpy_generator(self.seed_, count).permutation(count)[:test])

    def recipe(self, data: PointDataset, name: str = "estimator") -> Recipe:
        """What `fit` would train on a dataset, as a recipe for `train`: its sizes and steps, chosen from the data.

        Args:
            data: with splits named train and test; of others the last share is for testing.
            name: of the recipe.
        """
        _check_settings(self.get_params())
        return recipe_for(
            data, name, sizes=self._sizes, test_fraction=self.test_fraction, seed=_seed(self.random_state)
        )

    def _sizes(self, data: PointDataset, found: tuple[int, ...] | None = None) -> Sizes:
        """Sizes for samples to learn from; `found` are their linear channels, where somebody has looked."""
        whole = {"width": self.width, "depth": self.depth, "batch": self.batch_size, "steps": self.steps}
        told = {name: None if value is None else int(value) for name, value in whole.items()}  # numpy's too
        if self.linear is not None:
            found = tuple(map(int, self.linear))
        elif found is None:
            found = linear_channels(data, share=min(1.0, self.minutes or 1.0), seed=_seed(self.random_state))
        return sizes_for(data, **told, attention=self.attention, rate=self.learning_rate, linear=found)

    def _errors(self, data: PointDataset) -> np.ndarray:
        return errors(self.predictor_.operator, data, self.sizes_.batch).relative.numpy()


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name in ("width", "depth", "batch_size", "steps"):
        value = settings[name]
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise InputError(f"a whole `{name}` of at least 1, or None to have it chosen", repr(value))
    if not settings["learning_rate"] > 0:
        raise InputError("a `learning_rate` above zero", repr(settings["learning_rate"]))
    if settings["minutes"] is not None and not settings["minutes"] > 0:
        raise InputError("`minutes` above zero, or None", repr(settings["minutes"]))
    if not 0 < settings["test_fraction"] < 1:
        raise InputError("a `test_fraction` between 0 and 1", repr(settings["test_fraction"]))
    if settings["attention"] not in KINDS:
        raise unknown_name("attention", str(settings["attention"]), KINDS)
    linear = settings["linear"]
    if linear is not None and not (np.ndim(linear) == 1 and all(isinstance(n, Integral) for n in linear)):
        raise InputError("`linear`: a list of input channels, such as [0], or None to look for them", repr(linear))
    seed = settings["random_state"]
    if not (seed is None or hasattr(seed, "integers") or hasattr(seed, "randint") or isinstance(seed, Integral)) or (
        isinstance(seed, Integral) and seed < 0
    ):
        raise InputError("a `random_state` of zero or more, a generator of numpy, or None", repr(seed))


def _seed(state: Any) -> int:
    """The seed that a `random_state` stands for, in the manner of scikit-learn."""
    if isinstance(state, Integral):
        return int(state)
    state = np.random.default_rng() if state is None else state
    return int((getattr(state, "integers", None) or state.randint)(2**31 - 1))


def _not_fitted() -> type[InputError]:
    """The error of an estimator without data, which is scikit-learn's own too where that is loaded."""
    theirs = sys.modules.get("sklearn.exceptions")
    return type("NotFittedError", (InputError, theirs.NotFittedError), {}) if theirs else InputError


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


def _words_on_result(outcome: Outcome, found: np.ndarray, parameters: int) -> str:
    ended = "" if outcome.finished else f" Stopped early ({outcome.reason})."
    return (
        f"Done: {outcome.step:,} steps, {parameters:,} weights.{ended} Error on the {len(found)} samples held out "
        f"(relative L2): mean {found.mean():.2%}, worst {found.max():.2%}."
    )
