"""The manager's side of one worker process.

::

    STARTING ── first response ──▶ RUNNING ── close ──▶ CLOSING ──▶ GONE
        └────────── died, timed out, killed ────────────────────────▶ GONE

The rule: every message of a worker is matched by ticket (see ``channel``), and its end is reported once, by whoever
waits.
"""

from __future__ import annotations

import contextlib
import enum
import math
import pickle
import signal
import time
from functools import partial
from typing import Any

from envmanager._workers import crash_report, descriptors
from envmanager._workers.block import WorkerRows
from envmanager._workers.channel import Channel, Message
from envmanager._workers.decoding import Decoder
from envmanager._workers.hosting import phase_of
from envmanager._workers.launch import LaunchPlan, launch
from envmanager._workers.wire import ATTACH_CODE, CODES, FAILED_CODE, dumps_command
from envmanager.data.reports import News
from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import WorkerDied, WorkerTimedOut
from envmanager.observe.events import EventLog, LateReplyDiscarded, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts
from envmanager.system.interrupts import let_through

WHILE_BYTES_COME_S = 1.0
"""A message that is on its way at its deadline gets so much longer with every part that arrives."""


class State(enum.Enum):
    """Where a worker is in its life."""

    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSING = enum.auto()
    GONE = enum.auto()


_MOVES = {
    State.STARTING: {State.RUNNING, State.CLOSING, State.GONE},
    State.RUNNING: {State.CLOSING, State.GONE},
    State.CLOSING: {State.GONE},
    State.GONE: set(),
}


