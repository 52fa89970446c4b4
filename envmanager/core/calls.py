"""Guards the calls of one manager: one at a time, refused where they make no sense, and a Ctrl-C waits for their end.

The rule: interrupts are held before the lock is taken and until it has been given back, so none can leave it taken.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from envmanager.errors import ManagerClosed, UsageError
from envmanager.observe.timing import Track
from envmanager.system.interrupts import begin_held, end_held, held, let_through
from envmanager.system.processes import after_fork_in_child

_LEAVE_S = 1.0
"""How long close() waits for another thread to leave its call; then that call gives back what it may still use."""
_TURN_S = 0.1
"""How long a call that waits for another thread's is deaf to a Ctrl-C."""
_MOVES = ("reset", "step", "send", "recv")
"""The calls that move the environments on: they are never made inside another call."""
_QUESTIONS = ("call", "get_attr", "set_attr", "render")
"""Those that a policy may make."""


class _Forks:
    """How many forks lie between the first process of this program and this one; asking for the pid takes as long as
    all the rest of a call's beginning.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def one_more(self) -> None:
        self.count += 1


_forks = _Forks()
after_fork_in_child(_forks.one_more)


class Calls:
    """Whether calls may be made, and which are on their way."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        """``give_back()`` is called when the manager is closed and no call is on its way any more."""
        self.closed = False
        self.owner_pid, self.n_forks = os.getpid(), _forks.count
        self.lock = threading.RLock()
        self.on_their_way: list[str] = []
        """Each inside the one before it."""
        self.named: dict[str, _Call] = {name: _Call(self, name) for name in (*_MOVES, *_QUESTIONS)}
        """``with`` one of these, around all of a call."""
        self._give_back = give_back

    def require_usable(self, what: str) -> None:
        """UsageError in a forked process, ManagerClosed after close()."""
        self.require_owner(what)
        self.require_open(what)

    def require_owner(self, what: str) -> None:
        """UsageError in a process that was forked from the manager's own."""
        if self.owner_pid != os.getpid():
            raise UsageError(
                f"{what} was called in process {os.getpid()}, which was forked from the manager's own, "
                f"{self.owner_pid}: the workers belong to that one. Make a new manager in this process."
            )

    def require_open(self, what: str) -> None:
        """ManagerClosed after close()."""
        if self.closed:
            raise ManagerClosed(what)

    def end(self, stop: Callable[[], None] | None) -> None:
        """Give back now, or when the call that is on its way has ended; until then at least ``stop`` the workers."""
        with held():
            has_left = self.lock.acquire(timeout=_LEAVE_S)
            try:
                if has_left and not self.on_their_way:
                    self._give_back()
                elif stop is not None:
                    with let_through():
                        stop()
            finally:
                if has_left:
                    self.lock.release()

    def draw_on(self, track: Track) -> None:
        """Draw all calls from now on."""
        self.named.update({name: _DrawnCall(self, name, track) for name in self.named})

    def leave(self) -> None:
        """A call ends of a manager that was closed meanwhile."""
        self.on_their_way.pop()
        try:
            if not self.on_their_way:
                self._give_back()
        finally:
            self.lock.release()
            end_held()

    def wait_for_turn(self, what: str) -> None:
        """Take the lock that another thread has, unless the manager is closed or a Ctrl-C comes."""
        while not self.lock.acquire(timeout=_TURN_S):
            self.require_open(what)
            with let_through():
                pass

    def refuse_inside_a_call(self, what: str) -> None:
        """UsageError: whose step would be whose?"""
        outer = self.on_their_way[-1]
        raise UsageError(
            f"{what}() was called inside {outer}(), by a policy or an environment, and would mix up whose step is "
            f"whose. Call it when {outer}() has returned."
        )


class _Call:
    """``with`` one call of a manager. It holds nothing of its own, so one serves for all calls of that name."""

    __slots__ = ("_acquire", "_calls", "_is_move", "_on_their_way", "_release", "_what")

    def __init__(self, calls: Calls, what: str) -> None:
        self._calls = calls
        self._what = what
        self._is_move = what in _MOVES
        self._acquire, self._release = calls.lock.acquire, calls.lock.release
        self._on_their_way = calls.on_their_way

    def __enter__(self) -> None:
        calls = self._calls
        if calls.closed or calls.n_forks != _forks.count:
            calls.require_usable(self._what)
        begin_held()
        try:
            if not self._acquire(False):
                calls.wait_for_turn(self._what)
            if self._is_move and self._on_their_way:
                self._release()
                calls.refuse_inside_a_call(self._what)
        except BaseException:
            end_held()
            raise
        self._on_their_way.append(self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        calls = self._calls
        if calls.closed:
            calls.leave()
            if error is None or isinstance(error, Exception):
                raise ManagerClosed(self._what) from error
            return
        self._on_their_way.pop()
        self._release()
        end_held()


class _DrawnCall(_Call):
    """The same, drawn on a trace."""

    __slots__ = ("_began_ns", "_track")

    def __init__(self, calls: Calls, what: str, track: Track) -> None:
        super().__init__(calls, what)
        self._track = track
        self._began_ns: list[int] = []

    def __enter__(self) -> None:
        super().__enter__()
        self._began_ns.append(time.monotonic_ns())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        began_ns = self._began_ns.pop()
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._track.span(self._what, began_ns, time.monotonic_ns())
