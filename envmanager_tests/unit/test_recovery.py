"""What becomes of workers that fail, where a contract and mocked workers cannot tell: no process, no time."""

from __future__ import annotations

import math
import queue
from collections import deque

import attrs
import numpy as np
import pytest

from envmanager.data.steps import AgentSteps, EnvironmentResponse, StepInfo
from envmanager.errors import (
    EnvRaised,
    NotPlaced,
    ProtocolError,
    RestartsExhausted,
    UsageError,
    WorkerDied,
    WorkerError,
    WorkerTimedOut,
)
from envmanager.kernel.calls import Calls
from envmanager.kernel.collecting import Collector
from envmanager.kernel.host import QueueSource
from envmanager.kernel.recovery import Recovery
from envmanager.kernel.table import WorkerState, WorkerTable
from envmanager.kernel.tasks import SourceKind, TaskBook
from envmanager.observe import events
from envmanager.options import RestartPolicy, Wait


def steps_of(worker_id, says, *, ended=False, final=None):
    """One agent's step; the observation says which one."""
    flags = np.array([ended]), np.zeros(1, np.bool_)
    final_obs = np.array([says + 0.5 if final is None else final]) if ended else None
    return {"default": AgentSteps(np.array([worker_id << 32]), np.array([float(says)]), np.ones(1), *flags, final_obs)}


def died(worker_id=0, exit="SIGKILL"):
    return WorkerDied(worker_id=worker_id, env_ids=[worker_id], phase="step", exit=exit)


def raised(worker_id=0):
    where = {"worker_id": worker_id, "env_ids": [worker_id], "phase": "step"}
    return EnvRaised(**where, type_name="ValueError", cause="gear 7", remote_traceback="…")


@attrs.define
class Clock:
    """Time that passes when somebody waits."""

    now: float = 1000.0

    def monotonic(self):
        return self.now

    def perf_counter_ns(self):
        return int(self.now * 1e9)


@attrs.define
class Answers:
    """A step queue for whose answers nobody waits: the time is up at once."""

    clock: Clock
    arrives_when_waited_for: object = None
    _arrived: deque = attrs.field(factory=deque, init=False)

    def put(self, response):
        self._arrived.append(response)

    def get_nowait(self):
        if not self._arrived:
            raise queue.Empty
        return self._arrived.popleft()

    def get(self, *, timeout=None):
        if self.arrives_when_waited_for is not None:
            self.put(self.arrives_when_waited_for)
            self.arrives_when_waited_for = None
        if not self._arrived:
            assert timeout is not None, "it would wait for ever"
            self.clock.now += timeout
        return self.get_nowait()

    def empty(self):
        return not self._arrived


@attrs.define
class Told:
    """What one call handed out of one worker."""

    worker_id: int
    name: str
    lost: object
    obs: float
    steps: AgentSteps


