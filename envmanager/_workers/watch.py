"""Watches over the workers of one manager, and is the one place where the manager waits for them.

::

    one epoll: where steps come from, every worker's death (pidfd), every worker's connection
        └──▶ what has come ──▶ deaths ──▶ deadlines ──▶ EnvironmentResponses

A worker that takes another's place responds here too, with its first observations. One that is not needed any more is
watched until it has ended.

The rule: what is there is read before a death or a deadline is believed; the last response counts. A worker's end comes
out of the queue as a "failed" response, once.
"""

from __future__ import annotations

import math
import select
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from envmanager._workers import descriptors
from envmanager._workers.remote import WHILE_BYTES_COME_S, Alarm, RemoteWorker, State
from envmanager._workers.spin import Spinner
from envmanager.core.sources import ResponseSource
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError
from envmanager.system.interrupts import let_through

_LONGEST_WAIT_S = 3600.0
"""A wait may be longer than epoll's argument can be; it is then made of several."""
_WATCH_EVERY_S = 0.01
"""How often to look for deaths and time-outs while responses keep coming, so that a busy queue does not hide them."""

Worker = TypeVar("Worker", bound=RemoteWorker)


_FIRST = (CommandName.START, CommandName.RESET)
"""What a replacement is asked before its first step."""


class Watch(ResponseSource, Generic[Worker]):
    """Responses to "step", in order of completion; subclasses say where they come from."""

    def __init__(self, *, on_retired: Callable[[Worker], None], spin_ns: int) -> None:
        """``on_retired(handle)``: it has ended as asked. ``spin_ns``: how long a wait may spin."""
        self._epoll = select.epoll()
        descriptors.register(self._epoll.fileno())
        self._handles: dict[int, Worker] = {}
        self._by_fd: dict[int, Worker] = {}
        self._arrived: list[EnvironmentResponse] = []
        self._spinner = Spinner(spin_ns)
        self._watch_at = 0.0
        self._on_retired = on_retired
        self._retiring: set[Worker] = set()
        self._alarm = Alarm()
        self._is_woken = False

    @abstractmethod
    def _look(self) -> bool:
        """Take what has come, by the shortest way; whether there are responses now."""

    @abstractmethod
    def _look_aside(self) -> None:
        """Take what has come by other ways than the connections of workers."""

    @abstractmethod
    def _take_messages(self, handle: Worker) -> None:
        """Its connection was read: make responses to steps of what is there."""

    @abstractmethod
    def _ring(self) -> None:
        """End a wait in another thread."""

    def register(self, handle: Worker) -> None:
        """Take responses from this worker, and watch over it."""
        self._handles[handle.worker_id] = handle
        handle.alarm = self._alarm
        handle.channel.on_moved = partial(self._move, handle)
        for fd in (handle.process.pidfd, handle.channel.fd):
            self._start_watching(handle, fd)

    def forget(self, handle: Worker) -> None:
        """Take no more responses from this worker."""
        self._retiring.discard(handle)
        for fd in (handle.process.pidfd, handle.channel.fd):
            self._stop_watching(handle, fd)

    def retire(self, handle: Worker) -> None:
        """Watch over a worker that was asked to end; another may take its number."""
        self._retiring.add(handle)

    def wake(self) -> None:
        """Have a ``wait`` in another thread end with nothing, now and always."""
        self._is_woken = True
        self._ring()

    def _start_watching(self, handle: Worker, fd: int) -> None:
        self._by_fd[fd] = handle
        self._epoll.register(fd, select.EPOLLIN)

    def _stop_watching(self, handle: Worker, fd: int) -> None:
        """Twice does no harm, also when the number has become another worker's meanwhile."""
        if self._by_fd.get(fd) is handle:
            del self._by_fd[fd]
            self._epoll.unregister(fd)

    def _move(self, handle: Worker, before: int, after: int) -> None:
        """Its channel has another descriptor now. Called before the old one is closed."""
        if self._by_fd.get(before) is handle:
            self._stop_watching(handle, before)
            self._start_watching(handle, after)

    def take(self) -> Sequence[EnvironmentResponse]:
        if time.monotonic() >= self._watch_at:
            self._watch(0.0)
        else:
            self._look()
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, timeout: float | None, n_wanted: int = 1) -> Sequence[EnvironmentResponse]:
        """A worker that ends or runs out of time meanwhile is a response too."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while not self._arrived:
            self._spinner.wait(self._look, lambda: self._sleep(give_up))
            if not self._arrived and (self._is_woken or time.monotonic() >= give_up):
                break
        arrived, self._arrived = self._arrived, []
        return arrived

    def _sleep(self, give_up: float) -> None:
        if self._is_woken:  # what rang may have been read already
            return
        left_s = max(0.0, min(give_up, self._alarm.at) - time.monotonic())
        self._watch(min(left_s + 0.001, _LONGEST_WAIT_S))

    def _watched(self) -> list[Worker]:
        return [*self._handles.values(), *self._retiring]

    def _watch(self, timeout_s: float) -> None:
        """Wait for anything at all, then see what it was: responses first, then deaths and time-outs."""
        if timeout_s > 0:
            with let_through():
                events = self._epoll.poll(timeout_s)
        else:
            events = self._epoll.poll(0)
        self._watch_at = time.monotonic() + _WATCH_EVERY_S
        self._look_aside()
        for fd, _ in events:
            handle = self._by_fd.get(fd)
            if handle is not None and fd == handle.process.pidfd:
                self._note_death(handle)
            elif handle is not None:
                self._pump(handle)
        self._note_timeouts()

    def _pump(self, handle: Worker) -> None:
        channel = handle.channel
        if channel.pump():
            handle.due_at = max(handle.due_at, time.monotonic() + WHILE_BYTES_COME_S)
        if channel.hung_up:  # it would wake us for ever; the worker's end or its deadline will tell
            self._stop_watching(handle, channel.fd)
        if handle.awaited in _FIRST:
            first = handle.take_first()
            if first is not None:
                self._arrived.append(first)
        self._take_messages(handle)
        if channel.broken and handle.state is not State.GONE:
            if handle in self._retiring:
                handle.kill()  # its end is noted next
            else:
                self._note_end(handle, handle.broke_protocol)

    def _note_end(self, handle: Worker, describe: Callable[[CommandName | None], EnvManagerError]) -> None:
        during = handle.awaited
        self.forget(handle)
        self._arrived.append(handle.decoder.failed(describe(during)))

    def _note_death(self, handle: Worker) -> None:
        if handle in self._retiring:
            self._on_retired(handle)
            return
        self._pump(handle)
        if handle.state is not State.GONE:  # else it was reported by recv
            self._note_end(handle, handle.died)
        else:
            self.forget(handle)

    def _note_timeouts(self) -> None:
        now = time.monotonic()
        if now < self._alarm.at:
            return
        for handle in self._watched():
            if handle.due_at <= now:
                self._pump(handle)
            if handle.due_at <= now and handle.awaited is not None:
                self._note_timeout(handle, handle.awaited)
        self._alarm.at = min((handle.due_at for handle in self._watched()), default=math.inf)

    def _note_timeout(self, handle: Worker, awaited: CommandName) -> None:
        if handle in self._retiring:
            handle.kill()  # its end is noted next
        else:
            self.forget(handle)
            self._arrived.append(handle.decoder.failed(handle.timed_out(awaited)))

    def close(self) -> None:
        """Give back what it holds. The workers must have gone."""
        descriptors.forget(self._epoll.fileno())
        self._epoll.close()
