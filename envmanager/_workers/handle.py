"""The manager's side of one worker process.

::

    STARTING ── first answer ──▶ RUNNING ── close ──▶ CLOSING ──▶ GONE
        └────────── died, timed out, killed ──────────────────────▶ GONE

The rule: everything a worker says is matched by ticket. What answers an older request is dropped and counted, so an
interrupt or a time-out can never pair an answer with the wrong question.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from envmanager._workers import boot, crash_report, descriptors
from envmanager._workers.block import Block, WorkerRows
from envmanager._workers.child import Launch
from envmanager._workers.output_log import OutputLog
from envmanager._workers.processes import ChildProcess
from envmanager._workers.server import ServerGone
from envmanager._workers.wire import (
    ATTACH_CODE,
    CODES,
    COMMAND,
    ENDED,
    FAILED_CODE,
    FRAME,
    FULL,
    IN_MEMORY,
    WITH_NEWS,
    dumps_command,
    loads_failure,
)
from envmanager.errors import EnvManagerError, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.events import EventLog, LateReplyDiscarded, Started
from envmanager.hosting import News, describe_failure, phase_of
from envmanager.interrupts import begin_held, end_held, let_through
from envmanager.options import ResetConfig, Timeouts
from envmanager.specs import SpecConflict
from envmanager.steps import AgentSteps, CommandName, EnvironmentResponse
from envmanager.timing import WorkerTimes

_READ_SIZE = 1 << 20
_DESCRIPTORS_TO_START = 16
"""More than starting one process takes for a moment: refused before, nothing is left half open."""
WHILE_BYTES_COME_S = 1.0
"""A reply that is on its way at its deadline gets so much longer with every part that arrives."""


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
    """When the step queue must look for answers that are late: no later than the first is due."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = math.inf


@attrs.define
class _Reply:
    """A message that came through the connection."""

    ticket: int
    code: int
    flags: int
    data: bytes
    busy_ns: int
    ended_ns: int


@attrs.frozen
class LaunchPlan:
    """What a worker process is started with, besides its factory."""

    env_ids: tuple[int, ...]
    generation: int
    seed: int
    start_method: str
    memory_fd: int
    steps_fd: int
    life_fd: int
    guardian_fd: int
    crash_fd: int
    n_slots: int
    timeouts: Timeouts
    environ: Mapping[str, str] | None = attrs.field(repr=False)  # it may hold secrets
    log_dir: str | None


