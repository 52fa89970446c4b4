"""The answers of all actors of one manager, and the one place where it waits for them.

::

    an answer, in a thread of Ray's ── answered ──▶ came ──▶ bell
                                 the trainer ── take, wait, wait_for ──▶ each worker takes in what is its own

Nothing is polled: who waits, waits for the bell. Only the end of a worker that is asked nothing would go unseen, so
each of those is asked once a second whether it lives, while the trainer takes steps of the others.

The rule: Ray's threads only put something at the end of ``came`` and ring; all else happens in the trainer's calls. A
worker's end is told once, by ``recv`` where somebody asks it, else by the queue.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from envmanager._workers.remote import State
from envmanager.core.sources import ResponseSource
from envmanager.data.steps import EnvironmentResponse
from envmanager.ray_cluster.wire import brings_step
from envmanager.ray_cluster.worker import RayWorker
from envmanager.system.interrupts import let_through

_PING_EVERY_S = 1.0
_DEAF_S = 0.05
_LONGEST_WAIT_S = 3600.0
"""A wait may be longer than a lock's argument can be; it is then made of several."""


class AnswerQueue(ResponseSource):
    """Responses to "step" in order of arrival, and of workers that take another's place the first observations."""

    def __init__(self, is_connected: Callable[[], bool]) -> None:
        """``is_connected()``: whether actors can still be reached."""
        self._is_connected = is_connected
        self._came: deque[tuple[RayWorker, int, Any, int]] = deque()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._arrived: list[EnvironmentResponse] = []
        self._ended: list[RayWorker] = []
        """Those whose end was noticed and not told."""
        self._workers: dict[int, RayWorker] = {}
        self._retiring: set[RayWorker] = set()
        self._alarm_at = math.inf
        """No worker is late before."""
        self._ping_at = 0.0
        self._n_wanted = 1
        """How many steps are worth waking for: the trainer's thread and Ray's are in each other's way."""
        self._is_woken = False
        self._owner_pid = os.getpid()

    # What workers and Ray call.

    def answered(self, worker: RayWorker, ticket: int, future: Any) -> None:
        """Called in a thread of Ray's."""
        self._came.append((worker, ticket, future, time.monotonic_ns()))
        if len(self._came) >= self._n_wanted or not brings_step(future):
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def expect(self, due_at: float) -> None:
        """Somebody is late from then on."""
        if due_at < self._alarm_at:
            self._alarm_at = due_at

    # What the host calls.

    def register(self, worker: RayWorker) -> None:
        """Watch over this worker, in the place of another, if there was one."""
        before = self._workers.get(worker.worker_id)
        if before is not None and before in self._ended:  # what takes its place must not be taken for what ended
            self._ended.remove(before)
        self._workers[worker.worker_id] = worker

    def retire(self, worker: RayWorker, close_s: float) -> None:
        """Ask a healthy worker that is not needed any more to close, and see to it that it ends."""
        worker.ask_to_close(close_s)
        self._retiring.add(worker)

    def close_all(self, close_s: float) -> None:
        """Ask all to close, wait until they have, at most so long, and end them."""
        if os.getpid() != self._owner_pid or not self._is_connected():
            return  # in a process that the trainer forked, the actors are not its own
        workers = [*self._workers.values(), *self._retiring]
        deadline = time.monotonic() + close_s
        self._pump()
        try:
            for worker in workers:
                worker.ask_to_close(close_s)
            self._pump()
            while not all(worker.has_answered for worker in workers) and time.monotonic() < deadline:
                with let_through():  # a call in another thread may hear the bell instead
                    self._bell.acquire(timeout=_DEAF_S)
                self._pump()
        finally:
            for worker in workers:
                worker.kill()

    def wake(self) -> None:
        """Have a wait in another thread end with nothing, now and always."""
        self._is_woken = True
        self._ring()

    # What the trainer calls.

    def take(self) -> Sequence[EnvironmentResponse]:
        self._look()
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + _PING_EVERY_S
            for worker in self._workers.values():
                if worker.is_idle:
                    worker.ping()
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """A worker that ends or runs out of time meanwhile is a response too."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._look()
        while not self._arrived and not self._is_woken:
            if not self._sleep(deadline, self._alarm_at, n_wanted):
                break
            self._look()
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait_for(self, worker: RayWorker, deadline: float) -> None:
        """Return when the worker has answered what it was asked, or is gone, or at the deadline."""
        self._wait_until(lambda: worker.has_answered, deadline)
        if worker in self._ended:
            self._ended.remove(worker)  # who waits tells it

    def _wait_until(self, is_done: Callable[[], bool], deadline: float) -> None:
        self._pump()
        while not is_done() and not self._is_woken and self._sleep(deadline, math.inf):
            self._pump()

    def _sleep(self, deadline: float, alarm_at: float, n_wanted: int = 1) -> bool:
        """Wait for the bell, no longer than until the deadline or the alarm; False at the deadline.

        It rings when so many steps have come, and for anything else.
        """
        now = time.monotonic()
        if now >= deadline:
            return False
        left_s = min(deadline, alarm_at) - now
        self._n_wanted = n_wanted
        try:
            if len(self._came) < n_wanted:  # else nobody may ring
                with let_through():
                    self._bell.acquire(timeout=min(max(0.0, left_s), _LONGEST_WAIT_S))
        finally:
            self._n_wanted = 1
        return True

    def _look(self) -> None:
        """Take in what came, then see who is late."""
        self._pump()
        if time.monotonic() >= self._alarm_at:
            self._note_late()
        if self._ended:
            self._arrived += [worker.failed() for worker in self._ended]
            self._ended.clear()

    def _pump(self) -> None:
        while True:
            try:
                worker, ticket, future, at_ns = self._came.popleft()
            except IndexError:
                return
            was_gone = worker.state is State.GONE
            response = worker.take_in(ticket, future, at_ns)
            if response is not None:
                self._arrived.append(response)
            if worker in self._retiring:
                self._see_off(worker)
            elif worker.state is State.GONE and not was_gone:
                self._ended.append(worker)

    def _see_off(self, worker: RayWorker) -> None:
        if worker.has_answered:
            self._retiring.discard(worker)
            worker.kill()

    def _note_late(self) -> None:
        now = time.monotonic()
        for worker in [*self._workers.values(), *self._retiring]:
            if worker.due_at > now:
                continue
            if worker in self._retiring:
                self._retiring.discard(worker)
                worker.kill()
            elif worker.state is not State.GONE:
                worker.timed_out()
                self._ended.append(worker)
        self._alarm_at = min((each.due_at for each in (*self._workers.values(), *self._retiring)), default=math.inf)
