"""The entries of workers: what becomes of workers that fail, and in what order a trainer is told.

No process, no time.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter, deque

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager.core.calls import Calls
from envmanager.core.collecting import Collector
from envmanager.core.recovery import Recovery
from envmanager.core.sources import QueueSource
from envmanager.core.table import WorkerTable
from envmanager.data.steps import AgentSteps, EnvironmentResponse
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
    """A table with its recovery and collector, and workers of which the test says what they do."""

    def __init__(self, n_workers=3, *, clock=None, **policy):
        self.table = WorkerTable([[worker_id] for worker_id in range(n_workers)])
        self.entries = self.table.entries
        self.last = {worker_id: steps_of(worker_id, 0) for worker_id in range(n_workers)}
        self.started = []
        self.refusing = []  # errors, one for each start that fails
        self.recovery = Recovery(self.table, RestartPolicy(**{"backoff_s": 0.0, **policy}), self._launch_again)
        self.collector = Collector(self.table, self.recovery, Calls(lambda: None))
        self.queue = Answers(Clock() if clock is None else clock)
        self.collector.source = QueueSource(self.queue)

    def _launch_again(self, entry):
        self.started.append((entry.worker_id, entry.generation))
        if self.refusing:
            raise self.refusing.pop(0)

    def send(self, *worker_ids):
        for worker_id in worker_ids:
            self.table.sent(self.entries[worker_id], 1)

    def answer(self, worker_id, says=1, **steps):
        self.queue.put(EnvironmentResponse("step", worker_id, steps_of(worker_id, says, **steps)))

    def begin(self, worker_id, says=100):
        """The first observations of a worker's replacement."""
        self.queue.put(EnvironmentResponse("reset", worker_id, steps_of(worker_id, says)))

    def fail(self, worker_id, error=None):
        self.queue.put(EnvironmentResponse("failed", worker_id, died(worker_id) if error is None else error))

    def fail_quietly(self, worker_id, error):
        return self.recovery.fail_quietly(self.entries[worker_id], error)

    def collect(self, **wait):
        """What a manager hands out in one call."""
        found = []
        for entry in self.collector.collect(Wait(**{"timeout_s": 0.0, **wait})):
            cut = self.recovery.cut(entry, self.last[entry.worker_id])
            response = entry.response
            payload, lost = (response.payload, None) if cut is None else cut
            self.table.handed_out([entry])
            self.last[response.worker_id] = payload
            steps = payload["default"]
            found.append(Told(response.worker_id, str(response.name), lost, float(steps.obs[0]), steps))
        return found

    def take_arrived(self):
        """What a call does before it hands anything out."""
        self.recovery.start_due()
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


def test_a_worker_that_fails_is_replaced_alone_and_waits_until_its_replacement_has_begun():
    bench = Bench()
    bench.send(0, 1, 2)
    bench.fail(1)
    assert bench.collect() == []
    assert bench.started == [(1, 1)]
    assert bench.generations == [0, 1, 0]
    assert bench.restarts == [0, 1, 0]
    assert bench.waiting == [True, True, True]

    bench.answer(0)
    bench.answer(2)
    assert [told.worker_id for told in bench.collect()] == [0, 2], "nobody waits for the replacement"
    assert bench.waiting == [False, True, False]
    bench.begin(1)
    (told,) = bench.collect()
    assert (told.worker_id, told.lost.generation, told.obs) == (1, 1, 100)
    assert bench.waiting == [False, False, False]
    assert bench.recovery.steps_lost == 1


def test_a_loss_ends_the_last_step_that_was_handed_out():
    bench = Bench(1)
    bench.send(0)
    bench.answer(0, says=7)
    bench.collect()
    bench.send(0)
    bench.fail(0)
    bench.begin(0, says=200)
    (told,) = bench.collect()

    assert (told.steps.final_obs.tolist(), told.steps.obs.tolist()) == ([7.0], [200.0])
    assert (told.steps.truncated.tolist(), told.steps.terminated.tolist()) == ([True], [False])
    assert told.steps.reward.tolist() == [0.0]


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