class WorkerHandle:
    """A worker process: ``send`` commands, ``recv`` answers; steps are answered on the step queue."""

    def __init__(
        self, worker_id: int, pickled_factory: bytes, plan: LaunchPlan, events: EventLog, times: WorkerTimes
    ) -> None:
        self.worker_id = worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.times = times
        self.awaited: CommandName | None = None
        """What the step queue waits for: the answer to a step, or while a replacement starts, to "start" or "reset"."""
        self.due_at = math.inf
        self.alarm = Alarm()
        self.on_news: Callable[[News, int], None] = _unheard
        """Told what the worker tells besides its answers."""
        self._events = events
        self._launched_ns = self._ready_ns = time.monotonic_ns()
        self._core_wait_ns = 0
        self._first_reset: tuple[Block | None, ResetConfig] | None = None
        self._plan = plan
        self._timeouts_s = {command: _timeout_s(plan.timeouts, command) for command in CommandName}
        self._ticket = 0
        self._step_ticket = 0
        self._asked: CommandName = CommandName.START
        self._asked_ticket = 0
        self._deadline = 0.0
        self._slot = 0
        self._rows: WorkerRows | None = None
        self._inbox = bytearray()
        self._replies: list[_Reply] = []
        self._log: OutputLog | None = None
        self._released = False
        self.hung_up = False
        self._start_process(pickled_factory)

    def _start_process(self, pickled_factory: bytes) -> None:
        descriptors.require_room(_DESCRIPTORS_TO_START)
        stdio = self._open_output()
        try:
            try:
                self._start_process_with(pickled_factory, stdio)
            except ServerGone:
                # After it was asked. Once more, with a new one and another connection: a worker that it has forked all
                # the same notices that nobody is at the other end of its own, and ends.
                self._start_process_with(pickled_factory, stdio)
        except (OSError, EOFError) as error:
            raise self._cannot_start(error) from error
        finally:
            for fd in stdio.values():
                os.close(fd)

    def _open_output(self) -> dict[str, int]:
        """Where the output of the worker goes: its log, or what a process forked from the server would not inherit.

        In a block of ``standard_open``.
        """
        plan = self._plan
        if plan.log_dir is not None:
            self._log, fd = OutputLog.open(plan.log_dir, self.worker_id, plan.generation)
            return {"stdout": fd, "stderr": os.dup(fd)}
        return {"stdout": os.dup(1), "stderr": os.dup(2)} if plan.start_method == "forkserver" else {}

    def _start_process_with(self, pickled_factory: bytes, stdio: dict[str, int]) -> None:
        ours, theirs = socket.socketpair()
        self.fd, worker_fd = descriptors.register(ours.detach()), theirs.detach()
        os.set_blocking(self.fd, False)
        plan = self._plan
        fds = {
            "connection": worker_fd,
            "steps": plan.steps_fd,
            "memory": plan.memory_fd,
            "life": plan.life_fd,
            "guardian": plan.guardian_fd,
            "crash": plan.crash_fd,
        }
        launch = Launch(self.worker_id, plan.generation, plan.seed, pickled_factory)
        try:
            wrapped = {name: descriptors.Fd(fd) for name, fd in {**fds, **stdio}.items()}
            environ = None if plan.environ is None else dict(plan.environ)
            arguments = (wrapped, environ, pickle.dumps(launch))
            name = f"envmanager-worker-{self.worker_id}"
            deadline = time.monotonic() + plan.timeouts.start_s
            self.process = ChildProcess(plan.start_method, name, boot.run, arguments, deadline=deadline)
        except BaseException as error:
            descriptors.close(self.fd)
            if isinstance(error, TimeoutError):
                raise self._no_answer(CommandName.START) from error
            raise
        finally:
            os.close(worker_fd)

    def _cannot_start(self, error: Exception) -> WorkerError:
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        return WorkerError(
            f"the process of worker {self.worker_id} could not be started: {cause}. Is the machine out of processes "
            "(`ulimit -u`), memory or descriptors (`ulimit -n`)? Run fewer workers, each with more environments.",
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase="start",
            cause=cause,
        )

    def move(self, to: State) -> None:
        """The one place where a worker's state changes."""
        if to not in _MOVES[self.state]:
            raise RuntimeError(f"worker {self.worker_id} cannot go from {self.state.name} to {to.name}")
        self.state = to

    # What the manager sees.

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. To a worker that is gone nothing is sent: its end is told by ``recv`` or the step queue."""
        command = name if name.__class__ is CommandName else CommandName(name)
        deadline = time.monotonic() + self._timeouts_s[command]
        if command is CommandName.STEP or command is CommandName.STEP_ROWS:
            self._send_step(command, payload, deadline)
        else:
            data = b"" if payload is None else dumps_command(payload)
            self._asked, self._asked_ticket, self._deadline = command, self._ticket + 1, deadline
            self._write(CODES[command], 0, data, deadline)

    def recv(self) -> EnvironmentResponse:
        """The answer to the last command; a "failed" response when it ends badly or not in time."""
        while True:
            gone = self.state is State.GONE or bool(descriptors.wait_for([self.process.pidfd], 0))
            if self.pump():  # before believing a death or a deadline: the last reply counts
                self._deadline = max(self._deadline, time.monotonic() + WHILE_BYTES_COME_S)
            reply = self._take_reply(self._asked_ticket)
            if reply is not None:
                return self._response(reply)
            if gone:
                return self._failed(self.died(self._asked))
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return self._failed(self.timed_out(self._asked))
            with let_through():
                descriptors.wait_for(self.telling_fds(), left_s + 0.001)

    def _response(self, reply: _Reply) -> EnvironmentResponse:
        if reply.code == FAILED_CODE:
            return self._failed(loads_failure(reply.data))
        if self.state is State.STARTING:
            self._note_start(reply.ended_ns)
        else:
            self.times.answered(self._asked, reply.busy_ns, reply.ended_ns)
        try:
            payload = pickle.loads(reply.data)
        except Exception as error:
            return self._failed(self._cannot_unpickle(error, self._asked))
        payload, news = payload if reply.flags & WITH_NEWS else (payload, None)
        return self.heard(news, EnvironmentResponse(self._asked, self.worker_id, payload))

    def heard(self, news: News | None, response: EnvironmentResponse) -> EnvironmentResponse:
        """The response, once its news are told; a "failed" one when a behavior has two specs."""
        if news is not None:
            try:
                self.on_news(news, self.worker_id)
            except SpecConflict as error:
                phase = phase_of(response.name)
                return self._failed(
                    describe_failure(error, worker_id=self.worker_id, env_ids=self.env_ids, phase=phase)
                )
        return response

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

    def _cannot_unpickle(self, error: Exception, command: CommandName) -> EnvManagerError:
        """What a worker pickled can have a constructor that pickle cannot call, or a class that only the worker has."""
        unpickling = RuntimeError(
            f"what it returned cannot be unpickled in the trainer: {type(error).__name__}: {error}"
        )
        phase = phase_of(command)
        return describe_failure(unpickling, worker_id=self.worker_id, env_ids=self.env_ids, phase=phase)

    def _failed(self, error: EnvManagerError) -> EnvironmentResponse:
        return EnvironmentResponse(CommandName.FAILED, self.worker_id, error)

    # Taking another's place: the step queue waits for the answers, so nobody else does.

    def begin_again(self, block: Block | None, config: ResetConfig, slot: int) -> None:
        """Once it has started, attach it to the memory and reset it; the answer comes out of the step queue.

        ``slot`` is where the others stand: in step with them, its rows and theirs make one view again.
        """
        self._slot = slot
        self._first_reset = (block, config)
        self._await(CommandName.START, self._deadline)

    def take_answer(self) -> EnvironmentResponse | None:
        """While it begins again: the answer that is awaited; None when it has not come."""
        reply = self._take_reply(self._asked_ticket)
        return None if reply is None else self._response(reply)

    def go_on(self) -> None:
        """It has started: have it reset."""
        assert self._first_reset is not None
        block, config = self._first_reset
        if block is not None:
            self.attach(block)
        self.send(CommandName.RESET, config)
        self._await(CommandName.RESET, self._deadline)

    def _await(self, command: CommandName, due_at: float) -> None:
        self.awaited, self.due_at = command, due_at
        if due_at < self.alarm.at:
            self.alarm.at = due_at

    def await_nothing(self) -> None:
        """The step queue waits for nothing of this worker: a record that still comes is late."""
        self.awaited, self.due_at = None, math.inf
        self._step_ticket = 0

    # Steps.

    def attach(self, block: Block) -> None:
        """Use the shared memory from now on."""
        self._rows = WorkerRows(block, self.worker_id, self.env_ids)
        self._write(ATTACH_CODE, 0, pickle.dumps(block.layout), time.monotonic() + self._plan.timeouts.call_s)

    def _send_step(self, command: CommandName, payload: Any, deadline: float) -> None:
        rows, actions = payload if command is CommandName.STEP_ROWS else (None, payload)
        in_memory = self._rows is not None and self._rows.write_actions(actions, rows)
        data = b"" if in_memory else dumps_command(payload)
        self._slot = (self._slot + 1) % self._plan.n_slots
        ticket, flags = self._ticket + 1, IN_MEMORY if in_memory else 0
        frame = COMMAND.pack(ticket, CODES[command], self._slot, flags, 0, len(data)) + data
        self._ticket = self._step_ticket = ticket  # not before there was memory for the message
        self._await(CommandName.STEP, deadline)
        self._push(frame, deadline)

    def is_answer(self, ticket: int, generation: int) -> bool:
        """Whether a record answers the step in flight."""
        return ticket == self._step_ticket and generation == self.generation

    def take_step(self, code: int, slot: int, flags: int, extra: bytes | None) -> EnvironmentResponse:
        """The response behind a record, its arrays views of shared memory."""
        self.await_nothing()
        if code == FAILED_CODE:
            return self._failed(loads_failure(extra or b""))
        try:
            response, news = self._step_response(slot, flags, extra)
        except Exception as error:
            return self._failed(self._cannot_unpickle(error, CommandName.STEP))
        return response if news is None else self.heard(news, response)

    def await_extra(self) -> None:
        """A record says that the step has ended in time; its message gets as long again to arrive."""
        self.due_at = time.monotonic() + self._plan.timeouts.step_s

    def _step_response(self, slot: int, flags: int, extra: bytes | None) -> tuple[EnvironmentResponse, News | None]:
        infos: Any = {}
        news = None
        if flags & IN_MEMORY and self._rows is not None:
            if extra is not None:
                infos, news = pickle.loads(extra)
            steps = self._read(slot, flags)
            if infos:
                steps = {name: _with_infos(own, infos.get(name)) for name, own in steps.items()}
        else:
            steps, news = pickle.loads(extra or b"")
        return EnvironmentResponse(CommandName.STEP, self.worker_id, steps), news

    def _read(self, slot: int, flags: int) -> dict[str, AgentSteps]:
        assert self._rows is not None
        if not flags & FULL:
            return self._rows.read(slot)
        return self._rows.full_with_final(slot) if flags & ENDED else self._rows.full(slot)

    def holds_all_rows(self, steps: AgentSteps, slot: int) -> bool:
        """Whether these are views of all of this worker's rows in a slot of the block."""
        return self._rows is not None and self._slot == slot and self._rows.holds_all(steps)

    @property
    def slot(self) -> int:
        """Where the last step was written."""
        return self._slot

    def take_extra(self, ticket: int) -> bytes | None:
        """The message that belongs to a record, once all of it is here."""
        reply = self._take_reply(ticket)
        return None if reply is None else reply.data

    def _take_reply(self, ticket: int) -> _Reply | None:
        found = next((reply for reply in self._replies if reply.ticket == ticket), None)
        if found is not None:
            self._replies.remove(found)
        return found

    # The connection.

    def _write(self, code: int, flags: int, data: bytes, deadline: float) -> None:
        frame = COMMAND.pack(self._ticket + 1, code, self._slot, flags, 0, len(data)) + data
        self._ticket += 1
        self._push(frame, deadline)

    def _push(self, frame: bytes, deadline: float) -> None:
        """Write all of ``frame``, reading meanwhile what the worker writes: both ways may be full.

        Gives up at the deadline or when the worker is gone; whoever waits for the answer is told so.
        """
        is_outermost = begin_held()  # half a message would leave the worker waiting for the rest for ever
        try:
            left = memoryview(frame)
            while left and self.fd != descriptors.CLOSED:
                try:
                    left = left[os.write(self.fd, left) :]
                except (BrokenPipeError, ConnectionResetError):
                    return
                except BlockingIOError:
                    if time.monotonic() >= deadline or not self._wait_for_room(deadline):
                        return
        finally:
            end_held(is_outermost)

    def _wait_for_room(self, deadline: float) -> bool:
        left_s = deadline - time.monotonic()
        ready = descriptors.wait_for(self.telling_fds(), left_s + 0.001, writable=[self.fd])
        self.pump()
        return self.process.pidfd not in ready

    def telling_fds(self) -> list[int]:
        """What can be read when the worker says something or ends; what it has closed could always be."""
        return [self.process.pidfd] if self.hung_up else [self.process.pidfd, self.fd]

    def pump(self) -> bool:
        """Read what has come through the connection, without waiting; whether there was anything.

        Answers to older requests are dropped.
        """
        n_before = len(self._inbox)
        while self.fd != descriptors.CLOSED:
            try:
                part = os.read(self.fd, _READ_SIZE)
            except BlockingIOError:
                break
            except OSError:  # it ended with something of ours unread
                part = b""
            if not part:
                self.hung_up = True
                break
            self._inbox += part
        n_new = len(self._inbox) - n_before
        self._split_inbox()
        return n_new > 0

    def _split_inbox(self) -> None:
        while len(self._inbox) >= FRAME.size:
            ticket, code, flags, _, _, length, busy_ns, ended_ns = FRAME.unpack_from(self._inbox)
            if len(self._inbox) < FRAME.size + length:
                break
            data = bytes(memoryview(self._inbox)[FRAME.size : FRAME.size + length])
            del self._inbox[: FRAME.size + length]
            if ticket in (self._step_ticket, self._asked_ticket):
                self._replies.append(_Reply(ticket, code, flags, data, busy_ns, ended_ns))
            else:
                self._events.add(
                    LateReplyDiscarded(worker_id=self.worker_id, generation=self.generation, ticket=ticket)
                )

    # The end.

    def died(self, during: CommandName | None) -> WorkerDied:
        """Note that the process has ended, take along what it started, and say how it ended."""
        self.kill()
        return WorkerDied(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase="idle" if during is None else phase_of(during),
            exit=self.process.exit_name(),
            output=self._last_words(),
            ticket=self._ticket,
        )

    def timed_out(self, during: CommandName) -> WorkerTimedOut:
        """Stop a process that did not answer in time, and say so."""
        self.kill()
        return self._no_answer(during)

    def _no_answer(self, during: CommandName) -> WorkerTimedOut:
        return WorkerTimedOut(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            phase=phase_of(during),
            timeout_s=_timeout_s(self._plan.timeouts, during),
            output=self._last_words(),
            ticket=self._ticket,
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
            self._write(CODES[CommandName.CLOSE], 0, b"", deadline=0.0)
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
            self._rows = None
            self.process.release()
            self.fd = descriptors.close(self.fd)

    def _last_words(self) -> str:
        """What the process left behind: the end of its log, and the report of a crash in native code."""
        return "\n".join(filter(None, ["" if self._log is None else self._log.tail(), self._crash_report()]))

    def _crash_report(self) -> str:
        if not descriptors.is_registered(self._plan.crash_fd):  # close() came meanwhile
            return ""
        with contextlib.suppress(OSError):
            return crash_report.take(self._plan.crash_fd, self.worker_id)
        return ""


def _unheard(_: News, __: int) -> None:
    """Nobody listens yet."""


def _with_infos(steps: AgentSteps, infos: Any) -> AgentSteps:
    info, reset_info = (None, None) if infos is None else infos
    return attrs.evolve(steps, info=info, reset_info=reset_info)


def _timeout_s(timeouts: Timeouts, command: CommandName) -> float:
    phase = phase_of(command)
    return float(getattr(timeouts, f"{phase}_s", timeouts.call_s))
