"""Signals are noted within the block alone, and a second Ctrl-C is not."""

import signal
import threading

import pytest

from oformer.training.signals import REQUESTS, stop_signals


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.startswith("SIG") and hasattr(signal, name)])
def test_a_signal_is_noted_and_the_handlers_before_come_back(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_signals() as arrived:
        assert arrived.name is None
        signal.raise_signal(number)
        assert arrived.name == name
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_stops_at_once():
    with stop_signals() as arrived:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert arrived.name == "SIGINT"


def test_another_thread_listens_to_no_signals():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with stop_signals() as arrived:
            seen.append((arrived.name, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
