"""Grids shared by a batch: what depends on coordinates alone is computed once, not once per sample.

The samples of a batch often lie on one grid. `oformer.fields.collate` then stores its coordinates and weights once and
expands them: a view of shape (batch, points, dim) whose stride along the batch axis is 0. `expanded` recognizes such a
tensor by its stride, without comparing numbers. `once_per_grid` applies a function (angles of the rotary encoding,
normalization of coordinates, a copy to a GPU) to the one stored sample and expands the result, so that the next
function recognizes it too.
"""

from jaxtyping import Float
from torch import Tensor


def expanded(tensor: Tensor) -> bool:
    """Whether the batch axis repeats one stored sample: a grid shared by the whole batch."""
    return bool(tensor.shape[0] > 1 and tensor.stride(0) == 0)  # a tracer's sizes compare to what is no bool


def once_per_grid(function, tensor: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
    """Apply a function to a tensor; if its samples share a grid, to the one stored sample, and expand the result.

    Args:
        function: keeps the batch axis, and treats each sample alone.
        tensor: with a batch axis.
    """
    if not expanded(tensor):
        return function(tensor)
    result = function(tensor[:1])
    return result.expand(tensor.shape[0], *result.shape[1:])
