"""The manager's end of the step queue: one pipe for all workers, and the one place where the manager waits.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ take / wait ──▶ EnvironmentResponses
    worker 2 ──┘                    ▲
                     one epoll: the step pipe, every worker's death (pidfd), every worker's connection

A worker that takes another's place responds here too, with its first observations. One that is not needed any more is
watched until it has ended.

The rule: what is there is read before a death or a deadline is believed; the last response counts. A worker's end comes
out of the queue as a "failed" response, once.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Callable, Sequence

import attrs

from envmanager._workers import descriptors
from envmanager._workers.handle import WHILE_BYTES_COME_S, Alarm, State, WorkerHandle
from envmanager._workers.spin import Spinner
from envmanager._workers.wire import FULL, IN_MEMORY, RECORD, WITH_MESSAGE
from envmanager.core.sources import ResponseSource
from envmanager.data.reports import News
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.system.interrupts import let_through

_READ_SIZE = 256 * RECORD.size
_NOBODY = 2**32 - 1
"""The worker_id of a record that only wakes."""
_LONGEST_WAIT_S = 3600.0
"""A wait may be longer than epoll's argument can be; it is then made of several."""
_WATCH_EVERY_S = 0.01
"""How often to look for deaths and time-outs while responses keep coming, so that a busy queue does not hide them."""


_PLAIN, _PLAIN_MASK = IN_MEMORY | FULL, IN_MEMORY | FULL | WITH_MESSAGE
"""The flags of a record that no message follows, of a step that was written in place."""


@attrs.define
class _Awaited:
    """A record whose message has not arrived in full."""

    handle: WorkerHandle
    ticket: int
    code: int
    slot: int
    flags: int
    n_ended: int


