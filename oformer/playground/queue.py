"""Work queues: one job at a time, a few that wait, a clear refusal of the rest; and memory with a limit of its own.

Many requests may come at once, but an operator fills the processor by itself: answering two together makes both late.
So each kind of work has one thread and a short queue. A job that nobody waits for any more is not begun.
"""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


class Busy(Exception):
    """The queue is full, or the job did not end in time."""

    def __init__(self, why: str, retry: int):
        """Say so.

        Args:
            why: a sentence.
            retry: seconds after which to ask again.
        """
        super().__init__(why)
        self.retry = retry


@dataclass
class _Ticket:
    job: Callable[[], Any]
    wanted: Callable[[], bool]
    until: float
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Room:
    """Bytes of memory that many requests share."""

    def __init__(self, size: int, small: int):
        """All of it is free.

        Args:
            size: bytes.
            small: bytes of a part that is not counted, so that small requests are answered beside any large ones.
        """
        self.size, self.small = size, small
        self._held, self._lock = 0, threading.Lock()

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """The part of one request, given back when the block ends.

        Yields:
            Called with the bytes that the request holds from now on, in place of those that it held before.

        Raises:
            Busy: the others leave no room for them.
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
    """A thread that does jobs one after another."""

    def __init__(self, name: str, *, waiting: int, seconds: float):
        """Start the thread.

        Args:
            name: of the thread.
            waiting: jobs that may wait, besides the one that runs.
            seconds: the most that a caller waits, time in the queue included.
        """
        self.waiting, self.seconds = waiting, seconds
        self._tickets: deque[_Ticket] = deque()
        self._changed = threading.Condition()
        self._open = True
        self._running: _Ticket | None = None
        self._usual = 0.1  # seconds that a job takes, a running mean
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], Result], wanted: Callable[[], bool] = lambda: True) -> Result:
        """The result of a job, or the error that it raised.

        Args:
            job: runs in the thread of the queue.
            wanted: asked before the job is begun; nothing is done for someone who has left.

        Raises:
            Busy: the queue is full, closed, or too slow. A job that has begun is finished for nobody.
        """
        ticket = _Ticket(job, wanted, time.monotonic() + self.seconds)
        with self._changed:
            if not self._open:
                raise Busy("The server is stopping.", 5)
            if len(self._tickets) >= self.waiting:
                raise Busy(f"{len(self._tickets)} requests are waiting, and there is no room for more.", self.retry)
            self._tickets.append(ticket)
            self._changed.notify()
        if not ticket.done.wait(self.seconds):
            raise Busy(f"This took longer than {self.seconds:g} seconds. Ask for fewer points.", self.retry)
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    @property
    def retry(self) -> int:
        """Seconds in which the queue will be empty, at least one."""
        return max(1, math.ceil(len(self._tickets) * self._usual))

    def __len__(self) -> int:
        return len(self._tickets)

    def close(self, seconds: float = 0.0) -> bool:
        """Take no more; those who wait are told at once, and the one whose job runs when the time is over.

        Args:
            seconds: to wait for the job that runs.

        Returns:
            Whether none runs any more.
        """
        with self._changed:
            self._open = False
            waiting = [*self._tickets]
            self._tickets.clear()
            self._changed.notify()
        for ticket in waiting:
            _send_away(ticket)
        self._thread.join(seconds)
        if (running := self._running) is not None:
            _send_away(running)
        return not self._thread.is_alive()

    def _next(self) -> _Ticket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tickets or not self._open)
            self._running = self._tickets.popleft() if self._tickets else None
            return self._running

    def _work(self) -> None:
        while (ticket := self._next()) is not None:
            start = time.monotonic()
            if start >= ticket.until or not ticket.wanted():
                ticket.error = Busy("Nobody waits for this any more.", 1)
            else:
                try:
                    ticket.result = ticket.job()
                except BaseException as error:  # it belongs to whoever asked, not to this thread
                    ticket.error = error
                self._usual += 0.2 * (time.monotonic() - start - self._usual)
            ticket.done.set()


def _send_away(ticket: _Ticket) -> None:
    ticket.error = Busy("The server is stopping.", 5)
    ticket.done.set()
