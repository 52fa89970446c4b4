"""Functions of the tests that run beside the test."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SOON_S = 60.0
_AWHILE_S = 0.2
"""How long another thread may need, at most, for what it can do beside a thread that is held."""


def begun_in_a_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that runs ``function``, and what that has raised once it has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@contextmanager
def while_held_at(
    line: int, of: Callable[..., Any], function: Callable[[], Any], other: Callable[[], Any]
) -> Iterator[None]:
    """Run the block while one thread is in ``function``, before this line of ``of``, and another has done ``other``.

    The other one may have to wait for the first. Both have ended after the block, and have raised nothing.
    """
    is_held, go_on = threading.Event(), threading.Event()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not of.__code__:
            return None
        if event == "line" and frame.f_lineno == line and not is_held.is_set():
            is_held.set()
            go_on.wait(_SOON_S)
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            function()
        finally:
            is_held.set()

    first, raised_first = begun_in_a_thread(run)
    assert is_held.wait(_SOON_S)
    second, raised_second = begun_in_a_thread(other)
    second.join(_AWHILE_S)
    try:
        yield
    finally:
        go_on.set()
        for thread in (first, second):
            thread.join(_SOON_S)
    assert not first.is_alive()
    assert not second.is_alive()
    assert [*raised_first, *raised_second] == []


def lines_of(function: Callable[..., Any]) -> list[int]:
    """The lines before which a thread can be held in ``function``."""
    return sorted({line for _, line in dis.findlinestarts(function.__code__) if line is not None})[1:]
