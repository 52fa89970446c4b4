"""While libraries are loaded Ctrl-C leaves at once, unless somebody else decides what it does."""

from __future__ import annotations

import signal
import threading

import pytest

from envmanager.cli.loading import loading


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_handler_is_there_only_while_loading(default_handler):
    with loading():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_when_loading_fails_the_handler_goes_too(default_handler):
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, print], ids=["ignored", "default", "own"])
def test_a_handler_of_others_stays(default_handler, handler):
    signal.signal(signal.SIGINT, handler)
    with loading():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_may_load(default_handler):
    seen = []

    def load():
        with loading():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
