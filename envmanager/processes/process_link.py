"""The link to a worker process on this machine, without the parts that depend on the transport.

Actions and observations are in shared memory if they fit. Otherwise they are pickled and sent through the worker's own
connection. The modules ``native`` and ``portable`` have a subclass for each transport.
"""

from __future__ import annotations

import os
import pickle
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import attrs

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import WorkerTimedOut
from envmanager.hosts import descriptors
from envmanager.hosts.link import Link, WorkerPlan, WorkerProcess
from envmanager.hosts.shared_rows import SharedRows
from envmanager.hosts.wire import ATTACH_CODE, CODES, COMMAND, Channel, Decoder, Message, dumps_command
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig
from envmanager.processes.output import OutputLog

_STEP, _STEP_ROWS = CommandName.STEP, CommandName.STEP_ROWS
_DESCRIPTORS_TO_START = 16
"""Number of free descriptors required before a start, more than a start needs, so that no start fails half-way."""


@attrs.frozen(kw_only=True)
class LaunchPlan(WorkerPlan):
    """The arguments for the start of a worker process, except the pickled factory of its environments."""

    seed: int
    start_method: str | None
    memory: int | str
    """Descriptor of the shared memory; on Windows its name."""
    n_slots: int
    spin_ns: int
    """Maximum time in ns that the worker polls for a command before it sleeps."""
    environ: Mapping[str, str] = attrs.field(repr=False)  # may contain secrets
    log_dir: str | None


class ProcessLink(Link):
    """The manager's link to a worker process, which exchanges actions and steps through shared memory if they fit."""

    decoder: Decoder

    def __init__(self, plan: LaunchPlan, pickled_factory: bytes, events: EventLog, times: WorkerTimes) -> None:
        super().__init__(plan, self.make_channel(), events, times)
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._plan = plan
        self._worker_rows: SharedRows | None = None
        self._rows_to_attach: SharedRows | None = None
        descriptors.require_room(_DESCRIPTORS_TO_START)
        descriptors.open_standard()  # the trainer may have closed standard descriptors since the last start
        self._log, output_fd = None, None
        if plan.log_dir is not None:
            self._log, output_fd = OutputLog.open(plan.log_dir, plan.worker_id, plan.generation)
        try:
            self.process, fd = self.launch(plan, pickled_factory, output_fd)
        except TimeoutError as error:
            raise WorkerTimedOut(**self._facts(CommandName.START), timeout_s=plan.timeouts.start_s) from error
        except OSError as error:
            raise plan.not_started("process", error) from error
        finally:
            if output_fd is not None:
                os.close(output_fd)
        self.channel.open(fd, self.process.pidfd)

    def make_channel(self) -> Channel:
        """Return a new, closed channel. The channel is opened after the process has started."""
        return Channel()

    @abstractmethod
    def launch(self, plan: LaunchPlan, pickled_factory: bytes, output_fd: int | None) -> tuple[WorkerProcess, int]:
        """Start the process. Return the process and the descriptor of the trainer's end of the connection.

        ``output_fd``: descriptor for standard output and standard error; None for the trainer's. Raises
        TimeoutError after ``timeouts.start_s``, and another OSError if the process cannot be started.
        """

    def send(self, name: str, payload: Any = None) -> None:
        command = name if name.__class__ is CommandName else CommandName(name)
        if command is _STEP:
            self._send_step(command, payload, payload, None)
        elif command is _STEP_ROWS:
            self._send_step(command, payload, payload[1], payload[0])
        else:
            super().send(command, payload)

    def _send_step(self, command: CommandName, payload: Any, actions: Any, rows: Any) -> None:
        """Send a step without blocking; actions go to shared memory if they fit. The caller has deferred interrupts."""
        flags = 0 if self._worker_rows is None else self._worker_rows.write_actions(actions, rows)
        data = b"" if flags else dumps_command(payload)
        slot = (self.slot + 1) % self._plan.n_slots
        deadline = time.monotonic() + self._step_s
        ticket = self.ticket + 1
        message = COMMAND.pack(ticket, CODES[command], slot, flags, 0, len(data)) + data
        self.ticket = self.step_ticket = ticket  # here, because to pack the message may raise MemoryError
        try:
            n_written = descriptors.write(self.channel.fd, message)
        except OSError:  # the socket is full, or the worker has ended
            n_written = 0
        if n_written < len(message):
            self.channel.push(message[n_written:], deadline)
        self.slot = slot
        self._await(_STEP, deadline)

    def attach(self, worker_rows: SharedRows) -> None:
        """Use ``worker_rows``, in shared memory, for all later steps, and send their layout to the worker."""
        self._worker_rows = worker_rows
        self.decoder.attach(worker_rows)
        data = pickle.dumps(worker_rows.layout)
        self.ticket += 1
        message = COMMAND.pack(self.ticket, ATTACH_CODE, self.slot, 0, 0, len(data)) + data
        self.channel.push(message, time.monotonic() + self._timeouts.call_s)

    def begin_again_in(self, worker_rows: SharedRows | None, config: ResetConfig, slot: int) -> None:
        """Attach this replacement to ``worker_rows`` (if any) and reset it, as soon as it has started.

        ``slot`` is the last slot that the other workers used. With equal slots, one view covers all workers' rows.
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
        """Return the end of the worker's log file; an empty text without ``log_dir``."""
        return "" if self._log is None else self._log.tail()

    def release(self) -> None:
        super().release()
        self._worker_rows = self._rows_to_attach = None
        self.decoder.attach(None)
