"""The line: in order, bounded, and honest to those it turns away."""

import contextlib
import threading
import time

import pytest

from oformer.playground.jobs import Busy, Line


@pytest.fixture
def line():
    line = Line("test", waiting=2, seconds=5.0)
    yield line
    line.close()


def occupied(line: Line) -> threading.Event:
    """Give the line a job that ends when told to, and wait until it has begun."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with contextlib.suppress(Busy):
            line.do(lambda: (begun.set(), end.wait(5)))

    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(5)
    return end


def test_a_job_gives_its_result_or_its_error(line):
    assert line.do(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        line.do(lambda: 1 / 0)
    assert line.do(lambda: threading.current_thread().name) == "test"


def test_a_full_line_says_so_at_once(line):
    end = occupied(line)
    waiting = [threading.Thread(target=lambda: line.do(lambda: None)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while len(line) < 2:
        time.sleep(0.01)
    start = time.monotonic()
    with pytest.raises(Busy, match="no room") as refused:
        line.do(lambda: None)
    assert refused.value.retry >= 1
    assert time.monotonic() - start < 1
    end.set()
    for thread in waiting:
        thread.join(5)
    assert line.do(lambda: "again") == "again"


def test_what_took_too_long_or_is_not_wanted_is_not_begun():
    line = Line("hasty", waiting=2, seconds=0.2)
    end, done = occupied(line), []
    with pytest.raises(Busy, match="longer than"):
        line.do(lambda: done.append("late"))
    end.set()
    with pytest.raises(Busy, match="Nobody"):
        line.do(lambda: done.append("unwanted"), wanted=lambda: False)
    assert line.do(lambda: "next") == "next"
    assert not done
    line.close()


def test_a_closed_line_sends_everybody_away(line):
    end = occupied(line)
    outcome = []

    def wait() -> None:
        try:
            line.do(lambda: None)
        except Busy as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not len(line):
        time.sleep(0.01)
    line.close()
    end.set()
    thread.join(5)
    assert "stopping" in outcome[0]
    with pytest.raises(Busy, match="stopping"):
        line.do(lambda: None)
