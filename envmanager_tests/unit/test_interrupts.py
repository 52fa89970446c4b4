"""When a Ctrl-C is raised."""

from __future__ import annotations

import signal
import threading

import pytest

from envmanager.system.interrupts import allow_interrupts, defer_interrupts


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_held_block_is_raised_at_its_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with defer_interrupts():
            interrupt()
            done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_only_the_outermost_block_lets_go() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with defer_interrupts():
            with defer_interrupts():
                interrupt()
            done.append("after the inner block")
    assert done == ["after the inner block"]


def test_a_wait_inside_is_interrupted_at_once_and_then_held_again() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with defer_interrupts():
            try:
                with allow_interrupts():
                    interrupt()
                    done.append("never")
            finally:
                done.append("in order")
    assert done == ["in order"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_wait_is_raised_when_it_begins() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with defer_interrupts():
            interrupt()
            with allow_interrupts():
                done.append("never")
    assert done == []


def test_the_users_own_handler_is_called_and_stays() -> None:
    called = []
    before = signal.signal(signal.SIGINT, lambda *_: called.append("user's"))
    try:
        own = signal.getsignal(signal.SIGINT)
        with defer_interrupts():
            interrupt()
            assert called == []
        assert called == ["user's"]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_interrupts():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_use_it_and_changes_nothing() -> None:
    done = []

    def use() -> None:
        with defer_interrupts(), allow_interrupts():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


@pytest.mark.parametrize("comes", ["before", "inside"])
def test_after_one_interrupt_was_let_through_the_next_waits_for_the_end(comes: str) -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_interrupts():  # noqa: PT012
        if comes == "before":
            interrupt()
        try:
            with allow_interrupts():
                interrupt()
        except KeyboardInterrupt:
            interrupt()
            seen.append("whole")

    assert seen == ["whole"]
