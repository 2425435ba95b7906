"""A recipe: problem, view of the data, model, training. One name, one row of the results table, one set of weights."""

from dataclasses import dataclass
from typing import Literal

from oformer.data.dataset import View
from oformer.errors import InputError
from oformer.fields import Spec
from oformer.models import ModelConfig, Normalization
from oformer.models.base import Precision, autocast_of
from oformer.problems import Problem
from oformer.training.losses import Loss
from oformer.training.optimizers import Optimizer
from oformer.training.schedules import Drop, Halving, Horizon, OneCycle


@dataclass(frozen=True)
class Data:
    """The samples of a recipe, and the view through which the model sees them.

    With `validation`, training leaves the test samples alone: the last `validation` training samples are held out, and
    are the ones that are scored while training, by which `patience` stops, and by which settings should be chosen.
    """

    train: int  # the first so many samples of the dataset
    test: int  # the last so many
    validation: int = 0  # the last so many of the training samples, held out; 0: the test samples are scored
    limit: int | None = None  # train on the first so many training samples alone; dataset and test samples stay
    seed: int = 0
    view: View = View()
    storage: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.train < 1 or self.test < 1:
            raise InputError("at least one training and one test sample", f"{self.train} and {self.test}")
        if not 0 <= self.validation < self.train:
            raise InputError(
                f"`data.validation` from 0 to {self.train - 1}",
                str(self.validation),
                f"At least one of the {self.train:,} training samples must be left to train on",
            )
        if self.limit is not None and not 1 <= self.limit <= self.train - self.validation:
            raise InputError(
                f"`data.limit` from 1 to {self.train - self.validation}, the training samples there are",
                str(self.limit),
                "Leave it out to train on all of them",
            )

    @property
    def trained_on(self) -> int:
        """The number of samples that training sees."""
        return self.limit or self.train - self.validation

    @property
    def scored(self) -> Literal["test", "validation"]:
        """The split that is scored while training."""
        return "validation" if self.validation else "test"


@dataclass(frozen=True)
class Training:
    """The settings by which the weights are trained."""

    steps: int
    batch: int = 16
    accumulate: int = 1  # equal slices in which the batch of a rank is done one after the other, to save memory
    optimizer: Optimizer = Optimizer(kind="muon", clip=(("all", 1.0),))
    schedule: OneCycle | Halving = OneCycle(warmup=0.2, start=1e2, end=1e2)
    loss: Loss = Loss()
    horizon: Horizon | None = None
    windows: bool = False  # while the horizon is short, begin each sample at a random frame
    noise: float = 0.0  # on the input values, in units of the operator's input scale
    drop: Drop | None = None
    queries: float = 1.0  # the share of the query points, drawn at random, that a step predicts
    augment: bool = False  # a random exact symmetry of the problem for each sample
    ema: float | None = None  # decay of the running average of the weights, which is then what is saved
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    log_every: int = 50
    patience: int | None = None  # stop after so many evaluations without a better one; None: never
    seed: int = 1
    precision: Precision = "float32"  # of products on a GPU; a CPU computes in float32 with any of them
    compile: bool | None = None  # the model, for each shape it meets; None: on a GPU yes, on a CPU no
    capture: bool | None = None  # whole steps as CUDA graphs, one for each shape; None: on a GPU yes, on a CPU no
    # Activation checkpointing: store the inputs of blocks and steps, recompute the rest in the backward pass.
    recompute: bool = False
    chunk: int | None = None  # points of a batch in the model at once: samples of any size, in more time

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "evaluate_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"`training.{name}` of at least 1", str(getattr(self, name)))
        if not 0 < self.queries <= 1:
            raise InputError("`training.queries`, a share above 0 and at most 1", str(self.queries))
        if self.queries < 1 and self.loss.derivative:
            raise InputError(
                "all query points for a loss with derivatives, which need neighbors",
                f"training.queries {self.queries:g}",
                "Set training.queries to 1, or training.loss.derivative to 0",
            )
        autocast_of(self.precision)  # which refuses an unknown one
        if self.chunk is not None and not (isinstance(self.chunk, int) and self.chunk >= 1):
            raise InputError(
                "a whole number for training.chunk", str(self.chunk), "Leave it out for all points at once"
            )
        for name in ("compile", "capture", "recompute"):
            if self.chunk is not None and getattr(self, name):
                raise InputError(
                    f"no training.{name} with training.chunk, which runs the model on pieces, and again to go back",
                    "both",
                    f"Leave training.{name} off",
                )


@dataclass(frozen=True)
class Start:
    """The trained operator whose weights a training starts from (`training/start.py`)."""

    name: str
    step: int  # how long it was trained
    checksum: str  # SHA-256 of its weights


@dataclass(frozen=True)
class Recipe:
    """A named experiment: data, model, training and normalization."""

    name: str
    data: Data
    model: ModelConfig
    training: Training
    normalization: Normalization = Normalization()
    # None: no generator; give data of your own with --data
    problem: Problem | None = None
    spec: Spec | None = None  # of the data, where no problem states it
    paper: str = ""  # the row of the paper, and its error
    start: Start | None = None  # None: seeded weights; set by `train(..., start=...)` and `oformer train --from`

    def __post_init__(self) -> None:
        if self.training.augment and self.problem is None:
            raise InputError("a problem whose symmetries are known for training.augment", "data alone", "Leave it off")
        if self.training.windows:
            if self.problem is None or not self.problem.autonomous:
                raise InputError(
                    "a problem that may begin at any frame (Problem.autonomous) for training.windows",
                    "data alone" if self.problem is None else self.problem.name,
                    "Leave it off",
                )
            if self.training.horizon is None:
                raise InputError(
                    "a horizon that begins shorter than the sequences, for training.windows to have room",
                    "none",
                    "Set training.horizon, or leave training.windows off",
                )

    def data_spec(self) -> Spec:
        """The shape of the data under the recipe's view."""
        if self.problem is not None:
            return self.data.view.apply_to_spec(self.problem.spec)
        if self.spec is None:
            raise InputError(
                f"a problem or a spec in recipe `{self.name}`",
                "neither",
                "Train it from a dataset with --data",
            )
        return self.spec

    def describe(self) -> str:
        """Steps, batch and numbers of samples in one line, for lists of recipes."""
        t, data = self.training, self.data
        held_out = f" ({data.validation:,} held out)" if data.validation else ""
        limited = f"{data.limit:,} of " if data.limit else ""
        return f"{t.steps:,} steps of {t.batch}, {limited}{data.train:,}{held_out} + {data.test:,} samples"
