"""Processes that find torch and its compiler loaded: they are forked from one that loaded both, which takes seconds.

They begin as new ones do otherwise, and without the shape checks of the tests, which cannot be compiled.
"""

import contextlib
import io
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext


def context() -> ForkServerContext:
    """For `Process` and the like."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["torch._dynamo", "torch.distributed", "tests.engine.compiled"])
    return found


def printed(script: str) -> list[str]:
    """The lines that a script prints in a process of its own, which finds the names of `tests/engine/compiled.py`."""
    pipe, theirs = context().Pipe()
    process = context().Process(target=_print, args=(script, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        error, said = pipe.recv()
    except EOFError:
        raise RuntimeError("The process of a script ended before the script.") from None
    process.join()
    assert error is None, error
    return said.splitlines()


def _print(script: str, pipe: Connection) -> None:
    said, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            exec(f"from tests.engine.compiled import *\n{script}", {"__name__": "script"})
    except Exception:
        error = traceback.format_exc()
    pipe.send((error, said.getvalue()))
