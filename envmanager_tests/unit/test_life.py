"""The life of a worker without a descriptor or a process, which a test plays, as a coroutine could."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from envmanager.data.steps import CommandName, EnvironmentResponse
from envmanager.errors import WorkerTimedOut
from envmanager.hosts.life import State, WorkerLife, WorkerPlan
from envmanager.observe.events import EventLog, LateReplyDiscarded, Started
from envmanager.observe.timing import WorkerTimes
from envmanager.options import ResetConfig, Timeouts

START, SET_ATTR, RESET, STEP = CommandName.START, CommandName.SET_ATTR, CommandName.RESET, CommandName.STEP
LIMITS = Timeouts(start_s=10.0, reset_s=20.0, step_s=30.0, call_s=40.0, close_s=50.0)


class Played(WorkerLife):
    """A worker that notes what it is sent."""

    def __init__(self) -> None:
        self.log = EventLog()
        plan = WorkerPlan(worker_id=3, env_ids=(6, 7), generation=2, timeouts=LIMITS)
        super().__init__(plan, self.log, WorkerTimes())
        self.sent: list[CommandName] = []

    def send(self, name: str, payload: Any = None) -> None:
        command = CommandName(name)
        self.ticket += 1
        self.sent.append(command)
        deadline = time.monotonic() + self._timeouts_s[command]
        if command is STEP:
            self.await_response(self.ticket, command, deadline)
        else:
            self.asked.ticket, self.asked.command, self.asked.deadline = self.ticket, command, deadline

    def kill(self) -> None:
        self.awaited.clear()
        if self.state is not State.GONE:
            self.move(State.GONE)

    def ask_to_close(self) -> None:
        self.sent.append(CommandName.CLOSE)
        self.move(State.CLOSING)

    def left_s(self) -> float:
        """Seconds until the poller gives the worker up."""
        return self.awaited.deadline - time.monotonic()


def answer(name: CommandName, payload: Any = None) -> EnvironmentResponse:
    return EnvironmentResponse(name, 3, payload)


def replaced(worker: Played, *attributes: Any) -> Played:
    worker.send(START)
    worker.begin_again(ResetConfig(), attributes)
    return worker


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (State.RUNNING, State.STARTING),
        (State.CLOSING, State.RUNNING),
        (State.GONE, State.STARTING),
        (State.GONE, State.CLOSING),
        (State.CLOSING, State.CLOSING),
    ],
)
def test_a_worker_never_goes_back_and_is_nowhere_twice(before: State, after: State) -> None:
    worker = Played()
    worker.move(before)
    with pytest.raises(RuntimeError, match=f"worker 3 cannot go from {before.name} to {after.name}"):
        worker.move(after)


def test_a_replacement_gets_its_attributes_and_its_reset_one_after_the_other() -> None:
    worker = replaced(Played(), ("level", [1], (0,)), ("level", [2], (1,)))
    responses = [worker.first_response(answer(name)) for name in (START, SET_ATTR, SET_ATTR)]

    assert responses == [None, None, None]
    assert worker.sent == [START, SET_ATTR, SET_ATTR, RESET]
    assert (worker.awaited.ticket, worker.awaited.command) == (4, RESET)
    assert 10.0 < worker.left_s() <= 20.0, "each command has its own limit"
    first = answer(RESET, {})
    assert worker.first_response(first) is first
    assert (worker.awaited.command, worker.awaited.deadline) == (None, math.inf)


def test_a_replacement_that_fails_gets_no_further_command() -> None:
    worker = replaced(Played(), ("level", [1], (0,)))
    worker.first_response(answer(START))
    failure = answer(CommandName.FAILED, ValueError())

    assert worker.first_response(failure) is failure
    assert worker.sent == [START, SET_ATTR]
    assert worker.awaited.command is None


def test_a_worker_that_is_late_is_killed_and_the_error_names_the_limit_of_its_command() -> None:
    worker = Played()
    worker.send(STEP)
    error = worker.timed_out(STEP)

    assert isinstance(error, WorkerTimedOut)
    assert (error.worker_id, error.env_ids, error.phase, error.timeout_s) == (3, (6, 7), "step", 30.0)
    assert worker.state is State.GONE
    assert worker.awaited.ticket == 0, "a late response is discarded"


def test_a_retired_worker_is_awaited_for_close_s_and_no_response_of_it_counts() -> None:
    worker = Played()
    worker.send(STEP)
    worker.retire()

    assert (worker.awaited.ticket, worker.awaited.command, worker.state) == (0, CommandName.CLOSE, State.CLOSING)
    assert 30.0 < worker.left_s() <= 50.0


def test_the_alarm_rings_at_the_earliest_deadline_of_the_workers_that_share_it() -> None:
    workers = [Played(), Played(), Played()]
    for worker in workers:
        worker.alarm = workers[0].alarm
    for worker, deadline in zip(workers, (20.0, 10.0, 30.0), strict=True):
        worker.await_response(1, STEP, deadline)

    assert workers[0].alarm.at == 10.0


def test_starts_and_late_responses_are_events() -> None:
    worker = Played()
    worker.note_start(time.perf_counter_ns(), None)
    worker.discard(5)

    started, late = worker.log
    assert isinstance(started, Started)
    assert isinstance(late, LateReplyDiscarded)
    assert (started.worker_id, started.generation, started.pid) == (3, 2, None)
    assert (late.worker_id, late.generation, late.ticket) == (3, 2, 5)
