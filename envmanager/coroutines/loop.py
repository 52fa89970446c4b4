"""An event loop in a thread, and threads for the environments that are no coroutines.

::

    trainer's thread                       loop's thread                     thread of one environment
    post, post, post ── one wake-up ──▶ all that was posted
                                        Member.run ── OwnThread.run ──▶ reset, step, … of an environment that blocks
    ring() wakes it up ◀── one ring for all responses of a moment

No lock is held while either side works. A wake-up costs both threads more than a step does, so the loop takes all that
was posted at once, and a response waits for others before it rings, for a short part of the time that its step took.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from types import CoroutineType
from typing import Any, Protocol

import attrs

from envmanager.observe.events import LoopBlocked
from envmanager.system.interrupts import defer_interrupts

logger = logging.getLogger("envmanager")

_write: Callable[[int, bytes, int], int] | None = None if sys.platform == "win32" else ctypes.PyDLL(None).write
"""Function that writes to a descriptor and keeps Python's lock. Otherwise the loop's thread would get it after the
first of many commands, which takes both threads more time than the commands do. None on Windows, which lacks it."""
_HOLD_SHARE = 0.01
"""Share of the duration of a step for which its response may wait for others."""
_LONGEST_HOLD_S = 0.004
_LEAST_HOLD_S = 0.0005
"""Time (s) that is too short for a timer. Then the response waits for those of the same moment only."""
_LONG_S = 5.0
"""Time (s) after which it is told that the loop is blocked, even if that is not over."""
_REST_S = 0.2
"""Time (s) in which tasks that environments have left behind may end after they were cancelled."""

_RUN = asyncio.Handle._run.__code__  # calls every callback, and so each part of a task
abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that did not end when they were cancelled. They are kept, because Python reports pending ones that it frees."""


class Member(Protocol):
    """A user of a loop, which the end of the loop ends."""

    worker_id: int
    generation: int

    def owns(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task belongs to the member."""

    def end(self) -> asyncio.Task[None]:
        """Begin to end, if that has not begun. Return the task that does it. Called on the loop."""


class LoopThread:
    """An event loop in a thread of its own. Its thread keeps no interpreter from exiting."""

    def __init__(self, ring: Callable[[], None], own_files: Sequence[str] = ()) -> None:
        """Start the thread. ``ring``: function to call on the loop when responses are to be taken from it.

        ``own_files``: files of the code between the loop and environments.
        """
        self._own_files = own_files
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_log_exception)
        self.members: set[Member] = set()
        """Members that have not ended. Only the loop's thread uses the set."""
        self._ring = ring
        self._ring_at = math.inf
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._sockets: Sequence[socket.socket] = () if _write is None else socket.socketpair()
        for each in self._sockets:
            each.setblocking(False)
        if self._sockets:
            self.loop.add_reader(self._sockets[0], self._take_posted)
        self._is_awake = False
        """Whether the loop is going to look at what was posted."""
        self.guests: set[int] = set()
        """Ids of the environments of members, no two of which may be the same. Only the loop's thread uses the set."""
        self.shared: list[Any] = []
        """Objects that the members share. Other loops must not use them, because their threads would."""
        self.blocked: LoopBlocked | None = None
        """What ``watch`` has found of code that blocks the loop."""
        self._suspect: Any = None
        """Frame of the code that ``watch`` has found last."""
        self._asked_at: float | None = None
        """Time (monotonic seconds) at which ``watch`` asked the loop for a sign of life; None after the sign."""
        self._answered_after_s = 0.0
        self._is_over = self._is_closed = False
        self._ringing = threading.RLock()
        """Lock held while the loop is rung, and while the socket is closed, after which another gets its number."""
        self._finishing: asyncio.Task[None] | None = None
        self._end = threading.Lock()
        self._end.acquire()
        self.thread = threading.Thread(target=self._run, name="envmanager-asyncio", daemon=True)
        try:
            self.thread.start()
        except BaseException:
            self._close()
            raise

    # In any thread.

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop. Do nothing if the loop has ended."""
        self._posted.append((function, args))
        if not self._is_awake:
            self._is_awake = True
            self._wake()

    def _wake(self) -> None:
        with defer_interrupts(), self._ringing:  # an interrupt would leave the lock locked
            if self._is_closed:
                pass
            elif _write is not None:
                _write(self._sockets[1].fileno(), b"!", 1)
            else:
                self.loop.call_soon_threadsafe(self._take_posted)

    def watch(self, now: float) -> LoopBlocked | None:
        """Look whether code blocks the loop. Return the event to add: once if it takes long, and when it is over.

        Call this regularly, with the time of ``time.monotonic()``. Code blocks the loop if it is found twice while the
        loop gives no sign of life. If it is found only once, there are many tasks, each of which takes little time.
        """
        if self._asked_at is None:
            blocked, self.blocked, self._suspect = self.blocked, None, None
            after_s, self._asked_at = self._answered_after_s, now
            self.post(self._answer)
            if blocked is None:
                return None
            return attrs.evolve(blocked, blocked_s=after_s, is_over=True, at_s=time.perf_counter())
        blocked_s = now - self._asked_at
        if self.blocked is not None:
            is_news = self.blocked.blocked_s < _LONG_S <= blocked_s
            self.blocked = attrs.evolve(self.blocked, blocked_s=blocked_s, at_s=time.perf_counter())
            return self.blocked if is_news else None
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None or frame.f_code.co_filename == selectors.__file__:
            return None  # the loop waits, perhaps for its turn while another thread keeps Python's lock
        inner = None
        while frame is not None and frame.f_code is not _RUN and frame.f_code.co_filename not in self._own_files:
            inner, frame = frame, frame.f_back
        frame = None if frame is None else inner or frame  # None: the loop's own code, whose frames are always there
        if frame is not None and frame is self._suspect and frame.f_code.co_filename != __file__:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            task = asyncio.current_task(self.loop)
            owners = [each for each in list(self.members) if task is not None and each.owns(task)]
            who, generation = (owners[0].worker_id, owners[0].generation) if owners else (-1, 0)
            self.blocked = LoopBlocked(
                worker_id=who, generation=generation, blocked_s=blocked_s, where=where, is_over=False
            )
        self._suspect = frame
        return None

    def finish(self, close_s: float) -> None:
        """Make the loop end its members within ``close_s`` seconds, then itself, without waiting. May be repeated."""
        self._posted.append((self._begin_to_finish, (close_s,)))
        self._wake()  # even if it should be awake: an interrupt may have cut ``post`` short

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the loop. Return whether it has ended."""
        if threading.current_thread() is self.thread:  # the garbage collector has closed a manager here
            return True
        # Not an Event, whose wait may be interrupted anywhere. An interrupt here may leave the lock locked.
        if not self._is_closed and self._end.acquire(timeout=timeout_s):
            self._end.release()
        if self._is_closed:
            self.thread.join(_REST_S)
        return self._is_closed

    # On the loop.

    def ring_soon(self, busy_s: float) -> None:
        """Ring for a response whose step took ``busy_s`` seconds, together with others that come soon."""
        hold_s = min(_HOLD_SHARE * busy_s, _LONGEST_HOLD_S)
        if hold_s < _LEAST_HOLD_S:
            if self._ring_at > 0.0:
                self._ring_at = 0.0
                self.loop.call_soon(self._ring_now)
            return
        ring_at = time.monotonic() + hold_s
        if ring_at < self._ring_at:
            self._ring_at = ring_at
            self.loop.call_at(ring_at, self._ring_now)

    def _ring_now(self) -> None:
        self._ring_at = math.inf
        self._ring()

    def _take_posted(self) -> None:
        if self._sockets:
            with contextlib.suppress(BlockingIOError):
                self._sockets[0].recv(64)
        self._is_awake = False  # first: what is posted from now on calls this again
        posted = self._posted
        while posted:
            function, args = posted.popleft()
            function(*args)

    def _answer(self) -> None:
        assert self._asked_at is not None
        self._answered_after_s, self._asked_at = time.monotonic() - self._asked_at, None

    def _run(self) -> None:
        while not self._is_over:
            try:
                self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit):  # asyncio passes on those of a task that no session awaits
                logger.exception("a task or a callback of an environment raised")
        self._close()
        self._end.release()

    def _close(self) -> None:
        with self._ringing:
            self._is_closed = True
            if self._sockets:
                self.loop.remove_reader(self._sockets[0])
            for each in self._sockets:
                each.close()
        self.loop.close()

    def _begin_to_finish(self, close_s: float) -> None:
        if self._finishing is None:
            self._finishing = self.loop.create_task(self._finish(close_s))

    async def _finish(self, close_s: float) -> None:
        deadline = time.monotonic() + close_s
        try:
            await wait([member.end() for member in list(self.members)], close_s)
            own = asyncio.current_task()
            left = [task for task in asyncio.all_tasks() if task is not own and task not in abandoned]
            for task in left:
                task.cancel()
            await wait(left, max(0.0, min(_REST_S, deadline - time.monotonic())))
            abandoned.update(task for task in left if not task.done())
            await wait([self.loop.create_task(self.loop.shutdown_asyncgens())], _REST_S)
        finally:
            self._is_over = True
            self.loop.stop()


