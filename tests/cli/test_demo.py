"""`oformer demo`, as the command; tests/test_demo.py runs it."""

import torch

from oformer.cli import main


def test_the_demo_takes_one_thread_whatever_torch_would_take(monkeypatch):
    from oformer import demo as module

    threads = []
    monkeypatch.setattr(module, "demo", lambda *a, **options: threads.append(torch.get_num_threads()) or 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert main(["demo"]) == 0
    finally:
        torch.set_num_threads(before)
    assert threads == [1]
