"""The poller of Python worker processes: one pipe brings the steps of all.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ take / wait ──▶ EnvironmentResponses
    worker 2 ──┘

A record whose step does not fit into shared memory is followed by a message through the worker's own connection.
"""

from __future__ import annotations

import os
import select

import attrs

from envmanager.hosts import descriptors
from envmanager.hosts.poller import Poller
from envmanager.hosts.wire import FULL, IN_MEMORY, RECORD, WITH_MESSAGE
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.processes.process_link import ProcessLink

_READ_SIZE = 256 * RECORD.size
_PLAIN, _PLAIN_MASK = IN_MEMORY | FULL, IN_MEMORY | FULL | WITH_MESSAGE
"""The flags of a record that no message follows, of a step that was written in place."""


@attrs.define
class _Awaited:
    """A record whose message has not arrived in full."""

    handle: ProcessLink
    ticket: int
    code: int
    slot: int
    flags: int
    n_ended: int


class ProcessPoller(Poller[ProcessLink]):
    """Responses to "step", in order of completion."""

    def __init__(self, events: EventLog, *, spin_ns: int) -> None:
        super().__init__(spin_ns=spin_ns)
        self._read_fd, self.write_fd = os.pipe()
        descriptors.register(self._read_fd)
        descriptors.register(self.write_fd)
        self._has_records = select.poll()
        self._has_records.register(self._read_fd, select.POLLIN)
        self.epoll.register(self._read_fd, select.EPOLLIN)
        self._awaited: list[_Awaited] = []
        self._events = events

    def forget(self, link: ProcessLink) -> None:
        super().forget(link)
        self._awaited = [awaited for awaited in self._awaited if awaited.handle is not link]

    def collect(self) -> bool:
        """Read the records in the pipe; return whether there are responses now."""
        arrived, links = self.arrived, self.links
        while self._has_records.poll(0):  # a read that raises takes several times as long
            data = os.read(self._read_fd, _READ_SIZE)
            for ticket, worker_id, generation, code, slot, flags, n_ended, busy, idle, ended in RECORD.iter_unpack(
                data
            ):
                link = links.get(worker_id)
                if link is None or ticket != link.step_ticket or generation != link.generation:
                    self._events.add(LateReplyDiscarded(worker_id=worker_id, generation=generation, ticket=ticket))
                    continue
                link.times.stepped(busy, idle, ended)
                if flags & _PLAIN_MASK == _PLAIN:
                    link.await_nothing()
                    arrived.append(link.decoder.in_place(slot, n_ended))
                elif flags & WITH_MESSAGE:
                    link.await_message()
                    self._awaited.append(_Awaited(link, ticket, code, slot, flags, n_ended))
                    self.pump(link)
                else:
                    link.await_nothing()
                    arrived.append(link.decoder.step(code, slot, flags, n_ended, None))
            if len(data) < _READ_SIZE:
                break
        if self._awaited:  # a message may have been read while another response of that worker was waited for
            self._take_awaited()
        return bool(arrived)

    look = collect

    def take_step(self, link: ProcessLink) -> None:
        """Finish the steps whose messages are there."""
        if self._awaited:
            self._take_awaited()

    def _take_awaited(self) -> None:
        for awaited in list(self._awaited):
            link = awaited.handle
            message = link.take(awaited.ticket)
            if message is not None:
                self._awaited.remove(awaited)
                link.await_nothing()
                where = (awaited.code, awaited.slot, awaited.flags, awaited.n_ended)
                self.arrived.append(link.decoder.step(*where, message.data))

    def close(self) -> None:
        super().close()
        self._read_fd = descriptors.close(self._read_fd)
        self.write_fd = descriptors.close(self.write_fd)