class ProcessStepQueue(ResponseSource):
    """Responses to "step", in order of completion."""

    def __init__(
        self,
        events: EventLog,
        *,
        on_news: Callable[[News, int], None],
        on_retired: Callable[[WorkerHandle], None],
    ) -> None:
        """``on_news(news, worker_id)``: what a worker reports besides its responses.

        ``on_retired(handle)``: it has ended as asked.
        """
        self._read_fd, self.write_fd = os.pipe()
        descriptors.register(self._read_fd)
        descriptors.register(self.write_fd)
        self._has_records = select.poll()
        self._has_records.register(self._read_fd, select.POLLIN)
        self._epoll = select.epoll()
        descriptors.register(self._epoll.fileno())
        self._epoll.register(self._read_fd, select.EPOLLIN)
        self._handles: dict[int, WorkerHandle] = {}
        self._by_fd: dict[int, WorkerHandle] = {}
        self._arrived: list[EnvironmentResponse] = []
        self._awaited: list[_Awaited] = []
        self._spinner = Spinner()
        self._watch_at = 0.0
        self._events = events
        self._on_news = on_news
        self._on_retired = on_retired
        self._retiring: set[WorkerHandle] = set()
        self._alarm = Alarm()
        self._is_woken = False

    def register(self, handle: WorkerHandle) -> None:
        """Take responses from this worker, and watch over it."""
        self._handles[handle.worker_id] = handle
        handle.alarm = self._alarm
        handle.decoder.on_news = self._on_news
        for fd in (handle.process.pidfd, handle.channel.fd):
            self._by_fd[fd] = handle
            self._epoll.register(fd, select.EPOLLIN)

    def forget(self, handle: WorkerHandle) -> None:
        """Take no more responses from this worker."""
        self._retiring.discard(handle)
        for fd in (handle.process.pidfd, handle.channel.fd):
            self._stop_watching(handle, fd)
        self._awaited = [awaited for awaited in self._awaited if awaited.handle is not handle]

    def retire(self, handle: WorkerHandle) -> None:
        """Watch over a worker that was asked to end; another may take its number."""
        self._retiring.add(handle)

    def wake(self) -> None:
        """Have a ``wait`` in another thread end with nothing, now and always."""
        self._is_woken = True
        if self.write_fd != descriptors.CLOSED:
            os.write(self.write_fd, RECORD.pack(0, _NOBODY, 0, 0, 0, 0, 0, 0, 0, 0))

    def _stop_watching(self, handle: WorkerHandle, fd: int) -> None:
        """Twice does no harm, also when the number has become another worker's meanwhile."""
        if self._by_fd.get(fd) is handle:
            del self._by_fd[fd]
            self._epoll.unregister(fd)

    def take(self) -> Sequence[EnvironmentResponse]:
        if time.monotonic() >= self._watch_at:
            self._watch(0.0)
        else:
            self._read_records()
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self, timeout: float | None) -> Sequence[EnvironmentResponse]:
        """A worker that ends or runs out of time meanwhile is a response too."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        while not self._arrived:
            self._spinner.wait(self._read_records, lambda: self._sleep(give_up))
            if not self._arrived and (self._is_woken or time.monotonic() >= give_up):
                break
        arrived, self._arrived = self._arrived, []
        return arrived

    def _sleep(self, give_up: float) -> None:
        if self._is_woken:  # its record may have been read already
            return
        left_s = max(0.0, min(give_up, self._alarm.at) - time.monotonic())
        self._watch(min(left_s + 0.001, _LONGEST_WAIT_S))

    def _watched(self) -> list[WorkerHandle]:
        return [*self._handles.values(), *self._retiring]

    def _watch(self, timeout_s: float) -> None:
        """Wait for anything at all, then see what it was: responses first, then deaths and time-outs."""
        if timeout_s > 0:
            with let_through():
                events = self._epoll.poll(timeout_s)
        else:
            events = self._epoll.poll(0)
        self._watch_at = time.monotonic() + _WATCH_EVERY_S
        self._read_records()
        for fd, _ in events:
            handle = self._by_fd.get(fd)
            if handle is not None and fd == handle.process.pidfd:
                self._note_death(handle)
            elif handle is not None:
                self._pump(handle)
        self._note_timeouts()

    def _read_records(self) -> bool:
        """Take what has come; whether there are responses now."""
        arrived, handles = self._arrived, self._handles
        while self._has_records.poll(0):  # a read that raises takes several times as long
            data = os.read(self._read_fd, _READ_SIZE)
            for record in RECORD.iter_unpack(data):
                ticket, worker_id, generation, _, slot, flags, n_ended, busy, idle, ended = record
                handle = handles.get(worker_id)
                if handle is None:  # of nobody: it only wakes
                    continue
                if ticket != handle.channel.step_ticket or generation != handle.generation:
                    self._events.add(LateReplyDiscarded(worker_id=worker_id, generation=generation, ticket=ticket))
                    continue
                handle.times.stepped(busy, idle, ended)
                if flags & _PLAIN_MASK == _PLAIN:
                    handle.await_nothing()
                    arrived.append(handle.decoder.in_place(slot, n_ended))
                else:
                    self._take_record(handle, record)
            if len(data) < _READ_SIZE:
                break
        if self._awaited:  # a message may have been read by whoever waited for another response of that worker
            self._take_messages()
        return bool(arrived)

    def _take_record(self, handle: WorkerHandle, record: tuple[int, ...]) -> None:
        """A record that is not all of the step."""
        ticket, _, _, code, slot, flags, n_ended, *_ = record
        if flags & WITH_MESSAGE:
            handle.await_message()
            self._awaited.append(_Awaited(handle, ticket, code, slot, flags, n_ended))
            self._pump(handle)
        else:
            handle.await_nothing()
            self._arrived.append(handle.decoder.step(code, slot, flags, n_ended, None))

    def _pump(self, handle: WorkerHandle) -> None:
        if handle.channel.pump():
            handle.due_at = max(handle.due_at, time.monotonic() + WHILE_BYTES_COME_S)
        if handle.channel.hung_up:  # it would wake us for ever; the worker's end or its deadline will tell
            self._stop_watching(handle, handle.channel.fd)
        if handle.awaited in (CommandName.START, CommandName.RESET):
            first = handle.take_first()
            if first is not None:
                self._arrived.append(first)
        self._take_messages()

    def _take_messages(self) -> None:
        """Finish the steps whose messages are there."""
        for awaited in list(self._awaited):
            handle = awaited.handle
            message = handle.channel.take(awaited.ticket)
            if message is not None:
                self._awaited.remove(awaited)
                handle.await_nothing()
                where = (awaited.code, awaited.slot, awaited.flags, awaited.n_ended)
                self._arrived.append(handle.decoder.step(*where, message.data))

    def _note_death(self, handle: WorkerHandle) -> None:
        if handle in self._retiring:
            self._on_retired(handle)
            return
        self._pump(handle)
        during = handle.awaited
        self.forget(handle)
        if handle.state is not State.GONE:  # else it was reported by recv
            self._arrived.append(handle.decoder.failed(handle.died(during)))

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
            self._arrived.append(handle.decoder.failed(handle.timed_out(awaited)))

    def close(self) -> None:
        """Give back the pipe. The workers must have gone."""
        descriptors.forget(self._epoll.fileno())
        self._epoll.close()
        self._read_fd = descriptors.close(self._read_fd)
        self.write_fd = descriptors.close(self.write_fd)