def test_an_action_for_a_worker_that_had_failed_is_counted_once():
    bench = Bench(2)
    bench.send(1)
    bench.fail(0)
    bench.collect()
    assert bench.ignoring == {0}
    bench.recovery.discard_action(bench.entries[0])
    bench.begin(0)
    bench.collect()

    assert bench.ignoring == set()
    assert bench.recovery.steps_lost == 1


# What comes first.


def test_a_step_answered_before_the_death_is_handed_out_before_the_loss():
    bench = Bench(2)
    bench.send(0, 1)
    bench.answer(0, says=5)
    bench.fail(0)
    bench.begin(0)
    (step,) = bench.collect()
    assert (step.worker_id, step.name, step.lost, step.obs) == (0, "step", None, 5)
    assert bench.waiting == [True, True], "the loss is still to be told"
    (loss,) = bench.collect()
    assert (loss.worker_id, loss.lost.generation, loss.steps.final_obs.tolist()) == (0, 1, [5.0])
    assert bench.recovery.steps_lost == 0
    assert bench.waiting == [False, True]


def test_a_step_answered_before_the_death_is_handed_out_though_the_replacement_has_not_begun():
    bench = Bench(1)
    bench.send(0)
    bench.answer(0)
    bench.fail(0)
    assert [told.name for told in bench.collect()] == ["step"]
    assert bench.waiting == [True]
    assert bench.collect() == []
    bench.begin(0)
    assert [told.lost.generation for told in bench.collect()] == [1]


def test_an_action_for_a_step_whose_worker_died_after_it_is_dropped():
    bench = Bench(1)
    bench.send(0)
    bench.answer(0)
    bench.fail(0)
    bench.collect()

    assert bench.ignoring == {0}


@pytest.mark.parametrize("begun", [False, True], ids=["before it began", "after it began"])
def test_a_replacement_that_fails_too_is_one_loss_with_the_first_cause(begun):
    bench = Bench(1)
    first, second = died(exit="SIGSEGV"), died(exit="EXIT(3)")
    bench.send(0)
    bench.fail(0, first)
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


def test_a_worker_lost_twice_is_told_twice():
    bench = Bench(1)
    for generation in (1, 2):
        bench.send(0)
        bench.fail(0)
        bench.begin(0)
        assert [told.lost.generation for told in bench.collect()] == [generation]
    assert bench.recovery.steps_lost == 2


def test_no_more_than_max_ready_are_handed_out_losses_included():
    bench = Bench(3)
    bench.send(0, 1, 2)
    bench.fail(1)
    bench.begin(1)
    bench.answer(0)
    bench.answer(2)

    handed_out = [[told.worker_id for told in bench.collect(max_ready=1)] for _ in range(3)]
    assert handed_out == [[1], [0], [2]]


# Backoff.


@pytest.fixture
def clock(mocker):
    time = Clock()
    for module in ("recovery", "collecting"):
        mocker.patch(f"envmanager.core.{module}.time", time)
    return time


def test_a_delayed_replacement_is_started_when_its_time_has_come_and_not_before(clock, mocker):
    mocker.patch("random.Random.uniform", return_value=1.0)
    bench = Bench(2, clock=clock, backoff_s=8.0)
    bench.send(0, 1)
    bench.fail(0)
    bench.begin(0)
    bench.collect()
    bench.fail(0)
    assert bench.collect() == []
    assert bench.started == [(0, 1)]
    assert bench.waiting == [True, True], "nothing is sent to it meanwhile"
    assert bench.recovery.next_start_at() == clock.now + 8.0
    assert bench.generations == [1, 0], "the next generation has not begun"

    clock.now += 7.9
    bench.collect()
    assert bench.started == [(0, 1)]
    clock.now += 0.2
    bench.collect()
    assert bench.started == [(0, 1), (0, 2)]
    assert bench.recovery.next_start_at() is None


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
    assert clock.now == began + 20.0


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


