"""The lock around a manager's calls. While one thread's call runs, calls of other threads wait.

The rule: interrupts are deferred while the lock is acquired or released, so that no Ctrl-C leaves it locked.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envmanager.errors import ManagerClosed, UsageError
from envmanager.system.interrupts import (
    Handler,
    allow_interrupts,
    defer_interrupts,
    end_deferring,
    handler_of,
    leave,
    levels,
    state,
    take_over,
    thread_id,
)

if TYPE_CHECKING:
    from envmanager.observe.tracing import SpanTrack

_SIGINT = int(signal.SIGINT)
_LEAVE_S = 1.0
"""Seconds that ``close()`` waits for another thread's call. A longer call releases everything when it ends."""
_TURN_S = 0.1
"""Maximum time in seconds that a call defers a Ctrl-C while it waits for another thread's call."""
_MOVES = ("reset", "step", "send", "recv", "begin", "state", "move")
"""Calls that step or reset environments, or need that none does. They raise UsageError inside another call."""
_QUESTIONS = ("call", "get_attr", "set_attr", "render")
"""Calls that are also allowed inside another call, for instance from a policy."""


class Use(enum.Enum):
    """The way the trainer steps until the next reset: ``step()`` (STEP), or ``send()`` and ``recv()`` (SEND_RECV)."""

    RESETTING = enum.auto()
    """A reset has begun but did not complete. Only another reset is allowed."""
    UNDECIDED = enum.auto()
    STEP = enum.auto()
    SEND_RECV = enum.auto()

    def require(self, wanted: Use) -> None:
        """Raise UsageError if the last reset is unfinished, or if the trainer steps in another way than ``wanted``."""
        if self is Use.RESETTING:
            raise UsageError("the last reset() did not end: call reset() again.")
        if self not in (wanted, Use.UNDECIDED):
            raise UsageError("use either step() or send()/recv() between two resets, not both.")


def weak_callback(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``method`` as long as its object exists. The object is not kept alive by this."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


class Calls:
    """The lock that ``step``, ``reset``, ``call`` and similar calls acquire, and the names of the calls in progress."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        """Create the lock. When the manager is closed and idle, ``give_back()`` is called to release its resources."""
        self.closed = False
        self.owner_pid, self.n_forks = os.getpid(), state.n_forks
        self.lock = threading.RLock()
        self.in_progress: list[str] = []
        """Names of the calls in progress, outermost first."""
        self.named: dict[str, _Call] = {name: _Call(self, name) for name in (*_MOVES, *_QUESTIONS)}
        self.give_back = give_back

    def require_usable(self, what: str) -> None:
        """Raise UsageError in a forked process, and ManagerClosed after close(). ``what`` is the name of the call."""
        self.require_owner(what)
        self.require_open(what)

    def require_owner(self, what: str) -> None:
        """Raise UsageError in a process forked from the manager's process. ``what`` is the name of the call."""
        if self.owner_pid != os.getpid():
            raise UsageError(
                f"{what} was called in process {os.getpid()}, which was forked from the manager's own, "
                f"{self.owner_pid}: the workers belong to that one. Make a new manager in this process."
            )

    def require_open(self, what: str) -> None:
        """Raise ManagerClosed after close(). ``what`` is the name of the call."""
        if self.closed:
            raise ManagerClosed(what)

    def end(self, stop: Callable[[], None] | None) -> None:
        """Release the manager's resources. If a call is running, only run ``stop``. That call releases them later."""
        with defer_interrupts():
            has_left = self.lock.acquire(timeout=_LEAVE_S)
            try:
                if has_left and not self.in_progress:
                    self.give_back()
                elif stop is not None:
                    with allow_interrupts():
                        stop()
            finally:
                if has_left:
                    self.lock.release()

    def draw_on(self, track: SpanTrack) -> None:
        """Record each later call as a span on ``track``, one of the timelines of the trace."""
        self.named.update({name: _DrawnCall(self, name, track) for name in self.named})


class _Call:
    """A context manager around a call, such as ``step``. All calls of a manager with the same name share one object.

    ``step``, ``send`` and ``recv`` call ``begin`` and ``end`` directly, because that is faster than ``with``.
    """

    __slots__ = ("_acquire", "_calls", "_in_progress", "_is_move", "_release", "_what")

    def __init__(self, calls: Calls, what: str) -> None:
        self._calls = calls
        self._what = what
        self._is_move = what in _MOVES
        self._acquire, self._release = calls.lock.acquire, calls.lock.release
        self._in_progress = calls.in_progress

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.end(error)

    def begin(self) -> None:
        """Acquire the lock and defer interrupts for a call. Raises UsageError or ManagerClosed for a forbidden call."""
        calls = self._calls
        if calls.closed or calls.n_forks != state.n_forks:
            calls.require_usable(self._what)
        if thread_id() == state.main_thread:  # defer_interrupts, in line
            if handler_of(_SIGINT).__class__ is not Handler:
                take_over()
            levels[-1] += 1
        try:
            if not self._acquire(False):
                while not self._acquire(timeout=_TURN_S):
                    calls.require_open(self._what)
                    with allow_interrupts():
                        pass
            if self._in_progress and self._is_move:
                outer = self._in_progress[-1]
                self._release()
                raise UsageError(
                    f"{self._what}() was called inside {outer}(), by a policy or an environment, and would mix up "
                    f"whose step is whose. Call it when {outer}() has returned."
                )
        except BaseException:
            end_deferring()
            raise
        self._in_progress.append(self._what)

    def end(self, error: BaseException | None = None) -> None:
        """Release the lock after a call. Raises ManagerClosed after ``close()``, unless ``error`` is an interrupt."""
        calls = self._calls
        if calls.closed:
            self._in_progress.pop()
            try:
                if not self._in_progress:
                    calls.give_back()
            finally:
                self._release()
                end_deferring()
            if error is None or isinstance(error, Exception):
                raise ManagerClosed(self._what) from error
            return
        self._in_progress.pop()
        self._release()
        level = levels[-1]
        if level and thread_id() == state.main_thread:  # end_deferring(), in line
            levels[-1] = level - 1
            if level == 1 and (state.was_interrupted or state.found_another or not state.managers):
                leave()


class _DrawnCall(_Call):
    """A ``_Call`` that also records each call as a span in the trace."""

    __slots__ = ("_began_ns", "_track")

    def __init__(self, calls: Calls, what: str, track: SpanTrack) -> None:
        super().__init__(calls, what)
        self._track = track
        self._began_ns: list[int] = []

    def begin(self) -> None:
        super().begin()
        self._began_ns.append(time.perf_counter_ns())

    def end(self, error: BaseException | None = None) -> None:
        began_ns = self._began_ns.pop()
        try:
            super().end(error)
        finally:
            self._track.span(self._what, began_ns, time.perf_counter_ns())
