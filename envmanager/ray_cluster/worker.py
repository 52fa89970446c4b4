"""The manager's side of one actor: its life, its deadlines, its answers.

::

    STARTING ── the answer to "start" ──▶ RUNNING ── close ──▶ CLOSING ──▶ GONE
        └────────────── died, timed out, killed ───────────────────────────▶ GONE

The rule: every command has a ticket of its own, and an answer counts only while somebody waits for that ticket. So what
comes late, from this generation or another, is never taken for something else.
"""

from __future__ import annotations

import math
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from envmanager._workers.channel import Message
from envmanager._workers.decoding import Decoder
from envmanager._workers.remote import State, WorkerPlan
from envmanager._workers.wire import FAILED_CODE, loads_failure
from envmanager.data.reports import StartReport
from envmanager.data.steps import STEPPING, CommandName, EnvironmentResponse, phase_of
from envmanager.errors import EnvManagerError, NotPlaced, WorkerDied, WorkerError, WorkerTimedOut
from envmanager.observe.events import EventLog, LateReplyDiscarded, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts
from envmanager.ray_cluster.wire import Answer, SentRows, pack_command, unpack_answer

if TYPE_CHECKING:  # it needs Ray
    from envmanager.ray_cluster.cluster import ActorHandle, Cluster

_START, _RESET, _STEP, _CLOSE = CommandName.START, CommandName.RESET, CommandName.STEP, CommandName.CLOSE
_NODE_DIED = "NODE_DIED"
_EXIT_CODE = re.compile(r"exit code (\d+)")


class Answers(Protocol):
    """Where answers go."""

    def answered(self, worker: RayWorker, ticket: int, future: Any) -> None:
        """Called in a thread of Ray's."""
        ...

    def wait_for(self, worker: RayWorker, deadline: float) -> None:
        """Return when the worker has answered what it was asked, or is gone, or at the deadline."""
        ...

    def expect(self, due_at: float) -> None:
        """Somebody is late from then on."""
        ...


