"""Two processes that compute together, started once for the tests of a file: starting them is what takes time."""

import contextlib
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import forked

IDLE = 60.0  # seconds in which neither rank computes: they wait for each other, however busy the machine is
IDLE_AFTER_ERROR = 5.0  # the same when one rank has failed, and the other may wait for it
COMPUTES = 0.1  # CPU seconds that are more than waiting takes


def _serve(rank: int, world: int, meeting: str, connection: Connection, cpu_seconds: Any) -> None:
    threading.Thread(target=_report_cpu_seconds, args=(rank, cpu_seconds), daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    while (task := pickle.loads(connection.recv_bytes())) is not None:
        call, function, arguments = task
        try:
            answer = function(rank, *arguments), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send_bytes(pickle.dumps((call, *answer)))
    dist.destroy_process_group()


def _report_cpu_seconds(rank: int, cpu_seconds: Any) -> None:
    while True:
        cpu_seconds[rank] = time.process_time()
        time.sleep(0.5)


class Pair:
    """Call it with a function of a test module and its arguments: both processes do it, each with its rank first.

    Where a rank gives no answer, that call fails, and the next one gets two new processes: what the old ones still
    send is the answer to nothing.
    """

    def __init__(self, folder: Path, idle: float = IDLE):
        self.folder, self.idle, self.calls = folder, idle, 0
        self._start()

    def _start(self) -> None:
        context = forked.context()
        self.pipes, self.processes = [], []
        self.cpu_seconds: Sequence[float] = context.RawArray("d", 2)
        for rank in range(2):
            ours, theirs = context.Pipe()
            meeting = str(self.folder / f"meeting-{self.calls}")
            process = context.Process(target=_serve, args=(rank, 2, meeting, theirs, self.cpu_seconds), daemon=True)
            process.start()
            theirs.close()  # so that ours ends where the process does
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.calls += 1
        if not self.processes:
            self._start()
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((self.calls, function, arguments)))
            answers = self._answers()
        except BaseException:  # also that of a test which is out of time
            self._kill()
            raise
        for _, problem in answers:
            if problem is not None:
                raise RuntimeError(problem)
        return [answer for answer, _ in answers]

    def _answers(self) -> list[tuple[Any, str | None]]:
        """The answer of each rank to the present call, and its error."""
        answers: dict[int, tuple[Any, str | None]] = {}
        computed, since = 0.0, time.monotonic()
        while len(answers) < len(self.pipes):
            for pipe in wait([p for rank, p in enumerate(self.pipes) if rank not in answers], timeout=0.2):
                rank = self.pipes.index(pipe)
                try:
                    call, *answer = pickle.loads(self.pipes[rank].recv_bytes())
                except EOFError:
                    raise RuntimeError(f"Rank {rank} ended.") from None
                if call == self.calls:
                    answers[rank], since = tuple(answer), time.monotonic()
            total = sum(self.cpu_seconds)
            if total > computed + COMPUTES or not all(self.cpu_seconds):  # zero: it has not begun yet
                computed, since = total, time.monotonic()
            problems = [problem for _, problem in answers.values() if problem is not None]
            if time.monotonic() - since > (min(self.idle, IDLE_AFTER_ERROR) if problems else self.idle):
                late = ", ".join(str(rank) for rank in range(len(self.pipes)) if rank not in answers)
                words = f"Rank {late} gave no answer: the ranks wait for each other."
                raise RuntimeError("\n".join([*problems, words])) if problems else TimeoutError(words)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _kill(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self.pipes, self.processes = [], []

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
        self._kill()


@contextlib.contextmanager
def pair(folder: Path, idle: float = IDLE) -> Iterator[Pair]:
    """Two processes for a while."""
    both = Pair(folder, idle)
    try:
        yield both
    finally:
        both.close()
