"""Storms of failures: what the table counts and sorts is what one would find by looking at every worker."""

from __future__ import annotations

import math
import queue
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envmanager import (
    ActionInfo,
    AgentSteps,
    BadAction,
    EnvManager,
    EnvRaised,
    RestartPolicy,
    UsageError,
    Wait,
    WorkerDied,
    WorkerError,
    WorkerHost,
)
from envmanager.data.steps import EnvironmentResponse
from envmanager.kernel.calls import Use
from envmanager.kernel.table import WorkerState

N = 4
IDLE, IN_FLIGHT, READY, REPLACING, FAILED, DROPPED = WorkerState


def where(worker_id: int, phase: str = "step") -> dict[str, Any]:
    return {"worker_id": worker_id, "env_ids": [worker_id], "phase": phase}


class Life:
    """One generation of a worker, which answers when the test says so."""

    def __init__(self, storm: Storm, worker_id: int, generation: int) -> None:
        self.worker_id, self.generation = worker_id, generation
        self.owes = ""
        self.is_gone = False
        self._storm = storm
        self._n_steps = 0
        self._response: EnvironmentResponse | None = None

    def send(self, name: str, payload: Any = None) -> None:
        if name in ("step", "step_rows"):
            assert not self.owes, "two steps at once"
            self.owes = "step"
            self._storm.n_sent += 1
        elif self.is_gone:
            self._storm.forget(self.worker_id)
            self._response = self._failed("call")
        elif name == "reset":
            self._response = EnvironmentResponse("reset", self.worker_id, self._steps())
        else:
            self._response = EnvironmentResponse(name, self.worker_id, [None])

    def recv(self) -> EnvironmentResponse:
        assert self._response is not None
        return self._response

    def answer(self, *, ended: bool) -> None:
        """Give the response that is owed: to a step, or to the reset of a replacement."""
        if self.owes and not self.is_gone:
            name, self.owes = self.owes, ""
            self._n_steps += 1
            self._storm.put(EnvironmentResponse(name, self.worker_id, self._steps(ended=ended and name == "step")))

    def die(self) -> None:
        """End, which shows at once, or only in a call if nothing is owed."""
        if not self.is_gone:
            self.is_gone = True
            self._storm.put(self._failed("step"))

    def raises(self) -> None:
        if self.owes and not self.is_gone:
            self.owes = ""
            error = EnvRaised(**where(self.worker_id), type_name="ValueError", cause="gear 7", remote_traceback="…")
            self._storm.put(EnvironmentResponse("failed", self.worker_id, error))

    def _failed(self, phase: str) -> EnvironmentResponse:
        return EnvironmentResponse("failed", self.worker_id, WorkerDied(**where(self.worker_id, phase), exit="SIGKILL"))

    def _steps(self, *, ended: bool = False) -> dict[str, AgentSteps]:
        obs = np.array([[float(self.generation), float(self._n_steps)]])
        flags = np.array([ended]), np.zeros(1, np.bool_)
        return {
            "default": AgentSteps(np.array([self.worker_id << 32]), obs, np.ones(1), *flags, obs if ended else None)
        }


class Storm(WorkerHost):
    """A host whose workers are Lives. A wait with a limit of 0 gets nothing; any other, the next response owed."""

    def __init__(self) -> None:
        super().__init__()
        self.step_queue = self  # a StepQueue
        self.n_refused = 0
        self.n_sent = 0
        self._arrived: list[EnvironmentResponse] = []

    def launch(self, worker_id: int, generation: int) -> Life:
        if generation:
            old = self.workers[worker_id]
            old.is_gone = True
            self.forget(worker_id)
            if self.n_refused:
                self.n_refused -= 1
                raise OSError(11, "no more processes")
        return Life(self, worker_id, generation)

    def await_start(self) -> dict[int, Any]:
        return {}

    def begin_again(self, worker_id: int, config: Any) -> None:
        self.workers[worker_id].owes = "reset"

    def is_gone(self, worker_id: int) -> bool:
        return bool(self.workers[worker_id].is_gone)

    def close(self) -> None:
        pass

    def put(self, response: EnvironmentResponse) -> None:
        self._arrived.append(response)

    def forget(self, worker_id: int) -> None:
        """Discard what has arrived of a worker, as a poller does if recv has reported its end, or if it is retired."""
        self._arrived = [each for each in self._arrived if each.worker_id != worker_id]

    def get_nowait(self) -> EnvironmentResponse:
        if not self._arrived:
            raise queue.Empty
        return self._arrived.pop(0)

    def get(self, *, timeout: float | None = None) -> EnvironmentResponse:
        if timeout:
            for each in self.workers:
                if not self._arrived:
                    each.answer(ended=False)
        return self.get_nowait()


