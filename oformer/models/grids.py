"""The base of models that read values on a regular grid and answer there, alone."""

import math

import torch
from torch import Tensor

from oformer.errors import InputError
from oformer.fields import Field
from oformer.meshes.grids import grid_sizes
from oformer.models.base import OperatorModel
from oformer.nn.rotary import expanded


class GridModel(OperatorModel):
    """Points are a regular grid row by row, the last axis fastest, of any resolution; queries are the same points."""

    @property
    def needs_grid(self) -> bool:
        """Yes."""
        return True

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

    def check_queries(self, input: Field, query: Field) -> None:
        """Refuse queries that are not the points of the input, as far as it can be seen without stalling a GPU."""
        here = query.coords is input.coords or query.coords.shape == input.coords.shape
        if here and query.coords is not input.coords and query.coords.device.type == "cpu":
            here = torch.compiler.is_compiling() or torch.equal(query.coords, input.coords)
        if not here:
            raise InputError(
                f"queries at the points of the input for {self.name}, which answers on the grid that it reads",
                f"{query.points:,} other points",
                "Leave the queries out; for another resolution, give the input on a grid of it",
            )

    def _measured(self, input: Field, periods: tuple[float, ...] | None) -> tuple[int, ...]:
        """Points per axis, as the coordinates have it, with a period where there is one."""
        sizes = _sizes(input.coords, input.weights, periods)
        if sizes is None:
            raise InputError(
                f"the points of a regular grid, row by row and all with weight, for {self.name}"
                + " over the whole period" * (periods is not None),
                f"{input.points:,} points that are none",
                "Give the values on such a grid, or train an OFormer, which reads any points",
            )
        return sizes


def _sizes(coords: Tensor, weights: Tensor, periods: tuple[float, ...] | None) -> tuple[int, ...] | None:
    """The grid that all samples of a batch lie on; None where there is none."""
    if bool((weights <= 0).any()):
        return None
    found = {grid_sizes(points.detach(), periods) for points in (coords[:1] if expanded(coords) else coords)}
    return found.pop() if len(found) == 1 else None
