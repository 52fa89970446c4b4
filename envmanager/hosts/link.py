"""The manager's side of a worker outside this process: the life of the worker, its channel and its process.

A ``Link`` drives a Python process, an engine, or a Ray actor, which may be on another machine. Links differ mainly in
four parts: the ``channel`` carries messages, the ``process`` detects the worker's exit and kills the worker, ``encode``
converts commands to messages, and the ``decoder`` converts messages to responses. ``recv`` or the poller reports a
worker's end.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from envmanager.data.steps import STEPPING, Begin, CommandName, EnvironmentResponse
from envmanager.errors import EnvManagerError, ProtocolError, WorkerDied, WorkerOutOfMemory
from envmanager.hosts import descriptors
from envmanager.hosts.life import State, WorkerLife, WorkerPlan
from envmanager.hosts.wire import CODES, COMMAND, FAILED_CODE, Channel, Message, dumps_command
from envmanager.observe.events import EventLog
from envmanager.observe.timing import WorkerTimes
from envmanager.system.interrupts import allow_interrupts
from envmanager.system.machine import core_wait_ns
from envmanager.system.memory import MemoryLimits

SIGKILL = getattr(signal, "SIGKILL", 9)
"""Number of the signal SIGKILL. Windows does not define it; there ``WorkerProcess.signal`` accepts the number."""
WHILE_BYTES_COME_S = 1.0
"""Extra seconds granted each time bytes of a late message arrive."""
_STEP = CommandName.STEP


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

    def exit_name(self) -> str:
        """Return a name for how the process ended, such as ``SIGSEGV`` or ``EXIT(3)``."""

    def release(self) -> None:
        """Close the descriptors of the process. A second call does nothing."""


class ResponseDecoder(Protocol):
    """A converter of one worker's messages to responses."""

    def response(self, message: Message, asked: CommandName, slot: int = 0) -> EnvironmentResponse:
        """Convert ``message``, the answer to the command ``asked``, to a response. A step may be in ``slot``."""


