"""What a manager tells about itself: times per worker, and the verdict."""

from __future__ import annotations

import attrs
import pytest

from envmanager.observe.stats import ManagerStats, WorkerStats, verdict, wait_share
from envmanager.observe.timing import WaitTimes, WorkerTimes


def worker(worker_id=0, *, idle, step_time_s=0.001, **changes):
    return WorkerStats(worker_id, (worker_id,), steps=100, step_time_s=step_time_s, idle_share=idle, **changes)


def times_of(steps_ns, *, idle_ns=0):
    times = WorkerTimes()
    for busy_ns in steps_ns:
        times.stepped(busy_ns, idle_ns, 1)
    return times


def test_a_workers_times_are_told_in_seconds():
    times = times_of([1_000_000] * 90 + [50_000_000] * 10, idle_ns=1_000_000)
    times.queued_ns = 2_000_000
    times.start_s = 0.25

    told = WorkerStats(0, (0,), steps=100).with_times(times)

    assert told.start_s == 0.25
    assert told.step_time_s == pytest.approx(0.0059)
    assert told.step_time_p50_s == pytest.approx(0.001, rel=0.07)
    assert told.step_time_p95_s == told.step_time_p99_s == pytest.approx(0.05, rel=0.07)
    assert told.idle_share == pytest.approx(100 / 690)
    assert told.queue_wait_s == pytest.approx(20e-6)


def test_a_worker_that_has_taken_no_step_has_no_times():
    assert WorkerStats(0, (0,)).with_times(WorkerTimes()) == WorkerStats(0, (0,))


def test_the_trainers_waiting_is_a_share_of_the_longest_workers_time():
    waits = WaitTimes()
    waits.waited_ns = 300

    assert wait_share([times_of([100]), times_of([500, 500])], waits) == 0.3
    assert wait_share([times_of([100])], waits) == 1.0
    assert wait_share([times_of([])], waits) == 0.0


def test_busy_workers_and_a_waiting_trainer_are_environment_bound():
    told = verdict([worker(0, idle=0.1), worker(1, idle=0.14)], 0.88)

    assert told == "environment-bound: the workers wait for actions 12% of the time, the trainer for steps 88% of it"


def test_the_worker_that_the_others_wait_for_is_named():
    told = verdict([worker(0, idle=0.98), worker(1, idle=0.02, step_time_s=0.05), worker(2, idle=0.98)], 0.95)

    assert told.startswith("environment-bound: a step of worker 1 (env 1) takes 50 ms, of the median worker 1 ms; ")


def test_a_slow_worker_for_which_nobody_waits_is_not_named():
    told = verdict([worker(0, idle=0.05), worker(1, idle=0.02, step_time_s=0.05), worker(2, idle=0.05)], 0.9)

    assert told.startswith("environment-bound: the workers wait")


def test_workers_that_wait_for_a_core_are_not_idle():
    told = verdict([worker(0, idle=0.88, core_wait_share=0.7), worker(1, idle=0.88, core_wait_share=0.8)], 0.8)

    assert told.startswith("environment-bound: the workers wait for a free core 75% of the time and for actions 13%, ")


def test_waiting_workers_and_a_busy_trainer_are_policy_bound():
    told = verdict([worker(0, idle=0.9, queue_wait_s=0.003), worker(1, idle=0.9, queue_wait_s=0.005)], 0.04)

    assert told.startswith("policy-bound: the workers wait for actions 90% of the time, the trainer for steps 4% of it")
    assert "lies 4 ms in the queue" in told


def test_when_both_mostly_wait_it_is_the_messages():
    assert verdict([worker(idle=0.95)], 0.66).startswith("communication-bound: ")


def test_when_both_are_at_work_alike_it_is_balanced():
    assert verdict([worker(idle=0.5)], 0.5).startswith("balanced: ")


def cheap(worker_id, *, idle=0.9, **changes):
    """One of some processes whose steps take next to no time."""
    return worker(worker_id, idle=idle, **{"step_time_s": 20e-6, "pid": 100 + worker_id, **changes})


def test_processes_that_together_do_less_than_one_could_are_one_too_many():
    told = verdict([cheap(0), cheap(1, idle=0.86)], 0.1)

    assert told == (
        "too cheap for processes: the workers wait for actions 88% of the time, and one process could take all their "
        "steps in 24% of it. Try kind: simple, or ask envmanager tune"
    )


@pytest.mark.parametrize(
    ("workers", "wait_share"),
    [
        ([cheap(0)], 0.1),
        ([cheap(0), cheap(1, pid=None)], 0.1),
        ([cheap(0, idle=0.5), cheap(1, idle=0.5)], 0.1),
        ([cheap(0, step_time_s=0.001), cheap(1, step_time_s=0.001)], 0.1),
    ],
    ids=["one process", "one in this process", "as much as one could", "the trainer does more than pass messages"],
)
def test_nobody_is_sent_into_one_process_without_need(workers, wait_share):
    assert not verdict(workers, wait_share).startswith("too cheap")


@pytest.mark.parametrize("workers", [[], [WorkerStats(0, (0,))], [worker(idle=0.1, failed=True)]])
def test_without_a_measured_step_there_is_no_verdict(workers):
    assert ManagerStats(tuple(workers), env_steps=1000).verdict == ""


def test_the_verdict_on_a_manager_is_that_on_its_workers_once_there_are_enough_steps():
    stats = ManagerStats((worker(idle=0.1),), wait_share=0.9, env_steps=1000)

    assert stats.verdict == verdict(stats.workers, 0.9) != ""
    assert attrs.evolve(stats, env_steps=999).verdict == ""