class Bench:
    """A table with its recovery and collector, over a host of which the test says what its workers do."""

    start_at_most, is_asked = math.inf, False

    def __init__(self, n_workers=3, *, clock=None, **policy):
        self.table = WorkerTable([[worker_id] for worker_id in range(n_workers)])
        self.entries = self.table.entries
        for entry in self.entries:
            entry.previous_step = StepInfo(None, steps_of(entry.worker_id, 0), None, entry.worker_id)
        self.started = []
        self.refusing = []  # errors, one for each start that fails
        self.workers = [None] * n_workers
        self.recovery = Recovery(self.table, RestartPolicy(**{"backoff_s": 0.0, **policy}), None)
        self.recovery.host = self
        self.table.book = TaskBook(SourceKind.AUTOMATIC, None, self.table, self.recovery, None)
        calls = Calls(lambda: None)
        self.collector = Collector(self.table, self.recovery, calls)
        self.clock = Clock() if clock is None else clock
        self.queue = Answers(self.clock)
        self.collector.host = self
        self.collector.source = QueueSource(self.queue, calls)

    def now(self):
        return self.clock.now

    def lost(self, worker_id, error):
        pass

    def launch(self, worker_id, generation):
        self.started.append((worker_id, generation))
        if self.refusing:
            raise self.refusing.pop(0)

    def begin_again(self, worker_id, config):
        """The response comes out of the queue."""

    def send(self, *worker_ids):
        for worker_id in worker_ids:
            self.table.move([self.entries[worker_id]], WorkerState.IN_FLIGHT, ())

    def answer(self, worker_id, says=1, **steps):
        self.queue.put(EnvironmentResponse("step", worker_id, steps_of(worker_id, says, **steps)))

    def begin(self, worker_id, says=100):
        """The first observations of a worker's replacement, which has been started by then."""
        self.take_arrived()
        self.queue.put(EnvironmentResponse("reset", worker_id, steps_of(worker_id, says)))

    def fail(self, worker_id, error=None):
        self.queue.put(EnvironmentResponse("failed", worker_id, died(worker_id) if error is None else error))

    def fail_quietly(self, worker_id, error):
        self.recovery.fail_quietly([(self.entries[worker_id], error)])

    def collect(self, **wait):
        """What a manager hands out in one call."""
        found = []
        for entry in self.collector.collect(Wait(**{"timeout_s": 0.0, **wait})):
            cut = self.recovery.cut(entry)
            response = entry.outbox[0]
            payload, lost = (response.payload, None) if cut is None else cut
            self.table.delivered([entry])
            entry.previous_step = StepInfo(None, payload, None, response.worker_id)
            steps = payload["default"]
            found.append(Told(response.worker_id, str(response.name), lost, float(steps.obs[0]), steps))
        return found

    def take_arrived(self):
        """What a call does before it hands anything out."""
        self.collector.receive(self.collector.source.take())

    @property
    def waiting(self):
        waiting = [entry.waiting for entry in self.entries]
        assert self.table.n_waiting == sum(waiting)
        return waiting

    @property
    def generations(self):
        return [entry.generation for entry in self.entries]

    @property
    def restarts(self):
        return [entry.restarts for entry in self.entries]

    @property
    def errors(self):
        return {entry.worker_id: entry.error for entry in self.entries if entry.is_given_up}

    @property
    def dropped(self):
        return {entry.worker_id for entry in self.entries if entry.is_dropped}

    @property
    def ignoring(self):
        """Of whom one more action is discarded."""
        return {entry.worker_id for entry in self.entries if entry.ignores_action}

    def count(self, *kinds):
        return tuple(self.recovery.events.count(kind) for kind in kinds)


# A worker that is replaced.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (died(), events.Died),
        (WorkerTimedOut(worker_id=0, env_ids=[0], phase="step", timeout_s=1.0), events.TimedOut),
        (raised(), events.Raised),
        (ProtocolError(worker_id=0, env_ids=[0], phase="step", reason="a frame of kind 9"), events.ProtocolBroken),
        (NotPlaced(worker_id=0, env_ids=[0], timeout_s=9, wanted="1", missing="no GPU", cluster=""), events.NotStarted),
    ],
    ids=["died", "timed out", "raised", "broke the protocol", "found no room"],
)
def test_a_failure_and_a_restart_are_told_as_events(error, kind):
    bench = Bench(1, on_exception="restart")
    bench.send(0)
    bench.fail(0, error)
    bench.collect()

    failed, restarted = bench.recovery.events
    assert (type(failed), failed.worker_id, failed.generation, failed.error) == (kind, 0, 0, error)
    assert (type(restarted), restarted.generation, restarted.cause) == (events.Restarted, 1, error)


def test_a_worker_that_fails_while_nobody_asked_anything_of_it_loses_no_step():
    bench = Bench(2)
    bench.send(1)
    bench.fail(0)
    bench.begin(0)
    (told,) = bench.collect()

    assert (told.worker_id, told.lost.generation) == (0, 1)
    assert bench.recovery.steps_lost == 0
    assert bench.waiting == [False, True]


# What comes first.


@pytest.mark.parametrize("begun", [False, True], ids=["before it began", "after it began"])
def test_a_replacement_that_fails_too_is_one_loss_with_the_first_cause(begun):
    bench = Bench(1)
    first, second = died(exit="SIGSEGV"), died(exit="EXIT(3)")
    bench.send(0)
    bench.fail(0, first)
    bench.take_arrived()
    if begun:
        bench.begin(0, says=100)
    bench.fail(0, second)
    bench.begin(0, says=200)
    (told,) = bench.collect()

    assert (told.lost.cause, told.lost.generation, told.obs) == (first, 2, 200)
    assert bench.started == [(0, 1), (0, 2)]
    assert bench.recovery.steps_lost == 1
    assert bench.restarts == [2]
    assert bench.count(events.Died, events.Restarted) == (2, 2)