def test_without_a_budget_the_failure_is_raised_once_and_the_others_go_on():
    bench = Bench(2, max_restarts=0)
    error = died()
    bench.send(0, 1)
    bench.answer(1)
    bench.fail(0, error)
    with pytest.raises(WorkerDied) as raised:
        bench.collect()
    assert raised.value is error
    assert bench.errors == {0: error}
    assert [told.worker_id for told in bench.collect()] == [1]
    bench.send(1)
    bench.answer(1)
    assert [told.worker_id for told in bench.collect(min_ready=Wait.ALL)] == [1]
    assert (bench.started, bench.recovery.steps_lost) == ([], 1)


def test_an_exception_is_raised_and_leaves_the_worker_out():
    bench = Bench(2)
    bench.send(0, 1)
    bench.fail(0, raised())
    with pytest.raises(EnvRaised):
        bench.collect()

    assert (list(bench.errors), bench.started, bench.waiting) == ([0], [], [False, True])


def test_a_dropped_worker_is_told_loudly_and_nobody_is_stopped(caplog):
    bench = Bench(2, max_restarts=0, then="drop")
    bench.send(0, 1)
    bench.fail(0)
    assert bench.collect() == []

    assert bench.dropped == {0}
    assert bench.waiting == [False, True]
    assert bench.count(events.Dropped) == (1,)
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    bench.answer(1)
    assert [told.worker_id for told in bench.collect(min_ready=Wait.ALL)] == [1]


def test_a_worker_is_dropped_only_after_its_budget():
    bench = Bench(2, max_restarts=1, then="drop")
    bench.send(0, 1)
    bench.fail(0)
    bench.begin(0)
    assert [told.lost.generation for told in bench.collect()] == [1]
    bench.send(0)
    bench.fail(0)
    assert bench.collect() == []

    assert bench.dropped == {0}
    assert isinstance(bench.errors[0], RestartsExhausted)


def test_when_the_last_worker_is_dropped_its_error_is_raised():
    bench = Bench(2, max_restarts=0, then="drop")
    errors = [died(0), died(1)]
    bench.send(0, 1)
    for worker_id, error in enumerate(errors):
        bench.fail(worker_id, error)
    with pytest.raises(WorkerDied) as raised:
        bench.collect()

    assert raised.value is errors[1]
    assert bench.dropped == {0, 1}
    with pytest.raises(UsageError, match="every worker has failed"):
        bench.collect()


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
    assert bench.fail_quietly(0, error) is error
    bench.answer(1)

    assert [told.worker_id for told in bench.collect()] == [1]
    assert bench.waiting == [False, False]
    assert list(bench.errors) == [0]


def test_a_failure_in_a_call_replaces_the_worker_and_the_loss_comes_later():
    bench = Bench(1)
    error = died()
    assert bench.fail_quietly(0, error) is error
    bench.begin(0)

    assert [told.lost.cause for told in bench.collect()] == [error]


def test_a_failure_in_a_call_leaves_the_step_that_had_been_answered():
    bench = Bench(1, max_restarts=0)
    bench.send(0)
    bench.answer(0, says=5)
    bench.collector.arrive(bench.queue.get_nowait())
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
    bench.collector.arrive(EnvironmentResponse("failed", 0, died()))
    bench.answer(1)
    bench.begin(0)
    bench.answer(2)
    bench.collector.await_replacement(bench.entries[0])

    assert [(told.worker_id, told.name) for told in bench.collect()] == [(1, "step"), (0, "reset"), (2, "step")]


def test_waiting_for_a_replacement_ends_when_it_is_given_up():
    bench = Bench(1, max_restarts=1)
    bench.send(0)
    bench.collector.arrive(EnvironmentResponse("failed", 0, died()))
    bench.fail(0)
    bench.collector.await_replacement(bench.entries[0])

    assert isinstance(bench.errors[0], RestartsExhausted)