class Link(WorkerLife):
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

    first_mb = 0.0
    """Memory of the process, in MiB, when it was first looked at."""
    limits: MemoryLimits | None = None
    """What limits the memory of the process, and knows why the kernel has killed it."""

    process: WorkerProcess
    decoder: ResponseDecoder

    def __init__(self, plan: WorkerPlan, channel: Channel, events: EventLog, times: WorkerTimes) -> None:
        super().__init__(plan, events, times)
        self.channel = channel
        self.begins = b""
        """Pickle of ``_begins``, the episodes to begin, which the next step carries behind its own pickle."""
        self.begins_s = 0.0
        """Time that their actions may take beside the step."""
        self._begins: Sequence[Begin] = ()
        self._core_wait_ns = 0

    # Commands.

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. Raises UsageError, before anything is sent, if the payload cannot be sent.

        A command to a worker that has ended is lost; ``recv`` or the poller reports the end.
        """
        command = name if name.__class__ is CommandName else CommandName(name)
        if command is CommandName.BEGIN:
            self.announce(payload)
            return
        ticket = self.ticket + 1
        deadline = time.monotonic() + self._timeouts_s[command]
        if self.begins:
            deadline += self.begins_s
        elif command is CommandName.RESET:
            deadline += self.repeating_s(payload)
        message = self.encode(ticket, command, payload)
        self.ticket = ticket
        if command in STEPPING:
            self.await_response(ticket, _STEP, deadline)
        else:
            asked = self.asked
            asked.ticket, asked.command, asked.deadline = ticket, command, deadline
        self.channel.push(message, deadline)

    def announce(self, begins: Sequence[Begin]) -> None:
        """Let the worker know which episodes it is to begin, after those that wait for a step already."""
        self._begins = begins = [*self._begins, *begins] if self.begins else begins
        self.begins_s = self.repeating_s(begins)
        plain = [tuple(begin) for begin in begins]  # tuples take cloudpickle a tenth of the time
        has_objects = any(begin.options is not None or begin.actions is not None for begin in begins)
        self.begins = dumps_command(plain) if has_objects else pickle.dumps(plain)

    def encode(self, ticket: int, command: CommandName, payload: Any) -> Any:
        """Return a command as a message for the channel. Raises UsageError if the payload cannot be sent."""
        data = b"" if payload is None else dumps_command(payload)
        begins, self.begins = self.begins, b""
        return COMMAND.pack(ticket, CODES[command], self.slot, 0, len(begins), len(data)) + data + begins

    # Responses.

    def recv(self) -> EnvironmentResponse:
        """Await and return the response to the last non-step command, or a "failed" response if the worker fails."""
        channel, asked, command = self.channel, self.asked, self.asked.command
        assert command is not None
        try:
            while True:
                gone = self.state is State.GONE or bool(descriptors.wait_for([self.process.pidfd], 0))
                with channel.lock:
                    has_read = channel.pump()  # before a death or timeout is reported, as the last response counts
                if has_read:
                    asked.deadline = max(asked.deadline, time.monotonic() + WHILE_BYTES_COME_S)
                message = self.take(asked.ticket)
                if message is not None:
                    return self.command_response(message, command)
                if channel.broken:
                    return self.failed(self.broke_protocol(command))
                if gone:
                    return self.failed(self.died(command))
                left_s = asked.deadline - time.monotonic()
                if left_s <= 0:
                    return self.failed(self.timed_out(command))
                with allow_interrupts():
                    descriptors.wait_for(channel.watched_fds(), left_s + 0.001)
        finally:
            asked.ticket = 0  # a response that arrives after an interrupt or a timeout is discarded as late
            self.alarm.has_unread = True

    def has_answered(self) -> bool:
        """Return whether ``recv`` would return at once, with a response or a failure."""
        channel = self.channel
        with channel.lock:
            channel.pump()
        is_here = any(message.ticket == self.asked.ticket for message in channel.messages)
        is_over = channel.broken or channel.hung_up or time.monotonic() >= self.asked.deadline
        return is_here or bool(is_over) or bool(descriptors.wait_for([self.process.pidfd], 0))

    def take(self, ticket: int) -> Message | None:
        """Remove and return the message with this ticket, or None if it has not arrived. Discard outdated messages."""
        messages, found = self.channel.messages, None
        for message in list(messages):
            if message.ticket == ticket and found is None:
                found = message
                messages.remove(message)
            elif message.ticket not in (self.awaited.ticket, self.asked.ticket):
                messages.remove(message)
                self.discard(message.ticket)
        return found

    def command_response(self, message: Message, command: CommandName) -> EnvironmentResponse:
        """Decode the response to a command other than a step. The first success sets the state to RUNNING."""
        with self.channel.lock:
            is_first = message.code != self.FAILED and self.state is State.STARTING
            if is_first:
                self.move(State.RUNNING)
        if is_first:
            self._core_wait_ns = self.core_wait_ns()
            self.note_start(message.ended_ns, self.process.pid)
        elif message.code != self.FAILED:
            self.times.responded(command, message.busy_ns, message.ended_ns)
        return self.decoder.response(message, command)

    def step_response(self, message: Message) -> EnvironmentResponse:
        """Decode and return the response to the step in flight, and stop awaiting it."""
        response = self.decoder.response(message, _STEP, self.slot)  # the decoder may set the times of the message
        self.awaited.clear()
        self.times.stepped(message.busy_ns, message.ended_ns)
        return response

    def core_wait_ns(self) -> int:
        """Return the total time (ns) that the process has waited for a free core; 0 if unknown."""
        return 0 if self.process.pid is None else core_wait_ns(self.process.pid)

    def core_wait_share(self) -> float:
        """Return the fraction of the time since the worker became ready that it has spent waiting for a free core."""
        waited_ns = self.core_wait_ns() - self._core_wait_ns
        return min(1.0, max(0.0, waited_ns / max(1, time.perf_counter_ns() - self._ready_ns)))

    # The end.

    def died(self, during: CommandName | None) -> EnvManagerError:
        """Kill the processes left behind by a worker that ended. Return an error that says how the worker ended."""
        self.kill()
        facts: Any = {**self._facts(during), "exit": self.process.exit_name(), "output": self.output_tail()}
        why = None
        if self.limits is not None and facts["exit"] in ("SIGKILL", "EXIT(?)"):
            why = self.limits.why_killed(self.process.pid)
        return WorkerDied(**facts) if why is None else WorkerOutOfMemory(**facts, in_use_mb=why[0], killed_by=why[1])

    def broke_protocol(self, during: CommandName | None) -> EnvManagerError:
        """Kill a worker that violated the protocol. Return the error to report."""
        self.kill()
        facts = {**self._facts(during), "reason": self.channel.broken, "output": self.output_tail()}
        return ProtocolError(**facts, advice=self.PROTOCOL_ADVICE)

    def kill(self) -> None:
        """Kill the process and the processes that it started, and set the state to GONE. A second call does nothing."""
        self.awaited.clear()
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

    def release(self) -> None:
        """Kill the worker, unless it has ended, and close its descriptors. A second call does nothing."""
        self.kill()
        self.process.release()
        if self.limits is not None:
            self.limits.remove(self.process.pid)
        self.channel.close()
