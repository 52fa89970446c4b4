"""The manager's end of the step queue of Python workers: one pipe for all of them.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ take / wait ──▶ EnvironmentResponses
    worker 2 ──┘

A record whose step does not fit into shared memory is followed by a message through the worker's own connection.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

import attrs

from envmanager._workers import descriptors
from envmanager._workers.handle import WorkerHandle
from envmanager._workers.watch import Watch
from envmanager._workers.wire import FULL, IN_MEMORY, RECORD, WITH_MESSAGE
from envmanager.observe.events import EventLog, LateReplyDiscarded

_READ_SIZE = 256 * RECORD.size
_NOBODY = 2**32 - 1
"""The worker_id of a record that only wakes."""
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


class ProcessStepQueue(Watch[WorkerHandle]):
    """Responses to "step", in order of completion."""

    def __init__(self, events: EventLog, *, on_retired: Callable[[WorkerHandle], None], spin_ns: int) -> None:
        super().__init__(on_retired=on_retired, spin_ns=spin_ns)
        self._read_fd, self.write_fd = os.pipe()
        descriptors.register(self._read_fd)
        descriptors.register(self.write_fd)
        self._has_records = select.poll()
        self._has_records.register(self._read_fd, select.POLLIN)
        self._epoll.register(self._read_fd, select.EPOLLIN)
        self._awaited: list[_Awaited] = []
        self._events = events

    def forget(self, handle: WorkerHandle) -> None:
        super().forget(handle)
        self._awaited = [awaited for awaited in self._awaited if awaited.handle is not handle]

    def _ring(self) -> None:
        if self.write_fd != descriptors.CLOSED:
            os.write(self.write_fd, RECORD.pack(0, _NOBODY, 0, 0, 0, 0, 0, 0, 0, 0))

    def _look(self) -> bool:
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
            self._take_awaited()
        return bool(arrived)

    def _look_aside(self) -> None:
        self._look()

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

    def _take_messages(self, handle: WorkerHandle) -> None:
        if self._awaited:
            self._take_awaited()

    def _take_awaited(self) -> None:
        """Finish the steps whose messages are there."""
        for awaited in list(self._awaited):
            handle = awaited.handle
            message = handle.channel.take(awaited.ticket)
            if message is not None:
                self._awaited.remove(awaited)
                handle.await_nothing()
                where = (awaited.code, awaited.slot, awaited.flags, awaited.n_ended)
                self._arrived.append(handle.decoder.step(*where, message.data))

    def close(self) -> None:
        super().close()
        self._read_fd = descriptors.close(self._read_fd)
        self.write_fd = descriptors.close(self.write_fd)
