"""Messages between a training run and its learner arrive whole and in order, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from envmanager.testing.fault_checks import returns_within
from envmanager.training.learner_process import MessagePipe
from envmanager_tests.in_a_thread import lines_of, while_held_at
from envmanager_tests.interrupting import interrupted

LARGE = np.arange(1 << 20)
"""More than a socket holds."""


@pytest.fixture
def pipes() -> Iterator[tuple[MessagePipe, MessagePipe]]:
    ours, theirs = (MessagePipe(end.detach()) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def next_of(pipe: MessagePipe, *others: MessagePipe) -> Any:
    """The next message, while the other ends write what they have."""
    while (message := pipe.receive()) is None:
        for each in others:
            each.exchange(0)
        assert pipe.exchange(10)
    return message


def test_messages_arrive_in_order_and_one_that_is_not_there_is_not_waited_for(pipes: Any) -> None:
    ours, theirs = pipes
    assert theirs.receive() is None
    ours.send(1)
    ours.send("two")
    assert [theirs.receive(), theirs.receive(), theirs.receive()] == [1, "two", None]


def test_large_messages_both_ways_at_once_arrive(pipes: Any) -> None:
    ours, theirs = pipes
    for pipe in pipes:
        pipe.send(LARGE)
    assert ours.has_unsent
    np.testing.assert_array_equal(next_of(theirs, ours), LARGE)
    np.testing.assert_array_equal(next_of(ours, theirs), LARGE)
    assert not ours.has_unsent


def test_an_end_that_neither_reads_nor_writes_is_waited_for_no_longer_than_asked(pipes: Any) -> None:
    ours, theirs = pipes
    with returns_within(0.01):
        assert not ours.exchange(0.01)
        ours.send(LARGE)
        assert not ours.exchange(0.01)
    theirs.exchange(0)  # it reads again
    assert ours.exchange(0.01)


def test_what_was_sent_whole_is_received_before_the_end_is_reported(pipes: Any) -> None:
    ours, theirs = pipes
    theirs.send("last words")
    theirs.send(LARGE)  # it ends in the middle of this
    theirs.close()
    ours.send("in vain")
    assert ours.receive() == "last words"
    for _ in range(2):
        with pytest.raises(EOFError):
            ours.receive()
    assert ours.exchange(10)
    assert not ours.has_unsent


def test_the_end_of_the_other_process_with_something_unread_is_the_end_of_messages(pipes: Any) -> None:
    ours, theirs = pipes
    ours.send("unread")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


@pytest.mark.parametrize("line", lines_of(MessagePipe.exchange))
def test_a_close_in_another_thread_ends_an_exchange(pipes: Any, line: int) -> None:
    with while_held_at(line, MessagePipe.exchange, lambda: pipes[0].exchange(10), pipes[0].close):
        pass
    assert pipes[0].hung_up


def test_a_wait_can_be_interrupted_in_the_middle_of_a_message_which_arrives_all_the_same(pipes: Any) -> None:
    ours, theirs = pipes
    ours.send(LARGE)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ours.exchange(60)
    timer.join()
    ours.send("next")
    np.testing.assert_array_equal(next_of(theirs, ours), LARGE)
    assert next_of(theirs, ours) == "next"


def test_an_interrupt_anywhere_in_a_call_tears_no_message_and_sends_none_twice() -> None:
    def talk() -> None:
        for pipe in pipes:
            pipe.send("hello")
        for pipe in pipes:
            pipe.exchange(1)
            received.append(pipe.receive())

    nth, was_interrupted = 1, True
    while was_interrupted:
        pipes = [MessagePipe(end.detach()) for end in socket.socketpair()]
        received: list[str] = []
        was_interrupted = interrupted(talk, nth)
        for pipe in pipes:
            pipe.send("again")
        rest = [list(iter(pipe.receive, None)) for pipe in pipes]
        assert [messages in (["again"], ["hello", "again"]) for messages in rest] == [True, True], (nth, rest)
        assert len(received) + sum(map(len, rest)) <= 4
        for pipe in pipes:
            pipe.close()
        nth += 1
    assert nth > 10
