"""Work of a GPU that is recorded once and then started at one stroke, instead of kernel by kernel from Python.

What is recorded reads and writes the same memory each time, with the plain numbers of its first time: what changes must
lie in tensors that stay where they are. Random numbers are drawn anew at each replay, as without a record.
"""

from collections.abc import Callable

import torch

Work = Callable[[], None]
# Turns work into a replay of it: the same kernels on the same tensors. The number says how often to do the work first
# where it is recorded; it is 0 for work that must not be done twice, which was then done elsewhere before.
Record = Callable[[Work, int], Work]


class CudaGraphs:
    """Records CUDA graphs. They share one pool of memory: what one leaves in its tensors lasts until the next replay.

    That is safe since replays follow each other on one stream, and what outlives them lies elsewhere or is copied out.
    """

    def __init__(self, device: torch.device):
        """Prepare a stream and a pool of memory."""
        self._device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def apart(self) -> "CudaGraphs":
        """For recordings that live longer or shorter than these: a pool of its own.

        The stream is the same, since libraries of matrix products keep memory for each stream that they have seen.
        """
        other = CudaGraphs(self._device)
        other._stream = self._stream
        return other

    def __call__(self, work: Work, warm_up: int) -> Work:
        """Record work; see `Record`."""
        random = torch.cuda.get_rng_state(self._device)
        with torch.cuda.device(self._device):
            # Freed memory stays with its stream: what plain steps left would be of no use here, and taken twice. What
            # the warm-up leaves goes in the same way, by torch itself, at the start of a recording.
            torch.cuda.empty_cache()
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(warm_up):
                    work()
            here.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Only this thread is held to what a recording allows: the loader's may go on allocating and copying.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        torch.cuda.set_rng_state(random, self._device)  # as if it had not been warmed up
        return graph.replay
