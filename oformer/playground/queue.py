"""One work queue for each kind of work, and one limit on memory for all requests.

An operator fills the processor by itself, so two answers at once would both be late. Each queue has one thread and a
bounded length. A job whose caller is cancelled is not begun; jobs of one key are done together.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

TOGETHER = 8  # jobs of one key

Question = TypeVar("Question")
Result = TypeVar("Result")


def busy(why: str, retry: int = 1) -> HTTPException:
    """An answer 503, with the number of seconds after which to ask again."""
    return HTTPException(503, why, {"Retry-After": str(retry)})


class Room:
    """Memory, in bytes, that many requests share; a request with at most `small` bytes is not counted."""

    def __init__(self, size: int, small: int):
        self.size, self.small, self.held = size, small, 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that sets the bytes of one request, or answers 503 where the others leave no room."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            size = size if size > self.small else 0
            if size > held and self.held + size - held > self.size:
                raise busy(f"Other requests fill the {self.size:,} bytes that all large ones have together.")
            self.held, held = self.held + size - held, size

        try:
            yield hold
        finally:
            hold(0)


class WorkQueue:
    """A thread that does jobs one after another.

    Args:
        name: of the thread.
        waiting: jobs that may wait, besides those that run.
        seconds: the longest that a caller waits, time in the queue included.
    """

    def __init__(self, name: str, *, waiting: int, seconds: float):
        self._most, self._seconds = waiting, seconds
        self._thread = ThreadPoolExecutor(1, name)
        self._jobs = dict[Future, tuple[Callable[[list[Any]], Sequence[Any]], Any, Hashable]]()  # those that wait
        self._usual = 0.1  # seconds that a job takes, a running mean
        self.running = 0

    async def do(
        self, work: Callable[[list[Question]], Sequence[Result | Exception]], question: Question, key: Hashable = None
    ) -> Result:
        """Have a question answered in the thread of the queue.

        Args:
            work: answers some questions, each with a result or an error.
            question: one of them.
            key: waiting questions of one key are answered together; those without a key one by one.
        """
        retry = max(1, math.ceil(len(self) * self._usual))
        if len(self) >= self._most:
            raise busy(f"{len(self)} requests are waiting, and there is no room for more.", retry)
        future = Future[Result]()
        self._jobs[future] = work, question, key
        try:
            self._thread.submit(self._next)
        except RuntimeError:  # it is closed
            raise busy("The server is stopping.", 5) from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds)
        except TimeoutError:
            raise busy(f"This took longer than {self._seconds:g} seconds. Ask for fewer points.", retry) from None
        finally:
            self._jobs.pop(future, None)

    def _next(self) -> None:
        """Do the job that has waited longest, with others of its key."""
        waiting = list(self._jobs.items())
        alike = [entry for entry in waiting if entry[1][2] is not None and entry[1][2] == waiting[0][1][2]]
        jobs = [(future, job) for future, job in alike[:TOGETHER] or waiting[:1] if self._jobs.pop(future, None)]
        jobs = [(future, job) for future, job in jobs if future.set_running_or_notify_cancel()]
        if not jobs:
            return
        start, self.running = time.monotonic(), len(jobs)
        try:
            results = jobs[0][1][0]([question for _, (_, question, _) in jobs])
        except Exception as error:
            results = [error] * len(jobs)
        self._usual += 0.2 * ((time.monotonic() - start) / len(jobs) - self._usual)
        self.running = 0
        for (future, _), result in zip(jobs, results, strict=True):
            future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    def __len__(self) -> int:
        return len(self._jobs)

    def close(self) -> None:
        """Begin no further job; one that runs goes on, as `running` says."""
        self._thread.shutdown(wait=False, cancel_futures=True)
