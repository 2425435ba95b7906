"""Copies between host memory and a GPU that hold up neither of them.

An ordinary copy makes both wait: the driver takes host memory through a small buffer of its own in one thread, and an
answer meets memory that the system has yet to hand out, page after page. Here pieces pass through page-locked buffers,
which the card reads and writes by itself and all cores fill or empty. An answer is taken out of its buffer when that is
needed again, or at the end, so that the card computes the next one meanwhile.
"""

from collections import deque
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field
from oformer.nn.rotary import once_per_grid

PIECE = 2**22  # numbers in a buffer
BUFFERS = 8  # at most: together they hold the answers of one chunk while the next is computed
WORTHWHILE = 2**18  # numbers of a tensor; for fewer an ordinary copy is as good


class Ferry:
    """Takes fields to a device, and answers from there to wherever they are wanted. Not for several threads."""

    def __init__(
        self, device: torch.device, *, piece: int = PIECE, buffers: int = BUFFERS, worthwhile: int = WORTHWHILE
    ):
        """Make none of the buffers yet.

        Args:
            device: the other shore.
            piece: numbers in a buffer.
            buffers: how many of them at most.
            worthwhile: numbers of a tensor from which on it goes by buffers.
        """
        self.device, self.piece, self.buffers, self.worthwhile = device, piece, buffers, worthwhile
        self.locked = device.type == "cuda"  # whether buffers are, so that the card copies by itself
        self.used = self.locked  # whether anything goes by them
        self._free: list[Tensor] = []
        self._made = 0
        # Under way: when the card is done, the buffer, the numbers in it, and where these belong if not on the device.
        self._crossing: deque[tuple[torch.cuda.Event | None, Tensor, Tensor, Tensor | None]] = deque()

    def over(self, field: Field) -> Field:
        """The field on the device; what a batch shares stays one tensor."""
        return Field(*(once_per_grid(self._over, t) for t in (field.coords, field.values, field.weights)))

    def back(
        self, values: Float[Tensor, "batch times some channels"], place: Float[Tensor, "batch times some channels"]
    ) -> None:
        """Put values of the device into a place, some queries of a larger tensor, which has them after `land`."""
        if not self._by_buffer(place):
            place.copy_(values)
            return
        frames = place.shape[:2].numel()
        for source, target in _pieces(values.reshape(frames, -1), place.view(frames, -1), self.piece):
            buffer, held = self._buffer(source)
            held.copy_(source, non_blocking=True)
            self._crossing.append((self._mark(), buffer, held, target))

    def land(self) -> None:
        """Wait until all answers are in their places."""
        while self._crossing:
            self._land_first()

    def _over(self, tensor: Tensor) -> Tensor:
        if not self._by_buffer(tensor):
            return tensor.to(self.device)
        # The points of a chunk are not contiguous in all frames together, but in each of them.
        rows = 1 if tensor.is_contiguous() else tensor.shape[:-2].numel()
        result = torch.empty(tensor.shape, device=self.device)
        for source, target in _pieces(tensor.reshape(rows, -1), result.view(rows, -1), self.piece):
            buffer, held = self._buffer(source)
            held.copy_(source)
            target.copy_(held, non_blocking=True)
            self._crossing.append((self._mark(), buffer, held, None))
        return result

    def _by_buffer(self, on_host: Tensor) -> bool:
        return (
            self.used
            and on_host.device.type == "cpu"
            and on_host.dtype == torch.float32
            and on_host.numel() >= self.worthwhile
        )

    def _buffer(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer that nothing is under way in, and as much of it as a piece needs."""
        if not self._free and self._made < self.buffers:
            self._made += 1
            self._free.append(torch.empty(self.piece, pin_memory=self.locked))
        while not self._free:
            self._land_first()
        buffer = self._free.pop()
        return buffer, buffer[: piece.numel()].view(piece.shape)

    def _mark(self) -> torch.cuda.Event | None:
        if not self.locked:
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def _land_first(self) -> None:
        mark, buffer, held, place = self._crossing.popleft()
        if mark is not None:
            mark.synchronize()
        if place is not None:
            place.copy_(held)
        self._free.append(buffer)


def _pieces(
    source: Float[Tensor, "rows columns"], target: Float[Tensor, "rows columns"], most: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut alike into pieces of at most so many numbers: several rows, or a part of one."""
    rows, columns = source.shape
    wide = min(columns, most)
    high = most // wide
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            piece = slice(top, top + high), slice(left, left + wide)
            yield source[piece], target[piece]
