"""When a Ctrl-C is raised."""

from __future__ import annotations

import signal
import threading

import pytest

from envmanager.system.interrupts import held, let_through


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_held_block_is_raised_at_its_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with held():
            interrupt()
            done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_the_outermost_block_lets_go() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with held():
            with held():
                interrupt()
            done.append("after the inner block")
    assert done == ["after the inner block"]


def test_a_wait_inside_is_interrupted_at_once_and_then_held_again() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with held():
            try:
                with let_through():
                    interrupt()
                    done.append("never")
            finally:
                done.append("in order")
    assert done == ["in order"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_wait_is_raised_when_it_begins() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with held():
            interrupt()
            with let_through():
                done.append("never")
    assert done == []


def test_the_users_own_handler_is_called_and_stays() -> None:
    called = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append("user's"))
    try:
        own = signal.getsignal(signal.SIGINT)
        with held():
            interrupt()
            assert called == []
        assert called == ["user's"]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_use_it_and_changes_nothing() -> None:
    done = []

    def use() -> None:
        with held(), let_through():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


@pytest.mark.parametrize("comes", ["before", "inside"])
def test_after_one_interrupt_was_let_through_the_next_waits_for_the_end(comes: str) -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012
        if comes == "before":
            interrupt()
        try:
            with let_through():
                interrupt()
        except KeyboardInterrupt:
            interrupt()
            seen.append("whole")

    assert seen == ["whole"]
