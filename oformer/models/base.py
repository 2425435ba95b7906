"""The base of all models: the calls that each must answer, its abilities, and the march in time."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oformer.errors import InputError, unknown_name
from oformer.fields import Field, Spec

# float32: as it says; tf32: float32 with 10 bits of the factors in products; float16: products and activations with 10
# bits, and losses scaled so that gradients stay in its range; bfloat16: the same with 7 bits and the range of float32.
# Phases, statistics, norms, residuals, losses, weights and their moments are float32 under each.
Precision = Literal["float32", "tf32", "float16", "bfloat16"]
_AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def autocast_of(precision: str) -> torch.dtype | None:
    """The type that a model computes in under autocast; None where it stays in float32."""
    if precision not in get_args(Precision):
        raise unknown_name("precision", precision, get_args(Precision))
    return _AUTOCAST.get(precision)


@contextlib.contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """Products of float32 numbers as precise as is asked for; torch is as it was when the block ends."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class ModelConfig:
    """The base of all configurations of models: frozen dataclasses of plain values, stored by the name of the class."""

    def build(self, spec: Spec) -> "OperatorModel":
        """The model for a problem of the given shape."""
        raise NotImplementedError


class OperatorModel(nn.Module):
    """What a model promises: values at the queries from values at the input points, both on unit scale.

    A model must give `answer`, and set `config` and `spec`. Training, prediction, export and the playground ask the
    properties below what a model can do; their defaults promise as little as possible.
    """

    spec: Spec
    config: Any  # a ModelConfig; each model names its own

    @property
    def name(self) -> str:
        """What messages and model cards call it."""
        return type(self).__name__

    @property
    def queries_independent(self) -> bool:
        """Whether a query's answer is the same whichever other queries are asked with it."""
        return False

    @property
    def needs_grid(self) -> bool:
        """Whether it reads values on a regular grid, and answers there, alone (`models/grids.py`)."""
        return False

    @property
    def answers_anywhere(self) -> bool:
        """Whether queries may lie elsewhere than the points of the input; see `check_queries` where they may not."""
        return True

    @property
    def mixes_samples(self) -> bool:
        """Whether in training the samples of a batch feel each other, as under batch normalization."""
        return False

    @property
    def compares_pairs(self) -> bool:
        """Whether its time grows with the number of pairs of points."""
        return False

    @property
    def needs_all_points(self) -> str | None:
        """What needs all points of a sample at once, in words; None if they may pass in chunks.

        They may where points feel each other through sums that the model asks `over_points` for, and in no other way.
        """
        return self.name

    @property
    def needs_period(self) -> bool:
        """Whether it counts on coordinates that have the period of its spec."""
        return False

    @property
    def frames_per_encoding(self) -> int | None:
        """After how many frames a rollout encodes its own answer as the next input; None: it never does."""
        return None

    @property
    def linear_channels(self) -> tuple[int, ...]:
        """Input channels in which its answer is linear: these and the targets are scaled, and never shifted."""
        return ()

    def pieces(self) -> Sequence[nn.Module]:
        """The submodules whose inputs alone activation checkpointing stores; it computes the rest of them again."""
        return ()

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """Named groups of parameters that training may treat apart (clipping)."""
        return {}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices between hidden channels: no tables, and no layer that sees raw values or makes final ones."""
        return []

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that the model cannot read; fields are physical and have a batch axis."""

    def check_queries(self, input: Field, query: Field) -> None:
        """Refuse queries that are not the points of the input, as far as it can be seen without stalling a GPU.

        Points of weight zero, which are padding, may differ.
        """
        here = query.coords is input.coords or query.coords.shape == input.coords.shape
        seen = query.coords.device.type == "cpu" and not torch.compiler.is_compiling()
        if here and seen and query.coords is not input.coords:
            here = bool(((query.coords == input.coords).all(-1) | (input.weights <= 0)).all())
        if not here:
            raise InputError(
                f"queries at the points of the input for {self.name}, which answers at the points that it reads",
                f"{query.points:,} other points",
                "Leave the queries out; for answers elsewhere, give the input there",
            )

    def encode(self, input: Field) -> Tensor:
        """What is computed of the input once, however many queries follow; by default nothing but its values."""
        return input.values

    def answer(self, latents: Tensor, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values of shape (batch, times, queries, channels), from what `encode` gave.

        Args:
            latents: what `encode` made of the input.
            input: the field that was encoded, on unit scale.
            query: where to answer.
            times: frames; by default as many as in training, or `frames_per_encoding` of them.
        """
        raise NotImplementedError

    def forward(self, input: Field, query: Field, times: int | None = None) -> Tensor:
        """Values at the query points for `times` steps (the problem's own number where not given)."""
        return self.answer(self.encode(input), input, query, times)


class MarchingModel(OperatorModel):
    """A model that marches: latents at the query points at the time of the input, and one step of time.

    A model must give `start` and `step`. `march` is the one place where time advances, in training and prediction.
    """

    @property
    def steady(self) -> bool:
        """Whether it answers one frame alone."""
        return False

    def start(self, latents: Tensor, input: Field, query: Field) -> tuple[Tensor, Any]:
        """Latents at the queries before the first step, and a context that is the same at all times.

        Args:
            latents: what `encode` made of the input.
            input: the field that was encoded, on unit scale.
            query: where to answer.
        """
        raise NotImplementedError

    def step(self, z: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        """Latents one time step later, and the values (batch, queries, channels) there."""
        raise NotImplementedError

    def march(
        self, z: Tensor, context: Any, times: int, step: Callable[..., tuple[Tensor, Tensor]] | None = None
    ) -> Iterator[Float[Tensor, "batch queries channels"]]:
        """Values at one time after another; the first is one step after the input.

        Each step is decoded at once, so that without gradients no latents of earlier times are kept.

        Args:
            z: latents at the time of the input.
            context: from `start`.
            times: number of steps.
            step: `self.step` in another form, compiled or with activation checkpointing.
        """
        if times < 1 or (times > 1 and self.steady):
            wanted = "one frame of a steady problem" if self.steady else "at least one time step"
            raise InputError(wanted, f"times={times}")
        step = step or self.step
        for _ in range(times):
            z, values = step(z, context)
            yield values

    def answer(
        self, latents: Tensor, input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch times queries channels"]:
        """Values at the query points for `times` steps (the problem's own number where not given)."""
        z, context = self.start(latents, input, query)
        return torch.stack(list(self.march(z, context, self.spec.out_times if times is None else times)), 1)
