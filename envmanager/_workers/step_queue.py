"""The manager's end of the step queue: one pipe for all workers, and the one place where the manager waits.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ get_nowait / get ──▶ EnvironmentResponse
    worker 2 ──┘                    ▲
                     one epoll: the step pipe, every worker's death (pidfd), every worker's connection

The rule: read what is there before believing a death or a deadline; the last reply counts. A worker's end comes out of
the queue as a "failed" response, once. A worker that takes another's place answers here too, with its first
observations, and one that is not needed any more is watched until it has ended.
"""

from __future__ import annotations

import math
import os
import queue
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from envmanager._workers import descriptors
from envmanager._workers.handle import WHILE_BYTES_COME_S, Alarm, State, WorkerHandle
from envmanager._workers.spin import Spinner
from envmanager._workers.wire import EXTRA, RECORD
from envmanager.events import EventLog, LateReplyDiscarded
from envmanager.hosting import News
from envmanager.interrupts import let_through
from envmanager.steps import CommandName, EnvironmentResponse

_RECORDS_AT_ONCE = 256
_NOBODY = 2**32 - 1
"""The worker_id of a record that only wakes."""
_LONGEST_WAIT_S = 3600.0
"""A wait may be longer than epoll's argument can be; it is then made of several."""
_WATCH_EVERY_S = 0.01
"""How often to look for deaths and time-outs while answers keep coming, so that a busy queue does not hide them."""


@attrs.define
class _Awaited:
    """A record whose message has not arrived in full."""

    handle: WorkerHandle
    ticket: int
    code: int
    slot: int
    flags: int


