"""The manager's link to a worker process, and the poller of all these links.

::

    worker 0 ──┐
    worker 1 ──┼── RECORDs ──▶ step pipe ──▶ take / wait ──▶ EnvironmentResponses
    worker 2 ──┘

Actions and observations are in shared memory if they fit. Otherwise they are pickled and sent through the worker's own
connection, and the step is reported by a message instead of a record.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import WorkerTimedOut
from envmanager.hosts import descriptors
from envmanager.hosts.link import Link, WorkerPlan
from envmanager.hosts.poller import Poller
from envmanager.hosts.shared_rows import SharedRows
from envmanager.hosts.wire import (
    ATTACH_CODE,
    CODES,
    COMMAND,
    RECORD,
    Channel,
    Decoder,
    Message,
    dumps_command,
)
from envmanager.observe.events import EventLog, LateReplyDiscarded
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig
from envmanager.processes.output import OutputLog, take_crash_report
from envmanager.processes.starting import THREAD_CAPS, HelperGone, Process, start

_STEP, _STEP_ROWS = CommandName.STEP, CommandName.STEP_ROWS
_READ_SIZE = 256 * RECORD.size
_DESCRIPTORS_TO_START = 16
"""Number of free descriptors required before a start. It needs fewer, so no start runs out of them half-way."""


@attrs.frozen(kw_only=True)
class LaunchPlan(WorkerPlan):
    """The arguments for the start of a worker process, except its factory."""

    seed: int
    start_method: str
    memory_fd: int
    steps_fd: int
    crash_fd: int
    n_slots: int
    spin_ns: int
    """Maximum time in ns that the worker polls for a command before it sleeps."""
    environ: Mapping[str, str] = attrs.field(repr=False)  # may contain secrets
    log_dir: str | None


def launch(plan: LaunchPlan, pickled_factory: bytes) -> tuple[Process, int, OutputLog | None]:
    """Start the process. Return it, the trainer's end of its connection, and its log (None without ``log_dir``).

    Raises TimeoutError after ``start_s``, and WorkerError if the process cannot be started.
    """
    descriptors.require_room(_DESCRIPTORS_TO_START)
    descriptors.open_standard()  # the trainer may have closed standard descriptors since the last start
    log, output, is_second = None, (1, 2), False
    if plan.log_dir is not None:
        log, fd = OutputLog.open(plan.log_dir, plan.worker_id, plan.generation)
        output = fd, fd
    try:
        while True:
            ours, theirs = socket.socketpair()
            fd = descriptors.register(ours.detach())
            os.set_blocking(fd, False)
            try:
                with theirs:
                    process = start(
                        plan.start_method,
                        f"envmanager-worker-{plan.worker_id}",
                        "envmanager.processes.child:main",
                        (plan.worker_id, plan.generation, plan.seed, plan.spin_ns, pickled_factory),
                        fds=(theirs.fileno(), plan.steps_fd, plan.memory_fd, plan.crash_fd),
                        output=output,
                        environ={**dict.fromkeys(THREAD_CAPS, "1"), **plan.environ},
                        deadline=time.monotonic() + plan.timeouts.start_s,
                    )
                return process, fd, log
            except BaseException as error:
                descriptors.close(fd)
                # Try once more, with a new helper and another connection. A worker that the old helper may still fork
                # finds its connection closed and exits.
                if is_second or not isinstance(error, HelperGone):
                    raise
                is_second = True
    except TimeoutError:
        raise
    except OSError as error:
        raise plan.not_started("process", error) from error
    finally:
        if log is not None:
            os.close(output[0])


class ProcessLink(Link):
    """The link to a worker process. Actions are in shared memory; steps are reported through the step pipe."""

    decoder: Decoder

    def __init__(self, pickled_factory: bytes, plan: LaunchPlan, events: EventLog, times: WorkerTimes) -> None:
        super().__init__(plan, Channel(), events, times)
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._plan = plan
        self._worker_rows: SharedRows | None = None
        self._rows_to_attach: SharedRows | None = None
        try:
            self.process, fd, self._log = launch(plan, pickled_factory)
        except TimeoutError as error:
            raise WorkerTimedOut(**self._facts(CommandName.START), timeout_s=plan.timeouts.start_s) from error
        self.channel.open(fd, self.process.pidfd)

    def send(self, name: str, payload: Any = None) -> None:
        command = name if name.__class__ is CommandName else CommandName(name)
        if command is _STEP:
            self._send_step(command, payload, payload, None)
        elif command is _STEP_ROWS:
            self._send_step(command, payload, payload[1], payload[0])
        else:
            super().send(command, payload)

    def _send_step(self, command: CommandName, payload: Any, actions: Any, rows: Any) -> None:
        """Send a step on the fast path. The caller has deferred interrupts."""
        flags = 0 if self._worker_rows is None else self._worker_rows.write_actions(actions, rows)
        data = b"" if flags else dumps_command(payload)
        slot = (self.slot + 1) % self._plan.n_slots
        deadline = time.monotonic() + self._step_s
        ticket = self.ticket + 1
        message = COMMAND.pack(ticket, CODES[command], slot, flags, 0, len(data)) + data
        self.ticket = self.step_ticket = ticket  # here, because to pack the message may raise MemoryError
        try:
            n_written = os.write(self.channel.fd, message)
        except OSError:  # the socket is full, or the worker has ended
            n_written = 0
        if n_written < len(message):
            self.channel.push(message[n_written:], deadline)
        self.slot = slot
        self._await(_STEP, deadline)

    def attach(self, worker_rows: SharedRows) -> None:
        """Use these rows of the shared memory for all later steps, and send their layout to the worker."""
        self._worker_rows = worker_rows
        self.decoder.attach(worker_rows)
        data = pickle.dumps(worker_rows.layout)
        self.ticket += 1
        message = COMMAND.pack(self.ticket, ATTACH_CODE, self.slot, 0, 0, len(data)) + data
        self.channel.push(message, time.monotonic() + self._timeouts.call_s)

    def begin_again_in(self, worker_rows: SharedRows | None, config: ResetConfig, slot: int) -> None:
        """Schedule that the poller attaches a replacement to the memory and resets it, once it has started.

        ``slot`` is the last slot of the other workers, so that from then on all workers' rows are one view again.
        """
        self.slot, self._rows_to_attach = slot, worker_rows
        self.begin_again(config)

    def have_started_again(self) -> None:
        if self._rows_to_attach is not None:
            self.attach(self._rows_to_attach)

    def step_response(self, message: Message) -> EnvironmentResponse:
        self.await_nothing()
        self.times.stepped(message.busy_ns, message.ended_ns)
        return self.decoder.response(message, _STEP, self.slot)

    def output_tail(self) -> str:
        """Return the end of the worker's log, and the report of a crash in native code."""
        log = "" if self._log is None else self._log.tail()
        report = ""
        if descriptors.is_registered(self._plan.crash_fd):  # else another thread has called close()
            with contextlib.suppress(OSError):
                report = take_crash_report(self._plan.crash_fd, self.worker_id)
        return "\n".join(filter(None, [log, report]))

    def release(self) -> None:
        super().release()
        self._worker_rows = self._rows_to_attach = None
        self.decoder.attach(None)


