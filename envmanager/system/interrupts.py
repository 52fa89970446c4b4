"""Let a Ctrl-C wait while something is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between "the response was read" and
"the response was kept". Blocking the signal for the thread does not help: the kernel then hands it to any other thread,
and Python still runs the handler in the main one. So the handler itself is one of ours: while a counter is above 0 it
takes note, else it calls the handler that it found.

::

    a call begins ── another handler is in place? ── ours goes in front of it        the counter goes up
    it ends ── the counter is 0 again: what came is passed on ── another handler was found? ── it is put back
    the last manager closes ── Python's own handler is put back too

Only in front of Python's own ours stays between calls: swapping handlers takes longer than the rest of a call. Others
look for theirs (asyncio puts Python's back only where it finds its own).

A handler that Python did not install (robot middleware, an application that embeds Python) is left alone: Python could
not put it back. Interrupts are then not held, and whoever installed the handler decides what they do.

The rule: ``held`` is around whatever must be done wholly or not at all; ``let_through`` is around every wait and every
call of a user's code inside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envmanager.system.processes import after_fork_in_child

# signal.signal spends nine tenths of its time turning numbers into enums and back; these are what it calls.
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal
_get_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# What the kernel calls for a signal: only this tells of a handler that Python does not know.
_c_handler = ctypes.pythonapi.PyOS_getsig
_c_handler.argtypes = [ctypes.c_int]
_c_handler.restype = ctypes.c_void_p
_sigaction = getattr(ctypes.pythonapi, "sigaction", None)  # not on Windows
_SIGACTION_BYTES = 1024
"""More than a ``struct sigaction`` takes anywhere."""
_SIGINT = int(signal.SIGINT)
_RARELY_USED: Sequence[int] = (
    range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
    if hasattr(signal, "SIGRTMAX")
    else [getattr(signal, name) for name in ("SIGUSR2", "SIGUSR1", "SIGBREAK") if hasattr(signal, name)]
)
"""Signals to learn Python's handler from: real-time ones, which macOS has not; Windows has the last one alone."""
_thread = threading.get_ident


class _State:
    """What the main thread is in; other threads get no signals."""

    __slots__ = ("found_another", "main_thread", "managers", "pythons_c_handler", "was_interrupted")

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self.was_interrupted = False
        self.managers: dict[int, weakref.ref[object]] = {}
        """Those that are open, by id."""
        self.found_another = False
        """Whether the handler that was found is not Python's own."""
        self.pythons_c_handler: Any = None


_state = _State()
_levels = [0]
"""How many ``held`` blocks one is in; one more number for each ``let_through`` around them."""


class _Handler:
    """Takes note of an interrupt, or hands it on to the handler that it found."""

    __slots__ = ("found",)

    def __init__(self, found: Callable[[int, Any], Any]) -> None:
        self.found = found

    def __call__(self, number: int, frame: Any) -> None:
        if _levels[-1]:
            _state.was_interrupted = True
            return
        n_levels = len(_levels)
        try:
            self.found(number, frame)
        except BaseException:  # whoever catches it inside ``held`` may be interrupted no second time
            if n_levels > 1:
                del _levels[n_levels - 1 :]
            raise


def _take_over() -> None:
    """Go in front of the handler that is in place, unless Python has no say over SIGINT.

    It has none where the default is in place, or nothing, or somebody's handler in C.
    """
    found = _get_handler(_SIGINT)
    if callable(found) and _c_handler(_SIGINT) == (_state.pythons_c_handler or _learn_pythons_c_handler()):
        _state.found_another = found is not signal.default_int_handler
        _set_handler(_SIGINT, _Handler(found))


def _learn_pythons_c_handler() -> Any:
    """Return what the kernel calls for any handler of Python's, learnt from an unused signal; None if all are used."""
    unused = next(
        (each for each in _RARELY_USED if signal.getsignal(each) is signal.SIG_DFL and not _c_handler(each)), None
    )
    if unused is None:
        return None
    signal.signal(unused, lambda *_: None)
    _state.pythons_c_handler = _c_handler(unused)
    signal.signal(unused, signal.SIG_DFL)
    return _state.pythons_c_handler


def _go_away() -> None:
    """Put back the handler that was found."""
    ours = _get_handler(_SIGINT)
    if ours.__class__ is not _Handler:
        return
    if _c_handler(_SIGINT) == _state.pythons_c_handler:
        _set_handler(_SIGINT, ours.found)
        return
    # Somebody took the signal over in C meanwhile, and may hand it on to Python.
    if _sigaction is None:
        taken_over_by = _c_handler(_SIGINT)
        _set_handler(_SIGINT, ours.found)
        ctypes.pythonapi.PyOS_setsig(_SIGINT, ctypes.c_void_p(taken_over_by))
        return
    taken_over = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _sigaction(_SIGINT, None, taken_over)
    _set_handler(_SIGINT, ours.found)
    _sigaction(_SIGINT, taken_over, None)


def begin_held() -> None:
    """The beginning of ``held``, for who is a context manager too."""
    if _thread() == _state.main_thread:
        if _get_handler(_SIGINT).__class__ is not _Handler:
            _take_over()
        _levels[-1] += 1


def end_held() -> None:
    """The end of ``held``."""
    if _levels[-1] and _thread() == _state.main_thread:
        _levels[-1] -= 1
        if _levels[-1] == 0 and (_state.was_interrupted or _state.found_another or not _state.managers):
            _leave()


def _leave() -> None:
    """At the end of the outermost block: what came meanwhile is passed on to the handler that would have got it."""
    if len(_levels) == 1 and (_state.found_another or not _state.managers):
        _go_away()
    _raise_what_came()


def _raise_what_came() -> None:
    was_interrupted, _state.was_interrupted = _state.was_interrupted, False
    if was_interrupted:
        handler = _get_handler(_SIGINT)
        if callable(handler):
            handler(_SIGINT, None)


class held:  # noqa: N801  (used like a function)
    """``with held():`` a Ctrl-C in the block is raised at its end. May be nested."""

    __slots__ = ()

    def __enter__(self) -> None:
        begin_held()

    def __exit__(self, *_: object) -> None:
        end_held()


class let_through:  # noqa: N801
    """``with let_through():`` inside ``held``: here a Ctrl-C is raised at once, also one that came before.

    Wherever it is raised, also on the way in or out, they are held again: whoever catches it may be interrupted no
    second time.
    """

    __slots__ = ("_n_levels",)

    def __enter__(self) -> None:
        self._n_levels = 0
        if _levels[-1] and _thread() == _state.main_thread:
            self._n_levels = len(_levels)
            _levels.append(0)
            if _state.was_interrupted:
                _raise_what_came()

    def __exit__(self, *_: object) -> None:
        if self._n_levels:
            del _levels[self._n_levels :]


def stay_for(manager: object) -> Callable[[], Any]:
    """``manager`` is open from now on, so the handler may stay in place between calls; what is returned ends that.

    It ends too when the manager is garbage. After the last one the handler goes with the next ``held`` block.
    """
    leave = functools.partial(_state.managers.pop, id(manager), None)  # one call in C: an interrupt cannot halve it
    _state.managers[id(manager)] = weakref.ref(manager, lambda _: leave())
    return leave


def _after_fork_in_child() -> None:
    """The thread that forked is the main one now; what other threads were in has ended."""
    if _thread() != _state.main_thread:
        _state.main_thread, _state.was_interrupted = _thread(), False
        _levels[:] = [0]


after_fork_in_child(_after_fork_in_child)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Processes that are started in the block begin with a Ctrl-C blocked, until they say otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
