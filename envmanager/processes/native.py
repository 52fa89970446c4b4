"""The transport for Linux: a helper process starts the workers, and all workers report steps through one pipe.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ take / wait ──▶ EnvironmentResponses
    worker 2 ──┘

A step that is not entirely in shared memory comes as a message through the worker's own connection instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import time
from functools import partial

from envmanager.hosts import descriptors
from envmanager.hosts.link_host import Resources
from envmanager.hosts.poller import Poller
from envmanager.hosts.wire import RECORD, RECORD_MARK
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.processes.output import take_crash_report
from envmanager.processes.process_host import LaunchPlan, ProcessHost, ProcessLink
from envmanager.processes.starting import HelperGone, Process, start

_READ_SIZE = 1 << 16
"""Number of bytes that a pipe holds. One read takes all records, so no death is believed before a last record."""
_MARK = re.escape(RECORD_MARK)
_RECORDS = re.compile(_MARK + b"(?:(?!%b).){%d}" % (_MARK, RECORD.size - len(RECORD_MARK)), re.DOTALL)
_logger = logging.getLogger("envmanager")


class NativeLink(ProcessLink):
    """The link to a worker that the helper process started. All these workers report steps through one step pipe."""

    process: Process

    def launch(self, plan: LaunchPlan, pickled_factory: bytes, output_fd: int | None) -> tuple[Process, int]:
        assert isinstance(plan.memory, int)
        is_second = False
        while True:
            ours, theirs = socket.socketpair()
            fd = descriptors.register(ours.detach())
            os.set_blocking(fd, False)
            try:
                with theirs:
                    process = start(
                        plan.options.start_method or "forkserver",
                        *plan.call(pickled_factory),
                        fds=(theirs.fileno(), plan.memory, *plan.shared_fds),
                        output=(1, 2) if output_fd is None else (output_fd, output_fd),
                        environ=plan.environ,
                        deadline=time.monotonic() + plan.timeouts.start_s,
                    )
                return process, fd
            except BaseException as error:
                descriptors.close(fd)
                # Try once more, with a new helper and another connection. A worker that the old helper may still fork
                # finds its connection closed and exits.
                if is_second or not isinstance(error, HelperGone):
                    raise
                is_second = True

    def output_tail(self) -> str:
        """Return the end of the worker's log, and its native crash report if there is one. Erase that report."""
        report, (_, crash_fd) = "", self._plan.shared_fds
        if descriptors.is_registered(crash_fd):  # else another thread has called close()
            with contextlib.suppress(OSError):
                report = take_crash_report(crash_fd, self.worker_id)
        return "\n".join(filter(None, [super().output_tail(), report]))


class StepPipePoller(Poller[ProcessLink]):
    """A poller that also reads the step pipe, through which all workers report their steps."""

    def __init__(self, events: EventLog, *, spin_ns: int) -> None:
        super().__init__(spin_ns=spin_ns)
        self._read_fd, self.write_fd = map(descriptors.register, os.pipe())
        os.set_blocking(self._read_fd, False)
        self.epoll.register(self._read_fd, select.EPOLLIN)
        self._events = events
        self._rest = b""
        """Bytes of the step pipe at the end of the last read that may be the beginning of a record."""
        self._has_strays = False

    def read_other(self, fd: int) -> None:
        """Read ``fd`` if it is the step pipe. Append a response to ``arrived`` for each record that is not late."""
        if fd != self._read_fd:
            return
        try:
            data = os.read(fd, _READ_SIZE)
        except BlockingIOError:
            return
        if len(data) != RECORD.size or data[: len(RECORD_MARK)] != RECORD_MARK or self._rest:  # else one record
            data, self._rest = self._rest + data, b""
            if data.count(RECORD_MARK) * RECORD.size != len(data) or not data.startswith(RECORD_MARK, -RECORD.size):
                data = self._without_strays(data)
        for _, ticket, worker_id, generation, slot, flags, n_ended, busy_ns, ended_ns in RECORD.iter_unpack(data):
            link = self.links.get(worker_id)
            if link is None or ticket != link.awaited.ticket or generation != link.generation:
                self._events.add(LateReplyDiscarded(worker_id=worker_id, generation=generation, ticket=ticket))
                continue
            link.times.stepped(busy_ns, ended_ns)
            link.awaited.clear()
            self.arrived.append(link.decoder.record(slot, flags, n_ended))

    def _without_strays(self, data: bytes) -> bytes:
        """Return the records in ``data``. Keep the end for the next read if it may belong to a record; log the rest."""
        records = list(_RECORDS.finditer(data))
        end = records[-1].end() if records else 0
        self._rest = data[max(end, len(data) - RECORD.size + 1) :]
        if not self._has_strays:
            self._has_strays = True
            _logger.warning(
                "bytes that are no record came through the pipe in which the workers report their steps. They are "
                "skipped, and no step is lost. An environment writes to a file descriptor that it did not open. "
                'With transport="portable" each worker has a connection of its own, and the error names the worker.'
            )
        return b"".join(each.group() for each in records)

    def close(self) -> None:
        super().close()
        self._read_fd, self.write_fd = map(descriptors.close, (self._read_fd, self.write_fd))


class NativeHost(ProcessHost):
    """A ProcessHost whose workers are started by the helper process and report their steps through one pipe."""

    link_class = NativeLink

    def _make_resources(self) -> Resources[ProcessLink]:
        self._memory, crash_fd = map(descriptors.create_memory, ("envmanager", "envmanager-crashes"))
        close_all = (partial(descriptors.close, fd) for fd in (self._memory, crash_fd))
        poller = StepPipePoller(self.context.events, spin_ns=self._spin_ns)
        self._shared_fds = poller.write_fd, crash_fd
        return Resources(self.options.timeouts.close_s, poller, *close_all)
