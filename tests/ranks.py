"""Two processes that compute together, started once for the tests of a file: starting them is what takes time."""

import contextlib
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60  # seconds for one call, on a busy machine


def _serve(rank: int, world: int, meeting: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    while (task := pickle.loads(connection.recv_bytes())) is not None:
        function, arguments = task
        try:
            answer = function(rank, *arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


class Pair:
    """Call it with a function of a test module and its arguments: both processes do it, each with its rank first."""

    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, 2, str(folder / "meeting"), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                raise TimeoutError(f"Rank {rank} gave no answer: the ranks wait for each other.")
            answers.append(pickle.loads(pipe.recv_bytes()))
        for _, problem in answers:
            if problem is not None:
                raise RuntimeError(problem)
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Two processes for a while."""
    both = Pair(folder)
    try:
        yield both
    finally:
        both.close()
