"""Copies between host memory and a GPU through page-locked (pinned) buffers.

An ordinary copy makes both sides wait: the driver stages pageable memory through a small pinned buffer in one thread,
and an answer is written to pages that the system has yet to map. Here tensors are copied piece by piece through a few
pinned buffers: the GPU copies from and to them by itself, and all cores fill or empty them. A buffer with a part of an
answer is emptied when the buffer is needed again, or by `flush`, so that the GPU computes the next part meanwhile.
"""

from collections import deque
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from oformer.fields import Field

PIECE = 2**22  # numbers in a buffer
BUFFERS = 8  # at most: together they hold the answers of one chunk while the next is computed
WORTHWHILE = 2**18  # numbers of a tensor; for fewer an ordinary copy is as fast


class PinnedCopy:
    """Copies fields to a device, and answers from there to any tensor on the host. Not thread-safe."""

    def __init__(
        self, device: torch.device, *, piece: int = PIECE, buffers: int = BUFFERS, worthwhile: int = WORTHWHILE
    ):
        """Set sizes; buffers are allocated when they are first needed.

        Args:
            device: the compute device.
            piece: numbers in a buffer.
            buffers: how many of them at most.
            worthwhile: the least numbers of a tensor that is copied through buffers.
        """
        self.device, self.piece, self.buffers, self.worthwhile = device, piece, buffers, worthwhile
        self.locked = device.type == "cuda"  # whether buffers are, so that the GPU copies asynchronously
        self.enabled = self.locked  # whether anything is copied through buffers
        self._free: list[Tensor] = []
        self._made = 0
        # Pending copies: event when the GPU is done, buffer, the numbers in it, and their destination if on the host.
        self._pending: deque[tuple[torch.cuda.Event | None, Tensor, Tensor, Tensor | None]] = deque()

    def to_device(self, field: Field) -> Field:
        """The field on the device; coordinates and weights that a batch shares are copied once."""
        return field.map(self._tensor_to_device)

    def to_host(
        self, values: Float[Tensor, "batch times some channels"], place: Float[Tensor, "batch times some channels"]
    ) -> None:
        """Copy values of the device into `place`, a slice of the queries of a larger tensor; complete after `flush`."""
        if not self._by_buffer(place):
            place.copy_(values)
            return
        frames = place.shape[:2].numel()
        for source, target in _pieces(values.reshape(frames, -1), place.view(frames, -1), self.piece):
            buffer, held = self._buffer(source)
            held.copy_(source, non_blocking=True)
            self._pending.append((self._mark(), buffer, held, target))

    def flush(self) -> None:
        """Wait until all copies to the host are complete."""
        while self._pending:
            self._complete_first()

    def _tensor_to_device(self, tensor: Tensor) -> Tensor:
        if not self._by_buffer(tensor):
            return tensor.to(self.device)
        # The points of a chunk are not contiguous in all frames together, but in each of them.
        rows = 1 if tensor.is_contiguous() else tensor.shape[:-2].numel()
        result = torch.empty(tensor.shape, device=self.device)
        for source, target in _pieces(tensor.reshape(rows, -1), result.view(rows, -1), self.piece):
            buffer, held = self._buffer(source)
            held.copy_(source)
            target.copy_(held, non_blocking=True)
            self._pending.append((self._mark(), buffer, held, None))
        return result

    def _by_buffer(self, on_host: Tensor) -> bool:
        return (
            self.enabled
            and on_host.device.type == "cpu"
            and on_host.dtype == torch.float32
            and on_host.numel() >= self.worthwhile
        )

    def _buffer(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        """A buffer without a pending copy, and a view of it in the shape of a piece."""
        if not self._free and self._made < self.buffers:
            self._made += 1
            self._free.append(torch.empty(self.piece, pin_memory=self.locked))
        while not self._free:
            self._complete_first()
        buffer = self._free.pop()
        return buffer, buffer[: piece.numel()].view(piece.shape)

    def _mark(self) -> torch.cuda.Event | None:
        if not self.locked:
            return None
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def _complete_first(self) -> None:
        mark, buffer, held, place = self._pending.popleft()
        if mark is not None:
            mark.synchronize()
        if place is not None:
            place.copy_(held)
        self._free.append(buffer)


def _pieces(
    source: Float[Tensor, "rows columns"], target: Float[Tensor, "rows columns"], most: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching pieces of both, of at most `most` numbers: several rows, or a part of one row."""
    rows, columns = source.shape
    wide = min(columns, most)
    high = most // wide
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            piece = slice(top, top + high), slice(left, left + wide)
            yield source[piece], target[piece]
