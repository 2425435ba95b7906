"""Work queues: one job at a time, a bounded number that wait, a 503 for the rest; and one limit on memory for all.

An operator fills the processor by itself, so two answers at once would both be late. Each kind of work has one thread
and a short queue. A job whose client has left is not begun.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http import HTTPStatus
from typing import TypeVar

from oformer.playground.head import Refused

Result = TypeVar("Result")


class Busy(Refused):
    """The queue is full, or the job did not end in time; `retry` is the number of seconds after which to ask again."""

    def __init__(self, why: str, retry: int):
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, why, Retry_After=str(retry))
        self.retry = retry


class Room:
    """Memory, in bytes, that many requests share; a request with at most `small` bytes is not counted."""

    def __init__(self, size: int, small: int):
        self.size, self.small = size, small
        self._held, self._lock = 0, threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Reserve memory for one request; the end of the block releases it.

        Yields:
            A function that sets the bytes of the request. It raises `Busy` where the others leave no room.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            size = size if size > self.small else 0
            with self._lock:
                if size > held and self._held + size - held > self.size:
                    raise Busy(f"Other requests fill the {self.size:,} bytes that all large ones have together.", 1)
                self._held += size - held
                held = size

        try:
            yield hold
        finally:
            hold(0)


class WorkQueue:
    """A thread that does jobs one after another.

    Args:
        name: of the thread.
        waiting: jobs that may wait, besides the one that runs.
        seconds: the longest that a caller waits, time in the queue included.
    """

    def __init__(self, name: str, *, waiting: int, seconds: float):
        self._waiting, self._seconds = waiting, seconds
        self._thread, self._lock = ThreadPoolExecutor(1, name), threading.Lock()
        self._jobs = set[Future]()  # those that wait, and the one that runs
        self._closed: Future = Future()
        self._usual = 0.1  # seconds that a job takes, a running mean

    def do(self, job: Callable[[], Result], wanted: Callable[[], bool] = lambda: True) -> Result:
        """Run a job in the thread of the queue, and return its result or raise its error.

        Args:
            job: is called without arguments.
            wanted: called before the job is begun; the job is dropped where it returns False.

        Raises:
            Busy: the queue is full, closed, or too slow. A job that has begun goes on, and its result is dropped.
        """

        def run() -> Result:
            if not wanted():
                raise Busy("Nobody waits for this any more.", 1)
            start = time.monotonic()
            try:
                return job()
            finally:
                self._usual += 0.2 * (time.monotonic() - start - self._usual)

        with self._lock:
            if (waiting := len(self)) >= self._waiting:
                raise Busy(f"{waiting} requests are waiting, and there is no room for more.", self._retry)
            try:
                future = self._thread.submit(run)
            except RuntimeError:  # it is closed
                raise Busy("The server is stopping.", 5) from None
            self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        wait([future, self._closed], self._seconds, FIRST_COMPLETED)
        if future.done() and not future.cancelled():
            return future.result()
        future.cancel()
        if self._closed.done():
            raise Busy("The server is stopping.", 5)
        raise Busy(f"This took longer than {self._seconds:g} seconds. Ask for fewer points.", self._retry)

    @property
    def _retry(self) -> int:
        """Seconds in which the queue will be empty, at least one."""
        return max(1, math.ceil(len(self) * self._usual))

    def __len__(self) -> int:
        return sum(not job.running() for job in tuple(self._jobs))

    def close(self, seconds: float = 0.0) -> bool:
        """Begin no further job, and refuse all callers after some time.

        Args:
            seconds: for the job that runs.

        Returns:
            Whether no job runs any more.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        running = wait(tuple(self._jobs), seconds).not_done
        if not self._closed.done():
            self._closed.set_result(None)
        return not running
