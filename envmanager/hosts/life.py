"""The life of one worker: its state, tickets, deadlines, generation, events and times, with no descriptor or process.

::

    STARTING ── first success ──▶ RUNNING          STARTING, RUNNING ── close ──▶ CLOSING
    STARTING, RUNNING, CLOSING ── died, timed out, killed ──▶ GONE

``Link`` adds the channel and the process of a worker outside this process. A worker that is a coroutine would add its
task. Every response repeats the ticket (number) of its command. A response that is no longer awaited is discarded and
logged, so no response is paired with the wrong command after an interrupt.
"""

from __future__ import annotations

import enum
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from envmanager.data.steps import CommandName, EnvironmentResponse, phase_of
from envmanager.errors import EnvManagerError, WorkerError, WorkerTimedOut
from envmanager.observe.events import EventLog, LateReplyDiscarded, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts
from envmanager.system.machine import advice


class State(enum.IntEnum):
    """A stage in the life of a worker, from its start to its exit. A worker may skip stages, but never goes back."""

    STARTING = 0
    RUNNING = 1
    CLOSING = 2
    GONE = 3


@functools.cache
def _limits_s(timeouts: Timeouts) -> Mapping[CommandName, float]:
    """Return the time limit (s) of each command. All workers of a manager share the mapping."""
    return {each: getattr(timeouts, f"{phase_of(each)}_s", timeouts.call_s) for each in CommandName}


@attrs.define(eq=False)
class Await:
    """A command whose response is awaited. A worker has two, which its commands rewrite, so a step makes no object."""

    ticket: int = 0
    """Ticket of the command; 0 if no response is awaited, or only the worker's end."""
    command: CommandName | None = None
    deadline: float = math.inf
    """Time (monotonic seconds) at which the worker counts as hung."""

    def clear(self) -> None:
        """Await no response. One that arrives afterwards is discarded."""
        self.ticket, self.command, self.deadline = 0, None, math.inf


@attrs.define(eq=False)
class Alarm:
    """The time at which a poller next checks its workers, and a flag for unread messages. Its workers share one."""

    at: float = math.inf
    """Time (monotonic seconds) of the next check for late responses. Never later than the earliest deadline."""
    has_unread: bool = False
    """Whether a worker's ``recv`` may have read messages that the poller has not taken."""


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