class RayWorker:
    """An actor: ``send`` commands, ``recv`` responses; the responses to steps come out of the step queue."""

    def __init__(
        self,
        plan: WorkerPlan,
        cluster: Cluster,
        pickled_factory: bytes,
        *,
        answers: Answers,
        events: EventLog,
        times: WorkerTimes,
    ) -> None:
        self.worker_id = plan.worker_id
        self.env_ids = plan.env_ids
        self.generation = plan.generation
        self.state = State.STARTING
        self.pid: int | None = None
        self.node = ""
        """The host that it is on, once it has been placed."""
        self.due_at = math.inf
        """When the response that comes out of the step queue is late."""
        self.error: EnvManagerError | None = None
        """How it ended, if it did not end as asked."""
        self._decoder = Decoder(plan.worker_id, plan.env_ids)
        self._rows: SentRows | None = None
        self._plan = plan
        self._cluster = cluster
        self._answers = answers
        self._events = events
        self._times = times
        self._ticket = 0
        self._step_ticket = 0
        self._asked_ticket = 0
        self._asked = _START
        self._answer: tuple[Any, int] | None = None
        """What it has answered to what it was asked, and when that came."""
        self._deadline = math.inf
        self._first_reset: ResetConfig | None = None
        self._ping_ticket = 0
        self._launched_ns = self._ended_ns = time.monotonic_ns()
        self._pickled_factory = pickled_factory
        self._actor = self._new_actor()

    def _new_actor(self) -> ActorHandle:
        """An actor that was asked for, and is asked who it is."""
        self._ticket += 1
        self._hello_ticket = self._ticket
        actor: ActorHandle = self._cluster.make_actor(self.worker_id, self.env_ids, self._pickled_factory)
        actor.hello(partial(self._answers.answered, self, self._ticket))
        return actor

    # What the manager sees.

    def send(self, name: str, payload: Any = None) -> None:
        """Send a command. A worker that is gone is sent nothing: its end is reported by ``recv`` or the step queue."""
        command = name if name.__class__ is CommandName else CommandName(name)
        is_step = command in STEPPING
        data = self._rows.pack_step(command, payload) if is_step and self._rows else pack_command(command, payload)
        self._ticket += 1
        deadline = time.monotonic() + self._timeout_s(command)
        if is_step:
            self._step_ticket, self.due_at = self._ticket, deadline
            self._answers.expect(deadline)
        else:
            self._asked, self._asked_ticket, self._answer, self._deadline = command, self._ticket, None, deadline
        if self.state is not State.GONE:
            self._actor.obey(data, partial(self._answers.answered, self, self._ticket))

    def recv(self) -> EnvironmentResponse:
        """The response to the last command; a "failed" response when it ends badly or not in time."""
        try:
            self._answers.wait_for(self, self._deadline)
            if self._answer is None and self.state is not State.GONE:
                self.timed_out(self._asked)
        finally:
            self._asked_ticket = 0
            answer, self._answer = self._answer, None
        return self.failed() if answer is None else self._response(answer[0], self._asked, answer[1])

    @property
    def has_answered(self) -> bool:
        """Whether ``recv`` need not wait."""
        return self._answer is not None or self.state is State.GONE

    def failed(self) -> EnvironmentResponse:
        """The response that reports its end."""
        return EnvironmentResponse(CommandName.FAILED, self.worker_id, self.error)

    def _timeout_s(self, command: CommandName) -> float:
        timeouts: Timeouts = self._plan.timeouts
        return float(getattr(timeouts, f"{phase_of(command)}_s", timeouts.call_s))

    # Taking another's place: the step queue waits for the responses, so nobody else does.

    def begin_again(self, config: ResetConfig) -> None:
        """Once it has started, reset it; the response comes out of the step queue."""
        self._first_reset = config
        self._await_in_queue()

    def _await_in_queue(self) -> None:
        self.due_at = self._deadline
        self._answers.expect(self.due_at)

    def _begun(self, response: EnvironmentResponse) -> EnvironmentResponse | None:
        """One step further in that; its first observations, or why there are none, once they are here."""
        if response.name is not _START:
            self._first_reset, self.due_at = None, math.inf
            return response
        self.send(_RESET, self._first_reset)
        self._await_in_queue()
        return None

    # Answers.

    def take_in(self, ticket: int, future: Any, at_ns: int) -> EnvironmentResponse | None:
        """What came, at ``at_ns``; the response, if it is one for the step queue."""
        error = future.exception()
        if error is not None:
            if self.state is not State.GONE and ticket >= self._hello_ticket:  # else of an actor that never ran
                self._note_death(error)
            return None
        if ticket == self._hello_ticket:
            self.pid, self.node = future.result()
            return None
        if ticket == self._ping_ticket:
            self._ping_ticket = 0
            return None
        if ticket not in (self._step_ticket, self._asked_ticket) or self.state is State.GONE:
            self._events.add(LateReplyDiscarded(worker_id=self.worker_id, generation=self.generation, ticket=ticket))
            return None
        if ticket == self._step_ticket:
            self._step_ticket, self.due_at = 0, math.inf
            return self._response(future.result(), _STEP, at_ns)
        self._asked_ticket = 0
        if self._first_reset is not None:
            return self._begun(self._response(future.result(), self._asked, at_ns))
        self._answer = future.result(), at_ns
        return None

    def _response(self, value: Any, asked: CommandName, at_ns: int) -> EnvironmentResponse:
        answer = unpack_answer(value)
        if answer.code == FAILED_CODE:
            return self._decoder.failed(loads_failure(answer.data))
        if asked is _STEP:
            return self._step(answer, at_ns)
        message = Message(0, answer.code, answer.flags, answer.data, answer.busy_ns, at_ns)
        response = self._decoder.response(message, asked)
        if response.name is _START:
            self._have_started(response.payload, at_ns)
        else:
            self._times.responded(asked, answer.busy_ns, at_ns)
        return response

    def _step(self, answer: Answer, at_ns: int) -> EnvironmentResponse:
        self._times.stepped(answer.busy_ns, max(0, at_ns - answer.busy_ns - self._ended_ns), at_ns)
        self._ended_ns = at_ns
        if self._rows is not None:
            self._rows.receive_steps(answer.steps)
        return self._decoder.step(answer.code, 0, answer.flags, answer.n_ended, answer.data or None)

    def _have_started(self, report: StartReport, at_ns: int) -> None:
        self._rows = SentRows(report, self.env_ids)
        self._decoder.attach(self._rows.rows)
        self._note_start(at_ns)

    def _note_start(self, ready_ns: int) -> None:
        self.state, self._ended_ns = State.RUNNING, ready_ns
        self._times.started(self._launched_ns, ready_ns, generation=self.generation)
        self._events.add(
            Started(worker_id=self.worker_id, generation=self.generation, pid=self.pid, start_s=self._times.start_s)
        )

    # The end.

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way by which its end would be noticed."""
        return self.state is State.RUNNING and not (self._step_ticket or self._asked_ticket or self._ping_ticket)

    def ping(self) -> None:
        """Have its end noticed though nothing is asked of it."""
        self._ticket += 1
        self._ping_ticket = self._ticket
        self._actor.ping(partial(self._answers.answered, self, self._ticket))

    @property
    def _during(self) -> str:
        if self._asked_ticket:
            return phase_of(self._asked)
        return "step" if self._step_ticket else "idle"

    def _note_death(self, error: BaseException) -> None:
        """Ray says that it is no more, or out of reach: then it is ended too, lest it plays on unseen.

        For some seconds Ray may send actors to a node that has gone. One that never ran there is asked for again.
        """
        exit_name = _exit_name(type(error).__name__, str(error))
        is_starting = self.state is State.STARTING and self._asked is _START and self._asked_ticket
        if exit_name == _NODE_DIED and is_starting and self.pid is None and time.monotonic() < self._deadline:
            deadline = self._deadline
            self._actor = self._new_actor()
            self.send(_START)
            self._deadline = deadline
        else:
            self._died(exit_name, str(error))

    def _died(self, exit_name: str, text: str) -> None:
        self._end(
            WorkerDied(
                worker_id=self.worker_id,
                env_ids=self.env_ids,
                phase=self._during,
                exit=exit_name,
                output=text.strip(),
                ticket=self._ticket,
            )
        )

    def timed_out(self, during: CommandName | None = None) -> None:
        """It did not answer in time: end it."""
        if self.pid is None:
            self._end(self._not_placed())
            return
        command = during or (self._asked if self._first_reset is not None else _STEP)
        self._end(
            WorkerTimedOut(
                worker_id=self.worker_id,
                env_ids=self.env_ids,
                phase=phase_of(command),
                timeout_s=self._timeout_s(command),
                ticket=self._ticket,
            )
        )

    def _not_placed(self) -> WorkerError:
        return NotPlaced(
            worker_id=self.worker_id,
            env_ids=self.env_ids,
            timeout_s=self._plan.timeouts.start_s,
            wanted=self._cluster.wanted_in_words,
            missing=self._cluster.why_no_room(),
            cluster=self._cluster.what_it_has(),
        )

    def _end(self, error: EnvManagerError) -> None:
        self.error = error
        self.kill()

    def kill(self) -> None:
        """End it, whatever it does; what it still answers is late."""
        if self.state is State.GONE:
            return
        self.state, self.due_at = State.GONE, math.inf
        self._step_ticket = self._asked_ticket = 0
        self._actor.kill()

    def ask_to_close(self, close_s: float) -> None:
        """Ask it to close its environments, within so long."""
        if self.pid is None:  # nothing was made, or nobody knows where
            self.kill()
        if self.state in (State.STARTING, State.RUNNING):
            self._step_ticket = 0
            self.send(_CLOSE)
            self.state = State.CLOSING
            self.due_at = time.monotonic() + close_s
            self._answers.expect(self.due_at)


def _exit_name(kind: str, text: str) -> str:
    """How it ended, as far as Ray knows."""
    code = _EXIT_CODE.search(text)
    if code is not None:
        return f"EXIT({code[1]})"
    if "node" in text and ("node has died" in text or "node was" in text):
        return _NODE_DIED
    return {"ActorDiedError": "DIED", "ActorUnavailableError": "UNREACHABLE", "OutOfMemoryError": "OUT_OF_MEMORY"}.get(
        kind, kind
    )
