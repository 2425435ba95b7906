"""Requests to stop a run: signals of the operating system, the time limit of a call, and its callback.

Ctrl-C, SIGTERM and SIGUSR1 (which schedulers send before the time limit of a job) are noted when they arrive. The
training loop reads the note at the end of a step, saves and stops.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Requests that a rank may have, the strongest last; ranks agree on the strongest by its place in this row.
REQUESTS = ("", "time", "callback", "SIGINT", "SIGUSR1", "SIGTERM")


@dataclass
class StopSignal:
    """The signal that has arrived, by name; None so far."""

    name: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Note SIGINT, SIGUSR1 and SIGTERM within the block; a second Ctrl-C raises KeyboardInterrupt at once."""
    arrived = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # only the main thread may listen to signals
        return

    def note(number: int, frame: Any) -> None:
        if arrived.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        arrived.name = signal.Signals(number).name

    # Windows has no SIGUSR1.
    numbers = [getattr(signal, name) for name in REQUESTS if name.startswith("SIG") and hasattr(signal, name)]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
