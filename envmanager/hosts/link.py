"""The manager's side of a worker in another process: life cycle, messages, tickets, deadlines.

::

    STARTING ── first success ──▶ RUNNING          STARTING, RUNNING ── close ──▶ CLOSING
    STARTING, RUNNING, CLOSING ── died, timed out, killed ──▶ GONE

A ``Link`` drives a Python process, an engine, or a Ray actor, which may be on another machine. Links differ mainly in
four parts: the ``channel`` carries messages, the ``process`` detects the worker's exit and kills the worker, ``encode``
converts commands to messages, and the ``decoder`` converts messages to responses.

Every response repeats the ticket (number) of its command. A response that is no longer awaited is discarded and logged,
so no response is paired with the wrong command after an interrupt. ``recv`` or the poller reports a worker's end.
"""

from __future__ import annotations

import enum
import math
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import attrs

from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, phase_of
from envmanager.errors import EnvManagerError, ProtocolError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.hosts import descriptors
from envmanager.hosts.wire import CODES, COMMAND, FAILED_CODE, Channel, Message, dumps_command
from envmanager.observe.events import EventLog, LateReplyDiscarded, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts
from envmanager.system.interrupts import allow_interrupts
from envmanager.system.machine import advice

SIGKILL = getattr(signal, "SIGKILL", 9)
"""Number of the signal SIGKILL. Windows does not define it; there ``WorkerProcess.signal`` accepts the number."""
WHILE_BYTES_COME_S = 1.0
"""Extra seconds granted each time bytes of a late message arrive."""
_STEP = CommandName.STEP


class State(enum.Enum):
    """A stage in the life of a worker in another process, from its start to its exit."""

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
    """The time at which a poller next checks its links, and a flag for unread messages. Its links share one Alarm."""

    __slots__ = ("at", "has_unread")

    def __init__(self) -> None:
        self.at = math.inf
        """Time (monotonic seconds) of the next check for late responses. Never later than the earliest deadline."""
        self.has_unread = False
        """Whether a link's ``recv`` may have read messages that the poller has not taken."""


@attrs.frozen(kw_only=True)
class WorkerPlan:
    """The identity of a worker to start, and its time limits."""

    worker_id: int
    env_ids: tuple[int, ...]
    generation: int
    timeouts: Timeouts

    def not_started(self, what: str, error: OSError, more: str = "") -> WorkerError:
        """Return the error for a worker that did not start. ``what`` is the kind of process, and ``more`` is a hint."""
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        told = " ".join(filter(None, (f"{cause}.", more, advice(error))))
        return WorkerError(
            f"the {what} of worker {self.worker_id} could not be started: {told}",
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase="start",
            cause=cause,
        )


class WorkerProcess(Protocol):
    """An interface to a worker's process, which the manager may not have started itself."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None if unknown."""

    @property
    def pidfd(self) -> int:
        """Descriptor that becomes readable when the process ends."""

    def signal(self, number: int) -> None:
        """Send a signal to the process, if possible. SIGKILL also kills the processes that the worker started."""

    def core_wait_ns(self) -> int:
        """Return the total time (ns) that the process has waited for a free core; 0 if unknown."""

    def exit_name(self) -> str:
        """Return a name for how the process ended, such as ``SIGSEGV`` or ``EXIT(3)``."""

    def release(self) -> None:
        """Close the descriptors of the process. A second call does nothing."""


class ResponseDecoder(Protocol):
    """A converter of one worker's messages to responses."""

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """Return the "failed" response that reports ``error``."""

    def response(self, message: Message, asked: CommandName, slot: int = 0) -> EnvironmentResponse:
        """Convert ``message``, the answer to the command ``asked``, to a response. A step may be in ``slot``."""


