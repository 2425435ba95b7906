"""The two processes of tests/ranks.py: a call that fails spoils none after it."""

import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import pair


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with pair(tmp_path_factory.mktemp("meeting"), idle=3.0) as both:
        yield both


def late(rank: int, seconds: float, answer: str) -> str:
    if rank == 1:
        time.sleep(seconds)
    return f"{answer} of {rank}"


def total(rank: int) -> float:
    number = torch.tensor(float(rank + 1))
    dist.all_reduce(number)
    return float(number)


def deserter(rank: int, how: str) -> float:
    if rank == 0 and how == "fails":
        raise ValueError("this is what went wrong")
    if rank == 0 and how == "dies":
        os._exit(1)
    return total(rank)


def busy(rank: int, seconds: float) -> int:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return rank


def test_a_late_rank_fails_one_call_and_the_next_gets_its_own_answers(two):
    assert two(late, 0.0, "first") == ["first of 0", "first of 1"]
    with pytest.raises(TimeoutError, match="Rank 1 gave no answer"):
        two(late, 60.0, "second")
    assert two(late, 0.0, "third") == ["third of 0", "third of 1"]
    assert two(total) == [3.0, 3.0]


def test_an_answer_to_an_earlier_call_is_not_taken(two):
    two.pipes[1].send_bytes(pickle.dumps((two.calls, late, (0.0, "stale"))))
    assert two(late, 0.0, "own") == ["own of 0", "own of 1"]


@pytest.mark.parametrize(("how", "words"), [("fails", "this is what went wrong"), ("dies", "Rank 0 ended")])
def test_a_rank_that_leaves_the_other_waiting_is_named(two, how, words):
    with pytest.raises(RuntimeError, match=words):
        two(deserter, how)
    assert two(total) == [3.0, 3.0]


def test_a_rank_that_computes_is_not_late(two):
    assert two(busy, 4.0) == [0, 1]