class Stormy(EnvManager):
    def __init__(self, **options: Any) -> None:
        super().__init__([[worker_id] for worker_id in range(N)], **options)
        self.start(Storm())
        self.set_policy("default", Zeros())
        self.n_asked = 0
        """Number of actions that step() or send() has accepted."""

    def check(self) -> None:
        """The rules of the table."""
        table, recovery = self._table, self._recovery
        entries = table.entries
        assert table.n_waiting == sum(entry.waiting for entry in entries)
        assert table.n_dropped == sum(entry.is_dropped for entry in entries)
        assert table.unusual == {entry for entry in entries if not entry.is_nominal}
        assert set(table.ready) == {entry for entry in entries if entry.state is READY}
        failures = {entry for entry in table.ready if entry.outbox[0].name == "failed"}
        assert set(table.failures) == failures
        if self._use is not Use.RESETTING:
            steps = [entry.steps_since_reset for entry in entries if entry.error is None]
            assert table.slowest() == min(steps, default=0)
        for entry in entries:
            assert bool(entry.outbox) == (entry.state is READY)
            assert len(entry.outbox) <= 2
            if entry.state in (IDLE, IN_FLIGHT):
                assert entry.error is None
                assert entry.replacement is None
            elif entry.state is REPLACING:
                assert entry.replacement is not None
                assert not entry.replacement.has_begun
            elif entry.state in (FAILED, DROPPED):
                assert entry.error is not None
                assert entry.is_dropped == (entry.state is DROPPED)
            assert entry.error is None or entry.replacement is None
        unstarted = {entry for entry in entries if entry.replacement and not entry.replacement.is_started}
        scheduled = {each[2]: each[0] for each in recovery.scheduled if each[3] is each[2].replacement}
        assert recovery.next_start_at() == min((scheduled[entry] for entry in unstarted), default=math.inf)
        waiting = sum(entry.state is IN_FLIGHT for entry in entries)
        waiting += sum(response.name == "step" for entry in entries for response in entry.outbox)
        assert self.n_asked == sum(entry.steps for entry in entries) + recovery.steps_lost + waiting


class Zeros:
    def get_action(self, steps: AgentSteps) -> ActionInfo:
        return ActionInfo(np.zeros(len(steps), np.int64))

    is_random = False


workers = st.integers(0, N - 1)
limits = {"timeout_s": st.sampled_from([0.0, 0.0, 30.0]), "max_lead": st.none() | st.integers(1, 3)}
waits = st.builds(Wait, min_ready=st.integers(1, N), **limits) | st.builds(Wait, max_ready=st.just(1), **limits)
answer = st.tuples(st.just("answer"), workers, st.booleans())
fault = st.tuples(st.sampled_from(["die", "raises", "call"]), workers)
rare = st.one_of(
    st.tuples(st.just("storm")), st.tuples(st.just("refuse"), st.integers(1, 3)), st.tuples(st.just("reset"))
)
send = st.tuples(st.just("send"), st.just(set(range(N))) | st.sets(workers, min_size=1))
move = st.tuples(st.just("move"), waits)
moves = st.lists(st.one_of(answer, answer, fault, rare, send, send, move, move), min_size=20, max_size=60)
policies = st.builds(
    RestartPolicy,
    max_restarts=st.sampled_from([0, 1, 2, 1000, 1000]),
    then=st.sampled_from(["raise", "drop"]),
    on_exception=st.sampled_from(["raise", "restart"]),
    backoff_s=st.sampled_from([0.0, 1e-4]),
    recycle_after_steps=st.none() | st.integers(1, 3),
)


@given(policies, st.booleans(), moves)
def test_whatever_fails_when_the_table_is_what_its_entries_say(
    policy: RestartPolicy, steps: bool, moves: list[tuple[Any, ...]]
) -> None:
    with Stormy(restarts=policy) as manager:
        host = manager.env_workers
        storm = manager.step_queue
        for move, *arguments in [("reset",), *moves]:
            n_sent, n_send = storm.n_sent, 0
            try:
                if move == "answer":
                    host[arguments[0]].answer(ended=arguments[1])
                elif move in ("die", "raises"):
                    getattr(host[arguments[0]], move)()
                elif move == "storm":
                    for each in list(host):
                        each.die()
                elif move == "refuse":
                    storm.n_refused += arguments[0]
                elif move == "call":
                    manager.call("x", env_ids=[arguments[0]])
                elif move == "reset":
                    manager.reset()
                elif move == "move":
                    if steps:
                        manager.step(arguments[0])
                    else:
                        manager.recv(arguments[0])
                elif not steps:
                    waiting = {worker.worker_id for worker in manager.stats().workers if worker.waiting}
                    ids = sorted(arguments[0] - waiting)
                    manager.send(np.zeros(len(ids), np.int64), ids)
                    n_send = len(ids)
            except (WorkerError, UsageError, BadAction):
                pass
            manager.n_asked += n_send or storm.n_sent - n_sent
            manager.check()
