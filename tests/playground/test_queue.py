"""The queue: in order, bounded, and honest to those it turns away."""

import contextlib
import threading
import time

import pytest

from oformer.playground.queue import Busy, WorkQueue


@pytest.fixture
def queue():
    queue = WorkQueue("test", waiting=2, seconds=5.0)
    yield queue
    queue.close()


def occupied(queue: WorkQueue) -> threading.Event:
    """Give the queue a job that ends when told to, and wait until it has begun."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with contextlib.suppress(Busy):
            queue.do(lambda: (begun.set(), end.wait(60)))

    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(60)
    return end


def test_a_job_gives_its_result_or_its_error(queue):
    assert queue.do(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        queue.do(lambda: 1 / 0)
    assert queue.do(lambda: threading.current_thread().name).startswith("test")


def test_a_full_queue_says_so_at_once(queue):
    end = occupied(queue)
    waiting = [threading.Thread(target=lambda: queue.do(lambda: None)) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while len(queue) < 2:
        time.sleep(0.01)
    start = time.monotonic()
    with pytest.raises(Busy, match="no room") as refused:
        queue.do(lambda: None)
    assert refused.value.retry >= 1
    assert time.monotonic() - start < 1
    end.set()
    for thread in waiting:
        thread.join(60)
    assert queue.do(lambda: "again") == "again"


def test_what_took_too_long_or_is_not_wanted_is_not_begun():
    queue = WorkQueue("hasty", waiting=2, seconds=0.2)
    end, done = occupied(queue), []
    with pytest.raises(Busy, match="longer than"):
        queue.do(lambda: done.append("late"))
    end.set()
    with pytest.raises(Busy, match="Nobody"):
        queue.do(lambda: done.append("unwanted"), wanted=lambda: False)
    assert queue.do(lambda: "next") == "next"
    assert not done
    queue.close()


def test_a_closed_queue_sends_everybody_away(queue):
    end = occupied(queue)
    outcome = []

    def wait() -> None:
        try:
            queue.do(lambda: None)
        except Busy as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not len(queue):
        time.sleep(0.01)
    queue.close()
    end.set()
    thread.join(60)
    assert "stopping" in outcome[0]
    with pytest.raises(Busy, match="stopping"):
        queue.do(lambda: None)
