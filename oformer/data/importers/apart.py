"""Foreign files are read in a child process, with limits on its memory and time: what ends it is a sentence here.

scipy, h5py, meshio and torch trust the files they read. A wrong byte makes them crash, loop or ask for all memory.
"""

import atexit
import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oformer.errors import InputError
from oformer.files import check_regular, spare_memory

SECONDS = 60.0  # for any request, and one more for each
BYTES_A_SECOND = 1e6  # of the file and of what is read from it: a tenth of what the slowest disks and readers manage
_CHILD = Path(__file__).with_name("child.py")
_THREADS = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
UNREAD = (
    "It is damaged or cut short, so copy it again; or it uses something that is not supported, so save it anew in a "
    "plainer form"
)


def unreadable(path: Path, what: str, reason: str) -> InputError:
    """The sentence for a file that a reader cannot read: it may be a good file of a kind that the reader lacks."""
    return InputError(f"{what} in {path}", f"something that cannot be read ({reason})", UNREAD)


class _Idle(Exception):
    """The child ended itself, as it had nothing to do."""


class Reader:
    """A child process that answers requests one after another."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        paths = os.pathsep.join(place or os.getcwd() for place in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_THREADS, "PYTHONPATH": paths},
        )

    @property
    def is_there(self) -> bool:
        """Whether it can be asked: a fork of the process that started it has to start its own."""
        return self.owner == os.getpid() and self.process.poll() is None

    def end(self) -> None:
        """End the child and close its pipes."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not yet sent has no reader any more
                    pipe.close()

    def ask(
        self, path: Path, operation: str, *arguments: Any, what: str = "arrays", expected: float = 0, mapped: int = 0
    ) -> Any:
        """The result of an operation of `child.py`.

        Args:
            path: the file that is read, for the sentence and the limits.
            operation: its name.
            arguments: of the operation.
            what: what the file should hold.
            expected: how many bytes the result has, as far as the caller knows.
            mapped: bytes of the file that take addresses but no memory.
        """
        check_regular(path)
        spare = spare_memory()
        size = path.stat().st_size if path.exists() else 0
        seconds = SECONDS + (size + expected) / BYTES_A_SECOND
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.process.kill()

        # A clock kills the child that does not answer; its pipe then ends.
        clock = threading.Timer(min(seconds, threading.TIMEOUT_MAX), stop)
        clock.daemon = True
        with self._lock:
            clock.start()
            try:
                done, result = self._exchange((operation, arguments, spare + mapped, os.getcwd()))
            except (OSError, EOFError, pickle.UnpicklingError):
                self.end()
                if self.process.returncode == 0:
                    raise _Idle from None
                raise unreadable(path, what, _death(self.process.returncode, seconds, late.is_set())) from None
            except BaseException:  # Ctrl-C: the answer would come as that of the next request
                self.end()
                raise
            finally:
                clock.cancel()
        # What the child refused is raised here, in its words.
        if done:
            return result
        kind, words = result
        if kind == "InputError":
            raise InputError(*words)
        if "MemoryError" in kind or "DefaultCPUAllocator" in words[0]:
            raise too_large(path, what)
        raise unreadable(path, what, f"{kind}: {words[0]}")

    def _exchange(self, request: tuple[Any, ...]) -> tuple[bool, Any]:
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        pickle.dump(request, requests)
        requests.flush()
        return pickle.load(answers)


def too_large(path: Path, what: str) -> InputError:
    """The sentence for a file that asks for more memory than there is to spare."""
    spare = spare_memory()
    room = "" if math.isinf(spare) else f": {spare / 2**30:.2g} GiB"
    return InputError(
        f"{what} in {path} that can be read in half of the memory that is free{room}",
        "more",
        "Keep it in several files, or import it where there is more memory; if it should be small, it is damaged",
    )


def _death(code: int | None, seconds: float, late: bool) -> str:
    if late:
        return f"nothing within {seconds:.0f} seconds"
    if code == -getattr(signal, "SIGKILL", 0):
        return "the system ended the reader, most often for lack of memory"
    if code is not None and code < 0:
        return f"the reader crashed with {signal.Signals(-code).name}"
    return f"the reader ended with code {code}"


_readers: list[Reader] = []
_starting = threading.Lock()


def reader() -> Reader:
    """The child process of this process, started where there is none."""
    with _starting:
        if not _readers or not _readers[0].is_there:
            end_reader()
            _readers.append(Reader())
        return _readers[0]


@atexit.register
def end_reader() -> None:
    """End the child process, if there is one."""
    while _readers:
        _readers.pop().end()


def ask(path: Path, operation: str, *arguments: Any, **limits: Any) -> Any:
    """`Reader.ask` of the child process of this process."""
    try:
        return reader().ask(path, operation, *arguments, **limits)
    except _Idle:  # between our look whether it is there and the request
        return reader().ask(path, operation, *arguments, **limits)


@contextlib.contextmanager
def kept_open(path: Path, operation: str, *, mapped: int = 0) -> Iterator[Any]:
    """A file that stays open in the child for several requests: what opening it returned.

    Args:
        path: the file.
        operation: what opens it, and returns a handle, alone or first of several.
        mapped: bytes of the file that take addresses but no memory.
    """
    opened = ask(path, operation, str(path), mapped=mapped)
    try:
        yield opened
    finally:
        if _readers and _readers[0].is_there:
            ask(path, "close", opened[0] if isinstance(opened, tuple) else opened)
