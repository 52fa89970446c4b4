"""Let a Ctrl-C wait while something is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between "the answer was read" and
"the answer was kept". Blocking the signal for the thread does not help: the kernel then hands it to any other thread,
and Python still runs the handler in the main one. So the handler itself is replaced by one that takes note.

A handler that Python did not install (robot middleware, an application that embeds Python) is left alone: Python could
not put it back. Interrupts are then not held, and whoever installed the handler decides what they do.

The rule: ``held`` is around whatever must be done wholly or not at all; ``let_through`` is around every wait and every
call of a user's code inside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# signal.signal spends nine tenths of its time turning numbers into enums and back; this is what it calls.
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal

# What the kernel calls for a signal: only this tells of a handler that Python does not know.
_c_handler = ctypes.pythonapi.PyOS_getsig
_c_handler.argtypes = [ctypes.c_int]
_c_handler.restype = ctypes.c_void_p
_sigaction = ctypes.CDLL(None).sigaction
_SIGACTION_BYTES = 1024
"""More than a ``struct sigaction`` takes anywhere."""


class _State:
    """What the main thread is in; other threads get no signals."""

    is_held = False
    was_interrupted = False
    users_handler: Any = None
    pythons_c_handler: Any = None


def _note(_: int, __: Any) -> None:
    _State.was_interrupted = True


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


_SIGINT = int(signal.SIGINT)


def _learn_pythons_c_handler() -> Any:
    """What the kernel calls where Python has installed a handler, whichever: learnt from a signal that nobody uses."""
    unused = next(
        number
        for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
        if signal.getsignal(number) is signal.SIG_DFL and not _c_handler(number)
    )
    signal.signal(unused, _note)
    _State.pythons_c_handler = _c_handler(unused)
    signal.signal(unused, signal.SIG_DFL)
    return _State.pythons_c_handler


def _hold() -> bool:
    """Take note of interrupts from now on, unless Python has no say over SIGINT. ValueError in all but the main thread.

    It has none where the default is in place, or nothing, or somebody's handler in C.
    """
    if _c_handler(_SIGINT) != (_State.pythons_c_handler or _learn_pythons_c_handler()):
        return False
    _State.was_interrupted = False
    users_handler = _set_handler(_SIGINT, _note)  # from here on nothing is raised
    _State.users_handler, _State.is_held = users_handler, True
    return True


def _let_go() -> None:
    """Put the user's handler back, and tell it what came meanwhile."""
    handler = _State.users_handler
    _State.is_held = False
    if _c_handler(_SIGINT) == _State.pythons_c_handler:
        _set_handler(_SIGINT, handler)
    else:
        _set_only_pythons(handler)
    # Read when nothing is noted any more: what comes from now on is told to the user's handler at once.
    was_interrupted, _State.was_interrupted = _State.was_interrupted, False
    if was_interrupted:
        handler(_SIGINT, None)


def _set_only_pythons(handler: Any) -> None:
    """Put the user's handler back for whoever took the signal over meanwhile and may hand it on to Python."""
    taken_over = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _sigaction(_SIGINT, None, taken_over)
    _set_handler(_SIGINT, handler)
    _sigaction(_SIGINT, taken_over, None)


def begin_held() -> bool:
    """The beginning of ``held``, for who is a context manager too; the result is for ``end_held``."""
    if _State.is_held:
        return False
    try:
        return _hold()
    except ValueError:  # another thread, which gets no signals; asking first costs more than the rest
        return False


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
    """``with let_through():`` inside ``held``: here a Ctrl-C is raised at once, also one that came before.

    Wherever it is raised, also on the way in or out, they are held again: whoever catches it may be interrupted no
    second time.
    """

    __slots__ = ("_was_held",)

    def __enter__(self) -> None:
        self._was_held = _State.is_held and _in_main_thread()
        if self._was_held:
            try:
                _let_go()
            except BaseException:
                _hold()
                raise

    def __exit__(self, *_: object) -> None:
        if self._was_held:
            try:
                _hold()
            except BaseException:
                _hold()
                raise


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that are started in the block begin with a Ctrl-C blocked, until they say otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
