"""The bases of models that read values on a regular grid and answer there, alone."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import grid_sizes
from oformer.models.base import OperatorModel
from oformer.nn.feedforward import in_full
from oformer.nn.shared_grids import expanded


class GridModel(OperatorModel):
    """Points are a regular grid row by row, the last axis fastest, of any resolution; queries are the same points."""

    @property
    def needs_grid(self) -> bool:
        """Yes."""
        return True

    @property
    def answers_anywhere(self) -> bool:
        """No."""
        return False

    def refuse_problem(self, why: str, marching: str | None) -> None:
        """Refuse the problems of which this model cannot be built, when its spec is set.

        Args:
            why: the part of the sentence that says what it needs a grid for.
            marching: what to do where its answer, its next input, has other channels; None: it does not march.
        """
        spec = self.spec
        if spec.grid is None:
            raise InputError(
                f"a problem on a regular grid for {self.name}, {why}",
                "scattered points",
                "Train an OFormer, or say what grid the points form: PointDataset.from_arrays(..., grid=(64, 64))",
            )
        if spec.in_categories or spec.query_channels:
            raise InputError(
                f"values alone at the points of a problem for {self.name}",
                f"{spec.in_categories} categories in the input and {spec.query_channels} query features",
                "Train an OFormer",
            )
        if spec.out_times > 1 and marching and spec.in_channels != spec.out_channels:
            raise InputError(
                f"an answer with the channels of the input for {self.name} that marches on its own frames",
                f"{spec.in_channels} channels in, {spec.out_channels} out",
                marching,
            )

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that are no regular grid, and queries elsewhere."""
        self._measured(input, self.spec.periods)
        self.check_queries(input, query)

    def grid_of(self, input: Field) -> tuple[int, ...]:
        """Points per axis of a field; of the grid of training they are known, where a look would stall a GPU."""
        known, on_cpu = self.spec.grid, input.coords.device.type == "cpu"
        if known is not None and input.points == math.prod(known) and (torch.compiler.is_compiling() or not on_cpu):
            return known
        return self._measured(input, None)

    def _measured(self, input: Field, periods: tuple[float, ...] | None) -> tuple[int, ...]:
        """Points per axis, as the coordinates have it, with a period where there is one."""
        if torch.is_grad_enabled() and input.coords.requires_grad:
            raise InputError(
                f"coordinates without gradients for {self.name}, which reads values by their place in the grid",
                "some with requires_grad=True",
                "Give coords.detach(); an OFormer has derivatives by coordinates",
            )
        sizes = _sizes(input.coords, input.weights, periods)
        if sizes is None:
            raise InputError(
                f"the points of a regular grid, row by row and all with weight, for {self.name}"
                + " over the whole period" * (periods is not None),
                f"{input.points:,} points that are none",
                "Give the values on such a grid, or train an OFormer, which reads any points",
            )
        return sizes