class Alarm:
    """When the step queue must look for responses that are late: no later than the first is due."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = math.inf


class WorkerHandle:
    """A worker process: ``send`` commands, ``recv`` responses; the responses to steps come out of the step queue."""

    def __init__(self, pickled_factory: bytes, plan: LaunchPlan, events: EventLog, times: WorkerTimes) -> None:
        self.worker_id = plan.worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.times = times
        self.slot = 0
        """Where the last step was written."""
        self.awaited: CommandName | None = None
        """What the step queue waits for: the response to a step, or of a replacement to "start" or "reset"."""
        self.due_at = math.inf
        self.alarm = Alarm()
        self.decoder = Decoder(plan.worker_id, plan.env_ids)
        self._events = events
        self._plan = plan
        self._launched_ns = self._ready_ns = time.monotonic_ns()
        self._core_wait_ns = 0
        self._timeouts_s = {command: _timeout_s(plan.timeouts, command) for command in CommandName}
        self._step_s = self._timeouts_s[CommandName.STEP]
        self._asked = CommandName.START
        self._deadline = 0.0
        self._first_reset: tuple[WorkerRows | None, ResetConfig] | None = None
        self._worker_rows: WorkerRows | None = None
        self._released = False
        where = partial(LateReplyDiscarded, worker_id=plan.worker_id, generation=plan.generation)
        self.channel = Channel(lambda ticket: events.add(where(ticket=ticket)))
        try:
            launched = launch(plan, pickled_factory)
        except TimeoutError as error:
            raise self._no_response(CommandName.START, "") from error
        self.process, self._log = launched.process, launched.log
        self.channel.open(launched.fd, self.process.pidfd)

    def move(self, to: State) -> None:
        """The one place where a worker's state changes."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    # What the manager sees.

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. A worker that is gone is sent nothing: its end is reported by ``recv`` or the step queue."""
        command = name if name.__class__ is CommandName else CommandName(name)
        if command is CommandName.STEP:
            self._send_step(command, payload, payload, None)
        elif command is CommandName.STEP_ROWS:
            self._send_step(command, payload, payload[1], payload[0])
        else:
            data = b"" if payload is None else dumps_command(payload)
            self._asked, self._deadline = command, time.monotonic() + self._timeouts_s[command]
            self.channel.ask(CODES[command], self.slot, data, self._deadline)

    def _send_step(self, command: CommandName, payload: Any, actions: Any, rows: Any) -> None:
        flags = 0 if self._worker_rows is None else self._worker_rows.write_actions(actions, rows)
        data = b"" if flags else dumps_command(payload)
        slot = (self.slot + 1) % self._plan.n_slots
        deadline = time.monotonic() + self._step_s
        self.channel.step(CODES[command], slot, flags, data, deadline)
        self.slot, self.awaited, self.due_at = slot, CommandName.STEP, deadline
        if deadline < self.alarm.at:
            self.alarm.at = deadline

    def recv(self) -> EnvironmentResponse:
        """The response to the last command; a "failed" response when it ends badly or not in time."""
        channel = self.channel
        while True:
            gone = self.state is State.GONE or bool(descriptors.wait_for([self.process.pidfd], 0))
            if channel.pump():  # before believing a death or a deadline: the last response counts
                self._deadline = max(self._deadline, time.monotonic() + WHILE_BYTES_COME_S)
            message = channel.take(channel.asked_ticket)
            if message is not None:
                return self._response(message)
            if gone:
                return self.decoder.failed(self.died(self._asked))
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return self.decoder.failed(self.timed_out(self._asked))
            with let_through():
                descriptors.wait_for(channel.watched_fds(), left_s + 0.001)

    def _response(self, message: Message) -> EnvironmentResponse:
        if message.code != FAILED_CODE and self.state is State.STARTING:
            self._note_start(message.ended_ns)
        elif message.code != FAILED_CODE:
            self.times.responded(self._asked, message.busy_ns, message.ended_ns)
        return self.decoder.response(message, self._asked)

    def _note_start(self, ready_ns: int) -> None:
        self.move(State.RUNNING)
        self._ready_ns, self._core_wait_ns = ready_ns, self.process.core_wait_ns()
        self.times.started(self._launched_ns, ready_ns, generation=self.generation)
        start_s = self.times.start_s
        self._events.add(
            Started(worker_id=self.worker_id, generation=self.generation, pid=self.process.pid, start_s=start_s)
        )

    def core_wait_share(self) -> float:
        """The share of the time since its start that it could have run and no core was free."""
        waited_ns = self.process.core_wait_ns() - self._core_wait_ns
        return min(1.0, max(0.0, waited_ns / max(1, time.monotonic_ns() - self._ready_ns)))

    # Taking another's place: the step queue waits for the responses, so nobody else does.

    def begin_again(self, worker_rows: WorkerRows | None, config: ResetConfig, slot: int) -> None:
        """Once it has started, attach it to the memory and reset it; the response comes out of the step queue.

        ``slot`` is where the others stand: in step with them, its rows and theirs make one view again.
        """
        self.slot = slot
        self._first_reset = (worker_rows, config)
        self._await(CommandName.START, self._deadline)

    def take_first(self) -> EnvironmentResponse | None:
        """One step further in that; its first observations, or why there are none, once they are here."""
        message = self.channel.take(self.channel.asked_ticket)
        if message is None:
            return None
        response = self._response(message)
        if response.name is CommandName.START:
            response = self.decoder.pass_on(News(response.payload.specs), response)
        if response.name is not CommandName.START:
            self.await_nothing()
            return response
        assert self._first_reset is not None
        worker_rows, config = self._first_reset
        if worker_rows is not None:
            self.attach(worker_rows)
        self.send(CommandName.RESET, config)
        self._await(CommandName.RESET, self._deadline)
        return None

    def _await(self, command: CommandName, due_at: float) -> None:
        self.awaited, self.due_at = command, due_at
        self.alarm.at = min(self.alarm.at, due_at)

    def await_nothing(self) -> None:
        """The step queue waits for nothing of this worker: a record that still comes is late."""
        self.awaited, self.due_at = None, math.inf
        self.channel.step_ticket = 0

    # Steps.

    def attach(self, worker_rows: WorkerRows) -> None:
        """Use the shared memory from now on."""
        self._worker_rows = worker_rows
        self.decoder.attach(worker_rows)
        deadline = time.monotonic() + self._plan.timeouts.call_s
        self.channel.send(ATTACH_CODE, self.slot, pickle.dumps(worker_rows.layout), deadline)

    def await_message(self) -> None:
        """A record reports the end of the step; the message that follows it gets as long again to arrive."""
        self.due_at = time.monotonic() + self._step_s

    # The end.

    def died(self, during: CommandName | None) -> WorkerDied:
        """Note that the process has ended, take along what it started, and report how it ended."""
        self.kill()
        return WorkerDied(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase="idle" if during is None else phase_of(during),
            exit=self.process.exit_name(),
            output=self._last_words(),
            ticket=self.channel.ticket,
        )

    def timed_out(self, during: CommandName) -> WorkerTimedOut:
        """Stop a process that did not respond in time, and report that."""
        self.kill()
        return self._no_response(during, self._last_words())

    def _no_response(self, during: CommandName, output: str) -> WorkerTimedOut:
        return WorkerTimedOut(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=phase_of(during),
            timeout_s=self._timeouts_s[during],
            output=output,
            ticket=self.channel.ticket,
        )

    def kill(self) -> None:
        """SIGKILL the process and whatever it started."""
        self.await_nothing()
        if self.state is not State.GONE:
            self.process.signal(signal.SIGKILL)
            self.move(State.GONE)

    def ask_to_close(self) -> None:
        """Ask the worker to close its environments and end."""
        if self.state in (State.STARTING, State.RUNNING):
            self.channel.send(CODES[CommandName.CLOSE], self.slot, b"", deadline=0.0)
            self.move(State.CLOSING)

    def retire(self) -> None:
        """Ask a healthy worker that is not needed any more to end; the step queue sees to it that it does."""
        self.await_nothing()
        self.ask_to_close()
        self._await(CommandName.CLOSE, time.monotonic() + self._plan.timeouts.close_s)

    def release(self) -> None:
        """Kill what is left of it and give back its descriptors. A second time does nothing."""
        self.kill()
        if not self._released:
            self._released = True
            self._worker_rows = None
            self.decoder.attach(None)
            self.process.release()
            self.channel.close()

    def _last_words(self) -> str:
        """What the process left behind: the end of its log, and the report of a crash in native code."""
        log = "" if self._log is None else self._log.tail()
        report = ""
        if descriptors.is_registered(self._plan.crash_fd):  # else close() came meanwhile
            with contextlib.suppress(OSError):
                report = crash_report.take(self._plan.crash_fd, self.worker_id)
        return "\n".join(filter(None, [log, report]))


def _timeout_s(timeouts: Timeouts, command: CommandName) -> float:
    phase = phase_of(command)
    return float(getattr(timeouts, f"{phase}_s", timeouts.call_s))