def test_a_replacement_that_fails_while_the_last_step_is_still_to_be_told_is_one_loss_after_it():
    bench = Bench(1)
    bench.send(0)
    bench.answer(0, says=5)
    bench.fail(0, died(exit="SIGSEGV"))
    bench.begin(0)
    bench.fail(0, died(exit="EXIT(3)"))
    bench.begin(0, says=200)

    told = [each for _ in range(2) for each in bench.collect()]
    assert [(each.name, each.obs) for each in told] == [("step", 5), ("reset", 200)]
    assert (told[1].lost.cause.exit, told[1].lost.generation) == ("SIGSEGV", 2)
    assert bench.recovery.steps_lost == 0
    assert bench.waiting == [False]


def test_no_more_than_max_ready_are_handed_out_losses_included():
    bench = Bench(3)
    bench.send(0, 1, 2)
    bench.fail(1)
    bench.begin(1)
    bench.answer(0)
    bench.answer(2)

    handed_out = [[told.worker_id for told in bench.collect(max_ready=1)] for _ in range(3)]
    assert handed_out == [[1], [0], [2]]


def test_a_failure_is_raised_before_steps_that_came_earlier_even_where_they_are_more_than_max_ready():
    bench = Bench(3, max_restarts=0)
    bench.send(0, 1, 2)
    bench.answer(0)
    bench.answer(2)
    bench.fail(1)
    with pytest.raises(WorkerDied):
        bench.collect(max_ready=1)

    assert [[told.worker_id for told in bench.collect(max_ready=1)] for _ in range(2)] == [[0], [2]]


# Backoff.


@pytest.fixture
def clock(mocker):
    time = Clock()
    for module in ("collecting", "host"):
        mocker.patch(f"envmanager.kernel.{module}.time", time)
    return time


def test_a_call_that_waits_starts_what_becomes_due_meanwhile(clock, mocker):
    mocker.patch("random.Random.uniform", return_value=1.0)
    bench = Bench(2, clock=clock, backoff_s=8.0)
    for _ in range(2):
        bench.send(*(entry.worker_id for entry in bench.entries if not entry.waiting))
        bench.fail(0)
        bench.begin(0) if not bench.started else None
        bench.collect()
    began = clock.now
    assert bench.collect(timeout_s=20.0) == []

    assert bench.started == [(0, 1), (0, 2)]
    assert clock.now == pytest.approx(began + 20.0)


# A worker that cannot be started again.


@pytest.mark.parametrize("error", [OSError(11, "no more processes"), UsageError("two specs")], ids=lambda e: type(e))
def test_a_replacement_that_cannot_be_started_is_tried_again_within_the_budget(error):
    bench = Bench(1, max_restarts=3)
    bench.refusing = [error, error]
    bench.send(0)
    bench.fail(0)
    bench.begin(0)
    (told,) = bench.collect()

    assert bench.started == [(0, 1), (0, 2), (0, 3)]
    assert bench.count(events.NotStarted, events.Raised, events.Failed) == (2, 0, 3)
    refusals = [event.error for event in bench.recovery.events if isinstance(event, events.NotStarted)]
    assert [refusal.env_ids for refusal in refusals] == [bench.entries[0].env_ids] * 2 != [()] * 2
    assert (told.lost.cause.exit, told.lost.generation) == ("SIGKILL", 3)
    assert bench.recovery.steps_lost == 1


def test_a_replacement_that_can_never_be_started_ends_the_budget_with_the_reason():
    bench = Bench(2, max_restarts=2)
    bench.refusing = [OSError(11, "no more processes")] * 5
    bench.send(0)
    bench.fail(0)
    with pytest.raises(RestartsExhausted) as raised:
        bench.collect()

    assert raised.value.first.cause == "SIGKILL"
    assert "no more processes" in raised.value.last.cause
    assert raised.value.phase == "start"
    assert (bench.started, bench.waiting) == ([(0, 1), (0, 2)], [False, False])
    assert list(bench.errors) == [0]