class WorkerLife(ABC):
    """The base class of workers that respond later. A subclass carries commands and responses, and ends the worker."""

    _first_commands: Sequence[tuple[CommandName, Any]] = ()
    """Commands, with payloads, that a replacement has yet to receive before its first step."""

    def __init__(self, plan: WorkerPlan, events: EventLog, times: WorkerTimes) -> None:
        self.worker_id = plan.worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.times = times
        self.ticket = 0
        self.awaited = Await()
        """Command whose end the poller awaits: a step, one of a replacement's first commands, or "close"."""
        self.asked = Await()
        """Last command other than a step. Its ticket is 0 after ``recv`` has returned or raised."""
        self.alarm = Alarm()
        self._events = events
        self._launched_ns = self._ready_ns = time.perf_counter_ns()
        self._timeouts_s, self._restore_s = _limits_s(plan.timeouts), plan.timeouts.restore_s
        self._repeating_s = 0.0
        """Time that the last reset may take beside its limit."""

    def move(self, to: State) -> None:
        """Change the state. Raises RuntimeError for an invalid transition."""
        if to <= self.state:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    # What a subclass adds.

    @abstractmethod
    def send(self, name: str, payload: Any = None) -> None:
        """Send a command, and set ``awaited`` for a step or ``asked`` for any other command."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once, and set the state to GONE. A second call does nothing."""

    @abstractmethod
    def ask_to_close(self) -> None:
        """Ask the worker to close its environments and exit, without waiting for that."""

    def output_tail(self) -> str:
        """Return the end of the worker's output, which may explain a failure. The base class returns ""."""
        return ""

    # Waits.

    def repeating_s(self, begins: Any) -> float:
        """Return the time that actions and calls may take with which episodes begin, beside that of the command itself.

        ``begins``: a list of Begin, or another payload of a "reset" or step.
        """
        limits_s, own_s = self._timeouts_s, 0.0
        for each in begins if begins.__class__ is list else ():
            counts = (CommandName.STEP, each.n_repeated), (CommandName.CALL, len(each.calls))
            own_s += sum(n * limits_s[command] for command, n in counts if n)  # 0 times infinity is NaN
        self._repeating_s = own_s if self._restore_s is None else min(own_s, self._restore_s)
        return self._repeating_s

    def await_response(self, ticket: int, command: CommandName, deadline: float) -> None:
        """Make the poller wait for a response until ``deadline`` (monotonic seconds)."""
        awaited = self.awaited
        awaited.ticket, awaited.command, awaited.deadline = ticket, command, deadline
        if deadline < self.alarm.at:
            self.alarm.at = deadline

    def discard(self, ticket: int) -> None:
        """Log that a response arrived that is no longer awaited."""
        self._events.add(LateReplyDiscarded(worker_id=self.worker_id, generation=self.generation, ticket=ticket))

    def note_start(self, ready_ns: int, pid: int | None) -> None:
        """Record that the worker was ready at ``ready_ns`` (``perf_counter_ns``)."""
        self._ready_ns = ready_ns
        self.times.started(self._launched_ns, ready_ns, generation=self.generation)
        self._events.add(
            Started(worker_id=self.worker_id, generation=self.generation, pid=pid, start_s=self.times.start_s)
        )

    # Replacements. The poller awaits the responses to their first commands, so that no call blocks on them.

    def begin_again(self, config: ResetConfig, attributes: Iterable[Any]) -> None:
        """Schedule the first commands of a replacement: a "set_attr" for each of ``attributes``, and its reset.

        Each is sent after the response to the one before. The poller delivers the response to the reset.
        """
        self._first_commands = [*((CommandName.SET_ATTR, each) for each in attributes), (CommandName.RESET, config)]
        self.await_response(self.asked.ticket, CommandName.START, self.asked.deadline)

    def first_response(self, response: EnvironmentResponse) -> EnvironmentResponse | None:
        """Send a replacement's next command after ``response``. Return a response to the reset, or a failure."""
        if response.name is CommandName.FAILED or not self._first_commands:
            self.awaited.clear()
            return response
        (command, payload), *self._first_commands = self._first_commands
        self.send(command, payload)
        self.await_response(self.asked.ticket, command, self.asked.deadline)
        return None

    # The end.

    def failed(self, error: EnvManagerError) -> EnvironmentResponse:
        """Return the "failed" response that reports ``error``."""
        return EnvironmentResponse(CommandName.FAILED, self.worker_id, error)

    def timed_out(self, during: CommandName) -> EnvManagerError:
        """Kill a worker that did not respond in time. Return the error to report."""
        self.kill()
        limit_s = self._timeouts_s[during] + (self._repeating_s if during is CommandName.RESET else 0.0)
        return WorkerTimedOut(**self._facts(during), timeout_s=limit_s, output=self.output_tail())

    def _facts(self, during: CommandName | None) -> dict[str, Any]:
        """Return the arguments common to all errors about this worker. ``during`` is the awaited command or None."""
        phase = "idle" if during is None else phase_of(during)
        return {"worker_id": self.worker_id, "env_ids": self.env_ids, "phase": phase, "ticket": self.ticket}

    def retire(self) -> None:
        """Ask a worker that is being replaced to exit. If it does not exit within ``close_s``, the poller kills it."""
        self.awaited.clear()
        self.ask_to_close()
        self.await_response(0, CommandName.CLOSE, time.monotonic() + self._timeouts_s[CommandName.CLOSE])
