"""Let a Ctrl-C wait while something is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between "the answer was read" and
"the answer was kept". Blocking the signal for the thread does not help: the kernel then hands it to any other thread,
and Python still runs the handler in the main one. So the handler itself is replaced by one that takes note.

The rule: ``held`` is around whatever must be done wholly or not at all; ``let_through`` is around every wait and every
call of a user's code inside it.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# signal.signal spends nine tenths of its time turning numbers into enums and back; this is what it calls.
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal


class _State:
    """What the main thread is in; other threads get no signals."""

    is_held = False
    was_interrupted = False
    users_handler: Any = None


def _note(_: int, __: Any) -> None:
    _State.was_interrupted = True


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


_SIGINT = int(signal.SIGINT)


def _hold() -> None:
    """From the moment when the handler is replaced, nothing is raised. ValueError in any but the main thread."""
    users_handler = _set_handler(_SIGINT, _note)
    _State.users_handler, _State.is_held = users_handler, True


def _let_go() -> None:
    """Put the user's handler back, and tell it what came meanwhile."""
    handler, was_interrupted = _State.users_handler, _State.was_interrupted
    _State.is_held = _State.was_interrupted = False
    _set_handler(_SIGINT, signal.SIG_DFL if handler is None else handler)
    if was_interrupted:
        if callable(handler):
            handler(signal.SIGINT, None)
        else:
            signal.raise_signal(signal.SIGINT)


def begin_held() -> bool:
    """The beginning of ``held``, for who is a context manager too; the result is for ``end_held``."""
    if _State.is_held:
        return False
    try:
        _hold()
    except ValueError:  # another thread, which gets no signals; asking first costs more than the rest
        return False
    return True


def end_held(is_outermost: bool) -> None:
    """The end of ``held``."""
    if is_outermost and _State.is_held:
        _let_go()


class held:  # noqa: N801  (used like a function)
    """``with held():`` a Ctrl-C in the block is raised at its end. May be nested.

    The outermost block leaves everything as it found it, also when a ``let_through`` in it was interrupted on its way.
    """

    __slots__ = ("_is_outermost",)

    def __enter__(self) -> None:
        self._is_outermost = begin_held()

    def __exit__(self, *_: object) -> None:
        end_held(self._is_outermost)


class let_through:  # noqa: N801
    """``with let_through():`` inside ``held``: here a Ctrl-C is raised at once, also one that came before."""

    __slots__ = ("_was_held",)

    def __enter__(self) -> None:
        self._was_held = _State.is_held and _in_main_thread()
        if self._was_held:
            _let_go()

    def __exit__(self, *_: object) -> None:
        if self._was_held:
            _hold()


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that are started in the block begin with a Ctrl-C blocked, until they say otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
