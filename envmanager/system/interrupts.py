"""Deferral of a Ctrl-C until a block of code that must not be interrupted half-way has ended.

Python can raise KeyboardInterrupt between most bytecodes of the main thread, even between reading a response and
storing it. Blocking the signal in the main thread does not help, because the kernel can deliver it to another thread,
and Python still runs the handler in the main thread. So we install a handler. While a counter is above 0, our handler
records the interrupt; otherwise it calls the handler that it replaced.

::

    a call begins ── another handler is installed? ── ours replaces it             the counter is incremented
    it ends ── the counter is 0: a recorded interrupt is raised ── another handler was found? ── it is restored
    the last manager closes ── Python's own handler is restored too

Swapping handlers takes longer than the rest of a manager call, so ours stays between calls if it replaced Python's own.
Another Python handler is restored, because its library may check that the handler is installed, as asyncio does.

A handler that Python did not install (robot middleware, an application that embeds Python) is not replaced, because
Python could not restore it. Interrupts are then not deferred; that handler decides what they do.

``defer_interrupts`` encloses code that must run completely or not at all; ``kernel.calls`` inlines it to save time.
Inside such a block, ``allow_interrupts`` encloses waits and calls to user code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from envmanager.system.machine import after_fork_in_child

# The functions that signal.signal and getsignal call. They take a tenth of the time, as they convert no enums.
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal
handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal

# Returns the C function that the kernel calls for a signal, even if Python did not install it.
_c_handler = ctypes.pythonapi.PyOS_getsig
_c_handler.argtypes = [ctypes.c_int]
_c_handler.restype = ctypes.c_void_p
_SIGINT = int(signal.SIGINT)
thread_id = threading.get_ident


class _State:
    """The state of interrupt handling in the main thread, the only thread in which Python runs signal handlers."""

    __slots__ = ("found_another", "main_thread", "managers", "n_forks", "pythons_c_handler", "was_interrupted")

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        self.n_forks = 0
        """Number of forks between the first process and this one. Reading it is faster than calling ``os.getpid()``."""
        self.was_interrupted = False
        self.managers: dict[int, weakref.ref[object]] = {}
        """Weak references to the open managers, by ``id()``."""
        self.found_another = False
        """Whether our handler replaced a handler other than Python's own."""
        self.pythons_c_handler: Any = None


state = _State()
levels = [0]
"""Stack of counters of nested ``defer_interrupts`` blocks. Each ``allow_interrupts`` block pushes a counter of 0."""
_ONE = 1 << 20  # pushed by ``defer_one_interrupt``; more than there are nested blocks


class Handler:
    """A SIGINT handler that records interrupts while they are deferred, and otherwise calls the handler it replaced."""

    __slots__ = ("found",)

    def __init__(self, found: Callable[[int, Any], Any]) -> None:
        self.found = found

    def __call__(self, number: int, frame: Any) -> None:
        if levels[-1] and not (levels[-1] == _ONE and state.was_interrupted):
            state.was_interrupted = True
            return
        state.was_interrupted = False
        n_levels = len(levels)
        try:
            self.found(number, frame)
        except BaseException:  # interrupts are deferred again in code that catches this inside ``defer_interrupts``
            if n_levels > 1:
                del levels[n_levels - 1 :]
            raise


def take_over() -> None:
    """Install our handler if the current one is known to be a Python function, not SIG_DFL, SIG_IGN or a C handler."""
    found = handler_of(_SIGINT)
    if callable(found) and _c_handler(_SIGINT) == (state.pythons_c_handler or _learn_pythons_c_handler()):
        state.found_another = found is not signal.default_int_handler
        _set_handler(_SIGINT, Handler(found))


def _learn_pythons_c_handler() -> Any:
    """Return the address of CPython's C signal handler, read from the last unused signal. None if all are in use."""
    for each in sorted(signal.valid_signals(), reverse=True):
        if signal.getsignal(each) is signal.SIG_DFL and not _c_handler(each):
            signal.signal(each, lambda *_: None)
            state.pythons_c_handler = _c_handler(each)
            signal.signal(each, signal.SIG_DFL)
            break
    return state.pythons_c_handler


def end_deferring() -> None:
    """End a ``defer_interrupts`` block. At the end of the outermost, pass a recorded interrupt to the handler."""
    if levels[-1] and thread_id() == state.main_thread:
        levels[-1] -= 1
        if levels[-1] == 0 and (state.was_interrupted or state.found_another or not state.managers):
            leave()


def leave() -> None:
    """Restore the replaced handler, unless ours is still needed. Then call the handler if an interrupt was recorded.

    If C code has installed a handler since then, which may call ours, ours stays.
    """
    if len(levels) == 1 and (state.found_another or not state.managers):
        ours = handler_of(_SIGINT)
        if ours.__class__ is Handler and _c_handler(_SIGINT) == state.pythons_c_handler:
            _set_handler(_SIGINT, ours.found)
    raise_what_came()


def raise_what_came() -> None:
    """Pass a recorded interrupt to the handler."""
    was_interrupted, state.was_interrupted = state.was_interrupted, False
    if was_interrupted:
        handler = handler_of(_SIGINT)
        if callable(handler):
            handler(_SIGINT, None)


class defer_interrupts:  # noqa: N801  (used like a function)
    """A context manager that defers a Ctrl-C to the end of the block, or of the outermost block if nested.

    Outside the main thread, it does nothing.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        if thread_id() == state.main_thread:
            if handler_of(_SIGINT).__class__ is not Handler:
                take_over()
            levels[-1] += 1

    def __exit__(self, *_: object) -> None:
        end_deferring()


class allow_interrupts:  # noqa: N801
    """A context manager inside ``defer_interrupts`` that raises a Ctrl-C at once, even one that was recorded before.

    After the exception, interrupts are deferred again, even if it was raised on entry or exit. So code that catches it
    inside the ``defer_interrupts`` block is not interrupted a second time.
    """

    __slots__ = ("_n_levels",)
    _level = 0

    def __enter__(self) -> None:
        self._n_levels = 0
        if levels[-1] and thread_id() == state.main_thread:
            self._n_levels = len(levels)
            levels.append(self._level)
            if state.was_interrupted and not self._level:
                raise_what_came()

    def __exit__(self, *_: object) -> None:
        if self._n_levels:
            del levels[self._n_levels :]


class defer_one_interrupt(allow_interrupts):  # noqa: N801
    """A context manager inside ``defer_interrupts`` that defers a first Ctrl-C further, but raises a second at once."""

    __slots__ = ()
    _level = _ONE


def keep_handler_for(manager: object) -> Callable[[], Any]:
    """Keep our handler installed between calls while ``manager`` is open. Return a function that undoes this.

    Garbage collection of the manager has the same effect as the returned function. After the last manager has been
    closed, the next ``defer_interrupts`` block removes the handler.
    """
    undo = functools.partial(state.managers.pop, id(manager), None)  # one call in C, so it cannot be interrupted
    state.managers[id(manager)] = weakref.ref(manager, lambda _: undo())
    return undo


@after_fork_in_child
def _after_fork_in_child() -> None:
    """Count the fork. Treat the thread that forked as the main thread, since the child process has no other threads."""
    state.n_forks += 1
    if thread_id() != state.main_thread:
        state.main_thread, state.was_interrupted = thread_id(), False
        levels[:] = [0]


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block SIGINT in this thread for the ``with`` block. Processes started there must unblock it. No-op on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
