"""The queue: in order, bounded, and honest to those it turns away."""

import asyncio
import threading

import pytest
from starlette.exceptions import HTTPException

from oformer.playground.queue import TOGETHER, WorkQueue


def run(test):
    """A test with a queue in which a first job is at work until its event is set."""

    async def whole(**options):
        queue, begun, end = (
            WorkQueue("test", **{"waiting": 2, "seconds": 5.0, **options}),
            threading.Event(),
            threading.Event(),
        )
        first = asyncio.create_task(queue.do(lambda _: [begun.set() or end.wait(60)], None))
        await asyncio.to_thread(begun.wait, 60)
        try:
            await test(queue, end)
        finally:
            end.set()
            queue.close()
            await first

    return whole


def test_a_job_gives_its_result_or_its_error():
    async def test(queue, end):
        end.set()
        assert await queue.do(lambda _: [threading.current_thread().name], None) == "test_0"
        with pytest.raises(ZeroDivisionError):
            await queue.do(lambda _: [1 / 0], None)
        with pytest.raises(KeyError):
            await queue.do(lambda _: [KeyError(1)], None)

    asyncio.run(run(test)())


def test_a_full_queue_says_so_at_once():
    async def test(queue, end):
        waiting = [asyncio.create_task(queue.do(lambda questions: questions, i)) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="no room") as refused:
            await queue.do(lambda _: [None], None)
        assert int(refused.value.headers["Retry-After"]) >= 1
        end.set()
        assert await asyncio.gather(*waiting) == [0, 1]

    asyncio.run(run(test)())


def test_questions_of_one_key_are_answered_together_and_each_has_its_own_answer():
    async def test(queue, end):
        groups = []

        def work(questions):
            groups.append(list(questions))
            return [ValueError(q) if q == 3 else 10 * q for q in questions]

        tasks = [asyncio.create_task(queue.do(work, i, i % 2 or None)) for i in range(12)]
        await asyncio.sleep(0)
        tasks[5].cancel()  # its caller has left
        await asyncio.sleep(0.01)
        end.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert groups == [[0], [1, 3, 7, 9, 11], [2], [4], [6], [8], [10]]
        assert isinstance(answers[3], ValueError)
        assert isinstance(answers[5], asyncio.CancelledError)
        assert [a for i, a in enumerate(answers) if i not in (3, 5)] == [10 * i for i in range(12) if i not in (3, 5)]
        assert TOGETHER >= 6

    asyncio.run(run(test)(waiting=20))


def test_what_took_too_long_is_not_begun_and_a_closed_queue_sends_everybody_away():
    async def test(queue, end):
        done = []
        with pytest.raises(HTTPException, match=r"longer than 0\.1 seconds"):
            await queue.do(lambda _: done.append("late"), None)
        assert not len(queue)
        queue.close()
        with pytest.raises(HTTPException, match="stopping"):
            await queue.do(lambda _: [None], None)
        assert queue.running == 1
        end.set()
        await asyncio.sleep(0.05)
        assert not queue.running
        assert not done

    async def slow(queue, end):
        queue._seconds = 0.1
        await test(queue, end)

    asyncio.run(run(slow)())