class StepQueue:
    """Answers to "step", in order of completion. ``get_nowait`` and ``get`` raise queue.Empty when there is none."""

    def __init__(
        self,
        events: EventLog,
        *,
        on_news: Callable[[News, int], None],
        on_retired: Callable[[WorkerHandle], None],
    ) -> None:
        """``on_news(news, worker_id)``: what a worker tells besides its answers.

        ``on_retired(handle)``: it has ended as asked.
        """
        self._read_fd, self.write_fd = os.pipe()
        descriptors.register(self._read_fd)
        descriptors.register(self.write_fd)
        os.set_blocking(self._read_fd, False)
        self._epoll = select.epoll()
        descriptors.register(self._epoll.fileno())
        self._epoll.register(self._read_fd, select.EPOLLIN)
        self._handles: dict[int, WorkerHandle] = {}
        self._by_fd: dict[int, WorkerHandle] = {}
        self._arrived: deque[EnvironmentResponse] = deque()
        self._awaited: list[_Awaited] = []
        self._spinner = Spinner()
        self._watch_at = 0.0
        self._events = events
        self._on_news = on_news
        self._on_retired = on_retired
        self._retiring: set[WorkerHandle] = set()
        self._alarm = Alarm()
        self._is_woken = False
        self._has_just_looked = False

    def register(self, handle: WorkerHandle) -> None:
        """Take answers from this worker, and watch over it."""
        self._handles[handle.worker_id] = handle
        handle.alarm = self._alarm
        handle.on_news = self._on_news
        for fd in (handle.process.pidfd, handle.fd):
            self._by_fd[fd] = handle
            self._epoll.register(fd, select.EPOLLIN)

    def forget(self, handle: WorkerHandle) -> None:
        """Take no more answers from this worker."""
        self._retiring.discard(handle)
        for fd in (handle.process.pidfd, handle.fd):
            self._stop_watching(handle, fd)
        self._awaited = [awaited for awaited in self._awaited if awaited.handle is not handle]

    def retire(self, handle: WorkerHandle) -> None:
        """Watch over a worker that was asked to end; another may take its number."""
        self._retiring.add(handle)

    def wake(self) -> None:
        """Have a ``get`` in another thread raise queue.Empty, now and always."""
        self._is_woken = True
        if self.write_fd != descriptors.CLOSED:
            os.write(self.write_fd, RECORD.pack(0, _NOBODY, 0, 0, 0, 0, 0, 0, 0, 0))

    def _stop_watching(self, handle: WorkerHandle, fd: int) -> None:
        """Twice does no harm, also when the number has become another worker's meanwhile."""
        if self._by_fd.get(fd) is handle:
            del self._by_fd[fd]
            self._epoll.unregister(fd)

    def empty(self) -> bool:
        """Whether ``get_nowait`` would raise queue.Empty."""
        self._look()
        return not self._arrived

    def get_nowait(self) -> EnvironmentResponse:
        """The next answer that has arrived. After the last one of a look there is none, without a look for more."""
        if not self._arrived:
            if self._has_just_looked:
                self._has_just_looked = False
                raise queue.Empty
            self._look()
            if not self._arrived:
                raise queue.Empty
        return self._next()

    def _next(self) -> EnvironmentResponse:
        self._has_just_looked = True
        return self._arrived.popleft()

    def _look(self) -> None:
        if time.monotonic() >= self._watch_at:
            self._watch(0.0)
        else:
            self._read_answers()

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse:
        """The next answer, waiting for it; a worker that ends or runs out of time meanwhile is an answer too."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while not self._waited(give_up):
            pass
        if not self._arrived:
            raise queue.Empty
        return self._next()

    def _waited(self, give_up: float) -> bool:
        """Wait once; True when the waiting is over, because something arrived or the time is up."""
        if self._arrived:
            return True
        self._spinner.wait(self._something_arrived, lambda: self._sleep(give_up))
        return bool(self._arrived) or self._is_woken or time.monotonic() >= give_up

    def _something_arrived(self) -> bool:
        self._read_answers()
        return bool(self._arrived)

    def _sleep(self, give_up: float) -> None:
        if self._is_woken:  # its record may have been read already
            return
        left_s = max(0.0, min(give_up, self._alarm.at) - time.monotonic())
        self._watch(min(left_s + 0.001, _LONGEST_WAIT_S))

    def _watched(self) -> list[WorkerHandle]:
        return [*self._handles.values(), *self._retiring]

    def _watch(self, timeout_s: float) -> None:
        """Wait for anything at all, then see what it was: answers first, then deaths and time-outs."""
        if timeout_s > 0:
            with let_through():
                events = self._epoll.poll(timeout_s)
        else:
            events = self._epoll.poll(0)
        self._watch_at = time.monotonic() + _WATCH_EVERY_S
        self._read_answers()
        for fd, _ in events:
            handle = self._by_fd.get(fd)
            if handle is not None and fd == handle.process.pidfd:
                self._note_death(handle)
            elif handle is not None:
                self._pump(handle)
        self._note_timeouts()

    def _read_answers(self) -> None:
        self._read_records()
        if self._awaited:  # a message may have been read by whoever waited for another answer of that worker
            self._take_extras()

    def _read_records(self) -> None:
        size = RECORD.size * _RECORDS_AT_ONCE
        full = True
        while full:
            try:
                data = os.read(self._read_fd, size)
            except BlockingIOError:
                return
            full = len(data) == size
            for record in RECORD.iter_unpack(data):
                self._take_record(record)

    def _take_record(self, record: tuple[int, ...]) -> None:
        ticket, worker_id, generation, code, slot, flags, _, busy, idle, ended = record
        if worker_id == _NOBODY:
            return
        handle = self._handles[worker_id]
        if not handle.is_answer(ticket, generation):
            self._events.add(LateReplyDiscarded(worker_id=worker_id, generation=generation, ticket=ticket))
            return
        handle.times.stepped(busy, idle, ended)
        if flags & EXTRA:
            handle.await_extra()
            self._awaited.append(_Awaited(handle, ticket, code, slot, flags))
            self._pump(handle)
        else:
            self._finish(handle, code, slot, flags, None)

    def _pump(self, handle: WorkerHandle) -> None:
        if handle.pump():
            handle.due_at = max(handle.due_at, time.monotonic() + WHILE_BYTES_COME_S)
        if handle.hung_up:  # it would wake us for ever; the worker's end or its deadline will tell
            self._stop_watching(handle, handle.fd)
        if handle.awaited in (CommandName.START, CommandName.RESET):
            self._begin_again(handle)
        self._take_extras()

    def _take_extras(self) -> None:
        """Finish the steps whose messages are there."""
        for awaited in list(self._awaited):
            extra = awaited.handle.take_extra(awaited.ticket)
            if extra is not None:
                self._awaited.remove(awaited)
                self._finish(awaited.handle, awaited.code, awaited.slot, awaited.flags, extra)

    def _begin_again(self, handle: WorkerHandle) -> None:
        """One step further for a worker that takes another's place, if its answer is there."""
        response = handle.take_answer()
        if response is None:
            return
        if response.name is CommandName.START:
            response = handle.heard(News(response.payload.specs), response)
        if response.name is CommandName.START:
            handle.go_on()
            return
        handle.await_nothing()
        self._arrived.append(response)

    def _finish(self, handle: WorkerHandle, code: int, slot: int, flags: int, extra: bytes | None) -> None:
        self._arrived.append(handle.take_step(code, slot, flags, extra))

    def _note_death(self, handle: WorkerHandle) -> None:
        if handle in self._retiring:
            self._on_retired(handle)
            return
        self._pump(handle)
        during = handle.awaited
        self.forget(handle)
        if handle.state is not State.GONE:  # else it was told by recv
            self._fail(handle, handle.died(during))

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

    def _note_timeout(self, handle: WorkerHandle, awaited: CommandName) -> None:
        if handle in self._retiring:
            handle.kill()  # its end is noted next
        else:
            self.forget(handle)
            self._fail(handle, handle.timed_out(awaited))

    def _fail(self, handle: WorkerHandle, error: Any) -> None:
        self._arrived.append(EnvironmentResponse(CommandName.FAILED, handle.worker_id, error))

    def close(self) -> None:
        """Give back the pipe. The workers must have gone."""
        descriptors.forget(self._epoll.fileno())
        self._epoll.close()
        self._read_fd = descriptors.close(self._read_fd)
        self.write_fd = descriptors.close(self.write_fd)