class ProcessPoller(Poller[ProcessLink]):
    """A poller that also reads the step pipe of all workers."""

    def __init__(self, events: EventLog, *, spin_ns: int) -> None:
        super().__init__(spin_ns=spin_ns)
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        descriptors.register(self._read_fd)
        descriptors.register(self.write_fd)
        self.epoll.register(self._read_fd, select.EPOLLIN)
        self._events = events

    def read_other(self, fd: int) -> None:
        """Read all records in the step pipe."""
        if fd != self._read_fd:
            return
        while True:
            try:
                data = os.read(fd, _READ_SIZE)
            except BlockingIOError:
                return
            for ticket, worker_id, generation, slot, flags, n_ended, busy_ns, ended_ns in RECORD.iter_unpack(data):
                link = self.links.get(worker_id)
                if link is None or ticket != link.step_ticket or generation != link.generation:
                    self._events.add(LateReplyDiscarded(worker_id=worker_id, generation=generation, ticket=ticket))
                    continue
                link.times.stepped(busy_ns, ended_ns)
                link.await_nothing()
                self.arrived.append(link.decoder.record(slot, flags, n_ended))
            if len(data) < _READ_SIZE:
                return

    def close(self) -> None:
        super().close()
        self._read_fd = descriptors.close(self._read_fd)
        self.write_fd = descriptors.close(self.write_fd)
