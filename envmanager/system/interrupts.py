"""Defers a Ctrl-C while something is half done.

Python raises KeyboardInterrupt between any two bytecodes of the main thread, also between "the response was read" and
"the response was kept". Blocking the signal for the thread does not help: the kernel then delivers it to another one,
and Python still runs the handler in the main thread. So we install a handler: while a counter is above 0 it notes the
interrupt, else it calls the handler that it replaced.

::

    a call begins ── another handler is in place? ── ours replaces it               the counter goes up
    it ends ── the counter is 0 again: a noted interrupt is passed on ── another handler was found? ── it is restored
    the last manager closes ── Python's own handler is restored too

Our handler stays between calls only if it found Python's own: swapping handlers takes longer than the rest of a call.
Other libraries look for their own handler (asyncio restores Python's only where it finds its own).

A handler that Python did not install (robot middleware, an application that embeds Python) stays: Python could not
restore it. Interrupts are then not deferred; the handler decides what they do.

The rule: ``defer_interrupts`` is around everything that must be done wholly or not at all; ``allow_interrupts`` is
around every wait and every call of a user's code inside it.
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

from envmanager.system.machine import after_fork_in_child

# signal.signal spends nine tenths of its time turning numbers into enums and back; these are what it calls.
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal
_get_handler: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Returns the function that the kernel calls for a signal, also a handler that Python does not know.
_c_handler = ctypes.pythonapi.PyOS_getsig
_c_handler.argtypes = [ctypes.c_int]
_c_handler.restype = ctypes.c_void_p
_sigaction = getattr(ctypes.pythonapi, "sigaction", None)  # not on Windows
_SIGACTION_BYTES = 1024
"""More bytes than a ``struct sigaction`` has on any system."""
_SIGINT = int(signal.SIGINT)
_RARELY_USED: Sequence[int] = (
    range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
    if hasattr(signal, "SIGRTMAX")
    else [getattr(signal, name) for name in ("SIGUSR2", "SIGUSR1", "SIGBREAK") if hasattr(signal, name)]
)
"""Signals to learn Python's handler from: real-time ones, which macOS lacks; Windows has only the last one."""
_thread = threading.get_ident


class _State:
    """The state of the main thread; other threads get no signals."""

    __slots__ = ("found_another", "main_thread", "managers", "pythons_c_handler", "was_interrupted")

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self.was_interrupted = False
        self.managers: dict[int, weakref.ref[object]] = {}
        """The open managers, by id."""
        self.found_another = False
        """Whether the handler that ours replaced is not Python's own."""
        self.pythons_c_handler: Any = None


_state = _State()
_levels = [0]
"""Number of ``defer_interrupts`` blocks around the running code; a new number for each ``allow_interrupts`` block."""


class _Handler:
    """A handler of SIGINT that notes an interrupt, or passes it to the handler that it replaced."""

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
        except BaseException:  # code that catches it inside ``defer_interrupts`` cannot be interrupted a second time
            if n_levels > 1:
                del _levels[n_levels - 1 :]
            raise


def _take_over() -> None:
    """Replace the present handler by ours if it is a Python function (not the default, none, or one in C)."""
    found = _get_handler(_SIGINT)
    if callable(found) and _c_handler(_SIGINT) == (_state.pythons_c_handler or _learn_pythons_c_handler()):
        _state.found_another = found is not signal.default_int_handler
        _set_handler(_SIGINT, _Handler(found))


def _learn_pythons_c_handler() -> Any:
    """Return the C function that the kernel calls for any Python handler; None if no unused signal reveals it."""
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
    """Restore the handler that ours replaced."""
    ours = _get_handler(_SIGINT)
    if ours.__class__ is not _Handler:
        return
    if _c_handler(_SIGINT) == _state.pythons_c_handler:
        _set_handler(_SIGINT, ours.found)
        return
    # A handler in C has replaced ours meanwhile, and may call Python's.
    if _sigaction is None:
        taken_over_by = _c_handler(_SIGINT)
        _set_handler(_SIGINT, ours.found)
        ctypes.pythonapi.PyOS_setsig(_SIGINT, ctypes.c_void_p(taken_over_by))
        return
    taken_over = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _sigaction(_SIGINT, None, taken_over)
    _set_handler(_SIGINT, ours.found)
    _sigaction(_SIGINT, taken_over, None)


def begin_deferring() -> None:
    """Begin a ``defer_interrupts`` block without its context manager."""
    if _thread() == _state.main_thread:
        if _get_handler(_SIGINT).__class__ is not _Handler:
            _take_over()
        _levels[-1] += 1


def end_deferring() -> None:
    """End a ``defer_interrupts`` block that ``begin_deferring`` began."""
    if _levels[-1] and _thread() == _state.main_thread:
        _levels[-1] -= 1
        if _levels[-1] == 0 and (_state.was_interrupted or _state.found_another or not _state.managers):
            _leave()


def _leave() -> None:
    """Leave the outermost block: pass a noted interrupt to the handler that would have received it."""
    if len(_levels) == 1 and (_state.found_another or not _state.managers):
        _go_away()
    _raise_what_came()


def _raise_what_came() -> None:
    was_interrupted, _state.was_interrupted = _state.was_interrupted, False
    if was_interrupted:
        handler = _get_handler(_SIGINT)
        if callable(handler):
            handler(_SIGINT, None)


levels, state, Handler, take_over, leave, thread_id, handler_of = (
    _levels, _state, _Handler, _take_over, _leave, _thread, _get_handler
)  # fmt: skip
"""Parts of ``begin_deferring`` and ``end_deferring``, which ``kernel.calls`` repeats in line to save calls."""


class defer_interrupts:  # noqa: N801  (used like a function)
    """Context manager: a Ctrl-C in the block is raised at its end. Blocks may be nested."""

    __slots__ = ()

    def __enter__(self) -> None:
        begin_deferring()

    def __exit__(self, *_: object) -> None:
        end_deferring()


class allow_interrupts:  # noqa: N801
    """Context manager inside ``defer_interrupts``: a Ctrl-C is raised at once, also one that was noted before.

    Once it is raised, also on the way in or out, interrupts are deferred again: code that catches it cannot be
    interrupted a second time.
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

    begin, end = __enter__, __exit__  # calling them takes a third less than ``with``


def keep_handler_for(manager: object) -> Callable[[], Any]:
    """Keep our handler in place between calls while ``manager`` is open; return a function that ends this.

    Garbage collection of the manager ends it, too. After the last manager, the next ``defer_interrupts`` block removes
    the handler.
    """
    leave = functools.partial(_state.managers.pop, id(manager), None)  # one call in C: an interrupt cannot halve it
    _state.managers[id(manager)] = weakref.ref(manager, lambda _: leave())
    return leave


def _after_fork_in_child() -> None:
    """Treat the thread that forked as the main thread. Other threads and their blocks do not exist in the child."""
    if _thread() != _state.main_thread:
        _state.main_thread, _state.was_interrupted = _thread(), False
        _levels[:] = [0]


after_fork_in_child(_after_fork_in_child)


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Context manager: processes started in the block begin with SIGINT blocked; they unblock it themselves."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
