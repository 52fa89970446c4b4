"""The manager's side of one worker in a process of its own: its life, its deadlines, its end.

::

    STARTING ── first response ──▶ RUNNING ── close ──▶ CLOSING ──▶ GONE
        └────────── died, timed out, killed ────────────────────────▶ GONE

What travels, and how a step comes back, differs between kinds of workers; this does not.

The rule: every message of a worker is matched by ticket (see ``channel``), and its end is reported once, by whoever
waits.
"""

from __future__ import annotations

import enum
import math
import signal
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import attrs

from envmanager._workers import descriptors
from envmanager._workers.channel import Channel, Message
from envmanager.data.steps import CommandName, EnvironmentResponse, phase_of
from envmanager.errors import EnvManagerError, ProtocolError, WorkerDied, WorkerTimedOut
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


_STEP = CommandName.STEP


class Alarm:
    """When the step queue must look for responses that are late: no later than the first is due."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = math.inf


@attrs.frozen(kw_only=True)
class WorkerPlan:
    """Which worker is to be, and how long it may take."""

    worker_id: int
    env_ids: tuple[int, ...]
    generation: int
    timeouts: Timeouts


class WorkerProcess(Protocol):
    """The process of a worker, or what stands for one that was not started here."""

    @property
    def pid(self) -> int | None:
        """Its number; None when nobody knows it."""
        ...

    @property
    def pidfd(self) -> int:
        """Readable when it has ended."""
        ...

    @property
    def is_buried(self) -> bool:
        """Whether nothing is left of it."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to it and what it has started."""
        ...

    def core_wait_ns(self) -> int:
        """How long it could have run and no core was free."""
        ...

    def exit_name(self) -> str:
        """How it ended, by name."""
        ...

    def release(self) -> None:
        """Give back its descriptors. A second time does nothing."""
        ...


class ResponseDecoder(Protocol):
    """Makes responses of one worker's messages."""

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """The response that reports this error."""
        ...

    def response(self, message: Message, asked: CommandName) -> EnvironmentResponse:
        """The response to what was ``asked``."""
        ...