class Link:
    """The manager's side of one worker in another process. It sends commands and receives responses.

    A poller waits for the responses to steps and for the first observations of replacement workers. Set ``process`` and
    ``decoder`` after construction. Subclasses override methods such as ``encode`` and ``output_tail``.
    """

    FAILED: ClassVar[int] = FAILED_CODE
    """Command code of messages that report a failure."""
    PROTOCOL_ADVICE: ClassVar[str] = "An environment may have written to a file descriptor that it did not open."
    """Probable cause of a violation of the protocol, for the error."""

    slot = 0
    """Slot of shared memory for the response to the last step command; 0 for workers without shared memory."""

    process: WorkerProcess
    decoder: ResponseDecoder

    def __init__(self, plan: WorkerPlan, channel: Channel, events: EventLog, times: WorkerTimes) -> None:
        self.worker_id = plan.worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.times = times
        self.channel = channel
        self.ticket = 0
        """Ticket of the last command."""
        self.step_ticket = 0
        """Ticket of the step in flight, or 0."""
        self.asked_ticket = 0
        """Ticket of the last non-step command that ``send`` sent. 0 after ``recv`` has returned or raised."""
        self.awaited: CommandName | None = None
        """Command whose end the poller awaits: a step, one of a replacement's first commands, or "close"."""
        self.due_at = math.inf
        """Deadline (monotonic seconds) of the ``awaited`` command. Infinity if there is none."""
        self.alarm = Alarm()
        self._events = events
        self._launched_ns = self._ready_ns = time.perf_counter_ns()
        self._core_wait_ns = 0
        self._timeouts = plan.timeouts
        limits = plan.timeouts
        self._timeouts_s = {each: getattr(limits, f"{phase_of(each)}_s", limits.call_s) for each in CommandName}
        self._step_s = self._timeouts_s[_STEP]
        self._asked = CommandName.START
        self._deadline = 0.0
        self._first_commands: list[tuple[CommandName, Any]] = []
        """Commands, with payloads, that a replacement has yet to receive before its first step."""
        self._released = False

    def move(self, to: State) -> None:
        """Change the state. Raises RuntimeError for an invalid transition."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    # Commands.

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. Raises UsageError, before anything is sent, if the payload cannot be sent.

        A command to a worker that has ended is lost; ``recv`` or the poller reports the end.
        """
        command = name if name.__class__ is CommandName else CommandName(name)
        ticket = self.ticket + 1
        message = self.encode(ticket, command, payload)
        deadline = time.monotonic() + self._timeouts_s[command]
        self.ticket = ticket
        if command in STEPPING:
            self.step_ticket = ticket
            self._await(_STEP, deadline)
        else:
            self.asked_ticket, self._asked, self._deadline = ticket, command, deadline
        self.channel.push(message, deadline)

    def encode(self, ticket: int, command: CommandName, payload: Any) -> Any:
        """Return a command as a message for the channel. Raises UsageError if the payload cannot be sent."""
        data = b"" if payload is None else dumps_command(payload)
        return COMMAND.pack(ticket, CODES[command], self.slot, 0, 0, len(data)) + data

    # Responses.

    def recv(self) -> EnvironmentResponse:
        """Await and return the response to the last non-step command, or a "failed" response if the worker fails."""
        try:
            return self._received()
        finally:
            self.asked_ticket = 0  # a response that arrives after an interrupt or a timeout is discarded as late
            self.alarm.has_unread = True

    def _received(self) -> EnvironmentResponse:
        channel = self.channel
        while True:
            gone = self.state is State.GONE or bool(descriptors.wait_for([self.process.pidfd], 0))
            with channel.lock:
                has_read = channel.pump()  # before a death or timeout is reported, because the last response counts
            if has_read:
                self._deadline = max(self._deadline, time.monotonic() + WHILE_BYTES_COME_S)
            message = self.take(self.asked_ticket)
            if message is not None:
                return self._response(message)
            if channel.broken:
                return self.decoder.failed(self.broke_protocol(self._asked))
            if gone:
                return self.decoder.failed(self.died(self._asked))
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return self.decoder.failed(self.timed_out(self._asked))
            with allow_interrupts():
                descriptors.wait_for(channel.watched_fds(), left_s + 0.001)

    def take(self, ticket: int) -> Message | None:
        """Remove and return the message with this ticket, or None if it has not arrived. Discard outdated messages."""
        messages, found = self.channel.messages, None
        for message in list(messages):
            if message.ticket == ticket and found is None:
                found = message
                messages.remove(message)
            elif message.ticket not in (self.step_ticket, self.asked_ticket):
                messages.remove(message)
                self._events.add(
                    LateReplyDiscarded(worker_id=self.worker_id, generation=self.generation, ticket=message.ticket)
                )
        return found

    def _response(self, message: Message) -> EnvironmentResponse:
        """Decode the response to the last command other than a step. The first success sets the state to RUNNING."""
        with self.channel.lock:
            has_started = message.code != self.FAILED and self.state is State.STARTING
            if has_started:
                self.move(State.RUNNING)
        if has_started:
            self._ready_ns = message.ended_ns
            self._core_wait_ns = self.process.core_wait_ns()
            self.times.started(self._launched_ns, self._ready_ns, generation=self.generation)
            self._events.add(
                Started(
                    worker_id=self.worker_id,
                    generation=self.generation,
                    pid=self.process.pid,
                    start_s=self.times.start_s,
                )
            )
        elif message.code != self.FAILED:
            self.times.responded(self._asked, message.busy_ns, message.ended_ns)
        return self.decoder.response(message, self._asked)

    def step_response(self, message: Message) -> EnvironmentResponse:
        """Decode and return the response to the step in flight, and stop awaiting it."""
        response = self.decoder.response(message, _STEP, self.slot)  # the decoder may set the times of the message
        self.await_nothing()
        self.times.stepped(message.busy_ns, message.ended_ns)
        return response

    def core_wait_share(self) -> float:
        """Return the fraction of the time since the worker became ready that it has spent waiting for a free core."""
        waited_ns = self.process.core_wait_ns() - self._core_wait_ns
        return min(1.0, max(0.0, waited_ns / max(1, time.perf_counter_ns() - self._ready_ns)))

    # Replacements. The poller awaits the responses to their first commands, so that no call blocks on them.

    def begin_again(self, config: ResetConfig, attributes: Sequence[Any]) -> None:
        """Schedule the first commands of a replacement: a "set_attr" for each of ``attributes``, and its reset.

        The poller sends each after the response to the one before, and delivers the response to the reset.
        """
        self._first_commands = [*((CommandName.SET_ATTR, each) for each in attributes), (CommandName.RESET, config)]
        self._await(CommandName.START, self._deadline)

    def take_first(self) -> EnvironmentResponse | None:
        """Send a replacement's next command if it has responded. Return the reset's response or a failure."""
        message = self.take(self.asked_ticket)
        if message is None:
            return None
        response = self._response(message)
        if response.name is CommandName.FAILED or not self._first_commands:
            self.await_nothing()
            return response
        if response.name is CommandName.START:
            self.have_started_again()
        command, payload = self._first_commands.pop(0)
        self.send(command, payload)
        self._await(command, self._deadline)
        return None

    def have_started_again(self) -> None:
        """Prepare a started replacement worker for its reset. Does nothing unless overridden."""

    def _await(self, command: CommandName, due_at: float) -> None:
        self.awaited, self.due_at = command, due_at
        if due_at < self.alarm.at:
            self.alarm.at = due_at

    def await_nothing(self) -> None:
        """Make the poller stop waiting for a response. A step's response that arrives afterwards is discarded."""
        self.awaited, self.due_at, self.step_ticket = None, math.inf, 0

    # The end.

    def died(self, during: CommandName | None) -> EnvManagerError:
        """Kill the processes left behind by a worker that ended. Return an error that says how the worker ended."""
        self.kill()
        return WorkerDied(**self._facts(during), exit=self.process.exit_name(), output=self.output_tail())

    def timed_out(self, during: CommandName) -> EnvManagerError:
        """Kill a worker that did not respond in time. Return the error to report."""
        self.kill()
        return WorkerTimedOut(**self._facts(during), timeout_s=self._timeouts_s[during], output=self.output_tail())

    def broke_protocol(self, during: CommandName | None) -> EnvManagerError:
        """Kill a worker that violated the protocol. Return the error to report."""
        self.kill()
        facts = {**self._facts(during), "reason": self.channel.broken, "output": self.output_tail()}
        return ProtocolError(**facts, advice=self.PROTOCOL_ADVICE)

    def _facts(self, during: CommandName | None) -> dict[str, Any]:
        """Return the arguments common to all errors about this worker. ``during`` is the awaited command or None."""
        phase = "idle" if during is None else phase_of(during)
        return {"worker_id": self.worker_id, "env_ids": self.env_ids, "phase": phase, "ticket": self.ticket}

    def output_tail(self) -> str:
        """Return the end of the process's output, which may explain a crash. The base class returns an empty string."""
        return ""

    def kill(self) -> None:
        """Kill the process and the processes that it started, and set the state to GONE. A second call does nothing."""
        self.await_nothing()
        with self.channel.lock:
            if self.state is not State.GONE:
                self.process.signal(SIGKILL)
                self.move(State.GONE)

    def ask_to_close(self) -> None:
        """Ask the worker to close its environments and exit. Does not block if the connection is full."""
        with self.channel.lock:
            if self.state in (State.STARTING, State.RUNNING):
                self.ticket += 1
                self.channel.push(self.encode(self.ticket, CommandName.CLOSE, None), deadline=0.0)
                self.move(State.CLOSING)

    def retire(self) -> None:
        """Ask a worker that is being replaced to exit. If it does not exit within ``close_s``, the poller kills it."""
        self.await_nothing()
        self.ask_to_close()
        self._await(CommandName.CLOSE, time.monotonic() + self._timeouts.close_s)

    def release(self) -> None:
        """Kill the worker, unless it has ended, and close its descriptors. A second call does nothing."""
        self.kill()
        if not self._released:
            self._released = True
            self.process.release()
            self.channel.close()