async def wait(tasks: list[asyncio.Task[Any]], timeout_s: float) -> None:
    """Wait until all tasks are done, at most ``timeout_s`` seconds. No task is cancelled, and no error is raised."""
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)


def _log_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what an environment's own tasks and callbacks raise, and no other code awaits."""
    if loop.is_closed():
        return  # of a task that was abandoned
    error = context.get("exception")
    logger.warning("on the event loop of environments: %s", context.get("message"), exc_info=error)


class OwnThread:
    """A thread that carries out the calls of one environment, one after the other."""

    def __init__(self, loop: LoopThread, name: str) -> None:
        self._loop = loop
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run(self, function: Callable[..., Any], *args: Any) -> Coroutine[Any, Any, Any]:
        """Call ``function(*args)`` in the thread, after all earlier calls. Return its result, or raise its error.

        If the caller is cancelled meanwhile, the call goes on, and its result is discarded.
        """
        future = self._loop.loop.create_future()
        self._calls.put((future, function, args))
        return _outcome(future)

    def stop(self) -> None:
        """End the thread after the calls that it was given."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            result = error = None
            try:
                result = function(*args)
            except BaseException as raised:
                error = raised
            if self._loop.loop.is_closed():
                _discard(result)
            else:
                self._loop.post(_settle, future, (result, error))
            del call, future, function, args, result, error  # else they live until the next call


def _settle(future: asyncio.Future[Any], outcome: tuple[Any, BaseException | None]) -> None:
    if future.done():  # it was cancelled
        _discard(outcome[0])
    else:
        future.set_result(outcome)


def _discard(result: Any) -> None:
    """Close a result that is a coroutine and that no code awaits, of which Python would complain."""
    if isinstance(result, CoroutineType):
        result.close()


async def _outcome(future: asyncio.Future[Any]) -> Any:
    try:
        result, error = await future  # a future cannot hold every error: not StopIteration
    except asyncio.CancelledError:
        if not future.cancelled() and future.done():
            _discard(future.result()[0])
        raise
    if error is not None:
        try:
            raise error
        finally:
            del error
    return result