class RemoteWorker(ABC):
    """A worker process: ``send`` commands, ``recv`` responses; the responses to steps come out of the step queue."""

    FAILED: ClassVar[int]
    """The code of a message that reports a failure."""

    process: WorkerProcess
    decoder: ResponseDecoder

    def __init__(self, plan: WorkerPlan, channel: Channel, events: EventLog, times: WorkerTimes) -> None:
        self.worker_id = plan.worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.times = times
        self.channel = channel
        self.awaited: CommandName | None = None
        """What the step queue waits for: the response to a step, or of a replacement to "start" or "reset"."""
        self.due_at = math.inf
        self.alarm = Alarm()
        self._events = events
        self._launched_ns = self._ready_ns = time.monotonic_ns()
        self._core_wait_ns = 0
        self._timeouts = plan.timeouts
        self._timeouts_s = {command: _timeout_s(plan.timeouts, command) for command in CommandName}
        self._step_s = self._timeouts_s[CommandName.STEP]
        self._asked = CommandName.START
        self._deadline = 0.0
        self._first_reset: ResetConfig | None = None
        self._released = False
        channel.on_late = self._note_late

    def _note_late(self, ticket: int) -> None:
        self._events.add(LateReplyDiscarded(worker_id=self.worker_id, generation=self.generation, ticket=ticket))

    def move(self, to: State) -> None:
        """The one place where a worker's state changes."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    # What the manager sees.

    @abstractmethod
    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. A worker that is gone is sent nothing: its end is reported by ``recv`` or the step queue."""

    def _ask(self, command: CommandName) -> float:
        """A command other than a step is about to be sent: the deadline of its response."""
        self._asked, self._deadline = command, time.monotonic() + self._timeouts_s[command]
        return self._deadline

    def _await_step(self, deadline: float) -> None:
        """A step has been sent."""
        self.awaited, self.due_at = _STEP, deadline
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
            if channel.broken:
                return self._failed(self.broke_protocol(self._asked))
            if gone:
                return self._failed(self.died(self._asked))
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return self._failed(self.timed_out(self._asked))
            with let_through():
                descriptors.wait_for(channel.watched_fds(), left_s + 0.001)

    def _failed(self, error: EnvManagerError) -> EnvironmentResponse:
        return self.decoder.failed(error)

    def _response(self, message: Message) -> EnvironmentResponse:
        if message.code != self.FAILED and self.state is State.STARTING:
            self._note_start(message.ended_ns)
        elif message.code != self.FAILED:
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

    def begin_again(self, config: ResetConfig) -> None:
        """Once it has started, reset it; the response comes out of the step queue."""
        self._first_reset = config
        self._await(CommandName.START, self._deadline)

    def take_first(self) -> EnvironmentResponse | None:
        """One step further in that; its first observations, or why there are none, once they are here."""
        message = self.channel.take(self.channel.asked_ticket)
        if message is None:
            return None
        response = self._response(message)
        if response.name is not CommandName.START:
            self.await_nothing()
            return response
        self._have_started_again()
        self.send(CommandName.RESET, self._first_reset)
        self._await(CommandName.RESET, self._deadline)
        return None

    def _have_started_again(self) -> None:  # noqa: B027  (not all have something to do)
        """A replacement has started, and is to be reset."""

    def _await(self, command: CommandName, due_at: float) -> None:
        self.awaited, self.due_at = command, due_at
        self.alarm.at = min(self.alarm.at, due_at)

    def await_nothing(self) -> None:
        """The step queue waits for nothing of this worker: a response that still comes is late."""
        self.awaited, self.due_at = None, math.inf
        self.channel.step_ticket = 0

    # The end.

    def died(self, during: CommandName | None) -> EnvManagerError:
        """Note that the process has ended, take along what it started, and report how it ended."""
        self.kill()
        return WorkerDied(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=_phase(during),
            exit=self.process.exit_name(),
            output=self._last_words(),
            ticket=self.channel.ticket,
        )

    def timed_out(self, during: CommandName) -> EnvManagerError:
        """Stop a process that did not respond in time, and report that."""
        self.kill()
        return self._no_response(during, self._last_words())

    def broke_protocol(self, during: CommandName | None) -> EnvManagerError:
        """Stop a process that sent what its protocol does not allow, and report that."""
        self.kill()
        return ProtocolError(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=_phase(during),
            reason=self.channel.broken,
            output=self._last_words(),
            ticket=self.channel.ticket,
        )

    def _no_response(self, during: CommandName, output: str) -> WorkerTimedOut:
        return WorkerTimedOut(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=phase_of(during),
            timeout_s=self._timeouts_s[during],
            output=output,
            ticket=self.channel.ticket,
        )

    @abstractmethod
    def _last_words(self) -> str:
        """What the process left behind: the end of its output, the report of a crash."""

    def kill(self) -> None:
        """SIGKILL the process and whatever it started."""
        self.await_nothing()
        if self.state is not State.GONE:
            self.process.signal(signal.SIGKILL)
            self.move(State.GONE)

    def ask_to_close(self) -> None:
        """Ask the worker to close its environments and end."""
        if self.state in (State.STARTING, State.RUNNING):
            self._send_close()
            self.move(State.CLOSING)

    @abstractmethod
    def _send_close(self) -> None:
        """Send "close", without waiting for room."""

    def retire(self) -> None:
        """Ask a healthy worker that is not needed any more to end; the step queue sees to it that it does."""
        self.await_nothing()
        self.ask_to_close()
        self._await(CommandName.CLOSE, time.monotonic() + self._timeouts.close_s)

    def release(self) -> None:
        """Kill what is left of it and give back its descriptors. A second time does nothing."""
        self.kill()
        if not self._released:
            self._released = True
            self._let_go()
            self.process.release()
            self.channel.close()

    def _let_go(self) -> None:  # noqa: B027  (not all have something to do)
        """Give back what this kind of worker holds besides."""


def _phase(during: CommandName | None) -> str:
    return "idle" if during is None else phase_of(during)


def _timeout_s(timeouts: Timeouts, command: CommandName) -> float:
    phase = phase_of(command)
    return float(getattr(timeouts, f"{phase}_s", timeouts.call_s))