def test_nobody_waits_for_a_worker_that_is_dropped_because_it_cannot_be_started(clock):
    bench = Bench(2, clock=clock, max_restarts=2, backoff_s=8.0, then="drop")
    bench.refusing = [OSError(11, "no more processes")] * 2
    bench.send(0, 1)
    bench.fail(0)
    bench.answer(1)

    assert [told.worker_id for told in bench.collect(min_ready=Wait.ALL, timeout_s=None)] == [1]
    assert bench.dropped == {0}


def test_a_thousand_starts_that_fail_end_in_an_error_of_ours():
    bench = Bench(1, max_restarts=1000)
    bench.refusing = [OSError(11, "no more processes")] * 1000
    bench.send(0)
    bench.fail(0)
    with pytest.raises(RestartsExhausted):
        bench.collect()


# A worker that is given up.


@pytest.mark.parametrize("then", ["raise", "drop"])
def test_a_step_answered_before_a_worker_was_given_up_is_still_handed_out(then):
    bench = Bench(2, max_restarts=0, then=then)
    bench.send(0, 1)
    bench.answer(0, says=5)
    bench.fail(0)
    told = []
    for _ in range(3):
        try:
            told += bench.collect()
        except WorkerDied:
            assert then == "raise"
        except UsageError:
            break

    assert [(each.worker_id, each.obs) for each in told] == [(0, 5)]
    assert bench.recovery.steps_lost == 0


def test_wait_all_waits_for_all_though_one_of_them_failed_after_its_step():
    bench = Bench(3, max_restarts=0)
    bench.send(0, 1, 2)
    bench.answer(0)
    bench.fail(0)
    bench.answer(1)
    bench.queue.arrives_when_waited_for = EnvironmentResponse("step", 2, steps_of(2, 1))

    assert sorted(told.worker_id for told in bench.collect(min_ready=Wait.ALL, timeout_s=10.0)) == [0, 1, 2]
    with pytest.raises(WorkerDied):
        bench.collect()
    assert bench.waiting == [False, False, False]


def test_a_worker_that_is_revived_has_its_whole_budget_and_nothing_was_lost():
    bench = Bench(1, max_restarts=1)
    bench.send(0)
    bench.fail(0)
    bench.begin(0)
    bench.collect()
    bench.send(0)
    bench.fail(0)
    with pytest.raises(RestartsExhausted):
        bench.collect()
    bench.recovery.revive(bench.entries[0])
    bench.begin(0, says=300)
    (told,) = bench.collect()
    assert (told.lost, told.obs, told.steps.ended.tolist()) == (None, 300, [False])
    assert bench.generations == [2]

    bench.send(0)
    bench.fail(0)
    bench.begin(0)
    assert [each.lost.generation for each in bench.collect()] == [3]


# A call in which a worker failed.


def test_a_failure_in_a_call_is_raised_there_and_not_again():
    bench = Bench(2, max_restarts=0)
    error = died()
    bench.send(1)
    bench.fail_quietly(0, error)
    bench.answer(1)

    assert [told.worker_id for told in bench.collect()] == [1]
    assert bench.waiting == [False, False]
    assert list(bench.errors) == [0]


def test_a_failure_in_a_call_replaces_the_worker_and_the_loss_comes_later():
    bench = Bench(1)
    error = died()
    bench.fail_quietly(0, error)
    bench.begin(0)

    assert [told.lost.cause for told in bench.collect()] == [error]


def test_a_failure_in_a_call_leaves_the_step_that_had_been_answered():
    bench = Bench(1, max_restarts=0)
    bench.send(0)
    bench.answer(0, says=5)
    bench.take_arrived()
    bench.fail_quietly(0, died())

    assert [told.obs for told in bench.collect()] == [5]


def test_what_came_with_a_response_that_an_interrupt_hit_is_taken_by_the_next_call():
    bench = Bench(3)
    bench.send(0, 1, 2)
    bench.answer(1)
    bench.fail(0)
    bench.answer(2)
    bench.refusing = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        bench.collect()

    assert [told.worker_id for told in bench.collect(min_ready=2)] == [1, 2]
    assert bench.started == [(0, 1), (0, 2)]