def test_nobody_waits_for_a_worker_that_is_well():
    bench = Bench(1)
    bench.collector.await_replacement(bench.entries[0])

    assert bench.started == []


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


# Whatever order things come in.


class Model:
    """A trainer that acts whenever it may, over workers that answer, die and begin again in any order."""

    def __init__(self, n_workers, *, sends):
        self.bench = Bench(n_workers, max_restarts=10**6)
        self.sends = sends
        self.asked = Counter()
        self.delivered = Counter()
        self.told_lost = Counter()
        self.deaths = Counter()
        self.serial = Counter()
        self.in_step = dict.fromkeys(range(n_workers), False)  # the process has a step to answer
        self.asked_of = dict.fromkeys(range(n_workers), False)  # the trainer has asked and not been answered
        self.is_cut = dict.fromkeys(range(n_workers), False)  # a death has not been told yet
        self.generation = dict.fromkeys(range(n_workers), 0)

    def act(self, worker_id):
        entry = self.bench.entries[worker_id]
        if self.asked_of[worker_id] or (entry.waiting and not self.sends):
            return
        self.asked[worker_id] += 1
        self.asked_of[worker_id] = True
        if self.sends and entry.ignores_action:
            self.bench.recovery.discard_action(entry)
            return
        self.bench.send(worker_id)
        self.serial[worker_id] += 1
        self.in_step[worker_id] = True

    def answer(self, worker_id):
        if self.in_step[worker_id]:
            self.in_step[worker_id] = False
            self.bench.answer(worker_id, says=self.serial[worker_id])

    def die(self, worker_id):
        if self.bench.generations[worker_id] != self.generation[worker_id]:
            return  # it has died, or its replacement is still to be noticed
        self.in_step[worker_id] = False
        self.deaths[worker_id] += not self.is_cut[worker_id]
        self.is_cut[worker_id] = True
        self.generation[worker_id] += 1
        self.bench.fail(worker_id)
        self.bench.take_arrived()

    def begin(self, worker_id):
        replacement = self.bench.entries[worker_id].replacement
        if replacement is not None and replacement.first is None:
            self.bench.begin(worker_id)
            self.bench.take_arrived()

    def collect(self, number):
        try:
            found = self.bench.collect(min_ready=1, max_ready=1 + number)
        except UsageError:
            assert not any(self.bench.waiting), "what is waiting can be collected"
            return
        ids = [told.worker_id for told in found]
        assert len(set(ids)) == len(ids), "two answers of one worker in one call"
        for told in found:
            worker_id = told.worker_id
            self.asked_of[worker_id] = False
            if told.lost is None:
                self.delivered[worker_id] += 1
                assert told.obs == self.serial[worker_id], "not the answer to what was asked last"
            else:
                self.told_lost[worker_id] += 1
                self.is_cut[worker_id] = False
                assert told.lost.generation == self.generation[worker_id]

    def finish(self):
        for _ in range(5):
            for worker_id in range(len(self.bench.entries)):
                self.begin(worker_id)
                self.answer(worker_id)
            self.collect(100)
        assert self.bench.waiting == [False] * len(self.bench.entries)


moves = st.lists(st.tuples(st.sampled_from(["act", "answer", "die", "begin", "collect"]), st.integers(0, 2)))


@pytest.mark.parametrize("sends", [False, True], ids=["step", "send"])
@given(moves)
def test_every_step_is_delivered_or_lost_and_every_death_is_told_once(sends, moves):
    model = Model(3, sends=sends)
    for move, number in moves:
        getattr(model, move)(number)
    model.finish()

    assert model.told_lost == model.deaths
    assert sum((model.asked - model.delivered).values()) == model.bench.recovery.steps_lost
    for worker_id in range(3):
        missing = model.asked[worker_id] - model.delivered[worker_id]
        assert 0 <= missing <= model.told_lost[worker_id]