class LayeredGridModel(GridModel):
    """Values are lifted to latents on a padded grid, changed by layers, and read by two linear layers.

    A problem in time is marched, one frame from the latest frames and so on, or is a block: all frames at once, with
    time as one more axis of the grid. A model sets the attributes below and gives `transformed`, `activated` and
    `padded`; its configuration has `coords` and `batch_norm`.
    """

    lift: nn.Linear
    layers: nn.ModuleList
    hidden: nn.Linear
    values: nn.Linear

    def __init__(self, config: Any, spec: Spec, why: str):
        """Refuse other problems; the layers are built by the model.

        Args:
            config: of the model.
            spec: of the problem.
            why: the part of a sentence that says what the model needs a grid for.
        """
        super().__init__()
        self.config, self.spec = config, spec
        self.refuse_problem(why, 'Set time to "block"' if config.time == "march" else None)
        self.block = config.time == "block" and spec.out_times > 1  # time is one more axis of the grid
        places = (spec.dim + self.block) if config.coords else 0
        self.features = spec.in_times * spec.in_channels + places  # that are lifted, at each point

    def transformed(self, v: Float[Tensor, "batch *grid width"]) -> Float[Tensor, "batch *grid width"]:
        """Latents behind the layers, on the same padded grid."""
        raise NotImplementedError

    def activated(self, hidden: Tensor) -> Tensor:
        """The activation between the two layers that make values."""
        raise NotImplementedError

    def padded(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Points along each axis of the padded grid, time last where it is an axis; some grids are refused."""
        raise NotImplementedError

    @property
    def mixes_samples(self) -> bool:
        """Whether in training the samples of a batch feel each other."""
        return self.config.batch_norm

    @property
    def frames_per_encoding(self) -> int | None:
        """One, where it marches: each answer is part of the next input."""
        return 1 if self.spec.out_times > 1 and not self.block else None

    def pieces(self) -> Sequence[nn.Module]:
        """The layers, but not with batch norms, which would count each batch twice."""
        return () if self.config.batch_norm else list(self.layers)

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters before and after the latents."""
        decoder = [*self.hidden.parameters(), *self.values.parameters()]
        return {"encoder": [*self.lift.parameters(), *self.layers.parameters()], "decoder": decoder}

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices of the layers beside those of modes, and the first of the two that make values."""
        return [p for p in [*self.layers.parameters(), self.hidden.weight] if p.ndim == 2]

    def check(self, input: Field, query: Field) -> None:
        """Refuse points that are no regular grid, a grid that `padded` refuses, and other queries."""
        super().check(input, query)
        self.padded(self.grid_of(input))

    def encode(self, input: Field) -> Float[Tensor, "batch points *times width"]:
        """Latents at the points of the grid, at all times where time is one of its axes."""
        grid = self.grid_of(input)
        padded = self.padded(grid)
        features = input.values.permute(0, 2, 1, 3).flatten(2)
        if self.config.coords:
            features = torch.cat([features, input.coords.to(features.dtype)], -1)
        if self.block:
            features = self._over_time(features)
        v = in_full(self.lift(features)).unflatten(1, grid)
        sizes = v.shape[1:-1]
        behind = [more - points for more, points in zip(padded, sizes, strict=True)]
        # From the last axis, which is the channels, to the first: cells before it and cells behind it.
        v = F.pad(v, (0, 0, *(cells for count in reversed(behind) for cells in (0, count))))
        v = self.transformed(v)
        for axis, points in enumerate(sizes, 1):
            v = v.narrow(axis, 0, points)
        return v.flatten(1, self.spec.dim)

    def answer(
        self, latents: Float[Tensor, "batch points *times width"], input: Field, query: Field, times: int | None = None
    ) -> Float[Tensor, "batch _ points channels"]:
        """Values at the points of the grid: of the next frame where it marches, or of the first `times` of all."""
        self.check_queries(input, query)
        most = self.spec.out_times if self.block else 1
        times = most if times is None else times
        if times > most:
            raise InputError(
                f"at most {most} frame(s) from one encoding by {self.name}",
                f"times={times}",
                "It predicts a block of frames as long as in training" if self.block else "Call the Operator around it",
            )
        values = self.values(self.activated(self.hidden(latents)))
        return values.movedim(2, 1)[:, :times] if self.block else values.unsqueeze(1)

    def _over_time(self, features: Float[Tensor, "batch points numbers"]) -> Float[Tensor, "batch points times more"]:
        """The features of a point at each time of training, and the time as a fraction of the last."""
        times = self.spec.out_times
        features = features.unsqueeze(2).expand(-1, -1, times, -1)
        if not self.config.coords:
            return features
        time = torch.arange(1, times + 1, dtype=features.dtype, device=features.device) / times
        return torch.cat([features, time[:, None].expand(*features.shape[:-1], 1)], -1)


def _sizes(coords: Tensor, weights: Tensor, periods: tuple[float, ...] | None) -> tuple[int, ...] | None:
    """The grid that all samples of a batch lie on; None where there is none."""
    if bool((weights <= 0).any()):
        return None
    found = {grid_sizes(points.detach(), periods) for points in (coords[:1] if expanded(coords) else coords)}
    return found.pop() if len(found) == 1 else None