def test_waiting_for_a_replacement_keeps_what_arrives_meanwhile():
    bench = Bench(3)
    bench.send(0, 1, 2)
    bench.collector.receive([EnvironmentResponse("failed", 0, died())])
    bench.answer(1)
    bench.begin(0)
    bench.answer(2)
    bench.collector.await_replacements(bench.entries[:1])

    assert [(told.worker_id, told.name) for told in bench.collect()] == [(1, "step"), (0, "reset"), (2, "step")]


def test_waiting_for_a_replacement_ends_when_it_is_given_up():
    bench = Bench(1, max_restarts=1)
    bench.send(0)
    bench.collector.receive([EnvironmentResponse("failed", 0, died())])
    bench.fail(0)
    bench.collector.await_replacements(bench.entries[:1])

    assert isinstance(bench.errors[0], RestartsExhausted)


# A healthy worker that is recycled.


def test_a_worker_is_recycled_at_the_end_of_an_episode_once_it_is_old_enough():
    bench = Bench(1, recycle_after_steps=3)
    seen = []
    for number, ended in enumerate([False, True, False, False, True], start=1):
        bench.send(0)
        bench.answer(0, says=number, ended=ended)
        seen += [(told.obs, bench.started[:]) for told in bench.collect()]
    assert seen == [(1, []), (2, []), (3, []), (4, []), (5, [(0, 1)])]
    assert bench.waiting == [True]

    bench.begin(0, says=100)
    (told,) = bench.collect()
    assert (told.name, told.obs, told.steps.ended.tolist()) == ("reset", 100, [False])
    assert (told.lost.cause.phase, told.lost.cause.cause, told.lost.generation) == ("recycled", "5 steps", 1)
    assert (bench.restarts, bench.recovery.steps_lost) == ([0], 0)
    assert bench.count(events.Recycled, events.Failed, events.Restarted) == (1, 0, 0)


def test_the_age_is_counted_anew_for_each_generation():
    bench = Bench(1, recycle_after_steps=2)
    generations = []
    for number in range(1, 7):
        bench.send(0)
        bench.answer(0, says=number, ended=True)
        bench.collect()
        generations.append(bench.generations[0])
        if any(bench.waiting):
            bench.begin(0)
            bench.collect()

    assert generations == [0, 1, 1, 2, 2, 3]


def test_a_worker_that_is_old_enough_is_not_recycled_when_nobody_plays_on():
    bench = Bench(1, recycle_after_steps=1)
    bench.send(0)
    over = steps_of(0, 1, ended=True)
    over["default"].acting = np.zeros(1, np.bool_)
    bench.queue.put(EnvironmentResponse("step", 0, over))

    assert [told.name for told in bench.collect()] == ["step"]
    assert bench.started == []


def test_a_recycled_workers_replacement_that_fails_is_replaced_for_the_first_reason():
    bench = Bench(2, recycle_after_steps=1)
    bench.send(0, 1)
    bench.answer(0, says=5, ended=True)
    bench.take_arrived()
    bench.fail(0)
    bench.begin(0, says=200)
    step, first = [told for _ in range(2) for told in bench.collect()]

    assert bench.started == [(0, 1), (0, 2)]
    assert (step.name, step.lost, step.obs) == ("step", None, 5)
    assert (first.obs, first.steps.ended.tolist(), first.lost.cause.phase) == (200, [False], "recycled")
    assert (bench.restarts, bench.recovery.steps_lost) == ([1, 0], 0)


@pytest.mark.parametrize("then", ["raise", "drop"])
def test_the_step_of_a_recycled_worker_comes_also_when_it_cannot_be_replaced(then):
    bench = Bench(2, recycle_after_steps=1, max_restarts=1, then=then)
    bench.refusing = [OSError(11, "no more processes")] * 2
    bench.send(0, 1)
    bench.answer(0, says=5, ended=True)
    told, errors = [], []
    for _ in range(2):
        try:
            told += bench.collect(timeout_s=0.0)
        except WorkerError as failure:
            errors.append(failure)

    assert [(each.name, each.obs) for each in told] == [("step", 5)]
    assert [type(error) for error in errors] == ([RestartsExhausted] if then == "raise" else [])
